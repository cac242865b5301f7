"""Tensors with fewer rows than ranks: what is held, sent and padded in a huge world, as equations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench.counts import OperationCounter
from bench.model import Shape, Transformer, loss_of, make_tokens
from shardwise import fully_shard
from shardwise.core.layout import ALIGNMENT
from shardwise.core.root import unit_of

from .test_memory import live_bytes

Mesh = Callable[..., DeviceMesh]
WORLD_SIZE = 1024
SHAPE = Shape(blocks=3, width=64, batch=1, length=4)


def build(mesh: DeviceMesh) -> Transformer:
    model = Transformer(SHAPE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def buffers_of(module: nn.Module) -> list[object]:
    unit = unit_of(module)
    assert unit is not None
    return [buffer for group in unit.groups for buffer in group.shards.buffers]


@pytest.mark.parametrize("rank", [0, 63, 64, 191, 192, 1023])
def test_a_rank_holds_its_rows_and_nothing_else(fake_mesh: Mesh, rank: int) -> None:
    model = build(fake_mesh(WORLD_SIZE, rank=rank))
    for block in model.blocks:
        rows = [parameter[rank : rank + 1].numel() for parameter in _whole(block)]
        assert sum(buffer.local.numel() for buffer in buffers_of(block)) == sum(rows)  # type: ignore[attr-defined]
        assert [parameter.to_local().numel() for parameter in block.parameters()] == rows  # type: ignore[operator]
    loss_of(model, make_tokens(SHAPE)).backward()
    for block in model.blocks:
        held = {p.grad.to_local().untyped_storage().data_ptr() for p in block.parameters() if p.grad.to_local().numel()}  # type: ignore[union-attr, operator]
        assert len(held) <= 1


def _whole(block: nn.Module) -> list[torch.Tensor]:
    return [torch.empty(parameter.shape, device="meta") for parameter in block.parameters()]


def test_gathered_buffers_are_as_large_as_the_parameters(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(WORLD_SIZE))
    for block in model.blocks:
        numel = sum(-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in block.parameters())
        assert sum(buffer.layout.full_numel for buffer in buffers_of(block)) == numel  # type: ignore[attr-defined]


def test_a_block_is_gathered_and_reduced_by_one_sum_each(fake_mesh: Mesh) -> None:
    model, tokens = build(fake_mesh(WORLD_SIZE)), make_tokens(SHAPE)
    loss_of(model, tokens).backward()
    model.zero_grad()
    before = live_bytes(model)
    with OperationCounter() as counter:
        loss_of(model, tokens).backward()
    # The root saves less by it than another collective costs, and is gathered once.
    assert counter.counts == {"all-reduces": 3 * SHAPE.blocks, "gathers": 1, "reductions": 1}
    numel = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    flags = sum(1 for block in model.blocks for _ in block.parameters())
    sent = counter.bytes_by_kind["all-reduces"] * WORLD_SIZE / (2 * (WORLD_SIZE - 1))
    assert sent == 4 * (3 * numel + flags)
    model.zero_grad()
    assert live_bytes(model) == before


def test_gradients_lie_as_the_parameters_do(fake_mesh: Mesh) -> None:
    """So that an optimizer on flat shards steps a unit as one tensor."""
    model = build(fake_mesh(WORLD_SIZE))
    loss_of(model, make_tokens(SHAPE)).backward()
    for block in model.blocks:
        shards = [(p.to_local(), p.grad.to_local()) for p in block.parameters()]  # type: ignore[operator, union-attr]
        assert len({own.data_ptr() - gradient.data_ptr() for own, gradient in shards if own.numel()}) == 1


def test_small_worlds_are_gathered_as_ever(fake_mesh: Mesh) -> None:
    model, tokens = build(fake_mesh(8)), make_tokens(SHAPE)
    with OperationCounter() as counter:
        loss_of(model, tokens).backward()
    assert counter.counts["all-reduces"] == 0
