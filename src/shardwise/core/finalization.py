"""Iterations that the program ends, and no backward: pipeline schedules reduce gradients as a step of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed.fsdp as torch_fsdp

from .context import FSDPCommContext
from .device import eager, in_backward
from .errors import StateError

if TYPE_CHECKING:
    from .hooks import Unit

_TorchHandle: type = getattr(torch_fsdp, "GradientReductionHandle", object)  # from torch 2.15 on


class GradientReductionHandle(_TorchHandle):  # type: ignore[misc]
    """What `FSDPModule.finalize_backward` with ``async_op=True`` gives."""

    def __init__(self, context: FSDPCommContext, units: Iterable[Unit]):
        self._context, self._units = context, tuple(dict.fromkeys(units))
        self._is_under_way = False

    def start(self) -> None:
        """Start the reductions; nothing before the first forward.

        Raises:
            StateError: if no iteration can be ended now.
        """
        context = self._context
        if not context.passes:
            return
        if context.is_in_backward or in_backward():
            raise StateError("finalize_backward() was called before backward was over")
        if context.finalization is not None:
            raise StateError("finalize_backward(): call wait() before on what the last one with async_op=True gave")
        if not (context.ends_by_hand if context.begun_by_hand is None else context.begun_by_hand):
            raise StateError("finalize_backward() ends an iteration only after set_manual_backward_finalization(True)")
        for unit in self._units:
            if any(group.gradients.leaves_partial_sums() for group in unit.groups):
                raise StateError(
                    f"finalize_backward(): gradients of unit {unit.name!r} would not be all-reduced; call "
                    "set_requires_all_reduce(True) before its backward passes"
                )
        context.start_finishing(self._units)
        context.finalization, self._is_under_way = self, True

    @eager
    def wait(self) -> None:
        """Wait for the gradients, and end the iteration.

        Raises:
            RuntimeError: if they were dropped since by `FSDPModule.reset_iter_state`.
        """
        if not self._is_under_way:
            return
        if self._context.finalization is not self:
            raise StateError("the reductions that finalize_backward() started were dropped by reset_iter_state()")
        self._is_under_way = False
        self._context.finish_iteration(self._units)


def end_by_hand(context: FSDPCommContext, enabled: bool) -> None:
    """Whether `GradientReductionHandle` ends the iterations of ``context``, and no backward.

    Raises:
        StateError: if a backward of this iteration has begun with another setting.
    """
    begun = context.ends_by_hand if context.begun_by_hand is None and in_backward() else context.begun_by_hand
    if begun not in (None, enabled):
        raise StateError(
            f"set_manual_backward_finalization({enabled}): a backward of this iteration has begun otherwise; call it "
            "before the first one, or after finalize_backward() or reset_iter_state()"
        )
    context.ends_by_hand = enabled


def end_at_once(context: FSDPCommContext, units: Iterable[Unit]) -> None:
    """End the iteration of ``units``, for the pipeline schedules of torch before 2.15."""
    units = tuple(dict.fromkeys(units))
    context.start_finishing(units)
    context.finish_iteration(units)
