"""Iterations that the program ends: `set_manual_backward_finalization` and `finalize_backward`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise

from .harness import on_ranks
from .truth import batch, gradients_of

WIDTH = 7


def build(*, wraps: bool = True, **options: Any) -> Any:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3))
    for module in (model[0], model[2], model) if wraps else ():
        shardwise.fully_shard(module, **options)
    return model


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(batch(number, rank, 4, WIDTH)).square().sum()


def expect(model: Any, single: Any, numbers: list[int]) -> None:
    """Gradients of ``model`` are those of ``single`` on the batches of all ranks."""
    ranks = dist.get_world_size()
    single.zero_grad()
    for number in numbers:
        for rank in range(ranks):
            (loss_of(single, number, rank) / ranks).backward()
    expected = gradients_of(single)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name])


@on_ranks(2, 3, preset=["zero1", "zero2", "zero3", "ddp"], async_op=[False, True])
def test_gradients_of_several_backward_passes(preset: str, async_op: bool) -> None:
    rank = dist.get_rank()
    model, single = build(placements=preset), build(wraps=False)
    assert model.finalize_backward() is None  # nothing before the first forward
    model.set_manual_backward_finalization(True)
    for step in range(2):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        for part in range(2):
            loss_of(model, 2 * step + part, rank).backward()
            assert all(not isinstance(parameter, DTensor) for parameter in model.parameters())
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=async_op)
        assert isinstance(handle, shardwise.GradientReductionHandle) == async_op
        if async_op:
            handle.wait()
            handle.wait()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        expect(model, single, [2 * step, 2 * step + 1])
        model.zero_grad()
    model.set_manual_backward_finalization(False)
    loss_of(model, 0, rank).backward()
    expect(model, single, [0])


@on_ranks(2, preset=["zero1", "zero3"])
def test_synchronized_backward_passes(preset: str) -> None:
    """Strategies that keep whole gradients reduce them at the end alone, whatever is said of the last backward."""
    model, single = build(placements=preset), build(wraps=False)
    model.set_manual_backward_finalization(True)
    model.set_is_last_backward(True)
    for part in range(2):
        loss_of(model, part, dist.get_rank()).backward()
        sharded = [parameter.grad for parameter in model.parameters()]
        assert all((gradient is None) == (preset == "zero1") for gradient in sharded)
    model.finalize_backward()
    expect(model, single, [0, 1])


@on_ranks(2, preset=["zero1", "zero3"])
def test_one_backward_of_units_that_share_a_context(preset: str) -> None:
    """The first forward begins the first pass, which no root announces."""
    model, single = build(placements=preset, comm_ctx=shardwise.FSDPCommContext("cpu")), build(wraps=False)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, dist.get_rank()).backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    expect(model, single, [0])


@on_ranks(4)
def test_two_axes() -> None:
    model, single = build(mesh=init_device_mesh("cpu", (2, 2))), build(wraps=False)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, dist.get_rank()).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    with pytest.raises(RuntimeError, match=r"gradients of unit '.*' would not be all-reduced"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    expect(model, single, [0])


@on_ranks(2)
def test_refusals() -> None:
    rank, model, single = dist.get_rank(), build(), build(wraps=False)
    loss_of(model, 0, rank).backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="only after set_manual_backward_finalization"):
        model.finalize_backward()
    for method in (model[0].finalize_backward, lambda: model[0].set_manual_backward_finalization(True)):
        with pytest.raises(RuntimeError, match=r"was called on '0'; call it on the root"):
            method()
    model.set_manual_backward_finalization(True)
    caught = []

    def inside(_: torch.Tensor) -> None:
        for call in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
            with pytest.raises(RuntimeError, match="before backward was over") as error:
                call()
            caught.append(error)

    model.set_requires_gradient_sync(False)
    x = batch(0, rank, 4, WIDTH).requires_grad_()
    x.register_hook(inside)  # after the units' backward
    loss = model(x).square().sum()
    loss.register_hook(inside)  # before it
    loss.backward()
    assert len(caught) == 4
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    for call in (model.finalize_backward, lambda: loss_of(model, 0, rank)):
        with pytest.raises(RuntimeError, match=r"call wait\(\) before"):
            call()
    handle.wait()
    expect(model, single, [0])
    model.zero_grad()
    loss_of(model, 1, rank).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="dropped by reset_iter_state"):
        handle.wait()
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    loss_of(model, 1, rank).backward()
    expect(model, single, [1])


@on_ranks(2)
def test_a_unit_inside_is_told_before_the_root_is_known() -> None:
    rank, model, single = dist.get_rank(), build(), build(wraps=False)
    model[2].set_manual_backward_finalization(True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was called on '2' .* call it on the root"):
            loss_of(model, 0, rank)
    model[2].set_manual_backward_finalization(False)
    model.set_manual_backward_finalization(True)
    loss_of(model, 0, rank).backward()
    model.finalize_backward()
    expect(model, single, [0])


@on_ranks(2, preset=["zero1", "zero3"])
def test_roots_that_share_a_unit(preset: str) -> None:
    """It was refused as if the shared unit were told; and one root's iteration left what reduces in the other's."""
    rank = dist.get_rank()
    single = [build(wraps=False) for _ in range(2)]
    models = [build(wraps=False) for _ in range(2)]
    for one, other in (single, models):
        other[2] = one[2]
    for module in (models[0][2], *models):
        shardwise.fully_shard(module, placements=preset)
    for model in models:
        model.set_manual_backward_finalization(True)
    for step in range(4):
        model = models[step % 2]
        for number in (step, step + 1):
            loss_of(model, number, rank).backward()
        model.finalize_backward()
        expect(model, single[step % 2], [step, step + 1])
        model.zero_grad()


@on_ranks(2)
def test_after_a_backward_that_failed() -> None:
    """It was said to run still."""
    model, fails = build(), True

    def fail(_: torch.Tensor) -> None:
        if fails:
            raise ValueError("own")

    model[0].weight.register_post_accumulate_grad_hook(fail)
    model.set_manual_backward_finalization(True)
    loss = loss_of(model, 0, dist.get_rank())
    with pytest.raises(ValueError, match="own"):
        loss.backward()
    with pytest.raises(RuntimeError, match="or after an exception stopped it"):
        model.finalize_backward()
    fails = False
    model.zero_grad()
    loss_of(model, 0, dist.get_rank()).backward()
    model.finalize_backward()
    expect(model, build(wraps=False), [0])
