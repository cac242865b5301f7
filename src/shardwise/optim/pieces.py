"""What is stepped as one tensor, and how parameters share its state."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..core.buffer import allocate_storage, free_storage
from ..core.device import copy_each, get_version, local_of, shares_storage
from .members import Member, States, position_of


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


class Stretch:
    """Members one after the other in memory, whose gradients lie likewise.

    Args:
        members: at least one; a single one may lie in its memory as it likes.
    """

    __slots__ = ("_empty", "_filled", "_shifts", "anchor", "flat", "members", "numel")

    def __init__(self, members: Sequence[Member]):
        self.members = members
        filled = [member for member in members if member.local.numel()]
        self.anchor = filled[0] if filled else members[0]
        last = filled[-1] if filled else members[0]
        self.numel = (last.position + last.local.nbytes - self.anchor.position) // last.local.itemsize
        local = self.anchor.local.detach()
        self.flat = local if len(members) == 1 else local.as_strided((self.numel,), (1,))
        self._filled = [member.index for member in filled]
        self._empty = [member.index for member in members if not member.local.numel()]
        # Bytes from the anchor to each.
        self._shifts = [member.position - self.anchor.position for member in filled]

    def offsets(self) -> list[int]:
        """Where each member starts, in elements."""
        itemsize = self.anchor.local.itemsize
        return [(m.position - self.anchor.position) // itemsize if m.local.numel() else 0 for m in self.members]

    def gradient(self, gradients: Gradients) -> torch.Tensor | None:
        """This step's gradient of the flat tensor, in its own memory; None if the members' do not lie as they do.

        Args:
            gradients: of the whole param group.
        """
        first, pointers = gradients.tensors[self.anchor.index], gradients.pointers
        start = pointers[self.anchor.index]
        if first is None or start is None or len(self.members) == 1:
            return first
        if [pointers[index] for index in self._filled] != [start + shift for shift in self._shifts]:
            return None
        if self._empty and any(pointers[index] is None for index in self._empty):
            return None
        if not (gradients.are_contiguous or self._are_contiguous(gradients)):
            return None
        try:
            return first.as_strided((self.numel,), (1,))
        except RuntimeError:  # past the end of its storage: what starts there lies in another
            return None

    def _are_contiguous(self, gradients: Gradients) -> bool:
        own = (gradients.tensors[index] for index in self._filled)
        return all(gradient is not None and gradient.is_contiguous() for gradient in own)


class Piece:
    """Members that are stepped as one tensor, in this step and while gradients come like this.

    Of one stretch it is the members' own memory. Several are copied into one tensor before the step, and back after it.

    Args:
        stretches: if several, of contiguous members of one dtype and device.
        states: of the members, which are alike; the values of each become views of what the piece has.
    """

    def __init__(self, stretches: Sequence[Stretch], states: States):
        self.states = states
        self.members = [member for stretch in stretches for member in stretch.members]
        self.state: dict[str, Any] = {}
        self._stretches = stretches
        self._offsets: list[int] = []
        self._gradients: list[torch.Tensor] = []
        self._published: dict[str, Any] = {}
        self._shared: dict[str, _Shared] = {}
        start = 0
        for stretch in stretches:
            self._offsets += [start + offset for offset in stretch.offsets()]
            start += stretch.numel
        self.numel = start
        self.flat = stretches[0].flat
        self._sources: list[torch.Tensor] = []
        """What is copied together, if there are several stretches."""
        self._has_copies = False
        if len(stretches) > 1:
            self._sources = [stretch.flat.view(-1) for stretch in stretches]
            self.flat = self.flat.new_empty(start)
            self._copies = self.flat.split([source.numel() for source in self._sources])

    @property
    def anchors(self) -> list[torch.Tensor]:
        """A parameter of each stretch."""
        return [stretch.anchor.parameter for stretch in self._stretches]

    # -- Values and gradients

    def take(self, gradients: Gradients) -> bool:
        """Note this step's gradients; False if they do not lie as the parameters do.

        Args:
            gradients: of the whole param group.
        """
        found = [stretch.gradient(gradients) for stretch in self._stretches]
        taken = [gradient for gradient in found if gradient is not None]
        if len(taken) < len(found) or (self._sources and not all(gradient.is_contiguous() for gradient in taken)):
            return False
        self._gradients = taken
        return True

    def begin(self) -> None:
        """Let the flat tensor have this step's values and gradients."""
        if self._sources:
            allocate_storage(self.flat)
            torch.cat(self._sources, out=self.flat)
            self._has_copies = True
            self.flat.grad = torch.cat([gradient.view(-1) for gradient in self._gradients])
        else:
            [self.flat.grad] = self._gradients
        self._gradients = []

    def end(self) -> None:
        """Give the members their values, and drop the gradient."""
        self.flat.grad = None
        if self._has_copies:
            self._has_copies = False  # before the copy, which is not made once more after an interruption
            copy_each(self._sources, self._copies)
        if self._sources:
            # The same tensor in each step, as compiled ones need, but nothing is held between them.
            free_storage(self.flat)

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
        """The memory of ``parts``, if they lie as the members do, else a copy."""
        filled = [(offset, part) for offset, part in zip(self._offsets, parts, strict=True) if part.numel()]
        if not filled:
            return parts[0].new_zeros(self.numel)
        start, first = filled[0]
        in_place = all(
            part.is_contiguous()
            and shares_storage(first, part)
            and position_of(part) - position_of(first) == (offset - start) * first.itemsize
            for offset, part in filled
        )
        if in_place:
            return first.as_strided((self.numel,), (1,))
        flat = first.new_zeros(self.numel)
        views = [view for view in self._views(flat) if view.numel()]
        copy_each(views, [part for _, part in filled])
        return flat

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each member's part of ``flat``."""
        if len(self.members) == 1:
            return [flat]
        first, locals_ = flat.storage_offset(), [member.local for member in self.members]
        return [
            flat.as_strided(local.shape, local.stride(), first + offset)
            for offset, local in zip(self._offsets, locals_, strict=True)
        ]

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
            if is_container(value):
                raise ValueError(self._not_elementwise(name, f"a {type(value).__name__}"))
            return [value] * len(self.members)
        if value.shape == self.flat.shape and name != "step":
            return [member.wrap(view) for member, view in zip(self.members, self._views(value), strict=True)]
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
        self._written = get_version(self._all)

    @property
    def is_unwritten(self) -> bool:
        """Whether it was not written since the last `spread`."""
        return bool(get_version(self._all) == self._written)

    def spread(self) -> None:
        """Copy the first member's number, which was stepped, to the others."""
        self._others.copy_(self.first)
        self._written = get_version(self._all)


def is_container(value: Any) -> bool:
    """Whether a value of a state is of several others."""
    return isinstance(value, (dict, list, tuple))
