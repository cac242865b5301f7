"""Whether ranks hold the same where they should. Nobody waits for it, as in `agreement`, and it only warns: they may
differ on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .agreement import by_comm, neighbors, signature
from .comm import Comm
from .device import outside_transforms, unfaked
from .errors import listed
from .posts import post

if TYPE_CHECKING:
    from .group import ParamGroup

WORD = torch.int64.itemsize
COPIED = 1 << 20
"""Bytes at a time, a multiple of a word."""


def compare_values(sharing: Iterable[tuple[Comm, ParamGroup]]) -> None:
    """Warn if neighbors among replicas have other values than this one has, in groups that are trained; to be called
    where `check_alike` is."""
    sharing = [(comm, group) for comm, group in sharing if group.gradients.trains()]
    sums = {group: sum_of_bits(slot.local for slot in group.slots) for group in {group for _, group in sharing}}
    for comm, groups in by_comm(sharing).items():
        signed = {f"{signature(group)}:{sums[group]}": group for group in groups}
        for rank, theirs in neighbors(comm, post(comm, " ".join(signed), "values")):
            if other := [group.name for word, group in signed.items() if word not in theirs]:
                warnings.warn(
                    f"replicas train different models: rank {rank} has other values than rank "
                    f"{comm.global_rank(comm.rank)} in units {listed(other)}. Their gradients are averaged, and their "
                    "parameters never are: build the model after the same torch.manual_seed on all ranks, "
                    "shardwise.materialize it, or load its weights there",
                    stacklevel=2,
                )
                break


@outside_transforms
def sum_of_bits(tensors: Iterable[torch.Tensor]) -> int:
    """The sum of all tensors' memory: the same of other values only by chance, or if they are the same in another
    order."""
    with torch.no_grad(), unfaked():
        # What bits tensors of other classes consist of only those know.
        return int(sum(_sum_of_words(one) for one in tensors if type(one) is torch.Tensor and not one.is_meta))


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    # As wide as the sum is: torch copies narrower ones before it sums them. What is not aligned to them is copied here.
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    aligned = octets.storage_offset() % WORD == 0
    blocks = [octets] if aligned else (block.clone() for block in octets.split(COPIED))
    total = octets.new_zeros((), dtype=torch.int64)
    for block in blocks:
        end = len(block) // WORD * WORD
        total += block[:end].view(torch.int64).sum() + block[end:].sum()
    return total
