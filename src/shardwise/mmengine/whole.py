"""What MMEngine does to a model between its steps, for a model that is sharded: initialize it, average it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.model import BaseAveragedModel
from torch import nn
from torch.distributed.tensor import DTensor

from ..adapters.copies import is_own
from ..checkpoint.full_state import load_weights
from ..checkpoint.weights import ModelWeights, Weight, peers_of, weights_of
from ..core.errors import StateError
from ..core.module import function_of
from ..sites import Site, before_sharding, under

HOOKS = (
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_forward_pre_hooks", "_forward_hooks"),
)

NOTES = "_params_init_info"
"""Attribute of modules in which MMEngine, while it initializes a model, has notes by parameter; where that fails they
stay, and the next attempt, with whole parameters of its own, would not find them there. Nor does a sharded part of a
model that is initialized."""


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, the parameters of ``model`` are whole and plain, on every rank; afterwards their shards, and everything
    else in the state dict, have the values that the first rank gave them, and are trained or frozen as there. A
    collective of all ranks.

    Memory for the whole model. Modules have the classes from before sharding, by whose names and bases MMEngine chooses
    what to initialize.

    Raises:
        StateError: if parameters are on the meta device; listing those that inside were registered, removed, tied, or
            replaced along with their module.
        ValueError: listing parameters whose shapes were changed inside; nothing is loaded then.
        Exception: what was raised inside, on all ranks.
    """
    peers, weights = peers_of(model), weights_of(model, state_of=_registered)
    weights.check_values()
    sharded = [weight for weight in weights.weights if isinstance(weight.tensor, DTensor) and weight.sites]
    in_order = sorted(sharded, key=lambda weight: min(weight.names))  # ranks may have modules in another one
    with _without_own_hooks(model), _without_notes(model), before_sharding(model.modules(), _gathered(in_order)):
        with peers.together():
            yield
            given = {name: tensor.detach() for name, tensor in _registered(model).items()}
            _refuse_moved(model, weights, sharded, given)
        trained = peers.exchange([weight.sites[0].get().requires_grad for weight in in_order])[0]
    for weight, is_trained in zip(in_order, trained, strict=True):
        weight.tensor.requires_grad_(is_trained)
    load_weights(weights_of(model, state_of=_registered), peers, given)


def _gathered(sharded: Iterable[Weight]) -> list[tuple[Site, torch.Tensor]]:
    """Whole plain parameters to take the places of ``sharded`` ones. A collective."""
    found: list[tuple[Site, torch.Tensor]] = []
    for weight in sharded:
        whole = nn.Parameter(weight.gather().detach().clone(), weight.tensor.requires_grad)
        found += [(site, whole) for site in weight.sites]
    return found


def _registered(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is in the state dict of ``model``, apart from what it or its hooks change there for saving."""
    return {
        under(path, name): tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def _refuse_moved(model: nn.Module, weights: ModelWeights, sharded: Sequence[Weight], given: Mapping[str, Any]) -> None:
    """
    Raises:
        StateError: listing what is registered in ``given`` and was not in that of ``weights``, or the other way
            round, and ``sharded`` parameters that are no longer each one parameter, where they were.
    """
    changed = {*(given.keys() ^ weights.keys.keys())}
    members, known = {*model.modules()}, dict[int, Weight]()
    for weight in sharded:
        modules = [site.module for site in weight.sites]
        found = {id(module._parameters.get(site.name)) for module, site in zip(modules, weight.sites, strict=True)}
        others = [known.setdefault(key, weight) for key in found]
        if others != [weight] or not members.issuperset(modules):
            changed.update(weight.names)
    if changed:
        raise StateError(
            f"init_weights registered, removed, tied or replaced {', '.join(map(repr, sorted(changed)))}: do so before "
            "wrapping, and only write values there"
        )


@contextmanager
def _without_own_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, modules lack the hooks of this library, which expect sharded parameters."""
    hooks = [(module, kind, module.__dict__[kind]) for module in model.modules() for kind in HOOKS]
    for module, kind, own in hooks:
        module.__dict__[kind] = type(own)((key, hook) for key, hook in own.items() if not is_own(hook))
    try:
        yield
    finally:
        for module, kind, own in hooks:
            added = module.__dict__[kind]
            module.__dict__[kind] = own
            own.update({key: hook for key, hook in added.items() if key not in own})


@contextmanager
def _without_notes(model: nn.Module) -> Iterator[None]:
    """Inside, MMEngine makes notes about ``model`` anew; what surrounds it finds its own again."""
    before = [(module, module.__dict__.pop(NOTES)) for module in model.modules() if NOTES in module.__dict__]
    try:
        yield
    finally:
        for module in model.modules():
            module.__dict__.pop(NOTES, None)
        for module, notes in before:
            module.__dict__[NOTES] = notes


def init_weights_whole(model: nn.Module) -> None:
    """Let ``model.init_weights()``, of a sharded model, see whole parameters, as in one process.

    The method is replaced on the instance, where `Runner` finds it by its name; the model's class stays as it is.
    """
    original = getattr(model, "init_weights", None)
    # A second Runner may wrap the same model.
    if not callable(original) or is_own(original):
        return

    reference, function = weakref.ref(model), function_of(model, "init_weights")

    def init_weights(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None
        with whole_parameters(alive):
            return function(alive, *args, **kwargs)

    init_weights.__doc__ = original.__doc__
    model.__dict__["init_weights"] = init_weights


# -- Averages


def repoint_averages(model: nn.Module) -> None:
    """Let MMEngine's averages inside ``model``, as of a teacher, update the parameters and buffers that they have now
    instead of those from before sharding, which they keep."""
    for average in model.modules():
        if isinstance(average, BaseAveragedModel):
            module = average.module
            found = module.state_dict() if average.update_buffers else dict(module.named_parameters())
            average.avg_parameters = {name: found[name] for name in average.avg_parameters}
