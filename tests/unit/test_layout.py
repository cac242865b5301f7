"""Layouts against `torch.chunk`, and their invariants at world sizes up to 16,384."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layout import ALIGNMENT, Layout, for_gradients, per_parameter

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def check(layout: Layout) -> None:
    """No two tensors overlap in either order, and what is left over is counted as padding."""
    local = sorted((t.local_offset, t.chunk_numel) for t in layout.tensors)
    for (start, size), (after, _) in itertools.pairwise(local):
        assert start + size <= after
    assert max(start + size for start, size in local) <= layout.local_numel
    full = sorted((t.full_offset, t.chunk_numel * t.world_size) for t in layout.tensors)
    for (start, size), (after, _) in itertools.pairwise(full):
        assert start + size <= after
    owned = sum(math.prod(t.local_shape(rank)) for t in layout.tensors for rank in range(layout.world_size))
    assert owned == sum(t.numel for t in layout.tensors)
    assert layout.padding == layout.local_numel * layout.world_size - owned


@given(SHAPES, st.integers(1, 9), st.data())
def test_chunks_are_those_of_torch(shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject) -> None:
    packed = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    layout = per_parameter(shapes, [0] * len(shapes), world_size, packed)
    check(layout)
    for shape, tensor in zip(shapes, layout.tensors, strict=True):
        chunks = torch.arange(math.prod(shape)).view(shape).chunk(world_size)
        for rank in range(world_size):
            expected = chunks[rank].shape if rank < len(chunks) else (0, *shape[1:])
            assert tensor.local_shape(rank) == tuple(expected)
            if rank < len(chunks):
                assert tensor.start(rank) == sum(len(chunk) for chunk in chunks[:rank])
        assert tensor.full_offset % ALIGNMENT == 0


@given(SHAPES, st.integers(2, 9))
def test_packed_tensors_are_one_run_at_the_start(shapes: list[tuple[int, ...]], world_size: int) -> None:
    packed = [index % 2 == 0 for index in range(len(shapes))]
    layout = per_parameter(shapes, [0] * len(shapes), world_size, packed)
    for tensor, flag in zip(layout.tensors, packed, strict=True):
        assert tensor.packed == flag
        inside = tensor.local_offset + tensor.chunk_numel <= layout.packed_numel
        assert inside == flag or tensor.chunk_numel == 0


@given(SHAPES)
def test_one_rank_has_local_and_gathered_in_the_same_places(shapes: list[tuple[int, ...]]) -> None:
    layout = per_parameter(shapes, [0] * len(shapes), 1)
    check(layout)
    assert layout.local_numel == layout.full_numel
    assert all(t.local_offset == t.full_offset and not t.packed for t in layout.tensors)


def test_other_dims_are_cut_there_and_always_packed() -> None:
    layout = per_parameter([(3, 8), (5, 2)], [1, 0], 4)
    cut, plain = layout.tensors
    assert [cut.local_shape(rank) for rank in range(4)] == [(3, 2)] * 4
    assert cut.packed
    assert not plain.packed
    check(layout)


def test_gradients_are_tight_even_on_one_rank() -> None:
    layout = for_gradients([(3,), (5, 2)], [0, 0], 1, [True, True])
    assert layout.local_numel == layout.packed_numel == 13


def test_huge_worlds_in_an_instant() -> None:
    for world_size in (1024, 16_384):
        layout = per_parameter([(4096, 1024), (100, 7), (1,)], [0, 0, 0], world_size)
        big, small, single = layout.tensors
        assert big.length(0) == -(-4096 // world_size)
        assert sum(small.length(rank) for rank in range(world_size)) == 100
        assert small.length(world_size - 1) == 0
        assert single.length(0) == 1
        assert single.length(1) == 0
        assert layout.local_numel == big.chunk_numel + 7 + 1
