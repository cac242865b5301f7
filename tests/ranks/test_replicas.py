"""What ranks are told that hold different values where those should be the same."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.core.replicas import sum_of_bits

from .harness import on_ranks

WIDTH = 6


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))


def in_turn() -> None:
    """Let the last rank be the last to come to what follows."""
    dist.barrier()
    time.sleep(0.5 * (dist.get_rank() == dist.get_world_size() - 1))


def warned(messages: list[warnings.WarningMessage], words: str) -> list[str]:
    return [text for one in messages if words in (text := str(one.message))]


def told_of_replicas(placements: str, seed: int, *, steps: int = 2) -> list[str]:
    """What a rank is told while it trains a model that it made with ``seed``."""
    world_size = dist.get_world_size()
    mesh: Any = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    if placements == "ddp":
        mesh = init_device_mesh("cpu", (world_size,))
    model = model_of(seed)
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, placements=placements)
    fully_shard(model, mesh=mesh, placements=placements)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            in_turn()
            model(torch.ones(2, WIDTH)).sum().backward()
    return warned(caught, "replicas train different models")


@on_ranks(2, 4, placements=["ddp", "zero3"])
def test_replicas_that_begin_with_other_values(placements: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_other = rank >= world_size // 2 if placements == "zero3" else rank == world_size - 1
    told = told_of_replicas(placements, seed=int(is_other))
    assert len(told) <= 1
    if rank == world_size - 1:  # knows, since it comes last
        other = 0 if placements == "ddp" else world_size // 2 - 1
        assert f"rank {other} has other values than rank {rank} in units 'Sequential (root)', '0', '1'. " in told[0]


@on_ranks(2, 4, placements=["ddp", "zero3"])
def test_replicas_that_begin_alike(placements: str) -> None:
    assert told_of_replicas(placements, seed=0) == []


@on_ranks(2)
def test_one_element_of_a_replica_is_enough() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = model_of(0)
    for layer in model:
        fully_shard(layer, mesh=mesh, placements="ddp")
    fully_shard(model, mesh=mesh, placements="ddp")
    if dist.get_rank():
        with torch.no_grad():
            model[1].bias[3] += 1e-6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_turn()
        model(torch.ones(2, WIDTH)).sum().backward()
    told = warned(caught, "replicas train different models")
    assert not dist.get_rank() or "in units '1'. " in told[0], told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.uint8])
@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("numel", [0, 1, 3, 8, 33])
def test_one_bit_changes_the_sum(dtype: torch.dtype, start: int, numel: int) -> None:
    whole = torch.arange(64).to(dtype)
    part = whole[start : start + numel]
    before = sum_of_bits([part])
    assert before == sum_of_bits([part.clone()])  # wherever in memory that is
    for element in range(numel):
        changed = whole.clone()
        changed.view(torch.uint8)[(start + element) * dtype.itemsize] ^= 1
        assert sum_of_bits([changed[start : start + numel]]) != before


@on_ranks(2)
def test_replicas_of_frozen_units_may_differ() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = model_of(0)
    model[1] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # of another generator's state
    if dist.get_rank():
        with torch.no_grad():
            model[1].weight.mul_(2)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, placements="ddp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_turn()
        model(torch.ones(2, WIDTH)).sum().backward()
    assert warned(caught, "replicas train different models") == []
