"""Parameters that other parallelisms (tensor, expert) have made DTensors already: what data parallelism adds to them.

The group shards the local tensor; the sharded parameter is a DTensor over both meshes, and the unsharded one is the
DTensor that it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .device import ParallelSpec, complete, join_meshes, local_of, respec, shard_inside, spec_of, wrap_local
from .mesh import DataParallelMesh


@dataclass(frozen=True, eq=False)
class ModelParallel:
    """How one parameter is laid out without and with data parallelism.

    Args:
        original: the DTensor's spec before.
        sharded: spec of the sharded parameter and its gradient.
        data_axes: axes of the original mesh that data parallelism reduces over (none, unless that mesh has them).
    """

    original: ParallelSpec
    sharded: ParallelSpec
    data_axes: frozenset[int]

    def unsharded(self, local: torch.Tensor) -> DTensor:
        """The whole parameter around its gathered local tensor."""
        return wrap_local(local, self.original)

    def face(self, local: torch.Tensor) -> torch.Tensor:
        """What is registered while the model computes, around its gathered local tensor."""
        return self.unsharded(local)

    def annotate(self, face: torch.Tensor) -> None:
        """Note on the registered parameter what its values do not say: here nothing."""

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Local tensor of an unsharded gradient, laid out as the parameter is; sums over data axes stay partial."""
        assert isinstance(gradient, DTensor)
        target = tuple(
            own if axis in self.data_axes else wanted
            for axis, (own, wanted) in enumerate(zip(gradient.placements, self.original.placements, strict=True))
        )
        if target != tuple(gradient.placements):
            gradient = gradient.redistribute(placements=target)
        return complete(local_of(gradient))


def describe(name: str, parameter: Any, dim: int, mesh: DataParallelMesh) -> ModelParallel | None:
    """How data parallelism over ``mesh`` shards a parameter on tensor dim ``dim``; None for a plain tensor.

    Raises:
        ValueError: naming the parameter, if it is not laid out on the mesh as ``dp_mesh_dims`` needs.
    """
    if mesh.whole is not None:
        return _on_same_mesh(name, parameter, dim, mesh, mesh.whole)
    if not isinstance(parameter, DTensor):
        return None
    if parameter.device_mesh == mesh.mesh:
        raise ValueError(
            f"parameter {name!r} is a DTensor on the data parallel mesh already, as torch's own fully_shard and "
            "distribute_module leave them: shard it by one of them or by this fully_shard, not by both"
        )
    try:
        return _beside_other_mesh(parameter, dim, mesh)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"parameter {name!r} is a DTensor on {parameter.device_mesh}, which does not combine with the data "
            f"parallel mesh {mesh.mesh}: slice both from one mesh with named axes, say mesh['dp'] and mesh['tp']"
        ) from error


def _beside_other_mesh(parameter: DTensor, dim: int, mesh: DataParallelMesh) -> ModelParallel:
    """The parameter is on a mesh of its own, cut from the same one as ``mesh``."""
    spec, own = spec_of(parameter), mesh.placements(dim)
    placements = (*own[:-1], _inner_cut(own[-1], spec, range(spec.mesh.ndim)), *spec.placements)
    return ModelParallel(spec, respec(spec, join_meshes([mesh.mesh, spec.mesh]), placements), frozenset())


def _inner_cut(own: Placement, spec: ParallelSpec, axes: Iterable[int]) -> Placement:
    """``own``, inside the cuts of the same dim that other axes make."""
    if isinstance(own, Replicate):
        return own
    dim = own.dim  # type: ignore[attr-defined]
    factor = math.prod(spec.mesh.size(a) for a in axes if getattr(spec.placements[a], "dim", None) == dim)
    return shard_inside(dim, factor)


def _on_same_mesh(name: str, parameter: Any, dim: int, mesh: DataParallelMesh, whole: DeviceMesh) -> ModelParallel:
    """The parameter is on the mesh that the data-parallel axes are axes of."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh != whole:
        raise ValueError(
            f"parameter {name!r} is not a DTensor on the mesh given with dp_mesh_dims: distribute it over that mesh "
            "first, with Replicate() on the data-parallel axes"
        )
    spec, names = spec_of(parameter), whole.mesh_dim_names or ()
    data_axes = [axis for axis, axis_name in enumerate(names) if axis_name in mesh.axis_names]
    for axis in data_axes:
        if not isinstance(spec.placements[axis], Replicate):
            raise ValueError(
                f"parameter {name!r} is placed {spec.placements[axis]} on data-parallel axis {names[axis]!r}, "
                "which must be Replicate() before fully_shard"
            )
    own = mesh.placements(dim)
    if len(mesh.shard_names) <= 1:
        placements = list(spec.placements)
        for axis in map(names.index, mesh.shard_names):
            placements[axis] = _inner_cut(own[-1], spec, range(axis + 1, whole.ndim))
        return ModelParallel(spec, respec(spec, placements=placements), frozenset(data_axes))
    # Several axes shard as one, which the mesh of the sharded parameter has in their place.
    parts: list[DeviceMesh] = []
    placements = []
    for axis in range(whole.ndim):
        if axis not in data_axes:
            parts.append(whole[names[axis]])
            placements.append(spec.placements[axis])
        elif mesh.mesh not in parts:
            parts.append(mesh.mesh)
            placements += [*own[:-1], _inner_cut(own[-1], spec, range(axis + 1, whole.ndim))]
    return ModelParallel(spec, respec(spec, join_meshes(parts), placements), frozenset(data_axes))
