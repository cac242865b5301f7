"""Peak bytes of a training step, from the allocator's own events."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile, record_function

from .contenders import CONTENDERS, FSDP2, MIXED_PRECISION, SHARDWISE, UNSHARDED, make_contender
from .model import Shape, Transformer
from .ranks import run_on_gloo
from .report import NONE, Table, mebibytes, ratio

WORLD_SIZE = 2
FEW_TOKENS = Shape(blocks=8, width=512, batch=1, length=4)
MANY_TOKENS = Shape(blocks=8, width=512, batch=4, length=128)
LIMIT = 180.0
STEPS = 3
"""The last one is measured: the first makes optimizer state, the second may still grow buffers."""
FORWARD, BACKWARD, UPDATE = "bench forward", "bench backward", "bench update"


@dataclass(frozen=True)
class Peak:
    """Bytes on one rank.

    Args:
        resident: parameters (shards) and optimizer state, by arithmetic.
        kept: allocated before the measured step, above ``resident``.
        forward, backward, update: highest allocation inside each phase, above ``resident``.
        activations: allocated between forward and backward, above that before forward.
    """

    resident: int
    kept: int
    forward: int
    backward: int
    update: int
    activations: int

    @property
    def highest(self) -> int:
        """Of the whole step, above ``resident``."""
        return max(self.forward, self.backward, self.update)


def memory_tables(quick: bool) -> list[Table]:
    """One table per precision for few tokens, where parameters and gradients are all; one with many."""
    tables = [_table(FEW_TOKENS, None), _table(FEW_TOKENS, MIXED_PRECISION)]
    return tables if quick else [*tables, _table(MANY_TOKENS, None)]


def floor_bytes(shape: Shape, precision: MixedPrecisionPolicy | None) -> int:
    """Sharded gradients, two gathered units and one unit's gradients as backward computes them; no activations."""
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in Transformer(shape).parameters())
    unit = sum(math.prod(tensor) for tensor in shape.block_shapes)
    itemsize = 4 if precision is None else 2
    return 4 * total // WORLD_SIZE + 3 * itemsize * unit


def _table(shape: Shape, precision: MixedPrecisionPolicy | None) -> Table:
    names = CONTENDERS if precision is None else (SHARDWISE, FSDP2)
    by_rank: list[dict[str, Peak]] = run_on_gloo(WORLD_SIZE, LIMIT, measure, shape, precision, names)
    peaks = {name: max((found[name] for found in by_rank), key=lambda peak: peak.highest) for name in names}
    floor = floor_bytes(shape, precision)
    label = "fp32" if precision is None else "parameters bf16, reductions fp32"
    columns = [
        "contender",
        "resident MiB",
        "forward MiB",
        "backward MiB",
        "update MiB",
        "kept MiB",
        "peak MiB",
    ]
    columns += ["peak / floor", "peak / FSDP2's"]
    table = Table(f"Peak of a step above the resident bytes, {label}, world {WORLD_SIZE}: {shape}", columns)
    for name, peak in peaks.items():
        phases = (peak.resident, peak.forward, peak.backward, peak.update, peak.kept, peak.highest)
        comparable = name in (SHARDWISE, FSDP2)
        compared = [ratio(peak.highest, floor), ratio(peak.highest, peaks[FSDP2].highest)]
        table.rows.append([name, *map(mebibytes, phases), *(compared if comparable else [NONE, NONE])])
    table.rows.append(["floor", *[NONE] * 5, mebibytes(floor), "1.00", NONE])
    table.notes = (
        "resident: parameters (shards) and optimizer state, by arithmetic; everything else allocated counts, also "
        "what an engine keeps between steps (kept). The worse rank; peaks of the three phases of the step.",
        "floor: sharded gradients + two gathered units + one unit's gradients, without activations.",
        "torch's allocator events: what gloo allocates for itself (scratch of its all-reduce) is not among them.",
    )
    if UNSHARDED in peaks:
        activations = f"activations (no sharding, after forward): {mebibytes(peaks[UNSHARDED].activations)} MiB."
        table.notes = (*table.notes, activations)
    return table


def measure(shape: Shape, precision: MixedPrecisionPolicy | None, names: tuple[str, ...]) -> dict[str, Peak]:
    """On one rank: the contenders' peaks, one contender alive at a time."""
    # Whatever torch sets up on first use must not count.
    _measure_one(names[0], Shape(1, 64, 1, 4), precision)
    return {name: _measure_one(name, shape, precision) for name in names}


def _measure_one(name: str, shape: Shape, precision: MixedPrecisionPolicy | None) -> Peak:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contender = make_contender(name, shape, precision)
        for _ in range(STEPS):
            with record_function(FORWARD):
                loss = contender.forward()
            with record_function(BACKWARD):
                loss.backward()
            with record_function(UPDATE):
                contender.update()
            del loss
    resident = contender.resident_bytes()
    return _peak(profiler, resident)


def _peak(profiler: profile, resident: int) -> Peak:
    """Follow the allocated bytes, from nothing before the contender was made, through the last step."""
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    spans = {}
    for event in events:
        if event.name() in (FORWARD, BACKWARD, UPDATE):
            span = event.start_ns(), event.start_ns() + event.duration_ns()
            spans[event.name()] = max(spans.get(event.name(), span), span)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    before, forward = _follow(changes, *spans[FORWARD])
    after_forward, backward = _follow(changes, *spans[BACKWARD])
    _, update = _follow(changes, *spans[UPDATE])
    values = (before, forward, backward, update)
    return Peak(resident, *(value - resident for value in values), activations=after_forward - before)


def _follow(changes: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Bytes allocated at time ``start``, and the most between ``start`` and ``end`` (both ns)."""
    level = sum(size for when, size in changes if when < start)
    highest = current = level
    for when, size in changes:
        if start <= when <= end:
            current += size
            highest = max(highest, current)
    return level, highest
