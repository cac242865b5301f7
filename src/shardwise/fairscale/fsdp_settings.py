"""What is set on FairScale's wrapper at construction and may be read, and in part set, afterwards."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..arguments import check_flag
from ..core.gradient import halves_of
from ..core.group import ParamGroup
from ..core.hooks import Unit
from ..core.root import unit_of
from .ranks import given_group, given_reduce_group, name_of_reduce_group, ranks_of, reduce_comm_of


class Settings(nn.Module):
    """Groups of ranks, dtypes, divisors of gradients, and when whole parameters are freed."""

    rank: int
    world_size: int
    compute_device: torch.device
    move_params_to_cpu: bool
    move_grads_to_cpu: bool
    flatten_parameters: bool
    no_broadcast_optim_state: bool
    _own: ParamGroup | None
    _process_group: Any
    _reduce_group: Any
    _reshards: bool
    _disable_reshard_on_root: bool
    _mixed_precision: bool
    _fp32_reduce_scatter: bool
    _compute_dtype: torch.dtype
    _buffer_dtype: torch.dtype
    _has_cast_buffers: bool
    _divisors: tuple[float, float] | None
    """What gradients are divided by before and after they are summed, if that is set."""

    # -- At construction

    def _choose_dtypes(
        self, mixed_precision: bool, compute_dtype: torch.dtype | None, buffer_dtype: torch.dtype | None
    ) -> None:
        default = torch.float16 if mixed_precision else torch.float32
        self._mixed_precision = mixed_precision
        self._compute_dtype = default if compute_dtype is None else compute_dtype
        self._buffer_dtype = self._compute_dtype if buffer_dtype is None else buffer_dtype

    def _check_settings(self) -> None:
        check_flag("FullyShardedDataParallel", "move_grads_to_cpu", self.move_grads_to_cpu)
        self._check_widens(self.fp32_reduce_scatter)
        _check_dtypes(compute_dtype=self.compute_dtype, buffer_dtype=self.buffer_dtype)
        if self.move_grads_to_cpu != self.move_params_to_cpu and self.compute_device.type != "cpu":
            raise ValueError(
                f"move_grads_to_cpu={self.move_grads_to_cpu} with move_params_to_cpu={self.move_params_to_cpu}: torch "
                "keeps a parameter and its gradient on one device, so both have to be the same"
            )

    def _check_widens(self, widens: bool) -> None:
        if widens and not self.mixed_precision:
            raise ValueError("fp32_reduce_scatter=True needs mixed_precision=True: without it gradients are float32")

    def _choose_divisors(self, before: float | None) -> None:
        if before is not None:
            _check_divisors(gradient_predivide_factor=before)
        self._divisors = None if before is None else (before, self.world_size / before)

    def _shared_settings(self) -> dict[str, object]:
        """By what ranks communicate; others than theirs would crash or hang a rank, or give it other numbers."""
        flags = {
            "flatten_parameters": self.flatten_parameters,
            "mixed_precision": self._mixed_precision,
            "fp32_reduce_scatter": self._fp32_reduce_scatter,
            "reshard_after_forward": self._reshards,
            "disable_reshard_on_root": self._disable_reshard_on_root,
            "no_broadcast_optim_state": self.no_broadcast_optim_state,
        }
        return {
            **{name: bool(flag) for name, flag in flags.items()},
            "compute_dtype": self._compute_dtype,
            "gradient_predivide_factor": float(self.gradient_predivide_factor),
            "process_group_reduce_scatter": name_of_reduce_group(self._reduce_group),
        }

    # -- Afterwards

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    def _precision(self) -> MixedPrecisionPolicy:
        param_dtype = self.compute_dtype if self.mixed_precision else None
        return MixedPrecisionPolicy(param_dtype, torch.float32 if self.fp32_reduce_scatter else param_dtype)

    @property
    def process_group(self) -> Any:
        """The ranks that share the parameters; a stand-in after unpickling, until it is set."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        group = given_group(group)
        if (group.rank(), group.size()) != (self.rank, self.world_size):
            raise ValueError(
                f"process_group: this instance holds the shards of rank {self.rank} of {self.world_size}, and in the "
                f"group this process is rank {group.rank()} of {group.size()}"
            )
        self._process_group = group
        if self._own is not None:
            self._own.use_ranks(ranks_of(group, self.compute_device))
            self.process_group_reduce_scatter = self._reduce_group

    @property
    def process_group_reduce_scatter(self) -> Any:
        """The ranks' group for gradients; ``process_group`` unless there is another for them."""
        comm = self._own.options.reduce_comm if self._own is not None else None
        return self.process_group if comm is None else comm.group

    @process_group_reduce_scatter.setter
    def process_group_reduce_scatter(self, group: Any) -> None:
        self._reduce_group = given_reduce_group(group)
        if self._own is not None:
            comm = self._own.mesh.shard
            self._own.options.reduce_comm = reduce_comm_of(self._reduce_group, comm, self.compute_device)

    @property
    def cpu_offload(self) -> bool:
        """Another name of ``move_params_to_cpu``."""
        return self.move_params_to_cpu

    @property
    def reshard_after_forward(self) -> bool:
        """Whether whole parameters are freed between forward and backward. After the first forward it is False for the
        outermost instance, unless ``disable_reshard_on_root=False``."""
        if self._own is not None:
            return self._own.options.reshard_after_forward
        return self._reshards and not (self._disable_reshard_on_root and self._unit.is_root)

    @reshard_after_forward.setter
    def reshard_after_forward(self, reshards: bool) -> None:
        self._reshards, unit = reshards, self._unit
        unit.reshards_unless_root = reshards and self.disable_reshard_on_root
        if self._own is not None:
            self._own.options.reshard_after_forward = reshards and not (unit.reshards_unless_root and unit.is_root)

    @property
    def disable_reshard_on_root(self) -> bool:
        """Whether the outermost instance keeps its whole parameters between forward and backward in any case."""
        return self._disable_reshard_on_root

    @disable_reshard_on_root.setter
    def disable_reshard_on_root(self, disables: bool) -> None:
        self._disable_reshard_on_root = disables
        self.reshard_after_forward = self._reshards

    @property
    def mixed_precision(self) -> bool:
        """Whether ``compute_dtype`` differs from that of the parameters. Buffers are made for it at construction, so
        neither can be set afterwards."""
        return self._mixed_precision

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the whole parameters."""
        return self._compute_dtype

    @property
    def buffer_dtype(self) -> torch.dtype:
        """Dtype that floating-point buffers have from the next forward on."""
        return self._buffer_dtype

    @buffer_dtype.setter
    def buffer_dtype(self, dtype: torch.dtype) -> None:
        _check_dtypes(buffer_dtype=dtype)
        self._buffer_dtype, self._has_cast_buffers = dtype, False

    @property
    def fp32_reduce_scatter(self) -> bool:
        """Whether gradients are reduced in float32."""
        return self._fp32_reduce_scatter

    @fp32_reduce_scatter.setter
    def fp32_reduce_scatter(self, widens: bool) -> None:
        self._check_widens(widens)
        self._fp32_reduce_scatter = widens
        if self._own is not None:
            self._own.policy.precision = self._precision()

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over ranks."""
        return self._factors()[0]

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, factor: float) -> None:
        self._divide_by(factor, self._factors()[1])

    @property
    def gradient_postdivide_factor(self) -> float:
        """What gradients are divided by after they were summed over ranks."""
        return self._factors()[1]

    @gradient_postdivide_factor.setter
    def gradient_postdivide_factor(self, factor: float) -> None:
        self._divide_by(self._factors()[0], factor)

    def _factors(self) -> tuple[float, float]:
        """What gradients are divided by, as FairScale tells it; where none is set, they are averaged."""
        return halves_of(self.world_size) if self._divisors is None else self._divisors

    def _divide_by(self, before: float, after: float) -> None:
        _check_divisors(gradient_predivide_factor=before, gradient_postdivide_factor=after)
        self._divisors = before, after
        if self._own is not None:
            self._own.options.divisors = self._divisors


def device_of(name: str, given: Any, default: torch.device) -> torch.device:
    """``given``, or ``default`` if that is None.

    Raises:
        TypeError: naming what is no device.
        ValueError: naming a device that there is none of.
    """
    try:
        return default if given is None else torch.device(given)
    except (TypeError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}={given!r}: pass a torch.device, or the name of one, such as 'cpu' or 'cuda:0'") from error


def _check_dtypes(**dtypes: torch.dtype) -> None:
    """
    Raises:
        TypeError: naming one that is not a floating-point dtype.
    """
    for name, dtype in dtypes.items():
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"{name}={dtype!r}: pass a floating-point torch.dtype, such as torch.float16")


def _check_divisors(**factors: float) -> None:
    """
    Raises:
        TypeError: naming one that is no number.
        ValueError: naming one that gradients cannot be divided by.
    """
    for name, factor in factors.items():
        if not isinstance(factor, Real):
            raise TypeError(f"{name} must be a number, not {factor!r}")
        if not 0 < factor < math.inf:
            raise ValueError(f"{name}={factor}: gradients are divided by it, so it must be above 0 and finite")
