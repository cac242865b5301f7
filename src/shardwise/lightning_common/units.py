"""Which modules of a model become units, and how they are wrapped."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..checkpoint.peers import Peers
from ..core.module import FSDPModule, unit_of
from ..fairscale.checkpoint_wrapper import checkpoint_wrapper
from ..fairscale.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap
from ..fully_shard import fully_shard
from ..init.context import MARK, MARKS
from .optimizers import cut
from .weights import LOADED

Policy = Callable[..., bool] | Iterable[type[nn.Module]]
"""Chooses modules: a function of torch's or FairScale's form (module, recurse, number of parameters), a function of
the module alone, or classes of modules."""


@dataclass(frozen=True)
class Sharding:
    """How a model's units are made.

    Args:
        reshard_after_forward: whether units but the root let go of their parameters between forward and backward.
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
        """
        if not isinstance(self.precision, MixedPrecisionPolicy):
            raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, not {type(self.precision).__name__}")
        for policy in (self.policy, self.checkpointing):
            if policy is not None:
                chooser(policy)

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

    def shard(self, model: nn.Module, mesh: DeviceMesh, *, children_too: bool = False) -> None:
        """Make units of the modules that the policy chooses, and at last of ``model`` itself.

        Modules that are units already are left as they are, and the policy then is not asked: who wraps by hand has
        chosen. All ranks begin with the values of the first one.

        Args:
            model: changed in place.
            mesh: ranks to shard over.
            children_too: make units of the outermost modules inside as well, which are then called by themselves.

        Raises:
            TypeError: naming a module that another library has wrapped.
            ValueError: naming what ranks have differently, or a parameter that cannot be cut; nothing is changed then.
        """
        refuse_foreign(model)
        if unit_of(model) is not None:
            return
        refuse_scalars(model)
        share_values(model, mesh)
        if self.checkpointing is not None:
            apply_checkpointing(model, self.checkpointing)
        if any(unit_of(module) is not None for module in model.modules()):
            if self.policy is not None:
                warnings.warn(
                    f"{type(model).__name__} has modules that were wrapped by hand, so auto_wrap_policy is not asked",
                    stacklevel=2,
                )
        else:
            choose = functools.partial(_choose_inside, model, self._chooser(), *(_children(model, children_too)))
            with enable_wrap(choose, wrapper_cls=functools.partial(self.wrap, mesh=mesh)):
                auto_wrap(model)
        self.wrap(model, mesh, is_root=True)
        for module in model.modules():
            if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
                module.register_load_state_dict_pre_hook(_cut_whole)


def _cut_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Callbacks and users load whole state dicts, those of one process, by ``load_state_dict``."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None:
            state_dict[prefix + name] = cut(value, parameter)


def _children(model: nn.Module, are_wanted: bool) -> tuple[set[nn.Module], set[nn.Module]]:
    """The outermost modules inside ``model`` that can be called, and the containers that they are in."""
    children: set[nn.Module] = set()
    containers: set[nn.Module] = set()
    waiting = [model] if are_wanted else []
    while waiting:
        for child in waiting.pop().children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                containers.add(child)
                waiting.append(child)
            else:
                children.add(child)
    return children, containers


def _choose_inside(
    model: nn.Module,
    policy: Callable[..., bool],
    children: set[nn.Module],
    containers: set[nn.Module],
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
) -> bool:
    """``policy``, with ``children`` chosen beside and never ``model``, which is wrapped last."""
    if module is model or module in containers:
        return recurse and (bool(children) or policy(module, recurse, unwrapped_params, module_is_root))
    if module in children:
        return recurse or unwrapped_params > 0
    return policy(module, recurse, unwrapped_params, module_is_root)


def refuse_foreign(model: nn.Module) -> None:
    """
    Raises:
        TypeError: naming a module that another library has wrapped.
    """
    for name, module in model.named_modules():
        foreign = isinstance(module, (FullyShardedDataParallel, DistributedDataParallel))
        if foreign or (unit_of(module) is None and isinstance(module, TorchFSDPModule)):
            raise TypeError(
                f"module {name!r} ({type(module).__name__}) is wrapped by torch's own data parallelism: use "
                "shardwise.fully_shard, or leave the wrapping to the strategy"
            )


@torch.no_grad()
def share_values(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks of ``mesh`` the first one's values of everything in ``model`` that is neither sharded nor on the
    meta device.

    Raises:
        ValueError: on all ranks, naming what ranks have differently: other tensors, or on another kind of device.
    """
    peers = Peers(mesh)
    named = [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if not is_lazy(t)]
    described = {name: f"{tuple(t.shape)} {t.dtype}{' on meta' if t.is_meta else ''}" for name, t in named}
    for rank, other in zip(peers.ranks, peers.exchange(described), strict=True):
        if other != described:
            name = next(name for name in (*described, *other) if other.get(name) != described.get(name))
            raise ValueError(
                f"the ranks have different models: {name!r} is {described.get(name)} on rank "
                f"{peers.ranks[peers.position]}, and {other.get(name)} on rank {rank}"
            )
    for _, tensor in named:
        if isinstance(tensor, DTensor) or tensor.is_meta or not tensor.numel() or LOADED in tensor.__dict__:
            continue
        value = tensor.detach().to(peers.device).contiguous()
        # As bytes: not every backend knows every dtype.
        peers.broadcast(value.view(-1).view(torch.uint8))
        if value.data_ptr() != tensor.data_ptr():
            tensor.copy_(value)


def refuse_scalars(model: nn.Module) -> None:
    """
    Raises:
        ValueError: naming a parameter that cannot be cut, before anything else is.
    """
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and not parameter.ndim:
            raise ValueError(
                f"parameter {name!r} is a scalar, which cannot be cut: make it a 1-D tensor of one element"
            )


def apply_checkpointing(model: nn.Module, policy: Policy) -> None:
    """Let the modules inside ``model`` that ``policy`` chooses compute their activations again in backward."""
    choose = chooser(policy)
    for module in list(model.modules())[1:]:
        number = sum(parameter.numel() for parameter in module.parameters())
        if choose(module=module, recurse=False, unwrapped_params=number, module_is_root=False):
            checkpoint_wrapper(module)


def chooser(policy: Policy) -> Callable[..., bool]:
    """``policy`` in the form that `shardwise.fairscale.auto_wrap` asks.

    Raises:
        TypeError: if it is neither a function nor classes of modules.
    """
    if callable(policy) and not isinstance(policy, type):
        return functools.partial(_ask, policy)
    classes = (policy,) if isinstance(policy, type) else tuple(policy) if isinstance(policy, Iterable) else ()
    if not classes or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
        raise TypeError(f"a policy must be a function of a module or a set of module classes, not {policy!r}")
    return functools.partial(_is_one_of, classes)


def _is_one_of(
    classes: tuple[type, ...], module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    return recurse or isinstance(module, classes)


def _ask(
    policy: Callable[..., Any], module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    known = {
        "module": module,
        "recurse": recurse,
        "unwrapped_params": unwrapped_params,
        "nonwrapped_numel": unwrapped_params,
        "module_is_root": module_is_root,
    }
    parameters = inspect.signature(policy).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return bool(policy(**known))
    if "recurse" in parameters:
        return bool(policy(**{name: value for name, value in known.items() if name in parameters}))
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if len(required) == 1:
        return recurse or bool(policy(module))
    return bool(policy(module, recurse, unwrapped_params))


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward passes of ``model`` add up its gradients without communication."""
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [module.reduce_grads for module in units]
    for module in units:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module, synchronizes in zip(units, before, strict=True):
            module.set_requires_gradient_sync(synchronizes, recurse=False)


def move_metrics(model: nn.Module, device: torch.device) -> None:
    """Put the states of torchmetrics' metrics, which are neither parameters nor buffers, where ``model`` computes."""
    for module in model.modules():
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
            module.to(device)


def forget_history(model: nn.Module) -> None:
    """Let parameters on the meta device be initialized as if nothing had been recorded of their constructors."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                parameter.__dict__.pop(MARK, None)
                module.__dict__.get(MARKS, {}).pop(name, None)
