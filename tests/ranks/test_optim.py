"""Optimizers on flat shards against the same optimizers on the sharded parameters, FSDP2 and one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

import shardwise
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, Placements
from shardwise.core.device import shard_like
from shardwise.core.errors import StateError
from shardwise.core.step import ELEMENTWISE
from shardwise.fairscale import FullyShardedDataParallel
from shardwise.optim import flat

from ..models import MLP, build, inputs_for, wrap
from .harness import on_ranks
from .truth import whole

Make = Callable[..., Optimizer]


def plain(optimizer_class: type[Optimizer], params: Any, **settings: Any) -> Optimizer:
    return optimizer_class(params, **settings)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups, of matrices and of the rest."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in parameters if p.ndim <= 1]},
    ]


def wrapped(name: str, verb: Any = shardwise.fully_shard, **options: Any) -> nn.Module:
    return wrap(build(name), verb, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3, first: int = 0, rank: int | None = None) -> None:
    """Steps of mean squares or, for token models, of cross entropy; the norm is clipped in every second one."""
    rank = dist.get_rank() if rank is None else rank
    for step in range(first, first + steps):
        inputs = inputs_for(model, 100 * step + rank)
        model(inputs).float().square().mean().backward()
        if step % 2:
            shardwise.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(ours: nn.Module, truth: nn.Module, message: str = "") -> None:
    for (name, parameter), expected in zip(ours.named_parameters(), truth.parameters(), strict=True):
        one, other = whole(parameter), whole(expected)
        assert torch.equal(one, other), f"{message} {name} differs by {(one - other).abs().max()}"


def assert_same_state(ours: Optimizer, truth: Optimizer, message: str = "") -> None:
    one, other = ours.state_dict(), truth.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys(), message
    for index, state in one["state"].items():
        assert state.keys() == other["state"][index].keys(), message
        for key, value in state.items():
            expected = other["state"][index][key]
            assert type(value) is type(expected), f"{message} {key} {type(value)} {type(expected)}"
            if isinstance(value, DTensor):
                assert value.placements == expected.placements
                assert value.to_local().shape == expected.to_local().shape
            same = torch.equal(whole(value), whole(expected)) if isinstance(value, torch.Tensor) else value == expected
            assert same, f"{message} state {index} {key}"


@on_ranks(2, name=["transformer", "conv"])
def test_like_fsdp2(name: str) -> None:
    model, theirs = wrapped(name), wrapped(name, torch_fully_shard)
    optimizer, truth = flat(torch.optim.AdamW, groups(model), lr=1e-2), torch.optim.AdamW(groups(theirs), lr=1e-2)
    for step in range(3):
        for one, its in ((model, optimizer), (theirs, truth)):
            one(inputs_for(one, 10 * step + dist.get_rank())).square().mean().backward()
            (shardwise if one is model else nn.utils).clip_grad_norm_(one.parameters(), 0.5)
            its.step()
            its.zero_grad()
    assert_same(model, theirs)
    assert_same_state(optimizer, truth)


@on_ranks(2, by=["default", "foreach", "fused"])
def test_plain_optimizers_like_fsdp2(by: str) -> None:
    """An element-wise one steps this rank's parts as plain tensors; parameters, state and state dicts are DTensors'."""
    fused = (torch.optim.Adam, torch.optim.AdamW)
    settings: dict[type[Optimizer], dict[str, Any]] = {
        torch.optim.AdamW: {"amsgrad": True},
        torch.optim.SGD: {"momentum": 0.9, "nesterov": True},
        torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    }
    # The others fail in operators of DTensor, for which ours have no use.
    kinds = fused if by == "fused" else ELEMENTWISE - {torch.optim.Rprop}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        engines = (shardwise.fully_shard, torch_fully_shard)
        # Operators of DTensor take a second per optimizer for a transformer.
        models = [wrapped("transformer" if by == "fused" else "mlp", verb) for verb in engines]
        options: Any = {"lr": 1e-2, **settings.get(kind, {})} | ({by: True} if by != "default" else {})
        optimizers: list[Any] = [kind(groups(model), **options) for model in models]
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                skipped = list(model.parameters())[step]
                model(inputs_for(model, 10 * step + dist.get_rank())).square().mean().backward()
                skipped.grad = None
                optimizer.step()
                optimizer.zero_grad()
            if step == 1:  # each goes on with the other's state
                saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
                for optimizer, state in zip(optimizers, reversed(saved), strict=True):
                    optimizer.load_state_dict(state)
        assert_same(*models, kind.__name__)
        assert_same_state(*optimizers, kind.__name__)


@on_ranks(2, kind=["Adam", "SGD", "Adagrad"])
def test_failed_steps_whose_exceptions_are_kept(kind: str) -> None:
    """Param groups and state stay the optimizer's own: they can be saved at once, and training goes on."""
    kept: list[BaseException] = []

    def run(verb: Any) -> tuple[nn.Module, Optimizer]:
        model = wrapped("mlp", verb)
        optimizer = getattr(torch.optim, kind)(groups(model), lr=1e-2, **({"momentum": 0.9} if kind == "SGD" else {}))
        ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for step in range(5):
            model(inputs_for(model, 10 * step + dist.get_rank())).square().mean().backward()
            last = optimizer.param_groups[1]
            good, last["weight_decay"] = last["weight_decay"], "none" if step in (0, 2) else last["weight_decay"]
            try:
                optimizer.step()
                assert step not in (0, 2)
            except TypeError as error:  # the first group was stepped
                kept.append(error)
                last["weight_decay"] = good
                assert ids == [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
                assert {*map(id, optimizer.state)} <= {*ids}
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
        return model, optimizer

    (model, optimizer), (theirs, truth) = run(shardwise.fully_shard), run(torch_fully_shard)
    assert len(kept) == 4
    assert_same(model, theirs)
    assert_same_state(optimizer, truth)


@on_ranks(2)
def test_closures_of_elementwise_optimizers() -> None:
    """That step another optimizer of the same parameters, change settings, and fail."""

    def run(verb: Any) -> tuple[nn.Module, Optimizer, Optimizer]:
        model = wrapped("mlp", verb)
        optimizer = torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9)
        other = torch.optim.Adam(model.parameters(), lr=1e-3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs_for(model, 10 * step + dist.get_rank())).square().mean()
            loss.backward()
            other.step()
            optimizer.param_groups[0]["lr"] *= 0.5
            if step == 1:
                raise KeyError("on purpose")
            return loss

        for step in range(4):
            try:
                assert optimizer.step(closure).ndim == 0
            except KeyError:
                assert step == 1
        return model, optimizer, other

    (model, *optimizers), (theirs, *truths) = run(shardwise.fully_shard), run(torch_fully_shard)
    assert_same(model, theirs)
    for one, truth in zip(optimizers, truths, strict=True):
        assert_same_state(one, truth)


@on_ranks(2)
def test_gradients_of_another_dtype() -> None:
    models = [wrap(build("mlp").bfloat16(), verb) for verb in (shardwise.fully_shard, torch_fully_shard)]
    for model in models:
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad_dtype = None
        model(inputs_for(model, dist.get_rank()).bfloat16()).square().mean().backward()
        for parameter in parameters:
            parameter.grad = parameter.grad.float()
        torch.optim.SGD(parameters, lr=0.1).step()
    assert_same(*models)


@on_ranks(2)
def test_states_that_are_not_cut_like_parameters() -> None:
    """Are for DTensor's operators to handle or refuse."""
    models = [wrapped("mlp", verb) for verb in (shardwise.fully_shard, torch_fully_shard)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(inputs_for(model, dist.get_rank())).square().mean().backward()
            weight = next(model.parameters())
            if step == 1:
                state = optimizer.state[weight]
                state["momentum_buffer"] = state["momentum_buffer"].redistribute(placements=[Replicate()])
            if step == 2:
                weight.grad = weight.grad.redistribute(placements=[Replicate()])
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*models)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(inputs_for(model, dist.get_rank())).square().mean().backward()
        weight = next(model.parameters())
        optimizer.state[weight]["momentum_buffer"] = torch.zeros(weight.shape)
        with pytest.raises(RuntimeError):
            optimizer.step()
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


@on_ranks(2, 3)
def test_like_one_process() -> None:
    model, single = wrapped("transformer"), build("transformer")
    settings = {"lr": 0.1, "momentum": 0.9}  # linear in the gradients, so that a difference of rounding stays one
    optimizer, truth = flat(torch.optim.SGD, groups(model), **settings), torch.optim.SGD(groups(single), **settings)
    size = dist.get_world_size()
    for step in range(3):
        for rank in range(size):
            (single(inputs_for(single, 10 * step + rank)).square().mean() / size).backward()
        loss = model(inputs_for(model, 10 * step + dist.get_rank())).square().mean()
        given = list(model.parameters())  # the root's are unsharded ones now
        loss.backward()
        norm_type: Any = (2.0, "inf", 1)[step]
        norm = shardwise.clip_grad_norm_(given if step else model.parameters(), 0.5, norm_type)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 0.5, norm_type))
        for one in (optimizer, truth):
            one.step()
            one.zero_grad()
    for parameter, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), expected.detach())


@on_ranks(4)
def test_clipping_while_parameters_are_cut_over_fewer_ranks() -> None:
    single = build("mlp")
    model = wrap(copy.deepcopy(single), shardwise.fully_shard, reshard_after_forward=2)
    x = inputs_for(single, 0)
    for one in (model, single):
        one(x).square().mean().backward()
    model(x)
    norm = shardwise.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 1e-3))
    for module in model.modules():
        if isinstance(module, shardwise.FSDPModule):
            module.reshard()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


@on_ranks(2)
def test_clipping_float16_whose_squares_are_above_its_range() -> None:
    """The norm was infinite, and the gradients became zeros in silence."""
    single = build("mlp").half()
    model = wrap(build("mlp").half(), shardwise.fully_shard)
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        theirs.grad = torch.full_like(theirs, 100.0)
        ours.grad = torch.full_like(ours, 100.0)
    norm = shardwise.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 1.0))
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


@on_ranks(2)
def test_clipping_beside_gradients_that_are_not_reduced_yet() -> None:
    """Where unsharded parameters are registered, those were taken, which differ between ranks."""
    model: Any = wrap(build("mlp"), shardwise.fully_shard)
    model.set_reshard_after_backward(False)
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        model(inputs_for(model, dist.get_rank())).square().mean().backward()
        norms: list[Any] = [None, None]
        dist.all_gather_object(norms, shardwise.clip_grad_norm_(model.parameters(), 1e3).item())
        assert norms[0] == norms[1]


def of_known_gradients(seed: int) -> nn.Linear:
    """A layer, the same for the same seed."""
    torch.manual_seed(seed)
    layer = nn.Linear(4, 6)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape)
    return layer


def copy_gradients(model: nn.Module, truth: nn.Module) -> None:
    """Give the sharded parameters of ``model`` their parts of the gradients of ``truth``."""
    for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert theirs.grad is not None
        ours.grad = shard_like(theirs.grad, ours)


def assert_same_gradients(model: nn.Module, truth: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


@on_ranks(4, size=[1, 2], shared=["sharded", "replicated"])
def test_clipping_with_other_experts_in_each_group_of_ranks(size: int, shared: str) -> None:
    """Each rank had the norm of its own group, so that the rows of a shared gradient were scaled unlike."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("group", "shard"))
    group = mesh["group"].get_local_rank()
    truth = nn.ModuleList(of_known_gradients(seed) for seed in range(1 + world // size))
    model = nn.ModuleList(copy.deepcopy(truth[index]) for index in (0, 1 + group))
    shardwise.fully_shard(model[1], mesh=mesh["shard"])
    shardwise.fully_shard(model[0], mesh=mesh if shared == "replicated" else init_device_mesh("cpu", (world,)))
    for own, index in zip(model, (0, 1 + group), strict=True):
        copy_gradients(own, truth[index])
    for order in (0, 0.5, 1, 3, float("inf"), -1, -float("inf")):
        norm = shardwise.clip_grad_norm_(model.parameters(), 1e9, order)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(truth.parameters(), 1e9, order))
    for own in (model.parameters(), list(reversed(list(model.parameters())))):
        norm = shardwise.clip_grad_norm_(own, 0.5)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(truth.parameters(), 0.5))
    for own, index in zip(model, (0, 1 + group), strict=True):
        assert_same_gradients(own, truth[index])
    for parameter in (model if group else model[0]).parameters():
        parameter.grad = None
    model[1].requires_grad_(group == 0)  # also where that is the cause
    norm = shardwise.clip_grad_norm_(model.parameters(), 0.1)  # which only the first group has something to add to
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(truth[1].parameters(), 0.1))
    if group == 0:
        assert_same_gradients(model[1], truth[1])


@on_ranks(4, parallelism=["tensor", "expert"])
def test_clipping_units_whose_data_parallel_ranks_other_parallelisms_complete(parallelism: str) -> None:
    """They lie on different meshes, and yet all ranks have the same parameters: none counts twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    truth = nn.ModuleList(map(of_known_gradients, range(2)))
    model = copy.deepcopy(truth)
    parallelize_module(model[0], mesh["inner"], ColwiseParallel())
    shardwise.fully_shard(model[0], mesh=mesh["outer"])
    everywhere = init_device_mesh("cpu", (4,))  # experts have other ranks to be cut over than what is beside them
    shardwise.fully_shard(model[1], mesh=mesh["outer"] if parallelism == "tensor" else everywhere)
    copy_gradients(model, truth)
    norm = shardwise.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(truth.parameters(), 0.5))
    assert_same_gradients(model, truth)


@on_ranks(2, 3)
def test_norms_of_every_order_with_shards_without_elements() -> None:
    single = nn.Linear(4, 1)
    model = copy.deepcopy(single)
    shardwise.fully_shard(model)
    x = torch.arange(8.0).view(2, 4)
    for one in (single, model):
        one(x).square().mean().backward()
    for order in (0, 0.5, 1, 3, float("inf"), -1, -float("inf")):
        norm = shardwise.clip_grad_norm_(model.parameters(), 1e9, order)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 1e9, order))


def _options() -> dict[str, dict[str, Any]]:
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return {"hsdp": {"mesh": mesh}, "hsdp, zero2": {"mesh": mesh, "placements": Placements.zero2}}
    return {
        "zero1": {"placements": Placements.zero1},
        "zero2": {"placements": Placements.zero2},
        "ddp": {"placements": Placements.ddp},
        "kept": {"reshard_after_forward": False},
        "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "dim 1": {"shard_placement_fn": _last_dim},
    }


def _last_dim(parameter: nn.Parameter) -> Shard | None:
    last = parameter.ndim - 1
    return Shard(last) if last and parameter.shape[last] % dist.get_world_size() == 0 else None


@on_ranks(2, 4)
def test_with_every_way_to_shard() -> None:
    for title, options in _options().items():
        models = wrapped("mlp", **options), wrapped("mlp", **options)
        for model, make in zip(models, (plain, flat), strict=True):
            train(model, make(torch.optim.AdamW, groups(model), lr=1e-2))
        assert_same(models[1], models[0], title)


class Branches(nn.Module):
    """Of which an input chooses one; the last is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.layers[3].requires_grad_(False)

    def forward(self, x: torch.Tensor, branches: tuple[int, ...]) -> torch.Tensor:
        for branch in branches:
            x = torch.tanh(self.layers[branch](x))
        return self.layers[3](x)


@on_ranks(1, 2, 3)
def test_parameters_without_gradients_keep_their_state() -> None:
    for optimizer_class in (torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam):
        models, optimizers = [], []
        for make in (plain, flat):
            torch.manual_seed(1)
            models.append(shardwise.fully_shard(Branches()))
            momentum = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
            optimizers.append(make(optimizer_class, models[-1].parameters(), lr=1e-2, **momentum))
        for step, branches in enumerate([(0, 1), (1,), (0, 1, 2), (2, 0), (0, 1, 2), (0, 1, 2)]):
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(step)
                model(torch.randn(3, 5), branches).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(models[1], models[0], optimizer_class.__name__)
        assert_same_state(optimizers[1], optimizers[0], optimizer_class.__name__)


@on_ranks(2, 3)
def test_state_dicts_go_both_ways() -> None:
    models = [wrapped("mlp") for _ in range(4)]
    makers: list[Make] = [plain, flat, plain, flat]
    optimizers = [make(torch.optim.AdamW, groups(m), lr=1e-2) for m, make in zip(models, makers, strict=True)]
    for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
        train(model, optimizer)
    for source, target in ((0, 3), (1, 2)):  # the plain one's into a flat one, and the reverse
        models[target].load_state_dict(models[source].state_dict())
        state_dict = optimizers[source].state_dict()
        with tempfile.TemporaryDirectory() as directory:
            torch.save(state_dict, f"{directory}/state.pt")
            loaded = torch.load(f"{directory}/state.pt", weights_only=False)
        optimizers[target].load_state_dict(loaded)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, first=3)
    for other in (1, 2, 3):
        assert_same(models[other], models[0], str(other))
        assert_same_state(optimizers[other], optimizers[0], str(other))


@on_ranks(2, 3)
def test_checkpoints_of_torch_and_of_shardwise() -> None:
    models = [wrapped("mlp") for _ in range(5)]
    optimizers = [flat(torch.optim.AdamW, groups(model), lr=1e-2) for model in models[:4]]
    optimizers.append(torch.optim.AdamW(groups(models[4]), lr=1e-2))
    train(models[0], optimizers[0])
    for full, target in ((False, 1), (True, 2), (True, 4)):
        options = StateDictOptions(full_state_dict=full)
        state = copy.deepcopy(get_optimizer_state_dict(models[0], optimizers[0], options=options))
        models[target].load_state_dict(models[0].state_dict())
        set_optimizer_state_dict(models[target], optimizers[target], state, options=options)
    directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(directory)
    train(models[3], optimizers[3], steps=1, first=7)  # it has state already, which is written in place
    shardwise.save(f"{directory[0]}/checkpoint", model=models[0], optimizer=optimizers[0])
    shardwise.load(f"{directory[0]}/checkpoint", model=models[3], optimizer=optimizers[3])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, first=3)
    for other in (1, 2, 3, 4):
        assert_same(models[other], models[0], str(other))


@on_ranks(2)
def test_step_counts_that_differ_survive_loading_in_place() -> None:
    models = [shardwise.fully_shard(MLP()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (flat(torch.optim.AdamW, model.parameters(), lr=1e-2) for model in models)
    train(models[0], first, steps=2)
    parameters = list(models[0].parameters())
    inputs = inputs_for(models[0], 3)
    models[0](inputs).square().mean().backward()
    parameters[1].grad = None
    first.step()
    first.zero_grad()
    train(models[1], second, steps=1)
    directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(directory)
    shardwise.save(f"{directory[0]}/checkpoint", model=models[0], optimizer=first)
    shardwise.load(f"{directory[0]}/checkpoint", model=models[1], optimizer=second)
    assert [int(second.state[p]["step"]) for p in models[1].parameters()] == [3, 2, 3, 3, 3, 3]
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, first=3)
    assert_same(models[1], models[0])


@on_ranks(2, 3)
def test_accumulation_scaling_and_schedules() -> None:
    models = wrapped("mlp"), wrapped("mlp")
    for model, make in zip(models, (plain, flat), strict=True):
        optimizer = make(torch.optim.AdamW, groups(model), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-3], total_steps=5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            for half in range(2):
                loss = model(inputs_for(model, 100 * step + 10 * half + dist.get_rank())).square().mean()
                scaler.scale(loss if step != 1 else loss * float("inf")).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
    assert_same(models[1], models[0])


@on_ranks(1, 2, 3)
def test_shards_that_were_made_anew() -> None:
    models = wrapped("mlp"), wrapped("mlp")
    for model, make in zip(models, (plain, flat), strict=True):
        optimizer = make(torch.optim.AdamW, groups(model), lr=1e-2)
        train(model, optimizer, steps=2)
        model.to(torch.float64)
        for state in optimizer.state.values():
            state.update({key: value.double() for key, value in state.items() if key != "step"})
        for step in range(2):
            model(inputs_for(model, step).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
        again = make(torch.optim.AdamW, groups(model), lr=1e-2)
        for step in range(2):
            model(inputs_for(model, step).double()).square().mean().backward()
            again.step()
            again.zero_grad()
    assert_same(models[1], models[0])


@on_ranks(2)
def test_flat_shards_of_fairscale() -> None:
    models = []
    for make in (plain, flat):
        torch.manual_seed(1)
        model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(9, 7)), nn.Linear(7, 3)))
        optimizer = make(torch.optim.AdamW, model.parameters(), lr=1e-2)
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 9)).square().mean().backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        models.append((model, model.gather_full_optim_state_dict(optimizer)))
    (one, saved), (other, expected) = models
    for value, truth in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(value, truth)
    if expected is not None:
        assert saved is not None
        assert saved["state"].keys() == expected["state"].keys()


@on_ranks(2)
def test_beside_parameters_that_are_not_sharded() -> None:
    results = []
    for make in (plain, flat):
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
        shardwise.fully_shard(layers[0])
        optimizer = make(torch.optim.AdamW, layers.parameters(), lr=1e-2)
        for step in range(3):
            torch.manual_seed(step)
            layers(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((layers, optimizer))
    assert_same(results[1][0], results[0][0])
    assert_same_state(results[1][1], results[0][1])


@on_ranks(2)
def test_zeroing_gradients_in_place_beside_parameters_that_are_not_sharded() -> None:
    layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    shardwise.fully_shard(layers[0])
    for settings in ({}, {"foreach": True}, {"fused": True}):
        optimizer = flat(torch.optim.AdamW, layers.parameters(), **settings)
        layers(torch.randn(4, 5)).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)
        assert not any(whole(parameter.grad).any() for parameter in layers.parameters())
        assert {name: optimizer.defaults[name] for name in settings} == settings


@on_ranks(4)
def test_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for make in (plain, flat):
        model = parallelize_module(
            build("mlp"), mesh["tp"], {"layers.1": ColwiseParallel(), "layers.2": RowwiseParallel()}
        )
        wrap(model, shardwise.fully_shard, mesh=mesh["dp"])
        optimizer = make(torch.optim.AdamW, groups(model), lr=1e-2)
        train(model, optimizer, rank=mesh["dp"].get_local_rank())
        results.append((model, optimizer))
    assert_same(results[1][0], results[0][0])
    assert_same_state(results[1][1], results[0][1])


@on_ranks(2)
def test_an_optimizer_made_before_wrapping() -> None:
    results = []
    for make in (plain, flat):
        model = build("mlp")
        optimizer = make(torch.optim.AdamW, groups(model), lr=1e-2)
        model(inputs_for(model, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wrap(model, shardwise.fully_shard)
        with pytest.raises(StateError, match=r"shardwise.repoint"):
            optimizer.step()
        shardwise.repoint(optimizer)
        train(model, optimizer)
        results.append((model, optimizer))
    assert_same(results[1][0], results[0][0])
    assert_same_state(results[1][1], results[0][1])


@on_ranks(2)
def test_a_compiled_update() -> None:
    models = wrapped("mlp"), wrapped("mlp")
    optimizers = [flat(torch.optim.AdamW, groups(model), lr=1e-2) for model in models]
    compiled = torch.compile(_update, backend="eager")
    for step in range(3):
        for model, optimizer, update in zip(models, optimizers, (_update, compiled), strict=True):
            model(inputs_for(model, 10 * step + dist.get_rank())).square().mean().backward()
            update(optimizer)
            assert all(parameter.grad is None for parameter in model.parameters())
    for parameter, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), whole(expected))


@on_ranks(2)
def test_a_compiled_step_with_a_closure() -> None:
    """Lightning passes one to every step."""
    models = wrapped("mlp"), wrapped("mlp")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    compiled = torch.compile(_update, backend="eager")
    for step in range(3):
        for model, optimizer, update in zip(models, optimizers, (_update, compiled), strict=True):

            def closure(model: Any = model, step: int = step) -> torch.Tensor:
                loss = model(inputs_for(model, 10 * step + dist.get_rank())).square().mean()
                loss.backward()
                return loss

            update(optimizer, closure)
    for parameter, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), whole(expected))


def _update(optimizer: Optimizer, closure: Any = None) -> None:
    optimizer.step(closure)
    optimizer.zero_grad()


@on_ranks(2)
def test_clipping_one_by_one() -> None:
    model = MLP((8, 16, 4))
    wrap(model, shardwise.fully_shard, mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(3, 8)).sum().backward()
    before = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    norm = shardwise.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
    scale = (0.5 / (norm + 1e-6)).clamp(max=1.0)
    assert scale < 1
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad.to_local(), was * scale)
