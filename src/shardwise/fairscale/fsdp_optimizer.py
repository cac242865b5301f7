"""Optimizer state of FullyShardedDataParallel, between shards and the parameters of the model without wrappers."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..arguments import check_state_dict
from ..core.agreement import communicating
from ..core.comm import Comm
from ..core.flat import FlatPart, FlatSlot
from ..core.step import parameters_of
from ..core.tree import tensors_in
from ..sites import under
from .fsdp_parameters import clean

if TYPE_CHECKING:
    from .fsdp import FullyShardedDataParallel

Part = tuple[FlatSlot, int]
"""A slot, and which of its parameters."""


def numbered_parts(root: FullyShardedDataParallel, instances: Sequence[FullyShardedDataParallel]) -> list[Part]:
    """The parameters of the model without wrappers, in the order of its ``parameters()``."""
    by_place: dict[tuple[int, str], Part] = {}
    names: dict[int, tuple[str, ...]] = {}
    for instance in instances:
        for path, own in instance._names.items():
            names[id(instance.module.get_submodule(path))] = own
        for slot in instance._own_slots():
            for index, part in enumerate(slot.parts):
                for place in part.places:
                    by_place[id(place.module()), place.name] = slot, index
    found: dict[tuple[int, int], Part] = {}
    for module in root.modules():
        for name in names.get(id(module), ()):
            if (part_of := by_place.get((id(module), name))) is not None:
                slot, index = part_of
                found.setdefault((id(slot), index), part_of)
    return list(found.values())


def _parts_by_instance(instances: Sequence[FullyShardedDataParallel]) -> list[Part]:
    """The parameters in the order in which FairScale numbers them."""
    slots = [slot for instance in instances for slot in instance._own_slots()]
    return [(slot, index) for slot in slots for index in range(len(slot.parts))]


# -- Gathering


def gather_optimizer_state(
    root: FullyShardedDataParallel,
    instances: Sequence[FullyShardedDataParallel],
    optimizer: Optimizer,
    recipient: int | None,
) -> dict[str, Any]:
    """See `FullyShardedDataParallel.gather_full_optim_state_dict`; other ranks than the recipient get no tensors."""
    numbers: dict[tuple[int, int], int] = {}
    for number, (slot, index) in enumerate(numbered_parts(root, instances)):
        numbers[id(slot), index] = number
    slots = {id(slot.sharded): (instance, slot) for instance in instances for slot in instance._own_slots()}
    members: list[list[tuple[FullyShardedDataParallel, FlatSlot]]] = []
    held: Mapping[torch.Tensor, Mapping[str, Any]] = {}
    failure: Exception | None = None
    try:
        _check_optimizer(optimizer)
        members = [_slots_of_group(group, slots) for group in optimizer.param_groups]
        _check_order(_in_parameters_order(root, instances), optimizer)
        held = _state_by_parameter(optimizer)
    except Exception as error:
        failure = error
    gathered = [pair for pairs in members for pair in pairs if _is_gathered(pair[0])]
    own_slots = [slot for instance, slot in slots.values() if _is_gathered(instance)]
    _check_alike(held, {id(slot) for _, slot in gathered}, own_slots, failure)
    receives = recipient is None or recipient == root.rank
    state: dict[int, dict[str, Any]] = {}
    for _, slot in gathered:
        own = held.get(slot.sharded)
        if own:
            for index, values in enumerate(_gather_slot(slot, own, receives)):
                state[numbers[id(slot), index]] = values
    named = _part_names(root, numbers, slots.values())
    groups = []
    for group, pairs in zip(optimizer.param_groups, members, strict=True):
        chosen = sorted(numbers[id(slot), index] for _, slot in pairs for index in range(len(slot.parts)))
        names = {"param_names": [named[number] for number in chosen]} if "param_names" in group else {}
        groups.append({**_settings_of(group), **names, "params": chosen})
    others = {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
    return {**copy.deepcopy(others), "state": dict(sorted(state.items())), "param_groups": groups}


def _check_optimizer(optimizer: Any) -> None:
    """
    Raises:
        TypeError: for what is no optimizer, by its methods.
    """
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state_dict")):
        raise TypeError(
            f"gather_full_optim_state_dict takes the optimizer, with param_groups and state_dict, not {optimizer!r}"
        )


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what a param group says of all its parameters together."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}


def _part_names(
    root: FullyShardedDataParallel,
    numbers: Mapping[tuple[int, int], int],
    slots: Iterable[tuple[FullyShardedDataParallel, FlatSlot]],
) -> dict[int, str]:
    """Names in the model without wrappers of the parameters with these ``numbers``."""
    paths = {id(module): clean(path) for path, module in root.named_modules()}
    return {
        numbers[id(slot), index]: under(paths[id(instance)], part.name)
        for instance, slot in slots
        for index, part in enumerate(slot.parts)
    }


def _slots_of_group(
    group: Mapping[str, Any], slots: Mapping[int, tuple[FullyShardedDataParallel, FlatSlot]]
) -> list[tuple[FullyShardedDataParallel, FlatSlot]]:
    for parameter in group["params"]:
        if id(parameter) not in slots:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not a shard of this module: "
                "make it over module.parameters() after wrapping"
            )
    return [slots[id(parameter)] for parameter in group["params"]]


def _check_order(in_order: Sequence[FlatSlot], optimizer: Optimizer) -> None:
    """Refuse another order than the module's, ``in_order``: state is matched with parameters by order alone.

    Raises:
        ValueError: for a param group with another order than the module.
    """
    positions = {id(slot.sharded): position for position, slot in enumerate(in_order)}
    for index, group in enumerate(optimizer.param_groups):
        own = [positions[id(parameter)] for parameter in group["params"]]
        if own != sorted(own):
            raise ValueError(
                f"param group {index} of the optimizer has its parameters in another order than module.parameters(), "
                "so its state could not be given back to the right ones: make it in that order"
            )


def _is_gathered(instance: FullyShardedDataParallel) -> bool:
    return not instance.no_broadcast_optim_state or instance.world_size == 1


def _state_by_parameter(optimizer: Optimizer) -> Mapping[torch.Tensor, Mapping[str, Any]]:
    """State as the optimizer holds it; for a wrapper that holds none, such as fairseq's, that of its ``state_dict``."""
    if hasattr(optimizer, "state"):
        return optimizer.state
    saved = optimizer.state_dict()
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    return {one: saved["state"].get(number, {}) for one, number in zip(parameters_of(optimizer), numbers, strict=True)}


def _check_alike(
    held: Mapping[torch.Tensor, Mapping[str, Any]],
    stepped: set[int],
    slots: Sequence[FlatSlot],
    failure: Exception | None,
) -> None:
    """Compare over ranks what is about to be gathered, since ranks that differ would wait for each other; a collective.

    Args:
        held: state by parameter.
        stepped: ids of the slots in the optimizer's param groups.
        slots: all that ranks share, in the optimizer or not.
        failure: what this rank raised before, if anything.

    Raises:
        Exception: ``failure``.
        RuntimeError: naming a parameter that has other state on another rank, or the failure of another rank.
    """
    by_comm: dict[Comm, list[FlatSlot]] = {}
    for slot in slots:
        by_comm.setdefault(slot.buffer.comm, []).append(slot)
    everyone = [
        (comm, {slot.name: f"state {_kinds(slot, held)}" if id(slot) in stepped else "no part" for slot in members})
        for comm, members in by_comm.items()
        if comm.size > 1
    ]
    said, told = failure and str(failure), []
    for comm, mine in everyone:
        with communicating("comparing the optimizer's state on all ranks", comm):
            told.append((comm, mine, comm.gather_objects((mine, said))))
    if failure is not None:
        raise failure
    for comm, mine, answers in told:
        for rank, (theirs, its_failure) in enumerate(answers):
            if its_failure is not None:
                raise RuntimeError(f"the optimizer's state cannot be gathered from rank {rank}: {its_failure}")
            for name in mine:
                if theirs.get(name) != mine[name]:
                    raise RuntimeError(
                        f"the optimizer has {mine[name]} for {name!r} on rank {comm.rank} and {theirs.get(name)} on "
                        f"rank {rank}, so it cannot be gathered: make it over the same parameters on all ranks, and "
                        "step it on all"
                    )


def _kinds(slot: FlatSlot, held: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[str, str]:
    """What each state of a parameter is to `_gather_value`."""
    return {str(key): _kind(value, slot.sharded) for key, value in held.get(slot.sharded, {}).items()}


def _kind(value: Any, shard: torch.Tensor) -> str:
    if getattr(value, "ndim", 0):
        return "elementwise" if value.shape == shard.shape else "of another shape"
    inside = [] if isinstance(value, torch.Tensor) else tensors_in(value)
    return "shards in a container" if any(tensor.shape == shard.shape for tensor in inside) else "a value"


def _gather_slot(slot: FlatSlot, state: Mapping[str, Any], receives: bool) -> list[dict[str, Any]]:
    """State of each parameter of ``slot``; of none where it is not received."""
    whole = {key: _gather_value(slot, key, value, receives) for key, value in state.items()}
    if not receives:
        return []
    return [
        {key: values[index] if _has_parts(state[key]) else copy.deepcopy(values) for key, values in whole.items()}
        for index in range(len(slot.parts))
    ]


def _has_parts(value: Any) -> bool:
    """Whether a state is not one for all parameters of a slot. Lists may be, so results do not tell."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _gather_value(slot: FlatSlot, key: str, value: Any, receives: bool) -> Any:
    """A list with the part of each parameter, or what they have in common."""
    if _kind(value, slot.sharded) == "shards in a container":
        raise ValueError(
            f"optimizer state {key!r} of {slot.name!r} is a {type(value).__name__} with tensors of this rank's "
            "elements: only those that are states by themselves can be gathered"
        )
    if not _has_parts(value):
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    if value.shape != slot.sharded.shape:
        raise ValueError(
            f"optimizer state {key!r} of {slot.name!r} has shape {tuple(value.shape)}, where its shard has "
            f"{tuple(slot.sharded.shape)}: only elementwise optimizers can be gathered"
        )
    run = slot.gather_like(value)
    return [view.cpu().clone() for view in slot.views(run)] if receives else []


# -- Cutting


def shard_optimizer_state(
    root: FullyShardedDataParallel, instances: Sequence[FullyShardedDataParallel], full: Mapping[str, Any]
) -> dict[str, Any]:
    """See `FullyShardedDataParallel.get_shard_from_optim_state_dict`."""
    if not isinstance(full, Mapping):
        raise TypeError(
            "get_shard_from_optim_state_dict takes the whole state on every rank, in a dict, not "
            f"{type(full).__name__}: gather_full_optim_state_dict(recipient_rank=None) gives it to all"
        )
    check_state_dict("get_shard_from_optim_state_dict", full)
    is_fairscales = "param_id_map" in full
    if is_fairscales:
        _check_wrapping(instances, full["param_id_map"])
    parts = _parts_by_instance(instances) if is_fairscales else numbered_parts(root, instances)
    numbers: dict[int, dict[int, int]] = {}
    for number, (slot, part) in enumerate(parts):
        numbers.setdefault(id(slot), {})[part] = number
    saved = sum(len(group["params"]) for group in full["param_groups"])
    if saved > len(parts):
        raise ValueError(f"the optimizer state is of {saved} parameters, and this module has {len(parts)}")
    in_order = _in_parameters_order(root, instances)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for index, group in enumerate(full["param_groups"]):
        members = [slot for slot in in_order if _belongs(slot, numbers[id(slot)].values(), set(group["params"]), index)]
        groups.append({**_settings_of(group), "params": list(range(position, position + len(members)))})
        for slot in members:
            values = [full["state"].get(numbers[id(slot)][part], {}) for part in range(len(slot.parts))]
            if any(values):
                state[position] = _cut_slot(slot, values, is_fairscales)
            position += 1
    dropped = ("state", "param_groups", "param_id_map", "uncollected_local_ids")
    others = {key: copy.deepcopy(value) for key, value in full.items() if key not in dropped}
    return {**others, "state": state, "param_groups": groups}


def _check_wrapping(instances: Sequence[FullyShardedDataParallel], numbered: Mapping[int, int | None]) -> None:
    """
    Args:
        instances: in the order in which FairScale numbers their parameters, one instance after the other.
        numbered: by each parameter's number that of the instance that FairScale's model had it in; None for those of
            instances without state.

    Raises:
        ValueError: if the parameters with state were divided otherwise: it would go to other parameters.
    """
    ends = [*accumulate(sum(len(slot.parts) for slot in instance._own_slots()) for instance in instances)]
    own = {*zip([0, *ends], ends, strict=False)}
    start = 0
    for instance, members in groupby(numbered[number] for number in sorted(numbered)):
        stop = start + len([*members])
        if instance is not None and (start, stop) not in own:
            raise ValueError(
                f"the optimizer state is that of a FairScale model with parameters {start} to {stop - 1} in one "
                "wrapped module, and here they are divided otherwise: FairScale numbers them by wrapped module, so "
                "wrap this model as that one was"
            )
        start = stop


def _in_parameters_order(
    root: FullyShardedDataParallel, instances: Sequence[FullyShardedDataParallel]
) -> list[FlatSlot]:
    slots = {id(slot.sharded): slot for instance in instances for slot in instance._own_slots()}
    for name, parameter in root.named_parameters():
        if id(parameter) not in slots:
            raise ValueError(
                f"parameter {name!r} is not a shard of this module: it was registered after wrapping, or is whole "
                "inside summon_full_params; leave that first, and register parameters before they are wrapped"
            )
    return [slots[id(parameter)] for parameter in root.parameters()]


def _belongs(slot: FlatSlot, own: Collection[int], group: set[int], index: int) -> bool:
    inside = group.intersection(own)
    if inside and len(inside) < len(own):
        names = ", ".join(repr(part.name) for part in slot.parts)
        raise ValueError(
            f"param group {index} of the optimizer state has some of {names}, which are joined to {slot.name!r} here: "
            "use flatten_parameters=False, or wrap those of each group by themselves"
        )
    return bool(inside)


def _cut_slot(slot: FlatSlot, values: Sequence[Mapping[str, Any]], is_fairscales: bool) -> dict[str, Any]:
    """This rank's state of ``slot`` from that of each of its parameters."""
    keys = dict.fromkeys(key for one in values for key in one)
    cut: dict[str, Any] = {}
    for key in keys:
        members = [(part, one.get(key)) for part, one in zip(slot.parts, values, strict=True)]
        there = [(part, value) for part, value in members if value is not None]
        first: Any = there[0][1] if there else None  # as earlier versions of torch saved SGD's momentum_buffer
        if not _is_elementwise(key, there):
            first = _own_of(first, slot.buffer.comm.rank) if is_fairscales else first
            cut[key] = first.detach().clone() if isinstance(first, torch.Tensor) else copy.deepcopy(first)
            continue
        for part, value in members:
            if value is not None and tuple(value.shape) != part.shape:
                raise ValueError(
                    f"optimizer state {key!r} of {part.name!r} has shape {tuple(value.shape)}, where the parameter has "
                    f"{part.shape}"
                )
        pieces = [
            first.new_zeros(part.numel) if value is None else value.detach().reshape(-1) for part, value in members
        ]
        cut[key] = slot.cut(torch.cat(pieces))
    return cut


COUNTS = ("step", "mu_product", "eta", "mu")
"""0-dim state of torch's optimizers that belongs to no element, even where the parameter is 0-dim too."""


def _is_elementwise(key: str, members: Sequence[tuple[FlatPart, Any]]) -> bool:
    if not any(isinstance(value, torch.Tensor) for _, value in members):
        return False
    if any(part.shape for part, _ in members):
        return any(value.ndim > 0 for _, value in members)
    return key not in COUNTS


def _own_of(value: Any, rank: int) -> Any:
    """``value``; of FairScale's list of each rank's tensor without dims, this rank's."""
    if isinstance(value, list) and value and all(isinstance(one, torch.Tensor) and one.ndim == 0 for one in value):
        return value[min(rank, len(value) - 1)]
    return value
