"""torch's pipeline schedules over stages that are sharded over data-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

import shardwise

from .harness import on_ranks
from .truth import batch

WIDTH, MICRO_BATCHES = 9, 4


class Part(nn.Module):
    """One stage of the model: two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(
    verb: Any, schedule_class: Any, *, shares: bool = False, placements: str | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses (on the rank of the last stage) and whole parameters of this rank's stages after three steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = mesh["pp"].get_group()
    per_rank = 2 if schedule_class in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble) else 1
    # It takes the gradients of weights apart, from the parameters that are registered where backward begins.
    options: dict[str, Any] = {} if placements is None else {"placements": placements}
    if schedule_class is ScheduleInterleavedZeroBubble and placements in (None, "zero3"):
        options["reshard_after_forward"] = False
    stages, stage_count = [], 2 * per_rank
    for index in range(mesh["pp"].get_local_rank(), stage_count, 2):
        torch.manual_seed(index)
        part = Part()
        for layer in part.layers:
            verb(layer, mesh=mesh["dp"], **options)
        verb(part, mesh=mesh["dp"], **options)
        stages.append(PipelineStage(part, index, stage_count, torch.device("cpu"), group=group))
    if shares:
        shardwise.share_comm_ctx([stage.submod for stage in stages])
    given: Any = stages if per_rank > 1 else stages[0]
    schedule = schedule_class(given, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses: list[torch.Tensor] = []
    for step in range(3):
        data = batch(step, mesh["dp"].get_local_rank(), 2 * MICRO_BATCHES, WIDTH)
        own: list[torch.Tensor] = []
        target = {"target": data.flip(1), "losses": own} if stages[-1].is_last else {}
        schedule.step(*([data] if stages[0].is_first else []), **target)
        losses += [loss.detach() for loss in own]
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


@on_ranks(4, schedule_class=[ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
def test_stages_train_as_with_torch(schedule_class: Any) -> None:
    theirs, ours = train(torch_fully_shard, schedule_class), train(shardwise.fully_shard, schedule_class)
    for expected, found in zip(theirs, ours, strict=True):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@on_ranks(4, placements=["ddp", "zero1", "zero2", "zero3"], shares=[False, True])
def test_a_schedule_that_takes_gradients_of_weights_apart(placements: str, shares: bool) -> None:
    """All stages train, as with gradients that are taken at once."""
    kinds = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
    each = [train(shardwise.fully_shard, one, placements=placements, shares=shares) for one in kinds]
    for expected, found in zip(*each, strict=True):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other)


@on_ranks(4)
def test_stages_of_a_rank_that_share_their_context() -> None:
    """One of them is at the end of its iteration while the other is in the middle."""
    alone, together = (train(shardwise.fully_shard, ScheduleInterleaved1F1B, shares=shares) for shares in (False, True))
    for expected, found in zip(alone, together, strict=True):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
