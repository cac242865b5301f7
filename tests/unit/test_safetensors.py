"""Safetensors files without ranks: byte arithmetic, headers, hostile files; and one rank of many."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise.checkpoint.progress import Progress
from shardwise.checkpoint.safetensors import load_safetensors, save_safetensors
from shardwise.checkpoint.tensor_files import DTYPES, Extent, plan_files, read_stored
from shardwise.checkpoint.weights import Region

from ..models import MLP

INDEX = "model.safetensors.index.json"


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offsets, sizes = [], []
    for size in shape:
        offset = draw(st.integers(0, size))
        offsets.append(offset)
        sizes.append(draw(st.integers(0, size - offset)))
    return shape, Region(tuple(offsets), tuple(sizes))


@settings(max_examples=300)
@given(boxes(), st.sampled_from([1, 2, 4]), st.data())
def test_extent_is_the_bytes_of_the_region(box: tuple[tuple[int, ...], Region], itemsize: int, data: Any) -> None:
    shape, region = box
    positions = 100 + torch.arange(math.prod(shape) * itemsize).view(*shape, itemsize)
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        positions = positions.narrow(dim, offset, size)
    expected = positions.flatten().tolist()
    start = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(start, len(expected)))
    runs = list(Extent.of(100, shape, itemsize, region).runs(start, end))
    assert [first + i for first, length in runs for i in range(length)] == expected[start:end]


def test_rows_are_one_run() -> None:
    assert list(Extent.of(8, (10, 3, 2), 4, Region((4, 0, 0), (5, 3, 2))).runs(0, 120)) == [(8 + 96, 120)]


def save_all_dtypes(path: Path) -> dict[str, torch.Tensor]:
    state = {
        label: torch.arange(48).remainder(2).to(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype).view(6, 8)
        for label, dtype in DTYPES.items()
    }
    state |= {"scalar": torch.tensor(3), "empty": torch.zeros(0, 4), "row": torch.zeros(1, 0)}
    save_file(state, path)
    return state


def test_headers_as_the_library_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state = save_all_dtypes(path)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    stored = read_stored(path)
    assert stored.keys() == state.keys()
    for key, found in stored.items():
        assert found.shape == tuple(state[key].shape)
        assert found.dtype == state[key].dtype
        assert found.start - 8 - length == header[key]["data_offsets"][0] or not state[key].numel()


class Plain(nn.Module):
    """Buffers of every dtype."""

    def __init__(self, state: dict[str, torch.Tensor]):
        super().__init__()
        for name, value in state.items():
            self.register_buffer(name, value)


def test_every_dtype_there_and_back_on_a_plain_model(tmp_path: Path) -> None:
    state = save_all_dtypes(tmp_path / "model.safetensors")
    model = Plain({name: torch.zeros_like(value) for name, value in state.items()})
    load_safetensors(model, tmp_path)
    save_safetensors(model, tmp_path / "saved", max_shard_size=300)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        found |= load_file(file)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].untyped_storage().tolist() == value.untyped_storage().tolist()


def test_sparse_tensors_are_named(tmp_path: Path) -> None:
    model = Plain({"counts": torch.eye(3).to_sparse()})
    with pytest.raises(ValueError, match=r"'counts' is a tensor of layout torch\.sparse_coo"):
        save_safetensors(model, tmp_path)
    assert not list(tmp_path.iterdir())
    save_file({"counts": torch.eye(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'counts' is a tensor of layout torch\.sparse_coo"):
        load_safetensors(model, tmp_path)


def test_two_numbers_in_one_element(tmp_path: Path) -> None:
    dtype = torch.float4_e2m1fn_x2
    values = torch.arange(12, dtype=torch.uint8).view(3, 4)
    state = {"even": values.view(dtype), "sliced": torch.zeros(3, 8, dtype=torch.uint8)[:, ::2].view(dtype)}
    model = Plain(state | {"again": state["even"]})
    model.sliced.view(torch.uint8).copy_(values)
    save_safetensors(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in found.values()} == {dtype}
    assert all(torch.equal(value.view(torch.uint8), values) for value in found.values())
    save_file({**found, "again": found["even"].clone()}, tmp_path / "model.safetensors")
    model.even.view(torch.uint8).zero_()
    model.sliced.view(torch.uint8).zero_()
    load_safetensors(model, tmp_path)
    assert all(torch.equal(value.view(torch.uint8), values) for value in model.buffers())
    with pytest.raises(ValueError, match=r"cannot be converted: 'even' is torch\.float4_e2m1fn_x2, in the model"):
        load_safetensors(Plain({"even": torch.zeros(3, 4)}), tmp_path, strict=False)
    with pytest.raises(ValueError, match=r"cannot hold 'scalar' \(torch.float4_e2m1fn_x2, of shape \(\)\)"):
        save_safetensors(Plain({"scalar": torch.zeros((), dtype=torch.uint8).view(dtype)}), tmp_path)


def test_into_a_conjugate_of_memory(tmp_path: Path) -> None:
    model, other = nn.Module(), nn.Module()
    model.numbers = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64))
    other.numbers = nn.Parameter(torch.zeros(2, dtype=torch.complex64).conj())
    save_safetensors(model, tmp_path)
    load_safetensors(other, tmp_path)
    assert torch.equal(other.numbers, model.numbers)


def test_data_is_aligned() -> None:
    tensors = {
        "a": (torch.uint8, (3,)),
        "b": (torch.float64, (1,)),
        "c": (torch.bfloat16, (5,)),
        "d": (torch.float32, (2,)),
    }
    (file,) = plan_files(tensors, 10**9, {})
    for name, (dtype, _) in tensors.items():
        assert file.starts[name] % dtype.itemsize == 0, name
    assert len(file.header) % 8 == 0


@pytest.mark.parametrize(
    ("limit", "files"),
    [(1, 4), (40, 4), (41, 4), (60, 4), (80, 3), (99, 3), (100, 3), (10**9, 1)],
)
def test_sizes_of_files(limit: int, files: int) -> None:
    tensors = {name: (torch.float32, (size,)) for name, size in zip("abcd", (10, 10, 15, 15), strict=True)}
    planned = plan_files(tensors, limit, {})
    assert [key for file in planned for key in file.starts] == list("abcd")
    assert all(file.size - len(file.header) <= limit or len(file.starts) == 1 for file in planned)
    assert len(planned) == files


@pytest.mark.parametrize(
    ("size", "files"),
    [
        *[("1KB", 4), ("1.2 kb", 3), ("1.2KiB", 3), ("2.5kb", 2), (" 5 GB ", 1), ("4001b", 1), ("999", 4), ("1TiB", 1)],
        pytest.param("9" * 400, 1, id="beyond floats"),
    ],
)
def test_written_sizes(tmp_path: Path, size: str, files: int) -> None:
    """Four tensors of 600, 600, 1,200 and 1,000 bytes."""
    sizes = (150, 150, 300, 250)
    model = Plain({name: torch.zeros(size) for name, size in zip("abcd", sizes, strict=True)})
    save_safetensors(model, tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == files


# -- Files that are not what they should be


def good(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    torch.manual_seed(0)
    save_file(MLP().state_dict(), directory / "model.safetensors")
    return directory / "model.safetensors"


def cut(content: bytes) -> bytes:
    return content[:-1]


def longer(content: bytes) -> bytes:
    return content + b"\0"


def empty(_: bytes) -> bytes:
    return b""


def only_header(content: bytes) -> bytes:
    return content[:200]


def huge_header(content: bytes) -> bytes:
    return b"\xff" * 8 + content[8:]


def no_json(content: bytes) -> bytes:
    return content[:8] + b"\0" * 20 + content[28:]


def other_offsets(content: bytes) -> bytes:
    return content.replace(b'"data_offsets":[0,', b'"data_offsets":[4,')


def other_dtype(content: bytes) -> bytes:
    return content.replace(b'"F32"', b'"F99"')


def negative_shape(content: bytes) -> bytes:
    return content.replace(b'"shape":[17]', b'"shape":[-7]')


@pytest.mark.parametrize(
    "damage",
    [cut, longer, empty, only_header, huge_header, no_json, other_offsets, other_dtype, negative_shape],
)
def test_damaged_files_are_named_and_nothing_is_loaded(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = good(tmp_path)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert path.read_bytes() != content
    model = MLP()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"model\.safetensors \(\d+ bytes\) is not a whole safetensors file"):
        load_safetensors(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    path.write_bytes(content)
    load_safetensors(model, tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good(tmp_path)
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(ValueError, match=r"model\.safetensors ends at byte \d+: it was truncated"):
        load_safetensors(MLP(), tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}', b"\xff\xfe\0", b"[" * 100_000],
)
def test_damaged_indexes_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=r"index\.json is not a readable index"):
        load_safetensors(MLP(), tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x/model.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b.safetensors", "a\0b", "./a"],
)
def test_indexes_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    good(tmp_path / "x")
    (tmp_path / "y").mkdir()
    weight_map = dict.fromkeys(MLP().state_dict(), name)
    (tmp_path / "y" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="only files beside the index are read"):
        load_safetensors(MLP(), tmp_path / "y")


def test_indexes_that_promise_too_much(tmp_path: Path) -> None:
    good(tmp_path).rename(tmp_path / "part.safetensors")
    names = list(MLP().state_dict())
    index = {"weight_map": dict.fromkeys(names, "part.safetensors") | {names[0]: "gone.safetensors", "x": "lost"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"do not exist: 'gone\.safetensors', 'lost'"):
        load_safetensors(MLP(), tmp_path)
    index = {"weight_map": dict.fromkeys([*names, "more"], "part.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"their files do not have: 'more' in part\.safetensors"):
        load_safetensors(MLP(), tmp_path)


def test_pipes_in_the_place_of_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other" / INDEX)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "pipe"}}))
    for where in (".", "other", "x.safetensors.index.json"):
        with pytest.raises(ValueError, match="is not a file"):
            load_safetensors(MLP(), tmp_path / where)


def test_what_can_be_given_as_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = good(tmp_path / "real")
    truth = load_file(path)

    def loads(where: Any) -> None:
        model = MLP()
        load_safetensors(model, where)
        assert all(torch.equal(value, truth[name]) for name, value in model.state_dict().items())

    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "model.safetensors").symlink_to("../real/model.safetensors")
    index = {"weight_map": dict.fromkeys(truth, "blob.safetensors")}
    (tmp_path / "cache" / "other.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "cache" / "blob.safetensors").symlink_to(path)
    for where in ("link", "cache"):
        loads(tmp_path / where)
        loads(str(tmp_path / where))
    loads(path)
    loads(tmp_path / "cache" / "other.safetensors.index.json")
    (tmp_path / "cache" / "other.safetensors.index.json").rename(
        tmp_path / "cache" / "other.safetensors.index.fp16.json"
    )
    loads(tmp_path / "cache" / "other.safetensors.index.fp16.json")  # as transformers names that of a variant
    monkeypatch.chdir(tmp_path)
    loads("real")
    with pytest.raises(FileNotFoundError, match="there is no"):
        loads("nowhere")
    (tmp_path / "cache" / "model.safetensors").unlink()
    match = r"neither model\.safetensors nor model\.safetensors\.index\.json; it has blob\.safetensors, other"
    with pytest.raises(FileNotFoundError, match=match):
        loads("cache")
    (tmp_path / "cache" / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is a link to \.\./blobs/gone"):
        loads("cache")
    with pytest.raises(TypeError, match="path_or_dir must be a path, not int"):
        loads(3)
    with pytest.raises(TypeError, match="must be a module"):
        load_safetensors({}, path)  # type: ignore[arg-type]


def test_tensors_without_a_shape_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), nn.LazyLinear(2))
    state = nn.Sequential(nn.ReLU(), nn.Linear(3, 2)).state_dict()
    for verb in (
        lambda: save_safetensors(model, tmp_path),
        lambda: load_safetensors(model, good(tmp_path / "other")),
        lambda: shardwise.save(tmp_path, model=model),
        lambda: shardwise.full_state_dict(model),
        lambda: shardwise.load_full_state_dict(model, state),
    ):
        with pytest.raises(ValueError, match=r"'1\.weight' has no shape yet: run the lazy modules once"):
            verb()


class Expanded(nn.Module):
    """Has tensors whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 3).expand(4, 3))
        self.register_buffer("mask", torch.randn(1).expand(5))


@pytest.mark.parametrize("way", ["safetensors", "checkpoint", "state_dict"])
def test_expanded_tensors_get_memory_of_their_own(tmp_path: Path, way: str) -> None:
    model, loaded = Expanded(), Expanded()
    optimizer = torch.optim.SGD(loaded.parameters(), 1.0)
    with torch.no_grad():
        model.scale = nn.Parameter(torch.randn(4, 3))
    if way == "safetensors":
        save_safetensors(model, tmp_path)
        load_safetensors(loaded, tmp_path)
    elif way == "checkpoint":
        shardwise.save(tmp_path, model=model)
        shardwise.load(tmp_path, model=loaded)
    else:
        shardwise.load_full_state_dict(loaded, shardwise.full_state_dict(model))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert optimizer.param_groups[0]["params"][0] is loaded.scale


# -- One rank of many


@pytest.mark.parametrize(("rank", "size"), [(0, 64), (5, 64), (63, 64), (2, 5)])
def test_one_rank_of_many(tmp_path: Path, fake_mesh: Callable[..., DeviceMesh], rank: int, size: int) -> None:
    """More ranks than rows: most shards are empty."""
    truth = load_file(good(tmp_path))
    with torch.device("meta"):
        model = MLP()
    shardwise.fully_shard(model, mesh=fake_mesh(size, rank=rank))
    load_safetensors(model, tmp_path)
    for name, parameter in model.named_parameters():
        chunks = truth[name].chunk(size)
        expected = chunks[rank] if rank < len(chunks) else truth[name][:0]
        assert torch.equal(parameter.to_local(), expected), name  # type: ignore[attr-defined]


def test_parameters_keep_their_identity_and_marks(tmp_path: Path) -> None:
    """Plain ones on the meta device too; those that cannot (somebody has a weak reference) are replaced."""
    import weakref

    good(tmp_path)
    with torch.device("meta"):
        model = MLP()
    parameters = dict(model.named_parameters())
    parameters["layers.0.weight"].mark = 3  # type: ignore[attr-defined]
    parameters["layers.0.bias"].requires_grad_(False)
    reference = weakref.ref(parameters["layers.1.bias"])
    model.alias = parameters["layers.1.bias"]
    with pytest.raises(ValueError, match=r"layers\.0\.weight.*meta"):
        save_safetensors(model, tmp_path / "none")
    load_safetensors(model, tmp_path)
    assert not any(parameter.is_meta for parameter in model.parameters())
    for name, parameter in parameters.items():
        assert (model.get_parameter(name) is parameter) == (name != "layers.1.bias"), name
    assert model.layers[0].weight.mark == 3
    assert not model.layers[0].bias.requires_grad
    assert model.alias is model.layers[1].bias
    assert reference() is not model.alias


# -- The progress bar


def test_conversions_with_another_default_device(tmp_path: Path) -> None:
    model, wanted = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file({name: value.double() for name, value in wanted.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        load_safetensors(model, tmp_path)
    assert torch.equal(model.weight, wanted.weight)


class RandomBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded, self.drawn = nn.Linear(3, 2), nn.Linear(2, 2)
        self.register_buffer("table", torch.randn(5))


def test_random_buffers_that_were_loaded_are_not_drawn_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    stored = {name: value for name, value in RandomBuffer().state_dict().items() if "drawn" not in name}
    save_file(stored, tmp_path / "model.safetensors")
    with shardwise.init_on_meta():
        model = RandomBuffer()
    assert load_safetensors(model, tmp_path, strict=False).missing_keys == ["drawn.weight", "drawn.bias"]
    shardwise.materialize(model, seed=3)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in stored.items())


class Terminal:
    """An stderr that says it is one."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("shown", "patience", "appears"), [(True, 0.0, True), (False, 0.0, False), (True, 60.0, False)]
)
def test_progress(monkeypatch: pytest.MonkeyPatch, shown: bool, patience: float, appears: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("shardwise.checkpoint.progress.PATIENCE", patience)
    with Progress("loading", 300, shown=shown) as progress:
        for _ in range(3):
            progress.advance(100)
    assert ("loading" in terminal.text) == appears


class HungUp(Terminal):
    """An stderr whose terminal goes away."""

    def __init__(self, writes: int):
        super().__init__()
        self.left = writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("writes", [None, 0, 1, 3])
def test_what_cannot_show_progress_does_not_end_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, writes: int | None
) -> None:
    stream = None if writes is None else HungUp(writes)  # None is what Python has where the descriptor is closed
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("shardwise.checkpoint.progress.PATIENCE", 0.0)
    done = 0
    with Progress("loading", 300, shown=True) as progress:
        for _ in range(3):
            progress.advance(100)
            done += 1
    assert done == 3
    assert sys.stderr is stream


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    tensors = {
        "weight": {"dtype": "F6_E2M3", "shape": [2, 2], "data_offsets": [0, 3]},
        "bias": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    head = json.dumps(tensors).encode()
    head += b" " * (-len(head) % 8)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(11))
    with pytest.raises(ValueError, match="'weight' is of a dtype that torch does not have"):
        load_safetensors(nn.Linear(2, 2), tmp_path)
