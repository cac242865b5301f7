"""Training on a GPU comes to what training on the CPU comes to: alone with NCCL, and as two ranks with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.tensor import DTensor

from shardwise import CPUOffloadPolicy
from shardwise.core import comm

from ..models import MLP, ConvNet, Transformer, inputs_for
from ..ranks.harness import on_ranks
from . import cases
from .cases import DEVICE, Case, build, compare, mesh_on
from .conftest import World


@pytest.mark.parametrize("precision", cases.PRECISIONS)
@pytest.mark.parametrize("accumulation", cases.ACCUMULATIONS)
@pytest.mark.parametrize("preset", cases.AXES)
def test_presets_alone(world: World, preset: str, accumulation: str, precision: str) -> None:
    world(1)
    compare(cases.preset_case(preset, "one", accumulation, precision))


@on_ranks(
    2,
    preset=list(cases.AXES),
    prefetching=list(cases.PREFETCHES),
    accumulation=list(cases.ACCUMULATIONS),
    precision=list(cases.PRECISIONS),
)
def test_presets(preset: str, prefetching: str, accumulation: str, precision: str) -> None:
    compare(cases.preset_case(preset, prefetching, accumulation, precision))


@pytest.mark.parametrize("feature", cases.FEATURES)
def test_features_alone(world: World, feature: str) -> None:
    world(1)
    compare(cases.FEATURES[feature])


@on_ranks(2, feature=list(cases.FEATURES))
def test_features(feature: str) -> None:
    compare(cases.FEATURES[feature])


@on_ranks(2, limit=270.0)
def test_compiled_layers() -> None:
    compare(Case(prepare=cases.compile_layers))


# -- What is where


def check_places(model: Any, kept_on: str, pinned: bool = False) -> None:
    """Shards, gradients and optimizer state are kept on one device, computation and buffers are on ``DEVICE``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    output = model(inputs_for(model, 0))
    output.square().mean().backward()
    optimizer.step()
    assert {tensor.device.type for tensor in (output, *model.buffers())} == {DEVICE}
    for parameter in model.parameters():
        assert parameter.device_mesh.device_type == DEVICE
        for tensor in (parameter, parameter.grad, optimizer.state[parameter]["momentum_buffer"]):
            assert isinstance(tensor, DTensor)
            assert tensor.to_local().device.type == tensor.device.type == kept_on
        assert parameter.to_local().is_pinned() == parameter.grad.to_local().is_pinned() == pinned
        assert parameter.full_tensor().shape == parameter.shape


@on_ranks(2, model=[MLP, Transformer, ConvNet])
def test_places(model: Any) -> None:
    check_places(build(DEVICE, Case(model)), DEVICE)


@on_ranks(2, pin_memory=[True, False])
def test_places_of_offloaded_state(pin_memory: bool) -> None:
    model = build(DEVICE, Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=pin_memory)}))
    check_places(model, "cpu", pinned=pin_memory and DEVICE == "cuda")


# -- Collectives by themselves


def collectives(device: str) -> dict[str, torch.Tensor]:
    """What each collective gives, for one tensor and for several at once, on the CPU."""
    ranks = comm.comm_for(mesh_on(device, (2,)).get_group(), torch.device(device))
    results: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in ((3,), (5, 1, 64), (100_000, 2)):
            # Made on the CPU: where bfloat16 has no such number, each device rounds in its own way.
            own = [torch.arange(size, dtype=dtype).sub_(ranks.rank).to(device) for size in sizes]
            whole = [tensor.repeat(ranks.size) for tensor in own]
            gathered = [torch.empty_like(tensor) for tensor in whole]
            outputs, works = {"gathered": gathered}, list(ranks.all_gather(gathered, own))
            for mean in (True, False):
                outputs[f"scattered {mean}"] = scattered = [torch.empty_like(tensor) for tensor in own]
                works += ranks.reduce_scatter(scattered, whole, mean=mean)
                outputs[f"reduced {mean}"] = [own[0].clone()]
                works += ranks.all_reduce(outputs[f"reduced {mean}"][0], mean=mean)
            for work in works:
                work.wait()
            results |= {f"{k} {dtype} {sizes} {i}": t.cpu() for k, ts in outputs.items() for i, t in enumerate(ts)}
    return results


def check_collectives() -> None:
    """The same bits, sums being of one or two terms; over one process group for both devices."""
    truth, ours = collectives("cpu"), collectives(DEVICE)
    assert [name for name, expected in truth.items() if not torch.equal(ours[name], expected)] == []


def test_collectives_alone(world: World) -> None:
    world(1)
    check_collectives()


@on_ranks(2)
def test_collectives() -> None:
    check_collectives()


def check_staged(gather: Any, group: dist.ProcessGroup, **extra: Any) -> None:
    """A collective of one rank in memory that it allocates itself."""
    own = torch.arange(1000.0, device=DEVICE)
    sent, received = (gather.allocate((1000,), dtype=own.dtype, device=own.device) for _ in range(2))
    sent.copy_(own)
    if (work := gather(output_tensor=received, input_tensor=sent, group=group, **extra)) is not None:
        work.wait()
    assert torch.equal(received, own)


def test_process_group_memory(world: World) -> None:
    world(1)
    group = mesh_on(DEVICE, (1,)).get_group()
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    check_staged(comm.ProcessGroupMemory(group, device), group)
    check_staged(comm.ProcessGroupMemory(group, device), group, op=comm.reduce_op(True))


def test_symmetric_memory(world: World) -> None:
    if DEVICE != "cuda":
        pytest.skip("needs NCCL")
    world(1)
    try:  # by torch's own functions
        symmetric_memory.set_backend("NCCL")
        dist.all_reduce(torch.zeros(1, device=DEVICE))
        probe = symmetric_memory.empty(1000, device=torch.device(DEVICE, 0))
        symmetric_memory.rendezvous(probe, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    except RuntimeError as error:
        pytest.skip(f"no symmetric memory here: {error}")
    group = dist.new_group([0])  # has no communicator yet
    check_staged(comm.SymmetricMemoryGather(group, torch.device(DEVICE, 0), "NCCL"), group)
