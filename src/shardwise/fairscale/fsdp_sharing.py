"""Parameters that several instances of FullyShardedDataParallel use."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from ..core.flat import FlatShards, FlatSlot
from ..core.parameter import owner_of
from ..core.place import Place
from ..core.root import set_unit
from .fsdp_parameters import clean, own_modules

if TYPE_CHECKING:
    from .fsdp import FullyShardedDataParallel


def share_parameter(parameter: nn.Parameter, borrower: FullyShardedDataParallel) -> None:
    """See `FullyShardedDataParallel.append_shared_param`."""
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"append_shared_param takes a parameter, not {type(parameter).__name__}")
    lender = instance_of(owner_of(parameter))
    if lender is None:
        raise ValueError("append_shared_param: the parameter is not sharded by another instance; wrap that one first")
    slot = next(slot for slot in lender._own_slots() if slot.sharded is parameter)
    if borrower.flatten_parameters or slot.home is not None:
        raise ValueError(f"append_shared_param: {slot.name!r} can be shared with flatten_parameters=False only")
    if borrower._unit.has_context or lender._unit.has_context:
        raise ValueError(f"append_shared_param: call it for {slot.name!r} before the first forward")
    if borrower._own is None:
        raise ValueError(f"append_shared_param: this instance has no parameter of its own beside {slot.name!r}")
    modules = own_modules(borrower.module)
    places = [Place(m, name) for _, m in modules for name, value in m._parameters.items() if value is parameter]
    slot.parts[0].places.extend(places)
    slot.places.extend(places)
    borrower._appended.append(parameter)
    _share_unit(borrower, lender)


def instance_of(shards: object) -> FullyShardedDataParallel | None:
    """The instance that has ``shards``, if they are those of one that is alive."""
    holder = shards.holder() if isinstance(shards, FlatShards) and shards.holder is not None else None
    return cast("FullyShardedDataParallel | None", holder)


def _share_unit(borrower: FullyShardedDataParallel, lender: FullyShardedDataParallel) -> None:
    """Let two instances be gathered together, before their first forward."""
    mine, other = borrower._unit, lender._unit
    modules = [*other.modules, *mine.modules]
    groups = [*other.groups, *mine.groups]
    kept_by_root = other.reshards_unless_root and mine.reshards_unless_root
    unit = type(other)(modules, groups, other.device, other.precision, kept_by_root)
    for module in modules:
        set_unit(module, unit)


def borrowed(instance: FullyShardedDataParallel) -> list[tuple[str, FlatSlot]]:
    """Parameters of other instances that are registered in ``instance`` too, by their names there."""
    slots = {id(slot.sharded): slot for slot in instance._flat_slots()}
    names = {id(p): name for name, p in instance.module.named_parameters(remove_duplicate=False)}
    return [(clean(names[id(p)]), slots[id(p)]) for p in instance._appended if id(p) in names]
