"""Which parameters are stepped as one.

Those that lie one after the other in memory, if their gradients and state do so too. On CPUs also several such runs, if
they are so small that copying them together costs less than stepping each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..core.device import local_of, shares_storage
from ..core.norms import SMALL
from .members import Member, States, position_of
from .pieces import Gradients, Piece, Stretch, is_container

JOINED_PIECE = 256 * 2**10
"""Bytes that are copied together at most: the memory of temporary tensors of 1 MiB is mapped anew in each step."""
JOINED_GROUP = 4 * 2**20
"""Bytes of a param group that are copied at most, by which the memory of the copies is bounded."""


def bundles_of(members: Sequence[Member]) -> list[Bundle]:
    """Runs of ``members``, small ones of a CPU together. (On accelerators ``foreach`` steps all runs in few calls.)"""
    runs = runs_of(members)
    left = JOINED_GROUP if _lie_apart(runs) else 0
    apart: list[list[Member]] = []
    together: defaultdict[torch.dtype, list[list[list[Member]]]] = defaultdict(list)
    for run in runs:
        first, size = run[0].local, _nbytes(run)
        is_small = size <= min(SMALL * first.itemsize, left)
        if not (is_small and first.is_cpu and first.is_contiguous()):
            apart.append(run)
            continue
        left -= size
        of_dtype = together[first.dtype]
        if not of_dtype or sum(map(_nbytes, of_dtype[-1])) + size > JOINED_PIECE:
            of_dtype.append([])
        of_dtype[-1].append(run)
    joined = [Bundle(runs, joins=True) for of_dtype in together.values() for runs in of_dtype]
    return [Bundle([run], joins=False) for run in apart] + joined


def _nbytes(run: Sequence[Member]) -> int:
    return run[-1].end - run[0].position


def _lie_apart(runs: Sequence[Sequence[Member]]) -> bool:
    """Whether no memory is in two runs, of which one would overwrite what the other's step wrote."""
    ordered = sorted(runs, key=lambda run: run[0].position)
    return all(one[-1].end <= other[0].position for one, other in pairwise(ordered))


def runs_of(members: Sequence[Member]) -> list[list[Member]]:
    """Cut ``members`` into runs that lie one after the other in one memory, with nothing between but padding; in an
    order that all ranks share."""
    runs: list[list[Member]] = []
    for member in sorted(members, key=lambda member: member.position):
        last = runs[-1][-1] if runs else None
        if last is not None and _follows(last, member):
            runs[-1].append(member)
        else:
            runs.append([member])
    return sorted(runs, key=lambda run: run[0].index)


def _follows(last: Member, member: Member) -> bool:
    one, other = last.local, member.local
    return (
        (one.dtype, one.device) == (other.dtype, other.device)
        and last.end == member.position
        and one.is_contiguous()
        and other.is_contiguous()
        and shares_storage(one, other)
    )


def _gradients_follow(last: tuple[Member, torch.Tensor], member: Member, gradient: torch.Tensor) -> bool:
    """Whether the gradients lie as the parameters do; those without elements lie anywhere."""
    before, one = last
    if not (one.numel() and gradient.numel()):
        return True
    return (
        one.is_contiguous()
        and gradient.is_contiguous()
        and position_of(gradient) - position_of(one) == member.position - before.position
        and shares_storage(one, gradient)
    )


def _alike(last: Member, member: Member, states: States) -> bool:
    """Whether one state can stand for that of both: the same kinds of values, and the same values for whole tensors."""
    one, other = states.get(last.parameter) or {}, states.get(member.parameter) or {}
    if list(one) != list(other):
        return False
    return all(_same_kind(name, (last, one[name]), (member, other[name])) for name in one)


def _same_kind(name: str, one: tuple[Member, Any], other: tuple[Member, Any]) -> bool:
    (first, value), (second, compared) = one, other
    per_element = first.has_element_state(name, value)
    if per_element != second.has_element_state(name, compared):
        return False
    if not isinstance(value, torch.Tensor) or not isinstance(compared, torch.Tensor):
        return type(value) is type(compared) and not is_container(value) and bool(value == compared)
    if (value.dtype, value.device) != (compared.dtype, compared.device):
        return False
    return per_element or (value.shape == compared.shape and torch.equal(local_of(value), local_of(compared)))


class Bundle:
    """Runs that are stepped together, and the pieces in which they are.

    Args:
        runs: as `bundles_of` gives them.
        joins: whether what does not lie together may be copied together.
    """

    def __init__(self, runs: Sequence[Sequence[Member]], joins: bool):
        self.pieces: list[Piece] = []
        self._runs, self._joins = runs, joins
        self._absent = self._members = [member for run in runs for member in run]

    def prepare(self, gradients: Gradients, states: States, untouched: bool) -> None:
        """Take this step's gradients, and what was written into the state.

        Args:
            gradients: of the members of the param group.
            states: of the optimizer.
            untouched: whether nothing was replaced there since the last step.
        """
        fits = all(
            piece.states is states and (untouched or piece.keeps_state) and piece.is_unwritten and piece.take(gradients)
            for piece in self.pieces
        )
        present = gradients.tensors
        if fits and all(present[member.index] is None for member in self._absent):
            return
        self.pieces, self._absent = [], self._members  # if a state is refused, the next step asks again
        for stretches in self._joined(present, states):
            piece = Piece(stretches, states)
            piece.adopt_state()
            for member in piece.members:
                member.note(states)
            taken = piece.take(gradients)
            assert taken
            self.pieces.append(piece)
        self._absent = [member for member in self._members if present[member.index] is None]

    def _joined(self, gradients: Sequence[torch.Tensor | None], states: States) -> list[list[Stretch]]:
        """Stretches with gradients, those together that are stepped as one."""
        joined: list[list[Stretch]] = []
        last: Member | None = None  # that a stretch may be joined to
        for stretch in (Stretch(members) for run in self._runs for members in _cut(run, gradients, states)):
            own = (gradients[member.index] for member in stretch.members)
            can_join = self._joins and all(gradient is not None and gradient.is_contiguous() for gradient in own)
            if last is not None and can_join and _alike(last, stretch.members[0], states):
                joined[-1].append(stretch)
            else:
                joined.append([stretch])
            last = stretch.members[0] if can_join else None
        return joined


def _cut(run: Sequence[Member], gradients: Sequence[torch.Tensor | None], states: States) -> list[list[Member]]:
    """Members with gradients, cut where they cannot be stepped as one memory."""
    stretches: list[list[Member]] = []
    last: tuple[Member, torch.Tensor] | None = None  # of the stretch, with elements if any has
    for member in run:
        gradient = gradients[member.index]
        if gradient is None:
            last = None
        elif last is not None and _alike(last[0], member, states) and _gradients_follow(last, member, gradient):
            stretches[-1].append(member)
            last = (member, gradient) if member.local.numel() else last
        else:
            stretches.append([member])
            last = member, gradient
    return stretches
