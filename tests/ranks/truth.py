"""References that are not our own code: torch FSDP2 on the same ranks, and plain training on all ranks' batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardwise

from ..models import wrap

Key = TypeVar("Key")
Verb = Callable[..., Any]
Wrap = Callable[[nn.Module, Verb], Any]
Iteration = Callable[[nn.Module, int, int], torch.Tensor]
"""Forward and backward of a model for one (step, rank); returns the loss."""


@dataclass
class Record:
    """What training showed: for each step the loss and each parameter's gradient, and the parameters at the end."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, loss: torch.Tensor, model: nn.Module) -> None:
        """Record a step's loss and gradients; the gradients are whole only after `end`."""
        self.losses.append(loss.detach().clone())
        self.gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})

    def end(self, model: nn.Module) -> None:
        """Gather all gradients and the parameters of ``model`` at once, since collectives take long here."""
        held = {(step, name): grad for step, grads in enumerate(self.gradients) for name, grad in grads.items()}
        parameters: dict[Any, torch.Tensor] = {(None, name): value for name, value in model.named_parameters()}
        values = whole_each({**parameters, **{key: grad for key, grad in held.items() if grad is not None}})
        self.parameters = {name: values[None, name] for _, name in parameters}
        self.gradients = [{name: values.get((step, name)) for name in g} for step, g in enumerate(self.gradients)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded value of a tensor, as a copy."""
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().clone()


def whole_each(tensors: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Their unsharded values, as copies; those cut over one mesh axis are gathered by one collective."""
    cut = {name: tensor for name, tensor in tensors.items() if _is_cut_over_one_axis(tensor)}
    if len({tensor.device_mesh for tensor in cut.values()}) != 1:
        return {name: whole(tensor) for name, tensor in tensors.items()}
    mesh = next(iter(cut.values())).device_mesh
    local = [tensor.to_local().detach() for tensor in cut.values()]
    # As bytes of all of them: a tensor that is pickled by itself takes a tenth of a millisecond on each rank.
    packed = torch.cat([part.flatten().view(torch.uint8) for part in local]).cpu().numpy()
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, (packed, [part.shape for part in local]), group=mesh.get_group())
    values = {}
    for (name, tensor), *parts in zip(cut.items(), *(_unpacked(one, local) for one in everyone), strict=True):
        filled = [part for part in parts if part.numel()]
        values[name] = (
            torch.cat(filled, tensor.placements[0].dim) if filled else torch.empty(tensor.shape, dtype=tensor.dtype)
        )
        assert values[name].shape == tensor.shape
    return {name: values[name] if name in values else whole(tensor) for name, tensor in tensors.items()}


def _unpacked(packed: tuple[Any, list[torch.Size]], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Another rank's parts, of the dtypes of this one's."""
    flat, shapes = torch.from_numpy(packed[0]), packed[1]
    sizes = [shape.numel() * part.element_size() for shape, part in zip(shapes, like, strict=True)]
    parts = zip(flat.split(sizes), like, shapes, strict=True)
    return [values.to(part.device, copy=True).view(part.dtype).view(shape) for values, part, shape in parts]


def _is_cut_over_one_axis(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 and type(tensor.placements[0]) is Shard


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    return whole_each(dict(model.named_parameters()))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Whole gradients by name."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {**gradients, **whole_each({name: grad for name, grad in gradients.items() if grad is not None})}


def batch(step: int, rank: int, *shape: int) -> torch.Tensor:
    """Data of one step of one rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def simple_iteration(width: int = 9) -> Iteration:
    """Forward, mean of squares, backward, on a batch of ``width`` features."""

    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = model(batch(step, rank, 4, width)).square().mean()
        loss.backward()
        return loss

    return run


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, whose steps are linear in the gradients, so that rounding errors do not grow."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_sharded(model: nn.Module, iteration: Iteration, steps: int) -> Record:
    """Train on this rank's data; the wrapping does the rest."""
    record, optimizer, rank = Record(), make_optimizer(model), dist.get_rank()
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        record.note(iteration(model, step, rank), model)
        optimizer.step()
        optimizer.zero_grad()
    record.end(model)
    return record


def train_plain(model: nn.Module, iteration: Iteration, steps: int) -> Record:
    """Train one whole model on the batches of all ranks; keeps this rank's losses."""
    record, optimizer = Record(), make_optimizer(model)
    for step in range(steps):
        for rank in range(dist.get_world_size()):
            torch.manual_seed(1000 * step + rank)
            loss = iteration(model, step, rank)
            if rank == dist.get_rank():
                own = loss
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
        record.note(own, model)
        optimizer.step()
        optimizer.zero_grad()
    record.end(model)
    return record


def assert_tensors(kind: str, ours: torch.Tensor | None, truth: torch.Tensor | None, *, bitwise: bool) -> None:
    """Both are None, or equal."""
    assert (ours is None) == (truth is None), f"{kind}: ours is {_shown(ours)}, the truth is {_shown(truth)}"
    if ours is None or truth is None:
        return
    if bitwise:
        assert torch.equal(ours, truth), f"{kind} differs by {(ours - truth).abs().max()}"
    else:
        torch.testing.assert_close(ours, truth, msg=lambda text: f"{kind}: {text}")


def _shown(value: torch.Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def assert_records(ours: Record, truth: Record, name: str, *, bitwise: bool) -> None:
    """Two trainings showed the same."""
    for step, (loss, expected) in enumerate(zip(ours.losses, truth.losses, strict=True)):
        assert_tensors(f"loss of step {step} against {name}", loss, expected, bitwise=bitwise)
    for step, (gradients, expected_gradients) in enumerate(zip(ours.gradients, truth.gradients, strict=True)):
        assert gradients.keys() == expected_gradients.keys()
        for key, value in gradients.items():
            kind = f"gradient of {key} in step {step} against {name}"
            assert_tensors(kind, value, expected_gradients[key], bitwise=bitwise)
    for key, value in ours.parameters.items():
        assert_tensors(f"{key} against {name}", value, truth.parameters[key], bitwise=bitwise)


def assert_resharded(model: nn.Module) -> None:
    """All parameters are registered sharded."""
    unsharded = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not unsharded, f"still unsharded: {unsharded}"


def check(
    make: Callable[[], nn.Module],
    iteration: Iteration | None = None,
    *,
    wrapping: Wrap | None = None,
    steps: int = 3,
    against_torch: bool = True,
    bitwise: bool = True,
    resharded: bool = True,
    **options: Any,
) -> nn.Module:
    """Train three models of one seed: ours, torch FSDP2's and a plain one on all data; they must agree.

    Args:
        make: the unwrapped model.
        iteration: one step; by default of a model that takes 9 features.
        wrapping: applies the verb; by default to each of ``model.layers`` and then to the model.
        steps: of SGD with momentum.
        against_torch: whether FSDP2 can do this at all.
        bitwise: whether FSDP2's sums are in the same order; on more than two ranks they are only close.
        resharded: whether all parameters must be sharded afterwards.
        options: of the verb.

    Returns:
        Our trained model.
    """
    iteration = iteration or simple_iteration()

    def build() -> nn.Module:
        torch.manual_seed(1)
        return make()

    def wrapped(verb: Verb) -> nn.Module:
        model = build()
        if wrapping is None:
            wrap(model, verb, **options)
        else:
            wrapping(model, verb)
        return model

    model = wrapped(shardwise.fully_shard)
    ours = train_sharded(model, iteration, steps)
    if resharded:
        assert_resharded(model)
    assert_records(ours, train_plain(build(), iteration, steps), "plain training", bitwise=False)
    if against_torch:
        theirs = train_sharded(wrapped(torch_fully_shard), iteration, steps)
        assert_records(ours, theirs, "FSDP2", bitwise=bitwise and dist.get_world_size() <= 2)
    return model
