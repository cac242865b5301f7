"""What programs read of FairScale's objects, call on them and set, against FairScale's own."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import shardwise.fairscale as ours
from shardwise.fairscale import FSDP, OSS, ShardedDDP, ShardedGradScaler, get_fsdp_instances

from ..ranks.harness import on_ranks
from .fairscale_on_cpu import fairscale_fsdp, needs_fairscale

pytestmark = needs_fairscale

FLAT = (True, False)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 3), nn.Tanh()), nn.Linear(3, 2, bias=False)
    )


def inputs_for(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: Any, step: int = 0) -> None:
    model(inputs_for(step)).float().square().mean().backward()


def theirs() -> Any:
    logging.getLogger().setLevel(logging.ERROR)
    return importlib.import_module("fairscale.optim").OSS, importlib.import_module("fairscale.nn").ShardedDataParallel


def sharded_ddp(oss: Any, wrapper: Any, **options: Any) -> tuple[nn.Sequential, Any, Any]:
    model = model_of()
    optimizer = oss(model.parameters(), optim=SGD, lr=0.1, momentum=0.9, weight_decay=0.5)
    return model, optimizer, wrapper(model, optimizer, **options)


@contextlib.contextmanager
def both_fsdps(**options: Any) -> Iterator[list[Callable[[], Any]]]:
    """Makers of the same nested model, FairScale's first."""

    def make(cls: Any, extra: dict[str, Any]) -> Any:
        model = model_of()
        model[2] = cls(model[2], **extra, **options)
        return cls(model, **extra, **options)

    with fairscale_fsdp() as cls:
        # Not the group that FairScale remembers from another test of this process.
        same = {"process_group": dist.group.WORLD, "process_group_reduce_scatter": dist.group.WORLD}
        yield [lambda: make(cls, {"bucket_cap_mb": 0, **same}), lambda: make(FSDP, {})]


def instances_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "FullyShardedDataParallel"]


# -- Names, arguments and defaults


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def arguments(function: Any) -> list[tuple[str, Any]]:
    return [(one.name, one.default) for one in inspect.signature(function).parameters.values()]


NOT_OURS = {
    "OSS": {
        "buckets",  # their parameters' memory; ours have memory of their own unless they are small
        "in_super_constructor",  # a flag of their constructor
    },
    "FullyShardedDataParallel": {
        "uncollected_opt_state",  # between two of their methods
        "children_share_process_group",  # why their clip_grad_norm_ refuses; ours takes any groups
    },
}
OTHERWISE = {
    "to": "torch's own, which takes what theirs takes and more",
    "load_state_dict": "torch's `assign` too, to say that it cannot be",
    "gather_full_optim_state_dict": "`recipient_rank`, of the spec",
}


def assert_has_all_of(mine: Any, other: Any, name: str) -> None:
    assert public(other) - public(mine) == NOT_OURS.get(name, set()) & public(other)
    for method in public(other) & public(mine) - OTHERWISE.keys():
        if inspect.ismethod(getattr(other, method)):
            assert arguments(getattr(mine, method)) == arguments(getattr(other, method)), method


@on_ranks(2)
def test_optimizer_and_wrapper_have_all_names() -> None:
    (_, oss, wrapped), (_, their_oss, their_wrapped) = sharded_ddp(OSS, ShardedDDP), sharded_ddp(*theirs())
    for model, optimizer in ((wrapped, oss), (their_wrapped, their_oss)):
        train(model)
        optimizer.step()
    assert_has_all_of(oss, their_oss, "OSS")
    assert_has_all_of(wrapped, their_wrapped, "ShardedDataParallel")
    scaler = importlib.import_module("fairscale.optim.grad_scaler").ShardedGradScaler
    with fairscale_fsdp():  # theirs is off where there is no GPU
        group = dist.group.WORLD
        mine, other = ShardedGradScaler(process_group=group), scaler(process_group=group)
    assert_has_all_of(mine, other, "ShardedGradScaler")
    assert mine.group is other.group is group


@on_ranks(2, flat=FLAT)
def test_instances_have_all_names(flat: bool) -> None:
    with both_fsdps(flatten_parameters=flat) as (make_theirs, make_ours):
        other, mine = make_theirs(), make_ours()
        assert_has_all_of(mine, other, "FullyShardedDataParallel")
        for model in (other, mine):
            train(model)
        assert_has_all_of(mine, other, "FullyShardedDataParallel")


def test_the_rest_has_all_names() -> None:
    wrapping = importlib.import_module("fairscale.nn.wrap.auto_wrap")
    flattening = importlib.import_module("fairscale.nn.misc.flatten_params_wrapper")
    sharding = importlib.import_module("fairscale.nn.data_parallel")
    assert public(wrapping.ConfigAutoWrap) == public(ours.ConfigAutoWrap)
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
    assert public(flattening.FlatParameter(parameters)) <= public(ours.FlatParameter(parameters))
    assert [(state.name, state.value) for state in ours.TrainingState] == [
        (state.name, state.value) for state in sharding.TrainingState
    ]
    for name in ("auto_wrap_bn", "get_fsdp_instances"):
        assert arguments(getattr(ours, name)) == arguments(getattr(sharding, name))
    wrapper = importlib.import_module("fairscale.nn").checkpoint_wrapper
    assert arguments(ours.checkpoint_wrapper) == arguments(wrapper)


FLAT_PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "metadata": lambda cls: cls([nn.Parameter(torch.ones(2, 3)), torch.ones(())]).metadata(),
    "empty members": lambda cls: cls([torch.ones(0), torch.ones(2)]).metadata(),
    "views": lambda cls: [
        (view.tolist(), view.grad_fn is not None) for view in cls([torch.ones(2, 3), torch.ones(4)]).get_param_views()
    ],
    "frozen": lambda cls: cls([nn.Parameter(torch.ones(2))], False).requires_grad,
    "printed": lambda cls: repr(cls([torch.ones(2)])),
    "pickled": lambda cls: pickle.loads(pickle.dumps(cls([torch.ones(2, 2), torch.ones(3)]))).metadata(),
    "of other data": lambda cls: [view.tolist() for view in cls([torch.ones(2, 1)]).get_param_views(torch.zeros(2))],
    "of too many": lambda cls: cls([torch.ones(2)]).get_param_views(torch.zeros(3)),
    "nothing": lambda cls: cls([]),
    "numbers": lambda cls: cls([1]),
    "one": lambda cls: cls(nn.Parameter(torch.ones(2))),
    "several": lambda cls: cls(parameter for parameter in [torch.ones(1)]),
    "nested": lambda cls: cls([cls([torch.ones(1)])]),
}


@pytest.mark.parametrize("what", FLAT_PARAMETERS)
def test_flat_parameters(what: str) -> None:
    def result(cls: Any) -> Any:
        try:
            return FLAT_PARAMETERS[what](cls)
        except Exception as error:  # what kind is the result
            return type(error)

    flattening = importlib.import_module("fairscale.nn.misc.flatten_params_wrapper")
    assert result(ours.FlatParameter) == result(flattening.FlatParameter)


# -- OSS and ShardedDataParallel


@on_ranks(3)
def test_oss_tells_who_and_where_it_is() -> None:
    # Ranks of a group in descending order have other numbers in it.
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    their_oss, _ = theirs()
    with pytest.warns(UserWarning, match="force_broadcast_object"):
        mine, other = (
            cls(model_of().parameters(), lr=0.1, group=group, broadcast_fp16=True, force_broadcast_object=True)
            for cls in (OSS, their_oss)
        )
    for name in ("rank", "world_size", "global_rank", "backend", "group", "broadcast_fp16", "force_broadcast_object"):
        assert getattr(mine, name) == getattr(other, name), name
    assert (mine.rank, mine.global_rank, mine.backend) == (dist.get_rank() // 2, dist.get_rank(), "gloo")


@on_ranks(2)
def test_oss_copies_tell_the_same() -> None:
    with pytest.warns(UserWarning, match="force_broadcast_object"):
        oss = OSS(model_of().parameters(), lr=0.1, force_broadcast_object=True)
    copied = copy.deepcopy(oss)
    assert copied.force_broadcast_object
    assert (copied.global_rank, copied.backend) == (dist.get_rank(), "gloo")


@on_ranks(2)
def test_consolidating_passes_settings_on() -> None:
    for cls in (theirs()[0], OSS):
        oss = cls(model_of().parameters(), optim=Adam, lr=0.1)
        oss.param_groups[0]["lr"] = 0.3
        oss.consolidate_state_dict()
        assert oss.optim.param_groups[0]["lr"] == 0.3


def own_gradients(model: nn.Module, oss: Any) -> list[torch.Tensor | None]:
    own = {id(p) for group in oss.partition_parameters()[oss.rank] for p in group["params"]}
    return [p.grad for p in model.parameters() if id(p) in own]


@on_ranks(2, way=["default", "none", "zeros", "waiting"])
def test_the_wrapper_zeroes_as_theirs(way: str) -> None:
    """Zeros are gradients: weight decay goes on for a parameter that is not used any more."""
    results = []
    for kinds in (theirs(), (OSS, ShardedDDP)):
        model, oss, wrapped = sharded_ddp(*kinds, reduce_buffer_size=0)
        with wrapped.no_sync() if way == "waiting" else contextlib.nullcontext():
            train(wrapped)
        if way != "waiting":
            oss.step()
        assert (
            wrapped.zero_grad(**{"none": {"set_to_none": True}, "zeros": {"set_to_none": False}}.get(way, {})) is None
        )
        zeroed = [None if gradient is None else gradient.clone() for gradient in own_gradients(model, oss)]
        model[3].forward = lambda x: x  # type: ignore[method-assign]
        train(wrapped, 1)
        gradients = own_gradients(model, oss)
        oss.step()
        results.append((zeroed, gradients, list(model.parameters())))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    assert all((gradient is None) == (way == "none") for gradient in results[1][0])


# -- FullyShardedDataParallel


def read(model: Any) -> dict[str, Any]:
    instances = instances_of(model)
    return {
        "has_full_params": [one.has_full_params for one in instances],
        "training_state": [one.training_state.name for one in instances],
        "reshard_after_forward": [one.reshard_after_forward for one in instances],
        "numel_padded_per_param": [one.numel_padded_per_param for one in instances],
        "buffer_size": [one.buffer_size for one in instances],
        "factors": [(one.gradient_predivide_factor, one.gradient_postdivide_factor) for one in instances],
        "numbers": [(len(one.params), len(one.non_shared_params())) for one in instances],
        "params_with_grad": len(model.params_with_grad),
    }


UNLIKE = {
    # Until the next forward FairScale keeps those of the root, which nobody needs before.
    "no_sync": ("has_full_params",),
    "evaluated": ("has_full_params",),
    "summoned": ("params_with_grad",),  # theirs hang on what is whole here
    "summoned alone": ("params_with_grad",),
}


@on_ranks(1, 2, 3, flat=FLAT, keep=(True, False))
def test_instances_tell_what_they_are_doing(flat: bool, keep: bool) -> None:
    logs: list[list[Any]] = []
    with both_fsdps(flatten_parameters=flat, disable_reshard_on_root=keep) as makers:
        for make in makers:
            model, log = make(), []
            logs.append(log)
            note = lambda name, model=model, log=log: log.append((name, read(model)))  # noqa: E731
            model[1].register_forward_hook(lambda *_, note=note: note("forward"))
            note("made")
            for step in range(2):
                loss = model(inputs_for(step)).square().mean()
                note("after forward")
                loss.backward()
                note("after backward")
            model.zero_grad()
            with model.no_sync():
                train(model)
                note("no_sync")
            with model.summon_full_params():
                note("summoned")
            with model.summon_full_params(recurse=False):
                note("summoned alone")
            model.eval()
            with torch.no_grad():
                model(inputs_for())
            note("evaluated")
            model.state_dict()
            note("state")
    assert [name for name, _ in logs[0]] == [name for name, _ in logs[1]]
    for (name, expected), (_, actual) in zip(*logs, strict=True):
        for key in UNLIKE.get(name, ()):
            expected.pop(key), actual.pop(key)
        assert actual == expected, (name, actual, expected)


@on_ranks(2, flat=FLAT)
def test_params_are_those_of_the_optimizer(flat: bool) -> None:
    sizes = []
    with both_fsdps(flatten_parameters=flat) as makers:
        for model in (make() for make in makers):
            mine = [p for one in instances_of(model) for p in one.params]
            assert {id(p) for p in mine} == {id(p) for p in model.parameters()}
            sizes.append([p.numel() for p in mine])
    assert sizes[0] == sizes[1]
    lender, borrower = FSDP(nn.Linear(4, 4), flatten_parameters=False), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    borrower.tied = lender.module.weight
    wrapped = FSDP(borrower, flatten_parameters=False)
    wrapped.append_shared_param(lender.module.weight)
    assert wrapped.params[-1] is lender.params[0]
    assert [id(p) for p in wrapped.params[:-1]] == [id(p) for p in wrapped.non_shared_params()]
    assert len(wrapped.non_shared_params()) == 2


@on_ranks(1, 2, flat=FLAT)
def test_parts_have_their_shapes(flat: bool) -> None:
    """FairScale flattens what it cuts: of a world of one, only what it joins."""
    results = []
    with both_fsdps(flatten_parameters=flat) as makers:
        for make in makers:
            model = make()
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(model)
            gradients = [p.grad.shape for p in model.parameters()]
            model.clip_grad_norm_(0.1)
            optimizer.step()
            with model.no_sync():
                train(model, 1)
            train(model, 2)
            optimizer.step()
            moments = [optimizer.state[p]["momentum_buffer"].shape for p in model.parameters()]
            with model.summon_full_params():
                model[0].weight.data.mul_(2.0)
            shards = model.local_state_dict()
            parameters = [p.shape for p in model.parameters()]
            assert gradients == moments == parameters
            results.append((parameters, {name: (value.shape, value.clone()) for name, value in shards.items()}, model))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[1][1], results[0][1])
    copied = pickle.loads(pickle.dumps(results[1][2]))
    copied.load_local_state_dict({name: value.reshape(-1) for name, (_, value) in results[1][1].items() if value.ndim})
    assert [p.shape for p in copied.parameters()] == results[1][0]


@on_ranks(1)
def test_a_parameter_without_dims_keeps_its_shape() -> None:
    plain = nn.Linear(3, 2)
    plain.scale = nn.Parameter(torch.tensor(2.0))
    model = FSDP(copy.deepcopy(plain), flatten_parameters=False)
    optimizer = Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(3.0))
    optimizer.step()
    shapes = [p.shape for p in plain.parameters()]
    assert [p.shape for p in model.parameters()] == shapes
    gathered = model.gather_full_optim_state_dict(optimizer)
    for state in (gathered, model.get_shard_from_optim_state_dict(gathered)):
        assert [values["exp_avg"].shape for values in state["state"].values()] == shapes


ZEROING: dict[str, Callable[[Any, Any], None]] = {
    "model": lambda model, optimizer: model.zero_grad(),
    "zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "one by one": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
    "not": lambda model, optimizer: None,
}


@on_ranks(1, 2, 3, flat=FLAT, way=tuple(ZEROING), first=(True, False))
def test_zeroing_drops_what_no_sync_has_added_up(flat: bool, way: str, first: bool) -> None:
    results = []
    with both_fsdps(flatten_parameters=flat) as (make_theirs, make_ours):
        ddp = DistributedDataParallel(model_of())
        # FairScale keeps a gradient that was reduced before the sum was begun.
        models = [ddp, make_ours()] if first and way != "not" else [ddp, make_ours(), make_theirs()]
        for model in models:
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(2):
                if first:
                    train(model, 4 * step)
                with model.no_sync():
                    train(model, 4 * step + 1)
                    train(model, 4 * step + 2)
                ZEROING[way](model, optimizer)
                train(model, 4 * step + 3)
                optimizer.step()
                optimizer.zero_grad()
            source = model.module if model is ddp else model
            results.append(source.state_dict())
    for other in results[1:]:
        for name, value in results[0].items():
            if "running" not in name:  # DDP gives all ranks the first one's
                torch.testing.assert_close(other[name], value, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2, flat=FLAT)
def test_state_dicts_are_snapshots(flat: bool) -> None:
    """Of buffers as well; plain torch gives those that change."""
    with both_fsdps(flatten_parameters=flat) as makers:
        for model in (make() for make in makers):
            parent = nn.Sequential(model)
            for source in (model, parent, model[2]):
                state = source.state_dict()
                before = copy.deepcopy(state)
                train(model)
                for name, value in state.items():
                    assert torch.equal(value, before[name]), name
            live = dict(model.named_buffers())
            local = model.local_state_dict()
            assert local["1.running_mean"].data_ptr() in {buffer.data_ptr() for buffer in live.values()}


@on_ranks(2, flat=FLAT)
def test_state_dicts_take_torchs_arguments(flat: bool) -> None:
    results = []
    with both_fsdps(flatten_parameters=flat) as makers:
        for model in (make() for make in makers):
            given: dict[str, Any] = OrderedDict()
            assert model.state_dict(destination=given, prefix="p.") is given
            kept = model.state_dict(keep_vars=True)
            parent = nn.Sequential(nn.Tanh(), model).state_dict()
            results.append(([*given], [*parent], {name: value.requires_grad for name, value in kept.items()}))
    assert results[0] == results[1]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "float": lambda model: model.float(),
    "half and back": lambda model: model.half().float(),
    "device": lambda model: model.to("cpu"),
}


@on_ranks(2, flat=FLAT, how=("float", "half and back", "device"))
def test_buffers_are_cast_again_after_a_conversion(flat: bool, how: str) -> None:
    with both_fsdps(flatten_parameters=flat, mixed_precision=True) as makers:
        results = []
        for make in makers:
            model = make()
            train(model)
            CONVERSIONS[how](model)
            train(model, 1)
            buffers = [buffer.dtype for buffer in model.buffers()]
            results.append((buffers, {name: value.float() for name, value in model.state_dict().items()}))
    assert results[0][0] == results[1][0] == [torch.float16, torch.float16, torch.int64]
    for name, value in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], value, rtol=1e-3, atol=1e-5)


@on_ranks(2)
def test_buffers_follow_conversions_where_no_parameter_does() -> None:
    model = model_of()
    for index in (0, 2, 3):
        model[index] = FSDP(model[index])
    model[1] = FSDP(nn.BatchNorm1d(5, affine=False))
    model = FSDP(model)
    model.register_buffer("scale", torch.ones(1))
    model.module.register_buffer("shift", torch.ones(1))
    train(model)
    model.double()
    model(inputs_for().double())
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float64, torch.int64}
    assert {instance.compute_dtype for instance in get_fsdp_instances(model)} == {torch.float64}


@on_ranks(2)
def test_buffers_that_were_cast_in_inference_mode_are_trained_with() -> None:
    results = []
    for mode in (torch.inference_mode, torch.no_grad):
        model = FSDP(model_of(), mixed_precision=True, compute_dtype=torch.bfloat16)
        for convert in (lambda: None, model.float):
            convert()
            model.eval()
            with mode():
                model(inputs_for())
            train(model.train(), 1)
        results.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@on_ranks(2, flat=FLAT, ran=(True, False))
def test_settings_may_be_set_later(flat: bool, ran: bool) -> None:
    results = []
    with both_fsdps(flatten_parameters=flat) as makers:
        for make in makers:
            model, seen = make(), []
            if ran:
                train(model)
            for one in instances_of(model):
                one.reshard_after_forward = False
                one.gradient_predivide_factor, one.gradient_postdivide_factor = 4.0, 8.0
            loss = model(inputs_for(1)).square().mean()
            seen.append([one.has_full_params for one in instances_of(model)])
            model.zero_grad()
            loss.backward()
            instances_of(model)[1].reshard_after_forward = True
            model(inputs_for(2))
            seen.append([one.has_full_params for one in instances_of(model)])
            results.append((seen, [p.grad.reshape(-1) for p in model.parameters()]))
    assert results[0][0] == results[1][0] == [[True, True], [True, False]]
    torch.testing.assert_close(results[1][1], results[0][1])


@on_ranks(2, ran=(True, False))
def test_settings_of_dtypes_and_of_the_root_may_be_set_later(ran: bool) -> None:
    half = {"mixed_precision": True, "compute_dtype": torch.float16, "gradient_predivide_factor": 1.0}
    results = []
    with both_fsdps(disable_reshard_on_root=False, **half) as makers:
        for make in makers:
            model = make()
            model[1].forward = lambda x: x  # with buffers of any dtype
            if ran:
                train(model)
            for one in instances_of(model):
                one.buffer_dtype, one.fp32_reduce_scatter, one.disable_reshard_on_root = torch.float64, True, True
            model.zero_grad()
            train(model, 1)
            keeps = [one.reshard_after_forward for one in instances_of(model)]
            results.append(([p.grad for p in model.parameters()], keeps, model[1].running_mean.dtype))
    assert results[0][1:] == results[1][1:] == ([False, True], torch.float64)
    # Bitwise: in float16 the sums would be rounded.
    assert all(torch.equal(*pair) for pair in zip(results[0][0], results[1][0], strict=True))


@on_ranks(1)
def test_settings_that_may_not_be_set_later() -> None:
    model = FSDP(model_of())
    for name, value in {"compute_dtype": torch.float16, "mixed_precision": True}.items():
        with pytest.raises(AttributeError, match=name):
            setattr(model, name, value)
    with pytest.raises(ValueError, match="needs mixed_precision=True"):
        model.fp32_reduce_scatter = True
    assert not model.fp32_reduce_scatter


@on_ranks(2)
def test_copies_keep_settings() -> None:
    model = FSDP(model_of(), gradient_predivide_factor=4.0)
    train(model)
    assert not model.reshard_after_forward
    copied = copy.deepcopy(model)
    assert copied.reshard_after_forward
    assert (copied.gradient_predivide_factor, copied.gradient_postdivide_factor) == (4.0, 0.5)
    for one in (model, copied):
        one.zero_grad()
        train(one, 1)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), copied.parameters(), strict=True))


@on_ranks(2, given=("default", "reduce_scatter", "group"))
def test_tells_the_group_of_reductions(given: str) -> None:
    group = dist.new_group([0, 1])
    model = FSDP(nn.Linear(3, 3), process_group_reduce_scatter=group if given == "group" else given)
    reducing = model.process_group_reduce_scatter
    assert (reducing.rank(), reducing.size()) == (dist.get_rank(), 2)
    assert (reducing is model.process_group) == (given == "default")
    assert (reducing is group) == (given == "group")
    assert FSDP(nn.Linear(3, 3)).process_group_reduce_scatter is dist.group.WORLD


@on_ranks(2)
def test_what_is_refused_while_something_goes_on() -> None:
    logs = []
    with both_fsdps() as makers:
        for make in makers:
            model, log = make(), []
            calls: dict[str, Callable[[], Any]] = {
                "no_sync": lambda model=model: model.no_sync().__enter__(),
                "summon_full_params": lambda model=model: model.summon_full_params().__enter__(),
                "set_gradient_divide_factors": lambda model=model: model.set_gradient_divide_factors(1, 2, True),
                "apply": lambda model=model: model.apply(lambda _: None),
                "half": lambda model=model: model.half(),
                "clip_grad_norm_": lambda model=model: model.clip_grad_norm_(1.0),
            }

            def attempt(_: Any = None, __: Any = None, ___: Any = None, calls: Any = calls, log: Any = log) -> None:
                for name, call in calls.items():
                    with pytest.raises(ValueError) as caught, contextlib.redirect_stdout(None):
                        call()
                    log.append((name, str(caught.value)))

            handle = model[0].register_forward_hook(attempt)
            model(inputs_for())
            handle.remove()
            with model.summon_full_params():
                attempt()
            logs.append(log)
    assert len(logs[0]) == 12
    for (name, theirs), (our_name, message) in zip(*logs, strict=True):
        assert name == our_name
        for part in theirs.split(" but "):  # which programs look for
            assert part in message, (name, message)


class NormOfAnotherLibrary(nn.SyncBatchNorm.__base__):  # type: ignore[misc,name-defined]
    """As apex has it: derived from what torch's own are derived from."""


def test_tags_the_batch_norms_that_theirs_tags() -> None:
    sharding = importlib.import_module("fairscale.nn.data_parallel")
    tagged = []
    for library in (sharding, ours):
        model = nn.Sequential(nn.BatchNorm2d(3), NormOfAnotherLibrary(3), nn.InstanceNorm1d(3), nn.LayerNorm(3))
        assert library.auto_wrap_bn(model, wrap_it=False) is model
        tagged.append([hasattr(module, "wrapper_config") for module in model])
    assert tagged[0] == tagged[1] == [True, True, False, False]


@on_ranks(2)
def test_instances_without_parameters_tell_so() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 3)), nn.Tanh()))
    outer, inner = get_fsdp_instances(model)
    for _ in range(2):
        assert (outer.params, outer.numel_padded_per_param, outer.buffer_size) == ([], [], 0)
        assert inner.buffer_size == 12
        outer.reshard_after_forward = False
        assert not outer.reshard_after_forward
        outer.gradient_predivide_factor = 1.0
        assert outer.gradient_predivide_factor == 1.0
        train(model)
        model.zero_grad()


@on_ranks(2, kept=(True, False))
def test_outermost_instances_without_parameters_keep_none_after_forward(kept: bool) -> None:
    same = {"process_group": dist.group.WORLD, "process_group_reduce_scatter": dist.group.WORLD}
    with fairscale_fsdp() as theirs:
        read = []
        for cls, extra in ((theirs, {"bucket_cap_mb": 0, **same}), (FSDP, {})):
            model = cls(nn.Sequential(cls(nn.Linear(3, 3), **extra)), disable_reshard_on_root=kept, **extra)
            before = model.reshard_after_forward
            train(model)
            read.append((before, model.reshard_after_forward))
    assert read[0] == read[1] == (True, not kept)


def settings_of(instance: Any) -> dict[str, Any]:
    names = ("flatten_parameters", "reshard_after_forward", "mixed_precision", "world_size", "compute_dtype")
    return {name: getattr(instance, name) for name in names}


@on_ranks(2, how=("group", "config", "both"))
def test_batch_norms_are_wrapped_as_theirs_are(how: str) -> None:
    """By a group of its own, or by a configuration, which the group has no part in."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    read = []
    with fairscale_fsdp() as theirs:
        sharding = importlib.import_module(theirs.__module__)
        for library, cls, extra in ((sharding, theirs, {"bucket_cap_mb": 0}), (ours, FSDP, {})):
            # Not the group that FairScale remembers from another test of this process.
            own = {"process_group_reduce_scatter": dist.group.WORLD, **extra}
            given: dict[str, Any] = {"process_group": alone} if how != "config" else {}
            if how != "group":
                group = dist.group.WORLD
                given["fsdp_config"] = {"reshard_after_forward": True, "process_group": group, **own}
            before = dict(given.get("fsdp_config", {}))
            model = library.auto_wrap_bn(model_of(), **given)
            assert given.get("fsdp_config", {}) == before
            (norm,) = instances_of(model)
            assert norm is model[1]
            assert norm.process_group is (alone if how == "group" else dist.group.WORLD)
            model = cls(model, process_group=dist.group.WORLD, **own)
            train(model)
            train(model, 1)
            read.append((settings_of(norm), dict(model.state_dict())))
    assert read[0][0] == read[1][0]
    torch.testing.assert_close(read[1][1], read[0][1])


@on_ranks(2)
def test_batch_norms_that_have_a_configuration_get_another_if_that_is_asked_for() -> None:
    results = []
    with fairscale_fsdp() as theirs:
        sharding = importlib.import_module(theirs.__module__)
        for library in (sharding, ours):
            extra = {"bucket_cap_mb": 0} if library is sharding else {}
            first, second = ({"flatten_parameters": flat, "process_group": dist.group.WORLD} for flat in FLAT)
            second |= {"process_group_reduce_scatter": dist.group.WORLD, **extra}
            model = library.auto_wrap_bn(model_of(), fsdp_config=first, wrap_it=False)
            before = model[1].wrapper_config
            with pytest.raises((AssertionError, ValueError), match="wrapper_config"):
                library.auto_wrap_bn(model, fsdp_config=second)
            unchanged = model[1].wrapper_config
            again = library.auto_wrap_bn(model, fsdp_config=second, assert_on_collision=False)
            results.append((before == unchanged == first, settings_of(again[1])))
    assert results[0] == results[1]
    assert results[0][0]


def shards_of(model: Any) -> tuple[list[Any], list[Any]]:
    """All ranks' weights and their descriptions."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (dict(model.local_state_dict()), model.local_metadata_dict()))
    weights, metadata = zip(*everything, strict=True)
    return [*weights], [*metadata]


@on_ranks(2, flat=FLAT)
def test_weights_are_consolidated_without_buffers(flat: bool) -> None:
    """Each library's, by each; also where names are missing."""
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    with both_fsdps(flatten_parameters=flat) as makes:
        for make in makes:
            model = make()
            train(model)
            whole = model.state_dict()
            weights, metadata = shards_of(model)
            for cls in (type(model), FSDP):
                found = cls.consolidate_shard_weights(weights, metadata, with_module_buffers=False)
                assert found.keys() == whole.keys() - buffers
                torch.testing.assert_close(dict(found), {name: whole[name] for name in found}, rtol=0, atol=0)
                found = cls.consolidate_shard_weights(weights, metadata)
                assert found.keys() == whole.keys()
            fewer = [{name: value for name, value in one.items() if name not in buffers} for one in weights]
            for with_buffers in (True, False):
                found = FSDP.consolidate_shard_weights(fewer, metadata, with_buffers, strict=False)
                assert found.keys() == whole.keys() - buffers
            assert FSDP.consolidate_shard_weights(fewer, metadata, False).keys() == found.keys()
            with pytest.raises(KeyError, match=r"1\.running_mean"):
                FSDP.consolidate_shard_weights(fewer, metadata)


@on_ranks(2, flat=FLAT)
def test_shards_that_are_not_all_there_are_loaded(flat: bool) -> None:
    read = []
    with both_fsdps(flatten_parameters=flat) as makes:
        for make in makes:
            model = make()
            before = {name: value.clone() for name, value in model.local_state_dict().items()}
            state: dict[str, Any] = {name: value + 1 for name, value in before.items()}
            gone = next(name for name in state if name.startswith("2."))
            del state[gone], state["1.running_mean"]
            state["3.other"] = torch.zeros(1)
            names = list(state)
            with pytest.raises(RuntimeError) as caught:
                model.load_local_state_dict(dict(state))
            assert all(name in str(caught.value) for name in ("running_mean", "3.other"))
            result = model.load_local_state_dict(state, strict=False)
            after = model.local_state_dict()
            assert after.keys() == before.keys()
            for name, value in before.items():
                expected = value + 1 if name in names else value
                torch.testing.assert_close(after[name], expected, rtol=0, atol=0)
            train(model)
            # Theirs have the names of wrappers in them.
            missing, unexpected = (
                sorted(name.replace("_fpw_module.", "").replace("_fsdp_wrapped_module.", "") for name in given)
                for given in (result.missing_keys, result.unexpected_keys)
            )
            read.append((gone, names == list(state), missing, unexpected))
    assert read[0] == read[1]


@on_ranks(2, clears=(True, False))
def test_autocast_forgets_what_it_cast_where_that_is_asked_for(clears: bool) -> None:
    counts = []
    with both_fsdps(clear_autocast_cache=clears) as makes:
        for make in makes:
            model = make()
            calls: list[bool] = []
            with mock.patch.object(torch, "clear_autocast_cache", lambda calls=calls: calls.append(True)):
                with torch.autocast("cpu", torch.bfloat16):
                    for _ in range(2):
                        loss = model(inputs_for()).float().square().mean()
                    counts.append(len(calls))  # before autocast itself forgets everything
                loss.backward()
    assert counts[0] == counts[1] == (4 if clears else 0)


@on_ranks(2)
def test_state_dicts_are_where_they_are_asked_for() -> None:
    """On a device that every machine has."""
    read = []
    with both_fsdps(state_dict_device=torch.device("meta")) as makes:
        for make in makes:
            model = make()
            for _ in range(2):
                states = [model.state_dict(), model.local_state_dict()]
                train(model)
            read.append([{name: value.device.type for name, value in state.items()} for state in states])
    assert read[0][0] == read[1][0]
    assert set(read[1][1].values()) == {"meta"}  # FairScale leaves the shards of a rank where they are
