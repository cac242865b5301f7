"""Exceptions where a test wants them."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch


@contextmanager
def interrupted(name: str, after: int, of: Callable[[Any], bool] = lambda _: True) -> Iterator[list[int]]:
    """Raise a KeyboardInterrupt in the function with this qualified ``name``, after so many lines of it, if it is a
    method ``of`` such objects; gives a list that then has an item."""
    lines, raised, entered = after, list[int](), set[tuple[int, int]]()

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line" and not raised:
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
                if (id(frame), frame.f_lineno) in entered:
                    return in_function  # Python looks for signals in a context, or once it was left, not in between
                entered.add((id(frame), frame.f_lineno))
            lines -= 1
            if lines < 0:
                raised.append(frame.f_lineno)
                raise KeyboardInterrupt
        return in_function

    def anywhere(frame: FrameType, *_: Any) -> Any:
        return in_function if frame.f_code.co_qualname == name and of(frame.f_locals.get("self")) else None

    before = sys.gettrace()
    sys.settrace(anywhere)
    try:
        yield raised
    finally:
        sys.settrace(before)
    assert torch._C._is_torch_function_enabled()
