"""Ways through the engine that no other test takes: each fails without a statement that those can do without."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise
from shardwise.core import reducer
from shardwise.core.errors import StateError
from shardwise.core.parameter import owner_of
from shardwise.core.root import unit_of

from .harness import on_ranks
from .test_state import Tied
from .truth import assert_tensors, gradients_of

PRESETS = ["zero3", "zero2", "zero1", "ddp"]


class UsesSome(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        return self.a(x) + self.b(x) if use else self.a(x)


def assert_gradients(model: nn.Module, plain: nn.Module) -> None:
    for name, gradient in gradients_of(model).items():
        assert_tensors(name, gradient, plain.get_parameter(name).grad, bitwise=False)


def backward_of_both(model: nn.Module, plain: nn.Module, uses: tuple[bool, bool] = (True, True)) -> None:
    rank, dtype = dist.get_rank(), next(plain.parameters()).dtype
    batches = [torch.randn(2, 3, dtype=dtype) for _ in range(2)]
    model(batches[rank], uses[rank]).sum().backward()
    for batch, use in zip(batches, uses, strict=True):
        (plain(batch, use).sum() / 2).backward()


@on_ranks(2)
def test_a_late_gradient_is_kept_while_sums_wait_for_their_all_reduce() -> None:
    plain = UsesSome()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = shardwise.fully_shard(copy.deepcopy(plain), mesh=mesh)
    for _ in range(4):
        backward_of_both(model, plain, (False, False))
    model.set_requires_all_reduce(False)
    backward_of_both(model, plain)
    model.set_requires_all_reduce(True)
    backward_of_both(model, plain, (False, False))
    assert_gradients(model, plain)


@on_ranks(2, preset=PRESETS)
def test_thawed_before_the_last_micro_batch(preset: str) -> None:
    plain = UsesSome()
    model: Any = shardwise.fully_shard(copy.deepcopy(plain), placements=preset)
    for is_last in (False, True):
        for one in (plain, model):
            one.a.weight.requires_grad_(is_last)
        model.set_requires_gradient_sync(is_last)
        backward_of_both(model, plain)
    assert_gradients(model, plain)


@on_ranks(2, units=["", "embed head", "head embed"], first=[True, False])
def test_what_was_tied_after_sharding_is_converted(units: str, first: bool) -> None:
    plain = Tied()
    model: Any = copy.deepcopy(plain)
    for name in units.split():
        shardwise.fully_shard(getattr(model, name))
    shardwise.fully_shard(model)
    batch = torch.arange(4)
    F.cross_entropy(model(batch), batch).backward()
    for one in (model, plain):
        one.zero_grad()
        one.tie(first)
        one.double()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for _ in range(3):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            F.cross_entropy(one(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model(batch), plain(batch))
        model.reshard()


@on_ranks(2)
def test_a_unit_that_one_replica_leaves_out_after_a_conversion() -> None:
    plain = UsesSome()
    model: Any = copy.deepcopy(plain)
    for one in (model.a, model.b, model):
        shardwise.fully_shard(one, placements="ddp")
    for step, dtype in enumerate((torch.float32, torch.float64)):
        for one in (plain, model):
            one.to(dtype)
            one.zero_grad()
        backward_of_both(model, plain, (True, step == 0))
        assert_gradients(model, plain)


class Mixed(UsesSome):
    def __init__(self) -> None:
        super().__init__()
        self.b.bias = nn.Parameter(self.b.bias.detach().bfloat16())


@on_ranks(2)
def test_a_unit_of_two_dtypes_that_one_replica_leaves_out_once_they_are_one() -> None:
    plain = Mixed()
    model: Any = copy.deepcopy(plain)
    for one in (model.a, model.b, model):
        shardwise.fully_shard(one, placements="ddp")
    for step in range(2):
        for one in (plain, model):
            if step:
                one.float()
            one.zero_grad()
            one.b.forward = lambda x, b=one.b: F.linear(x, b.weight, b.bias.float())
        backward_of_both(model, plain, (True, step == 0))
    assert_gradients(model, plain)


def whole_on_each(placements: str) -> DeviceMesh:
    """Two ranks, each of which has whole parameters."""
    return init_device_mesh("cpu", (2,) if placements == "ddp" else (2, 1))


@on_ranks(2, placements=["ddp", "zero3"])
def test_a_unit_that_one_replica_leaves_out_after_another_took_over_what_replaced_a_parameter(placements: str) -> None:
    plain: Any = nn.Module()
    plain.a, plain.b = nn.Linear(3, 3), UsesSome()
    plain.forward = lambda x, use: plain.a(x) + plain.b(x, False) if use else plain.a(x)
    model: Any = copy.deepcopy(plain)
    model.forward = lambda x, use: model.a(x) + model.b(x, False) if use else model.a(x)
    for one in (model.a, model.b, model):
        shardwise.fully_shard(one, mesh=whole_on_each(placements), placements=placements)
    for step in range(reducer.IDLE_AFTER + 2):
        plain.zero_grad()
        model.zero_grad()
        is_last = step > reducer.IDLE_AFTER
        if is_last:
            model.b.a.weight = nn.Parameter(model.b.a.weight.detach().clone())
        backward_of_both(model, plain, (True, not is_last))
        assert_gradients(model, plain)


@on_ranks(2, preset=PRESETS)
def test_reset_drops_what_was_accumulated_in_another_dtype(preset: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = shardwise.fully_shard(nn.Linear(3, 3), placements=preset, mp_policy=policy)
    x, found = torch.randn(2, 3), []
    for _ in range(2):
        model(x).sum().backward()
        found.append([*gradients_of(model).values()])
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
    torch.testing.assert_close(found[0], found[1])


@on_ranks(2)
def test_what_is_kept_stays_when_a_forward_takes_another_way() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x: torch.Tensor, skipped: int | None = None) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                x = x if index == skipped else layer(x)
            return x

    model = Skips()
    for layer in model.layers:
        shardwise.fully_shard(layer, reshard_after_forward=False)
    shardwise.fully_shard(model)
    for skipped in (None, None, None, 3, 1):
        loss = model(torch.ones(2, 3), skipped).sum()
        for index, layer in enumerate(model.layers):
            assert index == skipped or unit_of(layer).groups[0].is_unsharded
        loss.backward()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.a, self.b = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.a(self.other(x)).tanh()))


@on_ranks(2)
def test_one_of_several_modules_runs_again() -> None:
    """Inside of a root the forward of the unit goes on; without one it is another forward."""
    plain = Twice()
    model: Any = copy.deepcopy(plain)
    shardwise.fully_shard([model.a, model.b])
    shardwise.fully_shard(model)
    for step in range(2):
        batches = [torch.randn(2, 3) for _ in range(2)]
        model(batches[dist.get_rank()]).sum().backward()
        for batch in batches:
            (plain(batch).sum() / 2).backward()
        assert_gradients(model, plain)
        assert unit_of(model).context.passes == step + 1
    alone = shardwise.fully_shard([nn.Linear(3, 3), nn.Linear(3, 3)])
    for step in range(2):
        with torch.no_grad():
            alone[0](torch.ones(2, 3))
        assert unit_of(alone[0]).context.passes == step + 1


class RunsAll(UsesSome):
    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        return a + b if use else a


@on_ranks(2, preset=PRESETS)
def test_frozen_after_a_micro_batch_in_which_a_unit_was_unused_on_a_rank(preset: str) -> None:
    plain = RunsAll()
    model: Any = copy.deepcopy(plain)
    for one in (model.b, model):
        shardwise.fully_shard(one, placements=preset)
        one.set_reduce_scatter_unused_params(True)
    for is_last in (False, True):
        for one in (plain, model):
            one.b.weight.requires_grad_(not is_last)
        model.set_requires_gradient_sync(is_last)
        backward_of_both(model, plain, (True, False))
    assert_gradients(model, plain)


@on_ranks(2, placements=["ddp", "zero3"], replaced=[True, False])
def test_a_unit_that_is_left_out_while_it_lacks_a_sharded_parameter(placements: str, replaced: bool) -> None:
    plain = UsesSome()
    model: Any = copy.deepcopy(plain)
    for one in (model.a, model.b, model):
        shardwise.fully_shard(one, mesh=whole_on_each(placements), placements=placements)
    backward_of_both(model, plain)
    own = model.b.weight
    model.b.weight = nn.Parameter(torch.ones(3, 3)) if replaced else None
    backward_of_both(model, plain, (False, False))
    model.b.weight = own
    backward_of_both(model, plain)
    assert_gradients(model, plain)


@on_ranks(2, placements=["ddp", "zero3"])
def test_frozen_after_a_micro_batch_in_which_a_rank_left_a_unit_out(placements: str) -> None:
    plain = UsesSome()
    model: Any = copy.deepcopy(plain)
    for one in (model.a, model.b, model):
        shardwise.fully_shard(one, mesh=whole_on_each(placements), placements=placements)
    for is_last in (False, True):
        for one in (plain, model):
            one.b.requires_grad_(not is_last)
        model.set_requires_gradient_sync(is_last)
        backward_of_both(model, plain, (True, False))
    assert_gradients(model, plain)


@on_ranks(2, placements=["ddp", "zero1"], asynchronous=[False, True])
def test_a_unit_that_micro_batches_leave_out_stays_as_the_user_has_it(placements: str, asynchronous: bool) -> None:
    model: Any = UsesSome()
    for one in (model.a, model.b, model):
        shardwise.fully_shard(one, mesh=whole_on_each(placements), placements=placements)
    model.set_requires_gradient_sync(False)
    handle = model.b.unshard(async_op=asynchronous)
    for step in range(3):
        model(torch.ones(2, 3), False).sum().backward()
        if handle is not None and step == 0:
            handle.wait()
        assert type(model.b.weight) is nn.Parameter


@on_ranks(2)
def test_micro_batches_may_leave_out_what_has_no_values_yet() -> None:
    model: Any = UsesSome()
    model.b.to("meta")
    for one in (model.a, model.b, model):
        shardwise.fully_shard(one, placements="ddp")
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(2, 3), False).sum().backward()
    assert model.b.weight.is_meta


@on_ranks(2)
def test_sums_that_wait_are_no_plan_to_forget() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = copy.deepcopy(plain)
    model.forward = lambda x: model[1](model[0](x).double())
    shardwise.fully_shard(model, mesh=mesh)
    with mock.patch.object(reducer, "MOST_PLANS", 1):
        for is_last in (False, True):
            model.set_requires_all_reduce(is_last)
            batches = [torch.randn(2, 3) for _ in range(2)]
            model(batches[dist.get_rank()]).sum().backward()
            for batch in batches:
                (plain[1](plain[0](batch).double()).sum() / 2).backward()
    assert_gradients(model, plain)


@on_ranks(2)
def test_a_unit_that_gives_a_sparse_tensor() -> None:
    class Sparse(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).to_sparse()

    plain = Sparse(3, 3)
    model = shardwise.fully_shard(copy.deepcopy(plain))
    for one in (model, plain):
        output = one(torch.ones(2, 3))
        assert output.is_sparse
        output.to_dense().sum().backward()
    assert_gradients(model, plain)


@on_ranks(1)
def test_what_was_to_be_prefetched_may_be_gone() -> None:
    model: Any = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    for one in (*model, model):
        shardwise.fully_shard(one)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    del model[1]
    gc.collect()
    model(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(1)
def test_guards_of_gradients_do_not_add_up() -> None:
    model = shardwise.fully_shard(nn.Linear(3, 3))
    for _ in range(3):
        x = torch.ones(2, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    unit: Any = unit_of(model)
    faces = [face for group in unit.groups for slot in group.slots for face in slot.faces]
    assert {len(face._post_accumulate_grad_hooks) for face in faces} == {1}


@on_ranks(1)
def test_parameters_that_got_memory_and_no_values_are_named() -> None:
    with shardwise.init_on_meta():
        model = nn.Sequential(nn.Linear(3, 3))
    for one in (*model, model):
        shardwise.fully_shard(one)
    for parameter in model.parameters():
        owner_of(parameter).leave_meta()  # type: ignore[union-attr]
    with pytest.raises(StateError, match=r"'0\.weight', '0\.bias'"):
        model(torch.ones(2, 3))
