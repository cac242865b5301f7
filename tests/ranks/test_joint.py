"""Small units are gathered and reduced several at a time, with the same results."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.core import batch as batches
from shardwise.core.context import FSDPCommContext
from shardwise.core.hooks import Unit
from shardwise.core.joint import JointGather
from shardwise.core.pending import PendingReductions
from shardwise.core.root import unit_of, units_of

from ..extensions import SentInBfloat16, extend
from ..interruptions import interrupted
from ..models import Stack, wrap
from .harness import RankError, assert_others_name, on_ranks, ranks
from .test_autograd import WIDTH, Layer
from .truth import assert_tensors, batch, check, gradients_of, make_optimizer, state_of, whole_each

LAYERS = batches.MANY + 2
SEVERAL = 2048
"""Bytes of several of the layers, but not of all."""
KEPT = ["ddp", "zero1", "zero2"]
ALL = [*KEPT, "zero3"]
SHARDED = ALL[1:]


def stack(layers: int = LAYERS) -> Stack:
    torch.manual_seed(1)
    return Stack([Layer() for _ in range(layers)], WIDTH)


def sharded(preset: str, mesh: Any = None, layers: int = LAYERS, **options: Any) -> Any:
    return wrap(stack(layers), shardwise.fully_shard, placements=preset, mesh=mesh, **options)


@contextlib.contextmanager
def joining(nbytes: int) -> Iterator[None]:
    """At most this many bytes at a time; 0: each unit by itself."""
    with contextlib.ExitStack() as changed:
        if not nbytes:
            changed.enter_context(mock.patch("shardwise.core.batch.MANY", LAYERS + 2))
        for room in ("batch", "pending", "context"):
            changed.enter_context(mock.patch(f"shardwise.core.{room}.JOINT_BYTES", nbytes or 1))
        yield


def train(
    model: Any, steps: int = 3, micro_batches: int = 1, optimizer: Any = None, stop_after: Any = lambda step: None
) -> dict[str, torch.Tensor | None]:
    """Losses, gradients and parameters of all steps."""
    optimizer = optimizer or make_optimizer(model)
    found: dict[str, torch.Tensor | None] = {}
    for step in range(steps):
        for part in range(micro_batches):
            model.set_is_last_backward(part == micro_batches - 1)
            loss = model(batch(10 * step + part, dist.get_rank(), 4, WIDTH), stop_after(step)).float().square().mean()
            loss.backward()
            found[f"loss {step}.{part}"] = loss.detach()
        found |= {f"gradient {step} of {name}": value.grad for name, value in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found |= dict(model.named_parameters())
    return found | whole_each({name: value for name, value in found.items() if value is not None})


def assert_same(
    ours: dict[str, torch.Tensor | None], truth: dict[str, torch.Tensor | None], preset: str = "zero1"
) -> None:
    """Bit for bit, but for gloo's all-reduce, whose order of additions depends on where in a message a number is."""
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        assert_tensors(name, value, truth[name], bitwise=preset != "ddp" or dist.get_world_size() <= 2)


@contextlib.contextmanager
def counting() -> Iterator[dict[str, list[int]]]:
    """How many groups take part in each joint gather, and each joint reduction, while inside."""
    counts: dict[str, list[int]] = {"gathers": [], "reductions": []}
    start, start_joint = JointGather.start, PendingReductions.start_joint

    def gather(self: JointGather) -> None:
        if self._ticket is None and len(self) > 1:
            counts["gathers"].append(len(self))
        start(self)

    def reduce(self: PendingReductions, lanes: Any) -> None:
        if self._joint:
            counts["reductions"].append(len(self._joint))
        start_joint(self, lanes)

    with (
        mock.patch.object(JointGather, "start", gather),
        mock.patch.object(PendingReductions, "start_joint", reduce),
    ):
        yield counts


@on_ranks(1, 2, 3, preset=ALL, precision=[None, torch.bfloat16])
def test_the_same_bits(preset: str, precision: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=precision and torch.float32)
    with joining(0), counting() as counts:
        truth = train(sharded(preset, mp_policy=policy), micro_batches=2)
    assert counts == {"gathers": [], "reductions": []}
    is_alone = dist.get_world_size() == 1 and preset != "ddp" and policy.param_dtype is None
    for nbytes in (SEVERAL, 2**21):
        with joining(nbytes), counting() as counts:
            assert_same(train(sharded(preset, mp_policy=policy), micro_batches=2), truth, preset)
        gathers, reductions = counts["gathers"], counts["reductions"]
        if dist.get_world_size() == 1:
            assert not gathers, "nothing is communicated"
        elif nbytes == 2**21:
            # Once all have been gathered before; without the root, which goes alone where it alone stays gathered.
            assert gathers == {"ddp": [], "zero3": [LAYERS] * (12 - 2)}.get(preset, [LAYERS + 1] * 2)
            assert reductions == {"zero2": [LAYERS + 1] * 6, "zero3": [LAYERS + 1] * 6}.get(preset, [LAYERS + 1] * 3)
        else:
            assert (len(gathers) > 2) == (preset != "ddp")
            assert max(gathers, default=0) < LAYERS
            assert len(reductions) > (6 if preset in ("zero2", "zero3") else 3)
            assert max(reductions) < LAYERS
        assert not is_alone or not reductions


@on_ranks(2, 3, preset=ALL, nbytes=[SEVERAL, 2**21])
def test_like_plain_training_and_fsdp2(preset: str, nbytes: int) -> None:
    with joining(nbytes):
        check(
            stack,
            wrapping=lambda model, verb: wrap(model, verb, **_options(verb, preset)),
            bitwise=preset != "ddp",  # gloo's all-reduce adds in another order
        )


def _options(verb: Any, preset: str) -> dict[str, Any]:
    return {"placements": preset} if verb is shardwise.fully_shard else {}


@on_ranks(4, preset=ALL)
def test_two_axes(preset: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for nbytes in (0, 2**21):
        with joining(nbytes):
            model = sharded(preset, mesh)
            model.set_requires_all_reduce(False)
            model(batch(7, dist.get_rank(), 4, WIDTH)).square().mean().backward()
            model.set_requires_all_reduce(True)
            found.append(train(model, micro_batches=2))
    assert_same(found[1], found[0], preset)


@on_ranks(4)
def test_sums_that_wait_of_units_that_the_last_micro_batch_leaves_out() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for nbytes in (0, 2**21):
        with joining(nbytes):
            model = sharded("zero3", mesh)
            for is_last in (False, True):
                model.set_requires_all_reduce(is_last)
                x = batch(is_last, dist.get_rank(), 4, WIDTH)
                model(x, LAYERS // 2 if is_last else LAYERS).square().mean().backward()
            found.append(gradients_of(model))
    assert_same(found[1], found[0])


@on_ranks(2, preset=SHARDED, policy=[CPUOffloadPolicy(pin_memory=False), OffloadPolicy()])
def test_other_kinds_of_units_among_them(preset: str, policy: OffloadPolicy) -> None:
    """Frozen ones, one that zeros are reduced of, one with two dtypes, tied ones, and one too large to be joined."""
    found = []
    for nbytes in (0, SEVERAL, 2**21):
        model = stack()
        layers: Any = model.layers
        layers[3].requires_grad_(False)
        layers[4].gate.requires_grad_(False)
        layers[6].same = layers[6].linear
        layers[7].gate = nn.Parameter(layers[7].gate.detach().bfloat16())
        layers[8].linear = nn.Sequential(nn.Linear(WIDTH, 700), nn.Linear(700, WIDTH))
        with joining(nbytes), counting() as counts:
            wrap(model, shardwise.fully_shard, placements=preset, offload_policy=policy)
            layers[10].set_reduce_scatter_unused_params(True)
            layers[11].set_gradient_divide_factor(3.0)
            layers[12].set_all_reduce_hook(lambda reduced: reduced.mul_(2))
            layers[13].set_requires_gradient_sync(False)
            found.append(train(model, steps=4))
        joins = bool(nbytes) and (preset != "zero3" or type(policy) is OffloadPolicy)
        assert bool(counts["gathers"]) == bool(counts["reductions"]) == joins
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@on_ranks(2, preset=ALL)
def test_units_that_say_themselves_how_they_are_gathered_among_them(preset: str) -> None:
    """One unit, and several in a row."""
    found = []
    for nbytes in (0, 2**21):
        model = stack()
        layers: Any = model.layers
        for layer in (layers[4], layers[9].linear, *layers[12:15]):
            extend(layer, SentInBfloat16)
        with joining(nbytes), counting() as counts:
            found.append(train(wrap(model, shardwise.fully_shard, placements=preset), micro_batches=2))
    assert max(counts["gathers"], default=0) >= LAYERS - 5 or preset == "ddp"
    assert_same(found[1], found[0], preset)


@on_ranks(2, 3, preset=ALL)
def test_parameters_without_gradients(preset: str) -> None:
    """On one rank, on all, and again after they were left out of reductions."""
    found = []
    for nbytes in (0, 2**21):
        with joining(nbytes):
            model = sharded(preset)
            layers, rank = model.layers, dist.get_rank()
            optimizer, steps = make_optimizer(model), {}
            for step in range(6):
                x = batch(step, rank, 4, WIDTH)
                is_used = step in (1, 5) or (step == 0 and rank == 0)
                hooks = [
                    layer.linear.register_forward_hook(lambda _, __, output: output.detach())
                    for layer in ([] if is_used else layers[5:7])
                ]
                model(x).square().mean().backward()
                steps |= {f"{step} {name}": value for name, value in gradients_of(model).items()}
                for hook in hooks:
                    hook.remove()
                optimizer.step()
                optimizer.zero_grad()
            found.append(steps | state_of(model))
    assert_same(found[1], found[0], preset)


@on_ranks(2, preset=SHARDED)
def test_units_that_do_not_run_each_time(preset: str) -> None:
    found = []
    for nbytes in (0, SEVERAL, 2**21):
        with joining(nbytes):
            model = sharded(preset)
            trained = train(model, steps=8, stop_after=lambda step: (None, None, 4, 4, 12, None, 9, None)[step])
            with torch.no_grad():
                model.layers[9].linear.weight.mul_(2)
                model.layers[2].linear.weight.to_local().data.add_(1)
                trained["evaluation"] = model(batch(0, dist.get_rank(), 4, WIDTH))
                trained["again"] = model(batch(0, dist.get_rank(), 4, WIDTH))
            found.append(trained)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@on_ranks(2, 3, preset=KEPT)
def test_ranks_that_evaluate_what_they_like(preset: str) -> None:
    """While nothing is to be gathered: what goes together afterwards does not depend on that."""
    found = []
    for nbytes in (0, SEVERAL, 2**21):
        with joining(nbytes):
            model = sharded(preset)
            optimizer = make_optimizer(model)
            trained = train(model, optimizer=optimizer)
            with torch.no_grad():
                model(batch(0, 0, 4, WIDTH))  # gathers
                for stop_after in range(3, 17, 4 + 3 * dist.get_rank()):
                    model(batch(0, 0, 4, WIDTH), stop_after)
                    model.layers[stop_after](batch(0, 0, 4, WIDTH))
            found.append(trained | train(model, optimizer=optimizer))
    assert_same(found[1], found[0], preset)
    assert_same(found[2], found[0], preset)


@on_ranks(2, preset=SHARDED, after=["step", "evaluation"])
def test_writes_between_the_gather_and_the_use(preset: str, after: str) -> None:
    """Of any kind, also those that tell nobody."""
    model = sharded(preset)
    train(model)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    if after == "evaluation":
        model(x)
    weight = model.layers[12].linear.weight

    def write(*_: Any) -> None:
        with torch.no_grad():
            weight.to_local().mul_(3)

    hook = model.layers[5].register_forward_pre_hook(write)
    output = model(x)
    hook.remove()
    truth = stack()
    truth.load_state_dict(state_of(model))
    torch.testing.assert_close(output, truth(x))
    torch.testing.assert_close(model(x), truth(x))


@on_ranks(4, preset=["zero2", "zero3"])
def test_partial_sums_of_parameters_that_are_replaced(preset: str) -> None:
    found = []
    for replaces in (False, True):
        model = sharded(preset, init_device_mesh("cpu", (2, 2)), layers=2)
        x = batch(0, dist.get_rank(), 4, WIDTH)
        model.set_requires_all_reduce(False)
        model(x).square().mean().backward()
        if replaces:
            model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
        model.set_requires_all_reduce(True)
        model(x).square().mean().backward()
        found.append(gradients_of(model))
    assert_same(found[1], found[0])


@on_ranks(2, preset=SHARDED)
def test_transforms(preset: str) -> None:
    model = sharded(preset)
    train(model)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    found = torch.func.grad(lambda one: model(one).square().mean())(x)
    truth = stack()
    truth.load_state_dict(state_of(model))
    torch.testing.assert_close(found, torch.func.grad(lambda one: truth(one).square().mean())(x))


@on_ranks(2, preset=ALL, nbytes=[0, 2**21])
def test_the_garbage_collector_comes_to_one_rank_alone(preset: str, nbytes: int) -> None:
    """Where units have left the model, which the optimizer has changed: the last one, and the largest."""
    with joining(nbytes):
        model: Any = stack()
        model.layers[6].more = nn.Linear(WIDTH, 5 * WIDTH)
        wrap(model, shardwise.fully_shard, placements=preset)
        train(model)
    for leaving in (model.layers[6], model.layers[-1]):
        leaving.itself = [leaving]
    gc.disable()
    del model.layers[-1], leaving
    model.layers[6] = nn.Identity()
    if dist.get_rank() == 0:
        gc.collect()
    truth = stack(len(model.layers))
    truth.layers[6] = nn.Identity()
    truth.load_state_dict(state_of(model))
    for step in range(3):
        x = batch(step, dist.get_rank(), 4, WIDTH)
        output = model(x)
        torch.testing.assert_close(output, truth(x))
        output.sum().backward()
    gc.enable()


@on_ranks(2)
def test_layers_that_outlive_their_model_on_one_rank() -> None:
    model = sharded("zero1")
    train(model)
    layers = list(model.layers)
    model.__dict__["itself"] = model
    gc.disable()
    del model
    if dist.get_rank() == 0:
        gc.collect()
    x = batch(0, dist.get_rank(), 4, WIDTH)
    outputs = []
    for _ in range(2):
        output = x
        for layer in layers:
            output = layer(output)
        outputs.append(output)
    assert_tensors("the output", outputs[1], outputs[0], bitwise=True)
    gc.enable()


class Shift(nn.Module):
    """Adds a parameter's sum."""

    def __init__(self, numel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * self.weight.sum()


@on_ranks(4)
def test_batches_of_the_same_size_over_other_numbers_of_ranks() -> None:
    """Staging memory of one is used again for the other, with rows of another length."""
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]]
    found = []
    for nbytes in (0, 2**14):
        torch.manual_seed(1)
        model = nn.Sequential(*[Shift(256 if index < 32 else 128) for index in range(64)])
        with joining(0) if not nbytes else mock.patch("shardwise.core.batch.JOINT_BYTES", nbytes):
            for index, layer in enumerate(model):
                shardwise.fully_shard(layer, mesh=meshes[index >= 32], placements="zero2")
            shardwise.fully_shard(model, mesh=meshes[0], placements="zero2")
            optimizer, outputs = torch.optim.SGD(model.parameters(), 0.1), {}
            for step in range(3):
                output = model(torch.ones(3))
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                outputs[str(step)] = output.detach()
        found.append(outputs)
    assert_same(found[1], found[0])


@on_ranks(2)
def test_the_root_is_not_gathered_again_while_it_runs() -> None:
    """Where units run twice, and everything is gathered whenever it is used, as once a graph was captured."""
    model = sharded("zero2")
    train(model)
    for unit in units_of(model):
        for group in unit.groups:
            group._is_replayed = True
    layers = model.layers
    model.layers = nn.ModuleList([*layers, *layers])
    x = batch(0, dist.get_rank(), 4, WIDTH)
    output = model(x)
    truth = stack()
    truth.layers = nn.ModuleList([*truth.layers, *truth.layers])
    truth.load_state_dict(state_of(model), strict=False)
    torch.testing.assert_close(output, truth(x))


@on_ranks(2)
def test_joins_again_after_a_failure() -> None:
    model = sharded("zero1")
    optimizer = make_optimizer(model)
    train(model, optimizer=optimizer)
    with (
        contextlib.suppress(PlannedError),
        mock.patch("shardwise.core.joint.start_together", mock.Mock(side_effect=PlannedError)),
    ):
        model(batch(0, dist.get_rank(), 4, WIDTH))
    handle = model.layers[7].unshard(async_op=True)
    handle.wait()
    model.layers[7].reshard()
    with counting() as counts:
        train(model, steps=2, optimizer=optimizer)
    assert counts["gathers"] == [LAYERS, LAYERS + 1]


@on_ranks(2, preset=KEPT)
def test_nothing_is_looked_for_where_nothing_is_gathered(preset: str) -> None:
    model = sharded(preset)
    train(model)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    model(x)
    with mock.patch.object(Unit, "join_gather") as looked_for, counting() as counts:
        model(x)
    assert not looked_for.called
    assert not counts["gathers"]


@on_ranks(2)
def test_what_one_rank_alone_knows_changes_no_collective() -> None:
    """Of parameters that are freed between uses. One rank writes into a shard before its use, and an exception ends
    its backward."""
    model = sharded("zero3")
    weight, rank = model.layers[7].linear.weight, dist.get_rank()

    def write(*_: Any) -> None:
        if rank == 0:
            with torch.no_grad():
                weight.to_local()[0].mul_(1.5)

    def fail(_: torch.Tensor) -> None:
        raise PlannedError

    model.register_forward_pre_hook(write)
    for step in range(4):
        hook = model.first.weight.register_post_accumulate_grad_hook(fail) if step == 2 and rank == 0 else None
        with contextlib.suppress(PlannedError):
            model(batch(step, rank, 4, WIDTH)).square().mean().backward()
        if hook is not None:
            hook.remove()
        model.zero_grad()
        dist.barrier()
    truth = stack()
    truth.load_state_dict(state_of(model))
    with torch.no_grad():
        model._forward_pre_hooks.popitem()
        torch.testing.assert_close(model(torch.ones(1, WIDTH)), truth(torch.ones(1, WIDTH)))


class Shuffled(Stack):
    """Runs its layers in the order in which they are registered, until its ``step`` is changed."""

    step = 1

    def forward(self, x: torch.Tensor, stop_after: int | None = None) -> torch.Tensor:
        x = self.first(x)
        for start in range(self.step):
            for layer in self.layers[start :: self.step]:
                x = layer(x)
        return self.last(x)


@on_ranks(2, step=[2, 5, 18], ahead=[2**12, 2**13, 2**23])
def test_other_orders_than_that_of_the_modules(step: int, ahead: int) -> None:
    """Later on: batches then wait for units that run much later, and may be let go of before."""
    found, most = [], [0]
    has_room = FSDPCommContext.has_room

    def watched(context: FSDPCommContext) -> bool:
        result = has_room(context)
        most[0] = max(most[0], sum(unit.whole_bytes for unit in context.units if unit.is_on_its_way))
        return result

    for nbytes in (0, SEVERAL):
        with (
            joining(nbytes),
            mock.patch("shardwise.core.context.AHEAD_BYTES", ahead),
            mock.patch.object(FSDPCommContext, "has_room", watched),
            counting() as counts,
        ):
            torch.manual_seed(1)
            model: Any = Shuffled([Layer() for _ in range(LAYERS)], WIDTH)
            wrap(model, shardwise.fully_shard)
            train(model)
            model.step = step
            found.append(train(model, micro_batches=2))
        assert bool(counts["gathers"]) == bool(nbytes)
    assert_same(found[1], found[0])
    assert most[0] <= ahead + SEVERAL, (most, ahead)


@on_ranks(2)
def test_units_that_no_longer_run_in_turn_are_gathered_alone() -> None:
    """Each would send for all others. So do those that run again in a pass, as a cell in each time step."""
    torch.manual_seed(1)
    model: Any = Shuffled([Layer() for _ in range(36)], WIDTH)
    with joining(2 * SEVERAL), mock.patch("shardwise.core.context.AHEAD_BYTES", 4 * SEVERAL):
        wrap(model, shardwise.fully_shard)
        train(model)
        model.step = 9
        with counting() as counts:
            train(model)
    assert counts["gathers"], "it was tried"
    x = batch(0, dist.get_rank(), 4, WIDTH)
    with counting() as counts:
        model(x).square().mean().backward()
    assert not counts["gathers"]

    model = sharded("zero3")
    train(model)
    cell = model.layers[3]
    model.layers[5].register_forward_hook(lambda _, __, output: cell(cell(output)))
    with counting() as counts:
        model(x).square().mean().backward()
    assert counts["gathers"] == [LAYERS] * 2


@on_ranks(2)
def test_units_that_never_ran_in_turn_are_gathered_alone() -> None:
    model: Any = Shuffled([Layer() for _ in range(36)], WIDTH)
    model.step = 3
    with joining(2 * SEVERAL), counting() as counts:
        wrap(model, shardwise.fully_shard)
        train(model)
        assert not counts["gathers"]
        model.step = 1
        train(model)
    assert counts["gathers"]


class Routed(Stack):
    """Of many experts, few run in each pass, on all ranks the same; one never does."""

    passes = 0

    def forward(self, x: torch.Tensor, stop_after: int | None = None) -> torch.Tensor:
        x = self.first(x)
        generator = torch.Generator().manual_seed(self.passes)
        self.passes += 1
        for index in torch.randperm(len(self.layers) - 1, generator=generator)[:2]:
            x = self.layers[int(index)](x)
        return self.last(x)


@on_ranks(2)
def test_experts_of_which_few_run_are_gathered_alone() -> None:
    torch.manual_seed(1)
    model = Routed([Layer() for _ in range(LAYERS)], WIDTH)
    wrap(model, shardwise.fully_shard)
    with counting() as counts:
        train(model, steps=20)
    assert not counts["gathers"]


@on_ranks(2)
def test_units_that_never_run() -> None:
    """The others go together, and ranks may train of these what they like."""
    model = sharded("zero3")
    unused = model.layers[-1]
    unused.linear.weight.requires_grad_(dist.get_rank() == 0)
    with counting() as counts:
        train(model, stop_after=lambda step: LAYERS - 1)
    assert counts["gathers"] == [LAYERS - 1] * 4
    # Once it runs it goes with the others, also where it does not any more.
    unused.linear.weight.requires_grad_(True)
    with counting() as counts:
        train(model, stop_after=lambda step: LAYERS - step)
    assert counts["gathers"] == [LAYERS - 1] + [LAYERS] * 5


class WithHeads(Stack):
    """Each layer has a head that runs when all layers have."""

    def forward(self, x: torch.Tensor, stop_after: int | None = None) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers[::2]:
            x = layer(x)
        return self.last(sum(head(x) for head in self.layers[1::2]))


@on_ranks(2)
def test_units_that_run_when_all_else_has_are_gathered_alone() -> None:
    """Of each batch, here six layers and their heads."""
    torch.manual_seed(1)
    model = WithHeads([layer for _ in range(36) for layer in (Layer(), nn.Linear(WIDTH, WIDTH))], WIDTH)
    with joining(4 * SEVERAL), counting() as counts:
        wrap(model, shardwise.fully_shard)
        train(model)
    assert counts["gathers"]
    assert {*counts["gathers"]} == {6}, counts


@on_ranks(2)
def test_gathers_that_the_user_starts_on_a_rank_that_does_not_know_the_order() -> None:
    """Others have started the same ahead, as they expected it."""
    model = sharded("zero3", layers=2 * LAYERS)
    with joining(4 * SEVERAL), counting() as counts:
        for index in range(0, 2 * LAYERS - 2, 3):
            model.layers[index].register_forward_pre_hook(
                lambda *_, layer=model.layers[index + 1]: layer.unshard(async_op=True) and None
            )
        x = batch(0, dist.get_rank(), 4, WIDTH)
        for step in range(5):
            output = model(x)
            output.square().mean().backward()
            if dist.get_rank() == step % 2:
                unit = unit_of(model)
                assert unit is not None
                unit.context.order = type(unit.context.order)()
    assert counts["gathers"]
    truth = stack(2 * LAYERS)
    truth.load_state_dict(state_of(model))
    torch.testing.assert_close(output, truth(x))


@on_ranks(2, direction=["forward", "backward"])
def test_prefetching_that_the_user_chooses(direction: str) -> None:
    """Then units go by themselves, however many are chosen."""
    found = []
    for nbytes in (0, SEVERAL):
        with joining(nbytes), mock.patch("shardwise.core.context.AHEAD_BYTES", 2 * SEVERAL):
            model = sharded("zero3")
            train(model)
            with counting() as counts:
                layers = list(model.layers)
                for index, layer in enumerate(layers):
                    ahead = layers[index + 1 :] if direction == "forward" else layers[:index][::-1]
                    getattr(layer, f"set_modules_to_{direction}_prefetch")(ahead)
                found.append(train(model))
            assert not counts["gathers"]
    assert_same(found[1], found[0])


@on_ranks(2)
def test_writes_to_what_backward_gathered_for_others() -> None:
    """And not for them, as they computed without gradients; parameters stay gathered after backward."""
    model = sharded("zero3")
    for index in (5, 6, 7):
        model.layers[index].register_forward_hook(lambda _, args, output: args[0] + output.detach())
    train(model)
    model.set_reshard_after_backward(False)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    model(x).square().mean().backward()
    with torch.no_grad():
        for index in (5, 6, 7):
            model.layers[index].linear.weight.to_local().mul_(3)
    first = model(x)
    for unit in units_of(model):
        unit.reshard()
    assert_tensors("the output", model(x), first, bitwise=True)


@on_ranks(2, 3)
def test_units_that_run_without_the_model_are_gathered_alone() -> None:
    model = sharded("zero3")
    train(model)
    truth = stack()
    truth.load_state_dict(state_of(model))
    x = batch(0, dist.get_rank(), 4, WIDTH)
    with counting() as counts:
        for layer, other in zip(model.layers, truth.layers, strict=True):
            output = layer(x)
            torch.testing.assert_close(output, other(x))
            output.sum().backward()
    assert not counts["gathers"]


@on_ranks(2)
def test_all_of_a_batch_is_sent_whatever_is_gathered_here() -> None:
    """Also what the user gathered, and what stays from the backward before."""
    model = sharded("zero3")
    optimizer = make_optimizer(model)
    train(model, optimizer=optimizer)
    model.layers[2].unshard()
    model.layers[6].set_reshard_after_backward(False)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    with counting() as counts:
        model(x).square().mean().backward()
        model(x).square().mean().backward()
    assert counts["gathers"] == [LAYERS] * 4


@on_ranks(2)
def test_parameters_that_are_replaced_among_those_that_are_gathered() -> None:
    found = []
    for nbytes in (0, 2**21):
        with joining(nbytes):
            model = sharded("zero3")
            optimizer = make_optimizer(model)
            trained = train(model, optimizer=optimizer)
            state = {name: one.clone() * 2 for name, one in model.layers[7].state_dict().items()}
            hook = model.layers[1].register_forward_hook(
                lambda *_, layer=model.layers[7], state=state: layer.load_state_dict(state, assign=True) and None
            )
            trained["output"] = model(batch(0, dist.get_rank(), 4, WIDTH))
            hook.remove()
            found.append(trained | {"again": model(batch(0, dist.get_rank(), 4, WIDTH))})
    assert_same(found[1], found[0])
    assert_tensors("the output", found[1]["again"], found[1]["output"], bitwise=True)


@torch.no_grad()
def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.fill_(0.1)


@on_ranks(2)
def test_parameters_without_values_among_those_that_are_gathered() -> None:
    with torch.device("meta"):
        model: Any = wrap(stack(), shardwise.fully_shard)
    for part in (model.first, model.last, *model.layers[:5], *model.layers[6:]):
        shardwise.materialize(part, init_fn=fill)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unit 'layers\.5'.* without values"):
            model(x)
    shardwise.materialize(model, init_fn=fill)
    truth = stack()
    truth.load_state_dict({name: torch.full_like(one, 0.1) for name, one in truth.state_dict().items()})
    torch.testing.assert_close(model(x), truth(x))


class PlannedError(Exception):
    """What the tests raise."""


@on_ranks(2, preset=SHARDED, where=["forward", "backward"], resets=[True, False])
def test_after_an_exception(preset: str, where: str, resets: bool) -> None:
    def fail(*_: Any) -> None:
        raise PlannedError

    found = []
    for nbytes in (0, SEVERAL, 2**21):
        with joining(nbytes):
            model = sharded(preset)
            optimizer = make_optimizer(model)
            train(model, steps=2, optimizer=optimizer)
            layer = model.layers[9]
            hook = (layer if where == "forward" else layer.linear).register_forward_hook(
                fail if where == "forward" else lambda _, __, output: output.register_hook(fail) and None
            )
            with contextlib.suppress(PlannedError):
                model(batch(5, dist.get_rank(), 4, WIDTH)).square().mean().backward()
            hook.remove()
            if resets:
                model.reset_iter_state()
            optimizer.zero_grad()
            found.append(train(model, optimizer=optimizer))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


NOT_RUN = {
    "zero1": ["FreedBatch.gather"],
    "zero3": ["KeptBatch.gather", "KeptBatch._gather", "Unit.join_gather"],
}


@on_ranks(
    2,
    preset=["zero1", "zero3"],
    name=[
        "Batch._start",
        "FreedBatch.gather",
        "JointGather.add",
        "KeptBatch._gather",
        "KeptBatch.gather",
        "JointGather.start",
        "JointGather._start_gather",
        "JointGather.wait",
        "ParamGroup.prepare_gather",
        "ParamGroup.start_gather",
        "PendingReductions.start",
        "PendingReductions.start_joint",
        "Unit._gather",
        "Unit._prefetch",
        "Unit.join_gather",
        "reduce_together",
        "start_together",
    ],
)
def test_interrupted(preset: str, name: str) -> None:
    """By the same exception on all ranks, at each line."""

    def after(lines: int) -> tuple[dict[str, torch.Tensor | None], bool]:
        model = sharded(preset, layers=2)
        optimizer = make_optimizer(model)
        train(model, steps=2, optimizer=optimizer)
        with contextlib.suppress(KeyboardInterrupt), interrupted(name, lines) as raised:
            model(batch(5, dist.get_rank(), 4, WIDTH)).square().mean().backward()
        model.reset_iter_state()
        optimizer.zero_grad()
        return train(model, steps=1, optimizer=optimizer), bool(raised)

    with mock.patch("shardwise.core.batch.MANY", 1):
        truth, was_raised = after(10**6)
        assert not was_raised
        lines, was_raised = 0, True
        while was_raised:
            found, was_raised = after(lines)
            assert_same(found, truth)
            lines += 1
    assert lines < 100
    assert (lines > 1) == (name not in NOT_RUN[preset])


@on_ranks(2, preset=["zero1", "zero3"])
def test_the_updates_of_flat_optimizers(preset: str) -> None:
    found = []
    for nbytes in (0, SEVERAL, 2**21):
        with joining(nbytes):
            model = sharded(preset)
            optimizer = shardwise.optim.flat(torch.optim.AdamW, model.parameters(), lr=1e-2)
            found.append(train(model, optimizer=optimizer))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@on_ranks(2, preset=["zero1", "zero3"])
def test_gathers_that_the_user_started(preset: str) -> None:
    """Among those that go together, also if nobody waits for them."""
    model = sharded(preset)
    optimizer = make_optimizer(model)
    train(model, steps=2, optimizer=optimizer)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2)
    handles = [model.layers[index].unshard(async_op=True) for index in (4, 5)]
    handles[0].wait()
    first = model(x)
    again = model(x)
    assert_tensors("the output", again, first, bitwise=True)
    truth = stack()
    truth.load_state_dict(state_of(model))
    torch.testing.assert_close(first, truth(x))
    unit = unit_of(model.layers[5])
    assert unit is not None
    assert not unit.is_on_its_way


@on_ranks(2, preset=["zero2", "zero3"])
def test_memory_goes_with_the_model(preset: str) -> None:
    model = sharded(preset)
    train(model)
    unit = unit_of(model.layers[3])
    assert unit is not None
    gathered = unit.groups[0].shards.buffers[0].full
    memory = torch.multiprocessing.reductions.StorageWeakRef(gathered.untyped_storage())
    del unit, gathered, model
    assert memory.expired()


class Dies:
    """What the test below runs by name."""

    @staticmethod
    def body(where: str, preset: str) -> None:
        model = sharded(preset)
        optimizer = make_optimizer(model)
        train(model, steps=2, optimizer=optimizer)
        if dist.get_rank() == 0:
            owner: Any = JointGather if where == "gathering" else PendingReductions
            setattr(owner, "start" if where == "gathering" else "start_joint", lambda *_: os._exit(3))
        model(batch(5, dist.get_rank(), 4, WIDTH)).square().mean().backward()


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("where", ["gathering", "reducing"])
def test_others_name_a_rank_that_dies(where: str, preset: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(__name__, "Dies", {"where": where, "preset": preset}, 60.0)
    assert_others_name(0, 2, caught.value)
    message = str(caught.value)
    assert where in message
    assert "layers.4" in message
    assert "layers.5" in message
