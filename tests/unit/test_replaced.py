"""What was made of a model before `fully_shard` replaced its parameters: averages, ties, references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise import fully_shard, repoint
from shardwise.core.errors import StateError

from ..needs import needs_results

Mesh = Callable[..., DeviceMesh]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def train(wrapped: nn.Module) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_replaced_parameters_are_readable_while_they_are_true(fake_mesh: Mesh) -> None:
    wrapped = model()
    held = list(wrapped.parameters())
    values = [parameter.detach().clone() for parameter in held]
    fully_shard(wrapped, mesh=fake_mesh(2))
    wrapped(torch.ones(2, 4)).sum().backward()
    for parameter, value, sharded in zip(held, values, wrapped.parameters(), strict=True):
        assert torch.equal(parameter, value)
        assert isinstance(sharded, DTensor)
        torch.testing.assert_close(parameter.chunk(2)[0].detach(), sharded.to_local().detach())


READS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda average, held: average.lerp_(held, 0.1),
    lambda average, held: average.mul_(0.9).add_(held.data, alpha=0.1),
    lambda average, held: average.mul_(0.9).add_(held.detach(), alpha=0.1),
    lambda average, held: torch._foreach_lerp_([average], [held], 0.1),
    lambda average, held: average.sub_(0.1 * (average - held)),
    lambda average, held: average.copy_(held),
]


@pytest.mark.parametrize("read", READS, ids=["lerp", "data", "detach", "foreach", "difference", "copy"])
@pytest.mark.parametrize("how", ["train", "write", "load"])
def test_an_average_over_replaced_parameters_is_refused(fake_mesh: Mesh, read: Any, how: str) -> None:
    wrapped = model()
    held = wrapped[1].weight
    average = held.detach().clone()
    fully_shard(wrapped, mesh=fake_mesh(2))
    if how == "train":
        train(wrapped)
    elif how == "write":
        nn.init.zeros_(wrapped[1].weight)
    else:
        wrapped.load_state_dict(wrapped.state_dict())
    with (
        pytest.raises(StateError, match=r"'1\.weight' as it was before fully_shard.*after fully_shard"),
        torch.no_grad(),
    ):
        read(average, held)
    assert (held.shape, held.dtype, held.requires_grad, held.numel()) == ((3, 6), torch.float32, True, 18)


def test_looking_at_sharded_parameters_does_not_outdate_replaced_ones(fake_mesh: Mesh) -> None:
    wrapped = model()
    held = list(wrapped.parameters())
    fully_shard(wrapped, mesh=fake_mesh(2))
    for parameter in wrapped.parameters():
        parameter.requires_grad_(False).requires_grad_(True)
        assert parameter.data.shape == parameter.shape
    wrapped(torch.ones(2, 4)).sum().backward()
    assert all(torch.isfinite(parameter).all() for parameter in held)


def test_averaged_models_are_sharded_alike(fake_mesh: Mesh) -> None:
    """One process of one rank: the average is the plain one."""
    torch.manual_seed(0)
    plain, wrapped = model(), model()
    wrapped.load_state_dict(plain.state_dict())
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (plain, wrapped)]
    mesh = fake_mesh(1)
    fully_shard(wrapped, mesh=mesh)
    fully_shard(averages[1].module, mesh=mesh)
    for _ in range(3):
        for each, average in zip((plain, wrapped), averages, strict=True):
            train(each)
            average.update_parameters(each)
    for expected, value in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert isinstance(value, DTensor)
        assert torch.equal(expected, value.full_tensor())


def test_an_average_of_whole_tensors_is_refused(fake_mesh: Mesh) -> None:
    wrapped = model()
    average = AveragedModel(wrapped)
    fully_shard(wrapped, mesh=fake_mesh(2))
    with pytest.raises(StateError, match=r"'0\.weight'.*is sharded.*an average that was made before fully_shard"):
        average.update_parameters(wrapped)


def test_training_through_a_reference_made_before_is_refused(fake_mesh: Mesh) -> None:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    fully_shard(embedding, mesh=fake_mesh(2), module_fqn="embedding")
    with pytest.raises(StateError, match=r"'embedding\.weight' got a gradient as it was before fully_shard"):
        head(embedding(torch.arange(3))).sum().backward()
    assert head.weight.grad is None


def test_a_graph_made_before_does_not_train_replaced_parameters(fake_mesh: Mesh) -> None:
    wrapped = model()
    loss = wrapped(torch.ones(2, 4)).sum()
    fully_shard(wrapped, mesh=fake_mesh(2))
    with pytest.raises(StateError, match="got a gradient as it was before fully_shard"):
        loss.backward()


@needs_results
def test_an_optimizer_of_parameters_of_the_smaller_world_is_refused(fake_mesh: Mesh) -> None:
    wrapped = model()
    fully_shard(wrapped, mesh=fake_mesh(4), reshard_after_forward=2)
    with torch.no_grad():
        wrapped(torch.ones(2, 4))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match=r"SGD holds parameter '0\.weight'.*shardwise\.repoint"):
        optimizer.step()
    repoint(optimizer)
    before = [parameter.to_local().clone() for parameter in wrapped.parameters() if isinstance(parameter, DTensor)]
    optimizer.step()
    after = [parameter.to_local() for parameter in wrapped.parameters() if isinstance(parameter, DTensor)]
    assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [False] * 4


def test_parameters_stay_sharded_ones_when_a_conversion_fails(fake_mesh: Mesh) -> None:
    wrapped = model()
    fully_shard(wrapped[0], mesh=(mesh := fake_mesh(2)))
    fully_shard(wrapped, mesh=mesh)
    kinds = [type(parameter) for parameter in wrapped.parameters()]
    calls = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 4:
            raise RuntimeError("no more memory")
        return tensor.double()

    with pytest.raises(RuntimeError, match="no more memory"):
        wrapped._apply(convert)
    assert [type(parameter) for parameter in wrapped.parameters()] == kinds
    with pytest.raises(StateError, match="now have"):
        wrapped(torch.ones(2, 4))
    wrapped.float()
    train(wrapped)


def test_what_a_hook_on_a_gradient_writes_is_noticed(fake_mesh: Mesh) -> None:
    wrapped = model()
    fully_shard(wrapped, mesh=fake_mesh(2), reshard_after_forward=False)
    wrapped.set_reshard_after_backward(False)
    weight, bias = wrapped.get_parameter("1.weight"), wrapped.get_parameter("1.bias")
    weight.register_hook(lambda _: (weight.data.zero_(), bias.data.zero_())[2:] or None)
    wrapped(torch.ones(2, 4)).sum().backward()
    assert not wrapped(torch.ones(2, 4)).any()


def test_parameters_are_ones_own_again_when_what_replaced_them_is_gone(fake_mesh: Mesh) -> None:
    wrapped = model()
    held = list(wrapped.parameters())
    fully_shard(wrapped, mesh=fake_mesh(2))
    train(wrapped)
    del wrapped
    sum(parameter.sum() for parameter in held).backward()  # type: ignore[union-attr]
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in held)  # type: ignore[arg-type]
