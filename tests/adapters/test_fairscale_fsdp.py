"""FullyShardedDataParallel against torch's DDP, plain training on all data, `fully_shard`, and FairScale's own."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import itertools
import pickle
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.core.errors import StateError
from shardwise.fairscale import (
    FSDP,
    DummyProcessGroup,
    FlatParameter,
    FullyShardedDataParallel,
    ShardedGradScaler,
    TrainingState,
    auto_wrap_bn,
    checkpoint_wrapper,
    get_fsdp_instances,
)
from shardwise.fairscale.fsdp import ARGUMENTS

from ..models import MLP, Block, ConvNet, Transformer, inputs_for
from ..ranks.harness import on_ranks
from .fairscale_on_cpu import fairscale_fsdp, needs_fairscale

FLAT = (True, False)


def tied_transformer() -> nn.Module:
    return Transformer(tied=True)


def made(kind: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def wrapped(model: nn.Module, nested: bool = True, **options: Any) -> Any:
    """``model`` with its blocks, or layers, in instances of their own."""
    if nested:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Block) or (isinstance(module, nn.ModuleList) and isinstance(child, nn.Linear)):
                    setattr(module, name, FSDP(child, **options))
    return FSDP(model, **options)


def loss_of(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).float().square().mean()


def whole_gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def consolidated(model: Any) -> dict[str, torch.Tensor]:
    """Whole weights from all ranks' shards."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (dict(model.local_state_dict()), model.local_metadata_dict()))
    weights, metadata = zip(*everything, strict=True)
    return FSDP.consolidate_shard_weights(list(weights), list(metadata))


def assert_same(actual: Any, expected: Any, exact: bool, summed_in: torch.dtype | None = None) -> None:
    """Equal bits, or close; three ranks' numbers that were ``summed_in`` a narrow dtype, in any order, in that one."""
    if summed_in is not None and not exact:
        actual, expected = ([one.to(summed_in) for one in listed(value)] for value in (actual, expected))
    torch.testing.assert_close(actual, expected, **({"rtol": 0, "atol": 0} if exact else {}))


def listed(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else value


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.05),
}


@on_ranks(1, 2, 3, 4, kind=(MLP, tied_transformer, ConvNet), flat=FLAT)
def test_trains_like_ddp(kind: Callable[[], nn.Module], flat: bool) -> None:
    nested = kind is not MLP or flat
    rank, exact = dist.get_rank(), dist.get_world_size() <= 2
    expected = DistributedDataParallel(made(kind))
    actual = wrapped(made(kind, seed=3 + rank), nested, flatten_parameters=flat)  # the first rank's count
    name = "sgd" if kind is not MLP else "adagrad"
    optimizers = [OPTIMIZERS[name](expected.parameters()), OPTIMIZERS[name](actual.parameters())]
    for step in range(3):
        inputs = inputs_for(expected.module, 10 * step + rank)
        for model, optimizer in zip((expected, actual), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, inputs)
            loss.backward()
            model.last = loss.detach()
        assert_same(actual.last, expected.last, exact)
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        torch.testing.assert_close(actual.clip_grad_norm_(0.1), norm)
        if step == 2:
            continue  # clipped gradients differ in their last bits, as their norms do
        for optimizer in optimizers:
            optimizer.step()
        exact = False
    full = actual.state_dict()
    assert list(full) == list(expected.module.state_dict())
    for name, value in expected.module.state_dict().items():
        if rank == 0 or "running" not in name:  # DDP gives all ranks the first one's buffers
            torch.testing.assert_close(full[name], value)


@on_ranks(2, kind=(MLP, tied_transformer), flat=FLAT, optimizer=tuple(OPTIMIZERS))
def test_is_bitwise_ddp(kind: Callable[[], nn.Module], flat: bool, optimizer: str) -> None:
    expected, actual = DistributedDataParallel(made(kind)), wrapped(made(kind), flatten_parameters=flat)
    steppers = [OPTIMIZERS[optimizer](model.parameters()) for model in (expected, actual)]
    schedules = [torch.optim.lr_scheduler.StepLR(stepper, 1, 0.5) for stepper in steppers]
    for step in range(4):
        inputs = inputs_for(expected.module, 10 * step + dist.get_rank())
        for model, stepper, schedule in zip((expected, actual), steppers, schedules, strict=True):
            stepper.step(closure=_closure(model, stepper, inputs))
            schedule.step()
    for name, value in actual.state_dict().items():
        assert_same(value, expected.module.state_dict()[name], True)


def _closure(model: Any, stepper: Optimizer, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        stepper.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        return loss

    return run


@on_ranks(2, 3, flat=FLAT, fp32_reduce=(True, False))
def test_mixed_precision_like_fully_shard(flat: bool, fp32_reduce: bool) -> None:
    expected, actual = made(Transformer), made(Transformer)
    summed_in = None if fp32_reduce else torch.bfloat16
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32 if fp32_reduce else torch.bfloat16)
    for layer in expected.layers:
        shardwise.fully_shard(layer, mp_policy=policy)
    shardwise.fully_shard(expected, mp_policy=policy)
    options = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": fp32_reduce}
    actual = wrapped(actual, flatten_parameters=flat, **options)
    steppers = [SGD(model.parameters(), lr=0.1) for model in (expected, actual)]
    for step in range(3):
        inputs = inputs_for(expected, 10 * step + dist.get_rank())
        losses = []
        for model, stepper in zip((expected, actual), steppers, strict=True):
            losses.append(_closure(model, stepper, inputs)())
            stepper.step()
        assert_same(losses[1], losses[0], dist.get_world_size() == 2, summed_in)
    assert all(parameter.grad.dtype == torch.float32 for parameter in actual.parameters())
    full = shardwise.full_state_dict(expected, rank0_only=False)
    for name, value in actual.state_dict().items():
        assert value.dtype == torch.float32
        assert_same(value, full[name], dist.get_world_size() == 2, summed_in)


# -- FairScale's own


@needs_fairscale
@on_ranks(2, 3, flat=FLAT, mixed=(None, torch.float16, torch.bfloat16))
def test_like_fairscale(flat: bool, mixed: torch.dtype | None) -> None:
    options: dict[str, Any] = {"flatten_parameters": flat}
    if mixed is not None:
        options |= {"mixed_precision": True, "compute_dtype": mixed}
    rank = dist.get_rank()
    with fairscale_fsdp() as theirs:
        results = []
        # Not the group that FairScale remembers from another test of this process.
        same = {"process_group": dist.group.WORLD, "process_group_reduce_scatter": dist.group.WORLD}
        for cls, extra in ((theirs, {"bucket_cap_mb": 0, **same}), (FSDP, {})):
            model = nn.Sequential(
                nn.Linear(7, 13), nn.Tanh(), nn.Sequential(nn.Linear(13, 5), nn.Tanh()), nn.Linear(5, 3)
            )
            model.register_buffer("scale", torch.tensor([1.5]))
            torch.manual_seed(0)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.5)
            model[2] = cls(model[2], **options, **extra)
            model = cls(model, **options, **extra)
            optimizer = AdamW(model.parameters(), lr=0.01)
            losses, norms = [], []
            for step in range(3):
                inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
                if mixed is torch.bfloat16:
                    inputs = inputs.bfloat16()  # FairScale casts float32 to float16 whatever it computes in
                loss = loss_of(model, inputs)
                optimizer.zero_grad()
                loss.backward()
                norms.append(model.clip_grad_norm_(0.3))
                optimizer.step()
                losses.append(loss.detach())
            sizes = [parameter.numel() for parameter in model.parameters()]
            results.append((model, optimizer, losses, norms, sizes))
        (their_model, their_optimizer, *their_numbers), (model, optimizer, *numbers) = results
        assert_same(numbers[0][0], their_numbers[0][0], dist.get_world_size() == 2)
        assert_same(numbers[0], their_numbers[0], False, mixed)
        assert_same(numbers[1], their_numbers[1], False, mixed)
        assert numbers[2] == their_numbers[2]
        _compare_states(model, their_model, mixed)
        if flat:  # otherwise FairScale gathers only instances of one parameter
            _compare_optimizers(model, optimizer, their_model, their_optimizer, mixed)


def _compare_states(ours: Any, theirs: Any, mixed: torch.dtype | None) -> None:
    for method in ("state_dict", "local_state_dict"):
        mine, other = getattr(ours, method)(), getattr(theirs, method)()
        assert list(mine) == list(other), method
        for name, value in other.items():
            assert (mine[name].dtype, mine[name].shape) == (value.dtype, value.shape), name
            assert_same(mine[name], value, False, mixed)
    mine, other = ours.local_metadata_dict(), theirs.local_metadata_dict()
    assert mine == other
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (dict(ours.local_state_dict()), mine))
    weights, metadata = zip(*everything, strict=True)
    whole = type(theirs).consolidate_shard_weights(list(weights), list(metadata))
    again = FSDP.consolidate_shard_weights(list(weights), list(metadata))
    for name, value in ours.state_dict().items():
        assert torch.equal(whole[name].view_as(value).float(), value.float()) or whole[name].dtype != value.dtype
        assert torch.equal(again[name].to(value.dtype), value), name
    # Either loads what the other saved.
    theirs.load_state_dict(dict(ours.state_dict()))
    ours.load_state_dict(dict(theirs.state_dict()))
    ours.load_local_state_dict(theirs.local_state_dict())
    for name, value in whole.items():
        torch.testing.assert_close(ours.state_dict()[name].float(), value.float())


def _compare_optimizers(
    ours: Any, optimizer: Optimizer, theirs: Any, their_optimizer: Optimizer, mixed: torch.dtype | None
) -> None:
    full = theirs.gather_full_optim_state_dict(their_optimizer)
    shared = [full]
    dist.broadcast_object_list(shared)
    part = ours.get_shard_from_optim_state_dict(shared[0])
    assert part["param_groups"][0]["params"] == optimizer.state_dict()["param_groups"][0]["params"]
    for number, values in optimizer.state_dict()["state"].items():
        for key in ("exp_avg_sq", "step"):  # FairScale gathers into one buffer, where `.cpu()` copies nothing here
            assert_same(torch.as_tensor(part["state"][number][key]), values[key], False, mixed)
    other = FSDP(nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 3)))
    with pytest.raises(ValueError, match=r"with parameters 0 to 3 in one wrapped module, and here"):
        other.get_shard_from_optim_state_dict(shared[0])


@needs_fairscale
def test_takes_fairscales_arguments() -> None:
    with fairscale_fsdp() as theirs:
        upstream = inspect.signature(theirs.__init__).parameters
    ours = inspect.signature(FullyShardedDataParallel.__init__).parameters
    assert list(ours) == list(upstream)
    assert set(ARGUMENTS) == set(ours) - {"self"}
    differ = {name for name in ours if ours[name].default != upstream[name].default}
    assert differ == {"process_group_reduce_scatter"}


# -- Memory


@on_ranks(1, 2, 3, 4, flat=FLAT)
def test_holds_shards_with_little_padding(flat: bool) -> None:
    world_size = dist.get_world_size()
    model = wrapped(made(Transformer), flatten_parameters=flat)
    total = sum(parameter.numel() for parameter in made(Transformer).parameters())
    for instance in get_fsdp_instances(model, skip_empty=True):
        for slot in instance._own_slots():
            held = torch.tensor(slot.local.numel())
            dist.all_reduce(held)
            assert 0 <= held - slot.total < world_size  # less than one element per rank
    held = torch.tensor(sum(parameter.numel() for parameter in model.parameters()))
    assert all(parameter.ndim == 1 for parameter in model.parameters()) or (world_size == 1 and not flat)
    dist.all_reduce(held)
    runs = sum(len(instance._own_slots()) for instance in get_fsdp_instances(model))
    assert total <= held < total + runs * world_size
    stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    buffers = sum(buffer.local.nbytes for unit in get_fsdp_instances(model) for buffer in unit._own.shards.buffers)
    assert sum(stored.values()) == buffers


@on_ranks(2, flat=FLAT)
def test_frees_whole_parameters(flat: bool) -> None:
    model = wrapped(made(Transformer), flatten_parameters=flat)
    inner = model.module.layers[0]
    seen: list[int] = []
    buffers = [buffer for instance in get_fsdp_instances(model) for buffer in instance._own.shards.buffers]
    inner.module.register_forward_hook(lambda *_: seen.append(live(inner._own.shards.buffers)))
    loss = loss_of(model, inputs_for(model.module, 1))
    assert seen[0] > 0
    assert live(inner._own.shards.buffers) == 0
    assert live(model._own.shards.buffers) > 0  # the root's are needed next
    loss.backward()
    assert live(buffers) == 0
    with torch.no_grad():
        loss_of(model, inputs_for(model.module, 1))
    assert live(buffers) == 0
    gradients = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(gradients.values()) <= sum(p.numel() * 4 for p in model.parameters()) + 64 * len(buffers)


def live(buffers: Any) -> int:
    return sum(buffer.full.untyped_storage().nbytes() for buffer in buffers)


@on_ranks(2)
def test_is_freed_when_deleted() -> None:
    gc.collect()
    gc.disable()
    try:
        model = wrapped(made(MLP))
        loss_of(model, inputs_for(model.module, 1)).backward()
        reference = weakref.ref(model.module.layers[0])
        del model
        assert reference() is None
    finally:
        gc.enable()


# -- State


@on_ranks(4, flat=FLAT)
def test_state_goes_to_other_world_sizes(flat: bool) -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([index]) for index in range(4)]
    groups = {4: dist.group.WORLD, 2: pairs[rank // 2], 1: alone[rank]}

    def build(size: int, seed: int) -> tuple[Any, Optimizer]:
        model = wrapped(made(MLP, seed), flatten_parameters=flat, process_group=groups[size])
        parameters = list(model.parameters())
        settings = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:], "weight_decay": 0.1}]
        return model, AdamW(settings, lr=0.01)

    inputs = inputs_for(MLP(), 5)  # the same on all ranks, so that all world sizes take the same steps
    source, optimizer = build(4, 3)
    for _ in range(2):
        _closure(source, optimizer, inputs)()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    weights, state = source.state_dict(), source.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    kept = copy.deepcopy(state)
    for size in (1, 2, 4):
        target, other = build(size, 11 + rank)
        target.load_state_dict(weights)
        other.load_state_dict(target.get_shard_from_optim_state_dict(state))
        for model, stepper in ((source, optimizer), (target, other)):
            again = copy.deepcopy((model.state_dict(), stepper.state_dict()))
            _closure(model, stepper, inputs)()
            stepper.step()
            model.result = model.state_dict()
            model.load_state_dict(again[0])
            stepper.load_state_dict(again[1])
        for name, value in source.result.items():
            torch.testing.assert_close(target.result[name], value, msg=f"{name} at {size}")
        assert [group["lr"] for group in other.param_groups] == [0.02, 0.01]
    torch.testing.assert_close(state, kept, rtol=0, atol=0)  # not changed
    plain = made(MLP)
    plain.load_state_dict(weights)
    named = [[p for i, p in enumerate(plain.parameters()) if i in group["params"]] for group in state["param_groups"]]
    expected = AdamW([{"params": members} for members in named])
    expected.load_state_dict(state)
    _closure(plain, expected, inputs)()
    expected.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(source.result[name], value)
    # And back: the state of an optimizer of the plain model.
    optimizer.load_state_dict(source.get_shard_from_optim_state_dict(expected.state_dict()))
    assert next(iter(optimizer.state.values()))["step"] == 3


@on_ranks(1, 2, 3, flat=FLAT)
def test_gathers_optimizer_state_for_the_recipient(flat: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = wrapped(made(tied_transformer), flatten_parameters=flat)
    optimizer = AdamW(model.parameters())
    empty = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    assert empty["state"] == {}
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(empty))  # stateless
    _closure(model, optimizer, inputs_for(model.module, rank))()
    optimizer.step()
    steps = [state["step"] for state in optimizer.state.values()]
    last = size - 1
    assert (model.gather_full_optim_state_dict(optimizer, recipient_rank=last) is None) == (rank != last)
    assert (model.gather_full_optim_state_dict(optimizer) is None) == (rank != 0)
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    assert all(isinstance(step, torch.Tensor) for step in steps)
    assert [state["step"] for state in optimizer.state.values()] == steps
    names = [name for name, _ in made(tied_transformer).named_parameters()]
    assert full["param_groups"][0]["params"] == list(range(len(names)))
    shapes = [parameter.shape for parameter in made(tied_transformer).parameters()]
    assert [state["exp_avg"].shape for state in full["state"].values()] == shapes
    with pytest.raises(ValueError, match="not a shard of this module"):
        model.gather_full_optim_state_dict(SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    with model.summon_full_params(), pytest.raises(ValueError, match="whole inside summon_full_params"):
        model.gather_full_optim_state_dict(optimizer)


@on_ranks(2, flat=FLAT)
def test_optimizers_of_named_parameters(flat: bool) -> None:
    plain = tied_transformer()
    names = [name for name, _ in plain.named_parameters()]
    model = wrapped(tied_transformer(), flatten_parameters=flat)
    optimizer = SGD(model.named_parameters(), lr=0.1)
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    assert full["param_groups"][0]["param_names"] == names
    own = optimizer.param_groups[0]["param_names"]
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(SGD(plain.named_parameters(), lr=0.3).state_dict()))
    assert (optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["lr"]) == (own, 0.3)


@on_ranks(2, what=["strangers", "fewer", "order", "unstepped", "shape", "none"])
def test_optimizers_that_differ_on_a_rank_are_refused_on_all(what: str) -> None:
    model = FSDP(made(MLP), flatten_parameters=False)
    optimizer, other = (AdamW(model.parameters()) for _ in range(2))
    _closure(model, optimizer, inputs_for(MLP(), 1))()
    optimizer.step()
    if dist.get_rank() == 1:
        parameters = list(model.parameters())
        if what == "shape":
            other = optimizer
            other.state[parameters[0]]["rows"] = torch.ones(3)
        elif what == "none":
            other = None
        elif what != "unstepped":
            given = {"strangers": nn.Linear(2, 2).parameters(), "fewer": parameters[1:], "order": parameters[::-1]}
            other = AdamW(given[what])
    else:
        other = optimizer
    expected = r"not a shard of|no part|another order|step it on all|takes the optimizer|rank 1"
    with pytest.raises(TypeError if other is None else (ValueError, RuntimeError), match=expected):
        model.gather_full_optim_state_dict(other)
    optimizer.state[next(model.parameters())].pop("rows", None)
    assert (model.gather_full_optim_state_dict(optimizer) is None) == (dist.get_rank() != 0)


@on_ranks(2)
def test_optimizer_state_that_cannot_be_cut() -> None:
    model = FSDP(made(MLP))
    optimizer = AdamW(model.parameters())
    _closure(model, optimizer, inputs_for(MLP(), 1))()
    optimizer.step()
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    whole = full["param_groups"][0]
    full["param_groups"] = [{**whole, "params": whole["params"][:3]}, {**whole, "params": whole["params"][3:]}]
    with pytest.raises(ValueError, match="joined to 'flat_param_0'"):
        model.get_shard_from_optim_state_dict(full)
    full["param_groups"] = [{**whole, "params": list(range(20))}]
    with pytest.raises(ValueError, match="20 parameters"):
        model.get_shard_from_optim_state_dict(full)
    next(iter(optimizer.state.values()))["rows"] = torch.zeros(3)
    with pytest.raises(ValueError, match="elementwise"):
        model.gather_full_optim_state_dict(optimizer)


@on_ranks(2, flat=FLAT)
def test_summons_whole_parameters(flat: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrapped(made(MLP), flatten_parameters=flat)
    names = [name for name, _ in made(MLP).named_parameters()]
    before = model.state_dict()
    with model.summon_full_params():
        assert [name for name, _ in model.named_parameters()] == names
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
        for parameter, value in zip(model.parameters(), before.values(), strict=True):
            assert torch.equal(parameter, value)
            parameter.data.add_(rank + 1)  # another number on each rank: a rank keeps its own part
        with pytest.raises(ValueError, match="summon_full_params"):
            model(inputs_for(MLP(), 1))
        with pytest.raises(ValueError, match="SUMMON_FULL_PARAMS"):
            model.apply(lambda module: None)
        for value, old in zip(model.state_dict().values(), before.values(), strict=True):
            assert torch.equal(value, old + (rank + 1))
    assert model.training_state is TrainingState.IDLE
    after = model.state_dict()
    for name, value in after.items():
        added = (value - before[name]).round().flatten()
        assert set(added.tolist()) <= set(range(1, world_size + 1)), name
    with model.summon_full_params(volatile=True):
        next(iter(model.parameters())).data.zero_()
    assert model.state_dict().keys() == after.keys()
    with pytest.raises(ZeroDivisionError), model.summon_full_params():
        _ = 1 / 0
    loss_of(model, inputs_for(MLP(), 1)).backward()
    with model.summon_full_params(recurse=False):
        inner = model.module.layers[0]
        assert inner.training_state is TrainingState.IDLE
        with inner.summon_full_params():
            assert inner.module.weight.shape == (17, 9)


@on_ranks(2, flat=FLAT)
def test_applies_and_resets_whole_parameters(flat: bool) -> None:
    model = wrapped(made(MLP), flatten_parameters=flat, allow_reset_parameters=True)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.ndim == 2
            nn.init.constant_(module.weight, 0.25)

    assert model.apply(fill) is model
    for name, value in model.state_dict().items():
        assert not name.endswith("weight") or torch.equal(value, torch.full_like(value, 0.25))
    torch.manual_seed(7)
    model.module.layers[0].reset_parameters()
    torch.manual_seed(7)
    expected = nn.Linear(9, 17)
    assert torch.equal(model.state_dict()["layers.0.weight"], expected.weight)
    with pytest.raises(RuntimeError, match="allow_reset_parameters"):
        FSDP(nn.Linear(2, 2)).reset_parameters()


@on_ranks(2, flat=FLAT)
def test_state_inside_of_plain_modules(flat: bool) -> None:
    """Instances below a module that is not wrapped: its state dict is whole and clean too."""
    plain = made(MLP)
    model = made(MLP, seed=8)
    model.layers[1] = FSDP(model.layers[1], flatten_parameters=flat)
    missing, unexpected = model.load_state_dict(plain.state_dict())
    assert (missing, unexpected) == ([], [])
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert list(model.state_dict()) == list(plain.state_dict())
    bad = {**plain.state_dict(), "layers.1.weight": torch.zeros(3, 3), "layers.1.extra": torch.zeros(1)}
    del bad["layers.1.bias"]
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(bad)
    assert "layers.1.weight" in str(error.value)
    assert "layers.1.extra" in str(error.value)
    assert "_fsdp_wrapped_module" not in str(error.value)
    result = model.load_state_dict({"layers.0.bias": torch.zeros(17)}, strict=False)
    assert "layers.1.weight" in result.missing_keys
    assert torch.equal(model.state_dict()["layers.0.bias"], torch.zeros(17))
    assert torch.equal(model.state_dict()["layers.1.weight"], plain.state_dict()["layers.1.weight"])


@on_ranks(2, flat=FLAT)
def test_loading_leaves_the_given_dict_alone(flat: bool) -> None:
    model = wrapped(made(ConvNet), flatten_parameters=flat)
    state = made(ConvNet, seed=5).state_dict()
    names, values = list(state), [value.clone() for value in state.values()]
    model.load_state_dict(state)
    assert list(state) == names
    for value, old, loaded in zip(state.values(), values, model.state_dict().values(), strict=True):
        assert torch.equal(value, old)
        assert torch.equal(loaded, old)
    local = model.local_state_dict()
    names = list(local)
    model.load_local_state_dict(local)
    assert list(local) == names
    with pytest.raises(RuntimeError, match="flat_param_0" if flat else "weight"):
        model.load_local_state_dict({})
    with pytest.raises(ValueError, match="assign"):
        model.load_state_dict(state, assign=True)


@on_ranks(2, flat=FLAT)
def test_loads_where_torch_swaps_parameters(flat: bool) -> None:
    model = wrapped(made(ConvNet), flatten_parameters=flat)
    optimizer, state = SGD(model.parameters(), lr=0.1), made(ConvNet, seed=5).state_dict()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    loss_of(model, inputs_for(model.module, seed=1)).backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["head.weight"], state["head.weight"])


@on_ranks(2)
def test_state_dict_options() -> None:
    first = FSDP(made(MLP), state_dict_on_rank_0_only=True)
    assert len(first.state_dict()) == (6 if dist.get_rank() == 0 else 0)
    assert len(first.local_state_dict()) == 1  # each rank has shards of its own
    half = FSDP(made(MLP).half(), compute_dtype=torch.float16)
    assert {value.dtype for value in half.state_dict().values()} == {torch.float16}
    mixed = FSDP(made(ConvNet), mixed_precision=True, compute_dtype=torch.bfloat16)
    mixed(inputs_for(ConvNet(), 1).bfloat16())
    assert {b.dtype for b in mixed.buffers() if b.is_floating_point()} == {torch.bfloat16}
    assert {v.dtype for v in mixed.state_dict().values() if v.is_floating_point()} == {torch.float32}
    others = {"step": torch.ones(2, dtype=torch.bfloat16), "more.weight": torch.ones(1)}
    for model in (first, mixed):
        given: dict[str, Any] = OrderedDict(others)
        model.state_dict(destination=given)
        assert all(given.get(name) is value for name, value in others.items())  # nothing else of a caller's is touched
    state = FSDP(made(MLP)).state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    gc.collect()
    assert all(torch.equal(value, kept[name]) for name, value in state.items())  # memory of its own


@on_ranks(2, flat=FLAT)
def test_pickles(flat: bool) -> None:
    with pytest.raises(AttributeError, match="no attribute 'reset'"):
        FSDP.__new__(FSDP).reset()  # type: ignore[operator]
    model = wrapped(made(MLP), flatten_parameters=flat, process_group_reduce_scatter="reduce_scatter")
    inputs = inputs_for(MLP(), dist.get_rank())
    loss_of(model, inputs)  # hooks of a forward must not be in the way
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.state_dict is not None
    with pytest.raises(StateError, match="process_group"):
        loaded(inputs)
    for instance in get_fsdp_instances(loaded):
        instance.process_group = dist.group.WORLD
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    results = []
    for each in (model, loaded):
        optimizer = SGD(each.parameters(), lr=0.1)
        _closure(each, optimizer, inputs)()
        optimizer.step()
        results.append(each.state_dict())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    # Built without processes, then given some.
    dummy = FSDP(made(MLP), process_group=DummyProcessGroup(dist.get_rank(), 2), flatten_parameters=flat)
    dummy.process_group = dist.group.WORLD
    assert torch.equal(dummy.state_dict()["layers.0.weight"], made(MLP).layers[0].weight)
    with pytest.raises(ValueError, match="rank"):
        dummy.process_group = DummyProcessGroup(1 - dist.get_rank(), 2)


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"there is none: call torch.distributed.init_process_group first, or pass"):
        FSDP(nn.Linear(2, 2))


@pytest.mark.parametrize("given", ["x", 3, torch.ones(1)])
def test_a_wrong_group_to_reduce_over_is_named_before_anything_changes(given: Any) -> None:
    """At any number of ranks, and where nothing is reduced."""
    group = DummyProcessGroup(0, 1)
    for module in (nn.Linear(2, 2), nn.ReLU()):
        before = [name for name, _ in module.named_parameters()]
        with pytest.raises(TypeError, match="process_group_reduce_scatter must be a process group"):
            FSDP(module, process_group=group, process_group_reduce_scatter=given)
        assert [name for name, _ in module.named_parameters()] == before
        wrapper = FSDP(module, process_group=group)
        with pytest.raises(TypeError, match="process_group_reduce_scatter must be a process group"):
            wrapper.process_group_reduce_scatter = given


@pytest.mark.parametrize("given", ["False", torch.zeros(2), 1.5])
def test_a_flag_that_is_none_is_named(given: Any) -> None:
    """A string counts as true."""
    flags = [name for name, one in inspect.signature(FSDP).parameters.items() if isinstance(one.default, bool)]
    assert len(flags) == 13
    for flag in flags:
        with pytest.raises(TypeError, match=rf"FullyShardedDataParallel\({flag}=.*\): pass True or False, not "):
            FSDP(nn.Linear(2, 2), DummyProcessGroup(0, 1), **{flag: given})


@pytest.mark.parametrize("given", [True, 1, np.True_])
def test_a_flag_may_be_what_counts_as_true_and_nothing_else(given: Any) -> None:
    model = FSDP(nn.Linear(2, 2), DummyProcessGroup(0, 1), disable_reshard_on_root=given)
    assert model.disable_reshard_on_root
    for name, value in itertools.product(("move_params_to_cpu", "cpu_offload"), (given, 0)):
        offloaded = FSDP(nn.Linear(2, 2), DummyProcessGroup(0, 1), **{name: value})
        assert offloaded.move_params_to_cpu is offloaded.cpu_offload is bool(value)


def test_flat_parameter() -> None:
    first, second = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.tensor(7.0))
    flat = FlatParameter([first, second])
    assert flat.shape == (7,)
    views = list(flat.get_param_views())
    assert torch.equal(views[0], first)
    assert torch.equal(views[1], second)
    assert flat.metadata() == ([], [torch.Size([2, 3]), torch.Size([])], [6, 1])
    for other in (pickle.loads(pickle.dumps(flat)), copy.deepcopy(flat)):
        assert type(other) is FlatParameter
        assert torch.equal(other, flat)
        assert other.metadata() == flat.metadata()
    with pytest.raises(ValueError, match="7"):
        flat.get_param_views(torch.zeros(3))
    mixed = [first, second.half()]
    for bad, message in (
        ([], "at least one"),
        ([flat], "do not nest"),
        ([1], "number 0 is a int"),
        (first, "a list"),
        (mixed, r"one dtype can be joined, not \['torch.float16', 'torch.float32'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            FlatParameter(bad)


# -- Behaviour


@on_ranks(1, 2, 3, nested=(True, False))
def test_backward_for_given_parameters(nested: bool) -> None:
    """All of them; then those of one instance; then in two parts under `no_sync`."""
    rank, exact = dist.get_rank(), dist.get_world_size() <= 2
    usual, asked = (wrapped(made(MLP), nested) for _ in range(2))
    steppers = [OPTIMIZERS["adamw"](model.parameters()) for model in (usual, asked)]
    count = len(list(usual.parameters()))
    assert (count > 1) == nested
    for step, chosen in enumerate([range(count), range(count - 1, count), range(count)]):
        pairs = [list(model.parameters()) for model in (usual, asked)]
        if step == 2:
            with usual.no_sync(), asked.no_sync():
                loss_of(usual, inputs_for(usual.module, rank)).backward()
                loss_of(asked, inputs_for(asked.module, rank)).backward(inputs=pairs[1])
        losses = [loss_of(model, inputs_for(model.module, 10 * step + rank)) for model in (usual, asked)]
        losses[0].backward()
        losses[1].backward(inputs=[pairs[1][index] for index in chosen])
        for index, (expected, actual) in enumerate(zip(*pairs, strict=True)):
            if index not in chosen:
                assert actual.grad is None
                assert expected.grad is not None
                actual.grad = expected.grad.clone()
            assert_same(actual.grad, expected.grad, exact)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    assert_same([*asked.parameters()], [*usual.parameters()], exact)


@needs_fairscale
@on_ranks(2)
def test_backward_for_given_parameters_like_fairscale() -> None:
    rank = dist.get_rank()
    with fairscale_fsdp() as theirs:
        models = [FSDP(made(MLP)), theirs(made(MLP), bucket_cap_mb=0)]
        for listed_first in (True, False):
            for model in models:
                before = list(model.parameters())
                loss = loss_of(model, inputs_for(model.module, rank))
                loss.backward(inputs=before if listed_first else list(model.parameters()))
            for ours, other in zip(*(model.parameters() for model in models), strict=True):
                assert_same(ours.grad, other.grad[: ours.numel()].view_as(ours), exact=True)
                ours.grad = other.grad = None


@on_ranks(2)
def test_gradients_of_shards_by_torch_are_refused_by_name() -> None:
    model, x = FSDP(MLP()), torch.ones((), requires_grad=True)
    loss, (flat,) = loss_of(model, inputs_for(model.module, 0)), model.parameters()
    with pytest.raises(StateError, match=r"'flat_param_0' of unit .*: call backward"):
        torch.autograd.grad(loss, [flat])
    assert torch.autograd.grad(loss, [flat], allow_unused=True)[0] is None
    with pytest.raises(RuntimeError, match="not have been used in the graph"):  # and not that of a shard
        torch.autograd.grad(loss, [copy.deepcopy(flat)])
    if torch.__version__ >= "2.13":
        with pytest.raises(RuntimeError, match="index 1 appears to not have been used"):
            torch.autograd.grad(flat.sum(), [flat, x])


@on_ranks(1, 2)
def test_parameters_that_are_not_joined_are_plain_ones() -> None:
    model = FSDP(MLP(), flatten_parameters=False)
    for parameter in model.parameters():
        assert type(parameter) is type(copy.deepcopy(parameter)) is nn.Parameter
        assert torch.equal(nn.Parameter(parameter), parameter)


@on_ranks(1, 2, 3, flat=FLAT)
def test_accumulates(flat: bool) -> None:
    rank = dist.get_rank()
    expected, actual = DistributedDataParallel(made(MLP)), wrapped(made(MLP), flatten_parameters=flat)
    batches = [inputs_for(expected.module, 10 * step + rank) for step in range(3)]
    for model in (expected, actual):
        with pytest.raises(ZeroDivisionError), model.no_sync():
            _ = 1 / 0
        with model.no_sync():
            for inputs in batches[:2]:
                loss_of(model, inputs).backward()
        if model is actual and dist.get_world_size() > 1:
            # Sums wait unsharded; what stands for them is to be zeroed by.
            assert not any(parameter.grad.any() for parameter in model.parameters())
        loss_of(model, batches[2]).backward()
        loss_of(model, batches[0]).backward()  # reduced by itself, and added
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (expected, actual)]
    for optimizer in optimizers:
        optimizer.step()
    if dist.get_world_size() == 1:
        return  # DDP's gradients of one rank are summed in another order
    for name, value in actual.state_dict().items():
        torch.testing.assert_close(value, expected.module.state_dict()[name])


class Branches(nn.Module):
    """Uses one of its layers, and gives a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, which: int) -> Any:
        return Output(self.frozen((self.first, self.second)[which](x)), None)


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    nothing: None


@on_ranks(2, flat=FLAT, nested=(True, False))
def test_unused_frozen_and_dataclasses(flat: bool, nested: bool) -> None:
    rank = dist.get_rank()
    model = made(Branches)
    plain = made(Branches)
    if nested:
        for name in ("first", "second", "never", "frozen"):
            setattr(model, name, FSDP(getattr(model, name), flatten_parameters=flat))
    model = FSDP(model, flatten_parameters=flat)
    inputs = [inputs_for_branch(r) for r in range(dist.get_world_size())]
    if dist.get_world_size() == 2 and not nested:
        # Other parameters on each rank: no hang, and zeros where a rank has none.
        model(inputs[rank], rank % 2).value.square().mean().backward()
        losses = [plain(x, index % 2).value.square().mean() for index, x in enumerate(inputs)]
    else:
        model(inputs[rank], 0).value.square().mean().backward()
        losses = [plain(x, 0).value.square().mean() for x in inputs]
    (sum(losses) / len(losses)).backward()
    SGD(model.parameters(), lr=0.5).step()
    SGD(plain.parameters(), lr=0.5).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    # Frozen ones can be unfrozen, by what the optimizer sees.
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen
    for parameter in frozen:
        parameter.requires_grad_(True)
    plain.frozen.requires_grad_(True)
    model.zero_grad()
    plain.zero_grad()
    model(inputs[rank], 0).value.square().mean().backward()
    (sum(plain(x, 0).value.square().mean() for x in inputs) / len(inputs)).backward()
    SGD(model.parameters(), lr=0.5).step()
    SGD(plain.parameters(), lr=0.5).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def inputs_for_branch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


class Checkpointed(nn.Module):
    def __init__(self, wrap: bool, how: str):
        super().__init__()
        self.how = how
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
        if wrap:
            layers = [FSDP(checkpoint_wrapper(one) if how == "inside" else one) for one in layers]
        if wrap and how == "around":
            layers = [checkpoint_wrapper(one) for one in layers]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torchs = self.how in ("reentrant", "torch")
            x = checkpoint(layer, x, use_reentrant=self.how == "reentrant") if torchs else layer(x)
        return x


@on_ranks(2, how=("torch", "reentrant", "around", "inside"))
def test_activation_checkpointing(how: str) -> None:
    torch.manual_seed(3)
    plain = Checkpointed(False, "none")
    torch.manual_seed(3)
    model = FSDP(Checkpointed(True, how))
    inputs = torch.randn(4, 6, requires_grad=True)
    for step in range(2):
        for each in (plain, model):
            torch.manual_seed(step)  # dropout is the same on all ranks
            loss_of(each, inputs).backward()
            SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    values = {name.replace("_checkpoint_wrapped_module.", ""): v for name, v in model.state_dict().items()}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value)


@on_ranks(2, flat=FLAT)
def test_after_an_exception(flat: bool) -> None:
    expected, model = DistributedDataParallel(made(MLP)), wrapped(made(MLP), flatten_parameters=flat)
    inputs = inputs_for(MLP(), dist.get_rank())
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 3))
    assert model.training_state is TrainingState.IDLE
    for each in (expected, model):
        loss_of(each, inputs).backward()
        SGD(each.parameters(), lr=0.1).step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.module.state_dict()[name])


def train_both(expected: nn.Module, model: nn.Module) -> None:
    steppers = [SGD(each.parameters(), lr=0.2) for each in (expected, model)]
    for step in range(3):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for each, stepper in zip((expected, model), steppers, strict=True):
            _closure(each, stepper, inputs)()
            stepper.step()


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@on_ranks(1, 2, 3)
def test_shares_parameters_between_instances() -> None:
    expected = DistributedDataParallel(made(Sharing))
    model = made(Sharing)
    model.first = FSDP(model.first, flatten_parameters=False)
    model.middle = FSDP(model.middle)
    model.last = FSDP(model.last, flatten_parameters=False)
    weight = model.first.module.weight
    with pytest.raises(ValueError, match="False only"):
        model.middle.append_shared_param(weight)
    with pytest.raises(ValueError, match="not sharded by another"):
        model.last.append_shared_param(nn.Parameter(torch.zeros(2)))
    tied = nn.Linear(5, 5, bias=False)
    tied.weight = weight
    with pytest.raises(ValueError, match="no parameter of its own beside 'weight'"):
        FSDP(tied, flatten_parameters=False).append_shared_param(weight)
    model.last.append_shared_param(weight)
    model = FSDP(model)
    for make in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"\(Linear\) uses a parameter of another instance, so it cannot"):
            make(model)
    train_both(expected, model)
    values, truth = model.state_dict(), expected.module.state_dict()
    assert set(values) == set(truth)
    for name, value in truth.items():
        torch.testing.assert_close(values[name], value)
    with pytest.raises(ValueError, match="before the first forward"):
        model.module.last.append_shared_param(weight)
    whole = consolidated(model)
    for name, value in truth.items():
        torch.testing.assert_close(whole[name], value)
    model.load_state_dict(truth)
    untold = made(Sharing)
    untold.first = FSDP(untold.first, flatten_parameters=False)
    with pytest.raises(ValueError, match="append_shared_param"):
        FSDP(untold, flatten_parameters=False)(torch.zeros(1, 5))
    flattened = made(Sharing)
    flattened.first = FSDP(flattened.first)
    with pytest.raises(ValueError, match="tied"):
        FSDP(flattened)


class SharingBiases(Sharing):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = nn.Parameter(self.first.weight.detach().clone())
        self.last.bias = self.first.bias


@on_ranks(1, 2)
def test_shares_another_parameter_than_the_first() -> None:
    expected = DistributedDataParallel(made(SharingBiases))
    model = made(SharingBiases)
    model.first = FSDP(model.first, flatten_parameters=False)
    model.last = FSDP(model.last, flatten_parameters=False)
    model.last.append_shared_param(model.first.module.bias)
    model = FSDP(model)
    train_both(expected, model)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.module.state_dict()))


class Versioned(nn.Linear):
    """Remembers of which version what it loads is."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@on_ranks(2, flat=FLAT)
def test_modules_are_told_the_version_of_what_they_load(flat: bool) -> None:
    model = FSDP(
        nn.Sequential(Versioned(4, 4), FSDP(Versioned(4, 4), flatten_parameters=flat)), flatten_parameters=flat
    )
    for state in (model.state_dict(), nn.Sequential(Versioned(4, 4), Versioned(4, 4)).state_dict()):
        found = [module for module in model.modules() if isinstance(module, Versioned)]
        for module in found:
            module.loaded = None
        model.load_state_dict(state)
        assert [module.loaded for module in found] == [3, 3]


class Projected(nn.Module):
    """Computes with the weight of a module that it has not registered."""

    def __init__(self, other: nn.Module):
        super().__init__()
        self.scale, self.others = nn.Linear(5, 5), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x) @ self.others[0].weight.t()


@on_ranks(1, 2, 3)
def test_shares_a_parameter_that_is_registered_elsewhere_alone() -> None:
    def model_of() -> Any:
        torch.manual_seed(3)
        first = nn.Linear(5, 5)
        return nn.Sequential(first, nn.Tanh(), Projected(first))

    expected, model = DistributedDataParallel(model_of()), model_of()
    model[0] = FSDP(model[0], flatten_parameters=False)
    model[2] = FSDP(model[2], flatten_parameters=False)
    model[2].append_shared_param(model[0].module.weight)
    model = FSDP(model)
    train_both(expected, model)
    whole = consolidated(model)
    for state in (model.state_dict(), whole):
        torch.testing.assert_close(dict(state), dict(expected.module.state_dict()))


@on_ranks(2)
def test_consolidates_ties_of_every_instance() -> None:
    """Not only those of the last instance."""
    model = nn.Sequential(Sharing(), Sharing())
    model[0], model[1] = FSDP(model[0]), FSDP(model[1])
    model = FSDP(model)
    everything: list[Any] = [None, None]
    dist.all_gather_object(everything, (dict(model.local_state_dict()), model.local_metadata_dict()))
    weights, metadata = zip(*everything, strict=True)
    whole = FSDP.consolidate_shard_weights(list(weights), list(metadata))
    assert set(whole) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(whole[name], value)
    assert set(FSDP.consolidate_shard_weights(list(weights), list(metadata), strict=False)) == set(whole)
    short = {name: value[:-1] for name, value in weights[1].items()}
    with pytest.raises(ValueError, match=r"the shards of '.*flat_param_0' have \d+ elements together, not"):
        FSDP.consolidate_shard_weights([weights[0], short], list(metadata))
    with pytest.raises(KeyError, match="flat_param_0"):
        FSDP.consolidate_shard_weights([{}, {}], list(metadata))
    assert FSDP.consolidate_shard_weights([{}, {}], list(metadata), strict=False) == {}
    with pytest.raises(ValueError, match="every rank"):
        FSDP.consolidate_shard_weights([], [])


class Notes(SGD):
    """Has state of other forms than tensors, as older optimizers count their steps."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": 3, "norm": 0.5, "name": "x", "later": None, "factors": [1.0, 2.0]}
        return super().step(closure)


@on_ranks(1, 2, flat=FLAT)
def test_gathers_state_of_other_forms_than_tensors(flat: bool) -> None:
    model = wrapped(made(MLP), flatten_parameters=flat)
    optimizer, plain = Notes(model.parameters(), lr=0.1), made(MLP)
    expected = Notes(plain.parameters(), lr=0.1)
    optimizer.step()
    expected.step()
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    assert full == expected.state_dict()
    assert model.get_shard_from_optim_state_dict(full) == optimizer.state_dict()
    first = next(iter(model.parameters()))
    optimizer.state[first]["factors"] = [torch.zeros_like(first)]
    with pytest.raises(ValueError, match=r"'factors'.* with tensors of this rank's elements"):
        model.gather_full_optim_state_dict(optimizer)


@on_ranks(2, flat=FLAT)
def test_loads_inside_of_summon_without_the_other_ranks(flat: bool) -> None:
    model, rank = wrapped(made(MLP), flatten_parameters=flat), dist.get_rank()
    before = [parameter.clone() for parameter in model.parameters()]
    ones = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    with model.summon_full_params():
        if rank == 1:
            model.load_state_dict(ones)
    for parameter, old in zip(model.parameters(), before, strict=True):
        own = parameter[parameter != 0] if rank == 1 else parameter  # but for the padding
        assert own.eq(1).all() if rank == 1 else torch.equal(own, old)


@on_ranks(2, flat=FLAT)
def test_consolidates_experts_of_the_first_rank(flat: bool) -> None:
    """An instance over one rank has whole parameters on each."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    expert = FSDP(nn.Linear(5, 3), alone, flatten_parameters=flat, no_broadcast_optim_state=True)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.fill_(dist.get_rank())
    model = FSDP(nn.Sequential(nn.Linear(4, 5), expert), flatten_parameters=flat)
    whole, expected = consolidated(model), model.state_dict()
    assert set(whole) == set(expected)
    for name, value in whole.items():
        assert torch.equal(value, torch.zeros_like(value) if name.startswith("1.") else expected[name])


@on_ranks(4, flat=FLAT, first=([0, 1], [0, 2]))
def test_consolidates_instances_over_a_part_of_the_ranks(flat: bool, first: list[int]) -> None:
    """From the shards of the first rank's group, whichever ranks are in it."""
    second = [rank for rank in range(4) if rank not in first]
    groups = dist.new_group(first), dist.new_group(second)
    own = groups[0] if dist.get_rank() in first else groups[1]
    inner = FSDP(made(lambda: nn.Linear(5, 3)), own, flatten_parameters=flat)
    model = FSDP(nn.Sequential(nn.Linear(4, 5), inner), flatten_parameters=flat)
    torch.testing.assert_close(consolidated(model), dict(model.state_dict()), rtol=0, atol=0)


class Casts(nn.Module):
    """Remembers the dtypes of its inputs."""

    def __init__(self, inner: nn.Module | None = None):
        super().__init__()
        self.linear, self.inner, self.seen = nn.Linear(4, 4), inner, []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, y.dtype))
        out = self.linear(x.to(self.linear.weight.dtype))
        return out if self.inner is None else self.inner(out, y.float()).to(out.dtype)


@on_ranks(2)
def test_casts_inputs_at_the_root() -> None:
    half, single = torch.bfloat16, torch.float32
    x, y = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    low = {"mixed_precision": True, "compute_dtype": half}
    root = FSDP(Casts(FSDP(Casts(), **low)), **low)
    assert root(x, y).dtype == half
    assert root.module.seen == [(half, half)]
    assert root.module.inner.module.seen == [(half, single)]  # its own root has cast what it gets
    child = FSDP(Casts(FSDP(Casts(), **low)))
    assert child(x, y).dtype == single
    assert child.module.seen == [(single, single)]
    assert child.module.inner.module.seen == [(half, half)]
    wide = FSDP(Casts(), force_input_to_fp32=True)
    wide(x.half(), y.bfloat16())
    assert wide.module.seen == [(single, single)]
    root(x, y).sum().backward()
    assert x.grad is not None


@on_ranks(1)
def test_divides_gradients_on_one_rank() -> None:
    model = FSDP(nn.Linear(2, 1, bias=False), gradient_predivide_factor=4.0)
    for factor in (1.0, 1 / 8):
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(next(model.parameters()).grad, torch.full((2,), factor))  # type: ignore[arg-type]
        model.zero_grad()
        model.set_gradient_divide_factors(2.0, 4.0, recursive=True)


@on_ranks(2)
def test_divides_gradients() -> None:
    inputs = inputs_for(MLP(), dist.get_rank())
    plain = wrapped(made(MLP))
    assert (plain.gradient_predivide_factor, plain.gradient_postdivide_factor) == (2.0, 1.0)
    loss_of(plain, inputs).backward()
    before = FSDP(made(MLP), gradient_predivide_factor=0.5)
    assert before.gradient_postdivide_factor == 4.0
    loss_of(before, inputs).backward()
    torch.testing.assert_close(before.clip_grad_norm_(9.0), plain.clip_grad_norm_(9.0))
    twice = wrapped(made(MLP))
    twice.set_gradient_divide_factors(1.0, 1.0, recursive=True)
    loss_of(twice, inputs).backward()
    for doubled, single in zip(whole_gradients(twice), whole_gradients(plain), strict=True):
        assert torch.equal(doubled, 2 * single)
    own = wrapped(made(MLP))
    own.set_gradient_divide_factors(1.0, 1.0, recursive=False)
    loss_of(own, inputs).backward()
    assert [torch.equal(a, b) for a, b in zip(whole_gradients(own), whole_gradients(plain), strict=True)].count(
        False
    ) <= 1


@on_ranks(2, dtype=(torch.float16, torch.bfloat16))
def test_scaler_skips_together(dtype: torch.dtype) -> None:
    model = FSDP(made(MLP), mixed_precision=True, compute_dtype=dtype)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), ShardedGradScaler(init_scale=8.0)
    before = model.state_dict()
    inputs = inputs_for(MLP(), 1)
    if dist.get_rank() == 1:
        inputs = inputs * float("inf")
    scaler.scale(loss_of(model, inputs)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    scaler.scale(loss_of(model, inputs_for(MLP(), 1))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.state_dict()["layers.0.weight"], before["layers.0.weight"])


@on_ranks(2, flat=FLAT)
def test_converts_after_wrapping(flat: bool) -> None:
    model = wrapped(made(MLP), flatten_parameters=flat)
    loss_of(model, inputs_for(MLP(), 1)).backward()
    assert model.to(torch.bfloat16) is model
    assert {one.compute_dtype for one in get_fsdp_instances(model, skip_empty=True)} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    model.zero_grad()
    loss_of(model, inputs_for(MLP(), 1).bfloat16()).backward()
    model.float()
    expected = {name: value.bfloat16().float() for name, value in made(MLP).state_dict().items()}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    loss_of(model, inputs_for(MLP(), 1)).backward()


@on_ranks(2)
def test_wraps_batch_norm_by_itself() -> None:
    expected = DistributedDataParallel(made(ConvNet))
    model = auto_wrap_bn(made(ConvNet))
    norms = [m for m in model.modules() if isinstance(m, FSDP)]
    assert norms
    assert all(isinstance(m.module, nn.BatchNorm2d) and not m.flatten_parameters for m in norms)
    model = FSDP(model)
    for step in range(2):
        inputs = inputs_for(expected.module, 10 * step + dist.get_rank())
        for each in (expected, model):
            each.zero_grad()
            loss_of(each, inputs).backward()
            SGD(each.parameters(), lr=0.1).step()
    values = model.state_dict()
    for name, value in expected.module.state_dict().items():
        if dist.get_rank() == 0 or "running" not in name:  # DDP gives all ranks the first one's buffers
            torch.testing.assert_close(values[name], value)
    marked = auto_wrap_bn(made(ConvNet), wrap_it=False)
    with pytest.raises(ValueError, match="wrapper_config of another"):
        auto_wrap_bn(marked)
    alone = FSDP(auto_wrap_bn(made(ConvNet), single_rank_pg=True))
    assert {m.world_size for m in get_fsdp_instances(alone)} == {1, 2}
    loss_of(alone, inputs_for(ConvNet(), 1)).backward()
    assert torch.isfinite(alone.clip_grad_norm_(1.0))
    assert set(alone.state_dict()) == set(made(ConvNet).state_dict())
    # The groups that its norms were wrapped with are not in the way.
    torch.testing.assert_close(copy.deepcopy(alone).state_dict(), alone.state_dict(), rtol=0, atol=0)
    assert get_fsdp_instances(pickle.loads(pickle.dumps(alone)))


# -- Errors


@on_ranks(2)
def test_refuses_what_does_not_fit() -> None:
    def partly_sharded() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        shardwise.fully_shard(model[1])
        return model

    def with_parameter(value: torch.Tensor) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_parameter("odd", nn.Parameter(value, requires_grad=False))
        return model

    mesh = init_device_mesh("cpu", (2,))
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "fp32_reduce_scatter", lambda: FSDP(nn.Linear(2, 2), fp32_reduce_scatter=True)),
        (ValueError, "'weight' is torch.float16", lambda: FSDP(nn.Linear(2, 2).half())),
        (ValueError, "'weight' is torch.float16", lambda: FSDP(nn.Linear(2, 2).half(), mixed_precision=True)),
        (ValueError, "'weight' is torch.float32", lambda: FSDP(nn.Linear(2, 2), compute_dtype=torch.float16)),
        (ValueError, "meta", lambda: FSDP(nn.Linear(2, 2, device="meta"))),
        (ValueError, "buffer 'running_mean' .* meta", lambda: FSDP(nn.BatchNorm1d(2, affine=False, device="meta"))),
        (ValueError, "'odd' is torch.int32: only floating", lambda: FSDP(with_parameter(torch.ones(2).int()))),
        (ValueError, "'odd' is a DTensor", lambda: FSDP(with_parameter(distribute_tensor(torch.ones(2), mesh)))),
        (ValueError, "module '1' was given to fully_shard", lambda: FSDP(partly_sharded())),
        (ValueError, "module '' was given to fully_shard", lambda: FSDP(shardwise.fully_shard(nn.Linear(2, 2)))),
        (TypeError, "wraps a module", lambda: FSDP(3)),
        (TypeError, "process_group must", lambda: FSDP(nn.Linear(2, 2), process_group="world")),
        (TypeError, "process_group_reduce_scatter", lambda: FSDP(nn.Linear(2, 2), process_group_reduce_scatter="x")),
        (ValueError, "IDLE", lambda: FSDP(nn.Linear(2, 2)).assert_state(TrainingState.FORWARD)),
        (TypeError, "compute_dtype='float16'", lambda: FSDP(nn.Linear(2, 2), compute_dtype="float16")),
        (TypeError, "buffer_dtype=torch.int32", lambda: FSDP(nn.BatchNorm1d(2), buffer_dtype=torch.int32)),
        (TypeError, "buffer_dtype='half'", lambda: setattr(FSDP(nn.Linear(2, 2)), "buffer_dtype", "half")),
        *(
            (kind, f"^{name}={given!r}: pass a ", lambda name=name, given=given: FSDP(nn.Linear(2, 2), **{name: given}))
            for name, given, kind in (
                ("compute_dtype", "", TypeError),
                ("buffer_dtype", 0, TypeError),
                ("compute_device", "nope", ValueError),
                ("compute_device", 1.5, TypeError),
                ("compute_device", "", ValueError),
                ("state_dict_device", "nope", ValueError),
                ("state_dict_device", torch.float32, TypeError),
            )
        ),
        (TypeError, "move_grads_to_cpu='no'", lambda: FSDP(nn.Linear(2, 2), move_grads_to_cpu="no")),
        (TypeError, "names to tensors, not list", lambda: FSDP(nn.Linear(2, 2)).load_state_dict([])),
        (TypeError, "not NoneType: .*None", lambda: FSDP(nn.Linear(2, 2)).get_shard_from_optim_state_dict(None)),
        (ValueError, "has 'model'", lambda: FSDP(nn.Linear(2, 2)).get_shard_from_optim_state_dict({"model": {}})),
        (ValueError, "has nothing", lambda: FSDP(nn.Linear(2, 2)).get_shard_from_optim_state_dict({})),
        (ValueError, "gradient_predivide_factor=0", lambda: FSDP(nn.Linear(2, 2), gradient_predivide_factor=0)),
        (ValueError, "divide_factor=inf", lambda: FSDP(nn.Linear(2, 2), gradient_predivide_factor=float("inf"))),
        (
            ValueError,
            "gradient_postdivide_factor=0",
            lambda: FSDP(nn.Linear(2, 2)).set_gradient_divide_factors(1.0, 0.0, recursive=True),
        ),
        (
            TypeError,
            "gradient_postdivide_factor must be a number, not '2'",
            lambda: FSDP(nn.Linear(2, 2)).set_gradient_divide_factors(1.0, "2", recursive=True),
        ),
        (
            TypeError,
            "gradient_predivide_factor must be a number, not None",
            lambda: setattr(FSDP(nn.Linear(2, 2)), "gradient_predivide_factor", None),
        ),
        (TypeError, "process_group must", lambda: setattr(FSDP(nn.Linear(2, 2)), "process_group", 3)),
        (TypeError, "append_shared_param .* NoneType", lambda: FSDP(nn.Linear(2, 2)).append_shared_param(None)),
        (TypeError, "assert_state takes .* 'IDLE'", lambda: FSDP(nn.Linear(2, 2)).assert_state("IDLE")),
        (TypeError, "assert_state takes .*None", lambda: FSDP(nn.Linear(2, 2)).assert_state([None])),
    ]
    for kind, message, run in cases:
        with pytest.raises(kind, match=message):
            run()
    for states in (TrainingState.IDLE, [TrainingState.IDLE], (TrainingState.FORWARD, TrainingState.IDLE)):
        FSDP(nn.Linear(2, 2)).assert_state(states)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(nn.Linear(2, 2), bucket_cap_mb=3)
        FSDP(nn.Linear(2, 2))
    assert [str(w.message) for w in caught if "bucket_cap_mb" in str(w.message)] != []
    model = FSDP(made(MLP))
    with pytest.raises(StateError, match=r"'layers.0.weight'.*summon_full_params"):
        model.module.layers[0].weight + 1
    assert model.module.layers[0].weight.shape == (17, 9)
    assert model.module.layers[0].weight.dtype == torch.float32
    plain = made(MLP)
    optimizer = SGD(plain.parameters(), lr=0.1)
    kept = FSDP(plain)
    with pytest.raises(StateError, match="repoint"):
        optimizer.step()
    assert kept.module is plain
    assert model.layers[0] is model.module.layers[0]  # attributes are forwarded
    assert FSDP(nn.Sequential(nn.Linear(2, 2)))[0].in_features == 2
    with pytest.raises(AttributeError):
        _ = model.nothing_like_it
    assert "world_size=2" in repr(model)
    assert "compute_dtype" in repr(FSDP(nn.Linear(2, 2), verbose=True))


@on_ranks(2, reduce_group=("reduce_scatter", "default", "new"))
def test_reduces_over_another_group(reduce_group: str) -> None:
    group: Any = dist.new_group([0, 1]) if reduce_group == "new" else reduce_group
    model = wrapped(made(MLP), process_group_reduce_scatter=group)
    expected = wrapped(made(MLP))
    for each in (model, expected):
        loss_of(each, inputs_for(MLP(), dist.get_rank())).backward()
    for one, other in zip(whole_gradients(model), whole_gradients(expected), strict=True):
        assert torch.equal(one, other)


@on_ranks(3)
def test_reduces_over_new_groups_where_ranks_are_in_more_or_fewer() -> None:
    """torch counts the groups that a rank knows to name the next, so the last rank waited for one of another name."""
    pair = dist.new_group([0, 1])
    for group in (pair, None) if dist.get_rank() < 2 else (None,):
        model = FSDP(made(MLP), process_group=group, process_group_reduce_scatter="reduce_scatter")
        expected = FSDP(made(MLP), process_group=group)
        for each in (model, expected):
            loss_of(each, inputs_for(MLP(), dist.get_rank())).backward()
        for one, other in zip(whole_gradients(model), whole_gradients(expected), strict=True):
            torch.testing.assert_close(one, other)


@on_ranks(3)
def test_gradients_are_not_reduced_over_other_ranks() -> None:
    """Each rank would get gradients of elements that another one has."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [1, 2])]
    if (rank := dist.get_rank()) == 2:
        return
    with pytest.warns(
        UserWarning, match=r"process_group_reduce_scatter has ranks \[\d, 2\] and process_group \[0, 1\]"
    ):
        model = FSDP(made(MLP), process_group=pairs[0], process_group_reduce_scatter=pairs[1 + rank])
    expected = FSDP(made(MLP), process_group=pairs[0])
    for each in (model, expected):
        loss_of(each, inputs_for(MLP(), rank)).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@on_ranks(2)
def test_ranks_outside_of_a_group_are_told() -> None:
    """`new_group` gives them a number."""
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return
    for name in ("process_group", "process_group_reduce_scatter"):
        with pytest.raises(ValueError, match=f"^{name}: this process is not in the group"):
            FSDP(made(MLP), **{name: group})


@on_ranks(4)
def test_subgroups() -> None:
    """Two models on two ranks each; group ranks are not global ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[rank // 2]
    model = wrapped(made(MLP, seed=rank), process_group=own)
    assert (model.rank, model.world_size) == (rank % 2, 2)
    truth = made(MLP, seed=2 * (rank // 2))
    for name, value in truth.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    _closure(model, optimizer, inputs_for(MLP(), 1))()
    optimizer.step()
    assert (model.gather_full_optim_state_dict(optimizer) is None) == (rank % 2 != 0)
    norm = model.clip_grad_norm_(1.0)
    loss_of(truth, inputs_for(MLP(), 1)).backward()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(truth.parameters(), 1.0))


class Recurrent(nn.Module):
    """Its recurrent module keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(4, 6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x)[0])


class Listed(nn.Module):
    """Has parameters in containers, one of them without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 3))])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(()))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return x * self.named["scale"]


def trains_alike(model: Any, plain: nn.Module, *inputs: torch.Tensor) -> None:
    """All ranks have the same data, so plain training is the truth."""
    for _ in range(2):
        for each in (plain, model):
            optimizer = SGD(each.parameters(), lr=0.1)
            optimizer.zero_grad()
            each(*inputs).square().mean().backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), plain(*inputs))


@on_ranks(2, flat=FLAT, inside=["self_attn", "linear1", "norm2"])
def test_evaluates_layers_that_compute_with_the_parameters_of_others(flat: bool, inside: str) -> None:
    torch.manual_seed(1)
    plain = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    layer: Any = copy.deepcopy(plain)
    setattr(layer, inside, FSDP(getattr(layer, inside), flatten_parameters=flat))
    model, inputs = FSDP(layer, flatten_parameters=flat), torch.randn(2, 3, 4)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs), plain.eval()(inputs))
    pickle.loads(pickle.dumps(model))


@on_ranks(2, flat=FLAT)
def test_recurrent_modules_and_containers(flat: bool) -> None:
    torch.manual_seed(1)
    trains_alike(FSDP(made(Recurrent), flatten_parameters=flat), made(Recurrent), torch.randn(3, 2, 4))
    model = FSDP(made(Listed), flatten_parameters=flat)
    trains_alike(model, made(Listed), torch.randn(2, 3))
    optimizer = AdamW(model.parameters())
    loss_of(model, torch.randn(2, 3)).backward()
    optimizer.step()
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    part = model.get_shard_from_optim_state_dict(full)
    for number, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(part["state"][number], values, rtol=0, atol=0)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"cpu_offload": True},
    {"reshard_after_forward": False},
    {"disable_reshard_on_root": False},
    {"clear_autocast_cache": True},
    {"move_params_to_cpu": True, "move_grads_to_cpu": False},
)


@on_ranks(2, settings=SETTINGS)
def test_settings_change_no_number(settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(3, 9)
    model, plain = wrapped(made(MLP), **settings), made(MLP)
    trains_alike(model, plain, inputs)
    count = sum(1 for _ in model.parameters())
    with torch.no_grad():
        model(inputs)
    assert sum(1 for _ in model.parameters()) == count
    for each in (model, plain):  # written past autograd, between evaluations
        for parameter in each.parameters():
            parameter.data.mul_(1.5)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), plain(inputs))
    trains_alike(model, plain, inputs)


@on_ranks(2, flat=FLAT)
def test_state_between_forward_and_backward(flat: bool) -> None:
    model, plain = wrapped(made(MLP), flatten_parameters=flat), made(MLP)
    torch.manual_seed(1)
    inputs = torch.randn(3, 9)
    loss = loss_of(model, inputs)
    model.state_dict()
    model.local_state_dict()
    with model.summon_full_params():
        pass
    loss.backward()
    loss_of(plain, inputs).backward()
    for each in (model, plain):
        SGD(each.parameters(), lr=0.1).step()
        each.zero_grad()
    copied = copy.deepcopy(model)
    trains_alike(copied, plain, inputs)
    assert not torch.equal(model.state_dict()["layers.0.weight"], copied.state_dict()["layers.0.weight"])


@on_ranks(2, flat=FLAT)
def test_one_rank_uses_its_shards_during_a_step(flat: bool) -> None:
    """Whole parameters stay where they are, so the other rank is not asked for them again."""
    model, plain = wrapped(made(MLP), flatten_parameters=flat), made(MLP)
    shards = {name: value.clone() for name, value in model.local_state_dict().items()}
    torch.manual_seed(1)
    inputs = torch.randn(3, 9)
    found: list[bool] = []

    def use(*_: Any) -> None:
        for one in (model, copy.deepcopy(model)):
            again = one.local_state_dict()
            found.append(list(again) == list(shards) and all(torch.equal(again[name], shards[name]) for name in shards))

    def load(*_: Any) -> None:
        with pytest.raises(ValueError, match=r"MLP\).* states .*IDLE.* current state is .*(FORWARD|BACKWARD)"):
            model.load_local_state_dict(shards)

    layers = [layer.module for layer in model.module.layers] if dist.get_rank() == 0 else []
    handles = [layer.register_forward_hook(hook) for layer in layers for hook in (use, load)]
    handles += [layer.register_full_backward_hook(hook) for layer in layers for hook in (use, load)]
    loss = loss_of(model, inputs)
    if layers:
        use()
    loss.backward()
    for handle in handles:
        handle.remove()
    assert found == [True] * (len(handles) + 2 if layers else 0)
    loss_of(plain, inputs).backward()
    for each in (model, plain):
        SGD(each.parameters(), lr=0.1).step()
    trains_alike(model, plain, inputs)


@on_ranks(2, 3)
def test_experts_of_one_rank() -> None:
    """An instance over a group of its own: other parameters on each rank, which count in the norm."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([index]) for index in range(size)]
    torch.manual_seed(rank)
    expert = FSDP(nn.Linear(4, 4), process_group=alone[rank], no_broadcast_optim_state=True)
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), expert))
    optimizer = AdamW(model.parameters())
    loss_of(model, torch.randn(3, 4)).backward()
    own = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
    dist.all_reduce(own)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), own.sqrt())
    largest = torch.stack([p.grad.abs().max() for p in model.parameters()]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    torch.testing.assert_close(model.clip_grad_norm_(1e9, float("inf")), largest)
    optimizer.step()
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


@needs_fairscale
@on_ranks(2)
def test_loads_fairscales_shards_of_one_rank() -> None:
    """They have the shapes of the parameters where those are not joined."""
    rank = dist.get_rank()
    alone = [dist.new_group([index]) for index in range(2)][rank]
    torch.manual_seed(rank)
    options: dict[str, Any] = {"process_group": alone, "flatten_parameters": False}
    with fairscale_fsdp() as theirs:
        saved = theirs(nn.Linear(4, 3), process_group_reduce_scatter=alone, bucket_cap_mb=0, **options)
        state = saved.local_state_dict()
    assert state["weight"].shape == (3, 4)
    model = FSDP(nn.Linear(4, 3), **options)
    model.load_local_state_dict(state)
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)


@on_ranks(1, 2)
def test_copying_a_joined_parameter() -> None:
    model = FSDP(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    copied = copy.deepcopy(model.module[0].weight)
    assert copied.shape == (7, 5)
    assert copied.dtype == torch.float32
    with pytest.raises(StateError, match="weight"):
        copied + 1


@on_ranks(1)
def test_consolidating_needs_metadata_of_every_rank() -> None:
    model = FSDP(nn.Linear(3, 2))
    weights, metadata = model.local_state_dict(), model.local_metadata_dict()
    with pytest.raises(ValueError, match="every rank, and got 2 and 1 of them"):
        FSDP.consolidate_shard_weights([weights, weights], [metadata])
    with pytest.raises(ValueError, match="every rank, and got 1 and 2 of them"):
        FSDP.consolidate_shard_weights([weights], [metadata, metadata])
