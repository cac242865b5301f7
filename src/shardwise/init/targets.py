"""The tensors of a model that have no values yet, and how each gets them."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..core.device import get_version, local_of, shard_like, spec_of, wrap_local
from ..core.errors import StateError
from ..core.parameter import owner_of, refuse_lazy
from ..core.shards import Shards
from ..core.slot import Slot
from ..core.whole import without_repeats
from ..sites import Site, become, sites_by_tensor, sites_of, under
from .context import MARK, MARKS
from .record import Origin, Record, View


def _origin_at(site: Site) -> Origin | None:
    """The history of what is registered there, if `init_on_meta` recorded one."""
    own: Origin | None = site.get().__dict__.get(MARK)
    marks: dict[str, Origin | None] = site.module.__dict__.get(MARKS) or {}
    return own or marks.get(site.name)


def forget_origin_at(site: Site) -> None:
    """Drop the history of what is registered there."""
    site.get().__dict__.pop(MARK, None)
    marks = site.module.__dict__.get(MARKS) or {}
    marks.pop(site.name, None)
    if not marks:
        site.module.__dict__.pop(MARKS, None)


Blocks = Callable[[int, int], Iterator[tuple[int, torch.Tensor]]]
"""``blocks(start, stop)`` gives these elements of a tensor in pieces (1-D), each with where it begins after start."""


class Target(ABC):
    """A parameter or buffer without values.

    Args:
        name: its full name.
        sites: where it is registered; several for a tied one.
    """

    def __init__(self, name: str, sites: list[Site]):
        self.name, self.sites = name, sites
        self.shape = tuple(sites[0].get().shape)
        """Of the whole tensor. Initializers may register others in its place."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks that hold parts of it, or copies."""
        registered = self.sites[0].get()
        return registered.device_mesh if isinstance(registered, DTensor) else None

    @property
    @abstractmethod
    def device(self) -> torch.device | None:
        """Where this rank keeps it; None for where its values are made."""

    @abstractmethod
    def write(self, whole: torch.Tensor) -> None:
        """Take what this rank keeps of ``whole``, in the dtype and on the device that it is to have."""

    def write_elements(self, blocks: Blocks) -> None:
        """Take what this rank keeps of ``blocks``."""
        parts = [values for _, values in blocks(0, math.prod(self.shape))]
        whole = torch.cat(parts) if parts else torch.empty(0, dtype=self.sites[0].get().dtype)
        self.write(whole.view(self.shape))

    def origin(self) -> Origin | None:
        """The history that gives its values.

        Raises:
            StateError: if it was written while it had no memory, which had no effect.
        """
        origin = next((origin for site in self.sites if (origin := _origin_at(site)) is not None), None)
        if origin is None or tuple(origin.view.size) != self.shape or not origin.record.is_written(origin.view.storage):
            return None
        if self.lost_writes:
            raise StateError(
                f"parameter {self.name!r} was written after init_on_meta and before it had memory, so nothing was "
                "stored: initialize it inside the context, or after materialize"
            )
        return origin

    @property
    def lost_writes(self) -> bool:
        """Whether it was written since the record of its history ended, without memory."""
        registered = self.sites[0].get()
        return not isinstance(registered, DTensor) and get_version(registered) > 0

    def forget_history(self) -> None:
        """Drop its history: it has values now."""
        for site in self.sites:
            forget_origin_at(site)


class SlotTarget(Target):
    """A sharded parameter."""

    def __init__(self, name: str, sites: list[Site], slot: Slot):
        super().__init__(name, sites)
        self.slot = slot

    @property
    def device(self) -> torch.device:
        return self.slot.local.device

    @property
    def lost_writes(self) -> bool:
        sharded = self.slot.sharded
        return self.slot.lost_writes or (local_of(sharded).is_meta and get_version(sharded) > 0)

    @torch.no_grad()
    def write_elements(self, blocks: Blocks) -> None:
        tensor, rank = self.slot.layout, self.slot.buffer.comm.rank
        if self.slot.parallel is not None or not tensor.is_contiguous_cut:
            super().write_elements(blocks)
            return
        row = math.prod(tensor.shape[1:])
        start, local = tensor.start(rank) * row, self.slot.local.view(-1)
        for first, values in blocks(start, start + local.numel()):
            local[first : first + values.numel()].copy_(values)
        self.slot.has_values = True

    def write(self, whole: torch.Tensor) -> None:
        if self.slot.parallel is None:
            self.slot.write(whole)
            return
        sharded = self.slot.sharded
        assert isinstance(sharded, DTensor)
        with torch.no_grad():
            self.slot.local.copy_(local_of(shard_like(whole, sharded)))
        self.slot.has_values = True


class WholeTarget(Target):
    """A parameter or buffer that is not sharded.

    Args:
        device: where it is to be; None for where its values are made.
    """

    def __init__(self, name: str, sites: list[Site], device: torch.device | None):
        super().__init__(name, sites)
        self._device = device

    @property
    def device(self) -> torch.device | None:
        return self._device

    def write(self, whole: torch.Tensor) -> None:
        old = self.sites[0].get()
        value = whole.detach().to(dtype=old.dtype, device=self.device)
        if isinstance(old, DTensor):  # cut by another parallelism only
            empty = torch.empty_like(local_of(old), device=value.device)
            value = shard_like(value, wrap_local(empty, spec_of(old)))
        elif value.stride() != old.stride():  # channels last, by others
            value = torch.empty_like(old, device=value.device, requires_grad=False).copy_(value)
        if not self.sites[0].is_buffer:
            value = nn.Parameter(value, old.requires_grad)
        become(old, value, self.sites)


class BufferTarget(Target):
    """A buffer that has random values of another seed."""

    @property
    def device(self) -> torch.device:
        return local_of(self.sites[0].get()).device

    def write(self, whole: torch.Tensor) -> None:
        local, whole = without_repeats(local_of(self.sites[0].get()), whole)
        with torch.inference_mode(local.is_inference()), torch.no_grad():  # the former sets both
            local.copy_(whole)


def find_shards(model: nn.Module) -> list[Shards]:
    """The shards that parameters of ``model`` belong to."""
    parameters = (parameter for module in model.modules() for parameter in module._parameters.values())
    owners = (owner_of(parameter) for parameter in parameters if parameter is not None)
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


def find_meshes(modules: Iterable[nn.Module], shards: list[Shards]) -> list[DeviceMesh]:
    """The meshes of the ranks that hold parts or copies of the tensors in ``modules``, with values or without."""
    registered: list[torch.Tensor] = [slot.sharded for owner in shards for slot in owner.slots]
    registered += [tensor for module in modules for site in sites_of(module) if owner_of(tensor := site.get()) is None]
    meshes = (tensor.device_mesh for tensor in registered if isinstance(tensor, DTensor))
    return list({id(mesh): mesh for mesh in meshes}.values())


def names_of_modules(model: nn.Module, shards: list[Shards]) -> dict[nn.Module, str]:
    """``model``'s modules, children before the modules that contain them, and those that share units with them; with
    their names."""
    found: dict[nn.Module, str] = {}
    _visit("", model, found)
    for owner in shards:
        for slot in owner.slots:
            for place in slot.places:
                module = place.module()
                if module is not None and module not in found:
                    found[module] = slot.name.rpartition(".")[0]
    return found


def _visit(name: str, module: nn.Module, found: dict[nn.Module, str]) -> None:
    for child_name, child in module.named_children():
        if child not in found:
            _visit(under(name, child_name), child, found)
    found[module] = name


def find_targets(names: Mapping[nn.Module, str], shards: list[Shards]) -> list[Target]:
    """All parameters and buffers without values, of the modules that have these ``names``.

    Raises:
        ValueError: naming one on the meta device that is of a lazy module, so that it has no shape.
    """

    def full(site: Site) -> str:
        return under(names.get(site.module, ""), site.name)

    targets: list[Target] = []
    for owner in shards:
        for slot in owner.slots:
            if not slot.is_borrowed and (slot.buffer.local.is_meta or not slot.has_values):
                alive = [(place.module(), place.name) for place in slot.places]
                if sites := [Site(module, name) for module, name in alive if module is not None]:
                    targets.append(SlotTarget(full(sites[0]), sites, slot))
    device = shards[0].mesh.device if shards else None
    for sites in sites_by_tensor(names).values():
        tensor, name = sites[0].get(), full(sites[0])
        if owner_of(tensor) is None and local_of(tensor).is_meta:
            refuse_lazy(repr(name), tensor)
            targets.append(WholeTarget(name, sites, device))
    return targets


def find_random_buffers(names: Mapping[nn.Module, str], record: Record) -> list[tuple[Target, View]]:
    """The buffers of modules whose random values are from ``record``, and that nobody has overwritten."""
    found: list[tuple[Target, View]] = []
    for module in names:
        marks: dict[str, Origin | None] = module.__dict__.get(MARKS) or {}
        for name, origin in marks.items():
            buffer = module._buffers.get(name)
            if origin is None or origin.record is not record or buffer is None:
                continue
            if origin.has_values_of(buffer):
                found.append((BufferTarget(name, [Site(module, name, is_buffer=True)]), origin.view))
    return found


def write_each(members: Sequence[tuple[Target, View]]) -> dict[int, Callable[[torch.UntypedStorage], None]]:
    """For each storage of a record, what writes it to its targets."""
    by_storage: dict[int, list[tuple[Target, View]]] = defaultdict(list)
    for target, view in members:
        by_storage[view.storage].append((target, view))

    def write(found: list[tuple[Target, View]], memory: torch.UntypedStorage) -> None:
        for target, view in found:
            target.write(view.on(memory))

    return {storage: functools.partial(write, found) for storage, found in by_storage.items()}
