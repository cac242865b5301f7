"""Makes sure that all ranks make the same values: they recorded the same, and they start from one rank's state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..core.comm import Comm, comm_for
from ..core.errors import StateError
from ..core.mesh import mesh_device
from .record import Record
from .streams import Position

_FAILED = 1 << 62
"""Larger than the number of any rank that did not fail."""
_DIFFERS = 1 << 61
"""The number of a rank on which other tensors lack values than on its peers."""


def require_same(
    meshes: Sequence[DeviceMesh],
    lacking: Sequence[tuple[str, DeviceMesh | None]],
    records: Sequence[Record],
    asked: object,
) -> None:
    """
    Args:
        meshes: of all ranks that must agree. Two collectives on each.
        lacking: names of the tensors without values here, with the mesh of each that is sharded, whose ranks must all
            lack the values.
        records: that are about to be replayed.
        asked: what this rank asked for; compared by its representation.

    Raises:
        StateError: on all ranks, if they lack, record or ask for different things, or one of them failed.
    """
    differs = []
    for mesh in meshes:
        shared = sorted(name for name, its_mesh in lacking if its_mesh == mesh)
        number = _number([repr(shared).encode()])
        differs.append(_extremes([mesh], number) != (number, number))
    parts = [repr(asked).encode(), *(record.digest() for record in records)] if lacking else []
    mine = _DIFFERS if any(differs) else _number(parts)
    largest, smallest = _extremes(meshes, mine)
    if largest == _FAILED:
        raise StateError("materialize failed on another rank, whose error tells why; nothing was changed")
    if largest == _DIFFERS:
        shown = ", ".join([repr(name) for name, _ in lacking[:3]] + (["..."] if len(lacking) > 3 else []))
        raise StateError(
            "materialize: ranks have different parameters on the meta device: "
            f"{f'{len(lacking)} of them are here ({shown})' if lacking else 'here there are none'}, others are on "
            "another rank. Build the model alike on all ranks; nothing was changed"
        )
    if not largest == mine == smallest:
        raise StateError(
            "materialize would give each rank parts of another model: the ranks passed different seeds, have different "
            "tensors on the meta device, the constructor did different things on them, or some of them seeded or drew "
            "between two init_on_meta contexts. Pass one seed, do the same between contexts on all ranks, and let "
            "nothing in the constructor depend on the rank or on random numbers other than torch's"
        )


def _number(parts: Iterable[bytes]) -> int:
    state = hashlib.blake2b(digest_size=7)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little")


@contextmanager
def telling_failure(meshes: Sequence[DeviceMesh], times: int = 2) -> Iterator[None]:
    """After an error inside, the other ranks raise too, when they next ask whether a rank has failed. This rank answers
    each mesh as many ``times`` as they ask it there; `require_same` asks each mesh twice."""
    try:
        yield
    except BaseException:  # an interrupt too
        for _ in range(times):
            _extremes(meshes, _FAILED)
        raise


@contextmanager
def failing_together(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """What a rank does inside by itself succeeds on all ranks, or raises on all. A collective on each of ``meshes``.

    Raises:
        StateError: if another rank failed.
    """
    with telling_failure(meshes, times=1):
        yield
    if _extremes(meshes, 0)[0] == _FAILED:
        raise StateError(
            "materialize failed on another rank, whose error tells why; sharded parameters that had no values "
            "still have none: call it again"
        )


def _extremes(meshes: Sequence[DeviceMesh], mine: int) -> tuple[int, int]:
    """The largest and the smallest of all ranks' numbers. Every mesh axis is asked: ranks that differ may share only
    the last one."""
    smallest = largest = mine
    for comm, device in _comms(meshes):
        smallest, largest = comm.widen(smallest, largest, device)
    return largest, smallest


def share_states(meshes: Sequence[DeviceMesh], states: Mapping[Position, torch.Tensor]) -> dict[Position, torch.Tensor]:
    """The first rank's states of generators, in the order of ``states``. A collective on each of ``meshes``."""
    shared: dict[Position, torch.Tensor] = {}
    for position, state in states.items():
        value = state
        for comm, device in _comms(meshes):
            on_device = value.to(device, copy=True)
            for work in comm.broadcast(on_device, 0):
                work.wait()
            value = on_device.cpu()
        shared[position] = value
    return shared


def _comms(meshes: Sequence[DeviceMesh]) -> Iterator[tuple[Comm, torch.device]]:
    for mesh in meshes:
        device = mesh_device(mesh)
        for axis in reversed(range(mesh.ndim)):
            yield comm_for(mesh.get_group(axis), device), device
