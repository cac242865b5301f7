"""Reads leaves from files in the format of `torch.distributed.checkpoint`, with its planner.

What `shardwise.save` wrote is read straight into its destination; torch would first unpickle a copy of each chunk. What
other programs wrote is unpickled, and compared with the metadata beside it.
"""

from __future__ import annotations

import io
import math
import operator
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..core.device import HOST
from ..core.errors import listed
from .atomic import DCP_METADATA
from .integrity import CheckpointError, CorruptFileError, Manifest, is_plain, raw, read_all
from .matching import convertible
from .objects import Path, UnsafeObjectError, key_of, unpickled


class _LoadPlanner(DefaultLoadPlanner):
    """Loads into a flat dict: tensors into its tensors, objects as its values."""

    def __init__(self, weights_only: bool):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = unpickled(value, f"{name!r} of the checkpoint", self._weights_only)


class _MetadataUnpickler(pickle.Unpickler):
    """Takes what DCP's metadata consists of and nothing else: a pickle can name any code to be run."""

    _ALLOWED = frozenset(
        [("torch.distributed.checkpoint.metadata", name) for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )]
        + [("torch.distributed.checkpoint.filesystem", "_StorageInfo")]
        + [("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")]
        + [(module, name) for module in ("pathlib", "pathlib._local") for name in (
            "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath",
        )]
    )  # fmt: skip

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in self._ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member  # early releases of Python 3.11 pickle members of enumerations like this
        raise CheckpointError(
            f"names {module_name}.{global_name}, which is not what checkpoints consist of: if you trust it, pass "
            "weights_only=False"
        )


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise CheckpointError(f"names {name!r} of something that is no enumeration")
    return kind[name]


@dataclass(frozen=True)
class StoredData:
    """The data of a checkpoint on the disk.

    Args:
        directory: of the checkpoint.
        metadata: of DCP.
        manifest: of `shardwise.save`; None if another program wrote it.
        weights_only: whether to refuse objects that run code when they are loaded.
    """

    directory: FilePath
    metadata: Metadata
    manifest: Manifest | None
    weights_only: bool

    @staticmethod
    def open(directory: FilePath, manifest: Manifest | None, weights_only: bool) -> StoredData:
        """
        Raises:
            CheckpointError: if its metadata are not those of a checkpoint.
        """
        path = directory / DCP_METADATA
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load() if weights_only else pickle.load(file)
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from None
        except Exception as error:  # unpickling what is not a pickle may fail in any way
            raise CorruptFileError(f"{path} is damaged: {error}") from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise CorruptFileError(f"{path} has no metadata of a checkpoint")
        try:
            problem = _problem_of(metadata, directory)
        except Exception as error:  # any field of an unpickled object may have any type
            problem = repr(error)
        if problem:
            raise CorruptFileError(f"{path} does not describe the files beside it: {problem}")
        return StoredData(directory, metadata, manifest, weights_only)

    @property
    def kinds(self) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
        """The metadata of everything stored, by key."""
        return self.metadata.state_dict_metadata

    def _path_of(self, key: str) -> Path:
        """Where a key is in the tree that was saved."""
        known = self.metadata.planner_data or {}
        path: Path = tuple(known.get(key, (key,)))
        return path

    def below(self, prefix: str) -> dict[str, Path]:
        """Keys that begin with ``prefix`` (or are it, without its dot), and where they are in the tree below it."""
        keys = (key for key in self.kinds if key.startswith(prefix) or key == prefix[:-1])
        return {key: _path_below(key, self._path_of(key), prefix) for key in keys}

    def tops(self) -> str:
        """The names at the top of the tree, for messages."""
        return listed(dict.fromkeys(str(self._path_of(key)[0]) for key in self.kinds))

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What is known about tensors, by key."""
        return {key: kind for key, kind in self.kinds.items() if isinstance(kind, TensorStorageMetadata)}

    def read_objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under those of ``keys`` that are not tensors, by key."""
        values: dict[str, Any] = {key: None for key in keys if isinstance(self.kinds.get(key), BytesStorageMetadata)}
        self.read(values)
        return values

    def read(self, values: dict[str, Any], advance: Callable[[int], None] = lambda _: None) -> None:
        """Fill ``values``, by key: tensors get this rank's part of what is stored, other values are replaced."""
        planner = _LoadPlanner(self.weights_only)
        planner.set_up_planner(values, self.metadata, True)
        reader: StorageReader = _CheckingReader(self.directory, self.kinds)
        if self.manifest is not None:
            reader = _DirectReader(self.directory, self.kinds, frozenset(self.manifest.unusual), advance)
        reader.set_up_storage_reader(self.metadata, True)
        try:
            with HOST:  # torch reads offsets from tensors on the default device
                plan = create_default_local_load_plan(values, self.metadata)
            reader.read_data(plan, planner).wait()
        except (CheckpointError, UnsafeObjectError):
            raise
        except Exception as error:  # unpickling what is damaged may fail in any way
            raise CheckpointError(
                f"reading the checkpoint {self.directory} failed: {type(error).__name__}: {error}"
            ) from error


def _problem_of(metadata: Metadata, directory: FilePath) -> str | None:
    """What is wrong with the files in ``directory`` that ``metadata`` refers to; None if nothing. torch does not check:
    it skips what is missing, and reads any path that it is given."""
    paths = metadata.planner_data or {}
    if not isinstance(paths, Mapping) or not all(isinstance(path, tuple) for path in paths.values()):
        return "it has no paths of what was saved"
    if wrong := [key for key, path in paths.items() if key != key_of(path)]:
        return f"the paths of {listed(wrong)} are others than the keys say"
    indices: list[MetadataIndex] = []
    for key, kind in metadata.state_dict_metadata.items():
        if isinstance(kind, BytesStorageMetadata):
            indices.append(MetadataIndex(key))
        elif not _is_covered(kind):
            return f"the chunks of {key!r} do not cover it exactly"
        else:
            indices += [MetadataIndex(key, chunk.offsets) for chunk in kind.chunks]
    sizes: dict[str, int] = {}
    for index in indices:
        if (where := metadata.storage_data.get(index)) is None:
            return f"it does not say where {index.fqn!r} is"
        if (name := where.relative_path) not in sizes:
            if FilePath(name).is_absolute() or ".." in FilePath(name).parts:
                return f"{index.fqn!r} is in {name!r}, which is outside of the checkpoint"
            if not (directory / name).is_file():
                return f"{index.fqn!r} is in {name!r}, and there is no such file"
            sizes[name] = (directory / name).stat().st_size
        start, length = operator.index(where.offset), operator.index(where.length)
        if start < 0 or length < 0 or start + length > sizes[name]:
            return f"{index.fqn!r} is outside of {name!r}, which has {sizes[name]:,} bytes"
    return None


def _is_covered(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks lie inside of the tensor, each elsewhere, and have as many elements together as it has."""
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
        and all(
            first >= 0 and count >= 0 and first + count <= size
            for first, count, size in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        )
        for chunk in tensor.chunks
    )
    return (
        isinstance(tensor.properties.dtype, torch.dtype)
        and inside
        and sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size)
        and _are_apart([chunk for chunk in tensor.chunks if math.prod(chunk.sizes)])
    )


def _are_apart(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether no two of ``chunks`` of one tensor, which all have elements, have any in common."""
    starts = [{chunk.offsets[dim] for chunk in chunks} for dim in range(len(chunks[0].offsets))] if chunks else []
    # Along the dim that is cut most often, only few of them begin before another one ends.
    dim = max(range(len(starts)), key=lambda dim: len(starts[dim]), default=0)
    begun: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim : dim + 1]):
        begun = [other for other in begun if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        if any(_overlap(chunk, other) for other in begun):
            return False
        begun.append(chunk)
    return True


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + of_b and b < a + of_a for a, of_a, b, of_b in boxes)


def _path_below(key: str, path: Path, prefix: str) -> Path:
    names = ""
    while path and names != prefix:
        names, path = f"{names}{path[0]}.", path[1:]
        if not prefix.startswith(names):
            return (key[len(prefix) :],)  # the prefix ends inside of a key of the tree
    return path


class _Slice(io.RawIOBase):
    """``length`` bytes of ``file`` from ``start`` on."""

    def __init__(self, file: io.BufferedReader, start: int, length: int):
        super().__init__()
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer)[: max(self._length - self._position, 0)])
        self._position += count
        return count


class _CheckingReader(FileSystemReader):
    """Reads what any program wrote. torch would take a part of a larger tensor for the one that the metadata tell of,
    and drop fractions and imaginary parts.

    Args:
        directory: of the checkpoint.
        kinds: the metadata of everything stored, by key.
    """

    def __init__(self, directory: FilePath, kinds: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
        super().__init__(directory)
        self._directory, self._kinds = directory, kinds

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open(self._directory / name, "rb") as file:
                for item in sorted(items, key=lambda item: int(self.storage_data[item.storage_index].offset)):
                    self._read_item(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: io.BufferedReader, item: ReadItem, planner: LoadPlanner) -> None:
        where = self.storage_data[item.storage_index]
        stored_bytes = io.BufferedReader(_Slice(file, where.offset, where.length))
        stream = self.transforms.transform_load_stream(item, where.transform_descriptors or (), stored_bytes)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(stream.read(-1)))
            return
        seekable = stream if stream.seekable() else io.BytesIO(stream.read(-1))
        stored, chunk = torch.load(seekable, map_location="cpu", weights_only=True), self._chunk_of(item)
        found = _Chunk(tuple(stored.shape), stored.dtype) if isinstance(stored, torch.Tensor) else type(stored).__name__
        # Those who save may store another dtype than the metadata tell of.
        if isinstance(found, str) or found.shape != chunk.shape or not convertible(found.dtype, chunk.dtype):
            key = item.storage_index.fqn
            raise CorruptFileError(f"{file.name} has {found} for {key!r}, and the metadata beside it tell of {chunk}")
        for dim, (start, count) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if count != stored.shape[dim]:  # subclasses need not have a narrow() along every dim
                stored = stored.narrow(dim, start, count)
        target = planner.resolve_tensor(item).detach()
        target.copy_(stored)
        planner.commit_tensor(item, target)

    def _chunk_of(self, item: ReadItem) -> _Chunk:
        """The stored chunk that ``item`` is in."""
        stored = self._kinds[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        return _Chunk(tuple(stored.chunks[item.storage_index.index or 0].sizes), stored.properties.dtype)


class _DirectReader(_CheckingReader):
    """Reads what `shardwise.save` wrote: each tensor is one contiguous run of bytes somewhere in its item.

    Args:
        directory: of the checkpoint.
        kinds: the metadata of everything stored, by key.
        unusual: keys of tensors that are stored otherwise, which are unpickled.
        advance: called with the number of bytes loaded.
    """

    def __init__(
        self,
        directory: FilePath,
        kinds: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
        unusual: frozenset[str],
        advance: Callable[[int], None],
    ):
        super().__init__(directory, kinds)
        self._unusual, self._advance = unusual, advance

    def _read_item(self, file: io.BufferedReader, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO or item.storage_index.fqn in self._unusual:
            super()._read_item(file, item, planner)
            return
        where = self.storage_data[item.storage_index]
        target, chunk = planner.resolve_tensor(item).detach(), self._chunk_of(item)
        payload = _payload(file, where.offset, where.length, chunk)
        _read_box(file, payload, chunk, item, target)
        self._advance(target.nbytes)
        planner.commit_tensor(item, target)


@dataclass(frozen=True)
class _Chunk:
    """A contiguous tensor in a file: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape} in {self.dtype}"

    @property
    def nbytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * self.dtype.itemsize


_DATA = b"archive/data/0"
"""What `torch.save` calls the data of the first storage that it saves."""
_ENTRY, _RECORD = struct.Struct("<4s20xI14xI"), struct.Struct("<26xHH")
"""Parts of a zip archive. What precedes the name in a directory entry: signature, size and position of the record. The
head of a record: lengths of its name and its padding."""


def _payload(file: BinaryIO, start: int, length: int, chunk: _Chunk) -> int:
    """Position in the file of the bytes of ``chunk``, which `torch.save` wrote there as a zip archive. `zipfile` would
    take longer to find it than reading a megabyte takes.

    Raises:
        CorruptFileError: if they are not there.
    """
    end = start + length
    tail = os.pread(file.fileno(), min(length, 4096), max(start, end - 4096))
    entry = tail.rfind(_DATA) - _ENTRY.size
    if entry >= 0:
        signature, size, record = _ENTRY.unpack_from(tail, entry)
        header = os.pread(file.fileno(), _RECORD.size, start + record)
        if signature == b"PK\1\2" and size == min(chunk.nbytes, 2**32 - 1) and len(header) == _RECORD.size:
            payload: int = start + record + _RECORD.size + sum(_RECORD.unpack(header))
            if payload + chunk.nbytes <= end:
                return payload
    raise CorruptFileError(f"{file.name} has no tensor of {chunk.nbytes:,} bytes at byte {start:,}")


def _read_box(file: BinaryIO, payload: int, chunk: _Chunk, item: ReadItem, target: torch.Tensor) -> None:
    """Fill ``target`` with the box of ``chunk`` that ``item`` asks for; only the rows it is in are read.

    Args:
        file: that has the chunk.
        payload: position of the chunk in the file, in bytes.
        chunk: that is stored there.
        item: says where the box starts and how long it is, in each tensor dim.
        target: as large as the box, of any dtype, on any device.

    Raises:
        CorruptFileError: if the file does not have the chunk.
    """
    first, count = (item.storage_offsets[0], item.lengths[0]) if chunk.shape else (0, 1)
    shape = (count, *chunk.shape[1:]) if chunk.shape else ()
    is_whole_rows = tuple(item.lengths) == shape
    fits = target.dtype == chunk.dtype and target.device.type == "cpu" and target.is_contiguous()
    is_raw = is_plain(target) and not target.is_conj() and not target.is_neg()
    rows = target if is_whole_rows and fits and is_raw else torch.empty(shape, dtype=chunk.dtype, device="cpu")
    row_size = math.prod(chunk.shape[1:]) * chunk.dtype.itemsize
    read_all(file.fileno(), raw(rows), payload + first * row_size, file.name)
    if rows is not target:
        for dim in range(1, len(chunk.shape)):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target.copy_(rows)
