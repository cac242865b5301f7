"""A stand-in for a process group, for where nothing is communicated."""

from __future__ import annotations


class DummyProcessGroup:
    """A process group that only knows its size: for building a model without processes, or at world size 1; also what
    an unpickled instance has until ``process_group`` is set.

    Args:
        rank: of this process, from 0.
        size: number of ranks.

    Raises:
        ValueError: if ``rank`` is not in ``range(size)``.
    """

    def __init__(self, rank: int, size: int):
        if not 0 <= rank < size:
            raise ValueError(f"DummyProcessGroup(rank={rank}, size={size}): the rank must be in range({size})")
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """The rank of this process."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size
