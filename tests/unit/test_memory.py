"""Bytes held and collectives issued, as equations, on the fake process group."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bench.counts import flag_bytes
from shardwise import FSDPCommContext, MixedPrecisionPolicy, Placements, fully_shard
from shardwise.core import reducer
from shardwise.core.batch import KeptBatch
from shardwise.core.buffer import MAPPED_BYTES, allocate_storage, free_storage
from shardwise.core.device import owns_memory
from shardwise.core.gradient import GradientPlan
from shardwise.core.lanes import Lane
from shardwise.core.root import unit_of

from ..models import Transformer, inputs_for

Mesh = Callable[..., DeviceMesh]


@pytest.mark.parametrize(
    "refer",
    [
        lambda tensor: tensor.detach(),
        lambda tensor: tensor[1:],
        lambda tensor: tensor.detach().numpy(),
        lambda tensor: torch.ones(2, 3, requires_grad=True) @ tensor.t(),
    ],
)
def test_memory_has_one_owner_until_something_else_refers_to_it(refer: Callable[[torch.Tensor], Any]) -> None:
    parameter = nn.Parameter(torch.randn(4, 3))
    assert owns_memory(parameter)
    reference = refer(parameter)
    assert not owns_memory(parameter)
    del reference
    assert owns_memory(parameter)


def test_part_of_a_memory_is_not_owned() -> None:
    assert not owns_memory(torch.randn(6)[:3])
    assert not owns_memory(torch.randn(2, 3).t())


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no kernel with huge pages")
def test_gathered_memory_that_is_mapped_anew_asks_for_huge_pages() -> None:
    tensor = torch.empty(MAPPED_BYTES // 4 + 1024)
    free_storage(tensor)
    allocate_storage(tensor)
    where, found = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= where < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the memory is in no mapping")


class Collectives(TorchDispatchMode):
    """Counts what is sent through c10d, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reductions = self.all_reduces = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.gathers += name.startswith(("c10d._allgather_base_", "c10d.allgather_into_tensor_coalesced_"))
        self.reductions += name.startswith(("c10d._reduce_scatter_base_", "c10d.reduce_scatter_tensor_coalesced_"))
        self.all_reduces += name.startswith("c10d.allreduce_")
        return func(*args, **(kwargs or {}))


reduced: list[tuple[StorageWeakRef, int]] = []
"""Buffers that reduced gradients are parts of, and their bytes: each gradient's own storage shows its part only."""


@pytest.fixture(autouse=True)
def watch_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GradientPlan.unstage

    def unstage(plan: GradientPlan, out: torch.Tensor, present: Any) -> Any:
        reduced.append((StorageWeakRef(out.untyped_storage()), out.untyped_storage().nbytes()))
        return original(plan, out, present)

    reduced.clear()
    monkeypatch.setattr(GradientPlan, "unstage", unstage)


def storages(model: nn.Module) -> dict[int, int]:
    """Bytes by address of everything that the engine holds for a model."""
    held: dict[int, int] = {}
    for module in model.modules():
        unit = unit_of(module)
        for group in unit.groups if unit is not None else ():
            for slot in group.slots:
                tensors = [slot.buffer.local, slot.buffer._full, slot.accumulated]
                tensors += [slot.unsharded.grad if slot.unsharded is not None else None]
                for tensor in tensors:
                    if tensor is not None and tensor.untyped_storage().nbytes():
                        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return held


def live_bytes(model: nn.Module) -> int:
    gradients = sum(size for reference, size in reduced if not reference.expired())
    return sum(storages(model).values()) + gradients


def local_bytes(model: nn.Module) -> int:
    """By arithmetic: each rank reserves the largest chunk of every parameter."""
    total = 0
    for module in model.modules():
        unit = unit_of(module)
        for group in unit.groups if unit is not None else ():
            total += sum(4 * slot.buffer.layout.tensors[slot.index].chunk_numel for slot in group.slots)
    return total


def full_bytes(module: nn.Module, itemsize: int = 4) -> int:
    unit = unit_of(module)
    assert unit is not None
    return sum(itemsize * group.slots[0].buffer.layout.full_numel for group in unit.groups)


def flags_bytes(model: nn.Module) -> int:
    """One number per trainable parameter says whether any rank had its gradient."""
    return flag_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)


def build(mesh: DeviceMesh, **options: Any) -> Transformer:
    model = Transformer(tied=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def test_staging_memory_is_used_again_within_a_pass(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[StorageWeakRef] = []
    allocate = Lane.allocate

    def noted(lane: Lane, size: tuple[int, ...], **kind: Any) -> torch.Tensor:
        memory = allocate(lane, size, **kind)
        staged.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    mesh, model = fake_mesh(2), nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    monkeypatch.setattr(Lane, "allocate", noted)
    model(torch.ones(2, 4)).sum().backward()
    # Six units are gathered twice and reduced once. Without an order known yet one is gathered at a time in forward.
    assert len(staged) == 18
    assert len({reference.cdata for reference in staged}) <= 4
    assert all(reference.expired() for reference in staged)
    staged.clear()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert len(staged) == 6
    assert all(reference.expired() for reference in staged)
    model[0].unshard()  # type: ignore[operator]
    handle = model[1].unshard(async_op=True)  # type: ignore[operator]
    handle.wait()
    model[1].reshard()  # type: ignore[operator]
    assert len(staged) == 8
    assert all(reference.expired() for reference in staged)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    assert all(reference.expired() for reference in staged)


@pytest.mark.parametrize("world_size", [2, 3, 8, 64, 1024])
@pytest.mark.parametrize("rank", [0, 1])
def test_live_bytes(fake_mesh: Mesh, world_size: int, rank: int) -> None:
    model = build(fake_mesh(world_size, rank=rank))
    x = inputs_for(model, 0)
    for _ in range(2):
        assert live_bytes(model) == local_bytes(model)
        loss = model(x).sum()
        # The root is not resharded after forward, since backward needs it at once.
        assert live_bytes(model) == local_bytes(model) + full_bytes(model)
        loss.backward()
        assert live_bytes(model) == 2 * local_bytes(model) + flags_bytes(model)
        model.zero_grad()


def test_live_bytes_without_gradients(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4), reshard_after_forward=True)
    with torch.no_grad():
        model(inputs_for(model, 0))
    assert live_bytes(model) == local_bytes(model)


@pytest.mark.parametrize("preset", ["zero1", "zero2"])
def test_live_bytes_of_kept_parameters(fake_mesh: Mesh, preset: str) -> None:
    model = build(fake_mesh(4), placements=getattr(Placements, preset))
    kept = full_bytes(model) + sum(full_bytes(layer) for layer in model.layers)
    model(inputs_for(model, 0)).sum().backward()
    assert live_bytes(model) == 2 * local_bytes(model) + kept + flags_bytes(model)


def test_ddp_holds_parameters_once(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4), placements=Placements.ddp)
    model(inputs_for(model, 0)).sum().backward()
    model.zero_grad()
    assert live_bytes(model) == full_bytes(model) + sum(full_bytes(layer) for layer in model.layers)


def test_world_of_one_shares_everything(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(1))
    seen: list[int] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.data_ptr()))
    model(inputs_for(model, 0)).sum().backward()
    assert seen == [model.layers[0].up.weight.to_local().data_ptr()]


def test_frozen_parameters_have_no_gradient_bytes(fake_mesh: Mesh) -> None:
    model = Transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    mesh = fake_mesh(4)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(inputs_for(model, 0)).sum().backward()
    trainable = sum(
        4 * slot.buffer.layout.tensors[slot.index].chunk_numel
        for module in [model, *model.layers]
        for group in unit_of(module).groups  # type: ignore[union-attr]
        for slot in group.slots
        if slot.sharded.requires_grad
    )
    assert live_bytes(model) == local_bytes(model) + trainable + flags_bytes(model)


@contextmanager
def counted() -> Iterator[Collectives]:
    with Collectives() as mode:
        yield mode


@pytest.mark.parametrize("world_size", [2, 8, 1024])
def test_collectives_per_step(fake_mesh: Mesh, world_size: int) -> None:
    model = build(fake_mesh(world_size))
    x, layers = inputs_for(model, 0), len(model.layers)
    for _ in range(2):
        with counted() as forward:
            loss = model(x).sum()
        assert (forward.gathers, forward.reductions) == (layers + 1, 0)
        with counted() as backward:
            loss.backward()
        assert (backward.gathers, backward.reductions, backward.all_reduces) == (layers, layers + 1, 0)


def collectives_of_steps(model: Any) -> list[tuple[int, int, int]]:
    """Gathers, reductions and all-reduces of each of three steps of three micro-batches."""
    optimizer, x, found = torch.optim.AdamW(model.parameters()), inputs_for(model, 0), []
    for _ in range(3):
        with counted() as count:
            for micro_batch in range(3):
                model.set_is_last_backward(micro_batch == 2)
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((count.gathers, count.reductions, count.all_reduces))
    return found


@pytest.mark.parametrize(
    ("preset", "gathers", "reductions", "all_reduces"),
    [("zero1", 4, 4, 0), ("zero2", 4, 12, 0), ("ddp", 0, 0, 4)],
)
def test_collectives_of_kept_parameters(
    fake_mesh: Mesh, preset: str, gathers: int, reductions: int, all_reduces: int
) -> None:
    model = build(fake_mesh(4), placements=getattr(Placements, preset))
    assert collectives_of_steps(model) == [(gathers, reductions, all_reduces)] * 3


@pytest.mark.parametrize(
    ("preset", "gathers", "reductions", "all_reduces"),
    # Two mebibytes are eight layers. The root of zero3 is gathered alone, once, and stays until its backward.
    [("zero1", 3, 3, 0), ("zero2", 3, 9, 0), ("ddp", 0, 0, 3), ("zero3", (1 + 3 + 3) * 3, 3 * 3, 0)],
)
def test_collectives_of_many_small_units(
    fake_mesh: Mesh, preset: str, gathers: int, reductions: int, all_reduces: int
) -> None:
    torch.manual_seed(0)
    mesh, model = fake_mesh(4), Transformer(layers=20, width=72)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, placements=getattr(Placements, preset))
    # Once all have been gathered before, and the order is known.
    assert collectives_of_steps(model)[1:] == [(gathers, reductions, all_reduces)] * 2


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2"])
def test_memory_goes_with_one_of_many_small_units(fake_mesh: Mesh, preset: str) -> None:
    """Whether it leaves the model, or its parameters are replaced."""
    mesh, model = fake_mesh(2), nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, placements=getattr(Placements, preset))

    def step() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def memory_of(layer: nn.Module) -> list[StorageWeakRef]:
        buffer = unit_of(layer).groups[0].shards.buffers[0]  # type: ignore[union-attr]
        return [StorageWeakRef(tensor.untyped_storage()) for tensor in (buffer.full, buffer.local)]

    for _ in range(3):
        step()
    held = memory_of(model[10])
    del model[10]
    step()
    assert all(memory.expired() for memory in held)
    held = memory_of(model[9])
    model[9].load_state_dict({name: value.clone() for name, value in model[9].state_dict().items()}, assign=True)
    step()
    assert held[1].expired()  # the gathered buffer is that of the new ones


def test_memory_goes_with_one_of_many_small_units_within_a_forward(fake_mesh: Mesh) -> None:
    """Though others that were gathered with it have yet to run."""
    mesh, model = fake_mesh(2), nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, placements=Placements.zero1)
    with torch.no_grad():
        model(torch.ones(2, 8))
        torch._foreach_mul_(list(model.parameters()), 2)
    buffer = unit_of(model[0]).groups[0].shards.buffers[0]  # type: ignore[union-attr]
    held = StorageWeakRef(buffer.full.untyped_storage())
    del buffer
    seen: list[bool] = []

    def take_out(*_: Any) -> None:
        model[0] = nn.Identity()
        seen.append(held.expired())

    model[3].register_forward_pre_hook(take_out)
    with torch.no_grad(), counted() as count:
        model(torch.ones(2, 8))
    assert count.gathers == 1
    assert seen == [True]


def test_plans_of_reductions_are_not_kept_for_ever(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though other parameters require gradients in every step."""
    monkeypatch.setattr(reducer, "MOST_PLANS", 4)
    model = fully_shard(nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]), mesh=fake_mesh(2))
    parameters = [*model.parameters()]
    plans: list[weakref.ref[GradientPlan]] = []
    make = GradientPlan.__init__

    def noted(plan: GradientPlan, *args: Any) -> None:
        plans.append(weakref.ref(plan))
        make(plan, *args)

    monkeypatch.setattr(GradientPlan, "__init__", noted)
    for chosen in range(1, 16):
        for index, parameter in enumerate(parameters):
            parameter.requires_grad_(bool(chosen & 1 << index))
        model(torch.ones(2, 8)).sum().backward()
    assert len(plans) == 15
    assert sum(plan() is not None for plan in plans) <= 4


def test_a_model_of_many_batches(fake_mesh: Mesh) -> None:
    """More of them than Python calls can be inside of each other."""
    model = fully_shard(nn.Linear(2, 2), mesh=fake_mesh(2))
    unit = unit_of(model)
    assert unit is not None
    batch: KeptBatch | None = None
    for _ in range(5000):
        batch = KeptBatch(unit.reference, batch)
    assert batch is not None
    batch.append(unit)
    batch.gather(unit, unit.groups)
    unit.context.drop_batches()
    assert not unit.is_on_its_way


def test_evaluation_twice_gathers_kept_parameters_once(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(4), placements=Placements.zero2)
    x = inputs_for(model, 0)
    with counted() as count, torch.no_grad():
        model(x)
        model(x)
    assert count.gathers == 4
    with counted() as count, torch.no_grad():
        model.layers[1].up.weight.mul_(2)
        model(x)
    assert count.gathers == 1
    with counted() as count, torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2)
        model.layers[0].up.weight.data.mul_(2)
        model(x)
    assert count.gathers == 4


def test_conversion_frees_gradients_that_were_not_reduced(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(inputs_for(model, 0)).sum().backward()
    unit = unit_of(model.layers[0])
    assert unit is not None
    unsharded = unit.groups[0].slots[0].unsharded
    assert unsharded is not None
    assert unsharded.grad is not None
    memory = StorageWeakRef(unsharded.grad.untyped_storage())
    del unsharded
    model.double()
    assert memory.expired()


def test_a_context_keeps_nothing_of_models_that_are_gone(fake_mesh: Mesh) -> None:
    """What it knew of the order grew with each."""
    mesh, context = fake_mesh(4), FSDPCommContext("cpu")
    known: list[int] = []
    for _ in range(4):
        layers = [fully_shard(nn.Linear(3, 3), mesh=mesh, comm_ctx=context) for _ in range(3)]
        for _ in range(2):
            nn.Sequential(*layers)(torch.randn(2, 3)).sum().backward()
        order = context.order
        known.append(len(order._next) + len(order._before) + len(order._runs))
        del layers
    assert known[1:] == [known[1]] * 3


def refuse(*_: Any) -> NoReturn:
    raise ArithmeticError("no gradient")


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("trained", [False, True, "in vain"])
def test_deleting_the_model_frees_it_at_once(fake_mesh: Mesh, preset: str, trained: bool | str) -> None:
    gc.collect()
    gc.disable()
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = build(fake_mesh(4), placements=getattr(Placements, preset), mp_policy=policy)
        if trained:
            model(inputs_for(model, 0)).sum().backward()
        if trained == "in vain":
            handle = model.layers[0].register_full_backward_hook(refuse)
            with pytest.raises(ArithmeticError):
                model(inputs_for(model, 0)).sum().backward()
            handle.remove()
        else:
            model(inputs_for(model, 0))
        unit = unit_of(model.layers[0])
        assert unit is not None
        watched = [
            weakref.ref(unit),
            weakref.ref(unit.groups[0]),
            weakref.ref(unit.groups[0].slots[0].buffer),
        ]
        watched += [weakref.ref(model), weakref.ref(unit.context)]  # type: ignore[list-item]
        del model, unit
        assert [reference() for reference in watched] == [None] * len(watched)
    finally:
        gc.enable()
