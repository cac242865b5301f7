"""Averages of sharded parameters, against torch's own average of a plain model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from shardwise import Placements
from shardwise.checkpoint import load, save
from shardwise.ema import EMA

from ..models import ConvNet, Transformer, inputs_for, wrap
from .harness import on_ranks
from .shared import shared_directory
from .truth import whole

DECAY = 0.9


def make(seed: int = 1) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(layers=2, width=10, tied=True)
    model.position.requires_grad_(False)
    return model


def sharded(seed: int = 1, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    return wrap(make(seed), shardwise.fully_shard, mesh=mesh, **options)


def train(model: nn.Module, ema: EMA, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        model(inputs_for(model, step)).square().mean().backward()  # all ranks alike, as the plain model
        optimizer.step()
        optimizer.zero_grad()
        ema.update()


def averaged_plainly(steps: int = 3) -> AveragedModel:
    model = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # the first only copies
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        model(inputs_for(model, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average


def mesh_and_options(name: str) -> tuple[DeviceMesh, dict[str, Any]]:
    size = dist.get_world_size()
    if name == "hsdp":
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")), {}
    if name == "offload":
        return init_device_mesh("cpu", (size,)), {"offload_policy": shardwise.CPUOffloadPolicy()}
    return init_device_mesh("cpu", (size,)), {"placements": getattr(Placements, name)}


@on_ranks(1, 2, 3, strategy=["ddp", "zero1", "zero2", "zero3", "offload"])
def test_like_torchs_average_of_the_plain_model(strategy: str) -> None:
    check(strategy)


@on_ranks(4)
def test_like_torchs_average_on_two_axes() -> None:
    check("hsdp")


def check(strategy: str) -> None:
    mesh, options = mesh_and_options(strategy)
    model = sharded(mesh=mesh, **options)
    ema = EMA(model, DECAY)
    for parameter, average in zip((p for p in model.parameters() if p.requires_grad), shards_of(ema), strict=True):
        assert isinstance(average, DTensor)
        assert average.placements == parameter.placements  # type: ignore[attr-defined]
    train(model, ema)
    truth = averaged_plainly()
    trained = {name: whole(value) for name, value in model.named_parameters()}
    x = inputs_for(model, 9)
    with torch.no_grad():
        before = model(x)
        with ema.swap():
            assert ema.is_swapped
            torch.testing.assert_close(model(x), truth(x))
            for name, value in model.named_parameters():
                torch.testing.assert_close(whole(value), truth.get_parameter(f"module.{name}").detach(), msg=name)
        assert not ema.is_swapped
        for name, value in model.named_parameters():
            assert torch.equal(whole(value), trained[name]), name
        assert torch.equal(model(x), before)
        ema.swap()
        torch.testing.assert_close(model(x), truth(x))
        with pytest.raises(RuntimeError, match=r"EMA.update\(\) was called while the model has the averages"):
            ema.update()
        ema.swap()
        assert torch.equal(model(x), before)
    train(model, ema, 1)
    assert ema.updates == 4


def shards_of(ema: EMA) -> list[torch.Tensor]:
    return list(ema.state_dict()["averages"].values())


@on_ranks(2)
def test_swaps_back_after_an_exception_and_between_forward_and_backward_states() -> None:
    model = sharded()
    ema = EMA(model, DECAY)
    x = inputs_for(model, 0)
    train(model, ema, 1)
    with torch.no_grad():
        before = model(x)  # the root stays gathered
    with pytest.raises(IndexError), ema.swap():
        model(x + 1000)
    assert torch.equal(model(x).detach(), before)
    model.unshard()
    ema.update()
    with ema.swap(), torch.no_grad():
        assert not torch.equal(model(x), before)
    with torch.no_grad():
        assert torch.equal(model(x), before)


@on_ranks(2)
def test_in_a_wider_dtype() -> None:
    model = make().to(torch.bfloat16)
    narrow = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    wrap(model, shardwise.fully_shard, mesh=init_device_mesh("cpu", (2,)))
    ema = EMA(model, 0.999, dtype=torch.float32)
    for _ in range(5):
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.add_(1.0)
        ema.update()
    for start, average in zip(narrow, shards_of(ema), strict=True):
        expected, value = start.float(), start.clone()
        for _ in range(5):
            value = value + 1.0
            expected = expected.lerp(value.float(), 1.0 - 0.999)
        assert average.dtype == torch.float32
        torch.testing.assert_close(whole(average), expected)
    kept = [whole(average) for average in shards_of(ema)]
    with ema.swap():
        for parameter, average in zip((p for p in model.parameters() if p.requires_grad), kept, strict=True):
            assert torch.equal(whole(parameter), average.bfloat16())
    assert all(torch.equal(whole(a), b) for a, b in zip(shards_of(ema), kept, strict=True))


@on_ranks(2, 3, strategy=["zero3", "ddp"])
def test_in_checkpoints(strategy: str) -> None:
    mesh, options = mesh_and_options(strategy)
    model = sharded(mesh=mesh, **options)
    ema = EMA(model, DECAY)
    train(model, ema)
    truth = {name: whole(value) for name, value in ema.state_dict()["averages"].items()}
    with shared_directory() as directory:
        path = save(directory, model=model, extra={"ema": ema, "step": 7})
        other = sharded(2)
        own = EMA(other, 0.5)
        extra = load(directory, model=other, extra={"ema": own})
        assert extra == {"ema": own, "step": 7}
        assert (own.decay, own.updates) == (DECAY, 3)
        for name, value in own.state_dict()["averages"].items():
            assert torch.equal(whole(value), truth[name]), name
        assert load(path)["ema"]["updates"] == 3  # without an average to load into, whole tensors
        plain = load(path, rng=False)["ema"]["averages"]
        assert all(torch.equal(plain[name], truth[name]) for name in truth)
        third = EMA(sharded(3), 0.5)
        third.load_state_dict({"decay": 0.5, "updates": 1, "averages": plain})
        assert all(torch.equal(whole(value), truth[name]) for name, value in third.state_dict()["averages"].items())
    unsharded = EMA(make(), 0.5)
    unsharded.load_state_dict(ema.state_dict())  # shards of one row were broadcast, in silence
    assert all(torch.equal(value, truth[name]) for name, value in unsharded.state_dict()["averages"].items())
    elsewhere = EMA(sharded(4, init_device_mesh("cpu", (1, dist.get_world_size()))), 0.5)
    elsewhere.load_state_dict(ema.state_dict())  # torch redistributes within a mesh only
    assert all(torch.equal(whole(value), truth[name]) for name, value in elsewhere.state_dict()["averages"].items())


def in_own_order(value: float, dim: int) -> nn.ModuleDict:
    """Units of one size, which every other rank has in the opposite order, cut on ``dim``."""
    names = ["one", "other", "third"]
    model = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in names[:: 1 - 2 * (dist.get_rank() % 2)]})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, name in enumerate(names, 1):
        nn.init.constant_(model[name].weight, number * value)
        shardwise.fully_shard(model[name], mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    return model


@on_ranks(2, 3)
def test_an_average_that_was_cut_otherwise_is_loaded_by_name() -> None:
    source, average = EMA(in_own_order(1.0, 0)), EMA(in_own_order(0.0, 1))
    average.load_state_dict(source.state_dict())
    for number, name in enumerate(("one", "other", "third"), 1):
        assert (average.state_dict()["averages"][f"{name}.weight"].to_local() == number).all()


@on_ranks(1, 2)
def test_complex_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 5).to(torch.complex64))
    shardwise.fully_shard(model)
    before = whole(model[0].weight).clone()
    ema = EMA(model, 0.5, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.zero_()
    ema.update()
    with ema.swap():
        torch.testing.assert_close(whole(model[0].weight), before / 2)


@on_ranks(2)
def test_a_model_that_is_sharded_after_its_average_was_made() -> None:
    model = make()
    ema = EMA(model, DECAY)
    wrap(model, shardwise.fully_shard, mesh=init_device_mesh("cpu", (2,)))
    before = [whole(parameter).clone() for parameter in model.parameters()]
    for use in (ema.update, ema.swap):
        with pytest.raises(ValueError, match=r"parameter '.*' .* sharded in another way .* after fully_shard"):
            use()
    assert ema.updates == 0
    assert not ema.is_swapped
    assert all(torch.equal(whole(now), old) for now, old in zip(model.parameters(), before, strict=True))


@on_ranks(1)
def test_nothing_to_average() -> None:
    ema = EMA(make().requires_grad_(False))
    ema.update()
    with ema.swap():
        assert ema.state_dict() == {"decay": 0.999, "updates": 1, "averages": {}}


@on_ranks(1)
def test_what_cannot_be_averaged() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        model = make()
    with pytest.raises(ValueError, match="on the meta device, so there is nothing to average"):
        EMA(model)
    with pytest.raises(ValueError, match="still on the meta device"):
        EMA(wrap(model, shardwise.fully_shard, mesh=mesh))
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no shape yet"):
        EMA(nn.Sequential(nn.LazyLinear(3)))
    plain = make()
    for decay in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="decay must be between 0 and 1"):
            EMA(plain, decay)
        with pytest.raises(ValueError, match="decay must be between 0 and 1"):
            EMA(plain, 0.5).decay = decay
    assert EMA(plain, np.float32(0.5)).state_dict()["decay"] == 0.5
    with pytest.raises(TypeError, match="EMA takes a module"):
        EMA([plain])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="floating-point"):
        EMA(plain, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype or None, not 'float32'"):
        EMA(plain, dtype="float32")  # type: ignore[arg-type]
    ema = EMA(plain)
    with pytest.raises(ValueError, match="the saved average does not fit: it lacks"):
        ema.load_state_dict(EMA(ConvNet()).state_dict())
    before = ema.state_dict()["averages"]["embed.weight"].clone()
    others = {name: torch.zeros_like(value) for name, value in ema.state_dict()["averages"].items()}
    with pytest.raises(ValueError, match="decay must be between 0 and 1"):
        ema.load_state_dict({**ema.state_dict(), "averages": others, "decay": 2.0})
    for state in ({"decay": 0.5, "averages": others}, {"module.weight": torch.ones(1)}, {}):
        with pytest.raises(ValueError, match=r"not the state dict of an EMA: it lacks .*'updates'"):
            ema.load_state_dict(state)
    own = ema.state_dict()
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "the state dict of an EMA is a dict, not NoneType", None),
        (TypeError, "averages must be a dict of tensors", {**own, "averages": None}),
        (
            TypeError,
            "the saved average of .* must be a tensor, not float",
            {**own, "averages": dict.fromkeys(others, 0.0)},
        ),
        (TypeError, "updates must be an int", {**own, "averages": others, "updates": "3"}),
        (ValueError, "updates must be at least 0", {**own, "averages": others, "updates": -1}),
    ]
    for kind, message, state in wrong:
        with pytest.raises(kind, match=message):
            ema.load_state_dict(state)
    assert torch.equal(ema.state_dict()["averages"]["embed.weight"], before)
    plain.head = nn.Linear(3, 3)
    plain.embed = nn.Embedding(3, 3)
    with pytest.raises(ValueError, match=r"parameter 'embed\.weight' of the averaged model has shape"):
        ema.update()


def test_parameters_that_are_conjugates_or_negatives_of_their_memory() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj())
    model.v = nn.Parameter(torch.randn(4, dtype=torch.complex64).conj().imag)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ema = EMA(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    ema.update()
    with ema.swap():
        torch.testing.assert_close([*map(torch.Tensor.detach, model.parameters())], [2 * value for value in before])
    torch.testing.assert_close([*map(torch.Tensor.detach, model.parameters())], [3 * value for value in before])


@on_ranks(1, 2, 3)
def test_parameters_that_are_unfrozen_later() -> None:
    """Their average starts at the next update; a state that has it is loaded before they are unfrozen too."""

    def mostly_frozen(seed: int = 1) -> nn.Module:
        model = sharded(seed)
        for parameter in list(model.parameters())[1:]:
            parameter.requires_grad_(False)
        return model

    def averages(ema: EMA) -> dict[str, torch.Tensor]:
        return {name: whole(value).clone() for name, value in ema.state_dict()["averages"].items()}

    model = mostly_frozen()
    ema = EMA(model, DECAY)
    train(model, ema, 2)
    first, *others = (name for name, _ in model.named_parameters())
    assert list(averages(ema)) == [first]
    model.requires_grad_(True)
    ema.update()
    before = averages(ema)
    assert list(before) == [first, *others]
    for name, value in model.named_parameters():
        assert torch.equal(before[name], whole(value)) == (name != first)
    train(model, ema, 1)
    after = averages(ema)
    for name, value in model.named_parameters():
        torch.testing.assert_close(after[name], before[name].lerp(whole(value), 1 - DECAY))
    resumed = EMA(mostly_frozen(seed=2), DECAY)
    with pytest.raises(ValueError, match="trainable at some update"):
        ema.load_state_dict(resumed.state_dict())
    resumed.load_state_dict(ema.state_dict())
    for name, value in averages(resumed).items():
        assert torch.equal(value, after[name])
