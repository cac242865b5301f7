"""The norm of gradients that are cut over ranks as flat shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..core.comm import Comm
from ..core.flat import FlatSlot
from ..grad import norm_over_ranks


def norm_of_gradients(
    slots: Sequence[FlatSlot], everyone: Comm, device: torch.device, norm_type: float
) -> torch.Tensor:
    """Norm of the gradients of ``slots`` over all ranks, in float32 for narrower ones; all ranks call this.

    Args:
        slots: whose parameters may be shared by fewer ranks.
        everyone: all ranks.
        device: that communicates, and has the result.
        norm_type: order of the norm.
    """
    # Judged by the parameters, since a rank may have no gradients.
    is_wide = any(slot.sharded.dtype == torch.float64 for slot in slots)
    wide = torch.float64 if is_wide else torch.float32
    nothing = torch.full((), math.inf if norm_type < 0 else 0.0, dtype=wide, device=device)
    by_comm: dict[Comm, list[torch.Tensor]] = {everyone: []}
    for slot in slots:
        norms = by_comm.setdefault(slot.buffer.comm, [])
        gradient = slot.sharded.grad
        if gradient is not None and (numel := gradient.numel() - slot.padding):
            norms.append(torch.linalg.vector_norm(gradient.reshape(-1)[:numel], norm_type, dtype=wide).to(device))
    # One number for each communicator, whatever gradients this rank has: ranks outside of a smaller group (of experts)
    # have other parameters in their place.
    shares = [_share_of_norm(norms or [nothing], comm, everyone, norm_type) for comm, norms in by_comm.items()]
    return norm_over_ranks(_joint_norm(shares, norm_type), everyone, norm_type)


def _share_of_norm(norms: Sequence[torch.Tensor], comm: Comm, everyone: Comm, norm_type: float) -> torch.Tensor:
    """This rank's share of the norm of what the ranks of ``comm`` have together."""
    norm = _joint_norm(norms, norm_type)
    if comm is everyone:
        return norm
    norm = norm_over_ranks(norm, comm, norm_type)
    # All ranks of ``comm`` have the same norm now.
    if norm_type == 0:
        return norm / comm.size
    return norm if math.isinf(norm_type) else norm * comm.size ** (-1.0 / norm_type)


def _joint_norm(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Norm of several tensors from that of each."""
    stacked = torch.stack(list(norms))
    joint: torch.Tensor = stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)
    return joint
