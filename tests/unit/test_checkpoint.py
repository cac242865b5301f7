"""Training checkpoints of one process: crashes, damage, names, and everything that they hold beside a model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import errno
import fcntl
import functools
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader

import shardwise
from shardwise.checkpoint import CheckpointError, CorruptFileError, latest, load, save, wait
from shardwise.checkpoint.asynchronous import Background, background, host_copies
from shardwise.checkpoint.atomic import Draft, _locked
from shardwise.checkpoint.full_state import full_state_dict, load_full_state_dict
from shardwise.checkpoint.integrity import BLOCK, Manifest, RunningSum, SummingStream, find_damage
from shardwise.checkpoint.model_state import model_state
from shardwise.checkpoint.objects import leaves, pickled, tree_of, unpickled, warn_of_unsafe
from shardwise.checkpoint.reading import _MetadataUnpickler
from shardwise.checkpoint.safetensors import load_safetensors, save_safetensors
from shardwise.lightning_common import replacing
from shardwise.lightning_common.files import (
    SavedDirectory,
    prepare_file,
    read_file,
    save_file,
    write_directory,
    write_file,
)
from shardwise.lightning_common.replacing import METADATA
from shardwise.lightning_common.weights import load_values


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def train(model: nn.Module, *others: Any, steps: int = 2) -> list[float]:
    """``others`` are optimizers and then schedulers, stepped in this order."""
    losses = []
    for _ in range(steps):
        x = torch.randn(6, 4, dtype=next(model.parameters()).dtype)
        loss = model(x).square().mean()
        loss.backward()
        for other in others:
            other.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# -- Crashes


def fork(body: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=body, args=args, daemon=True)
    process.start()
    return process


def endless_saves(root: Path, seed: int) -> None:
    """Save models whose values all are the number of the step, in different ways."""
    model, step = nn.Linear(64, 65), load(root) if latest(root) is not None else 0
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    while True:
        step += 1
        for parameter in model.parameters():
            parameter.data.fill_(step)
        save(root, model=model, optimizer=optimizer, extra=step, keep=1 + (step + seed) % 3, async_=step % 4 == 3)


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: what is killed here is a process, not the machine."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_fifty_kills_at_random_moments(fast_path: Path) -> None:
    """The newest checkpoint always loads, is whole, and is never older than one that was seen before."""
    tmp_path = fast_path
    generator, seen = random.Random(1), 0
    model = nn.Linear(64, 65)
    save(tmp_path, model=model, optimizer=SGD(model.parameters(), lr=0.1), extra=0)  # and import what that needs
    moments = Counter[str]()
    for round_ in range(50):
        process, before, limit = fork(endless_saves, tmp_path, round_), latest(tmp_path), time.monotonic() + 30
        while latest(tmp_path) == before and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(generator.uniform(0.0, 0.04))
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        names = os.listdir(tmp_path)
        moments.update({kind: any(name.startswith(kind) for name in names) for kind in (".unfinished", ".deleted")})
        newest = latest(tmp_path)
        assert newest is not None
        step = load(tmp_path, model=model)
        assert step >= seen
        if step:
            assert all(torch.equal(p, torch.full_like(p, step)) for p in model.parameters())
        seen = step
    assert seen > 20
    assert moments[".unfinished"] > 5, "hardly any save was interrupted"
    newest = save(tmp_path, model=model, keep=1)
    assert os.listdir(tmp_path) == [newest.name]


def write_limited(root: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save(root, model=nn.Linear(300, 300))
    except OSError as error:
        os._exit(7 if isinstance(error, CheckpointError) and "File too large" in str(error) else 8)
    os._exit(9)


@pytest.mark.parametrize("limit", [100, 10_000, 300_000])
def test_a_file_that_cannot_be_written_whole(tmp_path: Path, limit: int) -> None:
    good = save(tmp_path, model=make())
    process = fork(write_limited, tmp_path, limit)
    process.join(30)
    assert process.exitcode == 7
    assert os.listdir(tmp_path) == [good.name]
    load(tmp_path, model=make(1))


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    written, original = [0], SummingStream.write

    def write(self: SummingStream, data: Any) -> int:
        written[0] += memoryview(data).nbytes
        if written[0] > after:
            self.error = OSError(28, "No space left on device")
            raise self.error
        return original(self, data)

    monkeypatch.setattr(SummingStream, "write", write)


def test_each_tensor_is_summed_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each of the pieces that torch's serialization gives."""
    written, original = list[int](), SummingStream.write

    def write(self: SummingStream, data: Any) -> int:
        written.append(memoryview(data).nbytes)
        return original(self, data)

    monkeypatch.setattr(SummingStream, "write", write)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(10)))
    directory = save(tmp_path, model=model)
    assert 20 <= len(written) <= 25
    assert sum(written) == sum(file.size for file in Manifest.read(directory).files.values())


def test_files_are_on_the_disk_before_the_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, original = list[int](), os.fsync

    def fsync(file: int) -> None:
        sizes.append(os.fstat(file).st_size)
        original(file)

    monkeypatch.setattr(os, "fsync", fsync)
    directory = save(tmp_path, model=make())
    assert {file.stat().st_size for file in directory.iterdir()} <= {*sizes}


def test_the_names_of_files_are_on_the_disk_before_that_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_ino), sync(file))[1])
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append("rename"), rename(path, to))[1])
    directory = save(tmp_path, model=make())
    assert done[-3:] == [directory.stat().st_ino, "rename", tmp_path.stat().st_ino]


@pytest.mark.parametrize("after", [0, 700, 2000, 5000])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    model = make()
    good = save(tmp_path, model=model)
    with monkeypatch.context() as patch:
        full_disk(patch, after)
        with pytest.raises(CheckpointError, match=f"{tmp_path}.*No space left on device") as caught:
            save(tmp_path, model=make(1), keep=1)
        assert isinstance(caught.value, OSError)
    assert os.listdir(tmp_path) == [good.name]
    other = make(1)
    load(tmp_path, model=other)
    assert equal(other, model)
    assert save(tmp_path, model=model).name == "checkpoint-000002"


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for root in (file, file / "below", Path("/proc/nowhere")):
        with pytest.raises(CheckpointError, match=f"no checkpoint can be written into {root}"):
            save(root, model=make())


def hold_draft(root: Path, ready: Any) -> None:
    draft = Draft(root, None)
    (draft.path / "data").write_text("written by another run")
    ready.set()
    time.sleep(60)


def test_the_draft_of_another_run_is_left_alone_until_it_is_dead(tmp_path: Path) -> None:
    ready = multiprocessing.get_context("fork").Event()
    other = fork(hold_draft, tmp_path, ready)
    assert ready.wait(30)
    assert save(tmp_path, model=make()).name == "checkpoint-000002"
    assert (tmp_path / ".unfinished-000001" / "data").exists()
    os.kill(other.pid, signal.SIGKILL)
    other.join(30)
    save(tmp_path, model=make())
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-000002", "checkpoint-000003"]


def test_saves_of_two_runs_at_a_time_have_numbers_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        with _locked(tmp_path):
            others = [pool.submit(Draft, tmp_path, None) for _ in range(2)]
            time.sleep(0.2)
            assert not any(tmp_path.iterdir()), "a draft was made while another save looked for a number"
        drafts = [other.result(60) for other in others]
    assert sorted(draft.final.name for draft in drafts) == ["checkpoint-000001", "checkpoint-000002"]
    for draft in drafts:
        draft.discard()


def test_a_process_forked_within_a_save_does_not_hold_up_the_next(tmp_path: Path) -> None:
    """It has the locked directory open too."""
    with _locked(tmp_path):
        other = fork(time.sleep, 60)
    with ThreadPoolExecutor() as pool:
        try:
            next_one = pool.submit(Draft, tmp_path, None).result(20)
        finally:
            other.kill()
            other.join(30)
    next_one.discard()


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert [save(tmp_path, extra=number, keep=1).name for number in (1, 2)][-1] == "checkpoint-000002"
    assert load(tmp_path) == 2


def test_extra_may_be_a_tensor_without_values(tmp_path: Path) -> None:
    bare = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    for extra in (bare, {"list": [bare]}):
        save(tmp_path, extra=extra)
        loaded = load(tmp_path)
        found = loaded if isinstance(extra, torch.Tensor) else loaded["list"][0]
        assert (found.device, found.dtype, found.shape) == (bare.device, bare.dtype, bare.shape)


# -- Damage


def test_every_bit_counts(tmp_path: Path) -> None:
    model = make()
    path = save(tmp_path, model=model, extra=[1, 2])
    generator, other = random.Random(2), make(1)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for position in (0, len(data) - 1, *generator.sample(range(len(data)), 20)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(CorruptFileError, match=f"{file} is damaged"):
                load(tmp_path, model=other)
        for size in (0, 1, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:size])
            with pytest.raises(CorruptFileError, match=f"{file} is damaged"):
                load(tmp_path, model=other)
        file.write_bytes(data)
    assert equal(other, make(1)), "a damaged checkpoint changed the model"
    assert load(tmp_path, model=other) == [1, 2]


def test_the_message_says_what_else_there_is(tmp_path: Path) -> None:
    first, second = (save(tmp_path, model=make()) for _ in range(2))
    (second / "__0_0.distcp").unlink()
    with pytest.raises(CorruptFileError, match=f"cannot be read.*Nothing was loaded; beside it there are {first.name}"):
        load(tmp_path, model=make())
    load(first, model=make())


@pytest.mark.parametrize("damage", [b"", b"{}\n", None])
def test_the_message_says_so_of_a_damaged_manifest_too(tmp_path: Path, damage: bytes | None) -> None:
    """That is written last, so a machine that dies damages it first."""
    first, second = (save(tmp_path, extra=number) for number in range(2))
    manifest = second / "shardwise.json"
    manifest.write_bytes(manifest.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(CheckpointError, match=rf"Nothing was loaded; beside it there are {first.name}"):
        load(tmp_path)
    assert load(first) == 0


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_sums_do_not_depend_on_how_they_are_taken(size: int) -> None:
    data, generator = memoryview(random.Random(size).randbytes(size)), random.Random(3)
    whole, parts = RunningSum(), RunningSum()
    whole.add(data)
    while data:
        step = generator.randrange(1, BLOCK)
        parts.add(data[:step])
        data = data[step:]
    assert whole.result() == parts.result()
    assert whole.result().size == size
    assert len(whole.result().blocks) == -(-size // BLOCK)


def test_sums_are_what_the_docs_say() -> None:
    data = random.Random(4).randbytes(BLOCK + 12_345)
    assert sums(data) == (xxhash.xxh3_64_intdigest(data[:BLOCK]), xxhash.xxh3_64_intdigest(data[BLOCK:]))


def sums(data: bytes | bytearray) -> tuple[int, ...]:
    running = RunningSum()
    running.add(memoryview(data))
    return running.result().blocks


@pytest.mark.parametrize("unit", [1, 8, 512, 4096, 2**16])
def test_what_is_exchanged_moved_or_lost_shows(unit: int) -> None:
    data, generator = random.Random(5).randbytes(2**20 + 2**16), random.Random(6)
    expected = sums(data)
    for _ in range(5):
        a, b = (unit * position for position in generator.sample(range(len(data) // unit), 2))
        one, other = data[a : a + unit], data[b : b + unit]
        for damaged in (_with(data, {a: other, b: one}), _with(data, {a: other}), _with(data, {a: bytes(unit)})):
            assert damaged == data or sums(damaged) != expected
        moved = bytearray(data)
        moved[a : a + unit] = b""
        assert sums(moved[:b] + one + moved[b:]) != expected


def _with(data: bytes, parts: dict[int, bytes]) -> bytearray:
    changed = bytearray(data)
    for position, part in parts.items():
        changed[position : position + len(part)] = part
    return changed


def test_a_damaged_checkpoint_of_plain_dcp(tmp_path: Path) -> None:
    model = make()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs")
    (file,) = (tmp_path / "theirs").glob("*.distcp")
    content, size = file.read_bytes(), file.stat().st_size
    for part, bad in ((b"little", b"hittle"), (b"torch._utils", b"torch.\xff_tils"), (b"q\x02", b"\xffq")):
        file.write_bytes(content.replace(part, bad))
        with pytest.raises(CheckpointError, match=f"reading the checkpoint {tmp_path / 'theirs'} failed"):
            load(tmp_path / "theirs", model=model)
    file.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"reading the checkpoint {tmp_path / 'theirs'} failed"):
        load(tmp_path / "theirs", model=model)
    file.write_bytes(bytes(100))
    with pytest.raises(CorruptFileError, match=rf"outside of '{file.name}', which has 100 bytes"):
        load(tmp_path / "theirs", model=model)
    (tmp_path / "theirs" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CorruptFileError, match=r"\.metadata is damaged"):
        load(tmp_path / "theirs", model=model)


@pytest.mark.parametrize(
    "what", ["file", "place", "length", "chunk", "same", "overlap", "dtype", "entry", "paths", "path"]
)
def test_metadata_that_do_not_describe_their_files(tmp_path: Path, what: str) -> None:
    """Read by torch, these leave values as they were, read other files, or raise errors that name nothing."""
    model, directory = make(), tmp_path / "theirs"
    dcp.save({"model": model.state_dict()}, checkpoint_id=directory)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["model.0.weight"]
    index = next(index for index in metadata.storage_data if index.fqn == "model.0.weight")
    where = metadata.storage_data[index]
    if what == "file":
        os.mkfifo(tmp_path / "pipe")
        object.__setattr__(where, "relative_path", "../pipe")
    elif what == "place":
        object.__setattr__(where, "offset", -1)
    elif what == "length":
        object.__setattr__(where, "length", 1.5)
    elif what == "chunk":
        tensor.chunks.clear()
    elif what == "overlap":
        rows, shifted = tensor.size[0], torch.Size([1, 0])
        tensor.chunks[:] = [
            ChunkStorageMetadata(tensor.chunks[0].offsets, torch.Size([2, tensor.size[1]])),
            ChunkStorageMetadata(shifted, torch.Size([rows - 2, tensor.size[1]])),
        ]
        metadata.storage_data[dataclasses.replace(index, offset=shifted, index=1)] = where
    elif what == "same":
        half = ChunkStorageMetadata(tensor.chunks[0].offsets, torch.Size([tensor.size[0] // 2, *tensor.size[1:]]))
        tensor.chunks[:] = [half, half]
    elif what == "dtype":
        object.__setattr__(tensor.properties, "dtype", "float32")
    elif what == "entry":
        del metadata.storage_data[index]
    elif what == "path":
        metadata.planner_data["model.0.weight"] = ("model", "0.weighu")
    else:
        metadata.planner_data["model.0.weight"] = 5
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptFileError, match="does not describe the files beside it"):
        load(directory, model=model)


def test_files_that_hold_something_else_than_metadata_tell(tmp_path: Path) -> None:
    """Of these torch takes a part, drops fractions and imaginary parts, or raises errors that name nothing."""
    for number, (stored, told) in enumerate(
        (
            (torch.ones(8, 3), torch.zeros(4, 3)),
            (torch.ones(4, 3, dtype=torch.complex64), torch.zeros(4, 3)),
            (torch.ones(4, 3) / 2, torch.zeros(4, 3, dtype=torch.int64)),
            ("no tensor", torch.zeros(4, 3)),
        )
    ):
        directory, others = tmp_path / str(number), tmp_path / f"{number}-told"
        dcp.save({"model": {"weight": told}}, checkpoint_id=others)
        dcp.save({"model": {"weight": stored}}, checkpoint_id=directory)
        metadata, there = (pickle.loads((path / ".metadata").read_bytes()) for path in (others, directory))
        (index,), (where,) = metadata.storage_data, there.storage_data.values()
        metadata.storage_data[index] = where
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        model = nn.Module()
        model.register_buffer("weight", torch.full_like(told, 7))
        what = f"of shape {tuple(stored.shape)} in {stored.dtype}" if isinstance(stored, torch.Tensor) else "has str"
        with pytest.raises(CorruptFileError, match=f"{re.escape(what)} for 'model.weight'.* shape .4, 3. in"):
            load(directory, model=model)
        assert (model.weight == 7).all()


class Halving(dcp.DefaultSavePlanner):
    """Stores less than the metadata tell, as planners may."""

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value.bfloat16() if isinstance(value, torch.Tensor) else value


def test_files_whose_planner_stores_another_dtype(tmp_path: Path) -> None:
    saved, loaded = nn.Linear(4, 3), nn.Linear(4, 3)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path, planner=Halving())
    load(tmp_path, model=loaded)
    for one, other in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other)


def test_a_pipe_in_the_place_of_a_file(tmp_path: Path) -> None:
    path = save(tmp_path, model=make())
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    with pytest.raises(CorruptFileError, match="it is not a file"):
        load(tmp_path, model=make())
    manifest = Manifest.read(path)
    assert find_damage(path, manifest, 1, 2, lambda _: None) == {"__0_0.distcp": "it is not a file"}


def test_state_of_another_optimizer(tmp_path: Path) -> None:
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    save(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="does not fit AdamW"):
        load(tmp_path, model=model, optimizer=AdamW(model.parameters()))


def test_an_optimizer_that_finds_something_missing(tmp_path: Path) -> None:
    class Looks(SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            self.state = state_dict["state"]
            raise KeyError("mine")

    model = make()
    optimizer, other = SGD(model.parameters(), lr=0.1, momentum=0.9), Looks(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path, model=model, optimizer=optimizer)
    before = other.state
    with pytest.raises(ValueError, match=r"the saved state of the optimizer does not fit Looks: KeyError\('mine'\)"):
        load(tmp_path, model=model, optimizer=other)
    assert other.state is before


def test_several_optimizers_of_other_names(tmp_path: Path) -> None:
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    settings = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["0.weight"]}]}
    dcp.save({"model": model.state_dict(), "first": settings, "second": settings}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"optimizers under '\w+\.', '\w+\.', none of them called 'optimizer'"):
        load(tmp_path, model=model, optimizer=optimizer)


def test_an_object_that_does_not_take_its_state(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> Any:
            return {"step": 1}

        def load_state_dict(self, state: Any) -> None:
            raise KeyError(*state)

    save(tmp_path, extra={"mine": Refuses()})
    with pytest.raises(KeyError, match="step") as caught:
        load(tmp_path, extra={"mine": Refuses()})
    assert caught.value.__notes__ == ["when the Refuses that was passed took extra['mine'] of the checkpoint"]


def test_a_model_of_which_nothing_was_saved(tmp_path: Path) -> None:
    save(tmp_path, model=make(), extra=1)
    with pytest.raises(ValueError, match=r"has no model; it has 'model', 'extra', .* 'other\.weight' were looked for"):
        load(tmp_path, model=nn.ModuleDict({"other": nn.Embedding(2, 2)}), strict=False)


def test_a_checkpoint_of_a_later_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("shardwise.checkpoint.integrity.FORMAT", 1000)
        save(tmp_path, model=make())
    with pytest.raises(CheckpointError, match="has format 1000, which this version of shardwise cannot read"):
        load(tmp_path, model=make())


@pytest.mark.parametrize("kind", [SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_another_kind_of_optimizer_loads_nothing(tmp_path: Path, kind: Any, has_stepped: bool) -> None:
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path, model=model, optimizer=optimizer)
    train(model, optimizer)
    other = kind(model.parameters(), lr=0.3)
    if has_stepped:
        train(model, other)
    before = copy.deepcopy((model.state_dict(), other.state_dict()))
    with pytest.raises(ValueError, match=f"does not fit {kind.__name__}: another kind of optimizer saved it, with"):
        load(tmp_path, model=model, optimizer=other)
    torch.testing.assert_close((model.state_dict(), other.state_dict()), before, rtol=0, atol=0)
    train(model, other)


def test_settings_that_a_scheduler_or_a_newer_version_adds(tmp_path: Path) -> None:
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.1)
    lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9)
    train(model, optimizer)
    del optimizer.param_groups[0]["fused"]
    save(tmp_path, model=model, optimizer=optimizer)
    other = AdamW(model.parameters(), lr=0.3)
    lr_scheduler.OneCycleLR(other, 0.4, total_steps=9)
    load(tmp_path, model=model, optimizer=other)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    train(model, other)


# -- Names


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None
    paths = [save(tmp_path, extra=step, step=step) for step in (9, 10, 100, 20)]
    assert [path.name for path in paths][-1] == "checkpoint-000004-step-20"
    assert latest(tmp_path) == latest(str(tmp_path)) == paths[-1]
    assert load(tmp_path) == 20  # a run that went back to step 10
    os.utime(paths[0])
    shutil.rmtree(paths[-1])
    assert latest(tmp_path) == paths[2]
    assert load(paths[1]) == 10
    assert load(str(paths[0])) == 9
    (tmp_path / "file").write_text("")
    assert latest(tmp_path / "file") is None


def test_more_checkpoints_than_names_have_room_for(tmp_path: Path) -> None:
    for number in (999_998, 999_999):
        save(tmp_path, extra=number).rename(tmp_path / f"checkpoint-{number}")
    newest = save(tmp_path, extra=1_000_000, keep=2)
    assert newest.name == "checkpoint-1000000"
    assert latest(tmp_path) == newest
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1000000", "checkpoint-999999"]


def test_junk_is_passed_over(tmp_path: Path) -> None:
    good = save(tmp_path, extra=1)
    for name in (
        "checkpoint-000009",
        "checkpoint-x",
        "checkpoint-000007.tmp",
        ".unfinished-000008",
        "checkpoint-5-step-",
    ):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "checkpoint-000009" / "shardwise.json").unlink()  # copied in part, say
    (tmp_path / "checkpoint-000010").write_text("a file")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".unfinished-000003").symlink_to(tmp_path / "nowhere")
    assert latest(tmp_path) == good
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        load(tmp_path / "checkpoint-000009")
    assert save(tmp_path, extra=2, keep=1).name == "checkpoint-000011"
    assert not good.exists()
    assert (tmp_path / "checkpoint-000009").exists(), "what is no checkpoint of ours was deleted"
    (tmp_path / "junk" / "a").mkdir(parents=True)
    (tmp_path / "junk" / "b").write_text("")
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint in .*: there are only 'a', 'b'"):
        load(tmp_path / "junk")
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint in .*: it is empty"):
        load(tmp_path / "junk" / "a")


def test_keeping_the_newest(tmp_path: Path) -> None:
    for number in range(1, 6):
        save(tmp_path, extra=number, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-000004", "checkpoint-000005"]
    save(tmp_path, extra=6)
    assert len(os.listdir(tmp_path)) == 3
    for wrong, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="keep must be"):
            save(tmp_path, keep=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be at least 0"):
        save(tmp_path, step=-1)
    assert len(os.listdir(tmp_path)) == 3
    assert save(tmp_path, step=np.int64(7), keep=np.int32(1)).name.endswith("-step-7")  # type: ignore[arg-type]
    assert len(os.listdir(tmp_path)) == 1


def test_an_old_checkpoint_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, extra=1)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(PermissionError("not yours")))
    with pytest.warns(UserWarning, match="could not delete the old checkpoint .*checkpoint-000001: not yours"):
        save(tmp_path, extra=2, keep=1)
    assert load(tmp_path) == 2


def test_an_old_checkpoint_whose_deletion_ends_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no checkpoint any more, whatever is left of it, and the next save deletes the rest."""
    save(tmp_path, model=make())

    def delete_some(path: Path, **_: Any) -> None:
        (path / ".metadata").unlink()
        raise OSError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_some)
        with pytest.warns(UserWarning, match="checkpoint-000001: interrupted"):
            newest = save(tmp_path, model=make(), keep=1)
    shutil.rmtree(newest)
    assert latest(tmp_path) is None
    newest = save(tmp_path, extra=3)
    assert [*tmp_path.iterdir()] == [newest]


def test_links_to_checkpoints_are_deleted_without_what_they_lead_to(tmp_path: Path) -> None:
    """As after moving one to another disk."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    moved = save(root, extra=1).rename(elsewhere)
    (root / "checkpoint-000001").symlink_to(elsewhere)
    assert load(root) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = save(root, extra=2, keep=1)
    assert [*root.iterdir()] == [newest]
    assert load(moved) == 1


def test_saves_of_two_threads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have waited for what was under way before; the second is told, and leaves nothing."""
    begun, ends = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        ends.wait(60)

    background.start(work)
    begun.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(background, "take_error", lambda: None)
        with pytest.raises(RuntimeError, match="another thread of this process is saving"):
            save(tmp_path, extra=1, async_=True)
    ends.set()
    waiting = [threading.Thread(target=wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(60)
    assert not [*tmp_path.iterdir()]
    save(tmp_path, extra=2, async_=True)
    assert load(tmp_path) == 2


class CountingLoader(DataLoader[Any]):
    """Like torchdata's `StatefulDataLoader`: its iterator is made when it is asked for its state, or begins, and draws
    a number then."""

    def __init__(self) -> None:
        super().__init__([*range(8)])  # type: ignore[arg-type]
        self.drawn: int | None = None
        self.position = 0
        self.trains: list[bool] = []
        """Whether gradients were on when its workers would have started, since they were last to."""

    def state_dict(self) -> dict[str, Any]:
        if self.drawn is None:
            self.trains.append(torch.is_grad_enabled())
            self.drawn = int(torch.empty((), dtype=torch.int64).random_())
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.drawn, self.trains = state["position"], None, []

    def step(self) -> None:
        self.state_dict()
        self.position += 1


class Around:
    """An object that has a loader."""

    def __init__(self, loader: CountingLoader) -> None:
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_data_loader_that_draws_a_number(tmp_path: Path, steps: int, around: bool) -> None:
    """The generators go on as in the run that was saved, in the middle of an epoch or before it."""
    torch.manual_seed(0)
    loader = CountingLoader()
    for _ in range(steps):
        loader.step()
    save(tmp_path, extra={"loader": Around(loader) if around else loader})
    loader.step()
    expected = torch.rand(3)
    torch.manual_seed(1)
    other = CountingLoader()
    load(tmp_path, extra={"loader": Around(other) if around else other})
    other.step()
    assert other.position == loader.position
    assert other.trains == [True]
    assert torch.equal(torch.rand(3), expected)


def test_relative_paths_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    path = save("link", extra=1)
    assert path == tmp_path / "link" / "checkpoint-000001"
    for use in (load, latest, functools.partial(save, extra=2)):
        for url in ("s3://bucket/run", Path("s3://bucket/run")):
            with pytest.raises(ValueError, match=r"s3:/.*bucket/run is a URL: give the path of a directory"):
                use(url)
    monkeypatch.chdir("/")
    assert load(tmp_path / "real") == 1
    assert load(path) == 1


# -- Optimizers and schedulers


def test_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    """torch's own functions make one step here, and Adam's first steps then are other ones."""
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.1)
    save(tmp_path, model=model, optimizer=optimizer)
    assert not optimizer.state
    truth = train(model, optimizer)
    other = make(1)
    stepped = AdamW(other.parameters(), lr=0.5)
    train(other, stepped)
    load(tmp_path, model=other, optimizer=stepped)
    assert not stepped.state
    assert train(other, stepped) == truth


def test_an_optimizer_that_made_its_state_on_the_meta_device(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    train(model, optimizer)
    save(tmp_path, model=model, optimizer=optimizer)
    truth = train(model, optimizer)
    with shardwise.init_on_meta():
        other = make(1)
    loaded = torch.optim.Adagrad(other.parameters(), lr=0.5)
    load(tmp_path, model=other, optimizer=loaded)
    assert train(other, loaded) == truth


def test_state_whose_keys_are_numbers(tmp_path: Path) -> None:
    """They are text in the names of tensors: an optimizer would look for its numbers in vain, and start anew."""
    model, other = make(), make(1)
    optimizer, loaded = (SGD(one.parameters(), lr=0.1) for one in (model, other))
    for parameter in model.parameters():
        deep = {1: torch.randn(2), 2.5: [torch.randn(1), {3: torch.randn(1)}], "4": torch.randn(1)}
        optimizer.state[parameter] = {0: {"sum": torch.randn(3), "count": 2}, "deep": deep, "plain": {5: 6}}
    save(tmp_path, model=model, optimizer=optimizer)
    for _ in range(2):  # the second time into a state that is there
        load(tmp_path, model=other, optimizer=loaded)
        for mine, parameter in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(loaded.state[mine], optimizer.state[parameter], rtol=0, atol=0)
            assert [*loaded.state[mine]["deep"]] == [1, 2.5, "4"]
    optimizer.state[parameter]["deep"]["1"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"\.deep of the optimizer has keys of the same text, .*: 1, 2\.5, '4', '1'"):
        save(tmp_path, model=model, optimizer=optimizer)


def test_state_of_the_same_name(tmp_path: Path) -> None:
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[next(model.parameters())] = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}
    with pytest.raises(ValueError, match=r"two things to save have the same name: 'optimizer\.state\..*\.a\.b'"):
        save(tmp_path, model=model, optimizer=optimizer)


def test_state_in_a_wider_dtype_than_its_parameter(tmp_path: Path) -> None:
    model = make(dtype=torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.randn(state["momentum_buffer"].shape)
        state["nested"] = {"a": torch.randn(3, 2), "b": [torch.arange(3), {"c": None}]}
    save(tmp_path, model=model, optimizer=optimizer)
    other = make(1, dtype=torch.bfloat16)
    loaded = SGD(other.parameters(), lr=1.0)
    load(tmp_path, model=other, optimizer=loaded)
    for ours, theirs in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert ours["momentum_buffer"].dtype == torch.float32
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])
        assert ours["nested"]["a"].dtype == torch.float32
        assert torch.equal(ours["nested"]["a"], theirs["nested"]["a"])
        assert ours["nested"]["b"][0].dtype == torch.int64
        assert ours["nested"]["b"][1] == {"c": None}


def test_settings_of_param_groups(tmp_path: Path) -> None:
    model = make()
    first, second = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": first, "lr": torch.tensor(0.25), "name": "first", "more": [1, {"a": 2}]}, {"params": second}]
    groups[0]["steps"] = {0: 0.1, 1000: {"then": {}}}
    optimizer = AdamW(groups, lr=0.1, capturable=False, amsgrad=True)
    optimizer.add_param_group({"params": []})
    train(model, optimizer)
    save(tmp_path, model=model, optimizer=optimizer)
    other = make(1)
    swapped = [{"params": []}, {"params": list(other[2].parameters())}, {"params": [other[0].bias, other[0].weight]}]
    loaded = AdamW(swapped, lr=torch.tensor(7.0), betas=(0.1, 0.2))
    load(tmp_path, model=other, optimizer=loaded)
    by_size = {len(group["params"]) + (group["params"][0] is other[0].bias if group["params"] else 0): group
               for group in loaded.param_groups}  # fmt: skip
    for size, group in ((3, optimizer.param_groups[0]), (2, optimizer.param_groups[1]), (0, optimizer.param_groups[2])):
        assert {k: v for k, v in by_size[size].items() if k != "params"} == {
            k: v for k, v in group.items() if k != "params"
        }
    assert torch.equal(loaded.state[other[0].bias]["exp_avg"], optimizer.state[model[0].bias]["exp_avg"])


def test_other_param_groups_are_an_error_that_names_them(tmp_path: Path) -> None:
    model = make()
    save(tmp_path, model=model, optimizer=SGD([{"params": model[0].parameters()}, {"params": model[2].weight}], lr=0.1))
    other = make(1)
    with pytest.raises(
        ValueError, match=r"param group 0 of SGD .*the nearest one lacks '2.weight' and also has '0.weight'"
    ):
        load(tmp_path, model=other, optimizer=SGD([other[2].weight, other[0].bias], lr=0.1))
    with pytest.raises(ValueError, match=r"SGD has 1 parameters that are not the model's, of shapes \(3, 5\)"):
        save(tmp_path, model=make(), optimizer=SGD([other[2].weight], lr=0.1))
    with pytest.raises(ValueError, match="pass the model that has them too"):
        save(tmp_path, optimizer=SGD(other.parameters(), lr=0.1))
    assert equal(other, make(1))


def test_settings_that_differ_between_the_parameters_of_a_group(tmp_path: Path) -> None:
    """They were saved one by one: which would count must not depend on where the parameters are in memory."""
    model = make()
    model[2].requires_grad_(False)
    own = [{"params": [model[0].weight], "lr": 0.1}, {"params": [model[0].bias], "lr": 0.2}]
    save(tmp_path, model=model, optimizer=SGD(own, momentum=0.9))
    joined = SGD(model[0].parameters(), lr=0.3)
    with pytest.raises(ValueError, match=r"group 0 of SGD has '0.weight' and '0.bias', .* different 'lr': make"):
        load(tmp_path, model=model, optimizer=joined)
    assert joined.param_groups[0]["lr"] == 0.3


def test_several_optimizers_and_schedulers(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, list[Any], list[Any]]:
        model = make(seed)
        optimizers = [AdamW(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1, momentum=0.9)]
        schedulers = [
            lr_scheduler.SequentialLR(
                optimizers[0],
                [lr_scheduler.ConstantLR(optimizers[0], 0.1), lr_scheduler.ExponentialLR(optimizers[0], 0.9)],
                [2],
            ),
            lr_scheduler.MultiStepLR(optimizers[1], [1, 3]),
        ]
        return model, optimizers, schedulers

    model, optimizers, schedulers = build(0)
    train(model, *optimizers, *schedulers)
    save(tmp_path, model=model, optimizer=optimizers, scheduler=schedulers)
    truth = train(model, *optimizers, *schedulers, steps=4)
    model, optimizers, schedulers = build(1)
    load(tmp_path, model=model, optimizer=dict(enumerate(optimizers)), scheduler=schedulers)
    assert train(model, *optimizers, *schedulers, steps=4) == truth


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 3, 3]),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    ],
    ids=["one-cycle", "cosine", "lambda", "multi-step", "cyclic"],
)
def test_schedulers(tmp_path: Path, make_scheduler: Callable[[Any], Any]) -> None:
    def build(seed: int) -> tuple[Any, Any, Any]:
        model = make(seed)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, make_scheduler(optimizer)

    model, optimizer, scheduler = build(0)
    train(model, optimizer, scheduler)
    save(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    truth = train(model, optimizer, scheduler, steps=3)
    model, optimizer, scheduler = build(1)
    load(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert train(model, optimizer, scheduler, steps=3) == truth


def test_plain_dcp_loads_ours_and_ours_loads_plain_dcp(tmp_path: Path) -> None:
    """With a scheduler, as flat items."""
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, scheduler)
    ours = save(tmp_path / "ours", model=model, optimizer=optimizer, scheduler=scheduler, extra=5)
    other = make(1)
    state = {
        "model": other.state_dict(),
        "scheduler": lr_scheduler.StepLR(SGD(other.parameters(), 1.0), 9).state_dict(),
    }
    dcp.load(state, checkpoint_id=ours)
    assert equal(other, model)
    assert state["scheduler"] == scheduler.state_dict()
    dcp.save({**state, "extra": {"a": {"b": 1}, "t": torch.arange(3)}}, checkpoint_id=tmp_path / "theirs")
    third = make(2)
    loaded = lr_scheduler.StepLR(SGD(third.parameters(), 1.0), 9)
    extra = load(tmp_path / "theirs", model=third, scheduler=loaded)
    assert equal(third, model)
    assert loaded.state_dict() == scheduler.state_dict()
    assert extra["a"] == {"b": 1}
    assert torch.equal(extra["t"], torch.arange(3))
    with pytest.raises(ValueError, match="theirs has no optimizer; it has 'model', 'scheduler', 'extra'"):
        load(tmp_path / "theirs", model=third, optimizer=AdamW(third.parameters()))


# -- Models


class Special(torch.Tensor):
    """Of a class of its own, and not contiguous."""

    @staticmethod
    def __new__(cls, value: int) -> Special:
        return torch.arange(6.0).view(2, 3).mul(value).t().as_subclass(cls)


class Odd(nn.Module):
    """Everything that a state dict may hold beside float matrices."""

    def __init__(self, value: int):
        super().__init__()
        self.complex = nn.Parameter(torch.full((3,), complex(value, 1)))
        self.scalar = nn.Parameter(torch.tensor(float(value)))
        self.strided = nn.Parameter(torch.arange(12.0).view(3, 4).mul(value).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.tied = self.strided
        self.register_buffer("conjugate", torch.full((2, 3), complex(value, 2)).conj())
        self.register_buffer(
            "last", torch.arange(24.0).view(1, 2, 3, 4).mul(value).contiguous(memory_format=torch.channels_last)
        )
        self.register_buffer("subclass", Special(value))
        self.register_buffer("flags", torch.tensor([True, False]) if value else torch.zeros(2, dtype=torch.bool))
        self.register_buffer("small", torch.tensor(value, dtype=torch.float8_e4m3fn))
        self.register_buffer("view", torch.arange(10)[value : value + 2])
        self.extra: Any = {"value": value, "tensor": torch.tensor(value)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_all_kinds_of_tensors(tmp_path: Path) -> None:
    model, other = Odd(2), Odd(0)
    path = save(tmp_path, model=model)
    with torch.serialization.safe_globals([Special]):
        load(path, model=other)
    assert equal_bytes(model, other)
    assert other.extra["value"] == 2
    assert other.tied is other.strided
    plain = {"model": {key: value for key, value in Odd(0).state_dict().items() if key != "_extra_state"}}
    with torch.serialization.safe_globals([Special]):
        dcp.load(plain, checkpoint_id=path)
    assert type(other.subclass) is Special
    assert all(torch.equal(plain["model"][key], model.state_dict()[key]) for key in ("complex", "strided", "flags"))


def equal_bytes(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(*(t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))
        for x, y in zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers()), strict=True)
        if x.numel()
    )


def write_value(path: Path, value: float) -> None:
    write_directory(path, {"model": {"weight": torch.full((2, 2), value)}}, {"value": value})


def value_in(path: Path) -> Any:
    return SavedDirectory(path, weights_only=True).metadata()["value"]


def write_foreign(path: Path) -> set[str]:
    """Files that are no part of a checkpoint; their names."""
    (path / "logs" / "deep").mkdir(parents=True)
    (path / "config.yaml").write_text("mine")
    (path / "logs" / "deep" / "events").write_text("mine")
    (path / "link").symlink_to("config.yaml")
    (path / "nowhere").symlink_to("missing")
    return {"config.yaml", "logs", "link", "nowhere"}


def assert_foreign(path: Path) -> None:
    assert (path / "config.yaml").read_text() == (path / "logs" / "deep" / "events").read_text() == "mine"
    assert [os.readlink(path / name) for name in ("link", "nowhere")] == ["config.yaml", "missing"]


@pytest.mark.parametrize("lacks", ["nothing", "links", "exchange"])
def test_files_of_others_stay_where_a_checkpoint_of_lightning_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """On file systems of all kinds."""

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    if lacks == "links":
        monkeypatch.setattr(os, "link", refused)
    if lacks == "exchange":
        monkeypatch.setattr(replacing, "_exchanged", lambda *_: False)
    path = tmp_path / "last"
    foreign = write_foreign(path)
    (path / "__7_0.distcp").write_text("of a save that was killed")
    place, log = path.stat().st_ino, (path / "config.yaml").stat().st_ino
    write_value(path, 1.0)
    assert path.stat().st_ino == place, "a directory that may be somebody's working directory was replaced"
    own = {entry.name for entry in path.iterdir()} - foreign
    assert own == {".metadata", "shardwise.json", "meta.pt", "__0_0.distcp"}
    (path / "__7_0.distcp").write_text("of a save with more ranks")
    for value in (2.0, 3.0):
        write_value(path, value)
        assert value_in(path) == value
        assert_foreign(path)
        assert {entry.name for entry in path.iterdir()} == own | foreign
    assert lacks == "links" or (path / "config.yaml").stat().st_ino == log, "who writes it goes on with the same file"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_a_full_checkpoint_does_not_delete_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "last"
    foreign = write_foreign(path)
    write_value(path, 1.0)
    for replace in (prepare_file, lambda path: write_file(path, lambda draft: save_file(draft, {}))):
        with pytest.raises(IsADirectoryError, match=rf"{path} is a sharded .*'config.yaml', 'link', 'logs', 'nowhere'"):
            replace(path)
    assert_foreign(path)
    assert value_in(path) == 1.0
    shutil.rmtree(path / "logs")
    for name in foreign - {"logs"}:
        (path / name).unlink()
    prepare_file(path)
    assert not path.exists()


def test_a_link_makes_room_for_a_full_checkpoint(tmp_path: Path) -> None:
    """Also where a plugin writes the file, which would write through the link: to the best checkpoint, say."""
    for name in ("file", "directory"):
        target, link = tmp_path / name, tmp_path / f"link_{name}"
        target.write_text("best") if name == "file" else target.mkdir()
        link.symlink_to(name)
        prepare_file(link)
        assert not link.is_symlink()
        assert target.exists()


def test_files_of_others_that_come_and_go_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, exchanged, foreign_in = tmp_path / "last", replacing._exchanged, replacing.foreign_in
    write_foreign(path)
    write_value(path, 1.0)

    def later(one: Path, other: Path) -> bool:
        (other / "logs" / "new").write_text("new")
        (other / "new").write_text("new")
        return exchanged(one, other)

    def listed(path: Path) -> list[Path]:
        return [*foreign_in(path), path / "temporary"]

    monkeypatch.setattr(replacing, "_exchanged", later)
    monkeypatch.setattr(replacing, "foreign_in", listed)
    write_value(path, 2.0)
    assert_foreign(path)
    assert (path / "new").read_text() == (path / "logs" / "new").read_text() == "new"


def test_a_kill_between_two_renamings(tmp_path: Path) -> None:
    """Where names cannot be exchanged, the checkpoint may be missing, but not the files of others."""
    path = tmp_path / "last"
    write_foreign(path)
    write_value(path, 1.0)
    path.rename(tmp_path / ".last.deleted")
    write_value(path, 2.0)
    assert value_in(path) == 2.0
    assert_foreign(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def endless_replacements(path: Path) -> None:
    for step in itertools.count(1):
        write_value(path, float(step))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names cannot be exchanged")
def test_kills_while_a_checkpoint_among_files_of_others_is_replaced(fast_path: Path) -> None:
    path, generator = fast_path / "last", random.Random(2)
    write_foreign(path)
    write_value(path, 0.0)
    for _ in range(12):
        process, before, limit = fork(endless_replacements, path), path.stat().st_ino, time.monotonic() + 30
        while path.stat().st_ino == before and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        model = nn.Linear(2, 2, bias=False)
        SavedDirectory(path, weights_only=True).load_model("model", model, strict=True)
        assert torch.equal(model.weight, torch.full((2, 2), value_in(path)))
        assert_foreign(path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names cannot be exchanged")
def test_a_checkpoint_of_lightning_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a process is killed that replaces one."""
    path, there = tmp_path / "last", list[bool]()
    rename = Path.rename

    def write(value: float) -> None:
        write_directory(path, {"model": {"weight": torch.full((2, 2), value)}}, {"value": value})

    def watched(old: Path, new: Path) -> Path:
        renamed = rename(old, new)
        there.append(path.exists())
        return renamed

    write(1.0)
    monkeypatch.setattr(Path, "rename", watched)
    write(2.0)
    write_file(path, lambda draft: save_file(draft, {"value": 3.0}))
    assert read_file(path, weights_only=True) == {"value": 3.0}
    write(4.0)
    assert SavedDirectory(path, weights_only=True).metadata() == {"value": 4.0}
    assert there
    assert all(there)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "open", "fcntl.flock"}


def killed_before(change: int, write: Callable[[], object]) -> None:
    """In a process of its own: ``write``, but die before one of the changes it makes to the disk."""
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == change:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, _: object) -> None:
        if event in CHANGES:
            count()

    sync, exchange = os.fsync, replacing._exchanged
    os.fsync = lambda descriptor: (count(), sync(descriptor))[1]  # type: ignore[assignment]
    replacing._exchanged = lambda one, other: (count(), exchange(one, other))[1]
    sys.addaudithook(audit)
    write()
    os._exit(0)


def save_value(path: Path, value: float) -> None:
    save(path, model=filled(value), extra=value, keep=1)


def saved_value(path: Path) -> Any:
    model = nn.Linear(2, 2)
    found = load(path, model=model)
    assert all(torch.equal(parameter, torch.full_like(parameter, found)) for parameter in model.parameters())
    return found


def filled(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def directory_value(path: Path) -> Any:
    model, saved = nn.Linear(2, 2, bias=False), SavedDirectory(path, weights_only=True)
    saved.load_model("model", model, strict=True)
    assert torch.equal(model.weight, torch.full((2, 2), saved.metadata()["value"]))
    return saved.metadata()["value"]


def write_one(path: Path, value: float) -> None:
    write_file(path, lambda draft: save_file(draft, {"value": value}))


def weights_value(path: Path) -> float:
    model = filled(-1.0)
    load_safetensors(model, path)
    assert len({*torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()}) == 1
    return next(model.parameters()).flatten()[0].item()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names cannot be exchanged")
@pytest.mark.parametrize(
    ("write", "read"),
    [
        pytest.param(save_value, saved_value, id="save"),
        pytest.param(write_value, directory_value, id="directory"),
        pytest.param(write_one, lambda path: read_file(path, weights_only=True)["value"], id="file"),
        pytest.param(lambda path, value: save_safetensors(filled(value), path), weights_value, id="safetensors"),
    ],
)
def test_a_kill_before_each_change_on_the_disk(
    fast_path: Path, write: Callable[[Path, float], object], read: Callable[[Path], float]
) -> None:
    """The checkpoint of before or the new one is found, whole, and the next save finds nothing in its way."""
    path, value, ends = fast_path / "last", 1.0, set[float]()
    write(path, value)
    for change in itertools.count(1):
        process = fork(killed_before, change, functools.partial(write, path, value + 1))
        process.join(30)
        found = read(path)
        assert found in (value, value + 1)
        ends.add(found - value)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        value += 2
        write(path, value)
        assert read(path) == value
        assert [entry.name for entry in fast_path.iterdir()] == ["last"]
        if path.is_dir():
            assert all(not entry.name.startswith((".unfinished", ".deleted")) for entry in path.iterdir())
    assert change > 5
    assert ends == {0.0, 1.0}


def test_what_a_killed_save_of_the_other_kind_left(tmp_path: Path) -> None:
    """A file in the place of a directory, and the reverse."""
    path = tmp_path / "last"
    for suffix in ("unfinished", "deleted"):
        left = tmp_path / f".last.{suffix}"
        left.write_text("half")
        for value in (1.0, 2.0):
            write_directory(path, {"model": {"weight": torch.full((2, 2), value)}}, {"value": value})
            assert SavedDirectory(path, weights_only=True).metadata() == {"value": value}
        left.mkdir()
        (left / "part").write_text("half")
        for value in (3.0, 4.0):
            write_file(path, lambda draft, value=value: save_file(draft, {"value": value}))
            assert read_file(path, weights_only=True) == {"value": value}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("damage", [0, 100, 700, 7000, b"storage"])
def test_a_damaged_file_of_lightning_is_named(tmp_path: Path, damage: int | bytes) -> None:
    path, directory = tmp_path / "file", tmp_path / "directory"
    for target in (path, directory / METADATA):
        dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=directory)
        torch.save({"weight": torch.ones(2000), "epoch": 3}, target)
        content = target.read_bytes()
        target.write_bytes(
            content[:damage] if isinstance(damage, int) else content.replace(damage, b"\xff" * len(damage))
        )
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: "):
        read_file(path, weights_only=True)
    with pytest.raises(CheckpointError, match=f"{directory / METADATA} cannot be read: "):
        SavedDirectory(directory, weights_only=True).metadata()


class WithExtra(nn.Linear):
    """With extra state of any kind."""

    def __init__(self, extra: Any = None):
        super().__init__(3, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"a": 1, "b": {"c": torch.arange(3)}}, [1, {"a": 2}], {}, {0: 1}])
def test_extra_state_that_is_stored_item_by_item(tmp_path: Path, extra: Any) -> None:
    """By torch, and in the sharded checkpoints of Lightning."""
    model, plain, sharded = WithExtra(extra), WithExtra(), WithExtra()
    if extra and 0 not in extra:  # which torch does not store
        dcp.save({"some": {"net": model.state_dict()}}, checkpoint_id=tmp_path / "plain")
        load(tmp_path / "plain", model=plain)
        assert str(plain.extra) == str(extra)
        assert torch.equal(plain.weight, model.weight)
    write_directory(tmp_path / "sharded", {"model": model_state(model)}, {})
    SavedDirectory(tmp_path / "sharded", weights_only=True).load_model("model", sharded, strict=True)
    assert str(sharded.extra) == str(extra)
    assert torch.equal(sharded.weight, model.weight)


def test_a_checkpoint_of_several_models_is_asked_which(tmp_path: Path) -> None:
    models = {name: nn.Linear(2, 3) for name in ("student", "teacher")}
    dcp.save({"nets": {name: model.state_dict() for name, model in models.items()}}, checkpoint_id=tmp_path)
    loaded = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"under 'nets\.student', 'nets\.teacher'"):
        load(tmp_path, model=loaded)
    load(tmp_path, model=nn.ModuleDict({"nets": nn.ModuleDict({"teacher": loaded})}))
    assert torch.equal(loaded.weight, models["teacher"].weight)


def test_a_part_of_a_model_whose_averages_are_saved_too(tmp_path: Path) -> None:
    model, loaded = nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 3)
    path = save(tmp_path, model=model, extra={"average": model.state_dict()})
    load(path, model=loaded)
    assert torch.equal(loaded.weight, model[0].weight)


def test_theirs_without_the_longest_name_of_the_model(tmp_path: Path) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 3)})
    dcp.save({"net": model.state_dict()}, checkpoint_id=tmp_path)
    loaded = nn.ModuleDict({"body": nn.Linear(2, 3), "a_head_that_is_new": nn.Linear(3, 1)})
    load(tmp_path, model=loaded, strict=False)
    assert torch.equal(loaded["body"].weight, model["body"].weight)


def test_names_without_wrappers(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make()
    model[0] = checkpoint_wrapper(model[0])
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    path = save(tmp_path, model=model, optimizer=optimizer)
    plain = make(1)
    loaded = AdamW(plain.parameters(), lr=1.0)
    load(path, model=plain, optimizer=loaded)
    assert torch.equal(plain[0].weight, model[0].weight)
    inner = make(2)
    inner[0] = checkpoint_wrapper(inner[0])
    again = torch.compile(inner)
    load(path, model=again, optimizer=AdamW(again.parameters()))
    assert equal(again, model)


def test_misfits_are_listed_together(tmp_path: Path) -> None:
    path = save(tmp_path, model=make())
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Linear(1, 1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load(tmp_path, model=other)
    for part in (
        f"the checkpoint {path} does not fit the model",
        "the checkpoint does not have '3.weight', '3.bias'",
        "the model does not have '2.bias'",
        "'0.weight' has shape (6, 4), and (5, 4) in the checkpoint",
        "'0.bias' has shape (6,), and (5,)",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    others = [nn.ModuleList([nn.Linear(size, 1) for _ in range(20)]) for size in (2, 3)]
    path = save(tmp_path / "many", model=others[0])
    with pytest.raises(ValueError, match=r"'11.weight' has shape .*; and 8 more$"):
        load(path, model=others[1])
    rounding = make()
    rounding.register_buffer("extra", torch.tensor(0.5))
    path = save(tmp_path / "rounding", model=rounding)
    rounding.extra = torch.tensor(0)
    with pytest.raises(ValueError, match=r"'extra' is torch.int64, and torch.float32 in the checkpoint"):
        load(path, model=rounding)
    part = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Linear(1, 1))
    load(tmp_path, model=part, strict=False)
    assert torch.equal(part[2].weight, make()[2].weight)


def test_wrong_arguments(tmp_path: Path) -> None:
    model, sparse = make(), nn.Module()
    sparse.register_buffer("weight", torch.eye(2).to_sparse())
    for arguments, match in (
        ({"model": [model]}, "model must be a module, not list"),
        ({"model": model, "optimizer": 3}, "optimizer must be a torch.optim.Optimizer or a list of such, not int"),
        ({"model": sparse}, "model.weight is a tensor of layout torch.sparse_coo"),
        ({"model": model, "optimizer": [model]}, "optimizer must be a torch.optim.Optimizer or a list of such"),
        ({"scheduler": 3}, "scheduler must have state_dict and load_state_dict"),
    ):
        with pytest.raises(TypeError, match=match):
            save(tmp_path, **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("function", "flag"),
    [
        (save, "async_"),
        *((load, flag) for flag in ("rng", "strict", "weights_only")),
        *((full_state_dict, flag) for flag in ("cpu", "rank0_only")),
        (load_full_state_dict, "broadcast_from_rank0"),
        (load_safetensors, "strict"),
    ],
)
def test_a_string_is_no_flag(tmp_path: Path, function: Any, flag: str) -> None:
    model = make()
    arguments: dict[Any, tuple[Any, ...]] = {
        full_state_dict: (model,),
        load_full_state_dict: (model, model.state_dict()),
        load_safetensors: (model, tmp_path),
    }
    message = re.escape(f"{function.__name__}({flag}='no'): pass True or False, not str")
    with pytest.raises(TypeError, match=message):
        function(*arguments.get(function, (tmp_path,)), **{flag: "no"})
    assert not list(tmp_path.iterdir())


# -- What users add


def test_extras_come_back_as_they_were(tmp_path: Path) -> None:
    numbers = [1, 2.5, float("inf"), 10**40, True, None, 1 + 2j, "text", b"bytes", np.float32(1.5), np.int64(3)]
    extra = {
        "numbers": numbers,
        "containers": {3: {"x": ()}, (1, 2): [], "empty": {}, "set": {1, 2}, "counter": Counter("aab")},
        "ordered": OrderedDict(b=1, a=2),
        "when": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
        "path": Path("/a/b"),
        "dtype": torch.bfloat16,
        "state": np.random.default_rng(3).bit_generator.state,
    }
    save(tmp_path, extra={**extra, "tensor": torch.randn(2, 3).t(), "array": np.arange(6).reshape(2, 3)})
    loaded = load(tmp_path)
    assert torch.is_tensor(loaded.pop("tensor"))
    assert np.array_equal(loaded.pop("array"), np.arange(6).reshape(2, 3))
    assert repr(loaded) == repr(extra)
    for value in (7, None, "text", [1, {"a": 2}], (), {}):
        save(tmp_path, extra=value)
        assert load(tmp_path) == value


class Loader:
    """Has a position, as data loaders have."""

    def __init__(self, position: int = 0):
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_extras_of_another_form_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "list", extra=[Loader(3)])
    save(tmp_path / "object", extra=Loader(3))
    save(tmp_path / "schedulers", scheduler=Loader(3))
    loader = Loader()
    for form in ([loader, loader], [], {"loaders": [loader]}, (loader, loader)):
        if form:
            with pytest.raises(
                ValueError, match="extra of the checkpoint has the form list of 1 items, and what is to"
            ):
                load(tmp_path / "list", extra=form)
            with pytest.raises(ValueError, match="extra of the checkpoint has"):
                load(tmp_path / "object", extra=form)
    with pytest.raises(
        ValueError, match="scheduler of the checkpoint has the form dict, and what is to be filled list"
    ):
        load(tmp_path / "schedulers", scheduler=[loader])
    assert loader.position == 0
    load(tmp_path / "list", extra=(loader,))
    assert loader.position == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"more": Loader()}, r"extra of the checkpoint has no 'more'; it has 'step', 'loader'"),
        ([Loader()], r"extra of the checkpoint has the form dict, and what is to be filled list of 1 items"),
        ({"step": [Loader()]}, r"extra\['step'\] of the checkpoint has the form int, and what is to be filled list"),
    ],
)
def test_what_extras_lack_is_known_before_anything_is_loaded(tmp_path: Path, given: Any, message: str) -> None:
    save(tmp_path, model=nn.Linear(2, 2), extra={"step": 1, "loader": Loader(3)})
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        load(tmp_path, model=model, extra=given)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_deeper_model_is_named_before_its_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    save(tmp_path, model=model, optimizer=AdamW(model.parameters()))
    deeper = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"does not have '1\.weight', '1\.bias'"):
        load(tmp_path, model=deeper, optimizer=AdamW(deeper.parameters()))


def test_directories_that_are_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for verb in (latest, load, functools.partial(save, model=model), functools.partial(save_safetensors, model)):
        with pytest.raises(TypeError, match="directory must be a path, not int"):
            verb(3)  # type: ignore[operator]
        with pytest.raises(ValueError, match="directory is no path, since it has a null character"):
            verb(f"{tmp_path}\0")  # type: ignore[operator]
    assert not [*tmp_path.iterdir()]


class Pair(NamedTuple):
    loader: Any
    count: int


def test_tuples_that_are_filled_keep_their_class(tmp_path: Path) -> None:
    save(tmp_path, extra={"pair": (Loader(3), 5)})
    loader = Loader()
    loaded = load(tmp_path, extra={"pair": Pair(loader, 0)})
    assert loaded["pair"].loader is loader
    assert (loader.position, loaded["pair"].count) == (3, 5)


class Dangerous:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Own:
    def __init__(self, value: int):
        self.value = value


def test_objects_that_run_code_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"extra has objects of posix\.mkdir: to load them"):
        save(tmp_path / "dangerous", extra={"a": Dangerous(tmp_path / "ran")})
    with pytest.raises(ValueError, match=r"'extra' of the checkpoint has objects .*mkdir.* pass weights_only=False"):
        load(tmp_path / "dangerous")
    assert not (tmp_path / "ran").exists()
    load(tmp_path / "dangerous", weights_only=False)
    assert (tmp_path / "ran").exists()
    with pytest.warns(UserWarning, match="Own"):
        save(tmp_path / "own", extra=Own(3))
    assert load(tmp_path / "own", weights_only=False).value == 3
    with torch.serialization.safe_globals([Own]), warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "own", extra=Own(4))
        assert load(tmp_path / "own").value == 4


def test_extra_that_contains_itself(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"list": []}
    extra["list"].append(extra)
    with pytest.raises(ValueError, match="extra contains itself"):
        save(tmp_path / "endless", extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_runs_code_is_refused(tmp_path: Path) -> None:
    model = make()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs")
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(Dangerous(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'theirs'}/\.metadata names posix\.mkdir"):
        load(tmp_path / "theirs", model=model)
    assert not (tmp_path / "ran").exists()


def test_trees_and_their_leaves() -> None:
    tree = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": 2}, {}, [torch.tensor(3)]], "f": (1, {}), "g": {4: {"h": {}}}}
    found = list(leaves(tree))
    assert [path for path, _ in found] == [("a", "b"), ("a", "c"), ("d", 0, "e"), ("d", 1), ("d", 2, 0), ("f",), ("g",)]
    assert tree_of(found) == tree


# -- Seeing it


def test_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("shardwise.checkpoint.progress.PATIENCE", 0.0)
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        save(tmp_path, model=make())
        load(tmp_path, model=make())
        shown = terminal.getvalue()
        assert ("Saving" in shown and "Loading" in shown) == terminal.isatty()


AT_EXIT = """
import os, sys, torch
from torch import nn
from shardwise.checkpoint import save
from shardwise.checkpoint.integrity import SummingStream
write = SummingStream.write
def slow(self, data):
    import time
    time.sleep(0.02)
    if sys.argv[2] == "fails":
        self.error = OSError(28, "No space left on device")
        raise self.error
    return write(self, data)
SummingStream.write = slow
save(sys.argv[1], model=nn.Linear(3, 3), async_=True)
print(os.listdir(sys.argv[1]), flush=True)
"""


@pytest.mark.parametrize("ending", ["succeeds", "fails"])
def test_the_process_does_not_end_before_the_checkpoint_is_complete(tmp_path: Path, ending: str) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path), ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "['.unfinished-000001']\n"
    if ending == "succeeds":
        load(tmp_path, model=nn.Linear(3, 3))
        assert not done.stderr
    else:
        assert not os.listdir(tmp_path)
        assert "the last checkpoint was not saved: writing a checkpoint into" in done.stderr


def test_copies_are_waited_for_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = []

    class Stream:
        def __init__(self, device: torch.device):
            self.synchronize = lambda: awaited.append(device)

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    with FakeTensorMode():
        tensors = {(device,): torch.ones(3, device=device) for device in ("cuda:0", "cuda:1", "cpu")}
        copies = host_copies({**tensors, ("step",): 3})
    assert sorted(map(str, awaited)) == ["cuda:0", "cuda:1"]
    assert {str(copies[path].device) for path in tensors} == {"cpu"}


@pytest.mark.filterwarnings("ignore")  # of torch: quantized tensors will go
def test_a_quantized_buffer_beside_training(tmp_path: Path) -> None:
    model, other = make(), make(1)
    for module, value in ((model, 1.5), (other, 0.0)):
        module.register_buffer("table", torch.quantize_per_tensor(torch.full((3,), value), 0.5, 3, torch.quint8))
    save(tmp_path, model=model, async_=True)
    load(tmp_path, model=other)
    assert other.table.dequantize().tolist() == [1.5] * 3


def test_load_tells_once_of_a_save_that_failed(tmp_path: Path) -> None:
    save(tmp_path, extra=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SummingStream, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
        save(tmp_path, extra=2, async_=True)
        background.finish()
    with pytest.raises(CheckpointError, match="No space left"):
        load(tmp_path)
    assert load(tmp_path) == 1
    wait()


def test_a_save_that_failed_keeps_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: SummingStream, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummingStream, "write", fail)
    model = nn.Linear(1, 12_345, bias=False)
    save(tmp_path, model=model, async_=True)
    background.finish()
    gc.collect()
    shapes = [tuple(one.shape) for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    assert shapes.count((12_345, 1)) == 1  # the model's
    with pytest.raises(CheckpointError, match="No space left"):
        wait()


def test_errors_of_each_other_end_a_save_too() -> None:
    """torch raises one while a file's own is handled, and that is raised from it then."""

    def fail() -> None:
        own, other = OSError("of the file"), RuntimeError("of the archive")
        own.__cause__, other.__context__ = other, own
        raise own

    work = Background()
    work.start(fail)
    assert str(work.take_error()) == "of the file"


def load_and_leave(root: Path) -> None:
    wait()
    load(root, model=make())
    os._exit(7)


def test_a_forked_process_does_not_wait_for_the_save_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, model=make())
    may_write, write = threading.Event(), SummingStream.write

    def wait_and_write(self: SummingStream, data: Any) -> int:
        may_write.wait(60)
        return write(self, data)

    monkeypatch.setattr(SummingStream, "write", wait_and_write)
    newest = save(tmp_path, model=make(), async_=True)
    process = fork(load_and_leave, tmp_path)
    process.join(20)
    may_write.set()
    wait()
    assert process.exitcode == 7
    assert latest(tmp_path) == newest


def test_without_another_thread_the_save_is_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        assert save(tmp_path, model=make(), async_=True) == latest(tmp_path)
    wait()


def test_nothing_is_left_open_or_running(tmp_path: Path) -> None:
    save(tmp_path, model=make(), async_=True)
    load(tmp_path, model=make())
    before = len(os.listdir("/proc/self/fd"))
    for index in range(5):
        save(tmp_path, model=make(), async_=index % 2 == 0)
        load(tmp_path, model=make())
        with contextlib.suppress(CheckpointError):
            save("/proc/nowhere", model=make())
        (tmp_path / f".unfinished-{index:06d}").mkdir()  # of a save that was killed
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_user_allowed_stays_allowed() -> None:
    """torch's context manager takes back all that it was given, also what was allowed before."""
    with torch.serialization.safe_globals([datetime.date]):
        item = pickled(datetime.date(2026, 1, 2), "extra")
        warn_of_unsafe(item, "extra")
        assert unpickled(io.BytesIO(item.data), "extra", weights_only=True) == datetime.date(2026, 1, 2)
        assert datetime.date in torch.serialization.get_safe_globals()
    assert unpickled(io.BytesIO(item.data), "extra", weights_only=True) == datetime.date(2026, 1, 2)
    assert datetime.date not in torch.serialization.get_safe_globals()


class _ByGetattr:
    """Pickled as an attribute of ``of``, as Python 3.11.2 pickles members of enumerations."""

    def __init__(self, of: Any, name: str):
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def test_metadata_gives_members_of_enumerations_and_no_other_attributes() -> None:
    def load(value: Any) -> Any:
        return _MetadataUnpickler(io.BytesIO(pickle.dumps(value))).load()

    member = next(iter(_MEM_FORMAT_ENCODING))
    assert load(_ByGetattr(_MEM_FORMAT_ENCODING, member.name)) is member
    with pytest.raises(CheckpointError, match="no enumeration"):
        load(_ByGetattr(torch.Size, "__init__"))
    with pytest.raises(KeyError):
        load(_ByGetattr(_MEM_FORMAT_ENCODING, "__init__"))


NOT_WHOLE = {
    "meta": lambda: torch.empty(3, 5, device="meta"),
    "sparse": lambda: torch.eye(3, 5).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(5)] * 3),
    "tied": lambda: torch.ones(3, 5),
}


@pytest.mark.parametrize("kind", NOT_WHOLE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_lightning_loads_all_of_a_state_dict_or_nothing(kind: str) -> None:
    model = make()
    state = {**make(seed=1).state_dict(), "2.weight": NOT_WHOLE[kind]()}
    if kind == "tied":
        model.other = model[2]  # type: ignore[assignment]
        state.update({"other.weight": torch.zeros(3, 5), "other.bias": state["2.bias"]})
    with pytest.raises(ValueError, match=r"'2\.weight'"):
        load_values(model, state)
    assert torch.equal(model[0].weight, make()[0].weight)


def test_a_sparse_tensor_in_a_sharded_checkpoint_of_lightning(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model\.mask is a tensor of layout"):
        write_directory(tmp_path / "sharded", {"model": {"mask": torch.eye(3).to_sparse()}}, {})
    assert not list(tmp_path.iterdir())


def test_arrays_that_numpy_of_another_version_pickled() -> None:
    """Versions 1 and 2 name their functions in other modules."""
    known = np.empty(0).__reduce__()[0].__module__  # type: ignore[union-attr]
    other = {"numpy._core.multiarray": "numpy.core.multiarray"}.get(known, "numpy._core.multiarray")
    source, stream = (
        zipfile.ZipFile(io.BytesIO(pickled({"a": np.arange(3), "b": np.float64(2)}, "x").data)),
        io.BytesIO(),
    )
    with zipfile.ZipFile(stream, "w") as target:
        for name in source.namelist():
            data = (
                source.read(name).replace(known.encode(), other.encode())
                if name.endswith(".pkl")
                else source.read(name)
            )
            target.writestr(name, data)
    stream.seek(0)
    loaded = unpickled(stream, "x", weights_only=True)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["b"] == 2


class Versioned(nn.Linear):
    """Adds a value to its state dict by itself, and takes it back."""

    def __init__(self, version: int) -> None:
        super().__init__(3, 2)
        self.version = version

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "version"] = self.version

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.version = state_dict.pop(prefix + "version", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_values_that_modules_add_themselves() -> None:
    one, two = nn.Sequential(Versioned(3)), nn.Sequential(Versioned(0))
    load_full_state_dict(two, full_state_dict(one))
    assert two[0].version == 3
    assert torch.equal(one[0].weight, two[0].weight)


@pytest.mark.parametrize("is_tensor", [True, False])
def test_a_rate_that_was_a_tensor_or_is_one(tmp_path: Path, is_tensor: bool) -> None:
    model = nn.Linear(2, 2)

    def made(is_tensor: bool, rate: float) -> AdamW:
        return AdamW(model.parameters(), lr=torch.tensor(rate) if is_tensor else rate)

    save(tmp_path, model=model, optimizer=made(is_tensor, 0.25))
    other = made(not is_tensor, 0.5)
    load(tmp_path, model=model, optimizer=other)
    assert float(other.param_groups[0]["lr"]) == 0.25


@pytest.mark.parametrize("name", [".unfinished-000002", ".deleted-checkpoint-000002", "checkpoint-000002"])
def test_what_an_interrupted_save_left_is_not_loaded(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, model=model)
    (complete,) = tmp_path.glob("checkpoint-*")
    shutil.copytree(complete, tmp_path / name)
    (tmp_path / name / "shardwise.json").unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        load(tmp_path / name, model=model)
