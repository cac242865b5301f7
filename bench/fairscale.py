"""Step time and peak bytes of OSS and ShardedDDP, beside FairScale's own and DDP."""

from __future__ import annotations

import functools
import gc
import importlib.util
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import fairscale as ours

from .allocations import Meter, NoCompilerError, preloaded_meter
from .model import Shape, Transformer, loss_of, make_tokens
from .ranks import BenchError, run_on_gloo
from .report import NONE, Table, mebibytes, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 2
COMPUTE_HEAVY = Shape(blocks=8, width=512, batch=4, length=128)
PARAMETER_HEAVY = Shape(blocks=4, width=1024, batch=1, length=32)
MANY_SMALL = Shape(blocks=32, width=64, batch=4, length=32)
FEW_TOKENS = Shape(blocks=8, width=512, batch=1, length=4)
LIMIT = 300.0
LOSS_TOLERANCE = 1e-3
"""Nats per token by which contenders may differ: rounding of other orders of summation."""
PLAIN = "DDP"
PAIRS = {
    "DDP + our OSS": "DDP + FairScale's OSS",
    "our ShardedDDP + OSS": "FairScale's ShardedDDP + OSS",
    "our ShardedDDP + OSS, no buffers": "FairScale's ShardedDDP + OSS, no buffers",
}
"""Ours, and what it is compared to."""

Phases = tuple[float, float, float, float]
"""Seconds of forward, backward and update, and the loss in nats per token."""


@dataclass
class Contender:
    """A wrapped model of its own, ready to train.

    Args:
        model: wrapped.
        optimizer: AdamW, sharded or not.
        zero_grad: drops gradients, or zeros them where the contender needs that.
        tokens: the batch of every step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    zero_grad: Callable[[], None]
    tokens: Tensor

    def forward(self) -> Tensor:
        """The loss, in nats per token."""
        return loss_of(self.model, self.tokens)

    def update(self) -> None:
        """Step the optimizer and drop the gradients."""
        self.optimizer.step()
        self.zero_grad()


def has_fairscale() -> bool:
    """Whether FairScale is installed."""
    return importlib.util.find_spec("fairscale") is not None


def contender_names() -> list[str]:
    """Those that can run here."""
    theirs = PAIRS.values() if has_fairscale() else ()
    return [PLAIN, *(name for pair in zip(PAIRS, theirs, strict=False) for name in pair)] if theirs else [PLAIN, *PAIRS]


def make_contender(name: str, shape: Shape) -> Contender:
    """Build and wrap a model for the default process group; all contenders start from the same parameters."""
    torch.manual_seed(1)
    model: nn.Module = Transformer(shape)
    tokens = make_tokens(shape)
    if name == PLAIN:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Contender(_data_parallel(model), optimizer, optimizer.zero_grad, tokens)
    is_ours = "our " in name
    oss, sharded = _classes(is_ours)
    optimizer = oss(model.parameters(), optim=torch.optim.AdamW, lr=1e-4)
    if name.startswith("DDP"):
        return Contender(_data_parallel(model), optimizer, optimizer.zero_grad, tokens)
    options = {"reduce_buffer_size": 0} if "no buffers" in name else {}
    model = sharded(model, optimizer, **options)
    # With buffers, FairScale's trains on zeros once its optimizer has dropped the gradients.
    return Contender(model, optimizer, optimizer.zero_grad if is_ours else model.zero_grad, tokens)


def _classes(is_ours: bool) -> tuple[Any, Any]:
    if is_ours:
        return ours.OSS, ours.ShardedDDP
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    return OSS, ShardedDataParallel


def _data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fairscale_tables(quick: bool) -> list[Table]:
    """One table of times per model, one of peak bytes."""
    names = contender_names()
    rounds = (3, 5, 5) if quick else (10, 16, 90)
    shapes = (COMPUTE_HEAVY, PARAMETER_HEAVY, MANY_SMALL)
    tables = [_time_table(shape, names, count) for shape, count in zip(shapes, rounds, strict=True)]
    try:
        with preloaded_meter():
            tables.append(_memory_table(FEW_TOKENS, names))
    except NoCompilerError as error:
        tables.append(Table("Peak of a step", ["not measured"], [[str(error)]]))
    if not has_fairscale():
        for table in tables:
            table.notes = (
                *table.notes,
                "FairScale is not installed: pip install fairscale==0.4.13 --no-build-isolation",
            )
    return tables


def _compared(values: dict[str, list[float]], name: str) -> list[str]:
    """Ratios of ``name``'s values to FairScale's and to DDP's: the median over rounds, in each of which the machine was
    about as fast for all."""
    others = [values.get(PAIRS.get(name, "")), values[PLAIN]]
    pairs = [zip(values[name], other, strict=True) if other is not None else None for other in others]
    return [NONE if pair is None else ratio(median([a / b for a, b in pair]), 1.0) for pair in pairs]


def _time_table(shape: Shape, names: list[str], rounds: int) -> Table:
    by_rank = run_on_gloo(WORLD_SIZE, LIMIT, measure_time, shape, names, 2, rounds)
    slowest = {name: _slowest(ranks[name] for ranks in by_rank) for name in names}
    losses = [runs[-1][3] for runs in slowest.values()]
    if max(losses) - min(losses) > LOSS_TOLERANCE:
        raise BenchError(f"the contenders' losses differ: {losses}")
    steps = {name: [_seconds(run) for run in runs] for name, runs in slowest.items()}
    columns = ["contender", "step ms", "± ms", "forward ms", "backward ms", "update ms", "/ FairScale's", "/ DDP's"]
    table = Table(f"Step on {WORLD_SIZE} gloo processes: {shape}", columns)
    for name, runs in slowest.items():
        phases = [number(1e3 * median([run[phase] for run in runs])) for phase in range(3)]
        times = [number(1e3 * median(steps[name])), number(1e3 * spread(steps[name]))]
        table.rows.append([name, *times, *phases, *_compared(steps, name)])
    table.chart = "step ms"
    table.notes = (
        f"AdamW. {rounds} rounds after 2 of warm-up; a round is one step of each, the slower rank counts; ± is half "
        "the distance between the quartiles; ratios are medians over rounds. OSS sends the parameters in its update.",
        f"all contenders reported the same loss to within {LOSS_TOLERANCE:g} nats.",
    )
    return table


def _slowest(by_rank: Iterable[list[Phases]]) -> list[Phases]:
    return [max(ranks, key=_seconds) for ranks in zip(*by_rank, strict=True)]


def _seconds(run: Phases) -> float:
    return sum(run[:3])


def measure_time(shape: Shape, names: list[str], warm_up: int, rounds: int) -> dict[str, list[Phases]]:
    """On one rank: each contender's steps."""
    actions = {name: functools.partial(_timed_step, make_contender(name, shape)) for name in names}
    gc.collect()
    gc.freeze()
    return interleave(actions, warm_up, rounds)


def _timed_step(contender: Contender) -> Phases:
    dist.barrier()
    start = time.perf_counter()
    loss = contender.forward()
    after_forward = time.perf_counter()
    loss.backward()
    after_backward = time.perf_counter()
    contender.update()
    end = time.perf_counter()
    return after_forward - start, after_backward - after_forward, end - after_backward, loss.item()


def _memory_table(shape: Shape, names: list[str]) -> Table:
    by_rank: list[dict[str, tuple[int, int]]] = run_on_gloo(WORLD_SIZE, LIMIT, measure_memory, shape, names)
    peaks = {name: [float(max(ranks[name][0] for ranks in by_rank))] for name in names}
    columns = ["contender", "peak MiB", "between steps MiB", "peak / FairScale's", "peak / DDP's"]
    table = Table(f"Bytes of a step, parameters and optimizer state included, world {WORLD_SIZE}: {shape}", columns)
    for name in names:
        between = max(ranks[name][1] for ranks in by_rank)
        table.rows.append([name, mebibytes(int(peaks[name][0])), mebibytes(between), *_compared(peaks, name)])
    with torch.device("meta"):
        parameters = 4 * sum(parameter.numel() for parameter in Transformer(shape).parameters())
    table.notes = (
        f"parameters: {mebibytes(parameters)} MiB, AdamW's state twice that. The worse rank; the median of 3 steps "
        "after 2 of warm-up; every block of 2 KiB and more on all threads, so also what gloo allocates for itself.",
    )
    return table


def measure_memory(shape: Shape, names: list[str]) -> dict[str, tuple[int, int]]:
    """On one rank: each contender's peak bytes and its bytes between steps, one contender alive at a time."""
    # What torch, its kernels and gloo set up on first use must not count.
    _measure_one(names[0], shape)
    return {name: _measure_one(name, shape) for name in names}


def _measure_one(name: str, shape: Shape) -> tuple[int, int]:
    gc.collect()
    meter = Meter()
    contender = make_contender(name, shape)
    peaks, between = [], []
    for step in range(5):
        gc.collect()
        before = meter.current()
        _, peak = meter.highest_during(functools.partial(_timed_step, contender))
        if step >= 2:
            peaks.append(peak)
            between.append(before)
    return int(median(peaks)), int(median(between))
