"""Which parameters can be stepped as one: they lie one after the other, and so do their gradients and their state."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..core.device import (
    copy_each,
    get_local,
    get_spec,
    local_of,
    shares_storage,
    spec_of,
    wrap_local,
)
from ..core.extension import is_extended
from ..core.parameter import local_gradient, name_of, owner_of
from ..core.shards import Shards

States = MutableMapping[torch.Tensor, dict[str, Any]]
"""State of an optimizer, by parameter."""


class Member:
    """One parameter, and where this rank's part of it lies.

    Args:
        parameter: a DTensor, or a flat shard.
        index: in its param group, whole parameters left out.
        reserved: bytes of the shards' buffer that nobody else uses, padding included.
    """

    __slots__ = ("address", "end", "index", "local", "parameter", "position", "spec", "state", "values")

    def __init__(self, parameter: torch.Tensor, index: int, reserved: int = 0):
        self.parameter, self.index, self.local = parameter, index, local_of(parameter)
        self.spec = spec_of(parameter) if isinstance(parameter, DTensor) else None
        self.address = self.local.data_ptr()
        # Not the address, which an empty tensor does not have.
        self.position: int = 0 if self.local.is_meta else _position(self.local)
        self.end = self.position + max(reserved, self.local.nbytes)
        self.state: dict[str, Any] | None = None
        self.values: tuple[Any, ...] = ()

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """``local``, this rank's part of something of the parameter's shape, as state of the parameter."""
        if self.spec is None:
            return local
        return wrap_local(local, self.spec)

    def has_element_state(self, name: str, value: Any) -> bool:
        """Whether a value of the state has one number for each element.

        Raises:
            ValueError: if it does, but is not cut as the parameter is.
        """
        if not isinstance(value, torch.Tensor) or value.shape != self.parameter.shape or name == "step":
            return False
        if self.spec is not None and not isinstance(value, DTensor):
            raise ValueError(
                f"state {name!r} of {name_of(self.parameter)} is a whole tensor, and the parameter is sharded: load it "
                "by shardwise.load or torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which cut it"
            )
        if self.spec is not None and isinstance(value, DTensor) and value.placements != self.spec.placements:
            raise ValueError(
                f"state {name!r} of {name_of(self.parameter)} has placements {value.placements}, and the parameter "
                f"{self.spec.placements}: redistribute the state before it is loaded"
            )
        return True

    def keeps(self, states: States) -> bool:
        """Whether the state is what was noted, with none of its values replaced."""
        state = states.get(self.parameter)
        if state is not self.state:
            return False
        return state is None or (len(state) == len(self.values) and all(map(is_, state.values(), self.values)))

    def note(self, states: States) -> None:
        """Remember the state as it is."""
        self.state = states.get(self.parameter)
        self.values = tuple(self.state.values()) if self.state is not None else ()


def local_gradients(members: Sequence[Member]) -> list[torch.Tensor | None] | None:
    """This rank's parts of the gradients, cut as the parameters are; None if a parameter has other memory than before.

    Raises:
        ValueError: as of `local_gradient`.
    """
    if (made_by_engine := _gradients_of_engine(members)) is not None:
        return made_by_engine
    gradients: list[torch.Tensor | None] = []
    for member in members:
        parameter, spec = member.parameter, member.spec
        if local_of(parameter) is not member.local or (spec is None and parameter.data_ptr() != member.address):
            return None
        gradient = parameter.grad
        if gradient is not None and spec is not None:
            gradient = local_gradient(parameter, gradient)
        gradients.append(gradient)
    return gradients


def _gradients_of_engine(members: Sequence[Member]) -> list[torch.Tensor | None] | None:
    """What `local_gradients` gives if the engine made all gradients, without a line of Python for each; else None."""
    parameters: list[Any] = [member.parameter for member in members]
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    try:
        same_cuts = all(map(is_, map(get_spec, gradients), [member.spec for member in members]))
        in_place = all(map(is_, map(get_local, parameters), [member.local for member in members]))
        return [*map(get_local, gradients)] if same_cuts and in_place else None
    except AttributeError:  # no gradient, or no DTensor
        return None


def _position(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def members_of(parameters: Sequence[torch.Tensor]) -> tuple[list[Member], list[torch.Tensor]]:
    """Those of ``parameters`` of which this rank has a part, and those that are whole, or whose parts are tensors of
    classes of their own."""
    members: list[Member] = []
    others: list[torch.Tensor] = []
    reserved: dict[int, int] = {}
    seen: set[int] = set()
    for parameter in parameters:
        owner = owner_of(parameter)
        if isinstance(owner, Shards) and id(owner) not in seen:
            seen.add(id(owner))
            for slot in owner.slots:
                tensor = slot.buffer.layout.tensors[slot.index]
                if not slot.is_borrowed:
                    reserved[id(slot.sharded)] = tensor.reserved(slot.buffer.comm.rank) * slot.buffer.local.itemsize
        if (owner is not None or isinstance(parameter, DTensor)) and not is_extended(local_of(parameter)):
            members.append(Member(parameter, len(members), reserved.get(id(parameter), 0)))
        else:
            others.append(parameter)
    return members, others


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
        and _position(gradient) - _position(one) == member.position - before.position
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
        return type(value) is type(compared) and not _is_container(value) and bool(value == compared)
    if (value.dtype, value.device) != (compared.dtype, compared.device):
        return False
    return per_element or (value.shape == compared.shape and torch.equal(local_of(value), local_of(compared)))


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


class Gradients:
    """This step's gradients of a param group's members, and where they lie.

    Args:
        tensors: as `local_gradients` gives them.
    """

    __slots__ = ("are_contiguous", "pointers", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor | None]):
        self.tensors = tensors
        self.pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.are_contiguous = all(tensor is None or tensor.is_contiguous() for tensor in tensors)


class Piece:
    """Members of a run that are stepped as one tensor, in this step and while gradients come like this.

    Args:
        members: one after the other in memory, with gradients and states that lie likewise.
        states: of the members; the values of each become views of what the piece has.
    """

    def __init__(self, members: Sequence[Member], states: States):
        self.members, self.states = members, states
        filled = [member for member in members if member.local.numel()]
        self.anchor = filled[0] if filled else members[0]
        last = filled[-1] if filled else members[0]
        self.numel = (last.position + last.local.nbytes - self.anchor.position) // last.local.itemsize
        local = self.anchor.local.detach()
        self.flat = local if len(members) == 1 else local.as_strided((self.numel,), (1,))
        self.state: dict[str, Any] = {}
        self._published: dict[str, Any] = {}
        self._shared: dict[str, _Shared] = {}
        self._filled = [member.index for member in filled]
        self._empty = [member.index for member in members if not member.local.numel()]
        # Bytes from the anchor to each.
        self._shifts = [member.position - self.anchor.position for member in filled]

    # -- Gradients

    def take(self, gradients: Gradients) -> bool:
        """Let the flat tensor have this step's gradients; False if they do not lie as the parameters do.

        Args:
            gradients: of the whole param group.
        """
        first, pointers = gradients.tensors[self.anchor.index], gradients.pointers
        start = pointers[self.anchor.index]
        if first is None or start is None:
            return False
        if len(self.members) == 1:
            self.flat.grad = first
            return True
        if [pointers[index] for index in self._filled] != [start + shift for shift in self._shifts]:
            return False
        if any(pointers[index] is None for index in self._empty):
            return False
        if not (gradients.are_contiguous or self._are_contiguous(gradients)):
            return False
        # The starts are in place, so all is within one storage if the end is.
        storage = first.untyped_storage()
        if start + self.numel * first.itemsize > storage.data_ptr() + storage.nbytes():
            return False
        self.flat.grad = first.as_strided((self.numel,), (1,))
        return True

    def _are_contiguous(self, gradients: Gradients) -> bool:
        own = (gradients.tensors[index] for index in self._filled)
        return all(gradient is not None and gradient.is_contiguous() for gradient in own)

    # -- State

    @property
    def keeps_state(self) -> bool:
        """Whether only the optimizer has replaced any of the members' state."""
        return all(member.keeps(self.states) for member in self.members)

    @property
    def is_unwritten(self) -> bool:
        """Whether only the optimizer has written the numbers that its members share, such as step counts. (State with
        one number for each element is the piece's own memory, so writes to it need no notice.)"""
        return all(shared.is_unwritten for shared in self._shared.values())

    def adopt_state(self) -> None:
        """Take over what the members' state is now."""
        first = self.members[0]
        state = self.states.get(first.parameter)
        for name, value in (state or {}).items():
            if not first.has_element_state(name, value):
                self.state[name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            parts = [local_of(self.states[member.parameter][name]) for member in self.members]
            self.state[name] = parts[0] if len(parts) == 1 else self._joined(parts)
        if state is not None:
            self.publish()

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The memory of ``parts``, if they lie as the parameters do, else a copy."""
        filled = [(m, part) for m, part in zip(self.members, parts, strict=True) if part.numel()]
        if not filled:
            return parts[0].new_zeros(self.numel)
        first, itemsize = filled[0][1], self.anchor.local.itemsize
        expected = [(m.position - self.anchor.position) // itemsize * first.itemsize for m, _ in filled]
        start = _position(first)
        in_place = all(
            part.is_contiguous() and shares_storage(first, part) and _position(part) - start == shift
            for (_, part), shift in zip(filled, expected, strict=True)
        )
        if in_place:
            return first.as_strided((self.numel,), (1,))
        flat = first.new_zeros(self.numel)
        copy_each([self._view(member, flat) for member, _ in filled], [part for _, part in filled])
        return flat

    def _view(self, member: Member, flat: torch.Tensor) -> torch.Tensor:
        if len(self.members) == 1:
            return flat
        local = member.local
        offset = (member.position - self.anchor.position) // local.itemsize if local.numel() else 0
        return flat.as_strided(local.shape, local.stride(), flat.storage_offset() + offset)

    @property
    def is_new(self) -> bool:
        """Whether it had no state yet."""
        return not self._published

    def publish(self) -> None:
        """Give each member its part of the state, where the optimizer made or replaced any."""
        for shared in self._shared.values():
            shared.spread()
        if len(self.state) == len(self._published) and all(map(is_, self.state.values(), self._published.values())):
            return
        own = [self.states.setdefault(member.parameter, {}) for member in self.members]
        for name in self._published.keys() - self.state.keys():
            self._shared.pop(name, None)
            for state in own:
                state.pop(name, None)
        for name, value in list(self.state.items()):
            if name not in self._published or value is not self._published[name]:
                for state, part in zip(own, self._parts(name, value), strict=True):
                    state[name] = part
        self._published = dict(self.state)
        for member in self.members:
            member.note(self.states)

    def _parts(self, name: str, value: Any) -> Sequence[Any]:
        """What each member has of ``value``."""
        self._shared.pop(name, None)
        if not isinstance(value, torch.Tensor):
            if _is_container(value):
                raise ValueError(self._not_elementwise(name, f"a {type(value).__name__}"))
            return [value] * len(self.members)
        if value.shape == self.flat.shape and name != "step":
            return [member.wrap(self._view(member, value)) for member in self.members]
        if value.numel() > 1:
            raise ValueError(self._not_elementwise(name, f"of shape {tuple(value.shape)}"))
        if len(self.members) == 1:
            return [value]
        shared = self._shared[name] = _Shared(value, len(self.members))
        self.state[name] = shared.first
        return shared.parts

    def _not_elementwise(self, name: str, what: str) -> str:
        return (
            f"state {name!r} of {self.numel} elements stepped as one is {what}, so the optimizer does not step each "
            "element by itself: use it as it is, not by shardwise.optim.flat"
        )


class _Shared:
    """One number of the state of a piece, of which each member has a tensor of its own.

    Args:
        value: of one element.
        count: of members.
    """

    def __init__(self, value: torch.Tensor, count: int):
        self._all = value.expand(count, *value.shape).clone()
        self.parts: Sequence[torch.Tensor] = self._all.unbind()
        self.first = self.parts[0]
        self._others = self._all[1:]
        self._version = self._all._version

    @property
    def is_unwritten(self) -> bool:
        """Whether it was not written since the last `spread`."""
        return self._all._version == self._version

    def spread(self) -> None:
        """Copy the first member's number, which was stepped, to the others."""
        self._others.copy_(self.first)
        self._version = self._all._version


class Run:
    """Parameters that lie one after the other, and the pieces in which they are stepped.

    Args:
        members: as `runs_of` gives them.
    """

    def __init__(self, members: Sequence[Member]):
        self.members = members
        self.pieces: list[Piece] = []
        self._absent: list[Member] = list(members)

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
        self.pieces, self._absent = [], list(self.members)  # if a state is refused, the next step asks again
        for members in self._cut(present, states):
            piece = Piece(members, states)
            piece.adopt_state()
            for member in members:
                member.note(states)
            taken = piece.take(gradients)
            assert taken
            self.pieces.append(piece)
        self._absent = [member for member in self.members if present[member.index] is None]

    def _cut(self, gradients: Sequence[torch.Tensor | None], states: States) -> list[list[Member]]:
        """Members with gradients, cut where they cannot be stepped as one."""
        pieces: list[list[Member]] = []
        last: tuple[Member, torch.Tensor] | None = None  # of the piece, with elements if any has
        for member in self.members:
            gradient = gradients[member.index]
            if gradient is None:
                last = None
            elif last is not None and _alike(last[0], member, states) and _gradients_follow(last, member, gradient):
                pieces[-1].append(member)
                last = (member, gradient) if member.local.numel() else last
            else:
                pieces.append([member])
                last = member, gradient
        return pieces
