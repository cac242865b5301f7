"""Whether ranks hold the same where they should. Nobody waits for it, as in `agreement`, and it only warns: they may
differ on purpose."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .agreement import by_comm, neighbors, signature
from .comm import Comm
from .device import local_of, outside_transforms, unfaked
from .errors import listed
from .posts import post

if TYPE_CHECKING:
    from .group import ParamGroup
    from .shards import Shards

WORD = torch.int64.itemsize
COPIED = 1 << 20
"""Bytes at a time, a multiple of a word."""


def compare_values(sharing: Iterable[tuple[Comm, ParamGroup]]) -> None:
    """Warn if neighbors among replicas have other values than this one has; to be called where `check_alike` is."""
    sharing = [*sharing]
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


_ignored: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters that users want in no unit."""


def note_ignored(parameters: Iterable[torch.Tensor]) -> None:
    """`compare_gradients` says nothing of ``parameters``."""
    for parameter in parameters:
        _ignored[parameter] = True


_compared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those that `compare_gradients` was called for."""


def compare_gradients(optimizer: Optimizer, owner_of: Callable[[torch.Tensor], Shards | None]) -> None:
    """Warn if ranks that share units, whose parameters ``optimizer`` has, are about to step others, in no unit, by
    gradients of their own. Looks once, at the first step that has gradients.

    Args:
        optimizer: about to step.
        owner_of: gives the shards that a parameter belongs to.
    """
    if optimizer in _compared:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = [owner for one in parameters if one.grad is not None and (owner := owner_of(one)) is not None]
    if not owners:
        return
    _compared.add(optimizer)
    names = [name for group in optimizer.param_groups for name in group.get("param_names", group["params"])]
    unowned = {
        number: str(name) if isinstance(name, str) else f"one of shape {tuple(name.shape)}"
        for number, (one, name) in enumerate(zip(parameters, names, strict=False))
        if one.requires_grad and owner_of(one) is None and one not in _ignored
    }
    words = {f"{number}:{sum_of_bits([parameters[number].grad])}": name for number, name in unowned.items()}
    for comm in (owners[0].mesh.shard, *owners[0].mesh.replicate) if words else ():
        for rank, theirs in neighbors(comm, post(comm, " ".join(words), "gradients")):
            if other := [name for word, name in words.items() if word not in theirs]:
                warnings.warn(
                    f"parameters that are in no unit, whose gradients nobody averages: {type(optimizer).__name__} has "
                    f"{listed(other)}, of which rank {rank} has other gradients than rank "
                    f"{comm.global_rank(comm.rank)}. Call fully_shard on the module that has them as well, mostly the "
                    "root, or name them among its ignored_params if each rank trains its own",
                    stacklevel=2,
                )
                return


@outside_transforms
def sum_of_bits(tensors: Iterable[torch.Tensor | None]) -> int:
    """A number that other tensors of such shapes hardly have, unless their bits are the same."""
    with torch.no_grad(), unfaked():
        # What bits tensors of other classes consist of only those know.
        plain = [local for one in tensors if one is not None and type(local := local_of(one)) is torch.Tensor]
        return int(sum(_sum_of_words(one) for one in plain if not one.is_meta and one.layout is torch.strided))


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    # As wide as the sum is: torch copies narrower ones before it sums them. What is not aligned to them is copied here.
    octets = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    aligned = octets.storage_offset() % WORD == 0
    blocks = [octets] if aligned else (block.clone() for block in octets.split(COPIED))
    total = octets.new_zeros((), dtype=torch.int64)
    for block in blocks:
        end = len(block) // WORD * WORD
        total += block[:end].view(torch.int64).sum() + block[end:].sum()
    return total
