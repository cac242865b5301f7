"""What a Runner does otherwise with a sharded model."""

from __future__ import annotations

import functools
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import EMAHook, Hook, RuntimeInfoHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from .optimizers import prepare_optim_wrapper
from .saving import together, whole_states
from .strategy import ShardwiseStrategy
from .wrapper import sharded_model


def prepare_runner(runner: Any) -> None:
    """Let a Runner whose model is sharded initialize, save and resume it; nothing with any other model.

    On the instance, whose methods are replaced: `Runner` saves by a method that runs on one process only and offers no
    hook on the others, and it broadcasts what it takes for whole tensors.

    Args:
        runner: that has built what it needs; `ShardwiseHook` calls this when a run begins.
    """
    if sharded_model(runner.model) is None:
        return
    prepare_optim_wrapper(runner.optim_wrapper)
    if isinstance(getattr(runner, "strategy", None), ShardwiseStrategy):
        runner.strategy.hooks = runner.hooks
    elif isinstance(runner, Runner) and "save_checkpoint" not in runner.__dict__:
        runner.save_checkpoint = functools.partial(_save_checkpoint, runner, runner.save_checkpoint)
        runner._init_model_weights = functools.partial(_init_model_weights, runner)


def _init_model_weights(runner: Any) -> None:
    """Initialize whole parameters; the first rank's values then are everyone's already."""
    model: Any = sharded_model(runner.model)
    if hasattr(model, "init_weights"):
        model.init_weights()


def _save_checkpoint(runner: Any, save: Any, *args: Any, **kwargs: Any) -> None:
    """Save by the Runner's own method, on the main process, what all ranks have gathered. A collective."""
    model = sharded_model(runner.model)
    assert model is not None
    saves_optimizer = kwargs.get("save_optimizer", args[3] if len(args) > 3 else True)
    optim_wrapper = runner.optim_wrapper if saves_optimizer else None
    with whole_states(model, optim_wrapper, runner.hooks), together():
        if is_main_process():
            save(*args, **kwargs)


def prepare_averages(runner: Any) -> None:
    """Let averages of a sharded model be there when a checkpoint is loaded.

    `FlexibleRunner` loads before it calls ``before_run``, where an `EMAHook` makes its average.
    """
    if sharded_model(runner.model) is None:
        return
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and not hasattr(hook, "ema_model"):
            hook.before_run(runner)
            # On the instance, and once: the call that comes later would make it anew.
            hook.before_run = functools.partial(_skip_once, hook)


def _skip_once(hook: Any, runner: Any) -> None:
    del hook.before_run


@HOOKS.register_module()
class ShardwiseHook(Hook):  # type: ignore[misc]  # MMEngine has no types
    """Prepares a Runner for a sharded model when a run begins.

    Every Runner has it in its `RuntimeInfoHook`; whoever leaves that one out adds
    ``custom_hooks=[dict(type="ShardwiseHook")]``.
    """

    priority = "VERY_HIGH"

    def before_run(self, runner: Any) -> None:
        """See `prepare_runner`."""
        super().before_run(runner)
        prepare_runner(runner)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """See `prepare_averages`."""
        prepare_averages(runner)


@HOOKS.register_module(name="RuntimeInfoHook", force=True)
class ShardwiseRuntimeInfoHook(ShardwiseHook, RuntimeInfoHook):  # type: ignore[misc]
    """MMEngine's hook, which every Runner has by default, and `ShardwiseHook`."""
