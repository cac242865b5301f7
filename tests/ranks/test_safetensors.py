"""Safetensors files against the safetensors library: what it wrote we load, what we wrote it loads."""

from __future__ import annotations

import errno
import json
import os
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from shardwise.checkpoint import safetensors as ours
from shardwise.checkpoint.safetensors import load_safetensors, save_safetensors

from ..models import MLP, MODELS, Transformer, build, inputs_for, wrap
from .harness import on_ranks
from .shared import shared_directory
from .truth import whole

State = dict[str, torch.Tensor]


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def write(directory: Path, state: State, files: int = 1) -> None:
    """By the library, on rank 0."""
    if dist.get_rank() == 0:
        names = list(state)
        parts = [names[number::files] for number in range(files)]
        weight_map = {}
        for number, part in enumerate(parts, 1):
            name = "model.safetensors" if files == 1 else f"model-{number:05d}-of-{files:05d}.safetensors"
            save_file({key: state[key].contiguous() for key in part}, directory / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, name)
        if files > 1:
            index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()


def read(directory: Path) -> State:
    """By the library, all files."""
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def assert_state(model: nn.Module, state: State) -> None:
    found = model.state_dict()
    for name, value in state.items():
        ours = whole(found[name])
        assert ours.dtype == value.dtype, name
        assert torch.equal(ours, value), name


def assert_raises_alike(kind: type[BaseException], match: str, action: Callable[[], object]) -> str:
    """The action raises on every rank the same; gives the message."""
    with pytest.raises(kind, match=match) as caught:
        action()
    message = str(caught.value)
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    assert set(messages) == {message}
    return message


# -- Loading


@on_ranks(1, 2, 3, 4, meta=[False, True])
def test_loads_what_the_library_wrote(meta: bool) -> None:
    for name in MODELS:
        load_what_the_library_wrote(name, meta)


def load_what_the_library_wrote(name: str, meta: bool) -> None:
    truth = build(name, seed=1).state_dict()
    model = wrap(on_meta(MODELS[name]) if meta else build(name, seed=2), shardwise.fully_shard, mesh=mesh_of_all())
    parameters = list(model.parameters())
    with shared_directory() as directory:
        write(directory, truth, files=3)
        keys = load_safetensors(model, directory)
    assert keys == ([], [])
    assert_state(model, truth)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    inputs = inputs_for(model, 0)
    expected = build(name, seed=1)
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), expected.eval()(inputs))


@on_ranks(2, 3, preset=["ddp", "zero1", "zero2", "zero3"])
def test_every_preset_computes_with_what_was_loaded(preset: str) -> None:
    """Also where parameters stay gathered between steps."""
    model = wrap(build("mlp", 2), shardwise.fully_shard, mesh=mesh_of_all(), placements=preset)
    inputs = inputs_for(model, 0)
    model(inputs)
    with shared_directory() as directory:
        write(directory, build("mlp", 1).state_dict())
        load_safetensors(model, directory)
        with torch.no_grad():
            assert torch.equal(model(inputs), build("mlp", 1)(inputs))
        save_safetensors(model, directory / "saved")
        assert_equal(read(directory / "saved"), build("mlp", 1).state_dict())


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


class Mixed(nn.Module):
    """Several dtypes in a unit, parameters of one element and of none, a frozen one, buffers of both kinds, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(6, 5, bias=False)
        self.second.weight = self.first.weight
        self.narrow = nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
        self.one = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.none = nn.Parameter(torch.randn(0, 4))
        self.frozen = nn.Parameter(torch.randn(2, 2, 2, dtype=torch.float16), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def make_mixed(seed: int = 1) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def shard_plainly(model: nn.Module) -> nn.Module:
    return shardwise.fully_shard(model, mesh=mesh_of_all())


def shard_on_last_dim(model: nn.Module) -> nn.Module:
    """On dim 1 where it divides evenly."""
    size = dist.get_world_size()

    def place(parameter: nn.Parameter) -> Shard | None:
        last = parameter.ndim - 1
        return Shard(last) if parameter.shape[last] % size == 0 else None

    return shardwise.fully_shard(model, mesh=mesh_of_all(), shard_placement_fn=place)


def shard_and_replicate(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return shardwise.fully_shard(model, mesh=mesh)


def offload(model: nn.Module) -> nn.Module:
    return shardwise.fully_shard(model, mesh=mesh_of_all(), offload_policy=shardwise.CPUOffloadPolicy())


def ignore_some(model: nn.Module) -> nn.Module:
    ignored = {model.narrow, model.first.weight}  # type: ignore[union-attr]
    return shardwise.fully_shard(model, mesh=mesh_of_all(), ignored_params=ignored)


def by_torch(model: nn.Module) -> nn.Module:
    """FSDP2's parameters are DTensors of another owner."""
    return torch_fully_shard(model, mesh=mesh_of_all())


def not_at_all(model: nn.Module) -> nn.Module:
    return model


@on_ranks(
    2, 4, sharding=[shard_plainly, shard_on_last_dim, shard_and_replicate, offload, ignore_some, by_torch, not_at_all]
)
def test_round_trip_of_everything_that_a_unit_may_have(sharding: Callable[[nn.Module], nn.Module]) -> None:
    source = sharding(make_mixed(1))
    truth = make_mixed(1).state_dict()
    with shared_directory() as directory:
        own = directory if sharding is not not_at_all else directory / str(dist.get_rank())
        save_safetensors(source, own, max_shard_size=200)
        del truth["second.weight"]  # one name of a tie
        assert_equal(read(own), truth)
        for target in (sharding(make_mixed(2)), sharding(on_meta(Mixed))):
            assert load_safetensors(target, own) == ([], [])
            assert target.second.weight is target.first.weight  # type: ignore[union-attr]
            assert_state(target, truth | {"second.weight": truth["first.weight"]})
            assert not target.frozen.requires_grad
            assert target.narrow.requires_grad


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Two ranks by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    for layer in model.layers:  # type: ignore[union-attr]
        shardwise.fully_shard(layer, mesh=mesh["data"])
    return model


@on_ranks(4, rows=[8, 10])
def test_beside_tensor_parallelism(rows: int) -> None:
    """Cuts of the same dim and of another, even and not."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return MLP((9, rows, 4, 6))

    truth = make(1).state_dict()
    with shared_directory() as directory:
        save_safetensors(tensor_parallel(make(1)), directory)
        assert_equal(read(directory), truth)
        for target in (tensor_parallel(make(2)), tensor_parallel(on_meta(lambda: make(2)))):
            load_safetensors(target, directory)
            assert_state(target, truth)


@on_ranks(2, stored=[torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int32])
def test_converts_dtypes_as_torch_does(stored: torch.dtype) -> None:
    state = {name: (20 * value).to(stored) for name, value in build("mlp", 1).state_dict().items()}
    for dtype in (torch.float32, torch.bfloat16):
        model = shard_plainly(build("mlp", 2).to(dtype))
        with shared_directory() as directory:
            write(directory, state)
            load_safetensors(model, directory)
        assert_state(model, {name: value.to(dtype) for name, value in state.items()})


@on_ranks(2)
def test_several_tensors_without_elements() -> None:
    """Which have one place in the file, so that the library gives each process another order."""
    state = {f"empty.{index}": torch.empty(0, index) for index in range(12)}
    model = nn.Module()
    model.empty = nn.ParameterList(state.values())
    shardwise.fully_shard(model, mesh=mesh_of_all())
    with shared_directory() as directory:
        write(directory, state)
        assert load_safetensors(model, directory).missing_keys == []


@on_ranks(2)
def test_bools_whose_bytes_are_anything() -> None:
    model = shard_plainly(make_mixed(1))
    with shared_directory() as directory:
        write(directory, {name: value for name, value in make_mixed(1).state_dict().items() if name != "second.weight"})
        if dist.get_rank() == 0:
            content = (directory / "model.safetensors").read_bytes()
            header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
            start = 8 + struct.unpack("<Q", content[:8])[0] + header["mask"]["data_offsets"][0]
            changed = content[:start] + bytes([2, 0, 255]) + content[start + 3 :]
            (directory / "model.safetensors").write_bytes(changed)
        dist.barrier()
        load_safetensors(model, directory)
    assert model.mask.tolist() == [True, False, True]
    assert model.mask.view(torch.uint8).tolist() == [1, 0, 1]  # type: ignore[operator]


def bytes_read() -> int:
    """By read calls of this process, so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def highest_memory(action: Callable[[], object]) -> int:
    """The most bytes that were resident while ``action`` ran, above those before."""

    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


@on_ranks(2, 3, sharding=[shard_plainly, shard_on_last_dim])
def test_a_rank_reads_its_share_alone(sharding: Callable[[nn.Module], nn.Module]) -> None:
    make = lambda: nn.Sequential(*(nn.Linear(360, 600, bias=False) for _ in range(12)))  # noqa: E731
    state = make().state_dict()
    total = sum(value.nbytes for value in state.values())
    model = sharding(on_meta(make))
    with shared_directory() as directory:
        write(directory, state, files=4)
        load_safetensors(shard_plainly(build("mlp")), directory, strict=False)  # imports
        before = bytes_read()
        load_safetensors(model, directory)
        used = bytes_read() - before
    share = total / dist.get_world_size()
    headers = 4 * 1000
    assert share <= used <= share + headers, (used, share)


@on_ranks(2)
def test_memory_stays_within_blocks() -> None:
    make = lambda: nn.Sequential(*(nn.Linear(4096, 2048, bias=False) for _ in range(4)))  # noqa: E731
    total = 4 * 4096 * 2048 * 4
    with shared_directory() as directory:
        model = shard_plainly(on_meta(make))
        write(directory, {name: torch.zeros(2048, 4096) for name in model.state_dict()})
        dist.barrier()
        load_safetensors(shard_plainly(build("mlp")), directory, strict=False)
        loading = highest_memory(lambda: load_safetensors(model, directory))
        saving = highest_memory(lambda: save_safetensors(model, directory / "a"))
        model.bfloat16()
        converted = highest_memory(lambda: load_safetensors(model, directory))
        sharing = highest_memory(lambda: save_safetensors(model, directory / "b", max_shard_size="1KB"))
    assert loading <= total / 2 + 12 * 2**20, loading
    assert saving <= 12 * 2**20, saving
    assert converted <= 20 * 2**20, converted
    assert sharing <= 12 * 2**20, sharing


# -- Names


@on_ranks(2)
def test_one_error_lists_all_that_does_not_fit_and_nothing_is_written() -> None:
    state = build("mlp", 1).state_dict()
    state["layers.0.renamed"] = state.pop("layers.0.weight")
    state["layers.1.weight"] = state["layers.1.weight"].T
    state["layers.1.bias"] = state["layers.1.bias"][:3]
    state["layers.2.bias"] = state["layers.2.bias"].to(torch.complex64)
    state["a.b"], state["c.d"] = torch.zeros(2), torch.zeros(3)
    model = shard_plainly(build("mlp", 2))
    with shared_directory() as directory:
        write(directory, state)
        message = assert_raises_alike(ValueError, "does not fit", lambda: load_safetensors(model, directory))
        assert_raises_alike(RuntimeError, "mis-shaped", lambda: load_safetensors(model, directory, strict=False))
    lines = dict(line.strip().split(": ", 1) for line in message.splitlines()[1:])
    lines["unexpected keys"] = ", ".join(sorted(lines["unexpected keys"].split(", ")))
    assert lines == {
        "missing keys": "'layers.0.weight'",
        "unexpected keys": "'a.b', 'c.d', 'layers.0.renamed'",
        "mis-shaped keys": "'layers.1.weight' has shape (17, 12), in the model (12, 17), "
        "'layers.1.bias' has shape (3,), in the model (12,)",
        "keys of a dtype that cannot be converted": "'layers.2.bias' is torch.complex64, in the model torch.float32",
    }
    assert_state(model, build("mlp", 2).state_dict())


@on_ranks(2, meta=[False, True])
def test_not_strict_gives_the_names_and_loads_the_rest(meta: bool) -> None:
    state, others = build("mlp", 1).state_dict(), build("mlp", 2).state_dict()
    del state["layers.1.weight"], state["layers.2.bias"]
    model = wrap(on_meta(MLP) if meta else build("mlp", 2), shardwise.fully_shard, mesh=mesh_of_all())
    with shared_directory() as directory:
        write(directory, {**state, "more": torch.zeros(1)})
        keys = load_safetensors(model, directory, strict=False)
        assert keys.missing_keys == ["layers.1.weight", "layers.2.bias"]
        assert keys.unexpected_keys == ["more"]
        if meta:
            with pytest.raises(ValueError, match=r"layers\.1\.weight.* without values"):
                model(inputs_for(model, 0))
            assert_raises_alike(ValueError, "layers.1.weight", lambda: save_safetensors(model, directory / "b"))
            assert not (directory / "b").exists()
            write(directory, others)
            load_safetensors(model, directory)
            assert_state(model, others)
            model(inputs_for(model, 0))
        else:
            assert_state(model, others | state)


@on_ranks(2)
def test_rename() -> None:
    truth = build("mlp", 1).state_dict()
    with shared_directory() as directory:
        write(directory, {f"old.{name}": value for name, value in truth.items()} | {"dropped": torch.zeros(1)})

        def load(rename: Any) -> nn.Module:
            model = shard_plainly(build("mlp", 2))
            load_safetensors(model, directory, rename=rename)
            return model

        assert_state(load(lambda name: name[4:] if name != "dropped" else None), truth)
        names = {f"old.{name}": name for name in truth}
        message = assert_raises_alike(ValueError, "unexpected keys: 'dropped'", lambda: load(names))
        assert "missing" not in message
        collide = names | {"old.layers.1.bias": "layers.0.bias", "dropped": "x"}
        message = assert_raises_alike(ValueError, "does not fit", lambda: load(collide))
        assert "renamed alike: 'old.layers.0.bias', 'old.layers.1.bias' to 'layers.0.bias'" in message
        assert "missing keys: 'layers.1.bias'" in message
        assert_raises_alike(TypeError, "rename", lambda: load(["no"]))
        assert_raises_alike(TypeError, "rename gave 3", lambda: load(lambda _: 3))


@on_ranks(2, meta=[False, True])
def test_ties(meta: bool) -> None:
    """Either name is enough; two names must agree."""

    def make() -> nn.Module:
        torch.manual_seed(2)
        return Transformer(tied=True)

    def target() -> nn.Module:
        return wrap(on_meta(make) if meta else make(), shardwise.fully_shard, mesh=mesh_of_all())

    torch.manual_seed(1)
    truth = {name: value.clone() for name, value in Transformer(tied=True).state_dict().items()}
    for left_out in ("embed.weight", "head.weight", None):
        with shared_directory() as directory:
            write(directory, {name: value for name, value in truth.items() if name != left_out}, files=3)
            model = target()
            assert load_safetensors(model, directory) == ([], [])
            assert_state(model, truth)
            assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
    with shared_directory() as directory:
        differ = truth["head.weight"].clone()
        differ[-1, -1] += 1
        write(directory, truth | {"head.weight": differ}, files=3)
        model = target()
        match = "ties what has different values there: 'embed.weight' and 'head.weight'"
        assert_raises_alike(ValueError, match, lambda: load_safetensors(model, directory))
        # Also where this rank's rows of the two are alike.
        assert all(parameter.is_meta == meta for parameter in model.parameters())
        if not meta:
            assert_state(model, make().state_dict())
            model(inputs_for(model, 0))


# -- Failures


@on_ranks(2)
def test_a_failing_read_on_one_rank_raises_on_all_and_the_model_is_refused() -> None:
    state = build("mlp", 1).state_dict()
    preadv = os.preadv
    calls = iter(range(1000))

    def fails_late(*args: Any) -> int:
        if dist.get_rank() == 1 and next(calls) == 3:
            raise OSError(errno.EIO, "disk on fire")
        return preadv(*args)

    for model in (shard_plainly(build("mlp", 2)), shard_plainly(on_meta(MLP))):
        calls = iter(range(1000))
        with shared_directory() as directory:
            write(directory, state)
            with mock.patch("os.preadv", fails_late):
                assert_raises_alike(
                    OSError, "disk on fire.*model.safetensors", lambda model=model: load_safetensors(model, directory)
                )
            with pytest.raises(ValueError, match="without values"):
                model(inputs_for(model, 0))
            load_safetensors(model, directory)
        assert_state(model, state)
        model(inputs_for(model, 0))


@on_ranks(2)
def test_ranks_with_different_files() -> None:
    model = shard_plainly(build("mlp", 2))
    with tempfile.TemporaryDirectory() as name:
        state = build("mlp", 1).state_dict()
        state = state if dist.get_rank() else dict(reversed(state.items())) | {"x": torch.zeros(1)}
        save_file(state, Path(name) / "model.safetensors")
        action = lambda: load_safetensors(model, Path(name) / "model.safetensors", strict=False)  # noqa: E731
        with pytest.raises(ValueError, match="not the same for all ranks"):
            action()
        (Path(name) / "model.safetensors").unlink(missing_ok=dist.get_rank() == 0)
        if dist.get_rank() == 0:
            save_file(state, Path(name) / "model.safetensors")
        assert_raises_alike(FileNotFoundError, "model.safetensors", action)
    assert_state(model, build("mlp", 2).state_dict())


# -- Saving


@on_ranks(2)
def test_a_directory_that_is_none_on_one_rank() -> None:
    model = shard_plainly(build("mlp", 2))
    with tempfile.TemporaryDirectory() as name, pytest.raises(TypeError, match="directory must be a path, not None"):
        save_safetensors(model, None if dist.get_rank() else name)  # type: ignore[arg-type]


def other_hosts() -> Any:
    """Every rank on a host of its own."""
    return mock.patch.object(ours, "_host", return_value=str(dist.get_rank()))


def only_rank_zero_sees() -> Any:
    return mock.patch.object(ours._Target, "is_visible", return_value=dist.get_rank() == 0)


@on_ranks(1, 2, 3, 4)
def test_the_library_loads_what_was_saved() -> None:
    for name in MODELS:
        truth = build(name, 1).state_dict()
        model = wrap(build(name, 1), shardwise.fully_shard, mesh=mesh_of_all())
        with shared_directory() as directory:
            save_safetensors(model, directory)
            assert [entry.name for entry in directory.iterdir()] == ["model.safetensors"]
            assert_equal(load_file(directory / "model.safetensors"), truth)
            limit = 1000
            save_safetensors(model, str(directory), max_shard_size=limit)
            files = sorted(directory.glob("*.safetensors"))
            count = len(files)
            assert count > 1
            assert [file.name for file in files] == [
                f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
            ]
            index = json.loads((directory / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(value.nbytes for value in truth.values())
            assert index["metadata"]["total_parameters"] == sum(value.numel() for value in model.parameters())
            for file in files:
                state = load_file(file)
                assert set(state) == {key for key, name in index["weight_map"].items() if name == file.name}
                assert sum(value.nbytes for value in state.values()) <= limit or len(state) == 1
            assert_equal(read(directory), truth)
            assert len(list(directory.iterdir())) == count + 1
            save_safetensors(model, directory, max_shard_size="2MiB")
            assert [entry.name for entry in directory.iterdir()] == ["model.safetensors"]


@on_ranks(3, apart=[other_hosts, only_rank_zero_sees])
def test_ranks_of_several_hosts_gather(apart: Callable[[], Any]) -> None:
    for make in (make_mixed, lambda: build("conv", 1)):
        truth = make().state_dict()
        truth.pop("second.weight", None)
        with shared_directory() as directory, apart():
            save_safetensors(shard_plainly(make()), directory, max_shard_size=300)
            assert_equal(read(directory), truth)


class Between(nn.Module):
    """A linear layer between two buffers, which have as many elements together at any ``size`` up to 100."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("before", torch.zeros(size))
        self.linear = nn.Linear(6, 6)
        self.after = nn.Module()
        self.after.register_buffer("last", torch.zeros(100 - size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@on_ranks(3, apart=[False, True])
def test_ranks_that_would_write_other_files(apart: bool) -> None:
    alike, other = Between(40), Between(40 + 4 * (dist.get_rank() == 2))
    sizes = 100 if dist.get_rank() == 2 else 1000
    with shared_directory() as directory, other_hosts() if apart else nullcontext():
        for model, size, what in (
            (alike, sizes, "ranks 0 and 2 do not have the same max_shard_size or order of tensors"),
            (other, 1000, "ranks 0 and 2 do not have the same 'before', 'after.last'"),
        ):
            shardwise.fully_shard(model, mesh=mesh_of_all())
            action = lambda model=model, size=size: save_safetensors(model, directory, max_shard_size=size)  # noqa: E731
            assert_raises_alike(ValueError, what, action)
        own = directory / "own" if dist.get_rank() == 2 else directory
        action = lambda: save_safetensors(alike, own)  # noqa: E731
        assert_raises_alike(ValueError, "directory is .* on rank 0 and .*/own on rank 2: all ranks that hold", action)
        assert list(directory.iterdir()) == []


@on_ranks(2, 4)
def test_replicas_that_have_units_in_another_order_share_all_of_them() -> None:
    replicas = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    names = ["wide", "narrow"] if replicas.get_local_rank("replicate") else ["narrow", "wide"]
    dtypes = {"wide": torch.float32, "narrow": torch.bfloat16}  # a file has the wider ones first, in either order
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False, dtype=dtypes[name]) for name in names})
    for name in dtypes:
        nn.init.ones_(model[name].weight)
        shardwise.fully_shard(model[name], mesh=replicas)
    with shared_directory() as directory:
        save_safetensors(model, directory)
        assert_equal(read(directory), {f"{name}.weight": torch.ones(4, 4, dtype=dtypes[name]) for name in names})
        dist.barrier()


@on_ranks(2)
def test_what_goes_wrong_while_one_rank_writes_for_all_raises_on_all() -> None:
    def fails(*_: Any) -> int:
        raise RuntimeError("no memory to copy to")

    model = shard_plainly(build("mlp", 2))
    with shared_directory() as directory, other_hosts():
        broken = mock.patch("os.pwrite", fails) if dist.get_rank() == 0 else mock.patch("os.getpid")
        with broken:
            assert_raises_alike(RuntimeError, "no memory to copy to", lambda: save_safetensors(model, directory))
        assert list(directory.iterdir()) == []
        save_safetensors(model, directory)


@on_ranks(2, several=[False, True], apart=[False, True])
def test_a_full_disk_on_one_rank_leaves_the_earlier_weights(several: bool, apart: bool) -> None:
    earlier, limit = build("mlp", 1).state_dict(), 300 if several else "5GB"

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with shared_directory() as directory:
        save_safetensors(shard_plainly(build("mlp", 1)), directory, max_shard_size=limit)
        before = sorted(entry.name for entry in directory.iterdir())
        model = shard_plainly(build("mlp", 2))
        full = mock.patch("os.pwrite", fails) if dist.get_rank() == (0 if apart else 1) else mock.patch("os.getpid")
        with full, other_hosts() if apart else mock.patch("os.getpid"):
            assert_raises_alike(
                OSError,
                "No space left.*model.*safetensors",
                lambda: save_safetensors(model, directory, max_shard_size=limit),
            )
        assert sorted(entry.name for entry in directory.iterdir()) == before
        assert_equal(read(directory), earlier)
        save_safetensors(model, directory, max_shard_size=limit)
        assert_equal(read(directory), build("mlp", 2).state_dict())


@on_ranks(2)
def test_an_interrupt_of_one_rank_leaves_the_ranks_in_step() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        model = shard_plainly(build("mlp", 1))
        for rank in (0, 1):
            is_own = dist.get_rank() == rank
            if is_own:
                patch.setattr(ours.TensorMover, "write", interrupted)
            with pytest.raises(KeyboardInterrupt if is_own else RuntimeError):
                save_safetensors(model, directory)
            patch.undo()
            assert os.listdir(directory) == []
            dist.barrier()
        save_safetensors(model, directory)
        load_safetensors(model, directory)


@on_ranks(2)
def test_a_file_that_is_replaced_while_it_is_read() -> None:
    """By one of another layout, between the header and the data."""
    check, path = ours._check_same, "model.safetensors"

    def check_and_replace(*given: Any) -> None:
        check(*given)
        if dist.get_rank() == 0:
            (directory / "new").replace(directory / path)
        dist.barrier()

    with shared_directory() as directory, pytest.MonkeyPatch.context() as patch:
        state = {name: value.double() for name, value in build("mlp", 1).state_dict().items()}
        if dist.get_rank() == 0:
            save_file(build("mlp", 1).state_dict(), directory / path)
            save_file(state, directory / "new")
        dist.barrier()
        model = shard_plainly(build("mlp", 2))
        patch.setattr(ours, "_check_same", check_and_replace)
        assert_raises_alike(ValueError, f"{path} was replaced", lambda: load_safetensors(model, directory))
        patch.undo()
        load_safetensors(model, directory)
        assert_state(model, build("mlp", 1).state_dict())


@on_ranks(2)
def test_a_disk_too_full_for_a_header_is_told_with_the_file() -> None:
    model = shard_plainly(build("mlp", 1))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with shared_directory() as directory:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, unlimited[1]))
        try:
            assert_raises_alike(OSError, f"{directory}/model.safetensors", lambda: save_safetensors(model, directory))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert not list(directory.iterdir())


@on_ranks(2)
def test_directories_that_cannot_be_written() -> None:
    model = shard_plainly(build("mlp", 1))
    with shared_directory() as directory:
        (directory / "file").write_text("")
        assert_raises_alike(OSError, "file", lambda: save_safetensors(model, directory / "file"))
        assert_raises_alike(OSError, "file", lambda: save_safetensors(model, directory / "file" / "below"))
        assert_raises_alike(OSError, "", lambda: save_safetensors(model, Path("/proc/none")))
        for size in (0, -5, "many", "5 XB", "", "0GB"):
            assert_raises_alike(
                ValueError, "max_shard_size", lambda size=size: save_safetensors(model, directory, max_shard_size=size)
            )
        for size in (2.5, None, True):
            assert_raises_alike(
                TypeError, "max_shard_size", lambda size=size: save_safetensors(model, directory, max_shard_size=size)
            )
        assert [entry.name for entry in directory.iterdir()] == ["file"]


@on_ranks(2, apart=[False, True])
def test_names_without_wrappers_and_the_first_ranks_buffers(apart: bool) -> None:
    def make(seed: int) -> nn.Module:
        model = build("conv", seed)
        for number, layer in enumerate(model.layers):  # type: ignore[union-attr, arg-type]
            model.layers[number] = torch.compile(layer) if number else checkpoint_wrapper(layer)  # type: ignore[index, operator]
        return model

    truth = build("conv", 1).state_dict()
    model = shard_plainly(make(1))
    assert any("_orig_mod" in name for name in model.state_dict())
    if dist.get_rank():
        for buffer in model.buffers():
            buffer.add_(1)
    with shared_directory() as directory, other_hosts() if apart else mock.patch("os.getpid"):
        save_safetensors(model, directory, max_shard_size=100)
        assert_equal(read(directory), truth)
        target = shard_plainly(make(2))
        load_safetensors(target, directory)
    for found, expected in zip(target.state_dict().values(), truth.values(), strict=True):
        assert torch.equal(whole(found), expected)


class Counted(nn.Linear):
    """Extra state that is a tensor, or is not."""

    def __init__(self, count: Any):
        super().__init__(3, 3)
        self.count = count

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


@on_ranks(2)
def test_extra_state() -> None:
    with shared_directory() as directory:
        save_safetensors(shard_plainly(nn.Sequential(Counted(torch.tensor([3.0, 4.0])))), directory)
        target = shard_plainly(nn.Sequential(Counted(torch.zeros(2))))
        load_safetensors(target, directory)
        assert target[0].count.tolist() == [3.0, 4.0]  # type: ignore[index]
        model = shard_plainly(nn.Sequential(Counted({"a": 1})))
        assert_raises_alike(ValueError, "0._extra_state", lambda: save_safetensors(model, directory / "b"))
        model = shard_plainly(nn.Sequential(nn.Linear(3, 3).to(torch.complex128)))
        assert_raises_alike(ValueError, "'0.weight'.*complex128", lambda: save_safetensors(model, directory / "b"))


class CountedElsewhere(Counted):
    """Takes its extra state on the first rank alone."""

    def set_extra_state(self, state: Any) -> None:
        if dist.get_rank():
            raise RuntimeError("no place for a count")
        super().set_extra_state(state)


@on_ranks(2)
def test_extra_state_that_one_rank_does_not_take_raises_on_all() -> None:
    with shared_directory() as directory:
        save_safetensors(shard_plainly(nn.Sequential(Counted(torch.ones(2)))), directory)
        target = shard_plainly(nn.Sequential(CountedElsewhere(torch.zeros(2))))
        assert_raises_alike(RuntimeError, "no place for a count", lambda: load_safetensors(target, directory))


@on_ranks(2)
def test_abandoned_files_are_removed() -> None:
    with shared_directory() as directory:
        old, new = (directory / f".model.safetensors.{name}.partial" for name in "ab")
        if dist.get_rank() == 0:
            old.touch()
            new.touch()
            os.utime(old, (time.time() - 1e7,) * 2)
        dist.barrier()
        save_safetensors(wrap(MLP((8, 16, 4)), shardwise.fully_shard, mesh=mesh_of_all()), directory)
        dist.barrier()
        assert not old.exists()
        assert new.exists()
        dist.barrier()
