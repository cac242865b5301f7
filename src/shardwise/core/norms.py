"""Norms of many tensors of this rank, with as few calls as their sizes allow."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import Any

import torch

from .device import norm_each, sent_to

SMALL = 8192
"""Elements that a CPU copies faster than it calls an operator."""
_kind_of = attrgetter("shape", "dtype", "layout", "device", "__class__")


def local_norms(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Norm of each of ``tensors``, one or more of any shapes, dtypes and devices.

    Returns:
        1-dim, in their order, on the device of the first and in the dtype that holds all; for an empty tensor the value
        that leaves a norm of norms as it is.
    """
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for index, kind in enumerate(map(_kind_of, tensors)):
        alike[kind].append(index)
    rest: defaultdict[torch.device, list[int]] = defaultdict(list)
    found: list[torch.Tensor] = []
    order: list[int] = []
    for indices in alike.values():
        members = [tensors[index] for index in indices]
        first = members[0]
        if not first.numel():
            found.append(first.new_full((len(members),), norm_of_nothing(norm_type), dtype=first.dtype.to_real()))
        elif _are_stacked(members):
            found.append(torch.linalg.vector_norm(torch.stack(members).view(len(members), -1), norm_type, dim=1))
        else:
            rest[first.device] += indices
            continue
        order += indices
    for indices in rest.values():
        indices.sort()
        found.append(torch.stack(norm_each([tensors[index] for index in indices], norm_type)))
        order += indices
    return in_order([norms.to(tensors[0].device) for norms in found], order)


def norm_of_nothing(norm_type: float) -> float:
    """The norm that leaves a norm of norms as it is."""
    return math.inf if norm_type < 0 else 0.0


def _are_stacked(alike: Sequence[torch.Tensor]) -> bool:
    """Whether one call for a copy of all is faster than one for each; its norms have the same bits."""
    first = alike[0]
    is_small = first.is_cpu and first.numel() <= SMALL and len(alike) > 1
    is_plain = type(first) is torch.Tensor and first.layout is torch.strided
    return is_small and is_plain and all(map(torch.Tensor.is_contiguous, alike))


def in_order(vectors: Sequence[torch.Tensor], order: Sequence[int]) -> torch.Tensor:
    """The elements of ``vectors``, of which ``order`` tells the positions, in a vector of the dtype that holds all."""
    joined = vectors[0] if len(vectors) == 1 else torch.cat([*vectors])
    if all(map(int.__eq__, order, count())):
        return joined
    ordered = torch.empty_like(joined)
    ordered[sent_to(joined.device, order, torch.int64)] = joined
    return ordered
