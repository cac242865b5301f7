"""What goes into a checkpoint: leaves of the tree ``{"model", "optimizer", "scheduler", "extra", "rng"}``."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ..core.errors import listed
from ..core.extension import with_plain_values
from .integrity import checksum, is_plain
from .model_state import model_state
from .names import parameter_names, plain_name
from .objects import Path, Pickled, as_saved, capture, is_kept_by_leaves, key_of, leaves, pickled, warn_of_unsafe
from .optimizer_state import STATE, classes, cuts, number_keys, optimizer_state
from .rng import random_states
from .weights import replica_of

MODEL, OPTIMIZER, SCHEDULER, EXTRA, RNG = "model", "optimizer", "scheduler", "extra", "rng"
EXTRA_TENSORS = "extra_tensors"
"""Sharded tensors found in the scheduler and in ``extra``."""
RANKS = "ranks"
"""Prefix of what differs on a rank from the first rank that has it: ``ranks.3.rng.torch``."""
_SAFE = (bool, int, float, str, type(None))
"""Most of what is in param groups, of which there may be one for each parameter."""


@torch.no_grad()
def contents(
    model: nn.Module | None, optimizers: Sequence[Optimizer], scheduler: Any, extra: Any
) -> tuple[dict[Path, torch.Tensor | Pickled], set[Path]]:
    """This rank's leaves: its tensors, and objects pickled as they are now; and the paths of what it leaves to others.

    A tensor that several ranks replicate is a leaf of one of them only, and they share such tensors among them.

    Raises:
        StateError: naming parameters without values.
        TypeError: naming an object that cannot be pickled, or a tensor that is not dense.
        ValueError: if an optimizer has parameters that the model does not have, or state with keys of the same text; if
            ``extra`` contains itself.
    """
    found: dict[Path, Any] = {}
    if model is not None:
        found.update({(MODEL, name): value for name, value in model_state(model).items()})
        if optimizers:
            names = parameter_names(model)
            tree = optimizer_state(optimizers, names)
            state = dict(leaves(tree, (OPTIMIZER,)))
            found.update({**state, **cuts(state, names), **classes(state), **number_keys(tree[STATE])})
    sharded: dict[str, DTensor] = {}
    if scheduler is not None:
        captured = _captured(SCHEDULER, scheduler, sharded, (SCHEDULER,))
        found.update(leaves(captured, (SCHEDULER,)) if is_kept_by_leaves(captured) else [((SCHEDULER,), captured)])
    if extra is not None:
        found[EXTRA,] = _captured(EXTRA, extra, sharded)
    found.update({(EXTRA_TENSORS, name): tensor for name, tensor in sharded.items()})
    # Last: what the run continues with, whatever was drawn to say what the state of its objects is.
    found.update({(RNG, name): state for name, state in random_states().items()})
    loads: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    # In an order that ranks share, whatever that of their dicts is; last what only some of them may have.
    in_order = sorted(found, key=lambda path: (path[0] == EXTRA_TENSORS, key_of(path)))
    own = {path for path in in_order if _is_own(found[path], loads)}
    return {path: _leaf(path, value) for path, value in found.items() if path in own}, found.keys() - own


def _captured(name: str, value: Any, sharded: dict[str, DTensor], path: Path = ()) -> Any:
    try:
        return capture(value, sharded, path)
    except RecursionError as error:
        raise ValueError(f"{name} contains itself, or is nested too deeply to be saved: pass a tree") from error


def _leaf(path: Path, value: Any) -> torch.Tensor | Pickled:
    where = key_of(path)
    if path[0] == RNG:  # a generator's state is an object in which ranks differ
        return pickled(value, where)
    item = as_saved(value, where)
    if isinstance(item, Pickled) and path[0] in (SCHEDULER, EXTRA, OPTIMIZER) and not isinstance(value, _SAFE):
        # Of the optimizer's state, alike for all parameters, one warning is enough.
        warn_of_unsafe(item, where if path[0] != OPTIMIZER else "the optimizer's state")
    return with_plain_values(item) if isinstance(item, torch.Tensor) else item


def _is_own(value: Any, loads: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]]) -> bool:
    """Whether this rank, and not another one that has the same, writes ``value``.

    Args:
        value: a leaf.
        loads: bytes that each replica on some axes of a mesh writes so far; the same on all of them.
    """
    if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is None:
        return True
    replica, count = replica_of(value)
    axes = tuple(axis for axis, placement in enumerate(value.placements) if isinstance(placement, Replicate))
    load = loads.setdefault((value.device_mesh, axes), [0] * count)
    writer = load.index(min(load))
    load[writer] += value.numel() * value.itemsize
    return writer == replica


def shares(own: Iterable[Path], left: Iterable[Path]) -> tuple[set[Path], set[Path]]:
    """Of what this rank saves and of what it leaves to others, that which others may not have been given: sharded
    tensors of the scheduler and of extra."""
    saved, expected = ({path for path in paths if path[0] == EXTRA_TENSORS} for paths in (own, left))
    return saved, expected


def refuse_lost(told: Iterable[tuple[set[Path], set[Path]]]) -> None:
    """
    Args:
        told: `shares` of every rank.

    Raises:
        ValueError: naming what each rank leaves to another one, which does not have it.
    """
    saved, expected = (set[Path]().union(*paths) for paths in zip(*told, strict=True))
    if lost := sorted(key_of(path[1:]) for path in expected - saved):
        raise ValueError(
            f"not all ranks that hold copies of {listed(lost)} give it, and those that do left it to one that does "
            "not: pass it on all ranks of its mesh"
        )


def digests(items: Mapping[Path, torch.Tensor | Pickled], model: nn.Module | None) -> dict[Path, int]:
    """A checksum of everything in which ranks may differ: pickled objects; plain tensors of the scheduler and of extra;
    buffers and extra state of ``model``; and plain tensors in the state of sharded parameters, since an optimizer may
    have made them from its rank's shard."""
    found = {path: zlib.crc32(item.data) for path, item in items.items() if isinstance(item, Pickled)}
    buffers: set[Path] = set()
    sharded: set[str] = set()
    if model is not None:
        # With every name of a shared buffer: all of them are saved, and loaded into the same memory.
        buffers = {(MODEL, plain_name(model, key)) for key, _ in model.named_buffers(remove_duplicate=False)}
        sharded = {own[0] for parameter, own in parameter_names(model).items() if isinstance(parameter, DTensor)}
    for path, item in items.items():
        may_differ = path[0] in (SCHEDULER, EXTRA) or path in buffers
        may_differ |= path[0] == MODEL and str(path[-1]).split(".")[-1] == "_extra_state"
        may_differ |= path[:2] == (OPTIMIZER, STATE) and len(path) > 2 and str(path[2]) in sharded
        if may_differ and isinstance(item, torch.Tensor) and is_plain(item):
            found[path] = checksum(item)
    return found


def apart(
    items: Mapping[Path, torch.Tensor | Pickled], all_digests: Sequence[Mapping[Path, int]], rank: int
) -> dict[Path, torch.Tensor | Pickled]:
    """``items`` of ``rank``, with paths of their own for those that differ from the first rank that has them.

    Args:
        items: of this rank.
        all_digests: `digests` of every rank.
        rank: position of this rank among them.
    """
    common: dict[Path, int] = {}
    for own in reversed(all_digests):
        common.update(own)
    mine = all_digests[rank]
    return {
        (RANKS, str(rank), *path) if path in mine and mine[path] != common[path] else path: item
        for path, item in items.items()
    }
