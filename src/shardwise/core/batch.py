"""Batch: small units of a model that are gathered together, since a message costs more than what each sends."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .device import outside_transforms
from .group import ParamGroup
from .joint import JOINT_BYTES, JointGather

if TYPE_CHECKING:
    from .context import FSDPCommContext
    from .hooks import Unit

MANY = 16
"""Small units in a model, from which on it pays to communicate for several at once: few hide behind the computation."""
MOST_FIRSTS = 6
"""Units of a batch that may be the first to need it, or half as many of a short one: one in forward, one in backward,
and where recomputation begins, or a layer is left out."""


class Batch(ABC):
    """Neighbours in a model that are gathered together. What they are depends on the modules alone, neither on the
    order in which they ran, which one rank may forget, nor on what is alive: the garbage collector comes to each rank
    when it likes.

    Args:
        root: of the model.
    """

    def __init__(self, root: weakref.ref[Unit]):
        self.root = root
        self._joints: list[JointGather] = []
        self._members: list[weakref.ref[Unit]] = []

    keeps = False
    """Whether whole parameters are kept."""

    @abstractmethod
    def takes(self, unit: Unit) -> bool:
        """Whether ``unit``, one of its units, is gathered with the others."""

    @abstractmethod
    def note_alone(self, unit: Unit) -> None:
        """``unit``, which it does not take, started to be gathered for forward."""

    @abstractmethod
    def gather(
        self, first: Unit, needing: Sequence[ParamGroup], *, for_backward: bool = False, is_hint: bool = False
    ) -> None:
        """Start gathering for the use of one of its units.

        Args:
            first: the unit.
            needing: its groups that have to be gathered.
            for_backward: that comes now, and not forward.
            is_hint: whether the use is expected only, as one rank may and another may not: what is gathered then must
                be what it will be.
        """

    def append(self, unit: Unit) -> None:
        """``unit`` belongs to it."""
        self._members.append(unit.reference)

    def __iter__(self) -> Iterator[Unit]:
        """The units that are in the model still."""
        for reference in self._members:
            if (unit := reference()) is not None and unit.is_in_model:
                yield unit

    def _start(self, joint: JointGather, context: FSDPCommContext) -> None:
        joint.start()
        self._joints.append(joint)
        context.batches_ahead.append(self)

    @property
    def held_bytes(self) -> int:
        """Of memory that holds what was gathered for its units, some of which have yet to run."""
        self._joints = [joint for joint in self._joints if joint.held_bytes]
        return sum([joint.held_bytes for joint in self._joints])

    def let_go(self, but: Unit | None = None) -> None:
        """Free what was gathered for units that have not run, other than ``but``."""
        if self.held_bytes:
            for unit in self:
                if unit is not but:
                    unit.let_go()

    def part(self) -> None:
        """Let each of its units be gathered by itself from now on."""
        for unit in self:
            unit.batch = None


class KeptBatch(Batch):
    """Of units that keep whole parameters. Those are gathered that have to be: where none has, each rank may run what
    it likes.

    Args:
        root: of the model.
        following: the next one in the model, gathered while this one computes.
    """

    keeps = True

    def __init__(self, root: weakref.ref[Unit], following: KeptBatch | None):
        super().__init__(root)
        self.following = following

    def takes(self, unit: Unit) -> bool:
        """See `Batch.takes`."""
        return True

    def note_alone(self, unit: Unit) -> None:
        """See `Batch.note_alone`."""

    def gather(
        self, first: Unit, needing: Sequence[ParamGroup], *, for_backward: bool = False, is_hint: bool = False
    ) -> None:
        """See `Batch.gather`."""
        if needing:
            self._gather(first.context, needing)
        following = self.following
        if following is not None and first.is_on_its_way and not any(unit.is_on_its_way for unit in following):
            following._gather(first.context)

    @outside_transforms
    def _gather(self, context: FSDPCommContext, needing: Sequence[ParamGroup] = ()) -> None:
        joint = JointGather(context.gather_lane)
        for group in needing:
            group.start_gather(joint.lane, joint=joint if group.joins else None)
        for unit in self:
            unit.join_gather(joint)
        self._start(joint, context)


class Course:
    """The order in which small units start to be gathered for forward over the same ranks, each of which has the same:
    those would wait for each other otherwise. Also where one of them ran more than the others, without gathers."""

    def __init__(self) -> None:
        self.round = 0
        """Changes when something comes that has come since the last change."""
        self.total_bytes = 0
        """Of all that was gathered."""
        self._met: set[Hashable] = set()

    def meet(self, what: Hashable, nbytes: int) -> None:
        """A gather of so many bytes starts for ``what``, a unit or several that go together."""
        if what in self._met:
            self._met.clear()
            self.round += 1
        self._met.add(what)
        self.total_bytes += nbytes


class FreedBatch(Batch):
    """Of units whose parameters are freed between uses, so that all ranks use the same ones. All that go together are
    sent each time, also where they are there already: as little as ranks may know differently is to decide what is
    sent.

    They go together once most of it, by bytes, came one after the other in a round of the course: experts of which few
    run would be sent for nothing. What never came so is gathered alone: what nothing uses, and what runs when all else
    has, as heads may. It parts if ever more of its units are the first that need a gather: each would send for all.
    That is counted as gathers start, which all ranks start alike; units that run would not do, as an exception may keep
    one rank from some that need no gather.

    Args:
        root: of the model.
        course: of the units over its ranks.
    """

    def __init__(self, root: weakref.ref[Unit], course: Course):
        super().__init__(root)
        self._course, self._itself = course, object()
        self._round = course.round
        """That the last unit came in."""
        self._end = 0
        """Bytes of the course up to that unit."""
        self._is_late = False
        """Whether what came in this round was interrupted by more than goes together."""
        self._known: set[weakref.ref[Unit]] = set()
        """Units that came one after the other, when they came last."""
        self._bytes = self._came = self._came_before = 0
        """Of all units; of those that came in this round, and in the last one in which any did."""
        self._goes_together = False
        self._firsts: set[weakref.ref[Unit]] = set()

    def append(self, unit: Unit) -> None:
        """See `Batch.append`."""
        super().append(unit)
        self._bytes += unit.whole_bytes

    def takes(self, unit: Unit) -> bool:
        """See `Batch.takes`."""
        return self._goes_together and unit.reference in self._known

    def note_alone(self, unit: Unit) -> None:
        """See `Batch.note_alone`."""
        between = self._course.total_bytes - self._end
        if not self._come(unit.reference, unit.whole_bytes):
            self._is_late = self._is_late or between > JOINT_BYTES
        if self._is_late:
            self._known.discard(unit.reference)  # whatever was gathered with it would wait for long
        else:
            self._known.add(unit.reference)
            self._came += unit.whole_bytes
        self._goes_together = 2 * self._came_before > self._bytes

    def _come(self, what: Hashable, nbytes: int) -> bool:
        """See `Course.meet`; gives whether it is the first of this batch in a round."""
        self._course.meet(what, nbytes)
        self._end = self._course.total_bytes
        is_new = self._course.round != self._round
        if is_new:
            self._round, self._is_late = self._course.round, False
            self._came, self._came_before = 0, self._came
        return is_new

    @outside_transforms
    def gather(
        self, first: Unit, needing: Sequence[ParamGroup], *, for_backward: bool = False, is_hint: bool = False
    ) -> None:
        """See `Batch.gather`."""
        context = first.context
        units = [unit for unit in self if self.takes(unit)]
        members = [group for unit in units for group in unit.groups if group.joins]
        alone = [group for group in needing if group not in members]
        for group in alone:
            group.start_gather(context.gather_lane)
        takes = [group in needing or group.takes_from_others(for_backward=for_backward) for group in members]
        if len(alone) == len(needing) or (is_hint and not (all(takes) and context.has_room())):
            return
        context.make_room(first)
        joint = JointGather(context.gather_lane)
        for group, is_taken in zip(members, takes, strict=True):
            if is_taken:
                group.start_gather(joint.lane, joint=joint)
                if not for_backward:
                    group.shards.note_gathered(keeps=True)  # as in `KeptBatch`, it may be used long after
            else:
                group.send_with(joint)
        if not for_backward:
            nbytes = sum([unit.whole_bytes for unit in units])
            self._come(self._itself, nbytes)
            self._came = max(self._came, nbytes)
        self._start(joint, context)
        self._firsts.add(first.reference)
        if len(self._firsts) > max(MOST_FIRSTS // 2, min(MOST_FIRSTS, len(self._members) // 2)):
            self.part()


def make_batches(root: Unit, units: Sequence[Unit]) -> None:
    """Divide the ``units`` of a tree into batches, if many are small: runs of neighbours that are, of no more bytes
    than are gathered together; and where all keep whole parameters also the others, one by one."""
    sizes = {unit: unit.whole_bytes for unit in units}
    for unit, size in sizes.items():
        unit.is_small, unit.batch = 0 < size <= JOINT_BYTES // 2, None
    if sum(unit.is_small for unit in units) < MANY:
        return
    keeps = all(unit.keeps_unsharded for unit in units)
    if not keeps and any(unit.prefetch_forward or unit.prefetch_backward for unit in units):
        return  # the user says what is gathered when
    joins = {unit: _joins(unit, root, keeps) for unit in units}
    courses: defaultdict[Hashable, Course] = defaultdict(Course)
    following: KeptBatch | None = None
    for run in reversed(_runs(joins, sizes)):
        if keeps:
            batch: Batch = (following := KeptBatch(root.reference, following))
        elif ranks := joins[run[0]]:
            batch = FreedBatch(root.reference, courses[ranks])
        else:
            continue
        for unit in run:
            batch.append(unit)
            unit.batch = batch


def _joins(unit: Unit, root: Unit, keeps: bool) -> Hashable:
    """None if ``unit`` is gathered by itself; else equal for those that it can be gathered with."""
    if not unit.is_small:
        return None
    if keeps:
        return True
    return tuple([group.mesh.shard for group in unit.groups]) if unit.frees_alike and unit is not root else None


def _runs(joins: Mapping[Unit, Hashable], sizes: Mapping[Unit, int]) -> list[Sequence[Unit]]:
    """All units in order: neighbours that join alike, or one that does not."""
    runs: list[Sequence[Unit]] = []
    for _, neighbours in groupby(joins, lambda unit: joins[unit] or unit):
        several = [*neighbours]
        total = sum([sizes[unit] for unit in several])
        # About as much in each, so that the memory of one serves the next.
        count = -(-total // JOINT_BYTES)
        limit = min(total // max(count, 1) + max([sizes[unit] for unit in several]) - 1, JOINT_BYTES)
        run: list[Unit] = []
        room = limit
        for unit in several:
            if run and sizes[unit] > room:
                runs.append(run)
                run, room = [], limit
            run.append(unit)
            room -= sizes[unit]
        runs.append(run)
    return runs
