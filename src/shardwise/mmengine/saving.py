"""Checkpoints in MMEngine's format: one file, with the whole tensors of one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from mmengine.config import ConfigDict
from mmengine.dist import is_main_process
from mmengine.logging import HistoryBuffer
from mmengine.optim import OneCycleParamScheduler
from torch import nn
from torch.distributed.tensor import DTensor

from ..adapters.whole import gather_in
from ..checkpoint.full_state import full_state_dict
from ..checkpoint.objects import numpy_types
from ..checkpoint.peers import Peers, world_mesh
from ..core.errors import StateError
from ..core.tree import tensors_in
from ..sites import under

DTYPES = "_shardwise_dtypes"
"""Attribute of a module whose floating-point buffers were cast: their dtypes before, by name. Copies have it too."""


@contextmanager
def whole_states(model: nn.Module, optim_wrapper: Any, hooks: Iterable[Any]) -> Iterator[None]:
    """Inside, ``state_dict()`` of the model, of the wrapper of its optimizers, and of averages in hooks, gives whole
    tensors on the main process. Entering and leaving are collectives of all ranks, which all fail if one of these
    fails, or what is done inside on one rank.

    Args:
        model: sharded.
        optim_wrapper: None, or with a state to save.
        hooks: of the Runner, whose attributes may be copies of the model.
    """
    # A wrapper gives the state of the model in it.
    averages = [found for found in _sharded_modules(hooks) if model not in (found, getattr(found, "module", None))]
    others = averages if optim_wrapper is None else [optim_wrapper, *averages]
    ranks = Peers(world_mesh())
    # Before anything is gathered, for which the others would wait.
    with ranks.together():
        states = [other.state_dict() for other in others]
    with ExitStack() as stack:
        stack.enter_context(_giving(model, _before_casts(model, full_state_dict(model))))
        for other, state in zip(others, states, strict=True):
            whole = gather_in(state, keeps=is_main_process())
            stack.enter_context(_giving(other, _before_casts(other, whole)))
        with ranks.together():
            yield


def _before_casts(owner: Any, state: Any) -> Any:
    """``state`` of ``owner`` with buffers in the dtypes from before they were cast, as torch's FSDP saves them."""
    modules = owner.named_modules(remove_duplicate=False) if isinstance(owner, nn.Module) else ()
    for path, module in modules:
        for name, dtype in module.__dict__.get(DTYPES, {}).items():
            key = under(path, name)
            if isinstance(state.get(key), torch.Tensor):
                state[key] = state[key].to(dtype)
    return state


@contextmanager
def _giving(owner: Any, state: Any) -> Iterator[None]:
    """Inside, ``state_dict()`` of ``owner`` returns ``state``."""
    own = owner.__dict__.pop("state_dict", None)  # programs replace it on an instance, as for a part of the weights
    owner.__dict__["state_dict"] = lambda *_, **__: state
    try:
        yield
    finally:
        del owner.__dict__["state_dict"]
        if own is not None:
            owner.__dict__["state_dict"] = own


def _sharded_modules(hooks: Iterable[Any]) -> list[nn.Module]:
    found = [value for hook in hooks for value in vars(hook).values() if isinstance(value, nn.Module)]
    return [module for module in found if any(isinstance(parameter, DTensor) for parameter in module.parameters())]


def refuse_shards(checkpoint: Mapping[str, Any]) -> None:
    """For a checkpoint that hooks have added to, on the main process alone.

    Raises:
        StateError: naming an entry with sharded tensors, of which the file would have the main process's part only.
    """
    for name, value in checkpoint.items():
        if any(isinstance(tensor, DTensor) for tensor in tensors_in(value)):
            raise StateError(
                f"checkpoint[{name!r}] has tensors of which this process has a part. Where the Runner's model is an "
                "MMFullyShardedDataParallel, its state, that of its optimizers, and those of averages that are "
                "attributes of hooks are whole here; gather others before, on all ranks"
            )


def _method(owner: Any, name: str) -> Any:
    """The uses of `getattr` that checkpoints need: a history of logged values names the methods of its statistics, and
    `OneCycleLR` the method by which it anneals.

    Raises:
        UnpicklingError: for any other use.
    """
    is_statistic = owner is HistoryBuffer and not name.startswith("_")
    if not is_statistic and (owner is not OneCycleParamScheduler or not name.startswith("_annealing_")):
        raise pickle.UnpicklingError(f"the checkpoint asks for attribute {name!r} of {owner!r}, which is not allowed")
    return getattr(owner, name)


def allow_checkpoints() -> None:
    """Let `torch.load` read, without ``weights_only=False``, what MMEngine's checkpoints have beside tensors: histories
    of logged values, configs, a schedule's function, numpy's arrays and numbers."""
    own = [HistoryBuffer, OneCycleParamScheduler, ConfigDict, (_method, "builtins.getattr")]
    torch.serialization.add_safe_globals([*own, *numpy_types()])


allow_checkpoints()
