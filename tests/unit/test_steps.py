"""What the engine does around an optimizer's step: parameters are plain DTensors in it, and writes are seen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from shardwise import Placements, fully_shard
from shardwise.core.device import local_of, shares_storage
from shardwise.core.errors import StateError
from shardwise.core.parameter import ShardedParameter, SteppedParameter

from ..models import inputs_for
from ..needs import needs_results
from .test_memory import Collectives, build

Mesh = Callable[..., DeviceMesh]


class Watching(torch.optim.SGD):
    """Notes of what type its parameters are while it writes them through ``data``; fails when told."""

    def __init__(self, parameters: Any, fails: bool = False):
        super().__init__(parameters, lr=0.1)
        self.fails = fails
        self.met: list[type] = []

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.met.append(type(parameter))
                    parameter.data.mul_(0.5)
        if self.fails:
            raise KeyError("on purpose")
        return loss


def types_of(model: nn.Module) -> set[type]:
    return {type(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_plain_in_a_step_and_themselves_after_it(fake_mesh: Mesh, fails: bool) -> None:
    model = build(fake_mesh(2))
    frozen = model.layers[0].up.bias.requires_grad_(False)
    optimizer = Watching(model.parameters(), fails)
    for _ in range(2):
        model(inputs_for(model, 0)).sum().backward()
        with torch.no_grad():
            before = [parameter.to_local().clone() for parameter in model.parameters()]
        try:
            optimizer.step()
        except KeyError:
            assert fails
        assert set(optimizer.met) == {SteppedParameter}
        assert types_of(model) == {ShardedParameter}
        for parameter, value in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.to_local(), value if parameter is frozen else value / 2)


def test_a_closure_meets_parameters_as_they_are(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    optimizer = Watching(model.parameters())

    def closure() -> torch.Tensor:
        assert types_of(model) == {ShardedParameter}
        with pytest.raises(StateError, match="was used outside the forward of its unit"):
            model.layers[0].up(torch.ones(1, model.layers[0].up.in_features))
        optimizer.zero_grad()
        loss = model(inputs_for(model, 0)).sum()
        loss.backward()
        return loss

    for arguments, named in (((closure,), {}), ((), {"closure": closure})):
        assert isinstance(optimizer.step(*arguments, **named), torch.Tensor)
        assert set(optimizer.met) == {SteppedParameter}
        assert types_of(model) == {ShardedParameter}


@needs_results
def test_a_closure_runs_many_times_in_a_step(fake_mesh: Mesh) -> None:
    model = fully_shard(nn.Linear(4, 6), mesh=fake_mesh(2))
    met: list[set[type]] = []

    def closure() -> torch.Tensor:
        met.append(types_of(model))
        model.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    torch.optim.LBFGS(model.parameters(), max_iter=3).step(closure)
    assert len(met) > 1
    assert all(types == {ShardedParameter} for types in (*met, types_of(model)))


def test_a_closure_that_fails_leaves_parameters_as_they_are(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    optimizer = Watching(model.parameters())
    with pytest.raises(KeyError):
        optimizer.step(lambda: {}["on purpose"])
    assert not optimizer.met
    assert types_of(model) == {ShardedParameter}


@pytest.mark.parametrize("preset", ["zero1", "zero2"])
def test_kept_parameters_are_gathered_after_a_step(fake_mesh: Mesh, preset: str) -> None:
    model = build(fake_mesh(2), placements=getattr(Placements, preset))
    model(inputs_for(model, 0)).sum().backward()
    optimizer = Watching(model.parameters())
    gathers = []
    for step in (True, False):
        if step:
            optimizer.step()
        with Collectives() as count, torch.no_grad():
            model(inputs_for(model, 0))
        gathers.append(count.gathers)
    optimizer.zero_grad()
    optimizer.step()  # has nothing to write
    with Collectives() as count, torch.no_grad():
        model(inputs_for(model, 0))
    assert gathers[0] > 0 == gathers[1] == count.gathers


def test_a_step_within_a_step(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    model(inputs_for(model, 0)).sum().backward()
    inner = Watching(model.parameters())

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            inner.step()
            assert types_of(model) == {SteppedParameter}

    Outer(model.parameters(), lr=0.1).step()
    assert set(inner.met) == {SteppedParameter}
    assert types_of(model) == {ShardedParameter}


def test_the_next_forward_ends_a_step_whose_exception_is_kept(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    optimizer = Watching(model.parameters(), fails=True)
    model(inputs_for(model, 0)).sum().backward()
    with pytest.raises(KeyError) as kept:
        optimizer.step()
    model(inputs_for(model, 0)).sum().backward()
    assert types_of(model) == {ShardedParameter}
    del kept
    assert types_of(model) == {ShardedParameter}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_keeps_nothing_alive(fake_mesh: Mesh, kind: type[torch.optim.Optimizer]) -> None:
    model = build(fake_mesh(2))
    optimizer = kind(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        for arguments in ((), (lambda: None,)):
            model(inputs_for(model, 0)).sum().backward()
            gradients = [weakref.ref(local_of(parameter.grad)) for parameter in model.parameters()]
            optimizer.step(*arguments)
            optimizer.zero_grad()
            assert not any(gradient() is not None for gradient in gradients)
    finally:
        gc.enable()


class Resets(torch.optim.SGD):
    """Puts back the values from before its step, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            old = [parameter.data.clone() for parameter in parameters]
            if closure is not None:
                closure()
            for parameter, value in zip(parameters, old, strict=True):
                parameter.add_(1.0)
                parameter.data = value


@pytest.mark.parametrize("closure", [None, int])
def test_a_step_may_replace_data(fake_mesh: Mesh, closure: Any) -> None:
    """It went to the DTensor and not to its local tensor, in silence, as with FSDP2."""
    model = build(fake_mesh(2))
    model(inputs_for(model, 0)).sum().backward()
    before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    Resets(model.parameters(), lr=0.1).step(closure)
    for parameter, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.to_local(), value)
    model(inputs_for(model, 0)).sum().backward()


class Copies(torch.optim.SGD):
    """Keeps copies of its parameters, and what pickles have of them."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(slow=copy.deepcopy(parameter), reduced=parameter.__reduce_ex__(2))


def test_parameters_may_be_copied_in_a_step(fake_mesh: Mesh) -> None:
    model = build(fake_mesh(2))
    optimizer = Copies(model.parameters(), lr=0.1)
    model(inputs_for(model, 0)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        slow, reduced = optimizer.state[parameter]["slow"], optimizer.state[parameter]["reduced"]
        assert torch.equal(local_of(slow), local_of(parameter))
        assert not shares_storage(local_of(slow), local_of(parameter))
        assert isinstance(slow, nn.Parameter)
        assert type(slow) is DTensor
        assert "SteppedParameter" not in repr(reduced)


class ByDetached(torch.optim.SGD):
    """Copies what it has of its parameters without a graph, and writes through it in compiled code."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        add = torch.compile(lambda to, value: to.add_(value, alpha=-0.1), backend="aot_eager", fullgraph=True)
        for group in self.param_groups:
            for parameter in group["params"]:
                for detached in (parameter.data, parameter.detach()):
                    copies = self.state[parameter].setdefault("copies", [])
                    copies += [copy.deepcopy(detached), nn.Parameter(detached).detach().clone()]
                    add(detached, parameter.grad)


@needs_results
def test_detached_parameters_may_be_copied_and_traced_in_a_step(fake_mesh: Mesh) -> None:
    """Of all but the first of a unit neither was possible; with FSDP2 both are."""
    model = build(fake_mesh(2))
    optimizer = ByDetached(model.parameters(), lr=0.1)
    model(inputs_for(model, 0)).sum().backward()
    before = [local_of(parameter).clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        change = 0.1 * local_of(parameter.grad)
        torch.testing.assert_close(local_of(parameter), value - 2 * change)
        for times, copied in zip((0, 0, 1, 1), optimizer.state[parameter]["copies"], strict=True):
            torch.testing.assert_close(local_of(copied), value - times * change)
            assert type(copy.deepcopy(copied)) is DTensor


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("preset", ["zero3", "zero2"])
def test_a_plain_gradient_is_refused_by_name(fake_mesh: Mesh, kind: type[torch.optim.Optimizer], preset: str) -> None:
    model = build(fake_mesh(2), placements=getattr(Placements, preset))
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    weight = next(model.parameters())
    model(inputs_for(model, 0)).sum().backward()
    sharded, weight.grad = weight.grad, torch.ones(weight.shape)
    with pytest.raises(StateError, match=r"the gradient of parameter 'embed.weight' is a plain tensor"):
        optimizer.step()
    assert types_of(model) == {ShardedParameter}
    with implicit_replication():
        optimizer.step()
    weight.grad = sharded
    optimizer.step()


def test_a_plain_gradient_of_one_number_steps_on_one_rank(fake_mesh: Mesh) -> None:
    model = nn.Linear(3, 1)
    before = model.bias.item()
    fully_shard(model, mesh=fake_mesh(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.bias.grad = torch.ones(1)
    optimizer.step()
    assert local_of(model.bias).item() == pytest.approx(before - 0.5)


def test_a_differentiable_step_is_torchs_own(fake_mesh: Mesh) -> None:
    """Which fails for parameters, that are leaves: it is not taken as if it were not differentiable."""
    model = build(fake_mesh(2))
    optimizer = torch.optim.AdamW(model.parameters(), differentiable=True)
    model(inputs_for(model, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        optimizer.step()
