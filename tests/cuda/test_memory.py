"""Bytes that the device's allocator gave out, as equations, for one of eight ranks."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn

from ..models import Transformer, inputs_for
from .cases import DEVICE, OFFLOAD, PRECISIONS, Case, build
from .conftest import World

RANKS = 8
KIB = 1024


def allocated() -> int:
    """Bytes of tensors on the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    return requested("current")


def requested(when: str) -> int:
    """Bytes that tensors and libraries asked for, "current" or "peak"; the allocator's blocks may be 1 MiB larger."""
    if DEVICE == "cpu":
        return 0
    if DEVICE == "cuda":
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])
    module = torch.get_device_module(DEVICE)
    return int(module.memory_allocated() if when == "current" else module.max_memory_allocated())


def assert_bytes(actual: int, expected: int, slack: int = 256 * KIB) -> None:
    """Equal, but for blocks of whole 512 bytes and a row of flags for each unit."""
    if DEVICE != "cpu":
        assert expected <= actual <= expected + slack, f"{actual:,} bytes where {expected:,} are expected"


def bytes_of(module: nn.Module, ranks: int = 1) -> int:
    """Bytes of one rank's part, by arithmetic."""
    return sum(4 * -(-p.shape[0] // ranks) * p[0].numel() for p in module.parameters())


def wide(layers: int) -> Transformer:
    return Transformer(layers=layers, width=512, vocabulary=1000)


def case_of(preset: str, layers: int = 3, **options: Any) -> Case:
    axes = (2, RANKS // 2) if preset == "hsdp" else (RANKS,)
    return Case(functools.partial(wide, layers), axes, {"placements": preset} | options)


def backward(model: Any) -> None:
    """Forward and backward on few tokens, so that activations are small."""
    model(inputs_for(model, 0, batch=1)).float().square().mean().backward()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_bytes_between_steps(world: World, preset: str, precision: str) -> None:
    world(RANKS)
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # torch's first one in a process leaves a cycle
    gc.collect()
    before, whole = allocated(), bytes_of(wide(3))
    shards = bytes_of(wide(3), {"ddp": 1, "hsdp": RANKS // 2}.get(preset, RANKS))
    gathered = {"ddp": 0 if precision == "fp32" else whole, "zero1": whole, "zero2": whole}.get(preset, 0)
    kept = shards + (gathered if precision == "fp32" else gathered // 2)
    model = build(DEVICE, case_of(preset, mp_policy=PRECISIONS[precision]))
    assert_bytes(allocated() - before, shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        backward(model)
        assert_bytes(allocated() - before, kept + shards)
        optimizer.step()
        optimizer.zero_grad()
        assert_bytes(allocated() - before, kept)
    del model, optimizer
    assert_bytes(allocated() - before, 0, slack=4 * KIB)


@pytest.mark.parametrize("preset", ["zero3", "hsdp"])
def test_bytes_of_evaluation(world: World, preset: str) -> None:
    world(RANKS)
    gc.collect()
    before = allocated()
    model = build(DEVICE, case_of(preset, reshard_after_forward=True))
    with torch.no_grad():
        output = model(inputs_for(model, 0))
    assert output.shape == (4, 8, 1000)
    shards = bytes_of(wide(3), RANKS // 2 if preset == "hsdp" else RANKS)
    assert_bytes(allocated() - before, shards + 4 * output.numel())


def test_offloaded_state_takes_no_memory(world: World) -> None:
    world(RANKS)
    gc.collect()
    before = allocated()
    model = build(DEVICE, case_of("zero3", **OFFLOAD))
    backward(model)
    assert all(parameter.grad.to_local().device.type == "cpu" for parameter in model.parameters())
    assert_bytes(allocated() - before, 0)


def test_peak(world: World) -> None:
    """Few units at a time, however many there are."""
    world(RANKS)
    layers = 12
    plain = wide(layers)
    unit, shards, whole = bytes_of(plain.layers[0]), bytes_of(plain, RANKS), bytes_of(plain)
    model = build(DEVICE, case_of("zero3", layers))
    for _ in range(2):
        model.zero_grad()
        before = requested("current")  # with the workspaces that cuBLAS keeps
        if DEVICE != "cpu":
            torch.get_device_module(DEVICE).reset_peak_memory_stats()
        backward(model)
    # Gathered: the root, this unit and the next. Gradients: this unit's, those being reduced, temporaries.
    most = shards + (whole - layers * unit) + 5 * unit + layers * 1024 * KIB
    assert most < whole
    assert requested("peak") - before <= most
