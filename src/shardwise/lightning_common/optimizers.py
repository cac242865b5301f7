"""Optimizers of sharded models: moving them to the sharded parameters, and their state as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..adapters.whole import cut_state, gathered
from ..core.device import eager, local_of, not_inference
from ..core.step import parameters_of
from ..core.tree import map_tensors, tensors_in
from ..optim import repoint


def refuse_strangers(optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    """
    Raises:
        ValueError: naming an optimizer that has none of the parameters of ``model``.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        repoint(optimizer)  # the model may have been wrapped by hand after it was made
        if not any(id(parameter) in own for parameter in parameters_of(optimizer)):
            raise ValueError(f"{type(optimizer).__name__} {WITHOUT_PARAMETERS}")


def attach(optimizer: Optimizer) -> None:
    """Move an optimizer to the sharded successors of its parameters, which have values.

    Groups, settings and state stay; state that the constructor made of parameters on the meta device
    (Adagrad's) is made again.

    Raises:
        ValueError: if that cannot be done.
    """
    has_no_values = any(tensor.is_meta for tensor in tensors_in(list(optimizer.state.values())))
    if has_no_values:
        optimizer.state.clear()
    repoint(optimizer)
    if not has_no_values:
        return
    kind: Any = type(optimizer)
    try:
        again = kind([dict(group) for group in optimizer.param_groups], **optimizer.defaults)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__} has state on the meta device, which its constructor cannot make again: make it after "
            "the model was set up"
        ) from error
    optimizer.state.update(again.state)


WITHOUT_PARAMETERS = (
    "does not reference any of the sharded parameters, so it would train nothing. HINT: create the optimizer in "
    "configure_optimizers() from `self.trainer.model.parameters()` or self.parameters()"
)


@torch.no_grad()
def full_optimizer_state(optimizer: Optimizer, *, keeps: bool) -> dict[str, Any]:
    """The optimizer's state dict with whole plain tensors on the host, as one process would have it.

    All ranks that hold its parameters call this; memory for one whole tensor beside what is kept.

    Args:
        optimizer: over sharded parameters or plain ones.
        keeps: whether this rank keeps it.

    Returns:
        The state dict; an empty dict where it is not kept.
    """
    packed = optimizer.state_dict()
    state: dict[Any, Any] = {}
    with not_inference():
        for key, values in packed["state"].items():
            whole = map_tensors(values, lambda tensor: gathered(tensor, keeps))
            if keeps:
                state[key] = whole
    return {**packed, "state": state} if keeps else {}


@torch.no_grad()
def load_full_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict with whole tensors, that of one process or of `full_optimizer_state`.

    Args:
        optimizer: over sharded parameters or plain ones.
        saved: is not changed; only this rank's part of tensors that are mapped from a file is read.

    Raises:
        ValueError: if ``saved`` is not a state dict of an optimizer, its param groups differ, or parameters are on the
            meta device.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        found = list(saved)[:5] if isinstance(saved, Mapping) else [saved]
        raise ValueError(
            f"this is not a state dict of {type(optimizer).__name__}: it has "
            f"{', '.join(f'{item!r:.80}' for item in found)} instead of 'state' and 'param_groups'"
        )
    if any(parameter.is_meta for parameter in parameters_of(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} has parameters on the meta device, so its state has no place: set it up with "
            "its model, or load the model first"
        )
    state = cut_state(optimizer, saved)
    with not_inference():
        optimizer.load_state_dict({**state, "param_groups": list(saved["param_groups"])})


@eager
@torch.no_grad()
def clip_grad_value_(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Limit each element of the gradients to ``-clip_value`` … ``clip_value``, in place; no communication."""
    clip_value = float(clip_value)  # of a string too, as torch takes it
    for parameter in parameters:
        if parameter.grad is not None:
            local_of(parameter.grad).clamp_(-clip_value, clip_value)
