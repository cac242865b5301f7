"""The order in which units compute, recorded to know which to gather next. Only ever a hint: never correctness."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """Forward order of the last pass, and the order of this iteration's forwards for its backward.

    Holds weak references, so that it never keeps a model alive.
    """

    def __init__(self) -> None:
        self._last: list[weakref.ref[T]] = []
        self._now: list[weakref.ref[T]] = []
        self._matches = False
        self._backward: list[weakref.ref[T]] = []

    def start_pass(self) -> None:
        """A forward pass begins: what the last one did is expected again."""
        if self._now:
            self._last = self._now
        self._now = []
        self._matches = bool(self._last)

    def starts_again(self, unit: weakref.ref[T]) -> bool:
        """Whether ``unit`` was the first of the current pass; tells passes apart where no root does."""
        return bool(self._now) and self._now[0] is unit

    def enter(self, unit: weakref.ref[T]) -> T | None:
        """``unit`` runs forward now; gives the one expected next, None when the order is not the recorded one."""
        position = len(self._now)
        self._now.append(unit)
        if self._matches:
            self._matches = position < len(self._last) and self._last[position] is unit
        if not self._matches or position + 1 >= len(self._last):
            return None
        return self._last[position + 1]()

    @property
    def matches(self) -> bool:
        """Whether the current pass follows the recorded one so far."""
        return self._matches

    def record_for_backward(self, unit: weakref.ref[T]) -> int:
        """``unit`` will take part in backward; gives its position."""
        self._backward.append(unit)
        return len(self._backward) - 1

    def before(self, position: int) -> T | None:
        """The unit that ran forward before ``position``: the one expected next in backward."""
        return self._backward[position - 1]() if 0 < position <= len(self._backward) else None

    def clear_backward(self) -> None:
        """Backward is over."""
        self._backward.clear()

    def forget(self) -> None:
        """Nothing is known of the order any more."""
        self._last, self._now, self._backward, self._matches = [], [], [], False
