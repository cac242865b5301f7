"""torchao's tensors, which say themselves how they are gathered, beside torch FSDP2."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise
from shardwise.adapters.wrapping import share_values

from ..models import MLP
from ..ranks.harness import on_ranks
from ..ranks.shared import shared_directory

pytest.importorskip("torchao")


def float8(model: nn.Module, *, gathered: bool = True) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathered, emulate=True)
    convert_to_float8_training(model, config=config)


def nf4(model: nn.Module) -> None:
    """Frozen matrices in four bits, as QLoRA has them."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear_nf4(x, self.weight) + self.bias

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = to_nf4(layer.weight.detach(), block_size=64, scaler_block_size=4)
            layer.weight, layer.__class__ = nn.Parameter(weight, requires_grad=False), Linear


def int8(model: nn.Module) -> None:
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    quantize_(model, int8_mixed_precision_training())


def make(verb: Any, convert: Any, last: int = 64) -> nn.Module:
    torch.manual_seed(0)
    model = MLP((128, 128, last))
    convert(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        verb(layer, mesh=mesh)
    verb(model, mesh=mesh)
    return model


def train(model: nn.Module, after_step: Any = None) -> list[torch.Tensor]:
    """Losses of some steps; each rank sees its own data."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        torch.manual_seed(step)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        losses.append(loss.detach())
    return losses


@on_ranks(2, convert=[float8, nf4, int8])
def test_like_fsdp2(convert: Any) -> None:
    expected = train(make(torch_fully_shard, convert))
    assert expected[0] != expected[-1]
    torch.testing.assert_close(train(make(shardwise.fully_shard, convert)), expected, rtol=0, atol=0)


@on_ranks(2, convert=[float8, nf4, int8])
def test_the_first_ranks_values_are_sent(convert: Any) -> None:
    """As the strategies for Lightning and MMEngine do."""
    torch.manual_seed(dist.get_rank())
    model = MLP((128, 128, 64))
    convert(model)
    share_values(model, init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    expected = MLP((128, 128, 64))
    convert(expected)
    assert torch.equal(model(torch.ones(4, 128)), expected(torch.ones(4, 128)))


@on_ranks(2)
def test_scales_computed_after_the_step() -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp as precompute

    expected = train(make(torch_fully_shard, float8), precompute)
    torch.testing.assert_close(train(make(shardwise.fully_shard, float8), precompute), expected, rtol=0, atol=0)


@on_ranks(2, 3, last=[50])
def test_uneven(last: int) -> None:
    # FSDP2 gathers such matrices only in the dtype that they have.
    expected = train(make(torch_fully_shard, partial(float8, gathered=False), last))
    torch.testing.assert_close(train(make(shardwise.fully_shard, float8, last)), expected)


@on_ranks(2)
def test_checkpoints() -> None:
    model = make(shardwise.fully_shard, float8)
    train(model)
    whole = shardwise.full_state_dict(model, rank0_only=False)
    with shared_directory() as directory:
        shardwise.save(directory / "run", model=model)
        shardwise.save_safetensors(model, directory / "weights")
        for convert in (float8, lambda model: None):
            for load in (
                lambda other: shardwise.load(directory / "run", model=other),
                lambda other: shardwise.load_safetensors(other, directory / "weights"),
                lambda other: shardwise.load_full_state_dict(other, whole, broadcast_from_rank0=False),
            ):
                other = make(shardwise.fully_shard, convert)
                load(other)
                found = shardwise.full_state_dict(other, rank0_only=False)
                assert all(torch.equal(value, found[name]) for name, value in whole.items())


@on_ranks(2)
def test_one_process_and_two_draw_the_same_values() -> None:
    torch.manual_seed(3)
    expected = MLP((128, 128, 64)).state_dict()
    torch.manual_seed(3)
    with shardwise.init_on_meta():
        model = MLP((128, 128, 64))
        float8(model)
    shardwise.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    shardwise.materialize(model)
    found = shardwise.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@on_ranks(2)
def test_flat_optimizers_step_them_alone() -> None:
    def losses(kind: Any) -> list[float]:
        model = make(shardwise.fully_shard, float8)
        optimizer = kind(model.parameters(), lr=1e-2)
        found = []
        for step in range(3):
            loss = model(torch.randn(4, 128, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(partial(shardwise.optim.flat, torch.optim.AdamW)) == losses(torch.optim.AdamW)


def train_in_eight_bits(model: nn.Module, optimizer: Any, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@on_ranks(2, limit=240)
def test_optimizers_that_compile_their_step_and_keep_state_in_eight_bits() -> None:
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    def start(verb: Any) -> tuple[nn.Module, Any]:
        model = make(verb, lambda model: None)
        return model, AdamW8bit(model.parameters(), lr=1e-2)

    # Ours first: what the other compiles would serve it too.
    (ours, optimizer), (theirs, other) = start(shardwise.fully_shard), start(torch_fully_shard)
    found = train_in_eight_bits(ours, optimizer, range(2))
    torch.testing.assert_close(found, train_in_eight_bits(theirs, other, range(2)), rtol=0, atol=0)
    with shared_directory() as directory:
        shardwise.save(directory / "run", model=ours, optimizer=optimizer)
        again, resumed = start(shardwise.fully_shard)
        shardwise.load(directory / "run", model=again, optimizer=resumed)
    state = resumed.state[again.layers[0].weight]  # type: ignore[index, union-attr]
    assert type(state["exp_avg"].to_local()) is OptimState8bit
    assert state["step"] == 2
    expected = train_in_eight_bits(theirs, other, range(2, 4))
    torch.testing.assert_close(train_in_eight_bits(again, resumed, range(2, 4)), expected, rtol=0, atol=0)
