"""Models built on the meta device: materialized, they are what one process makes without sharding, bit for bit."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import MixedPrecisionPolicy, fully_shard, load_full_state_dict
from shardwise.checkpoint.peers import Peers
from shardwise.core.root import units_of
from shardwise.init import init_on_meta, materialize

from ..models import Block, ConvNet, Transformer, inputs_for, wrap
from .harness import on_ranks
from .truth import whole

Make = Callable[[], nn.Module]
materializing: Any = importlib.import_module("shardwise.init.materialize")


def world_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Layers(nn.Module):
    """One of many kinds of layers, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3, bias=False), nn.Bilinear(3, 2, 5)),
                nn.Embedding(11, 6, padding_idx=2),
                nn.Sequential(nn.LayerNorm(7), nn.RMSNorm(7), nn.GroupNorm(1, 7), nn.PReLU()),
                nn.MultiheadAttention(12, 3, kdim=5, add_bias_kv=True),
                nn.Sequential(nn.Conv1d(3, 5, 2), nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(2, 3, 2), nn.BatchNorm2d(4)),
                nn.LSTM(5, 3, 2, bidirectional=True),
            ]
        )
        self.root = nn.Linear(3, 2)


def torch_transformer() -> nn.Module:
    model: Any = nn.Transformer(12, 3, 2, 2, 20, batch_first=True)
    model.layers = nn.ModuleList([*model.encoder.layers, *model.decoder.layers])
    return model  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """A table that no checkpoint has, and a second name for it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.original = self.frequencies
        self.register_buffer("noise", torch.randn(3))


class Custom(nn.Module):
    """Initializes by itself what its children have initialized before, and creates a parameter after them."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(3, 1) * 0.02)
        self.apply(self._init_weights)
        for depth, layer in enumerate(self.layers):
            layer.linear2.weight.data.div_(2.0 * (depth + 1))
        self.layers[1].linear1.load_state_dict(self.layers[0].linear1.state_dict())
        self.late = nn.Parameter(torch.empty(7, 5))
        nn.init.orthogonal_(self.late)
        self.drop = [x.item() for x in torch.linspace(0, 0.5, 3)]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def tied() -> nn.Module:
    return Transformer(tied=True)


def half() -> nn.Module:
    return Transformer().to(torch.bfloat16)


def several_dtypes() -> nn.Module:
    model = Transformer()
    for layer in model.layers:
        layer.norm1.to(torch.float64)
        layer.up.requires_grad_(False)
    return model


MODELS: list[Make] = [Layers, torch_transformer, Custom, tied, half, several_dtypes, ConvNet]


def built(make: Make, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def on_meta(make: Make, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    with init_on_meta():
        return make()


def assert_is(model: nn.Module, truth: nn.Module) -> None:
    """Every parameter and buffer is the plain model's, and what was tied is tied."""
    expected = dict(truth.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(whole(parameter), expected[name]), f"{name} differs"
        assert parameter.requires_grad == expected[name].requires_grad, name
        assert parameter.dtype == expected[name].dtype, name
    assert len(list(model.parameters())) == len(list(truth.parameters()))
    buffers = dict(model.named_buffers())
    for name, buffer in truth.named_buffers():
        assert torch.equal(buffers[name], buffer), f"{name} differs"
    for ours, theirs in zip(model.modules(), truth.modules(), strict=True):
        assert set(ours.state_dict(keep_vars=False)) == set(theirs.state_dict())


@on_ranks(2, 4, make=MODELS)
def test_equals_plain_construction(make: Make) -> None:
    """At other world sizes: tests/unit/test_init.py, on every rank of a fake process group."""
    truth = built(make)
    state = torch.get_rng_state()
    model = on_meta(make)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    wrap(model, fully_shard, mesh=world_mesh())
    assert materialize(model) is model
    assert_is(model, truth)
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(7)
def test_equals_plain_construction_on_seven_ranks() -> None:
    for make in (Custom, Layers, tied):
        model = wrap(on_meta(make), fully_shard, mesh=world_mesh())
        assert_is(materialize(model), built(make))


@on_ranks(2, 3, make=[Custom, tied])
def test_one_seed_whatever_the_ranks_drew_before(make: Make) -> None:
    truth = built(make)
    model = on_meta(make, seed=100 + dist.get_rank())
    before = torch.Generator().manual_seed(100 + dist.get_rank()).get_state()
    wrap(model, fully_shard, mesh=world_mesh())
    materialize(model, seed=5)
    assert_is(model, truth)
    assert torch.equal(torch.get_rng_state(), before)


def half_real(first: bool) -> nn.Module:
    """One unit to be, of which one layer has values."""
    with init_on_meta():
        layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    layers[first] = nn.Linear(3, 3)
    return nn.Sequential(*layers)


@on_ranks(2, 3, first=[False, True])
def test_a_unit_of_which_some_parameters_have_values(first: bool) -> None:
    """They keep them, whichever comes first; the others are refused until they have got theirs."""
    torch.manual_seed(5)
    model, has, lacks = half_real(first), str(int(first)), str(int(not first))
    own = {name: value.clone() for name, value in model[int(first)].state_dict().items()}
    fully_shard(model, mesh=world_mesh())
    with pytest.raises(RuntimeError, match=rf"parameters '{lacks}.weight', '{lacks}.bias' are still on the meta"):
        model(torch.ones(1, 3))
    expected = built(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), seed=7).state_dict()
    expected |= {f"{has}.{name}": value for name, value in own.items()}
    materialize(model, seed=7)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), expected[name]), name
    model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model(torch.ones(1, 3))


@on_ranks(2, first=[False, True])
def test_what_lacks_values_in_a_unit_is_loaded(first: bool) -> None:
    torch.manual_seed(5)
    truth = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inputs, whole_dict = torch.ones(1, 3), truth.state_dict()
    models = [fully_shard(half_real(first), mesh=world_mesh()) for _ in range(3)]
    load_full_state_dict(models[0], whole_dict)
    models[1].load_state_dict(models[0].state_dict(), assign=True)
    models[2].to_empty(device="cpu")
    set_model_state_dict(models[2], whole_dict, options=StateDictOptions(full_state_dict=True))
    for model in models:
        assert torch.equal(model(inputs), truth(inputs))
        assert_is(model, truth)


@on_ranks(2)
def test_what_a_rank_recorded_before_is_its_own() -> None:
    """Models that only some ranks built, and never materialized, change nothing for what all have."""
    for seed in (5, None):
        torch.manual_seed(5)
        if dist.get_rank() == (1 if seed is None else 0):
            with init_on_meta():
                nn.Linear(3, 3)
        with init_on_meta():
            model = Custom()
        wrap(model, fully_shard, mesh=world_mesh())
        assert_is(materialize(model, seed=seed), built(Custom))


@on_ranks(3, make=[Custom, tied])
def test_without_seed_the_first_rank_decides(make: Make) -> None:
    model = on_meta(make, seed=5 + dist.get_rank())
    wrap(model, fully_shard, mesh=world_mesh())
    materialize(model)
    assert_is(model, built(make))


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"])
def test_strategies_train_as_if_built_with_values(preset: str) -> None:
    mesh, losses = world_mesh(), []
    for make in (on_meta, built):
        model = wrap(make(tied), fully_shard, mesh=mesh, placements=preset)
        materialize(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            loss = model(inputs_for(model, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    assert torch.equal(*losses)


def shard_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


@on_ranks(2)
def test_other_placements_and_offloading() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for options in (
        {"shard_placement_fn": shard_columns},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": policy},
    ):
        for fast in (False, True):
            model = wrap(on_meta(tied), fully_shard, mesh=world_mesh(), **options)
            materialize(model, fast=fast)
            reference = built(tied) if not fast else materialize(on_meta(tied), fast=True)
            assert_is(model, reference)
            model(inputs_for(model, 0)).sum().backward()


@on_ranks(4)
def test_replicated_over_a_second_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap(on_meta(Custom, seed=5 + dist.get_rank()), fully_shard, mesh=mesh)
    materialize(model)
    assert_is(model, built(Custom))


@on_ranks(4)
def test_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for shards_data in (True, False):
        model = on_meta(Block)
        parallelize_module(model, mesh["tensor"], plan)
        if shards_data:
            fully_shard(model, mesh=mesh["data"])
        materialize(model)
        assert_is(model, built(Block))
        assert isinstance(model.up.weight, DTensor)


@on_ranks(2)
def test_units_of_several_modules_and_parameters_left_alone() -> None:
    mesh, model, truth = world_mesh(), on_meta(tied), built(tied)
    fully_shard([model.layers[0], model.layers[1]], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.position.weight})
    # A part of the model is enough to find all of its units; the rest waits.
    materialize(model.layers[1])
    assert torch.equal(whole(model.layers[0].up.weight), truth.layers[0].up.weight)
    assert model.norm.weight.is_meta
    assert model.position.weight.is_meta
    materialize(model)
    assert_is(model, truth)
    assert type(model.position.weight) is nn.Parameter


@on_ranks(2, 3, make=[Transformer, Layers, torch_transformer])
def test_put_on_meta_by_others(make: Make) -> None:
    """Initialized by the modules themselves: alike at any world size and for any wrapping."""
    models = []
    for sharded in (True, False):
        torch.manual_seed(dist.get_rank())
        with torch.device("meta"):
            model = make()
        if sharded:
            wrap(model, fully_shard, mesh=world_mesh())
        models.append(materialize(model, seed=5))
    assert_is(*models)
    if make is not torch_transformer:  # whose layers are copies of one
        assert_is(models[0], built(make))


@on_ranks(2, 3, 4, make=[Custom, Layers, half])
def test_fast_is_alike_at_any_world_size(make: Make) -> None:
    model = wrap(on_meta(make, seed=dist.get_rank()), fully_shard, mesh=world_mesh())
    materialize(model, seed=5, fast=True)
    reference = materialize(on_meta(make, seed=11), seed=5, fast=True)
    assert_is(model, reference)


class Unlike(nn.Module):
    """Depends on something that the ranks do not share."""

    def __init__(self, value: float, with_value: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        if with_value:
            self.layers[0].weight.data.mul_(value)


@on_ranks(2)
def test_ranks_that_differ_are_told() -> None:
    rank = dist.get_rank()
    model = wrap(on_meta(lambda: Unlike(1.0 + rank)), fully_shard, mesh=world_mesh())
    with pytest.raises(RuntimeError, match="parts of another model"):
        materialize(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = wrap(on_meta(lambda: Unlike(1.0)), fully_shard, mesh=world_mesh())
    with pytest.raises(RuntimeError, match="different seeds"):
        materialize(model, seed=rank)
    assert_is(materialize(model), built(lambda: Unlike(1.0)))


@on_ranks(2)
def test_ranks_that_seed_or_record_differently_between_contexts_are_told() -> None:
    def record_another() -> None:
        with init_on_meta():
            nn.Linear(2, 2)

    between: list[Callable[[], object]] = [lambda: torch.manual_seed(7), lambda: torch.rand(1), record_another]
    for change, seed in zip(between, (None, 3, 3), strict=True):
        model = nn.Sequential(on_meta(lambda: nn.Linear(6, 8)))
        if dist.get_rank():
            change()
        with init_on_meta():
            model.append(nn.Linear(8, 4))
        fully_shard(model, mesh=world_mesh())
        with pytest.raises(RuntimeError, match="between two init_on_meta contexts"):
            materialize(model, seed=seed)
        assert all(parameter.is_meta for parameter in model.parameters())


@on_ranks(2)
def test_ranks_that_lack_different_values_are_told() -> None:
    """Also one that has all values, which must not leave the others alone."""
    rank = dist.get_rank()
    for lacking, first in ((rank, "0"), (1 - rank, "1"), (rank or None, None)):
        layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
        if lacking is not None:
            layers[lacking].to("meta")
        model = fully_shard(nn.Sequential(*layers), mesh=world_mesh())
        found = "none on rank 0" if first is None else rf"2 of them \('{first}.weight', '{first}.bias'\) on rank 0"
        with pytest.raises(RuntimeError, match=f"different parameters on the meta device: {found}, others on another"):
            materialize(model, seed=1)
    whole_model = materialize(fully_shard(nn.Linear(3, 3), mesh=world_mesh()), seed=rank)
    assert not whole_model.weight.is_meta


@on_ranks(2, preset=["ddp", "zero3"], seed=[None, 3])
def test_modules_that_ranks_make_in_another_order_are_told(preset: str, seed: int | None) -> None:
    """All ranks draw the same, but not for the same parameters: replicas would differ."""
    names = ["one", "other"][:: -1 if dist.get_rank() else 1]
    with init_on_meta():
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    for name in sorted(names):
        fully_shard(model[name], mesh=world_mesh(), placements=preset)
    with pytest.raises(RuntimeError, match="did different things on them, as in another order"):
        materialize(model, seed=seed)
    assert all(parameter.is_meta for parameter in model.parameters())


@on_ranks(2)
def test_ranks_of_one_mesh_agree_in_few_messages() -> None:
    """Before they make values, on what they make, and after."""
    model, exchange, exchanged = wrap(on_meta(Custom), fully_shard, mesh=world_mesh()), Peers.exchange, []

    def counted(peers: Peers, value: Any) -> Any:
        exchanged.append(value)
        return exchange(peers, value)

    with patch.object(Peers, "exchange", counted):
        materialize(model, seed=1)
    assert len(exchanged) == 3


@on_ranks(4)
def test_ranks_that_differ_on_one_axis_are_told() -> None:
    """Those whose peers on one axis agree must not wait for others on the next one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap(on_meta(Custom), fully_shard, mesh=mesh)
    with pytest.raises(RuntimeError, match="different seeds"):
        materialize(model, seed=dist.get_rank() // 3)
    assert_is(materialize(model), built(Custom))


@on_ranks(2)
def test_one_rank_that_fails_fails_all() -> None:
    rank = dist.get_rank()

    def broken(module: nn.Module) -> None:
        raise ZeroDivisionError("not this module")

    with torch.device("meta"):
        model = wrap(Layers(), fully_shard, mesh=world_mesh())
    with pytest.raises(ZeroDivisionError, match="not this module") as caught:
        materialize(model, seed=5, init_fn=broken if rank else None)
    assert ("shardwise: this happened on rank 1" in caught.value.__notes__) == (rank == 0)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(TypeError, match="seed must be an int"):
        materialize(model, seed="5" if rank else 5)  # type: ignore[arg-type]

    def interrupted(module: nn.Module) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if rank else RuntimeError, match="" if rank else "KeyboardInterrupt"):
        materialize(model, seed=5, init_fn=interrupted if rank else None)
    dist.barrier()


@on_ranks(4)
def test_one_rank_that_fails_fails_those_that_share_no_mesh_with_it() -> None:
    """By those with which it shares one, and the error tells where it happened alone."""
    rank, model = dist.get_rank(), nn.Sequential(on_meta(lambda: nn.Linear(4, 4)), on_meta(lambda: nn.Linear(4, 4)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for module, name in zip(model, ("rows", "columns"), strict=True):
        fully_shard(module, mesh=mesh[name])
    with pytest.raises(TypeError, match="seed must be an int") as caught:
        materialize(model, seed="5" if rank == 3 else 5)  # type: ignore[arg-type]
    assert getattr(caught.value, "__notes__", []) == ["shardwise: this happened on rank 3"] * (rank != 3)
    assert not any(parameter.is_meta for parameter in materialize(model, seed=5).parameters())


@on_ranks(2, fast=[False, True])
def test_values_that_one_rank_cannot_make_are_made_on_none(fast: bool) -> None:
    """Or the other would go on, and wait for it in the next forward."""
    replay, rank = materializing._replay, dist.get_rank()
    model, truth = (wrap(on_meta(Layers), fully_shard, mesh=world_mesh()) for _ in range(2))
    materialize(truth, seed=5, fast=fast)

    def fails_late(*given: Any) -> None:
        replay(*given)
        if rank:
            raise MemoryError("no more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materializing, "_replay", fails_late)
        with pytest.raises(MemoryError, match="no more") as caught:
            materialize(model, seed=5, fast=fast)
    assert "still have none: call materialize again" in caught.value.__notes__[-1]
    with pytest.raises(RuntimeError, match="without values"):
        model.layers[1](torch.tensor([3]))
    materialize(model, seed=5, fast=fast)
    for parameter, expected in zip(model.parameters(), truth.parameters(), strict=True):
        assert torch.equal(whole(parameter), whole(expected))


@on_ranks(2)
def test_an_interrupt_of_a_rank_that_waits_for_the_others_leaves_them_in_step() -> None:
    before, exchange, rank = signal.getsignal(signal.SIGALRM), Peers.exchange, dist.get_rank()
    signal.signal(signal.SIGALRM, signal.default_int_handler)

    def interrupted(*given: Any) -> list[Any]:
        found = exchange(*given)
        signal.raise_signal(signal.SIGALRM)
        patch.undo()
        return found

    model = wrap(on_meta(tied, seed=6), fully_shard, mesh=world_mesh())
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(Peers, "exchange", interrupted)
        with pytest.raises(KeyboardInterrupt) if rank else nullcontext():
            materialize(model, seed=5)
    materialize(model, seed=5)
    signal.signal(signal.SIGALRM, before)


@on_ranks(2)
def test_what_is_loaded_stays() -> None:
    truth, model = built(tied), on_meta(tied, seed=6)
    wrap(model, fully_shard, mesh=world_mesh())
    for module in (model, *model.layers):
        for group in units_of(module)[0].groups:
            group.shards.leave_meta()
            for slot in group.slots:
                if "norm" in slot.name:
                    slot.write(torch.full(tuple(slot.sharded.shape), 3.0))
    materialize(model, seed=5)
    for name, parameter in model.named_parameters():
        expected = truth.get_parameter(name)
        assert torch.equal(whole(parameter), torch.full_like(expected, 3.0) if "norm" in name else expected), name


@on_ranks(2)
def test_forward_before_materializing_is_refused() -> None:
    model = wrap(on_meta(tied), fully_shard, mesh=world_mesh())
    with pytest.raises(RuntimeError, match="meta device"):
        model(inputs_for(model, 0))
    materialize(model.layers[0])
    with pytest.raises(RuntimeError, match="meta device"):
        model(inputs_for(model, 0))
    materialize(model)
    assert torch.equal(model(inputs_for(model, 0)), built(tied)(inputs_for(model, 0)))
