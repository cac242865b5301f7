"""Gradients of gradients (penalties, forces, Hessian-vector products) through units, against plain training."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.fairscale import FullyShardedDataParallel

from ..models import Block, ConvNet, Stack, Transformer, wrap
from .harness import on_ranks
from .test_autograd import Layer, Repeats, check_transform, counted
from .truth import Iteration, assert_resharded, assert_tensors, batch, check, gradients_of, simple_iteration, whole

WIDTH = 9


def gradient_of(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Differentiable."""
    return torch.autograd.grad(output, x, create_graph=True)[0]


def data(step: int, rank: int) -> torch.Tensor:
    return batch(step, rank, 4, WIDTH).requires_grad_()


# -- How the penalty is differentiated


def with_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Penalty and loss in one backward."""
    x = data(step, rank)
    out = model(x).square().mean()
    loss = out + gradient_of(out, x).square().sum()
    loss.backward()
    return loss


def alone(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Nothing but the penalty, of an output whose gradient is a constant."""
    x = data(step, rank)
    loss = (gradient_of(model(x).sum(), x).norm(dim=-1) - 1).square().mean()
    loss.backward()
    return loss


def after_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The penalty in a backward of its own, after one that reshards."""
    x = data(step, rank)
    out = model(x).square().mean()
    penalty = gradient_of(out, x).square().sum()
    out.backward(retain_graph=True)
    penalty.backward()
    return penalty


def retained(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = data(step, rank)
    penalty = gradient_of(model(x).square().mean(), x).square().sum()
    penalty.backward(retain_graph=True)
    penalty.backward(retain_graph=True)
    penalty.backward()
    return penalty


def of_critic(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """WGAN-GP: three forwards, of which one is penalized, in one backward."""
    real, fake, mixed = (batch(10 * step + part, rank, 4, WIDTH) for part in range(3))
    mixed.requires_grad_()
    loss = model(fake).mean() - model(real).mean()
    loss = loss + 10 * (gradient_of(model(mixed).sum(), mixed).norm(dim=-1) - 1).square().mean()
    loss.backward()
    return loss


def of_two_forwards(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Two forwards that are both penalized, by gradients that flow into the middle of each unit's calls."""
    x, y = data(step, rank), data(50 + step, rank)
    penalty = gradient_of(model(x).sum(), x).square().sum() + gradient_of(model(y).sum(), y).square().sum()
    loss = (penalty + model(batch(70 + step, rank, 4, WIDTH)).mean()) / 10
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def of_two_forwards_at_once(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The same, where the second backward is in the middle of all calls at the same time."""
    x, y = data(step, rank), data(50 + step, rank)
    outputs = [model(x).sum(), model(y).sum()]
    penalty = sum(gradient_of(output, each).square().sum() for output, each in zip(outputs, (x, y), strict=True))
    loss = (penalty + model(batch(70 + step, rank, 4, WIDTH)).mean()) / 10
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def backward_to_inputs(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The first gradients by ``backward`` restricted to inputs."""
    x = data(step, rank)
    model(x).square().mean().backward(inputs=[x], create_graph=True)
    assert x.grad is not None
    loss = x.grad.square().sum()
    x.grad = None
    loss.backward()
    return loss


def third(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A penalty on second derivatives."""
    x = data(step, rank)
    curvature = gradient_of(gradient_of(model(x).square().mean(), x).square().sum(), x)
    loss = curvature.square().sum()
    loss.backward()
    return loss


def of_product(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A Jacobian-vector product by two backward passes, penalized by a third."""
    x = data(step, rank)
    out = model(x)
    weights = torch.ones_like(out, requires_grad=True)
    (pulled,) = torch.autograd.grad(out, x, weights, create_graph=True)
    (pushed,) = torch.autograd.grad(pulled, weights, batch(30 + step, rank, 4, WIDTH), create_graph=True)
    loss = pushed.square().sum()
    loss.backward()
    return loss


def of_several_at_once(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Gradients of several outputs by one backward, and then of several of those."""
    x = data(step, rank)
    out = model(x)
    (first,) = torch.autograd.grad(
        out.tanh(), x, torch.eye(4).unsqueeze(2) * out, is_grads_batched=True, create_graph=True
    )
    weights = torch.stack([first.detach(), 3 * torch.ones_like(first)])
    (second,) = torch.autograd.grad(first.square(), x, weights, is_grads_batched=True, create_graph=True)
    loss = first.square().mean() + second.square().mean() + out.mean()
    loss.backward()
    return loss


def accumulated(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The first micro-batch without synchronization."""
    sharded = isinstance(model, FSDPModule)
    losses = []
    for part in range(2):
        if sharded:
            model.set_requires_gradient_sync(part == 1)
            model.set_is_last_backward(part == 1)
        losses.append(with_loss(model, 10 * step + part, rank))
    return torch.stack(losses).sum()


def constant_penalty_of_data(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A graph that is made and then not differentiated: an evaluation before the step."""
    x = data(step, rank)
    gradient_of(model(x).square().mean(), x)
    return simple_iteration()(model, step, rank)


ITERATIONS: list[Iteration] = [
    with_loss,
    alone,
    after_loss,
    retained,
    of_critic,
    of_two_forwards,
    of_two_forwards_at_once,
    backward_to_inputs,
    third,
    of_product,
    of_several_at_once,
    accumulated,
    constant_penalty_of_data,
]


def layers() -> nn.Module:
    return Stack([Layer(), Layer()], WIDTH)


@on_ranks(2, iteration=[each.__name__ for each in ITERATIONS], reshard=[True, False])
def test_penalties(iteration: str, reshard: bool) -> None:
    run = next(each for each in ITERATIONS if each.__name__ == iteration)
    check(layers, run, steps=2, against_torch=False, reshard_after_forward=reshard)


@on_ranks(1, 3)
def test_penalties_in_other_worlds() -> None:
    for run in ITERATIONS:
        check(layers, run, steps=2, against_torch=False)


def of_parameters(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A Hessian-vector product with respect to the parameters, as they are between forward and backward."""
    loss = model(batch(step, rank, 4, WIDTH)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    generator = torch.Generator().manual_seed(step)
    product = sum((g * torch.randn(g.shape, generator=generator)).sum() for g in gradients)
    product.backward()
    return loss


@on_ranks(1, 2, 3)
def test_products_with_the_hessian_of_the_parameters() -> None:
    check(layers, of_parameters, against_torch=False, reshard_after_forward=False)
    blocks = lambda: Stack([Stack([Layer()], WIDTH), Stack([Layer()], WIDTH)], WIDTH)  # noqa: E731
    check(blocks, of_parameters, against_torch=False, reshard_after_forward=False)


@on_ranks(2)
def test_sharded_parameters_are_in_no_graph() -> None:
    model = wrap(make_stack(), shardwise.fully_shard)
    x = data(0, dist.get_rank())
    loss = model(x).square().mean()
    with pytest.raises(RuntimeError, match=r"'layers.0.gate' of unit 'layers.0'.*reshard_after_forward=False"):
        torch.autograd.grad(loss, model.layers[0].gate, create_graph=True)
    assert torch.autograd.grad(loss, model.layers[0].gate, allow_unused=True, retain_graph=True) == (None,)
    matches_plain_step(model, make_stack)


@on_ranks(2, preset=["ddp", "zero1", "zero2"])
def test_strategies(preset: str) -> None:
    check(layers, with_loss, steps=2, against_torch=False, placements=preset)


def several_as_one(model: nn.Module, verb: Callable[..., Any]) -> None:
    verb([model.first, model.last])
    verb(list(model.layers))
    verb(model)


def without_root(model: nn.Module, verb: Callable[..., Any]) -> None:
    context = shardwise.FSDPCommContext("cpu")
    for name in ("first", "layers.0", "layers.1", "last"):
        verb(model.get_submodule(name), comm_ctx=context, module_fqn=name)


def offloaded(model: nn.Module, verb: Callable[..., Any]) -> None:
    wrap(model, verb, offload_policy=shardwise.CPUOffloadPolicy(pin_memory=False))


@on_ranks(2, wrapping=[several_as_one, without_root, offloaded])
def test_wrappings(wrapping: Any) -> None:
    check(layers, with_loss, steps=2, against_torch=False, wrapping=wrapping)
    check(layers, of_critic, steps=2, against_torch=False, wrapping=wrapping)


class Halves(nn.Module):
    """A unit whose outputs are a view and a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.up = Layer(2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(self.up(x))
        return {"left": y[:, :WIDTH], "right": y[:, WIDTH:].clone()}


class ChangesHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Halves(), Halves()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            halves = layer(x)
            x = halves["left"].mul_(0.5) * halves["right"]
        return x


@on_ranks(2, reshard=[True, False])
def test_outputs_that_are_views(reshard: bool) -> None:
    check(ChangesHalves, with_loss, steps=2, against_torch=False, reshard_after_forward=reshard)
    check(ChangesHalves, of_two_forwards_at_once, steps=2, against_torch=False, reshard_after_forward=reshard)


def of_images(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank, 4, 3, 6, 6).requires_grad_()
    out = model(x).square().mean()
    loss = out + gradient_of(out, x).square().sum()
    loss.backward()
    return loss


@on_ranks(2)
def test_convolutions() -> None:
    check(ConvNet, of_images, steps=2, against_torch=False)


@on_ranks(2, flatten=[True, False], iteration=["with_loss", "alone", "of_critic"])
def test_fairscale(flatten: bool, iteration: str) -> None:
    """By its adapter, with parameters that are joined to one run, or not."""
    run = next(each for each in ITERATIONS if each.__name__ == iteration)

    def make() -> nn.Module:
        torch.manual_seed(4)
        return Stack([Layer(), Layer()], WIDTH)

    plain, model = make(), make()
    for index in range(2):
        model.layers[index] = FullyShardedDataParallel(model.layers[index], flatten_parameters=flatten)
    wrapped = FullyShardedDataParallel(model, flatten_parameters=flatten)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    run(wrapped, 0, dist.get_rank())
    optimizer.step()
    for rank in range(dist.get_world_size()):
        run(plain, 0, rank)
    with wrapped.summon_full_params(), torch.no_grad():
        for ours, truth in zip(wrapped.parameters(), plain.parameters(), strict=True):
            gradient = torch.zeros_like(truth) if truth.grad is None else truth.grad
            torch.testing.assert_close(ours, truth - 0.1 * gradient / dist.get_world_size())
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"unit .* backward\(create_graph=True\)"):
        wrapped(data(1, dist.get_rank())).square().sum().backward(create_graph=True)


@on_ranks(2, 3, iteration=["alone", "with_loss", "after_loss"])
def test_unit_that_is_linear(iteration: str) -> None:
    """Nothing flows back to its output in the second backward."""
    run = next(each for each in ITERATIONS if each.__name__ == iteration)
    wrapping = lambda model, verb: verb(model)  # noqa: E731
    check(lambda: nn.Linear(WIDTH, 5), run, against_torch=False, wrapping=wrapping)
    check(lambda: Stack([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], WIDTH), run, against_torch=False)


@on_ranks(2, iteration=["with_loss", "alone", "of_two_forwards_at_once", "of_critic", "third"])
def test_repeated_unit(iteration: str) -> None:
    run = next(each for each in ITERATIONS if each.__name__ == iteration)
    check(Repeats, run, steps=2, against_torch=False)


@on_ranks(2, 3, size=[1])
def test_resharded_to_fewer_ranks(size: int) -> None:
    check(layers, with_loss, against_torch=False, reshard_after_forward=size)


@on_ranks(2)
def test_frozen_units() -> None:
    """Their second derivatives need parameters all the same."""

    def make() -> nn.Module:
        model = Stack([Layer(), Layer(), Layer()], WIDTH)
        model.layers[1].requires_grad_(False)
        return model

    check(make, with_loss, against_torch=False)
    check(make, third, against_torch=False)


# -- Which gradients


class Attentive(nn.Module):
    """Blocks whose attention torch differentiates twice, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unsqueeze(0)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).squeeze(0)


@on_ranks(2, 3)
def test_transformer_blocks() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check(Attentive, with_loss, steps=2, against_torch=False)
        check(Attentive, alone, steps=2, against_torch=False)


def of_embeddings(model: nn.Module, step: int, rank: int, *, apart: bool = False) -> torch.Tensor:
    """Gradients of the embedding's output: no input of the root announces the derivative of its head."""
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))
    seen: list[torch.Tensor] = []
    handle = model.embed.register_forward_hook(lambda module, args, output: seen.append(output))
    out = model(tokens).square().mean()
    handle.remove()
    penalty = gradient_of(out, seen[0]).square().sum()
    if apart:
        out.backward(retain_graph=True)
        penalty.backward()
    else:
        (out + penalty).backward()
    return penalty


@on_ranks(2, apart=[True, False], embed_unit=[True, False], reshard=[True, None])
def test_gradients_of_embeddings(apart: bool, embed_unit: bool, reshard: bool | None) -> None:
    def wrapping(model: nn.Module, verb: Callable[..., Any]) -> None:
        if embed_unit:
            verb(model.embed, reshard_after_forward=reshard)
        wrap(model, verb, reshard_after_forward=reshard)

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return of_embeddings(model, step, rank, apart=apart)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check(lambda: Transformer(2), run, steps=2, against_torch=False, wrapping=wrapping)


def forward_of_layers(model: nn.Module, batch_number: int, rank: int) -> tuple[Any, ...]:
    """Input, loss, and the outputs of the layers."""
    seen: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda module, args, output: seen.append(output)) for layer in model.layers]
    x = data(batch_number, rank)
    out = model(x).square().mean()
    for handle in handles:
        handle.remove()
    return x, out, *seen


def before_another_forward(model: nn.Module, step: int, rank: int, layer: int) -> torch.Tensor:
    """The root's backward of the second forward is over before the penalty on the first comes to it."""
    _, _, *outputs = result = forward_of_layers(model, 10 * step, rank)
    penalty = gradient_of(result[1], outputs[layer]).square().sum()
    loss = penalty + model(data(10 * step + 1, rank)).square().mean()
    loss.backward()
    return loss


def of_both_forwards(model: nn.Module, step: int, rank: int, layer: int) -> torch.Tensor:
    """A backward that reaches the inputs of one forward only; the penalty is on what it gave for the other."""
    x, out, *_ = forward_of_layers(model, 10 * step, rank)
    _, other, *outputs = forward_of_layers(model, 10 * step + 1, rank)
    _, gradient = torch.autograd.grad(out + other, [x, outputs[layer]], create_graph=True)
    loss = out + gradient.square().sum()
    loss.backward()
    return loss


def of_both_forwards_at_once(model: nn.Module, step: int, rank: int, layer: int) -> torch.Tensor:
    """The second backward is in the middle of both calls of the root, whose outputs it does not come to."""
    results = [forward_of_layers(model, 10 * step + part, rank) for part in range(2)]
    gradients = [gradient_of(out, outputs[layer]) for _, out, *outputs in results]
    loss = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    loss.backward()
    return loss


def of_outputs_after_loss(model: nn.Module, step: int, rank: int, layer: int) -> torch.Tensor:
    _, out, *outputs = forward_of_layers(model, step, rank)
    penalty = gradient_of(out, outputs[layer]).square().sum()
    out.backward(retain_graph=True)
    penalty.backward(retain_graph=True)
    penalty.backward()
    return penalty


OF_OUTPUTS = [before_another_forward, of_both_forwards, of_both_forwards_at_once, of_outputs_after_loss]


@on_ranks(2, run=OF_OUTPUTS, layer=[0, 1], reshard=[True, False])
def test_gradients_of_outputs_of_units(run: Any, layer: int, reshard: bool) -> None:
    """They are tensors inside the root, of whose inputs and outputs the derivative may come to none."""

    def iteration(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = run(model, step, rank, layer)
        return loss

    check(layers, iteration, steps=2, against_torch=False, reshard_after_forward=reshard)
    if reshard:
        check(layers, iteration, steps=2, against_torch=False, wrapping=several_as_one)


class Keeps(nn.Module):
    """A unit that shows a tensor of its middle, which is all that it is differentiated by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.middle = torch.tanh(self.first(x))
        return self.last(self.middle)


def of_middle(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    out = model(batch(step, rank, 4, WIDTH)).sum()
    loss = gradient_of(out, model.middle).square().sum()
    loss.backward()
    return loss


@on_ranks(2)
def test_gradients_of_a_tensor_inside_the_only_unit() -> None:
    """Nothing at all announces the second backward, which only the last layer's weight takes part in."""
    check(Keeps, of_middle, against_torch=False, wrapping=lambda model, verb: verb(model, reshard_after_forward=True))


@on_ranks(2)
def test_kept_parameters_are_refreshed() -> None:
    """Those that nothing will announce stay unsharded after the first backward; then their shards are written."""
    torch.manual_seed(4)
    model, x = Keeps(), batch(0, 0, 4, WIDTH)
    twice = copy.deepcopy(model)
    shardwise.fully_shard(model, reshard_after_forward=True)
    shards = [parameter.to_local().detach() for parameter in model.parameters()]
    gradient_of(model(x).sum(), model.middle)
    with torch.no_grad():
        for each in (*shards, *twice.parameters()):
            each.mul_(2)
    torch.testing.assert_close(model(x), twice(x))


class Potential(nn.Module):
    """Forces are gradients taken inside forward, as models of atoms do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack([Layer(), Layer()], WIDTH)
        self.layers = self.body.layers

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        energy = self.body(positions).square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, forces


def fit_forces(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    energy, forces = model(data(step, rank))
    loss = energy.square() + (forces - batch(90 + step, rank, 4, WIDTH)).square().sum()
    (loss * 1e-3).backward()
    return loss


def fit_forces_alone(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss = model(data(step, rank))[1].square().sum()
    (loss * 1e-3).backward()
    return loss


@on_ranks(2, 3, iteration=[fit_forces, fit_forces_alone], reshard=[True, False])
def test_gradients_inside_forward(iteration: Any, reshard: bool) -> None:
    check(Potential, iteration, against_torch=False, reshard_after_forward=reshard)


class CheckpointedPotential(Potential):
    """The backward that creates a graph is inside one that does not, which computes forward again; what it is given
    requires no gradient, so that the root's gradients are reduced at the end."""

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        energy, forces = checkpoint(self.predict, positions.detach(), use_reentrant=False)
        return energy, forces

    def predict(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(positions.requires_grad_())


@on_ranks(2, iteration=[fit_forces, fit_forces_alone], reshard=[True, False])
def test_gradients_inside_recomputed_forward(iteration: Any, reshard: bool) -> None:
    check(CheckpointedPotential, iteration, against_torch=False, reshard_after_forward=reshard)


class Checkpointed(Stack):
    """Layers that are computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.last(x)


class InnerCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@on_ranks(2, iteration=["with_loss", "alone", "after_loss", "of_two_forwards_at_once"], reshard=[True, False])
def test_activation_checkpointing(iteration: str, reshard: bool) -> None:
    run = next(each for each in ITERATIONS if each.__name__ == iteration)
    options = {"steps": 2, "against_torch": False, "reshard_after_forward": reshard}
    check(lambda: Checkpointed([Layer(), Layer()], WIDTH), run, **options)
    check(lambda: Stack([InnerCheckpointed(), InnerCheckpointed()], WIDTH), run, **options)


class HalfPrecision(nn.Module):
    """What mixed precision computes on one rank: float32 parameters, cast for each use."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = {name: parameter.bfloat16() for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, cast, (x.bfloat16(),))


@on_ranks(1, 2)
def test_mixed_precision() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return Stack([Layer(), Layer()], WIDTH)

    plain, policy = make(), shardwise.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for rank in range(dist.get_world_size()):
        with_loss(HalfPrecision(plain), 0, rank)
    model = wrap(make(), shardwise.fully_shard, mp_policy=policy)
    with_loss(model, 0, dist.get_rank())
    found = gradients_of(model)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert_tensors(name, found[name], parameter.grad / dist.get_world_size(), bitwise=True)


# -- Functional interfaces


def hessian_product(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.hvp(lambda value: model(value).square().sum(), x, y)[1]


FUNCTIONAL: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "hvp": hessian_product,
    "functional_jvp": lambda model, x, y: torch.autograd.functional.jvp(model, x, y)[1],
    "functional_hessian": lambda model, x, _: torch.autograd.functional.hessian(lambda v: model(v).sum(), x[0]),
    "grad_grad": lambda model, x, _: torch.func.grad(
        lambda v: torch.func.grad(lambda w: model(w).square().sum())(v).square().sum()
    )(x),
    "grad_then_backward": lambda model, x, _: _grad_then_backward(model, x),
    "hessian": lambda model, x, _: torch.func.hessian(lambda v: model(v).sum())(x[0]),
    "jacrev_jacrev": lambda model, x, _: torch.func.jacrev(torch.func.jacrev(lambda v: model(v).sum()))(x[0]),
    "jvp_of_grad": lambda model, x, y: torch.func.jvp(torch.func.grad(lambda v: model(v).sum()), (x,), (y,))[1],
}


def _grad_then_backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    gradient = torch.func.grad(lambda value: model(value).square().sum())(x)
    gradient.square().sum().backward()
    assert x.grad is not None
    return x.grad


@on_ranks(2, name=list(FUNCTIONAL))
def test_functional(name: str) -> None:
    """Parameters are in no transform: what ``backward`` gives them is tested by the ordinary step after."""
    check_transform(FUNCTIONAL[name])


# -- What it costs


@on_ranks(2)
def test_collectives() -> None:
    """The backward that creates the graph reduces nothing, the one that differentiates it gathers each unit once
    more and reduces once, and ordinary training before and after is as if there were none."""
    model = wrap(Stack([Layer(), Layer()], WIDTH), shardwise.fully_shard)
    rank, ordinary = dist.get_rank(), simple_iteration()
    ordinary(model, 0, rank)
    with counted() as before:
        ordinary(model, 1, rank)
    x = data(2, rank)
    out = model(x).square().mean()
    with counted() as first:
        gradient = gradient_of(out, x)
    assert_resharded(model)
    with counted() as second:
        gradient.square().sum().backward()
    assert_resharded(model)
    with counted() as after:
        ordinary(model, 3, rank)
    assert before == after
    gradient_of(model(x).square().mean(), x)
    with counted() as other:
        model(x, stop_after=0).square().mean().backward()
    assert len(other["reduce_scatter"]) == 1  # of the root, the only unit that took part
    assert len(before["reduce_scatter"]) == 3
    assert first["reduce_scatter"] == []
    assert len(second["reduce_scatter"]) == 3
    assert len(second["all_gather"]) == 3


@on_ranks(2)
def test_collectives_of_several_forwards() -> None:
    """Each unit's gradients are reduced once, when all forwards have given theirs; those of the root, of whose inputs
    only one requires a gradient, at the end of backward, before which it cannot know of the others."""
    model = wrap(Stack([Layer(), Layer()], WIDTH), shardwise.fully_shard)
    for step in range(2):
        with counted() as seen:
            of_critic(model, step, dist.get_rank())
        assert len(seen["reduce_scatter"]) == 3


@on_ranks(2)
def test_deleted_model_is_freed() -> None:
    """Without the cycle collector."""
    gc.collect()
    gc.disable()
    try:
        model = wrap(make_stack(), shardwise.fully_shard)
        of_critic(model, 0, dist.get_rank())
        references = [weakref.ref(one) for one in (model, model.layers[0].gate, model.layers[0]._shardwise_unit)]
        del model
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()


# -- What is refused, and what fails


def matches_plain_step(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """An ordinary step gives what it gives without sharding."""
    model.reset_iter_state()
    model.zero_grad()
    plain = make()
    for rank in range(dist.get_world_size()):
        with_loss(plain, 5, rank)
    with_loss(model, 5, dist.get_rank())
    found = gradients_of(model)
    for name, gradient in gradients_of(plain).items():
        assert gradient is not None
        assert_tensors(name, found[name], gradient / dist.get_world_size(), bitwise=False)
    assert_resharded(model)


def make_stack() -> nn.Module:
    torch.manual_seed(4)
    return Stack([Layer(), Layer()], WIDTH)


@on_ranks(1, 2, linear=[True, False])
def test_gradients_of_parameters_with_a_graph_are_refused(linear: bool) -> None:
    model = wrap(make_stack(), shardwise.fully_shard)
    out = model(data(0, dist.get_rank()))
    loss = out.sum() if linear else out.square().mean()
    with pytest.raises(RuntimeError, match=r"unit '.*': backward\(create_graph=True\).*torch\.autograd\.grad"):
        loss.backward(create_graph=True)
    matches_plain_step(model, make_stack)
    matches_plain_step(model, make_stack)


@on_ranks(2)
def test_tensor_inside_a_unit_after_another_backward_is_refused() -> None:
    def make() -> nn.Module:
        torch.manual_seed(4)
        return Keeps()

    model = make()
    shardwise.fully_shard(model)
    out = model(batch(0, dist.get_rank(), 4, WIDTH)).sum()
    assert model.middle is not None
    penalty = gradient_of(out, model.middle).square().sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"unit .*: backward differentiated gradients of tensors inside"):
        penalty.backward()
    matches_plain_step(model, make)


class InjectedError(Exception):
    pass


@on_ranks(2, when=["first", "second", "between"])
def test_exceptions(when: str) -> None:
    """On all ranks, in either backward: the next step is right."""

    def fail(gradient: torch.Tensor) -> None:
        raise InjectedError

    model = wrap(make_stack(), shardwise.fully_shard)
    x = data(0, dist.get_rank())
    seen: list[torch.Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    out = model(x).square().mean()
    handle.remove()
    if when == "first":
        seen[0].register_hook(fail)
        with pytest.raises(InjectedError):
            gradient_of(out, x)
    gradient = gradient_of(out, x) if when != "first" else None
    if gradient is not None and when == "second":
        seen[0].register_hook(fail)
        with pytest.raises(InjectedError):
            gradient.square().sum().backward()
    del gradient
    matches_plain_step(model, make_stack)
    matches_plain_step(model, make_stack)


@on_ranks(2)
def test_graph_does_not_keep_unsharded_parameters() -> None:
    """What the graph saved of them has no memory between the two backward passes."""
    model = wrap(make_stack(), shardwise.fully_shard)
    x = data(0, dist.get_rank())
    weights: list[torch.Tensor] = []
    handle = model.layers[0].linear.register_forward_hook(lambda module, args, output: weights.append(module.weight))
    out = model(x).square().mean()
    handle.remove()
    gradient = gradient_of(out, x)
    assert weights[0].untyped_storage().nbytes() == 0
    gradient.square().sum().backward()
    assert weights[0].untyped_storage().nbytes() == 0
    assert whole(model.layers[0].linear.weight).shape == (WIDTH, WIDTH)
