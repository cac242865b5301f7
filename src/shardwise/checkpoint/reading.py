"""Leaves from files, by `torch.distributed.checkpoint`'s planner and from its format.

What `shardwise.save` wrote is read straight to where it belongs; torch would unpickle a copy of each whole chunk first.
What others wrote is read by torch.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .atomic import DCP_METADATA
from .integrity import CheckpointError, CorruptFileError, is_plain, raw
from .names import listed
from .objects import Path, unpickled


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
        raise CheckpointError(
            f"the checkpoint's {DCP_METADATA} names {module_name}.{global_name}, which is not what checkpoints consist "
            "of: if you trust it, pass weights_only=False"
        )


@dataclass(frozen=True)
class StoredData:
    """The data of a checkpoint on the disk.

    Args:
        directory: of the checkpoint.
        metadata: of DCP.
        unusual: keys of tensors that are not stored as one contiguous run of numbers; None if that may be any.
        weights_only: whether to refuse objects that run code when they are loaded.
    """

    directory: FilePath
    metadata: Metadata
    unusual: Sequence[str] | None
    weights_only: bool

    @staticmethod
    def open(directory: FilePath, unusual: Sequence[str] | None, weights_only: bool) -> StoredData:
        """
        Raises:
            CheckpointError: if its metadata are not those of a checkpoint.
        """
        path = directory / DCP_METADATA
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load() if weights_only else pickle.load(file)
        except CheckpointError:
            raise
        except Exception as error:  # unpickling what is not a pickle may fail in any way
            raise CorruptFileError(f"{path} is damaged: {error}") from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise CorruptFileError(f"{path} has no metadata of a checkpoint")
        return StoredData(directory, metadata, unusual, weights_only)

    @property
    def kinds(self) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
        """What there is, by key."""
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

    def objects(self) -> list[str]:
        """Keys of what is not a tensor."""
        return [key for key, kind in self.kinds.items() if isinstance(kind, BytesStorageMetadata)]

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What is known about tensors, by key."""
        return {key: kind for key, kind in self.kinds.items() if isinstance(kind, TensorStorageMetadata)}

    def read(self, values: dict[str, Any], advance: Callable[[int], None]) -> None:
        """Fill ``values``, by key: tensors with this rank's part of what is stored, others are replaced by objects."""
        planner = _LoadPlanner(self.weights_only)
        planner.set_up_planner(values, self.metadata, True)
        reader: StorageReader = FileSystemReader(self.directory)
        if self.unusual is not None:
            reader = _DirectReader(self.directory, frozenset(self.unusual), advance)
        reader.set_up_storage_reader(self.metadata, True)
        try:
            reader.read_data(create_default_local_load_plan(values, self.metadata), planner).wait()
        except CheckpointError:
            raise
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"reading the checkpoint {self.directory} failed: {error}") from error


def _path_below(key: str, path: Path, prefix: str) -> Path:
    names = ""
    while path and names != prefix:
        names, path = f"{names}{path[0]}.", path[1:]
        if not prefix.startswith(names):
            return (key[len(prefix) :],)  # one level of the tree has more than the prefix
    return path


class _DirectReader(FileSystemReader):
    """Reads what `shardwise.save` wrote: each tensor is one contiguous run of bytes somewhere in its item.

    Args:
        directory: of the checkpoint.
        unusual: keys of tensors that are not; torch reads them.
        advance: called with the number of bytes loaded.
    """

    def __init__(self, directory: FilePath, unusual: frozenset[str], advance: Callable[[int], None]):
        super().__init__(directory)
        self._directory, self._unusual, self._advance = directory, unusual, advance
        self._metadata: Metadata | None = None

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.storage_index.fqn in self._unusual:
                continue
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open(self._directory / name, "rb") as file:
                for item in sorted(items, key=lambda item: int(self.storage_data[item.storage_index].offset)):
                    self._read_item(file, item, planner)
        return super().read_data(
            LoadPlan([item for item in plan.items if item.storage_index.fqn in self._unusual]), planner
        )

    def _read_item(self, file: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        where = self.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            file.seek(where.offset)
            planner.load_bytes(item, io.BytesIO(file.read(where.length)))
            return
        target = planner.resolve_tensor(item).detach()
        payload, size = _payload(file, where.offset, where.length)
        _read_box(file, payload, size, self._chunk_of(item), item, target)
        self._advance(target.nbytes)
        planner.commit_tensor(item, target)

    def _chunk_of(self, item: ReadItem) -> torch.Tensor:
        """The stored chunk that ``item`` is in, without memory."""
        assert self._metadata is not None
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        sizes = stored.chunks[item.storage_index.index or 0].sizes
        return torch.empty(sizes, dtype=stored.properties.dtype, device="meta")


class _Slice(io.RawIOBase):
    """Part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = self._length - self._position
        self._file.seek(self._start + self._position)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data


def _payload(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """Position in the file, and number, of the bytes of the tensor that `torch.save` wrote there, as a zip archive.

    Raises:
        CorruptFileError: if there is none.
    """
    part = _Slice(file, start, length)
    try:
        with zipfile.ZipFile(part) as archive:
            (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
        part.seek(record.header_offset)
        # The two lengths at the end of the fixed part of a record's header: of its name and of its padding.
        name, padding = struct.unpack("<26x2H", part.read(30))
    except (zipfile.BadZipFile, struct.error, ValueError) as error:
        raise CorruptFileError(f"{file.name} has no tensor at byte {start:,}: {error}") from error
    return start + record.header_offset + 30 + name + padding, record.file_size


def _read_box(
    file: BinaryIO, payload: int, size: int, chunk: torch.Tensor, item: ReadItem, target: torch.Tensor
) -> None:
    """Fill ``target`` with the box of ``chunk`` that ``item`` asks for; only the rows it is in are read.

    Args:
        file: that has the chunk, contiguous.
        payload: position of the chunk in the file, in bytes.
        size: of the chunk in bytes.
        chunk: its shape and dtype.
        item: says where the box starts and how long it is, in each tensor dim.
        target: as large as the box, of any dtype, on any device.

    Raises:
        CorruptFileError: if the file does not have the chunk.
    """
    if size != chunk.nbytes:
        raise CorruptFileError(f"{file.name} has {size:,} bytes of {item.storage_index.fqn!r}, not {chunk.nbytes:,}")
    first, count = (item.storage_offsets[0], item.lengths[0]) if chunk.dim() else (0, 1)
    shape = (count, *chunk.shape[1:]) if chunk.dim() else ()
    is_whole_rows = tuple(item.lengths) == shape
    fits = target.dtype == chunk.dtype and target.device.type == "cpu" and target.is_contiguous()
    is_raw = is_plain(target) and not target.is_conj() and not target.is_neg()
    rows = target if is_whole_rows and fits and is_raw else torch.empty(shape, dtype=chunk.dtype, device="cpu")
    row_size = math.prod(chunk.shape[1:]) * chunk.itemsize
    _fill(file, payload + first * row_size, rows)
    if rows is not target:
        for dim in range(1, chunk.dim()):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target.copy_(rows)


def _fill(file: BinaryIO, position: int, tensor: torch.Tensor) -> None:
    """Read a contiguous tensor of the host from ``position`` on."""
    left = raw(tensor)
    while left:
        count = os.preadv(file.fileno(), [left], position)
        if not count:
            raise CorruptFileError(f"{file.name} ends before byte {position + len(left):,}")
        left, position = left[count:], position + count
