"""Parameters that come and go: on some ranks, in some steps, after they were left out of reductions for a while."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise

from . import truth
from .harness import on_ranks
from .truth import batch, gradients_of

WIDTH, BRANCHES = 7, 3
USED: list[list[set[int]]] = [
    # for each step, what each rank (the last one again for more ranks) uses
    [{0, 1}, {0, 2}],
    [{0, 1, 2}, {0, 1, 2}],
    [{0}, {0}],
    [{0}, {0}],
    [{0}, {0}],  # 1 and 2 are left out from here on
    [{0, 1}, {0}],  # 1 comes back on one rank, and is reduced late
    [{0, 1}, {0}],
    [{0}, {0, 2}],  # 2 comes back on others
    [set(), set()],
    [set(), set()],
    [set(), set()],  # nothing at all: flags alone
    [{1, 2}, {0}],
    [{0, 1, 2}, {0, 1, 2}],
]


class Branches(nn.Module):
    """Sums chosen branches of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=index != 1) for index in range(BRANCHES))

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        for index in sorted(used):
            x = x + torch.tanh(self.branches[index](x))
        return x


def used_by(step: int, rank: int) -> set[int]:
    return USED[step][min(rank, 1)]


def plain_gradients(model: nn.Module, step: int, ranks: int, micro_batches: int) -> dict[str, torch.Tensor | None]:
    """Of the mean over ranks."""
    model.zero_grad()
    for rank in range(ranks):
        for part in range(micro_batches):
            x = batch(100 * part + step, rank, 4, WIDTH).requires_grad_()
            (model(x, used_by(step, rank)).square().sum() / ranks).backward()
    return gradients_of(model)


def check(model: Any, mesh: Any, micro_batches: int, ranks: int, *, apart: bool = False, **options: Any) -> None:
    """
    Args:
        apart: whether each branch is a unit.
    """
    rank = dist.get_rank()
    torch.manual_seed(3)
    reference = Branches()
    model.load_state_dict(reference.state_dict())
    for branch in model.branches if apart else ():
        shardwise.fully_shard(branch, mesh=mesh, **options)
    wrapped = shardwise.fully_shard(model, mesh=mesh, **options)
    for step in range(len(USED)):
        for part in range(micro_batches):
            wrapped.set_is_last_backward(part == micro_batches - 1)
            x = batch(100 * part + step, rank, 4, WIDTH).requires_grad_()
            wrapped(x, used_by(step, rank)).square().sum().backward()
        expected, found = plain_gradients(reference, step, ranks, micro_batches), gradients_of(model)
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None, (step, name)
            else:
                torch.testing.assert_close(found[name], gradient, msg=lambda text, s=step, n=name: f"{s} {n}: {text}")
        model.zero_grad()


@on_ranks(2, 3, preset=["zero1", "zero3", "ddp"], micro_batches=[1, 2])
def test_branches_that_come_and_go(preset: str, micro_batches: int) -> None:
    ranks = dist.get_world_size()
    check(Branches(), init_device_mesh("cpu", (ranks,)), micro_batches, ranks, placements=preset)


@on_ranks(2, 3, strategy=["ddp", "replicas"], micro_batches=[1, 2])
def test_units_that_ranks_leave_out(strategy: str, micro_batches: int) -> None:
    """Where each has the whole parameters, they need not run the same units, nor ever have run one."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,) if strategy == "ddp" else (ranks, 1))
    placements = "ddp" if strategy == "ddp" else "zero3"
    check(Branches(), mesh, micro_batches, ranks, apart=True, placements=placements)


@on_ranks(4)
def test_two_axes() -> None:
    check(Branches(), init_device_mesh("cpu", (2, 2)), 1, 4)


@on_ranks(2)
def test_left_out_parameters_of_low_precision_come_back() -> None:
    """Reduced in fp32 from bf16 gradients: a late reduction has the dtype of the others."""
    policy = shardwise.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shardwise.fully_shard(Branches(), mp_policy=policy)
    for step in range(len(USED)):
        used = used_by(step, dist.get_rank())
        model(batch(step, dist.get_rank(), 4, WIDTH).requires_grad_(), used).float().square().sum().backward()
        anywhere = USED[step][0] | USED[step][1]
        for index, branch in enumerate(model.branches):  # type: ignore[arg-type, var-annotated]
            gradient = branch.weight.grad
            assert (gradient is not None) == (index in anywhere), step
            assert gradient is None or (gradient.dtype is torch.float32 and bool((gradient.full_tensor() != 0).any()))
        model.zero_grad()


class Pair(nn.Module):
    """Two units, of which one's output may be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, drops: bool = False) -> torch.Tensor:
        kept, maybe = self.first(x), self.second(x)
        return self.head(kept if drops else kept + maybe)


def pair(verb: Any = None, **options: Any) -> Any:
    torch.manual_seed(5)
    model = Pair()
    for module in (model.first, model.second, model) if verb else ():
        verb(module, **options)
    return model


@on_ranks(
    2, 3, preset=["zero1", "zero2", "zero3", "ddp"], announces=["set_requires_gradient_sync", "set_is_last_backward"]
)
def test_a_unit_left_out_of_the_last_micro_batch(preset: str, announces: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, single = pair(shardwise.fully_shard, placements=preset), pair()
    for step in range(2):
        for part, drops in enumerate([False, True]):
            getattr(model, announces)(part == 1)
            model(batch(2 * step + part, rank, 4, WIDTH), drops).square().sum().backward()
            for other in range(ranks):
                (single(batch(2 * step + part, other, 4, WIDTH), drops).square().sum() / ranks).backward()
        expected, found = gradients_of(single), gradients_of(model)
        for name, gradient in expected.items():
            assert gradient is not None
            torch.testing.assert_close(found[name], gradient)
        model.zero_grad()
        single.zero_grad()


@on_ranks(2, 3, preset=["zero1", "zero3"])
def test_a_unit_used_on_other_ranks_and_left_out_of_the_last_micro_batch(preset: str) -> None:
    """This rank has none of its gradients, and reduces them with those that have."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.first, self.branches = nn.Linear(WIDTH, WIDTH), Branches()

        def forward(self, part: int, rank: int) -> torch.Tensor:
            x = self.first(batch(part, rank, 4, WIDTH))
            return self.branches(x, {0, 2} if rank else set()) if part == 0 else x

    model, single = Model(), Model()
    for module in (model.branches, model):
        shardwise.fully_shard(module, placements=preset)
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
        model(part, rank).square().sum().backward()
        for other in range(ranks):
            (single(part, other).square().sum() / ranks).backward()
    expected, found = gradients_of(single), gradients_of(model)
    assert {name for name, gradient in found.items() if gradient is None} == {"branches.branches.1.weight"}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@on_ranks(2, 3, reshards=[False, True])
def test_zeros_for_a_unit_that_took_no_part(reshards: bool) -> None:
    """Also where another rank's backward does go through the unit; all ranks gather it, whatever theirs did before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, single = pair(shardwise.fully_shard, reshard_after_forward=reshards), pair()
    model.set_reduce_scatter_unused_params(True)
    for users in (set(), set(), {0}, {0}, {0, 1, 2}):
        model(batch(1, rank, 4, WIDTH), rank not in users).square().sum().backward()
        for other in range(ranks):
            (single(batch(1, other, 4, WIDTH), other not in users).square().sum() / ranks).backward()
        found = gradients_of(model)
        for name, parameter in single.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], expected, msg=lambda text, n=name, u=users: f"{n} {u}: {text}")
        model.zero_grad()
        single.zero_grad()


class Detached(nn.Module):
    """Layers of one shape, all of which run; what some give is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            part = layer(x)
            x = x + torch.tanh(part if index in used else part.detach())
        return x


@on_ranks(2, 3)
def test_zeros_for_units_that_other_ranks_leave_out_of_the_loss() -> None:
    """All of one shape, and their inputs need gradients: never reduced with another one's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    single, model = Detached(), Detached()
    model.load_state_dict(single.state_dict())
    for unit in (*model.layers, model):
        shardwise.fully_shard(unit, reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    for step in range(3):
        used = [{(step + one) % BRANCHES} for one in range(ranks)]
        model(batch(step, rank, 4, WIDTH).requires_grad_(), used[rank]).square().sum().backward()
        for other in range(ranks):
            (single(batch(step, other, 4, WIDTH), used[other]).square().sum() / ranks).backward()
        found = gradients_of(model)
        for name, parameter in single.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], expected)
        model.zero_grad()
        single.zero_grad()


class Heads(nn.Module):
    """Two outputs, of which the second is a view of its linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(9, 5), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x).t()


@on_ranks(2)
def test_outputs_that_nothing_uses_give_no_gradients() -> None:
    def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = model(batch(step, rank, 4, 9))[step % 2].square().mean()
        loss.backward()
        return loss

    truth.check(Heads, run, wrapping=lambda model, verb: verb(model, mesh=init_device_mesh("cpu", (2,))))


class Chain(nn.Module):
    """Branches of the root's, then two units: what goes into the first of these needs gradients if a branch is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Branches(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        return self.third(torch.tanh(self.second(self.first(x, used))))


@on_ranks(2, 3, preset=["zero1", "zero3", "ddp"], shares=[True, False])
def test_units_whose_inputs_need_gradients_on_some_ranks(preset: str, shares: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model, reference = Chain(), Chain()
    reference.load_state_dict(model.state_dict())
    context = shardwise.FSDPCommContext("cpu") if shares else None
    for module in (model.second, model.third, model):
        shardwise.fully_shard(module, placements=preset, comm_ctx=context)
    for step in range(len(USED)):
        model(batch(step, rank, 4, WIDTH), used_by(step, rank)).square().sum().backward()
        reference.zero_grad()
        for other in range(ranks):
            loss = reference(batch(step, other, 4, WIDTH), used_by(step, other)).square().sum()
            (loss / ranks).backward()
        expected, found = gradients_of(reference), gradients_of(model)
        for name, gradient in expected.items():
            truth.assert_tensors(f"{step} {name}", found[name], gradient, bitwise=False)
        model.zero_grad()


class Towers(nn.Module):
    """Two towers of different sizes on data; their head is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, image: torch.Tensor, text: torch.Tensor, text_first: bool) -> torch.Tensor:
        if text_first:
            from_text, from_image = self.text(text), self.image(image)
        else:
            from_image, from_text = self.image(image), self.text(text)
        return self.head(torch.tanh(from_image + from_text))


@on_ranks(2, 3, preset=["ddp", "zero1", "zero2", "kept"], differs=["evaluation", "order"])
def test_forwards_that_differ_between_ranks(preset: str, differs: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model, reference = Towers(), Towers()
    reference.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"reshard_after_forward": False} if preset == "kept" else {"placements": preset}
    for module in (model.image, model.text, model):
        shardwise.fully_shard(module, **options)
    for step in range(3):
        # What is gathered in forward is gathered in the same order, in the first one at the latest.
        swaps = differs == "order" and rank == 0 and preset != "kept" and step > 0
        loss = model(batch(step, rank, 5, 8), batch(10 + step, rank, 5, 4), swaps).square().sum()
        if differs == "evaluation" and rank == 0:
            with torch.no_grad():
                model.image(batch(20, rank, 5, 8))
        loss.backward()
        reference.zero_grad()
        for other in range(ranks):
            expected = reference(batch(step, other, 5, 8), batch(10 + step, other, 5, 4), False).square().sum()
            (expected / ranks).backward()
        found = gradients_of(model)
        for name, gradient in gradients_of(reference).items():
            truth.assert_tensors(f"{step} {name}", found[name], gradient, bitwise=False)
        model.zero_grad()


@on_ranks(2, 3)
def test_what_never_runs_may_be_frozen_on_some_ranks() -> None:
    """Also where others are trained otherwise than before, on which ranks agree."""
    torch.manual_seed(0)
    plain = Branches()
    model: Any = copy.deepcopy(plain)
    for module in (*model.branches, model):
        shardwise.fully_shard(module)
    x = batch(0, dist.get_rank(), 4, WIDTH)
    model(x, {0, 1}).sum().backward()
    model.branches[2].weight.requires_grad_(dist.get_rank() == 0)
    for one in (model, plain):
        one.branches[0].bias.requires_grad_(False)
        one.zero_grad()
    for _ in range(2):
        model(x, {0, 1}).sum().backward()
        for rank in range(dist.get_world_size()):
            (plain(batch(0, rank, 4, WIDTH), {0, 1}).sum() / dist.get_world_size()).backward()
    for name, expected in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        assert (gradient is None) == (expected.grad is None), name
        if gradient is not None:
            torch.testing.assert_close(truth.whole(gradient), expected.grad)


class Recomputes(nn.Module):
    """Runs chosen layers, some of them twice, each recomputed in backward by reentrant checkpointing or not."""

    def __init__(self, recomputed: set[int]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor, calls: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for position, index in enumerate(calls):
            layer = self.layers[index]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if position in self.recomputed else layer(x))
        return x


@on_ranks(3, recomputed=[{0}, {1}, {0, 1}], calls=[[(0, 1), (1,), (0,)], [(), (0, 1), (0, 1)], [(0, 0), (0,), ()]])
def test_units_recomputed_call_by_call_on_some_ranks(recomputed: set[int], calls: list[tuple[int, ...]]) -> None:
    """Ranks that run a unit several times reduce as often as those that leave it out."""
    torch.manual_seed(1)
    plain = Recomputes(recomputed)
    model: Any = copy.deepcopy(plain)
    shardwise.fully_shard([*model.layers] if (0, 1) in calls else model.layers[0], placements="ddp")
    shardwise.fully_shard(model, placements="ddp")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        model(batch(step, rank, 4, WIDTH), calls[rank]).sum().backward()
        for other in range(ranks):
            (plain(batch(step, other, 4, WIDTH), calls[other]).sum() / ranks).backward()
    for name, gradient in gradients_of(model).items():
        truth.assert_tensors(name, gradient, plain.get_parameter(name).grad, bitwise=False)
