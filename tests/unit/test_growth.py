"""What an operation costs grows as the model does, and not as its square: counted in calls of Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import fully_shard, load_full_state_dict
from shardwise.fairscale import FullyShardedDataParallel

Mesh = Callable[..., DeviceMesh]
Operation = Callable[[nn.Module], Any]
FEW, TIMES = 16, 4


class Nested(nn.Module):
    """Layers of which each but the last contains the next."""

    def __init__(self, depth: int):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = Nested(depth - 1) if depth > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.layer(x))


def calls_of_ours(operation: Operation, model: nn.Module) -> int:
    """How often functions of this package are entered, or go on as generators do."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "shardwise" in frame.f_globals.get("__name__", "")

    sys.setprofile(note)
    try:
        operation(model)
    finally:
        sys.setprofile(None)
    return count


def growth(make: Callable[[int], nn.Module], operation: Operation) -> float:
    """How many times the calls of an operation on a model are those on another that is smaller ``TIMES`` times."""
    operation(make(2))  # the first makes what the process keeps
    few, many = (calls_of_ours(operation, make(size)) for size in (FEW, FEW * TIMES))
    return many / few


def layers_of(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def layers(count: int, mesh: DeviceMesh) -> nn.Module:
    """That many layers in one unit."""
    return fully_shard(layers_of(count), mesh=mesh)


def nested(depth: int, mesh: DeviceMesh) -> nn.Module:
    """That many units, each inside of the one before."""
    model = Nested(depth)
    for module in reversed([*model.modules()]):
        if isinstance(module, Nested):
            fully_shard(module, mesh=mesh)
    return model


def load_whole(model: nn.Module) -> None:
    load_full_state_dict(model, {name: torch.ones(value.shape) for name, value in model.state_dict().items()})


def unjoined(count: int, _: DeviceMesh) -> nn.Module:
    """That many layers in FairScale's wrapper, each parameter of its own."""
    device = torch.device("cpu")
    return FullyShardedDataParallel(layers_of(count), flatten_parameters=False, compute_device=device)


OPERATIONS: dict[str, tuple[Callable[[int, DeviceMesh], nn.Module], Operation]] = {
    "load_state_dict": (layers, lambda model: model.load_state_dict(model.state_dict())),
    "assign": (layers, lambda model: model.load_state_dict(model.state_dict(), assign=True)),
    "load_full_state_dict": (layers, load_whole),
    "convert": (layers, lambda model: model.double()),
    "forward": (layers, lambda model: model(torch.ones(2, 4))),
    "convert nested": (nested, lambda model: model.double()),
    "forward nested": (nested, lambda model: model(torch.ones(2, 4))),
    "load_state_dict nested": (nested, lambda model: model.load_state_dict(model.state_dict())),
    "state_dict unjoined": (unjoined, lambda model: model.state_dict()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_grows_with_the_model(fake_mesh: Mesh, name: str) -> None:
    mesh = fake_mesh(1)
    make, operation = OPERATIONS[name]
    assert growth(lambda size: make(size, mesh), operation) < 1.5 * TIMES
