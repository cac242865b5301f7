"""Methods that others hold without keeping their objects alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Any) -> Callable[..., Any]:
    """What calls ``method``, a bound one, as long as its object exists, and does nothing then."""
    reference, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return None if alive is None else function(alive, *args, **kwargs)

    return call
