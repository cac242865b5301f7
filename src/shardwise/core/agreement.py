"""What ranks tell each other: whether those that share parameters have wrapped them and train them alike, and what
failed on one.

Otherwise gloo ends a process, and the others wait in vain.

A rank posts what its collectives depend on, and compares it with what its neighbors have posted by then. Nobody waits
for anybody: of two ranks that differ the later one knows it, and the other one when it fails to hear from that.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import torch

from .comm import Comm, failed_peer
from .device import local_of
from .errors import StateError, explain
from .posts import failure_elsewhere, last_posted_by, post, post_failure, post_last, posted_by, told_failures

if TYPE_CHECKING:
    from .group import ParamGroup
    from .slot import Slot

_posted: weakref.WeakKeyDictionary[Comm, tuple[str, Counter[str], dict[str, str]]] = weakref.WeakKeyDictionary()
"""What was posted last over these ranks: its number, signatures, and what to call a unit with such a signature."""


class _Trained(NamedTuple):
    """Which parameters of a unit are trained: those whose bits are set in ``bits``."""

    unit: str
    parameters: Sequence[str]
    bits: int


_trained: weakref.WeakKeyDictionary[Comm, Mapping[str, _Trained]] = weakref.WeakKeyDictionary()
"""What was posted last over these ranks of trained parameters, by what units of one name and parameters are called."""

_verb: ContextVar[tuple[object, ...]] = ContextVar("_verb", default=())
"""What `doing` was given."""

UNITS_ALIKE = (
    "a unit that runs forward or backward on one rank must do so on all, in the same order, and train the same "
    "parameters there"
)
VERBS_ALIKE = "all ranks must do that, in the same order"
TRAINED = "trained"
NAMED_PARAMETERS = 3
"""Of a unit, in a message."""
MESSAGE_LENGTH = 300
"""Characters of an exception's message that other ranks are told."""


def check_alike(sharing: Iterable[tuple[Comm, ParamGroup]]) -> None:
    """Post what the groups are that communicate over some ranks, all of a model, and compare it with the neighbors'.

    To be called right before one does. Only what all of those ranks do in one order gives their posts the same number,
    as no forward over replicas does.

    Raises:
        StateError: naming another rank, which has other parameters, dtypes or units.
    """
    for comm, members in by_comm(sharing).items():
        signed = [(signature(group), _described(group)) for group in members]
        counts = Counter(signature for signature, _ in signed)
        # Their order says nothing: ranks may have wrapped units in any.
        number = post(comm, " ".join(sorted(counts.elements())))
        _posted[comm] = number, counts, dict(signed)
        if text := _difference(comm):
            raise StateError(text)


def check_training(groups: Sequence[ParamGroup]) -> None:
    """Post which parameters of ``groups``, all that a model has over some ranks, are trained, and compare it with what
    the neighbors have posted at the same reduction.

    To be called right before the first one, and before one that is the first since that has changed; not if none
    follows, or what is posted next would have the same number.

    Raises:
        StateError: naming a parameter that is not trained on another rank, or is there alone.
    """
    every = ((comm, group) for group in groups for comm in group.mesh.comms)
    for comm, members in by_comm(pair for pair in every if pair[0].size > 1).items():
        found = [_trained_of(group) for group in members]
        counts = Counter(key for key, _ in found)  # which of several units of one name is meant none could tell
        trained = _trained[comm] = {key: one for key, one in found if counts[key] == 1}
        words = [str(comm.reductions), *(f"{key}:{one.bits:x}" for key, one in trained.items())]
        post_last(comm, TRAINED, " ".join(words))
        if text := _trained_elsewhere(comm, comm.reductions):
            raise StateError(text)


def _trained_of(group: ParamGroup) -> tuple[str, _Trained]:
    names = [slot.name for slot in group.slots]
    key = hashlib.sha256(repr((group.name, names)).encode()).hexdigest()[:16]
    bits = sum(_current(slot).requires_grad << index for index, slot in enumerate(group.slots))
    return key, _Trained(group.name, names, bits)


def _trained_elsewhere(comm: Comm, reduction: int | None = None, when: str = "") -> str:
    """A parameter that this rank and a neighbor do not both train, as far as they have posted it, at the same
    ``reduction`` if that is given, and else ``when``, as the text says; empty if there is none."""
    for neighbor in _adjacent(comm) if comm in _trained else ():
        number, *words = (last_posted_by(comm, neighbor, TRAINED) or "-1").split()
        if reduction not in (None, int(number)):
            continue
        theirs = {key: int(bits, 16) for key, _, bits in (word.partition(":") for word in words)}
        for key, own in _trained[comm].items():
            if differ := own.bits ^ theirs.get(key, own.bits):
                index = differ.bit_length() - 1
                ranks = [comm.global_rank(rank) for rank in (comm.rank, neighbor)]
                trains, does_not = ranks if own.bits >> index & 1 else ranks[::-1]
                return (
                    f"{when}parameter {own.parameters[index]!r} of unit {own.unit!r} required gradients on rank "
                    f"{trains} and not on rank {does_not}: set requires_grad alike on all, before the same backward"
                )
    return ""


def by_comm(sharing: Iterable[tuple[Comm, ParamGroup]]) -> Mapping[Comm, Sequence[ParamGroup]]:
    """The groups that communicate over each."""
    found: defaultdict[Comm, list[ParamGroup]] = defaultdict(list)
    for comm, group in sharing:
        found[comm].append(group)
    return found


def neighbors(comm: Comm, number: str) -> Iterator[tuple[int, Counter[str]]]:
    """The two ranks next to this one, numbered as in the default group, with the words that they have posted by now
    under ``number``, if they have."""
    for neighbor in _adjacent(comm):
        if (posted := posted_by(comm, neighbor, number)) is not None:
            yield comm.global_rank(neighbor), Counter(posted.split())


def _adjacent(comm: Comm) -> Sequence[int]:
    return sorted({(comm.rank + step) % comm.size for step in (-1, 1)} - {comm.rank})


@contextlib.contextmanager
def doing(*words: object) -> Iterator[None]:
    """Let errors inside, of what `explained` surrounds, tell that this was being done.

    Args:
        words: joined only when something fails, since to print a path of the user's may raise. Inside of another such
            context they do not count: the user called the verb of that one.
    """
    token = _verb.set(_verb.get() or words)
    try:
        yield
    finally:
        _verb.reset(token)


@contextlib.contextmanager
def explained(what: str, *comms: Comm) -> Iterator[None]:
    """Explain an error of a collective, beside which nothing runs inside that users write.

    Args:
        what: is being communicated; what a surrounding `doing` tells is told in its place.
        comms: as of `explain_failure`.
    """
    try:
        yield
    except RuntimeError as error:
        explain_failure(error, " ".join(map(str, _verb.get())) or what, *comms, rule=VERBS_ALIKE)
        raise


@contextlib.contextmanager
def communicating(what: str, *comms: Comm) -> Iterator[None]:
    """`explained`, for collectives over ``comms`` themselves: when it ends their ranks have met, here or right before,
    so that none waits any more because of what failed earlier."""
    with explained(what, *comms):
        yield
    forget_failures(comms)


def explain_failure(error: RuntimeError, what: str, *comms: Comm, rule: str = UNITS_ALIKE) -> None:
    """Add to an ``error`` what was being communicated, with which rank if that is known, and the cause if others have
    told it; if not, tell them, unless what this one has told before is the cause of this too.

    Args:
        error: of a collective.
        what: was being communicated.
        comms: the collective was one of these; the first, if it was of messages between two ranks.
        rule: that another rank may have broken.
    """
    if (peer := failed_peer(error)) is not None and (rank := comms[0].known_rank(peer)) is not None:
        what = f"{what}, waiting for rank {rank}"
    causes = (cause(comm) for cause in (_difference, _failure_elsewhere) for comm in comms)
    found = next(filter(None, causes), "")
    if not found:
        untold = [comm for comm in comms if comm not in told_failures]
        tell_failure(f"while {what}: {rule}", untold)
        # Of ranks that wait for each other, and so fail together, the last to tell finds the first.
        found = next(filter(None, (_failure_elsewhere(comm, "at the same time") for comm in comms)), "")
    trained = next(filter(None, (_trained_elsewhere(comm, when="when they told it last, ") for comm in comms)), "")
    explain(error, what, "; ".join(filter(None, (found, trained))), rule)


def sized(tensors: Iterable[tuple[torch.dtype, int]]) -> str:
    """How many elements of which dtypes ``tensors`` have, each given by both: what ranks may differ in."""
    totals: Counter[torch.dtype] = Counter()
    for dtype, numel in tensors:
        totals[dtype] += numel
    return ", ".join(f"{numel} elements of {dtype}" for dtype, numel in totals.items())


def said_by(error: BaseException) -> str:
    """The kind of ``error``, and the first line of its message."""
    message = ""
    # To print what a user made may fail, or wait for a device: an exception may carry tensors.
    if all(isinstance(argument, str | int | float) for argument in error.args):
        with contextlib.suppress(Exception):
            message = str(error).partition("\n")[0][:MESSAGE_LENGTH]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def tell_failure(text: str, comms: Iterable[Comm]) -> None:
    """Let other ranks that fail later, of those of ``comms``, tell how this one did."""
    for comm in comms:
        if comm.size > 1:
            post_failure(comm, text)


def forget_failures(comms: Iterable[Comm]) -> None:
    """The ranks of ``comms`` have communicated since this one failed, if it did: none of them waits because of that."""
    for comm in comms if told_failures else ():
        post_failure(comm, "")


def _failure_elsewhere(comm: Comm, when: str = "before that") -> str:
    if comm.size == 1 or (found := failure_elsewhere(comm)) is None:
        return ""
    rank, text = found
    return f"rank {rank} failed {when}, {text}"


def _difference(comm: Comm) -> str:
    """What this rank and its neighbors have wrapped otherwise, as far as they have posted it; empty if nothing."""
    if comm not in _posted:
        return ""
    number, counts, descriptions = _posted[comm]
    for rank, theirs in neighbors(comm, number):
        if theirs == counts:
            continue
        own = comm.global_rank(comm.rank)
        only_here = next(iter(counts - theirs), None)
        if only_here is None:
            what = f"rank {rank} has {(theirs - counts).total()} more units than rank {own}"
        else:
            what = f"rank {own} has {descriptions[only_here]}, and rank {rank} has no unit like that"
        return (
            f"ranks do not share one model: {what}. Build the same modules on all ranks, and call fully_shard with the "
            "same options there"
        )
    return ""


def signature(group: ParamGroup) -> str:
    """The same for all groups whose gathers and reductions are alike."""
    parts = [(_shape(slot), slot.layout.dim, _dtype(slot)) for slot in group.slots]
    precision = group.policy.precision
    return hashlib.sha256(repr((parts, precision.param_dtype, precision.reduce_dtype)).encode()).hexdigest()[:16]


def _described(group: ParamGroup) -> str:
    shown = [f"{slot.name} {_shape(slot)}" for slot in group.slots[:NAMED_PARAMETERS]]
    if len(group.slots) > NAMED_PARAMETERS:
        shown.append("…")
    return f"unit {group.name!r} with {', '.join(shown)} in {', '.join(dict.fromkeys(map(_dtype, group.slots)))}"


def _shape(slot: Slot) -> tuple[int, ...]:
    return tuple(slot.layout.shape)


def _dtype(slot: Slot) -> str:
    """Dtype that the parameter will be gathered from."""
    return str(local_of(_current(slot)).dtype)


def _current(slot: Slot) -> torch.Tensor:
    """The sharded parameter that counts: what is registered, since what was converted or replaced is taken over with
    the next gather, on some ranks earlier."""
    try:
        registered = slot.registered()
    except StateError:  # it is missing, which is told when the unit runs
        registered = slot.sharded
    return slot.sharded if registered is slot.unsharded else registered
