"""Tensors with fewer rows than ranks, laid out without padding, against torch FSDP2.

That is only done in worlds larger than a test's, so it is asked for here."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise
from shardwise.core.comm import PairwiseGlooComm
from shardwise.core.root import unit_of

from .harness import on_ranks
from .test_parity import assert_same, train

BF16 = torch.bfloat16


class Narrow(nn.Module):
    """Layers of one row to ten, each with one whose parameters all have one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(6, 2), nn.Linear(2, 10), nn.Linear(10, 1), nn.Linear(1, 6)])
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, 3))

    def forward(self, x: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale if scaled else x


def everywhere() -> Any:
    return mock.patch.object(PairwiseGlooComm, "thin_from_bytes", 0.0)


def build(verb: Any, mesh: Any, **options: Any) -> nn.Module:
    model = Narrow()
    for layer in model.layers:
        verb(layer, mesh=mesh, **options)
    verb(model, mesh=mesh, **options)
    return model


def thin_names(module: nn.Module) -> set[str]:
    unit = unit_of(module)
    assert unit is not None
    slots = [slot for group in unit.groups for slot in group.slots]
    return {slot.name for slot in slots if slot.buffer.layout.tensors[slot.index].thin}


SETTINGS: dict[str, dict[str, Any]] = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@on_ranks(2, param_dtype=[None, BF16], reduce_dtype=[None, torch.float32], setting=[*SETTINGS])
def test_bitwise_like_fsdp2(param_dtype: Any, reduce_dtype: Any, setting: str) -> None:
    like_fsdp2({"mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype), **SETTINGS[setting]}, sgd=False)


@on_ranks(3, 4, param_dtype=[None, BF16], setting=[*SETTINGS])
def test_like_fsdp2(param_dtype: Any, setting: str) -> None:
    # More terms are added in another order: not in bfloat16 then, nor by Adam, which would make a step of full size of
    # the difference where they nearly cancel.
    like_fsdp2({"mp_policy": MixedPrecisionPolicy(param_dtype, torch.float32), **SETTINGS[setting]}, sgd=True)


def like_fsdp2(options: dict[str, Any], sgd: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with everywhere():
        model = build(shardwise.fully_shard, mesh, **options)
    assert thin_names(model.layers[2]) == {"weight", "bias"}  # type: ignore[index]
    assert thin_names(model.layers[0]) == ({"weight", "bias"} if dist.get_world_size() >= 4 else set())  # type: ignore[index]
    ours = train(model, clip=shardwise.clip_grad_norm_, sgd=sgd)
    assert_same(ours, train(build(torch_fully_shard, mesh, **options), sgd=sgd))


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())  # type: ignore[union-attr, operator]


@on_ranks(4)
def test_replicated_and_accumulated() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with everywhere():
        models = [build(shardwise.fully_shard, mesh), build(torch_fully_shard, mesh)]
    assert thin_names(models[0].layers[2])  # type: ignore[index]
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
        for model in models:
            model.set_requires_all_reduce(step == 3)  # type: ignore[operator]
            model.set_requires_gradient_sync(step != 0)  # type: ignore[operator]
            model(x).square().mean().backward()
    assert_same_gradients(*models)


@on_ranks(2, 4)
def test_parameters_without_gradient_on_some_ranks_or_on_all() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with everywhere():
        model = build(shardwise.fully_shard, mesh)
    x = torch.randn(4, 6)
    for step in range(5):
        model.zero_grad()
        model(x, scaled=dist.get_rank() == 0).sum().backward()
        had = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert had == {name for name, _ in model.named_parameters()} - {"unused"}, step


@on_ranks(2, 3, 4)
def test_values_come_back_bit_for_bit() -> None:
    """Signed zeros and NaNs too, which adding floating-point zeros would change."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    strange = torch.tensor([[-0.0, 0.0, float("nan"), -float("inf"), 1e-45, -3.5]])
    model = nn.Linear(6, 1)
    model.weight.data.copy_(strange)
    for dtype in (torch.float32, BF16):
        with everywhere():
            sharded = shardwise.fully_shard(nn.Linear(6, 1).to(dtype), mesh=mesh)
        sharded.weight.data.to_local().copy_(strange[: len(sharded.weight.to_local())])
        assert thin_names(sharded) == {"weight", "bias"}
        sharded.unshard()
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(sharded.weight.detach().view(bits), strange.to(dtype).view(bits))
        sharded.reshard()


@on_ranks(2, 4)
def test_custom_collectives_take_the_rest() -> None:
    calls: list[str] = []

    class Collective:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Collective):
        def __call__(self, **arguments: Any) -> Any:
            calls.append("gather")
            return dist.all_gather_into_tensor(
                arguments["output_tensor"], arguments["input_tensor"], group=arguments["group"], async_op=True
            )

    class Scatter(Collective):
        def __call__(self, **arguments: Any) -> Any:
            calls.append("scatter")
            return dist.reduce_scatter_tensor(
                arguments["output_tensor"],
                arguments["input_tensor"].clone(),
                op=dist.ReduceOp.SUM,
                group=arguments["group"],
                async_op=True,
            )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with everywhere():
        model, plain = build(shardwise.fully_shard, mesh), build(shardwise.fully_shard, mesh)
    for module in (model, *model.layers):  # type: ignore[misc]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        module.set_custom_all_gather(Gather())  # type: ignore[operator]
        module.set_custom_reduce_scatter(Scatter())  # type: ignore[operator]
    x = torch.randn(4, 6)
    for one in (model, plain):
        one(x).square().mean().backward()
    assert {"gather", "scatter"} <= set(calls)
    assert_same_gradients(model, plain)


@on_ranks(2, 4)
def test_whole_values_and_flat_optimizer() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with everywhere():
        model, plain = build(shardwise.fully_shard, mesh), build(shardwise.fully_shard, mesh)
    flat = shardwise.optim.flat(torch.optim.AdamW, model.parameters(), lr=0.1)
    usual = torch.optim.AdamW(plain.parameters(), lr=0.1)
    x = torch.randn(4, 6)
    for _ in range(3):
        for one, optimizer in ((model, flat), (plain, usual)):
            one(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = shardwise.full_state_dict(model, rank0_only=False)
    for (name, ours), theirs in zip(whole.items(), plain.parameters(), strict=True):
        assert ours.untyped_storage().nbytes() == ours.nbytes
        assert torch.equal(ours, theirs.full_tensor()), name  # type: ignore[operator]


@on_ranks(2, 3)
def test_ranks_that_own_nothing_notice_what_is_moved() -> None:
    """A unit is laid out anew on all ranks or on none: else they would no longer agree what is reduced."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(5, 1)
    model.unused = nn.Parameter(torch.ones(1, 3))
    shardwise.fully_shard(model, mesh=mesh)
    for step in range(8):
        model(torch.ones(2, 5)).sum().backward()
        assert model.unused.grad is None
        model.zero_grad()
        if step == 3:
            model._apply(lambda tensor: tensor.clone())
