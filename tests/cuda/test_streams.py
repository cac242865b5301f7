"""Stream races made likely: kernels that wait, on lanes and among the computation, must not change a bit.

Collectives are copies inside this process, queued on the lane as NCCL's kernels are, so that no wait of the host hides
a race; and memory that is free is written full of NaN.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from ..models import MLP
from . import cases
from .cases import BF16, DEVICE, MIXED, OFFLOAD, Case, Results
from .conftest import World

LONGEST = 2_000_000
"""Clock cycles of a pause: about a millisecond, many times what a layer computes."""
TOO_LONG = 20 * LONGEST
"""Longer than the host takes to come from a backward pass to the optimizer, also where others use the same cores."""


class Noise:
    """Pauses, of ``longest`` cycles, and rubbish at random times; ``where`` is "lanes", "compute", "both", or "" for
    silence."""

    def __init__(self, where: str = "", longest: int = LONGEST):
        self.random, self.longest = random.Random(where), longest
        self.places = {"lanes", "compute"} if where == "both" else {where}

    def pause(self, place: str) -> None:
        """Maybe let the current stream wait."""
        if place in self.places and self.random.random() < 0.5 and DEVICE == "cuda":
            torch.cuda._sleep(self.random.randrange(self.longest))

    def compute(self, *_: Any) -> None:
        """Maybe wait; write into memory that is free as far as the allocator knows."""
        self.pause("compute")
        for _round in range(3 if any(self.places) else 0):
            torch.full((2 ** self.random.randrange(12, 22),), torch.nan, device=DEVICE)

    def install(self, prepare: Any, model: Any) -> None:
        """Be heard before and after every layer, forward and backward."""

        def after(module: Any, inputs: Any, output: torch.Tensor) -> None:
            self.compute()
            if output.requires_grad:
                output.register_hook(self.compute)

        prepare(model)
        for layer in model.layers:
            layer.register_forward_pre_hook(self.compute)
            layer.register_forward_hook(after)


def train(monkeypatch: pytest.MonkeyPatch, case: Case, noise: Noise) -> Results:
    """Train with noise, as if all ranks had this one's data."""
    cases.give_ranks_the_same(monkeypatch, lambda: noise.pause("lanes"))

    def after(model: Any) -> None:
        case.after(model)
        noise.compute()

    noisy = replace(case, prepare=functools.partial(noise.install, case.prepare), after=after)
    return cases.train(DEVICE, noisy, steps=6)


wide = functools.partial(Case, functools.partial(MLP, (1024,) * 7))
in_micro_batches = functools.partial(wide, (8,), micro_batches=3)
CASES: dict[str, Case] = {
    "zero3": wide((8,)),
    "zero3_in_bf16": wide((8,), MIXED, dtype=BF16),
    "zero2": in_micro_batches({"placements": "zero2"}, before=cases.by_last_backward),
    "zero1_in_bf16": in_micro_batches({"placements": "zero1"} | MIXED, before=cases.by_last_backward),
    "ddp": wide((8,), {"placements": "ddp"}),
    "hsdp": wide((2, 4)),
    "partial_sums": wide((2, 4), before=cases.partial_sums, micro_batches=3),
    "partial_sums_in_bf16": wide((2, 4), MIXED, before=cases.partial_sums, micro_batches=3),
    "smaller_world": wide((8,), {"reshard_after_forward": 2}),
    "uneven": Case(functools.partial(MLP, (513, 1023, 1021, 510)), (8,)),
    "micro_batches": in_micro_batches(before=cases.by_sync),
    "kept": in_micro_batches(before=cases.keeping_parameters),
    "prefetch_two": wide((8,), prepare=functools.partial(cases.prefetch, 2)),
    "three_reductions": wide((8,), prepare=lambda model: model.set_reduce_scatter_max_input_buffers(3)),
    "event": wide((8,), after=cases.let_prefetch_early),
    "event_in_bf16": wide((8,), MIXED, after=cases.let_prefetch_early),
    "offloaded": wide((8,), OFFLOAD),
    "offloaded_in_bf16": in_micro_batches(OFFLOAD | MIXED, before=cases.by_last_backward),
}


# Where everything runs at once there are no pauses, but rubbish.
@pytest.mark.parametrize("where", ["lanes", "compute", "both"] if DEVICE == "cuda" else ["both"])
@pytest.mark.parametrize("name", CASES)
def test_delays_change_nothing(world: World, monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    world(torch.Size(CASES[name].axes).numel())
    quiet = train(monkeypatch, CASES[name], Noise())
    noisy = train(monkeypatch, CASES[name], Noise(where))
    assert noisy.keys() == quiet.keys()
    assert [key for key, value in quiet.items() if not torch.equal(noisy[key], value)] == []


@pytest.mark.parametrize("name", ["zero3", "ddp", "offloaded"])
def test_missing_waits_would_be_heard(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    world(torch.Size(CASES[name].axes).numel())
    quiet = train(monkeypatch, CASES[name], Noise())
    if DEVICE == "cuda":
        monkeypatch.setattr("shardwise.core.lanes._StreamTicket.wait", lambda self: None)
        monkeypatch.setattr("shardwise.core.lanes._StreamTicket.synchronize", lambda self: None)
    noisy = train(monkeypatch, CASES[name], Noise("lanes", TOO_LONG))
    assert any(not torch.equal(noisy[key], value) for key, value in quiet.items()) == (DEVICE == "cuda")
