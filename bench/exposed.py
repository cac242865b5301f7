"""Communication that a step does not hide, on a modelled network; measured, and predicted by an explicit schedule."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .contenders import FSDP2, SHARDWISE, UNSHARDED, Contender, make_contender
from .model import Shape
from .network import (
    ALL_REDUCE,
    GATHER,
    INSTANT,
    REDUCE_SCATTER,
    Clock,
    Network,
    TimerLink,
    Transfer,
    Wires,
    modelled_network,
)
from .ranks import BenchError, run_on_fake
from .report import NONE, Table, number, ratio
from .timing import interleave, median, spread

WORLD_SIZES = (8, 64, 1024)
LIMIT = 400.0
FSDP2_ASYNC = f"{FSDP2}, asynchronous gathers"
ENGINES = (SHARDWISE, FSDP2, FSDP2_ASYNC)


@dataclass(frozen=True)
class Setting:
    """A size of model, and networks whose collectives take about as long as it computes."""

    shape: Shape
    networks: tuple[Network, ...]


ON_CPU = Setting(
    Shape(blocks=8, width=512, batch=1, length=128), (Network(50e-6, 2e9), Network(50e-6, 1e9), Network(1e-3, 0.5e9))
)
ON_CUDA = Setting(
    Shape(blocks=16, width=2048, batch=2, length=1024),
    (Network(20e-6, 200e9), Network(50e-6, 50e9), Network(200e-6, 25e9)),
)


# -- The schedule ------------------------------------------------------------------------------------------------


class ScheduleClock:
    """Time that passes when somebody computes or waits."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self.time

    def sleep_until(self, deadline: float) -> None:
        """Let time pass until ``deadline``."""
        self.time = max(self.time, deadline)

    def advance(self, seconds: float) -> None:
        """Compute."""
        self.time += seconds


@dataclass(frozen=True)
class Overlap:
    """What an engine communicates while it computes.

    Args:
        gathers: of the next unit, beside the computation of one; else each is waited for where it is issued.
        reductions: of one unit beside the backward of the next; else likewise.
        early: whether a unit's gather is issued before the wait for the one before it, else after.
    """

    gathers: bool = True
    reductions: bool = True
    early: bool = False


def overlap_of(name: str, device: str) -> Overlap:
    """That an engine can reach: torch FSDP2 leaves waiting to streams, and a CPU has none."""
    if name == SHARDWISE:
        return Overlap(early=True)
    if device != "cpu":
        return Overlap()
    return Overlap(gathers=name == FSDP2_ASYNC, reductions=False)


@dataclass(frozen=True)
class Part:
    """What a step does between two of its moments, in seconds; a wait for the network is in none but ``total``.

    Args:
        total: by the clock.
        computes: neither of the others.
        copied: by collectives, for what they bring to this machine.
        installs: between the arrival of a gather and the start of its unit.
    """

    total: float
    computes: float
    copied: float = 0.0
    installs: float = 0.0


@dataclass(frozen=True)
class Collective:
    """Seconds of one unit's: on the link, and of copies by the caller meanwhile."""

    seconds: float
    copied: float


@dataclass(frozen=True)
class Plan:
    """What a step does, whenever that is.

    Args:
        parts: the embedding, each block, head and loss; then backward through head and loss, each block from the last
            on, and the embedding.
        gathers: of the root and each block; then of each block from the last on.
        reductions: of each block from the last on, and the root.
    """

    parts: Sequence[Part]
    gathers: Sequence[Collective]
    reductions: Sequence[Collective]


def predicted_seconds(plan: Plan, overlap: Overlap) -> float:
    """Of forward and backward: every unit is gathered while the one before it computes, blocks once more in backward,
    and reduced while the next one's backward computes; one collective at a time."""
    clock = ScheduleClock()
    link = TimerLink(clock)
    gathers, reductions = iter(plan.gathers), iter(plan.reductions)
    blocks = len(plan.reductions) - 1

    def issue(kind: str, collective: Collective, overlaps: bool) -> float:
        end = link.occupy(kind, 0, collective.seconds).end
        clock.advance(collective.copied)
        if not overlaps:
            clock.sleep_until(end)
        return end

    def gather() -> float:
        return issue(GATHER, next(gathers), overlap.gathers)

    def reduce(before: float) -> float:
        clock.sleep_until(before)
        return issue(REDUCE_SCATTER, next(reductions), overlap.reductions)

    def gather_around(awaited: float) -> float:
        """Wait until ``awaited``, and issue the next gather before or after that; gives when it ends."""
        if overlap.early:
            end = gather()
            clock.sleep_until(awaited)
            return end
        clock.sleep_until(awaited)
        return gather()

    def through(parts: Sequence[Part], reduces: bool, awaited: float) -> float:
        """The blocks, between what comes before and after them; gives when the last reduction ends."""
        gathered, reduced = gather_around(awaited), 0.0
        for block in range(blocks):
            clock.advance(parts[block].computes)
            reduced = reduce(reduced) if reduces and block > 0 else reduced
            if block < blocks - 1:
                gathered = gather_around(gathered)
            else:
                clock.sleep_until(gathered)
            clock.advance(parts[block].installs)
        clock.advance(parts[blocks].computes)
        reduced = reduce(reduced) if reduces else reduced
        clock.advance(parts[blocks + 1].computes)
        return reduced

    through(plan.parts[: blocks + 2], reduces=False, awaited=gather())
    clock.sleep_until(reduce(through(plan.parts[blocks + 2 :], reduces=True, awaited=0.0)))
    return clock.now()


def per_unit(transfers: Sequence[Transfer], network: Network, kind: str, units: int) -> list[Collective]:
    """What the collectives of ``kind`` of a step would take on ``network``; each unit has the same number of them, or
    one and, where it has tensors of fewer rows than ranks, an all-reduce or that alone.

    Raises:
        BenchError: if they cannot be told apart.
    """
    if any(transfer.kind == ALL_REDUCE for transfer in transfers):
        runs = _with_all_reduces(transfers, kind)
    else:
        found = [transfer for transfer in transfers if transfer.kind == kind]
        each = max(len(found) // units, 1)
        runs = [found[start : start + each] for start in range(0, len(found), each)]
    if len(runs) != units:
        raise BenchError(f"{len(runs)} collectives ({kind}) for {units} units")
    return [Collective(sum(network.seconds(one.sent) for one in run), sum(one.copied for one in run)) for run in runs]


def _with_all_reduces(transfers: Sequence[Transfer], kind: str) -> list[list[Transfer]]:
    """Collectives of ``kind``, each with the all-reduce that follows it. One without is a gather if nothing was reduced
    before, as the root's in forward is, and else a reduction."""
    runs: list[list[Transfer]] = []
    for transfer in transfers:
        if transfer.kind == ALL_REDUCE and runs and runs[-1][-1].kind != ALL_REDUCE:
            runs[-1].append(transfer)
        else:
            runs.append([transfer])
    found, alone = [], GATHER
    for run in runs:
        alone = REDUCE_SCATTER if run[0].kind == REDUCE_SCATTER else alone
        if (alone if run[0].kind == ALL_REDUCE else run[0].kind) == kind:
            found.append(run)
    return found


def part_between(start: float, end: float, transfers: Sequence[Transfer], starts_unit: bool) -> Part:
    """What happened between two moments of a step on an instant network, of whose collectives ``transfers`` are all;
    ``starts_unit``: a unit that was gathered begins at ``end``."""
    inside = [transfer for transfer in transfers if start < transfer.issued <= end]
    copied, installs = sum(transfer.copied for transfer in inside), 0.0
    arrivals = [one.arrived for one in transfers if one.kind == GATHER and start < one.arrived <= end]
    if starts_unit and arrivals:
        installs = end - max(arrivals) - sum(one.copied for one in inside if one.issued >= max(arrivals))
    return Part(end - start, end - start - copied - installs, copied, installs)


# -- Measuring ---------------------------------------------------------------------------------------------------


class Stopwatch(Protocol):
    """Moments of a step, in the order in which the device came to them."""

    def mark(self, *_: Any) -> None: ...

    def moments(self) -> list[float]:
        """Seconds since some moment; forgets them."""


class HostStopwatch:
    """By a clock."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.times: list[float] = []

    def mark(self, *_: Any) -> None:
        """This moment."""
        self.times.append(self.clock.now())

    def moments(self) -> list[float]:
        times, self.times = self.times, []
        return times


class StreamStopwatch:
    """By events on the current CUDA stream."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def mark(self, *_: Any) -> None:
        """When the stream comes here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def moments(self) -> list[float]:
        events, self.events = self.events, []
        events[-1].synchronize()
        return [1e-3 * events[0].elapsed_time(event) for event in events]


@dataclass
class Run:
    """One forward and backward.

    Args:
        moments: seconds; the start, that of each block, the end of the last, the loss; then the start of each block's
            backward from the last on, the end of the first's, and the end.
        transfers: what the links carried.
        loss: in nats per token.
    """

    moments: list[float]
    transfers: list[Transfer]
    loss: float

    @property
    def seconds(self) -> float:
        """Of the whole."""
        return self.moments[-1] - self.moments[0]

    @property
    def blocks(self) -> int:
        """How many there are."""
        return (len(self.moments) - 5) // 2


class Stepper:
    """Forward and backward of a contender, with a stopwatch at its blocks.

    Args:
        contender: whose blocks have not been given hooks.
        watch: says when the step came where.
    """

    def __init__(self, contender: Contender, watch: Stopwatch):
        self.contender, self.watch = contender, watch
        blocks = list(contender.model.get_submodule("blocks").children())
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._first if index == 0 else watch.mark)
            block.register_forward_hook(self._watch_gradient)
        blocks[-1].register_forward_hook(watch.mark)

    def _first(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self.watch.mark()
        args[0].register_hook(self.watch.mark)

    def _watch_gradient(self, module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(self.watch.mark)

    def run(self, wires: Wires, network: Network) -> Run:
        """One step on ``network``."""
        wires.network = network
        wires.log.clear()
        self.watch.mark()
        loss = self.contender.forward()
        self.watch.mark()
        loss.backward()
        self.watch.mark()
        moments = self.watch.moments()
        self.contender.optimizer.zero_grad()
        return Run(moments, list(wires.log), loss.item())


def make_stepper(name: str, shape: Shape, device: str, clock: Clock) -> Stepper:
    """An engine's, or that without sharding."""
    contender = make_contender(FSDP2 if name == FSDP2_ASYNC else name, shape, device=device)
    if name == FSDP2_ASYNC:
        model: Any = contender.model
        model._set_unshard_async_op(True)
        units: list[Any] = [model, *model.get_submodule("blocks").children()]
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    return Stepper(contender, HostStopwatch(clock) if device == "cpu" else StreamStopwatch())


Runs = dict[tuple[str, Network], list[Run]]


def measure(
    setting: Setting, device: str, engines: Sequence[str], warm_up: int, rounds: int, clock: Clock | None = None
) -> Runs:
    """In one process: every engine on every network, on an instant one, and the unsharded step."""
    with modelled_network(dist.get_world_size(), clock=clock) as wires:
        actions: dict[tuple[str, Network], Callable[[], Run]] = {}
        for name in (UNSHARDED, *engines):
            stepper = make_stepper(name, setting.shape, device, wires.clock)
            for network in (INSTANT, *(() if name == UNSHARDED else setting.networks)):
                actions[name, network] = functools.partial(stepper.run, wires, network)
        gc.collect()
        gc.freeze()
        return interleave(actions, warm_up, rounds)


def plan_of(run: Run, network: Network) -> Plan:
    """What a step does that ran on an instant network, were it to run on ``network``."""
    blocks = run.blocks
    starts = {*range(blocks), *range(blocks + 2, 2 * blocks + 2)}
    moments = enumerate(itertools.pairwise(run.moments))
    parts = [part_between(*pair, run.transfers, place in starts) for place, pair in moments]
    gathers = per_unit(run.transfers, network, GATHER, 2 * blocks + 1)
    return Plan(parts, gathers, per_unit(run.transfers, network, REDUCE_SCATTER, blocks + 1))


# -- Tables ------------------------------------------------------------------------------------------------------


def exposed_tables(quick: bool) -> list[Table]:
    """One table for each number of ranks, on the CPU."""
    return tables_on("cpu", ON_CPU, ENGINES, 3 if quick else 9)


def tables_on(device: str, setting: Setting, engines: Sequence[str], rounds: int) -> list[Table]:
    """One table for each number of ranks."""
    tables = []
    for world_size in WORLD_SIZES:
        runs = run_on_fake(world_size, LIMIT, measure, setting, device, engines, 2, rounds)
        tables.append(_table(world_size, setting, device, runs, rounds))
    return tables


def _table(world_size: int, setting: Setting, device: str, runs: Runs, rounds: int) -> Table:
    columns = ["engine, network", "step ms", "± ms", "instant ms", "on the link ms", "exposed ms", "waited ms"]
    columns += ["waited / on the link", "predicted ms", "measured / predicted"]
    title = f"Forward + backward on a modelled network of {world_size} ranks, {device}: {setting.shape}"
    table = Table(title, columns)
    unsharded = [run.seconds for run in runs[UNSHARDED, INSTANT]]
    table.rows.append([UNSHARDED, number(1e3 * median(unsharded)), number(1e3 * spread(unsharded)), *[NONE] * 7])
    for network in setting.networks:
        for name in [name for name, found in runs if found == network]:
            row = _row(runs[name, network], runs[name, INSTANT], unsharded, network, overlap_of(name, device))
            table.rows.append([f"{name}, {network}", *row])
    table.notes = (
        f"{rounds} rounds after 2 of warm-up; a round is one step of each; medians, and of ratios the median over "
        "rounds. No optimizer: what sharding saves there would hide what communication costs.",
        "network: latency of each collective + bytes that a ring sends / bandwidth, one collective at a time.",
        "instant: the engine's step where collectives take no time: the unsharded step, its host time and its copies.",
        "exposed: the step minus the unsharded one. waited: the step minus the engine's on the instant network.",
        "predicted: what the step computed on the instant network, with one gather and one reduction beside it.",
    )
    if device == "cpu":
        table.notes += (
            f"{FSDP2} waits for each collective where it issues it, since it leaves overlap to streams, and is "
            "predicted so; with asynchronous gathers (a private setting, and its prefetch in forward) it overlaps "
            "gathers, not reductions.",
        )
    table.chart = "exposed ms"
    return table


def _row(
    runs: Sequence[Run], instant: Sequence[Run], unsharded: Sequence[float], network: Network, overlap: Overlap
) -> list[str]:
    steps = [run.seconds for run in runs]
    link = sum(transfer.seconds for transfer in runs[-1].transfers)
    alone = [run.seconds for run in instant]
    exposed, waited = (median([a - b for a, b in zip(steps, other, strict=True)]) for other in (unsharded, alone))
    predictions = [predicted_seconds(plan_of(run, network), overlap) for run in instant]
    compared = median([step / predicted for step, predicted in zip(steps, predictions, strict=True)])
    times = (median(steps), spread(steps), median(alone), link, exposed, waited)
    return [
        *(number(1e3 * seconds) for seconds in times),
        ratio(waited, link),
        number(1e3 * median(predictions)),
        ratio(compared, 1.0),
    ]
