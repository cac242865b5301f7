"""Time of a whole training step on gloo processes."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable

import torch.distributed as dist

from .contenders import CONTENDERS, FLAT, FSDP2, UNSHARDED, Contender, make_contender
from .model import Shape
from .ranks import BenchError, run_on_gloo
from .report import NONE, Table, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 2
COMPARED = (*CONTENDERS, FLAT)
COMPUTE_HEAVY = Shape(blocks=8, width=512, batch=4, length=128)
PARAMETER_HEAVY = Shape(blocks=4, width=1024, batch=1, length=32)
SMALL_UNITS = Shape(blocks=32, width=64, batch=1, length=4)
LIMIT = 240.0
SAVES = f"sharding also saves: AdamW then updates 1/{WORLD_SIZE} of the parameters, so an overhead may be negative."
LOSS_TOLERANCE = 1e-3
"""Nats per token by which contenders may differ: rounding of other orders of summation."""

Phases = tuple[float, float, float, float, float]
"""Seconds of forward, backward and optimizer, processor seconds of all threads, and the loss in nats per token."""


def step_tables(quick: bool) -> list[Table]:
    """Each model on two processes, and on one, where nothing is sharded."""
    return [
        _table(WORLD_SIZE, COMPUTE_HEAVY, warm_up=2, rounds=3 if quick else 10),
        _table(WORLD_SIZE, PARAMETER_HEAVY, warm_up=2, rounds=5 if quick else 16),
        _table(WORLD_SIZE, SMALL_UNITS, warm_up=4, rounds=5 if quick else 40),
        _table(1, COMPUTE_HEAVY, warm_up=2, rounds=3 if quick else 10),
        _table(1, PARAMETER_HEAVY, warm_up=2, rounds=5 if quick else 16),
    ]


def _table(world_size: int, shape: Shape, warm_up: int, rounds: int) -> Table:
    by_rank = run_on_gloo(world_size, LIMIT, measure, shape, warm_up, rounds)
    slowest = {
        name: [max(ranks, key=_seconds) for ranks in zip(*(r[name] for r in by_rank), strict=True)] for name in COMPARED
    }
    _check_losses(slowest)
    steps = {name: median([_seconds(run) for run in runs]) for name, runs in slowest.items()}
    columns = ["contender", "step ms", "± ms", "forward ms", "backward ms", "optimizer ms", "CPU ms"]
    columns += ["step / no sharding", "overhead ms", "overhead / FSDP2's"]
    table = Table(f"Step on {world_size} gloo process{'es' * (world_size > 1)}: {shape}", columns)
    reference = steps[FSDP2] - steps[UNSHARDED]
    for name, runs in slowest.items():
        overhead = steps[name] - steps[UNSHARDED]
        compared = [NONE, NONE] if name == UNSHARDED else [number(1e3 * overhead), ratio(overhead, reference)]
        phases = [number(1e3 * median([run[phase] for run in runs])) for phase in range(4)]
        half = number(1e3 * spread([_seconds(run) for run in runs]))
        row = [
            name,
            number(1e3 * steps[name]),
            half,
            *phases,
            ratio(steps[name], steps[UNSHARDED]),
            *compared,
        ]
        table.rows.append(row)
    table.notes = (
        f"{rounds} rounds after {warm_up} of warm-up; a round is one step of each, the slower rank counts; "
        "± is half the distance between the quartiles.",
        "CPU: of one process, all its threads.",
        "overhead: a contender's step minus that without sharding.",
        *([] if world_size == 1 else [SAVES]),
        f"all contenders reported the same loss to within {LOSS_TOLERANCE:g} nats.",
    )
    table.chart = "step ms"
    return table


def _seconds(run: Phases) -> float:
    return sum(run[:3])


def _check_losses(runs: dict[str, list[Phases]]) -> None:
    """A contender that trains something else must not win."""
    last = {name: found[-1][4] for name, found in runs.items()}
    if max(last.values()) - min(last.values()) > LOSS_TOLERANCE:
        raise BenchError(f"the contenders' losses differ: {last}")


def measure(shape: Shape, warm_up: int, rounds: int) -> dict[str, list[Phases]]:
    """On one rank: each contender's steps."""
    actions: dict[str, Callable[[], Phases]] = {}
    for name in COMPARED:
        actions[name] = functools.partial(_timed_step, make_contender(name, shape))
    gc.collect()
    gc.freeze()
    return interleave(actions, warm_up, rounds)


def _timed_step(contender: Contender) -> Phases:
    dist.barrier()
    cpu_start, start = time.process_time(), time.perf_counter()
    loss = contender.forward()
    after_forward = time.perf_counter()
    loss.backward()
    after_backward = time.perf_counter()
    contender.update()
    end, cpu_end = time.perf_counter(), time.process_time()
    phases = after_forward - start, after_backward - after_forward, end - after_backward
    return *phases, cpu_end - cpu_start, loss.item()
