"""What a device mesh and a strategy mean for one group of parameters: which ranks shard, which replicate."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from ..placements import Placements
from .comm import Comm, GrouplessComm, comm_for, new_group_of
from .device import flatten_axes, join_meshes, unfaked
from .errors import UnsupportedShardError
from .lanes import current_device


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The torch device that this rank computes on under ``mesh``."""
    return current_device(mesh.device_type)


@dataclass(frozen=True, eq=False)
class DataParallelRanks:
    """The collectives of each axis of ranks, by what the strategy does over it.

    Args:
        strategy: what is sharded between uses.
        device: that this rank computes on.
        shard: the axis that tensors are cut over; size 1 where the strategy replicates everything.
        replicate: axes that gradients are averaged over beside that.
    """

    strategy: Placements
    device: torch.device
    shard: Comm
    replicate: tuple[Comm, ...]

    @functools.cached_property
    def comms(self) -> tuple[Comm, ...]:
        """All axes."""
        return self.shard, *self.replicate

    @functools.cached_property
    def size(self) -> int:
        """Ranks that compute on different data."""
        return math.prod(comm.size for comm in self.comms)

    @functools.cached_property
    def has_replicas(self) -> bool:
        """Whether gradients are summed over replicas, apart from the sum over the axis that shards."""
        return bool(self.replicate)


@dataclass(frozen=True, eq=False)
class DataParallelMesh(DataParallelRanks):
    """The ranks of a device mesh, over which parameters are DTensors.

    Args:
        mesh: one axis (shard) or two (replicate, shard).
        whole: the mesh that ``mesh`` was cut from by ``dp_mesh_dims``; parameters are then DTensors on it.
        axis_names: names of its data-parallel axes.
        shard_names: names of those that shard.
    """

    mesh: DeviceMesh
    whole: DeviceMesh | None = None
    axis_names: tuple[str, ...] = ()
    shard_names: tuple[str, ...] = ()

    @functools.cached_property
    def has_replicas(self) -> bool:
        # One rank too is an axis of them, so that what is kept until it is summed does not depend on their number.
        return self.mesh.ndim > 1 or not self.strategy.shards_optimizer

    @functools.cached_property
    def shard_axis(self) -> DeviceMesh:
        """The axis that tensors are cut over, alone; this rank alone, where nothing is cut."""
        mesh = self.mesh
        if self.shard.size != mesh.size(mesh.ndim - 1):
            return _alone(mesh.device_type)
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names is not None:
            return mesh[mesh.mesh_dim_names[-1]]
        group = mesh.get_group(mesh.ndim - 1)
        return DeviceMesh.from_group(group, mesh.device_type, dist.get_process_group_ranks(group))

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Placements, by mesh axis, of the DTensor of a tensor that is cut on tensor dim ``dim``."""
        return _placements(self.mesh.ndim, dim if self.strategy.shards_optimizer else None)


@functools.cache
def _placements(ndim: int, dim: int | None) -> tuple[Placement, ...]:
    # One object for all parameters: to compare placements takes longer than most of what is asked of them.
    last: Placement = Replicate() if dim is None else Shard(dim)
    return (Replicate(),) * (ndim - 1) + (last,)


class DataParallelAxes(Protocol):
    """torch's ``DataParallelMeshDims``: names of the axes of a mesh that shard and that replicate."""

    @property
    def shard_names(self) -> tuple[str, ...]: ...

    @property
    def replicate_names(self) -> tuple[str, ...]: ...


def data_parallel_mesh(
    mesh: DeviceMesh, strategy: Placements, axes: DataParallelAxes | None = None
) -> DataParallelMesh:
    """Read ``mesh``: its last axis shards, an axis before it replicates.

    Args:
        mesh: one or two axes, or any number of named ones if ``axes`` says which are data-parallel.
        strategy: what is sharded between uses.
        axes: axes of a mesh that also has other parallelisms; without a sharding axis among them everything is
            replicated.

    Raises:
        ValueError: if the mesh does not have one or two axes, or not as many as the strategy needs, or not those
            that are named, or not this rank, or ranks in another order than process groups have them.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {mesh}: call fully_shard on the ranks of its mesh only")
    if axes is not None:
        strategy = strategy if axes.shard_names else Placements.ddp
        names = (*axes.replicate_names, *axes.shard_names)
        own = data_parallel_mesh(_named_axes(mesh, axes), strategy)
        return replace(own, whole=mesh, axis_names=names, shard_names=tuple(axes.shard_names))
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), not {mesh.ndim}-D: {mesh}; "
            "slice the mesh by its axis names first"
        )
    if strategy.mesh_ndim not in (None, mesh.ndim):
        raise ValueError(f"{strategy} needs a {strategy.mesh_ndim}-D mesh, not {mesh}")
    if strategy.shards_optimizer and any(row != sorted(row) for row in _rows(mesh, mesh.size(mesh.ndim - 1))):
        # A rank would hold another part than its DTensors say, and replicas would add up gradients of different parts.
        raise ValueError(
            f"the ranks of {mesh} do not ascend along the axis that shards, as they do in its process groups: make the "
            "mesh with them in ascending order"
        )
    device = mesh_device(mesh)
    comms = [comm_for(mesh.get_group(axis), device) for axis in range(mesh.ndim)]
    shard, replicate = comms[-1], tuple(comms[:-1])
    if not strategy.shards_optimizer:
        shard, replicate = GrouplessComm(), tuple(comms)
    return DataParallelMesh(strategy, device, shard, tuple(comm for comm in replicate if comm.size > 1), mesh)


def _named_axes(mesh: DeviceMesh, axes: DataParallelAxes) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"dp_mesh_dims names axes, and the mesh has no names: pass mesh_dim_names to {mesh}")
    for name in (*axes.shard_names, *axes.replicate_names):
        if name not in names:
            raise ValueError(f"dp_mesh_dims names an axis {name!r}; the mesh has {', '.join(names)}")
    parts = [flatten_axes(mesh, chosen) for chosen in (axes.replicate_names, axes.shard_names) if chosen]
    return parts[0] if len(parts) == 1 else join_meshes(parts)


_single: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()
"""By the default group, without which they are of no use."""


def _alone(device_type: str) -> DeviceMesh:
    """This rank as a mesh of one."""
    world = dist.group.WORLD
    assert world is not None
    known = _single.setdefault(world, {})
    if device_type not in known:
        rank = [dist.get_rank()]
        known[device_type] = DeviceMesh.from_group(new_group_of(rank, "alone"), device_type, rank)
    return known[device_type]


_smaller: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DataParallelMesh]]
_smaller = weakref.WeakKeyDictionary()
"""By the default group, which ends on all ranks together, as no mesh or model does."""


def smaller_mesh(mesh: DataParallelMesh, size: int) -> DataParallelMesh | None:
    """The ranks of ``mesh`` as rows of ``size`` neighbours, over which parameters are cut after forward; None if that
    is one rank, or all that shard them anyway.

    Raises:
        ValueError: if ``size`` does not divide the number of ranks that share a parameter.
    """
    world_size = mesh.shard.size
    if mesh.whole is not None:
        raise UnsupportedShardError(f"reshard_after_forward={size}: with dp_mesh_dims only True and False are possible")
    if size < 1 or world_size % size:
        raise ValueError(
            f"reshard_after_forward={size}: as an int it must divide the {world_size} ranks that parameters are "
            "sharded over; pass True for all of them, False for none"
        )
    if size in (1, world_size):
        return None
    world, rows = dist.group.WORLD, _rows(mesh.mesh, size)
    assert world is not None
    known, key = _smaller.setdefault(world, {}), (mesh.mesh.device_type, *map(tuple, rows))
    if key not in known:
        known[key] = data_parallel_mesh(_of_rows(rows, mesh.mesh.device_type), Placements.zero3)
    return known[key]


def _rows(mesh: DeviceMesh, size: int) -> list[list[int]]:
    """The ranks of ``mesh`` in rows of ``size``."""
    with unfaked():
        rows: list[list[int]] = mesh.mesh.view(-1, size).tolist()
    return rows


def _of_rows(rows: Sequence[Sequence[int]], device_type: str) -> DeviceMesh:
    """A mesh of these rows of ranks, with process groups of its own."""
    own = dist.get_rank()
    row = next(row for row in rows if own in row)
    column = [ranks[row.index(own)] for ranks in rows]
    # Not by DeviceMesh itself, which asks all ranks of the default group to make the same groups: other ranks may have
    # a mesh of their own, one stage of a pipeline each, and torch would take the groups of both for the same.
    groups = [new_group_of(column, "columns"), new_group_of(row, "rows")]
    with unfaked():
        return DeviceMesh.from_group(groups, device_type, rows, mesh_dim_names=("replicate", "shard"))
