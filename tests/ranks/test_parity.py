"""Bitwise equality with torch FSDP2 at world size 2, closeness elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise
from shardwise import Placements

from ..models import build, inputs_for, wrap
from .harness import on_ranks

BF16 = torch.bfloat16


def train(model: nn.Module, steps: int = 5, clip: Any = None) -> dict[str, list[torch.Tensor]]:
    """Losses, gradient norms and whole parameters of some AdamW steps; each rank sees its own data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        x = inputs_for(getattr(model, "original", model), seed=100 * step + dist.get_rank())
        loss = model(x).float().square().mean()
        loss.backward()
        norm = (clip or torch.nn.utils.clip_grad_norm_)(model.parameters(), 1.0)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return {"losses": losses, "norms": norms, "parameters": whole, "buffers": list(model.buffers())}


def assert_same(ours: dict[str, list[torch.Tensor]], theirs: dict[str, list[torch.Tensor]]) -> None:
    for kind in ours:
        for index, (a, b) in enumerate(zip(ours[kind], theirs[kind], strict=True)):
            if dist.get_world_size() <= 2:
                assert torch.equal(a, b), f"{kind}[{index}]: {(a - b).abs().max()}"
            else:
                torch.testing.assert_close(a, b)


@on_ranks(
    1,
    2,
    3,
    4,
    model=["mlp", "transformer", "conv"],
    param_dtype=[None, BF16],
    reduce_dtype=[None, torch.float32, BF16],
    reshard=[True, False],
)
def test_like_fsdp2(model: str, param_dtype: Any, reduce_dtype: Any, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    options = {"mp_policy": policy, "reshard_after_forward": reshard}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = train(wrap(build(model), shardwise.fully_shard, mesh=mesh, **options), clip=shardwise.clip_grad_norm_)
    theirs = train(wrap(build(model), torch_fully_shard, mesh=mesh, **options))
    assert_same(ours, theirs)


@on_ranks(1, 2, 3, 4, model=["mlp", "transformer", "conv"], preset=["ddp", "zero1", "zero2", "zero3"])
def test_presets_agree(model: str, preset: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = train(
        wrap(build(model), shardwise.fully_shard, mesh=mesh, placements=getattr(Placements, preset)),
        clip=shardwise.clip_grad_norm_,
    )
    theirs = train(wrap(build(model), torch_fully_shard, mesh=mesh))
    assert_same(ours, theirs)
