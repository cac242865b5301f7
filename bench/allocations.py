"""The meter of allocated bytes: a small library preloaded into the measuring processes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from .preload import NoCompilerError, preloaded

__all__ = ["Meter", "NoCompilerError", "preloaded_meter"]
T = TypeVar("T")


def preloaded_meter() -> AbstractContextManager[None]:
    """Processes started inside can make a `Meter`."""
    return preloaded(Path(__file__).with_name("allocations.c"))


class Meter:
    """Bytes that this process has allocated since the meter was made, on all its threads."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("allocations_current", "allocations_highest"):
            getattr(self._library, name).restype = ctypes.c_long
        self._base = int(self._library.allocations_current())

    def current(self) -> int:
        """Bytes allocated now."""
        return int(self._library.allocations_current()) - self._base

    def highest_during(self, action: Callable[[], T]) -> tuple[T, int]:
        """What ``action()`` gives, and the most bytes that were allocated meanwhile."""
        self._library.allocations_start_phase()
        result = action()
        return result, int(self._library.allocations_highest()) - self._base
