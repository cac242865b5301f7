"""What is saved, loaded, initialized and averaged on a GPU comes to what it comes to on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import shardwise
from shardwise.fairscale import OSS, FullyShardedDataParallel, ShardedDataParallel

from ..models import Transformer, inputs_for, wrap
from ..ranks.harness import on_ranks
from ..ranks.shared import shared_directory
from .cases import DEVICE, mesh_on

Weights = dict[str, torch.Tensor]


def wrapped(device: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return wrap(Transformer(), shardwise.fully_shard, mesh=mesh_on(device, (2,)))


def momentum(model: Any) -> torch.optim.Optimizer:
    # Not Adam, which makes steps of the noise that the gradients of some biases are.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(inputs_for(model, seed=10 * step + dist.get_rank())).float().square().mean().backward()
        shardwise.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def whole(model: Any) -> Weights:
    return shardwise.full_state_dict(model, rank0_only=False)


def by_flat_optimizer(device: str, directory: Path) -> Weights:
    model = wrapped(device)
    train(model, shardwise.optim.flat(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9), range(3))
    return whole(model)


def by_repointed_optimizer(device: str, directory: Path) -> Weights:
    torch.manual_seed(1)
    plain = Transformer()
    optimizer = momentum(plain)
    model = wrap(plain, shardwise.fully_shard, mesh=mesh_on(device, (2,)))
    shardwise.repoint(optimizer)
    train(model, optimizer, range(2))
    return whole(model)


def resumed(device: str, directory: Path, *, async_: bool = False) -> Weights:
    model = wrapped(device)
    optimizer, average = momentum(model), shardwise.EMA(model, 0.9)
    train(model, optimizer, range(2))
    average.update()
    extra = {"average": average, "a tensor": torch.ones(2, device=device), "a number": 3}
    shardwise.save(directory, model=model, optimizer=optimizer, extra=extra, async_=async_)
    if async_:
        shardwise.wait()
    model = wrapped(device, seed=2)
    optimizer, average = momentum(model), shardwise.EMA(model, 0.9)
    loaded = shardwise.latest(directory)
    assert loaded is not None
    shardwise.load(loaded, model=model, optimizer=optimizer, extra={"average": average})
    train(model, optimizer, range(2, 4))
    average.update()
    averages = average.state_dict()["averages"]
    return whole(model) | {f"average of {name}": value.full_tensor() for name, value in averages.items()}


def resumed_beside_training(device: str, directory: Path) -> Weights:
    return resumed(device, directory, async_=True)


def through_full_state(device: str, directory: Path) -> Weights:
    state = whole(wrapped(device))
    on_device = shardwise.full_state_dict(wrapped(device), cpu=False, rank0_only=False)
    assert {value.device.type for value in on_device.values()} == {device}
    model = wrapped(device, seed=2)
    shardwise.load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    return whole(model)


def through_safetensors(device: str, directory: Path) -> Weights:
    shardwise.save_safetensors(wrapped(device), directory)
    with shardwise.init_on_meta():
        plain = Transformer()
    model = wrap(plain, shardwise.fully_shard, mesh=mesh_on(device, (2,)))
    shardwise.load_safetensors(model, directory)
    return whole(model)


def assigned_from_the_host(device: str, directory: Path) -> Weights:
    state = {name: value.cpu() for name, value in wrapped(device).state_dict().items()}
    model = wrapped(device, seed=2)
    model.load_state_dict(state, assign=True)
    train(model, momentum(model), range(2))
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    return whole(model)


def from_meta(device: str, directory: Path) -> Weights:
    torch.manual_seed(3)
    with shardwise.init_on_meta():
        plain = Transformer()
    model = wrap(plain, shardwise.fully_shard, mesh=mesh_on(device, (2,)))
    shardwise.materialize(model)
    train(model, momentum(model), range(2))
    return whole(model)


def through_torch_state(device: str, directory: Path) -> Weights:
    model = wrapped(device)
    optimizer = momentum(model)
    train(model, optimizer, range(2))
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    model = wrapped(device, seed=2)
    optimizer = momentum(model)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    train(model, optimizer, range(2, 4))
    return whole(model)


def by_oss(device: str, directory: Path) -> Weights:
    torch.manual_seed(1)
    model = Transformer().to(device)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    ddp = ShardedDataParallel(model, optimizer)
    for step in range(3):
        ddp(inputs_for(model, seed=10 * step + dist.get_rank()).to(device)).square().mean().backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    return model.state_dict()


def by_fairscale_fsdp(device: str, directory: Path, **options: Any) -> Weights:
    torch.manual_seed(1)
    model = Transformer().to(device)
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, compute_device=torch.device(device), **options)
    fsdp = FullyShardedDataParallel(model, compute_device=torch.device(device), **options)
    optimizer = momentum(fsdp)
    for step in range(3):
        fsdp(inputs_for(model, seed=10 * step + dist.get_rank()).to(device)).square().mean().backward()
        fsdp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    fsdp.gather_full_optim_state_dict(optimizer)
    return copy.copy(fsdp.state_dict())


def by_fairscale_fsdp_per_parameter(device: str, directory: Path) -> Weights:
    return by_fairscale_fsdp(device, directory, flatten_parameters=False)


def by_fairscale_fsdp_offloaded(device: str, directory: Path) -> Weights:
    return by_fairscale_fsdp(device, directory, move_params_to_cpu=True)


WAYS: list[Callable[[str, Path], Weights]] = [
    by_flat_optimizer,
    by_repointed_optimizer,
    resumed,
    resumed_beside_training,
    through_full_state,
    through_safetensors,
    from_meta,
    assigned_from_the_host,
    through_torch_state,
    by_oss,
    by_fairscale_fsdp,
    by_fairscale_fsdp_per_parameter,
    by_fairscale_fsdp_offloaded,
]


@on_ranks(2, way=WAYS)
def test_state(way: Callable[[str, Path], Weights]) -> None:
    results = []
    for device in (DEVICE, "cpu"):
        with shared_directory() as directory:
            results.append(way(device, directory))
    ours, truth = results
    assert ours.keys() == truth.keys()
    for name, expected in truth.items():
        torch.testing.assert_close(ours[name].cpu(), expected.cpu(), msg=lambda text, name=name: f"{name}: {text}")
