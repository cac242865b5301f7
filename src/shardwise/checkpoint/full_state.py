"""Whole state dicts of sharded models, gathered and loaded one tensor at a time."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..arguments import check_flag, check_flags
from ..core.agreement import doing
from ..core.device import untracked
from .groups import warn_of_groups
from .interrupts import held
from .matching import Match, WeightsError, check_ties, match
from .peers import Peers
from .progress import Progress
from .weights import VERSIONS, ModelWeights, Weight, peers_of, weights_of

BLOCK_BYTES = 2**24
"""Bytes broadcast at a time, rounded down to whole rows, of which there is at least one."""


@held()
@untracked()
@doing("gathering the full state dict")
def full_state_dict(model: nn.Module, *, cpu: bool = True, rank0_only: bool = True) -> dict[str, Any]:
    """The model's state dict with whole plain tensors, none of which shares memory with the model.

    All ranks that hold the model call this. A rank needs memory for what it keeps and for one whole tensor.

    Args:
        model: with units or without, and with values.
        cpu: whether the tensors are on the host; otherwise on the device that the model computes on.
        rank0_only: whether the first rank alone keeps them; the others get an empty dict.

    Returns:
        The keys of ``model.state_dict()``, in its order, and the versions of modules that it notes for
        `load_state_dict`. Names of a tied parameter have the same tensor.

    Raises:
        ValueError: naming tensors without values, or sharded ones that ranks do not have alike; on all ranks.
        TypeError: for an argument of a wrong type; on all ranks.
        RuntimeError: on all ranks, naming a tensor that one of them cannot keep, as when its memory is full.
    """
    peers = peers_of(model, of_world=True)
    with peers.together():
        check_flags(full_state_dict, "full_state_dict", {"cpu": cpu, "rank0_only": rank0_only})
        state = weights_of(model, asked_by="full_state_dict")
        state.check_values()
    warn_of_groups("full_state_dict", peers, state.tensors)
    gathered = {name: (w.dtype, w.shape) for w in state.weights if isinstance(w.tensor, DTensor) for name in w.names}
    peers.refuse_unlike("full_state_dict", gathered, list(gathered.items()), otherwise="order of tensors")
    keeps = peers.is_first or not rank0_only
    values: dict[str, Any] = {name: value for name, (_, value) in state.objects.items()}
    # Raised at the end: until then the others wait for this rank.
    failures: dict[str, Exception] = {}
    with Progress("Gathering", sum(w.nbytes for w in state.weights), shown=peers.is_first) as progress:
        for weight in state.weights:
            whole = weight.gather()
            with _noting(weight.names[0], failures):
                if keeps and not failures:
                    values.update(dict.fromkeys(weight.names, _kept(whole, weight.local, cpu=cpu)))
            del whole
            progress.advance(weight.nbytes)
    with peers.together():
        for name, error in failures.items():
            raise RuntimeError(f"full_state_dict cannot keep {name!r}: {error}") from error
    if not keeps:
        return {}
    whole_state = OrderedDict((name, values[name]) for name in state.names)
    if state.versions is not None:  # without them, modules would take their own layout for one of an old version
        setattr(whole_state, VERSIONS, state.versions)
    return whole_state


def _kept(whole: torch.Tensor, live: torch.Tensor, *, cpu: bool) -> torch.Tensor:
    """``whole``, which may share the memory of ``live``, in memory of its own."""
    kept = whole.cpu() if cpu else whole
    return kept.clone() if kept.device == live.device and kept.data_ptr() == live.data_ptr() else kept


@dataclass(frozen=True)
class _Description:
    """Shape and dtype of a tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@held()
@doing("loading a full state dict")
def load_full_state_dict(model: nn.Module, sd: Mapping[str, Any] | None, *, broadcast_from_rank0: bool = True) -> None:
    """Load a state dict with whole plain tensors; all ranks that hold the model call this.

    Each rank keeps its shards; beside them it needs memory for a block of rows. Values are converted to the dtypes
    that the model has, and parameters on the meta device get memory, as the same objects. Nothing is written before
    everything was checked.

    Args:
        model: with units or without.
        sd: tensors by the names of ``model.state_dict()``; of a tied parameter one name is enough.
        broadcast_from_rank0: whether to broadcast the first rank's ``sd`` and ignore the others', which may be ``{}``
            or None; otherwise every rank passes the whole state dict, and no values are communicated.

    Raises:
        ValueError: (also a RuntimeError) listing all missing, unexpected and mis-shaped names, and values that are
            not whole tensors, together; or, of a sharded model, if ranks differ in ``broadcast_from_rank0``; on all
            ranks.
        TypeError: if ``sd`` is not a dict, or another argument of a wrong type.
    """
    peers = peers_of(model, of_world=broadcast_from_rank0)
    with peers.together():
        check_flag("load_full_state_dict", "broadcast_from_rank0", broadcast_from_rank0)
    rule = "give all ranks that hold the model the same"
    peers.exchange_given({"broadcast_from_rank0": bool(broadcast_from_rank0)}, None, rule)
    with peers.together():
        loading = weights_of(model, asked_by="load_full_state_dict").with_extra_as_objects()
    load_weights(loading, peers, sd, broadcast_from_rank0=broadcast_from_rank0)


@held()
@torch.no_grad()
def load_weights(
    loading: ModelWeights, peers: Peers, sd: Mapping[str, Any] | None, *, broadcast_from_rank0: bool = True
) -> None:
    """What `load_full_state_dict` does, for ``loading``, which ``peers`` hold and which has extra state among its
    objects."""
    has_values = peers.is_first or not broadcast_from_rank0
    with peers.together():
        tensors, objects, problems = sort_state(loading, sd) if has_values else ({}, {}, [])
        described = {name: _Description(tuple(value.shape), value.dtype) for name, value in tensors.items()}
        packed = _packed((described, objects, problems)) if broadcast_from_rank0 else b""
    if broadcast_from_rank0:
        described, objects, problems = pickle.loads(peers.exchange(packed)[0])
    with peers.together():
        matches, _ = match(loading, described, "the state dict", objects=objects, problems=problems)
        if has_values:
            refuse_untied(matches, tensors)
    if broadcast_from_rank0:
        matches = _in_one_order(matches, list(described), peers)
    with peers.together():
        for found in matches:
            found.weight.prepare_memory(loading.device)
    _write(matches, tensors, peers, broadcast_from_rank0=broadcast_from_rank0)
    with peers.together():
        for found in matches:
            found.weight.accept_values()
        loading.set_extra_state(objects)


def _in_one_order(matches: Iterable[Match], names: Sequence[str], peers: Peers) -> list[Match]:
    """``matches`` as all ranks order them, whatever the order of each one's modules. A collective.

    Args:
        matches: of this rank.
        names: of all that is stored, in an order that ranks share.
        peers: that are about to broadcast what is stored, one after the other.

    Raises:
        ValueError: on all ranks, naming tensors that they do not have alike.
    """
    position = {name: number for number, name in enumerate(names)}
    ordered = sorted(matches, key=lambda found: min(position[name] for name in found.stored))
    tensors = {name: (found.weight.dtype, found.weight.shape) for found in ordered for name in found.stored}
    plan = [(sorted(found.stored), found.weight.dtype) for found in ordered]
    peers.refuse_unlike("loading a full state dict", tensors, plan, otherwise="ties between parameters")
    return ordered


def sort_state(
    loading: ModelWeights, sd: Mapping[str, Any] | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str]]:
    """The tensors of a state dict, but for those that have no shape, its other objects, and what is wrong with them.

    Raises:
        TypeError: if it is not a dict.
    """
    if not isinstance(sd, Mapping):
        raise TypeError(f"the state dict must be a dict on every rank whose values count, not {type(sd).__name__}")
    tensors = {n: v for n, v in sd.items() if isinstance(v, torch.Tensor) and n not in loading.objects}
    wrong = {
        "keys that are not strings": [n for n in sd if not isinstance(n, str)],
        "keys of DTensors (give whole tensors: full_tensor())": [
            n for n, v in tensors.items() if isinstance(v, DTensor)
        ],
        "keys of tensors on the meta device": [n for n, v in tensors.items() if v.is_meta],
        "keys of tensors that are sparse, nested or quantized (give dense ones)": [
            n for n, v in tensors.items() if v.layout is not torch.strided or v.is_nested or v.is_quantized
        ],
    }
    problems = [f"{kind}: {', '.join(map(repr, names))}" for kind, names in wrong.items() if names]
    objects = {name: value for name, value in sd.items() if name not in tensors}
    return {name: value for name, value in tensors.items() if not value.is_nested}, objects, problems


def refuse_untied(matches: Iterable[Match], tensors: Mapping[str, torch.Tensor]) -> None:
    """
    Raises:
        WeightsError: naming tied weights of which ``tensors`` has several names with different values.
    """
    check_ties(matches, "the state dict", lambda w, a, b: not _equal(tensors[a], tensors[b], w.dtype))


def _packed(values: object) -> bytes:
    """
    Raises:
        TypeError: if they cannot be pickled for the other ranks.
    """
    try:
        return pickle.dumps(values)
    except Exception as error:
        raise TypeError(
            f"the state dict has a value that is not a tensor and cannot be sent to the other ranks: {error}"
        ) from error


def _equal(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors of one shape have the same bits once converted to ``dtype``."""
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype is b.dtype:
        return True
    bits_a, bits_b = (tensor.to(b.device, dtype).reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(bits_a, bits_b)


def _write(
    matches: Sequence[Match], tensors: Mapping[str, torch.Tensor], peers: Peers, *, broadcast_from_rank0: bool
) -> None:
    """Give every rank its part of ``tensors``, the first rank's or its own.

    Raises:
        WeightsError: on all ranks, naming a tensor that one of them cannot read; others have been written then.
    """
    failures: dict[str, Exception] = {}
    # One for all: of blocks made one by one, a backend holds the one before while the next is made.
    size = max((_rows_at_once(found.weight) * _row_bytes(found.weight) for found in matches), default=0)
    staging = torch.empty(size if broadcast_from_rank0 else 0, dtype=torch.uint8, device=peers.device)
    with Progress("Loading", sum(found.weight.nbytes for found in matches), shown=peers.is_first) as progress:
        for found in matches:
            name = found.stored[0]
            # Raised at the end: until then the others wait for this rank.
            if broadcast_from_rank0:
                _spread(found.weight, name, tensors.get(name), peers, failures, staging)
            else:
                with _noting(name, failures):
                    found.weight.write_rows(tensors[name], 0)
            progress.advance(found.weight.nbytes)
    with peers.together():
        for name, error in failures.items():
            raise WeightsError(f"the state dict's {name!r} cannot be read: {error}") from error


@contextlib.contextmanager
def _noting(name: str, failures: dict[str, Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.setdefault(name, error)


def _row_bytes(weight: Weight) -> int:
    return math.prod(weight.shape[1:]) * weight.dtype.itemsize


def _rows_at_once(weight: Weight) -> int:
    rows = math.prod(weight.shape[:1])
    return min(rows, max(1, BLOCK_BYTES // max(1, _row_bytes(weight))))


def _spread(
    weight: Weight,
    name: str,
    value: torch.Tensor | None,
    peers: Peers,
    failures: dict[str, Exception],
    staging: torch.Tensor,
) -> None:
    """Give every rank its part of the first rank's ``value``, by way of ``staging``."""
    shape = weight.shape or (1,)
    if not math.prod(shape):
        return
    count = _rows_at_once(weight)
    for start in range(0, shape[0], count):
        size = min(count, shape[0] - start)
        block = staging[: size * _row_bytes(weight)].view(weight.dtype).view(size, *shape[1:])
        with _noting(name, failures):
            if value is not None:
                block.copy_(value.reshape(shape)[start : start + size])
        peers.broadcast(block)
        with _noting(name, failures):
            weight.write_rows(block, start)
