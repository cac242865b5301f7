"""Integer arithmetic of sharding: which rank holds which elements. No tensors, no process groups.

Two orders of the same elements:

- *rank-major*, a rank's local buffer: its chunk of every tensor, one after the other;
- *tensor-major*, the gathered buffer: every tensor contiguous, padded at its end to world size x chunk.

Tensor ``i`` gathered is therefore one contiguous run, and gathering it needs no copy: ``local[i] -> full[i]``.

A *thin* tensor has fewer rows than there are ranks. One row for each rank would be mostly padding, so it can be laid
out without any: its rows are brought together where they belong, among zeros that the other ranks contribute.

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
    does not own of it is padding at the end. Of a thin tensor only the ranks that own a row reserve anything.
    """

    shape: tuple[int, ...]
    dim: int
    world_size: int
    local_offset: int
    full_offset: int
    packed: bool
    thin: bool = False

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
        """Elements of the largest chunk."""
        size = self.shape[self.dim]
        return self.chunk_length * (self.numel // size) if size else 0

    def reserved(self, rank: int) -> int:
        """Elements that ``rank``'s buffer reserves for this tensor."""
        return 0 if self.thin and not self.length(rank) else self.chunk_numel

    @property
    def full_reserved(self) -> int:
        """Elements that the gathered buffer reserves for this tensor."""
        return self.numel if self.thin else self.chunk_numel * self.world_size

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
    communicated together through a staging buffer, the others each straight from and to their places. Thin ones come
    last: behind ``even_numel`` elements in the local buffer, where those with most rows are first, so that what a rank
    does not own is at the end and not allocated; and behind ``full_even_numel`` elements in the gathered one.
    """

    tensors: tuple[TensorLayout, ...]
    world_size: int
    even_numel: int
    full_numel: int
    full_even_numel: int
    packed_numel: int

    @property
    def thin(self) -> list[TensorLayout]:
        """The thin tensors, in the order of the local buffer."""
        return sorted((tensor for tensor in self.tensors if tensor.thin), key=lambda tensor: tensor.local_offset)

    def local_numel(self, rank: int) -> int:
        """Elements of ``rank``'s local buffer."""
        return self.even_numel + sum(tensor.reserved(rank) for tensor in self.thin)


def per_parameter(
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int],
    world_size: int,
    packed: Sequence[bool] | None = None,
    thin: Sequence[bool] | None = None,
) -> Layout:
    """Cut every tensor on one dim: honest ``Shard(dim)`` placements.

    Args:
        shapes: shape of each tensor, at least one dim.
        dims: tensor dim that each is cut on.
        world_size: ranks on the sharding axis.
        packed: which tensors are communicated together; None packs none. A cut that is not contiguous is
            always packed, since its gathered chunks have to be rearranged.
        thin: which of those with fewer rows than ranks are laid out without padding; None: none.
    """
    cuts = _cuts(shapes, dims, world_size, packed or [False] * len(shapes), thin or [False] * len(shapes))
    order = sorted(range(len(cuts)), key=lambda index: cuts[index].thin)
    full_offsets, full_numel = _offsets([cut.full_reserved for cut in cuts], ALIGNMENT, order)
    if world_size == 1:
        # Local and gathered buffer are then the same memory.
        tensors = tuple(
            replace(cut, packed=False, local_offset=offset, full_offset=offset)
            for cut, offset in zip(cuts, full_offsets, strict=True)
        )
        return Layout(tensors, 1, full_numel, full_numel, full_numel, 0)
    if any(cut.thin for cut in cuts):
        full_numel = -(-full_numel // ALIGNMENT) * ALIGNMENT  # what is summed is a whole number of words
    return _rank_major(cuts, world_size, full_offsets, full_numel)


def over_fewer(layout: Layout, world_size: int) -> Layout:
    """The tensors of ``layout`` over ``world_size`` ranks, by which theirs divides, to be gathered to the same places:
    cut on dim 0, as in FSDP2, where their padding has room there, and else on the dim that they are cut on now."""
    shapes = [tensor.shape for tensor in layout.tensors]
    rows = per_parameter(shapes, [0] * len(shapes), world_size).tensors
    fits = [new.full_reserved <= old.full_reserved for new, old in zip(rows, layout.tensors, strict=True)]
    dims = [0 if fit else tensor.dim for fit, tensor in zip(fits, layout.tensors, strict=True)]
    return per_parameter(shapes, dims, world_size)


def worth_thinning(shapes: Sequence[tuple[int, ...]], dims: Sequence[int], world_size: int, least: float) -> list[bool]:
    """Which tensors to lay out as thin ones: those with at most half as many rows as there are ranks, if that saves
    ``least`` elements of a gathered buffer.

    Half: to sum rows among zeros sends everything twice.
    """
    cuts = _cuts(shapes, dims, world_size, [False] * len(shapes), [True] * len(shapes))
    found = [cut.thin and 2 * cut.shape[cut.dim] <= world_size for cut in cuts]
    saved = sum((world_size - cut.shape[0]) * cut.chunk_numel for cut, thin in zip(cuts, found, strict=True) if thin)
    return [thin and saved >= least for thin in found]


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


Cut = tuple[tuple[int, ...], int, bool, bool]
"""Shape, dim, and whether packed or thin."""


def for_gradients(tensors: Sequence[Cut], world_size: int) -> Layout:
    """Like `per_parameter`, for reduced gradients: nothing is aligned, and only the thin ones are whole somewhere, in
    the order of the local buffer."""
    shapes, dims, packed, thin = zip(*tensors, strict=True)
    cuts = _cuts(shapes, dims, world_size, packed, thin)
    full_offsets, full_numel = _offsets([cut.numel if cut.thin else 0 for cut in cuts], 1, _local_order(cuts))
    return _rank_major(cuts, world_size, full_offsets, full_numel)


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


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """Tensors that each lie on one rank, and the runs that they travel in.

    Every tensor with elements is in exactly one run. Runs are in the order in which they are complete when the
    tensors become ready one by one, so ranks that send them in this order wait for nothing else.
    """

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
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
) -> WholeLayout:
    """Lay whole tensors out in runs.

    Args:
        sizes: elements of each tensor, in the order in which they become ready.
        owners: rank of each.
        kinds: dtype and device of each, by number; tensors of different kinds share no run.
        alone: which travel in a run of their own, from and to their own memory.
        limits: elements that a run of each kind has at most; a larger tensor is alone.
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
    return WholeLayout(tuple(sizes), tuple(owners), found)


def _cuts(
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int],
    world_size: int,
    packed: Sequence[bool],
    thin: Sequence[bool],
) -> list[TensorLayout]:
    """The tensors, without offsets yet. Of those that may be ``thin`` the ones with fewer rows than ranks are."""
    cuts = []
    for shape, dim, is_packed, may_be_thin in zip(shapes, dims, packed, thin, strict=True):
        is_thin = may_be_thin and dim == 0 and 0 < shape[0] < world_size
        cut = TensorLayout(tuple(shape), dim, world_size, 0, 0, is_packed and not is_thin, is_thin)
        cuts.append(cut if cut.is_contiguous_cut else replace(cut, packed=True))
    return cuts


def _local_order(cuts: Sequence[TensorLayout]) -> list[int]:
    """Indices of the tensors as they lie in a local buffer."""

    def key(index: int) -> tuple[bool, int]:
        cut = cuts[index]
        return (True, -cut.shape[0]) if cut.thin else (False, not cut.packed)

    return sorted(range(len(cuts)), key=key)


def _rank_major(cuts: Sequence[TensorLayout], world_size: int, full_offsets: Sequence[int], full_numel: int) -> Layout:
    local_offsets, _ = _offsets([cut.chunk_numel for cut in cuts], 1, _local_order(cuts))
    tensors = tuple(
        replace(cut, local_offset=local, full_offset=full)
        for cut, local, full in zip(cuts, local_offsets, full_offsets, strict=True)
    )
    return Layout(
        tensors,
        world_size,
        even_numel=sum(cut.chunk_numel for cut in cuts if not cut.thin),
        full_numel=full_numel,
        full_even_numel=min((tensor.full_offset for tensor in tensors if tensor.thin), default=full_numel),
        packed_numel=sum(cut.chunk_numel for cut in cuts if cut.packed),
    )


def _offsets(sizes: Sequence[int], alignment: int, order: Sequence[int]) -> tuple[list[int], int]:
    """Where runs of ``sizes`` elements start when laid one after the other in ``order``, and where the last ends."""
    offsets, position, end = [0] * len(sizes), 0, 0
    for index in order:
        offsets[index], end = position, position + sizes[index]
        position += -(-sizes[index] // alignment) * alignment
    return offsets, end
