"""A model's part of a checkpoint: what is saved of it, and how it is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..core.device import local_of, spec_of, wrap_local
from ..core.errors import listed
from .matching import convertible, differing_ties
from .objects import tree_of
from .peers import Peers
from .reading import StoredData
from .weights import Weight, weights_of

MOST = 12
"""Problems that a message lists at most."""


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model`` by plain names. Leaves the sharded parameters registered.

    Raises:
        StateError: naming what is on the meta device, or without values.
    """
    found = weights_of(model, plain_names=True)
    found.check_values()
    return found.values


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


def check_fit(ranks: Peers, path: Path, own: Misfit, strict: bool) -> None:
    """A collective.

    Args:
        ranks: that load the checkpoint; a rank may have only a part of the model (a pipeline stage).
        path: of the checkpoint.
        own: of this rank.
        strict: whether names that only the model or only the checkpoint has are an error.

    Raises:
        ValueError: listing all that does not fit; on all ranks.
    """
    misfits = ranks.exchange(own)
    unexpected = [name for name in misfits[0].unexpected if all(name in misfit.unexpected for misfit in misfits)]
    missing = dict.fromkeys(name for misfit in misfits for name in misfit.missing)
    problems = list(dict.fromkeys(text for misfit in misfits for text in misfit.other))
    with ranks.together():  # ranks may have been told different things about being strict
        if strict and unexpected:
            problems.insert(0, f"the model does not have {listed(unexpected)}")
        if strict and missing:
            problems.insert(0, f"the checkpoint does not have {listed(missing)}")
        if problems:
            more = [f"and {len(problems) - MOST} more"] if len(problems) > MOST else []
            raise ValueError(f"the checkpoint {path} does not fit the model: {'; '.join([*problems[:MOST], *more])}")


class SavedModel:
    """What a checkpoint has of a model.

    Args:
        stored: the checkpoint's data.
        model: to load into.
        preferred: prefix of its names in our checkpoints. Another is taken if more of the names are found with it.
        is_given: the program gave ``preferred``: it is taken if any name is found with it, since others may be those
            of other models.

    Raises:
        ValueError: if the checkpoint has none of its names, or has them several times.
    """

    def __init__(self, stored: StoredData, model: nn.Module, preferred: str, *, is_given: bool = False):
        loading = weights_of(model, asked_by="load", plain_names=True)
        self._stored, self._kinds = stored, stored.kinds
        self._model = loading.with_extra_as_objects()
        names = list(self._model.tensors) or self._model.names
        is_found = is_given and any(preferred + name in self._kinds for name in names)
        self.prefix = preferred if is_found else _best_prefix(names, stored, preferred)
        """What stands before its names in the checkpoint."""
        split = {name: stored.below(f"{self.prefix}{name}.") for name in self._model.objects}
        self._split = {name: parts for name, parts in split.items() if parts and self.prefix + name not in self._kinds}
        """Extra state, dicts and lists, that `torch.distributed.checkpoint` stored item by item: where each item is."""
        self.names = [name for name in self._model.names if self.prefix + name in self._kinds or name in self._split]
        """Names that the model and the checkpoint both have."""
        if self._model.names and not self.names:
            raise ValueError(
                f"the checkpoint {stored.directory} has no model; it has {stored.tops()}, and "
                f"{listed(self._model.names)} were looked for"
            )
        # Without a prefix, the other keys need not be names of a model.
        parts = {key for parts in self._split.values() for key in parts}
        below = [key for key in stored.below(self.prefix) if key not in parts] if self.prefix else []
        self._saved = [key[len(self.prefix) :] for key in below if key.startswith(self.prefix)]

    @property
    def device(self) -> torch.device:
        """Where parameters on the meta device get their memory."""
        return self._model.device

    def keys(self) -> list[str]:
        """Keys of what is loaded."""
        return [key for name in self.names for key in self._split.get(name, [self.prefix + name])]

    def misfit(self, own: Callable[[str], str] = str) -> Misfit:
        """Where the checkpoint differs from the model. Reads what is stored under several names of one weight.

        Args:
            own: from a key to that of this rank's own value, which may have another shape.
        """
        known, tensors = set(self.names), self._model.tensors
        missing = [name for name in self._model.names if name not in known]
        unexpected = [name for name in self._saved if name not in self._model.keys]
        both = [name for name in self.names if name in tensors]
        texts = (_misfit(name, tensors[name], self._kinds[own(self.prefix + name)]) for name in both)
        problems = [text for text in texts if text]
        return Misfit(missing, unexpected, problems or self._differing_ties({*both}, own))

    def _differing_ties(self, names: Collection[str], own: Callable[[str], str]) -> list[str]:
        """Messages about weights that are stored under several of ``names`` with different values."""

        def differ(weight: Weight, one: str, other: str) -> bool:
            first, second = (self._read_apart(weight, own(self.prefix + name)) for name in (one, other))
            return not torch.equal(first, second)

        stored = ((weight, [name for name in weight.names if name in names]) for weight in self._loaded())
        return [
            f"{pair} have different values in the checkpoint, and the model ties them: untie them before fully_shard"
            for pair in differing_ties(stored, differ)
        ]

    def _read_apart(self, weight: Weight, key: str) -> torch.Tensor:
        """The bytes of this rank's part of what is stored for ``weight`` under ``key``, in memory of their own."""
        local = local_of(weight.value)
        values = torch.empty(local.shape, dtype=local.dtype, device=self.device if local.is_meta else local.device)
        is_sharded = isinstance(weight.value, DTensor)
        self._stored.read({key: wrap_local(values, spec_of(weight.value)) if is_sharded else values})
        return values.reshape(-1).view(torch.uint8)

    def lacks(self, name: str) -> bool:
        """Whether the checkpoint's model has ``name``, and the model, or the part of it on this rank, does not."""
        return self.prefix + name in self._kinds and name not in self._model.keys

    def _loaded(self) -> list[Weight]:
        known = set(self.names)
        return [weight for weight in self._model.weights if not known.isdisjoint(weight.names)]

    def targets(self, own: Callable[[str], str] = str) -> dict[str, torch.Tensor]:
        """The model's own memory for the saved tensors, by key; what is on the meta device gets memory. Until `load`
        a forward of the units concerned is refused.

        Args:
            own: as of `misfit`.
        """
        for weight in self._loaded():
            weight.prepare_memory(self._model.device)
        tensors = {name: weight.value for weight in self._model.weights for name in weight.names}
        found = {self.prefix + name: tensors[name] for name in self.names if name in tensors}
        # Extra state is handed over: it may have another shape each time.
        for name in (name for name in self.names if name not in tensors):
            device = "cpu" if name in self._split else self._model.device
            for key in self._split.get(name, [self.prefix + name]):
                if isinstance(kind := self._kinds[own(key)], TensorStorageMetadata):
                    found[key] = torch.empty(kind.size, dtype=kind.properties.dtype, device=device)
        return found

    @torch.no_grad()
    def load(self, values: Mapping[str, Any], *, strict: bool) -> None:
        """Let the model take what was read, by key.

        Raises:
            StateError: if ``strict``, naming what the model adds to its state dict and does not take.
        """
        for weight in self._loaded():
            weight.accept_values()
        # For modules with a load hook of their own; tensors were read into the model's memory already.
        state: dict[str, Any] = {}
        for name in self.names:
            parts = self._split.get(name, {self.prefix + name: ()})
            state[self._model.keys[name]] = tree_of((path, values[key]) for key, path in parts.items())
        self._model.load_into_modules(state, strict=strict)


def _best_prefix(names: Iterable[str], stored: StoredData, preferred: str) -> str:
    """What stands before a model's names in a checkpoint: the prefix that has most of them; of those that have as many
    ``preferred``, or none, or one below ``preferred`` (for a part of a model).

    Raises:
        ValueError: if several others have as many.
    """
    known, counts = set(names), Counter({preferred: 0})
    for key in stored.kinds:
        parts = key.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in known:
                counts["".join(f"{part}." for part in parts[:start])] += 1
    most = max(counts.values())
    found = [prefix for prefix, count in counts.items() if count == most]
    best = [prefix for prefix in (preferred, "") if prefix in found][:1]
    best = best or [prefix for prefix in found if prefix.startswith(preferred)] or found
    if len(best) > 1:
        paths = [prefix.removesuffix(".") for prefix in best]
        wrapped = "model"
        for part in reversed(paths[0].split(".")):
            wrapped = f"nn.ModuleDict({{{part!r}: {wrapped}}})"
        raise ValueError(
            f"the checkpoint {stored.directory} has names of the model under {listed(paths)}: say which, as by "
            f"load(..., model={wrapped})"
        )
    return best[0]


def _misfit(name: str, tensor: torch.Tensor, stored: Any) -> str | None:
    if not isinstance(stored, TensorStorageMetadata):
        return f"{name!r} is not a tensor in the checkpoint"
    if tuple(tensor.shape) != tuple(stored.size):
        return f"{name!r} has shape {tuple(tensor.shape)}, and {tuple(stored.size)} in the checkpoint"
    if not convertible(stored.properties.dtype, tensor.dtype):
        return f"{name!r} is {tensor.dtype}, and {stored.properties.dtype} in the checkpoint"
    return None
