"""No more collectives and no more bytes than torch FSDP2, case by case, as equations on the fake process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench.cases import CASES, OURS, THEIRS, Case, measure_case, with_adapters
from bench.counts import COUNTED, bytes_to_send
from bench.model import Shape
from shardwise import fully_shard

from ..models import Residual

Mesh = Callable[..., DeviceMesh]
SHAPE = Shape(blocks=3, width=128, batch=1, length=4)


def test_names_of_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_more_than_fsdp2(fake_mesh: Mesh, case: Case) -> None:
    if case.missing:
        pytest.skip(f"torch {torch.__version__}, {case.missing}")
    fake_mesh(case.ranks)
    ours, theirs = measure_case(case, OURS, SHAPE), measure_case(case, THEIRS, SHAPE)
    assert theirs.calls, "nothing was counted"
    for kind in COUNTED:
        assert ours.calls.get(kind, 0) <= theirs.calls.get(kind, 0), (kind, ours.calls, theirs.calls)
    assert ours.bytes <= theirs.bytes + ours.flags, f"{ours.bytes - theirs.bytes - ours.flags:.0f} bytes more"


def test_frozen_parameters_cost_no_reduction(fake_mesh: Mesh) -> None:
    case = next(case for case in CASES if case.make is with_adapters)
    fake_mesh(case.ranks)
    ours = measure_case(case, OURS, SHAPE)
    adapters = [parameter for parameter in with_adapters(SHAPE).parameters() if parameter.requires_grad]
    gradients = sum(bytes_to_send("reductions", 4 * parameter.numel(), case.ranks) for parameter in adapters)
    assert ours.calls["reductions"] == SHAPE.blocks
    assert ours.sent["reductions"] == gradients + ours.flags


def test_steps_that_only_differentiate_gradients_are_alike(fake_mesh: Mesh, gathers: list[int]) -> None:
    mesh = fake_mesh(2)
    block = Residual(nn.Linear(8, 8))
    # The first, last and a middle layer, and one unit twice.
    model: Any = nn.Sequential(nn.Linear(8, 8), block, block, nn.Linear(8, 8))
    for module in (model[0], block.layer, model[3], block, model):
        fully_shard(module, mesh=mesh)
    counts = []
    for _ in range(4):
        gathers.clear()
        x = torch.ones(4, 8, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
        counts.append(len(gathers))
    assert len({*counts[1:]}) == 1, counts
