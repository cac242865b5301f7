"""Partial gradients to reduced shards: staging, the reduction, and what comes out of it.

A parameter that got no gradient on this rank contributes zeros. Whether another rank had one is known from one
number per parameter that rides along: without it ranks would disagree whether ``grad`` is None or zero, and step
their shards differently. It also tells of gradients of parameters that were left out because nobody had any lately.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch

from .agreement import explain_failure, sized
from .buffer import Allocate, cut_chunks, local_strides, thin_rows
from .comm import Comm, StagedCollective, by_custom, reduce_op
from .device import HOST, chunk_cat, copy_each, is_elsewhere, pins_memory, sent_to
from .errors import StateError
from .lanes import Lane, Step, Ticket, Waitable
from .layout import Cut, TensorLayout, for_gradients


@dataclass(frozen=True)
class Scale:
    """How a sum over ranks becomes a mean: divisors before, between and after the reductions, and whether each
    reduction averages by itself."""

    before: float = 1.0
    between: float = 1.0
    after: float = 1.0
    mean: bool = False


@functools.lru_cache
def gradient_scale(
    dtype: torch.dtype, shard_size: int, replicate_size: int, factor: float | None, force_sum: bool
) -> Scale:
    """Divisors for gradients reduced in ``dtype``, as torch FSDP2 places them, so that results agree bitwise.

    Args:
        dtype: of the reduction. float16 is divided by about the root of the factor before and by the rest after,
            so that neither sum nor terms leave its range.
        shard_size: ranks of the reduce-scatter.
        replicate_size: ranks of the all-reduce.
        factor: divisor in place of the number of ranks.
        force_sum: whether the backend's own averaging must not be used.
    """
    if dtype == torch.float16:
        before, after = halves_of(factor or shard_size * replicate_size)
        return Scale(before=before, after=after)
    if force_sum:
        return Scale(after=float(factor or shard_size * replicate_size))
    if factor is not None:
        return Scale(between=float(factor))
    return Scale(mean=True)


def halves_of(divisor: float) -> tuple[float, float]:
    """Two factors of ``divisor``: a power of two that is about its root, and the rest."""
    first = 1.0
    while divisor % first == 0 and divisor / first > first:
        first *= 2
    return first, divisor / first


def refuse_sparse(name: str, gradient: torch.Tensor, destination: str = "shards") -> NoReturn:
    """
    Raises:
        StateError: the gradient of parameter ``name`` is sparse, and should be reduced to ``destination``.
    """
    raise StateError(
        f"parameter {name!r} got a {gradient.layout} gradient, which cannot be reduced to {destination}: "
        "use dense gradients (nn.Embedding(sparse=False))"
    )


@dataclass
class Staged:
    """What a reduction communicates.

    Args:
        outputs: of the reduce-scatter, runs of the reduced buffer.
        inputs: of the reduce-scatter.
        thin: run of whole gradients to be summed in place, if there are such.
    """

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    thin: torch.Tensor | None = None

    @property
    def sent(self) -> list[torch.Tensor]:
        """All that holds this rank's gradients."""
        return self.inputs if self.thin is None else [*self.inputs, self.thin]


FLAGS_ALIGNMENT = 16
"""Bytes: what follows the flags starts where NCCL and element-wise kernels can move as many at once."""
PADDED_BYTES = 2**20
"""On the CPU torch first copies a tensor that needs padding to new memory; from this size on, that costs more than one
call for each tensor."""


def pad_chunks(tensors: Sequence[torch.Tensor], world_size: int, out: torch.Tensor) -> None:
    """`chunk_cat`, tensor by tensor, each copied once."""
    lengths = [-(-len(tensor) // world_size) for tensor in tensors]
    sizes = [length * tensor[:1].numel() for length, tensor in zip(lengths, tensors, strict=True)]
    for tensor, length, rows in zip(tensors, lengths, out.split(sizes, dim=1), strict=True):
        count = len(tensor) // length
        rows[:count].copy_(tensor[: count * length].reshape(count, -1))
        rest = tensor[count * length :].reshape(-1)
        rows[count:].zero_()
        rows[count : count + 1, : rest.numel()].copy_(rest)


class GradientPlan:
    """How the gradients of some parameters are laid out for their reduction.

    Args:
        tensors: layouts of the parameters.
        shard: axis that the gradients are cut over.
        dtype: of the reduction.
        packs_all: whether all are sent in one run, where casting them costs no extra copy.
        flags: number of parameters whose presence is reported: those of ``tensors`` first, then any left out.
    """

    def __init__(
        self,
        tensors: Sequence[TensorLayout],
        shard: Comm,
        dtype: torch.dtype,
        packs_all: bool,
        flags: int,
    ):
        world_size = shard.size
        self.dtype, self.world_size = dtype, world_size
        self.sums_flags = any(tensor.thin for tensor in tensors)
        # Where anything is summed whole the flags are too, instead of once for every rank. They are at the start or at
        # the end, so that the shards of gradients lie as those of the parameters do.
        padded_bytes = -(-flags * dtype.itemsize // FLAGS_ALIGNMENT) * FLAGS_ALIGNMENT
        self._flags_numel = flags if self.sums_flags else padded_bytes // dtype.itemsize
        cuts: list[Cut] = [] if self.sums_flags else [((world_size, self._flags_numel), 0, True, False)]
        front = len(cuts)
        for tensor in tensors:
            is_small = shard.packs(tensor.chunk_numel * dtype.itemsize)
            packed = packs_all or is_small or not tensor.is_even
            cuts.append((tensor.shape, tensor.dim, packed, tensor.thin))
        self.layout = layout = for_gradients(cuts, world_size)
        padded = (tensor.numel for tensor in layout.tensors if tensor.packed and not tensor.is_even)
        self._pads_much = max(padded, default=0) * dtype.itemsize >= PADDED_BYTES
        self.tensors = layout.tensors[front:]
        held = layout.local_numel(shard.rank)
        self.flags = slice(0, flags) if front else slice(held, held + flags)
        self.numel = held if front else held + flags
        self.partial: torch.Tensor | None = None
        self._own_rows = [*thin_rows(layout, shard.rank), (layout.full_numel, flags)]
        self._own_sizes = [size for _, size in self._own_rows]
        self._views = [local_strides(tensor, shard.rank, held) for tensor in self.tensors]
        self._told: tuple[Sequence[bool], torch.Tensor] | None = None
        """What `_flag_rows` was called with last, and gave."""
        self.exist: Sequence[bool] = ()
        """Which of the reported parameters had a gradient on any rank, when that was read last."""

    def _flag_rows(self, present: Sequence[bool], like: torch.Tensor) -> torch.Tensor:
        """One row of ones and zeros for every rank, or for all: which gradients this rank has."""
        if (flags := self._kept_flags(present, like)) is not None:
            return flags
        rows, padding = 1 if self.sums_flags else self.world_size, self._flags_numel - len(present)
        if all(present):
            flags = like.new_ones(rows, self._flags_numel)
        else:
            row = sent_to(like.device, [*map(float, present), *[0.0] * padding], like.dtype)
            flags = row.repeat(rows, 1)
        self._told = [*present], flags
        return flags

    def _kept_flags(self, present: Sequence[bool], like: torch.Tensor) -> torch.Tensor | None:
        """What `_flag_rows` gave last, if that was for the same."""
        if self._told is None or self._told[0] != present or self._told[1].dtype != like.dtype:
            return None
        return self._told[1]

    def knows(self, present: Sequence[bool], like: torch.Tensor) -> bool:
        """Whether nothing has to be made on the host, or read there, where this rank has these gradients as last time,
        of the dtype of ``like``, and so have the others."""
        return self._kept_flags(present, like) is not None and (all(present) or bool(self.exist))

    def stage(
        self, gradients: Sequence[torch.Tensor], present: Sequence[bool], out: torch.Tensor, allocate: Allocate
    ) -> Staged:
        """What is communicated: one packed run and each other tensor itself, and the run of the thin ones."""
        thin: list[tuple[int, torch.Tensor]] = []
        outputs, inputs = [], []
        flags = self._flag_rows(present, gradients[0] if gradients else out)
        rows = [] if self.sums_flags else [flags]
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            if not tensor.chunk_numel:
                continue
            if tensor.thin:
                thin.append((tensor.full_offset, gradient.view(-1)))
            elif tensor.packed:
                rows.append(gradient if tensor.is_contiguous_cut else cut_chunks(tensor, gradient))
            else:
                outputs.append(out[tensor.local_offset : tensor.local_offset + tensor.chunk_numel])
                inputs.append(gradient.view(-1))
        packed = self.layout.packed_numel
        if self.world_size == 1:
            chunk_cat(rows, 1, out[:packed].view(1, -1))
            return Staged([], [])
        if rows:
            staging = allocate((packed * self.world_size,), dtype=out.dtype, device=out.device)
            cut = pad_chunks if self._pads_much and staging.device.type == "cpu" else chunk_cat
            cut(rows, self.world_size, staging.view(self.world_size, -1))
            outputs, inputs = [out if packed == out.numel() else out[:packed], *outputs], [staging, *inputs]
        if not self.sums_flags:
            return Staged(outputs, inputs)
        parts = [gradient for _, gradient in sorted(thin, key=itemgetter(0))]
        whole = out.new_empty(self.layout.full_numel + flags.numel())
        chunk_cat([*parts, flags.view(-1)], 1, whole.view(1, -1))
        return Staged(outputs, inputs, whole)

    def keep_own(self, thin: torch.Tensor, out: torch.Tensor) -> None:
        """Copy this rank's rows, and the flags, out of the summed run of thin tensors."""
        parts = [thin.narrow(0, *row) for row in self._own_rows]
        copy_each(out[self.layout.even_numel :].split_with_sizes(self._own_sizes), parts)

    def unstage(self, out: torch.Tensor, exist: Sequence[bool]) -> list[torch.Tensor | None]:
        """Shards of the reduced gradients in their shapes; None for a parameter that no rank had a gradient for."""
        own = exist[: len(self._views)]
        return [out.as_strided(*view) if flag else None for view, flag in zip(self._views, own, strict=True)]


@dataclass(slots=True)
class Route:
    """The collectives that gradients take.

    Args:
        shard: axis of the reduce-scatter.
        replicate: axes of the all-reduces that follow.
        scale: divisors.
        stop_after_shard: keep the partial sums instead of all-reducing.
        hook: called with the reduced 1-D buffer.
        custom: the user's own reduce-scatter.
    """

    shard: Comm
    replicate: tuple[Comm, ...]
    scale: Scale
    stop_after_shard: bool
    hook: Callable[[torch.Tensor], None] | None
    custom: StagedCollective | None = None

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], purpose: str
    ) -> Sequence[Waitable]:
        """Issue the reduce-scatter."""
        if self.custom is None:
            return self.shard.reduce_scatter(outputs, inputs, mean=self.scale.mean, purpose=purpose)
        return by_custom(self.custom, outputs, inputs, group=self.shard.group, op=reduce_op(self.scale.mean))


class ReductionLanes(NamedTuple):
    """Lanes for sums over the ranks that shard and over replicas: those of one unit run beside those of the next."""

    scatter: Lane
    replicate: Lane


def _try(hook: Callable[[torch.Tensor], None], reduced: torch.Tensor) -> None:
    with contextlib.suppress(Exception):
        hook(reduced)


Deliver = Callable[[Sequence[torch.Tensor | None], Sequence[bool]], None]
"""Gets the shards of reduced gradients, and which of the reported parameters have a gradient on any rank."""


class Reduction:
    """One reduction under way: started when a unit's backward is done, finished when its result is needed.

    Its scatter, over the ranks that shard, comes first, so that what was sent is free soon; then what is summed over
    replicas, beside the scatters of other reductions.

    Args:
        plan: how the gradients are laid out.
        route: the collectives.
        gradients: whole ones of the plan's tensors (emptied), zeros where this rank has none.
        present: which of the reported parameters have a gradient on this rank.
        lanes: that communicate.
        device: that computes.
        like: a tensor of the dtype and device of the shards.
        deliver: gets the result.
        name: of the unit, for messages.
    """

    def __init__(
        self,
        plan: GradientPlan,
        route: Route,
        gradients: list[torch.Tensor],
        present: Sequence[bool],
        lanes: ReductionLanes,
        device: torch.device,
        like: torch.Tensor,
        deliver: Deliver,
        name: str,
    ):
        self.plan, self.route, self.present = plan, route, present
        self.like, self.name = like, name
        self._give = deliver
        self._is_captured = lanes.scatter.is_captured
        if self._is_captured:
            lanes.scatter.wait_for_computation()  # until it is captured too, it may not take memory that it has not yet
        # What is not scattered the computation packs into it.
        allocate: Allocate = torch.empty if route.custom is None else route.custom.allocate
        with lanes.scatter.own_memory() if plan.world_size > 1 else contextlib.nullcontext():
            self.out = allocate((plan.numel,), dtype=plan.dtype, device=device)
        self._on_host: torch.Tensor | None = None
        self._flags_on_host: torch.Tensor | None = None
        if self._is_captured:
            self._check_capture(gradients[0] if gradients else self.out)
        elif not route.stop_after_shard:
            self._receive_on_host()
        # Held like the inputs: a lane may read it long after it was replaced.
        self._added = plan.partial
        self._lanes = lanes
        self._staging: torch.Tensor | None = None
        staged = plan.stage(gradients, present, self.out, self._allocate)
        # Staged gradients are freed before the collective takes memory of its own.
        gradients.clear()
        if route.scale.before != 1.0:
            for tensor in staged.sent or [self.out]:
                tensor.div_(route.scale.before)
        self._staged: Staged | None = staged
        first, self._rest = self._steps(staged)
        self._ticket: Ticket = self._submit(lanes.scatter, first)
        self.replicates = bool(self._rest)
        if self._rest and not staged.sent:
            self.release()

    def _receive_on_host(self) -> None:
        """Make room for what the host has to read: shards that are kept there, or else flags that are not known."""
        out, like = self.out, self.like
        if is_elsewhere(like, out.device):
            self._on_host = torch.empty(out.numel(), dtype=like.dtype, device=like.device, pin_memory=like.is_pinned())
        elif not (all(self.present) or out.is_cpu):
            self._flags_on_host = torch.empty(len(self.present), dtype=out.dtype, pin_memory=pins_memory(HOST))

    def _check_capture(self, like: torch.Tensor) -> None:
        """For gradients of the dtype of ``like``.

        Raises:
            StateError: the host would have to read what a graph that is captured computes.
        """
        if is_elsewhere(self.like, self.out.device):
            raise StateError(
                f"unit {self.name!r}: gradients of offloaded parameters go to the host, which nothing that is captured "
                "into a CUDA graph can wait for: shard without offload_policy, or do not capture"
            )
        if not self.plan.knows(self.present, like):
            raise StateError(
                f"unit {self.name!r}: its backward is captured into a CUDA graph, and none has given gradients to the "
                "same parameters before: run four training steps first, each as the one to be captured"
            )

    def _allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.route.custom is not None:
            return self.route.custom.allocate(size, dtype=dtype, device=device)
        self._staging = self._lanes.scatter.allocate(size, dtype=dtype, device=device)
        return self._staging

    def _steps(self, staged: Staged) -> tuple[list[Step], list[Step]]:
        """What is done before and after `release`."""
        route, out, plan, on_host, flags_on_host = self.route, self.out, self.plan, self._on_host, self._flags_on_host
        thin, name = staged.thin, self.name  # the inputs are not held until the sums over replicas are there

        def scatter() -> Sequence[Waitable]:
            works = [*route.reduce_scatter(staged.outputs, staged.inputs, name)] if staged.inputs else []
            if thin is not None:
                works += route.shard.all_reduce(thin, mean=route.scale.mean)
            return works

        def between() -> Sequence[Waitable]:
            if thin is not None:
                plan.keep_own(thin, out)
            if route.scale.between != 1.0:
                out.div_(route.scale.between)
            if plan.partial is not None:
                out.add_(plan.partial)
            plan.partial = out if route.stop_after_shard else None
            return []

        def all_reduce(comm: Comm) -> Step:
            return lambda: comm.all_reduce(out, mean=route.scale.mean)

        def first_all_reduce() -> Sequence[Waitable]:
            between()  # with it, since the host runs a first step at once
            return all_reduce(route.replicate[0])()

        def complete() -> Sequence[Waitable]:
            if route.hook is not None:
                route.hook(out)
            if route.scale.after != 1.0:
                out.div_(route.scale.after)
            if on_host is not None:
                copy_each([on_host], [out])
            if flags_on_host is not None:
                copy_each([flags_on_host], [out[plan.flags]])
            return []

        if route.stop_after_shard:
            return [scatter, between], []
        if route.replicate:
            return [scatter], [first_all_reduce, *map(all_reduce, route.replicate[1:]), complete]
        return [scatter, between, complete], []

    def _submit(self, lane: Lane, steps: Sequence[Step], after: Sequence[Any] | None = None) -> Ticket:
        try:
            return lane.submit(*steps, after=after)
        except RuntimeError as error:  # gloo refuses messages once it knows that the other rank is gone
            self._explain(error)
            raise

    def _wait(self) -> None:
        try:
            self._ticket.wait()
        except RuntimeError as error:
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        comms = self.route.shard, *self.route.replicate
        sizes = [(self.plan.dtype, tensor.numel) for tensor in self.plan.tensors]
        explain_failure(error, f"reducing the gradients of unit {self.name!r} ({sized(sizes)})", *comms)

    def release(self) -> None:
        """Wait for the scatter, free what was sent, and start what is summed over replicas; once, which is at the start
        where nothing is scattered."""
        if self._staged is None:
            return
        self._wait()
        if self._staging is not None:
            self._lanes.scatter.release(self._staging)
        self._staged = self._staging = None
        if self._rest:
            steps, self._rest = self._rest, []
            self._ticket = self._submit(self._lanes.replicate, steps, after=[self._ticket.event])

    @property
    def lands(self) -> bool:
        """Whether the host has to read what arrives, for which `finish` does not wait: it would stop queueing the
        computation."""
        return self._on_host is not None or self._flags_on_host is not None

    def finish(self) -> None:
        """Wait, once it is released, and deliver the shards, unless it `lands`."""
        self._wait()
        self._added = None
        if not (self.route.stop_after_shard or self.lands):
            self._deliver()

    def _deliver(self) -> None:
        out, plan = self.out, self.plan
        del self.out
        if self._on_host is not None:
            out = self._on_host
        exist = self.present
        if not all(exist):
            if not self._is_captured:
                flags = out[plan.flags] if self._flags_on_host is None else self._flags_on_host
                plan.exist = [flag != 0 for flag in flags.tolist()]
            exist = plan.exist
        if out.dtype != self.like.dtype:
            out = out.to(self.like.dtype)
        self._give(plan.unstage(out, exist), exist)

    def land(self) -> None:
        """Let the host wait, and deliver what `finish` did not."""
        self._ticket.synchronize()
        self._deliver()

    def abandon(self) -> None:
        """Wait and drop the result. The hook runs, since other ranks may wait for what it communicates; whatever it
        raises says nothing of what comes next."""
        if self.route.hook is not None:
            self.route.hook = functools.partial(_try, self.route.hook)
        self._wait()
