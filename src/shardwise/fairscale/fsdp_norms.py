"""The norm of gradients that are cut over ranks as flat shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.comm import Comm
from ..core.flat import FlatSlot
from ..core.norms import norm_of_nothing
from ..grad import joint_norm, norm_dtype, norm_over_ranks, share_of_norm


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
    wide = norm_dtype(slot.sharded for slot in slots)
    nothing = torch.full((), norm_of_nothing(norm_type), dtype=wide, device=device)
    by_comm: dict[Comm, list[torch.Tensor]] = {everyone: []}
    for slot in slots:
        norms = by_comm.setdefault(slot.buffer.comm, [])
        gradient = slot.sharded.grad
        if gradient is not None and (numel := gradient.numel() - slot.padding):
            norms.append(torch.linalg.vector_norm(gradient.reshape(-1)[:numel], norm_type, dtype=wide).to(device))
    # One number for each communicator, whatever gradients this rank has: ranks outside of a smaller group (of experts)
    # have other parameters in their place.
    shares = [_share(norms or [nothing], comm, everyone, norm_type) for comm, norms in by_comm.items()]
    return norm_over_ranks(joint_norm(shares, norm_type), everyone, norm_type)


def _share(norms: Sequence[torch.Tensor], comm: Comm, everyone: Comm, norm_type: float) -> torch.Tensor:
    """This rank's share of the norm of what the ranks of ``comm`` have together."""
    norm = joint_norm(norms, norm_type)
    if comm is everyone:
        return norm
    return share_of_norm(norm_over_ranks(norm, comm, norm_type), comm.size, norm_type)
