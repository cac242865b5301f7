"""Attributes that are another value for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def changing(objects: Sequence[Any], name: str, value: Any) -> Iterator[None]:
    """Inside, attribute ``name`` of each of ``objects`` is ``value``."""
    before = [getattr(one, name) for one in objects]
    for one in objects:
        setattr(one, name, value)
    try:
        yield
    finally:
        for one, own in zip(objects, before, strict=True):
            setattr(one, name, own)
