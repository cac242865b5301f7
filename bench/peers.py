"""Our classes beside those of a library that is not torch: time and bytes of a step of each."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .allocations import Meter, NoCompilerError, preloaded_meter
from .model import Shape, Transformer, loss_of
from .ranks import BenchError, run_on_gloo
from .report import NONE, Table, mebibytes, number, ratio
from .steps import LOSS_TOLERANCE, WORLD_SIZE
from .timing import interleave, median, spread

MANY_SMALL = Shape(blocks=32, width=64, batch=4, length=32)
FEW_TOKENS = Shape(blocks=8, width=512, batch=1, length=4)

Phases = tuple[float, float, float, float]
"""Seconds of forward, backward and update, and the loss in nats per token."""


@dataclass
class Contender:
    """A wrapped model of its own, ready to train.

    Args:
        model: wrapped.
        tokens: the batch of every step.
        update: steps the optimizer and drops the gradients.
        backward: gets the loss.
    """

    model: nn.Module
    tokens: Tensor
    update: Callable[[], object]
    backward: Callable[[Tensor], object] = torch.Tensor.backward

    def forward(self) -> Tensor:
        """The loss, in nats per token."""
        return loss_of(self.model, self.tokens)


def updating(optimizer: torch.optim.Optimizer, zero_grad: Callable[[], None] | None = None) -> Callable[[], None]:
    """Steps ``optimizer`` and drops the gradients, by its own `zero_grad` unless another is given."""

    def update() -> None:
        optimizer.step()
        (zero_grad or optimizer.zero_grad)()

    return update


@dataclass(frozen=True)
class Comparison:
    """Who is compared.

    Args:
        peer: the library, in the possessive.
        make: builds and wraps the model of the contender with this name for the default process group; all start from
            the same parameters. A function at the top level of its module.
        plain: name of the contender that both are compared to as well.
        pairs: names of ours, and of what each is compared to.
        has_peer: whether the library is there.
        limit: seconds that one measurement may take.
    """

    peer: str
    make: Callable[[str, Shape], Contender]
    plain: str
    pairs: Mapping[str, str]
    has_peer: bool
    limit: float

    @property
    def names(self) -> list[str]:
        """The contenders that can run here."""
        return [self.plain, *(name for pair in self.pairs.items() for name in pair[: 1 + self.has_peer])]

    def ratios(self, values: Mapping[str, Sequence[float]], name: str) -> list[str]:
        """Of ``name``'s values to those of what it is compared to: the median over rounds, in each of which the machine
        was about as fast for all."""
        others = [values.get(self.pairs.get(name, "")), values[self.plain]]
        pairs = [zip(values[name], other, strict=True) if other is not None else None for other in others]
        return [NONE if pair is None else ratio(median([a / b for a, b in pair]), 1.0) for pair in pairs]


def time_table(comparison: Comparison, shape: Shape, rounds: int, *notes: str) -> Table:
    """Step times on gloo processes."""
    names = comparison.names
    by_rank = run_on_gloo(WORLD_SIZE, comparison.limit, measure_time, comparison.make, shape, names, 2, rounds)
    slowest = {name: _slowest(ranks[name] for ranks in by_rank) for name in names}
    losses = [runs[-1][3] for runs in slowest.values()]
    if max(losses) - min(losses) > LOSS_TOLERANCE:
        raise BenchError(f"the contenders' losses differ: {losses}")
    table = phase_table(f"Step on {WORLD_SIZE} gloo processes: {shape}", comparison, slowest)
    table.notes = (
        f"AdamW. {rounds} rounds after 2 of warm-up; a round is one step of each, the slower rank counts; ± is half "
        "the distance between the quartiles; ratios are medians over rounds.",
        f"all contenders reported the same loss to within {LOSS_TOLERANCE:g} nats.",
        *notes,
    )
    return table


def phase_table(title: str, comparison: Comparison, runs: Mapping[str, Sequence[Phases]]) -> Table:
    """Medians of what was measured."""
    columns = ["contender", "step ms", "± ms", "forward ms", "backward ms", "update ms"]
    table = Table(title, [*columns, f"/ {comparison.peer}", f"/ {comparison.plain}"], chart="step ms")
    steps = {name: [_seconds(run) for run in found] for name, found in runs.items()}
    for name, found in runs.items():
        phases = [number(1e3 * median([run[phase] for run in found])) for phase in range(3)]
        times = [number(1e3 * median(steps[name])), number(1e3 * spread(steps[name]))]
        table.rows.append([name, *times, *phases, *comparison.ratios(steps, name)])
    return table


def _slowest(by_rank: Iterable[list[Phases]]) -> list[Phases]:
    return [max(ranks, key=_seconds) for ranks in zip(*by_rank, strict=True)]


def _seconds(run: Phases) -> float:
    return sum(run[:3])


def measure_time(
    make: Callable[[str, Shape], Contender], shape: Shape, names: Sequence[str], warm_up: int, rounds: int
) -> dict[str, list[Phases]]:
    """On one rank: each contender's steps."""
    actions = {name: functools.partial(_timed_step, make(name, shape)) for name in names}
    gc.collect()
    gc.freeze()
    return interleave(actions, warm_up, rounds)


def _timed_step(contender: Contender) -> Phases:
    dist.barrier()
    start = time.perf_counter()
    loss = contender.forward()
    after_forward = time.perf_counter()
    contender.backward(loss)
    after_backward = time.perf_counter()
    contender.update()
    end = time.perf_counter()
    return after_forward - start, after_backward - after_forward, end - after_backward, loss.item()


def memory_table(comparison: Comparison, shape: Shape = FEW_TOKENS, *notes: str) -> Table:
    """Peak bytes of a step, and those between steps."""
    names, columns = comparison.names, ["contender", "peak MiB", "between steps MiB"]
    title = f"Bytes of a step, parameters and optimizer state included, world {WORLD_SIZE}: {shape}"
    table = Table(title, [*columns, f"peak / {comparison.peer}", f"peak / {comparison.plain}"])
    try:
        with preloaded_meter():
            by_name = {
                name: run_on_gloo(WORLD_SIZE, comparison.limit, measure_memory, comparison, name, shape)
                for name in names
            }
    except NoCompilerError as error:
        return Table("Peak of a step", ["not measured"], [[str(error)]])
    peaks = {name: [float(max(peak for peak, _ in by_rank))] for name, by_rank in by_name.items()}
    for name, by_rank in by_name.items():
        between = max(found for _, found in by_rank)
        table.rows.append([name, mebibytes(int(peaks[name][0])), mebibytes(between), *comparison.ratios(peaks, name)])
    with torch.device("meta"):
        parameters = 4 * sum(parameter.numel() for parameter in Transformer(shape).parameters())
    table.notes = (
        f"parameters: {mebibytes(parameters)} MiB, AdamW's state twice that. The worse rank; the median of 3 steps "
        "after 2 of warm-up; every block of 2 KiB and more on all threads, so also what gloo allocates for itself.",
        *notes,
    )
    return table


def measure_memory(comparison: Comparison, name: str, shape: Shape) -> tuple[int, int]:
    """On one rank: peak bytes of a contender, and its bytes between steps."""
    # What torch, its kernels, gloo and the library set up on first use must not count.
    for first in (comparison.plain, name):
        _measure_one(comparison.make, first, shape, steps=3)
    return _measure_one(comparison.make, name, shape, steps=5)


def _measure_one(make: Callable[[str, Shape], Contender], name: str, shape: Shape, steps: int) -> tuple[int, int]:
    gc.collect()
    meter = Meter()
    contender = make(name, shape)
    peaks, between = [], []
    for step in range(steps):
        gc.collect()
        before = meter.current()
        _, peak = meter.highest_during(functools.partial(_timed_step, contender))
        if step >= 2:
            peaks.append(peak)
            between.append(before)
    return int(median(peaks)), int(median(between))
