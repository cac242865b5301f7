"""Which modules of a model become units, and how they are wrapped."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import wrap as torch_wrap

from ..adapters.policies import Policy, chooser
from ..adapters.wrapping import (
    modules_with_units,
    refuse_foreign,
    refuse_uncuttable,
    share_values,
    take_whole_tensors,
)
from ..checkpoint.peers import Peers
from ..core.errors import StateError
from ..core.root import is_never_called, unit_of
from ..fairscale.checkpoint_wrapper import checkpoint_wrapper
from ..fairscale.wrap import auto_wrap, check_min_num_params, default_auto_wrap_policy, enable_wrap
from ..fully_shard import fully_shard
from ..init.initializers import InitFn, uninitialized
from ..init.targets import find_shards, find_targets, names_of_modules

INITIALIZERS = ("reset_parameters", "_reset_parameters", "_init_weights")
"""Methods of modules that `materialize` calls."""


@dataclass(frozen=True)
class Sharding:
    """How a model's units are made.

    Args:
        reshard_after_forward: whether units but the root free their parameters between forward and backward.
        precision: dtypes of the units.
        offload: whether shards, gradients and optimizer state are kept on the host.
        policy: chooses units; None for all modules with at least ``min_num_params`` parameters.
        min_num_params: for the default policy.
        checkpointing: chooses modules that compute their activations again in backward; None for none.
    """

    reshard_after_forward: bool = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: bool = False
    policy: Policy | None = None
    min_num_params: int = 100_000_000
    checkpointing: Policy | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            TypeError: for an argument of a wrong type.
            ValueError: for a number of parameters that is negative or NaN, or a policy that chooses containers.
        """
        if not isinstance(self.reshard_after_forward, int):
            raise TypeError(f"reshard_after_forward must be a bool or an int, not {self.reshard_after_forward!r}")
        if not isinstance(self.offload, bool):
            raise TypeError(f"cpu_offload must be a bool, not {self.offload!r}")
        check_min_num_params(self.min_num_params)
        if self.min_num_params < 0:
            raise ValueError(f"min_num_params={self.min_num_params}: a module cannot have fewer than no parameters")
        if not isinstance(self.precision, MixedPrecisionPolicy):
            raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, not {type(self.precision).__name__}")
        policies = {"auto_wrap_policy": self.policy, "activation_checkpointing_policy": self.checkpointing}
        for name, policy in policies.items():
            if policy is not None:
                chooser(policy, name)

    def wrap(self, module: nn.Module, mesh: DeviceMesh, *, is_root: bool = False, **overrides: Any) -> nn.Module:
        """Make one unit, in place; a module that is one already stays as it is.

        Args:
            module: to wrap.
            mesh: ranks to shard over.
            is_root: whether it is the outermost one.
            overrides: arguments of `fully_shard` that go before those of the strategy.
        """
        if unit_of(module) is not None:
            return module
        options = {
            "mesh": mesh,
            # The root's parameters are needed at once in backward, so by default it keeps them.
            "reshard_after_forward": None if is_root and self.reshard_after_forward else self.reshard_after_forward,
            "mp_policy": self.precision,
            "offload_policy": CPUOffloadPolicy(torch.cuda.is_available()) if self.offload else OffloadPolicy(),
        }
        fully_shard(module, **{**options, **overrides})
        return module

    @contextmanager
    def wrapping(self, mesh: DeviceMesh) -> Iterator[None]:
        """Inside, ``wrap`` and ``auto_wrap`` of `shardwise.fairscale`, and torch's ``wrap``, make units."""

        def wrapper(module: nn.Module, **overrides: Any) -> nn.Module:
            return self.wrap(module, mesh, **overrides)

        with enable_wrap(self._chooser(), wrapper_cls=wrapper), torch_wrap.enable_wrap(wrapper_cls=wrapper):
            yield

    def _chooser(self) -> Callable[..., bool]:
        if self.policy is None:
            return functools.partial(default_auto_wrap_policy, min_num_params=self.min_num_params)
        return chooser(self.policy)

    def shard(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        children_too: bool = False,
        is_initialized: bool = True,
        init_fn: InitFn | None = None,
    ) -> None:
        """Make units of the modules that the policy chooses, and at last of ``model`` itself.

        Modules that are units already are left as they are; the policy is then not asked, since the choice was made by
        hand. All ranks begin with the values of the first one. What is refused, by the policy too, is refused on
        all ranks, and before anything is changed.

        Args:
            model: changed in place.
            mesh: ranks to shard over.
            children_too: make units of the outermost modules inside as well, so that each can be called by itself.
            is_initialized: whether `materialize` will give values to what is on the meta device; otherwise something
                else, such as a checkpoint, does.
            init_fn: the user's initializer.

        Raises:
            TypeError: naming a module that another library has wrapped.
            ValueError: naming a tensor or a setting in which ranks differ, a parameter that cannot be cut, or one on
                the meta device that nothing initializes; listing modules that policies do not choose on all ranks.
        """
        with Peers(mesh).together():
            refuse_foreign(model)
            if unit_of(model) is not None:
                return
            refuse_uncuttable(model)
            if is_initialized:
                refuse_uninitialized(model, init_fn)
            chosen = self._chosen(model, children_too)
            checkpointed = _checkpointed(model, self.checkpointing)
        units = [*modules_with_units(model), *(module for module, _ in chosen)]
        choices = {"auto_wrap_policy": units, "activation_checkpointing_policy": checkpointed}
        settings = {"reshard_after_forward": self.reshard_after_forward, "mp_policy": self.precision}
        share_values(model, mesh, choices, settings)
        for module in checkpointed:
            checkpoint_wrapper(module)
        for module, overrides in chosen:
            self.wrap(module, mesh, **overrides)
        self.wrap(model, mesh, is_root=True)
        take_whole_tensors(model)

    def _chosen(self, model: nn.Module, children_too: bool) -> list[tuple[nn.Module, dict[str, Any]]]:
        """The modules inside ``model`` to wrap, those inside others first, each with arguments of its own."""
        if modules_with_units(model):
            if self.policy is not None:
                warnings.warn(
                    f"{type(model).__name__} has modules that were wrapped by hand, so auto_wrap_policy is not asked",
                    stacklevel=3,
                )
            return []
        chosen: list[tuple[nn.Module, dict[str, Any]]] = []

        policy, children = self._chooser(), _children(model, children_too)

        def choose(module: nn.Module, recurse: bool, unwrapped_params: int, **asked: Any) -> bool:
            # The model itself is wrapped last, and what is never called not at all.
            is_left = module is model or is_never_called(module)
            if module in children:
                return recurse or unwrapped_params > 0
            if is_left and (children or not recurse):
                return recurse
            return policy(module=module, recurse=recurse, unwrapped_params=unwrapped_params, **asked)

        def note(module: nn.Module, **overrides: Any) -> nn.Module:
            chosen.append((module, overrides))
            return module

        with enable_wrap(choose, wrapper_cls=note):
            auto_wrap(model)
        return chosen


def _children(model: nn.Module, are_wanted: bool) -> set[nn.Module]:
    """The outermost modules inside ``model`` that can be called."""
    children: set[nn.Module] = set()
    waiting = [model] if are_wanted else []
    while waiting:
        for child in waiting.pop().children():
            if is_never_called(child):
                waiting.append(child)
            else:
                children.add(child)
    return children


def refuse_uninitialized(model: nn.Module, init_fn: InitFn | None) -> None:
    """
    Raises:
        ValueError: naming what is on the meta device and has neither a recorded history nor a module around it with an
            initializer. (What initializers leave out is known only once they have run.)
    """
    if init_fn is not None:
        return
    initialized: set[nn.Module] = set()
    for module in model.modules():
        if any(callable(getattr(module, name, None)) for name in INITIALIZERS):
            initialized.update(module.modules())
    shards = find_shards(model)
    names = names_of_modules(model, shards)
    left = [
        target
        for target in find_targets(names, shards)
        if target.origin() is None and initialized.isdisjoint(site.module for site in target.sites)
    ]
    if left:
        raise StateError(uninitialized(left, names))


def _checkpointed(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """The modules inside ``model`` that are to compute their activations again in backward."""
    if policy is None:
        return []
    choose = chooser(policy)
    return [
        module
        for module in list(model.modules())[1:]
        if choose(
            module=module,
            recurse=False,
            unwrapped_params=sum(parameter.numel() for parameter in module.parameters()),
            module_is_root=False,
        )
    ]


def move_metrics(model: nn.Module, device: torch.device) -> None:
    """Put the states of torchmetrics' metrics, which are neither parameters nor buffers, where ``model`` computes."""
    for module in model.modules():
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
            module.to(device)
