"""Peak bytes of a training step, counted inside the C library's allocator.

The profiler's memory events would need no compiler, but it does not see what other threads free: gloo's threads are
often the last to let go of a collective's tensors, and then FSDP2's peak came out 30 to 50 MiB too high.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from .allocations import Meter, NoCompilerError, preloaded_meter
from .contenders import CONTENDERS, FSDP2, MIXED_PRECISION, SHARDWISE, UNSHARDED, Contender, make_contender
from .model import Shape, Transformer
from .ranks import run_on_gloo
from .report import NONE, Table, mebibytes, ratio

WORLD_SIZE = 2
FEW_TOKENS = Shape(blocks=8, width=512, batch=1, length=4)
MANY_TOKENS = Shape(blocks=8, width=512, batch=1, length=128)
LIMIT = 180.0
WARM_UP, STEPS = 2, 3
"""The first makes optimizer state, the second may still grow buffers. Of those measured the median peak counts: when
gloo's threads let go of a collective's tensors varies."""


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
    try:
        tables = [_table(FEW_TOKENS, None), _table(FEW_TOKENS, MIXED_PRECISION)]
        return tables if quick else [*tables, _table(MANY_TOKENS, None)]
    except NoCompilerError as error:
        return [Table("Peak of a step", ["not measured"], [[str(error)]])]


def floor_bytes(shape: Shape, precision: MixedPrecisionPolicy | None) -> int:
    """Sharded gradients, two gathered units and one unit's gradients as backward computes them; no activations."""
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in Transformer(shape).parameters())
    unit = sum(math.prod(tensor) for tensor in shape.block_shapes)
    itemsize = 4 if precision is None else 2
    return 4 * total // WORLD_SIZE + 3 * itemsize * unit


def _table(shape: Shape, precision: MixedPrecisionPolicy | None) -> Table:
    names = CONTENDERS if precision is None else (SHARDWISE, FSDP2)
    with preloaded_meter():
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
        f"what an engine keeps between steps (kept). The median of {STEPS} steps on the worse "
        "rank; peaks of the three phases of the step.",
        "floor: sharded gradients + two gathered units + one unit's gradients, without activations.",
        "counted: every block of 2 KiB and more on all threads, so also what gloo allocates for itself (a preloaded "
        "`allocations.c` around the C library's allocator).",
    )
    if UNSHARDED in peaks:
        activations = f"activations (no sharding, after forward): {mebibytes(peaks[UNSHARDED].activations)} MiB."
        table.notes = (*table.notes, activations)
    table.chart = "peak MiB"
    return table


def measure(shape: Shape, precision: MixedPrecisionPolicy | None, names: tuple[str, ...]) -> dict[str, Peak]:
    """On one rank: the contenders' peaks, one contender alive at a time."""
    # What torch, its kernels and gloo set up on first use must not count.
    _measure_one(names[0], shape, precision)
    return {name: _measure_one(name, shape, precision) for name in names}


def _measure_one(name: str, shape: Shape, precision: MixedPrecisionPolicy | None) -> Peak:
    gc.collect()
    meter = Meter()
    contender = make_contender(name, shape, precision)
    for _ in range(WARM_UP):
        contender.step()
    peaks = [_measure_step(contender, meter) for _ in range(STEPS)]
    return sorted(peaks, key=lambda peak: peak.highest)[STEPS // 2]


def _measure_step(contender: Contender, meter: Meter) -> Peak:
    # Garbage in reference cycles goes at any time; here before the step, for all alike.
    gc.collect()
    before = meter.current()
    loss, forward = meter.highest_during(contender.forward)
    after_forward = meter.current()
    _, backward = meter.highest_during(loss.backward)
    _, update = meter.highest_during(contender.update)
    resident = contender.resident_bytes()
    above = (level - resident for level in (before, forward, backward, update))
    return Peak(resident, *above, activations=after_forward - before)
