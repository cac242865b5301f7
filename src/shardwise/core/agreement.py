"""Whether the ranks that share parameters have wrapped them alike: otherwise gloo ends a process, and others wait.

A rank posts what its collectives depend on, and compares it with what its neighbors have posted by then. Nobody waits
for anybody: of two ranks that differ the later one knows it, and the other one when it fails to hear from that.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .comm import Comm
from .device import local_of
from .errors import StateError

if TYPE_CHECKING:
    from .group import ParamGroup
    from .slot import Slot

_posted: weakref.WeakKeyDictionary[Comm, tuple[str, Counter[str], dict[str, str]]] = weakref.WeakKeyDictionary()
"""What was posted last over these ranks: its number, signatures, and what to call a unit with such a signature."""

NAMED_PARAMETERS = 3
"""Of a unit, in a message."""


def check_alike(sharing: Iterable[tuple[Comm, ParamGroup]]) -> None:
    """Post what the groups are that communicate over some ranks, all of a model, and compare it with the neighbors'.

    To be called right before one does. Only what all of those ranks do in one order gives their posts the same number,
    as no forward over replicas does.

    Raises:
        StateError: naming another rank, which has other parameters, dtypes or units.
    """
    by_comm: defaultdict[Comm, list[ParamGroup]] = defaultdict(list)
    for comm, group in sharing:
        by_comm[comm].append(group)
    for comm, members in by_comm.items():
        signed = [(_signature(group), _described(group)) for group in members]
        counts = Counter(signature for signature, _ in signed)
        # Their order says nothing: ranks may have wrapped units in any.
        number = comm.post(" ".join(sorted(counts.elements())))
        _posted[comm] = number, counts, dict(signed)
        if text := difference(comm):
            raise StateError(text)


def difference(*comms: Comm) -> str:
    """What this rank and its neighbors over any of ``comms`` have wrapped otherwise, as far as they have posted it.

    Empty if nothing.
    """
    return next(filter(None, map(_difference, comms)), "")


def _difference(comm: Comm) -> str:
    if comm not in _posted:
        return ""
    number, counts, descriptions = _posted[comm]
    for rank in sorted({(comm.rank + step) % comm.size for step in (-1, 1)} - {comm.rank}):
        posted = comm.posted_by(rank, number)
        if posted is None or (theirs := Counter(posted.split())) == counts:
            continue
        only_here = next(iter(counts - theirs), None)
        if only_here is None:
            what = f"rank {rank} has {(theirs - counts).total()} more units than rank {comm.rank}"
        else:
            what = f"rank {comm.rank} has {descriptions[only_here]}, and rank {rank} has no unit like that"
        return (
            f"ranks do not share one model: {what}. Build the same modules on all ranks, and call fully_shard with the "
            "same options there"
        )
    return ""


def _signature(group: ParamGroup) -> str:
    """The same for all groups whose gathers and reductions are alike."""
    parts = [(_shape(slot), slot.buffer.layout.tensors[slot.index].dim, _dtype(slot)) for slot in group.slots]
    precision = group.policy.precision
    return hashlib.sha256(repr((parts, precision.param_dtype, precision.reduce_dtype)).encode()).hexdigest()[:16]


def _described(group: ParamGroup) -> str:
    shown = [f"{slot.name} {_shape(slot)}" for slot in group.slots[:NAMED_PARAMETERS]]
    if len(group.slots) > NAMED_PARAMETERS:
        shown.append("…")
    return f"unit {group.name!r} with {', '.join(shown)} in {', '.join(dict.fromkeys(map(_dtype, group.slots)))}"


def _shape(slot: Slot) -> tuple[int, ...]:
    return tuple(slot.buffer.layout.tensors[slot.index].shape)


def _dtype(slot: Slot) -> str:
    """That the parameter is gathered from: what was converted is taken over with the next gather, on some ranks before
    that."""
    try:
        registered = slot.registered()
    except StateError:  # it is missing, which is told when the unit runs
        registered = slot.sharded
    return str(local_of(slot.sharded if registered is slot.unsharded else registered).dtype)
