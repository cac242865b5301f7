"""Loss scaling for parameters, gradients or optimizer state that are sharded."""

from __future__ import annotations

import functools
import math
from typing import Any, SupportsFloat, SupportsIndex

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from .arguments import check_flag
from .core.agreement import communicating
from .core.comm import comm_for
from .core.device import local_of, scale_each, unscale_each
from .core.norms import local_norms
from .core.step import parameters_of

FUSED_DTYPES = (torch.float16, torch.float32, torch.float64)
"""Dtypes for which torch scales and looks for infinities in one kernel, on every device."""


class ShardedGradScaler(GradScaler):
    """`torch.amp.GradScaler` whose ranks agree: if any finds an infinite gradient, all skip the step.

    For gradients in shards (`fully_shard`), of owned parameters only (`OSS` with `ShardedDataParallel`), or on all
    ranks; on the CPU as on accelerators; in float16, bfloat16 and wider. `unscale_`, and `step` without it, are
    collectives.

    Args:
        init_scale: first factor.
        growth_factor: multiplies the scale after ``growth_interval`` steps in a row without infinities; above 1.
        backoff_factor: multiplies the scale after a step that was skipped; below 1.
        growth_interval: in steps.
        enabled: whether to scale at all.
        process_group: ranks that skip together; None for all, or a stand-in for a process by itself.

    Attributes:
        group: ``process_group``.

    Raises:
        TypeError: for a ``process_group`` that is none of this rank, a factor that is no number, or an ``enabled`` that
            is no flag, such as a string.
        ValueError: for a scale, or a factor, that would make gradients zero, infinite or NaN.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ):
        if not (process_group is None or isinstance(process_group, dist.ProcessGroup) or _is_alone(process_group)):
            raise TypeError(
                f"ShardedGradScaler(process_group={process_group!r}): pass a group that this rank is in, or None"
            )
        check_flag("ShardedGradScaler", "enabled", enabled)
        if enabled:
            _check_factors(init_scale, growth_factor, backoff_factor, growth_interval)
        # torch never disables a scaler for "cpu"; the scale itself is put where the first loss is.
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.group = process_group

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._device = dev.type

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # float16 gradients are allowed: mixed precision gives them where parameters are sharded.
        found = {found_inf.device: found_inf}
        for (device, _), gradients in _by_device_and_dtype(optimizer).items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            _unscale(gradients, flag, inv_scale.to(device))
        for flag in list(found.values())[1:]:
            found_inf += flag.to(found_inf.device)
        group = self.group if self.group is not None else dist.group.WORLD
        if group is not None and group.size() > 1:
            comm = comm_for(group, found_inf.device)
            with communicating("looking for infinite gradients on all ranks", comm):
                comm.all_reduce_largest(found_inf)
        return {found_inf.device: found_inf}

    def __getstate__(self) -> dict[str, Any]:
        """
        Raises:
            TypeError: for a subgroup, which another process could not find again.
        """
        is_real = isinstance(self.group, dist.ProcessGroup)
        if is_real and self.group is not dist.group.WORLD:
            raise TypeError("a ShardedGradScaler over a subgroup cannot be pickled: save its state_dict")
        return {**super().__getstate__(), "group": None if is_real else self.group}


def _is_alone(given: Any) -> bool:
    """Whether it only tells that it has one rank, as FullyShardedDataParallel may have got as well."""
    return callable(size := getattr(given, "size", None)) and size() == 1


def _check_factors(init_scale: Any, growth_factor: Any, backoff_factor: Any, growth_interval: Any) -> None:
    factors = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
    for name, value in factors.items():
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"ShardedGradScaler({name}={value!r}): must be a number")
        if not 0 < float(value) < math.inf:
            raise ValueError(f"ShardedGradScaler({name}={value}): must be above 0 and finite")
    if growth_factor <= 1:
        raise ValueError(f"ShardedGradScaler(growth_factor={growth_factor}): must be above 1, to let it grow")
    if backoff_factor >= 1:
        raise ValueError(f"ShardedGradScaler(backoff_factor={backoff_factor}): must be below 1, to shrink the scale")
    if not isinstance(growth_interval, SupportsIndex):
        raise TypeError(f"ShardedGradScaler(growth_interval={growth_interval!r}): must be an int, a number of steps")


def sharded_scaler(scaler: Any) -> Any:
    """Let the ranks that use ``scaler`` skip a step together. It stays the same object, which the program may hold as
    well, and keeps what a class of the program's own overrides, but for how gradients are unscaled.

    Args:
        scaler: of torch, or of a class derived from it; anything else is left as it is.

    Returns:
        The scaler.
    """
    if isinstance(scaler, GradScaler) and not isinstance(scaler, ShardedGradScaler):
        sharded: Any = scaler
        kind: Any = type(scaler)
        sharded.group, sharded.__class__ = _group_of(scaler), _sharded_class(kind)
        if type(sharded) is ShardedGradScaler:
            vars(sharded).pop("process_group", None)  # of torch's for FSDP: it cannot be pickled
    return scaler


def _group_of(scaler: GradScaler) -> dist.ProcessGroup | None:
    """The group that torch's scaler for FSDP was given. Its default is the world at the time when torch was imported,
    which may be gone."""
    group = getattr(scaler, "process_group", None)
    try:
        return group if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0 else None
    except ValueError:
        return None


@functools.cache
def _sharded_class(base: Any) -> Any:
    if base.__module__.startswith("torch."):  # none of these has more, apart from sharing by other means
        return ShardedGradScaler
    body = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
    # By its base, of which another process makes it anew.
    body["__reduce_ex__"] = lambda scaler, protocol: (_blank, (base,), scaler.__getstate__())
    return type(base.__name__, (ShardedGradScaler, base), body)


def _blank(base: Any) -> Any:
    kind = _sharded_class(base)
    return kind.__new__(kind)


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Scale gradients of one dtype and device; ``found_inf`` becomes 1 if any element is not finite."""
    if gradients[0].dtype in FUSED_DTYPES:
        unscale_each(gradients, found_inf, inverse_scale)
        return
    largest = local_norms(gradients, math.inf)
    found_inf.masked_fill_(~torch.isfinite(largest).all(), 1.0)
    scale_each(gradients, inverse_scale)


def _by_device_and_dtype(
    optimizer: torch.optim.Optimizer,
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """This rank's part of the gradients of an optimizer's parameters."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None and (local := local_of(dense_gradient(parameter))).numel():
            found.setdefault((local.device, local.dtype), []).append(local)
    return found


def dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient; changing them changes it."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    # Duplicate indices may only overflow together.
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()
