"""The order in which units compute, recorded to know which to gather next. Only ever a hint: never correctness."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Next(Generic[T]):
    """What followed a unit's forward last time, and whether it did the time before too, as far as is known."""

    unit: weakref.ref[T] | None
    is_sure: bool


class ExecutionOrder(Generic[T]):
    """What runs forward after what, and the order of this iteration's forwards for its backward.

    A unit that ran several times in a pass has several places. Where two passes differ nothing is expected until two
    agree again, since a wrong guess costs a gather. Holds weak references, so that it never keeps a model alive.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[weakref.ref[T], int], _Next[T]] = {}
        self._before: dict[tuple[weakref.ref[T], int], _Next[T] | None] = {}
        """What was known before the current pass, where that changed it."""
        self.gathers = False
        """Whether something was gathered in the current pass, so that all ranks run it: of others they run what they
        like, which is not to tell what to gather."""
        self._place: tuple[weakref.ref[T], int] | None = None
        self._failed_at: tuple[weakref.ref[T], int] | None = None
        """The place at which the forward of a unit raised in the current pass."""
        self._first: weakref.ref[T] | None = None
        self._runs: defaultdict[weakref.ref[T], int] = defaultdict(int)
        self._matches = True
        self._backward: list[tuple[weakref.ref[T], int]] = []
        """Units by position, each with the number of its pass."""
        self._pass = 0
        """Number of the current pass among those of which some unit takes part in backward."""
        self._came_to: set[int] = set()
        """Passes that the current backward has come to."""
        self._goes_back = 0
        """Through how many passes before the latest of its own the last backward went."""
        self._settled = 0
        """Positions whose backward is over, as far as forward passes tell."""

    def start_pass(self) -> None:
        """A forward pass begins."""
        self.end_pass()
        self._first, self._matches, self.gathers = None, True, False
        if self._backward and self._backward[-1][1] == self._pass:
            self._pass += 1
        self._runs.clear()

    def note_failure(self) -> None:
        """The forward of a unit raised: of the one that was entered last, if nothing else runs after it."""
        self._failed_at = self._place

    def end_pass(self, *, failed: bool = False) -> None:
        """The current pass came to its end, or an exception ended it. Then ranks on which none did gathered nothing
        more, or would wait in vain: it was their end too, unless it came within a unit, behind which they went on."""
        if self._place is not None and not self.gathers:
            self._undo()
        elif self._place is not None and not (failed and self._failed_at == self._place):
            self._follow(None)
        self._place = self._failed_at = None
        self._before.clear()

    def _undo(self) -> None:
        for place, old in self._before.items():
            if old is None:
                self._next.pop(place, None)
            else:
                self._next[place] = old

    def _follow(self, unit: weakref.ref[T] | None) -> None:
        """``unit`` runs after the one at the current place (None: nothing does)."""
        assert self._place is not None
        old = self._next.get(self._place)
        agrees = old is None or old.unit is unit
        if old is None or not (agrees and old.is_sure):
            self._before.setdefault(self._place, old)
            self._next[self._place] = _Next(unit, agrees)
        self._matches = self._matches and (agrees or (old is not None and not old.is_sure))

    def starts_again(self, unit: weakref.ref[T]) -> bool:
        """Whether ``unit`` was the first of the current pass; tells passes apart where no root does."""
        return self._first is unit

    def forget_freed(self) -> None:
        """Some units may be gone, maybe on this rank alone: what is known of them is not looked at again, though a pass
        whose first unit they were goes on."""
        self._next = {place: after for place, after in self._next.items() if place[0]() is not None}
        self._before = {place: old for place, old in self._before.items() if place[0]() is not None}
        for unit in [unit for unit in self._runs if unit() is None]:
            del self._runs[unit]

    def enter(self, unit: weakref.ref[T]) -> None:
        """``unit`` runs forward now."""
        if self._place is not None:
            self._follow(unit)
        else:
            self._first = unit
        self._runs[unit] += 1
        self._place = unit, self._runs[unit]

    def ahead(self) -> Iterator[T]:
        """The units expected to run forward after the current one, the next first."""
        place = self._place
        met: defaultdict[weakref.ref[T], int] = defaultdict(int)
        while place is not None:
            known = self._next.get(place)
            if known is None or not known.is_sure or known.unit is None or (unit := known.unit()) is None:
                return
            yield unit
            met[known.unit] += 1
            place = known.unit, self._runs[known.unit] + met[known.unit]

    @property
    def matches(self) -> bool:
        """Whether everything that was expected in the current pass ran, if it ends here."""
        known = self._next.get(self._place) if self._place is not None else None
        return self._matches and (known is None or not known.is_sure or known.unit is None)

    def record_for_backward(self, unit: weakref.ref[T]) -> int:
        """``unit`` will take part in backward; gives its position."""
        self._backward.append((unit, self._pass))
        return len(self._backward) - 1

    def behind(self, position: int) -> Iterator[T]:
        """The units expected next in backward, which has come to ``position``: those that ran forward before, the last
        first.

        Also where backward went another way the last time: ranks whose backward reaches different units gather alike.
        But not in passes further back than the last backward went: if the forward of a rank has raised, and ranks left
        out that step, they had other passes before, to which no backward comes.
        """
        if not self._backward:
            return
        own = self._backward[min(position, len(self._backward) - 1)][1]
        self._came_to.add(own)
        earliest = min(own, max(self._came_to) - self._goes_back)
        first = self._settled if position >= self._settled else 0
        for index in range(min(position, len(self._backward)) - 1, first - 1, -1):
            reference, number = self._backward[index]
            if number < earliest or (unit := reference()) is None:
                return
            yield unit

    def end_backward(self) -> None:
        """A backward of the iteration is over: those of forwards to come do not go on to the forwards before."""
        self._settled = len(self._backward)
        if self._came_to:
            self._goes_back = max(self._came_to) - min(self._came_to)
            self._came_to.clear()

    def clear_backward(self) -> None:
        """The iteration's last backward is over."""
        self.end_backward()
        self._backward.clear()
        self._settled = 0

    def abandon(self) -> None:
        """The iteration failed: its passes have no backward any more. What they told of the order all ranks know, of
        which others may not have failed."""
        self.end_pass(failed=True)
        self._came_to.clear()
        self.clear_backward()
