"""The model wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from mmengine.optim import OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from ..adapters.copies import allow_copies
from ..adapters.wrapping import forget_history, show_shards, without_gradient_sync
from ..arguments import check_arguments, documented
from ..core.changing import changing
from ..core.device import eager
from ..init import materialize
from . import arguments
from .arguments import WRAPPER_ARGUMENTS, Precision, wrong_type
from .optimizers import prepare_optim_wrapper
from .policies import find_policy
from .saving import DTYPES
from .units import Units
from .whole import init_weights_whole, repoint_averages

NAME = "MMFullyShardedDataParallel"


@MODEL_WRAPPERS.register_module(name=[NAME, "ShardwiseDataParallel"], force=True)
@documented(WRAPPER_ARGUMENTS)
class MMFullyShardedDataParallel(nn.Module):
    """A model whose parameters, gradients and optimizer state are in shards over the ranks, with the steps that
    MMEngine's loops call: ``Runner(model_wrapper_cfg=dict(type="MMFullyShardedDataParallel", ...))``.

    ``module`` is the model, the same object, with parameters of the same names. Attributes that the wrapper does not
    have are looked up there. Its state dict has the model's names.

    Raises:
        TypeError: for an argument of a wrong type, or an unknown one; the message names it, and what it takes.
        ValueError: for an unknown name, or arguments that exclude each other.
    """

    module: Any

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        cpu_offload: Any = None,
        fsdp_auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        sharding_strategy: Any = None,
        mixed_precision: Any = None,
        param_init_fn: Any = None,
        use_orig_params: bool = True,
        ignored_modules: Any = None,
        ignored_parameters: Any = None,
        auto_wrap_policy: Any = None,
        ignored_states: Any = None,
        device_mesh: Any = None,
        sync_module_states: bool = True,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        device_id: Any = None,
        device_ids: Any = None,
        **kwargs: Any,
    ):
        given = dict(locals())
        super().__init__()
        if kwargs:
            raise TypeError(f"{NAME} got {', '.join(map(repr, kwargs))}; it takes {', '.join(WRAPPER_ARGUMENTS)}")
        arguments.check_device(device_id)
        check_arguments(MMFullyShardedDataParallel.__init__, NAME, WRAPPER_ARGUMENTS, given)
        if not isinstance(module, nn.Module):
            raise wrong_type("module", module, "a torch.nn.Module")
        init_fn = arguments.find_function("param_init_fn", param_init_fn)
        units = _find_units(given)
        if init_fn is not None:
            forget_history(module)
        units.make(module)
        materialize(module, init_fn=init_fn)
        if units.precision.buffers is not None:
            _cast_buffers(module, units.precision)
        init_weights_whole(module)
        allow_copies(module)
        repoint_averages(module)
        self.module = module
        self.register_load_state_dict_pre_hook(_take_models_names)  # type: ignore[no-untyped-call]
        self._syncs_gradients = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how to copy the wrapper is not how to copy the model
                raise
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    # -- Steps

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """Compute losses of a batch, and let ``optim_wrapper`` update the parameters.

        Args:
            data: from the dataloader.
            optim_wrapper: of an optimizer over the model's parameters; decides when gradients are reduced.

        Returns:
            The values to log, by name.

        Raises:
            TypeError: if the data preprocessor gives neither a dict, nor a list or tuple.
            NotImplementedError: for an `OptimWrapperDict`.
        """
        if getattr(type(optim_wrapper), "optim_context", None) is OptimWrapperDict.optim_context:
            raise NotImplementedError(
                f"train_step of {type(self).__name__} takes one optimizer, and each one of an OptimWrapperDict "
                f"({', '.join(optim_wrapper.keys())}) has an `optim_context` of its own: derive a class whose "
                "train_step steps them, register it in MODEL_WRAPPERS, and name it as model_wrapper_cfg"
            )
        prepare_optim_wrapper(optim_wrapper)
        with optim_wrapper.optim_context(self):
            losses = self._run_forward(self.module.data_preprocessor(data, training=True), mode="loss")
            syncs = self._syncs_gradients
        loss, log_vars = self.module.parse_losses(losses)
        # Whether gradients are reduced is decided in backward, which runs after `optim_context` has ended.
        with nullcontext() if syncs else self.no_sync():
            _update(optim_wrapper, loss)
        values: dict[str, torch.Tensor] = log_vars
        return values

    def val_step(self, data: Any) -> Any:
        """Predictions for a batch.

        Args:
            data: from the dataloader.

        Raises:
            TypeError: if the data preprocessor gives neither a dict, nor a list or tuple.
        """
        predictions = self._run_forward(self.module.data_preprocessor(data, False), mode="predict")
        # No backward follows that would reshard, and hooks exchange parameters with averages between epochs.
        show_shards(self.module)
        return predictions

    def test_step(self, data: Any) -> Any:
        """As `val_step`."""
        return self.val_step(data)

    def _run_forward(self, data: Any, mode: str) -> Any:
        if isinstance(data, dict):
            return self(**data, mode=mode)
        if isinstance(data, (list, tuple)):
            return self(*data, mode=mode)
        raise TypeError(f"Output of `data_preprocessor` should be list, tuple or dict, but got {type(data)}")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients on each rank, without communication; also those of steps whose
        forward runs inside and whose backward `train_step` runs after it."""
        with changing([self], "_syncs_gradients", False), without_gradient_sync(self.module):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The model's; also of what was added up under `no_sync`."""
        self.module.zero_grad(set_to_none)

    # -- State

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's: DTensors where parameters are sharded; for whole tensors `shardwise.full_state_dict`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The model's; takes whole tensors as well as DTensors."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def set_state_dict_type(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        Raises:
            TypeError: MMEngine's FSDPStrategy calls this, which is for torch's FullyShardedDataParallel.
        """
        raise TypeError("FSDPStrategy is for torch's own FSDP: use strategy=dict(type='ShardwiseStrategy', ...)")


@eager
def _update(optim_wrapper: Any, loss: torch.Tensor) -> None:
    """Run backward and the optimizer, outside of what is compiled where `train_step` is: only the model is."""
    optim_wrapper.update_params(loss)


def _find_units(given: Mapping[str, Any]) -> Units:
    """What the wrapper's arguments say about units."""
    names = [name for name in ("auto_wrap_policy", "fsdp_auto_wrap_policy") if given[name] is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} are two names of one argument: pass one")
    module = given["module"]
    policy = find_policy(names[0], given[names[0]], module) if names else None
    prefetch = arguments.find_prefetch(given["backward_prefetch"])
    strategy = arguments.find_strategy(given["sharding_strategy"])
    precision = arguments.find_precision(given["mixed_precision"])
    offload = arguments.find_offload(given["cpu_offload"])
    ignored = arguments.find_ignored(
        module, given["ignored_modules"], given["ignored_parameters"], given["ignored_states"]
    )
    # Last: it may have to wait for other ranks.
    mesh = arguments.find_mesh(strategy, given["process_group"], given["device_mesh"])
    return Units(mesh, strategy, precision, offload, policy, *ignored, prefetch)


def _cast_buffers(model: nn.Module, precision: Precision) -> None:
    for module in model.modules():
        if not precision.exempts(module):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module.__dict__.setdefault(DTYPES, {}).setdefault(name, buffer.dtype)
                    buffer.data = buffer.to(precision.buffers)


def _take_models_names(wrapper: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """For `load_state_dict` of a module around ``wrapper``, whose `state_dict` has the model's names too."""
    for name in wrapper.state_dict():
        if prefix + name in state_dict:
            state_dict[f"{prefix}module.{name}"] = state_dict.pop(prefix + name)


def sharded_model(model: Any) -> nn.Module | None:
    """The model inside a wrapper of this library; None for anything else."""
    return model.module if isinstance(model, MMFullyShardedDataParallel) else None
