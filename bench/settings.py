"""A training step in other settings than the default, each next to what torch FSDP2 has for it."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise

from .contenders import FSDP2, MIXED_PRECISION, SHARDWISE
from .model import Shape, Transformer, loss_of, make_tokens
from .ranks import BenchError, run_on_gloo
from .report import Table, number, ratio
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
        mesh: ranks by axis.
        micro_batches: backward passes of a step.
        reduces_each: whether each of them reduces.
    """

    title: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = (2,)
    micro_batches: int = 1
    reduces_each: bool = True


KEPT = {"reshard_after_forward": False}
MIXED = {"mp_policy": MIXED_PRECISION}
SETTINGS = (
    Setting("the default: ZeRO-3, float32"),
    Setting("parameters bfloat16, reductions float32", MIXED, MIXED),
    Setting("ZeRO-2; FSDP2 keeps parameters after forward", {"placements": "zero2"}, KEPT),
    Setting("ZeRO-1; FSDP2 keeps parameters after forward", {"placements": "zero1"}, KEPT),
    Setting(f"{MICRO_BATCHES} micro-batches, each reduced", micro_batches=MICRO_BATCHES),
    Setting(f"{MICRO_BATCHES} micro-batches, the last reduces", micro_batches=MICRO_BATCHES, reduces_each=False),
    Setting("HSDP on 4 processes: replicate 2, shard 2", mesh=(2, 2)),
)


def setting_tables(quick: bool) -> list[Table]:
    """One table."""
    rounds = 3 if quick else 10
    columns = ["setting", "shardwise ms", "± ms", "FSDP2 ms", "± ms", "shardwise / FSDP2's"]
    table = Table(f"Step on gloo processes: {SHAPE}", columns)
    for index, setting in enumerate(SETTINGS):
        world_size = functools.reduce(lambda a, b: a * b, setting.mesh)
        by_rank = run_on_gloo(world_size, LIMIT, measure, index, 2, rounds)
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
        f"AdamW. {rounds} rounds after 2 of warm-up; a round is one step of each, the slowest rank counts; ± is half "
        "the distance between the quartiles; the ratio is the median over rounds.",
        f"both reported the same loss to within {LOSS_TOLERANCE:g} nats.",
    )
    table.chart = "shardwise / FSDP2's"
    return [table]


def measure(index: int, warm_up: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """On one rank: seconds and loss of each engine's steps in setting ``index``."""
    setting = SETTINGS[index]
    actions: dict[str, Callable[[], tuple[float, float]]] = {
        SHARDWISE: _stepper(setting, shardwise.fully_shard, setting.ours),
        FSDP2: _stepper(setting, torch_fully_shard, setting.theirs),
    }
    gc.collect()
    gc.freeze()
    return interleave(actions, warm_up, rounds)


def _stepper(setting: Setting, verb: Any, options: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    torch.manual_seed(1)
    model: Any = Transformer(SHAPE)
    mesh = init_device_mesh("cpu", setting.mesh, mesh_dim_names=("replicate", "shard")[-len(setting.mesh) :])
    for block in model.get_submodule("blocks").children():
        verb(block, mesh=mesh, **options)
    verb(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return functools.partial(_timed_step, setting, model, optimizer, make_tokens(SHAPE))


def _timed_step(setting: Setting, model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    for number_ in range(setting.micro_batches):
        is_last = number_ == setting.micro_batches - 1
        model.set_requires_gradient_sync(setting.reduces_each or is_last)
        model.set_is_last_backward(is_last)
        loss = loss_of(model, tokens)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, loss.item()
