"""Parameters of an optimizer of which this rank has a part, and where it lies."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..core.device import get_local, get_spec, local_of, spec_of, wrap_local
from ..core.extension import is_extended
from ..core.parameter import local_gradient, name_of, owner_of

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
        self.position: int = 0 if self.local.is_meta else position_of(self.local)
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
        if self.spec is None:
            return True
        if not isinstance(value, DTensor):
            raise ValueError(
                f"state {name!r} of {name_of(self.parameter)} is a whole tensor, and the parameter is sharded: load it "
                "by shardwise.load or torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which cut it"
            )
        if value.placements != self.spec.placements:
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


def position_of(tensor: torch.Tensor) -> int:
    """Where ``tensor`` starts in memory, in bytes, also if it is empty."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def refuse_repeated(parameters: Sequence[torch.Tensor]) -> None:
    """
    Raises:
        ValueError: naming a parameter that is there twice.
    """
    seen: set[int] = set()
    for parameter in parameters:
        if id(parameter) in seen:
            raise ValueError(
                f"{name_of(parameter)} is twice in one param group, and torch would step it twice with one state, "
                "which one step of flat shards does not: list each parameter once"
            )
        seen.add(id(parameter))


def members_of(parameters: Sequence[torch.Tensor]) -> tuple[list[Member], list[torch.Tensor]]:
    """Those of ``parameters`` of which this rank has a part, and those that are whole, or whose parts are tensors of
    classes of their own.

    Raises:
        ValueError: as of `refuse_repeated`.
    """
    refuse_repeated(parameters)
    members: list[Member] = []
    others: list[torch.Tensor] = []
    reserved: dict[int, int] = {}
    seen: set[int] = set()
    for parameter in parameters:
        owner = owner_of(parameter)
        if owner is not None and id(owner) not in seen:
            seen.add(id(owner))
            for slot in owner.slots:
                tensor = slot.layout
                if not slot.is_borrowed:
                    reserved[id(slot.sharded)] = tensor.reserved(slot.buffer.comm.rank) * slot.buffer.local.itemsize
        if (owner is not None or isinstance(parameter, DTensor)) and not is_extended(local_of(parameter)):
            members.append(Member(parameter, len(members), reserved.get(id(parameter), 0)))
        else:
            others.append(parameter)
    return members, others
