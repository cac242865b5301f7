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
    peers: Sequence[Peers],
    lacking: Sequence[tuple[str, DeviceMesh | None, object]],
    records: Sequence[Record],
    asked: object,
) -> None:
    """
    Args:
        peers: all ranks that must agree, of each mesh. Collectives on each.
        lacking: names of the tensors without values here, with the mesh of each that is sharded, whose ranks must all
            lack the values, and what in ``records`` gives it values, compared by its representation.
        records: that are about to be replayed.
        asked: what this rank asked for; compared by its representation.

    Raises:
        StateError: on all ranks, if they lack, record or ask for different things.
    """
    plan = (asked, [record.digest() for record in records]) if lacking else None
    lack_alike, plan_alike = True, True
    for one in peers:
        own = sorted((name, repr(origin)) for name, mesh, origin in lacking if mesh == one.mesh)
        names, planned = one.positions_unlike([name for name, _ in own], (plan, own))
        lack_alike, plan_alike = lack_alike and names is None, plan_alike and planned is None
    if len(peers) < 2 and lack_alike and plan_alike:
        return  # on all ranks
    with failing_together(peers):
        if not lack_alike:
            shown = ", ".join([repr(name) for name, *_ in lacking[:3]] + (["..."] if len(lacking) > 3 else []))
            raise StateError(
                "materialize: ranks have different parameters on the meta device: "
                f"{f'{len(lacking)} of them ({shown})' if lacking else 'none'} on rank {dist.get_rank()}, others on "
                "another rank. Build the model alike on all ranks; nothing was changed"
            )
        if not plan_alike:
            raise StateError(
                "materialize would give each rank parts of another model: the ranks passed different seeds, have "
                "different tensors on the meta device, the constructor did different things on them, as in another "
                "order, or some of them seeded or drew between two init_on_meta contexts. Pass one seed, do the same "
                "between contexts on all ranks, and let nothing in the constructor depend on the rank or on random "
                "numbers other than torch's"
            )


@contextmanager
def failing_together(peers: Sequence[Peers]) -> Iterator[None]:
    """What a rank does inside by itself succeeds on all ranks of ``peers``, or raises on all, as in `Peers.together`.
    The first ones are asked first."""
    with ExitStack() as stack:
        for one in reversed(peers):
            stack.enter_context(one.together())
        yield


def share_states(peers: Sequence[Peers], states: Mapping[Position, torch.Tensor]) -> dict[Position, torch.Tensor]:
    """The first rank's states of generators, in the order of ``states``. Collectives on each of ``peers``."""
    shared: dict[Position, torch.Tensor] = {}
    for position, value in states.items():
        for one in peers:
            on_device = value.to(one.device, copy=True)
            one.broadcast(on_device)
            value = on_device.cpu()
        shared[position] = value
    return shared
