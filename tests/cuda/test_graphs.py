"""Training steps captured into CUDA graphs: replays train as steps do, to the bit, and what is gathered before a replay
is not used after it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from bench.gpu import beside_current_stream

from ..models import MLP, inputs_for
from . import cases
from .cases import BF16, DEVICE, MIXED, Case, build
from .conftest import World


class Unused(MLP):
    """One layer has a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__((64, 64, 64))
        self.layers[0].register_parameter("spare", nn.Parameter(torch.ones(64)))


deep = functools.partial(Case, functools.partial(MLP, (64,) * 5))
in_micro_batches = functools.partial(deep, (8,), micro_batches=3)
CASES: dict[str, Case] = {
    "zero3": deep((8,)),
    "zero3_in_bf16": deep((8,), MIXED, dtype=BF16),
    "zero2": in_micro_batches({"placements": "zero2"}, before=cases.by_last_backward),
    "zero1_in_bf16": in_micro_batches({"placements": "zero1"} | MIXED, before=cases.by_last_backward, dtype=BF16),
    "ddp": deep((8,), {"placements": "ddp"}),
    "hsdp": deep((2, 4)),
    "partial_sums": deep((2, 4), before=cases.partial_sums, micro_batches=3),
    "smaller_world": deep((8,), {"reshard_after_forward": 2}),
    "uneven": Case(functools.partial(MLP, (65, 127, 33, 10)), (8,)),
    "by_sync": in_micro_batches(before=cases.by_sync),
    "kept": in_micro_batches(before=cases.keeping_parameters),
    "alone": deep((1,)),
    "unused": Case(Unused, (8,)),
}


class Trainer:
    """A case with an optimizer, always on the memory of the same inputs.

    Args:
        case: how to train.
        flat: whether the optimizer steps all of a unit as one tensor.
    """

    def __init__(self, case: Case, flat: bool = False):
        self.case, self.model = case, build(DEVICE, case)
        make: Any = functools.partial(shardwise.optim.flat, torch.optim.AdamW) if flat else torch.optim.AdamW
        self.optimizer = make(self.model.parameters(), lr=1e-2, capturable=DEVICE == "cuda")
        self.inputs = [self._inputs(part).clone() for part in range(case.micro_batches)]
        self.loss = torch.zeros((), device=DEVICE)

    def _inputs(self, seed: int) -> torch.Tensor:
        return inputs_for(self.case.model(), seed).to(DEVICE)

    def take(self, seed: int) -> None:
        """Other inputs from now on."""
        for part, inputs in enumerate(self.inputs):
            inputs.copy_(self._inputs(100 * seed + part))

    def step(self) -> None:
        """A whole training step, clipping included."""
        self.optimizer.zero_grad()
        for part, inputs in enumerate(self.inputs):
            self.case.before(self.model, part == len(self.inputs) - 1)
            loss = self.model(inputs).float().square().mean()
            loss.backward()
            self.loss.copy_(loss.detach())
        shardwise.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def evaluate(self) -> torch.Tensor:
        """The output of a forward without gradients."""
        with torch.no_grad():
            output: torch.Tensor = self.model(self.inputs[0])
        return output.clone()

    def captured(self) -> Callable[[], Any]:
        """What replays a step; where there are no graphs, a step."""
        if DEVICE != "cuda":
            return self.step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def warmed_up(case: Case, flat: bool = False) -> Trainer:
    """After some steps, beside the stream that captures cannot use."""
    trainer = Trainer(case, flat)
    with beside_current_stream() if DEVICE == "cuda" else contextlib.nullcontext():
        for _ in range(4):
            trainer.step()
    return trainer


@pytest.mark.parametrize("name", [*CASES, "flat"])
def test_replays_are_steps(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES["zero3" if name == "flat" else name]
    world(torch.Size(case.axes).numel())
    if case.axes != (1,):
        cases.give_ranks_the_same(monkeypatch)
    eager, graphed = warmed_up(case), warmed_up(case, flat=name == "flat")
    replay = graphed.captured()
    for seed in range(3):
        for trainer in (eager, graphed):
            trainer.take(seed)
        eager.step()
        replay()
        assert torch.equal(graphed.loss, eager.loss)
        # What this gathers of either is not what the next one has to use.
        for _ in range(2):
            assert torch.equal(graphed.evaluate(), eager.evaluate())
    for trainer in (eager, graphed):
        trainer.step()
    ours, truth = (dict(trainer.model.named_parameters()) for trainer in (graphed, eager))
    assert [key for key, value in truth.items() if not torch.equal(ours[key].to_local(), value.to_local())] == []


@pytest.mark.skipif(DEVICE != "cuda", reason="there are no graphs")
def test_a_capture_without_steps_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world(8)
    cases.give_ranks_the_same(monkeypatch)
    trainer = Trainer(CASES["zero3"])
    with pytest.raises(RuntimeError) as caught:
        trainer.captured()
    error: BaseException | None = caught.value
    messages = []
    while error is not None:  # torch's own comes last, when the capture ends
        messages.append(str(error))
        error = error.__context__
    assert any("run four training steps first" in message for message in messages), messages
