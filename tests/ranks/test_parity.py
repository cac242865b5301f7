"""Bitwise equality with torch FSDP2 at world size 2, closeness elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

import shardwise
from shardwise import Placements

from ..models import Residual, build, inputs_for, wrap
from .harness import on_ranks
from .truth import batch, gradients_of, state_of

BF16 = torch.bfloat16


def train(model: nn.Module, steps: int = 3, clip: Any = None, sgd: bool = False) -> dict[str, list[torch.Tensor]]:
    """Losses, gradient norms and whole parameters of some steps of AdamW or SGD; each rank sees its own data."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if sgd else torch.optim.AdamW(parameters, lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        x = inputs_for(getattr(model, "module", model), seed=100 * step + dist.get_rank())
        loss = model(x).float().square().mean()
        loss.backward()
        norm = (clip or torch.nn.utils.clip_grad_norm_)(model.parameters(), 1.0)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = list(state_of(model).values())
    return {"losses": losses, "norms": norms, "parameters": whole, "buffers": list(model.buffers())}


def assert_same(ours: dict[str, list[torch.Tensor]], theirs: dict[str, list[torch.Tensor]]) -> None:
    for kind in ours:
        for index, (a, b) in enumerate(zip(ours[kind], theirs[kind], strict=True)):
            if dist.get_world_size() <= 2:
                assert torch.equal(a, b), f"{kind}[{index}]: {(a - b).abs().max()}"
            else:
                torch.testing.assert_close(a, b)


@on_ranks(
    2,
    model=["mlp", "transformer", "conv"],
    param_dtype=[None, BF16],
    reduce_dtype=[None, torch.float32, BF16],
    reshard=[True, False],
)
def test_like_fsdp2(model: str, param_dtype: Any, reduce_dtype: Any, reshard: bool) -> None:
    check_like_fsdp2(model, param_dtype, reduce_dtype, reshard)


@on_ranks(1, model=["mlp", "transformer", "conv"], param_dtype=[None, BF16], reduce_dtype=[None, torch.float32, BF16])
def test_like_fsdp2_on_one_rank(model: str, param_dtype: Any, reduce_dtype: Any) -> None:
    check_like_fsdp2(model, param_dtype, reduce_dtype, reshard=True)


@on_ranks(3, 4, model=["mlp", "transformer", "conv"], precision=[(None, None), (BF16, None), (BF16, torch.float32)])
def test_like_fsdp2_on_more_ranks(model: str, precision: tuple[Any, Any]) -> None:
    check_like_fsdp2(model, *precision, reshard=True)


def check_like_fsdp2(model: str, param_dtype: Any, reduce_dtype: Any, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    options = {"mp_policy": policy, "reshard_after_forward": reshard}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make(verb: Any) -> nn.Module:
        module = build(model)
        for buffer in module.buffers():
            if buffer.is_floating_point():  # torch's batch norm on the CPU wants buffers as its parameters are
                buffer.data = buffer.to(param_dtype)
        return wrap(module, verb, mesh=mesh, **options)

    ours = train(make(shardwise.fully_shard), clip=shardwise.clip_grad_norm_)
    theirs = train(make(torch_fully_shard))
    assert_same(ours, theirs)


@on_ranks(2, reshard=[True, False])
def test_a_unit_without_parameters_adds_gradients_in_the_order_of_fsdp2(reshard: bool) -> None:
    def make(verb: Any) -> nn.Module:
        torch.manual_seed(1)
        inner = Residual(nn.Linear(9, 9))
        model = nn.Sequential(nn.Linear(9, 9), Residual(inner), nn.Linear(9, 5))
        model.layers = (inner.layer, inner, model[1])
        return wrap(model, verb, reshard_after_forward=reshard)

    def steps(model: nn.Module) -> list[torch.Tensor | None]:
        optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, dist.get_rank(), 16, 9)).square().mean().backward()
            gradients += gradients_of(model).values()
            optimizer.step()
        return gradients

    ours, theirs = steps(make(shardwise.fully_shard)), steps(make(torch_fully_shard))
    for one, other in zip(ours, theirs, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


class Scaled(nn.Module):
    """Computes with its weight in one dtype and with the others in another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.weight, self.bias = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(BF16)  # nothing to do where it is
        return nn.functional.linear(x.to(BF16), weight).float() * self.scale.sum() + self.bias


@on_ranks(1, 2, 3, reduce_dtype=[None, torch.float32], placements=["zero1", "zero3"])
def test_parameters_that_keep_their_dtype(reduce_dtype: Any, placements: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    of_torch, exact = hasattr(policy, "param_dtype_override_fn"), dist.get_world_size() < 3  # from 2.15 on
    kept = {"weight": None, "bias": torch.float32, "scale": torch.float32}
    seen: list[dict[str, torch.dtype]] = []

    def steps(model: Any, verb: Any, **options: Any) -> list[dict[str, torch.Tensor | None]]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        object.__setattr__(policy, "param_dtype_override_fn", lambda parameter: kept[names[id(parameter)]])
        verb(model, mp_policy=policy, **options)
        model.register_forward_pre_hook(lambda m, _: seen.append({k: p.dtype for k, p in m.named_parameters()}))
        gradients = []
        for step in range(2):
            if step:  # buffers made anew
                model.float()
            model(batch(step, dist.get_rank(), 4, 7)).square().sum().backward()
            gradients.append(gradients_of(model))
            model.zero_grad()
        return gradients

    found = steps(Scaled(), shardwise.fully_shard, placements=placements)
    assert seen == [{"weight": BF16, "bias": torch.float32, "scale": torch.float32}] * 2
    if of_torch and placements == "zero3":
        for ours, theirs in zip(found, steps(Scaled(), torch_fully_shard), strict=True):
            for name, gradient in theirs.items():
                torch.testing.assert_close(ours[name], gradient, rtol=0 if exact else None, atol=0 if exact else None)
    plain = Scaled()
    for step, gradients in enumerate(found):
        plain.zero_grad()
        for rank in range(dist.get_world_size()):
            plain(batch(step, rank, 4, 7)).square().sum().backward()
        for name, gradient in gradients_of(plain).items():
            if name != "weight" or reduce_dtype is not None:
                assert gradient is not None
                torch.testing.assert_close(gradients[name], gradient / dist.get_world_size())


@on_ranks(1, 2, 3, 4, model=["mlp", "transformer", "conv"])
def test_zero_stages_agree(model: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = train(wrap(build(model), torch_fully_shard, mesh=mesh))
    for placements in (Placements.zero1, Placements.zero2, Placements.zero3):
        sharded = wrap(build(model), shardwise.fully_shard, mesh=mesh, placements=placements)
        assert_same(train(sharded, clip=shardwise.clip_grad_norm_), theirs)


@on_ranks(1, 2, 3, 4, model=["mlp", "transformer", "conv"])
def test_ddp_preset_like_torch_ddp(model: str) -> None:
    # torch divides before it adds. With three ranks that is another last bit, which Adam would turn into a step of
    # full size where a gradient is nearly zero.
    sgd = dist.get_world_size() > 2
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = wrap(build(model), shardwise.fully_shard, mesh=mesh, placements=Placements.ddp)
    ours = train(sharded, clip=shardwise.clip_grad_norm_, sgd=sgd)
    # Buffers are not broadcast: fully_shard leaves them to each rank.
    theirs = train(nn.parallel.DistributedDataParallel(build(model), broadcast_buffers=False), sgd=sgd)
    assert_same(ours, theirs)


@on_ranks(1, 2, 3, around=[False, True], placements=["zero2", "zero3"])
def test_torchs_encoder_leaves_out_padding_in_evaluation(around: bool, placements: str) -> None:
    def encoder() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def forward(self, x: torch.Tensor, src_key_padding_mask: torch.Tensor) -> Any:
            return self.encoder(x, src_key_padding_mask=src_key_padding_mask)

    make: Any = Around if around else encoder
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, plain = make(), make().eval()
    for layer in (model.encoder if around else model).layers:
        shardwise.fully_shard(layer, mesh=mesh, placements=placements)
    shardwise.fully_shard(model, mesh=mesh, placements=placements)
    padding = torch.tensor([[False, False, False, True, True], [False] * 5])
    for _ in range(2):
        x = torch.randn(2, 5, 8)
        with torch.no_grad():
            ours = model.eval()(x, src_key_padding_mask=padding)
            theirs = plain(x, src_key_padding_mask=padding)
        assert torch.equal(ours, theirs)
        assert not ours[0, 3:].any()
        model.train()(x, src_key_padding_mask=padding).sum().backward()


@on_ranks(2, 3, 4, model=["mlp", "transformer"], reshard=[True, False])
def test_counted_like_fsdp2(model: str, reshard: bool) -> None:
    """`CommDebugMode` counts gathers and reductions, though they are made of messages."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2) if ranks == 4 else (ranks,), mesh_dim_names=("outer", "inner")[: ranks // 2])
    counts, modules = [], []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        sharded = wrap(build(model), verb, mesh=mesh, reshard_after_forward=reshard)
        for _ in range(2):
            with CommDebugMode() as counter:
                sharded(inputs_for(sharded, seed=dist.get_rank())).sum().backward()
        counts.append(dict(counter.get_comm_counts()))
        modules.append({name.replace("FSDP", ""): of for name, of in counter.comm_module_counts.items()})
    assert counts[0] == counts[1] != {}
    assert modules[0]["Global"] == modules[1]["Global"]


@on_ranks(2)
def test_a_second_unshard_counts_nothing() -> None:
    sharded = wrap(build("mlp"), shardwise.fully_shard)
    with CommDebugMode() as counter:
        handle = sharded.layers[0].unshard(async_op=True)  # type: ignore[index, union-attr]
        sharded.layers[0].unshard()  # type: ignore[index, union-attr]
        handle.wait()
    assert counter.get_comm_counts() == {torch.ops.c10d._allgather_base_: 1}


@on_ranks(2)
def test_other_modes_do_not_import_what_counts() -> None:
    """It imports the compiler, which takes seconds."""
    sharded = wrap(build("mlp"), shardwise.fully_shard)
    place = "torch.distributed.tensor.debug"
    imported = sys.modules.pop(place)
    try:
        with FlopCounterMode(display=False):
            sharded(inputs_for(sharded, seed=dist.get_rank())).sum().backward()
        assert place not in sys.modules
    finally:
        sys.modules[place] = imported
