"""Shards: the sharded parameters of a group, how they are made, and how they are made again when torch code replaces
or moves them."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .buffer import ShardedBuffer, chunk_of
from .device import (
    get_local,
    get_requires_grad,
    get_version,
    local_of,
    make_spec,
    not_inference,
    pins_memory,
    set_local,
    shares_storage,
    spec_of,
    take_hooks,
    without_torch_function,
)
from .errors import StateError
from .extension import PRE, ExtendedBuffer, Surroundings, check_extension, cut_part, is_extended
from .lanes import Ticket
from .layout import Layout, per_parameter, worth_thinning
from .mesh import DataParallelMesh, DataParallelRanks
from .options import GroupPolicy
from .parameter import OwnerReference, adopt_parameter, borrowers, make_sharded_parameter, marks_of, owner_of
from .place import Place, Registry
from .replaced import mark_replaced, remember_successor, retire, successor_of
from .slot import ManagedParameter, Slot
from .step import watch_steps

_is_trained = attrgetter("was_unsharded", "sharded.requires_grad")
"""Of a slot: whether there is an unsharded face that gradients come for, and of the sharded one."""


_PRE = repeat(PRE)
"""For `map`, without a line of Python for each shard."""


class Shards(ABC):
    """The sharded parameters of one group, in one flat buffer for each dtype, and whether they were written.

    Args:
        mesh: ranks and strategy.
        policy: dtypes and memory.
    """

    sees_writes = True
    """Whether every write into a sharded parameter is noticed, also one through ``parameter.data``."""

    def __init__(self, mesh: DataParallelRanks, policy: GroupPolicy):
        watch_steps()
        self.mesh, self.policy = mesh, policy
        self.unit_name = ""
        self.slots: list[Slot] = []
        self.buffers: list[ShardedBuffer] = []
        self.reference: weakref.ref[Shards] = OwnerReference(self)
        self.written_since_wrapping = False
        self.read_by: Ticket | None = None
        """Copies from offloaded shards that may still be under way."""
        self.borrowed: list[Slot] = []
        self._writes = 0
        self._gathered_writes = self._has_values_since = -1
        self._trainable: Sequence[Sequence[Slot]] = ()
        self._trained: list[tuple[bool, bool]] = []
        """What `_trainable` was found from."""
        self._versions: list[int] | None = None

    @property
    @abstractmethod
    def is_adopted(self) -> bool:
        """Whether what is registered is what was taken over."""

    @abstractmethod
    def leave_meta(self) -> None:
        """Give parameters on the meta device memory, as the same parameter objects; they then wait for values, without
        which they are refused in forward."""

    @abstractmethod
    def adopt_registered(self, *, is_loading: bool = False) -> bool:
        """Take over what is registered now, after torch code replaced or moved sharded parameters
        (`nn.Module.to`, `to_empty`, `load_state_dict(assign=True)`).

        Args:
            is_loading: more parameters of the unit may be replaced before its next use.

        Returns:
            Whether buffers were made anew.

        Raises:
            StateError: naming a parameter that is not sharded, or since tied to one that is cut otherwise.
        """

    @abstractmethod
    def put_sharded(self) -> None:
        """Register the sharded faces."""

    @abstractmethod
    def put_unsharded(self) -> None:
        """Register the unsharded faces, which require gradients where the sharded ones do."""

    def gives_unsharded(self) -> bool:
        """Whether names of sharded DTensors give their unsharded faces now."""
        return False

    def replaced(self) -> tuple[str, Any] | None:
        """While the unsharded faces are registered: the name of one in whose place something else is, and that."""
        return None

    @abstractmethod
    def agree_on_gradients(self) -> None:
        """Let the unsharded faces, which are registered, require gradients where the sharded ones do now."""

    @property
    def lost(self) -> Slot | None:
        """One that `Slot.is_lost`, if no forward has made others since."""
        return next((slot for slot in self.slots if slot.is_lost), None)

    def frozen_in_use(self) -> Sequence[Slot]:
        """Slots that were frozen since `agree_on_gradients`, or since the unsharded faces were registered."""
        return ()

    def gradients_as_registered(
        self, slots: Sequence[Slot], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Reduced ``gradients`` of ``slots`` in the shapes of what is registered."""
        return gradients

    # -- Making

    @property
    def _device(self) -> torch.device:
        """Where they are while they have values."""
        return torch.device("cpu") if self.policy.offload else self.mesh.device

    @property
    def _is_pinned(self) -> bool:
        """Whether they are in pinned memory there."""
        return self.policy.offload and self.policy.pin_memory and pins_memory(self._device)

    def _new_buffer(
        self, layout: Layout, dtype: torch.dtype, gathered: torch.dtype, *, on_meta: bool = False
    ) -> ShardedBuffer:
        """A buffer of zeros, which is gathered in dtype ``gathered``."""
        device, pinned = (torch.device("meta"), False) if on_meta else (self._device, self._is_pinned)
        numel = layout.local_numel(self.mesh.shard.rank)
        local = torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned)
        return ShardedBuffer(layout, local, self.mesh.shard, gathered, self.mesh.device)

    def _only_dtype(self, dtypes: Collection[torch.dtype]) -> torch.dtype:
        """The dtype that all parameters of a buffer have now.

        Raises:
            StateError: if there are several.
        """
        if len(dtypes) > 1:
            raise StateError(
                f"parameters of unit {self.unit_name!r} that had one dtype now have {sorted(map(str, dtypes))}: "
                "convert all parameters of a unit alike"
            )
        (dtype,) = dtypes
        return dtype

    # -- Who they are

    def name_of(self, parameter: torch.Tensor) -> tuple[str, str]:
        """Names of a sharded parameter, or of the one that ``parameter`` was detached from, and of its unit."""
        with without_torch_function():
            where = local_of(parameter).data_ptr()
            found = (slot.name for slot in self.slots if local_of(slot.sharded).data_ptr() == where)
            own = (slot.name for slot in self.slots if slot.sharded is parameter)
            return next(own, None) or next(found, "?"), self.unit_name

    def manages(self, place: Place) -> bool:
        """Whether one of these parameters is registered at ``place``."""
        return any(place in slot.places for slot in self.slots)

    def slots_by_face(self) -> dict[int, list[Slot]]:
        """Slots by the ids of their sharded parameters; several where one has that of another."""
        found: dict[int, list[Slot]] = {}
        for slot in self.slots:
            found.setdefault(id(slot.sharded), []).append(slot)
        return found

    def take_borrowed(self) -> None:
        """Copy the values of the parameters that are other slots'."""
        with torch.no_grad(), not_inference():
            for slot in self.borrowed:
                slot.local.copy_(local_of(slot.sharded))

    @property
    def is_meta(self) -> bool:
        """Whether any has no memory."""
        return any(buffer.local.is_meta for buffer in self.buffers)

    @property
    def is_materialized(self) -> bool:
        """Whether all have values."""
        if self._has_values_since == self._writes:
            return True
        borrowed = [local_of(slot.sharded) for slot in self.borrowed]
        if self.is_meta or any(one.is_meta for one in borrowed) or not all(slot.has_values for slot in self.slots):
            return False
        self._has_values_since = self._writes
        return True

    def check_materialized(self) -> None:
        """
        Raises:
            StateError: naming the parameters that are still on the meta device.
        """
        if self.is_materialized:
            return
        names = [
            slot.name
            for slot in self.slots
            if not slot.has_values or slot.buffer.local.is_meta or local_of(slot.sharded).is_meta
        ]
        raise StateError(
            f"unit {self.unit_name!r}: parameters {', '.join(map(repr, names))} are still on the meta device or "
            "without values: before the first forward call shardwise.materialize(model), load a checkpoint, or call "
            "model.to_empty(device=...) and initialize them"
        )

    # -- Whether they are trained

    @property
    def training(self) -> object:
        """Another object once `trainable` found others."""
        return self._trained

    def trainable(self, frozen_since: Collection[Slot] = ()) -> Sequence[Sequence[Slot]]:
        """Slots that gradients may come for, those of the same dtypes together; ``frozen_since`` among them."""
        # Looked up each time: there are ways to change ``requires_grad`` that tell nobody (`detach_`, a write with a
        # history, `swap_tensors`, compiled code).
        with without_torch_function():
            trained = [*map(_is_trained, self.slots)]
        if frozen_since:
            trained = [(was, now or slot in frozen_since) for slot, (was, now) in zip(self.slots, trained, strict=True)]
        if trained != self._trained:
            alike: dict[tuple[torch.dtype, torch.dtype], list[Slot]] = {}
            for slot, (was_unsharded, requires_grad) in zip(self.slots, trained, strict=True):
                if was_unsharded and requires_grad:
                    alike.setdefault((slot.buffer.local.dtype, slot.buffer.dtype), []).append(slot)
            self._trainable, self._trained = [*alike.values()], trained
        return self._trainable

    # -- Whether they changed

    def mark_stale(self) -> None:
        """They may have changed: kept unsharded ones must be gathered again."""
        self._writes += 1

    def note_write(self) -> None:
        """One of them is about to be written."""
        self._writes += 1
        self.written_since_wrapping = True
        if self.read_by is not None:
            self.read_by.synchronize()
            self.read_by = None

    def note_gather(self) -> None:
        """They are being gathered as they are now."""
        self._gathered_writes = self._writes

    @property
    def was_gathered(self) -> bool:
        """Whether they ever were: so on all ranks or none."""
        return self._gathered_writes >= 0

    @property
    def is_outdated(self) -> bool:
        """Whether they may have changed since the last gather began, as far as anybody told."""
        return self._writes != self._gathered_writes

    def note_gathered(self, *, keeps: bool) -> None:
        """They were gathered; ``keeps`` says whether `changed` will be asked."""
        self._versions = self._written() if keeps else None

    def stamp(self) -> tuple[int, ...]:
        """A value that differs once they are written."""
        return self._writes, *self._written()

    def watch(self) -> None:
        """`changed` will be asked."""
        if self._versions is None:
            self._versions = self._written()

    def changed(self) -> bool:
        """Whether they were written since they were gathered last."""
        return self.is_outdated or (self._versions is not None and self._versions != self._written())

    def _written(self) -> list[int]:
        """Version counters of all that they can be written through."""
        # Not from a list made once: others may replace local tensors, and swap parameters.
        with without_torch_function():  # otherwise each look at a sharded parameter is a call into Python
            shards = [slot.sharded for slot in self.slots]
            memory = [one for buffer in self.buffers for one in buffer.local_memory]
            try:
                locals_ = [*map(get_local, shards)]
            except AttributeError:  # plain tensors
                locals_ = [*map(local_of, shards)]
            return [*map(get_version, shards), *map(get_version, locals_), *map(get_version, memory)]


class ParameterShards(Shards):
    """Parameters that are each cut on one dim, as DTensors.

    Args:
        parameters: what to shard; their registered places get the sharded parameters.
        mesh: ranks and strategy.
        policy: dtypes and memory.
    """

    mesh: DataParallelMesh

    def __init__(self, parameters: Sequence[ManagedParameter], mesh: DataParallelMesh, policy: GroupPolicy):
        super().__init__(mesh, policy)
        self._waits_for_others = False
        """Whether only some of the parameters of a unit have been loaded."""
        self._faces: list[tuple[Registry, str, nn.Parameter, nn.Parameter]] = []
        """For each place its registry and name, and what is registered there: sharded, and unsharded."""
        self._unsharded: list[nn.Parameter] = []
        """The unsharded face of each slot; none where they have to be made."""
        self._required: list[bool] = []
        """Whether each of them required gradients, when that was looked at last."""
        self._registered: list[tuple[Registry, str]] = []
        self._extended: list[bool] = []
        """Of the local tensor of each sharded face whether it said, when it was taken over, how it is gathered."""
        self._sharded: list[nn.Parameter] = []
        """The sharded face of each slot."""
        self._taken_over: tuple[list[nn.Parameter], list[torch.Tensor]] = [], []
        """What was registered at those places, and the local tensors of the sharded faces."""
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[ManagedParameter]] = defaultdict(list)
        extended = [self._cut_extended(parameter) for parameter in parameters]  # may raise, when none is replaced yet
        for parameter, buffer in zip(parameters, extended, strict=True):
            if buffer is None:
                dtype = parameter.value.dtype
                by_dtype[dtype, self._gather_dtype(dtype, parameter)].append(parameter)
            else:
                self.buffers.append(buffer)
                self._add_slot(parameter, buffer, 0, buffer.local)
        with torch.no_grad(), not_inference():
            for (dtype, gathered), members in by_dtype.items():
                self._add_buffer(dtype, gathered, members)
        order = {id(parameter.places[0]): position for position, parameter in enumerate(parameters)}
        self.slots.sort(key=lambda slot: order[id(slot.places[0])])
        self._note_registered()
        for index, parameter in enumerate(parameters):
            remember_successor(parameter.value, self.reference, index)
            retire(parameter.value)

    def _gather_dtype(self, dtype: torch.dtype, of: ManagedParameter | Slot) -> torch.dtype:
        return dtype if of.keeps_dtype else self.policy.gather_dtype(dtype)

    def _layout(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int], gathered: torch.dtype) -> Layout:
        comm, itemsize = self.mesh.shard, gathered.itemsize
        cuts = per_parameter(shapes, dims, comm.size).tensors
        packed = [comm.packs(cut.chunk_numel * itemsize) for cut in cuts]
        # What is cut anew over a smaller world needs room for that one's padding.
        least = math.inf if self.policy.reshard_to is not None else comm.thin_from_bytes / itemsize
        return per_parameter(shapes, dims, comm.size, packed, worth_thinning(shapes, dims, comm.size, least))

    def _add_buffer(self, dtype: torch.dtype, gathered: torch.dtype, members: Sequence[ManagedParameter]) -> None:
        layout = self._layout([tuple(m.local.shape) for m in members], [m.dim for m in members], gathered)
        on_meta = all(member.value.is_meta for member in members)
        buffer = self._new_buffer(layout, dtype, gathered, on_meta=on_meta)
        self.buffers.append(buffer)
        for index, (member, tensor) in enumerate(zip(members, layout.tensors, strict=True)):
            view = buffer.local_view(index)
            waits = member.value.is_meta and not on_meta
            if waits:  # others of the unit have values: it has memory already, and does not show it
                view = torch.empty_like(view, device="meta")
            elif not on_meta:
                view.copy_(chunk_of(tensor, member.local, self.mesh.shard.rank))
            slot = self._add_slot(member, buffer, index, view)
            slot.has_values, slot.face_is_meta = not waits, waits

    def _add_slot(self, member: ManagedParameter, buffer: ShardedBuffer, index: int, local: torch.Tensor) -> Slot:
        """Register the sharded face of ``member`` around ``local``."""
        own = make_spec(self.mesh.mesh, self.mesh.placements(member.dim), member.value)
        spec = own if member.parallel is None else member.parallel.sharded
        sharded = make_sharded_parameter(local, spec, member.value.requires_grad, self.reference)
        sharded.__dict__.update(marks_of(member.value))
        take_hooks(sharded, member.value)
        slot = Slot(member.name, member.places, buffer, index, sharded, member.parallel, member.keeps_dtype)
        counts_writes = member.value.is_meta and member.parallel is None and not member.value.is_inference()
        slot.lost_writes = counts_writes and get_version(member.value) > 0
        self.slots.append(slot)
        for place in member.places:
            place.put(sharded)
        return slot

    # -- Those that say themselves how they are gathered

    def _cut_extended(self, member: ManagedParameter) -> ExtendedBuffer | None:
        """``member`` cut by the operators of its class; None if this rank's part does not say how it is gathered."""
        value = local_of(member.value)
        if not is_extended(value):
            return None
        with torch.no_grad(), not_inference():
            layout = per_parameter([tuple(value.shape)], [member.dim], self.mesh.shard.size)
            local = cut_part(value, layout.tensors[0], self.mesh.shard.rank)
            if not is_extended(local):
                return None
            if not local.is_meta:
                local = local.to(self._device)
                local = local.pin_memory() if self._is_pinned else local
            return self._extended_buffer(layout, local, member)

    def _extended_buffer(self, layout: Layout, local: torch.Tensor, of: ManagedParameter | Slot) -> ExtendedBuffer:
        """A buffer of one parameter, around this rank's part; raises what `check_extension` does."""
        check_extension(of.name, local, reshards_to_smaller=self.policy.reshard_to is not None)
        gathered = self._gather_dtype(local.dtype, of)
        around = Surroundings(of.name, of.places[0], self.mesh.shard_axis, self.policy.precision)
        return ExtendedBuffer(layout, local, self.mesh.shard, gathered, self.mesh.device, around)

    def _sort_by_extension(self, is_loading: bool) -> bool:
        """Take parameters that got extensions out of the buffers that they share with others; gives whether any did."""
        left: dict[ShardedBuffer, None] = {}
        for slot in self.slots:
            registered = slot.registered()
            local = local_of(registered)
            if isinstance(registered, DTensor) and is_extended(local) and not isinstance(slot.buffer, ExtendedBuffer):
                layout = per_parameter([slot.layout.shape], [slot.layout.dim], self.mesh.shard.size)
                left[slot.buffer] = None
                slot.buffer = self._extended_buffer(layout, local, slot)
                slot.index = 0
                slot.forget_unsharded()
                self.buffers.append(slot.buffer)
        for old in left:
            rest = [slot for slot in self.slots if slot.buffer is old]
            parameters = [slot.registered() for slot in rest]
            if rest:
                self._rebuild(old, rest, parameters, [*map(local_of, parameters)], is_loading)
            else:
                self.buffers.remove(old)
        return bool(left)

    # -- The two faces

    def put_sharded(self) -> None:
        self._note_required()
        for registry, name, sharded, _ in self._faces:
            registry[name] = sharded

    def put_unsharded(self) -> None:
        self._require_gradients()  # `put_sharded` noted what was frozen before
        for registry, name, _, unsharded in self._faces:
            registry[name] = unsharded

    def gives_unsharded(self) -> bool:
        return any(registry.get(name) is unsharded for registry, name, _, unsharded in self._faces)

    def replaced(self) -> tuple[str, Any] | None:
        for registry, name, _, unsharded in self._faces:
            if (now := registry.get(name)) is unsharded or now is None:  # who removes a parameter gets it back
                continue
            slot = next(slot for slot in self.slots if slot.unsharded is unsharded)
            with without_torch_function():
                # The unsharded face of another slot that it is tied to is no other parameter.
                if slot.is_another(now) and successor_of(now) is not slot.sharded:
                    return slot.name, now
        return None

    @property
    def lost(self) -> Slot | None:
        return None if self._unsharded else super().lost

    def agree_on_gradients(self) -> None:
        """See `Shards.agree_on_gradients`; also the other way round, where users froze or thawed unsharded ones."""
        self._note_required()
        self._require_gradients()

    def frozen_in_use(self) -> Sequence[Slot]:
        with without_torch_function():
            required = [*map(get_requires_grad, self._unsharded)], [*map(get_requires_grad, self._sharded)]
        if not self._required or required == (self._required, self._required):
            return ()
        states = zip(self.slots, self._required, *required, strict=True)
        return [slot for slot, before, face, sharded in states if before and not (face and sharded)]

    def _require_gradients(self) -> None:
        """Let the unsharded faces require gradients where the sharded ones do."""
        with without_torch_function():
            if [*map(get_requires_grad, self._sharded)] != self._required:
                self._make_faces()

    def _note_required(self) -> None:
        """What users froze or thawed of the unsharded faces, while those were registered, is so of the sharded ones."""
        required = [*map(get_requires_grad, self._unsharded)]
        if required == self._required:
            return
        with without_torch_function():
            for slot, now, before in zip(self.slots, required, self._required, strict=True):
                if now != before:
                    slot.sharded.requires_grad = now
        self._required = required

    def _forget_faces(self) -> None:
        self._faces, self._unsharded, self._required = [], [], []

    def _make_faces(self) -> None:
        unsharded_faces: list[nn.Parameter] = []
        faces: list[tuple[Registry, str, nn.Parameter, nn.Parameter]] = []
        for position, slot in enumerate(self.slots):
            if (unsharded := slot.unsharded) is None:
                unsharded = slot.make_unsharded(self.policy.arriving_dtype(slot.buffer))
                # An optimizer made while it is registered must not step it: the shards are what counts.
                remember_successor(unsharded, self.reference, position)
            if unsharded.requires_grad != slot.sharded.requires_grad:
                # Not `requires_grad_`, which the transforms of `torch.func` refuse.
                unsharded.requires_grad = slot.sharded.requires_grad
            faces += [(place.registry, place.name, slot.sharded, unsharded) for place in slot.places]
            unsharded_faces.append(unsharded)
        self._faces, self._unsharded = faces, unsharded_faces
        self._required = [*map(get_requires_grad, unsharded_faces)]

    # -- Making them again

    @property
    def is_adopted(self) -> bool:
        """See `Shards.is_adopted`. Looked up: who assigns to a module's attribute tells nobody."""
        if self._waits_for_others:
            return False
        registered = [registry.get(name) for registry, name in self._registered]
        locals_ = [*map(get_local, self._sharded)]
        parameters, own = self._taken_over
        if not (all(map(is_, registered, parameters)) and all(map(is_, locals_, own))):
            return False
        # Methods may be hung on a local tensor at any time.
        return [*map(hasattr, locals_, _PRE)] == self._extended

    def _note_registered(self) -> None:
        entries = [(place, slot.sharded) for slot in self.slots for place in slot.places if place.exists]
        self._registered = [(place.registry, place.name) for place, _ in entries]
        self._sharded = [slot.sharded for slot in self.slots]
        self._taken_over = [sharded for _, sharded in entries], [*map(local_of, self._sharded)]
        self._extended = [
            is_extended(local_of(slot.sharded)) if slot.is_borrowed else isinstance(slot.buffer, ExtendedBuffer)
            for slot in self.slots
        ]

    def leave_meta(self) -> None:
        with torch.no_grad(), not_inference():
            for position, old in enumerate(self.buffers):
                members = [slot for slot in self.slots if slot.buffer is old]
                buffer = old
                if old.local.is_meta and isinstance(old, ExtendedBuffer):
                    local = torch.empty_like(old.local, device=self._device)
                    buffer = self._extended_buffer(
                        old.layout, local.pin_memory() if self._is_pinned else local, members[0]
                    )
                elif old.local.is_meta:
                    buffer = self._new_buffer(old.layout, old.local.dtype, old.dtype)
                else:
                    members = [slot for slot in members if slot.face_is_meta]
                if not members:
                    continue
                self._forget_faces()
                self.buffers[position] = buffer
                for slot in members:
                    slot.buffer, slot.has_values, slot.face_is_meta = buffer, slot.is_borrowed, False
                    slot.forget_unsharded()
                    if slot.is_borrowed:
                        continue
                    self._move_face(slot.sharded, slot.local)
        self._note_registered()
        self.mark_stale()

    def _move_face(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Let ``parameter`` be around ``local``, which is on another device; the same object, as optimizers may hold
        it."""
        moved = make_sharded_parameter(local, spec_of(parameter), parameter.requires_grad, self.reference)
        moved.__dict__.update(marks_of(parameter))
        torch.utils.swap_tensors(parameter, moved)

    def adopt_registered(self, *, is_loading: bool = False) -> bool:
        self.mark_stale()
        self._waits_for_others = False
        self._forget_faces()
        rebuilt = self._sort_by_extension(is_loading)
        taken: set[int] = set()
        for buffer in list(self.buffers):
            slots = [slot for slot in self.slots if slot.buffer is buffer]
            registered = [slot.registered() for slot in slots]
            _note_borrowed(slots, registered, taken)
            self._check_registered(slots, registered)
            with without_torch_function():
                locals_ = [local_of(parameter) for parameter in registered]
                untouched = all(map(_is_in_place, slots, registered, locals_))
            if not untouched:
                rebuilt |= self._rebuild(buffer, slots, registered, locals_, is_loading)
            for slot, parameter in zip(slots, registered, strict=True):
                if parameter is not slot.sharded:
                    mark_replaced(slot.sharded)
                    remember_successor(slot.sharded, self.reference, self.slots.index(slot))
                adopt_parameter(parameter, None if slot.is_borrowed else self.reference)
                slot.use_sharded(parameter)
                for place in slot.places:  # `assign=True` gives each name of a tied parameter a tensor of its own
                    place.put(parameter)
        self.borrowed = [slot for slot in self.slots if slot.is_borrowed]
        if self.borrowed:
            borrowers.add(self)
        self._note_registered()
        if rebuilt:
            self._trained = []  # dtypes may be others
        return rebuilt

    def _check_registered(self, slots: Sequence[Slot], registered: Sequence[nn.Parameter]) -> None:
        for slot, parameter in zip(slots, registered, strict=True):
            if not isinstance(parameter, DTensor):
                raise StateError(
                    f"parameter {slot.name!r} of unit {self.unit_name!r} was replaced by a {type(parameter).__name__} "
                    "that is not sharded: replace it before fully_shard, or write its values into the sharded one "
                    "(torch.func.functional_call replaces for one forward: call unshard() before)"
                )
            if parameter is slot.sharded:
                continue
            if not isinstance(parameter, nn.Parameter):
                raise StateError(
                    f"parameter {slot.name!r} of unit {self.unit_name!r} was replaced by a DTensor that is no "
                    "parameter, with which the unit cannot compute (torch.func.functional_call does so): write its "
                    "values into the sharded one"
                )
            if slot.is_borrowed and not is_cut_alike(parameter, slot.sharded):
                owner = owner_of(parameter)
                other = "another parameter" if owner is None else repr(owner.name_of(parameter)[0])
                raise StateError(
                    f"parameter {slot.name!r} was tied to {other} after both were sharded, and they are cut in other "
                    "ways or over other meshes: tie them before fully_shard"
                )

    def _rebuild(
        self,
        old: ShardedBuffer,
        slots: Sequence[Slot],
        registered: Sequence[nn.Parameter],
        locals_: Sequence[torch.Tensor],
        is_loading: bool,
    ) -> bool:
        """A new buffer with the values of ``locals_``; gives whether the old one was replaced."""
        dtypes = {local.dtype for local in locals_}
        if len(dtypes) > 1 and is_loading:
            self._waits_for_others = True  # the rest of the unit is loaded next
            return False
        if is_extended(locals_[0]):
            new = self._extended_buffer(old.layout, locals_[0], slots[0])
            self._replace_buffer(old, new, slots, meta=locals_[0].is_meta)
            return True
        dtype, tensors = self._only_dtype(dtypes), [slot.layout for slot in slots]
        gathered = self._gather_dtype(dtype, slots[0])  # all of a buffer keep it, or none
        with torch.no_grad(), not_inference():
            layout = self._layout([tensor.shape for tensor in tensors], [tensor.dim for tensor in tensors], gathered)
            meta = any(local.is_meta for local in locals_)
            buffer = self._new_buffer(layout, dtype, gathered, on_meta=meta)
            for index, (slot, parameter, value) in enumerate(zip(slots, registered, locals_, strict=True)):
                view = buffer.local_view(index)
                if meta and not value.is_meta:
                    continue  # half materialized: stays as it is until the rest is
                if not meta:
                    view.copy_(value)
                if slot.is_borrowed:
                    continue
                with without_torch_function():
                    if value.device == view.device:
                        set_local(parameter, view)
                    else:
                        self._move_face(parameter, view)
        if meta and not all(value.is_meta for value in locals_):
            return False
        if not meta and old.takes(buffer.local, layout, gathered):  # a graph may have what is gathered there
            old.use_local(buffer.local)
            buffer = old
        self._replace_buffer(old, buffer, slots, meta=meta)
        return True

    def _replace_buffer(self, old: ShardedBuffer, buffer: ShardedBuffer, slots: Sequence[Slot], *, meta: bool) -> None:
        """Let ``buffer``, which may be ``old`` itself, take the place of ``old`` and have ``slots``, in that order; on
        the meta device or not."""
        self.buffers[self.buffers.index(old)] = buffer
        if buffer is not old:
            old.free()
        for index, slot in enumerate(slots):
            slot.index = index
            slot.has_values = slot.has_values or (slot.face_is_meta and not meta)
            slot.face_is_meta = slot.face_is_meta and meta
            slot.use_buffer(buffer)


def _is_in_place(slot: Slot, registered: nn.Parameter, local: torch.Tensor) -> bool:
    """Whether ``local``, of what is registered, is where the slot's values are, or can be copied there."""
    own = slot.buffer.local
    if isinstance(slot.buffer, ExtendedBuffer) and not slot.is_borrowed:
        return registered is slot.sharded and local is own
    if (local.dtype, local.device) != (own.dtype, own.device) or local.is_meta:
        return False
    if slot.is_borrowed:
        return True
    # By offsets: empty shards have no address, and all ranks have to agree; fake tensors have none either.
    is_there = local.storage_offset() == slot.local.storage_offset() and shares_storage(local, own)
    return registered is slot.sharded and is_there


def _note_borrowed(slots: Sequence[Slot], registered: Sequence[torch.Tensor], taken: set[int]) -> None:
    """Tell slots whether what is registered is another slot's; ``taken`` has the ids of those that are not."""
    known: dict[Shards, dict[int, list[Slot]]] = {}
    for slot, parameter in zip(slots, registered, strict=True):
        slot.is_borrowed = id(parameter) in taken
        if not slot.is_borrowed and (owner := owner_of(parameter)) is not None:
            if owner not in known:
                known[owner] = owner.slots_by_face()
            lenders = known[owner].get(id(parameter), ())
            slot.is_borrowed = any(one is not slot and not one.is_borrowed for one in lenders)
        if not slot.is_borrowed:
            taken.add(id(parameter))


def is_cut_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two sharded tensors have the same shape, and are cut in the same way over the same mesh."""
    first, second = spec_of(one), spec_of(other)
    return (first.shape, first.placements, first.mesh) == (second.shape, second.placements, second.mesh)
