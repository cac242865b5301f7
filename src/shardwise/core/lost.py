"""Writes to gathered parameters, which the shards never get."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from .device import get_version, local_of, unwrapped, without_torch_function
from .group import ParamGroup
from .slot import Slot

MOST_FORWARDS = 2
"""In which writes are looked for, where no backward follows."""


class LostWrites:
    """Tells of writes to gathered parameters, which are thrown away: torch FSDP2 says nothing.

    For few forwards: to compare version counters each time costs as much as the rest of a unit's hooks.

    Args:
        groups: of a unit.
    """

    def __init__(self, groups: Sequence[ParamGroup]):
        self._groups = groups
        self._before: dict[Slot, list[tuple[int, int]]] = {}
        self._forwards = 0

    def enter(self) -> None:
        """Forward begins, with gathered parameters."""
        self.check()
        self._before = self._stamps(self._groups)

    def leave(self) -> bool:
        """Forward is over; gives whether that is enough."""
        after = self._stamps(self._groups)
        written = [slot for slot, stamp in self._before.items() if after.get(slot, stamp) != stamp]
        self._warn("forward wrote to", written)
        self._before = after
        self._forwards += 1
        return self._forwards >= MOST_FORWARDS + torch.is_grad_enabled()

    def check(self) -> None:
        """Forward or backward begins, or parameters are about to be freed: nobody should have written to them since
        they were gathered, or since forward."""
        before, self._before = self._before, {}
        now = self._stamps([group for group in self._groups if group.is_unsharded]) if before else {}
        # Versions alone: users may have freed and gathered them since. Those of faces made anew are not higher.
        written = [slot for slot, stamp in now.items() if _versions(stamp) > _versions(before.get(slot, stamp))]
        self._warn("something wrote, while they were gathered, to", written)

    def _warn(self, who: str, written: Sequence[Slot]) -> None:
        if written:
            warnings.warn(
                f"unit {self._groups[0].name!r}: {who} {', '.join(repr(slot.name) for slot in written)} in place. Its "
                "shards do not get what is written to gathered parameters, so it is lost with them: write to the "
                "parameters after backward or before forward, or compute with a changed copy (nn.Embedding: without "
                "max_norm)",
                stacklevel=2,
            )

    @staticmethod
    def _stamps(groups: Sequence[ParamGroup]) -> dict[Slot, list[tuple[int, int]]]:
        with without_torch_function():
            return {
                slot: [(get_version(face), _address(face)) for face in slot.faces]
                for group in groups
                for slot in group.slots
                if not slot.buffer.is_identity and not any(face.is_inference() for face in slot.faces)
            }


def _versions(stamp: Sequence[tuple[int, int]]) -> list[int]:
    return [version for version, _ in stamp]


def _address(face: torch.Tensor) -> int:
    """Where its elements are, which an assignment to ``data`` changes; 0 of a subclass."""
    own = unwrapped(local_of(face))
    return own.data_ptr() if type(own) in (torch.Tensor, nn.Parameter) else 0
