"""Makes sure that all ranks make the same values: they recorded the same, and they start from one rank's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.peers import Peers
from ..core.errors import StateError
from .record import Record
from .streams import Position


def require_same(
    meshes: Sequence[DeviceMesh],
    lacking: Sequence[tuple[str, DeviceMesh | None]],
    records: Sequence[Record],
    asked: object,
) -> None:
    """
    Args:
        meshes: of all ranks that must agree. Collectives on each.
        lacking: names of the tensors without values here, with the mesh of each that is sharded, whose ranks must all
            lack the values.
        records: that are about to be replayed.
        asked: what this rank asked for; compared by its representation.

    Raises:
        StateError: on all ranks, if they lack, record or ask for different things.
    """
    shared = [sorted(name for name, its_mesh in lacking if its_mesh == mesh) for mesh in meshes]
    plan = (asked, [record.digest() for record in records]) if lacking else None
    peers = [Peers(mesh) for mesh in meshes]
    lack_alike = [one.position_unlike(names) is None for one, names in zip(peers, shared, strict=True)]
    plan_alike = [one.position_unlike(plan) is None for one in peers]
    with failing_together(meshes):
        if not all(lack_alike):
            shown = ", ".join([repr(name) for name, _ in lacking[:3]] + (["..."] if len(lacking) > 3 else []))
            raise StateError(
                "materialize: ranks have different parameters on the meta device: "
                f"{f'{len(lacking)} of them ({shown})' if lacking else 'none'} on rank {dist.get_rank()}, others on "
                "another rank. Build the model alike on all ranks; nothing was changed"
            )
        if not all(plan_alike):
            raise StateError(
                "materialize would give each rank parts of another model: the ranks passed different seeds, have "
                "different tensors on the meta device, the constructor did different things on them, or some of them "
                "seeded or drew between two init_on_meta contexts. Pass one seed, do the same between contexts on all "
                "ranks, and let nothing in the constructor depend on the rank or on random numbers other than torch's"
            )


@contextmanager
def failing_together(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """What a rank does inside by itself succeeds on all ranks of ``meshes``, or raises on all, as in `Peers.together`.
    The first mesh is asked first."""
    with ExitStack() as stack:
        for mesh in reversed(meshes):
            stack.enter_context(Peers(mesh).together())
        yield


def share_states(meshes: Sequence[DeviceMesh], states: Mapping[Position, torch.Tensor]) -> dict[Position, torch.Tensor]:
    """The first rank's states of generators, in the order of ``states``. Collectives on each of ``meshes``."""
    peers = [Peers(mesh) for mesh in meshes]
    shared: dict[Position, torch.Tensor] = {}
    for position, value in states.items():
        for one in peers:
            on_device = value.to(one.device, copy=True)
            one.broadcast(on_device)
            value = on_device.cpu()
        shared[position] = value
    return shared
