"""Training checkpoints on several ranks: other world sizes, torch's own checkpoints, failures of one rank."""

from __future__ import annotations

import asyncio
import copy
import errno
import io
import itertools
import math
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import Placements
from shardwise.checkpoint import CheckpointError, latest, load, save, wait
from shardwise.checkpoint import sharded as sharded_files
from shardwise.checkpoint.asynchronous import background
from shardwise.checkpoint.integrity import SummingStream
from shardwise.checkpoint.ranks import SavingRanks
from shardwise.optim import flat

from ..models import MLP, Transformer, inputs_for, wrap
from .harness import on_ranks
from .shared import shared_directory
from .truth import batch, whole

WIDTH = 7


class Scale(nn.Module):
    """A parameter of another dtype than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.float().sum()


class Net(nn.Module):
    """Shards of all kinds at world sizes 1 to 4: uneven, empty, tied, frozen, of two dtypes; buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.narrow = nn.Linear(WIDTH, 1)
        self.frozen = nn.Linear(WIDTH, 2).requires_grad_(False)
        self.scale = Scale()
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("temporary", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        x = self.norm(x)
        return self.narrow(x) + self.scale(self.frozen(x).sum())


def make(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net()


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(
    verb: Any = shardwise.fully_shard, seed: int = 1, mesh: DeviceMesh | None = None, **options: Any
) -> nn.Module:
    model = make(seed)
    mesh = world_mesh() if mesh is None else mesh
    verb([model.layers[0], model.layers[2]], mesh=mesh, **options)
    verb(model.layers[1], mesh=mesh, **options)
    if verb is torch_fully_shard:  # which wants one dtype in a unit
        verb(model.scale, mesh=mesh, **options)
    verb(model, mesh=mesh, **options)
    return model


def make_optimizer(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trainable if (p.ndim > 1) == flag] for flag in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1, "note": ("custom", 3)}, {"params": vectors, "lr": 3e-2}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), amsgrad=True)


class Run:
    """A model with everything that a checkpoint holds."""

    def __init__(self, kind: str = "adamw", verb: Any = shardwise.fully_shard, seed: int = 1, **options: Any):
        self.model = sharded(verb, seed, **options)
        self.optimizer = make_optimizer(self.model, kind)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 5], gamma=0.5)
        self.done = 0
        for seeds in (torch.manual_seed, random.seed, np.random.seed):
            seeds(1000 * seed + (dist.get_rank() if dist.is_initialized() else 0))

    def steps(self, count: int = 2) -> list[float]:
        rank, losses = dist.get_rank() if dist.is_initialized() else 0, []
        for _ in range(count):
            noise = random.random() + np.random.rand()  # noqa: NPY002  (the generator that is saved)
            loss = (self.model(batch(self.done, rank, 4, WIDTH)) * noise).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.done += 1
            losses.append(loss.item())
        return losses

    def save(self, root: Path, **options: Any) -> Path:
        extra = {"done": self.done, "own": dist.get_rank(), "tensor": torch.arange(5), 3: ("x", {4: None}), "empty": {}}
        return save(root, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra=extra, **options)

    def load(self, path: Path, **options: Any) -> Any:
        extra = load(path, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **options)
        self.done = extra["done"]
        return extra

    def state(self) -> dict[str, Any]:
        """Everything whole, by name."""
        names = {p: name for name, p in self.model.named_parameters()}
        found: dict[str, Any] = {name: whole(value) for name, value in self.model.state_dict().items()}
        for parameter, own in self.optimizer.state.items():
            for key, value in own.items():
                found[f"{names[parameter]}/{key}"] = whole(value) if isinstance(value, torch.Tensor) else value
        for index, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                found[f"{index}/{key}"] = [names[p] for p in value] if key == "params" else value
        return {**found, "scheduler": copy.deepcopy(self.scheduler.state_dict())}


def assert_same(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    assert ours.keys() == truth.keys()
    for key, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == truth[key].dtype, key
            assert torch.equal(value, truth[key]), key
        else:
            assert value == truth[key], key


@contextmanager
def world_of(size: int, directory: Path, name: str) -> Iterator[bool]:
    """Of the ranks of a larger world the first ``size`` as a world of their own; gives whether this rank is one."""
    rank = int(os.environ["RANK"])
    if rank < size:
        rendezvous = f"file://{directory / f'rendezvous-{name}-{size}'}"
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=limit)
    yield rank < size
    if rank < size:
        dist.barrier()
        dist.destroy_process_group()


SIZES = (1, 2, 3, 4)


@on_ranks(4, kind=["adamw", "sgd"])
def test_every_pair_of_world_sizes(kind: str) -> None:
    """What one world size saves each other one restores, and the same one trains on as if nothing had happened."""
    names: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    directory = Path(names[0])
    dist.destroy_process_group()
    losses, randoms = {}, {}
    for size in SIZES:
        with world_of(size, directory, "save") as takes_part:
            if takes_part:
                run = Run(kind)
                run.steps(3)
                run.save(directory / str(size))
                randoms[size] = random.getstate()
                torch.save(run.state(), directory / f"{size}-{dist.get_rank()}.pt")
                losses[size] = run.steps(3)
    for size in reversed(SIZES):
        with world_of(size, directory, "load") as takes_part:
            for saved in SIZES if takes_part else ():
                own = dist.get_rank() if size == saved else 0
                truth = torch.load(directory / f"{saved}-{own}.pt", weights_only=False)
                run = Run(kind, seed=2)
                run.steps(saved % 2)  # with and without optimizer state before
                extra = run.load(directory / str(saved))
                assert_same(run.state(), truth)
                expected = {"done": 3, "own": own, "tensor": torch.arange(5), 3: ("x", {4: None}), "empty": {}}
                assert torch.equal(extra.pop("tensor"), expected.pop("tensor"))  # type: ignore[arg-type]
                assert extra == expected
                if size == saved:
                    assert random.getstate() == randoms[size]
                    again = run.steps(3)
                    assert again == losses[size], f"world size {size}: {again} is not {losses[size]}"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'end'}", rank=int(os.environ["RANK"]), world_size=len(SIZES)
    )


# -- Other ways of sharding


def mesh_and_options(name: str) -> tuple[DeviceMesh, dict[str, Any]]:
    if name == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), {}
    if name == "offload":
        return world_mesh(), {"offload_policy": shardwise.CPUOffloadPolicy()}
    return world_mesh(), {"placements": getattr(Placements, name)}


def elements_by_file(path: Path) -> dict[str, int]:
    """Elements of tensors that each file of a checkpoint has, but for buffers in which ranks differ."""
    metadata, found = FileSystemReader(path).read_metadata(), defaultdict(int)
    for index, where in metadata.storage_data.items():
        chunks = getattr(metadata.state_dict_metadata[index.fqn], "chunks", ())
        if not index.fqn.startswith("ranks."):
            sizes = (math.prod(chunk.sizes) for chunk in chunks if chunk.offsets == index.offset)
            found[where.relative_path] += max(sizes, default=0)
    return dict(found)


def check_forward(model: nn.Module, truth: dict[str, Any]) -> None:
    """A model computes what a plain one with these values does."""
    with torch.random.fork_rng():
        plain = Net().eval()
    plain.load_state_dict({name: truth[name] for name in plain.state_dict()})
    x = batch(7, dist.get_rank(), 4, WIDTH)
    torch.testing.assert_close(model.eval()(x), plain(x))
    model.train()


@on_ranks(4)
def test_between_strategies() -> None:
    """Each writes every byte once, whatever it replicates, and loads what the one before it has saved."""
    strategies = ["zero3", "ddp", "zero1", "hsdp", "zero2", "offload", "zero3"]
    with shared_directory() as directory:
        truth: dict[str, Any] = {}
        for index, name in enumerate(strategies):
            mesh, options = mesh_and_options(name)
            run = Run(seed=index, mesh=mesh, **options)
            if index:
                run.steps(1)  # some keep what they gathered, which is of the past now
                run.load(directory)
                assert_same(run.state(), truth)  # each rank's own buffers, too
                check_forward(run.model, truth)
            run.steps(1)
            truth = run.state()
            path = run.save(directory)
            shares = elements_by_file(path)
            assert sum(shares.values()) == sum(v.numel() for v in truth.values() if isinstance(v, torch.Tensor))
            assert len(shares) == 4
            assert max(shares.values()) < 3 * min(shares.values()), f"{name}: unequal shares of the writing: {shares}"


def parallel_model(shard: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Transformer(layers=2)
    if not shard:
        wrap(model, shardwise.fully_shard, mesh=world_mesh())
        return model
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrap(model, shardwise.fully_shard, mesh=mesh["data"])
    return model


@on_ranks(2)
def test_state_of_flat_optimizers_can_be_copied_and_saved_once_it_is_loaded() -> None:
    """Its tensors lie in one memory, at offsets, with which torch copies no DTensor."""
    model = sharded()
    optimizer = flat(torch.optim.AdamW, [p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(batch(0, dist.get_rank(), 4, WIDTH)).square().mean().backward()
    optimizer.step()
    with shared_directory() as directory:
        path = save(directory / "run", model=model, optimizer=optimizer, extra=optimizer.state_dict())
        before = copy.deepcopy(optimizer.state_dict())
        extra = load(path, model=model, optimizer=optimizer, extra=optimizer.state_dict())
    torch.save(optimizer.state_dict(), io.BytesIO())
    for state in (copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer).state_dict(), copy.deepcopy(extra)):
        assert {*state["state"]} == {*before["state"]}
        for key, values in state["state"].items():
            for name, value in values.items():
                assert torch.equal(whole(value), whole(before["state"][key][name]))


@on_ranks(4, first=[True, False])
def test_with_tensor_parallelism(first: bool) -> None:
    with shared_directory() as directory:
        model = parallel_model(first, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(inputs_for(model, 0)).square().mean().backward()
        optimizer.step()
        save(directory, model=model, optimizer=optimizer)
        other = parallel_model(not first, 2)
        other_optimizer = torch.optim.AdamW(other.parameters())
        load(directory, model=other, optimizer=other_optimizer)
        for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(whole(ours), whole(theirs)), name
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(whole(other_optimizer.state[ours][key]), whole(optimizer.state[theirs][key])), name
        other(inputs_for(other, 1)).square().mean().backward()
        other_optimizer.step()


class Rows(torch.optim.Optimizer):
    """Divides gradients of matrices by averages of the norms of their rows: one in shards, and one that is copied."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                rows, state = parameter.grad.square().mean(1), self.state[parameter]
                if not state:
                    state.update(cut=torch.zeros_like(rows), copied=parameter.grad.new_zeros(rows.shape))
                norms = state["cut"].lerp_(rows, 0.5) + state["copied"].lerp_(rows, 0.1)
                parameter.sub_(parameter.grad / norms.add(1e-6).sqrt().unsqueeze(1), alpha=0.1)

    def advance(self, model: nn.Module) -> None:
        """A step of ``model``."""
        model(inputs_for(model, 0)).square().mean().backward()
        self.step()
        self.zero_grad()


def check_rows(model: nn.Module, other: nn.Module) -> None:
    """What `Rows` has of ``model`` is saved, and serves as well in an optimizer of ``other`` that has made no step."""
    optimizer, fresh = Rows(model.parameters()), Rows(other.parameters())
    with shared_directory() as directory:
        optimizer.advance(model)
        save(directory, model=model, optimizer=optimizer)
        load(directory, model=other, optimizer=fresh)
    loaded = {key: value for p in other.parameters() for key, value in fresh.state[p].items()}
    assert {key: type(value) for key, value in loaded.items()} == {"cut": DTensor, "copied": DTensor}
    assert all(placement.is_replicate() for placement in loaded["copied"].placements)
    optimizer.advance(model)
    fresh.advance(other)
    for theirs, ours in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), whole(theirs))
        for key, value in optimizer.state[theirs].items():
            torch.testing.assert_close(whole(fresh.state[ours][key]), whole(value))


@on_ranks(1, 2, 3)
def test_sharded_state_of_another_shape_than_its_parameter() -> None:
    models = [wrap(Transformer(layers=1), shardwise.fully_shard, mesh=world_mesh()) for _ in range(2)]
    check_rows(*models)


@on_ranks(4, first=[True, False])
def test_sharded_state_of_another_shape_with_tensor_parallelism(first: bool) -> None:
    check_rows(parallel_model(first, 1), parallel_model(not first, 2))


@on_ranks(1, 3)
def test_state_of_another_shape_that_was_saved_of_plain_parameters() -> None:
    """The checkpoint cannot say how it is to be sharded."""
    torch.manual_seed(1)
    plain = Transformer(layers=1)
    check_rows(plain, wrap(Transformer(layers=1), shardwise.fully_shard, mesh=world_mesh()))


class Closed(Rows):
    """Does not make a step without being given one."""

    def step(self, closure: Any = None) -> None:
        closure()


@on_ranks(2)
def test_state_of_another_shape_of_an_optimizer_that_does_not_make_it_by_itself() -> None:
    torch.manual_seed(1)
    plain, model = Transformer(layers=1), wrap(Transformer(layers=1), shardwise.fully_shard, mesh=world_mesh())
    optimizer, fresh = Rows(plain.parameters()), Closed(model.parameters())
    with shared_directory() as directory:
        optimizer.advance(plain)
        save(directory, model=plain, optimizer=optimizer)
        load(directory, model=model, optimizer=fresh)
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert ours.grad is None
        assert all(torch.equal(fresh.state[ours][key], value) for key, value in optimizer.state[theirs].items())
    assert fresh.param_groups[0]["lr"] == 0.1


@on_ranks(2)
def test_ranks_that_differ_in_strict() -> None:
    with shared_directory() as directory:
        save(directory, model=sharded())
        part = nn.ModuleDict(dict(sharded(seed=2).named_children()))
        part["more"] = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"does not have 'more\.weight'"):
            load(directory, model=part, strict=dist.get_rank() == 0)
        load(directory, model=part, strict=False)  # all ranks left the refused one together


@on_ranks(1, 2)
def test_into_a_model_on_the_meta_device() -> None:
    with shared_directory() as directory:
        run = Run()
        run.steps(2)
        run.save(directory)
        with torch.device("meta"):
            model = Net()
        shardwise.fully_shard(model.layers[1], mesh=world_mesh())
        shardwise.fully_shard(model, mesh=world_mesh())
        optimizer = make_optimizer(model)
        parameters = list(model.parameters())
        with pytest.raises(ValueError, match=r"does not have 'narrow\.bias'.*'layers\.0\.weight' has shape"):
            load(directory, model=wrong_model())
        with pytest.raises(ValueError, match="meta device"):
            save(directory, model=model)
        load(directory, model=model, optimizer=optimizer)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        for name, value in run.model.state_dict().items():
            assert torch.equal(whole(model.state_dict()[name]), whole(value)), name
        assert optimizer.state[parameters[0]]["step"] == 2
        model.temporary = torch.zeros(2)
        model.eval()
        run.model.eval()
        x = batch(0, 0, 4, WIDTH)
        assert torch.equal(model(x), run.model(x))


def wrong_model() -> nn.Module:
    model = Net()
    model.layers[0] = nn.Linear(WIDTH, WIDTH + 1)
    model.narrow = nn.Linear(WIDTH, 1, bias=False)
    model.more = nn.Linear(2, 2)
    return shardwise.fully_shard(model, mesh=world_mesh())


# -- torch's own checkpoints


@on_ranks(2, 3, kind=["adamw", "sgd"])
def test_plain_dcp_loads_ours_into_fsdp2(kind: str) -> None:
    with shared_directory() as directory:
        run = Run(kind)
        run.steps(2)
        path = run.save(directory)
        theirs = Run(kind, torch_fully_shard, seed=2)
        state = {
            "model": get_model_state_dict(theirs.model),
            "optimizer": get_optimizer_state_dict(theirs.model, theirs.optimizer),
        }
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(theirs.model, state["model"])
        set_optimizer_state_dict(theirs.model, theirs.optimizer, state["optimizer"])
        theirs.scheduler.load_state_dict(run.scheduler.state_dict())
        first: list[Any] = [run.state()]
        dist.broadcast_object_list(first)  # torch knows no buffers in which ranks differ
        assert_same(theirs.state(), first[0])


def meta_by_default() -> torch.device:
    return torch.device("meta")


@on_ranks(2, verb=[shardwise.fully_shard, torch_fully_shard], mode=[torch.inference_mode, meta_by_default])
def test_within_modes(verb: Any, mode: Callable[[], Any]) -> None:
    """As of an evaluation whose model turns out to be the best, and where models are made without memory. What is
    loaded there can be trained."""
    run = Run(verb=verb)
    run.steps(1)
    truth = run.state()
    values = {name: truth[name] for name in run.model.state_dict()}
    with shared_directory() as directory:
        with mode():
            run.save(directory)
            shardwise.save_safetensors(run.model, directory)
            assert_same(shardwise.full_state_dict(run.model, rank0_only=False), values)
        others = [Run(verb=verb, seed=2) for _ in range(3)]
        with mode():
            others[0].load(directory)
            shardwise.load_safetensors(others[1].model, directory)
            shardwise.load_full_state_dict(others[2].model, values, broadcast_from_rank0=False)
    assert_same(others[0].state(), truth)
    for other in others:
        for name, parameter in other.model.named_parameters():
            assert torch.equal(whole(parameter), truth[name]), name
        other.steps(1)


@on_ranks(2)
def test_fsdp2_models_saved_and_loaded_by_ours() -> None:
    with shared_directory() as directory:
        theirs = Run(verb=torch_fully_shard)
        theirs.steps(2)
        theirs.save(directory)
        state, losses = theirs.state(), theirs.steps(2)
        for verb in (shardwise.fully_shard, torch_fully_shard):
            other = Run(verb=verb, seed=2)
            other.load(directory)
            assert_same(other.state(), state)
            check_forward(other.model, state)
            again = other.steps(2)
            assert again == losses, f"{verb.__module__}: {again} is not {losses}"


@on_ranks(2, 3)
def test_stages_of_a_pipeline() -> None:
    """Each rank has a part of the model and an optimizer of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def stage(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        part = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 2 + rank), f"norm{rank}": nn.LayerNorm(2 + rank)})
        optimizer = torch.optim.AdamW(part.parameters(), lr=0.1 * (rank + 1))
        part[f"norm{rank}"](part[f"layer{rank}"](torch.randn(4, 3))).square().mean().backward()
        optimizer.step()
        return part, optimizer

    model, optimizer = stage(10 + rank)
    with shared_directory() as directory:
        save(directory, model=model, optimizer=optimizer)
        other, other_optimizer = stage(20 + rank)
        load(directory, model=other, optimizer=other_optimizer)
        assert other_optimizer.param_groups[0]["lr"] == 0.1 * (rank + 1)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(other_optimizer.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])
        assert set(other_optimizer.state) == set(other.parameters())  # not that of other stages, to be saved again
        if rank == size - 1:
            del other[f"norm{rank}"]
        with pytest.raises(ValueError, match=rf"the model does not have 'norm{size - 1}\.weight'"):
            load(directory, model=other)


STAGED = 4
"""Layers of the model that `Staged` cuts."""


class Staged:
    """This rank's stage of a pipeline, or the whole model, with an optimizer of its own, of two param groups.

    Args:
        stages: that the layers are dealt to; each is sharded over as many ranks.
        rates: learning rates of the first and of the last half of the layers.
        backwards: whether the first ranks have the last stage.
    """

    def __init__(self, stages: int, seed: int, rates: tuple[float, float] = (0.1, 0.1), *, backwards: bool = False):
        torch.manual_seed(seed)
        ranks = dist.get_world_size() // stages
        mesh = init_device_mesh("cpu", (stages, ranks), mesh_dim_names=("stage", "shard"))["shard"]
        place, count = dist.get_rank() // ranks, STAGED // stages
        start = (stages - 1 - place if backwards else place) * count
        layers = [nn.Linear(3, 3) for _ in range(STAGED)]
        own = range(start, start + count)
        self.model = nn.ModuleDict({f"layer{index}": shardwise.fully_shard(layers[index], mesh=mesh) for index in own})
        rate = rates[start * 2 // STAGED]
        groups = [{"params": [layers[index].weight for index in own], "lr": rate}]
        groups += [{"params": [layers[index].bias for index in own], "lr": 2 * rate, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups)

    def step(self) -> None:
        for layer in self.model.values():
            layer(torch.randn(2, 3)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        values: dict[str, Any] = {name: whole(parameter) for parameter, name in names.items()}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                own = self.optimizer.state[parameter]
                values[f"{names[parameter]}/exp_avg"] = whole(own["exp_avg"])
                values[f"{names[parameter]}/settings"] = group["lr"], group["weight_decay"]
        return values


@on_ranks(4, stages=[1, 2, 4])
def test_other_stages_at_other_world_sizes(stages: int) -> None:
    """What two stages or four or the whole model saved, each other number of them restores at each world size."""
    with shared_directory() as directory:
        saved = Staged(stages, seed=1)
        saved.step()
        save(directory / "saved", model=saved.model, optimizer=saved.optimizer)
        states: list[Any] = [None] * 4
        dist.all_gather_object(states, saved.state())
        truth = {name: value for state in states for name, value in state.items()}
        halves = Staged(2, seed=1, rates=(0.1, 0.2))
        save(directory / "halves", model=halves.model, optimizer=halves.optimizer)
        dist.barrier()
        dist.destroy_process_group()
        for size in reversed(SIZES):
            with world_of(size, directory, "load") as takes_part:
                for number in (1, 2, 4) if takes_part else ():
                    if size % number == 0:
                        other = Staged(number, seed=2)
                        load(directory / "saved", model=other.model, optimizer=other.optimizer)
                        assert_same(other.state(), {name: truth[name] for name in other.state()})
                    if number == 1:
                        match = "group 0 of AdamW has 'layer0.weight' and 'layer2.weight', .* different 'lr': make"
                        with pytest.raises(ValueError, match=match):
                            load(directory / "halves", model=other.model, optimizer=other.optimizer)
        end = f"file://{directory / 'end'}"
        dist.init_process_group("gloo", init_method=end, rank=int(os.environ["RANK"]), world_size=4)


@on_ranks(4)
def test_stages_that_other_ranks_have_after_loading() -> None:
    saved, other = Staged(4, seed=1, rates=(0.1, 0.2)), Staged(4, seed=2, backwards=True)
    with shared_directory() as directory:
        save(directory, model=saved.model, optimizer=saved.optimizer)
        load(directory, model=other.model, optimizer=other.optimizer)
    rate = 0.2 if dist.get_rank() < 2 else 0.1
    assert [group["lr"] for group in other.optimizer.param_groups] == [rate, 2 * rate]


@on_ranks(4, own_names=[False, True], copies=[False, True])
def test_experts_on_meshes_of_their_own(own_names: bool, copies: bool) -> None:
    """Two ranks have one and two another one; what is saved under one name is one tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    number = dist.get_rank() // 2
    name = f"expert{number}" if own_names else "expert"

    def make_experts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        shared = nn.Linear(4, 4)
        torch.manual_seed(seed if copies else seed + number)
        model = nn.ModuleDict({"shared": shared, name: nn.Linear(4, 3)})
        shardwise.fully_shard(model[name], mesh=mesh["shard"])
        shardwise.fully_shard(model["shared"], mesh=world_mesh())
        optimizer = torch.optim.AdamW(model.parameters())
        model[name](model["shared"](torch.ones(2, 4))).square().mean().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, loaded) = make_experts(1), make_experts(5)
    with shared_directory() as directory:
        verbs: dict[str, Callable[[], Any]] = {
            "save": lambda: save(directory, model=model, optimizer=optimizer),
            "full_state_dict": lambda: shardwise.full_state_dict(model),
            "save_safetensors": lambda: shardwise.save_safetensors(model, directory),
        }
        if not own_names and not copies:
            for verb, action in verbs.items():
                match = rf"^{verb}: '\S*expert.weight' .*is on ranks \[0, 1\] and on ranks \[2, 3\] .*give the modules"
                with pytest.warns(UserWarning, match=match) if dist.get_rank() == 0 else nullcontext():
                    action()
            return
        for action in [verbs["save"]] if own_names else verbs.values():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                action()
        load(directory, model=other, optimizer=loaded)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs))
        assert torch.equal(whole(loaded.state[ours]["exp_avg"]), whole(optimizer.state[theirs]["exp_avg"]))


@on_ranks(2)
def test_distributed_data_parallel() -> None:
    """A model of torch's own wrapper, into a sharded one and back."""
    run = Run()
    model = DistributedDataParallel(make(3))
    optimizer = make_optimizer(model)
    model(batch(0, 0, 4, WIDTH)).square().mean().backward()
    optimizer.step()
    with shared_directory() as directory:
        save(directory, model=model, optimizer=optimizer)
        load(directory, model=run.model, optimizer=run.optimizer)
        names = dict(model.module.named_parameters())
        for name, value in run.model.named_parameters():
            assert torch.equal(whole(value), names[name]), name
        save(directory, model=run.model, optimizer=run.optimizer)
        other = DistributedDataParallel(make(4))
        loaded = make_optimizer(other)
        load(directory, model=other, optimizer=loaded)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            for key, value in optimizer.state[theirs].items():
                assert torch.equal(loaded.state[ours][key], value), key


def nested(run: Run, *names: str, flat: bool = False) -> dict[str, Any]:
    """The state of a run as torch's functions give it, under other names."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    state = {names[-2]: get_model_state_dict(run.model), names[-1]: optimizer}
    for name in reversed(names[:-2]):
        state = {name: state}
    return state


@on_ranks(2, 3, layout=["usual", "flattened", "application", "model"])
def test_ours_loads_what_plain_dcp_saved_of_fsdp2(layout: str) -> None:
    with shared_directory() as directory:
        theirs = Run("adamw", torch_fully_shard)
        theirs.steps(2)
        states = {
            "usual": lambda: nested(theirs, "model", "optimizer"),
            "flattened": lambda: nested(theirs, "model", "optimizer", flat=True),
            "application": lambda: nested(theirs, "app", "model", "optim"),
            "model": lambda: get_model_state_dict(theirs.model),
        }
        dcp.save(states[layout](), checkpoint_id=directory / "theirs")
        run = Run(seed=2)
        if layout == "model":
            with pytest.raises(ValueError, match=r"has no optimizer; it has 'layers\.0\.weight', "):
                load(directory / "theirs", model=run.model, optimizer=run.optimizer)
            load(directory / "theirs", model=run.model)
            names = dict(theirs.model.named_parameters())
            assert_same(*({name: run.state()[name] for name in names} for run in (run, theirs)))
            return
        assert load(directory / "theirs", model=run.model, optimizer=run.optimizer) is None
        run.scheduler.load_state_dict(theirs.scheduler.state_dict())
        ours, truth = run.state(), theirs.state()
        for name in ("norm.running_mean", "norm.running_var"):  # of any rank
            del ours[name], truth[name]
        if layout == "flattened":  # where every parameter has settings of its own, there is no order of groups
            assert ours.pop("0/note") == truth.pop("0/note")
        assert_same(ours, truth)


# -- What differs between ranks


@on_ranks(3)
def test_objects_with_a_state_and_ranks_that_differ() -> None:
    class Loader:
        def __init__(self, position: int):
            self.position = position

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    rank = dist.get_rank()
    with shared_directory() as directory:
        model = sharded()
        extra = {"loader": Loader(10 + rank), "all": ["same"], "shards": (dict(model.named_parameters()), 5)}
        save(directory, model=model, extra=extra)
        own = Loader(0)
        given: dict[str, Any] = {"loader": own, "mine": 1}
        loaded = load(directory, extra=given)
        assert loaded is given
        assert given["loader"] is own
        assert own.position == 10 + rank
        assert given["mine"] == 1
        assert given["all"] == ["same"]
        assert given["shards"][1] == 5
        for name, value in model.named_parameters():  # nothing here says how they should be sharded
            assert torch.equal(given["shards"][0][name], whole(value))
        with pytest.raises(
            ValueError, match=r"extra of the checkpoint has no 'other'; it has 'loader', 'all', 'shards'"
        ):
            load(directory, extra={"other": own})


@on_ranks(2, 3)
def test_plain_tensors_of_extra_and_scheduler_are_those_of_each_rank() -> None:
    class Warmup:
        def __init__(self, value: torch.Tensor):
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "same": torch.ones(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert torch.equal(state["same"], torch.ones(2))
            self.value = state["value"]

    rank = dist.get_rank()
    own = torch.arange(rank + 1).to(torch.bfloat16)  # of another shape on each
    with shared_directory() as directory:
        save(directory / "own", scheduler=Warmup(own), extra=own)
        scheduler = Warmup(torch.zeros(0))
        assert torch.equal(load(directory / "own", scheduler=scheduler), own)
        assert torch.equal(scheduler.value, own)
        for tensor_on in (0, 1):
            name = f"tensor_on_{tensor_on}"
            save(directory / name, extra=own if rank == tensor_on else "none")
            loaded = load(directory / name)
            assert torch.equal(loaded, own) if rank == tensor_on else loaded == "none"
        of_equal_bytes = torch.zeros(2, 2) if rank == 0 else torch.zeros(rank * 2, dtype=torch.float64)[:2]
        save(directory / "bytes", extra=of_equal_bytes)
        loaded = load(directory / "bytes")
        assert (loaded.dtype, loaded.shape) == (of_equal_bytes.dtype, of_equal_bytes.shape)


class Counting(torch.optim.SGD):
    """A state dict with more than state and param groups."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.counted, self.sums = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counted": {"steps": self.counted}, "sums": self.sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counted, self.sums = state_dict["counted"]["steps"], state_dict["sums"]
        super().load_state_dict(state_dict)


@on_ranks(2)
def test_optimizers_with_more_in_their_state_dict() -> None:
    model = sharded()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.counted, optimizer.sums = 3, torch.tensor([1.0, 2.0])
    with shared_directory() as directory:
        save(directory, model=model, optimizer=optimizer)
        again = Counting(model.parameters(), lr=0.5, momentum=0.9)
        load(directory, model=model, optimizer=again)
        assert again.param_groups[0]["lr"] == 0.1
        assert again.counted == 3
        assert torch.equal(again.sums, optimizer.sums)
        with pytest.raises(ValueError, match=r"two optimizers, one of them Counting, have 'counted', 'sums'"):
            save(directory / "two", model=model, optimizer=[optimizer, again])


@on_ranks(2)
def test_a_parameter_in_two_optimizers() -> None:
    """One name has one state in a checkpoint: that of the other optimizer would be lost."""
    model = sharded()
    parameters = list(model.parameters())
    first, second = torch.optim.AdamW(parameters, lr=0.1), torch.optim.AdamW(parameters[:1], lr=0.2)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    first.step()
    with shared_directory() as directory:
        save(directory, model=model, optimizer=[first, second])  # only the first has state
        second.step()
        with pytest.raises(ValueError, match=r"two optimizers, one of them AdamW, have state of"):
            save(directory, model=model, optimizer=[first, second])


class Holder:
    """An object in an optimizer's state, as GaLore's projectors are."""

    def __init__(self, held: Any):
        self.held = held


@on_ranks(2)
def test_objects_in_state_of_an_optimizer() -> None:
    """Loading them runs their code; `save` says so once."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {"holder": Holder(index)}
    with shared_directory() as directory:
        with pytest.warns(
            UserWarning, match=r"the optimizer's state has objects of tests\.ranks\.test_checkpoint\.Holder"
        ):
            save(directory, model=model, optimizer=optimizer)
        optimizer.state.clear()
        load(directory, model=model, optimizer=optimizer, weights_only=False)
    assert [optimizer.state[parameter]["holder"].held for parameter in model.parameters()] == [
        *range(len(optimizer.state))
    ]


@on_ranks(1)
def test_state_dicts_of_another_form_than_torchs() -> None:
    class Wrapping(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"base": super().state_dict()}

    model = sharded()
    with shared_directory() as directory, pytest.raises(TypeError, match="Wrapping has no 'param_groups', 'state'"):
        save(directory, model=model, optimizer=Wrapping(model.parameters()))


@on_ranks(2)
def test_sharded_tensors_in_a_tuple() -> None:
    """They would be pickled with one rank's part, and could not be loaded."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameter = next(model.parameters())
    optimizer.state[parameter] = {"pair": (parameter.detach(), None), "list": [parameter.detach()]}
    with shared_directory() as directory:
        with pytest.raises(TypeError, match=r"pair cannot be saved, since it has sharded tensors inside of a tuple"):
            save(directory, model=model, optimizer=optimizer)
        optimizer.state[parameter].pop("pair")
        optimizer.state[parameter]["holder"] = Holder(parameter.detach())
        with pytest.raises(TypeError, match=r"holder cannot be saved, since it has sharded tensors inside of a Holder"):
            save(directory, model=model, optimizer=optimizer)
        optimizer.state[parameter].pop("holder")
        with pytest.raises(TypeError, match=r"extra cannot be saved, since it has sharded tensors inside of an object"):
            save(directory, extra={"list": [Holder((parameter.detach(),))]})
        with pytest.warns(UserWarning, match="extra has objects of"):
            save(directory, extra={"class": Holder(DTensor)})
        save(directory, model=model, optimizer=optimizer)
        load(directory, model=model, optimizer=optimizer)
        assert torch.equal(whole(optimizer.state[parameter]["list"][0]), whole(parameter))


def with_own_state(model: nn.Module, count: int) -> torch.optim.Optimizer:
    """An optimizer that keeps plain tensors of this rank's shards, and a number of this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        local = parameter.detach().to_local()
        codes = torch.full_like(local, count, dtype=torch.int8)
        optimizer.state[parameter] = {"sums": local + count, "deep": {"codes": codes}, "calls": torch.tensor(count)}
    return optimizer


@on_ranks(3)
def test_optimizer_state_of_each_ranks_shards() -> None:
    """In plain tensors, of one name but other values on each rank, and another shape on the last."""
    names: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    directory = Path(names[0])
    model = sharded()
    optimizer = with_own_state(model, 1 + dist.get_rank())
    save(directory / "run", model=model, optimizer=optimizer)
    for again in (with_own_state(model, 9), torch.optim.SGD(model.parameters(), lr=0.1)):
        load(directory / "run", model=model, optimizer=again)
        for parameter in model.parameters():
            truth, found = optimizer.state[parameter], again.state[parameter]
            assert torch.equal(found["sums"], truth["sums"])
            assert torch.equal(found["deep"]["codes"], truth["deep"]["codes"])
            assert found["calls"] == truth["calls"]
    dist.destroy_process_group()
    with world_of(2, directory, "load") as takes_part:
        if takes_part:
            model = sharded()
            with pytest.raises(
                ValueError, match=r"'optimizer\.state\.\S+\.codes', .* the 3 ranks that saved them differ"
            ):
                load(directory / "run", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            load(directory / "run", model=model)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{directory / 'end'}", rank=rank, world_size=3)


@on_ranks(2)
def test_norms_that_are_yet_to_be_reduced() -> None:
    """Of a DTensor, torch gives these; its own error names nothing."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameter = next(model.parameters())
    optimizer.state[parameter]["size"] = norm = parameter.detach().norm()
    with shared_directory() as directory:
        with pytest.raises(TypeError, match=r"optimizer\.state\.\S+\.size is a DTensor placed as .*redistribute"):
            save(directory, model=model, optimizer=optimizer)
        with pytest.raises(TypeError, match=r"extra_tensors\.size is a DTensor placed as .*redistribute"):
            save(directory, extra={"size": norm})
        optimizer.state[parameter]["size"] = norm.redistribute(placements=[Replicate()])
        save(directory, model=model, optimizer=optimizer)
        optimizer.state[parameter]["size"] = norm
        load(directory, model=model, optimizer=optimizer)
        assert torch.equal(whole(optimizer.state[parameter]["size"]), whole(norm))


@on_ranks(2)
def test_buffers_that_differ_in_shape() -> None:
    rank = dist.get_rank()
    model = sharded()
    model.register_buffer("queue", torch.arange(3.0 + rank))
    with shared_directory() as directory:
        save(directory, model=model)
        model.queue.zero_()
        load(directory, model=model)
        assert torch.equal(model.queue, torch.arange(3.0 + rank))


@on_ranks(2)
def test_buffers_that_differ_under_several_names() -> None:
    rank = dist.get_rank()
    model = sharded()
    model.counts = model.same_counts = nn.Buffer(torch.full((2,), rank + 1.0))
    model.norm = model.same_norm = nn.BatchNorm1d(2, affine=False)
    model.norm.running_mean.fill_(rank + 3)
    with shared_directory() as directory:
        save(directory, model=model)
        model.counts.zero_()
        model.norm.reset_running_stats()
        load(directory, model=model)
        assert torch.equal(model.counts, torch.full((2,), rank + 1.0))
        assert torch.equal(model.norm.running_mean, torch.full((2,), rank + 3.0))


@on_ranks(4)
def test_random_numbers_at_another_world_size() -> None:
    names: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    directory = Path(names[0])
    dist.destroy_process_group()
    with world_of(2, directory, "save") as takes_part:
        if takes_part:
            for kind in ("same", "differ"):
                torch.manual_seed(5 if kind == "same" else dist.get_rank())
                save(directory / kind)
    drawn: dict[str, list[Any]] = {"same": [], "differ": []}
    for size in (4, 1):
        with world_of(size, directory, "load") as takes_part:
            for kind in drawn if takes_part else ():
                for repetition in range(2):
                    torch.manual_seed(99 + repetition)
                    load(directory / kind)
                    every: list[Any] = [None] * size
                    dist.all_gather_object(every, torch.rand(1).item())
                    drawn[kind].append(every)
    if int(os.environ["RANK"]) == 0:
        expected = [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in (0, 1, 5)]
        for kind in drawn:
            four, again, one, _ = drawn[kind]
            assert four == again
            assert one == four[:1]
        assert drawn["same"][0] == [expected[2]] * 4
        assert drawn["differ"][0][:2] == expected[:2]
        assert len(set(drawn["differ"][0])) == 4
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'end'}", rank=int(os.environ["RANK"]), world_size=4
    )


# -- Saving beside training


@on_ranks(1, 2, 3)
def test_asynchronous_saves_hold_the_values_of_the_call() -> None:
    with shared_directory() as directory:
        run = Run()
        run.steps(2)
        truth, own = run.state(), random.getstate()
        release = threading.Event()
        slow = slow_writes(release)
        path = run.save(directory, async_=True)
        assert latest(directory) is None
        assert not path.exists()
        run.scheduler.milestones.clear()
        ahead = run.steps(3)  # and the scheduler, the optimizer's settings and the buffers with them
        run.optimizer.param_groups[0]["note"] = "changed"
        release.set()
        slow.close()
        wait()
        assert latest(directory) == path
        again = Run(seed=2)
        again.load(directory)
        assert_same(again.state(), truth)
        assert random.getstate() == own
        again.scheduler.milestones.clear()
        assert again.steps(3) == ahead


def slow_writes(release: threading.Event) -> ExitStack:
    """Let nothing be written until ``release``."""
    original = SummingStream.write

    def write(self: SummingStream, data: Any) -> int:
        assert release.wait(60)
        return original(self, data)

    return patched(SummingStream, "write", write)


def patched(owner: Any, name: str, value: Any) -> ExitStack:
    stack = ExitStack()
    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, value)
    stack.callback(patch.undo)
    return stack


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@on_ranks(2)
def test_a_save_after_an_interrupted_wait_does_not_mix_with_the_one_before() -> None:
    before = signal.signal(signal.SIGALRM, interrupt)
    with shared_directory() as directory:
        model, release = sharded(), threading.Event()
        with slow_writes(release):
            first = save(directory, model=model, async_=True)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                wait()
            threading.Timer(0.2, release.set).start()
            second = save(directory, model=model)
        assert sorted(os.listdir(directory)) == [first.name, second.name]
    signal.signal(signal.SIGALRM, before)


@on_ranks(2)
def test_a_save_waits_for_the_one_before_and_outlives_the_process_group() -> None:
    names: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    directory = Path(names[0])
    model = sharded()
    first = save(directory, model=model, async_=True)
    second = save(directory, model=model, async_=True)
    assert latest(directory) == first
    wait()
    assert latest(directory) == second
    release = threading.Event()
    with slow_writes(release):
        save(directory, model=model, async_=True, keep=1)
        dist.destroy_process_group()
        release.set()
        wait()
    assert not first.exists()
    assert not second.exists()
    with pytest.raises(ValueError, match=r"whole tensors.*incomplete: .*one process saves alone"):
        save(directory, model=model, keep=1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{directory / 'again'}", rank=rank, world_size=2)
    newest = latest(directory)
    assert newest is not None
    assert newest.name == "checkpoint-000003"
    load(directory, model=sharded(seed=2))


# -- Failures


def full_disk_on(rank: int, after: int = 2000) -> ExitStack:
    """Let writing fail on one rank, after some bytes, as on a full disk."""
    original, written = SummingStream.write, [0]

    def write(self: SummingStream, data: Any) -> int:
        written[0] += len(memoryview(data).cast("B"))
        if written[0] > after:
            self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self.error
        return original(self, data)

    return patched(SummingStream, "write", write) if dist.get_rank() == rank else ExitStack()


def save_and_wait(run: Run, directory: Path, async_: bool) -> None:
    run.save(directory, async_=async_, keep=1)
    assert async_, "the error was not raised by save"
    run.steps(1)
    wait()


@on_ranks(3, async_=[False, True])
def test_a_full_disk_on_one_rank_fails_on_all(async_: bool) -> None:
    with shared_directory() as directory:
        run = Run()
        run.steps(1)
        good, truth = run.save(directory), run.state()
        run.steps(1)
        with full_disk_on(1), pytest.raises(OSError, match=rf"into {directory}.*No space left on device") as caught:
            save_and_wait(run, directory, async_)
        assert isinstance(caught.value, CheckpointError)
        assert os.listdir(directory) == [good.name]
        wait()  # raises an error once
        other = Run(seed=2)
        other.load(directory)
        assert_same(other.state(), truth)
        if async_:
            with full_disk_on(2):
                run.save(directory, async_=True)
                background.finish()
            with pytest.raises(CheckpointError, match="No space left"):
                run.save(directory)
        assert run.save(directory, keep=1) == latest(directory)
        dist.barrier()
        assert len(os.listdir(directory)) == 1


@on_ranks(2)
def test_errors_of_one_rank_are_raised_on_all() -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("not this one")

    rank = dist.get_rank()
    with shared_directory() as directory:
        model = sharded()
        with pytest.raises(TypeError, match="extra cannot be saved, since it cannot be pickled: not this one"):
            save(directory, model=model, extra=Unpicklable() if rank else None)
        assert os.listdir(directory) == []
        dist.barrier()
        save(directory, model=model)
        with pytest.raises(ValueError, match=r"the checkpoint /\S+/checkpoint-000001 has no extra"):
            load(directory, model=model, extra={} if rank else None)
        for verb in (save, load):
            with pytest.raises(TypeError, match="directory must be a path, not int"):
                verb(3 if rank else directory, model=model)
            with pytest.raises(ValueError, match=r"directory is .* on rank 0 and .*other on rank 1: all ranks"):
                verb(directory / "other" if rank else directory, model=model)
        with pytest.raises(ValueError, match=r"step is 0 on rank 0 and 1 on rank 1: all ranks"):
            save(directory, model=model, step=rank)
        assert os.listdir(directory) == ["checkpoint-000001"]
        dist.barrier()
        blocked = directory / "file"
        if rank == 0:
            blocked.write_text("")
        with pytest.raises(CheckpointError, match=f"no checkpoint can be written into {blocked}"):
            save(blocked, model=model)
        with pytest.raises(
            FileNotFoundError, match=f"no complete checkpoint in {directory / 'none'}: no such directory"
        ):
            load(directory / "none", model=model)


class History(nn.Linear):
    """With extra state that is a tensor of as many elements as it wants."""

    def __init__(self, *numbers: float):
        super().__init__(2, 2)
        self.numbers = torch.tensor(numbers)

    def get_extra_state(self) -> torch.Tensor:
        return self.numbers

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.numbers = state


@on_ranks(3)
def test_a_rank_that_keeps_its_part_back() -> None:
    with shared_directory() as directory:
        with pytest.raises(ValueError, match=r"each rank that holds a part .* has to pass it.* incomplete: 'model\."):
            save(directory, model=None if dist.get_rank() == 2 else sharded())
        assert os.listdir(directory) == []


@on_ranks(2)
def test_extra_state_that_is_a_tensor_may_differ_in_shape() -> None:
    rank = dist.get_rank()
    with shared_directory() as directory:
        save(directory, model=shardwise.fully_shard(History(*range(1 + rank))))
        for other in (History(), History(3.0, 4.0, 5.0)):
            load(directory, model=shardwise.fully_shard(other))
            assert other.numbers.tolist() == list(range(1 + rank))


class Interrupted:
    """With a state that takes so long that the user interrupts one rank."""

    def __init__(self, rank: int):
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.rank:
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()


@on_ranks(2)
def test_an_interrupt_of_one_rank_leaves_the_ranks_in_step() -> None:
    with shared_directory() as directory:
        model = sharded()
        for rank in (0, 1):
            expected = KeyboardInterrupt if dist.get_rank() == rank else RuntimeError
            with pytest.raises(expected, match="" if expected is KeyboardInterrupt else "KeyboardInterrupt"):
                save(directory, model=model, extra=Interrupted(rank))
            save(directory, model=model, extra=Interrupted(-1))
            with pytest.raises(expected):
                load(directory, model=model, extra=Interrupted(rank))
            with ExitStack() as stack:
                if dist.get_rank() == rank:
                    stack.enter_context(patched(sharded_files, "find_damage", interrupt))
                with pytest.raises(expected):
                    load(directory, model=model)
            load(directory, model=model)
        dist.barrier()
        assert sorted(os.listdir(directory)) == ["checkpoint-000001", "checkpoint-000002"]


@contextmanager
def signal_after(number: int, by: int) -> Iterator[None]:
    """Inside, rank ``by`` gets SIGALRM after the exchange of that number."""
    exchange, calls = SavingRanks.exchange, itertools.count(1)

    def interrupted(self: SavingRanks, value: Any) -> list[Any]:
        found = exchange(self, value)
        if next(calls) == number:
            signal.raise_signal(signal.SIGALRM)
        return found

    with ExitStack() as stack:
        if dist.get_rank() == by:
            stack.enter_context(patched(SavingRanks, "exchange", interrupted))
        yield


VERBS = {"save": save, "load": load}
MOMENTS = [("save", 1), ("save", 3), ("load", 1), ("load", 2), ("load", 4)]


@on_ranks(2)
def test_an_interrupt_of_a_rank_that_waits_for_the_others_leaves_them_in_step() -> None:
    before = signal.signal(signal.SIGALRM, interrupt)
    with shared_directory() as directory:
        model = sharded()
        save(directory, model=model)
        for verb, number in MOMENTS:
            expected = pytest.raises(KeyboardInterrupt) if dist.get_rank() == 1 else nullcontext()
            with expected, signal_after(number, by=1):
                VERBS[verb](directory, model=model)
            load(directory, model=model)
            save(directory, model=model, keep=2)
        dist.barrier()
        assert len(os.listdir(directory)) == 2
        assert signal.getsignal(signal.SIGALRM) is interrupt
    signal.signal(signal.SIGALRM, before)


@on_ranks(2)
def test_a_signal_handler_may_save() -> None:
    """As those of preemption do, which every rank calls, each at another moment of a verb."""
    with shared_directory() as directory:
        model = sharded()
        save(directory / "regular", model=model)
        before = signal.signal(signal.SIGALRM, lambda *_: save(directory / "preempted", model=model))
        for verb, number in MOMENTS:
            with signal_after(number, by=1), signal_after(3 - number % 2, by=0):
                VERBS[verb](directory / "regular", model=model)
            load(directory / "preempted", model=model)
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
        assert len(os.listdir(directory / "preempted")) == len(MOMENTS)


@on_ranks(1)
def test_a_signal_within_a_verb_reaches_its_handler_once() -> None:
    """Also where asyncio is told of it, a handler that was set meanwhile passes it on, or a process was forked."""
    calls: list[str] = []

    class Setting:
        def state_dict(self) -> dict[str, Any]:
            inner = signal.getsignal(signal.SIGALRM)
            assert callable(inner)
            signal.signal(signal.SIGALRM, lambda *given: (calls.append("outer"), inner(*given)))
            if not (child := os.fork()):
                calls.clear()
                signal.raise_signal(signal.SIGALRM)
                os._exit(calls != ["outer", "inner"])
            assert os.waitpid(child, 0)[1] == 0
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    async def heard() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGALRM, calls.append, "loop")
        with signal_after(1, by=0):
            save(directory, model=model)
        await asyncio.sleep(0.01)

    with shared_directory() as directory:
        model, before = sharded(), signal.signal(signal.SIGALRM, lambda *_: calls.append("inner"))
        save(directory, model=model, extra=Setting())
        with signal_after(1, by=0):
            save(directory, model=model)
        assert calls == ["outer", "inner"]
        calls.clear()
        asyncio.run(heard())
        assert calls == ["loop"]
    signal.signal(signal.SIGALRM, before)


@on_ranks(2, damage=["flip", "truncate", "remove"])
def test_damaged_files_are_named_and_change_nothing(damage: str) -> None:
    with shared_directory() as directory:
        run = Run()
        run.steps(1)
        path = run.save(directory)
        other = Run(seed=2)
        before = other.state()
        generator = random.Random(5)
        for name in sorted(os.listdir(path)):
            file = path / name
            data = file.read_bytes()
            for _ in range(1 if damage == "remove" else 6):
                position, bit = generator.randrange(len(data)), generator.randrange(8)
                dist.barrier()
                if dist.get_rank() == 0:
                    file.unlink()
                    if damage == "flip":
                        changed = bytes([data[position] ^ (1 << bit)])
                        file.write_bytes(data[:position] + changed + data[position + 1 :])
                    elif damage == "truncate":
                        file.write_bytes(data[:position])
                dist.barrier()
                if name == "shardwise.json" and damage == "remove":
                    with pytest.raises(FileNotFoundError):
                        other.load(directory)
                    match = "shardwise.json, so it is not a complete checkpoint"
                else:
                    match = f"{path / name} is damaged.*"
                with pytest.raises(CheckpointError, match=match):
                    other.load(path)
                dist.barrier()
                if dist.get_rank() == 0:
                    file.write_bytes(data)
        dist.barrier()
        assert_same(other.state(), before)
        other.load(directory)
        assert_same(other.state(), run.state())


# -- Killed processes


def endless_saves(directory: str) -> None:
    """Save and save again, each time a model all of whose values are the number of the step."""
    model = shardwise.fully_shard(nn.Linear(30, 31), mesh=world_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = step = 1 + (load(directory) if latest(directory) is not None else 0)
    while True:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        save(directory, model=model, optimizer=optimizer, extra=step, async_=step % 3 == 2, keep=2)
        if dist.get_rank() == 0 and step == first + 1:
            Path(directory, "started").touch()
        step += 1


def failing_peer(directory: str) -> None:
    """Rank 1 dies while it saves; the others say how long it took them to see it."""
    model = sharded()
    save(directory, model=model)
    if dist.get_rank() == 1:
        SummingStream.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        save(directory, model=model)
    Path(directory, f"rank-{dist.get_rank()}").write_text(str(time.monotonic() - start))
    os._exit(0)


def on_two(body: Callable[[str], None], directory: Path) -> list[Any]:
    """Start a body on two ranks that may be killed. Forked, since importing torch would take longest."""
    rendezvous = f"file://{tempfile.mktemp()}"

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        body(str(directory))

    processes = [
        multiprocessing.get_context("fork").Process(target=run, args=(rank,), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    return processes


def test_two_ranks_killed_while_they_save(tmp_path: Path) -> None:
    model = nn.Linear(30, 31)
    make_optimizer(model)  # imports what the forked ones need
    generator, limit, seen = random.Random(3), time.monotonic() + 60, 0
    for _ in range(6):
        processes = on_two(endless_saves, tmp_path)
        while not (tmp_path / "started").exists() and time.monotonic() < limit:
            time.sleep(0.005)
        (tmp_path / "started").unlink()
        time.sleep(generator.uniform(0, 0.15))
        for process in generator.sample(processes, 2):
            process.kill()
            process.join(30)
        step = load(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        assert step > seen
        assert all(torch.equal(p, torch.full_like(p, step)) for p in model.parameters())
        seen = step
    save(tmp_path, model=model, keep=1)
    assert len(os.listdir(tmp_path)) == 1


def test_the_others_see_a_rank_die(tmp_path: Path) -> None:
    for process in on_two(failing_peer, tmp_path):
        process.join(60)
    assert float((tmp_path / "rank-0").read_text()) < 20
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == "checkpoint-000001"
    load(tmp_path, model=Net())


@on_ranks(4)
def test_copies_that_ranks_have_in_another_order() -> None:
    """Ranks share the writing of copies by what each has written so far."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    values = {name: torch.arange(6.0) + 10 * number for number, name in enumerate("abc")}
    cut = {name: distribute_tensor(value, mesh, [Replicate(), Shard(0)]) for name, value in values.items()}
    extra = {name: cut[name] for name in ("abc" if rank < 2 else "cab")}
    with shared_directory() as directory:
        save(directory, extra=extra)
        loaded = load(directory)
        assert loaded.keys() == values.keys()
        assert all(torch.equal(loaded[name], value) for name, value in values.items())
        with pytest.raises(ValueError, match=r"not all ranks that hold copies of 'a' give it.*pass it on all ranks"):
            save(directory, extra={"a": extra["a"]} if rank >= 2 else None)
        assert len(os.listdir(directory)) == 1


@on_ranks(2)
def test_copies_that_one_rank_has_do_not_take_the_place_of_the_models() -> None:
    """What one rank alone has is saved by it, or refused, and all else is saved."""
    mesh, rank, refused = init_device_mesh("cpu", (2,)), dist.get_rank(), list[str]()
    models = [shardwise.fully_shard(nn.Linear(5, 3), mesh=mesh, placements=Placements.ddp) for _ in range(2)]
    value = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    for has in range(2):
        with shared_directory() as directory:
            try:
                save(directory, model=models[0], extra={"a": value} if rank == has else None)
            except ValueError as error:
                refused.append(str(error))
                continue
            load(directory, model=models[1])
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(one, other)
    assert len(refused) == 1
    assert "copies of 'a'" in refused[0]


@on_ranks(2)
def test_sharded_tensors_whose_names_join_alike() -> None:
    """Also where one rank has its dict in another order."""
    mesh = init_device_mesh("cpu", (2,))

    def cut(values: torch.Tensor) -> DTensor:
        return distribute_tensor(values, mesh, [Shard(0)])

    class Own:
        def __init__(self, by: float):
            self.values: dict[str, Any] = {
                "a.b": cut(torch.arange(4.0) * by),
                "a": {"b": cut(torch.arange(4.0) + 10 * by)},
            }

        def state_dict(self) -> dict[str, Any]:
            return dict(reversed(self.values.items()) if dist.get_rank() else self.values.items())

        def load_state_dict(self, values: dict[str, Any]) -> None:
            self.values = values

    one, two, model = Own(1), Own(0), wrap(MLP((8, 16, 4)), shardwise.fully_shard, mesh=mesh)
    with shared_directory() as directory:
        stored = {"extra_tensors.own.a.b": torch.empty(4), "extra_tensors.own.a.b_": torch.empty(4)}
        dcp.load(stored, checkpoint_id=save(directory, model=model, extra={"own": one}))
        load(directory, model=model, extra={"own": two})
    assert [*map(torch.Tensor.tolist, stored.values())] == [[10, 11, 12, 13], [0, 1, 2, 3]]
    assert torch.equal(two.values["a.b"].full_tensor(), torch.arange(4.0))
    assert torch.equal(two.values["a"]["b"].full_tensor(), torch.arange(4.0) + 10)

    class Copying(Own):
        def state_dict(self) -> dict[str, Any]:
            return dict(self.values)

        def load_state_dict(self, values: dict[str, Any]) -> None:
            self.values["a.b"].copy_(values["a.b"])
            self.values["a"]["b"].copy_(values["a"]["b"])

    one, two = Copying(1), Copying(0)
    with shared_directory() as directory:
        # As they were named once: in the order of dicts.
        with mock.patch("shardwise.checkpoint.objects.sorted", lambda marks, key: marks, create=True):
            save(directory, model=model, extra={"own": one})
        load(directory, model=model, extra={"own": two})
    assert torch.equal(two.values["a.b"].full_tensor(), torch.arange(4.0))
    assert torch.equal(two.values["a"]["b"].full_tensor(), torch.arange(4.0) + 10)


@on_ranks(2)
def test_parameters_assigned_since_forward_are_saved() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    shardwise.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    old = model[0].weight
    like = {"shape": old.shape, "stride": old.stride(), "run_check": False}
    local = torch.full_like(old.to_local(), 3.0)
    model[0].weight = nn.Parameter(DTensor.from_local(local, old.device_mesh, old.placements, **like))
    with shared_directory() as directory:
        save(directory, model=model)
        with torch.no_grad():
            model[0].weight.zero_()
        load(directory, model=model)
    for _ in range(2):
        assert torch.equal(whole(model[0].weight), torch.full((7, 5), 3.0))
        model(torch.ones(2, 5)).sum().backward()


@on_ranks(4)
def test_only_the_first_rank_warns_of_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.ModuleDict({"shared": nn.Linear(4, 4), "expert": nn.Linear(4, 3)})
    shardwise.fully_shard(model["expert"], mesh=mesh["shard"])
    shardwise.fully_shard(model["shared"], mesh=init_device_mesh("cpu", (4,)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shardwise.full_state_dict(model)
    told = [str(one.message) for one in found if "names of their own" in str(one.message)]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all("expert.weight' (and 1 more) is on ranks [0, 1] and on ranks [2, 3] " in one for one in told)


@on_ranks(1, 2, 3)
def test_a_checkpoint_of_other_ties() -> None:
    """Of a tied weight that is stored with two values neither is taken for the other."""

    def made(tied: bool, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return wrap(Transformer(layers=1, tied=tied), shardwise.fully_shard)

    saved, model = made(False, 1), made(True, 2)
    before = {name: whole(value).clone() for name, value in model.state_dict().items()}
    with shared_directory() as directory:
        save(directory, model=saved)
        with pytest.raises(ValueError, match="have different values in the checkpoint, and the model ties them"):
            load(directory, model=model)
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), before[name])
        for source, target in ((model, made(False, 3)), (model, made(True, 3))):
            save(directory, model=source)
            load(directory, model=target)
            for name, value in target.state_dict().items():
                assert torch.equal(whole(value), before[name])
