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
    assert [enter(order, unit) for unit in (a, b, c)] == [None, None, None]
    order.start_pass()
    assert [enter(order, unit) for unit in (a, b, c)] == [things[1], things[2], None]


def enter(order: ExecutionOrder[Thing], unit: weakref.ref[Thing]) -> Thing | None:
    """What is expected after ``unit``, which is gathered."""
    order.gathers = True
    order.enter(unit)
    return next(order.ahead(), None)


def run(order: ExecutionOrder[Thing], *units: weakref.ref[Thing]) -> tuple[list[Thing | None], bool]:
    """One pass: what was expected after each unit, and whether all of it ran."""
    order.start_pass()
    return [enter(order, unit) for unit in units], order.matches


def test_a_pass_that_gathers_nothing_tells_nothing() -> None:
    """One rank may run it alone."""
    things, (a, b, c) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    for gathered in ((a, b, c), (a, b, c)):
        run(order, *gathered)
    for alone in ((b,), (c, a), (a, c, b)):
        order.start_pass()
        for unit in alone:
            order.enter(unit)
        order.end_pass()
    assert run(order, a, b, c) == ([things[1], things[2], None], True)


def test_everything_that_follows_is_expected_as_far_as_passes_agree() -> None:
    things, (a, b, c, d) = references(4)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    run(order, a, b, a, c, b, d)
    order.start_pass()
    enter(order, a)
    assert list(order.ahead()) == [things[index] for index in (1, 0, 2, 1, 3)]
    order.enter(b)
    order.enter(a)
    assert list(order.ahead()) == [things[index] for index in (2, 1, 3)]
    order.enter(d)
    assert list(order.ahead()) == []
    order.start_pass()
    order.enter(a)
    assert list(order.ahead()) == [things[1], things[0]]  # what follows the second a is not sure


def test_backward_expects_forward_reversed() -> None:
    things, units = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    positions = [order.record_for_backward(unit) for unit in units]
    assert [list(order.behind(position)) for position in positions] == [[], [things[0]], [things[1], things[0]]]
    del things[0]
    assert [len(list(order.behind(position))) for position in positions] == [0, 0, 1]


def test_where_passes_differ_nothing_is_expected_until_two_agree() -> None:
    things, (a, b, c, d) = references(4)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    run(order, a, b, c, d)
    assert run(order, a, b, c, d) == ([things[1], things[2], things[3], None], True)
    assert run(order, a, c, d) == ([things[1], things[3], None], False)  # only what follows a was wrong
    assert run(order, a, b, c, d) == ([None, things[2], things[3], None], True)
    assert run(order, a, c, d) == ([None, things[3], None], True)
    assert run(order, a, c, d) == ([None, things[3], None], True)
    assert run(order, a, c, d) == ([things[2], things[3], None], True)


def test_units_that_run_several_times_have_several_places() -> None:
    things, (a, b) = references(2)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    run(order, a, b, a, b, b)
    assert run(order, a, b, a, b, b) == ([things[1], things[0], things[1], things[1], None], True)


def test_a_pass_that_ends_early_did_not_run_what_was_expected() -> None:
    things, (a, b, c) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    run(order, a, b, c)
    assert run(order, a, b) == ([things[1], things[2]], False)
    assert run(order, a, b) == ([things[1], None], True)


def test_a_pass_that_goes_on_after_the_expected_end() -> None:
    things, (a, b) = references(2)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    run(order, a)
    run(order, a)
    assert run(order, a, b) == ([None, None], False)
    assert run(order, a, b) == ([None, None], True)
    assert run(order, a, b) == ([things[1], None], True)


def test_a_pass_that_failed_behind_its_units_came_to_its_end_elsewhere() -> None:
    """Also where that was another one than before: it is not sure any more, as on ranks that did not fail."""
    things, (a, b, c) = references(3)
    failing: ExecutionOrder[Thing] = ExecutionOrder()
    going_on: ExecutionOrder[Thing] = ExecutionOrder()
    for order in (failing, going_on):
        run(order, a, b, c)
        run(order, a, b, c)
        run(order, a, b)
    failing.end_pass(failed=True)
    failing.abandon()
    going_on.end_pass()
    for order in (failing, going_on):
        assert run(order, a, b, c) == ([things[1], None, None], True)
        order.end_pass()
        assert run(order, a, b, c) == ([things[1], None, None], True)
        order.end_pass()
        assert run(order, a, b, c) == ([things[1], things[2], None], True)


def test_behind_a_unit_that_failed_others_went_on() -> None:
    things, (a, b, c) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    run(order, a, b, c)
    run(order, a, b)
    order.note_failure()
    order.end_pass(failed=True)
    order.abandon()
    assert run(order, a, b, c) == ([things[1], things[2], None], True)
    order.end_pass()
    run(order, a, b)
    order.note_failure()  # what ran around it went on
    order.end_pass()
    assert run(order, a, b) == ([things[1], None], True)


def test_backward_goes_back_by_position() -> None:
    things, (a, b, _) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    positions = [order.record_for_backward(unit) for unit in (a, b, a)]
    expected = [next(order.behind(position), None) for position in reversed(positions)]
    assert expected == [things[1], things[0], None]
    order.clear_backward()
    assert list(order.behind(2)) == []


def test_backward_does_not_go_on_to_forwards_whose_backward_is_over() -> None:
    things, (a, b, _) = references(3)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    earlier = [order.record_for_backward(unit) for unit in (a, b)]
    order.end_backward()
    later = [order.record_for_backward(unit) for unit in (a, b)]
    assert [list(order.behind(position)) for position in later] == [[], [things[0]]]
    # A pipeline may run forwards ahead, and their backward in turn.
    assert [list(order.behind(position)) for position in earlier] == [[], [things[0]]]
    order.clear_backward()
    assert [order.record_for_backward(unit) for unit in (a, b)] == earlier
    assert list(order.behind(1)) == [things[0]]


def test_backward_is_expected_in_as_many_passes_as_the_last_came_to() -> None:
    """Ranks whose forwards raised, in different units or at all, expect the same of the passes after."""
    things, (a, b) = references(2)
    order: ExecutionOrder[Thing] = ExecutionOrder()

    def passes(count: int) -> list[list[Thing]]:
        positions = []
        for _ in range(count):
            order.start_pass()
            positions += [order.record_for_backward(unit) for unit in (a, b)]
        return [list(order.behind(position)) for position in reversed(positions)]

    own, before = [[things[0]], []], [[things[index] for index in indices] for indices in ((0, 1, 0), (1, 0))]
    assert passes(2) == own * 2
    order.clear_backward()
    order.start_pass()
    order.record_for_backward(a)  # the rest of it failed
    assert passes(2) == before + own
    order.end_backward()
    assert passes(1) == own
    order.clear_backward()
    passes(1)
    order.abandon()
    assert passes(2) == own * 2


def test_nothing_is_kept_alive() -> None:
    things, (a, b) = references(2)
    order: ExecutionOrder[Thing] = ExecutionOrder()
    for _ in range(2):
        order.start_pass()
        order.enter(a)
        order.enter(b)
    del things[:]
    order.start_pass()
    assert enter(order, a) is None
