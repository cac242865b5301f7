"""Parameters whose tensors say themselves how they are gathered: torch FSDP2's all-gather extensions.

A tensor subclass, or a tensor with such attributes, that has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``: what
the first gives for this rank's part is gathered, and the second makes the unsharded parameter of that. Weights are so
sent in float8 or NF4 (torchao). The protocol is described in ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from .buffer import Allocate, Gather, ShardedBuffer, allocate_storage, free_storage
from .comm import Comm
from .device import (
    copy_each,
    is_elsewhere,
    keeping_version,
    local_of,
    make_spec,
    not_inference,
    shares_storage,
    spec_of,
    wrap_local,
)
from .errors import StateError
from .lanes import Lane
from .layout import Layout, TensorLayout
from .place import Place

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, this rank's part of a parameter, says itself how it is gathered."""
    return hasattr(tensor, PRE) or hasattr(tensor, POST)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that ``tensor`` consists of, if its class tells (`torch.Tensor.__tensor_flatten__`); else itself."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in inner_tensors(getattr(tensor, name))]


def check_extension(name: str, tensor: torch.Tensor, *, reshards_to_smaller: bool) -> None:
    """
    Raises:
        TypeError: naming the parameter, if ``tensor`` has one of both methods, or one that takes other arguments.
        ValueError: naming it, if it would be resharded to a smaller world.
    """
    kind = type(tensor).__name__
    for method, other in ((PRE, POST), (POST, PRE)):
        if not hasattr(tensor, method):
            raise TypeError(f"parameter {name!r} is a {kind} with {other} and without {method}: it needs both or none")
    if _count_of_arguments(tensor) not in (1, 5):
        raise TypeError(
            f"parameter {name!r} is a {kind} whose {PRE}{inspect.signature(getattr(tensor, PRE))} takes other "
            "arguments than it is given: (mesh, outer_size, outer_stride, module, mp_policy), or the mesh alone"
        )
    if reshards_to_smaller:
        raise ValueError(
            f"parameter {name!r} is a {kind} that says itself how it is gathered, which cannot be resharded to a "
            "smaller world: pass a bool for reshard_after_forward"
        )


def _count_of_arguments(tensor: torch.Tensor) -> int:
    return len(inspect.signature(getattr(tensor, PRE)).parameters)


@torch.no_grad()
def cut_part(value: torch.Tensor, tensor: TensorLayout, rank: int) -> torch.Tensor:
    """``rank``'s part of ``value``, without padding, in memory of its own that has room for it; of the same class.

    By the operators that FSDP2 uses, since subclasses have those.
    """
    chunks = torch.chunk(value, tensor.world_size, tensor.dim)
    padded = value.new_zeros(chunks[0].size())
    length = tensor.length(rank)
    if rank < len(chunks) and chunks[rank].numel():
        padded.narrow(tensor.dim, 0, length).copy_(chunks[rank])
    return padded.narrow(tensor.dim, 0, length)


@torch.no_grad()
def with_plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; around a plain copy of its local tensor, if only those can load that who allow its extended class
    (`torch.serialization.add_safe_globals`)."""
    local = local_of(tensor)
    kind = type(local)
    if not is_extended(local) or kind in torch.serialization.get_safe_globals():
        return tensor
    if (plain := _plain(local)) is local:
        return tensor
    return wrap_local(plain, spec_of(tensor)) if isinstance(tensor, DTensor) else plain


def _plain(local: torch.Tensor) -> torch.Tensor:
    """A plain copy of ``local``, which is one already or whose class may have no operator for it: then itself."""
    if type(local) is torch.Tensor:
        return local
    try:
        return torch.empty(local.shape, dtype=local.dtype, device=local.device).copy_(local)
    except (AttributeError, RuntimeError, TypeError):
        return local


@dataclass(frozen=True)
class Surroundings:
    """What an extension is told beside the tensor.

    Args:
        name: of the parameter, for messages.
        place: one of those where it is registered.
        mesh: of the ranks that it is cut over, 1-D.
        precision: of its unit.
    """

    name: str
    place: Place
    mesh: DeviceMesh
    precision: MixedPrecisionPolicy


class ExtendedBuffer(ShardedBuffer):
    """One parameter that says itself how it is gathered.

    Args:
        layout: of this one parameter.
        local: this rank's part, in its shape, without padding.
        comm: collectives of the sharding axis.
        dtype: that the unsharded parameter is asked for in; once it is there, `dtype` is the one that it has.
        device: that it is on.
        surroundings: what the extension is told.
    """

    computes_first = True

    def __init__(
        self,
        layout: Layout,
        local: torch.Tensor,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        surroundings: Surroundings,
    ):
        super().__init__(layout, local, comm, dtype, device)
        self.is_identity = False
        self.gathered_bytes = layout.full_numel * dtype.itemsize
        self.local_memory = (local, *inner_tensors(local))
        self._surroundings = surroundings
        self._is_told_all = _count_of_arguments(local) > 1
        self._outputs: list[torch.Tensor] = []
        self._value: torch.Tensor | None = None
        self._inner: Sequence[torch.Tensor] = ()
        """What the extension said the unsharded parameter's memory is, beside the outputs."""
        self._inner_nbytes: list[int] = []
        """Of the storage of each, of which it may be a view."""
        self._asked_dtype = dtype
        self._face: torch.Tensor | None = None

    def local_view(self, index: int) -> torch.Tensor:
        return self.local

    def full_view(self, index: int) -> torch.Tensor:
        assert self._value is not None, "the extension makes it when it was gathered once"
        return self._value

    def takes(self, local: torch.Tensor, layout: Layout, dtype: torch.dtype) -> bool:
        return False  # what is gathered is made of the parameter itself

    def use_name(self, index: int, name: str) -> None:
        self._surroundings = replace(self._surroundings, name=name)

    def use_face(self, index: int, face: torch.Tensor) -> None:
        self._face, self._value = face, None

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        memory = (*self._outputs, *self._inner)
        return any(type(one) is torch.Tensor and shares_storage(tensor, one) for one in memory)

    def free(self) -> None:
        for tensor in (*self._outputs, *self._inner):
            free_storage(tensor)

    def gather_whole(self, index: int) -> torch.Tensor:
        """See `ShardedBuffer.gather_whole`; the values that the parameter itself has, not those that its extension
        makes of them, as a plain tensor if its class can be copied into one."""
        tensor = self.layout.tensors[index]
        local = _plain(self.local.to(self.device))
        if tensor.world_size == 1:
            return local
        like = torch.empty(tensor.shape, dtype=local.dtype, device="meta")
        return wrap_local(local, make_spec(self._surroundings.mesh, (Shard(tensor.dim),), like)).full_tensor()

    # -- Gathers

    def start_gather(self, lane: Lane) -> Gather:
        inputs, finish = self._prepare()
        if self.layout.world_size == 1:
            flat = [one.view(-1) for one in inputs]
            return Gather(prepare=functools.partial(copy_each, self._outputs, flat), finish=finish)
        return Gather(_sendable(self._outputs), _sendable(inputs), finish=finish)

    def start_staged_gather(self, allocate: Allocate) -> Gather:
        inputs, make = self._prepare()
        outputs = _sendable(self._outputs)
        staged = [allocate((one.numel(),), dtype=one.dtype, device=one.device) for one in outputs]
        own = [one.view(self.layout.world_size, -1)[self.comm.rank] for one in staged]

        def finish() -> None:
            copy_each(outputs, staged)
            make()

        prepare = functools.partial(copy_each, own, _sendable(inputs))
        return Gather(staged, own, prepare=prepare, finish=finish)

    def _prepare(self) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """What is gathered, for which there is memory then, and a function that makes the unsharded parameter of it."""
        inputs, metadata = self._inputs()
        self._take_memory(inputs)
        return inputs, functools.partial(self._finish, [one.shape for one in inputs], metadata)

    def _inputs(self) -> tuple[list[torch.Tensor], Any]:
        """What is gathered, in the shapes that it has on every rank, and what the extension wants to be told then."""
        local, around, tensor = self.local, self._surroundings, self.layout.tensors[0]
        if is_elsewhere(local, self.device):
            local = local.to(self.device, non_blocking=True)
        size = torch.Size(tensor.shape)
        told = (size, torch.empty(size, device="meta").stride(), around.place.module(), around.precision)
        with torch.no_grad(), not_inference():
            prepare = getattr(local, PRE)
            given = prepare(around.mesh, *told) if self._is_told_all else prepare(around.mesh)
            if not (isinstance(given, (tuple, list)) and len(given) == 2 and _are_tensors(given[0])):
                raise TypeError(
                    f"{PRE} of parameter {around.name!r} gave {given!r:.80}: it has to give a pair, of the tensors to "
                    f"gather and of what {POST} is given with them"
                )
            return [self._padded(one, tensor).contiguous() for one in given[0]], given[1]

    def _padded(self, one: torch.Tensor, tensor: TensorLayout) -> torch.Tensor:
        """An input as long as on ranks that have more rows of the parameter."""
        wanted = torch.Size(tensor.chunk_shape)
        if tensor.is_even or one.shape == wanted:
            return one
        if one.shape != self.local.shape:
            raise StateError(
                f"parameter {self._surroundings.name!r} of shape {tensor.shape} is cut unevenly over "
                f"{tensor.world_size} ranks, and its {PRE} gave a tensor of shape {tuple(one.shape)}, of which it is "
                f"not known how other ranks have it: give tensors of shape {tuple(wanted)}, with padding"
            )
        padded = one.new_zeros(wanted)
        padded.narrow(tensor.dim, 0, one.shape[tensor.dim]).copy_(one)
        return padded

    def _take_memory(self, inputs: Sequence[torch.Tensor]) -> None:
        kinds = [(one.numel() * self.layout.world_size, one.dtype) for one in inputs]
        if not self._outputs:
            with not_inference():
                self._outputs = [torch.empty(numel, dtype=dtype, device=self.device) for numel, dtype in kinds]
        if [(one.numel(), one.dtype) for one in self._outputs] != kinds:
            raise StateError(
                f"{PRE} of parameter {self._surroundings.name!r} gave tensors of other sizes or dtypes than the first "
                "time, for which the unsharded parameter was made: give the same each time"
            )
        for output in self._outputs:
            allocate_storage(output)

    def _finish(self, shapes: Sequence[torch.Size], metadata: Any) -> None:
        """Let the extension make the unsharded parameter, or fill it again, of gathered inputs of ``shapes``."""
        tensor, finish = self.layout.tensors[0], getattr(self.local, POST)
        with torch.no_grad(), not_inference():
            # With version counters of their own: to gather again must not count as modifying what was made of them.
            outputs = [output.data for output in self._outputs]
            gathered = tuple(_joined(*pair, tensor) for pair in zip(outputs, shapes, strict=True))
            if self._face is not None:
                for inner, nbytes in zip(self._inner, self._inner_nbytes, strict=True):
                    allocate_storage(inner, nbytes)
                # What autograd saved of it must not count as modified.
                with keeping_version(self._face):
                    finish(gathered, metadata, self._asked_dtype, out=self._face)
                return
            given = finish(gathered, metadata, self._asked_dtype)
            is_pair = isinstance(given, (tuple, list)) and len(given) == 2
            if not (is_pair and isinstance(given[0], torch.Tensor) and _are_tensors(given[1])):
                raise TypeError(
                    f"{POST} of parameter {self._surroundings.name!r} gave {given!r:.80}: without `out` it has to give "
                    "a pair, of the unsharded tensor and of the tensors whose memory it has"
                )
            value, self._inner = given
            self._inner_nbytes = [inner.untyped_storage().nbytes() for inner in self._inner]
            self.dtype = value.dtype  # which gradients have: not all extensions give what they are asked for
            self._value = value if value.shape == tensor.shape else self._unpadded(value)

    def _unpadded(self, value: torch.Tensor) -> torch.Tensor:
        shape = self.layout.tensors[0].shape
        strides = torch.empty(shape, device="meta").stride()
        try:
            return torch.as_strided(value, shape, strides, storage_offset=0)
        except RuntimeError as error:
            raise StateError(
                f"{POST} of parameter {self._surroundings.name!r} gave a tensor of shape {tuple(value.shape)}, which "
                f"does not have the parameter's {shape}: give all of it, with padding or without"
            ) from error


def _are_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(one, torch.Tensor) for one in value)


def _joined(gathered: torch.Tensor, shape: torch.Size, tensor: TensorLayout) -> torch.Tensor:
    """What all ranks gave of ``shape``, one after the other in ``gathered``, joined on the dim that the parameter is
    cut on; on another than the first in memory of its own, and on the first if they lack that dim, as scales do."""
    if tensor.dim == 0 or len(shape) <= tensor.dim:
        return gathered.view(-1, *shape[1:])
    return gathered.view(tensor.world_size, *shape).movedim(0, tensor.dim).flatten(tensor.dim, tensor.dim + 1)


def _sendable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, flat, as bytes, which every backend sends; without empty ones, which not every backend does."""
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
