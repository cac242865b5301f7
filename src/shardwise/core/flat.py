"""Flat shards: parameters that are joined to runs of elements, each cut evenly over the ranks and registered as one
parameter (FairScale's layout). A run of one parameter is the parameter itself, flattened."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .agreement import communicating
from .buffer import ShardedBuffer
from .device import call_without_torch_function, copy_each, not_inference, without_torch_function
from .errors import StateError
from .gradient import refuse_sparse
from .layout import flat
from .mesh import DataParallelRanks
from .options import GroupPolicy
from .parameter import owner_of, set_owner
from .place import Place
from .replaced import METADATA_METHODS, remember_successor, retire, successor_of
from .shards import Shards
from .slot import Slot
from .tree import tensors_in


@dataclass(frozen=True)
class FlatPart:
    """One parameter inside a run.

    Args:
        name: for messages.
        shape: of the whole parameter.
        places: whose names give it while it is unsharded.
    """

    name: str
    shape: tuple[int, ...]
    places: list[Place]

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatRun:
    """Parameters of one dtype that are joined.

    Args:
        name: of the sharded parameter, for messages.
        parts: at least one.
        sharded: its data become this rank's part of the run, with its padding.
        home: where ``sharded`` is registered at all times; None for a run of one parameter that is registered at the
            parameter's own places while it is sharded.
        values: whole values of the parts; None if ``sharded`` has its values already.
    """

    name: str
    parts: tuple[FlatPart, ...]
    sharded: nn.Parameter
    home: Place | None = None
    values: Sequence[torch.Tensor] | None = None

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(part.numel for part in self.parts)

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """What `torch.Tensor.view` makes of a rank's part before it is registered: a parameter by itself that only one
        rank has keeps its own shape, as with FairScale; all else is 1-D."""
        return self.parts[0].shape if self.home is None and ranks == 1 else (-1,)


class AbsentParameter(torch.Tensor):
    """What a module has under a parameter's name while the parameter is joined to others and sharded: it has a shape
    and a dtype, but no values."""

    # Not attributes of a tensor that could be given at construction: `as_subclass` takes none.
    label: str
    owner: weakref.ref[Shards] | None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it is when it is unsharded."""
        shards = self.owner() if self.owner is not None else None
        return shards.mesh.device if shards is not None else torch.device("meta")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without a dtype to convert to, `type` tells the one that there is, as `print` of a `ParameterDict` does.
        tells = func.__name__ in METADATA_METHODS or (func is torch.Tensor.type and len(args) == 1 and not kwargs)
        if not tells and func not in _PROPERTIES:
            for tensor in tensors_in((args, kwargs or {})):
                if isinstance(tensor, AbsentParameter):
                    is_property = func.__name__ in ("__get__", "__set__")
                    raise StateError(tensor._explain(func.__self__.__name__ if is_property else func.__name__))
        return call_without_torch_function(func, types, args, kwargs or {})

    def _explain(self, operator: str) -> str:
        shards = self.owner() if self.owner is not None else None
        unit = f" of unit {shards.unit_name!r}" if shards is not None else ""
        return (
            f"{operator}: parameter {self.label!r}{unit} is sharded outside of the unit's forward and has no values of "
            "its own here: use it inside the forward, or inside `with module.summon_full_params():`"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AbsentParameter({self.label!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _absent, (tuple(self.shape), self.dtype, self.label)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentParameter:
        return _absent(tuple(self.shape), self.dtype, self.label)


def _absent(
    shape: tuple[int, ...], dtype: torch.dtype, label: str, owner: weakref.ref[Shards] | None = None
) -> AbsentParameter:
    """Without an owner as it is unpickled, until its wrapper makes another."""
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(AbsentParameter)
    made.label, made.owner = label, owner
    return made


_READABLE = ("shape", "dtype", "ndim", "requires_grad", "is_meta", "is_cuda", "layout", "grad", "is_leaf", "itemsize")
_PROPERTIES = {getattr(torch.Tensor, name).__get__ for name in _READABLE}


class FlatSlot(Slot):
    """One run.

    Args:
        run: its parameters.
        buffer: that holds it.
        index: of the run in the buffer's layout.
        owner: the shards that this is a part of.
    """

    def __init__(self, run: FlatRun, buffer: ShardedBuffer, index: int, owner: weakref.ref[Shards]):
        super().__init__(run.name, [place for part in run.parts for place in part.places], buffer, index, run.sharded)
        self.parts, self.home, self.total, self._owner = run.parts, run.home, run.numel, owner
        self._local_shape = run.local_shape(buffer.comm.size)
        self.address = run.sharded.data_ptr()
        """Of the sharded parameter's memory in the buffer."""
        self._faces: list[nn.Parameter] = []
        self._summoned: torch.Tensor | None = None
        self._stand_ins: list[AbsentParameter] = []
        self._register_sharded()

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the run, with its padding, in the shape that it is registered in."""
        return self.buffer.local_view(self.index).view(self._local_shape)

    @property
    def padding(self) -> int:
        """Elements at the end of this rank's part that belong to no parameter."""
        rank, length = self.buffer.comm.rank, self.layout.length(self.buffer.comm.rank)
        return min(max(self.layout.start(rank) + length - self.total, 0), length)

    @property
    def is_in_place(self) -> bool:
        """Whether the sharded parameter still has its memory in the buffer."""
        return self.sharded.data_ptr() == self.address

    @property
    def sharded_places(self) -> Sequence[Place]:
        return self.parts[0].places if self.home is None else [self.home]

    def registered(self) -> nn.Parameter:
        """What is registered as the sharded face."""
        place = self.sharded_places[0]
        return place.get() if place.exists else self.sharded

    # -- The two faces

    def put_sharded(self) -> None:
        """What is registered does not change with the faces: only what the names give."""
        if self.home is None:
            for place in self.parts[0].places:
                place.withdraw()
            return
        for part, stand_in in zip(self.parts, self._stand_ins, strict=True):
            for place in part.places:
                place.give(stand_in)

    def _register_sharded(self) -> None:
        if self.home is None:
            for place in self.parts[0].places:
                place.put(self.sharded)
        else:
            dtype = self.sharded.dtype
            self._stand_ins = [_absent(part.shape, dtype, part.name, self._owner) for part in self.parts]
            for place in self.places:
                place.remove()
            self.home.put(self.sharded)
        self.put_sharded()

    def put_unsharded(self) -> Sequence[nn.Parameter]:
        """Let the names give the parts; gives the parameters that were made for that, the first time."""
        made: Sequence[nn.Parameter] = ()
        self._check_registered()
        if not self._faces:
            with not_inference():
                run = self.buffer.full_view(self.index)
                # Of each a version counter of its own: modifying one must not count as modifying all.
                self._faces = [nn.Parameter(view.data, self.sharded.requires_grad) for view in self.views(run)]
            made, self.was_unsharded = self._faces, True
        self.agree_on_gradients()
        for part, face in zip(self.parts, self._faces, strict=True):
            for place in part.places:
                place.give(face)
        return made

    def agree_on_gradients(self) -> None:
        requires_grad = self.sharded.requires_grad
        for face in self._faces:
            if face.requires_grad != requires_grad:
                face.requires_grad = requires_grad  # not `requires_grad_`, which the transforms of `torch.func` refuse

    def _check_registered(self) -> None:
        """
        Raises:
            StateError: naming a parameter in whose place another one was registered.
        """
        expected = self.sharded if self.home is None else None
        for part in self.parts:
            for place in part.places:
                module = place.module()
                if module is not None and module._parameters.get(place.name) is not expected:
                    raise StateError(
                        f"parameter {part.name!r}{self._of_unit()} was replaced after it was sharded, and the new one "
                        "would not be trained: write values into it inside `with module.summon_full_params():`, load "
                        "a state dict, or replace it before it is wrapped"
                    )

    def _of_unit(self) -> str:
        shards = self._owner()
        return f" of unit {shards.unit_name!r}" if shards is not None else ""

    def views(self, run: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a whole run, in their shapes."""
        pieces = run[: self.total].split([part.numel for part in self.parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, self.parts, strict=True)]

    @property
    def faces(self) -> Sequence[nn.Parameter]:
        return self._faces

    def forget_unsharded(self) -> None:
        self._note_forgotten()
        dtypes = {face.dtype for face in self._faces}
        self._faces = []
        if self.accumulated is not None and self.accumulated.dtype in dtypes:
            self.accumulated = self.accumulated.to(self.buffer.dtype)

    # -- Unsharded gradients

    @staticmethod
    def have_gradients(slots: Sequence[Any]) -> bool:
        return any(slot._has_gradient() for slot in slots)

    def _has_gradient(self) -> bool:
        self._forget_zeroed()
        return self.accumulated is not None or any(face.grad is not None for face in self._faces)

    def drop_gradient(self) -> None:
        self.accumulated = None
        for face in self._faces:
            face.grad = None

    def _forget_zeroed(self) -> None:
        """Who has dropped the sharded parameter's gradient since `accumulate` meant what waits for it too."""
        if self.sharded.grad is None:
            self.accumulated = None

    def accumulate(self, reduce_dtype: torch.dtype | None) -> None:
        """See `Slot.accumulate`. The sharded parameter gets a gradient, of zeros if it has none."""
        self._forget_zeroed()
        fresh = self._join_gradients(reduce_dtype)
        if fresh is None:
            return
        self.accumulated = fresh if self.accumulated is None else self.accumulated.add_(fresh)
        if self.sharded.grad is None:
            # An optimizer's `zero_grad` knows of this parameter only, and has to find something there.
            self.sharded.grad = torch.zeros_like(self.local)

    @staticmethod
    def take_gradients(slots: Sequence[Any]) -> list[torch.Tensor | None]:
        """See `Slot.take_gradients`; zeros where only other parts of a run have one."""
        return [slot._take_gradient() for slot in slots]

    def _take_gradient(self) -> torch.Tensor | None:
        self._forget_zeroed()
        gradient, self.accumulated = self.accumulated, None
        fresh = self._join_gradients(None)
        if gradient is None:
            return fresh
        return gradient if fresh is None else gradient.add_(fresh)

    def _join_gradients(self, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Remove this backward's gradients and give them as one run."""
        gradients = [face.grad for face in self._faces]
        # First of all: memory like that of a sparse one cannot be cut.
        for part, gradient in zip(self.parts, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                refuse_sparse(part.name, gradient)
        like = next((gradient for gradient in gradients if gradient is not None), None)
        if like is None:
            return None
        numel = self.layout.numel
        has_gaps = numel != self.total or any(gradient is None for gradient in gradients)
        run = like.new_zeros(numel, dtype=dtype) if has_gaps else like.new_empty(numel, dtype=dtype)
        targets, sources = [], []
        for view, gradient in zip(self.views(run), gradients, strict=True):
            if gradient is not None:
                targets.append(view)
                sources.append(gradient)
        copy_each(targets, sources)
        for face in self._faces:
            face.grad = None
        return run

    # -- Whole values

    def gather_like(self, shard: torch.Tensor) -> torch.Tensor:
        """The whole run of which ``shard`` is this rank's part, padding included, 1-D; all ranks call this."""
        own = shard.detach().reshape(-1).to(self.buffer.device)
        if self.buffer.comm.size == 1 or not own.numel():
            return own
        run = own.new_empty(self.buffer.comm.size * own.numel())
        with communicating(f"gathering {self.name!r}", self.buffer.comm):
            for work in self.buffer.comm.all_gather([run], [own]):
                work.wait()
        return run

    def cut(self, run: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole run without padding, padded by zeros, in the shape of `local`; memory of its
        own."""
        length = self.local.numel()
        part = run[self.buffer.comm.rank * length : (self.buffer.comm.rank + 1) * length]
        cut = run.new_zeros(length)
        cut[: part.numel()] = part
        return cut.view(self._local_shape)

    def summon(self, *, volatile: bool) -> list[nn.Parameter]:
        """Register whole parameters in the dtype of the shards, and give them; all ranks call this, between uses.

        Args:
            volatile: what is written into them is not to be kept.
        """
        run = self.gather_like(self.local)
        if volatile and run.data_ptr() == self.local.data_ptr():  # a world of one
            run = run.clone()
        self._summoned, faces = run, []
        for part, view in zip(self.parts, self.views(run), strict=True):
            faces.append(face := nn.Parameter(view, self.sharded.requires_grad))
            for place in part.places:
                place.withdraw()
                place.put(face)
        if self.home is not None:
            self.home.remove()
        return faces

    @torch.no_grad()
    def dismiss(self, *, keep_changes: bool) -> None:
        """Register the sharded face again, with what was written into this rank's part if ``keep_changes``.

        Raises:
            StateError: naming a parameter that was removed, or replaced by one of another shape; none is kept then.
        """
        run, self._summoned = self._summoned, None
        assert run is not None
        try:
            if keep_changes:
                self._keep_changes(run)
        finally:
            self._register_sharded()

    def _keep_changes(self, run: torch.Tensor) -> None:
        trained: dict[bool, str] = {}
        for part, view in zip(self.parts, self.views(run), strict=True):
            found = [place.registry.get(place.name) for place in part.places if place.exists]
            value = found[0] if found else None
            if value is None or value.shape != view.shape or any(other is not value for other in found):
                now = "was removed" if value is None else f"was replaced by one of shape {tuple(value.shape)}"
                if value is not None and value.shape == view.shape:
                    now = f"which has {len(found)} names, was removed or replaced at some of them"
                raise StateError(
                    f"parameter {part.name!r}{self._of_unit()}, of shape {part.shape}, {now} inside "
                    "summon_full_params: change modules before they are wrapped"
                )
            if value.data_ptr() != view.data_ptr():  # replaced, not written
                view.copy_(value)
            trained.setdefault(value.requires_grad, part.name)
        if len(trained) > 1:
            raise StateError(
                f"{trained[False]!r} was frozen inside summon_full_params{self._of_unit()} and {trained[True]!r}, "
                "which is joined to it, was not: freeze both, wrap with flatten_parameters=False, or freeze before that"
            )
        self.sharded.requires_grad_(True in trained)
        length = self.local.numel()
        self.local.copy_(run.narrow(0, self.buffer.comm.rank * length, length).view(self._local_shape))

    @property
    def is_summoned(self) -> bool:
        """Whether whole parameters are registered by `summon`."""
        return self._summoned is not None

    @property
    def summoned_at(self) -> int | None:
        """Where the memory of summoned parameters begins."""
        return None if self._summoned is None else self._summoned.untyped_storage().data_ptr()


class FlatShards(Shards):
    """Runs of parameters, which optimizers see as tensors of this rank's elements.

    Args:
        runs: in the order that the slots get.
        ranks: that share them.
        policy: dtypes and memory.
    """

    slots: list[FlatSlot]  # type: ignore[assignment]
    sees_writes = False

    def __init__(self, runs: Sequence[FlatRun], ranks: DataParallelRanks, policy: GroupPolicy):
        super().__init__(ranks, policy)
        self.holder: weakref.ref[nn.Module] | None = None
        """The module that the joined parameters are registered on."""
        by_dtype: dict[torch.dtype, list[FlatRun]] = defaultdict(list)
        for run in runs:
            like = run.sharded if run.values is None else run.values[0]
            by_dtype[like.dtype].append(run)
        with torch.no_grad(), not_inference():
            for dtype, members in by_dtype.items():
                buffer = self._buffer_of([run.numel for run in members], dtype)
                self.buffers.append(buffer)
                for index, run in enumerate(members):
                    self._fill(buffer, index, run)
                    self.slots.append(FlatSlot(run, buffer, index, self.reference))
        order = {id(run.sharded): position for position, run in enumerate(runs)}
        self.slots.sort(key=lambda slot: order[id(slot.sharded)])
        self._remember(runs)

    def _buffer_of(self, totals: Sequence[int], dtype: torch.dtype) -> ShardedBuffer:
        comm, gathered = self.mesh.shard, self.policy.gather_dtype(dtype)
        packed = [comm.packs(-(-total // comm.size) * gathered.itemsize) for total in totals]
        return self._new_buffer(flat(totals, comm.size, packed), dtype, gathered)

    def _fill(self, buffer: ShardedBuffer, index: int, run: FlatRun) -> None:
        """Put this rank's part of ``run`` into the buffer, and the sharded parameter around it."""
        chunk = buffer.local_view(index)
        if run.values is None:
            chunk.copy_(run.sharded.reshape(-1))
        else:
            start, position = buffer.layout.tensors[index].start(buffer.comm.rank), 0
            for value in run.values:
                first, end = max(position, start), min(position + value.numel(), start + chunk.numel())
                if first < end:
                    piece = value.detach().reshape(-1)[first - position : end - position]
                    chunk[first - start : end - start].copy_(piece)
                position += value.numel()
        run.sharded.data = chunk.view(run.local_shape(buffer.comm.size))
        set_owner(run.sharded, self.reference)

    def _remember(self, runs: Sequence[FlatRun]) -> None:
        for position, run in enumerate(runs):
            for value in run.values or ():
                if isinstance(value, nn.Parameter) and value is not run.sharded:
                    remember_successor(value, self.reference, position)
                    retire(value)

    # -- The two faces

    def put_sharded(self) -> None:
        for slot in self.slots:
            slot.put_sharded()

    def put_unsharded(self) -> None:
        with without_torch_function():
            for position, slot in enumerate(self.slots):
                for made in slot.put_unsharded():
                    # An optimizer made while it is registered must not step it: the shards are what counts.
                    remember_successor(made, self.reference, position)

    def agree_on_gradients(self) -> None:
        for slot in self.slots:
            slot.agree_on_gradients()

    def gradients_as_registered(
        self, slots: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        if self.mesh.shard.size > 1:
            return gradients
        return [
            None if gradient is None else gradient.view(slot.local.shape)
            for slot, gradient in zip(slots, gradients, strict=True)
        ]

    # -- Whole values

    def summon(self, *, volatile: bool, is_loading: bool = False) -> None:
        """Register whole parameters; all ranks call this, between uses.

        Args:
            volatile: what is written into them is not to be kept.
            is_loading: a state dict is written into them, and nothing else is done meanwhile.
        """
        with torch.no_grad(), not_inference():
            for position, slot in enumerate(self.slots):
                for face in slot.summon(volatile=volatile):
                    # An optimizer made of them would step tensors that are thrown away. While loading nobody makes one,
                    # and torch may swap them with others, which it does not where they are referred to weakly.
                    if not is_loading:
                        remember_successor(face, self.reference, position)

    def dismiss(self, *, keep_changes: bool) -> None:
        """Undo `summon`; see `FlatSlot.dismiss`."""
        with not_inference(), contextlib.ExitStack() as stack:  # all of them, whatever one raises
            # A stack is left from its end, and joined parameters are registered in the order of the runs.
            for slot in reversed(self.slots):
                stack.callback(slot.dismiss, keep_changes=keep_changes)
        self.mark_stale()

    @property
    def is_summoned(self) -> bool:
        """Whether whole parameters are registered by `summon`."""
        return any(slot.is_summoned for slot in self.slots)

    # -- Making them again

    @property
    def is_adopted(self) -> bool:
        """See `Shards`. Looked up, not noted: an assignment to ``parameter.data`` tells nobody."""
        return all(slot.is_in_place for slot in self.slots)

    def leave_meta(self) -> None:
        pass  # flat shards are never on the meta device

    def adopt_registered(self, *, is_loading: bool = False) -> bool:
        self.mark_stale()
        rebuilt = False
        for position, buffer in enumerate(self.buffers):
            slots = [slot for slot in self.slots if slot.buffer is buffer]
            with without_torch_function():
                rebuilt |= self._adopt(position, slots)
        return rebuilt

    def _adopt(self, position: int, slots: Sequence[FlatSlot]) -> bool:
        old = self.buffers[position]
        untouched, registered = True, [slot.registered() for slot in slots]
        for slot, current in zip(slots, registered, strict=True):
            if current.shape != slot.local.shape:
                raise StateError(
                    f"parameter {slot.name!r} of unit {self.unit_name!r}, {slot.local.numel()} elements of this rank, "
                    f"was replaced by one of shape {tuple(current.shape)}: write values into it, or load a state dict"
                )
        for slot, current in zip(slots, registered, strict=True):
            untouched &= current is slot.sharded and current.data_ptr() == slot.local.data_ptr()
            untouched &= current.dtype == old.local.dtype and current.device == old.local.device
            if current is not slot.sharded:
                remember_successor(slot.sharded, self.reference, self.slots.index(slot))
                slot.sharded = current
        if untouched:
            return False
        dtype = self._only_dtype({slot.sharded.dtype for slot in slots})
        with torch.no_grad(), not_inference():
            buffer = self.buffers[position] = self._buffer_of([slot.total for slot in slots], dtype)
            for slot in slots:
                slot.buffer = buffer
                slot.local.copy_(slot.sharded)
                slot.sharded.data = slot.local
                set_owner(slot.sharded, self.reference)
                slot.address = slot.sharded.data_ptr()
                slot.forget_unsharded()
                slot._register_sharded()
        old.free()
        return True


def refuse_flat(where: nn.Module | Iterable[torch.Tensor], function: str) -> None:
    """For functions that would take a rank's part of a flat parameter for the whole.

    Args:
        where: a model, or parameters: sharded, unsharded, or those that were there before.
        function: for the message.

    Raises:
        ValueError: naming a flat parameter in ``where``, and what to call instead.
    """
    for parameter in where.parameters() if isinstance(where, nn.Module) else where:
        if isinstance(parameter, DTensor):
            continue
        successor = successor_of(parameter)
        sharded = parameter if successor is None else successor
        if isinstance(owner := owner_of(sharded), FlatShards):
            name, unit = owner.name_of(sharded)
            raise ValueError(
                f"{function}: parameter {name!r} of unit {unit!r} is a flat shard of FullyShardedDataParallel, and the "
                f"part that this rank has would be taken for the whole: {INSTEAD.get(function, INSTEAD['save'])}"
            )


INSTEAD = {
    "save": "call model.state_dict() (whole, at any world size) or model.local_state_dict(), "
    "model.gather_full_optim_state_dict(optimizer), and torch.save",
    "load": "call model.load_state_dict() or model.load_local_state_dict(), and load into the optimizer what "
    "model.get_shard_from_optim_state_dict() gives",
    "full_state_dict": "call model.state_dict(), which is whole",
    "load_full_state_dict": "call model.load_state_dict() with a whole state dict on every rank",
    "save_safetensors": "call model.state_dict(), which is whole, and write it by safetensors.torch.save_file",
    "load_safetensors": "read the file by safetensors.torch.load_file and call model.load_state_dict()",
    "EMA.state_dict": "save model.state_dict() inside `with ema.swap():`, which is whole",
    "EMA.load_state_dict": "make the EMA after model.load_state_dict() of the average",
    "clip_grad_norm_": "call model.clip_grad_norm_()",
    "repoint": "make the optimizer after wrapping, of model.parameters()",
}
"""What `FullyShardedDataParallel` has in the place of a function of `shardwise`."""
