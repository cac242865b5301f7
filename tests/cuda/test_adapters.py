"""Every adapter on a GPU, over its own collectives alone: what it trains, saves and loads comes to what it comes to on
the CPU. Two ranks share the GPU."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy
from shardwise.fairscale import (
    OSS,
    FullyShardedDataParallel,
    ShardedDataParallel,
    ShardedGradScaler,
    auto_wrap,
    checkpoint_wrapper,
    default_auto_wrap_policy,
    enable_wrap,
)

from ..models import MLP, ConvNet, Transformer, inputs_for, wrap
from ..ranks.harness import on_ranks
from ..ranks.shared import shared_directory
from .cases import DEVICE, Results, assert_same, is_on, mesh_on, set_up, use_device_alone
from .conftest import World

Way = Callable[[str, Path], Results]
Stepping = Callable[[torch.Tensor], None]

STEPS = 4
HALF = torch.float16


# -- What all ways have in common


def on_host(values: Any) -> Results:
    return {name: value.detach().float().cpu() for name, value in values.items()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    # Not Adam, which makes steps of the noise that the gradients of some biases are.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(model: nn.Module, step: int) -> torch.Tensor:
    """This rank's, on the host."""
    return inputs_for(model, seed=10 * step + dist.get_rank())


def plain(kind: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def backward(wrapped: Any, inputs: torch.Tensor, scaler: Any = None, device: str = "") -> None:
    """With ``device``, under its autocast to float16."""
    with torch.autocast(device, HALF) if device else nullcontext():
        loss = wrapped(inputs).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def step_scaled(scaler: Any, optimizer: torch.optim.Optimizer, clip: Callable[[], Any]) -> None:
    scaler.unscale_(optimizer)
    clip()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def compare(way: Way, dtype: torch.dtype = torch.float32, *, needs_host: bool = False) -> None:
    """The device trains as the CPU does; unless it ``needs_host``, only tensors on the device can be communicated."""
    set_up(DEVICE)
    with shared_directory() as directory:
        truth = way("cpu", directory)
    if not needs_host:
        use_device_alone()
    with shared_directory() as directory:
        ours = way(DEVICE, directory)
    assert_same(ours, truth, dtype)


# -- OSS and ShardedDataParallel


def by_oss_resumed(device: str, directory: Path) -> Results:
    """Gradients are averaged by hand; halfway another OSS takes over what the first has gathered on the host."""
    model = plain(Transformer).to(device)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, broadcast_buffer_size=0)
    for step in range(STEPS):
        backward(model, batch(model, step).to(device))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        norm = optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict(all_ranks=True)
        assert is_on(device, [norm, *(value["momentum_buffer"] for value in optimizer.state.values())])
        assert is_on("cpu", [value["momentum_buffer"] for value in state["state"].values()])
        if step == STEPS // 2:
            optimizer = OSS(model.parameters(), torch.optim.SGD, lr=1.0, momentum=0.9, broadcast_buffer_size=0)
            optimizer.load_state_dict(state)
    return on_host(model.state_dict())


def sharded_ddp(device: str, kind: Any = Transformer, **options: Any) -> tuple[nn.Module, OSS, ShardedDataParallel]:
    """A model, its OSS, and the model wrapped."""
    model = plain(kind).to(device)
    limit = 0 if device == "simulated" else -1
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, broadcast_buffer_size=limit)
    return model, optimizer, ShardedDataParallel(model, optimizer, **options)


def by_sharded_ddp(
    device: str, directory: Path, kind: Any = Transformer, scales: bool = False, **options: Any
) -> Results:
    """In two micro-batches; ``scales``: under autocast, with loss scaling."""
    model, optimizer, wrapped = sharded_ddp(device, kind, **options)
    scaler = ShardedGradScaler(enabled=scales)
    for step in range(STEPS):
        with wrapped.no_sync():
            backward(wrapped, batch(model, 5 * step).to(device), scaler, device if scales else "")
        backward(wrapped, batch(model, 5 * step + 1).to(device), scaler, device if scales else "")
        step_scaled(scaler, optimizer, functools.partial(optimizer.clip_grad_norm, 1.0))
    optimizer.consolidate_state_dict(recipient_rank=-1)
    assert is_on("cpu", [value["momentum_buffer"] for value in optimizer.state_dict()["state"].values()])
    return on_host(model.state_dict())


# -- FairScale's FullyShardedDataParallel


def on_device(device: str) -> dict[str, Any]:
    """By itself it computes where the process group communicates, which here may be the GPU."""
    return {"compute_device": torch.device("cpu")} if device == "cpu" else {}


def fsdp(device: str, seed: int = 1, **options: Any) -> Any:
    """Each layer an instance, and all of them: of a model on the host."""
    model = plain(Transformer, seed)
    options = {**on_device(device), **options}
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def by_fairscale_fsdp(
    device: str, directory: Path, *, offload: bool = False, scales: bool = False, **options: Any
) -> Results:
    """Halfway another instance takes over weights and optimizer state, from the host."""
    options.update(move_params_to_cpu=offload, mixed_precision=scales)
    wrapped = fsdp(device, **options)
    if not offload:
        wrapped = wrapped.to(device)
    optimizer, scaler = sgd(wrapped.parameters()), ShardedGradScaler(enabled=scales)
    for step in range(STEPS):
        # From the host, as far as it is the root that moves them.
        backward(wrapped, batch(wrapped.module, step), scaler)
        assert is_on("cpu" if offload else device, [parameter.grad for parameter in wrapped.parameters()])
        step_scaled(scaler, optimizer, functools.partial(wrapped.clip_grad_norm_, 1.0))
        if step == STEPS // 2:
            state = {name: value.cpu() for name, value in wrapped.state_dict().items()}
            moments = wrapped.gather_full_optim_state_dict(optimizer, recipient_rank=None)
            wrapped = fsdp(device, seed=2, **options)
            wrapped.load_state_dict(state)
            optimizer = sgd(wrapped.parameters())
            optimizer.load_state_dict(wrapped.get_shard_from_optim_state_dict(moments))
            assert is_on("cpu" if offload else device, wrapped.parameters())
    assert is_on("cpu" if offload else device, wrapped.state_dict().values())
    wrapped.load_local_state_dict({name: value.cpu() for name, value in wrapped.local_state_dict().items()})
    return on_host(wrapped.state_dict())


def by_fairscale_checkpointed(device: str, directory: Path) -> Results:
    """Wrapped by size, with activations on the host."""
    model = plain(Transformer)
    for layer in model.layers:
        checkpoint_wrapper(layer, offload_to_cpu=True)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **on_device(device)):
        policy = functools.partial(default_auto_wrap_policy, min_num_params=1000)
        wrapped = FullyShardedDataParallel(auto_wrap(model, policy), **on_device(device))
    optimizer = sgd(wrapped.parameters())
    for step in range(STEPS):
        backward(wrapped, batch(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return on_host(wrapped.state_dict())


# -- The engine with loss scaling, averages and flat optimizers


def sharded(device: str, seed: int = 1, **options: Any) -> Any:
    return wrap(plain(Transformer, seed), shardwise.fully_shard, mesh=mesh_on(device, (2,)), **options)


def by_scaler(device: str, directory: Path, **options: Any) -> Results:
    precision = MixedPrecisionPolicy(HALF, torch.float32)
    model = sharded(device, mp_policy=precision, **options)
    optimizer, scaler = sgd(model.parameters()), ShardedGradScaler()
    for step in range(STEPS):
        backward(model, batch(model, step), scaler)
        clip = functools.partial(shardwise.clip_grad_norm_, [*model.parameters()], 1.0)
        step_scaled(scaler, optimizer, clip)
    return on_host(shardwise.full_state_dict(model, rank0_only=False)) | {"scale": torch.tensor(scaler.get_scale())}


def by_average(device: str, directory: Path, **options: Any) -> Results:
    """Trains on what was averaged, too."""
    model = sharded(device, **options)
    optimizer, average = sgd(model.parameters()), shardwise.EMA(model, 0.5)
    for step in range(STEPS):
        backward(model, batch(model, step))
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    with average.swap():
        averages = on_host(shardwise.full_state_dict(model, rank0_only=False))
    average.load_state_dict(copy.deepcopy(average.state_dict()))
    average.swap()
    backward(model, batch(model, 9))
    optimizer.step()
    ours = on_host(shardwise.full_state_dict(model, rank0_only=False))
    return ours | {f"average of {name}": value for name, value in averages.items()}


def by_flat(device: str, directory: Path, *, resumes: bool = True, **settings: Any) -> Results:
    """Adam on runs of parameters, whose state is saved and loaded halfway."""
    model = sharded(device)
    make = functools.partial(shardwise.optim.flat, torch.optim.Adam, lr=0.01, eps=1e-3, **settings)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        backward(model, batch(model, step))
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS // 2:
            shardwise.save(directory, model=model, optimizer=optimizer)
            model = sharded(device, seed=2)
            optimizer = make(model.parameters())
            shardwise.load(shardwise.latest(directory), model=model, optimizer=optimizer)
    return on_host(shardwise.full_state_dict(model, rank0_only=False))


PINNED, PAGEABLE = ({"offload_policy": CPUOffloadPolicy(pin_memory=pins)} for pins in (True, False))
WAYS: dict[str, tuple[Way, torch.dtype]] = {
    "oss_resumed": (by_oss_resumed, torch.float32),
    "sharded_ddp": (by_sharded_ddp, torch.float32),
    "sharded_ddp_with_buffers": (functools.partial(by_sharded_ddp, kind=ConvNet), torch.float32),
    "sharded_ddp_in_fp16": (functools.partial(by_sharded_ddp, reduce_fp16=True), HALF),
    "sharded_ddp_scaled": (functools.partial(by_sharded_ddp, scales=True), HALF),
    "fairscale_fsdp": (by_fairscale_fsdp, torch.float32),
    "fairscale_fsdp_per_parameter": (functools.partial(by_fairscale_fsdp, flatten_parameters=False), torch.float32),
    "fairscale_fsdp_offloaded": (functools.partial(by_fairscale_fsdp, offload=True), torch.float32),
    "fairscale_fsdp_scaled": (functools.partial(by_fairscale_fsdp, scales=True), HALF),
    "fairscale_fsdp_offloaded_scaled": (functools.partial(by_fairscale_fsdp, offload=True, scales=True), HALF),
    "fairscale_checkpointed": (by_fairscale_checkpointed, torch.float32),
    "scaler": (by_scaler, HALF),
    "scaler_offloaded": (functools.partial(by_scaler, **PINNED), HALF),
    "average": (by_average, torch.float32),
    "average_offloaded": (functools.partial(by_average, **PINNED), torch.float32),
    "average_pageable": (functools.partial(by_average, **PAGEABLE), torch.float32),
    "flat": (by_flat, torch.float32),
    "flat_foreach": (functools.partial(by_flat, foreach=True), torch.float32),
    "flat_fused": (functools.partial(by_flat, fused=True), torch.float32),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_alone(world: World, way: str) -> None:
    world(1)
    compare(*WAYS[way])


@on_ranks(2, way=list(WAYS))
def test_ways(way: str) -> None:
    compare(*WAYS[way])


# -- Loss scaling


@on_ranks(2, offload=[False, True])
def test_ranks_skip_together(offload: bool) -> None:
    """An infinite gradient of one rank's is everybody's, and scale and counts are where the loss is."""
    use_device_alone()
    model = sharded(DEVICE, **(PINNED if offload else {}))
    optimizer, scaler = sgd(model.parameters()), ShardedGradScaler(init_scale=4.0)
    before = shardwise.full_state_dict(model, rank0_only=False)
    backward(model, batch(model, 0), scaler)
    if dist.get_rank() == 1:
        model.head.weight.grad.to_local().fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert is_on(DEVICE, [scaler._scale, scaler._growth_tracker])
    after = shardwise.full_state_dict(model, rank0_only=False)
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []
    again = ShardedGradScaler()
    again.load_state_dict(scaler.state_dict())
    optimizer.zero_grad()
    backward(model, batch(model, 0), again)
    again.step(optimizer)
    again.update()
    assert again.get_scale() == 2.0


# -- The host does not wait for the device


@contextmanager
def _raising() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def not_waiting() -> AbstractContextManager[Any]:
    """Inside, whatever lets the host wait for the device is an error."""
    if DEVICE == "simulated":
        return importlib.import_module("tests.cuda.simulated").refusing_waits()
    return _raising() if DEVICE == "cuda" else nullcontext()


def stepping(model: Any, optimizer: Any, *others: Callable[[], Any], clip: Callable[[], Any]) -> Stepping:
    """Steps of ``model``, each followed by ``others``."""

    def step(inputs: torch.Tensor) -> None:
        backward(model, inputs)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        for other in others:
            other()

    return step


def steps_of_engine(**options: Any) -> Stepping:
    model = sharded(DEVICE, **options)
    clip = functools.partial(shardwise.clip_grad_norm_, [*model.parameters()], 1.0)
    return stepping(model, sgd(model.parameters()), shardwise.EMA(model, 0.9).update, clip=clip)


def steps_of_flat() -> Stepping:
    model = sharded(DEVICE)
    optimizer = shardwise.optim.flat(torch.optim.AdamW, model.parameters(), lr=0.01)
    return stepping(model, optimizer, clip=lambda: None)


def steps_of_sharded_ddp() -> Stepping:
    _, optimizer, wrapped = sharded_ddp(DEVICE)
    return stepping(wrapped, optimizer, clip=functools.partial(optimizer.clip_grad_norm, 1.0))


def steps_of_fairscale_fsdp(**options: Any) -> Stepping:
    wrapped = fsdp(DEVICE, **options)
    clip = functools.partial(wrapped.clip_grad_norm_, 1.0)
    return stepping(wrapped, sgd(wrapped.parameters()), clip=clip)


QUICK: dict[str, Callable[[], Stepping]] = {
    "engine": steps_of_engine,
    "engine_in_fp16": functools.partial(steps_of_engine, mp_policy=MixedPrecisionPolicy(HALF, torch.float32)),
    "zero1": functools.partial(steps_of_engine, placements="zero1"),
    "flat": steps_of_flat,
    "sharded_ddp": steps_of_sharded_ddp,
    "fairscale_fsdp": steps_of_fairscale_fsdp,
    "fairscale_fsdp_in_fp16": functools.partial(steps_of_fairscale_fsdp, mixed_precision=True),
}


@on_ranks(2, name=list(QUICK))
def test_the_host_does_not_wait(name: str) -> None:
    set_up(DEVICE)
    use_device_alone()
    step = QUICK[name]()
    inputs = [inputs_for(Transformer(), seed=number).to(DEVICE) for number in range(4)]
    for early in inputs[:2]:  # plans and streams are made, and the order of units is recorded
        step(early)
    with not_waiting():
        for late in inputs[2:]:
            step(late)


# -- Random numbers of the device


def same_bits(found: Any, expected: Any) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@on_ranks(2, kind=[MLP, Transformer, ConvNet])
def test_init_draws_as_the_constructor_would(kind: Any) -> None:
    """On the device's generator, which ends where the constructor leaves it."""
    set_up(DEVICE)
    module = torch.get_device_module(DEVICE)
    torch.manual_seed(4)
    with torch.device(DEVICE):
        truth = kind()
    end = module.get_rng_state() if DEVICE != "cpu" else torch.get_rng_state()
    torch.manual_seed(4)
    with torch.device(DEVICE), shardwise.init_on_meta():
        model = kind()
    assert is_on("meta", model.parameters())
    wrap(model, shardwise.fully_shard, mesh=mesh_on(DEVICE, (2,)))
    shardwise.materialize(model)
    assert same_bits(shardwise.full_state_dict(model, cpu=False, rank0_only=False), truth.state_dict())
    assert torch.equal(module.get_rng_state() if DEVICE != "cpu" else torch.get_rng_state(), end)
    shardwise.materialize(wrap(_again(kind), shardwise.fully_shard, mesh=mesh_on(DEVICE, (2,))), seed=4)


def _again(kind: Any) -> Any:
    with torch.device(DEVICE), shardwise.init_on_meta():
        return kind()


@on_ranks(2, from_host=[True, False])
def test_fast_init_is_the_same_at_any_number_of_shards(from_host: bool) -> None:
    set_up(DEVICE)
    states = []
    for axes in ((2,), (2, 1)):
        with nullcontext() if from_host else torch.device(DEVICE), shardwise.init_on_meta():
            model = Transformer()
        wrap(model, shardwise.fully_shard, mesh=mesh_on(DEVICE, axes))
        shardwise.materialize(model, seed=3, fast=True)
        states.append(shardwise.full_state_dict(model, rank0_only=False))
    assert same_bits(*states)


# -- Frameworks


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def framework_way(module: str, name: str) -> tuple[Way, torch.dtype]:
    """One of the ``WAYS`` of a module, which is imported where it is used: that takes seconds."""
    ways: dict[str, tuple[Way, torch.dtype]] = importlib.import_module(f"tests.cuda.{module}").WAYS
    return ways[name]


TRAINERS = (
    *("trainer", "trainer_bf16", "trainer_scaled", "trainer_offloaded", "trainer_offloaded_scaled"),
    *("trainer_sharded_files", "trainer_by_name"),
)
FABRICS = ("fabric", "fabric_bf16", "fabric_scaled", "fabric_offloaded", "fabric_sharded_files", "fabric_by_name")
RUNNERS = ("runner", "runner_offloaded", "runner_averaged", "runner_scaled", "flexible", "flexible_scaled")


@needs("lightning")
@pytest.mark.parametrize("way", [*TRAINERS, *FABRICS])
def test_lightning_alone(world: World, way: str) -> None:
    world(1)
    compare(*framework_way("by_lightning", way))


@needs("lightning")
@on_ranks(2, limit=150.0, way=[way for way in (*TRAINERS, *FABRICS) if "by_name" not in way])
def test_lightning(way: str) -> None:
    compare(*framework_way("by_lightning", way))


@needs("mmengine")
@on_ranks(2, limit=150.0, way=list(RUNNERS))
def test_mmengine(way: str) -> None:
    # MMEngine communicates by the host where it does not know the device.
    compare(*framework_way("by_mmengine", way), needs_host=DEVICE == "simulated")


@needs("mmengine")
@on_ranks(2)
def test_mmengine_joins_where_ranks_share_a_device() -> None:
    """LOCAL_RANK is 1 on a rank that sees one device only."""
    importlib.import_module("tests.cuda.by_mmengine").join()
