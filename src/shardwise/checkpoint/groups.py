"""Groups of ranks that have tensors of one name, each group on a mesh of its own."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from ..core.device import local_of
from .integrity import checksum
from .peers import Peers

Ranks = tuple[int, ...]
"""Of a mesh, ascending."""


def warn_of_groups(verb: str, peers: Peers, tensors: Mapping[str, torch.Tensor]) -> None:
    """Warn if several groups of ranks have different values under one name: only those of the first group are saved.

    That is right if the others are copies, such as what tensor parallelism leaves whole, and wrong if they are other
    experts. It is no error, since copies differ in the last bits where operators are not deterministic, and a run must
    not end for that. A collective; values are read only of names whose tensors are on several meshes, unless one of
    these has the ranks of the others. The first rank warns.

    Args:
        verb: that saves, for the message.
        peers: all ranks that save.
        tensors: of this rank, by name; on any device.
    """
    meshes: dict[Ranks, list[str]] = defaultdict(list)
    own: dict[str, Ranks] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() < len(peers.ranks):
            own[name] = tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
            meshes[own[name]].append(name)
    apart = _apart(peers.exchange(dict(meshes)))
    if not apart:
        return
    with peers.together():
        sums = {name: (ranks, checksum(local_of(tensors[name]))) for name, ranks in own.items() if name in apart}
    # Sets, since the ranks of a group may hold copies of the same part.
    found: dict[str, dict[Ranks, set[int]]] = defaultdict(lambda: defaultdict(set))
    for told in peers.exchange(sums):
        for name, (ranks, total) in told.items():
            found[name][ranks].add(total)
    differ = [
        (name, first, other)
        for name, (first, *others) in apart.items()
        for other in others
        if found[name][first] != found[name][other]
    ]
    if differ and peers.is_first:
        name, first, other = differ[0]
        more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
        warnings.warn(
            f"{verb}: {name!r}{more} is on ranks {list(first)} and on ranks {list(other)} with different values, of "
            "which the first ranks' alone are saved: unless these are copies that have drifted apart, give the modules "
            "of each group of ranks names of their own, as by the number of the expert",
            stacklevel=2,
        )


def _apart(told: Iterable[Mapping[Ranks, Iterable[str]]]) -> dict[str, list[Ranks]]:
    """Names with the ranks of the first mesh that they are on, and of others none of which it has or is part of."""
    found: dict[str, list[Ranks]] = {}
    for own in told:
        for ranks, names in own.items():
            for name in names:
                known = found.setdefault(name, [ranks])
                if ranks not in known and not _contains(known[0], ranks) and not _contains(ranks, known[0]):
                    known.append(ranks)
    return {name: groups for name, groups in found.items() if len(groups) > 1}


def _contains(ranks: Ranks, others: Ranks) -> bool:
    return set(ranks).issuperset(others)
