"""ShardedDataParallel against torch's DDP, plain training on all data, and FairScale's own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import io
import math
import os
import pickle
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from shardwise import fully_shard
from shardwise.core import comm as comm_module
from shardwise.core import whole as whole_module
from shardwise.core.comm import Comm, GlooComm, PairwiseGlooComm, comm_for
from shardwise.fairscale import OSS, FullyShardedDataParallel, ShardedDataParallel, ShardedDDP
from shardwise.fairscale.sharded_ddp import ARGUMENTS

from ..models import MLP, ConvNet, Transformer, inputs_for
from ..ranks.harness import RankError, assert_others_name, on_ranks, ranks
from .fairscale_on_cpu import needs_fairscale

SIZES = (2**23, 60, 0)
"""Of the reduction's buffers: all in one, many, none."""


def tied_transformer() -> nn.Module:
    return Transformer(tied=True)


class Wide(nn.Module):
    """Has gradients large enough to be sent from their own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 300), nn.Linear(300, 300), nn.Linear(300, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def model_of(make: Callable[[], nn.Module] = MLP, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def shard(
    model: nn.Module, optim: type[Optimizer] = SGD, lr: float = 0.1, oss: dict[str, Any] | None = None, **options: Any
) -> tuple[ShardedDDP, OSS]:
    optimizer = OSS(model.parameters(), optim=optim, lr=lr, **(oss or {}))
    return ShardedDDP(model, optimizer, **options), optimizer


def loss_of(model: nn.Module, step: int, plain: nn.Module | None = None) -> torch.Tensor:
    """On this rank's own data; ``plain`` is the model inside a wrapper."""
    inputs = inputs_for(plain if plain is not None else model, 10 * step + dist.get_rank())
    return model(inputs).square().mean()


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, (ShardedDDP, DistributedDataParallel)) else model


def backward(model: nn.Module, step: int) -> None:
    loss_of(model, step, inner(model)).backward()


def assert_same(kind: str, ours: torch.Tensor | None, truth: torch.Tensor | None, bitwise: bool = True) -> None:
    assert (ours is None) == (truth is None), f"{kind}: {ours} against {truth}"
    if ours is None or truth is None:
        return
    assert ours.dtype == truth.dtype, kind
    if bitwise and dist.get_world_size() <= 2:
        assert torch.equal(ours, truth), f"{kind} differs by {(ours - truth).abs().max()}"
    else:
        torch.testing.assert_close(ours, truth, msg=lambda text: f"{kind}: {text}")


def assert_gradients(sharded: ShardedDDP, optimizer: OSS, truth: nn.Module, bitwise: bool = True) -> None:
    """Owned gradients are those of ``truth``, the others are gone."""
    owners, rank = optimizer.owners(), optimizer.rank
    named = inner(truth).named_parameters()
    for (name, expected), parameter in zip(named, inner(sharded).parameters(), strict=True):
        if owners[parameter] == rank:
            assert_same(f"gradient of {name}", parameter.grad, expected.grad, bitwise)
        else:
            assert parameter.grad is None, f"{name} is not owned"


def assert_parameters(ours: nn.Module, truth: nn.Module, bitwise: bool = True) -> None:
    for (name, mine), (_, other) in zip(
        inner(ours).state_dict().items(), inner(truth).state_dict().items(), strict=True
    ):
        assert_same(name, mine, other, bitwise)


def mean_gradients(model: nn.Module, run: Callable[[nn.Module, int], None]) -> nn.Module:
    """``model`` with the mean over ranks of what ``run(model, rank)`` adds to its gradients; without any engine."""
    world_size = dist.get_world_size()
    for rank in range(world_size):
        run(model, rank)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= world_size
    return model


# -- Parity


@on_ranks(1, 2, 3, make=[MLP, tied_transformer, ConvNet, Wide], size=SIZES)
def test_trains_as_ddp(make: Callable[[], nn.Module], size: int) -> None:
    """With clipping; buffers are those of DDP too, on every rank."""
    optim = AdamW if dist.get_world_size() <= 2 else SGD  # small differences of Adam's are large
    sharded, oss = shard(model_of(make), optim, reduce_buffer_size=size)
    ddp = DistributedDataParallel(model_of(make))
    optimizer = optim(ddp.parameters(), lr=0.1)
    for step in range(3):
        for model, stepped in ((sharded, oss), (ddp, optimizer)):
            stepped.zero_grad()
            backward(model, step)
        assert_gradients(sharded, oss, ddp)
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        assert_same("norm", oss.clip_grad_norm(0.1), norm)
        oss.step()
        optimizer.step()
        assert_parameters(sharded, ddp)


class Empty(nn.Module):
    """With parameters that have no elements, beside others if there is a ``width``."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0))
        self.linear = nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + self.first.sum() + self.last.sum()  # type: ignore[no-any-return]


@on_ranks(1, 2, 3, width=[0, 4])
def test_parameters_without_elements(width: int) -> None:
    sharded, oss = shard(Empty(width))
    ddp = DistributedDataParallel(copy.deepcopy(sharded.module))
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        x = torch.full((2, 8), 1.0 + step + dist.get_rank())
        for model, stepped in ((sharded, oss), (ddp, optimizer)):
            stepped.zero_grad()
            model(x).backward()
        assert_gradients(sharded, oss, ddp)
        oss.step()
        optimizer.step()
        assert_parameters(sharded, ddp)
    sharded.sync_buffers()  # there are none
    with torch.no_grad():
        assert torch.equal(sharded(x), ddp(x))


@on_ranks(2)
def test_other_ways_to_zero_gradients() -> None:
    """FairScale reduces zeros once the optimizer has dropped the gradients that it made views of its buffers."""
    ways: list[Callable[[ShardedDDP, OSS], None]] = [
        lambda sharded, oss: oss.zero_grad(),
        lambda sharded, oss: oss.zero_grad(set_to_none=False),
        lambda sharded, oss: sharded.zero_grad(),
        lambda sharded, oss: sharded.zero_grad(set_to_none=False),
        lambda sharded, oss: sharded.module.zero_grad(),
    ]
    for size in SIZES:
        for way in ways:
            sharded, oss = shard(model_of(), reduce_buffer_size=size)
            for step in range(3):
                way(sharded, oss)
                backward(sharded, step)
                truth = DistributedDataParallel(model_of())
                truth.module.load_state_dict(sharded.module.state_dict())
                backward(truth, step)
                assert_gradients(sharded, oss, truth)
                oss.step()


@on_ranks(2)
def test_runs_are_sent_while_few_bytes_may_be_under_way() -> None:
    whole_module.RUNS_IN_FLIGHT, before = 0, whole_module.RUNS_IN_FLIGHT
    try:
        for size in SIZES:
            sharded, oss = shard(model_of(Wide), reduce_buffer_size=size)
            ddp = DistributedDataParallel(model_of(Wide))
            for model in (sharded, ddp):
                backward(model, 0)
            assert_gradients(sharded, oss, ddp)
    finally:
        whole_module.RUNS_IN_FLIGHT = before


@on_ranks(2)
def test_reductions_overlap_backward() -> None:
    """Those of the last layers are under way before the first layer's gradient is there."""
    sharded, oss = shard(model_of(Wide), reduce_buffer_size=0)
    first = sharded.module.layers[0].weight
    comm = comm_for(dist.group.WORLD, torch.device("cpu"))
    events: list[Any] = []
    reduce = comm.reduce

    def watched(tensor: torch.Tensor, owner: int) -> Any:
        events.append(tensor.numel())
        return reduce(tensor, owner)

    first.register_hook(lambda _: events.append("first layer"))
    comm.reduce = watched  # type: ignore[method-assign]
    try:
        backward(sharded, 0)
    finally:
        del comm.reduce  # type: ignore[method-assign]
    # One for each gradient, the latest layer first.
    sizes = [4, 4 * 300, 300, 300 * 300, 300, 9 * 300]
    assert [event for event in events if event != "first layer"] == sizes
    assert events.index("first layer") >= 3
    assert oss.world_size == 2


@on_ranks(2)
def test_closures() -> None:
    sharded, oss = shard(model_of(), AdamW)
    ddp = DistributedDataParallel(model_of())
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    for step in range(3):
        for model, stepped in ((sharded, oss), (ddp, optimizer)):

            def closure(model: nn.Module = model, stepped: Optimizer = stepped, step: int = step) -> torch.Tensor:
                stepped.zero_grad()
                loss = loss_of(model, step, inner(model))
                loss.backward()
                return loss

            assert stepped.step(closure) is not None
    assert_parameters(sharded, ddp)


# -- Accumulation


def accumulate(model: nn.Module, plan: str, data: Callable[[int], int]) -> None:
    """``s``: a synchronized backward, ``n``: one under no_sync, ``r``: reduce."""
    for position, kind in enumerate(plan):
        if kind == "r":
            model.reduce()  # type: ignore[operator]
        elif kind == "n" and not isinstance(model, (MLP, Wide)):
            with model.no_sync():  # type: ignore[operator]
                model(inputs_for(inner(model), data(position))).square().mean().backward()
        else:
            model(inputs_for(inner(model), data(position))).square().mean().backward()


@on_ranks(2, 3, plan=["nns", "ss", "sns", "nr", "snr", "nsns", "nnrns", "sss"])
def test_gradients_add_up(plan: str) -> None:
    """FairScale divides what it reduced before once more."""
    for make in (MLP, Wide):
        for size in SIZES:
            sharded, oss = shard(model_of(make), reduce_buffer_size=size)
            # Twice, with gradients dropped in between.
            for _ in range(2):
                oss.zero_grad()
                accumulate(sharded, plan, lambda position: 10 * position + dist.get_rank())
                truth = mean_gradients(
                    model_of(make),
                    lambda model, rank: accumulate(
                        model, plan.replace("r", ""), lambda position: 10 * [*_passes(plan)][position] + rank
                    ),
                )
                assert_gradients(sharded, oss, truth, bitwise=False)


def _passes(plan: str) -> Iterable[int]:
    return (position for position, kind in enumerate(plan) if kind != "r")


@on_ranks(2)
def test_no_sync_is_ddps() -> None:
    sharded, oss = shard(model_of(ConvNet))
    ddp = DistributedDataParallel(model_of(ConvNet))
    for model in (sharded, ddp):
        accumulate(model, "nns", lambda position: 10 * position + dist.get_rank())
    assert_gradients(sharded, oss, ddp)


@on_ranks(2)
def test_no_sync_keeps_gradients_where_they_are() -> None:
    sharded, _ = shard(model_of())
    plain = model_of()
    with sharded.no_sync(), sharded.no_sync():
        backward(sharded, 0)
    backward(plain, 0)
    for parameter, expected in zip(sharded.module.parameters(), plain.parameters(), strict=True):
        assert_same("local gradient", parameter.grad, expected.grad)
    sharded.zero_grad()
    with pytest.raises(RuntimeError, match="no gradients wait"):
        sharded.reduce()


@on_ranks(2)
def test_no_sync_goes_on_after_one_inside() -> None:
    """Also for what is prepared anew: with buffers that a rank has by itself, and as many passes as it likes."""
    rank, model = dist.get_rank(), model_of()
    model.register_buffer("own", torch.full((3,), float(rank)))
    sharded, _ = shard(model)
    plain = model_of()
    with sharded.no_sync():
        with sharded.no_sync():
            backward(sharded, 0)
        sharded.refresh_trainable()
        model.own.fill_(rank)
        for step in range(1, 2 + rank):
            backward(sharded, step)
    for step in range(2 + rank):
        backward(plain, step)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same("local gradient", parameter.grad, expected.grad)
    assert torch.equal(model.own, torch.full((3,), float(rank)))


@on_ranks(2)
def test_no_sync_ends_with_an_exception() -> None:
    """FairScale goes on without synchronization."""
    sharded, oss = shard(model_of())
    ddp = DistributedDataParallel(model_of())
    with pytest.raises(KeyError), sharded.no_sync(), sharded.no_sync():
        raise KeyError
    for model in (sharded, ddp):
        backward(model, 0)
    assert_gradients(sharded, oss, ddp)


class GivesItself(torch.autograd.Function):
    """A linear layer whose backward leaves the gradient of the weight by itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        [x] = ctx.saved_tensors
        weight, gradient = ctx.weight, gradients[0].t() @ x
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return gradients[0] @ weight, None


class Fused(nn.Linear):
    """Has the gradient of its weight from `GivesItself`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GivesItself.apply(x, self.weight)


@on_ranks(2, 3, size=SIZES, way=["assigned", "preset", "by a function"], zero=["none", "zeros"])
def test_gradients_that_autograd_did_not_add(size: int, way: str, zero: str) -> None:
    """In every step, and not only in the first: a gradient that the program puts there is this rank's."""
    found = []
    for verb in (shard, None):
        model: Any = model_of(lambda: (Fused if way == "by a function" else nn.Linear)(5, 3, bias=False))
        wrapped, optimizer = verb(model, reduce_buffer_size=size) if verb else (model, SGD(model.parameters(), lr=0.1))
        for step in range(4):
            x = torch.full((2, 5), float(dist.get_rank() + step)).requires_grad_()
            if way == "preset":
                model.weight.grad = torch.ones(3, 5)
            with wrapped.no_sync() if verb and way == "assigned" else contextlib.nullcontext():
                loss = wrapped(x).square().sum()
            if way == "assigned":
                [model.weight.grad] = torch.autograd.grad(loss, model.weight)
            else:
                loss.backward()
            if verb is None:
                dist.all_reduce(model.weight.grad)
                model.weight.grad /= dist.get_world_size()
            elif way == "assigned":
                wrapped.reduce()
            optimizer.step()
            if way != "by a function" or zero == "none":
                optimizer.zero_grad(set_to_none=zero == "none")
            else:
                model.weight.grad = None
        found.append(model.weight.detach())
    torch.testing.assert_close(found[0], found[1])


@on_ranks(2)
def test_reduce_twice() -> None:
    sharded, oss = shard(model_of())
    with pytest.raises(RuntimeError, match="no gradients wait"):
        sharded.reduce()
    with sharded.no_sync():
        backward(sharded, 0)
    sharded.reduce()
    with pytest.raises(ValueError, match="no gradients wait"):
        sharded.reduce()
    ddp = DistributedDataParallel(model_of())
    backward(ddp, 0)
    assert_gradients(sharded, oss, ddp)


@on_ranks(2)
def test_scaled_or_clipped_gradients_stay_so() -> None:
    """What users do to an owned gradient between two backward passes counts."""
    sharded, oss = shard(model_of())
    backward(sharded, 0)
    kept = {p: p.grad.clone() for p in sharded.module.parameters() if p.grad is not None}
    for parameter in kept:
        parameter.grad *= 0.5
    backward(sharded, 1)
    other, _ = shard(model_of())
    backward(other, 1)
    for parameter, twin in zip(sharded.module.parameters(), other.module.parameters(), strict=True):
        if parameter in kept:
            torch.testing.assert_close(parameter.grad, 0.5 * kept[parameter] + twin.grad)
    assert set(kept) == {p for p, owner in oss.owners().items() if owner == dist.get_rank()}


# -- Unused parameters


class Branches(nn.Module):
    """Uses the branches that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.branches = nn.ModuleList(nn.Linear(9, 9) for _ in range(5))

    def forward(self, x: torch.Tensor, chosen: Iterable[int], first: bool = True) -> torch.Tensor:
        x = self.first(x) if first else x
        for index in chosen:
            x = torch.tanh(self.branches[index](x))
        return x


def branch_input(rank: int) -> torch.Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(rank)).requires_grad_()


@on_ranks(2, 3, size=SIZES)
def test_parameters_that_only_some_ranks_use(size: int) -> None:
    """FairScale waits forever where a bucket is not full, and asserts without buckets."""
    choices: list[Callable[[int], dict[str, Any]]] = [
        lambda rank: {"chosen": [rank]},
        lambda rank: {"chosen": [0, 1, 2] if rank else []},
        # A rank that uses no parameter at all.
        lambda rank: {"chosen": [3] if rank else [], "first": rank != 0},
        lambda rank: {"chosen": [4]},
    ]
    for choice in choices:
        sharded, oss = shard(model_of(Branches), reduce_buffer_size=size)

        def run(model: nn.Module, rank: int, choice: Any = choice) -> None:
            model(branch_input(rank), **choice(rank)).square().sum().backward()

        for _ in range(2):
            run(sharded, dist.get_rank())
            truth = mean_gradients(model_of(Branches), run)
            assert_gradients(sharded, oss, truth, bitwise=False)
            oss.zero_grad()


@on_ranks(2, size=SIZES)
def test_gradients_that_arrive_in_another_order_on_each_rank(size: int) -> None:
    """FairScale sends them as they come, without buckets, and so hangs or mixes them up."""
    order = [0, 1, 2, 3, 4] if dist.get_rank() else [4, 2, 3, 1, 0]
    sharded, oss = shard(model_of(Branches), reduce_buffer_size=size)
    sharded(branch_input(dist.get_rank()), order).square().sum().backward()
    orders = [[4, 2, 3, 1, 0], [0, 1, 2, 3, 4]]
    truth = mean_gradients(
        model_of(Branches), lambda model, rank: model(branch_input(rank), orders[rank]).square().sum().backward()
    )
    assert_gradients(sharded, oss, truth, bitwise=False)


@on_ranks(2, 3, size=SIZES)
def test_two_models_in_one_backward_of_which_ranks_use_other_parts(size: int) -> None:
    """All gradients have the same shape: one that met another model's would be wrong without an error."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                x = x if index == skipped else torch.tanh(layer(x))
            return x

    def run(generator: nn.Module, critic: nn.Module, rank: int) -> None:
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        critic(generator(x, skipped=9), skipped=1 + rank).square().sum().backward()

    models, plain = ([model_of(Skipping, seed) for seed in (1, 2)] for _ in range(2))
    oss = OSS([p for model in models for p in model.parameters()], lr=0.1)
    sharded = [ShardedDDP(model, oss, reduce_buffer_size=size) for model in models]
    for _ in range(2):
        for model in [*models, *plain]:
            model.zero_grad()
        run(sharded[0], sharded[1], dist.get_rank())
        for rank in range(dist.get_world_size()):
            run(plain[0], plain[1], rank)
        for model in plain:
            mean_gradients(model, lambda *_: None)
        for mine, truth in zip(sharded, plain, strict=True):
            assert_gradients(mine, oss, truth, bitwise=False)


@on_ranks(2)
def test_a_parameter_nobody_used_keeps_what_it_had() -> None:
    sharded, oss = shard(model_of(Branches))
    rank = dist.get_rank()
    sharded(branch_input(rank), [0, 1]).sum().backward()
    before = {name: None if p.grad is None else p.grad.clone() for name, p in sharded.module.named_parameters()}
    sharded(branch_input(rank), [2]).sum().backward()
    for name, parameter in sharded.module.named_parameters():
        if oss.owners()[parameter] == rank:
            if "branches.0" in name or "branches.1" in name:
                assert_same(name, parameter.grad, before[name])
            assert (parameter.grad is None) == ("branches.3" in name or "branches.4" in name)


# -- Freezing


@on_ranks(2)
def test_frozen_and_unfrozen_between_steps() -> None:
    sharded, oss = shard(model_of(), AdamW)
    plain = model_of()
    optimizer = AdamW(plain.parameters(), lr=0.1)
    for step in range(5):
        changed = [[], [0, 1], [0, 1, 4], [2], [2]][step]
        for model in (sharded.module, plain):
            for index, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(index not in changed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            oss.zero_grad()
            backward(sharded, step)
        assert len(caught) == (step in (1, 2, 3)), step
        assert all("warn_on_trainable_params_changed" in str(warning.message) for warning in caught)
        optimizer.zero_grad()
        ddp = DistributedDataParallel(plain)
        backward(ddp, step)
        assert_gradients(sharded, oss, plain)
        oss.step()
        optimizer.step()
        assert_parameters(sharded, plain)


@on_ranks(2)
def test_changes_may_go_unsaid_or_unseen() -> None:
    sharded, oss = shard(model_of(), warn_on_trainable_params_changed=False)
    manual, other = shard(model_of(), auto_refresh_trainable=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (sharded, manual):
            first = next(model.module.parameters())
            first.requires_grad_(False)
        manual.refresh_trainable()
        backward(sharded, 0)
        backward(manual, 0)
        for a, b in zip(sharded.module.parameters(), manual.module.parameters(), strict=True):
            assert_same("gradient", a.grad, b.grad)
        # Nobody told it: the gradient stays local.
        next(manual.module.parameters()).requires_grad_(True)
        backward(manual, 0)
        assert next(manual.module.parameters()).grad is not None
    assert oss.world_size == other.world_size


@on_ranks(2)
def test_what_one_rank_does_between_steps_is_not_waited_for() -> None:
    sharded, oss = shard(model_of())
    truth = model_of()
    for model in (sharded.module, truth):
        next(model.parameters()).requires_grad_(False)
    optimizer = SGD(truth.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what was frozen
        for step in range(4):
            if dist.get_rank() == 0 and step == 1:
                sharded.refresh_trainable()
            if dist.get_rank() == 0 and step == 2:
                sharded.module.to(torch.float64).to(torch.float32)
            for stepped in (oss, optimizer):
                stepped.zero_grad()
            backward(sharded, step)
            mean_gradients(truth, lambda model, rank, step=step: _backward_of(model, 10 * step + rank))
            oss.step()
            optimizer.step()
    assert_parameters(sharded, truth)


def _backward_of(model: nn.Module, seed: int) -> None:
    model(inputs_for(model, seed)).square().mean().backward()


@on_ranks(2, mode=(torch.no_grad, torch.inference_mode))
def test_what_trains_changes_before_an_evaluation(mode: Any) -> None:
    sharded, optimizer = shard(model_of())
    plain = model_of()
    for model in (sharded, plain):
        inner(model).layers[0].bias.requires_grad_(False)
        with mode():
            loss_of(model, 0, inner(model))
    truth = DistributedDataParallel(plain)
    for model in (sharded, truth):
        backward(model, 1)
    assert_gradients(sharded, optimizer, truth)


@on_ranks(2)
def test_everything_frozen_and_thawed() -> None:
    sharded, oss = shard(model_of(), warn_on_trainable_params_changed=False)
    sharded.module.requires_grad_(False)
    assert not sharded(inputs_for(sharded.module, 0)).requires_grad
    sharded.module.requires_grad_(True)
    ddp = DistributedDataParallel(model_of())
    for model in (sharded, ddp):
        backward(model, 1)
    assert_gradients(sharded, oss, ddp)


@on_ranks(2)
def test_frozen_between_backward_passes_that_add_up() -> None:
    def run(model: nn.Module, rank: int) -> None:
        for step in range(2):
            inner(model).layers[1].bias.requires_grad_(step == 0)
            model(inputs_for(inner(model), 10 * step + rank)).square().mean().backward()

    sharded, oss = shard(model_of(), warn_on_trainable_params_changed=False)
    run(sharded, dist.get_rank())
    assert_gradients(sharded, oss, mean_gradients(model_of(), run), bitwise=False)


@on_ranks(2)
def test_frozen_while_gradients_wait() -> None:
    """They are reduced with the next ones."""
    sharded, oss = shard(model_of(), warn_on_trainable_params_changed=False)
    plain = model_of()

    def run(model: nn.Module, rank: int) -> None:
        for index, local in enumerate((True, False)):
            for parameter in list(inner(model).parameters())[:3]:
                parameter.requires_grad_(local)
            loss = model(inputs_for(inner(model), 10 * index + rank)).square().mean()
            if local and isinstance(model, ShardedDDP):
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()

    run(sharded, dist.get_rank())
    assert_gradients(sharded, oss, mean_gradients(plain, run), bitwise=False)


@on_ranks(2)
def test_parameters_added_to_the_optimizer() -> None:
    model = model_of()
    first, *others = model.parameters()
    oss = OSS([first], optim=SGD, lr=0.1)
    with pytest.warns(UserWarning, match="no sharded optimizer has") as caught:
        sharded = ShardedDDP(model, oss, warn_on_trainable_params_changed=False)
    assert len(caught) == 1
    backward(sharded, 0)
    local = [parameter.grad.clone() for parameter in others]
    plain = model_of()
    backward(plain, 0)
    for gradient, parameter in zip(local, [*plain.parameters()][1:], strict=True):
        assert_same("local gradient", gradient, parameter.grad)
    model.zero_grad()
    oss.add_param_group({"params": others})
    ddp = DistributedDataParallel(model_of())
    for wrapped in (sharded, ddp):
        backward(wrapped, 0)
    assert_gradients(sharded, oss, ddp)


@on_ranks(2)
def test_reduces_in_eval_mode_too() -> None:
    """Fine-tuning with dropout and statistics off is training all the same."""
    sharded, oss = shard(model_of(ConvNet))
    ddp = DistributedDataParallel(model_of(ConvNet))
    for model in (sharded, ddp):
        for training in (False, True, False):
            model.train(training)
            model.zero_grad()
            backward(model, 0)
    assert_gradients(sharded, oss, ddp)
    with torch.no_grad():
        assert not sharded(inputs_for(sharded.module, 0)).requires_grad


# -- Memory


@on_ranks(2, 3, size=SIZES)
def test_nothing_is_left_of_gradients_that_are_not_owned(size: int) -> None:
    """Live bytes, bucketed or not: FairScale keeps its buckets."""
    sharded, oss = shard(model_of(Wide), reduce_buffer_size=size)
    held: list[tuple[StorageWeakRef, int]] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held.append((StorageWeakRef(storage), storage.nbytes()))
        return tensor

    for parameter in sharded.module.parameters():
        parameter.register_hook(watch)
    plan = whole_module.WholePlan
    pack = plan.pack
    plan.pack = lambda *args: watch(pack(*args))  # type: ignore[method-assign]
    try:
        for step in range(2):
            held.clear()
            backward(sharded, step)
            owned = [p for p, owner in oss.owners().items() if owner == dist.get_rank()]
            gradients = [p.grad for p in sharded.module.parameters() if p.grad is not None]
            assert len(gradients) == len(owned)
            expected = sum(parameter.nbytes for parameter in owned)
            assert sum({g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}.values()) == (
                expected
            )
            del gradients
            alive = sum(size for reference, size in held if not reference.expired())
            assert len(held) > len(owned)
            assert alive == expected
            oss.zero_grad()
            assert all(reference.expired() for reference, _ in held)
    finally:
        plan.pack = pack  # type: ignore[method-assign]


@on_ranks(2)
def test_no_sync_after_a_reduction_frees_as_well() -> None:
    sharded, oss = shard(model_of())
    accumulate(sharded, "snns", lambda position: position)
    for parameter, owner in oss.owners().items():
        assert (parameter.grad is None) == (owner != dist.get_rank())


@on_ranks(2)
def test_dropping_the_wrapper_frees_the_model() -> None:
    gc.disable()
    try:
        sharded, oss = shard(model_of(ConvNet))
        backward(sharded, 0)
        oss.step()
        references = [weakref.ref(parameter) for parameter in sharded.module.parameters()]
        storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in sharded.module.parameters()]
        module = sharded.module
        del sharded
        # The model may go on without it.
        loss_of(module, 1).backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        del module, oss
        assert [reference() for reference in references] == [None] * len(references)
        assert all(storage.expired() for storage in storages)
    finally:
        gc.enable()


# -- Autograd


@on_ranks(2, reentrant=[True, False])
def test_checkpointing(reentrant: bool) -> None:
    class Checkpointed(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layers[0](x))
            # One layer twice, in different recomputations.
            for index in (1, 2, 2):
                x = checkpoint(self.layers[index], x, use_reentrant=reentrant)
            return x

    def make() -> nn.Module:
        return Checkpointed((9, 17, 12, 12))

    sharded, oss = shard(model_of(make))
    for _ in range(2):
        oss.zero_grad()
        backward(sharded, 0)
        truth = mean_gradients(
            model_of(make), lambda model, rank: model(inputs_for(model, rank)).square().mean().backward()
        )
        assert_gradients(sharded, oss, truth, bitwise=False)


@on_ranks(2)
def test_gradients_of_inputs_between_backward_passes() -> None:
    """`torch.autograd.grad` adds to no parameter, so it starts no reduction and disturbs none."""
    sharded, oss = shard(model_of())
    ddp = DistributedDataParallel(model_of())
    for model in (sharded, ddp):
        backward(model, 0)
    before = [None if p.grad is None else p.grad.clone() for p in sharded.module.parameters()]
    loss = loss_of(sharded, 1, sharded.module)
    torch.autograd.grad(loss, list(sharded.module.parameters()), retain_graph=True)
    for parameter, gradient in zip(sharded.module.parameters(), before, strict=True):
        assert_same("gradient", parameter.grad, gradient)
    loss.backward()
    backward(ddp, 1)
    assert_gradients(sharded, oss, ddp, bitwise=False)


@on_ranks(2)
def test_gradient_penalty() -> None:
    def run(model: nn.Module, rank: int) -> None:
        x = branch_input(rank)
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + gradient.square().mean()).backward()

    sharded, oss = shard(model_of())
    run(sharded, dist.get_rank())
    assert_gradients(sharded, oss, mean_gradients(model_of(), run), bitwise=False)


@on_ranks(1, 2)
def test_gradients_that_keep_a_graph() -> None:
    """With one rank nothing is reduced; otherwise their graph would be lost."""
    model, truth = model_of(), model_of()
    sharded, optimizer = shard(model)
    name, parameter = next(model.named_parameters())

    def by_backward(one: nn.Module, rank: int) -> None:
        one(inputs_for(truth, rank)).square().mean().backward(create_graph=True)
        gradients = [own.grad for own in one.parameters()]
        for own in one.parameters():
            own.grad = None
        sum(gradient.square().sum() for gradient in gradients).backward()

    def by_grad(one: nn.Module, rank: int) -> None:
        loss = one(inputs_for(truth, rank)).square().mean()
        gradients = torch.autograd.grad(loss, list(one.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()

    parameter.grad = torch.zeros_like(parameter, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"gradient of parameter '{name}' requires a gradient"):
        sharded(inputs_for(truth, 0))
    sharded.zero_grad(set_to_none=True)
    rank = dist.get_rank()
    if dist.get_world_size() == 1:
        by_backward(sharded, rank)
    else:
        with pytest.raises(RuntimeError, match="create_graph=True"):
            by_backward(sharded, rank)
        sharded.zero_grad(set_to_none=True)
        with sharded.no_sync():
            by_backward(sharded, rank)
        sharded.reduce()
    assert_gradients(sharded, optimizer, mean_gradients(truth, by_grad))


@on_ranks(2)
def test_parts_of_a_graph_one_after_the_other() -> None:
    def run(model: nn.Module, rank: int) -> None:
        first = model(branch_input(rank), [0, 1])
        second = model(branch_input(rank), [2])
        (first.sum() + second.sum()).backward(retain_graph=True)
        first.square().sum().backward()
        second.square().sum().backward()

    sharded, oss = shard(model_of(Branches))
    run(sharded, dist.get_rank())
    assert_gradients(sharded, oss, mean_gradients(model_of(Branches), run), bitwise=False)


@on_ranks(2)
def test_an_exception_in_backward_leaves_no_trace() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyError("broken")

    for size in SIZES:
        sharded, oss = shard(model_of(Wide), reduce_buffer_size=size)
        backward(sharded, 0)
        kept = {p: p.grad.clone() for p in sharded.module.parameters() if p.grad is not None}
        handle = sharded.module.layers[1].register_forward_pre_hook(lambda _, args: (Breaks.apply(args[0]),))
        with pytest.raises(KeyError):
            backward(sharded, 1)
        handle.remove()
        # Whatever the failed one computed is gone, what was there before is not.
        backward(sharded, 2)
        other, _ = shard(model_of(Wide), reduce_buffer_size=size)
        for step in (0, 2):
            backward(other, step)
        for parameter, twin in zip(sharded.module.parameters(), other.module.parameters(), strict=True):
            assert_same("gradient", parameter.grad, twin.grad)
        assert set(kept) == {p for p, owner in oss.owners().items() if owner == dist.get_rank()}


@on_ranks(2, fails=("everywhere", "on one rank"))
def test_a_backward_after_one_that_failed_without_a_forward_between(fails: str) -> None:
    """Its gradients stayed each rank's own."""

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("broken")

    for size in SIZES:
        sharded, oss = shard(model_of(), reduce_buffer_size=size)
        ddp = DistributedDataParallel(model_of())
        first, second = (loss_of(sharded, step, sharded.module) for step in (1, 0))
        handle = list(sharded.parameters())[1].register_hook(fail)
        if fails == "on one rank" and dist.get_rank() == 0:
            handle.remove()
            first.backward()
            sharded.zero_grad(set_to_none=True)
        else:
            with pytest.raises(KeyError):
                first.backward()
            handle.remove()
        second.backward()
        backward(ddp, 0)
        assert_gradients(sharded, oss, ddp)


@on_ranks(2, by=("wrapper", "optimizer", "hand"), set_to_none=(True, False))
def test_gradients_zeroed_after_a_backward_that_failed(by: str, set_to_none: bool) -> None:
    """Those from before it too, which were put aside for it."""

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("broken")

    for size in SIZES:
        sharded, oss = shard(model_of(), reduce_buffer_size=size)
        ddp = DistributedDataParallel(model_of())
        backward(sharded, 1)
        handle = list(sharded.parameters())[1].register_hook(fail)
        with pytest.raises(KeyError):
            backward(sharded, 2)
        handle.remove()
        if by == "hand":
            for parameter in sharded.parameters():
                parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter)
        else:
            (oss if by == "optimizer" else sharded).zero_grad(set_to_none=set_to_none)
        for each in (sharded, ddp):
            backward(each, 0)
        assert_gradients(sharded, oss, ddp)


@on_ranks(2)
def test_an_exception_in_forward_leaves_no_trace() -> None:
    sharded, oss = shard(model_of())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sharded(torch.ones(2, 3))
    ddp = DistributedDataParallel(model_of())
    for model in (sharded, ddp):
        backward(model, 0)
    assert_gradients(sharded, oss, ddp)


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    label: str


@on_ranks(2)
def test_outputs_of_any_form() -> None:
    class Shaped(MLP):
        form = "tuple"

        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            if self.form == "tuple":
                return y, None, torch.arange(3)
            return {"y": [y]} if self.form == "dict" else Output(y, "label")

    for form in ("tuple", "dict", "dataclass"):
        Shaped.form = form
        sharded, oss = shard(model_of(Shaped))
        output = sharded(inputs_for(sharded.module, dist.get_rank()))
        value = output[0] if form == "tuple" else output["y"][0] if form == "dict" else output.value
        assert type(output) is {"tuple": tuple, "dict": dict, "dataclass": Output}[form]
        value += 1  # in place
        value.square().mean().backward()
        truth = mean_gradients(
            model_of(), lambda model, rank: (model(inputs_for(model, rank)) + 1).square().mean().backward()
        )
        assert_gradients(sharded, oss, truth, bitwise=False)


def assert_gradients_of(loss: Callable[[nn.Module, int], torch.Tensor], kind: type[nn.Module]) -> None:
    """Those of ``loss`` of a model and a rank, with ShardedDDP, are the mean over ranks of those of a plain model."""
    sharded, oss = shard(model_of(kind))
    loss(sharded, dist.get_rank()).backward()
    truth = mean_gradients(model_of(kind), lambda model, rank: loss(model, rank).backward())
    assert_gradients(sharded, oss, truth, bitwise=False)


@on_ranks(2)
def test_an_output_that_is_there_several_times_stays_one() -> None:
    """Otherwise gradients would lack what is done in place to one of them, whose values all of them have."""

    class Twice(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"logits": y, "all": [y, y.detach()]}

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        output = model(inputs_for(inner(model), rank))
        output["logits"].mul_(2)
        assert output["all"][0] is output["logits"]
        return output["all"][0].square().mean()

    assert_gradients_of(loss, Twice)


@on_ranks(2)
def test_an_output_and_views_of_it_stay_one_memory() -> None:
    """With gradients as values: of what is done in place to one, all that share its elements have both."""

    class Views(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x) * 1
            pair = y.new_zeros(2, 3) + y.sum()
            return {"whole": y, "first": y[:, 0], "turned": [y.t()], "pair": (pair[0], pair[1]), "half": y[2:]}

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        output = model(inputs_for(inner(model), rank))
        output["first"].mul_(2)
        output["turned"][0].sub_(1)
        output["whole"].square_()
        output["pair"][0].mul_(3)
        terms = output["whole"], output["first"], *output["turned"], *output["pair"], output["half"]
        return torch.stack([(index + 1) * term.mean() for index, term in enumerate(terms)]).sum()

    assert_gradients_of(loss, Views)


@on_ranks(2)
def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    sharded, _ = shard(model)
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' got a torch.sparse_coo gradient.*sparse=False"):
        sharded(torch.tensor([1, 2])).sum().backward()


# -- Several models and optimizers


@on_ranks(2)
def test_two_optimizers_for_one_model() -> None:
    def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        parameters = list(model.parameters())
        return parameters[:2], parameters[2:]

    model, plain = model_of(), model_of()
    a, b = split(model)
    first, second = OSS(a, optim=SGD, lr=0.1), OSS(b, optim=AdamW, lr=0.01)
    sharded = ShardedDDP(model, [first, second])
    ddp = DistributedDataParallel(plain)
    c, d = split(plain)
    optimizers = [SGD(c, lr=0.1), AdamW(d, lr=0.01)]
    for step in range(3):
        sharded.zero_grad()
        ddp.zero_grad()
        backward(sharded, step)
        backward(ddp, step)
        for stepped in (first, second, *optimizers):
            stepped.step()
    assert_parameters(sharded, ddp)
    for parameter, owner in {**first.owners(), **second.owners()}.items():
        assert (parameter.grad is None) == (owner != dist.get_rank())
    with pytest.raises(ValueError, match=r"'layers.0.bias' is in several optimizers, with owners 0 and 1"):
        ShardedDDP(model, [OSS(list(reversed(a)), lr=0.1), OSS([b[0], *a], lr=0.1)])


@on_ranks(2)
def test_two_models_of_one_optimizer_and_adversarial_steps() -> None:
    """A generator and a critic: the generator's backward goes through the critic as well."""

    def build() -> tuple[nn.Module, nn.Module]:
        return model_of(lambda: MLP((9, 11, 9))), model_of(lambda: MLP((9, 7, 1)), seed=2)

    generator, critic = build()
    oss = OSS([*generator.parameters(), *critic.parameters()], optim=AdamW, lr=0.01)
    ours = ShardedDDP(generator, oss), ShardedDDP(critic, oss)
    theirs = tuple(DistributedDataParallel(model) for model in build())
    plain = AdamW([p for model in theirs for p in model.parameters()], lr=0.01)
    for step in range(3):
        for (g, c), optimizer in ((ours, oss), (theirs, plain)):
            noise = inputs_for(inner(g), 10 * step + dist.get_rank())
            optimizer.zero_grad()
            c(noise).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (-c(g(noise)).mean()).backward()
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert_parameters(mine, other)


@on_ranks(2, 3, size=SIZES, order=["old first", "in turns"])
def test_wrapped_again_while_the_old_wrapper_is_still_there(size: int, order: str) -> None:
    """As for a next phase of training, with another optimizer: the wrapper whose forward ran reduces, and no other."""
    model, ddp = model_of(), DistributedDataParallel(model_of())
    kinds: tuple[type[Optimizer], ...] = (SGD, AdamW)
    pairs = [shard(model, kind, reduce_buffer_size=size) for kind in kinds]
    plain = [kind(ddp.parameters(), lr=0.1) for kind in kinds]
    for step, which in enumerate((0, 0, 1, 1) if order == "old first" else (0, 1, 0, 1)):
        (sharded, oss), optimizer = pairs[which], plain[which]
        if step == 2:
            with torch.no_grad():  # computes nothing that is to be reduced
                loss_of(pairs[1 - which][0], step, model)
        oss.zero_grad()
        optimizer.zero_grad()
        backward(sharded, step)
        backward(ddp, step)
        assert_gradients(sharded, oss, ddp)
        oss.step()
        optimizer.step()
    assert_parameters(pairs[0][0], ddp)


@on_ranks(2)
def test_reduces_again_when_a_later_wrapper_is_gone() -> None:
    sharded, oss = shard(model_of())
    later = ShardedDDP(sharded.module, oss)
    backward(later, 0)
    del later
    ddp = DistributedDataParallel(model_of())
    for step in range(2):
        oss.zero_grad()
        ddp.zero_grad()
        backward(sharded, step)
        backward(ddp, step)
        assert_gradients(sharded, oss, ddp)


@on_ranks(2)
def test_preparing_anew_leaves_no_hooks_behind() -> None:
    sharded, _ = shard(model_of())
    parameter = next(iter(sharded.module.parameters()))
    before = dict(parameter._post_accumulate_grad_hooks)  # type: ignore[arg-type]
    for _ in range(3):
        sharded.refresh_trainable()
    assert len(parameter._post_accumulate_grad_hooks) == len(before)  # type: ignore[arg-type]


@on_ranks(2)
def test_wrappers_of_overlapping_models_in_one_backward() -> None:
    """Each reduces what the other does not have."""

    def build() -> list[nn.Module]:
        torch.manual_seed(1)
        return [nn.Linear(9, 9) for _ in range(3)]

    parts, plain = build(), build()
    optimizers = [SGD(part.parameters(), lr=0.1) for part in plain]
    models = [nn.Sequential(*parts[:2]), nn.Sequential(*parts[1:])]
    osses = [OSS(part.parameters(), optim=SGD, lr=0.1) for part in parts]
    wrappers = [ShardedDDP(model, osses) for model in models]
    for step in range(2):
        inputs = torch.randn(2, 9, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for call, modules in ((wrappers, parts), ([nn.Sequential(*plain[:2]), nn.Sequential(*plain[1:])], plain)):
            for module in modules:
                module.zero_grad()
            (call[0](inputs).square().mean() + call[1](inputs).square().mean()).backward()
        for optimizer in (*osses, *optimizers):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if isinstance(optimizer, SGD):
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(dist.get_world_size())
            optimizer.step()
    for part, expected in zip(parts, plain, strict=True):
        torch.testing.assert_close(dict(part.named_parameters()), dict(expected.named_parameters()))


class Head(nn.Module):
    """A loss that is trained too, and not wrapped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scale, self.later = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, outputs: torch.Tensor, both: bool = True) -> torch.Tensor:
        loss = (outputs.mean() * self.scale).square().mean()
        return loss + (outputs.mean() * self.later).sum() if both else loss


@on_ranks(1, 2, 3, size=SIZES)
def test_reduces_what_the_optimizer_has_outside_of_the_module(size: int) -> None:
    """As FairScale does: nothing else would, and each rank would train them by its own data alone."""
    model, head, plain = model_of(), Head(), nn.ModuleList([model_of(), Head()])
    oss = OSS([*model.parameters(), head.scale], optim=SGD, lr=0.1)
    # The first is gone, with what it reduced, when the second has been made.
    sharded = ShardedDDP(model, oss, reduce_buffer_size=size)
    sharded = ShardedDDP(model, oss, reduce_buffer_size=size, warn_on_trainable_params_changed=False)
    plain[1].later.requires_grad_(False)
    optimizer = SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            oss.add_param_group({"params": [head.later]})
            plain[1].later.requires_grad_(True)
        had = head.scale.grad is not None
        sharded.zero_grad(set_to_none=step == 1)
        assert (head.scale.grad is not None) == (had and step != 1)
        optimizer.zero_grad()
        if step == 3:
            with sharded.no_sync():
                head(sharded(inputs_for(model, 7 + dist.get_rank())), True).backward()
        head(sharded(inputs_for(model, 10 * step + dist.get_rank())), step > 1).backward()
        for rank in range(dist.get_world_size()):
            for seed in (10 * step + rank, *([7 + rank] if step == 3 else [])):
                (plain[1](plain[0](inputs_for(model, seed)), step > 1) / dist.get_world_size()).backward()
        oss.step()
        optimizer.step()
    expected = dict(plain.named_parameters())
    torch.testing.assert_close(dict(nn.ModuleList([model, head]).named_parameters()), expected)


@on_ranks(2)
def test_what_several_wrappers_of_one_optimizer_do_not_have_is_reduced_once() -> None:
    one, other, head = model_of(), model_of(seed=2), Head()
    truth = [model_of(), model_of(seed=2), Head()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oss = OSS([p for part in (one, other, head) for p in part.parameters()], optim=SGD, lr=0.1)
        wrappers = ShardedDDP(one, oss), ShardedDDP(other, oss)
        for step in range(3):
            oss.zero_grad()
            losses = [part(inputs_for(one, 10 * step + dist.get_rank())) for part in wrappers]
            head(losses[0] + losses[1]).backward()
            oss.step()
    plain = SGD([p for part in truth for p in part.parameters()], lr=0.1)
    for step in range(3):
        plain.zero_grad()
        for rank in range(dist.get_world_size()):
            inputs = inputs_for(one, 10 * step + rank)
            (truth[2](truth[0](inputs) + truth[1](inputs)) / dist.get_world_size()).backward()
        plain.step()
    for part, expected in zip((one, other, head), truth, strict=True):
        torch.testing.assert_close(dict(part.named_parameters()), dict(expected.named_parameters()))


# -- Process groups


@on_ranks(3)
def test_a_subgroup_has_ranks_of_its_own() -> None:
    """FairScale compares an owner's rank in the group with the rank in the world, and drops owned gradients."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        model, own = model_of(ConvNet), dist.new_group([0], use_local_synchronization=True)
        with pytest.raises(ValueError, match=r"process_group=\.\.\.\): this process is not in the group"):
            ShardedDDP(model, OSS(model.parameters(), lr=0.1, group=own), process_group=group)
        return
    for size in SIZES:
        model = model_of(ConvNet)
        oss = OSS(model.parameters(), optim=AdamW, lr=0.1, group=group)
        # The group is the optimizer's, if no other is given.
        sharded = ShardedDDP(model, oss, process_group=group if size else None, reduce_buffer_size=size)
        ddp = DistributedDataParallel(model_of(ConvNet), process_group=group)
        optimizer = AdamW(ddp.parameters(), lr=0.1)
        for step in range(3):
            for wrapped, stepped in ((sharded, oss), (ddp, optimizer)):
                stepped.zero_grad()
                backward(wrapped, step)
            for parameter, expected in zip(model.parameters(), ddp.module.parameters(), strict=True):
                if oss.owners()[parameter] == dist.get_rank() - 1:
                    assert parameter.grad is not None
                    assert torch.equal(parameter.grad, expected.grad)
                else:
                    assert parameter.grad is None
            oss.step()
            optimizer.step()
        for mine, other in zip(model.state_dict().values(), ddp.module.state_dict().values(), strict=True):
            assert torch.equal(mine, other)
    with pytest.raises(ValueError, match="pass the same process group to both"):
        ShardedDDP(model, oss, process_group=dist.group.WORLD)


# -- Start-up and buffers


@on_ranks(2, 3)
def test_all_ranks_start_as_the_first() -> None:
    model = model_of(ConvNet, seed=dist.get_rank())
    for buffer in model.buffers():
        buffer.add_(dist.get_rank())
    model.register_buffer("mask", torch.tensor([dist.get_rank() == 0, True]), persistent=False)
    sharded, _ = shard(model)
    truth = model_of(ConvNet, seed=0)
    truth.register_buffer("mask", torch.tensor([True, True]), persistent=False)
    assert_parameters(sharded, truth)
    assert torch.equal(model.mask, truth.mask)


@on_ranks(2)
def test_or_as_they_are() -> None:
    model = model_of(MLP, seed=dist.get_rank())
    shard(model, sync_models_at_startup=False)
    assert_parameters(model, model_of(MLP, seed=dist.get_rank()))


@on_ranks(2)
def test_ranks_with_other_parameters_are_told() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"layers.0.weight \(17, 9\).*on rank 0, layers.0.weight \(18, 9\).*rank 1"):
        shard(MLP((9, 17 + rank, 5)))
    model = MLP()
    model.layers[0].weight.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match=r"requires_grad=True.*rank 0.*requires_grad=False"):
        shard(model)
    with pytest.raises(ValueError, match="on rank 0, none on rank 1"):
        shard(MLP((9, 4) if rank else (9, 4, 4)))
    # All have the same owners, and would still send one for the other.
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    parameters = list(model.parameters())
    first, second, third, fourth = parameters
    oss = OSS([third, second, first, fourth] if rank else parameters, lr=0.1)
    with pytest.raises(ValueError, match=r"0.weight \(3, 3\).*place=0 on rank 0, 0.weight .*place=2 on rank 1"):
        ShardedDDP(model, oss)


@on_ranks(2, other=({"reduce_fp16": True}, {"reduce_buffer_size": 0}, {"broadcast_buffers": False}))
def test_ranks_with_other_settings_are_told(other: dict[str, Any]) -> None:
    """They would send other numbers of bytes: gloo ends the process then, or both wait for ever."""
    model, (name,) = MLP(), other
    oss = OSS(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"setting {name}=.* on rank 0, setting {name}=.* on rank 1 of the group"):
        ShardedDDP(model, oss, **(other if dist.get_rank() == 1 else {}))


@on_ranks(1, 2)
def test_what_has_no_shape_yet_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ValueError, match=r"'1.running_mean' has no shape yet"):
        shard(model)
    if dist.get_rank() == 0:
        model[1] = nn.BatchNorm1d(3, affine=False)
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match=r"ranks have different parameters: .* without a shape yet .* on rank 1"):
            shard(model)


@on_ranks(2)
def test_tensors_on_the_meta_device_are_refused_on_all_ranks() -> None:
    for lacking, message in (
        (dist.get_rank(), "0.mean .* on meta on rank 0, 0.mean .* on rank 1"),
        (1, "'1.mean' is on"),
    ):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for index, layer in enumerate(model):
            layer.register_buffer("mean", torch.zeros(3, device="meta" if index == lacking else "cpu"))
        with pytest.raises(ValueError, match=message):
            shard(model)
        model[lacking].to("meta")
        with pytest.raises(ValueError, match=message.replace("mean", "weight").replace("on meta ", "on meta .*")):
            shard(model)


@on_ranks(2)
def test_buffers_follow_the_first_rank() -> None:
    for broadcasts in (True, False):
        sharded, _ = shard(model_of(ConvNet), broadcast_buffers=broadcasts)
        for step in range(2):
            sharded(inputs_for(sharded.module, 10 * step + dist.get_rank()))
        statistics = sharded.module.layers[0][1].running_mean
        means = [torch.empty_like(statistics) for _ in range(2)]
        dist.all_gather(means, statistics)
        assert not torch.equal(*means)  # each rank's own last batch
        sharded.eval()
        sharded(inputs_for(sharded.module, 0))
        assert torch.equal(statistics, means[0] if broadcasts else means[dist.get_rank()])


@on_ranks(2)
def test_buffers_that_are_expanded() -> None:
    """Several of their elements are one in memory, and none may be written twice."""
    first = dist.get_rank() + 5.0
    for wrap in (shard, FullyShardedDataParallel):
        model = model_of(MLP)
        model.register_buffer("expanded0", torch.tensor(first).expand(3))
        model.register_buffer("expanded1", torch.tensor([[first], [first + 1]]).expand(2, 4))
        wrap(model)
        assert torch.equal(model.expanded0, torch.full((3,), 5.0))
        assert torch.equal(model.expanded1, torch.tensor([[5.0] * 4, [6.0] * 4]))


@on_ranks(2)
def test_what_other_ranks_have_other_parts_of_is_refused_by_name() -> None:
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"OSS: parameter '0.flat_param_0' of param group 0 is sharded"):
        OSS(model.named_parameters(), lr=0.1)
    oss = OSS(model[1].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"OSS: parameter 0 of param group 1 is sharded"):
        oss.add_param_group({"params": model[0].parameters()})
    assert len(oss.param_groups) == 1
    before = [parameter.detach().clone() for parameter in model[0].parameters()]
    with pytest.raises(ValueError, match=r"ShardedDataParallel: '0.flat_param_0' is sharded"):
        ShardedDDP(model, oss)
    assert all(torch.equal(*pair) for pair in zip(before, model[0].parameters(), strict=True))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"OSS: parameter 'weight' of param group 0 is sharded"):
        OSS(model[1].named_parameters(), lr=0.1)


@on_ranks(2)
def test_parts_over_other_ranks_are_whole_here() -> None:
    """As where ranks of a node share parameters, and OSS spans nodes: its ranks have the same parts."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    wrapped = FullyShardedDataParallel(model_of(MLP), process_group=alone)
    oss = OSS(wrapped.parameters(), lr=0.1)
    plain = model_of(MLP)
    for model in (wrapped, plain):
        model(inputs_for(plain, 0)).square().mean().backward()
    oss.step()
    SGD(plain.parameters(), lr=0.1).step()
    for (name, mine), truth in zip(wrapped.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_same(name, mine, truth)


@on_ranks(2)
def test_buffers_by_hand() -> None:
    sharded, _ = shard(model_of(ConvNet), broadcast_buffers=False)
    for blocking in (True, False, False):
        for buffer in sharded.module.buffers():
            buffer.fill_(dist.get_rank() + 5)
        sharded.sync_buffers(blocking=blocking)
        if not blocking:
            sharded.eval()
            sharded(inputs_for(sharded.module, 0))  # waits for them
        assert all((buffer == 5).all() for buffer in sharded.module.buffers())
    # Buffers that were replaced, or changed their dtype.
    sharded.module.layers[0][1].running_mean = torch.full((6,), float(dist.get_rank()), dtype=torch.float64)
    sharded.sync_buffers(blocking=True)
    assert (sharded.module.layers[0][1].running_mean == 0).all()
    sharded.module.layers[0][1].running_mean.fill_(dist.get_rank() + 3)
    sharded.double()
    sharded.sync_buffers(blocking=True)
    assert (sharded.module.layers[0][1].running_mean == 3).all()


@on_ranks(2)
def test_buffers_that_nobody_waits_for() -> None:
    """They arrive all the same, and nothing that was written later is lost."""
    sharded, _ = shard(model_of(ConvNet), broadcast_buffers=False)
    buffers = [buffer for buffer in sharded.module.buffers() if buffer.is_floating_point()]

    def sync() -> None:
        for buffer in buffers:
            buffer.fill_(dist.get_rank() + 5)
        sharded.sync_buffers()

    sync()
    limit = time.monotonic() + 30
    while not all((buffer == 5).all() for buffer in buffers):
        assert time.monotonic() < limit, buffers
    sync()
    dist.barrier()  # by itself it does not wait for what is under way
    saved = {name: value.clone() for name, value in sharded.state_dict().items()}
    assert all((value == 5).all() for name, value in saved.items() if "running" in name)
    sync()
    assert all((buffer == 5).all() for name, buffer in copy.deepcopy(sharded).named_buffers() if "running" in name)
    sync()
    sharded.load_state_dict({name: value + 2 if "running" in name else value for name, value in saved.items()})
    sharded.eval()
    sharded(inputs_for(sharded.module, 0))
    assert all((buffer == 7).all() for buffer in buffers)
    sync()
    sharded.double()
    assert all((buffer == 5).all() for name, buffer in sharded.named_buffers() if "running" in name)


@on_ranks(2)
def test_thrown_away_while_something_is_under_way() -> None:
    for fails in (False, True):
        model = model_of(Wide)
        model.register_buffer("statistic", torch.zeros(3))
        sharded, oss = shard(model, reduce_buffer_size=0)
        if fails:
            sharded.module.layers[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backward(sharded, 0)
        else:
            sharded.sync_buffers()
        del model, sharded, oss
        gc.collect()
        dist.all_reduce(torch.ones(1))  # hangs where a message under way went with the wrapper


@on_ranks(2)
def test_two_forwards_before_a_backward() -> None:
    """With batch norm, whose statistics are broadcast in between."""

    def run(model: nn.Module, step: int) -> None:
        losses = [loss_of(model, index, inner(model)) for index in (step, step + 1)]
        sum(losses).backward()  # type: ignore[attr-defined, union-attr]

    sharded, oss = shard(model_of(ConvNet))
    ddp = DistributedDataParallel(model_of(ConvNet), broadcast_buffers=False)
    for model in (sharded, ddp):
        run(model, 0)
    assert_gradients(sharded, oss, ddp)


# -- Dtypes


@on_ranks(2, size=SIZES)
def test_parameters_of_several_dtypes(size: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            self.layers = nn.ModuleList(nn.Linear(9, 9, dtype=dtype) for dtype in dtypes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
            return x

    def run(model: nn.Module, rank: int) -> None:
        model(branch_input(rank)).square().mean().backward()

    sharded, oss = shard(model_of(Mixed), reduce_buffer_size=size)
    plain = model_of(Mixed)
    optimizer = SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for stepped in (oss, optimizer):
            stepped.zero_grad()
        run(sharded, dist.get_rank())
        mean_gradients(plain, run)
        # Halving before the sum costs the smallest float16 numbers a bit.
        assert_gradients(sharded, oss, plain, bitwise=False)
        oss.step()
        optimizer.step()
    assert_parameters(sharded, plain, bitwise=False)


@on_ranks(2)
def test_float16_sums_do_not_overflow() -> None:
    """Two gradients of 40000 have a mean that float16 holds, and no sum."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    other = nn.Linear(1, 1, bias=False, dtype=torch.float32)
    for model, options in ((layer, {}), (other, {"reduce_fp16": True}), (other, {"reduce_fp16": True} | NO_BUFFERS)):
        sharded, _ = shard(model, **options)
        sharded.zero_grad()
        (sharded(torch.ones(1, 1, dtype=model.weight.dtype)) * 40000).sum().backward()
        if model.weight.grad is not None:
            assert model.weight.grad.item() == pytest.approx(40000, rel=1e-3)
            assert model.weight.grad.dtype == model.weight.dtype


NO_BUFFERS = {"reduce_buffer_size": 0}


@on_ranks(2, size=SIZES)
def test_reduce_fp16_rounds_gradients(size: int) -> None:
    """With buffers as without: FairScale turns it off where there are any."""
    sharded, oss = shard(model_of(Wide), reduce_fp16=True, reduce_buffer_size=size)
    backward(sharded, 0)
    locals_ = []
    for rank in range(2):
        plain = model_of(Wide)
        plain(inputs_for(plain, rank)).square().mean().backward()
        locals_.append([parameter.grad for parameter in plain.parameters()])
    for parameter, gradients in zip(sharded.module.parameters(), zip(*locals_, strict=True), strict=True):
        if oss.owners()[parameter] == dist.get_rank():
            halves = [(gradient / 2).half() for gradient in gradients]
            assert_same("gradient", parameter.grad, (halves[0] + halves[1]).float())


@on_ranks(2)
def test_channels_last() -> None:
    def make() -> nn.Module:
        return ConvNet().to(memory_format=torch.channels_last)

    sharded, oss = shard(model_of(make), AdamW)
    ddp = DistributedDataParallel(model_of(make))
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    for step in range(2):
        for model, stepped in ((sharded, oss), (ddp, optimizer)):
            stepped.zero_grad()
            backward(model, step)
            stepped.step()
        for parameter in sharded.module.parameters():
            assert parameter.grad is None or parameter.grad.stride() == parameter.stride()
    assert_parameters(sharded, ddp, bitwise=False)


# -- The module


@on_ranks(2)
def test_to_gives_the_wrapper_back() -> None:
    """FairScale's gives None."""
    sharded, oss = shard(model_of())
    assert sharded.to("cpu") is sharded
    assert sharded.to(device=torch.device("cpu"), dtype=torch.float64, non_blocking=True) is sharded
    ddp = DistributedDataParallel(model_of().double())
    for model in (sharded, ddp):
        model(inputs_for(inner(model), dist.get_rank()).double()).square().mean().backward()
    assert_gradients(sharded, oss, ddp)
    with pytest.raises(ValueError, match="cannot move from cpu to meta"):
        sharded.to("meta")
    assert next(sharded.parameters()).device.type == "cpu"
    assert sharded.half() is sharded
    assert next(sharded.parameters()).dtype == torch.float16


@on_ranks(2, refresh=(True, False))
def test_the_module_itself_may_be_converted(refresh: bool) -> None:
    """And back: autograd then forgets the hooks that keep a mean apart from what is added to it."""
    sharded, oss = shard(model_of(), auto_refresh_trainable=refresh)
    truth = model_of()

    def run(model: nn.Module, step: int) -> None:
        dtype = next(model.parameters()).dtype
        model(inputs_for(inner(model), step).to(dtype)).square().mean().backward()

    for step, dtypes in enumerate([(), (torch.float16, torch.float32), (torch.float64,), ()]):
        for dtype in dtypes:
            sharded.module.to(dtype)
            truth.to(dtype)
        if not refresh:
            sharded.refresh_trainable()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing was frozen
            run(sharded, 10 * step + dist.get_rank())
        for rank in range(2):
            added = copy.deepcopy(truth)
            added.zero_grad()
            run(added, 10 * step + rank)
            for parameter, other in zip(truth.parameters(), added.parameters(), strict=True):
                parameter.grad = other.grad / 2 + (0 if parameter.grad is None else parameter.grad)
        assert_gradients(sharded, oss, truth, bitwise=False)
        if step == 1:
            sharded.zero_grad()
            truth.zero_grad(set_to_none=False)


@on_ranks(2)
def test_looks_like_ddp() -> None:
    model = model_of()
    model.greeting = "hello"  # type: ignore[assignment]
    sharded, _ = shard(model)
    assert sharded.greeting == "hello"
    assert sharded.layers is model.layers
    assert sharded.module is model
    with pytest.raises(AttributeError, match="unheard"):
        _ = sharded.unheard
    assert [*sharded.state_dict()] == [*DistributedDataParallel(model).state_dict()]
    assert (sharded.device_type, sharded.is_multi_device_module) == ("cpu", False)
    assert ShardedDDP is ShardedDataParallel
    sharded.load_state_dict(sharded.state_dict())


@on_ranks(2)
def test_pickling_and_copying() -> None:
    sharded, oss = shard(model_of(), AdamW)
    backward(sharded, 0)
    oss.step()
    oss.zero_grad()
    stream = io.BytesIO()
    pickle.dump((sharded, oss), stream)
    stream.seek(0)
    copies = [pickle.load(stream), copy.deepcopy((sharded, oss))]
    backward(sharded, 1)
    oss.step()
    for other, optimizer in copies:
        backward(other, 1)
        for parameter, owner in optimizer.owners().items():
            assert (parameter.grad is None) == (owner != dist.get_rank())
        optimizer.step()
        assert_parameters(other, sharded)
    with pytest.raises(AttributeError, match="no attribute 'module'"):
        ShardedDDP.__new__(ShardedDDP).reset()  # type: ignore[operator]
    group = dist.new_group([0, 1])
    model = model_of()
    with pytest.raises(TypeError, match="subgroup cannot be pickled"):
        pickle.dumps(ShardedDDP(model, OSS(model.parameters(), group=group, lr=0.1)))


@on_ranks(2)
def test_arguments() -> None:
    model = model_of()
    oss = OSS(model.parameters(), lr=0.1)
    for wrong in (SGD(model.parameters(), lr=0.1), [], [oss, None]):
        with pytest.raises(TypeError, match="OSS"):
            ShardedDDP(model, wrong)
    for wrong in (None, [model], nn.Linear):
        with pytest.raises(TypeError, match="ShardedDataParallel wraps a module, not"):
            ShardedDDP(wrong, oss)
    for wrong in ("gloo", 0):
        with pytest.raises(TypeError, match=r"process_group=...\): must be a process group"):
            ShardedDDP(model, oss, wrong)
    for size in (-1, None, float("nan")):
        with pytest.raises(ValueError, match=f"reduce_buffer_size={size}"):
            ShardedDDP(model, oss, reduce_buffer_size=size)
    numbers: Any = (np.int64(100), np.float32(math.inf))
    for size in numbers:
        backward(ShardedDDP(model, oss, reduce_buffer_size=size), 0)
    for flag in ("broadcast_buffers", "sync_models_at_startup", "auto_refresh_trainable", "reduce_fp16"):
        with pytest.raises(TypeError, match=rf"ShardedDataParallel\({flag}='False'\): pass True or False, not str"):
            ShardedDDP(model, oss, **{flag: "False"})
    with pytest.raises(ValueError, match="not on none"):
        ShardedDDP(nn.Module(), oss)
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match=r"'1.weight' is on the meta device"):
        ShardedDDP(mixed, oss)
    with pytest.raises(ValueError, match="materialize the module before"):
        ShardedDDP(nn.Linear(1, 1, device="meta"), oss)
    sparse = model_of()
    sparse.register_buffer("graph", torch.eye(3).to_sparse())
    for syncs in (True, False):  # the first forward would send it too
        with pytest.raises(ValueError, match=r"'graph' is a tensor of layout torch\.sparse_coo"):
            ShardedDDP(sparse, OSS(sparse.parameters(), lr=0.1), sync_models_at_startup=syncs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ShardedDDP(model, (oss,), None, True, True, 2**23, True, False, True)


def test_the_table_has_every_argument() -> None:
    assert [*ARGUMENTS] == [name for name in inspect.signature(ShardedDataParallel).parameters if name != "self"]
    assert all(argument.meaning in (ShardedDataParallel.__doc__ or "") for argument in ARGUMENTS.values())


# -- Collectives


@on_ranks(2, 3)
def test_collectives_of_whole_tensors_on_every_backend() -> None:
    """As many ranks use them that direct messages pay, as more do, and as other backends than gloo."""
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    before = comm_module.DIRECT_BELOW_BYTES
    try:
        for comm in (comm_for(group, torch.device("cpu")), PairwiseGlooComm(group), GlooComm(group), Comm(group)):
            for comm_module.DIRECT_BELOW_BYTES in (0, before):
                for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool):
                    if dtype == torch.bool and type(comm) is Comm:
                        continue  # gloo itself refuses it
                    for owner in range(size):
                        values = torch.arange(7).add(rank).to(dtype)
                        for work in comm.broadcast(values, owner):
                            work.wait()
                        assert torch.equal(values, torch.arange(7).add(owner).to(dtype))
                        if dtype != torch.bool:
                            values = torch.arange(7).mul(rank + 1).to(dtype)
                            for work in comm.reduce(values, owner):
                                work.wait()
                            if rank == owner:
                                assert torch.equal(values, torch.arange(7).mul(size * (size + 1) // 2).to(dtype))
                moved = torch.full((3,), float(rank))
                comm.move(moved, 1, 0)
                comm.move(moved, 1, 1)
                assert moved[0] == (1 if rank <= 1 else rank)
            for dtype in (torch.complex64, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool):
                if not dtype.is_complex and type(comm) is Comm:
                    continue
                outputs = [torch.empty(size * count, dtype=dtype) for count in (1, 2)]
                inputs = [torch.full((count,), float(rank % 2)).to(dtype) for count in (1, 2)]
                for work in comm.all_gather(outputs, inputs):
                    work.wait()
                expected = [float(other % 2) for other in range(size)]
                assert [*map(float, outputs[0].to(torch.float64))] == expected
                assert [*map(float, outputs[1][::2].to(torch.float64))] == expected
            summed = torch.empty(1, dtype=torch.complex64)
            for work in comm.reduce_scatter([summed], [torch.full((size,), 1.0 + 2.0j * rank)], mean=False):
                work.wait()
            assert summed.item() == complex(size, size * (size - 1))
            assert comm.gather_objects({"rank": rank}) == [{"rank": other} for other in range(size)]
            assert comm.host_device == torch.device("cpu")
    finally:
        comm_module.DIRECT_BELOW_BYTES = before


@on_ranks(2)
def test_trains_on_a_backend_without_direct_messages() -> None:
    known = comm_module._comms.setdefault(dist.group.WORLD, {})
    before, known["cpu"] = known.get("cpu"), GlooComm(dist.group.WORLD)
    try:
        for size in SIZES:
            sharded, oss = shard(model_of(Wide), AdamW, reduce_buffer_size=size)
            ddp = DistributedDataParallel(model_of(Wide))
            optimizer = AdamW(ddp.parameters(), lr=0.1)
            for step in range(2):
                for model, stepped in ((sharded, oss), (ddp, optimizer)):
                    stepped.zero_grad()
                    backward(model, step)
                    stepped.step()
            assert_parameters(sharded, ddp)
    finally:
        del known["cpu"]
        if before is not None:
            known["cpu"] = before


# -- FairScale


@needs_fairscale
@on_ranks(2, options=[{}, NO_BUFFERS, {"reduce_fp16": True, **NO_BUFFERS}], make=[MLP, ConvNet, Wide])
def test_like_fairscale(options: dict[str, Any], make: Callable[[], nn.Module]) -> None:
    from fairscale.nn.data_parallel import sharded_ddp as fairscale_sharded_ddp
    from fairscale.optim import oss as fairscale_oss

    for optim in (SGD, Adam):
        sharded, oss = shard(model_of(make), optim, **options)
        model = model_of(make)
        theirs_oss = fairscale_oss.OSS(model.parameters(), optim=optim, lr=0.1)
        theirs = fairscale_sharded_ddp.ShardedDataParallel(model, theirs_oss, **options)
        for step in range(3):
            for wrapped, stepped in ((sharded, oss), (theirs, theirs_oss)):
                wrapped.zero_grad()
                loss_of(wrapped, step, wrapped.module).backward()
                stepped.step()
            assert_parameters(sharded, model)


class Conjugate(nn.Module):
    """Parameters that are the conjugate, and the negative, of their memory."""

    def __init__(self, size: int):
        super().__init__()
        torch.manual_seed(1)
        self.whole = nn.Parameter(torch.randn(size, dtype=torch.complex64).conj())
        self.imaginary = nn.Parameter(torch.randn(size, dtype=torch.complex64).conj().imag)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = self.whole.real.square() + self.whole.imag + self.imaginary.square()
        return squares.mean() * x.mean() + self.bias.sum()


@on_ranks(2, 3, size=[6, 40000])
def test_parameters_that_are_conjugates_of_their_memory(size: int) -> None:
    truth, model = Conjugate(size), Conjugate(size)
    ours, theirs = OSS(model.parameters(), optim=SGD, lr=0.1), SGD(truth.parameters(), lr=0.1)
    sharded = ShardedDataParallel(model, ours)
    for step in range(2):
        theirs.zero_grad()
        for rank in range(dist.get_world_size()):
            (truth(torch.full((2,), 1.0 + step + rank)) / dist.get_world_size()).backward()
        theirs.step()
        ours.zero_grad()
        sharded(torch.full((2,), 1.0 + step + dist.get_rank())).backward()
        ours.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(truth.named_parameters()))


class Dies:
    """A body that the test below runs by name."""

    @staticmethod
    def body(place: str, size: int) -> None:
        """The last rank is killed in its second step."""
        model = MLP()
        optimizer = OSS(model.parameters(), optim=SGD, lr=0.1)
        sharded = ShardedDataParallel(model, optimizer, reduce_buffer_size=size)
        for step in range(3):
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
                if place == "backward":
                    model.layers[1].register_full_backward_hook(die)
                else:
                    optimizer.optim.register_step_post_hook(die)
            optimizer.zero_grad()
            sharded(inputs_for(model, step)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("size", SIZES[::2])
@pytest.mark.parametrize("place", ["backward", "step"])
@pytest.mark.parametrize("world_size", [2, 3], ids=lambda size: f"world{size}")
def test_a_rank_that_is_killed_is_named(world_size: int, place: str, size: int) -> None:
    with pytest.raises(RankError) as caught:
        ranks(world_size).run(__name__, "Dies", {"place": place, "size": size}, 60.0)
    assert_others_name(world_size - 1, world_size, caught.value)


VERBS: dict[str, Callable[[Any, OSS], object]] = {
    "computing the norm of the gradients": lambda _, optimizer: optimizer.clip_grad_norm(1.0),
    "gathering the optimizer's state": lambda _, optimizer: optimizer.consolidate_state_dict(),
    "gathering the state dict": lambda sharded, _: sharded.state_dict(),
    "loading a state dict": lambda sharded, _: sharded.load_state_dict(sharded.local_state_dict(), strict=False),
}


class EndsBefore:
    """A body that the test below runs by name."""

    @staticmethod
    def body(verb: str) -> None:
        """The last rank is gone before the ``verb``."""
        optimizer = OSS(MLP().parameters(), optim=SGD, lr=0.1)
        optimizer.step()
        sharded = FullyShardedDataParallel(MLP())
        dist.barrier()
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        VERBS[verb](sharded, optimizer)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_a_rank_does_not_come_to_is_named(verb: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(__name__, "EndsBefore", {"verb": verb}, 60.0)
    assert f"shardwise: this happened while {verb}" in caught.value.tracebacks[0], caught.value
