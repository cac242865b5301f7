"""Layouts against `torch.chunk`, and their invariants at world sizes up to 16,384."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layout import ALIGNMENT, Layout, for_gradients, over_fewer, per_parameter, worth_thinning

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


def check(layout: Layout) -> None:
    """No two tensors overlap in either order, and every element is some rank's."""
    local = sorted((t.local_offset, t.reserved(0)) for t in layout.tensors)
    for (start, size), (after, _) in itertools.pairwise(local):
        assert start + size <= after
    assert max(start + size for start, size in local) <= layout.local_numel(0)
    full = sorted((t.full_offset, t.full_reserved) for t in layout.tensors)
    for (start, size), (after, _) in itertools.pairwise(full):
        assert start + size <= after
    owned = sum(math.prod(t.local_shape(rank)) for t in layout.tensors for rank in range(layout.world_size))
    assert owned == sum(t.numel for t in layout.tensors)


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
    assert layout.local_numel(0) == layout.full_numel
    assert all(t.local_offset == t.full_offset and not t.packed for t in layout.tensors)


def test_other_dims_are_cut_there_and_always_packed() -> None:
    layout = per_parameter([(3, 8), (5, 2)], [1, 0], 4)
    cut, plain = layout.tensors
    assert [cut.local_shape(rank) for rank in range(4)] == [(3, 2)] * 4
    assert cut.packed
    assert not plain.packed
    check(layout)


@given(SHAPES, st.integers(1, 4), st.integers(1, 4), st.data())
def test_over_fewer_ranks_in_the_same_places(
    shapes: list[tuple[int, ...]], world_size: int, times: int, data: st.DataObject
) -> None:
    dims = [data.draw(st.integers(0, len(shape) - 1)) for shape in shapes]
    # Dims other than the first divide evenly.
    even = [
        tuple(size * times * world_size if at == dim > 0 else size for at, size in enumerate(shape))
        for shape, dim in zip(shapes, dims, strict=True)
    ]
    layout = per_parameter(even, dims, times * world_size)
    fewer = over_fewer(layout, world_size)
    check(fewer)
    for old, new in zip(layout.tensors, fewer.tensors, strict=True):
        assert new.shape == old.shape
        assert new.full_reserved <= old.full_reserved
        assert new.dim in (0, old.dim)
        assert new.dim == 0 or new.is_even


def test_gradients_are_tight_even_on_one_rank() -> None:
    layout = for_gradients([((3,), 0, True, False), ((5, 2), 0, True, False)], 1)
    assert layout.local_numel(0) == layout.packed_numel == 13


def test_huge_worlds_in_an_instant() -> None:
    for world_size in (1024, 16_384):
        layout = per_parameter([(4096, 1024), (100, 7), (1,)], [0, 0, 0], world_size)
        big, small, single = layout.tensors
        assert big.length(0) == -(-4096 // world_size)
        assert sum(small.length(rank) for rank in range(world_size)) == 100
        assert small.length(world_size - 1) == 0
        assert single.length(0) == 1
        assert single.length(1) == 0
        assert layout.local_numel(world_size - 1) == big.chunk_numel + 7 + 1


@given(SHAPES, st.integers(2, 40), st.data())
def test_thin_tensors_are_padded_nowhere(shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))
    packed, thin = data.draw(flags), data.draw(flags)
    layout = per_parameter(shapes, [0] * len(shapes), world_size, packed, thin)
    check(layout)
    for tensor, wanted in zip(layout.tensors, thin, strict=True):
        assert tensor.thin == (wanted and tensor.shape[0] < world_size)
        assert (tensor.full_offset >= layout.full_even_numel) == tensor.thin
        assert not (tensor.thin and tensor.packed)
    for rank in range(world_size):
        owned = [t for t in layout.tensors if t.reserved(rank)]
        ends = sorted((t.local_offset, t.local_offset + t.reserved(rank)) for t in owned)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert sum(end - start for start, end in ends) == layout.local_numel(rank)
        assert all(math.prod(t.local_shape(rank)) == t.reserved(rank) for t in owned if t.thin)


def test_thin_where_padding_would_be_most_of_what_is_sent() -> None:
    shapes = [(64, 192), (600, 8), (64,), (3, 0)]
    assert worth_thinning(shapes, [0] * 4, 1024, 184_320 + 960) == [True, False, True, True]
    assert worth_thinning(shapes, [0] * 4, 1024, 184_320 + 961) == [False] * 4
    assert worth_thinning(shapes, [1, 0, 0, 0], 96, 0) == [False, False, False, True]
