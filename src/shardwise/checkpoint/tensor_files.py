"""Safetensors files in the Hugging Face layout: what is in them and where, and moving regions of tensors in and out.

Headers are read and checked by the safetensors library. The data is not read through it: its slices are views of a
memory map, of which every page touched counts as this process's memory, and of which a file that shrinks meanwhile
kills the process. Reads at byte ranges are as fast, take exactly the bytes wanted, and raise if they fail.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..core.device import HOST, pins_memory
from .integrity import CorruptFileError, raw, read_all
from .matching import PACKED, WeightsError
from .weights import Region

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK_NUMEL = 2**21
"""Elements moved at a time, and the size of the host memory through which values are converted or leave a device."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
LABELS = {dtype: label for label, dtype in DTYPES.items()}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of the format's dtypes that are narrower than a byte."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        file: path.
        key: its name there.
        label: the format's name of its dtype.
        dtype: None if torch does not have it, or not for rows of this length.
        shape: of the whole tensor, in elements of ``dtype``.
        start: where its data starts in the file, in bytes.
        version: of the file when its header was read (see `version_of`).
    """

    file: str
    key: str
    label: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    version: tuple[int, ...]


def version_of(descriptor: int) -> tuple[int, ...]:
    """Differs between an open file and what was at its path before, or will be."""
    state = os.fstat(descriptor)
    return state.st_ino, state.st_size, state.st_mtime_ns


# -- What is stored


def read_stored(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a file, of the files of an index, or of a directory that has either.

    Args:
        path: a ``.safetensors`` file, an index, which is a ``.json`` (``model.safetensors.index.fp16.json`` is what
            transformers calls that of a variant), or a directory with ``model.safetensors`` or
            ``model.safetensors.index.json``; where it has both the former counts, as in transformers.

    Raises:
        FileNotFoundError: if there is nothing, or a file of the index is missing.
        CorruptFileError: for an index or a file that is damaged.
        WeightsError: for an index that refers to what it must not, or to tensors that are not there.
        TypeError: if it is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path_or_dir must be a path, not {type(path).__name__}")
    path = Path(path)
    if path.is_dir():
        path = _weights_in(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path} (models of the hub must be downloaded before)")
    _check_file(path)
    return _read_index(path) if path.suffix == ".json" else _read_header(path)


def _weights_in(directory: Path) -> Path:
    for name in (SINGLE, INDEX):
        if (directory / name).exists():
            return directory / name
    for path in (directory / SINGLE, directory / INDEX):
        if path.is_symlink():
            raise FileNotFoundError(f"{path} is a link to {os.readlink(path)}, which does not exist: get it once more")
    others = sorted(entry.name for entry in directory.iterdir() if ".safetensors" in entry.name)
    found = f"; it has {', '.join(others)}: pass the path of the file or index to load" if others else ""
    raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}{found}")


def _check_file(path: Path) -> None:
    """
    Raises:
        CorruptFileError: if it is not a regular file: opening a pipe would wait for its other end.
    """
    if not path.is_file():
        raise CorruptFileError(f"{path} is not a file")


def _read_index(path: Path) -> dict[str, StoredTensor]:
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not a readable index: {error}") from error
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
        raise CorruptFileError(f"{path} is not a readable index: it has no weight_map from tensors to file names")
    names = list(dict.fromkeys(file_of.values()))
    for name in names:
        # Symbolic links may lead anywhere (the hub's cache has them); what the index says may not.
        if name in ("", ".", "..") or "\0" in name or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name}:
            raise WeightsError(f"{path} refers to {name!r}: only files beside the index are read")
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise FileNotFoundError(f"{path} refers to files that do not exist: {', '.join(map(repr, missing))}")
    for name in names:
        _check_file(path.parent / name)
    headers = {name: _read_header(path.parent / name) for name in names}
    absent = [f"{key!r} in {name}" for key, name in file_of.items() if key not in headers[name]]
    if absent:
        raise WeightsError(f"{path} refers to tensors that their files do not have: {', '.join(absent)}")
    return {key: headers[name][key] for key, name in file_of.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb", buffering=0) as file:
            size, version = file.read(8), version_of(file.fileno())
        # The library checks that sizes agree with shapes and that the data has neither holes nor overlaps and ends
        # with the file: so the tensors lie one after the other.
        with safe_open(path, "numpy") as header:
            position, stored = 8 + struct.unpack("<Q", size)[0], {}
            for key in header.offset_keys():
                entry = header.get_slice(key)
                label, shape = str(entry.get_dtype()), tuple(entry.get_shape())
                stored[key] = StoredTensor(str(path), key, label, *_as_torch_has_it(label, shape), position, version)
                position += math.prod(shape) * _bits(label) // 8
        return stored
    except SafetensorError as error:
        actual = path.stat().st_size
        raise CorruptFileError(
            f"{path} ({actual} bytes) is not a whole safetensors file, it may be truncated: {error}"
        ) from error


def _as_torch_has_it(label: str, shape: tuple[int, ...]) -> tuple[torch.dtype | None, tuple[int, ...]]:
    dtype = DTYPES.get(label)
    if dtype is None or dtype not in PACKED:
        return dtype, shape
    if not shape or shape[-1] % PACKED[dtype]:
        return None, shape
    return dtype, (*shape[:-1], shape[-1] // PACKED[dtype])


def _bits(label: str) -> int:
    return _BITS[label] if label in _BITS else 8 * DTYPES[label].itemsize


# -- What is to be stored


@dataclass(frozen=True)
class PlannedFile:
    """One file to write.

    Args:
        name: final one, within the directory.
        header: its first bytes.
        starts: where each tensor's data starts, in bytes.
        size: of the whole file, in bytes.
    """

    name: str
    header: bytes
    starts: Mapping[str, int]
    size: int


def plan_files(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_size: int, metadata: Mapping[str, str]
) -> list[PlannedFile]:
    """Deal tensors to files, in order, of at most ``max_size`` bytes of data unless one tensor alone has more.

    Args:
        tensors: dtype and whole shape by name.
        max_size: in bytes.
        metadata: to be put into every file.

    Raises:
        ValueError: naming the tensors whose dtype the format does not have, or not for scalars.
    """
    unknown = [
        f"{name!r} ({dtype}, of shape {shape})"
        for name, (dtype, shape) in tensors.items()
        if dtype not in LABELS or (dtype in PACKED and not shape)
    ]
    if unknown:
        raise ValueError(f"safetensors files cannot hold {', '.join(unknown)}")
    parts: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if parts[-1] and filled + size > max_size:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return [_plan_file(SINGLE, parts[0], tensors, metadata)]
    return [
        _plan_file(f"model-{number:05d}-of-{len(parts):05d}.safetensors", part, tensors, metadata)
        for number, part in enumerate(parts, 1)
    ]


def _plan_file(
    name: str,
    keys: Sequence[str],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> PlannedFile:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ends = {}
    position = 0
    # The largest elements first: then each tensor starts at a multiple of its element's size.
    for key in sorted(keys, key=lambda key: -tensors[key][0].itemsize):
        dtype, shape = tensors[key]
        end = position + math.prod(shape) * dtype.itemsize
        stored = [*shape[:-1], shape[-1] * PACKED[dtype]] if dtype in PACKED else list(shape)
        header[key] = {"dtype": LABELS[dtype], "shape": stored, "data_offsets": [position, end]}
        ends[key], position = position, end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    begin = 8 + len(encoded)
    starts = {key: begin + start for key, start in ends.items()}
    return PlannedFile(name, struct.pack("<Q", len(encoded)) + encoded, starts, begin + position)


def index_of(files: Sequence[PlannedFile], parameters: int) -> bytes:
    """The index of several files; ``parameters`` counts the elements of the model's parameters."""
    total = sum(file.size - len(file.header) for file in files)
    weight_map = {key: file.name for file in files for key in file.starts}
    metadata = {"total_parameters": parameters, "total_size": total}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()


# -- Moving data


@dataclass(frozen=True)
class Extent:
    """Where the bytes of a region of a stored tensor lie in its file: runs of equal length, in the region's order.

    Args:
        base: where the first run starts.
        run: bytes of each.
        counts, steps: how many runs along each outer dim, and bytes between them.
    """

    base: int
    run: int
    counts: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, start: int, shape: Sequence[int], itemsize: int, region: Region) -> Extent:
        """The extent of ``region`` of a tensor of ``shape`` whose data starts at byte ``start``."""
        steps = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        base = start + sum(offset * step for offset, step in zip(region.offsets, steps, strict=True))
        inner = max(len(shape) - 1, 0)
        while inner and region.sizes[inner] == shape[inner]:
            inner -= 1
        run = itemsize * math.prod(region.sizes[inner:])
        return cls(base, run, tuple(region.sizes[:inner]), tuple(steps[:inner]))

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Position in the file and length of the runs that make up the region's bytes from ``start`` to ``end``."""
        number, skipped = divmod(start, self.run) if self.run else (0, 0)
        while start < end:
            length = min(self.run - skipped, end - start)
            yield self._position(number) + skipped, length
            start, number, skipped = start + length, number + 1, 0

    def _position(self, number: int) -> int:
        position = self.base
        for count, step in zip(reversed(self.counts), reversed(self.steps), strict=True):
            number, index = divmod(number, count)
            position += index * step
        return position


class TensorMover:
    """Moves regions of tensors between open files and memory, block by block.

    Args:
        advance: called with the number of bytes of each block.
    """

    def __init__(self, advance: Callable[[int], None] = lambda _: None):
        self._advance = advance
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, file: int, stored: StoredTensor, region: Region, target: torch.Tensor) -> None:
        """Read ``region`` of a stored tensor into ``target`` (of the region's shape, any dtype, any device).

        Raises:
            OSError: if the file cannot be read.
            CorruptFileError: if it has become too short.
        """
        target = _copyable(target)
        if not target.is_contiguous() or target.is_conj() or target.is_neg():
            whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            self.read(file, stored, region, whole)
            target.copy_(whole)
            return
        flat = target.view(-1)
        is_alike = stored.dtype is not None and target.dtype is _moved_as(stored.dtype)
        # Not bools: their stored bytes may be other than 0 and 1.
        if is_alike and target.dtype is not torch.bool and target.device.type == "cpu":
            for _ in self._blocks(file, stored, region, flat):
                pass
            # As other writes do, which autograd notices by it.
            torch.autograd.graph.increment_version(target)
            return
        for start, block in self._blocks(file, stored, region):
            flat[start : start + block.numel()].copy_(block)

    def differ(
        self, file: int, a: StoredTensor, other_file: int, b: StoredTensor, region: Region, as_: torch.dtype
    ) -> bool:
        """Whether two stored tensors of one shape have, in ``region``, other bits once converted to dtype ``as_``."""
        pairs = zip(self._blocks(file, a, region), TensorMover()._blocks(other_file, b, region), strict=True)
        dtype = _moved_as(as_)
        return any(not torch.equal(_bits_of(x, dtype), _bits_of(y, dtype)) for (_, x), (_, y) in pairs)

    def _blocks(
        self, file: int, stored: StoredTensor, region: Region, into: torch.Tensor | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Blocks of ``region`` as they are read, 1-D, and where each starts: in ``into``, or in the staging memory."""
        assert stored.dtype is not None
        dtype = torch.uint8 if stored.dtype is torch.bool else _moved_as(stored.dtype)
        extent = Extent.of(stored.start, stored.shape, dtype.itemsize, region)
        numel = math.prod(region.sizes)
        for start in range(0, numel, BLOCK_NUMEL):
            end = min(start + BLOCK_NUMEL, numel)
            block = self._staged(end - start, dtype) if into is None else into[start:end]
            memory, filled = raw(block), 0
            for position, length in extent.runs(start * dtype.itemsize, end * dtype.itemsize):
                read_all(file, memory[filled : filled + length], position, stored.file)
                filled += length
            self._advance(filled)
            yield start, block

    def write(self, file: int, start: int, shape: Sequence[int], region: Region, source: torch.Tensor) -> None:
        """Write ``source`` as ``region`` of the tensor of ``shape`` whose data starts at byte ``start``.

        Raises:
            OSError: if the file cannot be written.
        """
        extent = Extent.of(start, shape, source.itemsize, region)
        flat = _copyable(source).reshape(-1)
        for first in range(0, flat.numel(), BLOCK_NUMEL):
            block = flat[first : first + BLOCK_NUMEL]
            if block.device.type != "cpu":
                block = self._staged(block.numel(), block.dtype).copy_(block)
            memory, written, end = raw(block), 0, 0
            for position, length in extent.runs(first * source.itemsize, first * source.itemsize + len(memory)):
                _write_all(file, memory[written : written + length], position)
                written, end = written + length, position + length
            # Exact for one run; of several it covers the last, which is enough for a hint.
            _start_flushing(file, end - written, written)
            self._advance(written)

    def _staged(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = BLOCK_NUMEL * dtype.itemsize
        if self._staging.numel() < size:
            pinned = pins_memory(HOST)
            self._staging = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._staging[: numel * dtype.itemsize].view(dtype)


def _bits_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).view(torch.uint8)


def _moved_as(dtype: torch.dtype) -> torch.dtype:
    """What elements of ``dtype`` are read and written as: bytes where torch copies none."""
    return torch.uint8 if dtype in PACKED else dtype


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a view of it as bytes where torch copies no elements of its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in PACKED else tensor


def _start_flushing(file: int, position: int, length: int) -> None:
    """Start writing the last bytes to the disk, which makes saving two to three times as fast."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            # Linux answers this hint by starting to write the pages back; it drops none before that is done.
            os.posix_fadvise(file, position, length, os.POSIX_FADV_DONTNEED)


def _write_all(file: int, memory: memoryview, position: int) -> None:
    while memory:
        count = os.pwrite(file, memory, position)
        memory, position = memory[count:], position + count
