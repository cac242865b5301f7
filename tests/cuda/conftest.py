"""These tests need a GPU. ``SHARDWISE_REHEARSE=cpu`` runs their bodies on the CPU, which shows that they run at all,
``SHARDWISE_REHEARSE=simulated`` on a device that shows what reads memory before it is written or after it is freed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..ranks import harness
from .cases import BACKENDS, DEVICE, set_up

NOT_SIMULATED = (
    *("buffers", "ConvNet", "process_group_memory", "symmetric_memory", "network", "by_oss", "fairscale"),
    *("_scaled", "test_init_draws", "test_fast_init", "by_name", "flexible"),
)
"""torch gives private devices no memory of process groups, no DLPack and no autocast, and moves no `.data` there; this
one has no generators of its own, and frameworks do not know its name."""

IS_THERE = {"cuda": torch.cuda.is_available(), "simulated": shutil.which("c++") is not None, "cpu": True}[DEVICE]

if IS_THERE:
    harness.BACKEND = BACKENDS[DEVICE]
    if DEVICE == "simulated":
        from . import simulated

        harness.PRELOADED.append(simulated.__name__)

HERE = Path(__file__).parent

World = Callable[[int], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if DEVICE == "simulated" and any(word in item.nodeid for word in NOT_SIMULATED):
                item.add_marker(pytest.mark.skip(reason="torch cannot do this on private devices"))
            if not IS_THERE:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, or a C++ compiler for a simulated one"))


@pytest.fixture
def world() -> Iterator[World]:
    """Make this process rank 0 of a world: of one rank with real collectives, or of more, which do not exist."""

    def start(size: int) -> None:
        set_up(DEVICE)
        if size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        else:
            dist.init_process_group(BACKENDS[DEVICE], store=dist.HashStore(), rank=0, world_size=1)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
