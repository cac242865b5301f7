"""Activation checkpointing of a module, by replacing its ``forward``."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..core.device import untraced
from ..core.tree import map_tensors


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Make ``module`` drop what its forward computed and compute it again in backward.

    All else is as without it: arguments and outputs of any kind, random numbers, autocast, the statistics of batch
    norms, names in the state dict, the class of the module. Without gradients, forward runs as it is.

    Args:
        module: changed in place; may contain wrapped modules, or be one.
        offload_to_cpu: whether its input tensors are kept in host memory until backward.

    Returns:
        ``module``. Wrapping it again changes only ``offload_to_cpu``.

    Raises:
        TypeError: if it is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint_wrapper takes a module, not {type(module).__name__}")
    # On the instance: a class of its own would hide the module's, which policies and checks of types look at.
    module.forward = _CheckpointedForward(module, offload_to_cpu)
    return module


class _CheckpointedForward:
    """Stands in for the method ``forward`` of a module; goes with it where that is copied or pickled.

    Args:
        module: held weakly, since it holds this.
        offload_to_cpu: as of `checkpoint_wrapper`.
    """

    def __init__(self, module: nn.Module, offload_to_cpu: bool):
        earlier = module.__dict__.get("forward")
        # A forward that was set on the instance runs inside; that of the class is looked up at each call.
        self._inner: Callable[..., Any] | None = (
            earlier._inner if isinstance(earlier, _CheckpointedForward) else earlier
        )
        self._offload_to_cpu = offload_to_cpu
        self._reference = weakref.ref(module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reference": self._reference()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reference=weakref.ref(state["_reference"]))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward_of(self._module))

    @property
    def _module(self) -> nn.Module:
        module = self._reference()
        if module is None:
            raise RuntimeError("forward was called after its module was gone: keep the module, not its forward")
        return module

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        return functools.partial(type(module).forward, module) if self._inner is None else self._inner

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        forward = self._forward_of(module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors: list[torch.Tensor] = []

        def take(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return torch.empty(0)  # another for each

        # All tensors become arguments of their own: torch keeps the random states of their devices, and offloading
        # frees only tensors that are not also held here.
        template = map_tensors((args, kwargs), take)
        given = [(args, kwargs)]
        del args, kwargs

        def run(*inputs: torch.Tensor) -> Any:
            # The first time with the caller's own containers, which forward may write to.
            remaining = iter(inputs)
            args, kwargs = given.pop() if given else map_tensors(template, lambda _: next(remaining))
            return forward(*args, **kwargs)

        with save_on_cpu(pin_memory=torch.cuda.is_available()) if self._offload_to_cpu else nullcontext():
            context = functools.partial(_contexts, module) if any(_statistics(module)) else noop_context_fn
            return checkpoint(run, *tensors, use_reentrant=False, context_fn=context)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(module)


def _statistics(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Buffers that forward adds running statistics to."""
    for norm in module.modules():
        if norm.training and getattr(norm, "track_running_stats", False):
            for name, buffer in norm.named_buffers(recurse=False):
                yield norm, name, buffer


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside, running statistics go to copies, since forward has counted the batch already."""
    # Not by turning the statistics off: operators would then save other tensors than in forward, which torch refuses.
    kept = list(_statistics(module))
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)
