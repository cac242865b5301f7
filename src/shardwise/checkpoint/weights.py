"""The tensors of a model's state dict: by which names, which part of each this rank holds, and how values get in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.agreement import communicating
from ..core.comm import Comm, comm_for
from ..core.device import local_of, not_inference, region_of, spec_of
from ..core.errors import StateError
from ..core.flat import refuse_flat
from ..core.mesh import mesh_device
from ..core.parameter import owner_of, refuse_lazy
from ..core.root import units_of
from ..core.slot import Slot
from ..core.whole import has_repeats
from ..sites import Site, become, sites_by_tensor
from .names import plain_name
from .peers import Peers, common_mesh, world_mesh

VERSIONS = "_metadata"
"""Attribute of a state dict: the versions of the layouts of its modules, for their `load_state_dict`."""


class Region(NamedTuple):
    """A box of a whole tensor: for each tensor dim, where it starts and how long it is, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def replica_of(tensor: DTensor) -> tuple[int, int]:
    """Which of how many copies of the same region of ``tensor`` this rank, one of its mesh, holds."""
    index, count, mesh = 0, 1, tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            index, count = index * mesh.size(axis) + coordinate[axis], count * mesh.size(axis)
    return index, count


@dataclass(eq=False)
class Weight:
    """One tensor of a model's state dict, under one name or several.

    Args:
        names: of the state dict; several for a tied parameter.
        tensor: what is registered, of the whole shape; a DTensor if it is sharded.
        sites: where it is registered; none for what a module's hook made.
        slot: where its unit keeps it, if it belongs to one.
        extra_of: the module whose extra state it is, if it is one.
    """

    names: list[str]
    tensor: torch.Tensor
    sites: list[Site]
    slot: Slot | None = None
    extra_of: nn.Module | None = None
    _fresh: torch.Tensor | None = None
    """Memory for a tensor on the meta device that no unit manages; registered once it has values."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """In which the model keeps it."""
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_values(self) -> bool:
        """Whether it has left the meta device and was written since."""
        if self.slot is not None:
            return self.slot.has_values and not self.slot.buffer.local.is_meta
        return not self.tensor.is_meta

    @property
    def can_be_written(self) -> bool:
        """Whether it is part of the model, not something that a hook made for the state dict."""
        return bool(self.sites) or self.extra_of is not None

    @property
    def value(self) -> torch.Tensor:
        """The tensor to read from and to write into, detached; a DTensor if it is sharded."""
        with not_inference():  # in which no DTensor can be detached
            return (self._fresh if self._fresh is not None else self.tensor).detach()

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of `value`."""
        if self.slot is not None:
            return self.slot.local
        return local_of(self.value)

    @cached_property
    def region(self) -> Region:
        """Which part of the whole tensor this rank holds (see `check_region`)."""
        if self.slot is not None:
            return _region_of_slot(self.names[0], self.slot)
        if not isinstance(self.tensor, DTensor):
            return Region((0,) * len(self.shape), self.shape)
        _check_box(self.names[0], self.tensor.placements)
        return Region(*region_of(spec_of(self.tensor)))

    def check_region(self) -> None:
        """
        Raises:
            ValueError: if what this rank holds need not be one box of the tensor, or it is sparse.
        """
        if self.tensor.layout is not torch.strided:
            raise ValueError(
                f"{self.names[0]!r} is a tensor of layout {self.tensor.layout}, of which there are no rows to move: "
                "make it dense by to_dense()"
            )
        _ = self.region

    @property
    def replica(self) -> tuple[int, int] | None:
        """Which of how many copies of the same region this rank holds; None if every rank has the whole tensor."""
        return replica_of(self.tensor) if isinstance(self.tensor, DTensor) else None

    @torch.no_grad()
    def gather(self) -> torch.Tensor:
        """The whole tensor, on its mesh's device; may share the model's memory. All ranks that hold it call this."""
        if not isinstance(self.tensor, DTensor):
            return self.local
        with communicating(f"gathering {self.names[0]!r}", *self._comms(self.tensor.device_mesh)):
            return self._gather(self.tensor)

    def _comms(self, mesh: DeviceMesh) -> list[Comm]:
        """Of the ranks that hold parts, the unit's own first, which sends messages."""
        own = [] if self.slot is None else [self.slot.buffer.comm]
        axes = (axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)
        return own + [comm_for(mesh.get_group(axis), mesh_device(mesh)) for axis in axes]

    def _gather(self, tensor: DTensor) -> torch.Tensor:
        if self.slot is not None:
            gathered = self.slot.buffer.gather_whole(self.slot.index)
            return gathered if self.slot.parallel is None else self.slot.parallel.unsharded(gathered).full_tensor()
        # Around the local tensor, since attributes of the parameter may be its owner's.
        local, spec = self.local, spec_of(tensor)
        shape, stride = torch.Size(self.shape), torch.empty(self.shape, device="meta").stride()
        whole = DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)
        return whole.full_tensor()

    @torch.no_grad()
    def write_rows(self, rows: torch.Tensor, start: int) -> None:
        """Keep this rank's part of ``rows``: the rows (on dim 0) from ``start`` on of the whole tensor."""
        (offsets, sizes), target = self.region, self.local
        if not self.shape:
            target.copy_(rows.reshape(()))
            return
        first, end = max(start, offsets[0]), min(start + rows.shape[0], offsets[0] + sizes[0])
        if first >= end:
            return
        rows = rows.narrow(0, first - start, end - first)
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        target.narrow(0, first - offsets[0], end - first).copy_(rows)

    # -- Loading

    def prepare_memory(self, device: torch.device) -> None:
        """Give it memory that can be written: on ``device`` if it is on the meta device and no unit manages it, and new
        memory if several of its elements share some, as those of expanded tensors do.

        Until `accept_values` a forward of its unit is refused.
        """
        if self.slot is not None:
            shards = owner_of(self.tensor)
            assert shards is not None
            if self.slot.buffer.local.is_meta or self.slot.face_is_meta:  # it looks at all parameters of the unit
                shards.leave_meta()
            # Before the write, which must not overtake copies of offloaded shards to the device.
            shards.note_write()
            self.slot.has_values = False
        elif self.tensor.is_meta or self.extra_of is not None:
            with not_inference():
                self._fresh = torch.empty_like(self.tensor.detach(), device=device)
        elif has_repeats(local_of(self.tensor)):
            with not_inference():
                self._fresh = torch.empty_like(self.tensor.detach())

    def accept_values(self) -> None:
        """Make the values written to `local` the model's, and allow forwards of its unit again."""
        if self.slot is not None:
            self.slot.has_values = True
        if self._fresh is None:
            return
        if self.extra_of is not None:
            self.extra_of.set_extra_state(self._fresh)
        else:
            is_parameter = isinstance(self.tensor, nn.Parameter)
            with not_inference():
                fresh = nn.Parameter(self._fresh, self.tensor.requires_grad) if is_parameter else self._fresh
            self.tensor = become(self.tensor, fresh, self.sites)
        self._fresh = None


def _region_of_slot(name: str, slot: Slot) -> Region:
    tensor, rank = slot.layout, slot.buffer.comm.rank
    start: tuple[int, ...] = (0,) * len(tensor.shape)
    if slot.parallel is not None:
        _check_box(name, slot.parallel.original.placements)
        start, _ = region_of(slot.parallel.original)
    offsets = [offset + tensor.start(rank) * (dim == tensor.dim) for dim, offset in enumerate(start)]
    return Region(tuple(offsets), tensor.local_shape(rank))


def _check_box(name: str, placements: Iterable[object]) -> None:
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise ValueError(
            f"{name!r} is placed {tuple(placements)}, of which a rank need not hold one box: only Shard and Replicate "
            "can be loaded and saved"
        )


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """What a model's state dict has.

    Args:
        model: whose state dict it is.
        weights: its tensors, each once, however many names it has.
        objects: what is not a tensor, by name: the module whose extra state it is, None if it is something else that
            the model adds to its state dict, and the value.
        keys: of the state dict, in its order, by name.
        versions: of the layouts that modules give their state, as the state dict notes them for `load_state_dict`.
    """

    model: nn.Module
    weights: list[Weight]
    objects: dict[str, tuple[nn.Module | None, Any]]
    keys: dict[str, str]
    versions: Any

    @property
    def names(self) -> list[str]:
        """All names, in the order of the state dict."""
        return list(self.keys)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the state dict, by name."""
        return {name: weight.tensor for weight in self.weights for name in weight.names}

    @property
    def values(self) -> dict[str, Any]:
        """The values of the state dict, by name, in its order; tensors detached."""
        tensors = self.tensors
        return {name: tensors[name].detach() if name in tensors else self.objects[name][1] for name in self.keys}

    def with_extra_as_objects(self) -> ModelWeights:
        """The same with extra state, and what else is neither a parameter nor a buffer, among the objects, also where
        it is a tensor: modules may take any other."""
        named = self.model.named_parameters(remove_duplicate=False), self.model.named_buffers(remove_duplicate=False)
        own = {key for pairs in named for key, _ in pairs}
        extra = {
            name: (weight.extra_of, weight.tensor)
            for weight in self.weights
            # A hook's version of a parameter is neither the model's nor for anyone else to take.
            if weight.extra_of is not None
            or not (weight.sites or own.intersection(self.keys[name] for name in weight.names))
            for name in weight.names
        }
        weights = [weight for weight in self.weights if extra.keys().isdisjoint(weight.names)]
        return replace(self, weights=weights, objects={**self.objects, **extra})

    def set_extra_state(self, values: Mapping[str, Any], *, strict: bool = True) -> None:
        """Give those of `objects` that ``values`` has to their modules, or to whatever put them into the state dict.

        Raises:
            StateError: as of `load_into_modules`.
        """
        others: dict[str, Any] = {}
        for name in (name for name in values if name in self.objects):
            owner, _ = self.objects[name]
            if owner is not None:
                owner.set_extra_state(values[name])
            else:
                others[self.keys[name]] = values[name]
        if others:
            self.load_into_modules(others, strict=strict)

    def load_into_modules(self, others: Mapping[str, Any], *, strict: bool) -> None:
        """Let the model's own ``load_state_dict`` take ``others``, by keys, and all else as it is.

        Raises:
            StateError: if ``strict``, naming those that no module takes.
        """
        state = self.model.state_dict()
        # What a module gives as its extra state, such as a count of its steps, need not be what it was handed before.
        for key in [key for key in state if _owner_of_extra_state(self.model, key) is not None]:
            del state[key]
        state.update(others)
        # What a module leaves out of its state dict is not missing: the names were compared before.
        result = self.model.load_state_dict(state, strict=False)
        left = [key for key in getattr(result, "unexpected_keys", ()) if key in others]
        if strict and left:
            raise StateError(
                f"{type(self.model).__name__}.state_dict() has {', '.join(map(repr, left))}, which its "
                "load_state_dict() does not take: let the module that adds them take them, or pass strict=False"
            )

    @cached_property
    def device(self) -> torch.device:
        """For tensors on the meta device that no unit manages."""
        if meshes := _meshes_of(weight.tensor for weight in self.weights):
            return mesh_device(meshes[0])
        return next((w.tensor.device for w in self.weights if not w.tensor.is_meta), torch.device("cpu"))

    def check_values(self) -> None:
        """
        Raises:
            StateError: naming the tensors that are on the meta device, or without values.
        """
        empty = [weight.names[0] for weight in self.weights if not weight.has_values]
        if empty:
            raise StateError(
                f"{', '.join(map(repr, empty))} are still on the meta device or without values: initialize or load "
                "them first"
            )


def peers_of(model: nn.Module, *, of_world: bool = False) -> Peers:
    """The ranks that hold ``model``. Runs no code of its own, which one rank alone could fail in.

    Args:
        model: as of `weights_of`.
        of_world: whether a plain model belongs to all ranks together; otherwise to this process alone.

    Raises:
        TypeError: if it is not a module.
        ValueError: if it is on several meshes of which none has all ranks.
    """
    _check_module(model)
    sharded = [slot.sharded for unit in units_of(model) for group in unit.groups for slot in group.slots]
    mesh = common_mesh(_meshes_of([*sharded, *model.parameters(), *model.buffers()]))
    return Peers(world_mesh() if mesh is None and of_world else mesh)


def _meshes_of(tensors: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a module, not {type(model).__name__}")


def weights_of(
    model: nn.Module,
    *,
    asked_by: str = "save",
    plain_names: bool = False,
    state_of: Callable[[nn.Module], Mapping[str, Any]] | None = None,
) -> ModelWeights:
    """Find the tensors of ``model``'s state dict.

    Args:
        model: with units, with DTensors from elsewhere, or plain.
        asked_by: name of the function that wants them, for messages.
        plain_names: whether names are those of the model as it was written, without wrappers around its modules;
            otherwise they are the keys of its state dict.
        state_of: gives what to take for the state dict of the model, with its own parameters; None for that itself.

    Raises:
        TypeError: if it is not a module.
        ValueError: if it has flat shards, or naming a tensor of a lazy module that has not run.
    """
    _check_module(model)
    refuse_flat(model, asked_by)
    slots = _slots_of(model)
    sites = sites_by_tensor(model.modules())
    weights: dict[int, Weight] = {}
    objects: dict[str, tuple[nn.Module | None, Any]] = {}
    state = model.state_dict(keep_vars=True) if state_of is None else state_of(model)
    named = {plain_name(model, key) if plain_names else key: key for key in state}
    for name, key in named.items():
        value, extra_of = state[key], _owner_of_extra_state(model, key)
        refuse_lazy(repr(name), value)
        if not isinstance(value, torch.Tensor):
            objects[name] = extra_of, value
        elif id(value) in weights:
            weights[id(value)].names.append(name)
        else:
            weights[id(value)] = Weight([name], value, sites.get(id(value), []), slots.get(id(value)), extra_of)
    return ModelWeights(model, list(weights.values()), objects, named, getattr(state, VERSIONS, None))


def _slots_of(model: nn.Module) -> dict[int, Slot]:
    """The units' slots by the identity of the parameters that are registered for them."""
    slots = {}
    for unit in units_of(model):
        for group in unit.groups:
            group.reshard()
            if not group.shards.is_adopted:
                group.adopt_registered()
            slots.update({id(slot.sharded): slot for slot in group.slots if not slot.is_borrowed})
    return slots


def _owner_of_extra_state(model: nn.Module, name: str) -> nn.Module | None:
    path, _, last = name.rpartition(".")
    if last != "_extra_state":
        return None
    try:
        return model.get_submodule(path)
    except AttributeError:  # a hook renamed it
        return None
