"""The strategy for `FlexibleRunner`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mmengine._strategy import DDPStrategy, SingleDeviceStrategy
from mmengine.device import get_device
from mmengine.dist import is_main_process
from mmengine.hooks import EMAHook
from mmengine.model import BaseDataPreprocessor, is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS, STRATEGIES
from torch import nn

from ..adapters.wrapping import modules_with_units
from .arguments import wrong_type
from .optimizers import prepare_optim_wrapper
from .processes import init_process_group
from .saving import refuse_shards, whole_states
from .wrapper import NAME, sharded_model


def _own(wrapped: nn.Module) -> nn.Module:
    """
    Raises:
        TypeError: if another wrapper has the model, whose state this strategy would not gather.
    """
    if sharded_model(wrapped) is None:
        raise TypeError(f"ShardwiseStrategy's model_wrapper should be a {NAME}, but is a {type(wrapped).__name__}")
    return wrapped


def _set_device(preprocessor: BaseDataPreprocessor, device: str) -> None:
    """Let ``preprocessor`` bring batches to ``device``, with what it holds."""
    if any(tensor.is_meta for tensor in (*preprocessor.parameters(), *preprocessor.buffers())):
        # There is nothing to move yet: wrapping gives each tensor its values, on the device, and moves the others.
        preprocessor._device = torch.device(device)
    else:
        preprocessor.to(device)


def _is_initialized_sharded(model: nn.Module) -> bool:
    """Whether ``model`` has no values before it is sharded, or is sharded already, so that only the wrapper, which lets
    it see whole parameters, can initialize it."""
    return any(parameter.is_meta for parameter in model.parameters()) or bool(modules_with_units(model))


def _make_average(hook: Any, runner: Any) -> None:
    """Let ``hook`` make its average now: a `FlexibleRunner` loads checkpoints before it calls ``before_run``."""
    hook.before_run(runner)
    # On the instance, and once: the call that comes later would replace the average.
    hook.before_run = functools.partial(_skip_once, hook)


def _skip_once(hook: Any, runner: Any) -> None:
    del hook.before_run


def _call_and_check(callback: Callable[[dict[str, Any]], Any] | None, checkpoint: dict[str, Any]) -> None:
    if callback is not None:
        callback(checkpoint)
    refuse_shards(checkpoint)


@STRATEGIES.register_module()
class ShardwiseStrategy(DDPStrategy):  # type: ignore[misc]  # MMEngine has no types
    """Parameters, gradients and optimizer state in shards: ``FlexibleRunner(strategy=dict(type="ShardwiseStrategy"))``.

    The model is built and initialized on the host, and each rank moves its part to the device. Checkpoints are one
    file with whole tensors, as other strategies write and read them.

    Args:
        model_wrapper: arguments of `MMFullyShardedDataParallel`, in a dict.
        kwargs: those of MMEngine's strategies: ``work_dir``, ``sync_bn``, ``env_kwargs`` …
    """

    runner: weakref.ref[Any] | None = None
    """The runner, whose hooks may have averages of the model."""

    def _hooks(self) -> list[Any]:
        runner = None if self.runner is None else self.runner()
        return [] if runner is None else runner.hooks

    def _setup_distributed(
        self, launcher: str = "pytorch", backend: str | None = None, timeout: float | None = None, **kwargs: Any
    ) -> None:
        """Join the process group. Without a GPU, MMEngine's default backend "nccl" becomes that of the CPU."""
        if launcher != "pytorch":
            super()._setup_distributed(launcher, backend or "nccl", **kwargs)
            return
        if kwargs:
            raise TypeError(f"dist_cfg has {', '.join(map(repr, kwargs))}; it takes backend and timeout")
        init_process_group(None if backend == "nccl" and not torch.cuda.is_available() else backend, timeout)

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if is_model_wrapper(model):
            return _own(model)
        if not isinstance(self.model_wrapper, Mapping | None):
            raise wrong_type("ShardwiseStrategy's model_wrapper", self.model_wrapper, f"a dict of arguments of {NAME}")
        for module in model.modules():
            if isinstance(module, BaseDataPreprocessor):
                _set_device(module, get_device())
        config = {"type": NAME, **(self.model_wrapper or {})}
        initializes_now = _is_initialized_sharded(model)
        wrapped: Any = _own(MODEL_WRAPPERS.build(config, default_args={"module": self.convert_model(model)}))
        wants_weights = self.dispatch_kwargs.get("init_weights_for_test_or_val", True)
        if initializes_now and wants_weights and hasattr(wrapped.module, "init_weights"):
            wrapped.module.init_weights()
        return wrapped  # type: ignore[no-any-return]

    def _init_model_weights(self, model: nn.Module) -> nn.Module:
        """Initialize a model, unless it has to wait for `_wrap_model`."""
        if _is_initialized_sharded(model):
            return model
        initialized: nn.Module = super()._init_model_weights(model)
        return initialized

    def build_optim_wrapper(self, optim_wrapper: Any, model: nn.Module | None = None) -> Any:
        """MMEngine's, over the sharded parameters, also if the optimizer was made before."""
        built = super().build_optim_wrapper(optim_wrapper, model)
        prepare_optim_wrapper(built)
        return built

    def load_checkpoint(self, filename: str, *, map_location: Any = "cpu", **kwargs: Any) -> dict[str, Any]:
        """MMEngine's, with whole tensors on the host, of which each rank takes its part."""
        for hook in self._hooks():
            if isinstance(hook, EMAHook) and not hasattr(hook, "ema_model"):
                _make_average(hook, self.runner and self.runner())
        location = "cpu" if map_location == "default" else map_location
        checkpoint: dict[str, Any] = super().load_checkpoint(filename, map_location=location, **kwargs)
        return checkpoint

    def save_checkpoint(
        self,
        filename: str,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: dict[str, Any] | None = None,
        callback: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        """Write whole tensors on the main process. A collective of all ranks.

        Args:
            filename: to write.
            save_optimizer: whether the optimizer's state is in it.
            save_param_scheduler: whether that of the schedulers is.
            extra_ckpt: more to save.
            callback: gets the checkpoint before it is written, on the main process.
        """
        model = sharded_model(self.model)
        assert model is not None
        optim_wrapper = getattr(self, "optim_wrapper", None) if save_optimizer else None
        with whole_states(model, optim_wrapper, self._hooks()):
            if is_main_process():
                SingleDeviceStrategy.save_checkpoint(
                    self,
                    filename,
                    save_optimizer=save_optimizer,
                    save_param_scheduler=save_param_scheduler,
                    extra_ckpt=extra_ckpt,
                    callback=functools.partial(_call_and_check, callback),
                )
