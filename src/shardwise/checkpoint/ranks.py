"""The ranks that save and load a checkpoint together."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..core.agreement import explained
from ..core.comm import connect
from .peers import AGREEING, Peers

T = TypeVar("T")

SHORT = 1016
"""Bytes of a message that are sent along with its length."""

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, SavingRanks] = weakref.WeakKeyDictionary()


class SavingRanks(Peers):
    """All ranks of the default process group, or this process alone where there is none.

    They have connections of their own: a save runs beside training, whose collectives must not mix with the save's, and
    may go on after the process groups were destroyed. `torch.distributed.new_group` does not serve: its groups end with
    the default one, and change the names of groups that are made later.
    """

    def __init__(self, world: dist.ProcessGroup | None):
        super().__init__()
        self._connections: Any = None  # torch's types do not have its methods
        if world is not None and world.size() > 1:
            self.ranks, self.position = list(range(world.size())), world.rank()
            with explained("connecting the ranks that save and load"):
                self._connections = connect(world)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def exchange(self, value: T) -> list[T]:
        """All ranks' values (picklable), in the order of their ranks."""
        if self._connections is None:
            return [value]
        data = pickle.dumps(value)
        # Most values are short and take one collective, which carries the length and the beginning of each.
        heads = self._gather_all(_bytes(len(data).to_bytes(8, "little") + data[:SHORT], 8 + SHORT))
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        rest = max(sizes) - SHORT
        tails = self._gather_all(_bytes(data[SHORT:], rest)) if rest > 0 else [b""] * self.size
        return [pickle.loads((head[8:] + tail)[:size]) for head, tail, size in zip(heads, tails, sizes, strict=True)]

    def _gather_all(self, data: torch.Tensor) -> list[bytes]:
        received = [torch.empty_like(data) for _ in self.ranks]
        with explained(AGREEING):
            self._connections.allgather([received], [data]).wait()
        return [item.numpy().tobytes() for item in received]

    def gather(self, value: Any) -> list[Any] | None:
        """All ranks' values on the first; None on the others."""
        if self._connections is None:
            return [value]
        data = pickle.dumps(value)
        mine = _bytes(data, max(self.exchange(len(data))))
        received = [torch.empty_like(mine) for _ in self.ranks] if self.is_first else []
        with explained(AGREEING):
            self._connections.gather([received] if self.is_first else [], [mine], dist.GatherOptions()).wait()
        # Unpickling ignores the padding.
        return [pickle.loads(item.numpy().data) for item in received] if self.is_first else None

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """This rank's item of the first rank's ``values``; the other ranks pass None."""
        if self._connections is None:
            assert values is not None
            return values[0]
        items = [pickle.dumps(value) for value in values or ()]
        size = self.exchange(max(map(len, items), default=0))[0]
        received = _bytes(b"", size)
        given = [[_bytes(item, size) for item in items]] if self.is_first else []
        with explained(AGREEING):
            self._connections.scatter([received], given, dist.ScatterOptions()).wait()
        return pickle.loads(received.numpy().data)


def _bytes(data: bytes, size: int) -> torch.Tensor:
    """``data`` and zeros after it, ``size`` bytes together."""
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def saving_ranks() -> SavingRanks:
    """The ranks of the current default process group. The first call for each group is a collective."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return SavingRanks(None)
    if world not in _known:
        _known[world] = SavingRanks(world)
    return _known[world]
