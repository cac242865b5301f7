"""Micro-batches: what is reduced when, and that it comes to what one large batch gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwise
from shardwise.core import options

from ..models import MLP, Stack, Transformer, inputs_for, wrap
from .harness import on_ranks
from .test_autograd import Layer, NormAndHead, PartlyUsedModel, counted, stack, wrap_like_the_seed
from .truth import (
    Iteration,
    assert_records,
    batch,
    check,
    gradients_of,
    make_optimizer,
    state_of,
    train_sharded,
    whole,
)

WIDTH = 9
MICRO_BATCHES = 3
PRESETS = ["ddp", "zero1", "zero2", "zero3"]

Control = Callable[[nn.Module, int], None]
"""Told of each micro-batch before its forward."""


def is_last(part: int) -> bool:
    """Whether a micro-batch is the step's last."""
    return part == MICRO_BATCHES - 1


def in_micro_batches(control: Control) -> Iteration:
    """An iteration that splits its batch; a plain model is not controlled."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(MICRO_BATCHES):
            if any(isinstance(module, TorchFSDPModule) for module in model.modules()):
                control(model, part)
            loss = model(batch(10 * step + part, rank, 4, WIDTH)).float().square().mean() / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        return total

    return run


def make() -> Stack:
    return stack(Layer(), Layer(), Layer())


def by_sync(model: Any, part: int) -> None:
    model.set_requires_gradient_sync(is_last(part))


def by_last_backward(model: Any, part: int) -> None:
    model.set_is_last_backward(is_last(part))


def by_both(model: Any, part: int) -> None:
    by_sync(model, part)
    by_last_backward(model, part)


def keeping_parameters(model: Any, part: int) -> None:
    """Nothing is resharded between micro-batches."""
    by_both(model, part)
    model.set_reshard_after_backward(is_last(part))


def always_reducing(model: Any, part: int) -> None:
    pass


def one_unit_apart(model: Any, part: int) -> None:
    """A unit inside reduces always, the others at the end."""
    by_sync(model, part)
    model.layers[1].set_requires_gradient_sync(True, recurse=False)


def without_recursion(model: Any, part: int) -> None:
    """The root alone waits."""
    model.set_requires_gradient_sync(is_last(part), recurse=False)


CONTROLS: dict[str, Control] = {
    control.__name__: control
    for control in (
        by_sync,
        by_last_backward,
        by_both,
        keeping_parameters,
        always_reducing,
        one_unit_apart,
        without_recursion,
    )
}


@on_ranks(1, 2, 3, control=list(CONTROLS), preset=PRESETS)
def test_micro_batches_of_each_preset(control: str, preset: str) -> None:
    check(make, in_micro_batches(CONTROLS[control]), against_torch=False, placements=preset)


@on_ranks(2, control=list(CONTROLS), reshard=[True, False])
def test_micro_batches_like_fsdp2(control: str, reshard: bool) -> None:
    check(make, in_micro_batches(CONTROLS[control]), reshard_after_forward=reshard)


@on_ranks(
    2,
    control=["by_sync", "keeping_parameters", "by_last_backward"],
    param_dtype=[None, torch.bfloat16],
    reduce_dtype=[None, torch.float32, torch.bfloat16],
)
def test_accumulates_in_the_dtype_of_the_reduction(control: str, param_dtype: Any, reduce_dtype: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    records = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        torch.manual_seed(1)
        model = wrap(make(), verb, mp_policy=policy)
        records.append(train_sharded(model, in_micro_batches(CONTROLS[control]), 3))
    assert_records(*records, "FSDP2", bitwise=True)


@on_ranks(1, 2, preset=PRESETS)
def test_a_policy_without_reduce_dtype_means_what_the_installed_torch_says(preset: str) -> None:
    """The dtype of the shards from torch 2.15 on, that of the gradients before."""
    records = []
    with pytest.MonkeyPatch.context() as patch:
        for of_shards, reduce_dtype in ((True, None), (True, torch.float32), (False, None), (False, torch.bfloat16)):
            patch.setattr(options, "REDUCES_IN_DTYPE_OF_SHARDS", of_shards)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            torch.manual_seed(1)
            model = wrap(make(), shardwise.fully_shard, placements=preset, mp_policy=policy)
            records.append(train_sharded(model, in_micro_batches(by_sync), 3))
    in_shards, in_float32, in_gradients, in_bfloat16 = records
    assert_records(in_shards, in_float32, "float32", bitwise=True)
    assert_records(in_gradients, in_bfloat16, "bfloat16", bitwise=True)
    with pytest.raises(AssertionError):
        assert_records(in_shards, in_gradients, "the other", bitwise=True)


@on_ranks(2, preset=PRESETS)
def test_nothing_is_reduced_without_synchronization(preset: str) -> None:
    model: Any = wrap(make(), shardwise.fully_shard, placements=preset)
    units = 1 + len(model.layers)
    for part in range(MICRO_BATCHES):
        by_sync(model, part)
        with counted() as seen:
            model(batch(part, dist.get_rank(), 4, WIDTH)).sum().backward()
        reductions = len(seen["reduce_scatter"]) + len(seen["all_reduce"])
        assert reductions == (units if is_last(part) else 0), (part, seen)
        for parameter in model.parameters():
            assert (parameter.grad is not None) == is_last(part)


@on_ranks(2)
def test_kept_parameters_are_not_gathered_again() -> None:
    model: Any = wrap(make(), shardwise.fully_shard, reshard_after_forward=False)
    gathers = []
    for step in range(2):
        for part in range(MICRO_BATCHES):
            keeping_parameters(model, part)
            with counted() as seen:
                model(batch(10 * step + part, dist.get_rank(), 4, WIDTH)).sum().backward()
            gathers.append(len(seen["all_gather"]))
    assert gathers == [4, 0, 0] * 2


@on_ranks(2, preset=PRESETS)
def test_backward_of_some_micro_batches_leaves_parameters_out(preset: str) -> None:
    """What the last micro-batch does not use was used before, on one rank or on all."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(MICRO_BATCHES):
            if isinstance(model, TorchFSDPModule):
                by_both(model, part)
            use = part == 0 and (step != 1 or rank == 0)
            loss = model(batch(10 * step + part, rank, 4, WIDTH), use=use).square().mean()
            loss.backward()
            total += loss.detach()
        return total

    check(PartlyUsedModel, run, against_torch=False, placements=preset)


@on_ranks(2, preset=PRESETS)
def test_gradients_add_up_over_reductions(preset: str) -> None:
    """No ``zero_grad`` between two whole iterations."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        losses = []
        for part in range(2):
            losses.append(model(batch(10 * step + part, rank, 4, WIDTH)).square().mean())
            losses[-1].backward()
        return torch.stack(losses).sum()

    check(make, run, against_torch=False, placements=preset)
    if preset == "zero3":
        check(make, run)


@on_ranks(2, 3, preset=PRESETS)
def test_frozen_between_micro_batches(preset: str) -> None:
    """What it got before was left out of the step, and added to the one after it was thawed, in silence."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(MICRO_BATCHES):
            if isinstance(model, TorchFSDPModule):
                by_both(model, part)
            model.get_parameter("layers.1.sometimes.linear.weight").requires_grad_(part == 0 or step == 2)
            use = part == 0 and (step != 1 or rank == 0)
            loss = model(batch(10 * step + part, rank, 4, WIDTH), use=use).square().mean()
            loss.backward()
            total += loss.detach()
        return total

    check(PartlyUsedModel, run, against_torch=False, placements=preset)


@on_ranks(2)
def test_synchronization_only_for_the_forwards_of_one_backward() -> None:
    """Several forwards, one backward, without and with synchronization."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(2):
            if isinstance(model, TorchFSDPModule):
                model.set_requires_gradient_sync(part == 1)
            losses = [model(batch(20 * step + 2 * part + i, rank, 4, WIDTH)).square().mean() for i in range(2)]
            torch.stack(losses).sum().backward()
            total += torch.stack(losses).sum().detach()
        return total

    check(make, run, bitwise=False)


@on_ranks(2)
def test_step_that_never_synchronizes_keeps_gradients_for_the_next() -> None:
    """The reduction that comes at last has all of them, whatever the optimizer did meanwhile."""
    torch.manual_seed(1)
    model: Any = wrap(make(), shardwise.fully_shard)
    torch.manual_seed(1)
    plain = make()
    optimizer = make_optimizer(model)
    for part in range(MICRO_BATCHES):
        by_sync(model, part)
        model(batch(part, dist.get_rank(), 4, WIDTH)).square().mean().backward()
        if not is_last(part):
            optimizer.step()
            optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (plain(batch(part, rank, 4, WIDTH)).square().mean() / dist.get_world_size()).backward()
    expected = gradients_of(plain)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name])


def replace_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()


def load_by_assignment(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def convert(model: Any) -> None:
    model.double().float()


@on_ranks(2, how=[replace_data, load_by_assignment, convert], preset=["zero1", "zero3"])
def test_gradients_outlive_the_parameters_they_wait_for(how: Callable[[Any], None], preset: str) -> None:
    """Also of a unit that takes no part in the last backward."""
    torch.manual_seed(1)
    plain = NormAndHead()
    model: Any = copy.deepcopy(plain)
    shardwise.fully_shard(model.head, placements=preset)
    shardwise.fully_shard(model, placements=preset)
    by_both(model, 0)
    model(batch(0, dist.get_rank(), 4, WIDTH)).square().mean().backward()
    how(model)
    by_both(model, MICRO_BATCHES - 1)
    model(batch(1, dist.get_rank(), 4, WIDTH), skip_head=True).square().mean().backward()
    for rank in range(dist.get_world_size()):
        for part in range(2):
            loss = plain(batch(part, rank, 4, WIDTH), skip_head=part == 1).square().mean()
            (loss / dist.get_world_size()).backward()
    for (name, ours), truth in zip(gradients_of(model).items(), gradients_of(plain).values(), strict=True):
        torch.testing.assert_close(ours, truth, msg=name)


# -- Two mesh axes


def without_all_reduce(model: Any, part: int) -> None:
    """Every micro-batch reduces inside, the last one also across."""
    model.set_requires_all_reduce(is_last(part))


def mixed(model: Any, part: int) -> None:
    """One after the other: nothing, inside only, all."""
    model.set_requires_gradient_sync(part > 0)
    model.set_requires_all_reduce(is_last(part))


def mixed_reversed(model: Any, part: int) -> None:
    """Inside only, nothing, all: what waits for its all-reduce came before what waits for any."""
    model.set_requires_gradient_sync(part != 1)
    model.set_requires_all_reduce(is_last(part))


def keeping_both(model: Any, part: int) -> None:
    without_all_reduce(model, part)
    model.set_is_last_backward(is_last(part))
    model.set_reshard_after_backward(is_last(part))


MESH_CONTROLS: dict[str, Control] = {
    control.__name__: control
    for control in (
        without_all_reduce,
        mixed,
        mixed_reversed,
        keeping_both,
        by_both,
        keeping_parameters,
        always_reducing,
    )
}


@on_ranks(4, control=list(MESH_CONTROLS), reshard=[True, False])
def test_two_axes_like_fsdp2(control: str, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = check(make, in_micro_batches(MESH_CONTROLS[control]), mesh=mesh, reshard_after_forward=reshard)
    weight = model.layers[0].linear.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Shard(0))


@on_ranks(4, control=["without_all_reduce", "mixed", "by_both"], shape=[(4, 1), (1, 4)])
def test_degenerate_axes(control: str, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    check(make, in_micro_batches(MESH_CONTROLS[control]), mesh=mesh, against_torch=False)


@on_ranks(1, 2, control=["without_all_reduce", "mixed", "mixed_reversed"], one=["replicate", "shard"])
def test_sums_over_one_rank_are_kept_as_over_more(control: str, one: str) -> None:
    """What parameters have as gradients after each micro-batch, where a mesh axis, or both, are of one rank."""
    size = dist.get_world_size()
    shape = (1, size) if one == "replicate" else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    found: list[list[dict[str, torch.Tensor | None]]] = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        torch.manual_seed(1)
        model = wrap(make(), verb, mesh=mesh)
        found.append([])
        for part in [*range(MICRO_BATCHES)] * 2:  # without zero_grad in between
            MESH_CONTROLS[control](model, part)
            model(batch(part, dist.get_rank(), 4, WIDTH)).square().mean().backward()
            found[-1].append({name: whole_gradient(parameter) for name, parameter in model.named_parameters()})
    for part, (ours, truth) in enumerate(zip(*found, strict=True)):
        for name, gradient in truth.items():
            if gradient is None:
                assert ours[name] is None, (part, name)
            else:
                torch.testing.assert_close(ours[name], gradient, rtol=0, atol=0, msg=f"{name} after {part}")


def whole_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@on_ranks(4, control=["mixed", "by_both", "always_reducing"], preset=[*PRESETS, "hsdp"])
def test_presets_on_two_axes(control: str, preset: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check(make, in_micro_batches(MESH_CONTROLS[control]), mesh=mesh, against_torch=False, placements=preset)


@on_ranks(4, control=["without_all_reduce", "mixed", "mixed_reversed"], reduce_dtype=[torch.float32, torch.bfloat16])
def test_two_axes_in_mixed_precision(control: str, reduce_dtype: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    records = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        torch.manual_seed(1)
        model = wrap(make(), verb, mesh=mesh, mp_policy=policy)
        records.append(train_sharded(model, in_micro_batches(MESH_CONTROLS[control]), 2))
    # Two terms on each axis: the order of a sum of two does not matter.
    assert_records(*records, "FSDP2", bitwise=True)


@on_ranks(4)
def test_partial_sums_cost_no_all_reduce() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model: Any = wrap(make(), shardwise.fully_shard, mesh=mesh)
    for part in range(MICRO_BATCHES):
        without_all_reduce(model, part)
        with counted() as seen:
            model(batch(part, dist.get_rank(), 4, WIDTH)).sum().backward()
        assert len(seen["reduce_scatter"]) == 4
        assert len(seen["all_reduce"]) == (4 if is_last(part) else 0)


@on_ranks(4)
def test_int_reshard_on_two_axes_while_accumulating() -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    check(make, in_micro_batches(by_both), mesh=mesh, reshard_after_forward=2, against_torch=False, bitwise=False)


@on_ranks(4)
def test_parameters_unused_in_partial_sums() -> None:
    """A parameter that one replica used in one micro-batch only."""
    mesh = init_device_mesh("cpu", (2, 2))

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(2):
            if isinstance(model, TorchFSDPModule):
                model.set_requires_all_reduce(part == 1)
            use = part == 0 and rank == step
            loss = model(batch(10 * step + part, rank, 4, WIDTH), use=use).square().mean()
            loss.backward()
            total += loss.detach()
        return total

    check(PartlyUsedModel, run, mesh=mesh, against_torch=False)


@on_ranks(4)
def test_units_unused_in_the_last_micro_batch_complete_their_partial_sums() -> None:
    mesh = init_device_mesh("cpu", (2, 2))

    def run(model: Any, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(2):
            if isinstance(model, TorchFSDPModule):
                model.set_requires_all_reduce(part == 1)
            loss = model(batch(10 * step + part, rank, 4, WIDTH), skip_head=part == 1).square().mean()
            loss.backward()
            total += loss.detach()
        return total

    def wrapping(model: Any, verb: Any) -> None:
        verb(model.head, mesh=mesh)
        verb(model, mesh=mesh)

    check(NormAndHead, run, wrapping=wrapping, against_torch=False)


# -- Arithmetic of the reduction


def _check_divide_factor(dtype: Any, force_sum: bool) -> None:
    for factor in (1.0, 3.0, 8.0):
        records = []
        for verb in (shardwise.fully_shard, torch_fully_shard):
            torch.manual_seed(1)
            model: Any = wrap(make(), verb, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            for unit in (*model.layers, model):
                unit.set_gradient_divide_factor(factor)
                # FSDP2 needs it on gloo, which has no scaled sum.
                unit.set_force_sum_reduction_for_comms(force_sum or verb is torch_fully_shard)
            records.append(train_sharded(model, in_micro_batches(by_sync), 2))
        assert_records(*records, "FSDP2", bitwise=dist.get_world_size() == 2)


@on_ranks(2, dtype=[None, torch.bfloat16, torch.float16], force_sum=[True, False])
def test_divide_factor(dtype: Any, force_sum: bool) -> None:
    _check_divide_factor(dtype, force_sum)


@on_ranks(4, force_sum=[True, False])
def test_divide_factor_of_more_ranks(force_sum: bool) -> None:
    """In float32: in 16 bits the order of sums decides over more than rounding."""
    _check_divide_factor(None, force_sum)


@on_ranks(2)
def test_all_reduce_hook_sees_reduced_gradients() -> None:
    """A hook that scales what was reduced."""
    records = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        torch.manual_seed(1)
        model: Any = wrap(make(), verb)
        for unit in (*model.layers, model):
            unit.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
        records.append(train_sharded(model, in_micro_batches(by_sync), 2))
    assert_records(*records, "FSDP2", bitwise=True)


# -- Seed 001's way to say it


@on_ranks(2)
def test_attributes_of_the_seed() -> None:
    """``reduce_grads`` and ``reshard_after_backward`` of units without a common root."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(MICRO_BATCHES):
            for module in model.modules():
                if isinstance(module, shardwise.FSDPModule):
                    module.reduce_grads = is_last(part)
                    module.reshard_after_backward = is_last(part)
                    module.set_is_last_backward(is_last(part))
                    assert module.reduce_grads == module.reshard_after_backward == is_last(part)
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
            loss = model(torch.randint(0, 29, (2, 8), generator=generator)).square().mean()
            loss.backward()
            total += loss.detach()
        return total

    check(lambda: Transformer(layers=2), run, wrapping=wrap_like_the_seed, against_torch=False)


@on_ranks(3)
def test_uneven_shards_add_up() -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(MICRO_BATCHES):
            if isinstance(model, TorchFSDPModule):
                by_both(model, part)
            loss = model(batch(10 * step + part, rank, 4, 7)).square().mean()
            loss.backward()
            total += loss.detach()
        return total

    model = check(lambda: MLP((7, 2, 5, 1)), run)
    assert all(value.isfinite().all() for value in state_of(model).values())


@on_ranks(2, preset=PRESETS, set_to_none=[True, False])
def test_zeroing_gradients_between_forward_and_backward(preset: str, set_to_none: bool) -> None:
    """Where unsharded parameters are registered (the root's, or all): the sharded ones' gradients go too."""
    plain, model = Transformer(), Transformer()
    model.load_state_dict(plain.state_dict())
    wrap(model, shardwise.fully_shard, placements=preset)
    for step in range(3):
        x = inputs_for(plain, step)
        for each in (plain, model):
            loss = each(x).square().mean()
            each.zero_grad(set_to_none)
            loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2, what=["unreduced", "not_last", "partial"], set_to_none=[True, False])
def test_zeroing_what_waits_for_its_reduction(what: str, set_to_none: bool) -> None:
    """Gradients that no parameter shows yet are dropped like those that it shows."""
    plain, model = Transformer(), Transformer()
    model.load_state_dict(plain.state_dict())
    shape, names = ((2, 1), ("replicate", "shard")) if what == "partial" else ((2,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    sharded: Any = wrap(model, shardwise.fully_shard, mesh=mesh, placements="zero1" if what == "not_last" else None)
    by = {"unreduced": "requires_gradient_sync", "not_last": "is_last_backward", "partial": "requires_all_reduce"}
    reduce = getattr(sharded, f"set_{by[what]}")
    for step in range(3):
        reduce(False)
        sharded(inputs_for(model, 9)).square().mean().backward()
        sharded.zero_grad(set_to_none)
        reduce(True)
        for each in (plain, model):
            each.zero_grad(set_to_none)
            each(inputs_for(model, step)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


@on_ranks(2, 3)
def test_backward_adds_to_gradients_that_are_cut_otherwise() -> None:
    """As many rows as ranks, with which parts of other shapes could be added too."""
    size = dist.get_world_size()
    plain = nn.Linear(size, size, bias=False)
    model: Any = copy.deepcopy(plain)
    shardwise.fully_shard(model)
    mesh, gradient = model.weight.device_mesh, torch.randn(size, size)
    x = torch.ones(2, size)
    plain(x).sum().backward()
    expected = gradient + plain.weight.grad
    partial = DTensor.from_local(gradient / size, mesh, [Partial()], run_check=False)
    cut = [distribute_tensor(gradient, mesh, [one]) for one in (Replicate(), Shard(1), Shard(0))]
    for assigned in (partial, *cut):
        model.weight.grad = assigned
        model(x).sum().backward()
        assert model.weight.grad.placements == model.weight.placements
        torch.testing.assert_close(whole(model.weight.grad), expected)
    model.weight.grad = gradient
    with pytest.raises(ValueError, match="the gradient of parameter 'weight' is a plain tensor"):
        model(x).sum().backward()


@on_ranks(2)
def test_backward_has_the_kept_parameters_of_its_forward() -> None:
    """What writes to the shards in between counts from the next forward on, as in FSDP2."""
    found = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        torch.manual_seed(1)
        model = MLP((WIDTH, 6, 7, 2))
        verb(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
        parameters = list(model.parameters())
        for step in range(2):
            loss = model(batch(step, dist.get_rank(), 4, WIDTH)).square().mean()
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(0.5)
            loss.backward()
        found.append([whole(parameter.grad) for parameter in parameters])
    assert all(map(torch.equal, *found))
