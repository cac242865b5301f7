"""One flat local tensor, its gathered twin, and the transitions between them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .comm import Comm
from .device import RowSplitter, copy_each, not_inference
from .lanes import Lane
from .layout import Layout, TensorLayout, over_fewer

Allocate = Callable[..., torch.Tensor]
"""``allocate(size, dtype=..., device=...)``."""
Release = Callable[[torch.Tensor], None]


@dataclass(slots=True)
class Gather:
    """One gather that is about to start.

    Args:
        outputs: of the collective; none where the world is of one rank.
        inputs: of the collective, as long as ``outputs``.
        thin: run of the thin tensors, which holds this rank's rows and zeros once prepared, to be united over ranks.
        prepare: casts this rank's part, or copies it from the host; runs beside the computation, before the collective.
        finish: puts what was received in its places; runs on the compute stream when the collective is done.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    thin: torch.Tensor | None = None
    prepare: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None


class GatherPlan:
    """Views that a gather of ``layout`` into ``full`` needs; made once, since the memory behind them only resizes.

    Args:
        layout: how the source is laid out over the ranks.
        comm: the ranks.
        full: the gathered buffer, 1-D.
        offsets: where each tensor starts in ``full``, in elements.
        pack_all: whether everything goes through the staging buffer.
    """

    def __init__(self, layout: Layout, comm: Comm, full: torch.Tensor, offsets: Sequence[int], pack_all: bool = False):
        rank = comm.rank
        self.layout, self.comm, self.full = layout, comm, full
        self._direct: list[tuple[TensorLayout, torch.Tensor]] = []
        self._packed: list[tuple[TensorLayout, torch.Tensor]] = []
        self._run = layout.even_numel if pack_all else layout.packed_numel
        self._thin = full[layout.full_even_numel :] if layout.thin else None
        self._thin_rows = [] if self._thin is None else [self._thin.narrow(0, *row) for row in thin_rows(layout, rank)]
        in_order = sorted(zip(layout.tensors, offsets, strict=True), key=lambda pair: pair[0].local_offset)
        for tensor, offset in in_order:
            if (size := tensor.chunk_numel) and not tensor.thin:
                target = full[offset : offset + size * layout.world_size]
                assert target.numel() == size * layout.world_size, "collectives would write behind the buffer"
                (self._packed if tensor.packed or pack_all else self._direct).append((tensor, target))
        self._splitter: RowSplitter | None = None
        if all(tensor.is_contiguous_cut for tensor, _ in self._packed):
            self._splitter = RowSplitter([target.view(layout.world_size, -1) for _, target in self._packed])
        self.is_one_run = bool(self._packed) and not self._direct and self._thin is None and self._splitter is not None
        """Whether all of it travels in one run, whose pieces are contiguous where they arrive."""
        self._outputs = [target for _, target in self._direct]
        self._own = [target.view(layout.world_size, -1)[rank] for target in self._outputs]
        """Where a cast puts this rank's part of each of them."""
        self._inputs: list[torch.Tensor] = []
        """Runs of the source to send: the packed one first, where there is one."""
        self._own_rows: list[torch.Tensor] = []
        """This rank's rows of thin tensors in the source."""

    def take(self, source: torch.Tensor) -> None:
        """Gather ``source``, a rank-major buffer, from now on."""
        self._inputs = [source[: self._run]] if self._packed else []
        self._inputs += [source[t.local_offset : t.local_offset + t.chunk_numel] for t, _ in self._direct]
        sizes = [row.numel() for row in self._thin_rows]
        self._own_rows = [*source[self.layout.even_numel :].split_with_sizes(sizes)] if sizes else []

    def drop(self) -> None:
        """Refer to no source."""
        self._inputs, self._own_rows = [], []

    def start(self, allocate: Allocate, release: Release | None = None, *, casts: bool) -> Gather:
        """Gather the source with staging memory of ``allocate``, which ``release`` gets back.

        A source of another dtype or device (``casts``) is cast straight to where this rank's part goes.
        """
        # Packed tensors need their memory only once they are there: what is gathered ahead takes no more than staging.
        if self._outputs or self._thin is not None:
            allocate_storage(self.full)
        outputs, staging = self._outputs, None
        if self._packed:
            staging = allocate((self._run * self.layout.world_size,), dtype=self.full.dtype, device=self.full.device)
            outputs = [staging, *outputs]
        inputs = self._inputs
        prepare: Callable[[], None] | None = None
        if casts:
            own = self._own
            if staging is not None:
                own = [staging.view(self.layout.world_size, -1)[self.comm.rank], *own]
            inputs, prepare = own, functools.partial(self._prepare, own, inputs)
        elif self._thin is not None:
            prepare = self._prepare
        finish = None if staging is None else functools.partial(self._finish, staging, release)
        return Gather(outputs, inputs, self._thin, prepare, finish)

    def _prepare(self, own: Sequence[torch.Tensor] = (), inputs: Sequence[torch.Tensor] = ()) -> None:
        """Put ``inputs`` into ``own``, and this rank's rows of thin tensors among zeros."""
        if self._thin is not None:
            self._thin.zero_()
        if rows := self._thin_rows:
            own, inputs = [*own, *rows], [*inputs, *self._own_rows]
        if own:
            copy_each(own, inputs)

    def _finish(self, staging: torch.Tensor, release: Release | None, start: int = 0) -> None:
        """Put the packed tensors, which begin in each row of ``staging`` at element ``start``, in their places, once
        the collective is done."""
        allocate_storage(self.full)
        if self._splitter is not None:
            self._splitter(staging, is_own=release is not None, start=start)
        else:
            rows = staging.view(self.layout.world_size, -1)
            sizes = [tensor.chunk_numel for tensor, _ in self._packed]
            for (tensor, target), part in zip(self._packed, rows.split(sizes, dim=1), strict=True):
                join_chunks(tensor, part, target)
        if release is not None:
            release(staging)


def start_together(
    plans: Sequence[GatherPlan], lane: Lane, takes: Sequence[bool]
) -> tuple[Gather, list[Callable[[], None]]]:
    """Gather the sources of ``plans``, over the same ranks and in the same dtype, in one staging run: of each rank
    first its part of the first one. All of them are `is_one_run`.

    Args:
        plans: of the buffers.
        lane: that communicates.
        takes: whether this rank puts each of them in its place, once.

    Returns:
        The gather, and what finishes it for each of those.
    """
    first, sizes = plans[0], [plan._run for plan in plans]
    world_size = first.layout.world_size
    staging = lane.allocate((sum(sizes) * world_size,), dtype=first.full.dtype, device=first.full.device)
    own = staging.view(world_size, -1)[first.comm.rank]
    inputs = [plan._inputs[0] for plan in plans]
    left = sum(takes)

    def release(memory: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            lane.release(memory)

    starts = itertools.accumulate(sizes[:-1], initial=0)
    finish: list[Callable[[], None]] = [
        functools.partial(plan._finish, staging, release, start)
        for plan, start, is_taken in zip(plans, starts, takes, strict=True)
        if is_taken
    ]
    return Gather([staging], [own], prepare=lambda: copy_each(own.split_with_sizes(sizes), inputs)), finish


def thin_rows(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Rows that ``rank`` owns of the thin tensors, where all rows of all of them lie one after the other: where they
    start and their elements; ordered as in its local buffer."""
    return [
        (tensor.full_offset - layout.full_even_numel + rank * tensor.chunk_numel, tensor.chunk_numel)
        for tensor in layout.thin
        if tensor.reserved(rank)
    ]


def join_chunks(tensor: TensorLayout, chunks: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``chunks`` (world size x chunk) into ``target``, the tensor's own order with padding at the end of its
    cut dim (only tensors cut on dim 0 have padding)."""
    shaped = chunks.view(tensor.world_size, *tensor.chunk_shape)
    padded = list(tensor.chunk_shape)
    padded[tensor.dim] *= tensor.world_size
    target.view(padded).unflatten(tensor.dim, (tensor.world_size, -1)).copy_(shaped.movedim(0, tensor.dim))


def cut_chunks(tensor: TensorLayout, value: torch.Tensor) -> torch.Tensor:
    """``value`` (the tensor's shape) as world size x chunk elements, without padding; a copy unless cut on dim 0."""
    chunks: torch.Tensor = value.unflatten(tensor.dim, (tensor.world_size, -1)).movedim(tensor.dim, 0).flatten(1)
    return chunks


class ShardedBuffer:
    """Tensors of one dtype over the ranks of one mesh axis.

    Args:
        layout: where each tensor's elements are.
        local: this rank's rank-major buffer, 1-D, ``layout.local_numel(rank)`` elements; may be on the meta device, or
            on the host while the device computes (offloaded).
        comm: collectives of the sharding axis.
        dtype: of the gathered tensors.
        device: that the gathered tensors are on.
    """

    def __init__(self, layout: Layout, local: torch.Tensor, comm: Comm, dtype: torch.dtype, device: torch.device):
        self.layout, self.local, self.comm = layout, local, comm
        self.dtype, self.device = dtype, device
        self.is_identity = layout.world_size == 1 and local.dtype == dtype and local.device.type == device.type
        """Whether the gathered buffer is the local one: nothing to gather, cast or move."""
        self.full_bytes = layout.full_numel * dtype.itemsize
        self.gathered_bytes = 0 if self.is_identity else self.full_bytes
        """Bytes that gathering it takes beside the shards."""
        self.local_memory: Sequence[torch.Tensor] = (local,)
        """All tensors that its shards can be written through, beside views."""
        self._casts = local.dtype != dtype or local.device != device
        self._full: torch.Tensor | None = None
        self._plan: GatherPlan | None = None
        self._staged_plan: GatherPlan | None = None
        self._smaller_plans: dict[bool, GatherPlan] = {}
        """Over the smaller world; by whether all tensors are packed, as for a staging buffer of the caller's."""
        self.resharded: GatherPlan | None = None
        """How to gather the chunks over the smaller world, where this rank holds them."""

    @property
    def full(self) -> torch.Tensor:
        """The gathered buffer, 1-D, tensor-major; gathers give it memory, and `free` takes it."""
        if self._full is None:
            with not_inference():
                if self.is_identity:
                    self._full = self.local
                else:
                    self._full = torch.empty(self.layout.full_numel, dtype=self.dtype, device=self.device)
        return self._full

    computes_first = False
    """Whether starting a gather computes what is gathered."""

    def local_view(self, index: int) -> torch.Tensor:
        """This rank's chunk of a tensor, without padding, in the chunk's shape."""
        return local_view(self.layout.tensors[index], self.local, self.comm.rank)

    def full_view(self, index: int) -> torch.Tensor:
        """The whole tensor in the gathered buffer, with a version counter of its own.

        Gathering again writes the values that autograd saved, so it must not count as a modification.
        """
        tensor = self.layout.tensors[index]
        with not_inference():
            run = self.full[tensor.full_offset : tensor.full_offset + tensor.numel]
            return run.view(tensor.shape).data

    def takes(self, local: torch.Tensor, layout: Layout, dtype: torch.dtype) -> bool:
        """Whether shards in ``local``, laid out as ``layout`` and gathered in ``dtype``, can be gathered as its own."""
        own = self.local
        is_alike = (local.dtype, local.device, dtype, layout) == (own.dtype, own.device, self.dtype, self.layout)
        return is_alike and not own.is_meta

    def use_local(self, local: torch.Tensor) -> None:
        """Have the shards in ``local``, which it `takes`, from now on; what was made of the gathered buffer stays."""
        self.local, self.local_memory = local, (local,)
        if self.is_identity:
            self._full = None
        for plan in (self._plan, self._staged_plan):
            if plan is not None:
                plan.take(local)

    def use_name(self, index: int, name: str) -> None:
        """Messages call a tensor ``name`` from now on."""

    def use_face(self, index: int, face: torch.Tensor) -> None:
        """Of what `full_view` gave ``face`` was made, which is what computes from now on."""

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the gathered buffer."""
        full = self._full
        return full is not None and 0 <= tensor.data_ptr() - full.data_ptr() < full.nbytes

    def free(self) -> None:
        """Free the gathered buffer's memory."""
        if self._full is not None and not self.is_identity:
            free_storage(self._full)

    def gather_whole(self, index: int) -> torch.Tensor:
        """One whole tensor in the dtype of the shards, on the device that computes; all ranks of the axis call this.

        In memory of its own, unless there is nothing to gather. Not through DTensor, which stages: this takes the
        memory of one tensor, and of two if it is cut unevenly or not on dim 0.
        """
        tensor = self.layout.tensors[index]
        if tensor.world_size == 1:
            return self.local_view(index).to(self.device)
        if tensor.thin:
            return self._unite(tensor)
        own = self.local.narrow(0, tensor.local_offset, tensor.chunk_numel).to(self.device)
        gathered = own.new_empty(tensor.world_size * tensor.chunk_numel)
        if not tensor.chunk_numel:
            return gathered.view(tensor.shape)
        for work in self.comm.all_gather([gathered], [own]):
            work.wait()
        if tensor.is_even and tensor.dim == 0:
            return gathered.view(tensor.shape)
        if tensor.dim == 0:
            return gathered[: tensor.numel].view(tensor.shape).clone()
        whole = own.new_empty(tensor.shape)
        join_chunks(tensor, gathered, whole.view(-1))
        return whole

    def _unite(self, tensor: TensorLayout) -> torch.Tensor:
        """A thin tensor, whole, in memory of its own."""
        per_word = max(4 // self.local.itemsize, 1)
        reserved = -(-tensor.numel // per_word) * per_word
        whole = torch.zeros(reserved, dtype=self.local.dtype, device=self.device)
        start, size = tensor.start(self.comm.rank) * tensor.chunk_numel, tensor.chunk_numel
        if tensor.length(self.comm.rank):
            whole[start : start + size].copy_(self.local[tensor.local_offset : tensor.local_offset + size])
        for work in self.comm.unite(whole):
            work.wait()
        return whole[: tensor.numel].view(tensor.shape)

    def _offsets(self) -> list[int]:
        return [tensor.full_offset for tensor in self.layout.tensors]

    def _make_plan(self, *, pack_all: bool) -> GatherPlan:
        was_free = self._full is None or self._full.untyped_storage().nbytes() == 0
        allocate_storage(self.full)  # to make views of it
        with not_inference():
            plan = GatherPlan(self.layout, self.comm, self.full, self._offsets(), pack_all)
            plan.take(self.local)
        if was_free:
            free_storage(self.full)
        return plan

    def start_staged_gather(self, allocate: Allocate) -> Gather:
        """`start_gather` through a staging buffer of the caller's; only where there is something to gather."""
        if self.resharded is not None:
            return self.resharded.start(allocate, casts=True)
        if self._staged_plan is None:
            self._staged_plan = self._make_plan(pack_all=True)
        return self._staged_plan.start(allocate, casts=True)

    def start_gather(self, lane: Lane) -> Gather:
        """Say how to fill the gathered buffer, which gets memory as soon as the gather needs it; staged in memory of
        ``lane``."""
        if self.resharded is not None:
            return self.resharded.start(lane.allocate, lane.release, casts=False)
        if self.is_identity:
            return Gather()
        if self.layout.world_size == 1:
            allocate_storage(self.full)
            return Gather(prepare=functools.partial(copy_each, [self.full], [self.local]))
        return self._own_plan.start(lane.allocate, lane.release, casts=self._casts)

    @property
    def _own_plan(self) -> GatherPlan:
        if self._plan is None:
            self._plan = self._make_plan(pack_all=False)
        return self._plan

    @property
    def run_plan(self) -> GatherPlan | None:
        """How to gather it in one run with others; None where it has several runs, or would not be gathered so."""
        if self.layout.world_size == 1 or self.computes_first or self.resharded is not None:
            return None
        return plan if (plan := self._own_plan).is_one_run else None

    def reshard_to_smaller(self, comm: Comm, *, pack_all: bool) -> list[tuple[torch.Tensor, int]]:
        """Keep this rank's chunks over the ranks of ``comm``; the rest may be freed then.

        Args:
            comm: of the smaller world.
            pack_all: whether they will be gathered by `start_staged_gather`.

        Returns:
            Each chunk in its shape, and the tensor dim that it is cut on.
        """
        if (plan := self._smaller_plans.get(pack_all)) is None:
            layout = over_fewer(self.layout, comm.size)
            plan = self._smaller_plans[pack_all] = GatherPlan(layout, comm, self.full, self._offsets(), pack_all)
        layout = plan.layout
        local = self.full.new_zeros(layout.local_numel(comm.rank))
        views = [local_view(tensor, local, comm.rank) for tensor in layout.tensors]
        for index, (tensor, view) in enumerate(zip(layout.tensors, views, strict=True)):
            view.copy_(chunk_of(tensor, self.full_view(index), comm.rank))
        plan.take(local)
        self.resharded = plan
        return [(view, tensor.dim) for view, tensor in zip(views, layout.tensors, strict=True)]

    def drop_resharded(self) -> None:
        """Free the chunks over the smaller world."""
        if self.resharded is not None:
            self.resharded.drop()
            self.resharded = None

    @property
    def gather_comm(self) -> Comm:
        """The collectives that the next gather uses."""
        return self.comm if self.resharded is None else self.resharded.comm


def local_strides(tensor: TensorLayout, rank: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of ``rank``'s chunk of ``tensor``, without padding, in a rank-major buffer of ``end``
    elements."""
    shape = tensor.local_shape(rank)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return shape, tuple(reversed(strides)), min(tensor.local_offset, end)  # thin tensors may lie behind the end


def local_view(tensor: TensorLayout, local: torch.Tensor, rank: int) -> torch.Tensor:
    """``rank``'s chunk of ``tensor`` in the rank-major buffer ``local``."""
    shape, strides, offset = local_strides(tensor, rank, local.numel())
    return local.as_strided(shape, strides, local.storage_offset() + offset)


def chunk_of(tensor: TensorLayout, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """``rank``'s chunk of ``whole``, which has the tensor's shape, without padding; a view."""
    return whole.narrow(tensor.dim, tensor.start(rank), tensor.length(rank))


# -- Memory


MAPPED_BYTES = 32 * 2**20
"""glibc takes larger blocks from the kernel each time, so that every page of theirs faults when it is written."""


def allocate_storage(tensor: torch.Tensor, nbytes: int | None = None) -> None:
    """Give ``tensor`` memory again after `free_storage`; its views see it.

    Args:
        tensor: whole, or a view of a tensor that has ``nbytes``.
        nbytes: of its storage, if not its own.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(size := tensor.nbytes if nbytes is None else nbytes)
        if size > MAPPED_BYTES and tensor.device.type == "cpu":
            _ask_for_huge_pages(storage.data_ptr(), size)


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Let fresh memory consist of pages 512 times as large, of which fewer fault; a hint, which kernels may ignore."""
    if sys.platform == "linux":
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), mmap.MADV_HUGEPAGE)


def free_storage(tensor: torch.Tensor) -> None:
    """Free the memory of ``tensor`` and of all its views, which stay valid objects."""
    tensor.untyped_storage().resize_(0)
