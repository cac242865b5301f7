"""What happens to sharded gradients between backward and the optimizer: norms, clipping, loss scaling."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from .core.comm import Comm, comm_for
from .core.device import eager, local_of, scale_each, sent_to, spec_of, without_torch_function
from .core.flat import refuse_flat
from .core.mesh import mesh_device
from .core.norms import in_order, local_norms
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
    # Strings too, as torch takes them: "inf", and what YAML makes of 1e-3. Before ranks communicate.
    max_norm, norm_type = float(max_norm), float(norm_type)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    refuse_flat(parameters, "clip_grad_norm_")
    with without_torch_function():
        found = [*map(_gradient_of, parameters)]
    gradients = [gradient for gradient in found if gradient is not None]
    if not gradients:
        return torch.tensor(0.0)
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
    gradient = parameter.grad
    is_sharded = gradient is not None and owner_of(parameter) is not None
    sharded = None if is_sharded else successor_of(parameter)
    return gradient if sharded is None else sharded.grad


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
    parts = [*map(local_of, gradients)]
    devices = {part.device for part in parts}
    for device in devices:
        tensors = parts if len(devices) == 1 else [part for part in parts if part.device == device]
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
    by_mesh: defaultdict[DeviceMesh | None, defaultdict[frozenset[int], list[int]]]
    by_mesh = defaultdict(lambda: defaultdict(list))
    for mesh, axes, indices in _by_cut(tensors):
        by_mesh[mesh][axes] += indices
    vectors, order = [], []
    for mesh, by_axes in by_mesh.items():
        indices = [*chain.from_iterable(by_axes.values())]
        vector = local_norms([local_of(tensors[index]) for index in indices], norm_type)
        if mesh is not None:
            # Norms of offloaded gradients go to where the mesh communicates.
            vector = vector.to(mesh_device(mesh))
            vector = _complete(vector, [(axes, len(own)) for axes, own in by_axes.items()], mesh, norm_type)
        vectors.append(vector.to(tensors[0].device))
        order += indices
    total: torch.Tensor = torch.linalg.vector_norm(in_order(vectors, order), norm_type)
    return total


def _by_cut(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[DeviceMesh | None, frozenset[int], list[int]]]:
    """Indices of tensors that are cut over the same axes of one mesh. Objects tell, since comparing meshes and
    placements of all tensors is slow; others may be equal."""
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    whole: list[int] = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            spec = spec_of(tensor)
            found[id(spec.mesh), id(spec.placements)].append(index)
        else:
            whole.append(index)
    if whole:
        yield None, frozenset(), whole
    for indices in found.values():
        spec = spec_of(tensors[indices[0]])
        if any(isinstance(placement, Partial) for placement in spec.placements):
            raise ValueError(f"a gradient with placements {spec.placements} is not reduced yet, so it has no norm")
        axes = (axis for axis, placement in enumerate(spec.placements) if not isinstance(placement, Replicate))
        yield spec.mesh, frozenset(axes), indices


def _complete(
    vector: torch.Tensor, sharded: Sequence[tuple[frozenset[int], int]], mesh: DeviceMesh, norm_type: float
) -> torch.Tensor:
    """Each tensor's norm over all ranks from this rank's norms, by one all-reduce for each axis that cuts any.

    Args:
        vector: norms, on the device of ``mesh``.
        sharded: over which axes tensors are cut, and how many of them, in the order of ``vector``.
        mesh: of all tensors.
        norm_type: of the norms.
    """
    for axis in sorted(frozenset().union(*(axes for axes, _ in sharded))):
        if mesh.size(axis) == 1:
            continue
        combined = norm_over_ranks(vector.clone(), comm_for(mesh.get_group(axis), vector.device), norm_type)
        if not all(axis in axes for axes, _ in sharded):
            # Where the axis does not cut a tensor its ranks have the same norm already.
            cuts = [axis in axes for axes, count in sharded for _ in range(count)]
            combined = torch.where(sent_to(vector.device, cuts, torch.bool), combined, vector)
        vector = combined
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
