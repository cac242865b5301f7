"""Bytes that operators copy in a forward and backward, as equations: casts, and what is too small to be sent alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.counts import CopyCounter
from bench.model import Shape, Transformer, loss_of, make_tokens
from shardwise import fully_shard
from shardwise.core import gradient
from shardwise.core.device import RowSplitter
from shardwise.core.layout import Layout
from shardwise.core.root import unit_of

Mesh = Callable[..., DeviceMesh]
SHAPE = Shape(blocks=2, width=512, batch=1, length=4)


def padded(flags: int) -> int:
    """Numbers for as many parameters of a unit: a multiple of 16 bytes in fp32."""
    return 4 * math.ceil(flags / 4)


def train(mesh: DeviceMesh, **options: Any) -> tuple[Transformer, int]:
    """A model, and the bytes that its third forward and backward copy."""
    model, tokens = Transformer(SHAPE), make_tokens(SHAPE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for _ in range(2):
        loss_of(model, tokens).backward()
        model.zero_grad()
    with CopyCounter() as copies:
        loss_of(model, tokens).backward()
    return model, copies.bytes


def layouts(model: Transformer) -> list[tuple[Layout, int]]:
    """Layout and gathers per step of each unit: the root is not gathered again for backward."""
    found = []
    for module, gathers in [(model, 1), *((block, 2) for block in model.blocks)]:
        unit = unit_of(module)
        assert unit is not None
        [buffer] = [buffer for group in unit.groups for buffer in group.shards.buffers]
        found.append((buffer.layout, gathers))
    return found


def test_a_world_of_one_copies_nothing(fake_mesh: Mesh) -> None:
    assert train(fake_mesh(1))[1] == 0


@pytest.mark.parametrize(("world_size", "preset"), [(1, "zero3"), (4, "ddp"), (4, "zero2"), (4, "zero3")])
def test_outputs_that_are_parameters_are_copied_where_these_are_freed(
    fake_mesh: Mesh, world_size: int, preset: str
) -> None:
    class Gives(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    model = nn.Sequential(Gives(256, 1024))
    mesh = fake_mesh(world_size)
    fully_shard(model[0], mesh=mesh, placements=preset)
    fully_shard(model, mesh=mesh, placements=preset)
    model(torch.ones(1))
    with CopyCounter() as copies:
        model(torch.ones(1))
    small = 4 * 1024
    assert copies.bytes == (4 * 256 * 1024 + small if (world_size, preset) == (4, "zero3") else 0)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_even_shards_are_sent_from_and_to_their_places(fake_mesh: Mesh, world_size: int) -> None:
    model, copied = train(fake_mesh(world_size))
    expected = 0
    for layout, gathers in layouts(model):
        small = sum(tensor.numel for tensor in layout.tensors if tensor.packed)
        flags = world_size * padded(len(layout.tensors))
        expected += 4 * (gathers * small + small + flags)
    assert copied == expected
    assert copied < 0.1 * 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("world_size", [2, 8])
def test_mixed_precision_casts_once_each_way(fake_mesh: Mesh, world_size: int) -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, copied = train(fake_mesh(world_size), mp_policy=precision)
    casts = 0
    for layout, gathers in layouts(model):
        packed = sum(tensor.numel for tensor in layout.tensors if tensor.packed)
        numel, flags = sum(tensor.numel for tensor in layout.tensors), world_size * padded(len(layout.tensors))
        casts += 2 * gathers * (numel // world_size + packed) + 4 * (numel + flags)
    plain = Transformer(SHAPE).to(torch.bfloat16)
    with CopyCounter() as of_the_model:
        loss_of(plain, make_tokens(SHAPE)).backward()
    assert copied == casts + of_the_model.bytes


def test_what_is_padded_is_copied_once(fake_mesh: Mesh) -> None:
    model = nn.Linear(512, 513, bias=False)
    assert gradient.PADDED_BYTES <= 4 * 512 * 513
    fully_shard(model, mesh=fake_mesh(8))
    with CopyCounter() as copies:
        model(torch.randn(1, 512)).sum().backward()
    flags = 8 * padded(1)
    assert copies.bytes == 4 * (512 * 513 + flags)


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    world_size=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_are_torchs(shapes: list[list[int]], world_size: int, dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    sizes = [-(-shape[0] // world_size) * tensor[0].numel() for shape, tensor in zip(shapes, tensors, strict=True)]
    found, expected = torch.full((2, world_size, sum(sizes)), torch.nan, dtype=dtype)
    gradient.pad_chunks(tensors, world_size, found)
    torch._chunk_cat(tensors, 0, world_size, out=expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def gaps_between(sizes: list[int], gaps: list[int], rows: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Targets of ``sizes`` elements a row in one memory, with ``gaps`` elements before each, and that memory."""
    memory, start, targets = torch.zeros(sum(sizes) * rows + sum(gaps) + 1), 0, []
    for size, gap in zip(sizes, gaps, strict=True):
        start += gap
        targets.append(memory[start : start + rows * size].view(rows, size))
        start += rows * size
    return targets, memory


@pytest.mark.parametrize("is_own", [True, False])
@given(
    pieces=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=9),
    rows=st.integers(1, 5),
    repetitions=st.integers(1, 3),
    start=st.integers(0, 2),
)
def test_rows_are_taken_apart(
    is_own: bool, pieces: list[tuple[int, int]], rows: int, repetitions: int, start: int
) -> None:
    sizes, gaps = [[*column] for column in zip(*pieces, strict=True)]
    (targets, memory), (expected, other) = gaps_between(sizes, gaps, rows), gaps_between(sizes, gaps, rows)
    splitter, staging = RowSplitter(targets), torch.empty(start + rows * sum(sizes))[start:]
    for _ in range(repetitions):  # memory that is used again keeps its views
        staging.copy_(torch.randn_like(staging))
        splitter(staging, is_own=is_own)
        for target, piece in zip(expected, staging.view(rows, -1).split(sizes, dim=1), strict=True):
            target.copy_(piece)
        torch.testing.assert_close(memory, other, rtol=0, atol=0)


def test_pieces_at_equal_distances_are_one_copy() -> None:
    targets, _ = gaps_between([2, 2, 4, 4, 4, 4, 4], [0, 0, 0, 1, 1, 5, 5], 3)
    with torch.profiler.profile() as profile:
        RowSplitter(targets)(torch.zeros(3 * 24), is_own=True)
    # Two of 2, three of 4 one apart, and two of 4 five apart.
    assert [event.count for event in profile.key_averages() if event.key == "aten::copy_"] == [3]
