"""Whatever line of the engine an exception comes from, what is trained afterwards is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise import EMA, FSDPCommContext, MixedPrecisionPolicy, fully_shard
from shardwise.core.errors import StateError
from shardwise.core.lanes import Lane
from shardwise.core.root import unit_of
from shardwise.optim import flat

from ..interruptions import interrupted

Mesh = Callable[..., DeviceMesh]
INPUT = torch.linspace(-1.0, 1.0, 12).view(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return self.head(inputs)


def sharded(mesh: DeviceMesh, placements: str = "zero3") -> Any:
    torch.manual_seed(0)
    model, precision = Net(), MixedPrecisionPolicy(param_dtype=torch.float64)  # so that one rank gathers too
    context = FSDPCommContext("cpu") if placements == "zero3 of one context" else None
    for layer in (*model.layers, model):
        strategy = placements.partition(" ")[0]
        fully_shard(layer, mesh=mesh, mp_policy=precision, placements=strategy, comm_ctx=context)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = model(INPUT).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def losses_after(
    mesh: DeviceMesh, earlier: int, interrupt: Callable[[Any], None], resets: bool, placements: str = "zero3"
) -> list[float]:
    model = sharded(mesh, placements)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(earlier):
        step(model, optimizer)
    interrupt(model)
    if resets:
        model.reset_iter_state()
    optimizer.zero_grad()
    return [step(model, optimizer) for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "earlier"),
    [
        ("make_root", 0),
        ("Unit.join", 0),
        ("FSDPCommContext.join", 0),
        ("FSDPCommContext.start_pass", 1),
        ("Unit._enter_forward", 1),
        ("Unit._leave_forward", 1),
        ("Unit._enter_backward", 1),
        ("Unit.post_backward", 1),
        ("ParamGroup.start_gather", 1),
        ("ParamGroup.wait_for_unshard", 1),
        ("ParamGroup._finish_gathers", 1),
        ("ParameterShards.put_unsharded", 1),
        ("ParamGroup.reshard", 1),
    ],
)
@pytest.mark.parametrize("placements", ["zero3", "zero1"])
def test_iterations(fake_mesh: Mesh, name: str, earlier: int, placements: str) -> None:
    check_iterations(fake_mesh(1), name, earlier, placements)


@pytest.mark.parametrize("name", ["make_root", "Unit.join", "FSDPCommContext.join"])
def test_first_iterations_in_a_context_that_was_given(fake_mesh: Mesh, name: str) -> None:
    check_iterations(fake_mesh(1), name, 0, "zero3 of one context")


def check_iterations(mesh: DeviceMesh, name: str, earlier: int, placements: str) -> None:
    expected = losses_after(mesh, earlier, lambda _: None, True, placements)
    for after in range(200):
        raised: list[int] = []

        def interrupt(model: Any, after: int = after) -> None:
            nonlocal raised
            with suppress(KeyboardInterrupt), interrupted(name, after) as raised:
                model(INPUT).square().mean().backward()

        assert losses_after(mesh, earlier, interrupt, True, placements) == expected, (name, raised)
        if not raised:
            break
    assert 0 < after < 199


def gradients_after_a_step(model: Any) -> list[torch.Tensor]:
    model(INPUT).square().mean().backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]


def test_a_backward_whose_end_is_being_queued(fake_mesh: Mesh) -> None:
    """What earlier backward passes left unreduced goes with it."""
    mesh = fake_mesh(1)
    expected = gradients_after_a_step(sharded(mesh))
    for after in range(20):
        model = sharded(mesh)
        model.set_requires_gradient_sync(False)
        model(INPUT).square().mean().backward()
        model.set_requires_gradient_sync(True)
        loss = model(INPUT).square().mean()
        with suppress(KeyboardInterrupt), interrupted("queue_end_of_backward", after) as raised:
            loss.backward()
        if not raised:
            break
        torch.testing.assert_close(gradients_after_a_step(model), expected, rtol=0, atol=0)
    assert 0 < after < 19


@pytest.mark.parametrize("name", ["Unit.leave_by_exception", "Unit._end_failed_call", "Unit._leave_call"])
@pytest.mark.parametrize(
    ("register", "resets"),
    [("register_forward_hook", True), ("register_forward_hook", False), ("register_forward_pre_hook", False)],
)
def test_exceptions_in_forward(fake_mesh: Mesh, name: str, register: str, resets: bool) -> None:
    """Once the unit has left its forward, and inside of that."""
    mesh = fake_mesh(1)
    expected = losses_after(mesh, 1, lambda _: None, resets)
    for after in range(200):
        raised: list[int] = []

        def interrupt(model: Any, after: int = after) -> None:
            nonlocal raised
            layer = model.layers[1]
            handle = getattr(layer, register)(lambda *_: torch.empty(3, 5) @ torch.empty(3, 5))
            # A root that was interrupted itself seems to call itself with the next forward.
            of = (lambda _: True) if resets else (lambda unit: not unit.is_root)
            with suppress(KeyboardInterrupt, RuntimeError), interrupted(name, after, of) as raised:
                model(INPUT)
            handle.remove()

        assert losses_after(mesh, 1, interrupt, resets) == expected, (name, raised)
        if not raised:
            break
    assert 0 < after < 199


@pytest.mark.parametrize("name", ["FlatOptimizer._put_flat", "FlatOptimizer._put_back"])
def test_steps_of_flat_optimizers(fake_mesh: Mesh, name: str) -> None:
    mesh = fake_mesh(1)
    for after in range(200):
        model = sharded(mesh)
        optimizer = flat(torch.optim.SGD, model.parameters(), lr=0.5, momentum=0.9)
        step(model, optimizer)
        model(INPUT).square().mean().backward()
        with suppress(KeyboardInterrupt), interrupted(name, after) as raised:
            optimizer.step()
        assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(list(model.parameters()))
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        step(model, optimizer)
        stepped = [not torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)]
        assert any(stepped), raised
        if not raised:
            break
    assert 0 < after < 199


def test_averages_that_are_swapped(fake_mesh: Mesh) -> None:
    model = sharded(fake_mesh(1))
    ema = EMA(model, 0.5)
    step(model, torch.optim.SGD(model.parameters(), 0.5))
    ema.update()
    trained = [parameter.to_local().clone() for parameter in model.parameters()]
    for after in range(200):
        with suppress(KeyboardInterrupt), interrupted("EMA.swap", after) as raised:
            ema.swap()
        if ema.is_swapped:
            ema.swap()
        assert all(torch.equal(p.to_local(), own) for p, own in zip(model.parameters(), trained, strict=True)), raised
        if not raised:
            break
    assert 0 < after < 199


def test_gathers_for_which_there_is_no_memory(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded(fake_mesh(4))
    model(INPUT.double())
    buffers = [buffer for layer in model.layers for group in unit_of(layer).groups for buffer in group.shards.buffers]

    def allocate(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Lane, "allocate", allocate)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(INPUT.double())
    assert [buffer.full.untyped_storage().size() for buffer in buffers] == [0] * len(buffers)


def test_a_tied_parameter_that_is_untied(fake_mesh: Mesh) -> None:
    model = sharded(fake_mesh(2))
    tied = Net()
    tied.head.weight = tied.layers[0].weight
    fully_shard(tied, mesh=unit_of(model).groups[0].mesh.mesh)
    tied(INPUT).sum().backward()
    tied.head.weight = nn.Parameter(tied.layers[0].weight.detach().clone())
    with pytest.raises(StateError, match=r"'layers.0.weight' is tied.*replaced as 'weight' of a Linear alone"):
        tied(INPUT)
    tied.layers[0].weight = tied.head.weight
    tied(INPUT)


class Log(TorchDispatchMode):
    """A mode of the program's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["_idle", "_selective_modes", "eager.<locals>.run"])
def test_selective_checkpoints_leave_the_programs_modes(fake_mesh: Mesh, name: str) -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    mesh, lines, was_raised = fake_mesh(2), 0, True
    while was_raised:
        model = sharded(mesh)
        with Log() as log, suppress(KeyboardInterrupt), interrupted(name, lines) as raised:
            checkpoint(model, INPUT, use_reentrant=False, context_fn=contexts)
        assert not _len_torch_dispatch_stack()
        with log:
            assert _len_torch_dispatch_stack() == 1
        lines, was_raised = lines + 1, bool(raised)
    assert lines > 2
