"""Ways to use FullyShardedDataParallel that are not the plain loop, against plain training on the same data."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import ASGD, SGD, Adam, NAdam
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.adapters.wrapping import refuse_uncuttable, share_values
from shardwise.core.errors import StateError
from shardwise.core.flat import refuse_flat
from shardwise.fairscale import FSDP, DummyProcessGroup, ShardedGradScaler, TrainingState, get_fsdp_instances

from ..extensions import SentInBfloat16, extend
from ..ranks.harness import on_ranks
from .test_fairscale_fsdp import consolidated

FLAT = (True, False)
INPUTS = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)

    def linear() -> nn.Linear:
        return nn.Linear(4, 4)

    innermost = nn.Sequential(linear())
    return nn.Sequential(
        linear(), nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh(), innermost)), nn.Tanh(), linear()
    )


def nested(model: Any, flat: bool = True, **options: Any) -> Any:
    """Instances in instances, four deep."""
    options["flatten_parameters"] = flat
    model[1][1][2] = FSDP(model[1][1][2], **options)
    model[1][1] = FSDP(model[1][1], **options)
    model[1] = FSDP(model[1], **options)
    return FSDP(model, **options)


def of_children(model: Any) -> Any:
    return FSDP(nn.Sequential(*[FSDP(child) for child in model]))


def error_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, FSDP) else contextlib.nullcontext()


def assert_state(model: nn.Module, plain: nn.Module, hint: str = "") -> None:
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected), hint
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=lambda text, name=name: f"{hint} {name}: {text}")


# -- Orders of calls


def two_forwards_one_backward(model: Any) -> None:
    sum(error_of(model(x)) for x in INPUTS).backward()


def two_forwards_two_backwards(model: Any) -> None:
    first, second = error_of(model(INPUTS[0])), error_of(model(INPUTS[1]))
    second.backward()
    first.backward()


def casts_of_an_earlier_forward(model: Any) -> None:
    """Autocast casts a parameter once: the second forward uses what is in the graph of the first."""
    with torch.autocast("cpu", torch.bfloat16):
        losses = [error_of(model(inputs)) for inputs in INPUTS[:2]]
    for loss in losses:
        loss.backward()


def retained_graph(model: Any) -> None:
    loss = error_of(model(INPUTS[0]))
    loss.backward(retain_graph=True)
    loss.backward()


def evaluation_between(model: Any) -> None:
    loss = error_of(model(INPUTS[0]))
    with torch.no_grad():
        model(INPUTS[1])
    model.eval()
    model(INPUTS[2])
    model.train()
    with torch.inference_mode():
        model(INPUTS[3])
    loss.backward()


def inference_first(model: Any) -> None:
    with torch.inference_mode():
        model(INPUTS[0])
        model.state_dict()
    error_of(model(INPUTS[0])).backward()


def dropped_forwards(model: Any) -> None:
    model(INPUTS[1])
    error_of(model(INPUTS[0])).backward()


def through_itself(model: Any) -> None:
    error_of(model(model(INPUTS[0]))).backward()


def inner_first_then_outer(model: Any) -> None:
    error_of(model[1](INPUTS[1])).backward()
    error_of(model(INPUTS[0])).backward()
    error_of(model[1](INPUTS[2])).backward()


def inner_beside_outer(model: Any) -> None:
    (error_of(model(INPUTS[0])) + error_of(model[1](INPUTS[1]))).backward()


def gradients_of_inputs(model: Any) -> None:
    inputs = INPUTS[0].clone().requires_grad_()
    torch.autograd.grad(error_of(model(inputs)), inputs)
    error_of(model(INPUTS[1])).backward()


def accumulation_without_no_sync(model: Any) -> None:
    for x in INPUTS:
        error_of(model(x)).backward()


def gradients_set_to_zero(model: Any) -> None:
    error_of(model(INPUTS[1])).backward()
    model.zero_grad(set_to_none=False)
    error_of(model(INPUTS[0])).backward()


def exception_in_no_sync(model: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), no_sync(model):
        error_of(model(INPUTS[1])).backward()
        _ = 1 / 0
    error_of(model(INPUTS[0])).backward()


def no_sync_of_an_inner_one(model: Any) -> None:
    with no_sync(model[1]):
        error_of(model(INPUTS[1])).backward()
    error_of(model(INPUTS[0])).backward()


def states_between_micro_batches(model: Any) -> None:
    with no_sync(model):
        error_of(model(INPUTS[1])).backward()
    model.state_dict()
    if isinstance(model, FSDP):
        model.local_state_dict()
        with model.summon_full_params():
            pass
    with torch.no_grad():
        model(INPUTS[2])
    error_of(model(INPUTS[0])).backward()


def replaced_between_micro_batches(model: Any) -> None:
    with no_sync(model):
        error_of(model(INPUTS[1])).backward()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with no_sync(model):
        error_of(model(INPUTS[2])).backward()
    model.double()
    error_of(model(INPUTS[3].double())).backward()
    with no_sync(model):
        error_of(model(INPUTS[0].double())).backward()
    model.float().double().float()
    error_of(model(INPUTS[0])).backward()


def users_hooks(model: Any) -> None:
    seen: list[Any] = []
    handles = [
        model.register_full_backward_hook(lambda *_: seen.append(1)),
        model[1][0].register_full_backward_hook(lambda *_: seen.append(2)),
        model[1][0].register_forward_hook(lambda module, *_: seen.append(module.weight.sum())),
    ]
    error_of(model(INPUTS[0])).backward()
    for handle in handles:
        handle.remove()
    assert len(seen) == 3


def checkpointed(model: Any) -> None:
    for reentrant in (True, False):
        error_of(checkpoint(model, INPUTS[0].clone().requires_grad_(), use_reentrant=reentrant)).backward()


def exception_in_forward(model: Any) -> None:
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 5))
    error_of(model(INPUTS[0])).backward()


def data_assigned(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    model.state_dict()
    error_of(model(INPUTS[0])).backward()
    SGD(model.parameters(), lr=0.1).step()
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    error_of(model(INPUTS[0])).backward()


ORDERS: tuple[Callable[[Any], None], ...] = (
    two_forwards_one_backward,
    two_forwards_two_backwards,
    casts_of_an_earlier_forward,
    retained_graph,
    evaluation_between,
    inference_first,
    dropped_forwards,
    through_itself,
    inner_first_then_outer,
    inner_beside_outer,
    gradients_of_inputs,
    accumulation_without_no_sync,
    gradients_set_to_zero,
    exception_in_no_sync,
    no_sync_of_an_inner_one,
    states_between_micro_batches,
    replaced_between_micro_batches,
    users_hooks,
    checkpointed,
    exception_in_forward,
    data_assigned,
)


@on_ranks(2, flat=FLAT)
def test_orders_of_calls(flat: bool) -> None:
    for use in ORDERS:
        plain, model = plain_model(), nested(plain_model(), flat)
        for each in (plain, model):
            use(each)
            SGD(each.parameters(), lr=0.1).step()
        assert_state(model, plain, use.__name__)
        instances = get_fsdp_instances(model)
        assert all(instance.training_state is TrainingState.IDLE for instance in instances)
        whole = [buffer.full for instance in instances for buffer in instance._own.shards.buffers]
        assert sum(each.untyped_storage().nbytes() for each in whole) == 0, use.__name__


class Odd(nn.Module):
    """Parameters without dims and without elements, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(1))
        self.empty, self.linear = nn.Parameter(torch.empty(0, 3)), nn.Linear(3, 1)
        self.register_buffer("kept", torch.tensor(2.0))
        self.register_buffer("dropped", torch.tensor([1]), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.a + self.b + self.empty.sum() + self.kept


@on_ranks(1, 2, 4, flat=FLAT)
def test_odd_shapes(flat: bool) -> None:
    torch.manual_seed(1)
    plain = Odd()
    model = FSDP(copy.deepcopy(plain), flatten_parameters=flat)
    inputs = torch.randn(4, 3)
    # NAdam and ASGD have state without dims that is no count of steps.
    for kind in (Adam, NAdam, ASGD) if not flat or dist.get_world_size() == 1 else (Adam, NAdam):
        steppers = []
        for each in (plain, model):
            stepper = kind(each.parameters(), lr=0.1)
            for _ in range(2):
                stepper.zero_grad()
                error_of(each(inputs)).backward()
                stepper.step()
            steppers.append(stepper)
        assert_state(model, plain)
        full = model.gather_full_optim_state_dict(steppers[1], recipient_rank=None)
        expected = steppers[0].state_dict()
        torch.testing.assert_close(full["state"], expected["state"])
        assert full["param_groups"] == expected["param_groups"]
        before = copy.deepcopy(steppers[1].state_dict())
        part = model.get_shard_from_optim_state_dict(full)
        torch.testing.assert_close(part["state"], before["state"], rtol=0, atol=0)
    whole = consolidated(model)
    assert set(whole) == set(plain.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(whole[name], value)


# -- Layouts


@on_ranks(1, 2, 3)
def test_state_goes_to_other_layouts() -> None:
    """Saved by one nesting of instances, through a file, and loaded by others."""
    plain, model = plain_model(), nested(plain_model())
    steppers = []
    for each in (plain, model):
        steppers.append(stepper := Adam(each.parameters(), lr=0.1))
        for x in INPUTS:
            stepper.zero_grad()
            error_of(each(x)).backward()
            stepper.step()
    expected = steppers[0].state_dict()
    full = model.gather_full_optim_state_dict(steppers[1], recipient_rank=None)
    weights, full, local = (through_file(v) for v in (model.state_dict(), full, model.local_state_dict()))
    assert size_in_file(model.state_dict()) <= size_in_file(plain.state_dict()) + 500
    for build in (FSDP, of_children, lambda other: nested(other, False), nested):
        other = build(plain_model())
        other.load_state_dict(weights)
        assert_state(other, plain)
        stepper = Adam(other.parameters(), lr=0.1)
        stepper.load_state_dict(other.get_shard_from_optim_state_dict(full))
        again = other.gather_full_optim_state_dict(stepper, recipient_rank=None)
        torch.testing.assert_close(again["state"], expected["state"])
    model.load_local_state_dict(local)
    assert_state(model, plain)


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def size_in_file(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


class Reused(nn.Module):
    """One module in two places."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(4, 4)
        self.a, self.b = nn.Sequential(linear, nn.Tanh()), nn.Sequential(linear, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@on_ranks(2, flat=FLAT, inside=(True, False))
def test_modules_in_several_places(flat: bool, inside: bool) -> None:
    plain = Reused()
    model: Any = copy.deepcopy(plain)
    if inside:
        model.a[0] = model.b[0] = FSDP(model.a[0], flatten_parameters=flat)
    model = FSDP(model, flatten_parameters=flat)
    for each in (plain, model):
        stepper = Adam(each.parameters(), lr=0.1)
        error_of(each(INPUTS[0])).backward()
        stepper.step()
    assert_state(model, plain)
    assert model.gather_full_optim_state_dict(stepper, recipient_rank=None)["state"].keys() == {0, 1, 2, 3}
    whole = consolidated(model)
    assert set(whole) == set(plain.state_dict())
    model.load_state_dict(whole)
    model.load_local_state_dict(model.local_state_dict())
    assert_state(model, plain)


@on_ranks(2)
def test_instances_without_parameters() -> None:
    plain, model = nn.Linear(4, 4), FSDP(FSDP(nn.Sequential(FSDP(nn.Linear(4, 4)), FSDP(nn.ReLU(inplace=True)))))
    model.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    inputs = INPUTS[0].clone().requires_grad_()
    error_of(model(inputs)).backward()
    assert inputs.grad is not None
    assert model.clip_grad_norm_(1.0) > 0
    stepper = SGD(model.parameters(), lr=0.1)
    stepper.step()
    model.gather_full_optim_state_dict(stepper)
    model.load_local_state_dict(model.local_state_dict())
    assert set(consolidated(model)) == {"0.weight", "0.bias"}
    assert torch.equal(copy.deepcopy(model).state_dict()["0.bias"], model.state_dict()["0.bias"])
    nothing = FSDP(nn.ReLU())
    assert nothing(INPUTS[0]).shape == (2, 4)
    assert nothing.state_dict() == {}
    assert nothing.clip_grad_norm_(1.0) == 0


class Sharded(FSDP):
    """As trainers derive from it: its state dict is the local one, its arguments are passed on."""

    def __init__(self, *args: Any, local: bool, **options: Any):
        self.local = local
        super().__init__(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return super().local_state_dict(*args, **options) if self.local else super().state_dict(*args, **options)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        load = super().load_local_state_dict if self.local else super().load_state_dict
        return load(state_dict, strict)


@on_ranks(2, local=(True, False))
def test_subclasses(local: bool) -> None:
    model = Sharded(nn.Sequential(Sharded(nn.Linear(2, 2), local=local), nn.Linear(2, 2)), local=local)
    state = model.state_dict()
    assert list(state) == (
        ["flat_param_0", "0.flat_param_0"] if local else ["0.weight", "0.bias", "1.weight", "1.bias"]
    )
    assert model.load_state_dict(state).missing_keys == []
    assert list(model.local_state_dict()) == ["flat_param_0", "0.flat_param_0"]
    error_of(model(torch.randn(2, 2))).backward()
    with pytest.warns(UserWarning, match="bucket_cap_mb"):
        Sharded(nn.Linear(2, 2), local=local, bucket_cap_mb=3)


class Extra(nn.Linear):
    """Has extra state, and hooks of its own on state dicts."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.value = 0
        self._register_state_dict_hook(self._add)
        self._register_load_state_dict_pre_hook(lambda state, prefix, *_: state.pop(f"{prefix}hooked", None))

    @staticmethod
    def _add(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}hooked"] = 5

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]


@on_ranks(2, flat=FLAT)
def test_extra_state_and_hooks(flat: bool) -> None:
    plain = nn.Sequential(Extra(), Extra(), nn.BatchNorm1d(2))
    options = {"flatten_parameters": flat}
    model = FSDP(nn.Sequential(FSDP(Extra(), **options), Extra(), FSDP(nn.BatchNorm1d(2), **options)), **options)
    inner = model.module[0].module
    for save, load in (
        (model.state_dict, model.load_state_dict),
        (model.local_state_dict, model.load_local_state_dict),
    ):
        inner.value = 3
        state = save()
        assert (state["0._extra_state"], state["0.hooked"]) == ({"value": 3}, 5)
        inner.value = 0
        load(state)
        assert inner.value == 3
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert state._metadata["2"]["version"] == plain.state_dict()._metadata["2"]["version"]
    plain.load_state_dict(state)
    model.load_state_dict(plain.state_dict())
    assert all(name.startswith("pre.") for name in model.state_dict(prefix="pre."))
    result = model.load_state_dict({"0.weight": torch.zeros(2, 2), "other": 1}, strict=False)
    assert result.unexpected_keys == ["other"]
    assert {"0.bias", "0._extra_state", "2.weight"} <= set(result.missing_keys)
    assert not any("_fsdp" in name or "flat" in name for name in result.missing_keys)


class Refuses(nn.Linear):
    def _load_from_state_dict(self, *_: Any) -> None:
        raise ZeroDivisionError


@on_ranks(2)
def test_after_a_failed_load() -> None:
    model = nested(plain_model())
    for bad in ({}, {"0.weight": torch.zeros(9)}, {**plain_model().state_dict(), "1.0.weight": torch.zeros(3, 3)}):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(bad)
        assert not any(word in str(caught.value) for word in ("_fsdp", "flat_param"))
        error_of(model(INPUTS[0])).backward()
    lacking = {**plain_model().state_dict()}
    if dist.get_rank() == 1:
        del lacking["0.weight"]
    on_rank = "load_state_dict failed on rank 1 of the group: .*" if dist.get_rank() == 0 else ""
    with pytest.raises(RuntimeError, match=rf'(?s)^{on_rank}Error.*Missing key.*"0\.weight"'):
        model.load_state_dict(lacking)
    error_of(model(INPUTS[0])).backward()
    plain = nn.Sequential(FSDP(Refuses(2, 2)))
    with pytest.raises(ZeroDivisionError):
        plain.load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict())
    error_of(plain(torch.randn(1, 2))).backward()


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


@on_ranks(2)
def test_after_a_failed_backward() -> None:
    def states(model: Any) -> Iterator[Any]:
        yield model.state_dict()
        yield model.local_state_dict()
        yield model.half().float()
        yield model.clip_grad_norm_(1.0)
        yield model.set_gradient_divide_factors(1.0, 2.0, recursive=True)

    for index in range(6):
        first, last = FSDP(nn.Linear(4, 4)), FSDP(nn.Linear(4, 4))
        model = FSDP(nn.Sequential(first, last)).half().float()
        error_of(model(INPUTS[0])).backward()
        expected = [p.grad.clone() for p in model.parameters()]
        handle = first.register_forward_hook(lambda _, inputs, output: Boom.apply(output))
        with pytest.raises(ZeroDivisionError):
            error_of(model(INPUTS[0])).backward()
        uses = iter(states(model))
        for _ in range(index):
            next(uses)
        assert not index or all(one.training_state is TrainingState.IDLE for one in get_fsdp_instances(model))
        handle.remove()
        model.zero_grad()
        error_of(model(INPUTS[0])).backward()
        torch.testing.assert_close([p.grad.clone() for p in model.parameters()], expected)


# -- What users do to parameters


@on_ranks(1, 2, flat=FLAT)
def test_volatile_changes_are_gone(flat: bool) -> None:
    model = nested(plain_model(), flat)
    with model.summon_full_params(volatile=True):
        for parameter in model.parameters():
            parameter.data.zero_()
    assert_state(model, plain_model())
    with model.summon_full_params():
        optimizer = SGD(model.parameters(), lr=0.1)
        for action in (pickle.dumps, copy.deepcopy):
            with pytest.raises(ValueError, match="summon_full_params"):
                action(model)
    error_of(model(INPUTS[0])).backward()
    with pytest.raises(StateError, match="would change nothing"):  # made of parameters that are gone
        optimizer.step()


@on_ranks(1, 2, flat=FLAT)
def test_replaced_and_added_parameters(flat: bool) -> None:
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), flatten_parameters=flat)
    error_of(model(INPUTS[0])).backward()
    model.module[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StateError, match=r"'0.weight'.* was replaced"):
        model(INPUTS[0])
    if not flat:  # by one of as many elements as this rank has
        late = FSDP(nn.Linear(4, 4), flatten_parameters=False)
        optimizer = SGD(late.parameters(), lr=0.1)
        late.module.bias = nn.Parameter(torch.zeros(4 // dist.get_world_size()))
        late.state_dict()
        with pytest.raises(StateError, match=r"'bias'.* would change nothing"):
            optimizer.step()
        late.module.weight = nn.Parameter(torch.zeros(2, 8 // dist.get_world_size()))
        with pytest.raises(StateError, match=r"'weight'.*, was replaced by one of shape"):
            late.state_dict()
    late = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), flatten_parameters=flat)
    late.module[0].extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"'0.extra' was registered after wrapping"):
        late(INPUTS[0])
    with pytest.raises(ValueError, match=r"'0.extra' is not a shard"):
        late.get_shard_from_optim_state_dict({"state": {}, "param_groups": []})


@on_ranks(2, flat=FLAT)
def test_changes_inside_of_summon(flat: bool) -> None:
    model = nested(plain_model(), flat)
    with model.summon_full_params():
        model.module[0].weight = nn.Parameter(torch.full((4, 4), 7.0))
        model.module[1].module[0].weight.data = torch.full((4, 4), 8.0)
    state = model.state_dict()
    assert state["0.weight"].eq(7).all()
    assert state["1.0.weight"].eq(8).all()

    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros(1, 4))

    def remove(module: nn.Module) -> None:
        del module.weight

    for change, what in ((replace, r"was replaced by one of shape \(1, 4\)"), (remove, "was removed")):
        with pytest.raises(StateError, match=f"'0.weight'.*{what}"), model.summon_full_params():
            change(model.module[0])
        error_of(model(INPUTS[0])).backward()
        assert model.state_dict()["0.weight"].eq(7).all()


@on_ranks(2, flat=FLAT)
def test_frozen_inside_of_summon(flat: bool) -> None:
    """Joined parameters only together."""
    model = nested(plain_model(), flat)
    inner = model.module[1]

    def train() -> set[str]:
        before, optimizer = model.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        error_of(model(INPUTS[0])).backward()
        optimizer.step()
        return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}

    everything = train()
    with inner.summon_full_params(volatile=True):
        inner.requires_grad_(False)  # dropped
    assert train() == everything
    with inner.summon_full_params():
        inner.requires_grad_(False)
    assert train() == {name for name in everything if not name.startswith("1.")} != everything
    with model.summon_full_params():
        inner.requires_grad_(True)
    assert train() == everything
    refused = pytest.raises(StateError, match=r"'0.weight' was frozen .* and '0.bias', which is joined to it, was not")
    with refused if flat else contextlib.nullcontext(), model.summon_full_params():
        model.module[0].weight.requires_grad_(False)
    assert train() == everything - ({"0.weight"} if not flat else set())


@on_ranks(2)
def test_containers_of_parameters_are_printed() -> None:
    model = FSDP(nn.ModuleList([nn.ParameterDict({"a": torch.ones(3)}), nn.ParameterList([torch.ones(3)])]))
    assert "(a): Tensor containing" in repr(model)
    assert "(0): Tensor containing" in repr(model)
    with pytest.raises(StateError, match=r"'0\.a'"):
        model.module[0]["a"].type(torch.float64)


@on_ranks(1, 2, flat=FLAT)
def test_ties_inside_of_summon(flat: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[1].weight = plain[0].weight
    model = FSDP(plain, flatten_parameters=flat)
    for index in (0, 1):
        with pytest.raises(StateError, match=r"'0.weight'.*has 2 names.* some of them"), model.summon_full_params():
            model.module[index].weight = nn.Parameter(torch.zeros(4, 4))
    with model.summon_full_params():
        model.module[0].weight = model.module[1].weight = nn.Parameter(torch.full((4, 4), 7.0))
    state = model.state_dict()
    assert state["0.weight"].eq(7).all()
    assert state["1.weight"].eq(7).all()


@on_ranks(2)
def test_state_of_a_module_inside_lacks_nothing() -> None:
    """Its joined parameters are registered in the instance, so that it would be without them."""
    model = nested(plain_model())
    for used in (False, True):
        if used:
            with torch.no_grad():
                model(torch.ones(2, model.module[0].in_features))  # the outermost instance keeps whole parameters
        for inside in (model.module, model.module[0], copy.deepcopy(model).module):
            with pytest.raises(StateError, match=r"state_dict of Linear: .* joined its parameter 'weight'"):
                inside.state_dict()
    nn.Sequential(model).state_dict()
    assert "0.weight" not in model.local_state_dict()
    with model.summon_full_params():
        assert model.module[0].state_dict().keys() == {"weight", "bias"}
        assert model.module.state_dict().keys() == plain_model().state_dict().keys()


@on_ranks(2, flat=FLAT)
def test_sparse_gradients_are_refused_by_name(flat: bool) -> None:
    model = FSDP(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)), flatten_parameters=flat)
    with pytest.raises(StateError, match=r"parameter '0.weight' got a torch.sparse_coo gradient"):
        model(torch.tensor([1])).sum().backward()


@on_ranks(2)
def test_functions_for_other_shards_refuse_flat_ones() -> None:
    plain = plain_model()
    originals = list(plain.parameters())
    model = nested(plain)
    for where, function, instead in (
        (model, "save", "gather_full_optim_state_dict"),
        (nn.Sequential(model), "full_state_dict", "state_dict"),
        (originals, "repoint", "after wrapping"),
        (model.parameters(), "clip_grad_norm_", "model.clip_grad_norm_"),
    ):
        with pytest.raises(ValueError, match=rf"^{function}: parameter 'flat_param_0'.*{instead}"):
            refuse_flat(where, function)
    with model.summon_full_params(), pytest.raises(ValueError, match="load: "):
        refuse_flat(model, "load")
    other = plain_model()
    refuse_flat(other, "save")
    shardwise.fully_shard(other)
    refuse_flat(other, "save")


# -- Norms


@on_ranks(2, dtype=(torch.float16, torch.bfloat16))
def test_norms_of_half_precision_gradients(dtype: torch.dtype) -> None:
    """Whose squares overflow; of all orders."""
    model = nested(plain_model().to(dtype), compute_dtype=dtype)
    count = sum(parameter.numel() for parameter in plain_model().parameters())
    error_of(model(INPUTS[0].to(dtype))).backward()
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        for parameter in model.parameters():
            parameter.grad.fill_(30000.0)
        for slot in (slot for one in get_fsdp_instances(model) for slot in one._own_slots()):
            slot.sharded.grad[slot.sharded.numel() - slot.padding :] = 0  # as reductions leave it
        norm = model.clip_grad_norm_(1.0, norm_type)
        value = torch.tensor(30000.0).to(dtype).float()
        expected = value if math.isinf(norm_type) else value * count ** (1 / norm_type)
        torch.testing.assert_close(norm, expected)
        assert norm.dtype == torch.float32
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ValueError, match="outermost"):
        model[1].clip_grad_norm_(1.0)


@on_ranks(3)
def test_norm_of_float64_gradients_where_a_rank_has_none() -> None:
    plain = nn.Linear(1, 2).double()
    model = FSDP(copy.deepcopy(plain), flatten_parameters=False, compute_dtype=torch.float64)
    for one in (plain, model):
        error_of(one(torch.ones(1, 1, dtype=torch.float64))).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected)


class Experts(nn.Module):
    """Ranks have experts of their own, of as many layers as they like, and need not use them."""

    def __init__(self, group: Any, rank: int):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + rank)])
        self.expert = FSDP(layers, process_group=group, flatten_parameters=False)

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return self.expert(self.linear(x)) if uses else self.linear(x)


@on_ranks(2, 3)
def test_norm_with_experts_of_some_ranks() -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([index]) for index in range(dist.get_world_size())]
    model = FSDP(Experts(alone[rank], rank))
    error_of(model(INPUTS[0], rank != 1)).backward()
    for norm_type in (2.0, math.inf):
        own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        norms: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(norms, own)
        expected = torch.linalg.vector_norm(torch.cat(norms), norm_type)
        torch.testing.assert_close(model.clip_grad_norm_(1e9, norm_type), expected)


@on_ranks(2, flat=FLAT, everywhere=(True, False))
def test_skips_steps_with_nested_instances(flat: bool, everywhere: bool) -> None:
    model = nested(plain_model(), flat, mixed_precision=True, compute_dtype=torch.float16)
    optimizer, scaler = SGD(model.parameters(), lr=0.1), ShardedGradScaler(init_scale=4.0, growth_interval=1)
    first = math.inf if everywhere or dist.get_rank() == 1 else 1.0
    for factor, scale in ((first, 2.0), (1.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale(error_of(model(INPUTS[0])) * factor).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        if scale == 2.0:
            assert_state(model, plain_model())
    assert not torch.equal(model.state_dict()["0.weight"], plain_model()[0].weight)


# -- Optimizer state of others


class _HalfOptimizer:
    """As fairseq's: what the trainer holds is no torch optimizer, and its state tells the loss scale too."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "loss_scale": 128.0}


@on_ranks(2, flat=FLAT)
def test_gathers_state_of_what_is_no_torch_optimizer(flat: bool) -> None:
    model = nested(plain_model(), flat)
    optimizer = Adam(model.parameters())
    error_of(model(INPUTS[dist.get_rank()])).backward()
    optimizer.step()
    wanted = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    got = model.gather_full_optim_state_dict(_HalfOptimizer(optimizer), recipient_rank=None)
    assert got.pop("loss_scale") == 128.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


class _Noting(SGD):
    """Has state that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        """Note it."""
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(history=[1.0, 2.0], nothing=None, pair=(1, [torch.ones(())]))
        return loss


@on_ranks(2, flat=FLAT)
def test_state_of_lists_and_nothing(flat: bool) -> None:
    model = nested(plain_model(), flat)
    optimizer = _Noting(model.parameters(), lr=0.1, momentum=0.9)
    error_of(model(INPUTS[dist.get_rank()])).backward()
    optimizer.step()
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=None)
    for state in full["state"].values():
        assert (state["history"], state["nothing"], state["pair"]) == ([1.0, 2.0], None, (1, [1]))
    part = model.get_shard_from_optim_state_dict(full)
    torch.testing.assert_close(part["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    for state in optimizer.state.values():
        state["counts"] = [torch.tensor(1), torch.tensor(2)]
    part = model.get_shard_from_optim_state_dict(model.gather_full_optim_state_dict(optimizer, recipient_rank=None))
    assert all(state["counts"] == [1, 2] for state in part["state"].values())
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["pair"] = (1, [torch.ones_like(parameter)])
    with pytest.raises(ValueError, match=r"'pair' of .* is a tuple with tensors"):
        model.gather_full_optim_state_dict(optimizer)
    optimizer.state[parameter].pop("pair")
    # As earlier versions of torch saved SGD without momentum.
    full["state"] = {number: {"momentum_buffer": None} for number in full["state"]}
    part = model.get_shard_from_optim_state_dict(full)
    assert all(state == {"momentum_buffer": None} for state in part["state"].values())


@on_ranks(2)
def test_refuses_optimizer_state_of_other_shapes() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(1, 1, bias=False)))
    other = nn.Linear(9, 1)
    optimizer = Adam(other.parameters())
    error_of(other(torch.randn(1, 9))).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"'exp_avg' of '0.weight' has shape \(1, 9\)"):
        model.get_shard_from_optim_state_dict(optimizer.state_dict())
    mine = Adam(model.parameters())
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        model.gather_full_optim_state_dict(mine, recipient_rank=2)
    flipped = FSDP(plain_model(), flatten_parameters=False)
    with pytest.raises(ValueError, match=r"param group 0 .* order"):
        flipped.gather_full_optim_state_dict(Adam(list(flipped.parameters())[::-1]))
    # FairScale gives state without dims as a list with that of each rank.
    group = {"params": [0, 1]}
    state = {0: {"mu_product": [torch.tensor(0.5), torch.tensor(0.25)]}}
    saved: dict[str, Any] = {"state": state, "param_groups": [group], "param_id_map": {}}
    part = model.get_shard_from_optim_state_dict(saved)
    assert part["state"][0]["mu_product"] == (0.5, 0.25)[dist.get_rank()]
    # By parameter the instance that FairScale had it in; none for those of an instance without state.
    for divided in ({0: 0, 1: 0}, {0: None, 1: None}):
        assert model.get_shard_from_optim_state_dict({**saved, "param_id_map": divided})["state"]
    for divided in ({0: 0, 1: 1}, {0: None, 1: 1}):
        with pytest.raises(ValueError, match="here they are divided otherwise"):
            model.get_shard_from_optim_state_dict({**saved, "param_id_map": divided})


# -- Copies, and memory


@on_ranks(2, flat=FLAT)
def test_copies_of_recurrent_modules(flat: bool) -> None:
    """They look at their weights when they are copied."""
    group = dist.new_group([0, 1])
    model = FSDP(nn.GRU(4, 4), flatten_parameters=flat, process_group_reduce_scatter=group)
    inputs = INPUTS[0].unsqueeze(1)
    model(inputs)
    loaded, copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    loaded.process_group = dist.group.WORLD
    assert copied.process_group_reduce_scatter is group
    for each in (model, loaded, copied):
        error_of(each(inputs)[0]).backward()
    for other in (loaded, copied):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    dummy = FSDP(nn.Linear(2, 2), process_group=DummyProcessGroup(dist.get_rank(), 2))
    with pytest.raises(StateError, match="no process group"):
        dummy.state_dict()


@on_ranks(2)
def test_peak_memory_of_states() -> None:
    width, layers = 256, 6
    unit = 4 * width * width
    model = FSDP(nn.Sequential(*[FSDP(nn.Linear(width, width, bias=False)) for _ in range(layers)]))
    optimizer = Adam(model.parameters())
    error_of(model(torch.randn(2, width))).backward()
    optimizer.step()
    peak, state = peak_bytes(model.state_dict)
    assert peak < (layers + 1.1) * unit
    assert peak_bytes(model.local_state_dict)[0] < 0.1 * unit
    assert peak_bytes(lambda: model.load_state_dict(state))[0] < 1.1 * unit
    peak, full = peak_bytes(lambda: model.gather_full_optim_state_dict(optimizer))
    assert peak < (2 * layers + 1.1 if dist.get_rank() == 0 else 1.1) * unit
    assert size_in_file(model.local_state_dict()) < layers * unit / 2 * 1.1
    if dist.get_rank() == 0:
        assert size_in_file(full) < 2 * layers * unit * 1.1


def peak_bytes(action: Callable[[], Any]) -> tuple[int, Any]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = action()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak, result


@on_ranks(2, flat=FLAT)
def test_is_freed_after_every_use(flat: bool) -> None:
    def summoned(model: Any) -> None:
        with model.summon_full_params():
            pass

    def failed(model: Any) -> None:
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 9))

    uses: tuple[Callable[[Any], Any], ...] = (
        lambda model: model(INPUTS[0]),
        two_forwards_two_backwards,
        lambda model: (model.state_dict(), model.local_state_dict(), model.local_metadata_dict()),
        lambda model: model.load_state_dict(plain_model().state_dict()),
        lambda model: model.half(),
        copy.deepcopy,
        summoned,
        exception_in_no_sync,
        failed,
    )
    gc.collect()
    gc.disable()
    try:
        for use in uses:
            model = nested(plain_model(), flat)
            use(model)
            references = [weakref.ref(instance) for instance in get_fsdp_instances(model)]
            del model
            assert all(reference() is None for reference in references), use
    finally:
        gc.enable()


# -- Order


class Mixed(nn.Module):
    """Every module has trained and frozen parameters, in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


@on_ranks(1, 2, flat=FLAT)
def test_trained_and_frozen_parameters_take_turns(flat: bool) -> None:
    """Each has its own values, and the order stays: optimizers and averages find parameters again by it alone."""
    torch.manual_seed(3)
    plain = Mixed()
    model = FSDP(copy.deepcopy(plain), flatten_parameters=flat)
    names = [name for name, _ in plain.named_parameters()]
    for instance in (model, copy.deepcopy(model)):
        inputs = torch.randn(2, 3)
        assert torch.equal(instance(inputs), plain(inputs))
        for name, value in instance.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        before = list(instance.parameters())
        optimizer = torch.optim.Adam(before)
        instance(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for volatile in (True, False):
            with instance.summon_full_params(volatile=volatile):
                assert [name for name, _ in instance.named_parameters()] == names
        assert list(instance.state_dict()) == names
        instance.load_state_dict(plain.state_dict())
        instance.apply(lambda module: None)
        assert all(a is b for a, b in zip(instance.parameters(), before, strict=True))
        whole = instance.gather_full_optim_state_dict(optimizer, recipient_rank=None)
        assert whole is not None
        assert sorted(whole["state"]) == [1, 2]


@on_ranks(2)
def test_parameters_that_say_how_they_are_gathered_are_refused_by_name() -> None:
    for flat in (True, False):
        with pytest.raises(ValueError, match=r"'0.weight' is a SentInBfloat16 that says itself how it is gathered"):
            FSDP(extend(nn.Sequential(nn.Linear(4, 4)), SentInBfloat16), flatten_parameters=flat)


@on_ranks(1, 2)
def test_what_has_no_shape_yet_is_refused_by_name() -> None:
    for flat in (True, False):
        with pytest.raises(ValueError, match=r"'1.weight' has no shape yet"):
            FSDP(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), flatten_parameters=flat)
        with pytest.raises(ValueError, match=r"'1.running_mean' has no shape yet"):
            FSDP(nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)), flatten_parameters=flat)


@on_ranks(2)
def test_sparse_buffers_are_refused_by_all_ranks() -> None:
    """Also by what the strategies for Lightning and MMEngine check, which send them too."""
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    for wrap in (FSDP, refuse_uncuttable):
        with pytest.raises(ValueError, match=r"'graph' is a tensor of layout torch\.sparse_coo"):
            wrap(model)


@on_ranks(2)
def test_buffers_that_share_elements_or_are_conjugates() -> None:
    """As the strategies for Lightning and MMEngine send them."""
    model = nn.Linear(2, 2)
    model.register_buffer("expanded", (torch.arange(3.0) + dist.get_rank()).expand(2, 3))
    model.register_buffer("conjugate", torch.tensor([1j + dist.get_rank()]).conj())
    # What one rank computes with, as a cache, may require gradients there alone.
    model.register_buffer("cache", torch.ones(3).requires_grad_(dist.get_rank() == 0))
    share_values(model, init_device_mesh("cpu", (2,)))
    assert model.expanded.tolist() == [[0.0, 1.0, 2.0]] * 2
    assert model.conjugate.tolist() == [-1j]


def differing(kind: str) -> nn.Module:
    """A model that is another one on the second rank."""
    is_other = dist.get_rank() == 1
    model: nn.Module = nn.Linear(4, 5 if is_other and kind == "shape" else 4, bias=not (is_other and kind == "number"))
    if kind == "none":
        return nn.Flatten() if is_other else model
    if kind == "lazy":
        return nn.LazyLinear(4) if is_other else model
    if kind == "lazy buffer":
        return nn.LazyBatchNorm1d(affine=False) if is_other else nn.BatchNorm1d(4, affine=False)
    if kind == "buffer":
        model.register_buffer("mean", torch.zeros(3 if is_other else 2))
    model.weight.requires_grad_(not (is_other and kind == "frozen"))
    if is_other and kind in ("meta", "float64"):
        model.to(kind if kind == "meta" else torch.float64)
    return model


@on_ranks(
    2, 3, kind=["shape", "number", "none", "buffer", "frozen", "meta", "float64", "lazy", "lazy buffer"], flat=FLAT
)
def test_ranks_with_different_models_are_told(kind: str, flat: bool) -> None:
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel: ranks have different parameters: .* on rank 1"):
        FSDP(differing(kind), flatten_parameters=flat)


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "flatten_parameters": {"flatten_parameters": False},
    "mixed_precision": {"mixed_precision": True, "compute_dtype": torch.float32},
    "fp32_reduce_scatter": {"mixed_precision": True, "fp32_reduce_scatter": True},
    "compute_dtype": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    "reshard_after_forward": {"reshard_after_forward": False},
    "disable_reshard_on_root": {"disable_reshard_on_root": False},
    "no_broadcast_optim_state": {"no_broadcast_optim_state": True},
    "gradient_predivide_factor": {"gradient_predivide_factor": 4.0},
    "process_group_reduce_scatter": {"process_group_reduce_scatter": "reduce_scatter"},
}


@on_ranks(2, 3, name=tuple(OTHER_SETTINGS))
def test_ranks_with_different_settings_are_told(name: str) -> None:
    """They would send other numbers of bytes, at other times: gloo ends the process then, or both wait for ever."""
    other = OTHER_SETTINGS[name]
    mixed = {"mixed_precision": True} if name in ("fp32_reduce_scatter", "compute_dtype") else {}
    with pytest.raises(ValueError, match=rf"setting {name}=.* on rank 0, setting {name}=.* on rank 1 of the group"):
        FSDP(nn.Linear(3, 3), **(other if dist.get_rank() == 1 else mixed))
    # What means the same may be said in other ways.
    same: dict[str, Any] = {"compute_dtype": torch.float32, "process_group_reduce_scatter": "default"}
    model = FSDP(nn.Linear(3, 3), **(same if dist.get_rank() == 1 else {"process_group": dist.group.WORLD}))
    model(torch.ones(2, 3)).sum().backward()
