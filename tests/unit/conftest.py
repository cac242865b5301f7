"""A process group without processes, and what it gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.core.comm import Comm


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """Make a mesh of this many ranks, of which this process is ``rank``; nothing is communicated."""

    def make(*shape: int, rank: int = 0) -> DeviceMesh:
        size = 1
        for length in shape:
            size *= length
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        names = ("replicate", "shard")[-len(shape) :]
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ranks of each gather so far."""
    sizes: list[int] = []
    gather = Comm.all_gather

    def noted(comm: Comm, *args: Any) -> Any:
        sizes.append(comm.size)
        return gather(comm, *args)

    monkeypatch.setattr(Comm, "all_gather", noted)
    return sizes
