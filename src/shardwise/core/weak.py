"""Methods that others hold without keeping their objects alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Any) -> Callable[..., Any]:
    """What calls ``method``, a bound one, as long as its object exists, and does nothing then."""
    # By name, since the class of a unit changes once a profiler runs.
    reference, name = weakref.ref(method.__self__), method.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return None if alive is None else getattr(alive, name)(*args, **kwargs)

    return call
