"""Whole tensors dealt to ranks, and the runs that they travel in: invariants for any sizes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layout import WholeLayout, deal, whole

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=30)
MOST_RANKS = 5


def nothing(world_size: int) -> list[tuple[int, int]]:
    return [(0, 0)] * world_size


@given(SIZES, st.integers(1, 9), st.data())
def test_each_goes_to_the_rank_that_holds_least(sizes: list[int], world_size: int, data: st.DataObject) -> None:
    weighs = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    owners, loads = deal(sizes, weighs, nothing(world_size))
    held = [0] * world_size
    for size, counts, owner in zip(sizes, weighs, owners, strict=True):
        assert held[owner] == min(held)
        if counts:
            # Among equals the first, whatever frozen tensors were dealt before.
            assert owner == held.index(min(held))
            held[owner] += size
    assert [load for load, _ in loads] == held
    assert sum(tensors for _, tensors in loads) == weighs.count(False)


@given(SIZES, st.integers(1, 9))
def test_no_rank_holds_more_than_the_mean_and_one_tensor(sizes: list[int], world_size: int) -> None:
    _, loads = deal(sizes, [True] * len(sizes), nothing(world_size))
    assert max(elements for elements, _ in loads) <= sum(sizes) / world_size + max(sizes)


@given(SIZES, st.integers(1, 9))
def test_frozen_tensors_take_turns(sizes: list[int], world_size: int) -> None:
    """As FairScale deals them while nothing else was dealt."""
    owners, _ = deal(sizes, [False] * len(sizes), nothing(world_size))
    assert owners == [index % world_size for index in range(len(sizes))]


@given(SIZES, SIZES, st.integers(1, 9), st.booleans())
def test_dealing_goes_on_where_it_stopped(first: list[int], second: list[int], world_size: int, trained: bool) -> None:
    """Param groups dealt one after the other are dealt as one, and nothing moves when one is added."""
    owners, loads = deal(first, [trained] * len(first), nothing(world_size))
    more, after = deal(second, [True] * len(second), loads)
    weighs = [*([trained] * len(first)), *([True] * len(second))]
    assert ([*owners, *more], after) == deal([*first, *second], weighs, nothing(world_size))


def test_frozen_tensors_do_not_move_trained_ones() -> None:
    owners, loads = deal([100, 5, 5], [False, True, True], nothing(2))
    assert owners == [0, 0, 1]
    assert loads == [(5, 1), (5, 0)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[WholeLayout, list[int], list[bool], list[int]]:
    sizes = draw(SIZES)
    count, world_size = len(sizes), draw(st.integers(1, MOST_RANKS))

    def some(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=count, max_size=count))

    owners, kinds = some(st.integers(0, world_size - 1)), some(st.integers(0, 2))
    alone = [bool(flag) for flag in some(st.integers(0, 1))]
    limits = draw(st.lists(st.integers(0, 80), min_size=3, max_size=3))
    return whole(sizes, owners, kinds, alone, limits), kinds, alone, limits


@given(layouts())
def test_runs(drawn: tuple[WholeLayout, list[int], list[bool], list[int]]) -> None:
    layout, kinds, alone, limits = drawn
    members = [index for run in layout.runs for index in run.tensors]
    assert sorted(members) == [index for index, size in enumerate(layout.sizes) if size]
    for run in layout.runs:
        assert list(run.tensors) == sorted(run.tensors)
        assert run.sizes == tuple(layout.sizes[index] for index in run.tensors)
        assert {layout.owners[index] for index in run.tensors} == {run.owner}
        (kind,) = {kinds[index] for index in run.tensors}
        if len(run.tensors) > 1:
            assert sum(run.sizes) <= limits[kind]
            assert not any(alone[index] for index in run.tensors)
    # In the order in which they are complete.
    assert [run.tensors[-1] for run in layout.runs] == sorted(run.tensors[-1] for run in layout.runs)
    owned = [layout.owned(rank) for rank in range(MOST_RANKS)]
    assert sorted(itertools.chain(*owned)) == list(range(len(layout.sizes)))
    assert layout.most_owned == max(map(len, owned))


@given(SIZES, st.integers(1, 5), st.integers(1, 80))
def test_no_two_runs_in_a_row_would_fit_in_one(sizes: list[int], world_size: int, limit: int) -> None:
    owners, _ = deal(sizes, [True] * len(sizes), nothing(world_size))
    layout = whole(sizes, owners, [0] * len(sizes), [False] * len(sizes), [limit])
    for rank in range(world_size):
        packed = [run for run in layout.runs if run.owner == rank and sum(run.sizes) <= limit]
        by_start = sorted(packed, key=lambda run: run.tensors[0])
        for run, after in itertools.pairwise(by_start):
            assert sum(run.sizes) + after.sizes[0] > limit


def test_a_limit_of_nothing_sends_each_by_itself() -> None:
    layout = whole([3, 0, 5, 1], [0, 0, 1, 0], [0] * 4, [False] * 4, [0])
    assert [run.tensors for run in layout.runs] == [(0,), (2,), (3,)]


def test_many_tensors_in_a_huge_world_in_an_instant() -> None:
    sizes = [1 + index % 7 for index in range(5000)]
    owners, _ = deal(sizes, [True] * len(sizes), nothing(4096))
    layout = whole(sizes, owners, [0] * len(sizes), [False] * len(sizes), [10**6])
    assert len(layout.runs) == 4096
