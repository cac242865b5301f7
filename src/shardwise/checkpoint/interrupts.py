"""Python's handlers of signals (Ctrl-C, preemption) within what ranks do together: they wait until it is done.

Most come while a rank waits in a collective. What a handler raises there would leave the rank at another step than its
peers, and so would what it saves there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_holders: set[int] = set()
"""Ids of the processes whose main thread is inside of `held`: this one, or those that it was forked from."""


@contextmanager
def held() -> Iterator[None]:
    """Inside, Python's signal handlers wait until the end. Only a second Ctrl-C does not wait, if it raises
    KeyboardInterrupt. In other threads than the main one, which runs no handlers, nothing changes."""
    process, came, is_over = os.getpid(), list[int](), False
    if threading.current_thread() is not threading.main_thread() or process in _holders:
        yield
        return
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    own: dict[int, Callable[..., Any]] = {number: handler for number, handler in found.items() if callable(handler)}

    def note(number: int, frame: Any) -> None:
        is_urgent = number in came and own[number] is signal.default_int_handler
        if is_over or is_urgent or os.getpid() != process:
            own[number](number, frame)
        else:
            came.append(number)

    def end(number: int) -> None:
        if signal.getsignal(number) is note:  # else somebody has set another one inside
            signal.signal(number, own[number])
        if number in came:
            own[number](number, sys._getframe())

    with ExitStack() as stack:  # goes on with the others, whatever a handler raises
        for number in own:
            stack.callback(end, number)
            signal.signal(number, note)
        _holders.add(process)
        try:
            yield
        finally:
            is_over = True
            _holders.discard(process)
