"""Steps in other settings than the default, each next to what torch FSDP2 has for it: their time, their host time and
the memory that they hold."""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise

from .allocations import Meter, NoCompilerError, preloaded_meter
from .contenders import FSDP2, MIXED_PRECISION, SHARDWISE, UNSHARDED, Contender, wrap
from .host import KEEPS_MEMORY
from .host import SHAPE as SMALL
from .host import WORLD_SIZE as FAKE_WORLD_SIZE
from .model import Shape, Transformer, make_tokens
from .ranks import BenchError, run_on_fake, run_on_gloo
from .report import Table, mebibytes, number, ratio
from .timing import interleave, median, spread

SHAPE = Shape(blocks=8, width=512, batch=1, length=32)
LIMIT = 240.0
MICRO_BATCHES = 4
LOSS_TOLERANCE = 2e-2
"""Nats per token by which two engines may differ after the same steps, in bf16 too."""


@dataclass(frozen=True)
class Setting:
    """One way of use.

    Args:
        title: for the table.
        ours: arguments of our `fully_shard`.
        theirs: the equivalent ones of torch's.
        replicas: ranks of the axis that replicates.
        micro_batches: backward passes of a step.
        reduces_each: whether each of them reduces.
        gathers_once: whether parameters stay gathered from one to the next.
        theirs_stay: whether FSDP2's parameters stay gathered after the last of them too, until they are updated.
    """

    title: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    micro_batches: int = 1
    reduces_each: bool = True
    gathers_once: bool = False
    theirs_stay: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """That parameters compute in."""
        precision = self.theirs.get("mp_policy")
        return torch.float32 if precision is None else precision.param_dtype

    @property
    def world_size(self) -> int:
        """Processes that steps are timed on."""
        return 2 * self.replicas

    def mesh(self) -> DeviceMesh:
        """All ranks of this world."""
        size = dist.get_world_size()
        if self.replicas == 1:
            return init_device_mesh("cpu", (size,))
        names = ("replicate", "shard")
        return init_device_mesh("cpu", (self.replicas, size // self.replicas), mesh_dim_names=names)


KEPT = {"reshard_after_forward": False}
MIXED = {"mp_policy": MIXED_PRECISION}
SETTINGS = (
    Setting("the default: ZeRO-3, float32"),
    Setting("parameters bfloat16, reductions float32", MIXED, MIXED),
    Setting("parameters kept after forward", KEPT, KEPT),
    Setting("ZeRO-2; FSDP2 keeps parameters after forward", {"placements": "zero2"}, KEPT),
    Setting("ZeRO-1; FSDP2 keeps parameters after forward", {"placements": "zero1"}, KEPT),
    Setting("ZeRO-2; FSDP2 keeps parameters after backward", {"placements": "zero2"}, KEPT, theirs_stay=True),
    Setting("ZeRO-1; FSDP2 keeps parameters after backward", {"placements": "zero1"}, KEPT, theirs_stay=True),
    Setting(f"{MICRO_BATCHES} micro-batches, each reduced", micro_batches=MICRO_BATCHES),
    Setting(f"{MICRO_BATCHES} micro-batches, the last reduces", micro_batches=MICRO_BATCHES, reduces_each=False),
    Setting(
        f"{MICRO_BATCHES} micro-batches, gathered once: ZeRO-2; FSDP2 keeps parameters until the last",
        {"placements": "zero2"},
        KEPT,
        micro_batches=MICRO_BATCHES,
        gathers_once=True,
    ),
    Setting("HSDP: replicate 2, shard the rest", replicas=2),
)


def setting_tables(quick: bool) -> list[Table]:
    """Step time, host time and memory."""
    return [_step_table(3 if quick else 10), _host_table(8 if quick else 60), _memory_table()]


# -- What runs


@dataclass
class Stepper:
    """One engine, or none, in one setting, ready to train."""

    setting: Setting
    contender: Contender

    def passes(self) -> Tensor:
        """Forward and backward of all micro-batches; gives the last loss, in nats per token."""
        model: Any = self.contender.model
        for number_ in range(self.setting.micro_batches):
            is_last = number_ == self.setting.micro_batches - 1
            if self.contender.name != UNSHARDED:
                model.set_requires_gradient_sync(self.setting.reduces_each or is_last)
                model.set_is_last_backward(is_last)
            if self.contender.name == FSDP2 and (self.setting.gathers_once or self.setting.theirs_stay):
                model.set_reshard_after_backward(is_last and not self.setting.theirs_stay)
            loss = self.contender.forward()
            loss.backward()
        return loss

    def step(self) -> float:
        """All of a step; gives its loss."""
        loss = self.passes()
        self.contender.update()
        if self.contender.name == FSDP2 and self.setting.theirs_stay:
            self.refresh()
        return loss.item()

    def refresh(self) -> None:
        """Let the next forward gather what was updated, which FSDP2 does not notice."""
        for module in self.contender.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def make_stepper(name: str, setting: Setting, shape: Shape) -> Stepper:
    """All start from the same parameters."""
    torch.manual_seed(1)
    model: Any = Transformer(shape)
    if name == UNSHARDED:
        model.to(setting.dtype)
    else:
        verb: Any = shardwise.fully_shard if name == SHARDWISE else torch_fully_shard
        options = setting.ours if name == SHARDWISE else setting.theirs
        wrap(model, verb, setting.mesh(), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Stepper(setting, Contender(name, model, optimizer, make_tokens(shape)))


# -- Step time


def _step_table(rounds: int) -> Table:
    columns = ["setting", "shardwise ms", "± ms", "FSDP2 ms", "± ms", "shardwise / FSDP2's"]
    table = Table(f"Step on gloo processes: {SHAPE}", columns)
    for index, setting in enumerate(SETTINGS):
        by_rank = run_on_gloo(setting.world_size, LIMIT, measure_steps, index, 2, rounds)
        seconds = {
            name: [max(s for s, _ in ranks) for ranks in zip(*(r[name] for r in by_rank), strict=True)]
            for name in (SHARDWISE, FSDP2)
        }
        losses = [runs[-1][1] for runs in by_rank[0].values()]
        if max(losses) - min(losses) > LOSS_TOLERANCE:
            raise BenchError(f"{setting.title}: the losses differ: {losses}")
        cells = [number(1e3 * f(seconds[name])) for name in (SHARDWISE, FSDP2) for f in (median, spread)]
        compared = median([a / b for a, b in zip(seconds[SHARDWISE], seconds[FSDP2], strict=True)])
        table.rows.append([setting.title, *cells, ratio(compared, 1.0)])
    table.notes = (
        f"2 processes, or 4 on two axes. AdamW. {rounds} rounds after 2 of warm-up; a round is one step of each, the "
        "slowest rank counts; ± is half the distance between the quartiles; the ratio is the median over rounds.",
        f"both reported the same loss to within {LOSS_TOLERANCE:g} nats.",
    )
    table.chart = "shardwise / FSDP2's"
    return table


def measure_steps(index: int, warm_up: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """On one rank: seconds and loss of each engine's steps in setting ``index``."""
    setting = SETTINGS[index]
    steppers = {name: make_stepper(name, setting, SHAPE) for name in (SHARDWISE, FSDP2)}
    gc.collect()
    gc.freeze()
    return interleave({name: functools.partial(_timed_step, one) for name, one in steppers.items()}, warm_up, rounds)


def _timed_step(stepper: Stepper) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    loss = stepper.step()
    return time.perf_counter() - start, loss


# -- Host time


def _host_table(rounds: int) -> Table:
    columns = ["setting", "no sharding µs/unit", "shardwise µs/unit", "FSDP2 µs/unit", "overhead / FSDP2's"]
    table = Table(f"Host time of forward + backward on a fake group of {FAKE_WORLD_SIZE}: {SMALL}", columns)
    per_unit = 1e6 / (SMALL.blocks + 1)
    for index, setting in enumerate(SETTINGS):
        runs = run_on_fake(FAKE_WORLD_SIZE, LIMIT, measure_host, index, 4, rounds)
        plain, ours, theirs = (median(runs[name]) for name in (UNSHARDED, SHARDWISE, FSDP2))
        cells = [number(per_unit * seconds, 0) for seconds in (plain, ours, theirs)]
        table.rows.append([setting.title, *cells, ratio(ours - plain, theirs - plain)])
    table.notes = (
        f"of all micro-batches of a step; medians of {rounds} rounds after 4 of warm-up. No sharding: in the dtype "
        "that parameters are gathered in.",
        KEEPS_MEMORY,
    )
    table.chart = "overhead / FSDP2's"
    return table


def measure_host(index: int, warm_up: int, rounds: int) -> dict[str, list[float]]:
    """In one process: seconds of each contender's passes in setting ``index``."""
    steppers = {name: make_stepper(name, SETTINGS[index], SMALL) for name in (UNSHARDED, SHARDWISE, FSDP2)}
    gc.collect()
    gc.freeze()
    return interleave({name: functools.partial(_timed_passes, one) for name, one in steppers.items()}, warm_up, rounds)


def _timed_passes(stepper: Stepper) -> float:
    start = time.perf_counter()
    stepper.passes()
    seconds = time.perf_counter() - start
    stepper.contender.optimizer.zero_grad()
    return seconds


# -- Memory


def _memory_table() -> Table:
    names = (SHARDWISE, FSDP2)
    columns = ["setting", "shardwise: held MiB", "peak MiB", "FSDP2: held MiB", "peak MiB", "peak / FSDP2's"]
    table = Table(f"Bytes of a step on gloo processes: {SHAPE}", columns)
    try:
        with preloaded_meter():
            for index, setting in enumerate(SETTINGS):
                by_rank = run_on_gloo(setting.world_size, LIMIT, measure_memory, index)
                most = {
                    name: [max(counts) for counts in zip(*(r[name] for r in by_rank), strict=True)] for name in names
                }
                cells = [mebibytes(count) for name in names for count in most[name]]
                table.rows.append([setting.title, *cells, ratio(most[SHARDWISE][1], most[FSDP2][1])])
    except NoCompilerError as error:
        return Table("Bytes of a step", ["not measured"], [[str(error)]])
    table.notes = (
        "held between steps and at the peak of one: parameters, gradients, AdamW's state, activations and all else "
        "that is allocated (counted as in memory.md); the worst rank, the median of 3 steps after 2.",
        "ZeRO-1 and ZeRO-2 hold whole parameters between steps, which FSDP2 gathers in each forward.",
    )
    table.chart = "peak / FSDP2's"
    return table


def measure_memory(index: int) -> dict[str, tuple[int, int]]:
    """On one rank: bytes that each engine holds between steps and at the peak of one, in setting ``index``."""
    # What torch, its kernels and gloo set up on first use must not count.
    _measure_bytes(SHARDWISE, SETTINGS[index])
    return {name: _measure_bytes(name, SETTINGS[index]) for name in (SHARDWISE, FSDP2)}


def _measure_bytes(name: str, setting: Setting) -> tuple[int, int]:
    gc.collect()
    meter = Meter()
    stepper = make_stepper(name, setting, SHAPE)
    found = []
    for _ in range(5):
        gc.collect()
        held = meter.current()
        _, highest = meter.highest_during(stepper.step)
        found.append((held, highest))
    held, highest = (int(median(values)) for values in zip(*found[2:], strict=True))
    return held, highest
