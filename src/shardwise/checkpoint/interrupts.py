"""Interrupts (Ctrl-C, handlers of signals that raise) within what ranks do together: they wait until the ranks can be
told. Most come while a rank waits in a collective; raised there, they would leave it at another step than its peers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Signals:
    """Of this process."""

    def __init__(self) -> None:
        self.are_held = False
        self.pending: list[int] = []
        self.handlers: dict[int, Callable[..., Any]] = {}
        """The program's own, by number, where `note` stands in for them."""

    def note(self, number: int, frame: Any) -> None:
        """Let a signal wait; the second one of a kind does not."""
        if self.are_held and number not in self.pending:
            self.pending.append(number)
        else:
            self.handlers[number](number, frame)

    def deliver(self) -> None:
        """Hand over all that wait, whatever the handlers raise."""
        if self.pending:
            try:
                signal.raise_signal(self.pending.pop(0))
            finally:
                self.deliver()


_signals = _Signals()
_note = _signals.note


@contextmanager
def held() -> Iterator[None]:
    """Inside, and outside of `let_in`, Python's signal handlers wait until the end. Only the main thread runs them."""
    if threading.current_thread() is not threading.main_thread() or _signals.are_held:
        yield
        return
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    own: dict[int, Callable[..., Any]] = {n: h for n, h in found.items() if callable(h) and h is not _note}
    _signals.handlers.update(own)
    for number in own:
        signal.signal(number, _note)
    _signals.are_held = True
    try:
        yield
    finally:
        _signals.are_held = False
        for number, handler in own.items():
            if signal.getsignal(number) is _note:  # else somebody has set another one inside
                signal.signal(number, handler)
        _signals.deliver()


@contextmanager
def let_in() -> Iterator[None]:
    """Inside, for one step of one rank, signals reach their handlers, those that waited first; within `held`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _signals.are_held = False
    try:
        _signals.deliver()
        yield
    finally:
        _signals.are_held = True
