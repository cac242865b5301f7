"""Wrapping against FairScale's own, and checkpointed modules against the same ones without."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import math
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardwise import fully_shard
from shardwise.fairscale import FSDP
from shardwise.fairscale.checkpoint_wrapper import checkpoint_wrapper
from shardwise.fairscale.testing import DummyProcessGroup
from shardwise.fairscale.wrap import (
    ConfigAutoWrap,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)

from ..models import Block, ConvNet, Transformer, build, inputs_for
from ..ranks.harness import on_ranks
from .fairscale_on_cpu import needs_fairscale

# The package has functions of the same names as these modules.
wrapping = importlib.import_module("shardwise.fairscale.wrap")


class Wrapper(nn.Module):
    """Remembers its arguments."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class OtherWrapper(Wrapper):
    pass


class StrictWrapper(nn.Module):
    def __init__(self, module: nn.Module, group: Any = None):
        super().__init__()
        self.module, self.group = module, group


@pytest.fixture(autouse=True)
def _context_is_off_afterwards() -> Iterator[None]:
    yield
    assert not ConfigAutoWrap.in_autowrap_context
    assert ConfigAutoWrap.wrapper_cls is None
    assert not ConfigAutoWrap.kwargs


def fairscales_wrap() -> Any:
    # A function there has the name of its module.
    return importlib.import_module("fairscale.nn.wrap.auto_wrap")


def wrapped_names(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The modules that are wrapped, by the names that they have without wrappers, and their options."""
    found: dict[str, dict[str, Any]] = {}

    def visit(module: nn.Module, name: str) -> None:
        if isinstance(module, Wrapper):
            found[name] = {**module.options, "wrapper": type(module)}
            visit(module.module, name)
            return
        for key, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{key}" if name else key)

    visit(model, "")
    return found


# -- Against FairScale's


class Holder(nn.Module):
    """Parameters of its own beside children, one of them absent."""

    def __init__(self, size: int, children: list[nn.Module]):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.absent: nn.Module | None = None
        self.register_module("none", None)
        for index, child in enumerate(children):
            self.add_module(f"child{index}", child)


SMALL_SIZES = st.integers(0, 40)
TREES = st.recursive(
    st.tuples(st.just("linear"), st.integers(1, 6), st.integers(1, 6))
    | st.tuples(st.just("attention"), st.integers(1, 3), st.just(0))
    | st.tuples(st.just("relu"), st.just(0), st.just(0)),
    lambda inner: st.tuples(
        st.sampled_from(["sequential", "list", "dict", "holder"]), SMALL_SIZES, st.lists(inner, max_size=4)
    ),
    max_leaves=12,
)


def grow(tree: Any, tagged: Iterator[Any]) -> nn.Module:
    kind, first, second = tree
    module: nn.Module
    if kind == "linear":
        module = nn.Linear(first, second)
    elif kind == "attention":
        module = nn.MultiheadAttention(first, 1)
    elif kind == "relu":
        module = nn.ReLU()
    else:
        children = [grow(child, tagged) for child in second]
        if kind == "holder":
            module = Holder(first, children)
        elif kind == "dict":
            module = nn.ModuleDict({f"key{index}": child for index, child in enumerate(children)})
        else:
            module = {"sequential": nn.Sequential, "list": nn.ModuleList}[kind](
                *(children if kind == "sequential" else [children])
            )
    if (config := next(tagged)) is not None:
        module.wrapper_config = config
    return module


POLICIES: dict[str, Callable[[Any, int], Any]] = {
    "default": lambda library, limit: functools.partial(library.default_auto_wrap_policy, min_num_params=limit),
    "root": lambda library, limit: functools.partial(
        library.default_auto_wrap_policy, min_num_params=limit, skip_params_check_for_root=True
    ),
    "leaves": lambda library, limit: functools.partial(
        library.default_auto_wrap_policy, min_num_params=limit, force_leaf_modules={nn.Sequential, Holder}
    ),
    "excluded": lambda library, limit: functools.partial(
        library.default_auto_wrap_policy, min_num_params=limit, exclude_wrap_modules={nn.Linear, nn.ModuleDict}
    ),
    "nothing excluded": lambda library, limit: functools.partial(
        library.default_auto_wrap_policy, min_num_params=limit, exclude_wrap_modules=set(), force_leaf_modules=set()
    ),
    "config": lambda library, limit: library.config_auto_wrap_policy,
    "always": lambda library, limit: lambda **asked: True,
    "never": lambda library, limit: lambda **asked: False,
    "odd": lambda library, limit: (
        lambda module, recurse, unwrapped_params, module_is_root: (
            recurse or (unwrapped_params % 2 == 1 and not module_is_root)
        )
    ),
}


@needs_fairscale
@settings(max_examples=250)
@given(
    tree=TREES,
    policy=st.sampled_from(sorted(POLICIES)),
    limit=st.integers(0, 80),
    in_context=st.booleans(),
    tags=st.lists(st.sampled_from([None, None, {}, {"b": "module"}, {"a": "module", "c": 0}]), max_size=12),
    overrides=st.sampled_from([{}, {"c": "call"}]),
)
def test_auto_wrap_wraps_what_fairscale_wraps(
    tree: Any, policy: str, limit: int, in_context: bool, tags: list[Any], overrides: dict[str, Any]
) -> None:
    theirs = fairscales_wrap()

    def result(library: Any) -> tuple[Any, bool]:
        model = grow(tree, iter([*tags, *[None] * 100]))
        chosen = POLICIES[policy](library, limit)
        with library.enable_wrap(chosen if in_context else None, wrapper_cls=Wrapper, a="context", b="context"):
            root = library.auto_wrap(model, None if in_context else chosen, **overrides)
        return wrapped_names(root), root is model

    assert result(wrapping) == result(theirs)


@needs_fairscale
def test_recursive_wrap_counts_as_fairscale_does() -> None:
    theirs = fairscales_wrap()

    def result(library: Any, limit: int) -> tuple[Any, int]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2)), nn.Linear(5, 5))
        policy = functools.partial(library.default_auto_wrap_policy, min_num_params=limit)
        with library.enable_wrap(wrapper_cls=Wrapper):
            root, number = library.ConfigAutoWrap.recursive_wrap(model, policy, module_is_root=False)
        return wrapped_names(root), number

    for limit in range(0, 80, 3):
        assert result(wrapping, limit) == result(theirs, limit)


@needs_fairscale
@pytest.mark.parametrize("name", ["enable_wrap", "wrap", "auto_wrap", "default_auto_wrap_policy"])
def test_parameters_and_defaults_are_fairscales(name: str) -> None:
    theirs = fairscales_wrap()

    ours, expected = (inspect.signature(getattr(library, name)).parameters for library in (wrapping, theirs))
    # Theirs takes the class out of the other keywords, and fails when it is not there.
    assert [key for key in ours if key != "wrapper_cls"] == list(expected)
    for key, parameter in expected.items():
        assert ours[key].default == parameter.default
        assert ours[key].kind is parameter.kind
    assert default_auto_wrap_policy.EXCLUDE_WRAP_MODULES == theirs.default_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    assert default_auto_wrap_policy.FORCE_LEAF_MODULES == theirs.default_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]


# -- The page's example


def check_page(tfmr: nn.Module, wrapped: nn.Module) -> None:
    assert wrapped is tfmr
    names = wrapped_names(tfmr)
    layers = {f"{kind}.layers.{index}" for kind in ("encoder", "decoder") for index in range(2)}
    assert names.keys() == layers | {f"{layer}.linear{number}" for layer in layers for number in (1, 2)}
    assert all(options["mixed_precision"] and options["flatten_parameters"] for options in names.values())


def test_the_pages_example_wraps_what_it_says() -> None:
    tfmr = nn.Transformer(num_encoder_layers=2, num_decoder_layers=2)
    group = DummyProcessGroup(rank=0, size=1)
    assert (group.rank(), group.size()) == (0, 1)
    fsdp_params = {"mixed_precision": True, "flatten_parameters": True}
    with enable_wrap(wrapper_cls=Wrapper, process_group=group, **fsdp_params):
        l1 = wrap(nn.Linear(5, 5))
        tfmr_auto_wrapped = auto_wrap(tfmr, min_num_params=1e6)
    assert isinstance(l1, Wrapper)
    assert l1.options == {"process_group": group, **fsdp_params}
    check_page(tfmr, tfmr_auto_wrapped)


def test_options_of_the_policy_also_where_it_is_a_partial_and_the_rest_to_the_wrapper() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(2, 2)))
    partial = functools.partial(default_auto_wrap_policy, min_num_params=10**9, exclude_wrap_modules=set())
    with enable_wrap(partial, wrapper_cls=Wrapper, a=1):
        result = auto_wrap(model, min_num_params=10, b=2)
        assert wrapped_names(result) == {"0": {"a": 1, "b": 2, "wrapper": Wrapper}}
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)]))
    with enable_wrap(wrapper_cls=Wrapper):
        result = auto_wrap(model, partial, min_num_params=0, force_leaf_modules={nn.ModuleList})
    assert wrapped_names(result).keys() == {""}

    def custom(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool, *, only: type) -> bool:
        return recurse or isinstance(module, only)

    with enable_wrap(wrapper_cls=Wrapper):
        assert wrapped_names(auto_wrap(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), custom, only=nn.ReLU)).keys() == {"1"}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("1e8", TypeError, "min_num_params must be a number, not '1e8'"),
        (None, TypeError, "min_num_params must be a number, not None"),
        (math.nan, ValueError, "min_num_params=nan: pass the number of elements from which on modules are wrapped"),
    ],
)
def test_a_size_that_is_none(given: Any, kind: type[Exception], message: str) -> None:
    """NaN is below and above nothing: it would wrap no module, in silence."""
    model = nn.Sequential(nn.Linear(4, 4))
    layer = model[0]
    for policy, options in (
        (None, {"min_num_params": given}),
        (functools.partial(default_auto_wrap_policy, min_num_params=given), {}),
    ):
        with enable_wrap(policy, wrapper_cls=Wrapper), pytest.raises(kind, match=message):
            auto_wrap(model, **options)
    assert model[0] is layer


def test_attributes_of_the_default_policy_are_read_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_auto_wrap_policy, "FORCE_LEAF_MODULES", {nn.Linear})
    monkeypatch.setattr(default_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.Sequential})
    with enable_wrap(wrapper_cls=Wrapper):
        result = auto_wrap(nn.ModuleList([nn.Linear(1, 1), nn.Sequential(nn.Bilinear(1, 1, 1))]), min_num_params=0)
    assert wrapped_names(result).keys() == {"", "1.0"}


@pytest.mark.parametrize("policy", [default_auto_wrap_policy, lambda **asked: True, config_auto_wrap_policy])
def test_an_argument_that_nobody_takes_is_an_error(policy: Any) -> None:
    with enable_wrap(wrapper_cls=StrictWrapper), pytest.raises(TypeError, match=r"got min_params, which neither"):
        auto_wrap(nn.Linear(1, 1), policy, min_params=1e6)
    with enable_wrap(wrapper_cls=functools.partial(StrictWrapper, group=1)):
        assert not isinstance(auto_wrap(nn.Linear(1, 1), lambda **asked: False, group=2), StrictWrapper)


# -- Contexts


def test_outside_of_a_context_nothing_is_wrapped() -> None:
    linear = nn.Linear(2, 2)
    linear.wrapper_config = {"wrapper_cls": Wrapper}
    assert wrap(linear, a=1) is linear
    assert auto_wrap(linear, lambda **asked: True, a=1) is linear


def test_the_call_goes_before_the_module_and_that_before_the_context() -> None:
    linear = nn.Linear(2, 2)
    linear.wrapper_config = config = {"b": "module", "c": "module"}
    with enable_wrap(wrapper_cls=Wrapper, a="context", b="context", c="context"):
        assert wrap(linear, c="call").options == {"a": "context", "b": "module", "c": "call"}
        linear.wrapper_config = {"wrapper_cls": OtherWrapper}
        assert type(wrap(linear)) is OtherWrapper
        assert type(wrap(linear, wrapper_cls=Wrapper)) is Wrapper
    assert config == {"b": "module", "c": "module"}
    linear.wrapper_config = [1]
    with enable_wrap(wrapper_cls=Wrapper), pytest.raises(TypeError, match=r"Linear\.wrapper_config must be a dict"):
        wrap(linear)


def test_what_is_no_module_and_what_is_no_policy() -> None:
    with pytest.raises(TypeError, match="auto_wrap takes a module, not NoneType"):
        auto_wrap(None)  # type: ignore[arg-type]
    for policy in (3, nn.Linear):
        message = rf"auto_wrap_policy={re.escape(repr(policy))}: pass a function \(module, recurse"
        with pytest.raises(TypeError, match=message), enable_wrap(policy, wrapper_cls=Wrapper):  # type: ignore[arg-type]
            pass
        with enable_wrap(wrapper_cls=Wrapper):
            with pytest.raises(TypeError, match="auto_wrap takes a module, not int"):
                auto_wrap(3)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=message):
                auto_wrap(nn.Linear(1, 1), policy)  # type: ignore[arg-type]


def test_a_failed_context_is_off() -> None:
    with pytest.raises(ZeroDivisionError), enable_wrap(wrapper_cls=Wrapper):
        raise ZeroDivisionError
    for arguments in ({}, {"a": 1}):
        with pytest.raises(TypeError, match="wrapper_cls"), enable_wrap(**arguments):
            pass
        with pytest.raises(TypeError, match="wrapper_cls"), ConfigAutoWrap(**arguments):
            pass
    with pytest.raises(TypeError, match="wrapper_cls=None"), enable_wrap(wrapper_cls=None):  # type: ignore[arg-type]
        pass
    linear = nn.Linear(1, 1)
    assert wrap(linear) is linear
    with enable_wrap(wrapper_cls=Wrapper):
        assert isinstance(wrap(linear), Wrapper)


def test_a_context_inside_of_a_context_is_refused_and_leaves_the_outer_one() -> None:
    with enable_wrap(wrapper_cls=Wrapper, a=1):
        with pytest.raises(NotImplementedError, match="inside of enable_wrap"), enable_wrap(wrapper_cls=OtherWrapper):
            pass
        result = wrap(nn.Linear(1, 1))
        assert type(result) is Wrapper
        assert result.options == {"a": 1}


def test_one_context_object_serves_twice_and_decorates() -> None:
    context, options = ConfigAutoWrap(wrapper_cls=Wrapper, a=1), {"wrapper_cls": Wrapper, "a": 1}
    for _ in range(2):
        with context:
            assert wrap(nn.ReLU()).options == {"a": 1}
        ConfigAutoWrap.enable_autowrap_context(None, options)
        assert ConfigAutoWrap.auto_wrap_policy is default_auto_wrap_policy
        ConfigAutoWrap.disable_autowrap_context()
    assert options == {"wrapper_cls": Wrapper, "a": 1}

    @enable_wrap(wrapper_cls=Wrapper)
    def make() -> nn.Module:
        return wrap(nn.ReLU())

    assert isinstance(make(), Wrapper)
    assert isinstance(make(), Wrapper)


def test_modules_that_wrap_their_own_children() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = wrap(nn.Linear(2, 3), a=1), nn.Linear(3, 2)

    assert wrapped_names(Model()) == {}
    with enable_wrap(wrapper_cls=Wrapper, b=2):
        model = wrap(Model())
        assert wrapped_names(model) == {
            "": {"b": 2, "wrapper": Wrapper},
            "first": {"a": 1, "b": 2, "wrapper": Wrapper},
        }
        with pytest.raises(ValueError, match="the module itself is wrapped in Wrapper already"):
            auto_wrap(model)
        with pytest.raises(ValueError, match=r"auto_wrap of Model: module 'first' is wrapped in Wrapper already"):
            auto_wrap(model.module)
    with (
        enable_wrap(wrapper_cls=functools.partial(Wrapper, c=3)),
        pytest.raises(ValueError, match="wrapped in Wrapper"),
    ):
        auto_wrap(model)


def test_modules_become_half_before_they_are_wrapped() -> None:
    with enable_wrap(wrapper_cls=Wrapper, move_module_cuda_half=True, a=1):
        result = wrap(nn.Linear(2, 2))
        assert ConfigAutoWrap.move_module_cuda_half
    assert result.options == {"a": 1}
    assert result.module.weight.dtype == torch.float16
    assert result.module.weight.is_cuda == torch.cuda.is_available()
    assert not ConfigAutoWrap.move_module_cuda_half


@on_ranks(1)
def test_functions_wrap_too() -> None:
    model = build("transformer")
    with enable_wrap(lambda module, recurse, **asked: recurse or isinstance(module, Block), wrapper_cls=fully_shard):
        auto_wrap(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
    assert [type(layer).__name__ for layer in model.layers] == ["FSDPBlock"] * 3
    assert not hasattr(model, "unshard")


# -- Parameters and modules in several places


def test_a_module_in_several_places_is_wrapped_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.Linear(2, 2)), shared)
    with enable_wrap(wrapper_cls=Wrapper):
        result = auto_wrap(model, min_num_params=20)
    assert isinstance(result[0], Wrapper)
    assert result[0] is result[1][0] is result[2]
    assert wrapped_names(result).keys() == {"0", "1.0", "2"}
    assert next(iter(result.parameters())) is shared.weight


def test_what_is_left_counts_a_shared_module_once() -> None:
    shared = nn.Linear(4, 4)
    asked = {}

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        asked[type(module), recurse] = unwrapped_params
        return recurse or module is shared

    model = nn.Sequential(nn.ModuleList([shared]), nn.ModuleDict({"a": shared}), nn.Bilinear(1, 1, 1))
    with enable_wrap(policy, wrapper_cls=Wrapper):
        auto_wrap(model)
    assert asked[nn.Sequential, True] == 22
    assert asked[nn.Sequential, False] == 2
    assert asked[nn.ModuleDict, False] == 0


@pytest.mark.parametrize(
    "policy", [lambda **asked: True, functools.partial(default_auto_wrap_policy, min_num_params=9)]
)
def test_tied_modules_stay_with_the_one_that_contains_them(policy: Any) -> None:
    model = nn.ModuleDict({"model": Transformer(layers=1, tied=True), "other": nn.Linear(3, 3)})
    with (
        enable_wrap(policy, wrapper_cls=Wrapper),
        pytest.warns(UserWarning, match=r"ModuleDict\.model\.embed, ModuleDict\.model\.head use parameters") as warned,
    ):
        result = auto_wrap(model)
    names = wrapped_names(result)
    assert {"model", "other", "model.position", "model.layers.0.qkv"} <= names.keys()
    assert not {"model.embed", "model.head"} & names.keys()
    assert warned[0].filename == __file__
    with warnings.catch_warnings(), enable_wrap(policy, wrapper_cls=Wrapper):
        warnings.simplefilter("error")
        auto_wrap(Transformer(layers=1, tied=False))


def test_a_module_inside_of_a_shared_one_need_not_be_left() -> None:
    shared = nn.Sequential(nn.Linear(4, 4))
    model = nn.ModuleList([shared, nn.Sequential(shared), nn.Linear(1, 1)])
    with warnings.catch_warnings(), enable_wrap(wrapper_cls=Wrapper):
        warnings.simplefilter("error")
        auto_wrap(model, min_num_params=15)
    assert wrapped_names(model).keys() == {"0.0", "1.0.0"}
    assert model[0] is model[1][0] is shared


def test_two_modules_with_a_small_one_in_common_stay_with_the_one_that_contains_them() -> None:
    shared = nn.Linear(1, 1)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(nn.Bilinear(4, 4, 4), shared))
    policy = functools.partial(default_auto_wrap_policy, min_num_params=3, force_leaf_modules={nn.Linear, nn.Bilinear})
    with enable_wrap(policy, wrapper_cls=Wrapper), pytest.warns(UserWarning, match=r"Sequential\.0, Sequential\.1"):
        result = auto_wrap(model)
    assert wrapped_names(result).keys() == {""}


def test_parameters_that_a_wrapper_frees_are_free_before_the_next_is_wrapped() -> None:
    alive: list[int] = []
    references: list[weakref.ref[Any]] = []

    class Freeing(nn.Module):
        def __init__(self, module: nn.Linear):
            super().__init__()
            alive.append(sum(reference() is not None for reference in references))
            references.append(weakref.ref(module.weight))
            del module.weight
            self.module = module

    with enable_wrap(wrapper_cls=Freeing):
        auto_wrap(nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4))), min_num_params=9)
    assert alive == [0] * 4


# -- DummyProcessGroup


def test_dummy_process_group() -> None:
    group = DummyProcessGroup(rank=2, size=3)
    assert (group.rank(), group.size()) == (2, 3)
    for rank, size in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="rank must be in range"):
            DummyProcessGroup(rank=rank, size=size)


# -- checkpoint_wrapper


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    number: int


class Everything(nn.Module):
    """Arguments and outputs of many kinds, random numbers, and a count of how often it ran."""

    def __init__(self, kind: str = "tensor"):
        super().__init__()
        self.kind, self.runs = kind, 0
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, scale: Any = None, extra: Any = (), flag: str = "yes") -> Any:
        self.runs += 1
        x = F.dropout(torch.tanh(self.first(x)), 0.4, self.training)
        if scale is not None:
            x = x * scale
        for item in extra:
            x = x + item["bias"]
        y = self.last(x) if flag == "yes" else self.last(-x)
        return {
            "tensor": lambda: y,
            "tuple": lambda: (y, None, flag, y.detach() * 2),
            "dict": lambda: {"y": [y, {"z": y.sum()}], "none": None},
            "dataclass": lambda: Output(y, 3),
            "none": lambda: None,
        }[self.kind]()


def total(output: Any) -> torch.Tensor:
    found = []

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.square().sum())
        elif isinstance(value, Output):
            visit(value.value)
        elif isinstance(value, (dict, list, tuple)):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)

    visit(output)
    return torch.stack(found).sum()


def inputs(**options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    x, scale, bias = (torch.randn(3, size, generator=torch.Generator().manual_seed(size)) for size in (4, 8, 16))
    tensors = [tensor.requires_grad_() for tensor in (scale, bias)]
    return x, {"scale": tensors[0], "extra": [{"bias": tensors[1][:, :8]}, {"bias": 0.5}], **options}


def trained(module: nn.Module, rounds: int = 2) -> dict[str, Any]:
    """Gradients of all that has some, and the output."""
    torch.manual_seed(3)
    x, options = inputs(flag="no")
    outputs = []
    for _ in range(rounds):
        output = module(x, **options)
        total(output).backward()
        outputs.append(output)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"gradients": gradients, "scale": options["scale"].grad, "outputs": outputs, "random": torch.rand(2)}


def assert_same(ours: Any, expected: Any) -> None:
    assert type(ours) is type(expected)
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, expected)
        assert ours.requires_grad == expected.requires_grad
    elif isinstance(ours, Output):
        assert_same(dataclasses.astuple(ours), dataclasses.astuple(expected))
    elif isinstance(ours, dict):
        assert ours.keys() == expected.keys()
        for key in ours:
            assert_same(ours[key], expected[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(expected)
        for a, b in zip(ours, expected, strict=True):
            assert_same(a, b)
    else:
        assert ours == expected


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = make()
    return copy.deepcopy(model), model


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_checkpointed_modules_compute_the_same(kind: str, offload: bool) -> None:
    ours, plain = pair(lambda: Everything(kind))
    assert checkpoint_wrapper(ours, offload_to_cpu=offload) is ours
    assert type(ours) is Everything
    assert_same(trained(ours), trained(plain))
    assert (ours.runs, plain.runs) == (4, 2)
    assert ours.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("norm", [nn.ReLU, lambda: nn.BatchNorm1d(4)])
def test_checkpointed_modules_within_compiled_ones(norm: Any, offload: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), norm(), nn.Dropout(0.5), nn.Linear(4, 4))
    model = nn.Sequential(checkpoint_wrapper(inner, offload_to_cpu=offload), nn.Linear(4, 4))
    found = []
    for one in (copy.deepcopy(model), torch.compile(copy.deepcopy(model), backend="aot_eager")):
        x = torch.ones(3, 4).requires_grad_()
        for seed in range(3):
            torch.manual_seed(seed)
            one(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in one.parameters()), *one.buffers()])
    torch.testing.assert_close(found[0], found[1])


def test_other_outputs() -> None:
    ours, plain = pair(lambda: Everything("dataclass"))
    checkpoint_wrapper(ours)
    torch.manual_seed(0)
    got = ours(inputs()[0])
    torch.manual_seed(0)
    expected = plain(inputs()[0])
    assert isinstance(got, Output)
    assert got.number == 3
    assert torch.equal(got.value, expected.value)
    assert checkpoint_wrapper(Everything("none"))(inputs()[0]) is None


def test_no_gradients_where_there_would_be_none() -> None:
    module = checkpoint_wrapper(Everything()).requires_grad_(False)
    assert not module(inputs()[0]).requires_grad
    assert module(inputs()[0].requires_grad_()).requires_grad
    module = checkpoint_wrapper(Everything())
    with torch.no_grad():
        assert not module(inputs()[0]).requires_grad
    module.eval()
    (gradient,) = torch.autograd.grad(module(x := inputs()[0].requires_grad_()).sum(), x)
    assert gradient.abs().sum() > 0


def test_containers_that_forward_writes_to_are_the_callers() -> None:
    class Caching(nn.Module):
        def forward(self, x: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
            cache["seen"] = cache["last"] * 2
            return x.exp()

    cache: dict[str, Any] = {"last": torch.ones(2)}
    checkpoint_wrapper(Caching())(torch.zeros(2, requires_grad=True), cache).sum().backward()
    assert torch.equal(cache["seen"], torch.full((2,), 2.0))


def test_offloading_takes_all_inputs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkpoint_wrapper(Everything(), offload_to_cpu=True)
    x, options = inputs()
    bias = options["extra"][0]["bias"]
    sources, moved = [weakref.ref(tensor) for tensor in (x, bias)], []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():  # torch 2.11 keeps an empty tensor of its own with the inputs
            moved.append(tensor.data_ptr())
        return tensor.clone()  # as from a device

    monkeypatch.setattr(torch.Tensor, "cpu", copied)
    output = module(x, **options)
    assert sorted(moved) == sorted(tensor.data_ptr() for tensor in (x, options["scale"], bias))
    del x, bias
    options["extra"].clear()
    assert [reference() for reference in sources] == [None, None]
    output.sum().backward()
    assert options["scale"].grad is not None


def test_activations_are_not_kept() -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            middle = x.exp()
            references.append(weakref.ref(middle))
            return middle.sin()

    source = torch.randn(5, requires_grad=True)
    plain = Wide()(source)
    output = checkpoint_wrapper(Wide())(source)
    assert [reference() is None for reference in references] == [False, True]
    (output + plain).sum().backward()


def test_autocast_is_the_same_in_backward() -> None:
    dtypes: list[torch.dtype] = []

    class Recording(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            dtypes.append(y.dtype)
            return y.tanh()

    module = checkpoint_wrapper(Recording(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(torch.randn(2, 3)).sum()
    loss.backward()
    assert dtypes == [torch.bfloat16] * 2


@pytest.mark.parametrize("norm", ["batch", "cumulative", "instance"])
@pytest.mark.parametrize("nested", [False, True])
def test_statistics_are_counted_once(norm: str, nested: bool) -> None:
    make = {
        "batch": lambda: nn.BatchNorm1d(4),
        "cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
        "instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    }[norm]
    ours, plain = pair(lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.Sequential(make(), nn.Tanh()), make()))
    checkpoint_wrapper(ours)
    if nested:
        checkpoint_wrapper(ours[1])
    for step in range(6):
        x = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(step))
        for module in (ours, plain):
            module.train(step != 4)
            with torch.set_grad_enabled(step != 2):
                output = module(x)
            if step not in (2, 3):  # a batch without backward counts too
                output.square().sum().backward()
    assert_same(dict(ours.state_dict()), dict(plain.state_dict()))
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@needs_fairscale
def test_like_fairscales_checkpoint_wrapper() -> None:
    from fairscale.nn.checkpoint import checkpoint_wrapper as theirs

    ours, other = pair(ConvNet)
    for model, verb in ((ours, checkpoint_wrapper), (other, theirs)):
        for layer in model.layers:
            verb(layer)
        for step in range(3):
            model(inputs_for(model, step)).square().sum().backward()
    assert_same(dict(ours.state_dict()), dict(other.state_dict()))
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in other.parameters()])


def test_copies_and_pickles_checkpoint_themselves() -> None:
    original = checkpoint_wrapper(Everything(), offload_to_cpu=True)
    for make in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        copied = make(original)
        with torch.no_grad():
            copied.first.weight.zero_()
        original.runs = copied.runs = 0
        copied(inputs()[0]).sum().backward()
        assert (original.runs, copied.runs) == (0, 2)
        assert original.first.weight.grad is None
        assert original.first.weight.abs().sum() > 0


def test_wrapping_again_changes_the_offload_alone() -> None:
    module = checkpoint_wrapper(checkpoint_wrapper(Everything()), offload_to_cpu=True)
    module(inputs()[0]).sum().backward()
    assert module.runs == 2
    assert module.forward._offload_to_cpu


def test_a_forward_of_the_instance_runs_inside() -> None:
    module = nn.Linear(2, 2)
    calls = []

    def patched(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp()

    module.forward = patched  # type: ignore[method-assign]
    x = torch.ones(2, requires_grad=True)
    checkpoint_wrapper(module)(x).sum().backward()
    assert len(calls) == 2
    assert torch.equal(x.grad, x.exp())


def test_the_signature_is_that_of_forward() -> None:
    assert inspect.signature(checkpoint_wrapper(Everything()).forward) == inspect.signature(Everything().forward)


def test_modules_are_freed() -> None:
    gc.disable()
    try:
        module = checkpoint_wrapper(Everything())
        module(inputs()[0]).sum().backward()
        reference, forward = weakref.ref(module), module.forward
        del module
        assert reference() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="keep the module"):
        forward(inputs()[0])


def test_only_modules_are_checkpointed() -> None:
    with pytest.raises(TypeError, match="takes a module, not function"):
        checkpoint_wrapper(total)  # type: ignore[arg-type]


@on_ranks(2, where=["inside", "around", "both"], name=["transformer", "conv"])
def test_checkpointing_and_sharding(where: str, name: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank = mesh.get_local_rank()
    ours, plain = build(name), build(name)
    expected = DistributedDataParallel(plain, broadcast_buffers=False)
    for layer in ours.layers:
        if where in ("inside", "both"):
            checkpoint_wrapper(layer)
        fully_shard(layer, mesh=mesh)
        if where == "around":
            checkpoint_wrapper(layer)
    fully_shard(ours, mesh=mesh)
    if where == "both":
        checkpoint_wrapper(ours, offload_to_cpu=True)
    for step in range(3):
        x = inputs_for(plain, 2 * step + rank)
        losses = [model(x).square().mean() for model in (ours, expected)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for (key, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=lambda m, key=key: f"{key}: {m}")
    for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
def test_auto_wrapped_and_checkpointed_models_train_as_with_ddp() -> None:
    """Embedding and head are tied, some layers checkpointed inside of their instance, some around it."""
    ours, plain = Transformer(tied=True), Transformer(tied=True)
    plain.load_state_dict(ours.state_dict())
    checkpoint_wrapper(ours.layers[0])
    with enable_wrap(wrapper_cls=FSDP), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = auto_wrap(ours, min_num_params=300, skip_params_check_for_root=True)
    assert isinstance(ours, FSDP)
    assert isinstance(ours.layers[1], FSDP)
    checkpoint_wrapper(ours.layers[1], offload_to_cpu=True)
    expected = DistributedDataParallel(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, plain)]
    for step in range(3):
        x = inputs_for(plain, 2 * step + torch.distributed.get_rank())
        losses = []
        for model, optimizer in zip((ours, expected), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}")
