"""These tests need a GPU. ``SHARDWISE_REHEARSE=1`` runs their bodies on the CPU, which shows that they run at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from .cases import DEVICE, set_up

HERE = Path(__file__).parent

World = Callable[[int], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def world() -> Iterator[World]:
    """Make this process rank 0 of a world: of one rank with real collectives, or of more, which do not exist."""

    def start(size: int) -> None:
        set_up(DEVICE)
        if size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        else:
            backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
