"""Optimizers on flat shards in one process: how much they do, what they refuse, and what users may change."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.optim import FlatOptimizer, flat

from ..models import MLP, Transformer, inputs_for, wrap

MakeMesh = Callable[..., DeviceMesh]


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.fixture(params=["joined", "apart"], autouse=True)
def joins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether small runs are copied together, as on CPUs, or all are stepped where they are."""
    joins = bool(request.param == "joined")
    if not joins:
        monkeypatch.setattr("shardwise.optim.runs.JOINED_GROUP", 0)
    return joins


class Pair:
    """A sharded model under a flat optimizer, and plain copies of this rank's parts under the optimizer itself."""

    def __init__(self, model: nn.Module, optimizer_class: type[Optimizer] = torch.optim.AdamW, **settings: Any):
        elementwise = settings.pop("elementwise", False)
        self.model, self.parameters = model, list(model.parameters())
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):  # a fake group gathers nothing
                local(parameter).copy_(self._random(parameter, index))
        self.copies = [nn.Parameter(local(parameter).detach().clone()) for parameter in self.parameters]
        self.optimizer = flat(optimizer_class, self.parameters, elementwise=elementwise, **settings)
        self.truth = optimizer_class(self.copies, **settings)  # type: ignore[call-arg]
        self.steps = 0

    @staticmethod
    def _random(parameter: torch.Tensor, seed: int) -> torch.Tensor:
        part = local(parameter)
        return torch.randn(part.shape, generator=torch.Generator().manual_seed(seed), dtype=part.dtype)

    def backward(self, without: Iterable[int] = ()) -> None:
        """Gradients as the engine leaves them, with values that are known."""
        self.optimizer.zero_grad()
        if isinstance(self.model, Transformer):
            inputs = torch.zeros(2, 8, dtype=torch.long)
        else:
            inputs = torch.ones(4, self.parameters[0].shape[1])
        self.model(inputs).sum().backward()
        for parameter in self.parameters:  # a fake group reduces nothing, and padding is what was in memory
            torch.empty(0, dtype=parameter.dtype).set_(local(parameter.grad).untyped_storage()).zero_()
        self.steps += 1
        for index, (parameter, own) in enumerate(zip(self.parameters, self.copies, strict=True)):
            if index in without:
                parameter.grad = own.grad = None
                continue
            assert parameter.grad is not None
            value = self._random(parameter, 1000 * self.steps + index)
            local(parameter.grad).copy_(value)
            own.grad = value.clone()

    def step(self, without: Iterable[int] = ()) -> None:
        self.backward(without)
        self.optimizer.step()
        self.truth.step()

    def check(self) -> None:
        """Both have the same parameters and state."""
        for index, (parameter, own) in enumerate(zip(self.parameters, self.copies, strict=True)):
            assert torch.equal(local(parameter), own), index
            state, expected = self.optimizer.state.get(parameter, {}), self.truth.state.get(own, {})
            assert list(state) == list(expected)
            for key, value in expected.items():
                same = torch.equal(local(state[key]), value) if isinstance(value, torch.Tensor) else state[key] == value
                assert same, (index, key)


OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"maximize": True, "lr": torch.tensor(1e-2)}),
    (torch.optim.Adamax, {"weight_decay": 0.1}),
    (torch.optim.ASGD, {"t0": 2.0, "lambd": 0.1}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"betas": (0.5, 0.9)}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> nn.Module:
    return wrap(MLP() if model is None else model, shardwise.fully_shard, mesh=mesh, **options)


def pieces(optimizer: Optimizer) -> int:
    """How many tensors are stepped."""
    assert isinstance(optimizer, FlatOptimizer)
    seen: list[int] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addcdiv_.default:
                seen.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Watched():
        optimizer.step()
    return len(seen)


def counted(function: Callable[[], Any]) -> Counter[str]:
    """Operators that ``function`` runs."""
    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[func.__name__.partition(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        function()
    return found


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize(("optimizer_class", "settings"), OPTIMIZERS)
def test_every_optimizer_steps_like_itself(
    fake_mesh: MakeMesh, size: int, rank: int, optimizer_class: type[Optimizer], settings: dict[str, Any]
) -> None:
    """On plain copies of this rank's parts: as DTensors some of them do not run at all."""
    pair = Pair(sharded(fake_mesh(size, rank=rank)), optimizer_class, **settings)
    for without in ((), (), (1, 2), ()):
        pair.step(without)
        pair.check()


# -- How much it does


COPYING = ("clone", "cat", "_foreach_copy_", "stack")


@pytest.mark.parametrize("rank", [0, 7])
def test_one_tensor_for_each_unit(fake_mesh: MakeMesh, joins: bool, rank: int) -> None:
    pair = Pair(sharded(fake_mesh(8, rank=rank), Transformer(layers=3)))
    pair.step()
    pair.backward()
    operators = counted(pair.optimizer.step)
    tensors, units = 1 if joins else 4, 4
    copies = {name: operators[name] for name in COPYING if operators[name]}
    assert copies == ({"cat": 2, "_foreach_copy_": 1} if joins else {})
    assert operators["copy_"] == tensors  # of step counts
    assert operators["addcdiv_"] == operators["lerp_"] == operators["sqrt"] == tensors
    views = 2 * units if joins else 0
    assert sum(operators.values()) <= 16 * tensors + 3 + units + views


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 0), (3, 2), (4, 3), (16, 0), (16, 15)])
def test_uneven_and_empty_shards_are_one_tensor_too(fake_mesh: MakeMesh, joins: bool, size: int, rank: int) -> None:
    model = sharded(fake_mesh(size, rank=rank))
    pair = Pair(model)
    for _ in range(3):
        pair.step()
    pair.check()
    pair.backward()
    assert pieces(pair.optimizer) == (1 if joins else 3)


# -- What is copied together


@pytest.mark.parametrize(
    ("small", "piece", "group", "tensors"),
    [
        (150, 2**20, 2**20, 3),
        (150, 2 * 544, 2**20, 4),
        (150, 2**20, 2 * 544, 5),
        (300, 2**20, 2**20, 1),
        (0, 2**20, 2**20, 6),
    ],
)
def test_only_small_runs_are_copied_and_few_of_them(
    fake_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, small: int, piece: int, group: int, tensors: int
) -> None:
    """Of four units of 136 elements on this rank, and two of about twice that."""
    for name, limit in {"SMALL": small, "JOINED_PIECE": piece, "JOINED_GROUP": group}.items():
        monkeypatch.setattr(f"shardwise.optim.runs.{name}", limit)
    pair = Pair(sharded(fake_mesh(2), MLP((16, 16, 16, 32, 16, 16, 16))))
    for _ in range(2):
        pair.step()
    pair.check()
    pair.backward()
    assert pieces(pair.optimizer) == tensors


def test_copies_are_held_only_in_a_step(fake_mesh: MakeMesh, joins: bool) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    pair.step()
    stepped = pair.optimizer._groups[0].tensors  # type: ignore[attr-defined]
    own = {local(parameter).untyped_storage().data_ptr() for parameter in pair.parameters}
    held = [tensor.untyped_storage() for tensor in stepped]
    assert all((storage.nbytes() == 0) if joins else (storage.data_ptr() in own) for storage in held)
    assert len(held) == (1 if joins else 3)


def test_other_dtypes_are_copied_apart(fake_mesh: MakeMesh, joins: bool) -> None:
    model = MLP()
    model.layers[1].double()
    mesh = fake_mesh(2)
    for layer in model.layers:
        shardwise.fully_shard(layer, mesh=mesh)
    parameters = list(model.parameters())
    copies = [nn.Parameter(local(parameter).detach().clone()) for parameter in parameters]
    optimizer, truth = flat(torch.optim.AdamW, parameters), torch.optim.AdamW(copies)
    for _ in range(2):
        for parameter, own in zip(parameters, copies, strict=True):
            parameter.grad = torch.zeros_like(parameter)  # in memory of its own
            own.grad = local(parameter.grad).normal_().clone()
        truth.step()
        assert pieces(optimizer) == (2 if joins else len(parameters))
        assert all(torch.equal(local(p), own) for p, own in zip(parameters, copies, strict=True))


def test_memory_that_is_two_parameters_is_stepped_twice(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)), torch.optim.SGD, lr=0.5)
    twin = nn.Parameter(pair.parameters[0].detach())
    pair.optimizer.param_groups[0]["params"].append(twin)
    before = local(twin).clone()
    pair.backward()
    twin.grad = pair.parameters[0].grad.clone()  # type: ignore[union-attr]
    pair.optimizer.step()
    assert torch.equal(local(twin), before - 0.5 * local(twin.grad) - 0.5 * local(twin.grad))  # type: ignore[arg-type]


class Failing(Optimizer):
    """Fails after it stepped."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad)
        raise ArithmeticError("after the step")


def test_a_step_that_fails_late_leaves_what_it_did(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)), Failing, elementwise=True)
    pair.backward()
    for optimizer in (pair.optimizer, pair.truth):
        with pytest.raises(ArithmeticError):
            optimizer.step()
    pair.check()
    assert all(stepped.grad is None for stepped in pair.optimizer._groups[0].tensors)  # type: ignore[attr-defined]


def test_padding_stays_zero(fake_mesh: MakeMesh) -> None:
    pair = Pair(shardwise.fully_shard(MLP((9, 5)), mesh=fake_mesh(3, rank=2)), weight_decay=0.1)
    storage = local(pair.parameters[0]).untyped_storage()
    memory = torch.empty(0).set_(storage)
    owned = sum(local(parameter).numel() for parameter in pair.parameters)
    for _ in range(3):
        pair.step()
    pair.check()
    assert memory.numel() > owned
    assert int((memory == 0).sum()) == memory.numel() - owned


def test_state_is_views_of_flat_memory(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    pair.step()
    first = pair.parameters[:2]
    for key in ("exp_avg", "exp_avg_sq"):
        assert len({local(pair.optimizer.state[p][key]).untyped_storage().data_ptr() for p in first}) == 1
    before = [pair.optimizer.state[p]["exp_avg"] for p in first]
    pair.step()
    assert [pair.optimizer.state[p]["exp_avg"] for p in first] == before  # the same objects, with new values
    pair.check()
    pair.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in pair.parameters)


def test_groups_with_other_settings(fake_mesh: MakeMesh) -> None:
    model = sharded(fake_mesh(2))
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = flat(torch.optim.AdamW, [{"params": weights, "lr": 0.0}, {"params": others}], lr=1.0)
    before = [local(p).clone() for p in weights]
    Pair.backward(_holder(model, optimizer))
    optimizer.step()
    assert all(torch.equal(local(p), value) for p, value in zip(weights, before, strict=True))
    assert [p for group in optimizer.param_groups for p in group["params"]] == weights + others
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert not any(torch.equal(local(p), value) for p, value in zip(weights, before, strict=True))


def _holder(model: nn.Module, optimizer: Optimizer) -> Pair:
    holder = Pair.__new__(Pair)
    holder.model, holder.optimizer, holder.steps = model, optimizer, 0
    holder.parameters = list(model.parameters())
    holder.copies = [nn.Parameter(local(p).detach().clone()) for p in holder.parameters]
    return holder


# -- What it refuses


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
@pytest.mark.parametrize("elementwise", [False, True])
def test_refuses_what_is_not_elementwise(name: str, elementwise: bool) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot step flat shards"):
        flat(getattr(torch.optim, name), [nn.Parameter(torch.ones(2, 2))], elementwise=elementwise)


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam"])
def test_advises_no_optimizer_that_cannot_step_sharded_parameters(name: str) -> None:
    with pytest.raises(ValueError, match="cannot step flat shards") as refused:
        flat(getattr(torch.optim, name), [nn.Parameter(torch.ones(2, 2))])
    assert "use it" not in str(refused.value).lower()


def test_refuses_what_nobody_knows() -> None:
    class Mine(torch.optim.AdamW):
        pass

    parameters = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match=r"whether Mine steps every element.*elementwise=True"):
        flat(Mine, parameters)
    assert isinstance(flat(Mine, parameters, elementwise=True), Mine)
    with pytest.raises(TypeError, match="must be a class of optimizers, not 'adam'"):
        flat("adam", parameters)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="differentiable=True"):
        flat(torch.optim.SGD, parameters, lr=0.1, differentiable=True)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_group_that_is_refused_is_not_there_afterwards() -> None:
    first, second = [nn.Parameter(torch.ones(2))], [nn.Parameter(torch.ones(2))]
    optimizer = flat(torch.optim.SGD, first, lr=0.1)
    for wrong in ({"params": second, "differentiable": True}, {"params": second * 2}):
        with pytest.raises(ValueError, match=r"differentiable=True|twice in one param group"):
            optimizer.add_param_group(wrong)
        assert [group["params"] for group in optimizer.param_groups] == [first]
    optimizer.add_param_group({"params": second})
    assert [group["params"] for group in optimizer.param_groups] == [first, second]


class Factored(Optimizer):
    """Keeps a number for every row."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["rows"] = parameter.grad.reshape(2, -1).sum(1)


@pytest.mark.parametrize("bias", [False, True])
def test_a_state_that_is_not_of_elements_is_found(fake_mesh: MakeMesh, bias: bool) -> None:
    model = shardwise.fully_shard(nn.Linear(9, 4, bias=bias), mesh=fake_mesh(2))
    pair = Pair(model, Factored, elementwise=True)
    pair.backward()
    with pytest.raises(ValueError, match=rf"state 'rows' of {20 if bias else 18} elements .* is of shape"):
        pair.optimizer.step()
    assert pair.optimizer.param_groups[0]["params"] == pair.parameters


class Strange(Optimizer):
    """Counts in Python numbers, replaces its state in every step, and notes things in its groups."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            self.state["steps"] = group["calls"]  # type: ignore[index]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(parameter.grad)) * 0.5 + parameter.grad
                parameter.sub_(state["mean"] * group["lr"] / state["count"])


def test_an_optimizer_that_replaces_its_state(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)), Strange, elementwise=True)
    for without in ((), (), (1, 3), (), ()):
        pair.step(without)
        pair.check()
    assert pair.optimizer.param_groups[0]["calls"] == 5
    assert pair.optimizer.state["steps"] == 5  # type: ignore[index]


# -- What users may change


def test_parameters_that_get_no_gradient_for_a_while(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    for without in ((0,), (1, 2), (), (5,), ()):
        pair.step(without)
        pair.check()


def test_gradients_of_other_memory(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    pair.step()
    pair.backward()
    for parameter, own in zip(pair.parameters[::2], pair.copies[::2], strict=True):
        parameter.grad = parameter.grad * 2  # type: ignore[operator]
        own.grad *= 2  # type: ignore[operator]
    weight, own = pair.parameters[2], pair.copies[2]
    value = torch.randn(*reversed(own.shape)).t()  # not contiguous
    weight.grad = DTensor.from_local(value, weight.device_mesh, weight.placements, shape=weight.shape, stride=(17, 1))  # type: ignore[attr-defined]
    own.grad = value.clone()
    pair.optimizer.step()
    pair.truth.step()
    pair.step()
    pair.check()


def test_gradients_that_are_cut_otherwise(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2, rank=1)))
    pair.backward()
    weight, own = pair.parameters[2], pair.copies[2]
    whole = torch.randn(weight.shape)
    weight.grad = DTensor.from_local(whole, weight.device_mesh, [Replicate()], run_check=False)  # type: ignore[attr-defined]
    own.grad = whole[6:].clone()
    pair.optimizer.step()
    pair.truth.step()
    pair.check()
    for parameter in pair.parameters:
        parameter.grad = None
    weight.grad = torch.randn(weight.shape)
    with pytest.raises(ValueError, match=r"gradient of parameter 'layers.1.weight' is a plain tensor"):
        pair.optimizer.step()


def test_state_that_users_write_or_replace(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    pair.step()
    states = [
        (pair.optimizer.state[p], pair.truth.state[own]) for p, own in zip(pair.parameters, pair.copies, strict=True)
    ]
    for one, other in states[1:3]:
        one["exp_avg"].zero_()
        other["exp_avg"].zero_()
    states[0][0]["step"].fill_(7)
    states[0][1]["step"].fill_(7)
    assert states[1][0]["step"] == 1  # each parameter counts for itself
    pair.step()
    pair.check()
    with torch.no_grad():
        for one, other in states[3:5]:
            one["exp_avg_sq"] = one["exp_avg_sq"] * 2
            other["exp_avg_sq"] = other["exp_avg_sq"] * 2
    pair.step()
    pair.check()
    del pair.optimizer.state[pair.parameters[4]], pair.truth.state[pair.copies[4]]
    pair.step()
    assert {key: list(value) for key, value in pair.optimizer.state.items()}.keys() == set(pair.parameters)
    pair.check()
    pair.optimizer.state.clear()
    pair.truth.state.clear()
    pair.step()
    pair.check()


def test_state_that_users_drop_or_add(fake_mesh: MakeMesh) -> None:
    """Where some parameters have none."""
    pair = Pair(sharded(fake_mesh(2)), torch.optim.SGD, lr=0.1, momentum=0.9)
    for optimizer, parameters in ((pair.optimizer, pair.parameters), (pair.truth, pair.copies)):
        optimizer.param_groups[0]["params"] = parameters[:4]
        optimizer.add_param_group({"params": parameters[4:], "momentum": 0.0})
    pair.step()
    for optimizer, parameters in ((pair.optimizer, pair.parameters), (pair.truth, pair.copies)):
        del optimizer.state[parameters[1]]["momentum_buffer"]
    pair.step()
    pair.check()
    for optimizer, parameters in ((pair.optimizer, pair.parameters), (pair.truth, pair.copies)):
        optimizer.state[parameters[2]]["seen"] = 7
    pair.step()
    pair.check()


def test_looking_at_the_state_changes_nothing(fake_mesh: MakeMesh, joins: bool) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    assert pair.optimizer.state[pair.parameters[0]] == {}  # makes an entry
    pair.step()
    assert pieces(pair.optimizer) == (1 if joins else 3)


def test_whole_state_is_refused(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    pair.step()
    saved = pair.optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], "exp_avg": torch.zeros(pair.parameters[0].shape)}
    pair.optimizer.load_state_dict(saved)
    pair.backward()
    for _ in range(2):  # the second step did nothing
        with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 'layers.0.weight' is a whole tensor"):
            pair.optimizer.step()


def test_groups_that_users_change(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    extra = nn.Parameter(torch.ones(3))
    pair.optimizer.param_groups[0]["params"] = pair.parameters[:3]
    pair.truth.param_groups[0]["params"] = pair.copies[:3]
    pair.step()
    pair.optimizer.add_param_group({"params": [*pair.parameters[3:], extra], "lr": 0.5})
    own_extra = nn.Parameter(torch.ones(3))
    pair.truth.add_param_group({"params": [*pair.copies[3:], own_extra], "lr": 0.5})
    for _ in range(2):
        pair.backward()
        extra.grad, own_extra.grad = torch.ones(3), torch.ones(3)
        pair.optimizer.step()
        pair.truth.step()
    pair.check()
    assert torch.equal(extra, own_extra)
    assert pair.optimizer.state[extra]["step"] == 2


def test_hooks_run_once_and_see_the_parameters(fake_mesh: MakeMesh) -> None:
    pair, seen = Pair(sharded(fake_mesh(2))), []

    def hook(optimizer: Optimizer, *_: Any) -> None:
        seen.append((optimizer, list(optimizer.param_groups[0]["params"])))

    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # whose class torch has put hooks around
    handles = [
        pair.optimizer.register_step_pre_hook(hook),
        pair.optimizer.register_step_post_hook(hook),
        register_optimizer_step_pre_hook(hook),
    ]
    pair.backward()
    pair.optimizer.step()
    for handle in handles:
        handle.remove()
    assert seen == [(pair.optimizer, pair.parameters)] * 3


def test_hooks_see_what_the_step_was_given_and_may_replace_it(fake_mesh: MakeMesh) -> None:
    def calls_of(optimizer: Optimizer) -> list[Any]:
        def closure() -> float:
            calls.append("closure")
            return 1.0

        def note(_: Optimizer, arguments: Any, settings: dict[str, Any]) -> None:
            calls.append((arguments[1:], dict(settings)))

        calls: list[Any] = []
        noting = optimizer.register_step_pre_hook(note)
        for call in (
            lambda: optimizer.step(),
            lambda: optimizer.step(None),
            lambda: optimizer.step(closure),
            lambda: optimizer.step(closure=closure),
        ):
            calls.append(call())
        noting.remove()
        giving = optimizer.register_step_pre_hook(lambda _, arguments, settings: (arguments, {"closure": closure}))
        calls.append(optimizer.step())
        giving.remove()
        return [getattr(call, "__name__", str(call).split(" at ")[0]) for call in calls]

    pair = Pair(sharded(fake_mesh(2)), torch.optim.SGD, lr=0.1)
    assert calls_of(pair.optimizer) == calls_of(pair.truth)


def test_a_closure_sees_the_parameters(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))

    def closure() -> float:
        assert torch.is_grad_enabled()
        assert pair.optimizer.param_groups[0]["params"] == pair.parameters
        pair.backward()
        return 3.0

    assert pair.optimizer.step(closure) == 3.0
    pair.truth.step()
    pair.check()


def test_a_failing_step_leaves_the_parameters(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)), torch.optim.SGD, lr=0.1)
    pair.backward()
    pair.optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        pair.optimizer.step()
    assert pair.optimizer.param_groups[0]["params"] == pair.parameters
    pair.optimizer.param_groups[0]["lr"] = 0.1
    pair.optimizer.step()
    pair.truth.step()
    pair.check()


def test_zero_grad_in_place(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    pair.step()
    pair.optimizer.zero_grad(set_to_none=False)
    assert all(not local(parameter.grad).any() for parameter in pair.parameters)  # type: ignore[arg-type]


def test_copies_and_pickles_are_optimizers_like_it(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    pair.step()
    file = io.BytesIO()
    torch.save(pair.optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["state"]
    for index, own in enumerate(pair.copies):
        assert torch.equal(local(loaded[index]["exp_avg"]), pair.truth.state[own]["exp_avg"])
    for other in (copy.deepcopy(pair.optimizer), pickle.loads(pickle.dumps(pair.optimizer))):
        assert type(other) is type(pair.optimizer)
        assert isinstance(other, torch.optim.AdamW)
        parameters = other.param_groups[0]["params"]
        values = [local(parameter).detach().clone() for parameter in parameters]
        truth = torch.optim.AdamW([nn.Parameter(value) for value in values])
        truth.load_state_dict(copy.deepcopy(pair.truth.state_dict()))
        for index, parameter in enumerate(parameters):
            gradient = Pair._random(parameter, index)
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(gradient)
            truth.param_groups[0]["params"][index].grad = gradient.clone()
        other.step()
        truth.step()
        for parameter, own in zip(parameters, truth.param_groups[0]["params"], strict=True):
            assert torch.equal(local(parameter), own)
        assert all(torch.equal(local(p), own) for p, own in zip(pair.parameters, pair.copies, strict=True))


def test_parameters_that_were_on_meta(fake_mesh: MakeMesh) -> None:
    mesh = fake_mesh(2)
    with torch.device("meta"):
        model = sharded(mesh)
    optimizer = flat(torch.optim.AdamW, model.parameters())
    optimizer.step()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    pair = _holder(model, optimizer)
    pair.truth = torch.optim.AdamW(pair.copies)
    for _ in range(2):
        pair.step()
    pair.check()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused(fake_mesh: MakeMesh, name: str) -> None:
    """Close only: torch's own fused kernels round the ends of a tensor otherwise than its middle."""
    pair = Pair(sharded(fake_mesh(3)), getattr(torch.optim, name), lr=0.01, fused=True)
    for _ in range(3):
        pair.step()
    for parameter, own in zip(pair.parameters, pair.copies, strict=True):
        torch.testing.assert_close(local(parameter).detach(), own.detach())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older Dynamo cannot trace optimizers over views of one memory")
def test_compiled(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)))
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(len(graph.graph.nodes))
        return graph.forward

    ours = torch.compile(pair.optimizer.step, backend=backend)
    for _ in range(3):
        pair.backward()
        ours()
        pair.truth.step()
    assert calls
    assert len(calls) <= 2  # without state, and with
    for parameter, own in zip(pair.parameters, pair.copies, strict=True):
        torch.testing.assert_close(local(parameter).detach(), own.detach())
    pair.step()


class Forgets(torch.optim.SGD):
    """Drops its momentum after each other step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].pop("momentum_buffer", None)
        return loss


def test_state_that_the_optimizer_drops(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)), Forgets, lr=0.1, momentum=0.9, elementwise=True)
    for _ in range(4):
        pair.step()
        pair.check()
        for parameter, own in zip(pair.parameters, pair.copies, strict=True):
            assert set(pair.optimizer.state[parameter]) == set(pair.truth.state[own])


class Asks(Optimizer):
    """Looks at its own state dict in the middle of a step, as for logging."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state_dict()
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def test_a_step_that_asks_for_the_state_dict(fake_mesh: MakeMesh) -> None:
    pair = Pair(sharded(fake_mesh(2)), Asks, elementwise=True)
    for _ in range(2):
        pair.step()
        pair.check()


def test_a_flat_class_is_taken_for_what_it_steps(fake_mesh: MakeMesh) -> None:
    model = shardwise.fully_shard(MLP(), mesh=fake_mesh(2))
    kind = type(flat(torch.optim.SGD, model.parameters(), lr=0.1))
    assert type(flat(kind, model.parameters(), lr=0.1)).__name__ == kind.__name__


def test_state_that_is_a_dict_is_refused_by_name(fake_mesh: MakeMesh) -> None:
    class Nested(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["of"] = {"sum": torch.zeros_like(parameter)}

    model = shardwise.fully_shard(MLP(), mesh=fake_mesh(2))
    optimizer = flat(Nested, model.parameters(), elementwise=True, lr=0.1)
    model(inputs_for(model, 0)).sum().backward()
    with pytest.raises(ValueError, match=r"state 'of' of \d+ elements stepped as one is a dict"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["placements", "dtype"])
def test_state_that_is_loaded_otherwise_for_one_parameter(fake_mesh: MakeMesh, kind: str) -> None:
    model = shardwise.fully_shard(MLP(), mesh=fake_mesh(2))
    optimizer = flat(torch.optim.AdamW, model.parameters(), lr=0.1)
    model(inputs_for(model, 0)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    first = state["state"][0]
    if kind == "dtype":  # then it is stepped by itself
        first["step"] = first["step"].double()
        optimizer.load_state_dict(state)
        optimizer.step()
        assert [float(one["step"]) for one in optimizer.state_dict()["state"].values()] == [2.0] * len(state["state"])
    else:
        mesh = first["exp_avg"].device_mesh
        first["exp_avg"] = DTensor.from_local(torch.ones(first["exp_avg"].shape), mesh, [Replicate()], run_check=False)
        optimizer.load_state_dict(state)
        with pytest.raises(ValueError, match=r"'exp_avg' of parameter '.*' has placements .*: redistribute the state"):
            optimizer.step()


def test_a_rank_without_elements(fake_mesh: MakeMesh) -> None:
    model = shardwise.fully_shard(nn.Linear(3, 2), mesh=fake_mesh(4, rank=3))
    optimizer = flat(torch.optim.AdamW, model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert [one["exp_avg"].to_local().numel() for one in optimizer.state_dict()["state"].values()] == [0, 0]
