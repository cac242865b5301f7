"""Host time of forward and backward, with nothing to communicate and little to compute; what a large world adds; and
how long sharding a model takes."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .contenders import CONTENDERS, DDP, FSDP2, SHARDWISE, UNSHARDED, VERBS, Contender, make_contender, wrap
from .model import Shape, Transformer
from .network import ALL_REDUCE, COLLECTIVES, GATHER
from .ranks import run_on_fake
from .report import NONE, Table, mebibytes, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 8
SHAPE = Shape(blocks=32, width=64, batch=1, length=4)
LIMIT = 180.0
WORLD_SIZES = (8, 64, 1024)
KEEPS_MEMORY = "freed memory stays mapped, as on a GPU: page faults are no host time of an engine."
WIDE = Shape(blocks=4, width=1024, batch=1, length=4)

Result = tuple[dict[str, list[tuple[float, float]]], dict[str, str]]
"""By contender: seconds of forward and of backward per run; and why a contender does not run here."""


def host_tables(quick: bool) -> list[Table]:
    """Many small units on a small world; then worlds of 8 to 1024 ranks, with tensors that have fewer rows than those,
    and with large ones; and sharding the small units in such worlds."""
    worlds = [_worlds_table(SHAPE, 4 if quick else 48), _worlds_table(WIDE, 4 if quick else 16)]
    return [_units_table(20 if quick else 120), *worlds, _wrapping_table(3 if quick else 12)]


def _units_table(rounds: int) -> Table:
    runs, failures = run_on_fake(WORLD_SIZE, LIMIT, measure, 4, rounds)
    units = SHAPE.blocks + 1
    columns = ["contender", "forward µs/unit", "backward µs/unit", "both µs/unit", "± µs/unit"]
    columns += ["overhead µs/unit", "overhead / FSDP2's"]
    table = Table(f"Host time of forward + backward on a fake group of {WORLD_SIZE}: {SHAPE}", columns)
    both = {name: median([sum(run) for run in found]) for name, found in runs.items()}
    per_unit = 1e6 / units
    for name, found in runs.items():
        phases = [number(per_unit * median([run[phase] for run in found]), 0) for phase in range(2)]
        overhead = both[name] - both[UNSHARDED]
        compared = [number(per_unit * overhead, 0), ratio(overhead, both[FSDP2] - both[UNSHARDED])]
        half = number(per_unit * spread([sum(run) for run in found]), 0)
        row = [name, *phases, number(per_unit * both[name], 0), half]
        table.rows.append([*row, *([NONE, NONE] if name == UNSHARDED else compared)])
    table.rows += [[f"{name}: does not run ({reason})", *[NONE] * 6] for name, reason in failures.items()]
    table.notes = (
        f"{units} units (the blocks and the root); {rounds} rounds after 4 of warm-up, zero_grad not timed.",
        KEEPS_MEMORY,
        "overhead: a contender's time minus that without sharding.",
        f"{DDP}: its buckets go nowhere (a communication hook that does nothing), since it cannot use a fake group.",
    )
    table.chart = "both µs/unit"
    return table


@dataclass
class GroupCalls:
    """What a process group does by itself: seconds in its calls, and bytes of what gathers and all-reduces give."""

    seconds: float = 0.0
    gathered: int = 0


@contextmanager
def watched_groups() -> Iterator[GroupCalls]:
    """Watch all process groups' collectives."""
    calls = GroupCalls()
    # As they lie in the class: getattr gives bare functions, which put back there would no longer bind the group.
    methods = {name: vars(dist.ProcessGroup)[name] for name in COLLECTIVES if name in vars(dist.ProcessGroup)}
    for name in methods:
        setattr(dist.ProcessGroup, name, _watched(getattr(dist.ProcessGroup, name), COLLECTIVES[name][0], calls))
    try:
        yield calls
    finally:
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)


def _watched(method: Callable[..., Any], kind: str, calls: GroupCalls) -> Callable[..., Any]:
    def run(group: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        work = method(group, result, *args, **kwargs)
        calls.seconds += time.perf_counter() - start
        if kind in (GATHER, ALL_REDUCE):
            calls.gathered += sum(one.nbytes for one in ([result] if isinstance(result, Tensor) else result))
        return work

    return run


@dataclass
class InWorld:
    """What one contender takes when it shards over some number of ranks.

    Args:
        seconds: medians of forward + backward, of which in the process group's calls.
        padded: bytes gathered in a forward pass that belong to no parameter.
    """

    seconds: tuple[float, float]
    padded: int


def _worlds_table(shape: Shape, rounds: int) -> Table:
    columns = ["contender", "ranks", "both ms", "of which in the group", "overhead ms", "overhead / FSDP2's"]
    columns += ["outside the group ms", "/ its own at 8", "MiB padded", "padded / FSDP2's"]
    table = Table(f"Host time of forward + backward in large worlds: {shape}", columns)
    found = run_on_fake(max(WORLD_SIZES), LIMIT, measure_in_worlds, shape, rounds)
    plain = found[UNSHARDED, 1].seconds[0]
    for (name, size), one in found.items():
        both, inside = one.seconds
        row = [name, str(size), number(1e3 * both, 1), number(1e3 * inside, 1)]
        if size == 1:
            table.rows.append([*row, NONE, NONE, number(1e3 * (both - inside), 1), *[NONE] * 3])
            continue
        theirs, first = found[FSDP2, size], found[name, WORLD_SIZES[0]].seconds
        row += [number(1e3 * (both - plain), 1), ratio(both - plain, theirs.seconds[0] - plain)]
        row += [number(1e3 * (both - inside), 1), ratio(both - inside, first[0] - first[1])]
        table.rows.append([*row, mebibytes(one.padded), ratio(one.padded, theirs.padded)])
    table.notes = (
        "all in one process, interleaved: what slows the machine for a while slows every size of world. "
        f"{rounds} rounds after 2.",
        KEEPS_MEMORY,
        "fake groups, whose all-gather copies once for each rank: that is in the group.",
        "padded: gathered in one forward pass beyond the parameters' own bytes.",
    )
    return table


def measure_in_worlds(shape: Shape, rounds: int) -> dict[tuple[str, int], InWorld]:
    """In one process of the largest world: medians by contender and number of ranks that it shards over."""
    with watched_groups() as calls:
        contenders = {(UNSHARDED, 1): make_contender(UNSHARDED, shape)}
        for size in WORLD_SIZES:
            mesh = DeviceMesh.from_group(dist.new_group(list(range(size))), "cpu")
            contenders |= {(name, size): make_contender(name, shape, mesh=mesh) for name in (SHARDWISE, FSDP2)}
        gc.collect()
        gc.freeze()
        actions = {key: functools.partial(_watched_run, one, calls) for key, one in contenders.items()}
        runs = interleave(actions, 2, rounds)
        return {key: _in_world(runs[key], one, calls) for key, one in contenders.items()}


def _in_world(runs: list[tuple[float, float]], contender: Contender, calls: GroupCalls) -> InWorld:
    before = calls.gathered
    contender.forward()
    gathered = calls.gathered - before
    parameters = sum(parameter.numel() * parameter.itemsize for parameter in contender.model.parameters())
    return InWorld((median([run[0] for run in runs]), median([run[1] for run in runs])), gathered - parameters)


def _watched_run(contender: Contender, calls: GroupCalls) -> tuple[float, float]:
    before = calls.seconds
    seconds = sum(_timed_run(contender))
    return seconds, calls.seconds - before


def _wrapping_table(rounds: int) -> Table:
    columns = ["contender", "ranks", "ms", "± ms", "µs/parameter", "/ FSDP2's"]
    table = Table(f"Host time of fully_shard: {SHAPE}", columns)
    found, parameters = run_on_fake(max(WORLD_SIZES), LIMIT, measure_wrapping, rounds)
    for (name, size), runs in found.items():
        seconds = median(runs)
        row = [name, str(size), number(1e3 * seconds, 1), number(1e3 * spread(runs), 1)]
        table.rows.append([*row, number(1e6 * seconds / parameters, 0), ratio(seconds, median(found[FSDP2, size]))])
    table.notes = (
        f"{SHAPE.blocks + 1} units, {parameters} parameters, which are on the host already; {rounds} rounds after 2.",
        "all in one process, interleaved, each round on a new model.",
    )
    return table


def measure_wrapping(rounds: int) -> tuple[dict[tuple[str, int], list[float]], int]:
    """In one process of the largest world: seconds in which each engine shards a new model over some number of ranks;
    and how many parameters that has."""
    actions: dict[tuple[str, int], Callable[[], float]] = {}
    for size in WORLD_SIZES:
        mesh = DeviceMesh.from_group(dist.new_group(list(range(size))), "cpu")
        actions |= {(name, size): functools.partial(_timed_wrap, name, mesh) for name in VERBS}
    return interleave(actions, 2, rounds), len([*Transformer(SHAPE).parameters()])


def _timed_wrap(name: str, mesh: DeviceMesh) -> float:
    model = Transformer(SHAPE)
    gc.collect()
    start = time.perf_counter()
    wrap(model, VERBS[name], mesh, {})
    return time.perf_counter() - start


def measure(warm_up: int, rounds: int) -> Result:
    """In one process: each contender's runs."""
    actions: dict[str, Callable[[], tuple[float, float]]] = {}
    failures: dict[str, str] = {}
    for name in CONTENDERS:
        try:
            contender = make_contender(name, SHAPE)
            _timed_run(contender)
            actions[name] = functools.partial(_timed_run, contender)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            failures[name] = str(error).splitlines()[0][:40]
    gc.collect()
    gc.freeze()
    return interleave(actions, warm_up, rounds), failures


def _timed_run(contender: Contender) -> tuple[float, float]:
    start = time.perf_counter()
    loss = contender.forward()
    after_forward = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    contender.optimizer.zero_grad()
    return after_forward - start, end - after_forward
