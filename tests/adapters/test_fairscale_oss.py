"""OSS against the plain optimizer it wraps, and against FairScale's own."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardwise.arguments import Argument, Support, check_arguments
from shardwise.fairscale import OSS, DummyProcessGroup, FullyShardedDataParallel, ShardedDDP
from shardwise.fairscale.oss import ARGUMENTS

from ..models import MLP, ConvNet, inputs_for
from ..ranks.harness import on_ranks
from .fairscale_on_cpu import needs_fairscale

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"lr": 0.1}),
    (Adam, {"lr": 0.01, "amsgrad": True}),
    (AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {"lambd": 0.1, "t0": 1}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {}),
]


def model_of(make: Callable[[], nn.Module] = MLP, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def give_gradients(parameters: Iterable[torch.Tensor], step: int, scale: float = 1.0) -> None:
    """The same gradients on all ranks, as data parallelism leaves them."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.requires_grad:
            parameter.grad = gradient.to(parameter.dtype)


def assert_same(ours: Iterable[torch.Tensor], truth: Iterable[torch.Tensor], what: str = "") -> None:
    for index, (mine, other) in enumerate(zip(ours, truth, strict=True)):
        assert mine.dtype == other.dtype, f"{what} parameter {index}"
        difference = (mine.double() - other.double()).abs().max() if mine.numel() else 0
        assert torch.equal(mine, other), f"{what} parameter {index} differs by {difference}"


def assert_same_state(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    """Two state dicts, entry by entry."""
    assert ours.keys() == truth.keys()
    assert ours["param_groups"] == truth["param_groups"]
    assert list(ours["state"]) == list(truth["state"])
    for number, state in truth["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, value in state.items():
            other = ours["state"][number][key]
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, (number, key)


def pair(optim: type[Optimizer], options: dict[str, Any], make: Callable[[], nn.Module] = MLP) -> tuple[Any, ...]:
    """A model with its OSS, and the same model with the plain optimizer."""
    mine, plain = model_of(make), model_of(make)
    return mine, OSS(mine.parameters(), optim=optim, **options), plain, optim(plain.parameters(), **options)


def train_both(mine: nn.Module, oss: Optimizer, plain: nn.Module, optimizer: Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        for model, stepped in ((mine, oss), (plain, optimizer)):
            give_gradients(model.parameters(), step)
            stepped.step()
            stepped.zero_grad()


# -- Steps


@on_ranks(1, 2, 3)
def test_every_optimizer_steps_as_the_plain_one() -> None:
    for optim, options in OPTIMIZERS:
        mine, oss, plain, optimizer = pair(optim, options)
        train_both(mine, oss, plain, optimizer, range(3))
        assert_same(mine.parameters(), plain.parameters(), optim.__name__)
        assert_same_state(oss.state_dict(all_ranks=True), optimizer.state_dict())


@on_ranks(2, make=[MLP, ConvNet])
def test_trains_in_ddp_as_the_plain_optimizer(make: Callable[[], nn.Module]) -> None:
    mine, oss, plain, optimizer = pair(AdamW, {"lr": 0.01}, make)
    for model, stepped in ((mine, oss), (plain, optimizer)):
        wrapped = DistributedDataParallel(model)
        for step in range(3):
            stepped.zero_grad()
            wrapped(inputs_for(model, 10 * step + dist.get_rank())).square().mean().backward()
            stepped.step()
    assert_same(mine.parameters(), plain.parameters())


@on_ranks(2, sizes=[(-1,), (0,), (1,), (40,), (10**6,)])
def test_broadcast_buffers_of_any_size(sizes: tuple[int]) -> None:
    """Small and large, strided, empty and 0-dim parameters, with more kinds than buffers."""

    def build() -> list[nn.Parameter]:
        torch.manual_seed(3)
        shapes = [(3, 5), (), (0, 4), (300, 200), (7,), (2, 3, 4, 4), (1,)]
        parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        parameters[5].data = parameters[5].data.to(memory_format=torch.channels_last)
        parameters.append(nn.Parameter(torch.randn(400, 300).t()))
        parameters += [nn.Parameter(torch.randn(9).to(dtype)) for dtype in (torch.float64, torch.bfloat16)]
        return parameters

    mine, plain = build(), build()
    oss = OSS(mine, optim=Adam, broadcast_buffer_size=sizes[0])
    optimizer = Adam(plain)
    for step in range(2):
        for parameters, stepped in ((mine, oss), (plain, optimizer)):
            give_gradients(parameters, step)
            stepped.step()
    assert_same(mine, plain)
    assert [parameter.stride() for parameter in mine] == [parameter.stride() for parameter in plain]


@on_ranks(3)
def test_more_ranks_than_parameters() -> None:
    mine, plain = [nn.Parameter(torch.ones(3))], [nn.Parameter(torch.ones(3))]
    oss, optimizer = OSS(mine, optim=AdamW), AdamW(plain)
    for step in range(2):
        for parameters, stepped in ((mine, oss), (plain, optimizer)):
            give_gradients(parameters, step)
            stepped.step()
    assert_same(mine, plain)
    assert_same_state(oss.state_dict(all_ranks=True), optimizer.state_dict())
    oss.load_state_dict(optimizer.state_dict())
    oss.clip_grad_norm(1.0)


@on_ranks(2)
def test_closures() -> None:
    mine, oss, plain, optimizer = pair(AdamW, {"lr": 0.1})
    calls = []

    def closure_of(model: nn.Module, stepped: Optimizer) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            calls.append(model)
            stepped.zero_grad()
            loss = model(inputs_for(model, 5)).square().mean()
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        loss, expected = oss.step(closure_of(mine, oss)), optimizer.step(closure_of(plain, optimizer))
        assert torch.equal(loss, expected)
    assert_same(mine.parameters(), plain.parameters())
    assert len(calls) == 6


class Scaling(SGD):
    """Takes its closure by name only."""

    def step(self, scale: float = 1.0, *, closure: Any = None) -> Any:
        assert scale == 1.0
        return super().step(closure)


@on_ranks(2)
def test_closures_are_passed_by_name() -> None:
    mine, oss, plain, optimizer = pair(Scaling, {"lr": 0.1})
    for model, stepped in ((mine, oss), (plain, optimizer)):
        assert stepped.step(closure=lambda model=model: give_gradients(model.parameters(), 1) or 3.0) == 3.0
    assert_same(mine.parameters(), plain.parameters())


class WithoutClosure(SGD):
    """Takes none."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


@on_ranks(2)
def test_no_closure_is_passed_where_there_is_none() -> None:
    mine, oss, plain, optimizer = pair(WithoutClosure, {"lr": 0.1})
    for model, stepped in ((mine, oss), (plain, optimizer)):
        give_gradients(model.parameters(), 1)
        stepped.step()
    assert_same(mine.parameters(), plain.parameters())


class Counting(SGD):
    """Takes an argument of its own and keeps a number in its param groups."""

    def step(self, closure: Any = None, *, times: int = 1) -> Any:
        for _ in range(times):
            super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + times
        return "done"


@on_ranks(2)
def test_arguments_of_the_wrapped_step_and_its_own_settings() -> None:
    mine, oss, plain, optimizer = pair(Counting, {"lr": 0.1})
    for model, stepped in ((mine, oss), (plain, optimizer)):
        give_gradients(model.parameters(), 1)
        assert stepped.step(times=3) == "done"
    assert_same(mine.parameters(), plain.parameters())
    assert oss.param_groups[0]["count"] == 3


def schedulers(optimizer: Optimizer) -> list[Any]:
    from torch.optim import lr_scheduler as lr

    return [
        lr.OneCycleLR(optimizer, max_lr=0.5, total_steps=8),
        lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, 4)], milestones=[2]),
        lr.ReduceLROnPlateau(optimizer, patience=0),
    ]


@on_ranks(2, which=[0, 1, 2])
def test_schedulers_and_param_groups(which: int) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": [first], "weight_decay": 0.1}, {"params": others, "lr": 0.02, "betas": (0.8, 0.9)}]

    mine, plain = model_of(), model_of()
    oss, optimizer = OSS(groups(mine), optim=AdamW, lr=0.1), AdamW(groups(plain), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = [(mine, oss, schedulers(oss)[which]), (plain, optimizer, schedulers(optimizer)[which])]
        for step in range(5):
            for model, stepped, scheduler in pairs:
                give_gradients(model.parameters(), step)
                stepped.step()
                scheduler.step(*([1.0 + step] if which == 2 else []))
    assert_same(mine.parameters(), plain.parameters())
    settings = [{key: value for key, value in group.items() if key != "params"} for group in oss.param_groups]
    assert settings == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert oss.defaults == optimizer.defaults


@on_ranks(2)
def test_names_hooks_and_state_are_those_of_an_optimizer() -> None:
    model = model_of()
    oss = OSS(model.named_parameters(), optim=Adam, lr=0.1)
    assert oss.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert oss.optim.param_groups[0]["param_names"] == [
        name for name, parameter in model.named_parameters() if oss.owners()[parameter] == dist.get_rank()
    ]
    seen = []
    oss.register_step_pre_hook(lambda *_: seen.append("before"))
    oss.register_step_post_hook(lambda *_: seen.append("after"))
    oss.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    give_gradients(model.parameters(), 1)
    oss.step()
    oss.load_state_dict(oss.state_dict(all_ranks=True))
    assert seen == ["before", "after", "loaded"]
    assert set(oss.state) == {p for p, owner in oss.owners().items() if owner == dist.get_rank()}
    assert oss.state is oss.optim.state
    assert isinstance(oss, Optimizer)


# -- Freezing and param groups


@on_ranks(2)
def test_frozen_and_unfrozen_between_steps() -> None:
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1, "momentum": 0.9})
    for step in range(6):
        for model, stepped in ((mine, oss), (plain, optimizer)):
            for index, parameter in enumerate(model.parameters()):
                parameter.requires_grad_((index + step) % 3 != 0)
            # With zeros in place of None a frozen parameter keeps moving by its momentum, also on all ranks.
            stepped.zero_grad(set_to_none=step % 2 == 0)
            give_gradients(model.parameters(), step)
            stepped.step()
        assert_same(mine.parameters(), plain.parameters(), f"step {step}")


@on_ranks(2)
def test_a_frozen_parameter_with_a_gradient_moves_on_all_ranks() -> None:
    """An optimizer steps whatever has a gradient; with ShardedDDP only the owner has it."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    oss = OSS(parameters, optim=SGD, lr=1.0)
    for parameter, owner in oss.owners().items():
        parameter.grad = torch.ones(2) if owner == dist.get_rank() else None
        parameter.requires_grad_(False)
    oss.step()
    assert all(torch.equal(parameter.detach(), torch.zeros(2)) for parameter in parameters)


@on_ranks(2, has_all=[False, True])  # whether all ranks have gradients, as with DDP, or owners alone
def test_a_parameter_frozen_again_before_the_step_moves_on_all_ranks(has_all: bool) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    oss = OSS(parameters, optim=SGD, lr=1.0)
    for expected in (1.0, 0.0, 0.0, -1.0):
        for parameter, owner in oss.owners().items():
            parameter.requires_grad_(False)
            has_gradient = expected != parameter[0] and (has_all or owner == dist.get_rank())
            parameter.grad = torch.ones(2) if has_gradient else None
        oss.step()
        assert all(torch.equal(parameter.detach(), torch.full((2,), expected)) for parameter in parameters)


class ClearingSGD(SGD):
    """Drops the gradients that it has used."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


class UncountedSGD(ClearingSGD):
    """Its writes change no version."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)
        self.zero_grad()


@on_ranks(2, kind=[ClearingSGD, UncountedSGD])
def test_frozen_parameters_of_an_optimizer_that_drops_gradients(kind: type[SGD]) -> None:
    parameters = [nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(3)]
    with torch.inference_mode():
        untouched = nn.Parameter(torch.ones(2), requires_grad=False)
    oss = OSS([*parameters, untouched], optim=kind, lr=1.0)
    for expected in (1.0, 0.0, -1.0):
        for parameter in parameters:
            parameter.grad = torch.ones(2) if expected != parameter[0] else None
        oss.step()
        assert all(torch.equal(parameter, torch.full((2,), expected)) for parameter in parameters)


@on_ranks(2)
def test_frozen_parameters_whose_gradients_are_there_inside_of_the_step_only() -> None:
    parameters = [nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(3)]
    oss = OSS(parameters, optim=ClearingSGD, lr=1.0)

    def closure() -> float:
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        return 0.0

    for expected in (0.0, -1.0):
        oss.step(closure)
        oss.zero_grad()
        assert all(torch.equal(parameter, torch.full((2,), expected)) for parameter in parameters)


@on_ranks(1, 2)
def test_saving_and_loading_leave_no_hooks_behind() -> None:
    oss = OSS(model_of().parameters(), optim=AdamW, lr=0.1)
    kinds = ("state_dict_post_hooks", "load_state_dict_pre_hooks", "load_state_dict_post_hooks")
    before = [len(getattr(oss, f"_optimizer_{kind}")) for kind in kinds]
    for _ in range(2):
        oss.load_state_dict(oss.state_dict(all_ranks=True))
    assert [len(getattr(oss, f"_optimizer_{kind}")) for kind in kinds] == before


@on_ranks(2)
def test_ranks_that_freeze_other_parameters_are_told() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    oss = OSS(parameters, optim=SGD, lr=1.0)
    parameters[0].requires_grad_(False)
    oss.step()
    parameters[dist.get_rank()].requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"parameter 1 of param group 0.*requires_grad=True on rank 0.*False on rank 1"
    ):
        oss.step()


@on_ranks(2)
def test_freezing_between_backward_and_step_with_sharded_ddp() -> None:
    def inputs(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plain = copy.deepcopy(model)
    oss, optimizer = OSS(model.parameters(), optim=SGD, lr=0.1), SGD(plain.parameters(), lr=0.1)
    sharded = ShardedDDP(model, oss)
    for step in range(4):
        for trained, run, stepped, rank in ((model, sharded, oss, dist.get_rank()), (plain, plain, optimizer, None)):
            trained[0].requires_grad_(step % 2 == 1)
            rows = torch.cat([inputs(step, one) for one in range(2)]) if rank is None else inputs(step, rank)
            run(rows).square().mean().backward()
            trained[0].requires_grad_(False)
            stepped.step()
            stepped.zero_grad()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)


@on_ranks(2)
def test_refresh_trainable_may_be_called() -> None:
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1})
    before = oss.owners()
    next(mine.parameters()).requires_grad_(False)
    next(plain.parameters()).requires_grad_(False)
    oss.refresh_trainable()
    train_both(mine, oss, plain, optimizer, range(2))
    assert_same(mine.parameters(), plain.parameters())
    assert oss.owners() == before


@on_ranks(2, 4)
def test_partition_and_adding_param_groups() -> None:
    torch.manual_seed(0)
    sizes = [7, 5, 5, 3, 9, 1]
    first, second = ([nn.Parameter(torch.randn(size)) for size in sizes] for _ in range(2))
    second[1].requires_grad_(False)
    oss = OSS(first, optim=Adam, lr=0.1)
    before = oss.owners()
    oss.add_param_group({"params": second, "lr": 0.5})
    after = oss.owners()
    assert all(after[parameter] == owner for parameter, owner in before.items())
    parts = oss.partition_parameters()
    assert len(parts) == dist.get_world_size()
    for rank, part in enumerate(parts):
        assert [group["lr"] for group in part] == [0.1, 0.5]
        for group, whole in zip(part, oss.param_groups, strict=True):
            expected = [parameter for parameter in whole["params"] if after[parameter] == rank]
            assert all(a is b for a, b in zip(group["params"], expected, strict=True))
    loads = [0] * dist.get_world_size()
    for parameter, owner in after.items():
        assert loads[owner] == min(loads)
        loads[owner] += parameter.numel() if parameter.requires_grad else 0
    assert [len(group["params"]) for group in oss.optim.param_groups] == [
        len(group["params"]) for group in parts[dist.get_rank()]
    ]
    plain = copy.deepcopy([first, second])
    optimizer = Adam([{"params": plain[0]}, {"params": plain[1], "lr": 0.5}], lr=0.1)
    for step in range(2):
        for parameters, stepped in (([*first, *second], oss), ([*plain[0], *plain[1]], optimizer)):
            give_gradients(parameters, step)
            stepped.step()
    assert_same([*first, *second], [*plain[0], *plain[1]])
    with pytest.raises(ValueError, match="more than one"):
        oss.add_param_group({"params": first[:1]})
    assert oss.owners() == after


class Picky(SGD):
    """Refuses param groups that any optimizer takes."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As an optimizer for matrices only."""
        if param_group.get("lr", 1) == 0:
            raise ValueError("no lr")
        super().add_param_group(param_group)


@on_ranks(2)
def test_what_has_no_shape_yet_is_refused_by_name_and_not_added() -> None:
    parameter, lazy = nn.Parameter(torch.ones(3)), nn.LazyLinear(2)
    with pytest.raises(ValueError, match=r"parameter 'weight' of param group 0.* has no shape yet"):
        OSS(lazy.named_parameters(), lr=0.1)
    oss = OSS([parameter], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of param group 1.* has no shape yet"):
        oss.add_param_group({"params": lazy.parameters()})
    give_gradients([parameter], 0)
    oss.step()
    assert len(oss.param_groups) == 1
    assert list(oss.owners().values()) == [0]


@on_ranks(2)
def test_a_group_that_the_wrapped_optimizer_refuses_is_not_added() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(5)]
    oss, plain = OSS(parameters[:2], optim=Picky, lr=0.1), Picky(copy.deepcopy(parameters), lr=0.1)
    with pytest.raises(ValueError, match="no lr"):
        oss.add_param_group({"params": parameters[2:4], "lr": 0})
    assert len(oss.param_groups) == 1
    oss.add_param_group({"params": parameters[2:]})
    expected = OSS([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1).owners()
    assert oss.owners() == expected
    for step in range(2):
        for members, stepped in ((parameters, oss), (plain.param_groups[0]["params"], plain)):
            give_gradients(members, step)
            stepped.step()
    assert_same(parameters, plain.param_groups[0]["params"])


# -- Memory


@on_ranks(2, 3)
def test_holds_only_the_state_that_it_owns() -> None:
    model = model_of()
    oss = OSS(model.parameters(), optim=AdamW)
    give_gradients(model.parameters(), 0)
    oss.step()
    owned = [parameter for parameter, owner in oss.owners().items() if owner == dist.get_rank()]
    for optimizer in (oss, oss.optim):
        tensors = [t for state in optimizer.state.values() for t in state.values() if t.ndim or t.numel() > 1]
        assert sum(tensor.nbytes for tensor in tensors) == 2 * sum(parameter.nbytes for parameter in owned)
    total = torch.tensor(float(sum(parameter.numel() for parameter in owned)))
    dist.all_reduce(total)
    assert total == sum(parameter.numel() for parameter in model.parameters())


# -- fp16 and mixed dtypes


@on_ranks(2)
def test_broadcast_fp16_rounds_alike_and_keeps_every_dtype() -> None:
    """FairScale leaves float16 parameters in float32."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64] * 2

    def build() -> list[nn.Parameter]:
        torch.manual_seed(2)
        return [nn.Parameter(torch.randn(11).to(dtype)) for dtype in dtypes]

    mine, plain = build(), build()
    oss, optimizer = OSS(mine, optim=SGD, broadcast_fp16=True, lr=0.1), SGD(plain, lr=0.1)
    for step in range(2):
        for parameters, stepped in ((mine, oss), (plain, optimizer)):
            give_gradients(parameters, step)
            stepped.step()
        for parameter in plain:
            if parameter.dtype in (torch.float32, torch.float64):
                parameter.data = parameter.data.half().to(parameter.dtype)
    assert [parameter.dtype for parameter in mine] == dtypes
    assert_same(mine, plain)


@on_ranks(2)
def test_how_parameters_travel_may_be_set_between_steps() -> None:
    """Trainers wrap an optimizer that they are given and set ``broadcast_fp16`` of it later."""
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1})
    for step, (half, size) in enumerate([(False, -1), (True, -1), (True, 0), (False, 5), (False, -1)]):
        oss.broadcast_fp16, oss.broadcast_buffer_size = half, size
        train_both(mine, oss, plain, optimizer, [step])
        if half:
            for parameter in plain.parameters():
                parameter.data = parameter.data.half().float()
        assert_same(mine.parameters(), plain.parameters())


@on_ranks(2)
def test_a_model_may_change_its_dtype_between_steps() -> None:
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1})
    train_both(mine, oss, plain, optimizer, [0])
    mine.double()
    plain.double()
    train_both(mine, oss, plain, optimizer, [1])
    assert_same(mine.parameters(), plain.parameters())


@on_ranks(2)
def test_received_parameters_count_as_modified() -> None:
    """Otherwise autograd would refuse an old graph on the owner and use wrong values on the others."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    oss = OSS(parameters, optim=SGD, lr=0.1)
    losses = [parameter.square().sum() for parameter in parameters]
    give_gradients(parameters, 0)
    oss.step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# -- Memory of small parameters


def in_one_memory(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each starts at the first multiple of 64 bytes after the one before."""
    return all(
        after.data_ptr() == before.data_ptr() + before.nbytes + -before.nbytes % 64
        for before, after in itertools.pairwise(parameters)
    )


def live_where_they_travel(oss: OSS) -> bool:
    owners = oss.owners()
    return all(
        in_one_memory([parameter for parameter, owner in owners.items() if owner == rank and parameter.requires_grad])
        for rank in range(oss.world_size)
    )


@on_ranks(2)
def test_small_parameters_live_where_they_travel() -> None:
    mine, oss, plain, optimizer = pair(AdamW, {"lr": 0.1})
    train_both(mine, oss, plain, optimizer, range(2))
    assert live_where_they_travel(oss)
    # Where compiled kernels take them to be.
    assert not any(parameter.data_ptr() % 64 for parameter in mine.parameters())
    oss.refresh_trainable()
    train_both(mine, oss, plain, optimizer, [2])
    assert live_where_they_travel(oss)
    for trained in (False, True):
        for model in (mine, plain):
            model.layers[1].weight.requires_grad_(trained)
        train_both(mine, oss, plain, optimizer, [3])
        assert live_where_they_travel(oss)
    assert_same(mine.parameters(), plain.parameters())


@on_ranks(2)
def test_no_parameter_brings_the_others_along() -> None:
    """Who saves one, or looks which parameters are tied, finds its own memory and no more."""
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1})
    train_both(mine, oss, plain, optimizer, range(2))
    assert live_where_they_travel(oss)
    sizes = []
    for model in (mine, plain):
        torch.save(model.layers[0].bias, file := io.BytesIO())
        sizes.append(file.tell())
    assert sizes[0] == sizes[1]
    with tempfile.TemporaryDirectory() as directory:
        safetensors.torch.save_model(mine, f"{directory}/weights")
        loaded = safetensors.torch.load_file(f"{directory}/weights")
    assert_same([loaded[name] for name in plain.state_dict()], plain.parameters())
    mine.share_memory()
    train_both(mine, oss, plain, optimizer, range(2))
    assert all(parameter.is_shared() for parameter in mine.parameters())
    assert_same(mine.parameters(), plain.parameters())


@on_ranks(2)
def test_the_first_step_may_be_in_inference_mode() -> None:
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1})
    for model, stepped in ((mine, oss), (plain, optimizer)):
        give_gradients(model.parameters(), 0)
        with torch.inference_mode():
            stepped.step()
        model(inputs_for(model, 0)).sum().backward()
        stepped.step()
    assert_same(mine.parameters(), plain.parameters())


@on_ranks(2)
def test_memory_that_others_refer_to_stays_the_parameters() -> None:
    """Views; other processes; arrays; files."""
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1})
    views = [parameter.detach() for parameter in mine.parameters()]
    before = [view.data_ptr() for view in views]
    train_both(mine, oss, plain, optimizer, range(2))
    assert [parameter.data_ptr() for parameter in mine.parameters()] == before
    assert_same(views, plain.parameters())

    arrays = [np.ones(5, np.float32) for _ in range(4)]
    with tempfile.NamedTemporaryFile() as file:
        mapped = torch.from_file(file.name, shared=True, size=5).fill_(1.0)
        makes: list[Callable[[int], torch.Tensor]] = [
            lambda index: torch.ones(5).share_memory_(),
            lambda index: torch.from_numpy(arrays[index]),
            lambda index: torch.from_file(file.name, shared=True, size=5) if index else torch.ones(5),
        ]
        for make in makes:
            parameters = [nn.Parameter(make(index)) for index in range(4)]
            before = [parameter.data_ptr() for parameter in parameters]
            give_gradients(parameters, 0)
            OSS(parameters, lr=0.1).step()
            assert [parameter.data_ptr() for parameter in parameters] == before
        assert not (mapped == 1.0).any()
    assert not (np.stack(arrays) == 1.0).any()


@on_ranks(2)
def test_parameters_given_other_memory_between_steps() -> None:
    """Some of a run, all of it, and in the opposite order in one memory."""
    mine, oss, plain, optimizer = pair(Adam, {"lr": 0.1})
    parameters = list(mine.parameters())
    train_both(mine, oss, plain, optimizer, [0])
    parameters[0].data = parameters[0].data.clone()
    train_both(mine, oss, plain, optimizer, [1])
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    train_both(mine, oss, plain, optimizer, [2])
    flat = torch.cat([parameter.detach().view(-1) for parameter in reversed(parameters)])
    pieces = flat.split([parameter.numel() for parameter in reversed(parameters)])
    for parameter, piece in zip(reversed(parameters), pieces, strict=True):
        parameter.data = piece.view(parameter.shape)
    train_both(mine, oss, plain, optimizer, [3])
    assert_same(mine.parameters(), plain.parameters())


# -- Clipping


@on_ranks(2, 3)
def test_clips_as_torch() -> None:
    for order in (2.0, 1, 3, math.inf, -math.inf, -1, 0.5, 0):
        for max_norm in (0.01, 1e6):
            mine, oss, plain, _ = pair(SGD, {"lr": 0.1})
            give_gradients(mine.parameters(), 4)
            give_gradients(plain.parameters(), 4)
            norm = oss.clip_grad_norm(max_norm, norm_type=order)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type=order)
            assert torch.equal(norm, expected), (order, norm, expected)
            assert_same((p.grad for p in mine.parameters()), (p.grad for p in plain.parameters()), f"order {order}")


@on_ranks(2)
def test_clipping_looks_at_the_gradients_of_now() -> None:
    """FairScale remembers the parameters that had gradients at the first call."""
    mine, oss, plain, _ = pair(SGD, {"lr": 0.1})
    assert oss.clip_grad_norm(1.0) == 0
    for chosen in ([0, 1], [2, 3, 4], [0]):
        for model in (mine, plain):
            model.zero_grad()
            give_gradients([p for index, p in enumerate(model.parameters()) if index in chosen], 1)
        for order in (2.0, math.inf, -math.inf, -1.0):
            norm = oss.clip_grad_norm(1e9, norm_type=order)
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type=order)), order


@on_ranks(2)
def test_clipping_float16_gradients_does_not_overflow() -> None:
    """Their norm is above the largest float16."""
    parameters = [
        nn.Parameter(torch.zeros(64, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float32)
    ]
    oss = OSS(parameters, optim=SGD, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 30000.0)
    norm = oss.clip_grad_norm(1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(30000.0) * math.sqrt(3 * 64), rtol=1e-2, atol=0)
    for parameter in parameters:
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.float(), torch.full((64,), 1 / math.sqrt(192)), rtol=1e-2, atol=0)


@on_ranks(2)
def test_clipping_complex_gradients_does_not_overflow() -> None:
    """Their norm is above the largest float32."""
    gradients = [torch.full((3,), 1e150 + 2e150j, dtype=torch.complex128) for _ in range(3)]
    parameters, plain = ([nn.Parameter(torch.zeros_like(one)) for one in gradients] for _ in range(2))
    for members in (parameters, plain):
        for parameter, gradient in zip(members, gradients, strict=True):
            parameter.grad = gradient.clone()
    norm = OSS(parameters, optim=SGD, lr=0.1).clip_grad_norm(1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain, 1.0))
    assert_same([p.grad for p in parameters], [p.grad for p in plain])


@on_ranks(2)
def test_clipping_with_empty_gradients() -> None:
    """torch has no largest element of them; one rank must not fail alone."""
    for dtype in (torch.float16, torch.float32):
        parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 0, 0, 2)]
        oss = OSS(parameters, optim=SGD, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        for order, norm in ((math.inf, 2.0), (1.0, 10.0), (2.0, math.sqrt(20))):
            torch.testing.assert_close(oss.clip_grad_norm(100.0, order), torch.tensor(norm))


@on_ranks(1, 2)
def test_without_parameters_yet() -> None:
    """torch takes param groups without parameters, to which others are added."""
    oss = OSS([{"params": []}], optim=SGD, lr=0.1)
    for order in (2.0, math.inf):
        assert oss.clip_grad_norm(1.0, order) == 0
    oss.step()
    oss.load_state_dict(oss.state_dict(all_ranks=True))
    oss.add_param_group({"params": [parameter := nn.Parameter(torch.zeros(2))]})
    parameter.grad = torch.full((2,), 3.0)
    torch.testing.assert_close(oss.clip_grad_norm(100.0, 1.0), torch.tensor(6.0))
    oss.step()
    assert parameter.tolist() == [pytest.approx(-0.3)] * 2


@on_ranks(2)
def test_clipping_counts_what_the_filter_leaves() -> None:
    mine, oss, plain, _ = pair(SGD, {"lr": 0.1})
    give_gradients(mine.parameters(), 4)
    give_gradients(plain.parameters(), 4)
    seen: list[torch.Tensor] = []

    def only_matrices(parameters: list[torch.Tensor]) -> Iterable[torch.Tensor]:
        seen.extend(parameters)
        return filter(lambda parameter: parameter.ndim == 2, parameters)

    norm = oss.clip_grad_norm(0.1, filter_params_fn=only_matrices)
    truth = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters() if p.ndim == 2]))
    torch.testing.assert_close(norm, truth)
    assert all(oss.owners()[parameter] == dist.get_rank() for parameter in seen)
    scale = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
    assert_same((p.grad for p in mine.parameters()), [p.grad * scale for p in plain.parameters()])
    # One that looks at the model, not at what it is given: each parameter counts once all the same.
    matrices = [parameter for parameter in mine.parameters() if parameter.ndim == 2]
    torch.testing.assert_close(oss.clip_grad_norm(100.0, filter_params_fn=lambda _: matrices), norm * scale)
    one = torch.linalg.vector_norm(matrices[0].grad)
    with pytest.raises(ValueError, match="filter_params_fn"):
        oss.clip_grad_norm(0.1, filter_params_fn=lambda _: [torch.ones(3)])
    torch.testing.assert_close(oss.clip_grad_norm(100.0, filter_params_fn=lambda _: matrices[0]), one)
    wrong: list[tuple[Any, str]] = [
        ("weights", "filter_params_fn must be a function, not 'weights'"),
        (lambda _: None, "filter_params_fn returns .*, and it gave None"),
        (lambda _: ["weight"], "filter_params_fn returns .*, and it gave 'weight'"),
    ]
    for given, message in wrong:
        with pytest.raises(TypeError, match=message):
            oss.clip_grad_norm(0.1, filter_params_fn=given)


# -- State


@on_ranks(2)
def test_state_has_to_be_consolidated_first() -> None:
    model = model_of()
    oss = OSS(model.parameters(), optim=Adam)
    with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
        oss.state_dict()
    for recipient in (0, 1):
        oss.consolidate_state_dict(recipient)
        if dist.get_rank() == recipient:
            oss.state_dict()
        else:
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                oss.state_dict()
    for rank in (-2, 2, None, "1"):
        with pytest.raises(ValueError, match=rf"recipient_rank={rank!r}"):
            oss.consolidate_state_dict(rank)
    with pytest.raises(ValueError, match=r"recipient_rank is \d on rank \d of the group and \d on rank \d"):
        oss.consolidate_state_dict(dist.get_rank())


@on_ranks(1, 2, 3)
def test_state_travels_to_the_plain_optimizer_and_back() -> None:
    for optim, options in ((AdamW, {"lr": 0.01}), (SGD, {"lr": 0.1, "momentum": 0.9})):
        mine, oss, plain, optimizer = pair(optim, options)
        train_both(mine, oss, plain, optimizer, range(2))
        oss.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.003
        oss.consolidate_state_dict(recipient_rank=-1)
        saved = oss.state_dict()
        assert_same_state(saved, optimizer.state_dict())
        assert all(t.device.type == "cpu" for s in saved["state"].values() for t in s.values() if torch.is_tensor(t))
        other = copy.deepcopy(plain)
        resumed = optim(other.parameters(), lr=1.0)
        resumed.load_state_dict(saved)
        fresh, new = model_of(), OSS
        fresh.load_state_dict(plain.state_dict())
        new = OSS(fresh.parameters(), optim=optim, lr=1.0)
        new.load_state_dict(optimizer.state_dict())
        train_both(mine, oss, plain, optimizer, [5])
        train_both(fresh, new, other, resumed, [5])
        for model in (plain, other, fresh):
            assert_same(mine.parameters(), model.parameters(), optim.__name__)


@on_ranks(1, 2)
def test_what_was_consolidated_stays_as_it_was() -> None:
    """Small tensors and large ones, of this rank and of others."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((60, 60), (50, 50), (3,), (2,))]
    oss = OSS(parameters, optim=Adam)
    give_gradients(parameters, 0)
    oss.step()
    saved = oss.state_dict(all_ranks=True)
    kept = copy.deepcopy(saved)
    give_gradients(parameters, 1)
    oss.step()
    assert_same_state(saved, kept)


@on_ranks(2)
def test_loading_changes_nothing_of_the_callers() -> None:
    """FairScale empties the entries that the rank does not own."""
    mine, oss, plain, optimizer = pair(Adam, {"lr": 0.1})
    train_both(mine, oss, plain, optimizer, range(2))
    given = optimizer.state_dict()
    kept = copy.deepcopy(given)
    oss.load_state_dict(given)
    give_gradients(mine.parameters(), 7)
    oss.step()
    assert_same_state(given, kept)
    with pytest.raises(RuntimeError, match="consolidated"):
        oss.state_dict()  # of what there was before


@on_ranks(2)
def test_hooks_see_the_whole_state() -> None:
    """As those on the plain optimizer: what a state dict has, and what loads."""
    mine, oss, plain, optimizer = pair(Adam, {"lr": 0.1})
    train_both(mine, oss, plain, optimizer, range(2))

    def marked(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "state": {key: {**value, "marked": 1} for key, value in state_dict["state"].items()}}

    def changed(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {
            **state_dict,
            "state": {key: {**v, "exp_avg": v["exp_avg"] + 1} for key, v in state_dict["state"].items()},
        }

    seen: list[int] = []
    for one in (oss, optimizer):
        one.register_state_dict_post_hook(marked)
        one.register_load_state_dict_pre_hook(changed)
        one.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
    given = optimizer.state_dict()
    assert_same_state(oss.state_dict(all_ranks=True), given)
    for one in (oss, optimizer):
        one.load_state_dict(given)
    owned = sum(owner == dist.get_rank() for owner in oss.owners().values())
    assert seen == [owned, len(list(plain.parameters()))]
    train_both(mine, oss, plain, optimizer, range(1))
    assert_same(mine.parameters(), plain.parameters())


@on_ranks(2)
def test_adding_a_group_changes_nothing_of_the_others() -> None:
    mine, plain = model_of(), model_of()
    *first, last = mine.parameters()
    *others, its_last = plain.parameters()
    oss, optimizer = OSS(first, optim=SGD, lr=1.0), SGD(others, lr=1.0)
    for one, added in ((oss, last), (optimizer, its_last)):
        scheduler = torch.optim.lr_scheduler.StepLR(one, 1, 0.1)
        give_gradients(first if one is oss else others, 1)
        one.step()
        scheduler.step()
        one.param_groups[0]["momentum"] = 0.5
        one.add_param_group({"params": [added], "lr": 0.3})
    assert [group["lr"] for group in oss.param_groups] == [0.1, 0.3]
    train_both(mine, oss, plain, optimizer, range(2, 4))
    assert_same(mine.parameters(), plain.parameters())


@on_ranks(2)
def test_a_state_of_other_param_groups_is_refused() -> None:
    mine, oss, plain, optimizer = pair(Adam, {"lr": 0.1})
    train_both(mine, oss, plain, optimizer, range(1))
    other = OSS(list(mine.parameters())[:2], optim=Adam)
    with pytest.raises(ValueError, match="doesn't match the size"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"with 'state' and 'param_groups', and this has 'params'"):
        oss.load_state_dict({"params": []})
    train_both(mine, oss, plain, optimizer, range(1))
    assert_same(mine.parameters(), plain.parameters())


class Nested(SGD):
    """State that is not one tensor after the other."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                big = torch.full((2000,), float(parameter.numel()))
                state["pair"] = (big.to_sparse() if parameter.numel() == 3 else big, [torch.tensor(1), "text"])
                state["flags"] = {"mask": torch.ones(2000, dtype=torch.bool), "half": big.half().view(50, 40).t()}


@on_ranks(2)
def test_states_of_any_form_are_consolidated() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4, 5, 0)]
    oss = OSS(parameters, optim=Nested, lr=0.1)
    oss.step()
    states = oss.state_dict(all_ranks=True)["state"]
    for number, parameter in enumerate(parameters):
        first, (one, text) = states[number]["pair"]
        assert torch.equal(first.to_dense(), torch.full((2000,), float(parameter.numel())))
        assert (one, text) == (torch.tensor(1), "text")
        assert states[number]["flags"]["mask"].all()
        assert states[number]["flags"]["half"].shape == (40, 50)


@on_ranks(4)
def test_state_loads_at_other_world_sizes() -> None:
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4)}
    plain = model_of()
    optimizer = AdamW(plain.parameters(), lr=0.1)
    saved: dict[int, Any] = {}
    for size, group in groups.items():
        if rank < size:
            model = model_of()
            oss = OSS(model.parameters(), optim=AdamW, group=group, lr=0.1)
            give_gradients(model.parameters(), 0)
            oss.step()
            saved[size] = oss.state_dict(all_ranks=True)
    everyone: list[Any] = [saved]
    dist.broadcast_object_list(everyone, src=0)
    give_gradients(plain.parameters(), 0)
    optimizer.step()
    before = copy.deepcopy(plain.state_dict())
    give_gradients(plain.parameters(), 1)
    optimizer.step()
    for state in everyone[0].values():
        for size, group in groups.items():
            if rank < size:
                model = model_of()
                model.load_state_dict(before)
                oss = OSS(model.parameters(), optim=AdamW, group=group, lr=3.0)
                oss.load_state_dict(state)
                give_gradients(model.parameters(), 1)
                oss.step()
                assert_same(model.parameters(), plain.parameters(), f"at {size}")


@on_ranks(2)
def test_pickling_and_copying() -> None:
    model = model_of()
    oss = OSS(model.parameters(), optim=Adam, lr=0.1)
    torch.optim.lr_scheduler.StepLR(oss, 1)  # replaces the instance's step
    give_gradients(model.parameters(), 0)
    oss.step()
    stream = io.BytesIO()
    pickle.dump((model, oss), stream)
    stream.seek(0)
    for other, copied in (pickle.load(stream), copy.deepcopy((model, oss))):
        assert list(copied.owners().values()) == list(oss.owners().values())
        reference = copy.deepcopy(model)
        plain = Adam(reference.parameters(), lr=0.1)
        plain.load_state_dict(oss.state_dict(all_ranks=True))
        train_both(other, copied, reference, plain, [3])
        assert_same(other.parameters(), reference.parameters())
    group = dist.new_group([0, 1])
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(OSS(model.parameters(), group=group, lr=0.1))


@on_ranks(2)
def test_what_another_rank_pickled() -> None:
    """One rank's file on all of them would leave the parameters that the others own as they are, in silence."""
    model = model_of()
    oss = OSS(model.parameters(), optim=Adam, lr=0.1)
    for pickled in (oss, ShardedDDP(model, oss)):
        stream = [pickle.dumps(pickled)]
        dist.broadcast_object_list(stream, src=0)
        if dist.get_rank() == 0:
            pickle.loads(stream[0])
        else:
            with pytest.raises(RuntimeError, match=r"pickled on rank 0, .* cannot be unpickled on rank 1: "):
                pickle.loads(stream[0])


# -- Process groups


@on_ranks(3)
def test_a_subgroup_has_ranks_of_its_own() -> None:
    """Ranks 1 and 2 share state as ranks 0 and 1 of their group; rank 0 takes no part in anything."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="not in the group"):
            OSS(model_of().parameters(), group=group, lr=0.1)
        return
    mine, plain = model_of(), model_of()
    oss, optimizer = OSS(mine.parameters(), optim=AdamW, group=group, lr=0.1), AdamW(plain.parameters(), lr=0.1)
    assert (oss.rank, oss.world_size) == (dist.get_rank() - 1, 2)
    for step in range(2):
        give_gradients(mine.parameters(), step)
        give_gradients(plain.parameters(), step)
        # FairScale adds up the norms of all ranks of the world here, and so waits for rank 0.
        assert torch.equal(oss.clip_grad_norm(0.5), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        oss.step()
        optimizer.step()
    assert_same(mine.parameters(), plain.parameters())
    oss.consolidate_state_dict(recipient_rank=1)
    if oss.rank == 1:
        assert_same_state(oss.state_dict(), optimizer.state_dict())


# -- Ranks that differ


def parameters_of_rank(what: str, rank: int) -> Iterable[Any]:
    """Parameters of which rank 1 has others than rank 0."""
    named = [(name, nn.Parameter(torch.full((4,), float(value)))) for value, name in enumerate("abcd")]
    if what == "order":
        return named[::-1] if rank else named
    parameters = [parameter for _, parameter in named]
    if what == "shape":
        parameters[2] = nn.Parameter(torch.ones(4 - rank))
    if what == "frozen":
        parameters[2].requires_grad_(rank == 0)
    return parameters[: 4 - rank] if what == "number" else parameters


@on_ranks(2, what=["order", "shape", "frozen", "number", "settings"])
def test_ranks_with_other_parameters_are_told(what: str) -> None:
    """They would take each other's values, or wait for ever."""
    rank = dist.get_rank()
    oss = OSS(parameters_of_rank(what, rank), broadcast_fp16=what == "settings" and rank == 1, lr=0.1)
    for group in oss.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    differs = {"order": "'a' of param group 0", "number": "none on rank 1", "settings": "broadcast_fp16=True on rank 1"}
    message = differs.get(what, "parameter 2 of param group 0")
    with pytest.raises(ValueError, match=f"OSS: ranks have different parameters: .*{message}"):
        oss.step()


@on_ranks(1, 2)
def test_a_set_has_another_order_on_each_rank() -> None:
    parameters = {nn.Parameter(torch.ones(2)) for _ in range(3)}
    if dist.get_world_size() == 1:
        OSS(parameters, lr=0.1)
        return
    with pytest.raises(TypeError, match=r"OSS\(params=set\): .* sort it"):
        OSS(parameters, lr=0.1)


@on_ranks(2)
def test_one_rank_may_call_refresh_trainable() -> None:
    mine, oss, plain, optimizer = pair(SGD, {"lr": 0.1})
    for model in (mine, plain):
        next(model.parameters()).requires_grad_(False)
    train_both(mine, oss, plain, optimizer, range(2))
    if dist.get_rank() == 0:
        oss.refresh_trainable()
    train_both(mine, oss, plain, optimizer, range(2, 4))
    assert_same(mine.parameters(), plain.parameters())


# -- Arguments


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        OSS([nn.Parameter(torch.ones(1))], lr=0.1)


@on_ranks(2)
def test_arguments() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    for size in (-2, None, "100", math.nan):
        with pytest.raises(ValueError, match=f"broadcast_buffer_size={size!r}"):
            OSS(parameters, broadcast_buffer_size=size, lr=0.1)
    give_gradients(parameters, 0)
    numbers: Any = (np.int64(100), np.float32(math.inf), 10**400)
    for size in numbers:
        OSS(parameters, broadcast_buffer_size=size, lr=0.1).step()
    with pytest.raises(TypeError, match=r"OSS\(broadcast_fp16='no'\): pass True or False, not str"):
        OSS(parameters, broadcast_fp16="no", lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optim=SGD object\): pass the class"):
        OSS(parameters, optim=SGD(parameters, lr=0.1))
    for group in ("world", [0, 1], -100.0):
        with pytest.raises(TypeError, match=r"OSS\(group=...\): must be a process group"):
            OSS(parameters, group=group, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"this process is not in the group"):
        OSS(parameters, group=dist.GroupMember.NON_GROUP_MEMBER, lr=0.1)
    with pytest.raises(ValueError, match="LBFGS"):
        OSS(parameters, optim=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="empty parameter list"):
        OSS([])
    with pytest.raises(TypeError, match="hypothetical"):
        OSS(parameters, optim=Adam, hypothetical=1)
    with pytest.warns(UserWarning, match="force_broadcast_object") as caught:
        OSS(parameters, force_broadcast_object=True, lr=0.1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OSS(parameters, SGD, None, -1, False, False, lr=0.1)


def test_the_table_has_every_argument() -> None:
    assert [*ARGUMENTS] == [name for name in inspect.signature(OSS).parameters if name != "self"]
    assert "force_broadcast_object (accepted with a warning)" in (OSS.__doc__ or "")
    assert all(argument.meaning in (OSS.__doc__ or "") for argument in ARGUMENTS.values())


def test_refused_arguments() -> None:
    def function(known: int = 1) -> None: ...

    table = {"known": Argument("it cannot be; leave it out", Support.REFUSED)}
    check_arguments(function, "Thing", table, {"known": 1})
    with pytest.raises(ValueError, match=r"Thing\(known=...\) is not supported: it cannot be; leave it out"):
        check_arguments(function, "Thing", table, {"known": 2})


# -- FairScale


@needs_fairscale
@on_ranks(2)
def test_like_fairscale() -> None:
    from fairscale.optim import oss as fairscale_oss

    for optim, options in ((SGD, {"lr": 0.1, "momentum": 0.9}), (AdamW, {"lr": 0.01})):
        for extra in ({}, {"broadcast_fp16": True}):
            mine, theirs = model_of(), model_of()
            oss = OSS(mine.parameters(), optim=optim, **extra, **options)
            other = fairscale_oss.OSS(theirs.parameters(), optim=optim, **extra, **options)
            numbers = {id(p): n for model in (mine, theirs) for n, p in enumerate(model.parameters())}
            for ours, expected in zip(oss.partition_parameters(), other.partition_parameters(), strict=True):
                assert [numbers[id(p)] for g in ours for p in g["params"]] == [
                    numbers[id(p)] for g in expected for p in g["params"]
                ]
            for step in range(3):
                for model, stepped in ((mine, oss), (theirs, other)):
                    give_gradients(model.parameters(), step)
                    # Theirs scales only what it owns, and returns the norm of all.
                    stepped.clip_grad_norm(1e9)
                    stepped.step()
            assert_same(mine.parameters(), theirs.parameters())
            state = oss.state_dict(all_ranks=True)
            assert_same_state(state, other.state_dict(all_ranks=True))
            other.load_state_dict(copy.deepcopy(state))
            oss.load_state_dict(state)


@on_ranks(2)
def test_parameters_of_a_wrapper_for_one_rank() -> None:
    """What one rank has whole is no shard."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(3, 3), process_group=DummyProcessGroup(0, 1))
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter, value - 0.5 * parameter.grad)


@on_ranks(2, 3)
def test_one_rank_gets_all_state() -> None:
    """Small tensors and large ones, of itself and of others."""
    shapes = ((60, 60), (50, 50), (3,), (2,))
    parameters, copies = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    oss, optimizer = OSS(parameters, optim=Adam), Adam(copies)
    for own in (parameters, copies):
        give_gradients(own, 0)
    oss.step()
    optimizer.step()
    for recipient in range(dist.get_world_size()):
        oss.consolidate_state_dict(recipient)
        if dist.get_rank() == recipient:
            assert_same_state(oss.state_dict(), optimizer.state_dict())
