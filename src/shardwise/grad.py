"""What happens to sharded gradients between backward and the optimizer: norms and clipping."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from .arguments import to_float
from .core.agreement import communicating
from .core.comm import Comm, comm_for
from .core.device import eager, local_of, scale_each, sent_to, spec_of, without_torch_function
from .core.flat import refuse_flat
from .core.mesh import mesh_device
from .core.norms import in_order, local_norms, norm_of_nothing
from .core.parameter import owner_of
from .core.replaced import successor_of
from .core.shards import ParameterShards, Shards

OF_NORM = "computing the norm of the gradients"
"""What ranks that wait in vain were doing."""


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

    Units may lie on different meshes, of which the widest has the ranks of all. Where one lies on fewer data-parallel
    ranks than others (experts), each group of ranks has parameters of its own in it, and all groups' count once each:
    one more all-reduce, of one number, for each axis of the widest mesh. All its ranks then call this with parameters
    of such a unit, which may be frozen or have no gradients. Ranks of a tensor-parallel axis have those in common that
    it does not cut, and all ranks those that are not sharded.

    Args:
        parameters: one or many; those without gradients are left out. For an unsharded parameter (registered while its
            unit is not resharded, or to fewer ranks only), or one that `fully_shard` replaced, the gradient of its
            sharded parameter counts.
        max_norm: in the unit of the gradients.
        norm_type: order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: whether a norm that is nan or infinite is an error, before anything is scaled.
        foreach: False handles tensors one by one, which needs less memory for temporaries; None and True at once.

    Returns:
        The norm before scaling, a 0-dim tensor with the same value on every rank of the widest mesh. Stages of a
        pipeline, on meshes of their own, each have their own.

    Raises:
        TypeError: if ``parameters`` are something else, such as a module or pairs with names.
        ValueError: if a gradient is still a partial sum; naming two parameters, if they lie on different meshes and no
            mesh has the ranks of all.
        RuntimeError: if ``error_if_nonfinite`` and the norm is not finite.
    """
    # Before ranks communicate.
    max_norm = to_float("clip_grad_norm_", "max_norm", max_norm)
    norm_type = to_float("clip_grad_norm_", "norm_type", norm_type)
    parameters = _listed(parameters)
    refuse_flat(parameters, "clip_grad_norm_")
    with without_torch_function():
        sharded = [*map(_sharded_of, parameters)]
        gradients = [one.grad for one in sharded if one.grad is not None]
        groups = _sharers(sharded)  # of all, since ranks may differ in what is trained
    if groups is not None:
        norm = _norm_over_groups(sharded, *groups, norm_type)
    elif gradients:
        norm = total_norm(gradients, norm_type)
    else:
        return torch.tensor(0.0)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is non-finite ({norm.item()}), so they cannot be clipped; "
            "pass error_if_nonfinite=False to scale them by it all the same"
        )
    scale_to_norm(gradients, norm, max_norm, foreach=foreach is not False)
    return norm


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    try:
        each: Iterator[Any] = iter(parameters)
    except TypeError:
        each = iter([parameters])
    listed = [*each]
    for one in listed:
        if not isinstance(one, torch.Tensor):
            raise TypeError(
                "clip_grad_norm_: parameters must be a tensor or several, such as model.parameters(), and a "
                f"{type(one).__name__} is none"
            )
    return listed


def _sharded_of(parameter: torch.Tensor) -> torch.Tensor:
    # Unsharded ones may have gradients of this rank alone, which wait for their reduction.
    is_sharded = parameter.grad is not None and owner_of(parameter) is not None
    sharded = None if is_sharded else successor_of(parameter)
    return parameter if sharded is None else sharded


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


def _sharers(parameters: Sequence[torch.Tensor]) -> tuple[DeviceMesh, list[int]] | None:
    """The widest mesh of data-parallel ranks, and for each parameter how many of its ranks have it in common; None
    where all ranks have all in common.

    Raises:
        ValueError: if none has the ranks of all.
    """
    owners = [*map(owner_of, parameters)]
    meshes: dict[Shards, DeviceMesh] = {one: one.mesh.mesh for one in {*owners} if isinstance(one, ParameterShards)}
    if len({*meshes.values()}) < 2:
        return None
    firsts: dict[DeviceMesh, torch.Tensor] = {}
    for one, owner in zip(parameters, owners, strict=True):
        if owner is not None:
            firsts.setdefault(meshes[owner], one)
    ranks = functools.cache(_ranks_of)
    everyone = frozenset().union(*map(ranks, firsts))
    # With the ranks of other parallelisms, whose axes may lie across the data-parallel ranks of others (experts).
    common = [
        everyone if owner is None else everyone & ranks(spec_of(one).mesh)
        for one, owner in zip(parameters, owners, strict=True)
    ]
    if all(own == everyone for own in common):
        return None
    widest = max(firsts, key=DeviceMesh.size)
    for mesh in firsts:
        if not ranks(mesh) <= ranks(widest):
            first, other = (f"{_named(firsts[one])} on ranks {sorted(ranks(one))}, {one}" for one in (widest, mesh))
            raise ValueError(
                f"there is no norm of all gradients: no mesh has the ranks of {first}, and of {other}; clip the "
                "parameters of each mesh by a call of its own"
            )
    return widest, [*map(len, common)]


def _named(sharded: torch.Tensor) -> str:
    owner = owner_of(sharded)
    assert owner is not None
    name, unit = owner.name_of(sharded)
    return f"parameter {name!r} of unit {unit!r}"


def _ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _norm_over_groups(
    parameters: Sequence[torch.Tensor], everyone: DeviceMesh, sharers: Sequence[int], norm_type: float
) -> torch.Tensor:
    """Norm of the gradients of ``parameters``, of which groups of ranks have other ones; all of ``everyone`` call this.

    Args:
        parameters: one or more, with gradients or without.
        everyone: all ranks.
        sharers: for each parameter how many of the ranks have it in common.
        norm_type: order of the norm.
    """
    dtype, device = norm_dtype(parameters), mesh_device(everyone)
    by_sharers: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for parameter, count in zip(parameters, sharers, strict=True):
        if parameter.grad is not None:
            by_sharers[count].append(parameter.grad)
    norms = {count: total_norm(own, norm_type).to(device, dtype) for count, own in by_sharers.items()}
    of_all = [norms.pop(everyone.size())] if everyone.size() in norms else []
    # Whatever gradients this rank has: those of another group may be there.
    shares = [share_of_norm(norm, count, norm_type) for count, norm in norms.items()]
    nothing = torch.full((), norm_of_nothing(norm_type), dtype=dtype, device=device)
    share = joint_norm(shares or [nothing], norm_type)
    for axis in range(everyone.ndim):
        share = norm_over_ranks(share, comm_for(everyone.get_group(axis), device), norm_type)
    return joint_norm([*of_all, share], norm_type).to(parameters[0].device)


def norm_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """That norms are added up in which ranks have of unlike ``tensors``: float32, float64 if any of them needs it."""
    return torch.float64 if any(one.dtype.to_real() == torch.float64 for one in tensors) else torch.float32


def joint_norm(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Norm of several tensors from that of each, one or more 0-dim ones of one dtype and device."""
    stacked = torch.stack([*norms])
    joint: torch.Tensor = stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)
    return joint


def share_of_norm(norm: torch.Tensor, ranks: int, norm_type: float) -> torch.Tensor:
    """What each of ``ranks`` that all have ``norm`` adds, so that `norm_over_ranks` over these and others counts it
    once."""
    if norm_type == 0:
        return norm / ranks
    return norm if math.isinf(norm_type) else norm * ranks ** (-1.0 / norm_type)


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
        _sum(vector, comm)
        return vector
    # Squares of norms that float16 can tell may not be in its range.
    powers = (vector.float() if vector.dtype == torch.float16 else vector) ** norm_type
    _sum(powers, comm)
    result: torch.Tensor = powers ** (1.0 / norm_type)
    return result.to(vector.dtype)


def _sum(vector: torch.Tensor, comm: Comm) -> None:
    with communicating(OF_NORM, comm):
        comm.all_reduce_now(vector)


def _extremes_over_ranks(vector: torch.Tensor, comm: Comm, *, smallest: bool) -> torch.Tensor:
    # Backends may lose NaN in a maximum, by the order in which they compare.
    joined = torch.stack([-vector if smallest else vector, vector.isnan().to(vector.dtype)])
    with communicating(OF_NORM, comm):
        comm.all_reduce_largest(joined.view(-1))
    extremes, is_nan = joined
    return torch.where(is_nan > 0, math.nan, -extremes if smallest else extremes)
