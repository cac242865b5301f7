"""State dicts of FullyShardedDataParallel: names without wrappers, and whole weights from shards without processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import StateError
from ..core.flat import AbsentParameter
from ..core.parameter import owner_of
from ..core.replaced import successor_of
from ..sites import under
from .fsdp_parameters import INNER, Run, clean, own_modules
from .fsdp_sharing import borrowed, instance_of
from .ranks import is_stand_in

if TYPE_CHECKING:
    from .fsdp import FullyShardedDataParallel


# -- Hooks of state dicts


def finish_state_dict(module: FullyShardedDataParallel, state_dict: Any, prefix: str, _: Any) -> None:
    """Give the entries names without wrappers and memory of their own, on ``state_dict_device``."""
    inner = f"{prefix}{INNER}."
    # A local state dict has the shards and buffers that are trained, not copies.
    live = set() if module._gives_local else _addresses_of_buffers(module)
    whole = {slot.summoned_at for slot in module._flat_slots() if slot.is_summoned}
    # Not others that start so: without a prefix, all do that a caller's ``destination`` had before.
    own = {*module._parameters, *module._buffers, *module._modules, "_extra_state"}
    keys = [key for key in state_dict if key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] in own]
    names = []
    for key in keys:
        value = state_dict.pop(key)
        if isinstance(value, torch.Tensor):
            value = _given(module, value, live, whole)
        names.append(prefix + key.removeprefix(inner) if key.startswith(inner) else key)
        state_dict[names[-1]] = value
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        for name in [name for name in metadata if INNER in name]:
            metadata.setdefault(clean(name), {}).update(metadata.pop(name))
    if module.state_dict_on_rank_0_only and module.rank != 0 and not module._gives_local:
        for name in names:
            del state_dict[name]


def _addresses_of_buffers(module: FullyShardedDataParallel) -> set[int]:
    members = own_modules(module.module)
    return {buffer.data_ptr() for _, member in members for buffer in member._buffers.values() if buffer is not None}


def _given(
    module: FullyShardedDataParallel, value: torch.Tensor, live: Collection[int], whole: Collection[int | None]
) -> torch.Tensor:
    """``value``, or a copy if it is at a ``live`` address, or in memory of ``whole`` parameters, by where that is."""
    is_live = value.data_ptr() in live or (bool(whole) and value.untyped_storage().data_ptr() in whole)
    dtype = torch.float32 if module.mixed_precision and value.is_floating_point() else value.dtype
    device = value.device if value.device.type == module.state_dict_device.type else module.state_dict_device
    if not is_live and (device, dtype) == (value.device, value.dtype):
        return value
    # Whole parameters are freed when the state dict is complete.
    return value.detach().to(device, dtype, copy=is_live).requires_grad_(value.requires_grad)


def refuse_joined(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """For ``state_dict`` of a module whose parameters are joined to others, which would leave them out in silence.

    Raises:
        StateError: unless they are whole, or those of each rank are what is wanted.
    """
    for name, value in vars(module).items():
        if isinstance(value, (nn.Parameter, AbsentParameter)) and not _gives_local(value):
            raise StateError(
                f"state_dict of {type(module).__name__}: FullyShardedDataParallel has joined its parameter {name!r} to "
                "others, outside of this module: call state_dict of what is wrapped, or this one inside "
                "`with wrapped.summon_full_params():`"
            )


def _gives_local(given: nn.Parameter | AbsentParameter) -> bool:
    """Whether the instance that has joined what a name gives, whole or absent, gives shards now."""
    if isinstance(given, AbsentParameter):
        shards = given.owner() if given.owner is not None else None
    else:
        sharded = successor_of(given)
        shards = owner_of(sharded) if sharded is not None else None
    instance = instance_of(shards)
    return instance is not None and instance._gives_local


def prepare_load(
    module: FullyShardedDataParallel,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    _missing: list[str],
    _unexpected: list[str],
    messages: list[str],
) -> None:
    """Give the entries names with the wrapper, and register whole parameters to write into."""
    module._enter_loading(messages)
    pairs = [*zip(module._runs, module._own_slots(), strict=True)] if module._gives_local else []
    joined = {prefix + run.name for run, _ in pairs if run.is_joined}
    shapes = {prefix + run.name: slot.local.shape for run, slot in pairs if not run.is_joined}
    for key in [key for key in state_dict if key.startswith(prefix) and key not in joined]:
        value, shape = state_dict.pop(key), shapes.get(key)
        if shape is not None and isinstance(value, torch.Tensor) and value.numel() == shape.numel():
            value = value.reshape(shape)  # the only rank's shard may have been saved with one dim
        state_dict[f"{prefix}{INNER}.{key.removeprefix(prefix)}"] = value


def finish_load(module: FullyShardedDataParallel, incompatible: Any) -> None:
    """Keep this rank's part of what was loaded, and take the wrapper's name out of the messages."""
    module._leave_loading()
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [clean(name) for name in names]


# -- Whole weights from shards


def describe_shards(root: FullyShardedDataParallel, instances: Sequence[FullyShardedDataParallel]) -> dict[str, Any]:
    """See `FullyShardedDataParallel.local_metadata_dict`."""
    described = {id(instance): _describe_instance(instance) for instance in instances}
    named = [(clean(path), module) for path, module in root.named_modules(remove_duplicate=False)]
    return {
        # An instance that is used in several places is in the weights as often.
        "param_metadata": [
            {"fsdp_path": path, **described[id(module)]} for path, module in named if id(module) in described
        ],
        "buffer_names": list(
            dict.fromkeys(under(path, name) for path, module in named for name in _saved_buffers(module))
        ),
    }


def _saved_buffers(module: torch.nn.Module) -> list[str]:
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _other_names(instance: FullyShardedDataParallel, run: Run) -> list[tuple[str, str]]:
    """Each member's name with each other name that it has, by ties or by modules in several places."""
    paths: dict[int, list[str]] = {}
    for path, module in instance.module.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(clean(path))
    found = []
    for member in run.members:
        for path, name in member.places:
            names = [under(other, name) for other in paths[id(instance.module.get_submodule(path))]]
            found += [(member.name, other) for other in names if other != member.name]
    return found


def _describe_instance(instance: FullyShardedDataParallel) -> dict[str, Any]:
    params: dict[str, Any] = {}
    shared: list[tuple[str, str]] = []
    padding = [slot.padding for slot in instance._own_slots()]
    for run, padded in zip(instance._runs, padding, strict=True):
        params[run.name] = {
            "names": [member.name for member in run.members],
            "shapes": [torch.Size(member.shape) for member in run.members],
            "numels": [torch.Size(member.shape).numel() for member in run.members],
            "padding": padded,
        }
        shared += _other_names(instance, run)
    for name, slot in borrowed(instance):
        shape = torch.Size(slot.parts[0].shape)
        params[name] = {"names": [name], "shapes": [shape], "numels": [shape.numel()], "padding": slot.padding}
    described = {
        "params": params,
        "no_broadcast_optim_state": instance.no_broadcast_optim_state,
        "shared_param_info": shared,
    }
    group = instance.process_group
    if not is_stand_in(group) and 1 < group.size() < dist.get_world_size():  # otherwise as FairScale has it
        described["ranks"] = dist.get_process_group_ranks(group)
    return described


def consolidate(
    weights: Sequence[Mapping[str, torch.Tensor]],
    metadata: Sequence[Mapping[str, Any]],
    with_buffers: bool,
    strict: bool,
) -> dict[str, torch.Tensor]:
    """See `FullyShardedDataParallel.consolidate_shard_weights`."""
    if not weights or len(weights) != len(metadata):
        raise ValueError(
            f"consolidate_shard_weights takes the weights and the metadata of every rank, and got {len(weights)} and "
            f"{len(metadata)} of them"
        )
    whole: dict[str, torch.Tensor] = {}
    for index, instance in enumerate(metadata[0]["param_metadata"]):
        path = instance["fsdp_path"]
        alike = [one["param_metadata"][index] for one in metadata]
        # Those of other groups have shards of other copies, or other experts. FairScale does not tell the ranks.
        members = [rank for rank, other in enumerate(alike) if other.get("ranks") == instance.get("ranks")]
        for name, described in instance["params"].items():
            key = under(path, name)
            if not strict and key not in weights[0]:
                continue
            paddings = {rank: alike[rank]["params"][name]["padding"] for rank in members}
            joined = _join(key, weights, paddings, sum(described["numels"]))
            for part, values, shape in zip(
                described["names"], joined.split(described["numels"]), described["shapes"], strict=True
            ):
                whole[under(path, part)] = values.view(shape)
        for first, other in instance["shared_param_info"]:
            if strict or under(path, first) in whole:
                whole[under(path, other)] = whole[under(path, first)]
    for name in metadata[0]["buffer_names"] if with_buffers else ():
        if strict or name in weights[0]:
            whole[name] = _entry(weights, 0, name)
    return whole


def _join(
    key: str, weights: Sequence[Mapping[str, torch.Tensor]], paddings: Mapping[int, int], total: int
) -> torch.Tensor:
    """The whole run ``key`` of ``total`` elements, from the shards of ranks, without their ``paddings``; the first ones
    are enough where they have all elements."""
    parts: list[torch.Tensor] = []
    for rank, padding in paddings.items():
        shard = _entry(weights, rank, key).reshape(-1)
        parts.append(shard[: shard.numel() - padding])
        if sum(part.numel() for part in parts) >= total:
            break
    joined = torch.cat(parts)
    if joined.numel() != total:
        raise ValueError(f"the shards of {key!r} have {joined.numel()} elements together, not {total}")
    return joined


def _entry(weights: Sequence[Mapping[str, torch.Tensor]], rank: int, key: str) -> torch.Tensor:
    if key not in weights[rank]:
        raise KeyError(f"the weights of rank {rank} have no {key!r}")
    return weights[rank][key]
