"""Trees of units: which modules belong to a unit, and what becomes of the units when the outermost one is known."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from .batch import make_batches
from .context import FSDPCommContext
from .device import eager, is_replicated_by_torch
from .errors import StateError
from .group import ShardState
from .lanes import device_for

if TYPE_CHECKING:
    from .hooks import Unit

UNIT = "_shardwise_unit"
"""The attribute of a wrapped module that is its unit."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a module was wrapped as, if it was."""
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit


def units_of(*models: nn.Module) -> list[Unit]:
    """The units of ``models`` and of the modules in them, each once, outer ones first."""
    return list(dict.fromkeys(unit for module in modules_in(models) if (unit := unit_of(module)) is not None))


def units_within(*models: nn.Module) -> list[Unit]:
    """The units of which all modules are ``models``, or in them."""
    inside = {*modules_in(models)}
    return [unit for unit in units_of(*models) if inside.issuperset(unit.modules)]


def modules_in(models: Sequence[nn.Module]) -> list[nn.Module]:
    """``models`` and the modules in them, each once, outer ones first: what `nn.Module.modules` gives, in a time that
    does not grow with their depth."""
    found: dict[nn.Module, None] = {}
    left = [*reversed(models)]
    while left:
        if (module := left.pop()) not in found:
            found[module] = None
            left += reversed([*module.children()])
    return [*found]


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
    make_batches(root, units)
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
        unit.rename(", ".join(filter(None, own)))
        for group in unit.groups:
            for slot in group.slots:
                places = ((place.module(), place.name) for place in slot.sharded_places)
                slot.name = next((known[module] + last for module, last in places if module in known), slot.name)
                slot.buffer.use_name(slot.index, slot.name)
