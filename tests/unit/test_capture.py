"""What a lane that is captured into a CUDA graph changes; `tests/cuda/test_graphs.py` captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise import CPUOffloadPolicy, Placements, fully_shard
from shardwise.core import lanes

from ..models import MLP, inputs_for, wrap
from ..needs import needs_results

Mesh = Callable[..., DeviceMesh]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether lanes are captured from now on."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(lanes._HostLane, "is_captured", property(lambda self: on))

    return switch


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(inputs_for(MLP(), 0))


def backward(model: Any) -> None:
    model(inputs_for(MLP(), 0)).sum().backward()


@pytest.mark.parametrize("options", [{"placements": Placements.zero2}, {}, {"reshard_after_forward": False}])
def test_parameters_that_were_kept_are_gathered_again(
    fake_mesh: Mesh, captures: Callable[[bool], None], gathers: list[int], options: dict[str, Any]
) -> None:
    model = wrap(MLP(), fully_shard, mesh=fake_mesh(4), **options)
    units = 1 + len(list(MLP().layers))
    evaluate(model)
    first = len(gathers)
    evaluate(model)
    assert len(gathers) - first < units  # some are kept
    for is_captured in (True, False, False):  # replays, of which nobody tells, may come between the last ones
        captures(is_captured)
        before = len(gathers)
        evaluate(model)
        assert len(gathers) - before >= first


@pytest.mark.parametrize("unused", [False, pytest.param(True, marks=needs_results)])
def test_backward_before_any_other(fake_mesh: Mesh, captures: Callable[[bool], None], unused: bool) -> None:
    model = MLP()
    if unused:
        model.layers[0].register_parameter("spare", torch.nn.Parameter(torch.ones(4)))
    fully_shard(model, mesh=fake_mesh(4))
    captures(True)
    with pytest.raises(RuntimeError, match=r"captured into a CUDA graph.*run four training steps first"):
        backward(model)
    captures(False)
    for _ in range(4):
        backward(model)
    captures(True)
    model.zero_grad()
    backward(model)
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == (["layers.0.spare"] if unused else [])


def test_offloaded_gradients(
    fake_mesh: Mesh, captures: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.core.gradient.is_elsewhere", lambda tensor, device: True)
    model = fully_shard(MLP(), mesh=fake_mesh(4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for _ in range(4):
        backward(model)
    captures(True)
    with pytest.raises(RuntimeError, match="gradients of offloaded parameters go to the host"):
        backward(model)
