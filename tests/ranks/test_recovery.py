"""After an exception: `reset_iter_state` makes the next step right, and ranks that lost a peer stop."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.core.group import ParamGroup
from shardwise.core.root import unit_of

from ..interruptions import interrupted
from ..models import Stack, Transformer, wrap
from .harness import RankError, assert_others_name, on_ranks, ranks
from .test_autograd import Layer, stack, token_iteration, wrap_like_the_seed
from .truth import (
    Record,
    Verb,
    assert_records,
    assert_resharded,
    assert_tensors,
    batch,
    check,
    gradients_of,
    make_optimizer,
    state_of,
    train_plain,
)

WIDTH = 9
PRESETS = ["ddp", "zero1", "zero2", "zero3"]


class PlannedError(Exception):
    """What the tests raise."""


class Fails(torch.autograd.Function):
    """Identity that fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise PlannedError


class Fragile(Layer):
    """A layer that can be told to fail."""

    where: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "before":
            raise PlannedError
        y = super().forward(x)
        if self.where == "after":
            raise PlannedError
        if self.where == "backward":
            y = Fails.apply(y)
        if self.where == "early_backward":
            return super().forward(Fails.apply(x))
        return y


def fragile_stack() -> Stack:
    return stack(Layer(), Fragile(), Layer())


def fail_in_forward_hook(model: Any) -> Callable[[], None]:
    def hook(*_: Any) -> None:
        raise PlannedError

    return model.layers[1].register_forward_hook(hook).remove


def fail_in_last(model: Any) -> Callable[[], None]:
    def hook(*_: Any) -> None:
        raise PlannedError

    return model.last.register_forward_hook(hook).remove


def fail_in_pre_hook(model: Any) -> Callable[[], None]:
    def hook(*_: Any) -> None:
        raise PlannedError

    return model.layers[1].linear.register_forward_pre_hook(hook).remove


def fail_in_backward_hook(model: Any) -> Callable[[], None]:
    def hook(*_: Any) -> None:
        raise PlannedError

    return model.layers[1].register_full_backward_hook(hook).remove


def fail_in_accumulate_hook(model: Any) -> Callable[[], None]:
    def hook(*_: Any) -> None:
        raise PlannedError

    return model.layers[1].gate.register_post_accumulate_grad_hook(hook).remove


def fail_at(where: str) -> Callable[[Any], Callable[[], None]]:
    """Let the fragile layer fail at a place, or a hook of it."""

    def arm(model: Any) -> Callable[[], None]:
        model.layers[1].where = where

        def disarm() -> None:
            model.layers[1].where = None

        return disarm

    return arm


FAILURES: dict[str, Callable[[Any], Callable[[], None]]] = {
    "before": fail_at("before"),
    "after": fail_at("after"),
    "backward": fail_at("backward"),
    "early_backward": fail_at("early_backward"),
    "forward_hook": fail_in_forward_hook,
    "pre_hook": fail_in_pre_hook,
    "backward_hook": fail_in_backward_hook,
    "accumulate_hook": fail_in_accumulate_hook,
}


def step_once(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss = model(batch(step, rank, 4, WIDTH)).square().mean()
    loss.backward()
    return loss


def train_around(
    model: Any,
    attempt: Callable[[int], None],
    before: tuple[int, ...],
    steps: int = 4,
    optimizer: torch.optim.Optimizer | None = None,
) -> Record:
    """Train; before some steps ``attempt`` does something that is to leave no trace."""
    record, optimizer = Record(), optimizer or make_optimizer(model)
    for step in range(steps):
        if step in before:
            attempt(step)
        record.note(step_once(model, step, dist.get_rank()), model)
        optimizer.step()
        optimizer.zero_grad()
    record.end(model)
    return record


def train_with_failures(
    model: Any,
    arm: Callable[[Any], Callable[[], None]],
    fail_in: tuple[int, ...],
    steps: int = 4,
    optimizer: torch.optim.Optimizer | None = None,
) -> Record:
    """Train; in some steps a first try fails on all ranks, and the step is tried again after a reset."""

    def attempt(step: int) -> None:
        disarm = arm(model)
        with pytest.raises(PlannedError):
            step_once(model, step + 70, dist.get_rank())
        disarm()
        model.reset_iter_state()
        assert_resharded(model)

    return train_around(model, attempt, fail_in, steps, optimizer)


def assert_like_plain(record: Record, make: Callable[[], nn.Module], steps: int = 4) -> None:
    """What remains is as if nothing had failed."""
    torch.manual_seed(1)
    assert_records(record, train_plain(make(), step_once, steps), "plain training", bitwise=False)


@on_ranks(1, 2, failure=list(FAILURES), reshard=[True, False])
def test_exception_on_all_ranks(failure: str, reshard: bool) -> None:
    torch.manual_seed(1)
    model = wrap(fragile_stack(), shardwise.fully_shard, reshard_after_forward=reshard)
    assert_like_plain(train_with_failures(model, FAILURES[failure], (0, 2, 3)), fragile_stack)


@on_ranks(2)
def test_exception_in_another_unit_on_each_rank() -> None:
    """Not reset, and all had been communicated: ranks that know of other forwards expect the same in backward."""
    torch.manual_seed(1)
    model: Any = wrap(stack(Layer(), Fragile(), Fragile()), shardwise.fully_shard)

    def attempt(step: int) -> None:
        disarm = fail_at("before")(SimpleNamespace(layers=model.layers[dist.get_rank() :]))
        with pytest.raises(PlannedError):
            step_once(model, step + 70, dist.get_rank())
        disarm()

    assert_like_plain(train_around(model, attempt, (2,)), lambda: stack(Layer(), Fragile(), Fragile()))


@on_ranks(
    2,
    keeps_resets=["nothing, nobody", "nothing, that rank", "nothing, all", "the root, all", "all, all"],
    grads=[True, False],
)
def test_exception_on_one_rank_behind_all_units(keeps_resets: str, grads: bool) -> None:
    """All leave out that step: where nothing failed there was a pass to which no backward came. Where that kept
    something gathered, all reset, or they would not gather alike."""
    keeps, resets = keeps_resets.split(", ")
    torch.manual_seed(1)
    model: Any = fragile_stack()
    if keeps == "nothing":
        for layer in (model.first, model.last):  # of the root there is nothing left to keep
            shardwise.fully_shard(layer)
    wrap(model, shardwise.fully_shard, **{"reshard_after_forward": False} if keeps == "all" else {})

    def attempt(step: int) -> None:
        fails = dist.get_rank() == 1
        disarm = fail_in_last(model) if fails else lambda: None
        with pytest.raises(PlannedError) if fails else contextlib.nullcontext(), torch.set_grad_enabled(grads):
            model(batch(step + 70, dist.get_rank(), 4, WIDTH))
        disarm()
        if resets == "all" or (fails and resets == "that rank"):
            model.reset_iter_state()
            assert_resharded(model)

    assert_like_plain(train_around(model, attempt, (2,)), fragile_stack)


@on_ranks(2, reshard=[True, False], places=["end, backward", "layer, nowhere", "layer, backward"])
def test_exceptions_at_other_places_on_each_rank(reshard: bool, places: str) -> None:
    """Whatever each has gathered then, a reset of all makes them gather alike."""
    torch.manual_seed(1)
    model: Any = wrap(fragile_stack(), shardwise.fully_shard, reshard_after_forward=reshard)
    place = places.split(", ")[dist.get_rank()]

    def attempt(step: int) -> None:
        disarm = fail_in_last(model) if place == "end" else lambda: None
        model.layers[1].where = "after" if place == "layer" else None
        with contextlib.nullcontext() if place == "nowhere" else pytest.raises(PlannedError):
            output = model(batch(step + 70, dist.get_rank(), 4, WIDTH))
            if place == "backward" and reshard:
                Fails.apply(output).sum().backward()  # before it gathers
            elif place == "backward":
                output.register_hook(_raise)  # behind the engine's own, as it does not gather
                output.sum().backward()
        disarm()
        model.layers[1].where = None
        model.reset_iter_state()

    assert_like_plain(train_around(model, attempt, (2,)), fragile_stack)


class Shuffled(Stack):
    """Its layers run in any order, and it may fail behind all units."""

    order: Sequence[int] = range(6)
    fails = False

    def forward(self, x: torch.Tensor, stop_after: int | None = None) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        x = self.last(self.first(x))
        if self.fails:
            raise PlannedError
        return x


@on_ranks(2, evaluates=["a layer", "some", "all, in another order"])
def test_evaluation_on_one_rank_before_layers_run_in_another_order(evaluates: str) -> None:
    """Nothing is gathered for it, so that it tells nothing of what runs when."""
    torch.manual_seed(1)
    model: Any = Shuffled([Layer() for _ in range(6)], WIDTH)
    wrap(model, shardwise.fully_shard, placements="zero1")
    optimizer = make_optimizer(model)
    x = batch(70, dist.get_rank(), 4, WIDTH)
    for order in (range(6), range(6), range(6), (0, 1, 2, 4, 3, 5), (5, 3, 1), range(6)):
        model.order = order
        model(x).square().mean().backward()
        if dist.get_rank() == 0 and len(order) == 6:
            with torch.no_grad():
                model.order = {"some": (0, 1, 2), "a layer": ()}.get(evaluates, (2, 1, 0, 3, 5, 4))
                model.layers[2](x) if evaluates == "a layer" else model(x)
        optimizer.step()
        optimizer.zero_grad()
    truth = Shuffled([Layer() for _ in range(6)], WIDTH)
    truth.load_state_dict(state_of(model))
    model.order = truth.order
    assert_tensors("the output", model(x), truth(x), bitwise=True)


@on_ranks(2, place=["forward", "loss"], resets=[True, False])
def test_exception_on_one_rank_before_layers_run_in_another_order(place: str, resets: bool) -> None:
    """The others expect then what ran before, and so must the rank that was reset."""
    torch.manual_seed(1)
    model: Any = Shuffled([Layer() for _ in range(6)], WIDTH)
    for layer in (model.first, model.last):  # a root without parameters, which keeps none for backward
        shardwise.fully_shard(layer)
    wrap(model, shardwise.fully_shard)
    truth = Shuffled([Layer() for _ in range(6)], WIDTH)
    orders: list[Sequence[int]] = [range(6), range(6), range(6), (0, 1, 3, 4, 5), (0, 3, 2, 1), range(6)]
    for step, order in enumerate(orders):
        truth.load_state_dict(state_of(model))
        if step == 3:
            model.fails = place == "forward" and dist.get_rank() == 1
            with contextlib.suppress(PlannedError):
                model(batch(step + 70, dist.get_rank(), 4, WIDTH))
            model.fails = False
            if resets and dist.get_rank() == 1:
                model.reset_iter_state()
        truth.zero_grad()
        model.zero_grad()
        model.order = truth.order = order
        for rank in range(2):
            loss = truth(batch(step, rank, 4, WIDTH)).square().mean() / 2
            loss.backward()
        model(batch(step, dist.get_rank(), 4, WIDTH)).square().mean().backward()
        for name, value in gradients_of(model).items():
            assert_tensors(name, value, truth.get_parameter(name).grad, bitwise=False)


@on_ranks(3, failure=list(FAILURES))
def test_exception_on_three_ranks(failure: str) -> None:
    test_exception_on_all_ranks.body(failure, reshard=True)


@on_ranks(2, units=["layers", "root"], failure=["backward", "backward_hook"])
def test_forward_after_a_failed_backward_is_no_recomputation(units: str, failure: str) -> None:
    """Without `reset_iter_state`, which loops that catch a lack of memory do not know of."""
    torch.manual_seed(1)
    model: Any = fragile_stack()
    model = wrap(model, shardwise.fully_shard) if units == "layers" else shardwise.fully_shard(model)
    step_once(model, 0, dist.get_rank())
    expected = gradients_of(model)
    model.zero_grad()
    disarm = FAILURES[failure](model)
    with pytest.raises(PlannedError):
        step_once(model, 1, dist.get_rank())
    disarm()
    step_once(model, 0, dist.get_rank())
    torch.testing.assert_close(gradients_of(model), expected)


@on_ranks(2)
def test_backward_after_a_failed_one_without_a_forward_between() -> None:
    """Nothing waited for its reductions."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    model = copy.deepcopy(plain)
    for layer in list(model)[:2]:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    inputs = torch.randn(4, 3)
    loss = model(inputs).square().mean()
    handle = model[1].register_forward_pre_hook(lambda _, args: Fails.apply(args[0]))
    fails = model(inputs).square().mean()
    handle.remove()
    with pytest.raises(PlannedError):
        fails.backward()
    loss.backward()
    plain(inputs).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
def test_exception_between_the_modules_of_a_unit() -> None:
    """Those of the module that had run stayed registered unsharded, so that what was written into them was lost."""
    model: Any = fragile_stack()
    shardwise.fully_shard([model.layers[0], model.layers[2]])
    shardwise.fully_shard(model)
    model.layers[1].where = "before"
    with pytest.raises(PlannedError):
        step_once(model, 0, 0)
    assert_resharded(model)


class Retries(nn.Module):
    """Calls itself, and goes on when that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise PlannedError
        with contextlib.suppress(PlannedError):
            self(x, fails=True)
        return self.linear(x)


@on_ranks(2)
def test_exception_that_a_module_of_a_unit_catches_from_itself() -> None:
    """The outer call was taken to be over too, so that it computed with sharded parameters."""

    def wrapping(model: Any, verb: Verb) -> None:
        verb([*model.layers])
        verb(model)

    check(lambda: stack(Retries(), Retries()), wrapping=wrapping, against_torch=False)


class GoesOn(Stack):
    """Goes on without a layer that fails."""

    def forward(self, x: torch.Tensor, stop_after: int | None = None) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            with contextlib.suppress(PlannedError):
                x = layer(x)
        return self.last(x)


@on_ranks(2, reshard=[True, False])
def test_exception_of_a_module_of_a_unit_that_the_root_catches(reshard: bool) -> None:
    """Nothing gathered the unit for the backward of its modules that had run, which read freed memory."""

    def wrapping(model: Any, verb: Verb) -> None:
        verb([*model.layers], reshard_after_forward=reshard)
        verb(model)

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        model.get_submodule("layers.1").where = "before" if step == 1 else None  # type: ignore[assignment]
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(lambda: GoesOn([Fragile(WIDTH), Fragile(WIDTH)], WIDTH), run, wrapping=wrapping, against_torch=False)


class FailsOnce:
    """An all-gather that can be told to fail."""

    fails = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> None:
        if self.fails:
            self.fails = False
            raise PlannedError
        dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group=group)


@on_ranks(2, preset=["zero2", "zero3"])
def test_exception_in_the_first_gather_of_values(preset: str) -> None:
    """Where parameters stay gathered, memory that was never filled seemed to have them."""
    torch.manual_seed(1)
    plain, gather = stack(Layer(), Layer()), FailsOnce()
    model: Any = wrap(copy.deepcopy(plain), shardwise.fully_shard, placements=preset)
    model.layers[1].set_custom_all_gather(gather)
    for factor in (1.0, 1.5):
        for parameter in [*model.parameters(), *plain.parameters()]:
            parameter.data.mul_(factor)
        gather.fails = True
        with pytest.raises(PlannedError):
            step_once(model, 0, 0)
        torch.testing.assert_close(step_once(model, 1, 0), step_once(plain, 1, 0))


@on_ranks(2, 3)
def test_exception_right_after_messages_were_sent() -> None:
    """gloo breaks a connection when a message is freed before it is complete."""
    torch.manual_seed(1)
    plain = nn.Sequential(*[nn.Linear(512, 512) for _ in range(2)])
    model, issue = copy.deepcopy(plain), ParamGroup._issue_gather
    for unit in (*model, model):
        shardwise.fully_shard(unit)
    optimizers = [make_optimizer(one) for one in (plain, model)]

    def leaves(group: ParamGroup, *tensors: Any) -> Any:
        issue(group, *tensors)
        raise KeyboardInterrupt

    inputs = torch.randn(4, 512)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ParamGroup, "_issue_gather", leaves)
            with pytest.raises(KeyboardInterrupt):
                model(inputs)
        cast(Any, model).reset_iter_state()
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            one(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(cast(DTensor, parameter).full_tensor(), expected)


@on_ranks(2, 3)
def test_exception_at_each_line_that_sends_messages() -> None:
    """A later collective would wait for those that were not sent, or for one again that was received."""
    model, replicated = (nn.Linear(4, 4) for _ in range(2))
    shardwise.fully_shard(model)
    shardwise.fully_shard(replicated, placements="ddp")
    inputs = torch.ones(2, 4)
    for name in ("PairwiseGlooComm._exchange", "_Messages.__init__", "_Messages.wait", "Flight.wait", "_Done.wait"):
        for after in range(100):
            with contextlib.suppress(KeyboardInterrupt), interrupted(name, after) as raised:
                for one in (model, replicated):
                    one(inputs).sum().backward()
            for one in (model, replicated):
                cast(Any, one).reset_iter_state()
                one.zero_grad()
                one(inputs).sum().backward()
                for parameter in one.parameters():
                    gradient = cast(DTensor, parameter.grad)
                    torch.testing.assert_close(gradient.full_tensor(), torch.full_like(gradient, 2.0).full_tensor())
            if not raised:
                break
        assert 0 < after < 99, name


@on_ranks(2, by_hand=[False, True])
def test_exception_at_the_end_of_backward(by_hand: bool) -> None:
    """What was still being reduced was added to the gradients of the next step."""
    torch.manual_seed(1)
    plain = stack(Layer(), Layer(), Layer())
    model: Any = wrap(copy.deepcopy(plain), shardwise.fully_shard)
    model.set_reduce_scatter_max_input_buffers(8)
    model.set_manual_backward_finalization(by_hand)

    def step(number: int) -> None:
        model.set_requires_gradient_sync(not by_hand)
        step_once(model, number, 0)
        model.set_requires_gradient_sync(True)
        if by_hand:
            model.finalize_backward()

    handle = model.layers[1].gate.register_post_accumulate_grad_hook(_raise)
    with pytest.raises(PlannedError):
        step(70)
    handle.remove()
    model.zero_grad()
    step(0)
    step_once(plain, 0, 0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2, 3, built_while=["it is there", "it is not"])
def test_exception_in_a_hook_of_the_reduction(built_while: str) -> None:
    """The next model waited once more for messages that had arrived, until the connections timed out."""
    torch.manual_seed(1)
    plain = stack(Layer(), Layer())
    failed: Any = wrap(copy.deepcopy(plain), shardwise.fully_shard)
    failed.layers[1].set_all_reduce_hook(_raise)
    with pytest.raises(PlannedError):
        step_once(failed, 70, 0)
    if built_while == "it is not":
        del failed
    model: Any = wrap(copy.deepcopy(plain), shardwise.fully_shard)
    torch.testing.assert_close(step_once(model, 0, 0), step_once(plain, 0, 0))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2, preset=["ddp", "zero3"])
def test_reset_while_a_hook_of_the_reduction_raises(preset: str) -> None:
    """Reductions under way run their hook when they are dropped, whose exception came out of the reset."""
    torch.manual_seed(1)
    plain = stack(Layer(), Layer(), Layer())
    model: Any = wrap(copy.deepcopy(plain), shardwise.fully_shard, placements=preset)
    model.set_reduce_scatter_max_input_buffers(4)
    for layer in model.layers:
        layer.set_all_reduce_hook(_raise)
    with pytest.raises(PlannedError):
        step_once(model, 70, 0)
    model.reset_iter_state()
    assert_resharded(model)
    for layer in model.layers:
        layer.set_all_reduce_hook(None)
    torch.testing.assert_close(step_once(model, 0, 0), step_once(plain, 0, 0))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2, failure=list(FAILURES), preset=["ddp", "zero1", "zero2"])
def test_exception_with_other_presets(failure: str, preset: str) -> None:
    torch.manual_seed(1)
    model = wrap(fragile_stack(), shardwise.fully_shard, placements=preset)
    assert_like_plain(train_with_failures(model, FAILURES[failure], (0, 2, 3)), fragile_stack)


@on_ranks(4, failure=["before", "backward", "early_backward"])
def test_exception_on_two_axes_and_fewer_ranks(failure: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for options in ({"mesh": mesh}, {"reshard_after_forward": 2}):
        torch.manual_seed(1)
        model = wrap(fragile_stack(), shardwise.fully_shard, **options)
        assert_like_plain(train_with_failures(model, FAILURES[failure], (0, 2)), fragile_stack)


@on_ranks(2, failure=["before", "backward"], sync=[True, False])
def test_exception_while_accumulating_forgets_the_whole_step(failure: str, sync: bool) -> None:
    """Gradients are dropped with the failed iteration, whether a reduction took them or not."""
    torch.manual_seed(1)
    model: Any = wrap(fragile_stack(), shardwise.fully_shard)
    model.set_requires_gradient_sync(sync)
    step_once(model, 50, dist.get_rank())
    disarm = FAILURES[failure](model)
    with pytest.raises(PlannedError):
        step_once(model, 51, dist.get_rank())
    disarm()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    assert_like_plain(train_with_failures(model, FAILURES[failure], ()), fragile_stack)


@on_ranks(2, failure=["before", "backward"])
def test_exception_before_the_last_micro_batch(failure: str) -> None:
    torch.manual_seed(1)
    model: Any = wrap(fragile_stack(), shardwise.fully_shard)
    model.set_is_last_backward(False)
    step_once(model, 50, dist.get_rank())
    disarm = FAILURES[failure](model)
    with pytest.raises(PlannedError):
        step_once(model, 51, dist.get_rank())
    disarm()
    model.reset_iter_state()
    model.zero_grad()
    model.set_is_last_backward(True)
    assert_like_plain(train_with_failures(model, FAILURES[failure], ()), fragile_stack)


@on_ranks(2, reentrant=[True, False], where=["before", "backward"])
def test_exception_in_a_recomputation(reentrant: bool, where: str) -> None:
    class Recomputed(Fragile):
        """Fails when its forward runs for backward."""

        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            if self.where == "again" and self.runs > 1:
                raise PlannedError
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([Layer(), Recomputed(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def arm(model: Any) -> Callable[[], None]:
        model.layers[1].runs = 0
        return fail_at("again" if where == "before" else where)(model)

    torch.manual_seed(1)
    model = wrap(Model(), shardwise.fully_shard)
    assert_like_plain(train_with_failures(model, arm, (0, 2)), Model)


@on_ranks(2)
def test_exception_in_inference() -> None:
    torch.manual_seed(1)
    model: Any = wrap(fragile_stack(), shardwise.fully_shard)
    disarm = FAILURES["after"](model)
    with pytest.raises(PlannedError), torch.inference_mode():
        model(batch(0, 0, 4, WIDTH))
    disarm()
    model.reset_iter_state()
    assert_like_plain(train_with_failures(model, FAILURES["after"], ()), fragile_stack)


@on_ranks(2)
def test_forward_whose_backward_never_comes() -> None:
    """A loss that is thrown away needs no reset, though the root's parameters stay gathered for its backward."""
    torch.manual_seed(1)
    model: Any = wrap(fragile_stack(), shardwise.fully_shard)
    optimizer = make_optimizer(model)
    for step in range(2):
        model(batch(40 + step, dist.get_rank(), 4, WIDTH))
    record = train_with_failures(model, FAILURES["after"], (), optimizer=optimizer)
    assert_like_plain(record, fragile_stack)


@on_ranks(2)
def test_forward_that_is_thrown_away_between_backward_and_step() -> None:
    """What it leaves gathered is old after the optimizer's step."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = step_once(model, step, rank)
        model(batch(90 + step, rank, 4, WIDTH))
        return loss

    for reshard in (None, True, False):
        torch.manual_seed(1)
        model: Any = wrap(fragile_stack(), shardwise.fully_shard, reshard_after_forward=reshard)
        parameters = list(model.parameters())
        optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
        torch.manual_seed(1)
        plain = fragile_stack()
        theirs, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
        for step in range(3):
            losses.append(run(model, step, dist.get_rank()).detach())
            for rank in range(dist.get_world_size()):
                loss = plain(batch(step, rank, 4, WIDTH)).square().mean()
                (loss / dist.get_world_size()).backward()
                if rank == dist.get_rank():
                    expected.append(loss.detach())
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        torch.testing.assert_close(losses, expected)


@on_ranks(2, preset=PRESETS)
def test_model_thrown_away_after_a_failed_backward(preset: str) -> None:
    for _ in range(2):
        model: Any = wrap(fragile_stack(), shardwise.fully_shard, placements=preset)
        disarm = FAILURES["backward"](model)
        with pytest.raises(PlannedError):
            step_once(model, 0, dist.get_rank())
        del model, disarm
        gc.collect()
        dist.all_reduce(torch.ones(1))  # hangs where a message under way went with the model


@on_ranks(2)
def test_reset_without_a_failure() -> None:
    torch.manual_seed(1)
    model: Any = wrap(fragile_stack(), shardwise.fully_shard)
    model.reset_iter_state()
    model(batch(40, dist.get_rank(), 4, WIDTH))
    model.reset_iter_state()
    assert_resharded(model)
    assert_like_plain(train_with_failures(model, FAILURES["after"], ()), fragile_stack)


@on_ranks(2, name=["embed", "layers.1", "head"])
def test_exception_without_a_common_root(name: str) -> None:
    """Any unit of a shared context resets it."""
    torch.manual_seed(1)
    model: Any = Transformer(layers=2)
    wrap_like_the_seed(model, shardwise.fully_shard)
    optimizer, record = make_optimizer(model), Record()
    for step in range(3):
        handle = model.layers[1].register_forward_hook(_raise)
        with pytest.raises(PlannedError):
            token_iteration(model, step + 70, dist.get_rank())
        handle.remove()
        model.get_submodule(name).reset_iter_state()
        assert_resharded(model)
        record.note(token_iteration(model, step, dist.get_rank()), model)
        optimizer.step()
        optimizer.zero_grad()
    record.end(model)
    torch.manual_seed(1)
    truth = train_plain(Transformer(layers=2), token_iteration, 3)
    assert_records(record, truth, "plain training", bitwise=False)


def _raise(*_: Any) -> None:
    raise PlannedError


# -- Ranks that lose a peer


class PeerTests:
    """Bodies that the test below runs by name."""

    class Raises:
        @staticmethod
        def body(place: str) -> None:
            """Rank 0 fails; the others must get an error out of what they wait for."""
            torch.manual_seed(1)
            model: Any = wrap(fragile_stack(), shardwise.fully_shard)
            step_once(model, 0, dist.get_rank())
            if dist.get_rank() == 0:
                FAILURES[place](model)
            start = time.monotonic()
            try:
                for step in range(3):
                    step_once(model, step, dist.get_rank())
            except PlannedError:
                raise
            except Exception as error:
                raise RuntimeError(
                    f"stopped after {time.monotonic() - start:.0f} s by {type(error).__name__}"
                ) from error

    class Dies:
        @staticmethod
        def body(place: str) -> None:
            """Rank 0 is gone from one moment to the next, while another thread of it still sleeps."""
            torch.manual_seed(1)
            model: Any = wrap(fragile_stack(), shardwise.fully_shard)
            step_once(model, 0, dist.get_rank())
            if dist.get_rank() == 0:
                threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
                model.layers[1].register_forward_hook(lambda *_: os._exit(3))
            for step in range(3):
                step_once(model, step, dist.get_rank())


@pytest.mark.parametrize("place", ["before", "backward"])
@pytest.mark.parametrize("world_size", [2, 3], ids=lambda size: f"world{size}")
def test_others_stop_when_a_rank_raises(world_size: int, place: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(world_size).run(__name__, "PeerTests.Raises", {"place": place}, 60.0)
    assert time.monotonic() - start < 60
    message = str(caught.value)
    assert "PlannedError" in message
    assert "did not answer" not in message, message
    assert len(re.findall(r"stopped after \d", message)) == world_size - 1, message


@pytest.mark.parametrize("world_size", [2, 3], ids=lambda size: f"world{size}")
def test_others_stop_when_a_rank_dies(world_size: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(world_size).run(__name__, "PeerTests.Dies", {"place": ""}, 60.0)
    assert time.monotonic() - start < 60
    assert "did not answer" not in str(caught.value)
    assert_others_name(0, world_size, caught.value)


@on_ranks(2, 3)
def test_profiler_that_stops_before_communication_has_ended() -> None:
    """torch ends the event of a message when the message is waited for, in memory that went with the profiler: the heap
    was damaged, and the process died later, elsewhere."""
    model = wrap(stack(Layer(), Layer()), shardwise.fully_shard)
    layer: Any = model.layers[0]  # type: ignore[index, union-attr]
    x = batch(0, dist.get_rank(), 4, WIDTH)
    expected = model(x).detach()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        handle = layer.unshard(async_op=True)
    names = {event.key for event in profile.key_averages()}
    assert "FSDP::all_gather (layers.0)" in names
    assert not [name for name in names if "send" in name or "recv" in name]
    handle.wait()
    torch.testing.assert_close(model(x), expected)


ENDS_AT_ONCE = """
import os, sys, time
import torch, torch.distributed as dist
from shardwise.core.comm import comm_for

class Lingers:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
comm_for(dist.group.WORLD, torch.device("cpu"))
dist.barrier()
sys.setswitchinterval(10)  # seconds: other threads get the interpreter only where this one waits
time.sleep(0.3 * rank)  # rank 0 has dropped the tensor by the time that its thread has finished
dist.all_reduce(torch.ones(8), async_op=True)
end = time.monotonic() + 0.6
while time.monotonic() < end:
    pass
lingers = Lingers()  # its thread asks for the interpreter once that has begun to end
"""


def test_process_that_ends_right_after_a_collective(tmp_path: Path) -> None:
    """gloo's thread, which still drops that collective's work, aborted it."""
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / "rendezvous")]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@on_ranks(4)
def test_groups_of_the_engines_own_have_the_limit_of_the_process_group() -> None:
    model: Any = shardwise.fully_shard(Layer(), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group(True)
    [group] = unit_of(model).groups
    for own in (group.policy.reshard_to.shard, group.options.reduce_comm):
        limits = [one._get_backend(torch.device("cpu")).options._timeout for one in (own.group, dist.group.WORLD)]
        assert limits[0] == limits[1] < timedelta(minutes=30)
