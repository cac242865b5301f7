"""What is known about the parameters of a group: one slot for each, and what users set for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .buffer import ShardedBuffer, chunk_of
from .comm import Comm, StagedCollective
from .device import REDUCES_IN_DTYPE_OF_SHARDS, local_of, not_inference
from .errors import StateError
from .gradient import refuse_sparse
from .layout import TensorLayout
from .mesh import DataParallelMesh
from .model_parallel import ModelParallel
from .parameter import Place, is_alias


@dataclass
class ManagedParameter:
    """What `fully_shard` found out about one parameter.

    Args:
        value: the original parameter.
        name: full name, for messages.
        places: where it is registered (several for a tied parameter).
        dim: tensor dim that it is cut on.
        parallel: how it is laid out if another parallelism made it a DTensor.
        keeps_dtype: whether it is gathered in its own dtype, whatever the others are.
    """

    value: nn.Parameter
    name: str
    places: list[Place]
    dim: int = 0
    parallel: ModelParallel | None = None
    keeps_dtype: bool = False

    @property
    def local(self) -> torch.Tensor:
        """What data parallelism shards: the parameter, or its local part under another parallelism."""
        return local_of(self.value).detach()


@dataclass(eq=False)
class Slot:
    """One parameter of a group: its place in a buffer and its two faces."""

    name: str
    places: list[Place]
    buffer: ShardedBuffer
    index: int
    sharded: nn.Parameter
    parallel: ModelParallel | None = None
    keeps_dtype: bool = False
    """Whether it is gathered in its own dtype, whatever the others are."""
    unsharded: nn.Parameter | None = None
    was_unsharded: bool = False
    """Whether there is or was an unsharded face, which gradients may come for."""
    accumulated: torch.Tensor | None = None
    """Unsharded gradient in the reduction's dtype, summed over backward passes without synchronization."""
    is_borrowed: bool = False
    """Whether the sharded face is that of another slot, tied after both were sharded; its values are copied from there
    before each gather, and its gradient goes there."""
    has_values: bool = True
    """False from the moment a meta parameter gets memory until something is written there."""
    lost_writes: bool = False
    """Whether its parameter was written before it was sharded, while it had no memory that would hold that."""
    face_is_meta: bool = False
    """Whether the sharded face is on the meta device though the buffer, for others of the unit, is not."""

    @property
    def layout(self) -> TensorLayout:
        """How it is cut over the ranks."""
        return self.buffer.layout.tensors[self.index]

    @property
    def local(self) -> torch.Tensor:
        """This rank's chunk, without padding, in the chunk's shape."""
        return self.buffer.local_view(self.index)

    # -- The unsharded face

    def make_unsharded(self, gradients: torch.dtype | None) -> nn.Parameter:
        """The unsharded face, whose values come and go with the gathered buffer's.

        Args:
            gradients: dtype that autograd gives its gradients; None for its own.
        """
        with not_inference():
            value = self.buffer.full_view(self.index)
            if self.parallel is not None:
                value = self.parallel.face(value)
            self.unsharded = nn.Parameter(value, requires_grad=self.sharded.requires_grad)
            if self.parallel is not None:
                self.parallel.annotate(self.unsharded)
            if gradients is not None:
                self.unsharded.grad_dtype = gradients
        self.buffer.use_face(self.index, self.unsharded)
        self.was_unsharded = True
        return self.unsharded

    @property
    def faces(self) -> Sequence[nn.Parameter]:
        """All parameters that the unsharded face consists of; none before it was made."""
        return () if self.unsharded is None else (self.unsharded,)

    def forget_unsharded(self) -> None:
        """The buffer is another: the unsharded face is made anew; its gradients still wait for their reduction."""
        face, self.unsharded = self.unsharded, None
        if face is not None and face.grad is not None:
            self.accumulated = face.grad if self.accumulated is None else self.accumulated.add_(face.grad)
        if face is not None and self.accumulated is not None and self.accumulated.dtype == face.dtype:
            self.accumulated = self.accumulated.to(self.buffer.dtype)

    # -- Unsharded gradients

    @staticmethod
    def have_gradients(slots: Sequence[Slot]) -> bool:
        """Whether an unsharded gradient of any of ``slots`` of one kind waits for its reduction."""
        for slot in slots:
            if slot.accumulated is not None or ((face := slot.unsharded) is not None and face.grad is not None):
                return True
        return False

    def drop_gradient(self) -> None:
        """Forget unsharded gradients."""
        self.accumulated = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def accumulate(self, reduce_dtype: torch.dtype | None) -> None:
        """Keep this backward's gradient for a later reduction, in ``reduce_dtype`` if that is another."""
        gradient = self.unsharded.grad if self.unsharded is not None else None
        if gradient is None:
            return
        assert self.unsharded is not None
        if self.accumulated is not None:
            self.accumulated += gradient
            self.unsharded.grad = None
        elif gradient.dtype != (dtype := communicated_dtype(gradient.dtype, reduce_dtype)):
            self.accumulated = gradient.to(dtype)
            self.unsharded.grad = None

    @staticmethod
    def take_gradients(slots: Sequence[Slot]) -> list[torch.Tensor | None]:
        """Remove the unsharded gradients of ``slots`` of one kind; contiguous, None where there is none.

        Raises:
            StateError: if one is sparse.
        """
        taken: list[torch.Tensor | None] = []
        for slot in slots:
            gradient = None
            if (unsharded := slot.unsharded) is not None:
                gradient, unsharded.grad = unsharded.grad, None
            if slot.accumulated is not None:
                gradient = slot.accumulated if gradient is None else slot.accumulated.add_(gradient)
                slot.accumulated = None
            if gradient is not None:
                if slot.parallel is not None:
                    gradient = slot.parallel.local_gradient(gradient)
                if gradient.layout is not torch.strided:
                    refuse_sparse(slot.name, gradient)
                gradient = gradient.contiguous()
            taken.append(gradient)
        return taken

    # -- Values

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        """Keep this rank's chunk of ``whole``, which has the shape that data parallelism cuts."""
        self.local.copy_(self.chunk_of(whole))
        self.has_values = True

    def chunk_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of ``whole``, which has the shape that data parallelism cuts, without padding; a view."""
        return chunk_of(self.layout, whole, self.buffer.comm.rank)

    @property
    def sharded_places(self) -> Sequence[Place]:
        """Where the sharded face is registered."""
        return self.places

    def registered(self) -> nn.Parameter:
        """What is registered: of a tied parameter, the one that was replaced last."""
        found = [place.get() for place in self.places if place.exists]
        return next(filter(self.is_another, reversed(found)), self.sharded)

    def is_another(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter``, which is registered, is neither the sharded face nor that one detached."""
        return parameter is not self.sharded and not is_alias(parameter, self.sharded)

    def refuse_untied(self) -> None:
        """
        Raises:
            StateError: if it is tied, and was replaced under some of its names, of which the others then had the value.
        """
        places = [place for place in self.sharded_places if place.exists]
        replaced = [place for place in places if self.is_another(place.get())]
        if replaced and len(replaced) < len(places):
            raise StateError(
                f"parameter {self.name!r} is tied, and was replaced as {replaced[0].name!r} of a "
                f"{type(replaced[0].module()).__name__} alone: untie it before fully_shard, or register the same "
                "parameter under each of its names"
            )


def communicated_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype that tensors of ``dtype`` are gathered or reduced in, where ``wanted`` is asked for."""
    return wanted if wanted is not None and dtype.is_floating_point else dtype


@dataclass
class GroupOptions:
    """What users may set on a group while training; the defaults are torch FSDP2's."""

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    divide_factor: float | None = None
    divisors: tuple[float, float] | None = None
    """In place of ``divide_factor``: what gradients are divided by before and after they are summed."""
    force_sum: bool = False
    unshard_in_backward: bool = True
    keeps_memory: bool = False
    """Whether resharding leaves the gathered buffers their memory, which the next gather fills again."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    zeros_for_unused: bool = False
    custom_gather: StagedCollective | None = None
    custom_reduce_scatter: StagedCollective | None = None
    reduce_comm: Comm | None = None


@dataclass
class GroupPolicy:
    """What is fixed when a group is made.

    Args:
        precision: dtypes of gathered parameters and of reductions.
        offload: whether sharded parameters and gradients live on the host.
        pin_memory: whether they do so in pinned memory.
        reshard_to: mesh whose last axis is the smaller world to reshard to after forward, if not to the whole one.
    """

    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: bool = False
    pin_memory: bool = False
    reshard_to: DataParallelMesh | None = None

    def gather_dtype(self, shards: torch.dtype) -> torch.dtype:
        """Dtype that shards of dtype ``shards`` are gathered in."""
        return communicated_dtype(shards, self.precision.param_dtype)

    def reduce_dtype(self, shards: torch.dtype) -> torch.dtype | None:
        """Dtype that gradients of shards of dtype ``shards`` are reduced and accumulated in; None for their own."""
        return self.precision.reduce_dtype or (shards if REDUCES_IN_DTYPE_OF_SHARDS else None)

    def arriving_dtype(self, buffer: ShardedBuffer) -> torch.dtype | None:
        """Dtype that autograd gives gradients, if not that of the gathered parameters: from torch 2.15 on each is cast
        to that of the reduction before it is added to others, unless that is wider."""
        wanted, own = self.reduce_dtype(buffer.local.dtype), buffer.dtype
        if not REDUCES_IN_DTYPE_OF_SHARDS or wanted is None or not own.is_floating_point:
            return None
        return wanted if wanted != own and wanted.itemsize <= own.itemsize else None
