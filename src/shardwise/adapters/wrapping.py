"""What every adapter does to a model that it wraps, apart from making units of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..checkpoint.peers import Peers
from ..core.changing import changing
from ..core.errors import listed
from ..core.extension import inner_tensors
from ..core.module import FSDPModule, function_of
from ..core.parameter import owner_of
from ..core.root import is_never_called, unit_of, units_of
from ..core.step import parameters_of
from ..core.whole import without_repeats
from ..fairscale.ranks import describe, refuse_sparse
from ..fully_shard import check_cuttable
from ..init.targets import forget_origin_at
from ..sites import sites_of
from .whole import cut

LOADED = "shardwise_loaded"
"""Attribute of a parameter whose values all ranks read from one file, so that they are the same already."""


def refuse_foreign(model: nn.Module) -> None:
    """
    Raises:
        TypeError: naming a module that another library has wrapped.
    """
    for name, module in model.named_modules():
        foreign = isinstance(module, (FullyShardedDataParallel, DistributedDataParallel))
        if foreign or (unit_of(module) is None and isinstance(module, TorchFSDPModule)):
            raise TypeError(
                f"module {name!r} ({type(module).__name__}) is wrapped by torch's own data parallelism: use "
                "shardwise.fully_shard, or leave the wrapping to the strategy"
            )


def refuse_uncuttable(model: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """
    Args:
        model: to be sharded, inner modules first.
        ignored: parameters that are not sharded.

    Raises:
        ValueError: naming a parameter that `fully_shard` does not take, a sparse tensor, or a container without
            forward.
    """
    if is_never_called(model):
        raise ValueError(
            f"{type(model).__name__} has no forward, so nothing would tell when to gather its parameters: set up a "
            "module with a forward that calls those in it, or each of them"
        )
    for name, parameter in model.named_parameters():
        if parameter not in ignored:
            check_cuttable(name, parameter)
    refuse_sparse([*model.named_parameters(), *model.named_buffers()])


@torch.no_grad()
def share_values(
    model: nn.Module,
    mesh: DeviceMesh,
    chosen: Mapping[str, Iterable[nn.Module | nn.Parameter]] = MappingProxyType({}),
    settings: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Give all ranks of ``mesh`` the first one's values of everything in ``model`` that is neither sharded nor on the
    meta device.

    Args:
        model: changed in place.
        mesh: of the ranks.
        chosen: modules and parameters of ``model`` that all ranks must choose alike, by what chose them.
        settings: what else must be the same on all ranks, by name.

    Raises:
        ValueError: on all ranks, naming a tensor that some ranks lack, or have with another shape or dtype, on the
            meta device or frozen; or something that is not chosen by all; or a setting that is not the same.
    """
    peers = Peers(mesh)
    names = {item: name for name, item in (*model.named_modules(), *model.named_parameters())}
    choices = {by: dict.fromkeys(names[item] for item in items) for by, items in chosen.items()}
    everything = sorted((*model.named_parameters(), *model.named_buffers()), key=itemgetter(0))  # on all ranks
    named = [(name, tensor) for name, tensor in everything if not is_lazy(tensor)]
    described = {name: describe(tensor) for name, tensor in named}
    _refuse_unlike(peers, described, choices, {name: str(value) for name, value in settings.items()})
    sent = [tensor for _, tensor in named if not isinstance(tensor, DTensor) and LOADED not in tensor.__dict__]
    for tensor in itertools.chain.from_iterable(map(inner_tensors, sent)):
        if tensor.is_meta or not tensor.numel():
            continue
        value = tensor.detach().to(peers.device).resolve_conj().resolve_neg().contiguous()
        peers.broadcast(value)
        if value.data_ptr() != tensor.data_ptr():
            target, source = without_repeats(tensor, value)
            target.copy_(source)


def _refuse_unlike(
    peers: Peers, described: Mapping[str, str], choices: Mapping[str, Mapping[str, None]], settings: Mapping[str, str]
) -> None:
    """
    Args:
        peers: that compare what they have.
        described: what must be the same of each tensor, by name.
        choices: names of what was chosen, by what chose it.
        settings: by name.

    Raises:
        ValueError: on all ranks, naming what is not the same on all of them.
    """
    everywhere = dict(zip(peers.ranks, peers.exchange((described, choices, settings)), strict=True))
    own = peers.ranks[peers.position]
    for rank, (theirs, _, given) in everywhere.items():
        for name, value in settings.items():
            if given[name] != value:
                raise ValueError(
                    f"{name} is {value} on rank {own}, and {given[name]} on rank {rank}: by it ranks communicate, so "
                    "pass the same on all"
                )
        for name in (*described, *theirs) if theirs != described else ():
            if theirs.get(name) != described.get(name):
                raise ValueError(
                    f"the ranks have different models: {name!r} is {described.get(name)} on rank {own}, and "
                    f"{theirs.get(name)} on rank {rank}"
                )
    first, *others = peers.ranks
    for by, rank in itertools.product(choices, others):
        for one, other in ((first, rank), (rank, first)):
            if alone := [name for name in everywhere[one][1][by] if name not in everywhere[other][1][by]]:
                raise ValueError(
                    f"{by} chooses {listed(alone)} on rank {one}, and not on rank {other}: let it depend only on what "
                    "all ranks have alike"
                )


def take_whole_tensors(model: nn.Module) -> None:
    """Let ``load_state_dict`` of a sharded ``model`` take whole tensors, those of one process, as well as DTensors."""
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_cut_whole)


def _cut_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Callbacks and users load whole state dicts, those of one process, by ``load_state_dict``."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None:
            state_dict[prefix + name] = cut(value, parameter)


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward passes of ``model`` add up its gradients without communication."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with changing(units, "reduce_grads", False):
        yield


def zero_what_waits(optimizer: Optimizer) -> None:
    """Let ``zero_grad`` of ``optimizer`` also drop what `without_gradient_sync` added up for its parameters, as it does
    where gradients are whole."""
    if getattr(optimizer.zero_grad, "zeroes_what_waits", False):
        return
    reference, own = weakref.ref(optimizer), function_of(optimizer, "zero_grad")

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        me = reference()
        assert me is not None
        own(me, *args, **kwargs)
        parameters = {id(parameter): owner_of(parameter) for parameter in parameters_of(me)}
        for shards in dict.fromkeys(parameters.values()):
            for slot in shards.slots if shards is not None else ():
                if id(slot.sharded) in parameters:
                    slot.drop_gradient()

    cast(Any, zero_grad).zeroes_what_waits = True
    cast(Any, optimizer).zero_grad = zero_grad


def modules_with_units(model: nn.Module) -> list[Any]:
    """The modules of ``model`` that are units."""
    return [module for module in model.modules() if unit_of(module) is not None]


def show_shards(model: nn.Module) -> None:
    """Register the sharded parameters of all units; gathered ones that are kept stay in memory."""
    for unit in units_of(model):
        for group in unit.groups:
            group.reshard(keep=True)


def forget_history(model: nn.Module) -> None:
    """Drop what was recorded of constructors, so that modules initialize their parameters on the meta device."""
    for site in (site for module in model.modules() for site in sites_of(module)):
        if not site.is_buffer and site.get().is_meta:
            forget_origin_at(site)
