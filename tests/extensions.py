"""Tensors that say themselves how torch FSDP2, and shardwise, gather them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_KEPT = {
    *(_aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor, _aten.copy_.default, _aten.view.default),
    *(_aten.as_strided.default, _aten._to_copy.default, _aten.split.Tensor, _aten.clone.default, _aten.detach.default),
}


def _given(value: torch.Tensor, out: torch.Tensor | None) -> Any:
    """What an extension gives that makes ``value``, with padding, or fills ``out`` with it."""
    if out is None:
        return value, (value,)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value.as_strided(out.shape, out.stride()))
    return None


class SentInBfloat16(torch.Tensor):
    """A parameter whose shards are float32, and which is gathered in bfloat16 and computes in the dtype asked for."""

    def __new__(cls, data: torch.Tensor) -> SentInBfloat16:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor):
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(SentInBfloat16, lambda one: one.data_inside, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if func in _KEPT else result

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Told of the mesh alone."""
        return (self.data_inside.to(torch.bfloat16),), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        """Another tensor than what was gathered."""
        (sent,) = outputs
        return _given(sent.to(param_dtype), out)


class Told(SentInBfloat16):
    """Told all that there is, which it notes."""

    told: Any = None

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        Told.told = mesh.size(), tuple(outer_size), tuple(outer_stride), type(module), mp_policy
        padded = -(-outer_size[0] // mesh.size())
        sent = self.data_inside.new_zeros((padded, *outer_size[1:]), dtype=torch.bfloat16)
        sent[: len(self.data_inside)] = self.data_inside
        return (sent,), "metadata"

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        assert metadata == "metadata"
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)


class SentInTwo(SentInBfloat16):
    """Sent as a coarse part and what that leaves, so that nearly nothing is lost."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        coarse = self.data_inside.to(torch.bfloat16)
        return (coarse, self.data_inside - coarse), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        coarse, rest = outputs
        value = (coarse + rest).to(param_dtype)
        return _given(value, out)


class StaysBfloat16(SentInBfloat16):
    """Computes in what was sent, whatever dtype is asked for, and in its memory."""

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return (outputs[0], outputs) if out is None else None


class SentWithScale(SentInBfloat16):
    """As integers, with a scale that all ranks agree on, which has no dims, and something that is empty."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        inside = self.data_inside
        scale = inside.abs().max() / 32767 if inside.numel() else torch.zeros(())
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=mesh.get_group())
        return ((inside / scale).round().to(torch.int16), scale, inside.new_empty(0, 3)), mesh.size()

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        sent, scales, empty = outputs
        assert scales.shape == (metadata,)
        assert not empty.numel()
        value = (sent * scales[0]).to(param_dtype)
        return _given(value, out)


class InColumns(SentInBfloat16):
    """Computes in some columns of a larger tensor."""

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        value = outputs[0].to(param_dtype)
        if out is None:
            columns = value.repeat(1, 50)[:, : value.shape[1]]
            return columns, (columns,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(value)
        return None


class Tells(SentInBfloat16):
    """Tells what it consists of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, metadata: Any, size: Any, stride: Any) -> Tells:
        return cls(inner["data_inside"])


def extend(model: nn.Module, kind: type[SentInBfloat16]) -> nn.Module:
    """Let the matrices of ``model`` be of ``kind``."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > 1:
                setattr(module, name, nn.Parameter(kind(parameter.detach()), parameter.requires_grad))
    return model
