"""Reductions under way beside the computation, of all units of a tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from .gradient import Reduction, ReductionLanes
from .joint import JOINT_BYTES
from .reducer import Contribution, GradientReducer, reduce_together
from .slot import Slot


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
        self._joint: list[Contribution] = []
        """Of small units, to be reduced together."""
        self._joint_bytes = 0

    def start(
        self,
        reducer: GradientReducer,
        slots: Sequence[Slot],
        gradients: list[torch.Tensor | None],
        lanes: ReductionLanes,
        joins: bool = False,
    ) -> None:
        """Reduce ``gradients`` (emptied) of ``slots`` beside the computation.

        Args:
            reducer: of their group.
            slots: parameters.
            gradients: of each of them.
            lanes: that communicate.
            joins: whether to wait, if possible, for more that is reduced with them: alike on all ranks.
        """
        one = reducer.contribution(slots, gradients) if joins else None
        if one is None or (self._joint and self._joint[0].alike != one.alike):
            self.start_joint(lanes)
        if one is None:
            self.make_room()
            if (reduction := reducer.reduce(slots, gradients, lanes)) is not None:
                self.add(reduction)
            return
        self._joint.append(one)
        self._joint_bytes += one.nbytes
        if self._joint_bytes >= JOINT_BYTES:
            self.start_joint(lanes)

    def start_joint(self, lanes: ReductionLanes) -> None:
        """Reduce what waits for more."""
        joint, self._joint, self._joint_bytes = self._joint, [], 0
        if joint:
            self.make_room()
            self.add(reduce_together(joint, lanes))

    def make_room(self) -> None:
        """Release the oldest, so that no more than the limit hold what they send once another is added, and finish all
        that are summed over replicas but as many."""
        while len(self._scattering) >= self.limit:
            replicates = self._release_oldest()
            self._finish_all_but(self.limit if replicates else 0)

    def add(self, reduction: Reduction) -> None:
        """Let ``reduction`` run beside the computation."""
        self._scattering.append(reduction)

    def finish(self, lanes: ReductionLanes) -> None:
        """Wait for all of them, and deliver their shards."""
        self.start_joint(lanes)
        while self._scattering:
            self._release_oldest()
        self._finish_all_but(0)
        while self._landing:
            self._landing.popleft().land()

    def abandon(self) -> None:
        """Wait for all of them, and drop their shards."""
        self._joint, self._joint_bytes = [], 0
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
