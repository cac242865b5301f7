"""Spec 1.9: what a model may do in forward and backward, against FSDP2 and plain training on all ranks' batches."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise
from shardwise.core import comm as comm_module
from shardwise.core.errors import StateError
from shardwise.core.root import units_of
from shardwise.fairscale import FSDP

from ..models import MLP, Stack, Transformer, wrap
from ..needs import needs_compiled_steps
from .harness import on_ranks
from .truth import (
    Iteration,
    Verb,
    assert_records,
    assert_resharded,
    assert_tensors,
    batch,
    check,
    gradients_of,
    make_optimizer,
    simple_iteration,
    state_of,
    train_plain,
    train_sharded,
    whole,
)

WIDTH = 9


class Layer(nn.Module):
    """A linear layer, a residual and a gate: parameters that divide by no world size."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * torch.tanh(self.linear(x))


def stack(*layers: nn.Module) -> Stack:
    """``layers`` between two plain linear layers that the root owns."""
    return Stack(layers, WIDTH)


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """Bytes that this rank gives to each all-gather and each reduction while inside."""
    seen: dict[str, list[int]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}

    def recording(cls: type, name: str) -> Any:
        original = getattr(cls, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = args[1] if len(args) > 1 else [args[0]]
            seen[name].append(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
            return original(self, *args, **kwargs)

        return mock.patch.object(cls, name, run)

    cls = comm_module.PairwiseGlooComm
    with recording(cls, "all_gather"), recording(cls, "reduce_scatter"), recording(cls, "all_reduce"):
        yield seen


# -- Arguments and outputs


class WithKeywords(nn.Module):
    """A layer that takes everything by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, *, x: torch.Tensor, scales: dict[str, Any], skip: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layer(x) * scales["by"][0]
        return y if skip is None else y + skip


class CallsWithKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.layers = nn.ModuleList([WithKeywords(), WithKeywords()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.layers[0](x=x, scales={"by": (x.mean(), 3)})
        return self.layers[1](x=y, scales={"by": [y.detach()]}, skip=x)


@on_ranks(1, 2, 3)
def test_keyword_arguments() -> None:
    check(CallsWithKeywords)


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclasses.dataclass
class Record:
    left: torch.Tensor
    right: Any


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    left: torch.Tensor
    right: Any


class ModelOutput(OrderedDict):
    """The way of Hugging Face's: an ordered dict whose subclasses are dataclasses, without the fields that are None."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[key] for key in self)


@dataclasses.dataclass
class LayerOutput(ModelOutput):
    left: torch.Tensor | None = None
    right: Any = None
    missing: torch.Tensor | None = None


OUTPUTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "dict": (lambda a, b: {"left": a, "right": b}, lambda out: (out["left"], out["right"])),
    "ordered": (lambda a, b: OrderedDict(left=a, right=b), lambda out: (out["left"], out["right"])),
    "list": (lambda a, b: [a, b], lambda out: (out[0], out[1])),
    "namedtuple": (lambda a, b: Pair(a, b), lambda out: (out.left, out.right)),
    "nested": (
        lambda a, b: {"x": [Pair(a, None), ({"deep": (b,)}, 3)]},
        lambda out: (out["x"][0].left, out["x"][1][0]["deep"][0]),
    ),
    "none": (lambda a, b: (None, a, b, None), lambda out: (out[1], out[2])),
    "dataclass": (lambda a, b: Record(a, b), lambda out: (out.left, out.right)),
    "frozen": (lambda a, b: FrozenRecord(a, b), lambda out: (out.left, out.right)),
    "model_output": (lambda a, b: LayerOutput(a, b), lambda out: (out["left"], out.right)),
    "record_in_dict": (lambda a, b: {"out": Record(a, (b, None))}, lambda out: (out["out"].left, out["out"].right[0])),
}


class Splits(nn.Module):
    """A layer with two outputs in a container."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.left, self.right = kind, Layer(), Layer()

    def forward(self, x: torch.Tensor) -> Any:
        return OUTPUTS[self.kind][0](self.left(x), self.right(x))


class Joins(nn.Module):
    """A layer that takes such a container."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layer = kind, Layer()

    def forward(self, value: Any) -> torch.Tensor:
        a, b = OUTPUTS[self.kind][1](value)
        return self.layer(a) * b


@on_ranks(2, kind=list(OUTPUTS), view=[False, True])
def test_containers(kind: str, view: bool) -> None:
    class ViewSplits(Splits):
        def forward(self, x: torch.Tensor) -> Any:
            return OUTPUTS[self.kind][0](self.left(x).view(-1, WIDTH), self.right(x)[:])

    # FSDP2 does not look into dataclasses.
    known = kind not in ("dataclass", "frozen", "record_in_dict")
    if kind == "model_output" and torch.__version__ < "2.13":
        known = False  # torch 2.11's neither, and it then reads freed memory
    make = ViewSplits if view else Splits
    check(lambda: stack(make(kind), Joins(kind)), against_torch=known, steps=2)


@on_ranks(1, kind=list(OUTPUTS))
def test_containers_keep_their_types_and_identity(kind: str) -> None:
    unit = Splits(kind)
    plain = unit(batch(0, 0, 2, WIDTH))
    shardwise.fully_shard(unit, mp_policy=shardwise.MixedPrecisionPolicy(output_dtype=torch.float64))
    output = unit(batch(0, 0, 2, WIDTH))
    assert type(output) is type(plain)
    a, b = OUTPUTS[kind][1](output)
    assert a.dtype == b.dtype == torch.float64
    if kind == "model_output":
        assert output["left"] is output.left
        assert list(output) == ["left", "right"]
        assert output.missing is None


class Adds(Layer):
    """Adds what it finds to a container that its caller gave it."""

    def forward(self, x: torch.Tensor, found: Any) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = super().forward(x)
        if isinstance(found, list):
            found.append(y.square())
        elif isinstance(found, dict):
            found["left"] = found["left"] + y.square()
        else:
            found.left = found.left + y.square()
        return y


class Collects(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList([Adds(), Adds(), Adds()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(())
        found: Any = {"list": [zero], "dict": {"left": zero}, "record": Record(zero, zero)}[self.kind]
        for layer in self.layers:
            x = layer(x, found)
        return x + (sum(found) if self.kind == "list" else found["left"] if self.kind == "dict" else found.left)


@on_ranks(2, kind=["list", "dict", "record"], cast=[False, True])
def test_containers_that_forward_changes(kind: str, cast: bool) -> None:
    """All but the first layer changed copies, in silence; so do FSDP2's."""
    dtype = torch.float32 if cast else None
    options = {"mp_policy": shardwise.MixedPrecisionPolicy(param_dtype=dtype)}
    check(lambda: Collects(kind), against_torch=False, steps=2, **options)


class Keeps(Layer):
    """Shows its parameters, and views of them, in a list."""

    def forward(self, x: torch.Tensor, shown: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        shown += [self.linear.weight, self.linear.weight.t()]
        y: torch.Tensor = super().forward(x)
        return y


class UsesWhatIsKept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Keeps()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shown = [x * 2, self.layers[0](x)]
        y: torch.Tensor = self.layers[1](shown[1], shown)
        return y @ shown[2] @ shown[3]


@on_ranks(2, reshard=[False, True])
def test_parameters_in_a_container_that_was_given(reshard: bool) -> None:
    """Their memory was freed, as that of outputs is not."""
    check(UsesWhatIsKept, against_torch=False, steps=2, reshard_after_forward=reshard)


class Notes(Layer):
    """Puts a loss of its own into a list, which its parameters are needed for after its output."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.noted = kind, nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor, losses: list[Any]) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = super().forward(x)
        losses.append(self.noted if self.kind == "parameter" else torch.tanh(x @ self.noted))
        return y


class CollectsLosses(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList([Notes(kind), Layer(), Notes(kind)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, losses) if isinstance(layer, Notes) else layer(x)
        noted = sum(loss.square().mean() for loss in losses)
        return x * 0 + noted if self.kind == "alone" else x + noted


@on_ranks(2, kind=["loss", "parameter", "alone"], reshard=[True, False])
def test_what_is_put_into_an_empty_list(kind: str, reshard: bool) -> None:
    """There was nothing in it to replace, so it was not looked at: backward, or its reader, met freed memory."""
    check(lambda: CollectsLosses(kind), against_torch=False, steps=2, reshard_after_forward=reshard)


@on_ranks(2)
def test_parameters_in_an_empty_list_without_gradients() -> None:
    unit, noted = shardwise.fully_shard(Notes("parameter")), list[torch.Tensor]()
    with torch.no_grad():
        unit(torch.ones(2, WIDTH), noted)
    assert torch.equal(noted[0], torch.eye(WIDTH))


class Writes(Layer):
    """Returns nothing."""

    def forward(self, state: dict[str, torch.Tensor]) -> None:  # type: ignore[override]
        state["x"] = super().forward(state["x"]).view(-1, WIDTH)


class ReadsWhatIsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = Layer(), nn.ModuleList([Writes(), Writes(), Writes()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"x": self.first(x)}
        for layer in self.layers:
            layer(state)
        return state["x"]


@on_ranks(2, reshard=[False, True])
def test_outputs_that_are_only_in_a_container_that_was_given(reshard: bool) -> None:
    check(ReadsWhatIsWritten, against_torch=False, steps=2, reshard_after_forward=reshard)


class Nothing(nn.Module):
    """Takes part in forward, gives None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> None:
        self.layer(x)


class IgnoresAnOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Nothing(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        assert self.layers[1](x) is None
        return self.layers[2](x)


@on_ranks(2, reshard=[True, False])
def test_output_is_none(reshard: bool) -> None:
    model = check(IgnoresAnOutput, reshard_after_forward=reshard)
    assert all(parameter.grad is None for parameter in model.layers[1].parameters())


class MixedOutputs(nn.Module):
    """Outputs of which some require no grad, one an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return {"hidden": y, "mask": y > 0, "detached": y.detach(), "best": y.argmax(-1), "count": 3}


class UsesMixedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MixedOutputs(), Layer(), MixedOutputs()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers[0](x)
        y = self.layers[1](out["hidden"] * out["mask"] + out["detached"])
        out = self.layers[2](y)
        return out["hidden"] + out["detached"] * out["best"].unsqueeze(-1)


@on_ranks(2, reshard=[True, False])
def test_outputs_without_gradients(reshard: bool) -> None:
    check(UsesMixedOutputs, reshard_after_forward=reshard)


class MiddleWithoutInputGradient(nn.Module):
    """The middle unit's input is cut from the graph; it is another way by which no input tells that it is done."""

    def __init__(self, freeze_middle: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        if freeze_middle:
            self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[2](x + self.layers[1](x.detach()))


@on_ranks(2, freeze=[True, False], reshard=[True, False])
def test_middle_unit_gets_inputs_without_gradients(freeze: bool, reshard: bool) -> None:
    check(lambda: MiddleWithoutInputGradient(freeze), reshard_after_forward=reshard)


# -- How often, and in which order


class Repeats(nn.Module):
    """One unit that runs several times in a forward."""

    def __init__(self, times: int = 3, first_without_gradient: bool = False):
        super().__init__()
        self.times, self.first_without_gradient = times, first_without_gradient
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.first_without_gradient:
            x = self.layers[1](x)
        for _ in range(self.times):
            x = self.layers[0](x)
        return x


@on_ranks(2, 3, reshard=[True, False], first_without_gradient=[True, False])
def test_module_runs_several_times(reshard: bool, first_without_gradient: bool) -> None:
    make = lambda: Repeats(3, first_without_gradient)  # noqa: E731
    check(make, bitwise=False, reshard_after_forward=reshard)


@on_ranks(2)
def test_unit_without_a_root_runs_twice_and_reduces_once() -> None:
    unit = shardwise.fully_shard(nn.Linear(WIDTH, WIDTH))
    for step in range(2):
        loss = unit(torch.tanh(unit(batch(step, dist.get_rank(), 4, WIDTH)))).square().mean()
        with counted() as seen:
            loss.backward()
        assert len(seen["reduce_scatter"]) == 1, seen


def several_forwards(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    losses = [model(batch(10 * step + part, rank, 4, WIDTH)).square().mean() for part in range(3)]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss


def several_backwards(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    losses = [model(batch(10 * step + part, rank, 4, WIDTH)).square().mean() for part in range(3)]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum()


def reversed_backwards(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    losses = [model(batch(10 * step + part, rank, 4, WIDTH)).square().mean() for part in range(3)]
    for loss in reversed(losses):
        loss.backward()
    return torch.stack(losses).sum()


def retained_graph(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss = model(batch(step, rank, 4, WIDTH)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_losses_of_one_forward(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    out = model(batch(step, rank, 4, WIDTH))
    first, second = out.square().mean(), out.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def forward_that_nobody_uses(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    unused = model(batch(50 + step, rank, 4, WIDTH))
    loss = model(batch(step, rank, 4, WIDTH)).square().mean()
    loss.backward()
    del unused
    return loss


def forward_between(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Validation between the training forward and its backward."""
    loss = model(batch(step, rank, 4, WIDTH)).square().mean()
    with torch.no_grad():
        model(batch(50 + step, rank, 4, WIDTH))
    loss.backward()
    return loss


ITERATIONS: list[Iteration] = [
    several_forwards,
    several_backwards,
    reversed_backwards,
    retained_graph,
    two_losses_of_one_forward,
    forward_that_nobody_uses,
    forward_between,
]


@on_ranks(2, iteration=[each.__name__ for each in ITERATIONS], reshard=[True, False, None])
def test_forwards_and_backwards(iteration: str, reshard: bool | None) -> None:
    run = next(each for each in ITERATIONS if each.__name__ == iteration)
    check(lambda: stack(Layer(), Layer()), run, bitwise=False, reshard_after_forward=reshard)


@on_ranks(2, iteration=[each.__name__ for each in ITERATIONS])
def test_forwards_and_backwards_of_a_repeated_unit(iteration: str) -> None:
    run = next(each for each in ITERATIONS if each.__name__ == iteration)
    check(Repeats, run, bitwise=False)


def penalized(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A gradient penalty: the backward of a backward needs the parameters after that, so they are kept."""
    units = [module for module in model.modules() if isinstance(module, TorchFSDPModule)]
    for unit in units:
        unit.set_reshard_after_backward(False, recurse=False)
    x = batch(step, rank, 4, WIDTH).requires_grad_()
    out = model(x).square().mean()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    loss = out + gradient.square().sum()
    loss.backward()
    for unit in units:
        unit.reshard()
    return loss


@on_ranks(2)
def test_gradient_penalty() -> None:
    make = lambda: stack(Layer(), Layer())  # noqa: E731
    check(make, penalized, bitwise=False, reshard_after_forward=False)


def input_gradient(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Gradients of the inputs alone, then a training step that takes them as a constant."""
    x = batch(step, rank, 4, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    if isinstance(model, TorchFSDPModule):
        assert all(parameter.grad is None for parameter in model.parameters())
    loss = model(x.detach() + gradient).square().mean()
    loss.backward()
    return loss


@on_ranks(2, reshard=[True, False])
def test_torch_autograd_grad(reshard: bool) -> None:
    check(lambda: stack(Layer(), Layer()), input_gradient, reshard_after_forward=reshard)


def onto_some(taken: str) -> Iteration:
    """Leaves gradients at other parameters in each step, of which some are the root's; ``taken`` from the model before
    forward or after it."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        parameters = list(model.parameters())
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        if taken == "after":
            parameters = list(model.parameters())
        loss.backward(inputs=parameters if step == 0 else parameters[step % 2 :: 3])
        return loss

    return run


@on_ranks(1, 2, 3, preset=["zero3", "zero2", "zero1", "ddp"], taken=["before", "after"])
def test_backward_onto_parameters_that_are_named(preset: str, taken: str) -> None:
    """FSDP2 leaves none at sharded ones."""
    check(lambda: stack(Layer(), Layer()), onto_some(taken), steps=4, against_torch=False, placements=preset)


@on_ranks(2, offload=[True, False])
def test_backward_onto_parameters_that_stay_gathered(offload: bool) -> None:
    options: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    check(lambda: stack(Layer(), Layer()), onto_some("after"), steps=4, reshard_after_forward=False, **options)


@on_ranks(4)
def test_backward_onto_parameters_cut_over_a_smaller_world() -> None:
    check(lambda: stack(Layer(), Layer()), onto_some("after"), against_torch=False, reshard_after_forward=2)


@on_ranks(2)
def test_backward_onto_what_forward_does_not_compute_with() -> None:
    plain = Layer()
    model = shardwise.fully_shard(copy.deepcopy(plain))
    (model.linear.weight.square().sum() + model.gate.sum()).backward(inputs=[model.linear.weight])
    assert model.gate.grad is None
    torch.testing.assert_close(whole(model.linear.weight.grad), 2 * plain.linear.weight.detach())
    model.gate.requires_grad_(False)
    frozen = model.gate
    with pytest.raises(RuntimeError, match="not require grad"):
        model(torch.ones(2, WIDTH)).sum().backward(inputs=[frozen])
    model.reshard()
    old = model.linear.weight
    old.grad = None
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model(torch.ones(2, WIDTH)).sum().backward(inputs=[old])
    assert all(one.grad is None for one in (old, *model.parameters()))
    replaced = plain.gate
    with pytest.raises(StateError, match="'gate' as it was before fully_shard"):
        shardwise.fully_shard(plain)(torch.ones(2, WIDTH)).sum().backward(inputs=[replaced])


@on_ranks(2, kind=["fully_shard", "joined"])
def test_backward_onto_parameters_in_any_container(kind: str) -> None:
    torch.manual_seed(1)
    model: nn.Module = shardwise.fully_shard(Layer()) if kind == "fully_shard" else FSDP(Layer())

    def gradients(inputs: Any) -> list[torch.Tensor | None]:
        model(torch.ones(2, WIDTH)).square().mean().backward(inputs=inputs)
        found = [None if one.grad is None else whole(one.grad) for one in registered]
        for one in registered:
            one.grad = None
        if isinstance(model, shardwise.FSDPModule):
            model.reshard()
        return found

    registered = list(model.parameters())
    expected = gradients(registered)
    assert all(one is not None for one in expected)
    for container in (tuple(registered), set(registered), dict(enumerate(registered)).values()):
        torch.testing.assert_close(gradients(container), expected)
    torch.testing.assert_close(gradients(registered[-1]), [*([None] * (len(registered) - 1)), expected[-1]])
    if torch.__version__ < "2.13":
        with pytest.raises(TypeError, match="takes a list"):
            gradients(iter(registered))
    else:
        torch.testing.assert_close(gradients(iter(registered)), expected)


class ChecksPlainParameters(nn.Module):
    """Asks autograd for its parameters' gradients inside forward, as implicit layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = self.layer(x.detach()).square().mean()
            (gradient,) = torch.autograd.grad(inner, self.layer.gate)
        return self.layer(x) + gradient.detach()


@on_ranks(2)
def test_autograd_grad_of_parameters_inside_forward() -> None:
    check(lambda: stack(Layer(), ChecksPlainParameters()))


class LossesOfLayers(Stack):
    """Trains each layer by a loss of its own while the forward around them goes on, which has parameters too."""

    def forward(self, x: torch.Tensor, stop_after: int | None = None) -> torch.Tensor:
        x = self.first(x)
        total = x.square().mean()
        for layer in self.layers:
            x = layer(x.detach())
            x.square().mean().backward()
        return self.last(x.detach()).square() + total


@on_ranks(1, 2, preset=["ddp", "zero2", "zero3"])
def test_backward_of_layers_inside_forward_of_the_root(preset: str) -> None:
    check(
        lambda: LossesOfLayers([Layer(), Layer(), Layer()], WIDTH),
        wrapping=lambda model, verb: wrap(model, verb, placements=preset),
        against_torch=False,
    )


# -- Modes


@on_ranks(1, 2, mode=["no_grad", "inference_mode"], reshard=[True, False])
def test_first_forward_without_gradients(mode: str, reshard: bool) -> None:
    guard = getattr(torch, mode)

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        with guard():
            before = model(batch(step, rank, 4, WIDTH))
        out = model(batch(step, rank, 4, WIDTH))
        assert torch.equal(before, out)
        loss = out.square().mean()
        loss.backward()
        return loss

    check(
        lambda: stack(Layer(), Layer()),
        run,
        against_torch=mode == "no_grad",
        reshard_after_forward=reshard,
    )


class EnablesGradients(Layer):
    """Whoever calls it."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            return {"given": x, "made": super().forward(x)}


class EnablesGradientsOfArguments(Layer):
    """Gives what it makes to a container, or changes what it is given."""

    def forward(self, x: torch.Tensor, made: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.enable_grad():
            made["made"] = super().forward(x)
            made["changed"].mul_(self.gate.sum())
        return made["made"]


class DisablesGradients(Stack):
    """Trains its layers alone, and those by what gradients they enable."""

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)["made"]
        return x


@on_ranks(1, 2, reshard=[True, False])
def test_gradients_that_forward_enables_itself(reshard: bool) -> None:
    def of_root(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        with torch.no_grad():
            loss = model(batch(step, rank, 4, WIDTH))["made"].square().mean()
            assert not loss.requires_grad
            made = model(batch(step, rank, 4, WIDTH))["made"]
        made.square().mean().backward()
        return loss

    layers = lambda: DisablesGradients([EnablesGradients(), EnablesGradients()], WIDTH)  # noqa: E731
    check(layers, against_torch=False, reshard_after_forward=reshard)

    def of_argument(name: str) -> Callable[[nn.Module, int, int], torch.Tensor]:
        def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
            made = {"changed": batch(step, rank, 4, WIDTH)}
            with torch.no_grad():
                model(batch(step, rank, 4, WIDTH), made)
            loss = made[name].square().mean()
            loss.backward()
            return loss

        return run

    wrapping = lambda model, verb: verb(model, reshard_after_forward=reshard)  # noqa: E731
    check(EnablesGradients, of_root, against_torch=False, wrapping=wrapping)
    for name in ("made", "changed"):
        check(EnablesGradientsOfArguments, of_argument(name), against_torch=False, wrapping=wrapping)
    model = wrap(stack(EnablesGradients()), shardwise.fully_shard).layers[0]
    given = batch(0, 0, 4, WIDTH).requires_grad_().exp()
    with torch.no_grad():
        assert model(given)["given"] is given
    with counted() as seen:
        given.sum().backward()
    assert not any(seen.values())  # the unit has no part in that


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"])
def test_wrapped_and_first_run_in_inference_mode(preset: str) -> None:
    def wrapping(model: nn.Module, verb: Verb) -> None:
        wrap(model, verb, placements=preset)
        with torch.inference_mode():
            model(batch(0, 0, 4, WIDTH))

    check(lambda: stack(Layer(), Layer()), wrapping=wrapping, against_torch=False)


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"])
def test_evaluation_between_steps(preset: str) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        model.eval()
        with torch.no_grad():
            loss = loss.detach() + model(batch(100, 0, 4, WIDTH)).mean()
        model.train()
        return loss

    make = lambda: stack(Layer(), nn.Sequential(Layer(), nn.Dropout(0.5)))  # noqa: E731
    check(make, run, against_torch=False, placements=preset)


@on_ranks(2)
def test_evaluation_prefetch_is_freed() -> None:
    """A forward that ends early leaves nothing gathered."""
    model = stack(Layer(), Layer(), Layer())
    wrap(model, shardwise.fully_shard, reshard_after_forward=True)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad():
        model(x, stop_after=1)
    assert_resharded(model)
    model(x).sum().backward()
    assert_resharded(model)


@on_ranks(2)
def test_micro_batches_gather_nothing_for_each_other() -> None:
    """Where no root with parameters lies between them: each gathers its two layers for forward and for backward."""
    model = nn.Sequential(Layer(), Layer())
    for module in (*model, model):
        shardwise.fully_shard(module, reshard_after_forward=True)
    for _ in range(3):
        with counted() as seen:
            for part in range(3):
                model.set_is_last_backward(part == 2)  # type: ignore[operator]
                model(batch(part, dist.get_rank(), 4, WIDTH)).sum().backward()
        assert len(seen["all_gather"]) == 3 * 4


@on_ranks(2)
def test_one_reduction_for_each_of_two_backwards_through_a_unit_that_runs_twice() -> None:
    """Also in the second, which begins when an iteration seems to be over."""
    torch.manual_seed(1)
    unit = shardwise.fully_shard(Layer())
    for step in range(2):
        losses = [
            unit(torch.tanh(unit(batch(2 * step + k, dist.get_rank(), 4, WIDTH).requires_grad_()))) for k in (0, 1)
        ]
        for loss in reversed(losses):
            with counted() as seen:
                loss.square().sum().backward()
            assert len(seen["reduce_scatter"]) == 1


# -- Frozen, unused and tied parameters


def freeze(model: Stack, kind: str) -> Stack:
    """Freeze some of a stack of three layers."""
    if kind in ("unit", "both"):
        model.layers[1].requires_grad_(False)
    if kind in ("within", "both"):
        model.layers[0].linear.weight.requires_grad_(False)
        model.layers[2].gate.requires_grad_(False)
    if kind == "first":
        model.first.requires_grad_(False)
        model.layers[0].requires_grad_(False)
    if kind == "adapters":  # everything but one vector in the middle
        model.requires_grad_(False)
        model.layers[1].gate.requires_grad_(True)
    return model


@on_ranks(2, 3, kind=["unit", "within", "both", "first", "adapters"], reshard=[True, False])
def test_frozen_parameters(kind: str, reshard: bool) -> None:
    check(lambda: freeze(stack(Layer(), Layer(), Layer()), kind), reshard_after_forward=reshard)


@on_ranks(2)
def test_frozen_parameters_cost_no_gradient_communication() -> None:
    model = freeze(stack(Layer(), Layer(), Layer()), "adapters")
    wrap(model, shardwise.fully_shard)
    loss = model(batch(0, dist.get_rank(), 4, WIDTH)).square().mean()
    with counted() as seen:
        loss.backward()
    padded = 2 * -(-WIDTH // 2)
    assert len(seen["reduce_scatter"]) == 1, seen
    # The vector, and for each rank one number that says who has a gradient, padded to 16 bytes.
    assert seen["reduce_scatter"][0] <= 4 * padded + 2 * 16, seen
    assert not seen["all_reduce"]


@on_ranks(2)
def test_frozen_model_trains_its_input() -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = batch(step, rank, 4, WIDTH).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        return loss + x.grad.square().sum()

    check(lambda: stack(Layer(), Layer()).requires_grad_(False), run)


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"])
def test_requires_grad_toggled_between_steps(preset: str) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        model.layers[0].linear.weight.requires_grad_(step % 2 == 0)
        model.layers[1].requires_grad_(step != 1)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    make = lambda: stack(Layer(), Layer(), Layer())  # noqa: E731
    check(make, run, steps=5, against_torch=False, placements=preset)
    if preset == "zero3":
        check(make, run, steps=5)


@on_ranks(2, reshard=[True, False])
def test_frozen_between_forward_and_backward(reshard: bool) -> None:
    """The gradients of that backward do not come back when it is trained again."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(stack(Layer(), Layer()))
    wrap(models[0], shardwise.fully_shard, reshard_after_forward=reshard)
    frozen = [(model.layers[0].linear.weight, model.first.bias) for model in models]

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        chosen = frozen[models.index(model)]
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        for parameter in chosen:
            parameter.requires_grad_(step != 1)
        loss.backward()
        for parameter in chosen:
            parameter.requires_grad_(True)
        return loss

    ours, truth = train_sharded(models[0], run, 4), train_plain(models[1], run, 4)
    assert_records(ours, truth, "plain training", bitwise=False)


@on_ranks(2, reshard=[True, False], registered=[True, False])
def test_frozen_by_a_hook_during_its_backward(reshard: bool, registered: bool) -> None:
    """Whether the hook freezes what is registered or the sharded parameter, the gradient that it has is reduced, and
    does not come back when it is trained again."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(stack(Layer(), Layer()))
    wrap(models[0], shardwise.fully_shard, reshard_after_forward=reshard)
    chosen = [model.layers[0].linear.weight for model in models]
    for model, parameter in zip(models, chosen, strict=True):

        def freeze(layer: Any, *_: Any, parameter: nn.Parameter = parameter) -> None:
            (layer.linear.weight if registered else parameter).requires_grad_(False)

        model.layers[0].register_full_backward_hook(freeze)

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        parameter = chosen[models.index(model)]
        parameter.requires_grad_(step != 1)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        assert not parameter.requires_grad
        return loss

    ours, truth = train_sharded(models[0], run, 3), train_plain(models[1], run, 3)
    assert_records(ours, truth, "plain training", bitwise=False)


@on_ranks(2)
def test_unfrozen_after_wrapping_and_first_forward() -> None:
    """FSDP2's root is still gathered then, and what is unfrozen are its unsharded parameters."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if step == 1:
            model.requires_grad_(True)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        if step:
            loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()).requires_grad_(False), run, against_torch=False)


@on_ranks(2, registered=[True, False], freezes=[True, False])
def test_frozen_or_thawed_while_unsharded(registered: bool, freezes: bool) -> None:
    """What is registered then, or the sharded parameter; counts in the next forward and in all after it."""
    torch.manual_seed(1)
    plain = stack(Layer(), Layer())
    plain.first.weight.requires_grad_(freezes)
    model: Any = copy.deepcopy(plain)
    wrap(model, shardwise.fully_shard)
    sharded = model.first.weight
    model.unshard()
    (model.first.weight if registered else sharded).requires_grad_(not freezes)
    plain.first.weight.requires_grad_(not freezes)
    for step in range(2):
        model(batch(step, dist.get_rank(), 4, WIDTH)).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (plain(batch(step, rank, 4, WIDTH)).square().mean() / dist.get_world_size()).backward()
        assert sharded.requires_grad == (not freezes)
        torch.testing.assert_close(gradients_of(model), gradients_of(plain))


class PartlyUsed(nn.Module):
    """A unit that may leave some parameters out, or all."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = Layer(), Layer(), Layer()

    def forward(self, x: torch.Tensor, use: bool = True, use_any: bool = True) -> torch.Tensor:
        if not use_any:
            return x * 1.5
        x = self.used(x)
        return self.sometimes(x) if use else x


class PartlyUsedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), PartlyUsed(), Layer()])

    def forward(self, x: torch.Tensor, **use: bool) -> torch.Tensor:
        return self.layers[2](self.layers[1](self.layers[0](x), **use))


@on_ranks(2, 3, reshard=[True, False])
def test_parameters_unused_on_all_ranks(reshard: bool) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH), use=step == 1).square().mean()
        loss.backward()
        return loss

    check(PartlyUsedModel, run, reshard_after_forward=reshard)


@on_ranks(2, 3, what=["use", "use_any"], reshard=[True, False], limit=40.0)
def test_parameters_unused_on_some_ranks(what: str, reshard: bool) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH), **{what: (rank + step) % 2 == 0}).square().mean()
        loss.backward()
        return loss

    check(PartlyUsedModel, run, against_torch=False, reshard_after_forward=reshard)


class TiedStack(nn.Module):
    """Two layers of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other = nn.Linear(WIDTH, 7, bias=False), nn.Linear(WIDTH, 7, bias=False)
        self.other.weight = self.embed.weight
        self.layers = nn.ModuleList([Layer(7)])
        self.head = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.other.weight is self.embed.weight
        return self.head(self.layers[0](self.embed(x)) + self.other(x * 2))


@on_ranks(2, 3)
def test_tied_parameters() -> None:
    model = check(TiedStack)
    assert model.other.weight is model.embed.weight
    assert isinstance(model.embed.weight, DTensor)


@on_ranks(2, 3)
def test_tied_to_one_that_a_unit_inside_ignores() -> None:
    def make() -> nn.Module:
        layers = [Layer(), Layer()]
        layers[1].linear.weight = layers[0].linear.weight
        return Stack(layers, WIDTH)

    def wrapping(model: Any, verb: Verb) -> None:
        verb(model.layers[0], ignored_params={model.layers[0].linear.weight})
        verb(model)

    model: Any = check(make, wrapping=wrapping)
    assert model.layers[0].linear.weight is model.layers[1].linear.weight


@on_ranks(2)
def test_tied_parameters_are_gathered_once_and_stay_tied() -> None:
    torch.manual_seed(1)
    model = Transformer(layers=1, tied=True)
    unique = sum(parameter.numel() for parameter in model.parameters())
    wrap(model, shardwise.fully_shard)
    assert model.head.weight is model.embed.weight
    # Sharded ones and their bytes: one of each.
    assert len({id(p) for p in model.parameters()}) == len(list(model.named_parameters()))
    tokens = torch.randint(0, 29, (2, 8))
    with counted() as seen:
        model(tokens)
    sent = sum(seen["all_gather"]) // 4
    assert unique // 2 <= sent <= unique // 2 + 64, (sent, unique)
    model.to(torch.float64)
    assert model.head.weight is model.embed.weight
    model(tokens).mean().backward()
    model.load_state_dict(model.state_dict(), assign=True)
    assert model.head.weight is model.embed.weight
    model(tokens).mean().backward()
    assert model.head.weight.grad is not None


@on_ranks(2, preset=["zero2", "zero3"], assign=[True, False], name=["embed.weight", "head.weight"])
def test_tied_parameters_loaded_by_one_name(preset: str, assign: bool, name: str) -> None:
    """Checkpoints often have a tied weight once, under either name."""
    model = Transformer(layers=1, tied=True)
    wrap(model, shardwise.fully_shard, placements=preset)
    weight = model.embed.weight
    assert isinstance(weight, DTensor)
    value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    sharded = torch.distributed.tensor.distribute_tensor(value, weight.device_mesh, weight.placements)
    model.load_state_dict({name: sharded}, strict=False, assign=assign)
    assert model.head.weight is model.embed.weight
    assert torch.equal(whole(model.embed.weight), value)
    tokens = torch.randint(0, 29, (2, 8))
    plain = Transformer(layers=1, tied=True)
    plain.load_state_dict(state_of(model), strict=False)
    torch.testing.assert_close(model(tokens), plain(tokens))
    assert model.head.weight is model.embed.weight or not isinstance(model.embed.weight, DTensor)


@on_ranks(2)
def test_tied_transformer() -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randint(0, 29, (2, 8), generator=generator)).square().mean()
        loss.backward()
        return loss

    check(lambda: Transformer(layers=2, tied=True), run)


# -- Activation checkpointing


class Checkpointed(nn.Module):
    """Layers, each (or two at a time) under activation checkpointing."""

    def __init__(self, reentrant: bool, segment: int = 1, dropout: float = 0.0, layers: int = 4):
        super().__init__()
        self.reentrant, self.segment = reentrant, segment
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Layer(), nn.Dropout(dropout)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for start in range(0, len(self.layers), self.segment):
            part = self.layers[start : start + self.segment]

            def run(y: torch.Tensor, part: nn.ModuleList = part) -> torch.Tensor:
                for layer in part:
                    y = layer(y)
                return y

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x


class CheckpointsInside(nn.Module):
    """A layer that checkpoints part of its own forward."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.inner, self.outer, self.drop = Layer(), Layer(), nn.Dropout(0.3)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(torch.relu(self.inner(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(checkpoint(self._compute, x, use_reentrant=self.reentrant))


@on_ranks(2, reentrant=[True, False], segment=[1, 2, 4], reshard=[True, False])
def test_checkpointing_around_units(reentrant: bool, segment: int, reshard: bool) -> None:
    check(lambda: Checkpointed(reentrant, segment, dropout=0.3), reshard_after_forward=reshard)


@on_ranks(2, reentrant=[True, False], reshard=[True, False])
def test_checkpointing_inside_units(reentrant: bool, reshard: bool) -> None:
    check(lambda: stack(CheckpointsInside(reentrant), CheckpointsInside(reentrant)), reshard_after_forward=reshard)


@on_ranks(2, reentrant=[True, False])
def test_checkpointing_of_frozen_and_repeated_units(reentrant: bool) -> None:
    class Shared(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    def make() -> nn.Module:
        model = Shared(reentrant, layers=3)
        model.layers[1].requires_grad_(False)
        return model

    # FSDP2 reduces a unit that reentrant checkpointing repeats before its gradient is complete.
    check(make, bitwise=False, against_torch=not reentrant)


@on_ranks(2, reentrant=[True, False])
def test_checkpointing_of_the_root(reentrant: bool) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = batch(step, rank, 4, WIDTH).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
        loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, bitwise=False)


@on_ranks(2, reentrant=[True, False], iteration=["several_forwards", "several_backwards"])
def test_checkpointing_with_several_forwards(reentrant: bool, iteration: str) -> None:
    run = next(each for each in ITERATIONS if each.__name__ == iteration)
    check(lambda: Checkpointed(reentrant, layers=2), run, bitwise=False, against_torch=not reentrant)


@on_ranks(2, reentrant=[True, False])
def test_nested_checkpointing(reentrant: bool) -> None:
    """Checkpointing around units that checkpoint inside."""

    class Nested(Checkpointed):
        def __init__(self) -> None:
            super().__init__(False)
            self.layers = nn.ModuleList([CheckpointsInside(reentrant), CheckpointsInside(reentrant)])

    # Reentrant in non-reentrant is not possible with plain torch.
    if reentrant:
        return
    check(Nested)


class SavesSome(Stack):
    """Runs its layers twice, each time under a checkpoint that saves what the operators named by ``saved`` give."""

    def __init__(self, *saved: str):
        super().__init__([Layer() for _ in range(3)], WIDTH)
        self.saved = saved
        self.seen: list[Any] = []

    def _choose(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self.seen.append(operator)
        is_saved = any(part in str(operator) for part in self.saved)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.view(-1, WIDTH, 1).view(-1, WIDTH))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(self._choose)

        x = self.first(x)
        twice = [checkpoint(self._compute, y, use_reentrant=False, context_fn=contexts) for y in (x, 2 * x)]
        return self.last(twice[0] + twice[1])  # type: ignore[no-any-return]


@on_ranks(2, saved=[("addmm",), ("view",), ("c10d",), ("",)], reshard=[True, False])
def test_selective_checkpoints_leave_out_what_the_engine_does(saved: tuple[str, ...], reshard: bool) -> None:
    """Their recomputation took gathered values of forward, or for those of the model, as with FSDP2."""
    check(lambda: SavesSome(*saved), bitwise=False, against_torch=False, reshard_after_forward=reshard)
    seen = []
    for model in (SavesSome(*saved), wrap(SavesSome(*saved), shardwise.fully_shard, reshard_after_forward=reshard)):
        model(batch(0, 0, 4, WIDTH)).sum().backward()
        seen.append(model.seen)
    assert seen[0] == seen[1]


@on_ranks(2)
def test_a_mode_that_would_read_freed_memory_is_refused() -> None:
    """It ends the process; with FSDP2 it fails without a name."""
    model = wrap(stack(Layer()), shardwise.fully_shard)
    x = batch(0, 0, 4, WIDTH)
    with (
        allow_mutation_on_saved_tensors(),
        pytest.raises(StateError, match=r"unit 'Stack \(root\)' inside .*allow_mutation_on_saved_tensors"),
    ):
        model(x)
    model(x).sum().backward()
    with allow_mutation_on_saved_tensors():
        wrap(stack(Layer()), shardwise.fully_shard, placements="zero1")(x).sum().backward()


# -- Other ways in


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.head.bias * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


@on_ranks(2, reshard=[True, False], by_torch=[False, True])
def test_custom_forward_methods(reshard: bool, by_torch: bool) -> None:
    def wrapping(model: nn.Module, verb: Verb) -> None:
        wrap(model, verb, reshard_after_forward=reshard)
        ours = verb is shardwise.fully_shard and not by_torch
        register = shardwise.register_fsdp_forward_method if ours else torch_register_forward_method
        register(model, "encode")

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = batch(step, rank, 4, WIDTH)
        loss = model.encode(x, scale=2.0).square().mean()
        if step != 1:
            loss = loss + model.layers[1](x).square().mean()
        loss.backward()
        return loss

    check(Encoder, run, wrapping=wrapping, bitwise=False)


@on_ranks(2, reshard=[True, False, None])
def test_custom_forward_method_inside_forward(reshard: bool | None) -> None:
    """Leaving the inner method does not end the outer forward. (For FSDP2 it does.)"""

    def wrapping(model: nn.Module, verb: Verb) -> None:
        wrap(model, verb, reshard_after_forward=reshard)
        shardwise.register_fsdp_forward_method(model, "encode")

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        if step != 1:
            loss = loss + model.encode(batch(step, rank, 4, WIDTH), scale=2.0).square().mean()
        loss.backward()
        return loss

    check(Encoder, run, wrapping=wrapping, against_torch=False)


@on_ranks(2, kind=["earlier", "earlier kept", "earlier checkpointed", "inner", "inner kept", "evaluating"])
def test_backward_inside_a_forward_of_the_same_units(kind: str) -> None:
    """Of what an earlier forward gave, or one inside of it: the forward that goes on keeps its parameters. (With FSDP2
    it does not.)"""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        x = batch(step, rank, 4, WIDTH)
        earlier = None if "inner" in kind else model(x / 2).square().mean()

        def go_backward(*_: Any) -> None:
            handle.remove()
            (model(x / 2).square().mean() if earlier is None else earlier).backward()

        linear = next(module for module in model.layers[0].modules() if isinstance(module, nn.Linear))
        handle = linear.register_forward_hook(go_backward)
        with torch.set_grad_enabled(kind != "evaluating"):
            loss = model(x).square().mean()
        if kind != "evaluating":
            loss.backward()
        return loss

    make = lambda: Checkpointed(False, layers=2) if "checkpointed" in kind else stack(Layer(), Layer())  # noqa: E731
    check(make, run, against_torch=False, reshard_after_forward="kept" not in kind)


class KeepsEncoding(Encoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        self.encoding = self.encode(x)
        return out


class GivesItsWeight(Encoder):
    def encode(self, x: torch.Tensor) -> Any:
        return self.head.weight, super().encode(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, encoding = self.encode(x)
        assert weight is self.head.weight
        return F.linear(encoding, weight)


@on_ranks(2, reshard=[True, False])
def test_a_parameter_that_a_custom_forward_method_gives_inside_forward(reshard: bool) -> None:
    model: Any = GivesItsWeight()
    plain = copy.deepcopy(model)
    shardwise.fully_shard(model, reshard_after_forward=reshard)
    shardwise.register_fsdp_forward_method(model, "encode")
    x = batch(0, 0, 4, WIDTH)
    for one in (model, plain):
        one(x).square().mean().backward()
    for name, expected in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        if expected.grad is not None:
            torch.testing.assert_close(whole(gradient), expected.grad)


@on_ranks(2, reshard=[True, False], together=[True, False])
def test_what_a_custom_forward_method_gives_inside_forward_and_that_does_not_return(
    reshard: bool, together: bool
) -> None:
    """Backward comes to it first, or alone."""

    def wrapping(model: nn.Module, verb: Verb) -> None:
        wrap(model, verb, reshard_after_forward=reshard)
        ours = verb is shardwise.fully_shard
        (shardwise.register_fsdp_forward_method if ours else torch_register_forward_method)(model, "encode")

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        encoding, model.encoding = model.encoding.square().mean(), None
        for one in [loss + encoding] if together else [encoding, loss]:
            one.backward()
        return loss

    check(KeepsEncoding, run, wrapping=wrapping)


class ModifiesInput(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        x.mul_(self.layer.gate)
        return self.layer(x)


class InputIsAView(nn.Module):
    """Gives a unit a view, and uses the base after the unit changed it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.layers = nn.ModuleList([ModifiesInput()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.first(x).sin()
        return self.layers[0](base[:, :WIDTH]) + base[:, :WIDTH] + base[:, WIDTH:]


@on_ranks(2, reshard=[True, False])
def test_input_modified_in_place(reshard: bool) -> None:
    # FSDP2 refuses it.
    make = lambda: stack(ModifiesInput(), ModifiesInput())  # noqa: E731
    check(make, against_torch=False, reshard_after_forward=reshard)


class InputModifiedThenUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([ModifiesInput()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.layers[0](x)
        return y + 2 * x  # the changed one


@on_ranks(2)
def test_input_modified_in_place_is_seen_outside() -> None:
    check(InputModifiedThenUsed, against_torch=False)


@on_ranks(2)
def test_view_input_modified_in_place() -> None:
    check(InputIsAView, against_torch=False)


class OnlyModifiesInput(ModifiesInput):
    """Gives nothing but its changed input."""

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        x.add_(self.layer(x.clone()))


class OnlyModified(nn.Module):
    """Of two units that change their inputs alone, the first gets one that requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OnlyModifiesInput(), OnlyModifiesInput()])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        self.layers[0](x)
        y = x.sin()
        self.layers[1](y)
        result: torch.Tensor = self.last(y)
        return result


def as_one(model: nn.Module, verb: Verb) -> None:
    verb(list(model.layers))
    verb(model)


@on_ranks(2, wrapping=[None, as_one], reshard=[True, False])
def test_modified_input_is_the_only_output(wrapping: Any, reshard: bool) -> None:
    """Nothing told of the unit's backward, whose parameters were gone. FSDP2 refuses one that requires a gradient."""
    options = {} if wrapping else {"reshard_after_forward": reshard}
    check(OnlyModified, wrapping=wrapping, against_torch=False, **options)


class ModifiesUnseen(ModifiesInput):
    """Changes its input, but not as it was given: by another reference, or without a history."""

    outer: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x * 1)
        if self.outer is not None:
            self.outer.add_(y)
            return y
        with torch.no_grad():
            x.clamp_(-1, 1)
        return y + x


class InputModifiedUnseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([ModifiesUnseen()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit, x = self.layers[0], self.first(x)
        unit.outer = x
        y = unit(x)
        unit.outer = None
        z: torch.Tensor = y + x + unit(x * 2)
        return z


@on_ranks(2)
def test_input_modified_in_place_by_another_reference() -> None:
    """The history of that was replaced by one that does not have it, in silence."""
    check(InputModifiedUnseen, against_torch=False)


@on_ranks(2)
def test_leaf_modified_in_place_without_a_history() -> None:
    """It was refused, as if it were changed with one."""
    torch.manual_seed(1)
    plain = ModifiesUnseen()
    model = shardwise.fully_shard(copy.deepcopy(plain))
    x, y = (torch.linspace(-2, 2, 2 * WIDTH).view(2, WIDTH).requires_grad_() for _ in range(2))
    for module, leaf in ((plain, x), (model, y)):
        module(leaf).square().sum().backward()
    assert torch.equal(x, y)
    torch.testing.assert_close(y.grad, x.grad)


class ModifiesOneOfTwo(ModifiesInput):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + y


@on_ranks(1)
def test_input_given_twice_and_modified_in_place() -> None:
    """Each of both has a history of its own: gradients were wrong in silence. FSDP2 refuses it too."""
    model = shardwise.fully_shard(ModifiesOneOfTwo())
    x = torch.ones(2, WIDTH, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="given several times"):
        model(x, x)
    assert_resharded(model)
    model(x, x * 1).sum().backward()


@on_ranks(1)
def test_input_given_with_a_view_of_it_and_modified_in_place() -> None:
    """As one that is given twice: gradients were wrong in silence. Slices that are apart are not the same."""
    model = shardwise.fully_shard(ModifiesOneOfTwo())
    x = torch.ones(2, 2 * WIDTH, requires_grad=True) * 1
    for one, other in ((x[:, :WIDTH], x[:, 1 : WIDTH + 1]), (x.view(4, WIDTH)[:2], x.view(2, 2, WIDTH)[0])):
        with pytest.raises(RuntimeError, match="with a view of it"):
            model(one, other)
    model(x[:, :WIDTH], x[:, WIDTH:]).sum().backward()


class FailsAfterModifying(ModifiesInput):
    fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            raise ValueError("own")
        return y


@on_ranks(2)
def test_exception_after_an_input_was_modified_that_must_not_be() -> None:
    """A leaf: what leaving the call raises kept the unit unsharded, as if its forward ran still."""
    model: Any = shardwise.fully_shard(FailsAfterModifying())
    with pytest.raises(RuntimeError, match="leaf Variable"):
        model(torch.ones(2, WIDTH, requires_grad=True))
    assert_resharded(model)
    model.fails = False
    model(torch.ones(2, WIDTH)).sum().backward()
    assert_resharded(model)


class GivesSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y.to_sparse()


class SparseBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GivesSparse(), GivesSparse()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).to_dense()
        return x


@on_ranks(2)
def test_sparse_outputs() -> None:
    """They were asked whether their memory is that of a parameter, and have none."""
    check(SparseBetween)


class GivesViews(nn.Module):
    """Outputs that are views: of one tensor, and of the input."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x).sin()
        if self.kind == "slice":
            return y[:, :WIDTH]
        if self.kind == "transposed":
            return y[:, :WIDTH].t()
        if self.kind == "chunks":
            return tuple(part * 1 for part in y.chunk(2, -1)) + y.split(WIDTH, -1)
        if self.kind.endswith("changes"):
            return y, y[:, :WIDTH]
        return y.unflatten(-1, (2, WIDTH)).select(1, 0)


class ModifiesOutput(nn.Module):
    """Changes units' outputs in place."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([GivesViews(kind), Layer(), GivesViews(kind)])

    def _use(self, out: Any) -> torch.Tensor:
        if self.kind == "chunks":
            out[0].mul_(2)
            return out[0] + out[1] + out[2] * out[3]
        if self.kind.endswith("changes"):
            out[self.kind == "view changes"].mul_(2)
            return out[0][:, WIDTH:] * out[0][:, :WIDTH] + out[1]
        if self.kind == "transposed":
            out = out.t()
        out += 1
        out[:, 1:3].mul_(0.5)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._use(self.layers[0](x))
        x = self.layers[1](x).mul_(2).add_(1)
        return self._use(self.layers[2](x))


@on_ranks(2, kind=["slice", "transposed", "chunks", "select", "base changes", "view changes"], reshard=[True, False])
def test_output_modified_in_place(kind: str, reshard: bool) -> None:
    check(lambda: ModifiesOutput(kind), against_torch=False, reshard_after_forward=reshard)


class GivesAViewOfAnother(nn.Module):
    other: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.other[:1]


@on_ranks(2)
def test_view_of_what_is_not_the_units() -> None:
    """The unit was gathered and reduced once more when backward came to that."""
    unit: Any = shardwise.fully_shard(GivesAViewOfAnother())
    x = batch(0, dist.get_rank(), 4, WIDTH).requires_grad_()
    unit.other = x.sin()
    y, view = unit(unit.other * 1)
    with counted() as seen:
        (y.sum() + view.sum()).backward()
    assert (len(seen["all_gather"]), len(seen["reduce_scatter"])) == (0, 1), "a root stays gathered"


class GivesItsInput(nn.Module):
    """The same tensor in and out, beside a new one; or a tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return x, y, y, [x, y]


class UsesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([GivesItsInput(), GivesItsInput()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            same, once, twice, (again, thrice) = layer(x)
            x = (same * once + twice.sin() + again * thrice).tanh()
        return x


@on_ranks(2, reshard=[True, False])
def test_outputs_that_are_inputs(reshard: bool) -> None:
    check(UsesItsInput, reshard_after_forward=reshard)


class GivesItsParameter(nn.Module):
    """A table that is handed out whole, or a view of it."""

    def __init__(self, view: bool):
        super().__init__()
        self.view, self.table = view, nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[0]] if self.view else self.table


class UsesATable(nn.Module):
    def __init__(self, view: bool):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), GivesItsParameter(view)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.layers[1](x)
        return torch.tanh(self.layers[0](x) * table) + table


@on_ranks(2, view=[True, False], preset=["zero2", "zero3"])
def test_output_is_a_parameter(view: bool, preset: str) -> None:
    """It outlives the unit's reshard. (FSDP2 lets the process die.)"""
    model: Any = check(lambda: UsesATable(view), against_torch=False, placements=preset)
    faces = [face for slot in units_of(model.layers[1])[0].groups[0].slots for face in slot.faces]
    assert not any(face._backward_hooks for face in faces)  # one more for each forward


@on_ranks(2, reshard=[None, False])
def test_output_of_the_root_that_is_a_parameter_outlives_backward(reshard: bool | None) -> None:
    """Positions that a detector's root hands out beside the loss, read after backward. (FSDP2 frees their memory.)"""
    for view in (True, False):
        model: Any = shardwise.fully_shard(GivesItsParameter(view), reshard_after_forward=reshard)
        table = model(torch.zeros(2, WIDTH))
        table.sum().backward()
        truth = GivesItsParameter(view)(torch.zeros(2, WIDTH))
        assert torch.equal(table, truth)
        assert model.table.grad.full_tensor().sum() == truth.numel()


@on_ranks(2)
def test_output_of_the_root_that_is_a_parameter_of_a_unit_within() -> None:
    """Which keeps its parameters until backward, and frees them then. (FSDP2's process dies.)"""

    class HandsOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), self.inner.gate[:2]

    model = HandsOut()
    truth = model.inner.gate.detach().clone()[:2]
    shardwise.fully_shard(model.inner, reshard_after_forward=False)
    shardwise.fully_shard(model)
    output, gate = model(torch.ones(3, WIDTH))
    output.sum().backward()
    assert torch.equal(gate, truth)


class Box:
    """An object that is no container."""

    def __init__(self, content: Any):
        self.content = content


class Slots:
    __slots__ = ("content", "empty")

    def __init__(self, content: Any):
        self.content = content


class Sealed:
    """An object that nobody can look into."""

    def __init__(self, content: Any):
        self.open = lambda: content


BOXES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "box": (Box, lambda box: box.content),
    "slots": (Slots, lambda slots: slots.content),
    "nested": (lambda x: {"in": (1, Box([Slots(x)]))}, lambda given: given["in"][1].content[0].content),
    "beside a tensor": (lambda x: (Box(x * 2), x.detach()), lambda given: given[0].content / 2),
    "distribution": (
        lambda x: torch.distributions.Normal(x, 1 + x.sigmoid()),
        lambda normal: normal.mean + normal.variance,
    ),
    "filled by others": (lambda x: Box([x, x.detach()]), lambda box: box.content[0]),
    "cyclic": (lambda x: _in_a_cycle(Box(x)), lambda box: box.content[1]),
}


def _in_a_cycle(box: Box) -> Box:
    box.content = (box, box.content)
    return box


class Boxing(nn.Module):
    """Its middle layer runs ``times``, and gives what ``box`` makes of its output."""

    def __init__(
        self, box: Callable[[torch.Tensor], Any], unbox: Callable[[Any], torch.Tensor], times: int = 1
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), GivesABox(box), Layer()])
        self.unbox, self.times = unbox, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for _ in range(self.times):
            x = self.unbox(self.layers[1](x))
        return self.layers[2](x)


class GivesABox(Layer):
    def __init__(self, box: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.box = box

    def forward(self, x: torch.Tensor) -> Any:
        return self.box(super().forward(x))


@on_ranks(2, kind=[*BOXES], keep=[False, True], times=[1, 3])
def test_outputs_inside_of_objects(kind: str, keep: bool, times: int) -> None:
    """FSDP2 lets the process die, or leaves gradients out."""
    check(lambda: Boxing(*BOXES[kind], times), against_torch=False, reshard_after_forward=not keep)


@on_ranks(2)
def test_outputs_whose_tensors_cannot_all_be_found() -> None:
    """Or do not last as long as the object does."""

    def beside(x: torch.Tensor) -> Any:
        return Box((x * 0, Sealed(x)))

    for box, unbox in ((Sealed, lambda sealed: sealed.open()), (beside, lambda box: box.content[1].open())):
        with pytest.raises(TypeError, match=r"'layers\.1' returned a (Sealed|Box).*cannot be found"):
            check(lambda box=box, unbox=unbox: Boxing(box, unbox), against_torch=False)
    for choose in (lambda weight: weight, lambda weight: weight.t(), lambda weight: weight.detach()):
        model = Boxing(Box, lambda box: box.content[0])
        gives = model.layers[1]
        gives.box = lambda x, gives=gives, choose=choose: Box((x, choose(gives.linear.weight)))
        for unit in (*model.layers, model):
            shardwise.fully_shard(unit)
        with pytest.raises(TypeError, match=r"'layers\.1' returned a Box.*cannot be found"):
            model(torch.ones(2, WIDTH))


class Policy(nn.Module):
    """A distribution around a parameter of its own, as in reinforcement learning, or a copy of it."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.mean, self.scale = Layer(), nn.Parameter(torch.rand(WIDTH))
        self.copies = copies

    def forward(self, x: torch.Tensor) -> Any:
        scale = self.scale.clone() if self.copies else self.scale
        return torch.distributions.Independent(
            torch.distributions.Normal(self.mean(x), scale, validate_args=False), 1, validate_args=False
        )


class Actor(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Policy(copies=copies)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.layers[1](self.layers[0](x))
        return normal.mean.square().mean() + normal.stddev.square().mean()


@on_ranks(2, keep=[True, False])
def test_distributions_as_outputs(keep: bool) -> None:
    check(lambda: Actor(copies=True), against_torch=False, reshard_after_forward=not keep)
    if not keep:
        with pytest.raises(TypeError, match=r"'layers\.1' returned a Independent.*cannot be found"):
            check(lambda: Actor(copies=False), against_torch=False)


@on_ranks(2)
def test_unit_runs_before_its_root_ever_did() -> None:
    """FSDP2 refuses this."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        extra = model.layers[0](batch(step + 30, rank, 4, WIDTH)).square().mean()
        if step == 0:
            extra.backward()
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        if step > 0:
            loss = loss + extra
        loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, against_torch=False)


@on_ranks(2, preset=["ddp", "zero2", "zero3"])
def test_gradients_zeroed_instead_of_dropped(preset: str) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if rank == 0 or isinstance(model, TorchFSDPModule):
            model.zero_grad(set_to_none=False)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        if isinstance(model, TorchFSDPModule):
            model.zero_grad(set_to_none=False)
            model(batch(step, rank, 4, WIDTH)).square().mean().backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, against_torch=False, placements=preset)


@on_ranks(2)
def test_kept_parameters_are_refreshed() -> None:
    """Units that stay gathered after an evaluation see what an optimizer wrote meanwhile, by whatever way."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if isinstance(model, TorchFSDPModule) or rank == 0:
            with torch.no_grad():
                parts = [p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()]
                if isinstance(model, TorchFSDPModule):
                    model(batch(step + 50, rank, 4, WIDTH))
                torch._foreach_mul_(parts, 1.1)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, against_torch=False, reshard_after_forward=False)


@on_ranks(2, preset=["zero2", "zero3"])
def test_unsharding_begins_before_the_step(preset: str) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        if isinstance(model, shardwise.FSDPModule):
            for unit in (*model.layers, model):
                unit.unshard(async_op=True)
        return loss

    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(stack(Layer(), Layer()))
    wrap(models[0], shardwise.fully_shard, placements=preset)
    ours, truth = train_sharded(models[0], run, 3), train_plain(models[1], run, 3)
    assert_records(ours, truth, "plain training", bitwise=False)


@on_ranks(2)
def test_weight_used_outside_after_unshard() -> None:
    """A penalty on a unit's weights, gathered by hand."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        out = model(batch(step, rank, 4, WIDTH))
        if hasattr(model.layers[0], "unshard"):
            model.layers[0].unshard()
        loss = out.square().mean() + (rank + 1) * model.layers[0].linear.weight.square().sum()
        loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, reshard_after_forward=False, bitwise=False)


@on_ranks(2, reshard=[None, False])
def test_reshard_inside_a_forward_that_keeps_parameters(reshard: bool | None) -> None:
    """It waits for backward, as in FSDP2; the forward needs them still."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        def hook(*_: Any) -> None:
            model.reshard()
            if reshard is False:
                model.layers[0].reshard()

        handles = []
        if isinstance(model, TorchFSDPModule):
            handles = [model.layers[0].register_forward_pre_hook(hook), model.layers[1].register_forward_hook(hook)]
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        for handle in handles:
            handle.remove()
        return loss

    check(lambda: stack(Layer(), Layer()), run, reshard_after_forward=reshard)


# -- Hooks


@on_ranks(2, 3)
def test_post_accumulate_grad_hooks() -> None:
    """An optimizer step inside each parameter's hook."""
    seen: list[str] = []

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if step == 0:
            for name, parameter in model.named_parameters():

                def hook(p: torch.Tensor, name: str = name) -> None:
                    assert p.grad is not None
                    assert isinstance(p.grad, DTensor)
                    assert p.grad.placements == p.placements
                    seen.append(name)
                    with torch.no_grad():
                        p -= 0.1 * p.grad
                    p.grad = None

                parameter.register_post_accumulate_grad_hook(hook)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(1)
    model = stack(Layer(), Layer())
    names = [name for name, _ in model.named_parameters()]
    wrap(model, shardwise.fully_shard)
    ours = train_sharded(model, run, 3)
    assert sorted(seen) == sorted(3 * names)
    torch.manual_seed(1)
    plain = stack(Layer(), Layer())
    truth = train_plain(plain, simple_iteration(), 0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(dist.get_world_size()):
            (plain(batch(step, rank, 4, WIDTH)).square().mean() / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    truth.parameters = state_of(plain)
    for name, value in ours.parameters.items():
        assert_tensors(name, value, truth.parameters[name], bitwise=False)


@on_ranks(2)
def test_tensor_hooks_on_sharded_parameters() -> None:
    """``register_hook`` on a parameter changes its gradient, wherever the parameter lives."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if step == 0 and (rank == 0 or isinstance(model, TorchFSDPModule)):
            model.layers[0].gate.register_hook(lambda gradient: gradient * 3)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, against_torch=False)


@on_ranks(2, 3)
def test_tensor_hooks_from_before_sharding() -> None:
    """They go along to the sharded parameters, and are removed there (FSDP2 drops them, in silence)."""
    calls: list[tuple[int, ...]] = []
    handles: list[Any] = []

    def note(parameter: torch.Tensor, mask: torch.Tensor) -> None:
        assert parameter.grad is not None
        calls.append(tuple((parameter.grad * mask).shape))

    def make() -> nn.Module:
        model = stack(Layer(), Layer())
        first, second = model.layers[0], model.layers[1]
        first.gate.register_hook(lambda gradient: gradient * 3)
        mask = torch.arange(first.linear.weight.numel()).view_as(first.linear.weight) % 3
        first.linear.weight.register_hook(lambda gradient: gradient * mask)
        rising = torch.arange(first.linear.bias.numel(), dtype=first.linear.bias.dtype)
        first.linear.bias.register_hook(lambda gradient: rising)
        handles.append(second.gate.register_hook(lambda gradient: gradient * 5))
        half = torch.full(second.gate.shape, 0.5)
        handles.append(second.gate.register_post_accumulate_grad_hook(lambda one: note(one, half)))
        return model

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if step == 1:
            for handle in handles:
                handle.remove()
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(make, run, against_torch=False)
    size = dist.get_world_size()
    assert calls == [tuple(Layer().gate.shape)] * (1 + size)  # of the sharded one, and of one process for each rank


@on_ranks(2)
def test_module_hooks() -> None:
    """Users' forward and backward hooks see whole tensors and count once."""
    calls: list[str] = []

    def add_hooks(model: nn.Module) -> None:
        layer = model.layers[0]
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        layer.register_forward_hook(lambda m, args, out: out + m.gate)
        layer.register_full_backward_hook(lambda m, gi, go: calls.append("full"))
        layer.register_full_backward_pre_hook(lambda m, go: calls.append("pre"))

    def make() -> nn.Module:
        model = stack(Layer(), Layer())
        add_hooks(model)
        return model

    check(make, against_torch=False)
    assert calls[:2] == ["pre", "full"]


# -- Modules that are particular about their weights


class Recurrent(nn.Module):
    def __init__(self, cls: Any):
        super().__init__()
        self.layers = nn.ModuleList([cls(WIDTH, 5, num_layers=2, batch_first=True, bidirectional=True)])
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, state = self.layers[0](x.unsqueeze(1).expand(-1, 3, -1))
        state = state[0] if isinstance(state, tuple) else state
        return self.head(out).mean(1) + state.mean()


@on_ranks(2, 3, cls=[nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_units(cls: Any) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            model(batch(step, rank, 4, WIDTH))
        model.train()
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(lambda: Recurrent(cls), run)


class Attention(nn.Module):
    def __init__(self, whole_layer: bool):
        super().__init__()
        self.whole_layer = whole_layer
        if whole_layer:
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, 0.2, batch_first=True) for _ in range(2))
        else:
            self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.first = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unsqueeze(0)
        for layer in self.layers:
            x = layer(x) if self.whole_layer else layer(x, x, x, need_weights=False)[0]
        return x


@on_ranks(2, 3, whole_layer=[True, False])
def test_attention_units(whole_layer: bool) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        model.eval()  # the fast path
        with torch.no_grad():
            model(batch(step, rank, 4, WIDTH))
        model.train()
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(lambda: Attention(whole_layer), run)


@on_ranks(2)
def test_weight_norm_parametrization() -> None:
    def make() -> nn.Module:
        layer = Layer()
        nn.utils.parametrizations.weight_norm(layer.linear)
        return stack(layer, Layer())

    check(make)


# -- Classes and lists of modules


@on_ranks(2)
def test_slices_of_wrapped_containers() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Layer() for _ in range(3))
    model.chain = nn.Sequential(Layer(), Layer(), Layer())
    for layer in (*model.blocks, *model.chain):
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model.chain)
    assert type(model.chain).__name__ == "FSDPSequential"
    assert type(model.chain).__mro__[1] is shardwise.FSDPModule or type(model.chain).__mro__[0] is not nn.Sequential
    assert isinstance(model.chain, TorchFSDPModule)
    assert isinstance(model.chain, nn.Sequential)
    assert type(model.blocks[:2]) is nn.ModuleList
    part = model.chain[:2]
    assert type(part) is nn.Sequential
    assert list(part) == list(model.chain)[:2]
    assert type(model.blocks[0]) is type(model.chain[0])
    assert isinstance(type(model.blocks[0])(), Layer)
    assert not isinstance(type(model.blocks[0])(), shardwise.FSDPModule)
    part(batch(0, dist.get_rank(), 4, WIDTH)).sum().backward()
    assert model.chain[1].gate.grad is not None
    assert model.chain[2].gate.grad is None


class NormAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip_head: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if skip_head else self.head(x)


@on_ranks(2, 3, reshard=[True, False])
def test_several_modules_as_one_unit(reshard: bool) -> None:
    def wrapping(model: nn.Module, verb: Verb) -> None:
        for layer in model.layers:
            verb(layer, reshard_after_forward=reshard)
        verb([model.norm, model.head], reshard_after_forward=reshard)
        verb(model)

    check(NormAndHead, wrapping=wrapping)


@on_ranks(2)
def test_several_modules_gather_once() -> None:
    model = nn.Sequential(Layer(), Layer(), Layer())
    shardwise.fully_shard([model[0], model[1]], reshard_after_forward=True)
    shardwise.fully_shard(model)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    with counted() as seen:
        loss = model(x).sum()
        forward = len(seen["all_gather"])
        loss.backward()
    assert forward == 2
    assert len(seen["all_gather"]) == 3
    assert len(seen["reduce_scatter"]) == 2


@on_ranks(2)
def test_several_modules_of_one_unit_to_dtype() -> None:
    """Each is converted by itself, whether the root is wrapped or not."""
    x = batch(0, dist.get_rank(), 4, WIDTH).double()
    for wraps_root in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(Layer(), Layer(), Layer())
        expected = copy.deepcopy(model).double()(x)
        shardwise.fully_shard([model[0], model[1]])
        shardwise.fully_shard(model if wraps_root else model[2])
        torch.testing.assert_close(model.double()(x), expected)
        model[0].float()
        with pytest.raises(RuntimeError, match="convert all parameters of a unit alike"):
            model(x)


@on_ranks(2)
def test_unit_of_several_modules_of_which_one_does_not_run() -> None:
    def wrapping(model: nn.Module, verb: Verb) -> None:
        for layer in model.layers:
            verb(layer)
        verb([model.norm, model.head])
        verb(model)

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH), skip_head=step != 1).square().mean()
        loss.backward()
        return loss

    check(NormAndHead, run, wrapping=wrapping, steps=4, against_torch=False)


@on_ranks(2, reshard=[True, False])
def test_unit_of_several_modules_of_which_one_does_not_run_without_a_root(reshard: bool) -> None:
    """Nothing ends a forward around it: its gradients stayed where no optimizer saw them, in silence."""

    def wrapping(model: nn.Module, verb: Verb) -> None:
        verb([*model.layers])
        verb([model.norm, model.head], reshard_after_forward=reshard)

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        with torch.no_grad():
            model(batch(step + 10, rank, 4, WIDTH), skip_head=step % 2 == 0)
        loss = model(batch(step, rank, 4, WIDTH), skip_head=step not in (1, 4)).square().mean()
        loss.backward()
        return loss

    check(NormAndHead, run, wrapping=wrapping, steps=6, against_torch=False)


class TwoOfOneUnit(nn.Module):
    """Two layers, of which some run under reentrant checkpointing, which hides from forward that backward comes."""

    def __init__(self, checkpointed: str):
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.second, self.other = Layer(), Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(x)
        for name in ("first", "second"):
            layer = getattr(self, name)
            x = checkpoint(layer, x, use_reentrant=True) if name in self.checkpointed else layer(x)
        return x


@on_ranks(2, checkpointed=["first", "second", "first and second"], has_root=[True, False], reshard=[True, False])
def test_several_modules_of_one_unit_under_checkpointing(checkpointed: str, has_root: bool, reshard: bool) -> None:
    """What announced backward for all of them was the output of the last, of whose graph there was none yet."""

    def wrapping(model: nn.Module, verb: Verb) -> None:
        verb([model.first, model.second], reshard_after_forward=reshard)
        verb(model if has_root else model.other)

    check(lambda: TwoOfOneUnit(checkpointed), wrapping=wrapping, against_torch=False)


@on_ranks(2)
def test_nested_units() -> None:
    """Units inside units inside the root, and a unit without parameters of its own."""

    def wrapping(model: nn.Module, verb: Verb) -> None:
        for chain in model.layers:
            verb(chain[0])
            verb(chain)
        verb(model)

    check(lambda: stack(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer())), wrapping=wrapping)


# -- No common root


def wrap_like_the_seed(model: nn.Module, verb: Verb) -> None:
    """Every part is wrapped with one context, and no root."""
    context = shardwise.FSDPCommContext("cpu")
    model.requires_grad_(True)
    names = ["embed", "position", *(f"layers.{index}" for index in range(len(model.layers))), "norm", "head"]
    for name in names:
        shardwise.fully_shard(model.get_submodule(name), comm_ctx=context, module_fqn=name)


def token_iteration(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 29, (3, 8), generator=generator)
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    loss.backward()
    return loss


def recompute_some(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.int64))
    return token_iteration(model, step, rank) + token_iteration(model, step + 50, rank)


@on_ranks(1, 2, 3, 4, iteration=["token_iteration", "recompute_some"])
def test_no_common_root(iteration: str) -> None:
    run = {"token_iteration": token_iteration, "recompute_some": recompute_some}[iteration]
    model = check(lambda: Transformer(layers=3), run, wrapping=wrap_like_the_seed, against_torch=False, steps=4)
    assert type(model) is Transformer


@on_ranks(2)
def test_no_common_root_equals_fsdp2_bit_for_bit() -> None:
    torch.manual_seed(1)
    ours = Transformer(layers=3)
    wrap_like_the_seed(ours, shardwise.fully_shard)
    record = train_sharded(ours, token_iteration, 3)

    def wrapping(model: nn.Module, verb: Verb) -> None:
        for module in (model.embed, model.position, *model.layers, model.norm, model.head):
            verb(module)
        verb(model)

    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    torch.manual_seed(1)
    theirs = Transformer(layers=3)
    wrapping(theirs, torch_fully_shard)
    assert_records(record, train_sharded(theirs, token_iteration, 3), "FSDP2", bitwise=True)


@on_ranks(2)
def test_no_common_root_prefetches() -> None:
    """From the second iteration on the next unit is gathered while one computes; the number of gathers stays."""
    torch.manual_seed(1)
    model = Transformer(layers=3)
    wrap_like_the_seed(model, shardwise.fully_shard)
    counts = []
    for step in range(4):
        with counted() as seen:
            token_iteration(model, step, dist.get_rank())
        counts.append((len(seen["all_gather"]), len(seen["reduce_scatter"])))
    assert len(set(counts)) == 1, counts
    assert counts[0] == (14, 7)


# -- Conversions and state dicts


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"])
def test_model_to_dtype(preset: str) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if step == 1:
            model.to(torch.float64)
        dtype = next(model.parameters()).dtype
        loss = model(batch(step, rank, 4, WIDTH).to(dtype)).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(1)
    model = stack(Layer(), Layer())
    wrap(model, shardwise.fully_shard, placements=preset)
    ours = train_without_momentum(model, run)
    torch.manual_seed(1)
    truth = train_without_momentum(stack(Layer(), Layer()), run, plain=True)
    for name, value in ours.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, truth[name], rtol=1e-5, atol=1e-6)


def train_without_momentum(model: nn.Module, run: Iteration, *, plain: bool = False) -> dict[str, torch.Tensor]:
    """Three steps by an optimizer without state; it is made anew for each, as parameters may be replaced."""
    for step in range(3):
        ranks = range(dist.get_world_size()) if plain else [dist.get_rank()]
        for rank in ranks:
            run(model, step, rank)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad / len(ranks)
                parameter.grad = None
    return state_of(model)


@on_ranks(1, 2, 3, preset=["ddp", "zero2", "zero3"], init=["sharded", "unsharded", "load"])
def test_meta_device_start(preset: str, init: str) -> None:
    torch.manual_seed(1)
    source = stack(Layer(), Layer())
    values = {name: value.detach().clone() for name, value in source.named_parameters()}

    def wrapping(model: nn.Module, verb: Verb) -> None:
        wrap(model, verb, placements=preset)
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        with torch.no_grad():
            if init == "unsharded":
                for unit in (*model.layers, model):
                    unit.unshard()
                    unit.reshard()
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                if init != "load":
                    local = torch.distributed.tensor.distribute_tensor(
                        values[name], parameter.device_mesh, parameter.placements
                    )
                    parameter.copy_(local)
            if init == "load":
                model.load_state_dict(
                    {
                        name: torch.distributed.tensor.distribute_tensor(
                            values[name], parameter.device_mesh, parameter.placements
                        )
                        for name, parameter in model.named_parameters()
                    },
                    assign=True,
                )

    with torch.device("meta"):
        model = stack(Layer(), Layer())
    wrapping(model, shardwise.fully_shard)
    ours = train_sharded(model, simple_iteration(), 3)
    truth = train_plain(source, simple_iteration(), 3)
    assert_records(ours, truth, "plain training", bitwise=False)


@on_ranks(2)
def test_meta_device_with_reset_parameters() -> None:
    """The usual way: ``to_empty``, then each module's ``reset_parameters`` on DTensors."""
    with torch.device("meta"):
        model = MLP()
    wrap(model, shardwise.fully_shard)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    before = state_of(model)
    x = batch(0, 0, 4, 9)
    plain = MLP()
    plain.load_state_dict(before)
    torch.testing.assert_close(model(x), plain(x))
    assert all(value.isfinite().all() and value.abs().sum() > 0 for value in before.values())


@on_ranks(2, assign=[True, False], preset=["ddp", "zero2", "zero3"], when=["first", "later", "between"])
def test_load_state_dict(assign: bool, preset: str, when: str) -> None:
    torch.manual_seed(7)
    other = stack(Layer(), Layer())
    torch.manual_seed(1)
    model = stack(Layer(), Layer())
    wrap(model, shardwise.fully_shard, placements=preset)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    if when != "first":
        model(x).square().mean().backward()
        model.zero_grad()
    values = {
        name: torch.distributed.tensor.distribute_tensor(
            other.get_parameter(name).detach().clone(), parameter.device_mesh, parameter.placements
        )
        for name, parameter in model.named_parameters()
    }
    if when == "between":  # of a forward under no_grad, which may leave the root gathered
        with torch.no_grad():
            model(x)
    missing = model.load_state_dict(values, assign=assign)
    assert not missing.missing_keys
    assert_resharded(model)
    ours = train_sharded(model, simple_iteration(), 3)
    truth = train_plain(other, simple_iteration(), 3)
    assert_records(ours, truth, "plain training", bitwise=False)


@on_ranks(2, preset=["zero2", "zero3"], reshard=[True, False])
def test_state_dict_between_forward_and_backward(preset: str, reshard: bool) -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        state = model.state_dict()
        if isinstance(model, shardwise.FSDPModule):
            assert all(isinstance(value, DTensor) for value in state.values())
        part = model.layers[0].linear.state_dict()
        assert type(part["weight"]) is type(state["layers.0.linear.weight"]) or isinstance(part["weight"], DTensor)
        loss.backward()
        return loss

    check(
        lambda: stack(Layer(), Layer()),
        run,
        against_torch=False,
        placements=preset,
        reshard_after_forward=reshard,
    )


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"])
def test_values_written_by_hand_are_seen(preset: str) -> None:
    """Through the parameter, its data, its state dict, the local tensors of these, under no_grad, between steps."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        gate, weight = model.layers[0].gate, model.layers[1].linear.weight
        with torch.no_grad():
            model(batch(step, rank, 4, WIDTH))  # gathers what the optimizer wrote
            if rank > 0 and not isinstance(gate, DTensor):
                pass  # the plain model was changed for rank 0
            elif step == 1:
                gate.mul_(2)
            elif step == 2:
                gate.data.fill_(0.25)
            elif step == 3:
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                local.add_(0.1)
            elif step == 4:
                nn.init.ones_(model.layers[1].gate)
            elif step == 5:
                torch._foreach_mul_(list(model.parameters()), 0.9)
            elif step == 6:
                parts = [p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()]
                torch._foreach_mul_(parts, 1.1)
            elif step == 7:
                detached = weight.detach()
                (detached.to_local() if isinstance(detached, DTensor) else detached).mul_(0.8)
            elif step == 8:
                for value in model.state_dict().values():
                    (value.to_local() if isinstance(value, DTensor) else value).mul_(0.9)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, steps=10, against_torch=False, placements=preset)


@on_ranks(2, gather=["whole", "waited for", "on its way"], preset=["zero1", "zero3"])
def test_values_written_after_unsharding_are_seen(gather: str, preset: str) -> None:
    """Those that were gathered before served the next forward. (With FSDP2 they do.)"""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        weight = model.layers[1].linear.weight
        with torch.no_grad():
            if isinstance(weight, DTensor):
                handle = model.layers[1].unshard(async_op=gather != "whole")
                if gather == "waited for":
                    handle.wait()
                weight.to_local().add_(0.1)
                if gather == "on its way" and step == 1:
                    handle.wait()
            elif rank == 0:  # the plain model is one for all ranks
                weight.add_(0.1)
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    check(lambda: stack(Layer(), Layer()), run, against_torch=False, placements=preset)


@on_ranks(2, preset=["ddp", "zero1", "zero2", "zero3"], optimizer=["sgd", "fused", "foreach", "plain", "adamw"])
def test_optimizers(preset: str, optimizer: str) -> None:
    def make_one(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1)
        if optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2)
        return torch.optim.Adam(parameters, lr=1e-2, fused=optimizer == "fused", foreach=optimizer == "foreach" or None)

    torch.manual_seed(1)
    model, plain = stack(Layer(), Layer()), stack(Layer(), Layer())
    plain.load_state_dict(model.state_dict())
    wrap(model, shardwise.fully_shard, placements=preset)
    ours, theirs = make_one(model), make_one(plain)
    for step in range(3):
        model(batch(step, dist.get_rank(), 4, WIDTH)).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (plain(batch(step, rank, 4, WIDTH)).square().mean() / dist.get_world_size()).backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    expected = dict(plain.named_parameters())
    for name, value in state_of(model).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5)


@on_ranks(2, 3, preset=["ddp", "zero1", "zero2", "zero3"], with_state=[True, False])
def test_optimizer_made_before_wrapping(preset: str, with_state: bool) -> None:
    torch.manual_seed(1)
    model, plain = stack(Layer(), Layer()), stack(Layer(), Layer())
    plain.load_state_dict(model.state_dict())
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if with_state:
        for each, optimizer in ((model, ours), (plain, theirs)):
            each(batch(99, 0, 4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    wrap(model, shardwise.fully_shard, placements=preset)
    model(batch(0, dist.get_rank(), 4, WIDTH)).square().mean().backward()
    with pytest.raises(RuntimeError, match="repoint"):
        ours.step()
    model.zero_grad()
    assert shardwise.repoint(ours) is ours
    for step in range(3):
        model(batch(step, dist.get_rank(), 4, WIDTH)).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (plain(batch(step, rank, 4, WIDTH)).square().mean() / dist.get_world_size()).backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    expected = dict(plain.named_parameters())
    for name, value in state_of(model).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5)


# -- Memory


@on_ranks(
    1, 2, preset=["ddp", "zero1", "zero2", "zero3"], how=["rooted", "seed", "checkpointed", "forward_only", "custom"]
)
def test_deleting_the_model_frees_its_storage(preset: str, how: str) -> None:
    make_optimizer(nn.Linear(1, 1))  # torch's first one in a process leaves a cycle
    gc.collect()
    gc.disable()
    try:
        references = train_and_forget(preset, how)
        alive = [name for name, reference in references.items() if reference() is not None]
    finally:
        gc.enable()
    assert not alive, f"still alive without the cycle collector: {alive}"


def train_and_forget(preset: str, how: str) -> dict[str, weakref.ref[Any]]:
    """Train a model for some steps; gives weak references to everything of it that holds memory."""
    if how == "seed":
        model: Any = Transformer(layers=2)
        context = shardwise.FSDPCommContext("cpu")
        for name in ["embed", "position", "layers.0", "layers.1", "norm", "head"]:
            unit = model.get_submodule(name)
            shardwise.fully_shard(unit, comm_ctx=context, module_fqn=name, placements=preset)
        run: Iteration = token_iteration
    else:
        model = {"checkpointed": lambda: Checkpointed(False, layers=2), "custom": Encoder}.get(
            how, lambda: stack(Layer(), Layer())
        )()
        wrap(model, shardwise.fully_shard, placements=preset)
        run = simple_iteration()
    if how == "custom":
        shardwise.register_fsdp_forward_method(model, "encode")
        model.encode(batch(0, dist.get_rank(), 4, WIDTH)).sum().backward()
    optimizer = make_optimizer(model)
    for step in range(3):
        run(model, step, dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
    references: dict[str, weakref.ref[Any]] = {"model": weakref.ref(model)}
    for name, parameter in model.named_parameters():
        references[name] = weakref.ref(parameter)
        references[f"{name} storage"] = weakref.ref(parameter.to_local().untyped_storage())
    for name, module in model.named_modules():
        if (unit := module.__dict__.get("_shardwise_unit")) is not None:
            references[f"unit {name}"] = weakref.ref(unit)
            for group in unit.groups:
                references[f"group of {name}"] = weakref.ref(group)
                for buffer in group.shards.buffers:
                    references[f"buffer of {name}"] = weakref.ref(buffer)
    if how == "forward_only":
        model(batch(0, dist.get_rank(), 4, WIDTH))
    return references


# -- Several models


@on_ranks(2, reshard=[True, False])
def test_two_models_that_train_each_other(reshard: bool) -> None:
    """A generator and a discriminator, each with its optimizer."""

    def train(wrapped: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        generator, critic = stack(Layer()), stack(Layer(), Layer())
        if wrapped:
            wrap(generator, shardwise.fully_shard, reshard_after_forward=reshard)
            wrap(critic, shardwise.fully_shard, reshard_after_forward=reshard)
        ranks = [dist.get_rank()] if wrapped else list(range(dist.get_world_size()))
        makers, judges = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic))
        for step in range(3):
            for rank in ranks:
                noise, real = batch(step, rank, 4, WIDTH), batch(step + 50, rank, 4, WIDTH)
                fake = generator(noise)
                ((critic(fake.detach()).mean() - critic(real).mean()) / len(ranks)).backward()
            judges.step()
            judges.zero_grad()
            for rank in ranks:
                fake = generator(batch(step, rank, 4, WIDTH))
                (-critic(fake).mean() / len(ranks)).backward()
            makers.step()
            makers.zero_grad()
            judges.zero_grad()
        return {f"{kind}.{k}": v for kind, m in (("g", generator), ("c", critic)) for k, v in state_of(m).items()}

    ours, truth = train(True), train(False)
    for name, value in ours.items():
        torch.testing.assert_close(value, truth[name])


@on_ranks(2)
def test_teacher_and_student() -> None:
    """A frozen wrapped model gives targets; a wrapped one learns them."""

    def train(wrapped: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        teacher, student = stack(Layer()).requires_grad_(False), stack(Layer())
        if wrapped:
            wrap(teacher, shardwise.fully_shard)
            wrap(student, shardwise.fully_shard)
        ranks = [dist.get_rank()] if wrapped else list(range(dist.get_world_size()))
        optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
        for step in range(3):
            for rank in ranks:
                x = batch(step, rank, 4, WIDTH)
                ((student(x) - teacher(x)).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(student)

    ours, truth = train(True), train(False)
    for name, value in ours.items():
        torch.testing.assert_close(value, truth[name])


# -- Compiled blocks


@on_ranks(2, when=["before", "after", "in_place_before", "in_place_after", "whole"], reshard=[True, False], limit=120.0)
def test_compiled_blocks(when: str, reshard: bool) -> None:
    torch._dynamo.reset()
    alone = {"backend": "eager", "fullgraph": True}

    def wrapping(model: nn.Module, verb: Verb) -> None:
        for index, layer in enumerate(model.layers):
            if when == "in_place_before":
                layer.compile(**alone)
            unit = torch.compile(layer, **alone) if when == "before" else layer
            verb(unit, reshard_after_forward=reshard)
            if when == "in_place_after":
                layer.compile(**alone)
            if when in ("before", "after"):
                model.layers[index] = unit if when == "before" else torch.compile(layer, **alone)
        verb(model)
        if when == "whole":
            model.compile(backend="eager")

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(1)
    model = stack(Layer(), Layer())
    wrapping(model, shardwise.fully_shard)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")
        ours = train_sharded(model, run, 3)
    torch.manual_seed(1)
    truth = train_plain(stack(Layer(), Layer()), run, 3)
    for gradients in (*ours.gradients, ours.parameters):
        for name in list(gradients):
            gradients[name.replace("._orig_mod", "")] = gradients.pop(name)
    assert_records(ours, truth, "plain training", bitwise=False)


@on_ranks(2, preset=["zero2", "zero3"], limit=120.0)
def test_compiled_optimizer(preset: str) -> None:
    from torch._dynamo.testing import CompileCounter  # which takes seconds

    torch._dynamo.reset()

    def train(compiled: bool) -> Stack:
        torch.manual_seed(1)
        model = stack(Layer(), Layer())
        wrap(model, shardwise.fully_shard, placements=preset)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        update = torch.compile(optimizer.step, backend=graphs) if compiled else optimizer.step
        for step in range(3):
            model(batch(step, dist.get_rank(), 4, WIDTH)).square().mean().backward()
            update()
            optimizer.zero_grad()
        return model

    graphs = CompileCounter()
    ours, truth = train(True), train(False)
    assert graphs.frame_count == 1, "one graph updates all parameters"
    for parameter, expected in zip(ours.parameters(), truth.parameters(), strict=True):
        assert type(parameter) is type(expected)
        torch.testing.assert_close(whole(parameter), whole(expected))


@needs_compiled_steps
@on_ranks(2, limit=120.0)
def test_compiled_training_step() -> None:
    torch._dynamo.reset()

    def train(model: Any, clip: Callable[..., Any]) -> dict[str, torch.Tensor]:
        optimizer = make_optimizer(model)

        @torch.compile(backend="eager")
        def train_step(data: torch.Tensor) -> None:
            model.unshard()
            model.encode(data).square().mean().backward()
            clip(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        for step in range(3):
            train_step(batch(step, dist.get_rank(), 4, WIDTH))
        return state_of(model)

    models = wrapped_pair(Encoder)
    shardwise.register_fsdp_forward_method(models[0], "encode")
    torch_register_forward_method(models[1], "encode")
    ours, theirs = map(train, models, (shardwise.clip_grad_norm_, torch.nn.utils.clip_grad_norm_))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name])


@on_ranks(2, limit=120.0)
def test_compiled_use_of_gradients() -> None:
    """Between backward passes, of parameters that have gradients, and of those themselves."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def use(parameters: list[torch.Tensor]) -> torch.Tensor:
        norm = sum(parameter.grad.square().sum() for parameter in parameters)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.9)
                parameter.grad.mul_(0.5)
        return norm

    def train(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        for step in range(3):
            model(batch(step, dist.get_rank(), 4, WIDTH)).square().mean().backward()
            norm = use(list(model.parameters()))
        return whole(norm), [whole(parameter.grad) for parameter in model.parameters()], state_of(model)

    ours, theirs = map(train, wrapped_pair(lambda: stack(Layer())))
    torch.testing.assert_close(ours, theirs)


@on_ranks(2, limit=120.0)
def test_sharded_parameters_in_compiled_code() -> None:
    """The tracer's copies do not know of what unit they are, which exists all the same."""
    torch._dynamo.reset()
    model = wrap(stack(Layer()), shardwise.fully_shard)
    layer = model.layers[0]
    weight = next(layer.parameters())
    uses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda data: data + weight,
        lambda data: data @ weight.t(),
        lambda data: data * weight.detach(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"used in compiled code outside the forward of its unit.*unshard\(\)"):
            torch.compile(use, backend="eager")(torch.ones(weight.shape))
    layer.unshard()
    unsharded = next(layer.parameters())
    compiled = torch.compile(lambda data: data + unsharded, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(unsharded.shape)), unsharded + 1)


@on_ranks(2, limit=120.0)
def test_compiled_autograd_is_refused() -> None:
    """Nothing would reduce the root's gradients; FSDP2 leaves them unreduced, in silence."""
    from torch._dynamo.compiled_autograd import _enable

    model = wrap(stack(Layer()), shardwise.fully_shard)
    loss = model(batch(0, dist.get_rank(), 4, WIDTH)).square().mean()
    with _enable(torch.compile(backend="eager")), pytest.raises(RuntimeError, match="under compiled autograd"):
        loss.backward()
    model.reset_iter_state()
    torch.manual_seed(1)
    check(lambda: stack(Layer()))


# -- Where it is cut


def other_dim(parameter: nn.Parameter) -> Shard | None:
    """The last dim of what has several that divide evenly."""
    last = parameter.ndim - 1
    return Shard(last) if last and parameter.shape[last] % dist.get_world_size() == 0 else None


@on_ranks(2, 4, reshard=[True, False], dtype=[None, torch.bfloat16])
def test_sharded_on_another_dim(reshard: bool, dtype: Any) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(8, 9), nn.Conv1d(4, 6, 8), nn.Linear(2, 12), nn.Linear(12, 3, bias=False)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layers[0](x)).reshape(-1, 4, 9)
            return self.layers[3](self.layers[2](self.layers[1](x)))

    options: dict[str, Any] = {"shard_placement_fn": other_dim, "reshard_after_forward": reshard}
    if dtype is not None:
        options["mp_policy"] = shardwise.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        ours, truth = wrapped_pair(Wide, **options)
        run = simple_iteration(8)
        assert_records(
            train_sharded(ours, run, 3), train_sharded(truth, run, 3), "FSDP2", bitwise=dist.get_world_size() <= 2
        )
        return
    model = check(Wide, simple_iteration(8), **options)
    assert model.layers[0].weight.placements == (Shard(1),)
    assert model.layers[1].weight.placements == (Shard(2),)
    state = {name: whole(value) for name, value in model.state_dict().items()}
    for name, value in state_of(model).items():
        assert torch.equal(value, state[name])


def wrapped_pair(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """One model wrapped by us, and the same by FSDP2."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    models = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        torch.manual_seed(1)
        models.append(wrap(make(), verb, **options))
    return models[0], models[1]


@on_ranks(4, size=[2], iteration=["simple", "several_forwards", "several_backwards", "forward_between"])
def test_resharding_to_fewer_ranks(size: int, iteration: str) -> None:
    """The root too is resharded to groups of ``size`` ranks after forward."""
    run = next((each for each in ITERATIONS if each.__name__ == iteration), simple_iteration())
    check(lambda: stack(Layer(), Layer()), run, bitwise=False, reshard_after_forward=size)


@on_ranks(4, size=[1, 4])
def test_resharding_to_one_rank_or_all(size: int) -> None:
    test_resharding_to_fewer_ranks.body(size, "several_backwards")


@on_ranks(4, reentrant=[True, False])
def test_resharding_to_fewer_ranks_with_checkpointing(reentrant: bool) -> None:
    check(lambda: Checkpointed(reentrant, layers=2), reshard_after_forward=2)


@on_ranks(4)
def test_resharding_to_fewer_ranks_by_a_strategy_of_one_axis() -> None:
    options = {"reshard_after_forward": 2, "placements": shardwise.Placements(mesh_ndim=1)}
    check(lambda: stack(Layer()), against_torch=False, steps=2, **options)


@on_ranks(4, rows=[4, 3, 1])
def test_resharding_to_fewer_ranks_on_another_dim(rows: int) -> None:
    """Also where rows over fewer ranks would be padded beyond the memory of the whole tensor."""

    def wrapping(model: nn.Module, verb: Verb) -> None:
        mesh = init_device_mesh("cpu", (4,))
        wrap(model, verb, mesh=mesh, reshard_after_forward=2, shard_placement_fn=other_dim)

    # FSDP2 fails there on one-dimensional parameters.
    check(lambda: MLP((8, 12, 16, rows)), simple_iteration(8), wrapping=wrapping, against_torch=False)


@on_ranks(4, evaluates=[True, False])
def test_forward_between_backward_and_step_on_fewer_ranks(evaluates: bool) -> None:
    """What it leaves cut over fewer ranks are the values from before the step."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        with torch.set_grad_enabled(not evaluates):
            model(batch(step, rank, 4, WIDTH))
        return loss

    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(stack(Layer(), Layer()))
    wrap(models[0], shardwise.fully_shard, reshard_after_forward=2)
    ours, truth = train_sharded(models[0], run, 3), train_plain(models[1], run, 3)
    # Nothing else: what is registered is cut over fewer ranks.
    torch.testing.assert_close(ours.losses, truth.losses)


@on_ranks(2, 3)
def test_ignored_parameters() -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, WIDTH)).square().mean()
        loss.backward()
        if isinstance(model, TorchFSDPModule):  # left alone means that nobody averages their gradients either
            for layer in model.layers:
                assert not isinstance(layer.gate, DTensor)
                dist.all_reduce(layer.gate.grad)
                layer.gate.grad /= dist.get_world_size()
        return loss

    def wrapping(model: nn.Module, verb: Verb) -> None:
        gates = {layer.gate for layer in model.layers}
        wrap(model, verb, ignored_params=gates)
        assert {layer.gate for layer in model.layers} == gates

    check(lambda: stack(Layer(), Layer()), run, wrapping=wrapping, resharded=False)


@on_ranks(2)
def test_odd_shapes() -> None:
    """Fewer rows than ranks, one element, no element, several dtypes."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.precise = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.one * self.precise.sum()).float() + self.empty.sum()

    check(lambda: stack(Odd(), Layer()), against_torch=False)


@on_ranks(3, 4)
def test_more_ranks_than_rows() -> None:
    check(lambda: MLP((9, 2, 1, 3)))


def test_helpers_see_none() -> None:
    """The comparison itself tells None from zeros."""
    with pytest.raises(AssertionError, match="None"):
        assert_tensors("x", None, torch.zeros(1), bitwise=False)
    assert gradients_of(Layer())["gate"] is None


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "grad": lambda model, x, _: torch.func.grad(lambda value: model(value).sum())(x),
    "vjp": lambda model, x, y: torch.func.vjp(model, x)[1](y)[0],
    "jvp": lambda model, x, y: torch.func.jvp(model, (x,), (y,))[1],
    "jacrev": lambda model, x, _: torch.func.jacrev(model)(x[0]),
    "vmap": lambda model, x, _: torch.no_grad()(torch.vmap(model))(x),
}


def check_transform(run: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """``run`` on a sharded model, a new one and one that has run, is as on a plain one, and so is training after it."""

    def make() -> nn.Module:
        torch.manual_seed(4)
        return Stack([Layer(), Layer()], WIDTH)

    plain, model = make(), wrap(make(), shardwise.fully_shard)
    for step in range(2):
        x, y = batch(step, 0, 4, WIDTH), batch(step, 1, 4, WIDTH)
        torch.testing.assert_close(run(model, x, y), run(plain, x, y))
        for one in (plain, model):
            one(x).square().sum().backward()
        found = gradients_of(model)
        for name, gradient in gradients_of(plain).items():
            torch.testing.assert_close(found[name], gradient)
        for one in (plain, model):
            one.zero_grad()


@on_ranks(1, 2, 3, transform=list(TRANSFORMS))
def test_transforms_of_torch_func(transform: str) -> None:
    check_transform(TRANSFORMS[transform])


DIFFERENTIATED: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "vmap_twice": lambda model, x: torch.vmap(model)(2 * x) * model(x) + torch.vmap(model)(x),
    "vmap_of_inputs_with_gradients": lambda model, x: torch.vmap(model)(2 * x.clone().requires_grad_()),
    "jvp": lambda model, x: sum(torch.func.jvp(model, (x,), (torch.ones_like(x),)), x[:1]),
    "tangents": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda model, x: torch.vmap(torch.func.jacfwd(model))(x),
    "grad_of_vmap": lambda model, x: torch.func.grad(lambda value: torch.vmap(model)(value).square().sum())(x),
    "hessian": lambda model, x: torch.vmap(torch.func.hessian(lambda value: model(value).sum()))(x),
    "dual": lambda model, x: _dual_outputs(model, x)[0] + x,
    "dual_tangents": lambda model, x: _dual_outputs(model, x)[1],
    "functional_jacobian": lambda model, x: torch.autograd.functional.jacobian(
        model, x, vectorize=True, strategy="forward-mode"
    ),
}


def _dual_outputs(model: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos())))


@on_ranks(1, 2, 3, transform=list(DIFFERENTIATED), placements=["zero1", "zero3"])
def test_what_transforms_give_is_trained(transform: str, placements: str) -> None:
    """Inside a transform outputs do not show that parameters outside of it need gradients."""

    def make() -> nn.Module:
        torch.manual_seed(4)
        return Stack([nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh()), nn.Linear(5, WIDTH)], WIDTH)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return DIFFERENTIATED[transform](model, batch(step, rank, 4, WIDTH)).square().mean()

    plain, model = make(), wrap(make(), shardwise.fully_shard, placements=placements)
    for step in range(2):
        for rank in range(dist.get_world_size()):
            (loss(plain, step, rank) / dist.get_world_size()).backward()
        loss(model, step, dist.get_rank()).backward()
        found = gradients_of(model)
        for name, gradient in gradients_of(plain).items():
            torch.testing.assert_close(found[name], gradient)
        for one in (plain, model):
            one.zero_grad()
