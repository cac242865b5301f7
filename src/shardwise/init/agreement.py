"""That all ranks make the same values: they must have recorded the same, and they start from one rank's state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.device import mesh_device
from ..core.errors import StateError
from .record import Record
from .streams import Position


def require_same(meshes: Sequence[DeviceMesh], records: Sequence[Record], asked: object) -> None:
    """
    Args:
        meshes: of all ranks that must agree. A collective on each.
        records: that are about to be replayed.
        asked: for what; compared by its representation.

    Raises:
        StateError: on all ranks, if they did not record or ask for the same.
    """
    state = hashlib.blake2b(repr(asked).encode(), digest_size=7)
    for record in records:
        state.update(record.digest())
    # Unsigned, and with room for a sign: its negative shows the smallest of all ranks' by the same maximum.
    mine = int.from_bytes(state.digest(), "little")
    for mesh in meshes:
        for axis in range(mesh.ndim):
            extremes = torch.tensor([mine, -mine], device=mesh_device(mesh))
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
            if extremes.tolist() != [mine, -mine]:
                raise StateError(
                    "materialize would give each rank parts of another model: the ranks passed different seeds, or the "
                    "constructor did different things on them. Pass one seed, and let nothing in the constructor "
                    "depend on the rank or on random numbers other than torch's"
                )


def share_states(meshes: Sequence[DeviceMesh], states: Mapping[Position, torch.Tensor]) -> dict[Position, torch.Tensor]:
    """The first rank's states of generators, in the order of ``states``. A collective on each of ``meshes``."""
    shared: dict[Position, torch.Tensor] = {}
    for position, state in states.items():
        value = state
        for mesh in meshes:
            for axis in reversed(range(mesh.ndim)):
                on_device = value.to(mesh_device(mesh), copy=True)
                dist.broadcast(on_device, group=mesh.get_group(axis), group_src=0)
                value = on_device.cpu()
        shared[position] = value
    return shared
