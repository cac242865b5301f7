"""Which backward ends an iteration; iterations that the program ends, as pipeline schedules do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed.fsdp as torch_fsdp

from .device import eager, in_backward
from .errors import StateError

if TYPE_CHECKING:
    from .hooks import Unit

_TorchHandle: type = getattr(torch_fsdp, "GradientReductionHandle", object)  # from torch 2.15 on


@dataclass(eq=False)
class Iteration:
    """The iteration of one tree of units: one optimizer step's forward and backward passes.

    Args:
        is_last_backward: whether the next backward is the last one.
        ends_by_hand: whether none of them is, and the program calls `FSDPModule.finalize_backward`.
        is_finishing: whether it ends now.
        finalization: what has yet to wait for the last reductions.
    """

    is_last_backward: bool = True
    ends_by_hand: bool = False
    is_finishing: bool = False
    finalization: object | None = None

    @property
    def ends(self) -> bool:
        """Whether the backward that runs, or `finalize_backward`, is the last that reduces."""
        return self.is_finishing or (self.is_last_backward and not self.ends_by_hand)


class GradientReductionHandle(_TorchHandle):  # type: ignore[misc]
    """What `FSDPModule.finalize_backward` with ``async_op=True`` gives."""

    def __init__(self, root: Unit, units: Sequence[Unit]):
        self._root, self._units = root, units
        self._is_under_way = False

    def start(self) -> None:
        """Start the reductions; nothing before the first forward.

        Raises:
            StateError: if the iteration cannot be ended now.
        """
        context, iteration = self._root.context, self._root.iteration
        if not context.passes:
            return
        if context.is_in_backward or in_backward():
            raise StateError(
                "finalize_backward() was called before backward was over, or after an exception stopped it: the next "
                "forward, or reset_iter_state(), drops what that left"
            )
        if iteration.finalization is not None:
            raise StateError("finalize_backward(): call wait() before on what the last one with async_op=True gave")
        if not iteration.ends_by_hand:
            raise StateError("finalize_backward() ends an iteration only after set_manual_backward_finalization(True)")
        for unit in self._units:
            if any(group.gradients.leaves_partial_sums() for group in unit.groups):
                raise StateError(
                    f"finalize_backward(): gradients of unit {unit.title!r} would not be all-reduced; call "
                    "set_requires_all_reduce(True) before its backward passes"
                )
        context.start_finishing(self._units)
        iteration.finalization, self._is_under_way = self, True

    @eager
    def wait(self) -> None:
        """Wait for the gradients, and end the iteration.

        Raises:
            RuntimeError: if they were dropped since by `FSDPModule.reset_iter_state`.
        """
        if not self._is_under_way:
            return
        self._is_under_way = False
        if self._root.iteration.finalization is not self:
            raise StateError("the reductions that finalize_backward() started were dropped by reset_iter_state()")
        self._root.iteration.finalization = None
        self._root.context.finish_iteration(self._units)
