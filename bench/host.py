"""Host time of forward and backward, with nothing to communicate and little to compute."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable

from .contenders import CONTENDERS, DDP, FSDP2, UNSHARDED, Contender, make_contender
from .model import Shape
from .ranks import run_on_fake
from .report import NONE, Table, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 8
SHAPE = Shape(blocks=32, width=64, batch=1, length=4)
LIMIT = 180.0

Result = tuple[dict[str, list[tuple[float, float]]], dict[str, str]]
"""By contender: seconds of forward and of backward per run; and why a contender does not run here."""


def host_tables(quick: bool) -> list[Table]:
    """One table."""
    rounds = 20 if quick else 120
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
        "overhead: a contender's time minus that without sharding.",
        f"{DDP}: its buckets go nowhere (a communication hook that does nothing), since it cannot use a fake group.",
    )
    table.chart = "both µs/unit"
    return [table]


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
