"""Makes MMEngine's Runners initialize, save and resume a sharded model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from mmengine.dist import is_main_process
from mmengine.optim import BaseOptimWrapper
from mmengine.runner import FlexibleRunner, Runner

from .optimizers import prepare_optim_wrapper
from .saving import refuse_shards, whole_states
from .strategy import ShardwiseStrategy
from .wrapper import sharded_model


def prepare_runner(runner: Any) -> None:
    """Let a `Runner` initialize, save and resume its model, which is sharded.

    On the instance, whose methods are replaced: `Runner` saves by a method that runs on one process only and offers no
    hook on the others, it broadcasts what it takes for whole tensors, and it loads checkpoints to the device.

    Args:
        runner: `Runner.wrap_model` calls this; a subclass of `Runner` that replaces that does so itself.
    """
    if "save_checkpoint" in runner.__dict__:
        return
    runner.save_checkpoint = functools.partial(_save_checkpoint, runner, runner.save_checkpoint)
    runner.call_hook = functools.partial(_call_hook, runner.call_hook)
    runner.resume = functools.partial(_resume, runner.resume)
    runner.build_optim_wrapper = functools.partial(_build_optim_wrapper, runner.build_optim_wrapper)
    runner._init_model_weights = functools.partial(_init_model_weights, runner)


def _init_model_weights(runner: Any) -> None:
    """Initialize whole parameters. MMEngine's broadcast is left out: all ranks have the first rank's values already."""
    model: Any = sharded_model(runner.model)
    if hasattr(model, "init_weights"):
        model.init_weights()


def _call_hook(call: Callable[..., None], fn_name: str, **kwargs: Any) -> None:
    call(fn_name, **kwargs)
    if fn_name == "before_save_checkpoint":
        refuse_shards(kwargs["checkpoint"])


def _build_optim_wrapper(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    built = build(*args, **kwargs)
    prepare_optim_wrapper(built)
    return built


def _resume(
    resume: Callable[..., None],
    filename: str,
    resume_optimizer: bool = True,
    resume_param_scheduler: bool = True,
    map_location: Any = "default",
) -> None:
    """Resume with whole tensors on the host, since they may not fit on a device; each rank takes its part."""
    resume(filename, resume_optimizer, resume_param_scheduler, "cpu" if map_location == "default" else map_location)


def _save_checkpoint(runner: Any, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save by the Runner's own method, on the main process, what all ranks have gathered. A collective."""
    model = sharded_model(runner.model)
    assert model is not None
    saves_optimizer = kwargs.get("save_optimizer", args[3] if len(args) > 3 else True)
    # Before the run it is a config, which the Runner's own method refuses.
    is_built = isinstance(runner.optim_wrapper, BaseOptimWrapper)
    optim_wrapper = runner.optim_wrapper if saves_optimizer and is_built else None
    with whole_states(model, optim_wrapper, runner.hooks):
        if is_main_process():
            save(*args, **kwargs)


# -- Patches of the Runners' classes. A hook would come too late for initialization, and a config can leave it out; a
# FlexibleRunner's strategy does not know its runner.


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = original(self, *args, **kwargs)
        if sharded_model(wrapped) is not None:
            prepare_runner(self)
        elif any(sharded_model(module) is not None for module in wrapped.modules()):
            # Another wrapper, of parts: the Runner saves what one process has.
            self.call_hook = functools.partial(_call_hook, self.call_hook)
        return wrapped

    return wrap_model


def _introducing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_strategy(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = original(self, *args, **kwargs)
        if isinstance(strategy, ShardwiseStrategy):
            strategy.runner = weakref.ref(self)
        return strategy

    return build_strategy


Runner.wrap_model = _preparing(Runner.wrap_model)
FlexibleRunner.build_strategy = _introducing(FlexibleRunner.build_strategy)
