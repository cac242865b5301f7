"""State and param groups of optimizers by the names of parameters, as torch's checkpoint functions write them.

torch's own functions step an optimizer that has no state yet, to learn what it will have: a checkpoint of it then
says that one step was made. Here an optimizer is saved as it is, and what it will have is read from the checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer

from ..core.device import detached, local_of, make_spec, region_of, shard_inside, spec_of, wrap_local
from ..core.errors import listed
from ..core.step import parameters_of
from .objects import Path, has_tensors, is_sum, key_of, tree_of
from .reading import StoredData

Names = Mapping[torch.Tensor, Sequence[str]]
"""The names of each parameter; several if it is tied."""
STATE, GROUPS, PARAMETERS, NAMES = "state", "param_groups", "params", "param_names"
CUTS = "optimizer_cuts"
"""How sharded state is cut that has another shape than its parameter; see `cuts`."""

CLASSES = "optimizer_classes"
"""Names of the classes of tensors among the state that are no plain ones; see `classes`."""

KEYS = "optimizer_keys"
"""Keys of dicts among the state that are numbers; see `number_keys`."""

Cut = Mapping[int, int | None]
"""For dims on which a parameter is cut, the dim of its state that is cut where the parameter is; None for none."""


def optimizers_in(value: Optimizer | Iterable[Optimizer] | Mapping[Any, Optimizer] | None) -> list[Optimizer]:
    """One optimizer, or several in a container, as a list.

    Raises:
        TypeError: if there is something else.
    """
    if value is None:
        return []
    value = value.values() if isinstance(value, Mapping) else value
    given = list(value) if isinstance(value, Iterable) else [value]
    for item in given:
        if not isinstance(item, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of such, not {type(item).__name__}")
    return given


def optimizer_state(optimizers: Sequence[Optimizer], names: Names) -> dict[str, Any]:
    """State by parameter name, the param groups of all ``optimizers`` one after the other, and what else their state
    dicts have.

    Raises:
        TypeError: naming the class of an optimizer whose state dict is not in torch's form.
        ValueError: naming the optimizer, if it has parameters that the model does not have; or the parameter that two
            of them have state of, or the key that both have beside state and param groups.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    others: dict[str, Any] = {}
    for optimizer in optimizers:
        own = optimizer.state_dict()
        if missing := sorted({STATE, GROUPS} - own.keys()):
            raise TypeError(
                f"the state dict of {type(optimizer).__name__} has no {listed(missing)}: if it wraps an optimizer, "
                "save that one, and what else it has as extra"
            )
        more = {key: value for key, value in own.items() if key not in (STATE, GROUPS)}
        if both := sorted(more.keys() & others.keys()):
            raise ValueError(
                f"the state dicts of two optimizers, one of them {type(optimizer).__name__}, have {listed(both)}, of "
                "which only one can be saved: save the optimizers in checkpoints of their own"
            )
        others.update(more)
        name_of: dict[Any, str] = {}
        for group, packed in zip(optimizer.param_groups, own[GROUPS], strict=True):
            own_names = _names_of(optimizer, group[PARAMETERS], names)
            name_of.update(zip(packed[PARAMETERS], own_names, strict=True))
            groups.append({**packed, PARAMETERS: own_names})
        named = {name_of.get(key, key): value for key, value in own[STATE].items()}
        if both := [name for name in named if name in state]:
            raise ValueError(
                f"two optimizers, one of them {type(optimizer).__name__}, have state of {listed(both)}, of which only "
                "one can be saved: save the optimizers in checkpoints of their own"
            )
        state.update(named)
    return {STATE: state, GROUPS: groups, **others}


def _names_of(optimizer: Optimizer, parameters: Sequence[torch.Tensor], names: Names) -> list[str]:
    unknown = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
    if unknown:
        raise ValueError(
            f"{type(optimizer).__name__} has {len(unknown)} parameters that are not the model's, of shapes "
            f"{', '.join(map(str, unknown[:5]))}: make it after fully_shard from model.parameters(), call "
            "shardwise.repoint(optimizer), or pass one module that has all of its parameters"
        )
    return [names[parameter][0] for parameter in parameters]


def cuts(items: Mapping[Path, Any], names: Names) -> dict[Path, Cut]:
    """The cuts of sharded state of other shapes than its parameter's (such as sums over rows), by paths below `CUTS`.
    Chunks in a checkpoint do not tell a replicated tensor from a plain one, nor anything where one rank has saved.

    Args:
        items: leaves of the tree with the optimizer's state, by path.
        names: of the model's parameters.
    """
    parameters = {name: parameter for parameter, own in names.items() for name in own}
    found: dict[Path, Cut] = {}
    for path, value in items.items():
        parameter = parameters.get(str(path[2])) if path[1:2] == (STATE,) and len(path) > 2 else None
        if not isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.shape == parameter.shape:
            continue
        if value.device_mesh == parameter.device_mesh:
            pairs = zip(map(_dim_of, parameter.placements), map(_dim_of, value.placements), strict=True)
            found[CUTS, *path] = {of: own for of, own in pairs if of is not None}
    return found


def classes(items: Mapping[Path, Any]) -> dict[Path, list[str]]:
    """The classes of what is in the optimizer's state, if some of it is of subclasses (as that of 8-bit optimizers is):
    only the optimizer itself can make such, and chunks in a checkpoint do not tell of it."""
    state = [local_of(value) for path, value in items.items() if path[1:2] == (STATE,) and torch.is_tensor(value)]
    found = sorted({type(value).__qualname__ for value in state} - {"Tensor", "Parameter"})
    return {(CLASSES,): found} if found else {}


def number_keys(state: Any, path: Path = (KEYS, STATE)) -> dict[Path, int | float]:
    """Keys that are numbers, of dicts with tensors in the optimizer's ``state``, by the paths of what they are of: in
    those keys are text, and an optimizer that looks up a number would find nothing.

    Raises:
        ValueError: naming what has two keys of the same text.
    """
    found: dict[Path, int | float] = {}
    if isinstance(state, list):
        for index, item in enumerate(state):
            found |= number_keys(item, (*path, index))
    elif isinstance(state, Mapping) and has_tensors(state):
        if len({*map(str, state)}) < len(state):
            raise ValueError(
                f"{key_of(path[1:])} of the optimizer has keys of the same text, by which checkpoints tell them apart: "
                f"{listed(state)}"
            )
        for key, item in state.items():
            below = (*path, str(key))
            found |= {below: key} if type(key) in (int, float) else {}
            found |= number_keys(item, below)
    return found


def first_state(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """What ``optimizer`` keeps of each parameter after its first step, by a step of no effect; nothing where parameters
    are on the meta device. Its own state, its settings, and the parameters and their gradients are then as before.

    Raises:
        Exception: of the step.
    """
    parameters = parameters_of(optimizer)
    if any(one.is_meta for one in parameters):
        return {}
    state, groups = optimizer.state, [dict(group) for group in optimizer.param_groups]
    kept = [(one, one.grad, local_of(one).detach().clone()) for one in parameters]
    made: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    try:
        optimizer.state = made  # type: ignore[assignment]
        for one in parameters:
            one.grad = torch.zeros_like(one) if one.requires_grad else None
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
    finally:
        optimizer.state = state
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(settings)
        with torch.no_grad():
            for one, gradient, values in kept:
                one.grad = gradient
                local_of(one).detach().copy_(values)
    return dict(made)


def untold_state(
    optimizer: Optimizer, saved: Iterable[tuple[Sequence[int], object]]
) -> Mapping[torch.Tensor, Mapping[str, Any]]:
    """`first_state`, if something saved has another shape than its parameter, and that is sharded: only the optimizer
    knows whether it keeps such state (sums over rows, say) sharded too. Nothing otherwise, or if its step fails.

    Args:
        optimizer: that gets what is saved.
        saved: size of each tensor of which the checkpoint does not say how it is sharded, and its parameter.
    """
    # Numbers are the same on all ranks.
    if any(isinstance(one, DTensor) and len(size) > 0 and tuple(size) != tuple(one.shape) for size, one in saved):
        with suppress(Exception):
            return first_state(optimizer)
    return {}


def _dim_of(placement: Placement) -> int | None:
    dim: int | None = getattr(placement, "dim", None)  # torch's strided shards are of no common class with others
    return dim


def optimizer_paths(stored: StoredData, preferred: Sequence[str]) -> dict[str, Path]:
    """Keys of a checkpoint's optimizer, and where they are in its tree, from "state" or "param_groups" on (or from
    another key, where the optimizer is not all of the checkpoint).

    Args:
        stored: the checkpoint's data.
        preferred: what its keys may begin with; another prefix is taken if there is only one.

    Raises:
        ValueError: if there is no optimizer, or more than one.
    """
    found = {key[: key.index(f"{GROUPS}.")] for key in stored.kinds if f".{GROUPS}." in f".{key}"}
    known = [prefix for prefix in preferred if prefix in found]
    if not found:
        raise ValueError(f"the checkpoint {stored.directory} has no optimizer; it has {stored.tops()}")
    if not known and len(found) > 1:
        raise ValueError(
            f"the checkpoint {stored.directory} has optimizers under {listed(found)}, none of them called 'optimizer'"
        )
    prefix = (known or [*found])[0]
    below = {key: path for key, path in stored.below(prefix).items() if path}
    return {key: path for key, path in below.items() if prefix or _kind(path) in (STATE, GROUPS)}


def _kind(path: Path) -> str:
    return str(path[0]).partition(".")[0]


class SavedOptimizer:
    """What a checkpoint has of optimizers.

    Args:
        optimizers: to load into.
        names: of the model's parameters.
        tensors: what is known about those of its keys that are tensors.
        paths: where each of its keys is in the saved tree, from "state", "param_groups" or another key on.
        objects: values of the keys that are not tensors.
        plain: those of its keys that are plain tensors, of each rank's own.
        ranks: for each rank that saved, the values in ``objects`` of the keys of param groups, where ranks differ.

    Raises:
        ValueError: if ``optimizers`` have other param groups than were saved, or have in one what was saved in several
            with different settings.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Names,
        tensors: Mapping[str, TensorStorageMetadata],
        paths: Mapping[str, Path],
        objects: Mapping[str, Any],
        plain: Collection[str] = (),
        ranks: Sequence[Mapping[str, Any]] = (),
    ):
        self._plain, self._ranks = plain, ranks
        self._optimizers, self._names, self._objects = optimizers, names, objects
        self._parameters = {name: parameter for parameter, own in names.items() for name in own}
        self._tensors = tensors
        self._state_paths: dict[str, Path] = {}
        self._group_paths: dict[str, Path] = {}
        self._other_paths: dict[str, Path] = {}
        for key, path in paths.items():
            if path[0] in (STATE, GROUPS):
                (self._state_paths if path[0] == STATE else self._group_paths)[key] = path[1:]
            elif _kind(path) not in (STATE, GROUPS):
                self._other_paths[key] = path
            elif isinstance(path[0], str):
                self._add_flattened(key, *path[0].partition("."))
        self._matching({**objects, **dict.fromkeys(self._tensors)})

    def _add_flattened(self, key: str, kind: str, _: str, rest: str) -> None:
        """A key of ``flatten_optimizer_state_dict=True``: state and settings of every parameter, by dotted names."""
        parts = rest.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if (name := ".".join(parts[:end])) in self._parameters:
                path = name, ".".join(parts[end:])
                (self._state_paths if kind == STATE else self._group_paths)[key] = path
                return

    # -- Matching groups with saved ones

    def _saved_groups(self, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The groups of this rank, then those of the others that saved; ranks that share a stage have the same."""
        for own in ({}, *self._ranks):
            tree = tree_of((path, own.get(key, values[key])) for key, path in self._group_paths.items())
            if isinstance(tree, list):
                yield from tree
                continue
            for name, settings in tree.items():
                yield {**settings, PARAMETERS: [name]}

    def _matching(self, values: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """For each group of each optimizer the saved settings of its parameters.

        Raises:
            ValueError: if a group has other parameters than every saved one, or than several together, or those of
                several that have different settings, or settings of another kind of optimizer.
        """
        saved = list(self._saved_groups(values))
        by_parameters: dict[frozenset[torch.Tensor], list[dict[str, Any]]] = {}
        for group in saved:
            # Others are of stages, or parts of the model, that this rank does not have.
            known = frozenset(self._parameters[name] for name in group[PARAMETERS] if name in self._parameters)
            if known or not group[PARAMETERS]:
                by_parameters.setdefault(known, []).append(group)
        found: list[list[dict[str, Any]]] = []
        for optimizer in self._optimizers:
            found.append([])
            for index, group in enumerate(optimizer.param_groups):
                _names_of(optimizer, group[PARAMETERS], self._names)
                parameters = frozenset(group[PARAMETERS])
                fitting = by_parameters.get(parameters) or self._joined(by_parameters, optimizer, index)
                if not fitting:
                    raise ValueError(self._mismatch(optimizer, index, saved))
                _refuse_other_kind(optimizer, group, fitting[0])
                # Groups without parameters all look alike: they are taken in their order.
                found[-1].append(fitting.pop(0) if len(fitting) > 1 else fitting[0])
        return found

    def _joined(
        self, by_parameters: Mapping[frozenset[torch.Tensor], list[dict[str, Any]]], optimizer: Optimizer, index: int
    ) -> list[dict[str, Any]]:
        """The settings of a group whose parameters were saved in several, such as those of stages, or each alone.

        Raises:
            ValueError: if they differ, since the group has one for all.
        """
        parameters = optimizer.param_groups[index][PARAMETERS]
        # Of a parameter that is in several, the first counts.
        part_of = {one: part for part in reversed([*by_parameters]) for one in part}
        parts: dict[frozenset[torch.Tensor], torch.Tensor] = {}
        for one in parameters:
            if one not in part_of:
                return []
            parts.setdefault(part_of[one], one)
        if not frozenset(parameters).issuperset(one for part in parts for one in part):
            return []
        settings = [(one, by_parameters[part][0]) for part, one in parts.items()]
        for one, own in settings[1:]:
            if differing := _differing(settings[0][1], own):
                names = " and ".join(repr(self._names[each][0]) for each in (parameters[0], one))
                raise ValueError(
                    f"param group {index} of {type(optimizer).__name__} has {names}, which were saved with different "
                    f"{listed(differing)}: make the optimizer with the param groups that it was saved with"
                )
        return [own for _, own in settings[:1]]

    def _mismatch(self, optimizer: Optimizer, index: int, saved: Sequence[Mapping[str, Any]]) -> str:
        own = {self._names[parameter][0] for parameter in optimizer.param_groups[index][PARAMETERS]}
        groups = dict.fromkeys(frozenset(group[PARAMETERS]) for group in saved)
        nearest = max(groups, key=lambda names: len(own & names), default=frozenset())
        lacks, more = listed(sorted(own - nearest)), listed(sorted((nearest - own) & self._parameters.keys()))
        differs = " and ".join([*([f"lacks {lacks}"] if lacks else []), *([f"also has {more}"] if more else [])])
        return (
            f"param group {index} of {type(optimizer).__name__} has other parameters than any of the {len(groups)} "
            f"groups that were saved; the nearest one {differs}: make the optimizer with the param groups that it was "
            "saved with"
        )

    # -- Loading

    def targets(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Memory for the saved tensors: what the optimizers have, where it fits, and new tensors elsewhere.

        Args:
            device: for state of parameters that are still on the meta device.
        """
        held: dict[torch.Tensor, Any] = {}
        for optimizer in self._optimizers:
            held.update(optimizer.state or self._first_state(optimizer))
        found = {}
        for key, path in (*self._state_paths.items(), *self._group_paths.items(), *self._other_paths.items()):
            if key in self._tensors:
                parameter = self._parameters.get(str(path[0])) if key in self._state_paths else None
                current = held.get(parameter, {}) if parameter is not None else {}
                existing = current.get(path[1]) if len(path) == 2 else None
                cut = self._objects.get(f"{CUTS}.{key}")
                like = None if key in self._plain else parameter
                found[key] = _target(self._tensors[key], like, existing, device, cut)
        return found

    def _first_state(self, optimizer: Optimizer) -> Mapping[torch.Tensor, Any]:
        """What an optimizer without state will keep, where the checkpoint does not tell enough of it."""
        if self._objects.get(CLASSES):
            return first_state(optimizer)
        told = {*self._plain, *(key for key in self._state_paths if f"{CUTS}.{key}" in self._objects)}
        untold = (
            (self._tensors[key].size, self._parameters.get(str(path[0])))
            for key, path in self._state_paths.items()
            if len(path) == 2 and key in self._tensors and key not in told
        )
        return untold_state(optimizer, untold)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizers the saved state and settings; ``tensors`` are `targets`, with values."""
        values = {**self._objects, **tensors}
        state = tree_of((path, values[key]) for key, path in self._state_paths.items()) if self._state_paths else {}
        state = self._with_numbers(state)
        by_parameter = {self._parameters.get(name, name): value for name, value in state.items()}
        others = tree_of((path, values[key]) for key, path in self._other_paths.items()) if self._other_paths else {}
        for optimizer, groups in zip(self._optimizers, self._matching(values), strict=True):
            _load(optimizer, groups, by_parameter, others)

    def _with_numbers(self, value: Any, path: Path = (KEYS, STATE)) -> Any:
        """The state ``value``, whose place is ``path``, with the keys that `number_keys` noted."""
        if isinstance(value, dict):
            items = [(key, (*path, key), item) for key, item in value.items()]
            return {self._objects.get(key_of(at), key): self._with_numbers(item, at) for key, at, item in items}
        if isinstance(value, list):
            return [self._with_numbers(item, (*path, index)) for index, item in enumerate(value)]
        return value


def _refuse_other_kind(optimizer: Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: if ``saved`` lacks settings of a ``group`` of ``optimizer``, and has some that this does not know.
            Versions of one optimizer add settings, and schedulers do.
    """
    lacking, unknown = optimizer.defaults.keys() - saved.keys(), saved.keys() - group.keys() - _OF_ANY_KIND
    if lacking and unknown:
        raise ValueError(
            f"the saved state of the optimizer does not fit {type(optimizer).__name__}: another kind of optimizer "
            f"saved it, with {listed(sorted(unknown))} and without {listed(sorted(lacking))}"
        )


_OF_ANY_KIND = {PARAMETERS, NAMES, "initial_lr"}
"""Keys of a group that are no settings of its optimizer."""


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The settings in which two saved groups differ; their parameters, and the names of these, are none."""
    keys = dict.fromkeys([*one, *other])
    return [key for key in keys if key not in (PARAMETERS, NAMES) and one.get(key) != other.get(key)]


def _target(
    saved: TensorStorageMetadata,
    parameter: torch.Tensor | None,
    existing: Any,
    device: torch.device,
    cut: Cut | None,
) -> torch.Tensor:
    dtype, size = saved.properties.dtype, saved.size
    if isinstance(existing, DTensor) and is_sum(existing):
        existing = None  # what is stored is no term of it
    fits = isinstance(existing, torch.Tensor) and existing.dtype == dtype and existing.shape == size
    if fits and not existing.is_meta:  # Adagrad makes such state for parameters on the meta device
        return detached(existing)
    like = existing if isinstance(existing, DTensor) and existing.shape == size else parameter
    if like is None or like.shape != size or not size:
        if cut is None or not isinstance(parameter, DTensor):
            return torch.empty(size, dtype=dtype, device="cpu")
        placements = [_cut_along(placement, cut) for placement in parameter.placements]
        spec = make_spec(parameter.device_mesh, placements, torch.empty(size, dtype=dtype, device="meta"))
        kept = device if parameter.is_meta else local_of(parameter).device
        return wrap_local(torch.empty(region_of(spec)[1], dtype=dtype, device=kept), spec)
    local = local_of(like)
    empty = torch.empty_like(local, dtype=dtype, device=device if local.is_meta else None)
    return wrap_local(empty, spec_of(like)) if isinstance(like, DTensor) else empty


def _cut_along(placement: Placement, cut: Cut) -> Placement:
    """Where state is that is cut by ``cut``, on an axis of the mesh on which its parameter has ``placement``."""
    of = _dim_of(placement)
    dim = cut.get(of) if of is not None else None
    return Replicate() if dim is None else shard_inside(dim, getattr(placement, "split_factor", 1))


def _load(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], more: Mapping[str, Any]
) -> None:
    packed_groups, packed_state, position = [], {}, 0
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        count = len(group[PARAMETERS])
        packed = {key: _on_device_of(group.get(key), value) for key, value in settings.items() if key != NAMES}
        packed_groups.append({**packed, PARAMETERS: list(range(position, position + count))})
        for index, parameter in enumerate(group[PARAMETERS], start=position):
            if parameter in state:
                packed_state[index] = state[parameter]
        position += count
    others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    before = {name: value for name, value in vars(optimizer).items() if name in (STATE, GROUPS)}
    try:
        optimizer.load_state_dict({STATE: {**packed_state, **others}, GROUPS: packed_groups, **more})
    except (KeyError, TypeError, AttributeError) as error:  # as when another optimizer's state lacks what it looks up
        vars(optimizer).update(before)
        raise ValueError(
            f"the saved state of the optimizer does not fit {type(optimizer).__name__}: {error!r}"
        ) from error
    _undo_casts(optimizer, state)


def _on_device_of(current: Any, value: Any) -> Any:
    """A setting that is a tensor (such as a learning rate) on the device of its current value."""
    both = isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor)
    return value.to(current.device) if both else value


def _undo_casts(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Restore the saved dtypes: `Optimizer.load_state_dict` casts state to its parameter's, which may be narrower."""
    for parameter, saved in state.items():
        current = optimizer.state.get(parameter, {}) if isinstance(parameter, torch.Tensor) else {}
        for key, value in saved.items() if isinstance(saved, Mapping) else ():
            if key in current and key != "step":
                current[key] = _in_dtypes_of(value, current[key])


def _in_dtypes_of(saved: Any, now: Any) -> Any:
    """``now`` with the saved values of tensors that have another dtype in ``saved``."""
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        return saved.to(now.device) if now.dtype != saved.dtype and now.shape == saved.shape else now
    if type(saved) is type(now) is dict and saved.keys() == now.keys():
        return {key: _in_dtypes_of(saved[key], value) for key, value in now.items()}
    if type(saved) is type(now) and isinstance(now, (list, tuple)) and len(saved) == len(now):
        return type(now)(map(_in_dtypes_of, saved, now))
    return now
