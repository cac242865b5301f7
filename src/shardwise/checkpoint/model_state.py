"""A model's part of a checkpoint: what is saved of it, and how it gets it back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..core.errors import StateError
from ..core.group import ParamGroup
from ..core.module import unit_of
from .names import listed, parameter_names, state_names
from .reading import StoredData


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model`` by plain names; the sharded parameters are registered then.

    Raises:
        StateError: naming what is on the meta device, or without values.
    """
    for group in _groups_of(model):
        group.shards.check_materialized()
    state = model.state_dict()
    found = {name: state[key] for name, key in state_names(model, state).items()}
    if empty := [name for name, value in found.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise StateError(f"{listed(empty)} are on the meta device: initialize or load them before saving")
    return found


@dataclass
class Misfit:
    """Where a model and a checkpoint differ.

    Args:
        missing: names that the checkpoint does not have.
        unexpected: names that the model, or the part of it that is on this rank, does not have.
        other: messages about names that both have.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def check_fit(by_rank: Iterable[Misfit], strict: bool) -> None:
    """
    Args:
        by_rank: of every rank; a rank may have only a part of the model (a pipeline stage).
        strict: whether names that only one of both has are an error.

    Raises:
        ValueError: listing all that does not fit.
    """
    misfits = list(by_rank)
    unexpected = [name for name in misfits[0].unexpected if all(name in misfit.unexpected for misfit in misfits)]
    missing = dict.fromkeys(name for misfit in misfits for name in misfit.missing)
    problems = list(dict.fromkeys(text for misfit in misfits for text in misfit.other))
    if strict and unexpected:
        problems.insert(0, f"the model does not have {listed(unexpected)}")
    if strict and missing:
        problems.insert(0, f"the checkpoint does not have {listed(missing)}")
    if problems:
        raise ValueError("the checkpoint does not fit the model: " + "; ".join(problems[:12]))


class SavedModel:
    """What a checkpoint has of a model.

    Args:
        stored: the checkpoint's data.
        model: to load into.
        preferred: what its names begin with in checkpoints of ours; elsewhere what most names are found below.

    Raises:
        ValueError: if the checkpoint has nothing of it.
    """

    def __init__(self, stored: StoredData, model: nn.Module, preferred: str):
        self._model, self._kinds = model, stored.kinds
        self._read_state()
        self._prefix = _best_prefix(self._values, self._kinds, preferred)
        #: Names that both have.
        self.names = [name for name in self._values if self._prefix + name in self._kinds]
        if self._values and not self.names:
            raise ValueError(
                f"the checkpoint has no model; it has {stored.tops()}, and {listed(self._values)} were looked for"
            )
        # Below no prefix there may be anything.
        self._saved = [key[len(self._prefix) :] for key in stored.below(self._prefix)] if self._prefix else []

    def _read_state(self) -> None:
        self._state = self._model.state_dict()
        self._keys = state_names(self._model, self._state)
        self._values = {name: self._state[key] for name, key in self._keys.items()}

    def keys(self) -> list[str]:
        """Of what is loaded."""
        return [self._prefix + name for name in self.names]

    def misfit(self) -> Misfit:
        """Where it differs from the model."""
        known = set(self.names)
        missing = [name for name in self._values if name not in known]
        unexpected = [name for name in self._saved if name not in self._values]
        texts = (_misfit(name, self._values[name], self._kinds[self._prefix + name]) for name in self.names)
        return Misfit(missing, unexpected, [text for text in texts if text])

    def targets(self) -> dict[str, torch.Tensor]:
        """The model's own memory for the saved tensors, by key; what is on the meta device gets memory."""
        if _leave_meta(self._model):
            self._read_state()
        tensors = {name: self._values[name] for name in self.names}
        return {self._prefix + name: t.detach() for name, t in tensors.items() if isinstance(t, torch.Tensor)}

    @torch.no_grad()
    def load(self, values: Mapping[str, Any]) -> None:
        """Let the model take what was read, by key."""
        self._state.update({self._keys[name]: values[self._prefix + name] for name in self.names})
        # For modules that load in a way of their own; what was read into the model's memory is there already.
        self._model.load_state_dict(self._state)
        loaded = set(self.names)
        names = parameter_names(self._model)
        for group in _groups_of(self._model):
            group.shards.note_write()
            for slot in group.slots:
                slot.has_values = slot.has_values or not loaded.isdisjoint(names.get(slot.sharded, ()))


def _best_prefix(names: Iterable[str], keys: Mapping[str, Any], preferred: str) -> str:
    """What stands before a model's names in a checkpoint: ``preferred`` unless another prefix has more of them."""
    names = list(names)
    if not names:
        return preferred
    longest = max(names, key=len)
    found = {key[: len(key) - len(longest)] for key in keys if f".{key}".endswith(f".{longest}")}
    prefixes = [preferred, *sorted(found - {preferred}, key=len)]
    return max(prefixes, key=lambda prefix: sum(prefix + name in keys for name in names))


def _misfit(name: str, value: Any, stored: Any) -> str | None:
    is_tensor = isinstance(stored, TensorStorageMetadata)
    if is_tensor != isinstance(value, torch.Tensor):
        return f"{name!r} is {'' if is_tensor else 'not '}a tensor in the checkpoint"
    if is_tensor and tuple(value.shape) != tuple(stored.size):
        return f"{name!r} has shape {tuple(value.shape)}, and {tuple(stored.size)} in the checkpoint"
    return None


def _groups_of(model: nn.Module) -> list[ParamGroup]:
    units = dict.fromkeys(unit for module in model.modules() if (unit := unit_of(module)) is not None)
    return [group for unit in units for group in unit.groups]


def _leave_meta(model: nn.Module) -> bool:
    """Give memory to what is on the meta device: parameters of units stay refused until they have values.

    Returns:
        Whether there was something.
    """
    groups = _groups_of(model)
    changed = bool([slot for group in groups for slot in group.shards.leave_meta()])
    device = groups[0].mesh.device if groups else torch.get_default_device()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if isinstance(parameter, DTensor):
                raise StateError(
                    f"parameter {name!r} of {type(module).__name__} is on the meta device: call to_empty()"
                )
            filled = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            # Not another object: optimizers may hold this one.
            torch.utils.swap_tensors(parameter, filled)
            changed = True
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name], changed = torch.empty_like(buffer, device=device), True
    return changed
