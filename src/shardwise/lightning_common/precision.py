"""Lightning's precision plugins for sharded gradients: norms over all ranks, and loss scaling that ranks agree on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..grad import clip_grad_norm_
from ..grad_scaler import ShardedGradScaler, sharded_scaler
from .namespaces import Namespace, check_plugin, namespace_of
from .optimizers import clip_grad_value_


class _Clipping:
    """Gradient clipping of a Trainer's plugin, for sharded gradients."""

    main_params: Any

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale gradients so that their norm over all ranks is at most ``clip_val``."""
        clip_grad_norm_(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Limit each element of the gradients."""
        clip_grad_value_(self.main_params(optimizer), clip_val)


def check_precision(name: str, plugin: Any, part: str) -> None:
    """
    Raises:
        TypeError: if the argument ``name`` is no plugin; names of precisions are for Trainer and Fabric.
    """
    owner = "Trainer" if part == "pytorch" else "Fabric"
    check_plugin(
        name, plugin, part, "plugins.precision", "Precision", f": precisions by name go to {owner}(precision=...)"
    )


@cache
def _clipping(base: Any) -> Any:
    # Under the plugin's name, by which Trainer checkpoints find the state of the scaler.
    plugin: Any = base
    return type(plugin)(
        plugin.__name__, (_Clipping, plugin), {"__module__": __name__, "__qualname__": base.__qualname__}
    )


def sharded_precision(plugin: Any, default: Namespace) -> Any:
    """The plugin to use in the place of a Trainer's one; a user's own class stays, with a scaler that ranks agree on.

    Args:
        plugin: of any strategy, or None.
        default: namespace of plugins whose class belongs to none.

    Raises:
        TypeError: if it is no plugin.
    """
    if plugin is None:
        return None
    check_precision("precision_plugin", plugin, "pytorch")
    namespace = namespace_of(plugin) or default
    plugins = {
        name: namespace.of("pytorch", "plugins.precision", name)
        for name in ("Precision", "HalfPrecision", "MixedPrecision", "DoublePrecision", "FSDPPrecision")
    }
    if type(plugin) is plugins["FSDPPrecision"]:
        return _from_flag(plugin.precision, plugins)
    if type(plugin) in plugins.values():
        kind: Any = type(plugin)
        plugin.__class__ = _clipping(kind)
    share_scaler(plugin)
    return plugin


def _from_flag(precision: str, plugins: dict[str, Any]) -> Any:
    """The plugin for the Trainer's argument ``precision``."""
    if precision in ("16-mixed", "bf16-mixed"):
        # The device is known once the processes have found each other.
        scaler = ShardedGradScaler() if precision == "16-mixed" else None
        return _clipping(plugins["MixedPrecision"])(precision, "cpu", scaler)
    if precision in ("16-true", "bf16-true"):
        return _clipping(plugins["HalfPrecision"])(precision)
    return _clipping(plugins["Precision"])()


def share_scaler(plugin: Any) -> None:
    """Let ranks agree on what the scaler of a mixed-precision plugin finds, if it has one."""
    sharded_scaler(getattr(plugin, "scaler", None))


def use_device(plugin: Any, device: torch.device) -> None:
    """Let a mixed-precision plugin compute on ``device``."""
    if isinstance(getattr(plugin, "device", None), str):
        plugin.device = device.type
