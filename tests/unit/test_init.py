"""`init_on_meta` records what constructors do; `materialize` does it: values, random streams, memory, errors."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, skip_init

from shardwise import fully_shard
from shardwise.core.root import unit_of
from shardwise.init import init_on_meta, materialize
from shardwise.init.context import MARK, MARKS

from ..models import ConvNet, Transformer, wrap
from ..ranks.test_init import Custom, Layers, tied

Mesh = Callable[..., DeviceMesh]
Make = Callable[[], nn.Module]


def built(make: Make, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def built_aside(make: Make, seed: int) -> nn.Module:
    """As `built`, and the program's random numbers go on as before."""
    with torch.random.fork_rng(devices=[]):
        return built(make, seed)


def on_meta(make: Make, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    with init_on_meta():
        return make()


def assert_same(model: nn.Module, truth: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(m, kind)(remove_duplicate=False)) for m in (model, truth))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert type(ours[name]) is type(value), name
            assert ours[name].dtype == value.dtype, name
            assert ours[name].stride() == value.stride(), name
            assert ours[name].requires_grad == value.requires_grad, name
            assert torch.equal(ours[name], value), f"{name} differs"


def assert_recorded(make: Make) -> nn.Module:
    """Without a seed and with one, before and after which the program's own random numbers go on as they should."""
    truth = built(make)
    after = torch.get_rng_state()
    model = on_meta(make)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert_same(materialize(model), truth)
    assert torch.equal(torch.get_rng_state(), after)
    other = on_meta(make, seed=8)
    assert_same(materialize(other, seed=3), truth)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(8).get_state())
    return model


class Built(nn.Module):
    """A module whose constructor is a function."""

    def __init__(self, build: Callable[[Any], None]) -> None:
        super().__init__()
        build(self)


# -- Constructors


def initializers(m: Any) -> None:
    m.legacy = nn.Parameter(torch.Tensor(4, 5))
    nn.init.orthogonal_(m.legacy, 0.5)
    m.scaled = nn.Parameter(torch.randn(3, 40) * 0.02)
    m.constant = nn.Parameter(torch.tensor([1.0, 2.0]))
    m.counts = nn.Parameter(torch.arange(6), requires_grad=False)
    m.truncated, m.narrow = nn.Parameter(torch.empty(70, 9)), nn.Parameter(torch.empty(6, 6))
    nn.init.trunc_normal_(m.truncated, std=0.02)
    nn.init.trunc_normal_(m.narrow, a=3.0, b=3.1)
    m.sparse, m.eye, m.dirac = (nn.Parameter(torch.empty(*shape)) for shape in ((5, 7), (4, 4), (2, 3, 3)))
    nn.init.sparse_(m.sparse, 0.4)
    nn.init.eye_(m.eye)
    nn.init.dirac_(m.dirac)
    m.twice = nn.Parameter(torch.empty(20, 3))
    nn.init.kaiming_normal_(m.twice)
    nn.init.xavier_uniform_(m.twice)
    nn.init.normal_(m.twice[3:5], 7)
    m.twice.data[1].mul_(torch.rand(3))


def between_parameters(m: Any) -> None:
    m.a, m.b = nn.Linear(5, 5), nn.Linear(5, 5)
    both = torch.randn(6, 4)
    m.queries, m.keys = (nn.Parameter(part) for part in both.chunk(2))
    m.own = nn.Parameter(both[1].clone())
    m.transposed = nn.Parameter(torch.randn(3, 4).t())
    m.a.weight.data.copy_(m.b.weight @ m.b.weight.t())
    m.b.weight.data.copy_(m.a.weight.data)
    m.copied = copy.deepcopy(m.a)
    m.copied.bias.data = m.copied.bias.data * 2
    m.tied = nn.Linear(5, 5)
    m.tied.weight = m.a.weight


def buffers(m: Any) -> None:
    m.register_buffer("noise", torch.randn(4))
    m.first = nn.Linear(3, 3)
    m.register_buffer("table", torch.outer(torch.arange(3.0), 1.0 / 10 ** torch.arange(0, 4, 2)), persistent=False)
    m.second_name = m.table
    m.register_buffer("mean", m.first.weight.detach().mean(0))
    m.norm = nn.BatchNorm1d(3)
    m.mask = torch.ones(3, 3).triu()
    m.rates = [x.item() for x in torch.linspace(0, 1, 4)]
    m.last = nn.Parameter(torch.rand(2))


def generators(m: Any) -> None:
    own = torch.Generator().manual_seed(11)
    m.a = nn.Parameter(torch.randn(5, generator=own))
    m.b = nn.Parameter(torch.rand(5))
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        torch.manual_seed(17)
        m.c = nn.Parameter(torch.randn(5))
    m.d = nn.Parameter(torch.randn(5, generator=own))
    m.e = nn.Parameter(torch.rand(5))
    torch.set_rng_state(state)
    m.f = nn.Parameter(torch.rand(5))
    m.g = nn.Parameter(torch.bernoulli(torch.full((9,), 0.5)) + torch.normal(torch.zeros(9), torch.ones(9)))
    torch.multinomial(torch.rand(5), 3)
    chosen = torch.multinomial(torch.rand(3, 7), 4)
    m.h = nn.Parameter(
        torch.zeros(3, 7).scatter_(1, chosen, 1.0) * torch.multinomial(torch.rand(7), 7, replacement=True)
    )


def generators_in_one_state(m: Any) -> None:
    # The program's generator starts from 3, or from 8.
    first, second, third = (torch.Generator().manual_seed(seed) for seed in (3, 8, 8))
    m.a, m.b = nn.Parameter(torch.randn(17, generator=first)), nn.Parameter(torch.rand(3))
    m.c, m.d = nn.Parameter(torch.randn(17, generator=second)), nn.Parameter(torch.rand(3, generator=third))
    m.e, m.f = nn.Parameter(torch.rand(2, generator=second)), nn.Parameter(torch.rand(2, generator=third))
    copied = second.clone_state()
    m.g, m.h = nn.Parameter(torch.rand(5, generator=copied)), nn.Parameter(torch.randn(20, generator=second))
    m.i, m.j = nn.Parameter(torch.rand(5, generator=copied)), nn.Parameter(torch.rand(3))


def copies_of_the_generator(m: Any) -> None:
    own = torch.Generator()
    m.a = nn.Linear(2, 2)
    own.set_state(torch.get_rng_state())
    m.b, m.c, m.d = nn.Parameter(torch.rand(3, generator=own)), nn.Linear(2, 2), nn.Linear(2, 2)


@torch.no_grad()
def onto_themselves(m: Any) -> None:
    m.a, m.b = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    m.b.weight = m.a.weight
    m.b.weight.copy_(m.a.weight)
    m.scale, m.chances = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(30))
    m.scale.fill_(m.scale)
    m.chances.bernoulli_(m.chances)


@torch.no_grad()
def shared_elements(m: Any) -> None:
    m.row, m.failed = nn.Parameter(torch.empty(1, 3)), ""
    m.row.expand(4, 3).fill_(2)
    try:
        m.row.expand(4, 3).add_(1)
    except RuntimeError as error:
        m.failed = str(error)
        m.row.add_(5)


def deep_copies(m: Any) -> None:
    m.original = nn.Linear(2, 2)
    table = torch.randn(4, 3)
    m.original.table, m.original.row, m.original.turned = nn.Buffer(table), nn.Buffer(table[1]), nn.Buffer(table.t())
    m.original.table.axes = ["rows"]
    m.original.bias.grad = torch.ones(2)
    m.copied = copy.deepcopy(m.original)
    m.copied.row.fill_(7)
    m.copied.table.axes.append("columns")
    m.axes = [*m.original.table.axes, *m.copied.table.axes]


def dtypes(m: Any) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    m.a = nn.Linear(3, 20)
    m.ratio = nn.Parameter(torch.arange(5) / 3)
    torch.set_default_dtype(before)
    m.b = nn.Linear(3, 20).to(torch.float64).half()
    m.c = nn.Parameter(torch.randn(4).to("cpu").requires_grad_(False))
    m.c.data.to("cpu").mul_(2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        m.d = nn.Parameter(m.b.weight.float() @ torch.randn(3, 2))
    with torch.inference_mode():
        table = torch.randn(3)
    m.e = nn.Parameter(table.clone() * 2)


def ways_around_operators(m: Any) -> None:
    m.random = nn.Parameter(torch.rand(3))
    m.a = nn.Parameter(torch.zeros(2, 3))
    m.a.data.numpy()[1] = 7
    m.b = nn.Parameter(torch.from_numpy(np.arange(3.0)))
    staging = np.zeros(3, dtype=np.float32)
    m.c, m.d = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for parameter, value in ((m.c, 1.0), (m.d, 2.0)):
        staging[:] = value
        parameter.data.copy_(torch.from_numpy(staging))
    reused = torch.tensor(np.full(3, 5.0))
    m.e = nn.Parameter(torch.empty(3).copy_(reused))
    reused.mul_(2)
    m.f = nn.Parameter(torch.tensor([torch.arange(3)[1], 4.0]))
    m.g = pickle.loads(pickle.dumps(torch.arange(3.0)))
    m.p = nn.init.normal_(nn.Parameter(torch.tensor([1.0, 2.0])))
    m.q = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    m.q.data[0] += torch.rand(2)
    m.h = nn.Parameter(torch.empty(5).set_(torch.arange(5.0)).resize_(2, 2))
    m.i = nn.Parameter(torch.add(torch.arange(3.0), 1, out=torch.empty(0)))
    m.j = nn.Parameter(torch.arange(4.0)[torch.arange(4) > 1])
    m.k = nn.Parameter(torch.arange(4.0))
    m.k.data[m.k > 2] = 9
    m.text = f"{torch.arange(3)} {torch.arange(2.0)[1]:.2f} {torch.arange(2).tolist()} {torch.arange(2)!r}"
    m.addresses = len({parameter.data_ptr() for parameter in m.parameters()})
    m.nothing = nn.Parameter(torch.empty(0, 3))
    m.l = torch.tensor([1.0, 2.0])
    array = m.l.numpy()
    m.l.fill_(4.0)
    m.seen = array.tolist()
    m.n = nn.Parameter(torch.arange(3.0).apply_(lambda value: value + 1))
    m.o = nn.Parameter(torch.ones(3).map_(torch.arange(3.0), lambda mine, other: mine - other))


def conjugates(m: Any) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    m.conjugate, m.negative = nn.Parameter(numbers.conj()), nn.Parameter(numbers.conj().imag)
    m.adjoint = nn.Parameter(torch.full((2, 3), 2 + 1j).mH)
    m.random = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
    m.mean = nn.Buffer(torch.randn(3, dtype=torch.complex64).conj())


def loads(m: Any) -> None:
    m.a, m.b, m.c = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    m.a.load_state_dict({"weight": torch.full((2, 3), 4.0), "bias": torch.arange(2.0)})
    m.b.load_state_dict(m.c.state_dict())


def dry_run(m: Any) -> None:
    m.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    m.head = nn.Linear(m.body(torch.randn(2, 3, 6, 6)).shape[1], 2)
    m.tail = nn.Linear(m.body.eval()(torch.randn(2, 3, 6, 6)).shape[1], 2)


def parametrized(m: Any) -> None:
    m.a = parametrizations.weight_norm(nn.Linear(3, 4))
    m.b = parametrizations.spectral_norm(nn.Linear(3, 4))


def by_index(m: Any) -> None:
    m.rows, m.columns = nn.Parameter(torch.randn(5, 3)[[4, 0]]), nn.Parameter(torch.randn(3, 5)[:, [1, 3]])
    m.shuffled = nn.Parameter(torch.arange(7.0)[torch.randperm(7)])
    m.turned = nn.Parameter(torch.randn(3, 5).t()[torch.tensor([3, 1])])
    m.pairs = nn.Parameter(torch.randn(4, 2, 3)[torch.randint(4, (2, 2)), :, torch.tensor([0, 2])])
    m.empty = nn.Parameter(torch.randn(4, 3)[torch.tensor([], dtype=torch.long)])
    with torch.no_grad():
        m.rows[[0, 1]] = m.rows[[1, 0]]


def in_inference_mode(m: Any) -> None:
    with torch.inference_mode():
        table = torch.randn(4, 3)
        turned, widened, spectrum = table.t().reshape(12), table.double(), torch.fft.rfft(table.half().float()).abs()
    m.narrowed, m.turned, m.widened = nn.Parameter(table.half()), nn.Parameter(turned + 1), nn.Parameter(widened * 2)
    m.spectrum = nn.Buffer(spectrum + 1)
    m.dense, m.rows = nn.Buffer(table.t().contiguous().clone()), nn.Buffer(table.t().flatten().clone())


CONSTRUCTORS = [
    *(initializers, between_parameters, buffers, generators, generators_in_one_state, deep_copies, dtypes),
    *(ways_around_operators, conjugates, loads, copies_of_the_generator, onto_themselves, shared_elements),
    *(by_index, in_inference_mode),
]


@pytest.mark.parametrize("build", [*CONSTRUCTORS, dry_run, parametrized], ids=lambda build: build.__name__)
def test_constructors(build: Callable[[Any], None]) -> None:
    def make() -> nn.Module:
        return Built(build)

    model, truth = assert_recorded(make), built(make)
    for name, value in truth.__dict__.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(model.__dict__[name], value), name
        elif isinstance(value, (list, str, int, float)):
            assert model.__dict__[name] == value, name


@pytest.mark.parametrize(
    "make",
    [
        Layers,
        Custom,
        tied,
        ConvNet,
        lambda: nn.Transformer(12, 3, 2, 2, 20),
        lambda: nn.Sequential(nn.GRU(3, 4), nn.RNNCell(3, 4), nn.EmbeddingBag(5, 3), nn.Bilinear(2, 3, 4)),
        lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.ConvTranspose3d(2, 4, 2), nn.RMSNorm(3)),
    ],
)
def test_layers_of_torch(make: Make) -> None:
    assert_recorded(make)


def test_ties_and_shared_memory_are_as_constructed() -> None:
    model = materialize(on_meta(lambda: Built(between_parameters)))
    assert model.tied.weight is model.a.weight
    assert model.queries.untyped_storage().data_ptr() == model.keys.untyped_storage().data_ptr()
    assert model.second_name is model.table if hasattr(model, "table") else True
    other = on_meta(lambda: Built(buffers))
    assert other.second_name is other.table


def test_the_constructor_sees_what_it_always_sees() -> None:
    seen: dict[str, Any] = {}

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(2, 3))
            seen.update(device=self.a.device.type, meta=self.a.is_meta, kind=type(self.a), grad=self.a.requires_grad)
            seen["like"] = torch.zeros(2, device=self.a.device).device.type
            seen["alias"] = self.a.to("cpu") is self.a

    on_meta(Looks)
    assert seen == {"device": "cpu", "meta": False, "kind": nn.Parameter, "grad": True, "like": "cpu", "alias": True}


# -- Streams of random numbers


def test_contexts_continue_each_other() -> None:
    torch.manual_seed(3)
    truth = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    following = torch.rand(3)
    torch.manual_seed(3)
    with init_on_meta():
        probe = nn.Linear(3, 3)
    with init_on_meta():
        second = nn.Linear(3, 3)
    assert_same(materialize(second), truth[1])
    assert torch.equal(torch.rand(3), following)
    assert_same(materialize(probe), truth[0])
    model = nn.Sequential()
    for _ in range(2):
        with init_on_meta():
            model.append(nn.Linear(3, 3))
    assert_same(materialize(model, seed=3), truth)


def test_a_context_follows_one_whose_model_is_gone() -> None:
    torch.manual_seed(3)
    nn.Linear(3, 3)
    truth = nn.Linear(3, 3)
    torch.manual_seed(3)
    with init_on_meta():
        nn.Linear(3, 3)
    with init_on_meta():
        model = nn.Linear(3, 3)
    assert_same(materialize(model), truth)


def test_a_seed_is_for_what_is_materialized_whatever_was_recorded_before() -> None:
    make = lambda: Built(buffers)  # noqa: E731
    truth, state = built(make), torch.Generator().manual_seed(8).get_state()
    first = on_meta(lambda: nn.Linear(3, 3), seed=8)
    with init_on_meta():
        second = make()
    assert_same(materialize(second, seed=3), truth)
    with init_on_meta():
        third = Transformer()
    assert_same(materialize(third, seed=3, fast=True), materialize(on_meta(Transformer), seed=3, fast=True))
    with init_on_meta():
        looks = nn.Linear(3, 3)
        assert looks.weight.sum().item()
    with pytest.raises(RuntimeError, match="used values of random tensors"):
        materialize(looks, seed=8)
    seeding = on_meta(lambda: [torch.manual_seed(17), torch.rand(3)], seed=8)
    with init_on_meta():
        fourth = make()
    assert_same(materialize(fourth, seed=3), truth)
    assert seeding
    torch.set_rng_state(state)
    with init_on_meta():
        last = nn.Linear(3, 3)
    assert_same(materialize(last), first := materialize(first))
    assert_same(first, built(lambda: nn.Linear(3, 3), seed=8))


def test_each_of_two_models_has_its_own_seed() -> None:
    state = torch.manual_seed(8).get_state()
    for is_reversed in (False, True):
        with init_on_meta():
            pair = [nn.Linear(3, 3)]
        with init_on_meta():
            pair.append(nn.Linear(3, 3))
        for seed in (1, 0) if is_reversed else (0, 1):
            assert_same(materialize(pair[seed], seed=seed), built_aside(lambda: nn.Linear(3, 3), seed))
        assert torch.equal(torch.get_rng_state(), state)


def test_seeding_alike_gives_the_same_again() -> None:
    first, second = on_meta(lambda: nn.Linear(3, 3)), on_meta(lambda: nn.Linear(3, 3))
    assert_same(materialize(first), materialize(second))
    both = nn.Sequential(on_meta(lambda: nn.Linear(3, 3)), on_meta(lambda: nn.Linear(3, 3), seed=4))
    materialize(both, seed=3)
    assert_same(both[0], first)
    assert not torch.equal(both[0].weight, both[1].weight)


def test_what_the_program_draws_meanwhile_is_its_own() -> None:
    model = on_meta(tied)
    torch.manual_seed(21)
    torch.rand(2)
    expected = torch.get_rng_state()
    materialize(model)
    assert torch.equal(torch.get_rng_state(), expected)
    assert_same(model, built(tied))


def test_no_draws_leave_generators_alone() -> None:
    state = torch.manual_seed(3).get_state()
    with init_on_meta():
        model = nn.LayerNorm(3)
    assert torch.equal(torch.get_rng_state(), state)
    materialize(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_waits_for_materialize_where_no_parameters_were_made() -> None:
    """What it is called for has no history that would tell of the draws."""

    def build(m: Any) -> None:
        m.noise, m.own = nn.Buffer(torch.randn(3)), torch.Generator().manual_seed(3)
        m.other = nn.Buffer(torch.rand(2, generator=m.own))

    truth: Any = built(lambda: Built(build))
    after = torch.get_rng_state()
    model: Any = on_meta(lambda: Built(build))
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(model.own.get_state(), truth.own.get_state())
    assert_same(materialize(model), truth)
    assert torch.equal(torch.get_rng_state(), after)
    with init_on_meta():
        first = nn.Linear(2, 2)
    with init_on_meta():
        model = Built(build)  # comes after what waits still
    materialize(first)
    torch.set_rng_state(after)
    assert_same(first, nn.Linear(2, 2))
    assert_same(model, Built(build))


def test_an_operator_that_fails_names_the_parameter() -> None:
    def build(m: Any) -> None:
        m.odd = nn.Parameter(nn.init.orthogonal_(torch.empty(3, 3).bfloat16()))

    model = on_meta(lambda: Built(build))
    with pytest.raises(NotImplementedError) as caught:
        materialize(model)
    assert "in linalg_qr, by which the constructor gave 'odd' its values" in caught.value.__notes__[0]


@pytest.mark.parametrize("initialize", [nn.init.normal_, nn.init.trunc_normal_])
def test_writes_that_torch_refuses_fail_in_the_constructor(initialize: Any) -> None:
    def build(m: Any) -> None:
        m.odd = nn.Parameter(torch.randn(3).expand(2, 3))
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            initialize(m.odd)

    assert_same(materialize(on_meta(lambda: Built(build))), built(lambda: Built(build)))


def test_a_generator_that_was_passed_moves_on() -> None:
    truth, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    values = torch.randn(7, generator=truth)
    with init_on_meta():
        model = Built(lambda m: m.register_parameter("a", nn.Parameter(torch.randn(7, generator=own))))
    materialize(model, seed=1)
    assert torch.equal(model.a, values)
    assert torch.equal(own.get_state(), truth.get_state())


def test_the_initial_seed_is_that_of_the_program() -> None:
    def build(m: Any) -> None:
        m.a = nn.Parameter(torch.randn(3))
        m.b = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(torch.initial_seed() + 1)))

    assert_same(materialize(on_meta(lambda: Built(build))), built(lambda: Built(build)))


def branches(m: Any) -> None:
    m.a = nn.Parameter(torch.randn(3))
    m.b = nn.Parameter(torch.zeros(int(1 + (m.a > 0).sum())))
    m.c = nn.Parameter(torch.randn(3) * m.a.abs().max().item())


def test_values_of_a_dry_run_in_evaluation() -> None:
    def build(m: Any) -> None:
        dry_run(m)
        m.scale = nn.Parameter(torch.full((2,), m.body.eval()(torch.ones(2, 3, 6, 6)).std().item()))

    assert_same(materialize(on_meta(lambda: Built(build))), built(lambda: Built(build)))


def test_values_that_are_used_fix_the_seed() -> None:
    def make() -> nn.Module:
        return Built(branches)

    assert_same(materialize(on_meta(make)), built(make))
    assert_same(materialize(on_meta(make), seed=3), built(make))
    model = on_meta(make)
    with pytest.raises(RuntimeError, match=r"seed=4\): the constructor used values of random tensors.*manual_seed"):
        materialize(model, seed=4)
    assert model.a.is_meta
    assert_same(materialize(model), built(make))


@torch.library.custom_op("shardwise_tests::noise", mutates_args=())
def noise(like: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.randn(like.shape) * scale if scale else torch.zeros(like.shape)


def test_operators_that_torch_does_not_know_may_draw() -> None:
    def build(m: Any, scale: float = 2.0) -> None:
        m.a = nn.Parameter(torch.rand(3))
        m.b = nn.Parameter(noise(torch.zeros(3), scale))
        m.c = nn.Parameter(torch.rand(3))

    def make() -> nn.Module:
        return Built(build)

    truth, following = built(make), torch.rand(3)
    assert_same(materialize(on_meta(make)), truth)
    assert torch.equal(torch.rand(3), following)
    with pytest.raises(RuntimeError, match="used values of random tensors"):
        materialize(on_meta(make), seed=4)
    assert_recorded(lambda: Built(lambda m: build(m, 0.0)))


@pytest.mark.parametrize("draws_more", [False, True])
def test_values_that_were_drawn_before_all_else_fix_the_seed_too(draws_more: bool) -> None:
    def build(m: Any) -> None:
        m.a = nn.Parameter(torch.poisson(torch.full((6,), 9.0)))  # draws as many numbers as the values tell
        m.b = nn.Parameter(torch.rand(3) if draws_more else torch.ones(3))

    def make() -> nn.Module:
        return Built(build)

    truth, following = built(make), torch.rand(3)
    assert_same(materialize(on_meta(make)), truth)
    assert torch.equal(torch.rand(3), following)
    assert_same(materialize(on_meta(make), seed=3), truth)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())
    with pytest.raises(RuntimeError, match="used values of random tensors"):
        materialize(on_meta(make), seed=4)


def test_values_that_were_drawn_from_a_stream_of_the_constructor() -> None:
    def build(m: Any) -> None:
        torch.manual_seed(5)
        m.a = nn.Parameter(torch.rand(3))
        m.b = torch.poisson(torch.full((6,), 9.0))

    truth, following = built(lambda: Built(build)), torch.rand(3)
    assert_same(materialize(on_meta(lambda: Built(build))), truth)
    assert torch.equal(torch.rand(3), following)


def test_random_buffers_that_are_views_follow_the_seed() -> None:
    @torch.no_grad()
    def build(m: Any) -> None:
        m.a = nn.Parameter(torch.rand(3))
        m.noise = nn.Buffer(nn.Parameter(torch.rand(4, 3))[1:])

    assert_same(materialize(on_meta(lambda: Built(build), seed=8), seed=3), built(lambda: Built(build)))


def test_random_buffers_follow_the_seed_unless_loaded() -> None:
    def make() -> nn.Module:
        return Built(buffers)

    model = on_meta(make, seed=8)
    assert torch.equal(model.noise, built(make, seed=8).noise)
    with torch.no_grad():
        model.mean.fill_(2.0)
    materialize(model, seed=3)
    assert torch.equal(model.noise, built(make).noise)
    assert torch.equal(model.mean, torch.full((3,), 2.0))


def test_random_buffers_follow_the_seed_wherever_they_are() -> None:
    def shared(m: Any) -> None:
        table = torch.rand(4, 2)
        m.a, m.b = nn.Buffer(table[:2]), nn.Buffer(table[2:])
        m.wide = nn.Buffer(torch.rand(1, 3).expand(2, 3))
        m.weight = nn.Parameter(torch.rand(4))
        m.start = nn.Buffer(m.weight.detach()[:2])

    def make() -> nn.Module:
        return Built(shared)

    model = on_meta(make, seed=8)
    copied = copy.deepcopy(model)
    assert_same(materialize(model, seed=3), built(make))
    assert_same(materialize(copied.double(), seed=3), built(make).double())
    assert_same(materialize(on_meta(make, seed=8), seed=3, fast=True), materialize(on_meta(make), fast=True))


def test_a_buffer_in_the_place_of_a_random_one_stays() -> None:
    model = on_meta(lambda: Built(buffers), seed=8)
    model.noise = torch.full((4,), 7.0)
    model.load_state_dict({"mean": torch.full((3,), 2.0)}, strict=False, assign=True)
    materialize(model, seed=3)
    assert torch.equal(model.noise, torch.full((4,), 7.0))
    assert torch.equal(model.mean, torch.full((3,), 2.0))


# -- The context


def test_inference_mode() -> None:
    with torch.inference_mode():
        model = on_meta(lambda: Built(buffers), seed=8)
        assert_same(materialize(model, seed=3), built(lambda: Built(buffers)))


def test_a_default_device_is_not_that_of_initializers() -> None:
    with torch.device("meta"):
        model = materialize(nn.Linear(3, 2), seed=3)
    assert_same(model, built(lambda: nn.Linear(3, 2)))


def test_nested_contexts_are_one() -> None:
    def make() -> nn.Module:
        with init_on_meta():
            first = nn.Linear(3, 3)
        return nn.Sequential(first, nn.Linear(3, 3))

    torch.manual_seed(3)
    truth = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert_same(materialize(on_meta(make)), truth)


def test_an_exception_leaves_real_tensors_and_the_generators() -> None:
    state = torch.manual_seed(3).get_state()
    kept: list[Any] = []

    def fails() -> None:
        with init_on_meta():
            kept.extend([torch.ones(3) * 2, nn.Linear(3, 3)])
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (kept[0] + 1).shape == (3,)
    assert kept[1].weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(materialize(on_meta(tied)), built(tied))


def test_what_existed_before_stays_as_it_is() -> None:
    pretrained = nn.Linear(3, 3)
    weight = pretrained.weight.detach().clone()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = pretrained, nn.Linear(3, 3)
            self.head.weight.data.copy_(pretrained.weight.t().t())

    model = on_meta(Model)
    assert not pretrained.weight.is_meta
    assert model.head.weight.is_meta
    with torch.no_grad():
        pretrained.weight.zero_()
    materialize(model)
    assert torch.equal(model.head.weight, weight)


def test_large_values_are_held_by_reference_and_checked() -> None:
    large = torch.randn(2**19)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(2**19).copy_(large))

    assert torch.equal(materialize(on_meta(Model)).a, large)
    model = on_meta(Model)
    large[7] += 1
    with pytest.raises(RuntimeError, match=r"shape \(524288,\).*changed before materialize"):
        materialize(model)


def test_values_that_the_constructor_itself_changes_later() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            large = torch.tensor(np.ones(2**17))
            self.a = nn.Parameter(torch.empty(2**17).copy_(large))
            large.mul_(3)
            self.b = nn.Parameter(torch.empty(2**17).copy_(large))

    assert_recorded(Model)


def test_memory_that_somebody_has_the_address_of_stays() -> None:
    arrays: list[Any] = []

    def build(m: Any) -> None:
        m.a = torch.tensor([1.0, 2.0])
        arrays.append(m.a.numpy())
        m.a.normal_()
        m.b = nn.Parameter(torch.rand(2))

    model, truth = on_meta(lambda: Built(build)), built(lambda: Built(build))
    assert_same(materialize(model), truth)
    assert torch.equal(model.a, truth.a)
    assert arrays[0].tolist() == model.a.tolist()


def test_writes_without_memory_are_not_lost_in_silence() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    nn.init.ones_(model[1].weight)
    with pytest.raises(RuntimeError, match=r"'1.weight' was written after init_on_meta"):
        materialize(model)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["before sharding", "after it"])
def test_writes_to_what_is_to_be_sharded_are_not_lost_in_silence(fake_mesh: Any, is_sharded: bool) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    if is_sharded:
        fully_shard(model, mesh=fake_mesh(2))
    model[1].reset_parameters()
    if not is_sharded:
        fully_shard(model, mesh=fake_mesh(2))
    with pytest.raises(RuntimeError, match=r"'1.weight' was written after init_on_meta"):
        materialize(model)


def test_conversions_between_context_and_materialize() -> None:
    model = on_meta(tied).to(torch.bfloat16)
    copied = copy.deepcopy(model)
    truth = built(tied).to(torch.bfloat16)
    assert_same(materialize(model), truth)
    assert_same(materialize(copied, seed=3), truth)
    moved = nn.SyncBatchNorm.convert_sync_batchnorm(on_meta(ConvNet))
    assert_same(materialize(moved), nn.SyncBatchNorm.convert_sync_batchnorm(built(ConvNet)))
    twice = on_meta(lambda: nn.Linear(3, 3))
    parametrizations.weight_norm  # noqa: B018
    assert_same(materialize(materialize(twice)), built(lambda: nn.Linear(3, 3)))


def test_parts_of_a_model() -> None:
    model, truth = on_meta(Transformer), built(Transformer)
    materialize(model.layers[1])
    assert_same(model.layers[1], truth.layers[1])
    assert model.layers[0].up.weight.is_meta
    replaced = model.head = nn.Linear(16, 29, bias=False)
    values = replaced.weight.detach().clone()
    materialize(model)
    assert_same(model.layers, truth.layers)
    assert torch.equal(model.head.weight, values)


def test_hooks_of_parameters_stay() -> None:
    """Of parameters that no unit has; those that become shards have hooks of their own, as in FSDP2."""
    seen: list[torch.Tensor] = []
    with init_on_meta():
        model = nn.Linear(3, 2)
        model.weight.register_hook(torch.zeros_like)
        model.bias.register_post_accumulate_grad_hook(seen.append)
    materialize(model)
    model(torch.ones(4, 3)).sum().backward()
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    assert seen == [model.bias]


def test_other_threads_are_not_recorded() -> None:
    with init_on_meta(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(nn.Linear, 3, 3).result()
        own = nn.Linear(3, 3)
    assert (other.weight.is_meta, own.weight.is_meta) == (False, True)
    other(torch.ones(1, 3))


def test_other_threads_make_tuples_meanwhile() -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            tuple(number for number in range(400))

    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(2) as pool:
        at_work = [pool.submit(work) for _ in range(2)]
        sys.setswitchinterval(1e-5)
        try:
            for _ in range(20):
                with init_on_meta():
                    nn.Linear(3, 3)
        finally:
            sys.setswitchinterval(interval)
            is_over.set()
    for one in at_work:
        one.result()  # CPython's SystemError, where a tuple was referred to before it was complete


def test_records_die_with_their_model() -> None:
    gc.collect()
    gc.disable()
    try:
        model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        record = weakref.ref(getattr(model[0].weight, MARK).record)
        materialize(model[0])
        assert MARKS not in model[0].__dict__
        assert not hasattr(model[0].weight, MARK)
        assert record() is not None
        del model
        assert record() is None
    finally:
        gc.enable()


def test_a_model_without_values_can_be_pickled() -> None:
    stored = io.BytesIO()
    torch.save(on_meta(lambda: nn.Linear(3, 3)), stored)
    stored.seek(0)
    model = torch.load(stored, weights_only=False)
    assert_same(materialize(model, seed=3), built(lambda: nn.Linear(3, 3)))


def test_lazy_modules_stay_lazy() -> None:
    model = on_meta(lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))
    materialize(model)
    assert model(torch.ones(2, 5)).shape == (2, 3)


# -- Without history


def meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("make", [Layers, tied, ConvNet, lambda: nn.LSTM(3, 4, 2)])
def test_put_on_meta_by_others(make: Make) -> None:
    truth = built(make)
    after = torch.get_rng_state()
    assert_same(materialize(meta(make), seed=3), truth)
    torch.manual_seed(3)
    assert_same(materialize(meta(make)), truth)
    if make is not tied:  # whose head drew weights that it does not keep
        assert torch.equal(torch.get_rng_state(), after)


def test_memory_format_of_what_others_put_on_meta() -> None:
    model = meta(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    assert_same(materialize(model, seed=3), built(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)))


def test_lazy_modules_beside_what_others_put_on_meta() -> None:
    model = nn.Sequential(nn.LazyLinear(3), meta(lambda: nn.Linear(3, 3)))
    materialize(model, seed=3)
    assert_same(model[1], built(lambda: nn.Linear(3, 3)))
    assert model(torch.ones(2, 5)).shape == (2, 3)


def test_lazy_modules_on_meta_are_named() -> None:
    model = meta(lambda: nn.Sequential(nn.Linear(5, 5), nn.LazyLinear(3)))
    with pytest.raises(ValueError, match=r"'1\.weight' has no shape yet: run the lazy modules"):
        materialize(model)
    model(torch.empty(2, 5, device="meta"))
    assert_same(materialize(model, seed=3), built(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))))


def test_initializers_run_after_the_constructor() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), skip_init(nn.Linear, 3, 3))

    torch.manual_seed(3)
    truth = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert_same(materialize(on_meta(make)), truth)
    assert_same(materialize(on_meta(make, seed=1), seed=3), truth)


class Bare(nn.Module):
    """Initializes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Holder(nn.Module):
    """Its initializer is for what it contains, as that of many models."""

    def __init__(self) -> None:
        super().__init__()
        self.bare, self.linear = Bare(), nn.Linear(3, 3)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.normal_(module.scale)
            nn.init.zeros_(module.shift)
            module.table = torch.arange(3.0)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)


def test_init_weights_of_the_model() -> None:
    assert_same(materialize(meta(Holder), seed=3), built(Holder))


class Alone(nn.Linear):
    """Its initializer takes no module, as ``reset_parameters`` does."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self._init_weights()

    def _init_weights(self, std: float = 0.1) -> None:
        nn.init.normal_(self.weight, std=std)


def test_init_weights_without_a_module() -> None:
    assert_same(materialize(meta(Alone), seed=3), built(Alone))
    assert_same(materialize(meta(lambda: nn.Sequential(Alone(), nn.Linear(3, 3))), seed=3)[0], built(Alone))


class Residual(nn.Module):
    """As a model of transformers whose blocks have no parameters of their own, and scale those of layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)) for _ in range(2)])
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Sequential):
            nn.init.constant_(module[1].weight, 0.5)


def test_init_weights_of_modules_without_parameters() -> None:
    assert_same(materialize(meta(Residual), seed=3), built(Residual))


def test_what_nothing_initializes_is_named() -> None:
    model = nn.Sequential(meta(lambda: nn.Linear(3, 3)), nn.Sequential(meta(Bare)))
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError) as error:
        materialize(model)
    assert "module '1.0' (Bare): parameter 'scale', parameter 'shift', buffer 'table'" in str(error.value)
    assert "Linear" not in str(error.value)
    assert model[0].weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match=r"the root module \(Bare\): parameter 'scale', parameter 'shift'\."):
        materialize(on_meta(Bare))


def test_init_fn_goes_first_and_modules_do_the_rest() -> None:
    called: list[nn.Module] = []

    def init_fn(module: nn.Module) -> None:
        called.append(module)
        if isinstance(module, Bare):
            module.scale.fill_(2.0)
            module.shift.copy_(torch.from_numpy(np.arange(3.0)))
            module.table = torch.arange(3.0)

    model = nn.Sequential(meta(Bare), meta(lambda: nn.Linear(3, 3)), nn.Linear(3, 3))
    real = model[2].weight.detach().clone()
    materialize(model, seed=3, init_fn=init_fn)
    assert called == [model[0], model[1]]
    assert torch.equal(model[0].scale, torch.full((3,), 2.0))
    assert torch.equal(model[0].shift, torch.arange(3.0))
    assert torch.equal(model[0].table, torch.arange(3.0))
    assert_same(model[1], built(lambda: nn.Linear(3, 3)))
    assert torch.equal(model[2].weight, real)


def test_init_fn_in_the_style_of_older_interfaces() -> None:
    def init_fn(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()  # type: ignore[operator]

    make: Make = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # noqa: E731
    assert_same(materialize(meta(make), seed=3, init_fn=init_fn), built(make))


def test_init_fn_that_fails_says_where() -> None:
    def init_fn(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            raise ValueError("no")

    model = meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    with pytest.raises(ValueError) as error:
        materialize(model, init_fn=init_fn)
    assert error.value.__notes__ == ["shardwise: in init_fn of module '1' (LayerNorm), called by materialize"]
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(3, 4), (8, 3), (4, 1), (3,)])
@pytest.mark.parametrize("sharded", [False, True])
def test_initializers_that_change_shapes(fake_mesh: Mesh, shape: tuple[int, ...], sharded: bool) -> None:
    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 3))

        def reset_parameters(self) -> None:
            self.weight = nn.Parameter(torch.randn(*shape))

    model = meta(lambda: nn.Sequential(Reshapes()))
    if sharded:
        fully_shard(model, mesh=fake_mesh(2))
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(4, 3\), and its initializer made it"):
        materialize(model)


def test_initializers_see_unwrapped_modules_and_cannot_reach_values(fake_mesh: Mesh) -> None:
    kinds: list[type] = []

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.loaded = meta(lambda: nn.Linear(4, 4)), nn.Linear(4, 4)

        def reset_parameters(self) -> None:
            for module in (self.inner, self.loaded):
                kinds.append(type(module))
                assert tuple(module.weight.shape) == (4, 4)
                nn.init.constant_(module.weight, 5.0)

    mesh, model = fake_mesh(2), Parent()
    values = model.loaded.weight.detach().clone()
    for module in (model.inner, model.loaded, model):
        fully_shard(module, mesh=mesh)
    materialize(model)
    assert kinds == [nn.Linear, nn.Linear]
    assert torch.equal(model.inner.weight.to_local(), torch.full((2, 4), 5.0))
    assert torch.equal(model.loaded.weight.to_local(), values[:2])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "materialize takes a module, not int"),
        ((nn.Linear(1, 1), {"seed": 1.5}), TypeError, "seed must be an int or None, not 1.5"),
        ((nn.Linear(1, 1), {"seed": True}), TypeError, "seed must be an int or None, not True"),
        ((nn.Linear(1, 1), {"seed": 2**64}), ValueError, "64 bits"),
        ((nn.Linear(1, 1), {"init_fn": 3}), TypeError, "init_fn must be a function of a module, not int"),
        ((nn.Linear(1, 1), {"fast": "no"}), TypeError, "materialize(fast='no'): pass True or False, not str"),
    ],
)
def test_arguments(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    model, options = arguments if len(arguments) == 2 else (*arguments, {})
    with pytest.raises(error, match=re.escape(text)):
        materialize(model, **options)


def test_a_seed_of_numpy() -> None:
    models = []
    for seed in (5, np.int64(5)):
        with init_on_meta():
            model = nn.Linear(3, 4)
        models.append(materialize(model, seed=seed))  # type: ignore[arg-type]
    assert torch.equal(models[0].weight, models[1].weight)


# -- Sharded, on every rank of a fake process group


def sharded_rows(model: nn.Module, rank: int) -> dict[str, tuple[torch.Tensor, int]]:
    """Each parameter's chunk on this rank, and the row that it starts at."""
    rows = {}
    for module in model.modules():
        unit = unit_of(module)
        for group in unit.groups if unit is not None else ():
            for slot in group.slots:
                start = slot.buffer.layout.tensors[slot.index].start(rank)
                for place in slot.places:
                    owner = place.module()
                    name = next(name for name, found in model.named_modules() if found is owner)
                    rows[f"{name}.{place.name}".lstrip(".")] = slot.local, start
    return rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("make", [Custom, tied, Layers])
@pytest.mark.parametrize("fast", [False, True])
def test_every_rank_keeps_its_rows(fake_mesh: Mesh, world_size: int, make: Make, fast: bool) -> None:
    truth = materialize(on_meta(make), fast=True) if fast else built(make)
    expected = dict(truth.named_parameters(remove_duplicate=False))
    for rank in range(world_size):
        model = wrap(on_meta(make), fully_shard, mesh=fake_mesh(world_size, rank=rank))
        materialize(model, fast=fast)
        rows = sharded_rows(model, rank)
        assert rows.keys() == expected.keys()
        for name, (local, start) in rows.items():
            assert torch.equal(local, expected[name][start : start + len(local)]), name
        torch.distributed.destroy_process_group()


PEAK = """
import re, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwise import fully_shard
from shardwise.init import init_on_meta, materialize
from tests.models import Transformer, wrap

def resident(kind):
    return 1024 * int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

def measure(kind, action):
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = action()
    print(kind, resident("VmHWM") - before)
    return result

def build():
    with init_on_meta():
        return Transformer(layers=8, width=1024, vocabulary=1024, length=64)

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
mesh = init_device_mesh("cpu", (4,))
with init_on_meta():
    small = wrap(Transformer(), fully_shard, mesh=mesh)
materialize(small)  # whatever is loaded when first used
model = measure("construction", build)
size = lambda module: sum(4 * parameter.numel() for parameter in module.parameters())
print("model", size(model), "unit", size(model.layers[0]))
wrap(model, fully_shard, mesh=mesh)
measure("peak", lambda: materialize(model, fast=FAST))
print("shards", sum(4 * parameter.to_local().numel() for parameter in model.parameters()))
"""


@pytest.mark.parametrize("fast", [False, True])
def test_peak_memory_of_a_model_of_400_megabytes(fast: bool) -> None:
    """Resident bytes, in a process of its own: the shards and, meanwhile, less than one unit."""
    code = f"FAST = {fast}\n{PEAK}"
    root = Path(__file__).parents[2]
    # So that what is freed is resident no more: the C library would keep up to 30 MiB of it, more under load.
    returns = {f"MALLOC_{name}_THRESHOLD_": str(2**17) for name in ("MMAP", "TRIM")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, **returns},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    words = done.stdout.split()
    found = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    noise = 2 * 2**20
    assert found["model"] > 400e6
    assert found["construction"] < found["unit"]
    # Zeros (of biases) may not be resident.
    assert 0.95 * found["shards"] < found["peak"] < found["shards"] + (0 if fast else found["unit"]) + noise


# -- The fast way


def test_fast_values_are_distributed_as_the_initializer_says() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normal, self.uniform, self.truncated = (nn.Parameter(torch.empty(300, 400)) for _ in range(3))
            nn.init.normal_(self.normal, 3.0, 0.5)
            nn.init.uniform_(self.uniform, -1.0, 2.0)
            nn.init.trunc_normal_(self.truncated, a=-0.5, b=0.5)
            self.scaled = nn.Parameter(torch.randn(300, 400) * 0.1 + 1)
            self.ones, self.orthogonal = nn.Parameter(torch.ones(5)), nn.Parameter(torch.empty(40, 30))
            nn.init.orthogonal_(self.orthogonal)

    model = materialize(on_meta(Model), fast=True)
    flat = {name: value.detach().flatten() for name, value in model.named_parameters()}
    for name, mean, deviation in (("normal", 3.0, 0.5), ("uniform", 0.5, 0.75**0.5), ("scaled", 1.0, 0.1)):
        assert abs(flat[name].mean() - mean) < 0.01 * deviation**0.5, name
        assert abs(flat[name].std() - deviation) < 0.01, name
        blocks = flat[name][: 2**16], flat[name][2**16 :]
        # No block repeats another, and none is another tensor's.
        assert abs(torch.corrcoef(torch.stack([blocks[0][: len(blocks[1])], blocks[1]]))[0, 1]) < 0.02, name
    assert abs(torch.corrcoef(torch.stack([flat["normal"], flat["scaled"]]))[0, 1]) < 0.02
    assert flat["truncated"].abs().max() <= 0.5
    assert torch.equal(flat["ones"], torch.ones(5))
    torch.testing.assert_close(model.orthogonal.t() @ model.orthogonal, torch.eye(30))


def test_fast_depends_on_the_seed_alone() -> None:
    models = [materialize(on_meta(Transformer, seed=before), seed=3, fast=True) for before in (1, 2)]
    assert_same(*models)
    other = materialize(on_meta(Transformer), seed=4, fast=True)
    assert not torch.equal(other.head.weight, models[0].head.weight)
    torch.manual_seed(1)
    assert_same(materialize(on_meta(Transformer, seed=3), fast=True), models[0])


def test_fast_keeps_the_meaning_of_bytes() -> None:
    def build(m: Any) -> None:
        m.bits = nn.Parameter(torch.zeros(3))
        m.bits.data.view(torch.int32).fill_(0x40490FDB)
        m.mantissa = nn.Parameter(torch.frexp(torch.full((3,), 12.0))[0])
        m.adjoint = nn.Parameter(torch.full((2, 3), 2 + 1j).conj())

    assert_same(materialize(on_meta(lambda: Built(build)), fast=True), Built(build))


def test_fast_gives_random_buffers_too() -> None:
    model = materialize(on_meta(lambda: Built(buffers), seed=1), seed=3, fast=True)
    again = materialize(on_meta(lambda: Built(buffers), seed=2), seed=3, fast=True)
    assert_same(model, again)


class Halves(nn.Module):
    """Its parameter is a part of memory of which the other part is written too."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.empty(2, 12)
        self.weight = nn.Parameter(base[0])
        with torch.no_grad():
            base[0].normal_()
            base[1].fill_(3)


def test_fast_values_of_a_part_of_memory() -> None:
    with init_on_meta():
        model = Halves()
    materialize(model, seed=3, fast=True)
    assert not (model.weight == 3).any()


class InDefaultDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(40, 50))
        self.other = nn.Parameter(torch.full((40,), 0.1) * 3)


def test_fast_values_in_the_default_dtype_of_the_constructor() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with init_on_meta():
            model = InDefaultDtype()
        truth = InDefaultDtype()
    finally:
        torch.set_default_dtype(torch.float32)
    materialize(model, seed=3, fast=True)
    assert model.weight.dtype == torch.float64
    assert torch.equal(model.other, truth.other)
    assert (model.weight != model.weight.float().double()).any()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5) @ torch.randn(5, 4))


def test_materializing_under_autocast() -> None:
    torch.manual_seed(3)
    truth = Product()
    torch.manual_seed(3)
    with init_on_meta():
        model = Product()
    with torch.autocast("cpu", torch.bfloat16):
        materialize(model)
    assert torch.equal(model.weight, truth.weight)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("noise", torch.randn(4))


def test_a_random_buffer_on_the_meta_device_again() -> None:
    with init_on_meta():
        model = Noise()
    model.to("meta")
    torch.manual_seed(7)
    truth = Noise()
    materialize(model, seed=7)
    assert torch.equal(model.weight, truth.weight)
    assert torch.equal(model.noise, truth.noise)


def test_a_random_buffer_that_was_replaced_by_one_of_another_shape() -> None:
    with init_on_meta():
        model = Noise()
    model.noise = torch.zeros(2)
    materialize(model, seed=7)
    assert torch.equal(model.noise, torch.zeros(2))


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 5))
        nn.init.trunc_normal_(self.weight, std=0.02)
        self.other = nn.Parameter(torch.randn(3))


def test_truncated_normal_inside_another_mode() -> None:
    with init_on_meta(), torch.device("cpu"):
        model = Truncated()
    materialize(model, seed=5)
    torch.manual_seed(5)
    truth = Truncated()
    assert torch.equal(model.weight, truth.weight)
    assert torch.equal(model.other, truth.other)


class Direct(nn.Module):
    """Calls an operator itself, without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ops.aten.randn.default([3, 4]))
        self.other = nn.Parameter(torch.randn(3))


def test_an_operator_without_a_device() -> None:
    torch.manual_seed(3)
    truth = Direct()
    torch.manual_seed(3)
    with init_on_meta():
        model = Direct()
    materialize(model)
    assert torch.equal(model.weight, truth.weight)
    assert torch.equal(model.other, truth.other)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.scale = self.weight[0].item()


def test_a_seed_after_an_earlier_constructor_and_values_were_used() -> None:
    with init_on_meta():
        first = nn.Linear(3, 3)
    with init_on_meta():
        second = Looks()
    with pytest.raises(RuntimeError, match="right only for the seed"):
        materialize(second, seed=5)
    materialize(nn.ModuleList([first, second]))
