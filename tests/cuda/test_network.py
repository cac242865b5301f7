"""The modelled network on a GPU: values of a fake group, and one collective at a time whatever the stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from bench.contenders import FSDP2, SHARDWISE, make_contender
from bench.model import Shape
from bench.network import Network, modelled_network

from ..needs import needs_results
from .cases import DEVICE, set_up
from .conftest import World

SHAPE = Shape(blocks=3, width=128, batch=1, length=8)
WORLD = 8


def losses(name: str) -> list[float]:
    contender = make_contender(name, SHAPE, device=DEVICE)
    return [contender.step() for _ in range(3)]


@pytest.mark.parametrize("name", [SHARDWISE, FSDP2])
def test_trains_alike_however_slow(name: str) -> None:
    set_up(DEVICE)
    with modelled_network(WORLD):
        expected = losses(name)
    assert expected[0] > expected[1] > expected[2]
    with modelled_network(WORLD, Network(latency=1e-4, bandwidth=1e9)) as wires:
        assert losses(name) == expected
    assert wires.log


@pytest.mark.parametrize("name", [SHARDWISE, FSDP2])
@needs_results
def test_trains_as_on_a_fake_group(world: World, name: str) -> None:
    world(WORLD)
    expected = losses(name)
    with modelled_network(WORLD):
        assert losses(name) == expected


def test_a_link_serves_one_stream_after_the_other() -> None:
    set_up(DEVICE)
    stream: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    if DEVICE == "cuda":
        stream = lambda: torch.cuda.stream(torch.cuda.Stream())  # noqa: E731
    with modelled_network(WORLD, Network(latency=0.1)) as wires:
        with stream():
            first = dist.all_reduce(torch.ones(8, device=DEVICE), async_op=True)
        wires.network = Network()
        with stream():
            second = dist.all_reduce(torch.ones(8, device=DEVICE), async_op=True)
            assert first is not None
            assert second is not None
            second.wait()
            if DEVICE == "cuda":
                torch.cuda.current_stream().synchronize()
            assert first.is_completed()
