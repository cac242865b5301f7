"""From a checkpoint back into a training run: first everything is checked, then it is loaded."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.device import detached
from ..core.errors import listed
from .contents import EXTRA, EXTRA_TENSORS, MODEL, OPTIMIZER, RANKS, RNG, SCHEDULER
from .model_state import Misfit, SavedModel
from .names import parameter_names
from .objects import Path, capture, check_form, is_shared, release, restore, tree_of
from .optimizer_state import CLASSES, CUTS, GROUPS, KEYS, STATE, SavedOptimizer, optimizer_paths
from .reading import StoredData
from .rng import seed_from, set_random_state


@dataclass(frozen=True)
class Wanted:
    """What to load into.

    Args:
        model: or None.
        optimizers: of the model's parameters.
        scheduler: an object with a state, a container of such, or None.
        extra: what to fill, or None.
        rng: whether to continue with the saved states of random number generators.
    """

    model: nn.Module | None
    optimizers: Sequence[Optimizer]
    scheduler: Any
    extra: Any
    rng: bool


class Restoring:
    """One load, in steps that may each fail on any rank.

    Args:
        stored: the checkpoint's data.
        rank: of this process.
        world_size: ranks that load it.
        wanted: what to load into.

    Raises:
        ValueError: if the checkpoint does not have something that is wanted.
    """

    def __init__(self, stored: StoredData, rank: int, world_size: int, wanted: Wanted):
        self._stored, self._rank, self._wanted = stored, rank, wanted
        self._saved_by = None if stored.manifest is None else stored.manifest.world_size
        self._has_own = self._saved_by == world_size
        self._values: dict[str, Any] = {}
        self._model = SavedModel(stored, wanted.model, f"{MODEL}.") if wanted.model is not None else None
        self._optimizer_paths = self._find_optimizer() if wanted.optimizers else {}
        for name, value in ((SCHEDULER, wanted.scheduler), (EXTRA, wanted.extra)):
            if value is not None and not stored.below(f"{name}."):
                raise ValueError(f"the checkpoint {stored.directory} has no {name}; it has {stored.tops()}")
        self._rng_keys = list(stored.below(f"{RNG}.")) if wanted.rng and self._saved_by is not None else []
        self._read_objects()
        self._check_forms()
        self._optimizer: SavedOptimizer | None = None

    def misfit(self) -> Misfit:
        """Where the model differs from the saved one."""
        return self._model.misfit(self._own) if self._model is not None else Misfit()

    def _own(self, key: str) -> str:
        """Where this rank's own value of ``key`` is stored: ``key`` itself, unless ranks differed in it."""
        own = f"{RANKS}.{self._rank}.{key}"
        return own if self._has_own and own in self._stored.kinds else key

    def _find_optimizer(self) -> dict[str, Path]:
        """Where the optimizer's keys are, but for state of parameters of other stages, or other parts of the model,
        which this rank's optimizers would keep, and save instead of those that have the parameters."""
        paths, model = optimizer_paths(self._stored, (f"{OPTIMIZER}.", "optim.")), self._model
        return {
            key: path
            for key, path in paths.items()
            if model is None or path[0] != STATE or len(path) == 1 or not model.lacks(str(path[1]))
        }

    def _read_objects(self) -> None:
        """Read what is not a tensor."""
        keys = [*self._stored.below(f"{EXTRA}."), *self._optimizer_paths]
        keys += [*self._stored.below(f"{KEYS}."), CLASSES, *(f"{CUTS}.{key}" for key in self._optimizer_paths)]
        keys += self._model.keys() if self._model is not None else []
        keys += self._stored.below(f"{SCHEDULER}.") if self._wanted.scheduler is not None else []
        for key in self._rng_keys:
            keys += [key, f"{RANKS}.{self._rank}.{key}"]
        own = {key: self._own(key) for key in keys}
        read = self._stored.read_objects(own.values())
        self._values = {key: read[where] for key, where in own.items() if where in read}

    def _check_forms(self) -> None:
        """See that what is to be filled has the form of what was saved, of which the tensors are not read yet."""
        unread = torch.empty(0)
        for name, given in ((SCHEDULER, self._wanted.scheduler), (EXTRA, self._wanted.extra)):
            if given is not None:
                stored = self._stored.below(f"{name}.").items()
                check_form(given, tree_of((path, self._values.get(key, unread)) for key, path in stored), name)

    def _saved_optimizer(self) -> SavedOptimizer | None:
        model, optimizers = self._wanted.model, self._wanted.optimizers
        if model is None or not optimizers:
            return None
        tensors, others = self._stored.tensors(), f"{RANKS}."
        differing = {key.split(".", 2)[2] for key in tensors if key.startswith(others)}.intersection(
            self._optimizer_paths
        )
        # Of numbers, as of objects, another number of ranks gets the first rank's.
        if not self._has_own and (lost := sorted(key for key in differing if key in tensors and tensors[key].size)):
            raise ValueError(
                f"{listed(lost)} are plain tensors in which the {self._saved_by} ranks that saved them differ, as "
                "those of a rank's shard do: load them at that number of ranks, or without the optimizer (to be "
                "loaded at any, its state has to be DTensors)"
            )
        kinds = {key: tensors[own] for key in self._optimizer_paths if (own := self._own(key)) in tensors}
        paths, groups = self._optimizer_paths, self._groups_of_ranks()
        return SavedOptimizer(optimizers, parameter_names(model), kinds, paths, self._values, differing, groups)

    def _groups_of_ranks(self) -> list[dict[str, Any]]:
        """The param groups' keys on the first rank that saved them, then on each rank that differed from it: a stage's
        groups are those of its own ranks, wherever it is loaded. Empty if no rank differed."""
        keys = [key for key, path in self._optimizer_paths.items() if path[0] == GROUPS]
        places: dict[int, dict[str, str]] = defaultdict(dict)
        for rank, key in itertools.product(range(self._saved_by or 0), keys):
            if (where := f"{RANKS}.{rank}.{key}") in self._stored.kinds:
                places[rank][key] = where
        if not places:
            return []
        read = self._stored.read_objects([*keys, *(where for own in places.values() for where in own.values())])
        common = {key: read[key] for key in keys if key in read}
        others = ({key: read[where] for key, where in own.items() if where in read} for own in places.values())
        return [common, *({**common, **own} for own in others)]

    # -- Reading

    def read(self, advance: Callable[[int], None]) -> None:
        """Read the tensors, into the model's and the optimizers' own memory where they have it.

        Args:
            advance: called with the number of bytes read.
        """
        self._optimizer = self._saved_optimizer()  # whose names would be wrong if the model's were
        targets = self._model.targets(self._own) if self._model is not None else {}
        if self._model is not None and self._optimizer is not None:
            targets.update(self._optimizer.targets(self._model.device))
        # What the caller's objects hold now says how the new values are sharded.
        held: dict[str, DTensor] = {}
        capture(self._wanted.scheduler, held, (SCHEDULER,))
        capture(self._wanted.extra, held)
        tensors = self._stored.tensors()
        for prefix in (f"{EXTRA_TENSORS}.", f"{EXTRA}.", f"{SCHEDULER}."):
            for key in self._stored.below(prefix):
                if (kind := tensors.get(self._own(key))) is not None:
                    name, size = key.removeprefix(f"{EXTRA_TENSORS}."), kind.size
                    if (like := held.get(name)) is not None and like.shape == size:
                        # Paths with a name in common were told apart by the order of dicts once: then it is another's.
                        targets[key] = torch.empty_like(detached(like)) if is_shared(name, held) else detached(like)
                    else:
                        targets[key] = torch.empty(size, dtype=kind.properties.dtype, device="cpu")
        self._stored.read({self._own(key): tensor for key, tensor in targets.items()}, advance)
        self._values.update(targets)

    # -- Handing over

    def hand_over(self, *, strict: bool) -> Any:
        """Load what was read into the objects that were passed; return the saved extra.

        Args:
            strict: as of `SavedModel.load`.
        """
        wanted = self._wanted
        if self._model is not None:
            self._model.load(self._values, strict=strict)
        if self._optimizer is not None:
            self._optimizer.load(self._values)
        if wanted.scheduler is not None:
            restore(wanted.scheduler, self._tree(SCHEDULER), SCHEDULER)
        extra = self._tree(EXTRA)
        extra = extra if wanted.extra is None else restore(wanted.extra, extra, EXTRA)
        # Last, since anything above may draw numbers.
        for key in self._rng_keys:
            self._restore_rng(key)
        return extra

    def _tree(self, top: str) -> Any:
        """What was saved under ``top``; None if nothing was."""
        prefix = f"{EXTRA_TENSORS}."
        sharded = {key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)}
        items = [(path, self._values[key]) for key, path in self._stored.below(f"{top}.").items()]
        return release(tree_of(items), sharded) if items else None

    def _restore_rng(self, key: str) -> None:
        name = key.removeprefix(f"{RNG}.")
        is_new = self._saved_by is not None and self._rank >= self._saved_by
        ranks_differ = any(other.startswith(f"{RANKS}.") and other.endswith(f".{key}") for other in self._stored.kinds)
        if is_new and ranks_differ:
            seed_from(name, self._values[key], self._rank)
        else:
            set_random_state(name, self._values.get(f"{RANKS}.{self._rank}.{key}", self._values[key]))
