"""What happens to sharded gradients between backward and the optimizer: norms, clipping, loss scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from .core.comm import Comm, comm_for
from .core.device import eager, local_norms, local_of, scale_each, spec_of, without_torch_function
from .core.flat import refuse_flat
from .core.mesh import mesh_device
from .core.parameter import owner_of, successor_of
from .grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler", "clip_grad_norm_", "norm_over_ranks", "scale_to_norm", "total_norm"]


@eager
@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of ``parameters``, sharded or not, so that their norm over all ranks is at most ``max_norm``.

    One all-reduce for each mesh axis that gradients are sharded over, of one number per parameter. A collective: all
    ranks of the mesh call it.

    Args:
        parameters: one or many; those without gradients are left out. For an unsharded parameter (registered while its
            unit is not resharded, or to fewer ranks only), or one that `fully_shard` replaced, the gradient of its
            sharded parameter counts.
        max_norm: in the unit of the gradients.
        norm_type: order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: whether a norm that is nan or infinite is an error, before anything is scaled.
        foreach: False handles tensors one by one, which needs less memory for temporaries; None and True at once.

    Returns:
        The norm before scaling, a 0-dim tensor with the same value on every rank.

    Raises:
        RuntimeError: if ``error_if_nonfinite`` and the norm is not finite.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    refuse_flat(parameters, "clip_grad_norm_")
    with without_torch_function():
        found = [*map(_gradient_of, parameters)]
    gradients = [gradient for gradient in found if gradient is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm_type = float(norm_type)  # "inf", as torch takes it
    norm = total_norm(gradients, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is non-finite ({norm.item()}), so they cannot be clipped; "
            "pass error_if_nonfinite=False to scale them by it all the same"
        )
    scale_to_norm(gradients, norm, max_norm, foreach=foreach is not False)
    return norm


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    # Unsharded ones may have gradients of this rank alone, which wait for their reduction.
    is_sharded = parameter.grad is not None and owner_of(parameter) is not None
    sharded = None if is_sharded else successor_of(parameter)
    return parameter.grad if sharded is None else sharded.grad


def scale_to_norm(
    gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float, *, foreach: bool = True
) -> None:
    """Scale ``gradients``, whose norm over all ranks is ``norm``, down to ``max_norm``, in place.

    Args:
        gradients: DTensors or plain ones, on any devices.
        norm: 0-dim.
        max_norm: in the unit of the gradients.
        foreach: all tensors of a device at once, which needs memory for temporaries.
    """
    # As torch does: no branch on the value, which would wait for the device.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        local = local_of(gradient)
        by_device.setdefault(local.device, []).append(local)
    for device, tensors in by_device.items():
        on_device = scale.to(device)
        if foreach:
            scale_each(tensors, on_device)
        else:
            for tensor in tensors:
                tensor.mul_(on_device)


@torch.no_grad()
def total_norm(tensors: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all elements of ``tensors``, DTensors or plain ones, over all ranks that hold parts of them.

    Returns:
        A 0-dim tensor. The norm of each tensor is completed over ranks first and their norm taken then, as torch
        does for DTensors, so that the result agrees bitwise.

    Raises:
        ValueError: if a tensor is still a partial sum.
    """
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for mesh, indices in _by_mesh(tensors):
        by_mesh.setdefault(mesh, []).extend(indices)
    vectors = []
    for mesh, indices in by_mesh.items():
        members = [tensors[index] for index in indices]
        vector = torch.stack(local_norms([local_of(tensor) for tensor in members], norm_type))
        if mesh is not None:
            # Norms of offloaded gradients go to where the mesh communicates.
            vector = _complete(vector.to(mesh_device(mesh)), _sharded_axes(members), mesh, norm_type)
        vectors.append(vector)
    complete = vectors[0]
    if len(vectors) > 1:
        joined = torch.cat([vector.to(tensors[0].device) for vector in vectors])
        complete = torch.empty_like(joined)
        complete[[index for indices in by_mesh.values() for index in indices]] = joined
    total: torch.Tensor = torch.linalg.vector_norm(complete, norm_type)
    return total


def _by_mesh(tensors: Sequence[torch.Tensor]) -> Iterable[tuple[DeviceMesh | None, list[int]]]:
    """Indices of the tensors of each mesh object. Objects may be equal: comparing the meshes of all tensors is slow."""
    found: dict[int, tuple[DeviceMesh | None, list[int]]] = {}
    for index, tensor in enumerate(tensors):
        mesh = spec_of(tensor).mesh if isinstance(tensor, DTensor) else None
        found.setdefault(id(mesh), (mesh, []))[1].append(index)
    return found.values()


def _sharded_axes(tensors: Sequence[torch.Tensor]) -> list[frozenset[int]]:
    """Mesh axes that each of ``tensors``, DTensors, is cut over."""
    known: dict[int, frozenset[int]] = {}  # by object, since comparing placements is slow
    found = []
    for tensor in tensors:
        placements = spec_of(tensor).placements
        if (axes := known.get(id(placements))) is None:
            if any(isinstance(placement, Partial) for placement in placements):
                raise ValueError(f"a gradient with placements {placements} is not reduced yet, so it has no norm")
            axes = frozenset(axis for axis, one in enumerate(placements) if not isinstance(one, Replicate))
            known[id(placements)] = axes
        found.append(axes)
    return found


def _complete(
    vector: torch.Tensor, sharded: Sequence[frozenset[int]], mesh: DeviceMesh, norm_type: float
) -> torch.Tensor:
    """Each tensor's norm over all ranks from this rank's norms, by one all-reduce for each axis that cuts any."""
    for axis in sorted(frozenset().union(*set(sharded))):
        if mesh.size(axis) == 1:
            continue
        cuts = [axis in axes for axes in sharded]
        combined = norm_over_ranks(vector.clone(), comm_for(mesh.get_group(axis), vector.device), norm_type)
        # Where the axis does not cut a tensor its ranks have the same norm already.
        vector = combined if all(cuts) else torch.where(vector.new_tensor(cuts, dtype=torch.bool), combined, vector)
    return vector


def norm_over_ranks(vector: torch.Tensor, comm: Comm, norm_type: float) -> torch.Tensor:
    """Norms of what all ranks of ``comm`` hold, from each rank's norms ``vector``, which may be overwritten."""
    if comm.size == 1:
        return vector
    if math.isinf(norm_type):
        return _extremes_over_ranks(vector, comm, smallest=norm_type < 0)
    if norm_type == 0:
        comm.all_reduce_now(vector)
        return vector
    # Squares of norms that float16 can tell may not be in its range.
    powers = (vector.float() if vector.dtype == torch.float16 else vector) ** norm_type
    comm.all_reduce_now(powers)
    result: torch.Tensor = powers ** (1.0 / norm_type)
    return result.to(vector.dtype)


def _extremes_over_ranks(vector: torch.Tensor, comm: Comm, *, smallest: bool) -> torch.Tensor:
    # Backends may lose NaN in a maximum, by the order in which they compare.
    joined = torch.stack([-vector if smallest else vector, vector.isnan().to(vector.dtype)])
    comm.all_reduce_largest(joined.view(-1))
    extremes, is_nan = joined
    return torch.where(is_nan > 0, math.nan, -extremes if smallest else extremes)
