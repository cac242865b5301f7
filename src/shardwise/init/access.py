"""Accesses to the memory of hollow tensors that bypass torch's operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.device import storage_key, truncated_normal_code
from ..core.tree import tensors_in
from ..core.whole import has_repeats
from .record import View
from .recorder import Recorder


class MemoryAccess(TorchFunctionMode):
    """Gives hollow tensors memory where something is about to use it directly, or answers in their place."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if recorder.is_paused:
            return func(*args, **kwargs)
        if func in _EXPOSES:
            recorder.expose(args[0])
        elif func in _LOOPS:
            for tensor in tensors_in((args, kwargs)):
                recorder.expose(tensor)
        elif func in _ANSWERS and recorder.number_of(args[0]) is not None:
            return _ANSWERS[func](recorder, func, *args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            is_any_hollow = any(recorder.number_of(tensor) is not None for tensor in tensors_in((args, kwargs)))
            if "not allocated yet" not in str(error) or not is_any_hollow:
                raise
        return recorder.run_with_memory(func, args, kwargs)


_EXPOSES = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.share_memory_,
    torch.Tensor.storage,
    torch.Tensor.untyped_storage,
}
"""Functions whose results share memory with their tensor."""

_LOOPS = {torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_}
"""Functions that go through the memory of their tensors element by element."""


def _with_values(recorder: Recorder, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(recorder.peek(tensor), *args, **kwargs)


def _address(recorder: Recorder, func: Any, tensor: torch.Tensor) -> int:
    """An address that differs between storages, as code that looks for tied tensors expects."""
    view = recorder.view_of(tensor)
    return ((view.storage + 1) << 48) + view.offset * view.dtype.itemsize


def _deep_copy(recorder: Recorder, func: Any, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """As torch does it; but the copy of the memory, which tensors on one storage share, is recorded as `clone`."""
    storage, copies = tensor.untyped_storage(), memo.setdefault("torch", {})
    if tensor.is_leaf and (key := storage_key(storage)) not in copies:
        nbytes = recorder.record.memory[recorder.view_of(tensor).storage].nbytes
        copies[key] = View(0, torch.uint8, (nbytes,), (1,), 0).on(storage).clone().untyped_storage()
    copied: torch.Tensor = func(tensor, memo)
    return copied


def _is_meta(recorder: Recorder, func: Any, tensor: torch.Tensor, *_: Any) -> bool:
    """False, except when torch's truncated normal asks, whose number of draws depends on values. It is recorded here as
    one operator, and then told that the tensor is on the meta device, so that it does nothing. Where it would raise,
    since elements share memory, it is left to do that."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:  # other modes above this one
        frame = frame.f_back
    if frame.f_code is not truncated_normal_code or has_repeats(tensor):
        return False
    given = frame.f_locals
    arguments = [given[name] for name in ("mean", "std", "a", "b")]
    recorder.record_whole(torch.nn.init.trunc_normal_, tensor, *arguments, generator=given["generator"])
    return True


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.tolist: _with_values,
    torch.Tensor.__repr__: _with_values,
    torch.Tensor.__format__: _with_values,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.is_meta.__get__: _is_meta,  # type: ignore[attr-defined]
    torch.Tensor.__deepcopy__: _deep_copy,
}
