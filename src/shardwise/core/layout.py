"""Integer arithmetic of sharding: which rank holds which elements. No tensors, no process groups.

Two orders of the same elements:

- *rank-major*, a rank's local buffer: its chunk of every tensor, one after the other;
- *tensor-major*, the gathered buffer: every tensor contiguous, padded at its end to world size x chunk.

Tensor ``i`` gathered is therefore one contiguous run, and gathering it needs no copy: ``local[i] -> full[i]``.

Tensors may also stay whole, each on one rank (`deal`, `whole`): they then travel in runs of one owner's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

ALIGNMENT = 64
"""Elements: every tensor of a gathered buffer starts on a multiple, so at least on a 64-byte boundary.

CPU matrix kernels may give other last bits for other alignments, vector loads and NCCL prefer it.
"""


@dataclass(frozen=True)
class TensorLayout:
    """One tensor cut over ``world_size`` ranks on tensor dim ``dim``, as ``torch.chunk`` cuts it.

    Offsets and sizes are in elements. Every rank's buffer reserves ``chunk_numel``; what a rank
    does not own of it is padding at the end.
    """

    shape: tuple[int, ...]
    dim: int
    world_size: int
    local_offset: int
    full_offset: int
    packed: bool

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def chunk_length(self) -> int:
        """Size of the largest chunk along ``dim``."""
        return -(-self.shape[self.dim] // self.world_size)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements that each rank's buffer reserves for this tensor."""
        size = self.shape[self.dim]
        return self.chunk_length * (self.numel // size) if size else 0

    @cached_property
    def is_even(self) -> bool:
        """Whether all ranks hold equally much, so that nothing is padded."""
        return self.shape[self.dim] % self.world_size == 0

    @cached_property
    def is_contiguous_cut(self) -> bool:
        """Whether the gathered run has the elements in the tensor's own order."""
        return self.dim == 0 or self.world_size == 1

    def start(self, rank: int) -> int:
        """Index along ``dim`` where ``rank``'s chunk starts."""
        return min(rank * self.chunk_length, self.shape[self.dim])

    def length(self, rank: int) -> int:
        """Size along ``dim`` of ``rank``'s chunk; 0 where there are fewer rows than ranks."""
        return self.start(rank + 1) - self.start(rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of ``rank``'s chunk."""
        return (*self.shape[: self.dim], self.length(rank), *self.shape[self.dim + 1 :])

    @cached_property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk with its padding."""
        return (*self.shape[: self.dim], self.chunk_length, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Layout:
    """A group of tensors over the ranks of one mesh axis.

    The packed tensors come first in the local buffer, as one run of ``packed_numel`` elements: they are
    communicated together through a staging buffer, the others each straight from and to their places.
    """

    tensors: tuple[TensorLayout, ...]
    world_size: int
    local_numel: int
    full_numel: int
    packed_numel: int

    @property
    def padding(self) -> int:
        """Elements over all ranks' local buffers that no tensor owns."""
        return self.local_numel * self.world_size - sum(tensor.numel for tensor in self.tensors)


def per_parameter(
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int],
    world_size: int,
    packed: Sequence[bool] | None = None,
) -> Layout:
    """Cut every tensor on one dim: honest ``Shard(dim)`` placements.

    Args:
        shapes: shape of each tensor, at least one dim.
        dims: tensor dim that each is cut on.
        world_size: ranks on the sharding axis.
        packed: which tensors are communicated together; None packs none. A cut that is not contiguous is
            always packed, since its gathered chunks have to be rearranged.
    """
    cuts = _cuts(shapes, dims, world_size, packed or [False] * len(shapes))
    full_offsets, full_numel = _offsets([cut.chunk_numel * world_size for cut in cuts], ALIGNMENT)
    if world_size == 1:
        # Local and gathered buffer are then the same memory.
        tensors = tuple(
            replace(cut, packed=False, local_offset=offset, full_offset=offset)
            for cut, offset in zip(cuts, full_offsets, strict=True)
        )
        return Layout(tensors, 1, full_numel, full_numel, 0)
    return _rank_major(cuts, world_size, full_offsets, full_numel)


def flat(totals: Sequence[int], world_size: int, packed: Sequence[bool] | None = None) -> Layout:
    """Cut runs of joined tensors evenly: less than one element per rank and run is padded.

    Each run is one tensor of the layout, with its padding inside, at the end.

    Args:
        totals: elements of each run.
        world_size: ranks on the sharding axis.
        packed: as of `per_parameter`.
    """
    padded = [(-(-total // world_size) * world_size,) for total in totals]
    return per_parameter(padded, [0] * len(padded), world_size, packed)


def for_gradients(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int], world_size: int, packed: Sequence[bool]
) -> Layout:
    """Like `per_parameter`, for reduced gradients: nothing is aligned, and there is no gathered buffer."""
    cuts = _cuts(shapes, dims, world_size, packed)
    return _rank_major(cuts, world_size, [0] * len(cuts), 0)


def deal(
    sizes: Sequence[int], weighs: Sequence[bool], loads: Sequence[tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Deal whole tensors to ranks, in the given order, each to the rank that holds least so far.

    Among ranks that hold equally much the lowest gets it; a tensor that weighs nothing goes to the one of them that
    holds fewest such tensors, so that frozen ones take turns, as with FairScale.

    Args:
        sizes: elements of each tensor.
        weighs: whether a tensor counts for what its rank holds.
        loads: what each rank holds already: elements that weigh, and tensors that do not.

    Returns:
        The owner of each tensor, and the loads then.
    """
    held, weightless = [load for load, _ in loads], [load for _, load in loads]
    owners = []
    for size, counts in zip(sizes, weighs, strict=True):
        least = min(held)
        if counts:
            owner = held.index(least)
            held[owner] += size
        else:
            owner = min((rank for rank, load in enumerate(held) if load == least), key=weightless.__getitem__)
            weightless[owner] += 1
        owners.append(owner)
    return owners, list(zip(held, weightless, strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    """Whole tensors of one owner and one kind that travel together, one after the other.

    Args:
        owner: rank that holds them.
        tensors: their indices in the layout, rising.
        sizes: elements of each.
    """

    owner: int
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the run."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """Tensors that each lie on one rank, and the runs that they travel in.

    Every tensor with elements is in exactly one run. Runs are in the order in which they are complete when the
    tensors become ready one by one, so ranks that send them in this order wait for nothing else.
    """

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    world_size: int
    runs: tuple[Run, ...]

    def owned(self, rank: int) -> tuple[int, ...]:
        """Indices of the tensors of ``rank``."""
        return tuple(index for index, owner in enumerate(self.owners) if owner == rank)

    @property
    def most_owned(self) -> int:
        """Tensors of the rank that has the most of them."""
        return max((len(self.owned(rank)) for rank in set(self.owners)), default=0)


def whole(
    sizes: Sequence[int],
    owners: Sequence[int],
    kinds: Sequence[int],
    alone: Sequence[bool],
    limits: Sequence[int],
    world_size: int,
) -> WholeLayout:
    """Lay whole tensors out in runs.

    Args:
        sizes: elements of each tensor, in the order in which they become ready.
        owners: rank of each.
        kinds: dtype and device of each, by number; tensors of different kinds share no run.
        alone: which travel in a run of their own, from and to their own memory.
        limits: elements that a run of each kind has at most; a larger tensor is alone.
        world_size: number of ranks.
    """
    runs: list[list[int]] = []
    filling: dict[tuple[int, int], list[int]] = {}
    filled: dict[tuple[int, int], int] = {}
    for index, (size, owner, kind) in enumerate(zip(sizes, owners, kinds, strict=True)):
        if not size:
            continue
        if alone[index] or size > limits[kind]:
            runs.append([index])
            continue
        place = (owner, kind)
        if place not in filling or filled[place] + size > limits[kind]:
            filling[place], filled[place] = [], 0
            runs.append(filling[place])
        filling[place].append(index)
        filled[place] += size
    runs.sort(key=lambda run: run[-1])
    found = tuple(Run(owners[run[0]], tuple(run), tuple(sizes[index] for index in run)) for run in runs)
    return WholeLayout(tuple(sizes), tuple(owners), world_size, found)


def _cuts(
    shapes: Sequence[tuple[int, ...]], dims: Sequence[int], world_size: int, packed: Sequence[bool]
) -> list[TensorLayout]:
    drafts = [
        TensorLayout(tuple(shape), dim, world_size, 0, 0, flag)
        for shape, dim, flag in zip(shapes, dims, packed, strict=True)
    ]
    return [replace(draft, packed=draft.packed or not draft.is_contiguous_cut) for draft in drafts]


def _rank_major(cuts: Sequence[TensorLayout], world_size: int, full_offsets: Sequence[int], full_numel: int) -> Layout:
    order = sorted(range(len(cuts)), key=lambda index: not cuts[index].packed)
    in_order, local_numel = _offsets([cuts[index].chunk_numel for index in order], 1)
    local_offsets = [offset for _, offset in sorted(zip(order, in_order, strict=True))]
    tensors = tuple(
        replace(cut, local_offset=local, full_offset=full)
        for cut, local, full in zip(cuts, local_offsets, full_offsets, strict=True)
    )
    return Layout(tensors, world_size, local_numel, full_numel, sum(cut.chunk_numel for cut in cuts if cut.packed))


def _offsets(sizes: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Where runs of ``sizes`` elements start when laid one after the other, and where the last ends."""
    offsets, position = [], 0
    for size in sizes:
        offsets.append(position)
        position += -(-size // alignment) * alignment
    return offsets, (offsets[-1] + sizes[-1]) if sizes else 0
