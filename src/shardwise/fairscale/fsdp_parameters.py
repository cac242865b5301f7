"""Which parameters an instance of FullyShardedDataParallel has, and how they are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.extension import is_extended
from ..core.flat import FlatPart, FlatRun, FlatShards
from ..core.parameter import owner_of, refuse_lazy
from ..core.place import Place
from ..core.replaced import successor_of
from ..core.root import managed_modules, unit_of
from ..core.whole import WholeBroadcast
from ..sites import under
from .flat_parameter import FlatParameter
from .ranks import check_same_on_ranks, comm_of, describe, describe_settings, is_stand_in, refuse_sparse

INNER = "_fsdp_wrapped_module"
"""Name of the wrapped module in its wrapper, FairScale's."""


def clean(name: str) -> str:
    """A name as it is in the model without wrappers."""
    return name.replace(f"{INNER}.", "").removesuffix(INNER).removesuffix(".")


@dataclass(frozen=True)
class Member:
    """One parameter of an instance.

    Args:
        name: in the wrapped module, where it is found first.
        shape: of the whole parameter.
        places: path of each module in the wrapped module that has it, and its name there.
    """

    name: str
    shape: tuple[int, ...]
    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run:
    """Parameters that are sharded as one.

    Args:
        name: of the joined parameter in its wrapper, or of the only member.
        members: in the order of the model.
        is_joined: whether the wrapper has a joined parameter; otherwise the one member is sharded by itself.
    """

    name: str
    members: tuple[Member, ...]
    is_joined: bool


def own_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules in ``module``, itself among them, that belong to no instance inside; with their paths, parents first.
    None if ``module`` is itself an instance."""
    if unit_of(module) is not None:
        return []
    known = {id(member): index for index, member in enumerate(module.modules())}
    return sorted(managed_modules([module]), key=lambda pair: known[id(pair[1])])


def own_parameters(module: nn.Module) -> list[tuple[Member, nn.Parameter]]:
    """Parameters of `own_modules` that are not sharded yet.

    Raises:
        ValueError: for one that was joined to others by another instance, and so cannot be shared any more.
    """
    found = _unsharded(module)
    for parameter, places in found:
        if successor_of(parameter) is not None:
            raise ValueError(
                f"parameter {under(*places[0])!r} is tied to one that another instance has flattened: wrap the modules "
                "that share it together, or wrap them with flatten_parameters=False and call append_shared_param"
            )
    return [
        (Member(under(*places[0]), tuple(parameter.shape), tuple(places)), parameter) for parameter, places in found
    ]


def _unsharded(module: nn.Module) -> list[tuple[nn.Parameter, list[tuple[str, str]]]]:
    """Parameters of `own_modules` that are not sharded yet, with the paths of their modules and their names there."""
    found: dict[int, tuple[nn.Parameter, list[tuple[str, str]]]] = {}
    for path, member in own_modules(module):
        for name, parameter in member._parameters.items():
            if parameter is not None and owner_of(parameter) is None:
                found.setdefault(id(parameter), (parameter, []))[1].append((path, name))
    return list(found.values())


def describe_runs(own: Sequence[tuple[Member, nn.Parameter]], join: bool) -> list[Run]:
    """How ``own`` parameters are joined: trainable ones and frozen ones apart, so that either can be switched."""
    if not join:
        return [Run(member.name, (member,), False) for member, _ in own]
    by_kind: dict[bool, list[Member]] = {}
    for member, parameter in own:
        by_kind.setdefault(parameter.requires_grad, []).append(member)
    return [Run(f"flat_param_{index}", tuple(members), True) for index, members in enumerate(by_kind.values())]


def flat_runs(
    runs: Sequence[Run], wrapper: nn.Module, module: nn.Module, values: Sequence[nn.Parameter] | None
) -> list[FlatRun]:
    """``runs`` as they are sharded; joined parameters are registered.

    Args:
        runs: of the parameters in ``module``.
        wrapper: that has the joined parameters.
        module: the wrapped one.
        values: whole parameters, in the order of the runs' members, unless shards are registered already.
    """
    found, rest = [], list(values or ())
    for run in runs:
        parts = tuple(FlatPart(one.name, one.shape, _places(module, one)) for one in run.members)
        own, rest = rest[: len(parts)], rest[len(parts) :]
        home = Place(wrapper, run.name) if run.is_joined else None
        if own and home is not None:
            joined = FlatParameter.of([part.name for part in parts], [part.shape for part in parts], own[0])
            wrapper.register_parameter(run.name, joined)
        sharded = home.get() if home is not None else own[0] if own else parts[0].places[0].get()
        found.append(FlatRun(run.name, parts, sharded, home, own or None))
    return found


def _places(module: nn.Module, member: Member) -> list[Place]:
    return [Place(module.get_submodule(path), name) for path, name in member.places]


def restore_order(module: nn.Module, names: Mapping[str, Sequence[str]]) -> None:
    """Order the parameters that are registered in modules below ``module``, where several runs may have put them, by
    their ``names``, given by the paths of the modules; those of other names go last."""
    for path, order in names.items():
        registered = module.get_submodule(path)._parameters
        if [*registered] != [*order]:
            known = {name: registered.pop(name) for name in order if name in registered}
            rest = dict(registered)
            registered.clear()
            registered.update({**known, **rest})


def check_parameters(
    module: nn.Module, own: Sequence[tuple[Member, nn.Parameter]], mixed: bool, compute_dtype: torch.dtype
) -> None:
    """
    Raises:
        ValueError: naming a parameter that cannot be sharded with these settings, a buffer without values, or a module
            that was given to `shardwise.fully_shard`.
    """
    for path, part in module.named_modules():
        unit = unit_of(part)
        if unit is not None and not all(isinstance(group.shards, FlatShards) for group in unit.groups):
            raise ValueError(
                f"module {path!r} was given to fully_shard, whose parameters state dicts and clip_grad_norm_ of "
                "FullyShardedDataParallel would leave out: wrap it in FullyShardedDataParallel too, or the whole model "
                "by fully_shard"
            )
    for name, buffer in _own_buffers(module):
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name!r} is on the meta device, without values: materialize the model before it is wrapped"
            )
    for member, parameter in own:
        name, wanted = member.name, torch.float32 if mixed else compute_dtype
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device, without values: materialize the model before it is wrapped"
            )
        if isinstance(parameter, DTensor):
            raise ValueError(f"parameter {name!r} is a DTensor, sharded already: wrap the model before")
        if is_extended(parameter):
            raise ValueError(
                f"parameter {name!r} is a {type(parameter).__name__} that says itself how it is gathered, and here "
                "parameters are gathered with others: shard the model by shardwise.fully_shard"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name!r} is {parameter.dtype}: only floating-point ones can be sharded")
        if parameter.dtype != wanted:
            fix = "keep the parameters in float32" if mixed else f"pass compute_dtype={parameter.dtype}"
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}, and with mixed_precision={mixed} and "
                f"compute_dtype={compute_dtype} parameters are {wanted}: {fix}, or convert the module before"
            )


def check_same_model(
    named: Sequence[tuple[str, torch.Tensor]], settings: Mapping[str, object], group: Any, device: torch.device
) -> None:
    """Compare `named_tensors`, and settings, over ``group``; a collective. Checks of each rank by itself come
    afterwards, so that they fail on all ranks alike.

    Raises:
        ValueError: naming a setting that differs between ranks, a tensor whose shape, dtype or requires_grad does, or
            one that has no shape yet.
    """
    if not is_stand_in(group) and group.size() > 1:
        described = [*describe_settings(settings), *((name, describe(tensor)) for name, tensor in named)]
        check_same_on_ranks("FullyShardedDataParallel", comm_of(group, device), described, device)
    for name, tensor in named:
        refuse_lazy(repr(name), tensor)


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    members = own_modules(module)
    return [(under(path, name), buffer) for path, one in members for name, buffer in one.named_buffers(recurse=False)]


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters of `own_modules` that are not sharded yet, and buffers."""
    return [*((under(*places[0]), parameter) for parameter, places in _unsharded(module)), *_own_buffers(module)]


@torch.no_grad()
def sync_from_first_rank(named: Sequence[tuple[str, torch.Tensor]], group: Any, device: torch.device) -> None:
    """Give all ranks of ``group`` the first rank's `named_tensors`; a collective.

    Raises:
        ValueError: on all ranks, naming a sparse one.
    """
    if is_stand_in(group) or group.size() == 1:
        return
    refuse_sparse(named)
    tensors = list({id(tensor): tensor.detach() for _, tensor in named if tensor.numel()}.values())
    if not tensors:
        return
    # Tensors on other devices than the group's are copied there and back.
    there = [tensor.to(device) for tensor in tensors]
    WholeBroadcast(there, [0] * len(there), lambda where: comm_of(group, where)).start()()
    for tensor, synced in zip(tensors, there, strict=True):
        if tensor is not synced:
            tensor.copy_(synced)
