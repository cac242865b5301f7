"""What is known about the parameters of a group: one slot for each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .buffer import ShardedBuffer, chunk_of
from .device import local_of, not_inference, set_data
from .errors import StateError
from .gradient import refuse_sparse
from .layout import TensorLayout
from .model_parallel import ModelParallel
from .options import communicated_dtype
from .parameter import is_alias, marks_of
from .place import Place


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
    forgotten: Sequence[weakref.ref[torch.Tensor]] = ()
    """What the unsharded face consisted of before the buffer was another, as graphs may have it still."""
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
            self._take_marks()
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

    def use_sharded(self, parameter: nn.Parameter) -> None:
        """Another one is registered as the sharded face."""
        self.sharded = parameter
        self._take_marks()

    def use_buffer(self, buffer: ShardedBuffer) -> None:
        """Its values are in ``buffer``, which may be that of before with other shards: then a graph that has its
        unsharded face computes with those."""
        if buffer is not self.buffer:
            self.buffer = buffer
            self.forget_unsharded()
        elif buffer.is_identity and self.unsharded is not None:
            set_data(local_of(self.unsharded), buffer.full_view(self.index))

    def _take_marks(self) -> None:
        """Let the unsharded face have what users left on the sharded one."""
        if (face := self.unsharded) is not None and type(face.data) is torch.Tensor:  # others keep there what they are
            for name in marks_of(face):
                del face.__dict__[name]
            face.__dict__.update(marks_of(self.sharded))

    def forget_unsharded(self) -> None:
        """The buffer is another: the unsharded face is made anew; its gradients still wait for their reduction."""
        self._note_forgotten()
        face, self.unsharded = self.unsharded, None
        if face is not None and face.grad is not None:
            self.accumulated = face.grad if self.accumulated is None else self.accumulated.add_(face.grad)
        if face is not None and self.accumulated is not None and self.accumulated.dtype == face.dtype:
            self.accumulated = self.accumulated.to(self.buffer.dtype)

    def _note_forgotten(self) -> None:
        if self.faces:
            self.forgotten = [weakref.ref(face) for face in self.faces]

    @property
    def is_lost(self) -> bool:
        """Whether the unsharded face is gone, of which a graph has what it consisted of."""
        return not self.faces and any(reference() is not None for reference in self.forgotten)

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
