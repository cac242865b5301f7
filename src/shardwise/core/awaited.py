"""Calls of a unit's forward whose backward is to come."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

from .device import runs_in_this_backward


class AwaitedCalls:
    """Calls of one unit's forward whose backward has yet to come, by the number of the forward pass that they were in.

    A recomputation (reentrant checkpointing) is a pass of its own, with a negative number: backward may go through it
    or not, so that nothing else waits for it.
    """

    def __init__(self) -> None:
        self._recomputations = 0
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._nodes: dict[int, weakref.ref[Any]] = {}
        """Of each pass the autograd node that ends the backward of its first call whose inputs require gradients."""

    def number_recomputation(self) -> int:
        """A number of its own for the pass that a recomputation is."""
        self._recomputations += 1
        return -self._recomputations

    def add(self, forward_pass: int, node: Any) -> None:
        """A call begins; ``node`` ends its backward, or None, where nothing tells before the end of all backward."""
        self._counts[forward_pass] += 1
        if node is not None:
            self._nodes.setdefault(forward_pass, weakref.ref(node))

    def end(self, forward_pass: int) -> bool:
        """The backward of a call is over. Gives whether this backward goes on to another call, of the same pass or not:
        autograd adds up the gradients of all before it gives any.

        Of a pass whose inputs require no gradients that is not known before the end of this backward.
        """
        self._counts[forward_pass] -= 1
        if self._counts[forward_pass] > 0:
            return True
        for other, count in self._counts.items():
            if other > 0 and count > 0:
                if (reference := self._nodes.get(other)) is None:
                    return True
                node = reference()
                if node is not None and runs_in_this_backward(node):
                    return True
        return False

    def forget(self) -> None:
        """The iteration's last backward is over: none waits for calls that took no part in it, unless their graph still
        exists, which may have a backward of its own."""
        for number, count in [*self._counts.items()]:
            node = self._nodes.get(number)
            if count <= 0 or node is None or node() is None:
                del self._counts[number]
                self._nodes.pop(number, None)

    def clear(self) -> None:
        """No backward is to come."""
        self._counts.clear()
        self._nodes.clear()
