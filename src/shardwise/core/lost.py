"""Writes to gathered parameters during forward, which the shards never get."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from .device import local_of, unwrapped, without_torch_function
from .group import ParamGroup
from .slot import Slot


class LostWrites:
    """Tells of a forward that writes to gathered parameters, which are thrown away: torch FSDP2 says nothing.

    For few forwards: to compare version counters each time costs as much as the rest of a unit's hooks.

    Args:
        groups: of a unit.
    """

    def __init__(self, groups: Sequence[ParamGroup]):
        self._groups = groups
        self._before: dict[Slot, list[tuple[int, int]]] = {}
        self._evaluated = False

    def enter(self) -> None:
        """Forward begins, with gathered parameters."""
        self._before = self._stamps()

    def leave(self) -> bool:
        """Forward is over; gives whether it was the first with gradients, or the second without, so that it is known
        what forwards do."""
        after = self._stamps()
        if written := [slot.name for slot, stamp in self._before.items() if after.get(slot, stamp) != stamp]:
            warnings.warn(
                f"unit {self._groups[0].name!r}: forward wrote to {', '.join(map(repr, written))} in place. Its shards "
                "do not get what is written to gathered parameters, so it is lost with them: write to the parameters "
                "between forward and backward passes, or compute with a changed copy (nn.Embedding: without max_norm)",
                stacklevel=2,
            )
        is_over = self._evaluated or torch.is_grad_enabled()
        self._evaluated = True
        return is_over

    def _stamps(self) -> dict[Slot, list[tuple[int, int]]]:
        with without_torch_function():
            return {
                slot: [(face._version, _address(face)) for face in slot.faces]
                for group in self._groups
                for slot in group.slots
                if not slot.buffer.is_identity and not any(face.is_inference() for face in slot.faces)
            }


def _address(face: torch.Tensor) -> int:
    """Where its elements are, which an assignment to ``data`` changes; 0 of a subclass."""
    own = unwrapped(local_of(face))
    return own.data_ptr() if type(own) in (torch.Tensor, nn.Parameter) else 0
