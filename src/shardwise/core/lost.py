"""Writes to gathered parameters during forward, which the shards never get."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from .device import without_torch_function
from .group import ParamGroup
from .slot import Slot


class LostWrites:
    """Tells of a forward that writes to gathered parameters, which are thrown away: torch FSDP2 says nothing.

    For the first forward alone: to compare version counters costs as much as the rest of a unit's hooks.

    Args:
        groups: of a unit.
    """

    def __init__(self, groups: Sequence[ParamGroup]):
        self._groups = groups
        self._before: dict[Slot, int] = {}

    def enter(self) -> None:
        """Forward begins, with gathered parameters."""
        self._before = self._versions()

    def leave(self) -> None:
        """Forward is over."""
        after = self._versions()
        if written := [slot.name for slot, version in self._before.items() if after.get(slot, version) != version]:
            warnings.warn(
                f"unit {self._groups[0].name!r}: forward wrote to {', '.join(map(repr, written))} in place. Its shards "
                "do not get what is written to gathered parameters, so it is lost with them: write to the parameters "
                "between forward and backward passes, or compute with a changed copy (nn.Embedding: without max_norm)",
                stacklevel=2,
            )

    def _versions(self) -> dict[Slot, int]:
        with without_torch_function():
            return {
                slot: sum(face._version for face in slot.faces)
                for group in self._groups
                for slot in group.slots
                if not slot.buffer.is_identity and not any(face.is_inference() for face in slot.faces)
            }
