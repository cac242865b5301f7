"""Whole tensors between their owners and the other ranks: the small ones in runs, the large ones by themselves.

A parameter that got no gradient on this rank contributes zeros to its owner's sum; one number per parameter tells the
owner whether any rank had one (see `core.gradient`).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack

from .agreement import explain_failure
from .comm import Comm
from .device import backward_number, copy_each, not_inference, owns_memory, sent_to, shares_storage
from .gradient import Scale, gradient_scale, refuse_sparse
from .lanes import Flight
from .layout import Run, whole

RUNS_IN_FLIGHT = 4
"""At most so many full runs are being reduced at once: their memory is freed only when they are waited for."""

ALIGNED_BYTES = 64
"""Tensors that are kept in the run that they are sent in start at multiples of this, as memory of their own would:
kernels compiled for a parameter rely on its alignment."""


def half_precision(dtype: torch.dtype) -> torch.dtype:
    """float16 for floating-point dtypes that are wider."""
    return torch.float16 if dtype.is_floating_point and dtype.itemsize > 2 else dtype


class WholePlan:
    """The runs that tensors travel in.

    Args:
        tensors: in the order in which they become ready; only their shapes, dtypes and devices are looked at.
        owners: rank of each.
        comm: the ranks.
        limit: elements of a run at most; -1 leaves it to ``comm``, 0 sends every tensor by itself.
        half: whether wider floating-point numbers travel as float16.
        alignment: bytes; tensors of a run start at multiples of it. By default there is nothing between them.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        owners: Sequence[int],
        comm: Comm,
        limit: int = -1,
        half: bool = False,
        alignment: int = 1,
    ):
        self.comm, self._alignment = comm, alignment
        self.shapes = [tensor.shape for tensor in tensors]
        self.dtypes = [half_precision(tensor.dtype) if half else tensor.dtype for tensor in tensors]
        numbers: dict[tuple[torch.dtype, torch.device], int] = {}
        kinds = [
            numbers.setdefault((dtype, tensor.device), len(numbers))
            for dtype, tensor in zip(self.dtypes, tensors, strict=True)
        ]
        most = [comm.run_bytes // dtype.itemsize for dtype, _ in numbers]
        limits = [elements if limit < 0 else min(elements, limit) for elements in most]
        sizes = [tensor.numel() for tensor in tensors]
        alone = [
            size * dtype.itemsize >= comm.alone_bytes and dtype == tensor.dtype
            for size, dtype, tensor in zip(sizes, self.dtypes, tensors, strict=True)
        ]
        self.layout = whole(sizes, owners, kinds, alone, limits)
        self._places = {run.tensors[0]: self._places_of(run) for run in self.layout.runs}
        self._settled: dict[int, torch.Tensor] = {}

    def _places_of(self, run: Run) -> tuple[list[int], list[int]]:
        """Elements that each tensor takes with the padding behind it, and where each starts."""
        step = max(self._alignment // self.dtype(run).itemsize, 1)
        lengths = [*(size + -size % step for size in run.sizes[:-1]), run.sizes[-1]]
        return lengths, [*accumulate(lengths[:-1], initial=0)]

    def dtype(self, run: Run) -> torch.dtype:
        """That ``run`` travels in."""
        return self.dtypes[run.tensors[0]]

    def own_memory(self, run: Run, values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The memory of the run's values, 1-D, if it is as it has to travel: of the run's dtype, each value where it
        has to start. None if the run needs memory of its own."""
        dtype = self.dtype(run)
        there = [value for value in values if value is not None and _is_plain(value) and value.dtype is dtype]
        if len(there) < len(values):
            return None
        if len(there) == 1:
            return there[0].view(-1)
        addresses, (lengths, starts) = [value.data_ptr() for value in there], self._places[run.tensors[0]]
        if addresses != [addresses[0] + dtype.itemsize * start for start in starts]:
            # Nobody needs what the tensors have left.
            self._settled.pop(run.tensors[0], None)
            return None
        flat = self._settled.get(run.tensors[0])
        if flat is not None and flat.data_ptr() == addresses[0]:
            return flat
        return there[0].as_strided((sum(lengths),), (1,)) if shares_storage(there[0], there[-1]) else None

    def settle(self, tensors: Sequence[torch.Tensor], moved: dict[int, int]) -> None:
        """Move small tensors to where they travel, run by run, so that none is packed again.

        Only where nothing else refers to their memory, which would no longer be theirs.

        Args:
            tensors: all of them.
            moved: where tensors have been moved to, by their ids; changed here.
        """
        for run in self.layout.runs:
            members = [tensors[index] for index in run.tensors]
            if len(members) > 1 and all(_may_move(one, moved) and one.dtype == self.dtype(run) for one in members):
                with not_inference(), torch.no_grad():
                    flat = self._settled[run.tensors[0]] = self.pack(run, members, members[0])
                    for tensor, part in zip(members, self.parts(run, flat), strict=True):
                        tensor.data = _with_own_storage(part)
                        moved[id(tensor)] = tensor.data_ptr()

    def pack(self, run: Run, values: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
        """New memory with the values of ``run``, zeros for None, on the device of ``like``."""
        flat, parts = self.empty(run, like), []
        padding = flat.new_zeros(self._alignment)
        for value, size, length in zip(values, run.sizes, self._places[run.tensors[0]][0], strict=True):
            parts.append(flat.new_zeros(size) if value is None else value.reshape(-1))
            if length > size:
                parts.append(padding[: length - size])
        return torch.cat(parts, out=flat)

    def empty(self, run: Run, like: torch.Tensor) -> torch.Tensor:
        """New memory for ``run`` on the device of ``like``."""
        return torch.empty(sum(self._places[run.tensors[0]][0]), dtype=self.dtype(run), device=like.device)

    def parts(self, run: Run, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of ``flat`` in the shapes of the run's tensors."""
        pieces = zip(flat.split_with_sizes(self._places[run.tensors[0]][0]), run.sizes, run.tensors, strict=True)
        return [
            (piece if piece.numel() == size else piece[:size]).view(self.shapes[index]) for piece, size, index in pieces
        ]

    def unpack(self, run: Run, flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Copy ``flat`` into ``targets``."""
        pairs = [without_repeats(*pair) for pair in zip(targets, self.parts(run, flat), strict=True)]
        copy_each([target for target, _ in pairs], [source for _, source in pairs])

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> list[Callable[[], None]]:
        """Start replacing ``tensors`` by their owners'; gives what waits, for each run, until that is done.

        Where they travel in another dtype the owner rounds its own too, so that all ranks hold the same.
        """
        return [self._broadcast_run(run, [tensors[index] for index in run.tensors]) for run in self.layout.runs]

    def _broadcast_run(self, run: Run, values: Sequence[torch.Tensor]) -> Callable[[], None]:
        sends, own = run.owner == self.comm.rank, self.own_memory(run, values)
        if own is not None:
            flat, has_values = own.data, True
        else:
            values = [value.data for value in values]
            flat = self.pack(run, values, values[0]) if sends else self.empty(run, values[0])
            has_values = sends and all(value.dtype == flat.dtype for value in values)
        flight = Flight(self.comm.broadcast(flat, run.owner))

        def finish() -> None:
            flight.wait()
            if not has_values:
                self.unpack(run, flat, values)

        return finish


def _is_plain(value: torch.Tensor) -> bool:
    """Whether the memory of ``value`` has its elements, one after the other."""
    return value.is_contiguous() and not (value.is_conj() or value.is_neg())


def has_repeats(tensor: torch.Tensor) -> bool:
    """Whether ``expand`` made several elements of one place in memory, where torch refuses to write."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size(), strict=True))


def without_repeats(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without the copies that ``expand`` makes of elements of ``target``: torch writes no element twice."""
    strides = target.stride()
    if 0 in strides:
        first = tuple(slice(1) if stride == 0 else slice(None) for stride in strides)
        return target[first], source[first]
    return target, source


def _may_move(tensor: torch.Tensor, moved: dict[int, int]) -> bool:
    # Other processes may have shared memory, and files and arrays what cannot be resized, unless it was made here; and
    # there is a reason for pinned memory.
    if not owns_memory(tensor) or (tensor.is_cpu and (tensor.is_shared() or tensor.is_pinned())):
        return False
    return tensor.untyped_storage().resizable() or moved.get(id(tensor)) == tensor.data_ptr()


def _with_own_storage(part: torch.Tensor) -> torch.Tensor:
    """The same memory, of which no more belongs to the result than its elements: those who save a tensor, or look which
    ones share memory, go by storages."""
    # Flat, since DLPack forgets the strides of dims with one element.
    return from_dlpack(part.view(-1)).view(part.shape)


class WholeBroadcast:
    """Tensors that are often replaced by their owners', as long as none changes its shape, dtype or device.

    Args:
        tensors: on any devices.
        owners: rank of each.
        comm_on: the ranks, for a device.
        limit: as of `WholePlan`.
        half: as of `WholePlan`.
        moved: where small tensors have been moved to, by their ids, and may be again; None if they may not.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        owners: Sequence[int],
        comm_on: Callable[[torch.device], Comm],
        limit: int = -1,
        half: bool = False,
        moved: dict[int, int] | None = None,
    ):
        self._plans: list[tuple[WholePlan, list[torch.Tensor]]] = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            here = [(tensor, owner) for tensor, owner in zip(tensors, owners, strict=True) if tensor.device == device]
            members = [tensor for tensor, _ in here]
            alignment = 1 if moved is None else ALIGNED_BYTES
            plan = WholePlan(members, [owner for _, owner in here], comm_on(device), limit, half, alignment)
            if moved is not None:
                plan.settle(members, moved)
            self._plans.append((plan, members))

    def start(self) -> Callable[[], None]:
        """Start; gives what waits until it is done."""
        waits = [wait for plan, tensors in self._plans for wait in plan.broadcast(tensors)]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish


class _Turns:
    """The reducers of one backward pass send one after the other, in the order in which they began.

    Which gradients exist may differ by rank: sent as they come, those of one model would meet another's elsewhere.
    """

    def __init__(self, backward: int):
        self.backward = backward
        # Gradients on several devices arrive on several threads.
        self.lock = threading.Lock()
        self._queue: deque[OwnerReducer] = deque()

    def enter(self, reducer: OwnerReducer) -> None:
        """``reducer`` begins."""
        with self.lock:
            self._queue.append(reducer)

    def advance(self) -> None:
        """Send what is complete and has its turn; under the lock."""
        while self._queue and self._queue[0].send_complete():
            self._queue.popleft()

    def end(self, reducer: OwnerReducer) -> None:
        """The backward pass is over: send all of those that began before ``reducer``, and its own."""
        with self.lock:
            while reducer in self._queue:
                self._queue.popleft().send_rest()
            self.advance()


# Weak: after a pass that failed they would keep its models.
_turns: weakref.WeakKeyDictionary[Comm, weakref.ref[_Turns]] = weakref.WeakKeyDictionary()
"""Of the latest backward pass in which gradients are reduced over these ranks."""


def _turns_now(comm: Comm) -> _Turns:
    known = _turns.get(comm)
    turns = known() if known is not None else None
    if turns is None or turns.backward != backward_number():
        turns = _Turns(backward_number())
        _turns[comm] = weakref.ref(turns)
    return turns


_MEAN = "_shardwise_mean"
"""The attribute of a gradient that is a mean over ranks. Of the tensor, not of the parameter: users may give that
another one, of this rank alone."""


def _is_mean(gradient: torch.Tensor) -> bool:
    return _MEAN in gradient.__dict__


class OwnerReducer:
    """Gradients of whole parameters to the ranks that own them. It knows how, never when.

    One backward is `begin`, `ready` for each gradient that autograd has added, and `finish`. Runs are sent in one
    order on all ranks, whatever order gradients arrive in. Non-owners' gradients are gone when sent; an owner's
    gradient from an earlier reduction is set aside meanwhile and the new mean is added to it.

    Args:
        parameters: the trainable ones, in the order in which their gradients are expected.
        names: of the parameters, for messages.
        owners: rank of each.
        comm: the ranks.
        limit: elements of a run at most; 0 sends every gradient by itself.
        half: whether wider gradients are reduced in float16.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        owners: Sequence[int],
        comm: Comm,
        limit: int,
        half: bool,
    ):
        self.parameters, self.names, self.comm = list(parameters), list(names), comm
        self.plan = WholePlan(parameters, owners, comm, limit, half)
        layout = self.plan.layout
        self.owned = layout.owned(comm.rank)
        self._runs = layout.runs
        # Empty gradients count as of the last run: when it is sent, it is known which gradients there were.
        self._without_run = [index for index, size in enumerate(layout.sizes) if not size]
        self._run_of = dict.fromkeys(self._without_run, len(self._runs) - 1) if self._runs else {}
        self._run_of |= {index: number for number, run in enumerate(self._runs) for index in run.tensors}
        self._kept: dict[int, torch.Tensor] = {}
        self._flying: deque[tuple[Run, torch.Tensor, Flight]] = deque()
        self._all_present: torch.Tensor | None = None
        self._reset()

    def _reset(self) -> None:
        self._turns: _Turns | None = None
        self._missing = [len(run.tensors) for run in self._runs]
        if self._missing:
            self._missing[-1] += len(self._without_run)
        self._next_run = 0
        self._flags: tuple[torch.Tensor, Flight] | None = None
        self._flying_bytes = 0
        self._present = [False] * len(self.parameters)
        self._means: dict[int, torch.Tensor] = {}

    # -- While autograd runs

    def begin(self) -> None:
        """A backward pass goes on whose gradients are to be reduced."""
        self._turns = _turns_now(self.comm)
        self._turns.enter(self)

    def set_aside(self, index: int) -> None:
        """A gradient is about to be added that will be reduced: it must not mix with the mean that is there."""
        parameter = self.parameters[index]
        if (gradient := parameter.grad) is not None and _is_mean(gradient):
            self._kept[index], parameter.grad = gradient, None

    def mix(self, index: int) -> None:
        """A gradient is about to be added that stays local for now: the mean there becomes a term of the next sum."""
        if (gradient := self.parameters[index].grad) is not None and _is_mean(gradient):
            del gradient.__dict__[_MEAN]
            gradient.mul_(self.comm.size)

    def ready(self, index: int) -> None:
        """The gradient of a parameter is complete: send what is next and complete."""
        if index not in self._run_of:
            return
        assert self._turns is not None
        with self._turns.lock, torch.no_grad():
            self._missing[self._run_of[index]] -= 1
            self._turns.advance()

    def send_complete(self) -> bool:
        """Start sending what is next and complete; gives whether that was all."""
        while self._next_run < len(self._runs) and not self._missing[self._next_run]:
            self._send_next()
        return self._flags is not None

    def send_rest(self) -> None:
        """Start sending all that was not sent yet."""
        while self._next_run < len(self._runs):
            self._send_next()
        if self._flags is None:
            self._send_flags()

    def _scale(self, run: Run) -> Scale:
        return gradient_scale(self.plan.dtype(run), self.comm.size, 1, None, force_sum=True)

    def _send_next(self) -> None:
        run = self._runs[self._next_run]
        self._next_run += 1
        values = [self._take(index) for index in run.tensors]
        before = self._scale(run).before
        casts = any(value is not None and value.dtype != self.plan.dtype(run) for value in values)
        if casts and before != 1.0:
            # Before the cast, which they might not survive.
            values = [value / before if value is not None else None for value in values]
        flat = self.plan.own_memory(run, values)
        if flat is None:
            flat = self.plan.pack(run, values, self.parameters[run.tensors[0]])
        values.clear()
        if not casts and before != 1.0:
            flat.div_(before)
        try:
            self._flying.append((run, flat, Flight(self.comm.reduce(flat, run.owner))))
        except RuntimeError as error:  # gloo refuses messages once it knows that the other rank is gone
            self._explain(error, run)
            raise
        self._flying_bytes += flat.nbytes
        while self._flying_bytes > RUNS_IN_FLIGHT * self.comm.run_bytes and len(self._flying) > 1:
            self._land_oldest()
        if self._next_run == len(self._runs):
            self._send_flags()

    def _take(self, index: int) -> torch.Tensor | None:
        """Remove this rank's part of the next sum from a parameter."""
        self.set_aside(index)
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            # gloo does not survive that memory goes which it is receiving into.
            self._wait()
            refuse_sparse(self.names[index], gradient, "its owner")
        self._present[index] = True
        return gradient.detach()

    def _wait(self) -> None:
        while self._flying:
            self._land_oldest()

    def _land_oldest(self) -> None:
        run, flat, flight = self._flying.popleft()
        self._flying_bytes -= flat.nbytes
        try:
            flight.wait()
        except RuntimeError as error:
            self._explain(error, run)
            raise
        if run.owner == self.comm.rank:
            if (after := self._scale(run).after) != 1.0:
                flat.div_(after)
            # `data` is no view, which users could not detach in place.
            self._means.update(
                (index, part.data) for index, part in zip(run.tensors, self.plan.parts(run, flat), strict=True)
            )

    def _explain(self, error: RuntimeError, run: Run) -> None:
        names = ", ".join([repr(self.names[index]) for index in run.tensors[:3]] + ["…"] * (len(run.tensors) > 3))
        owner = self.comm.known_rank(run.owner)
        whom = "their owner" if owner is None else f"rank {owner}"
        explain_failure(error, f"reducing the gradients of {names} to {whom}", self.comm)

    # -- At the end

    @torch.no_grad()
    def finish(self) -> None:
        """Send and receive the rest; owned parameters then have their gradients, others none."""
        for index, mean, exists in self._complete():
            gradient = self._kept.pop(index, None)
            if exists:
                mean = self._like_parameter(mean, self.parameters[index])
                gradient = mean if gradient is None else gradient.add_(mean)
            if gradient is not None:
                gradient.__dict__[_MEAN] = True
            self.parameters[index].grad = gradient

    def put_back(self) -> None:
        """A backward failed: owned parameters have the gradients again that they had before, which may be zeroed."""
        for index in self.owned:
            parameter = self.parameters[index]
            if parameter.grad is None or not _is_mean(parameter.grad):
                parameter.grad = self._kept.pop(index, None)

    @torch.no_grad()
    def abandon(self) -> None:
        """Finish a backward that failed, as the other ranks have to, and drop what it computed; after `put_back`."""
        before = [(index, self.parameters[index].grad) for index in self.owned]
        self._complete()
        for index, gradient in before:
            self.parameters[index].grad = gradient
        self._kept.clear()

    def _complete(self) -> list[tuple[int, torch.Tensor, bool]]:
        """Owned parameters: index, mean over ranks, whether any rank had a gradient."""
        if self._turns is not None:
            self._turns.end(self)
        self.send_rest()
        assert self._flags is not None
        flags, flight = self._flags
        self._wait()
        try:
            flight.wait()
        except RuntimeError as error:
            explain_failure(error, "telling the owners of gradients which there are", self.comm)
            raise
        own = [self._present[index] for index in self.owned]
        exist = own if all(own) else [flag != 0 for flag in flags[: len(own)].tolist()]
        empty = {index: torch.zeros_like(self.parameters[index]) for index in self._without_run}
        means = {**self._means, **empty}
        self._reset()
        return [(index, means[index], exists) for index, exists in zip(self.owned, exist, strict=True)]

    def _send_flags(self) -> None:
        """Start adding up, for each parameter, which ranks have a gradient; every owner gets the row of its own."""
        for index in self._without_run:
            self._take(index)
        most = self.plan.layout.most_owned
        everything = all(self._present)
        sent = self._all_present if everything else None
        if sent is None:
            rows: list[float] = []
            for rank in range(self.comm.size):
                row = [float(self._present[index]) for index in self.plan.layout.owned(rank)]
                rows += row + [0.0] * (most - len(row))
            sent = sent_to(self.parameters[0].device, rows, torch.float32)
            self._all_present = sent if everything else self._all_present
        received = sent.new_empty(most)
        self._flags = received, Flight(self.comm.reduce_scatter([received], [sent], mean=False))

    @staticmethod
    def _like_parameter(mean: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """``mean`` in the dtype and memory format that optimizers are fastest with."""
        if parameter.is_contiguous():
            return mean.to(parameter.dtype)
        return torch.empty_like(parameter).copy_(mean)
