"""Trees of units: which modules belong to a unit, and what becomes of the units when the outermost one is known."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from torch import nn

from .context import FSDPCommContext
from .device import eager, is_replicated_by_torch, outside_transforms
from .errors import StateError
from .group import ParamGroup, ShardState
from .joint import JOINT_BYTES, JointGather
from .lanes import device_for

if TYPE_CHECKING:
    from .hooks import Unit

MANY = 16
"""Small units in a model, from which on it pays to communicate for several at once: few hide behind the computation."""
MOST_FIRSTS = 6
"""Units of a batch that may be the first to need it, or half as many of a short one: one in forward, one in backward,
and where recomputation begins, or a layer is left out."""
UNIT = "_shardwise_unit"
"""The attribute of a wrapped module that is its unit."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a module was wrapped as, if it was."""
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit


def units_of(*models: nn.Module) -> list[Unit]:
    """The units of ``models`` and of the modules in them, each once, outer ones first."""
    modules = (module for model in models for module in model.modules())
    return list(dict.fromkeys(unit for module in modules if (unit := unit_of(module)) is not None))


def set_unit(module: nn.Module, unit: Unit) -> None:
    """``module`` was wrapped as ``unit``."""
    module.__dict__[UNIT] = unit


def is_never_called(module: nn.Module) -> bool:
    """Whether it only contains others, so that nothing would gather the parameters of a unit of it."""
    return isinstance(module, CONTAINERS) and type(module).forward is nn.Module.forward


def managed_modules(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Modules below ``roots`` that no other unit has, children first, with their names relative to their root; none
    that torch's ``replicate`` has."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    for index, root in enumerate(roots):
        _visit(str(index) if len(roots) > 1 else "", root, found, seen)
    return found


def _visit(name: str, module: nn.Module, found: list[tuple[str, nn.Module]], seen: set[int]) -> None:
    if id(module) in seen or is_replicated_by_torch(module):
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        if unit_of(child) is None:
            _visit(f"{name}.{child_name}" if name else child_name, child, found, seen)
    found.append((name, module))


@eager
def make_root(root: Unit) -> FSDPCommContext:
    """Make ``root`` the outermost unit of its tree: one context, full names, and its own default for resharding.

    Raises:
        StateError: if a unit inside was told of iterations that the program ends, which are the root's.
    """
    named = [pair for module in root.modules for pair in module.named_modules()]
    units = units_of(*root.modules)
    for name, module in named:
        unit = unit_of(module)
        # Not where that is another root's, which shares the unit.
        if unit is not None and unit.is_root and unit.iteration.ends_by_hand and unit.iteration is not root.iteration:
            raise StateError(
                f"set_manual_backward_finalization(True) was called on {name!r} and does not hold for the whole tree: "
                "call it on the root, and with False there"
            )
    known = dict.fromkeys(unit.context for unit in units if unit.has_context)
    # A given one has its root already if this was interrupted.
    context = next((one for one in known if not one.has_root or one.outermost is root.reference), None)
    if context is None:
        context = FSDPCommContext(root.device.type)
        if context.device.torch_device != root.device:
            context.use_device(device_for(root.device))
    for other in known:  # inner units may have been told while they were the outermost known
        context.reductions.limit = max(context.reductions.limit, other.reductions.limit)
    for unit in units:
        context.join(unit)
    for unit in units:
        if unit is not root:
            unit.join(context, is_root=False, iteration=context.iteration)
    _name_units(named)
    locate_units(root)
    _make_batches(root, units)
    context.joins_small = context.joins_small or any(unit.batch is not None for unit in units)
    for unit in units:
        for group in unit.groups:
            if group.state is ShardState.SHARDED:
                group.adopt_for_use()
    # Last, since all this is done again, should it be interrupted, for a root without context.
    context.has_root = True
    root.join(context, is_root=True, iteration=context.iteration)
    context.outermost = None
    return context


def locate_units(root: Unit) -> None:
    """Note where in the model of ``root`` its units are."""
    found: set[Unit] = set()
    for top in root.modules:
        for name, module in top.named_modules():
            if (unit := unit_of(module)) is not None and unit not in found:
                found.add(unit)
                unit.location = weakref.ref(top), name.split(".") if name else ()


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


class FreedBatch(Batch):
    """Of units whose parameters are freed between uses, so that all ranks use the same ones. All that it has is sent
    each time, also where it is there already: as little as ranks may know differently is to decide what is sent.

    It parts if ever more of its units are the first that need a gather: they do not run one after the other then, and
    each would send for all. That is counted as gathers start, which all ranks start alike; units that run would not do,
    as an exception may keep one rank from some that need no gather.
    """

    def __init__(self, root: weakref.ref[Unit]):
        super().__init__(root)
        self._firsts: set[weakref.ref[Unit]] = set()

    @outside_transforms
    def gather(
        self, first: Unit, needing: Sequence[ParamGroup], *, for_backward: bool = False, is_hint: bool = False
    ) -> None:
        """See `Batch.gather`."""
        context = first.context
        members = [group for unit in self for group in unit.groups if group.joins]
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
        self._start(joint, context)
        self._firsts.add(first.reference)
        if len(self._firsts) > max(MOST_FIRSTS // 2, min(MOST_FIRSTS, len(self._members) // 2)):
            self.part()


def _make_batches(root: Unit, units: Sequence[Unit]) -> None:
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
    following: KeptBatch | None = None
    joins = {unit: unit.is_small and (keeps or (unit.frees_alike and unit is not root)) for unit in units}
    for run in reversed(_runs(joins, sizes)):
        if keeps:
            batch: Batch = (following := KeptBatch(root.reference, following))
        elif joins[run[0]]:
            batch = FreedBatch(root.reference)
        else:
            continue
        for unit in run:
            batch.append(unit)
            unit.batch = batch


def _runs(joins: Mapping[Unit, bool], sizes: Mapping[Unit, int]) -> list[Sequence[Unit]]:
    """All units in order: neighbours that join, or one that does not."""
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


def _name_units(named: Sequence[tuple[str, nn.Module]]) -> None:
    names: dict[Unit, list[str]] = {}
    known: dict[nn.Module | None, str] = {}
    for name, module in named:
        known.setdefault(module, f"{name}." if name else "")
        if (unit := unit_of(module)) is not None:
            names.setdefault(unit, []).append(name)
    for unit, own in names.items():
        if unit.given_name is not None:
            continue
        unit.rename(", ".join(own))
        for group in unit.groups:
            for slot in group.slots:
                places = ((place.module(), place.name) for place in slot.sharded_places)
                slot.name = next((known[module] + last for module, last in places if module in known), slot.name)
                slot.buffer.use_name(slot.index, slot.name)
