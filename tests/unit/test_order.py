"""The recorded order as a hint."""

from __future__ import annotations

import weakref

from shardwise.core.order import ExecutionOrder


class Thing:
    pass


def references(count: int) -> tuple[list[Thing], list[weakref.ref[Thing]]]:
    things = [Thing() for _ in range(count)]
    return things, [weakref.ref(thing) for thing in things]


def test_second_pass_expects_the_first() -> None:
    things, (a, b, c) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    order.start_pass()
    assert [order.enter(unit) for unit in (a, b, c)] == [None, None, None]
    order.start_pass()
    assert [order.enter(unit) for unit in (a, b, c)] == [things[1], things[2], None]


def test_a_mismatch_ends_the_guessing_until_the_next_pass() -> None:
    things, (a, b, c) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    for _ in range(2):
        order.start_pass()
        for unit in (a, b, c):
            order.enter(unit)
    order.start_pass()
    assert order.enter(a) is things[1]
    assert order.enter(c) is None
    assert not order.matches
    assert order.enter(b) is None
    order.start_pass()
    assert order.enter(a) is things[2]


def test_backward_goes_back_by_position() -> None:
    things, (a, b, _) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    positions = [order.record_for_backward(unit) for unit in (a, b, a)]
    assert [order.before(position) for position in reversed(positions)] == [things[1], things[0], None]
    order.clear_backward()
    assert order.before(2) is None


def test_nothing_is_kept_alive() -> None:
    things, (a, b) = references(2)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    for _ in range(2):
        order.start_pass()
        order.enter(a)
        order.enter(b)
    del things[:]
    order.start_pass()
    assert order.enter(a) is None
