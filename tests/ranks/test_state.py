"""State dicts, torch's checkpoints, and optimizers made before wrapping."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Placements
from shardwise.core.errors import StateError

from ..models import Transformer, inputs_for, wrap
from .harness import on_ranks
from .truth import state_of, whole

VERBS: dict[str, Any] = {"ours": shardwise.fully_shard, "torch": torch_fully_shard}


def make(seed: int = 1) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(tied=True)


def sharded(verb: str, mesh: DeviceMesh, seed: int = 1, **options: Any) -> nn.Module:
    return wrap(make(seed), VERBS[verb], mesh=mesh, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2, first: int = 0) -> list[torch.Tensor]:
    losses = []
    for step in range(first, first + count):
        loss = model(inputs_for(model, 10 * step + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@contextmanager
def shared_directory() -> Iterator[str]:
    """One temporary directory for all ranks."""
    own = tempfile.TemporaryDirectory()
    names: list[Any] = [own.name]
    dist.broadcast_object_list(names)
    yield names[0]
    dist.barrier()
    own.cleanup()


@on_ranks(1, 2, 3, preset=["ddp", "zero1", "zero2", "zero3"])
def test_state_dict_round_trip(preset: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = getattr(Placements, preset)
    source, target = (sharded("ours", mesh, seed, placements=placements) for seed in (1, 2))
    state = source.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    assert list(state) == list(make().state_dict())
    target.load_state_dict(state)
    assert_equal(state_of(source), state_of(target))
    x = inputs_for(source, 0)
    third = sharded("ours", mesh, 3, placements=placements)
    third(x)
    third.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    with torch.no_grad():
        assert torch.equal(source(x), target(x))
        assert torch.equal(source(x), third(x))
    steps(third, adam(third))


@on_ranks(2, 3)
def test_full_state_dict_and_broadcast_from_rank_zero() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    source, target = sharded("ours", mesh), sharded("ours", mesh, 2)
    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert_equal(dict(full), dict(make().state_dict()))
    else:
        assert not full
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, full, options=options)
    assert_equal(state_of(source), state_of(target))


@on_ranks(2, 4, pair=[("ours", "ours"), ("ours", "torch"), ("torch", "ours")])
def test_checkpoints_of_either_load_into_the_other(pair: tuple[str, str]) -> None:
    """At world size 4 the second shards over two ranks and replicates over two."""
    first, second = pair
    size = dist.get_world_size()
    one = init_device_mesh("cpu", (size,))
    other = one if size == 2 else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    source, target = sharded(first, one), sharded(second, other, 2)
    source_optimizer, target_optimizer = adam(source), adam(target)
    steps(source, source_optimizer)
    with shared_directory() as directory:
        model_state, optimizer_state = get_state_dict(source, source_optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
        model_state, optimizer_state = get_state_dict(target, target_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(
            target,
            target_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    assert_equal(state_of(source), state_of(target))
    losses = zip(steps(source, source_optimizer, 2, 2), steps(target, target_optimizer, 2, 2), strict=True)
    for ours, theirs in losses:
        torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_optimizer_state_dict_is_as_with_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2,))
    states = []
    for verb in VERBS:
        model = sharded(verb, mesh)
        optimizer = adam(model)
        steps(model, optimizer)
        states.append(
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        )
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        other = states[1][name]
        if isinstance(value, DTensor):
            assert torch.equal(value.to_local(), other.to_local()), name  # type: ignore[union-attr]
        else:
            assert value == other, name


@on_ranks(1, 2, preset=["ddp", "zero2", "zero3"])
def test_optimizer_made_before_wrapping(preset: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = sharded("ours", mesh)
    truth = steps(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.5))
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    wrap(model, shardwise.fully_shard, mesh=mesh, placements=getattr(Placements, preset))
    with pytest.raises(RuntimeError, match=r"AdamW holds parameter '.*' as it was before fully_shard.*repoint"):
        optimizer.step()
    assert shardwise.repoint(optimizer) is optimizer
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    for ours, theirs in zip(steps(model, optimizer), truth, strict=True):
        torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_optimizer_of_parameters_that_a_loaded_state_dict_replaced() -> None:
    mesh, losses = init_device_mesh("cpu", (2,)), []
    for replaces in (False, True):
        model = sharded("ours", mesh)
        optimizer = adam(model)
        steps(model, optimizer)
        if replaces:
            held = dict(model.named_parameters())
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            with pytest.raises(RuntimeError, match=r"AdamW? holds parameter 'embed.weight' as it was.*repoint"):
                optimizer.step()
            shardwise.repoint(optimizer)
            assert not {*map(id, held.values())} & {*map(id, optimizer.state)}
        losses.append(steps(model, optimizer, 2, 2))
    assert losses[0] == losses[1]


@on_ranks(2)
def test_optimizer_of_a_parameter_that_was_tied_since() -> None:
    model: Any = sharded("ours", init_device_mesh("cpu", (2,)))
    optimizer = adam(model)
    steps(model, optimizer)
    count = len(optimizer.state)
    block = model.layers[0]
    block.norm1.weight = block.norm2.weight
    shardwise.repoint(optimizer)  # before the next forward nothing is known of it
    model(inputs_for(model, 0)).square().mean().backward()
    with pytest.raises(RuntimeError, match="repoint"):
        optimizer.step()
    shardwise.repoint(optimizer)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(optimizer.state) == count - 1
    optimizer.step()


@on_ranks(2)
def test_optimizer_state_moves_with_the_parameters() -> None:
    mesh, model = init_device_mesh("cpu", (2,)), make()
    groups = [{"params": [model.embed.weight], "lr": 0.3}, {"params": [p for p in model.parameters() if p.ndim == 1]}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    x = inputs_for(model, 0)
    model(x).square().mean().backward()
    optimizer.step()
    before = {key: whole(value) for key, value in optimizer.state[model.embed.weight].items()}
    wrap(model, shardwise.fully_shard, mesh=mesh)
    shardwise.repoint(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 1e-2]
    state = optimizer.state[model.embed.weight]
    assert state["exp_avg"].placements == model.embed.weight.placements  # type: ignore[attr-defined]
    for key, value in before.items():
        assert torch.equal(whole(state[key]), value), key
    assert len(optimizer.state) == 1 + len(groups[1]["params"])
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@on_ranks(2)
def test_marks_on_parameters_survive() -> None:
    model = make()
    model.norm.weight.no_weight_decay = True  # type: ignore[attr-defined]
    wrap(model, shardwise.fully_shard, mesh=init_device_mesh("cpu", (2,)))
    assert model.norm.weight.no_weight_decay  # type: ignore[attr-defined]


def assign(layer: nn.Linear, value: DTensor) -> None:
    layer.weight = nn.Parameter(value)


def assign_data(layer: nn.Linear, value: DTensor) -> None:
    layer.weight.data = value


def assign_data_cut_otherwise(layer: nn.Linear, value: DTensor) -> None:
    layer.weight.data = value.redistribute(placements=[Replicate()])
    layer.weight.data -= 0.5 * value


def swap(layer: nn.Linear, value: DTensor) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(value))


def load(layer: nn.Linear, value: DTensor) -> None:
    layer.load_state_dict({"weight": value}, assign=True)


def small(verb: Any, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for module in (model[0], model[2], model):
        verb(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    return model


def gradients_after(model: nn.Sequential, between: Any) -> list[torch.Tensor]:
    """Gradients of a second backward, with ``between`` before it."""
    x = torch.linspace(-1, 1, 10).view(2, 5) + dist.get_rank()
    for change in (lambda _: None, between):
        model.zero_grad()
        loss = model(x).square().sum()
        change(model)
        loss.backward()
    return [whole(parameter.grad) for parameter in model.parameters()]


def load_all(model: nn.Module, factor: float = 1.0) -> None:
    model.load_state_dict({name: factor * one for name, one in model.state_dict().items()}, assign=True)


@on_ranks(1, 2, 3, preset=["ddp", "zero1", "zero2", "zero3"])
def test_loading_by_assignment_between_forward_and_backward(preset: str) -> None:
    """Gradients come to what is registered then, and the next step computes with that."""
    models = [small(shardwise.fully_shard, placements=getattr(Placements, preset)) for _ in range(2)]
    held = [*models[1].parameters()]
    before = [parameter.detach().clone() for parameter in held]
    for own, expected in zip(gradients_after(models[1], load_all), gradients_after(models[0], id), strict=True):
        assert torch.equal(own, expected)
    load_all(models[0])
    load_all(models[1], 2.0)
    load_all(models[0], 2.0)
    for model in models:
        model.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
    for own, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(whole(own), whole(expected))
        assert torch.equal(whole(own.grad), whole(expected.grad))
    for parameter, values in zip(held, before, strict=True):  # which are the user's
        assert torch.equal(parameter.to_local(), values.to_local())
        assert parameter.grad is None


@on_ranks(2, 3, keeps=[False, True])
def test_other_values_between_forward_and_backward_count_as_in_torch(keeps: bool) -> None:
    ours, theirs = (
        gradients_after(small(verb, reshard_after_forward=not keeps), lambda model: load_all(model, 2.0))
        for verb in (shardwise.fully_shard, torch_fully_shard)
    )
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, expected)


@on_ranks(1, 2, preset=["ddp", "zero2", "zero3"])
def test_conversion_between_forward_and_backward_names_a_parameter(preset: str) -> None:
    model = small(shardwise.fully_shard, placements=getattr(Placements, preset))
    with pytest.raises(StateError, match=r"'2.weight' of unit '2' was converted.*between forward and backward"):
        gradients_after(model, nn.Module.double)
    model.reset_iter_state()
    model(torch.ones(2, 5).double()).sum().backward()
    assert all(parameter.grad.dtype == torch.float64 for parameter in model.parameters())


@on_ranks(2)
def test_conversion_of_what_needs_no_gradient_leaves_backward_alone() -> None:
    """Of what is whole on each rank, the graph keeps the old values."""
    model = small(shardwise.fully_shard, placements=Placements.ddp).requires_grad_(False)
    x = torch.ones(2, 5, requires_grad=True)
    loss = model(x).sum()
    model.double()
    loss.backward()
    small(lambda module, **_: module)(expected := torch.ones(2, 5, requires_grad=True)).sum().backward()
    assert torch.equal(x.grad, expected.grad)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return given


@on_ranks(1, 2, preset=["ddp", "zero2", "zero3"])
def test_conversion_before_a_backward_that_recomputes_all(preset: str) -> None:
    """No graph has what forward computed with."""
    gradients = []
    for converts in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Recomputed(), nn.Linear(5, 5))
        for module in (model[0], model):
            shardwise.fully_shard(module, placements=getattr(Placements, preset))
        given = model[0](torch.linspace(-1, 1, 10).view(2, 5).requires_grad_())
        if converts:
            model[0].double().float()
        given.square().sum().backward()
        gradients.append([whole(parameter.grad) for parameter in model[0].parameters()])
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours, expected)


@on_ranks(2)
def test_marks_of_what_is_loaded_by_assignment_are_seen_in_forward() -> None:
    model = small(shardwise.fully_shard)
    model(torch.ones(2, 5))
    seen: list[tuple[bool, bool]] = []
    model[0].register_forward_hook(
        lambda layer, *_: seen.append((hasattr(layer.weight, "no_decay"), hasattr(layer.weight, "no_grad_clip")))
    )
    model[0].weight.no_decay = True
    load_all(model)
    model(torch.ones(2, 5))
    state = model.state_dict()
    state["0.weight"] = nn.Parameter(state["0.weight"].clone())
    state["0.weight"].no_grad_clip = True
    model.load_state_dict(state, assign=True)
    model(torch.ones(2, 5))
    assert seen == [(False, False), (False, True)]


REPLACING: dict[str, Any] = {one.__name__: one for one in (assign, assign_data, assign_data_cut_otherwise, swap, load)}


@on_ranks(3, how=[*REPLACING], preset=["zero1", "zero3"])
def test_what_replaces_a_parameter_inside_a_unit_counts(how: str, preset: str) -> None:
    """Before the first forward and after a step, with a parameter that keeps its gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 5, bias=False))
    model = copy.deepcopy(plain)
    shardwise.fully_shard(model, mesh=mesh, placements=getattr(Placements, preset))
    x = torch.randn(3, 5)
    for step in range(3):
        value = torch.randn(7, 5)
        REPLACING[how](model[0], distribute_tensor(value, mesh, model[0].weight.placements))
        plain[0].weight.data = 0.5 * value if how == "assign_data_cut_otherwise" else value
        loss, expected = model(x).square().mean(), plain(x).square().mean()
        torch.testing.assert_close(loss, expected, msg=f"step {step}")
        for each, one in ((model, loss), (plain, expected)):
            one.backward()
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
        for ours, truth in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours), truth.detach())


def replace_local(parameter: Any, value: Any) -> None:
    parameter._local_tensor = value._local_tensor


@on_ranks(2, replaces=[torch.utils.swap_tensors, replace_local], preset=["zero2", "zero3"])
def test_shards_that_are_replaced_while_parameters_stay_gathered(replaces: Any, preset: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    shardwise.fully_shard(model, placements=getattr(Placements, preset), reshard_after_forward=False)
    held, x = model.weight, torch.eye(4)
    with torch.no_grad():
        for _ in range(3):
            before = model(x)
            replaces(held, nn.Parameter(held.detach() * 0.5))
            torch.testing.assert_close(model(x), before * 0.5)
            held.to_local().mul_(0.5)
            torch.testing.assert_close(model(x), before * 0.25)


@on_ranks(2)
def test_shards_that_are_written_while_parameters_stay_gathered_after_backward() -> None:
    model = nn.Linear(4, 4, bias=False)
    shardwise.fully_shard(model, reshard_after_forward=True)
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    held, x = model.weight, torch.eye(4)
    for _ in range(2):
        before = model(x)
        before.sum().backward()
        with torch.no_grad():
            held.to_local().mul_(0.5)  # type: ignore[operator]
            torch.testing.assert_close(model(x), before * 0.5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.between = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.between(self.embed(x)).tanh())
        return logits

    def tie(self, first: bool) -> None:
        if first:
            self.head.weight = self.embed.weight
        else:
            self.embed.weight = self.head.weight  # type: ignore[assignment]


@on_ranks(2, 3, units=["", "embed"], options=[{}, {"placements": "zero1"}])
def test_parameters_may_be_tied_after_they_were_sharded(units: str, options: dict[str, Any]) -> None:
    """Before the first step or later, either way round; one parameter then, with one gradient, state and key."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for first, when in ((True, 0), (False, 1)):
        torch.manual_seed(0)
        plain = Tied()
        model = copy.deepcopy(plain)
        for name in units.split():
            shardwise.fully_shard(getattr(model, name), mesh=mesh, **options)
        shardwise.fully_shard(model, mesh=mesh, **options)
        for step in range(4):
            if step == when:
                for each in (model, plain):
                    each.tie(first)
                optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
            batches = [(torch.arange(4) + 2 * other + step) % 7 for other in range(size)]
            F.cross_entropy(model(batches[rank]), batches[rank]).backward()
            for batch in batches:
                (F.cross_entropy(plain(batch), batch) / size).backward()
            if step >= when:
                for optimizer in optimizers:
                    optimizer.step()
            with torch.no_grad():  # between steps, where everything may be kept from before the write
                torch.testing.assert_close(model(batches[0]), plain(batches[0]))
            for unit in (module for module in model.modules() if isinstance(module, shardwise.FSDPModule)):
                unit.reshard()
            named = dict(plain.named_parameters())
            assert dict(model.named_parameters()).keys() == named.keys()
            for name, ours in model.named_parameters():
                torch.testing.assert_close(whole(ours), named[name].detach())
                torch.testing.assert_close(whole(ours.grad), named[name].grad)
            for each in (model, plain):
                each.zero_grad()
        full = shardwise.full_state_dict(model)
        torch.testing.assert_close(full, dict(plain.state_dict()) if rank == 0 else {})
        with shared_directory() as directory:
            shardwise.save(directory, model=model)
            nn.init.zeros_(model.embed.weight)
            shardwise.load(directory, model=model)
        torch.testing.assert_close(whole(model.head.weight), plain.head.weight.detach())
        torch.testing.assert_close(model(batches[0]), plain(batches[0]))
        model.reshard()  # type: ignore[operator]
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())  # and they may part again
        nn.init.zeros_(model.embed.weight)
        assert model(batches[0]).unique().numel() > 1


@on_ranks(2)
@torch.no_grad()
def test_what_cannot_replace_a_parameter_is_named() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4))
    shardwise.fully_shard(model, mesh=mesh)
    x = torch.ones(1, 4)
    own, expected = dict(model.named_parameters()), model(x)
    call = torch.func.functional_call
    assert torch.equal(call(model, own, x), expected)
    assert torch.equal(call(model, {name: one.detach() for name, one in own.items()}, x), expected)
    for value in (torch.zeros(4, 4), distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])):
        with pytest.raises(StateError, match=r"'0\.weight' .* was replaced"):
            call(model, {"0.weight": value}, x)
        assert torch.equal(model(x), expected)
    for value in (torch.zeros(4, 4), distribute_tensor(torch.zeros(4, 5), mesh, [Shard(0)])):
        with pytest.raises(StateError, match=r"plain tensor|\(4, 5\)"):
            model[0].weight.data = value
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StateError, match=r"'0\.weight' .* not sharded"):
        model(x)


@on_ranks(2, preset=["zero3", "zero2", "zero1", "ddp"])
def test_functional_call_while_gathered(preset: str) -> None:
    """With other weights, as of an average: they are used each time, and stay what they are."""
    plain, call, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.func.functional_call, torch.ones(1, 4)
    model: Any = shardwise.fully_shard(copy.deepcopy(plain), placements=preset)
    for step in range(2):
        given = {name: torch.full_like(value, 0.1 + step) for name, value in plain.named_parameters()}
        own, trained = dict(given), {name: value.clone().requires_grad_() for name, value in given.items()}
        with torch.no_grad():
            model.unshard()
            for _ in range(3):
                torch.testing.assert_close(call(model, given, x), call(plain, given, x))
                assert all(given[name] is value for name, value in own.items())
            torch.testing.assert_close(model(x), plain(x))
        model.unshard()
        loss = model(x).square().sum()
        model.unshard()
        found = [torch.autograd.grad(call(one, trained, x).sum(), [*trained.values()]) for one in (model, plain)]
        for ours, truth in zip(*found, strict=True):
            torch.testing.assert_close(ours, truth)
        loss.backward()
        plain(x).square().sum().backward()
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
        model.reshard()
        for name, value in state_of(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())


class Forces(nn.Module):
    """The derivative of a layer by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.layer(x).sum(), x, create_graph=torch.is_grad_enabled())[0]


@on_ranks(2, keeps=[True, False])
def test_functional_call_of_a_derivative_while_gathered(keeps: bool) -> None:
    """With parameters, of another model; backward is over inside of the call."""
    plain, call, x = Forces(), torch.func.functional_call, torch.ones(1, 4)
    teacher = copy.deepcopy(plain)
    nn.init.ones_(teacher.layer[0].weight)  # type: ignore[arg-type]
    model = copy.deepcopy(plain)
    units: list[Any] = [shardwise.fully_shard(one, reshard_after_forward=not keeps) for one in (model.layer, model)]
    given = dict(teacher.named_parameters())
    for _ in range(2):
        for unit in units:
            unit.unshard()
        torch.testing.assert_close(call(model, given, x), teacher(x))
        assert all(given[name] is value for name, value in teacher.named_parameters())
        torch.testing.assert_close(model(x), plain(x))


@on_ranks(2)
@torch.no_grad()
def test_functional_call_with_what_was_detached_before_a_write() -> None:
    plain, call, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.func.functional_call, torch.ones(1, 4)
    model = shardwise.fully_shard(copy.deepcopy(plain))
    own = dict(model.named_parameters())
    model(x)  # the root stays gathered
    for parameters in (plain.parameters(), own.values()):
        for parameter in parameters:
            parameter.mul_(2)
    torch.testing.assert_close(call(model, {name: one.detach() for name, one in own.items()}, x), plain(x))


@on_ranks(2)
def test_what_replaces_a_gathered_parameter_is_used_or_named() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model: Any = copy.deepcopy(plain)
    for one in (*model, model):
        shardwise.fully_shard(one, reshard_after_forward=False)
    x, own, saved = torch.ones(1, 4), list(model.parameters()), model.state_dict()

    def replace() -> None:
        with torch.no_grad():
            model(x)
            model[1].weight, model[1].bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4))
            assert torch.equal(model(x), x)

    replace()
    model(x).sum().backward()
    with torch.no_grad():
        own[-1].zero_()
        plain[1].bias.zero_()
        with pytest.raises(StateError, match=r"'1\.weight' .* was replaced by a Parameter while it was gathered"):
            model(x)
    model.reset_iter_state()
    undone = (
        model.reset_iter_state,
        lambda: [unit.reshard() for unit in (*model, model)],
        lambda: model.to(torch.float32),
        lambda: model.load_state_dict(saved),
        lambda: model.load_state_dict(saved, assign=True),
    )
    for undo in undone:
        replace()
        undo()
        assert [type(parameter) for parameter in model.parameters()] == [type(parameter) for parameter in own]
        torch.testing.assert_close(model(x), plain(x))
    replace()
    for name, value in shardwise.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


@on_ranks(2, keeps=[True, False])
def test_what_is_tied_may_be_tied_again_while_gathered(keeps: bool) -> None:
    plain = Tied()
    model: Any = copy.deepcopy(plain)
    for one in (model.embed, model.head, model):
        shardwise.fully_shard(one, reshard_after_forward=not keeps)
    batch = torch.arange(4)
    for one in (model, plain):
        one.tie(True)
    for _ in range(2):
        with torch.no_grad():
            model(batch)
        if keeps:
            model.tie(True)
        for one in (model, plain):
            one.zero_grad()
            one(batch).square().mean().backward(inputs=list(one.parameters()))
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name).grad), parameter.grad)


@on_ranks(2)
def test_modules_may_go() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for trains_before in (False, True):
        models = [nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) for _ in VERBS]
        models[1].load_state_dict(models[0].state_dict())
        found = []
        for verb, model in zip(VERBS.values(), models, strict=True):
            verb(model[1], mesh=mesh)
            verb(model, mesh=mesh)
            if trains_before:
                model(torch.ones(1, 4)).sum().backward()
            model[1][0] = nn.Identity()  # type: ignore[index]
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            found.append([loss, *(whole(one.grad) for one in model.parameters() if one.grad is not None)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)


@on_ranks(2, 3, offload=[True, False])
def test_offloaded_like_not_offloaded(offload: bool) -> None:
    """On the CPU host and device are the same, and the policy is legal all the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = shardwise.CPUOffloadPolicy() if offload else shardwise.OffloadPolicy()
    model, plain = sharded("ours", mesh, offload_policy=policy), sharded("ours", mesh)
    for ours, theirs in zip(steps(model, adam(model)), steps(plain, adam(plain)), strict=True):
        assert torch.equal(ours, theirs)
    shardwise.clip_grad_norm_(model.parameters(), 1.0)
