"""Reductions under way beside the computation, of all units of a tree."""

from __future__ import annotations

from collections import deque

from .gradient import Reduction


class PendingReductions:
    """Reductions that were started and have not delivered their shards.

    Each holds what it sends until its scatter is over, is then summed over replicas, if there are any, and its result
    may have to be read by the host: three queues, which all pass in the order in which they were started.
    """

    def __init__(self) -> None:
        self.limit = 1
        """How many may hold what they send; as many more may be summed over replicas."""
        self._scattering: deque[Reduction] = deque()
        self._replicating: deque[Reduction] = deque()
        self._landing: deque[Reduction] = deque()

    def make_room(self) -> None:
        """Release the oldest, so that no more than the limit hold what they send once another is added, and finish all
        that are summed over replicas but as many."""
        while len(self._scattering) >= self.limit:
            replicates = self._release_oldest()
            self._finish_all_but(self.limit if replicates else 0)

    def add(self, reduction: Reduction) -> None:
        """Let ``reduction`` run beside the computation."""
        self._scattering.append(reduction)

    def finish(self) -> None:
        """Wait for all of them, and deliver their shards."""
        while self._scattering:
            self._release_oldest()
        self._finish_all_but(0)
        while self._landing:
            self._landing.popleft().land()

    def abandon(self) -> None:
        """Wait for all of them, and drop their shards."""
        for pending in (self._replicating, self._scattering, self._landing):
            while pending:
                pending.popleft().abandon()

    def _release_oldest(self) -> bool:
        reduction = self._scattering.popleft()
        reduction.release()
        self._replicating.append(reduction)
        return reduction.replicates

    def _finish_all_but(self, count: int) -> None:
        while len(self._replicating) > count:
            reduction = self._replicating.popleft()
            reduction.finish()
            if reduction.lands:
                self._landing.append(reduction)
