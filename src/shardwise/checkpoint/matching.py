"""Which stored tensors belong to which weights of a model, and one error with all that does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .weights import ModelWeights, Weight

PACKED = {torch.float4_e2m1fn_x2: 2}
"""Dtypes whose elements are several numbers each, and how many; torch neither copies nor converts them."""


class WeightsError(ValueError, RuntimeError):
    """Stored weights cannot be read, or do not fit the model; the message lists all that is wrong.

    A ValueError as all our errors about arguments are; a RuntimeError too because that is what
    `torch.nn.Module.load_state_dict` raises.
    """


class IncompatibleKeys(NamedTuple):
    """What ``strict=False`` let pass.

    Args:
        missing_keys: names of the model that got no values.
        unexpected_keys: names, after renaming, that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class Described(Protocol):
    """A stored tensor: a tensor itself, or what a file says about one."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """None if torch has no such dtype."""


@dataclass(frozen=True)
class Match:
    """One weight of the model and where its values are stored.

    Args:
        weight: to be loaded.
        stored: names that have its values: one, or several if it is tied and more than one name is stored.
    """

    weight: Weight
    stored: list[str]


def match(
    model: ModelWeights,
    stored: Mapping[str, Described],
    source: str,
    *,
    strict: bool = True,
    objects: Collection[str] = (),
    problems: Sequence[str] = (),
) -> tuple[list[Match], IncompatibleKeys]:
    """Find the stored tensors of each weight.

    Args:
        model: to be loaded.
        stored: by name.
        source: where they are from, for the message.
        strict: whether missing and unexpected names are errors.
        objects: stored names whose values are not tensors.
        problems: further messages for the same error.

    Raises:
        WeightsError: listing all missing, unexpected and mis-shaped names, and dtypes that cannot be converted.
        ValueError: if what this rank holds of one need not be one box of it.
    """
    matches = [Match(w, [name for name in w.names if name in stored]) for w in model.weights]
    absent = [m.weight for m in matches if not m.stored and not _may_be_missing(model, m.weight)]
    missing = [name for weight in absent for name in weight.names if name not in objects]
    missing += [name for name in model.objects if name not in objects]
    known = set(model.names)
    unexpected = [name for name in (*stored, *objects) if name not in known and not _may_be_unexpected(model, name)]
    found = {
        "missing keys": [repr(name) for name in missing] if strict else [],
        "unexpected keys": [repr(name) for name in unexpected] if strict else [],
        "keys that are not tensors": [repr(name) for w in model.weights for name in w.names if name in objects],
        "mis-shaped keys": _mis_shaped(matches, stored),
        "keys of a dtype that cannot be converted": _inconvertible(matches, stored),
        "keys that a hook of the model makes up": [
            repr(m.stored[0]) for m in matches if m.stored and not m.weight.can_be_written
        ],
    }
    lines = [f"{kind}: {', '.join(items)}" for kind, items in found.items() if items]
    if lines or problems:
        raise WeightsError("\n  ".join([f"{source} does not fit the model:", *problems, *lines]))
    loaded = [m for m in matches if m.stored]
    for m in loaded:
        m.weight.check_region()
    return loaded, IncompatibleKeys(missing, unexpected)


def differing_ties(
    stored: Iterable[tuple[Weight, Sequence[str]]], differ: Callable[[Weight, str, str], bool]
) -> list[str]:
    """Pairs of names, as messages show them, of one weight that are stored with different values.

    Args:
        stored: weights with the names that each is stored under.
        differ: as of `check_ties`.
    """
    return [
        f"{names[0]!r} and {other!r}"
        for weight, names in stored
        for other in names[1:]
        if differ(weight, names[0], other)
    ]


def check_ties(matches: Iterable[Match], source: object, differ: Callable[[Weight, str, str], bool]) -> None:
    """
    Args:
        matches: of the model.
        source: where the stored tensors are from, for the message.
        differ: whether two stored tensors of one weight, by name, have different values.

    Raises:
        WeightsError: naming tied weights that are stored under several names with different values.
    """
    if different := differing_ties(((found.weight, found.stored) for found in matches), differ):
        raise WeightsError(
            f"{source} does not fit the model, which ties what has different values there: {', '.join(different)}; "
            "untie them before fully_shard, or leave one out"
        )


def _mis_shaped(matches: Iterable[Match], stored: Mapping[str, Described]) -> list[str]:
    return [
        f"{name!r} has shape {tuple(stored[name].shape)}, in the model {m.weight.shape}"
        for m in matches
        for name in m.stored
        if tuple(stored[name].shape) != m.weight.shape
    ]


def _inconvertible(matches: Iterable[Match], stored: Mapping[str, Described]) -> list[str]:
    return [
        f"{name!r} is {stored[name].dtype or 'of a dtype that torch does not have'}, in the model {m.weight.dtype}"
        for m in matches
        for name in m.stored
        if not convertible(stored[name].dtype, m.weight.dtype)
    ]


def convertible(stored: torch.dtype | None, wanted: torch.dtype) -> bool:
    """Whether a conversion only rounds or widens: nothing loses its fraction or its imaginary part."""
    if stored is None or (stored is not wanted and not PACKED.keys().isdisjoint((stored, wanted))):
        return False
    if stored.is_complex:
        return wanted.is_complex
    return not stored.is_floating_point or wanted.is_floating_point or wanted.is_complex


# transformers' models declare names that files may lack (computed when the model is made) or may have (old versions).


def _may_be_missing(model: ModelWeights, weight: Weight) -> bool:
    patterns = getattr(model.model, "_keys_to_ignore_on_load_missing", None) or ()
    return weight.has_values and any(re.search(pattern, name) for pattern in patterns for name in weight.names)


def _may_be_unexpected(model: ModelWeights, name: str) -> bool:
    patterns = getattr(model.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
