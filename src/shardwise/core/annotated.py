"""Parameters that the package spmd_types annotates: plain tensors while they compute, DTensors while they are sharded.

An annotation says, for each axis of ranks, what a tensor is there (alike, partial, cut on a dim). torch's FSDP2 reads
them since 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from . import model_parallel
from .device import local_of
from .mesh import DataParallelMesh
from .model_parallel import ModelParallel


@dataclass(frozen=True, eq=False)
class AnnotatedParallel(ModelParallel):
    """How an annotated parameter is laid out.

    Args:
        gradients: placements of its gradient, by axis of the original mesh.
        types: what the module's code finds it annotated with, by axis of spmd_types.
        partition_spec: which axes cut which tensor dim, in their order; None if none does.
    """

    gradients: tuple[Placement, ...]
    types: dict[Any, Any]
    partition_spec: Any

    def face(self, local: torch.Tensor) -> torch.Tensor:
        """The gathered local tensor itself."""
        return local

    def annotate(self, face: torch.Tensor) -> None:
        """Annotate the unsharded parameter as the original is."""
        _spmd_types().assert_type(face, self.types, partition_spec=self.partition_spec)

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Local tensor of a plain gradient, summed over the axes of other parallelisms that its annotation leaves
        partial."""
        whole = DTensor.from_local(gradient, self.original.mesh, self.gradients, run_check=False)
        return super().local_gradient(whole)


def describe(name: str, parameter: Any, dim: int, mesh: DataParallelMesh) -> ModelParallel | None:
    """`model_parallel.describe`, also of annotated parameters.

    Raises:
        ValueError: naming the parameter, if its annotations do not say what it is on each axis of the mesh.
    """
    if not _is_annotated(parameter):
        return model_parallel.describe(name, parameter, dim, mesh)
    spmd = _spmd_types()
    if mesh.whole is None:
        raise ValueError(
            f"parameter {name!r} is annotated by spmd_types: pass fully_shard the mesh of all its axes, and "
            "dp_mesh_dims to say which of them are data-parallel"
        )
    annotated, partition_spec = dict(spmd.get_local_type(parameter)), spmd.get_partition_spec(parameter)
    cuts = {} if partition_spec is None else spmd.types.partition_spec_to_shard_types(partition_spec)
    stored = _types_on(name, {**annotated, **cuts}, mesh, mesh.whole)
    placements, gradients = (
        tuple(map(spmd.spmd_type_to_dtensor_placement, kinds))
        for kinds in (stored, [kind.backward_type() for kind in stored])
    )
    whole = DTensor.from_local(local_of(parameter).detach(), mesh.whole, placements, run_check=False)
    found = model_parallel.describe(name, whole, dim, mesh)
    assert found is not None
    types = {**_alike_elsewhere(annotated.keys(), mesh.whole), **annotated}
    return AnnotatedParallel(found.original, found.sharded, found.data_axes, gradients, types, partition_spec)


def _alike_elsewhere(annotated: Set[Any], whole: DeviceMesh) -> dict[Any, Any]:
    """Axes that the module's code asks about too: what all data-parallel ranks have alike needs no annotation."""
    spmd = _spmd_types()
    stored = {spmd.MeshAxis.of(whole.get_group(axis)) for axis in range(whole.ndim)}
    if spmd.normalize_mesh(frozenset(annotated)) == spmd.normalize_mesh(frozenset(stored)):
        return {}
    others = stored if annotated <= stored else ()
    return dict.fromkeys(spmd.current_mesh() or others, spmd.R)


def _types_on(name: str, annotated: dict[Any, Any], mesh: DataParallelMesh, whole: DeviceMesh) -> list[Any]:
    """What the parameter is on each axis of the ``whole`` mesh."""
    spmd, stored, data_axes = _spmd_types(), [], []
    left = dict(annotated)
    for axis_name in whole.mesh_dim_names or ():
        axis = spmd.MeshAxis.of(whole.get_group(axis_name))
        is_data = axis_name in mesh.axis_names
        if is_data:
            data_axes.append(axis)
        kind = left.pop(axis, spmd.R if is_data or axis.size() == 1 else None)
        if kind is None:
            raise ValueError(
                f"parameter {name!r} is annotated by spmd_types, but not for axis {axis_name!r} of {whole}, which is "
                "not data-parallel: annotate it for every such axis"
            )
        if is_data and kind is not spmd.R:
            raise ValueError(
                f"parameter {name!r} is annotated by spmd_types as {kind} on data-parallel axis {axis_name!r}, over "
                f"which its gradient is reduced: it has to be {spmd.R} there"
            )
        stored.append(kind)
    data = spmd._mesh_axis.flatten_axes(tuple(data_axes))
    for axis, kind in left.items():
        if not (axis <= data and kind is spmd.R):
            raise ValueError(
                f"parameter {name!r} is annotated by spmd_types as {kind} on {axis}, which is no axis of {whole}"
            )
    return stored


def _spmd_types() -> Any:
    # Never imported here: what annotates has done that.
    return sys.modules["spmd_types"]


def _is_annotated(parameter: torch.Tensor) -> bool:
    spmd = sys.modules.get("spmd_types")
    return spmd is not None and bool(spmd.get_local_type(parameter))
