"""Checksums of a checkpoint's files: taken while the files are written, kept in the manifest, compared before anything
is loaded.

They are XXH3 (https://xxhash.com): a CRC-32 takes longer than reading.
"""

from __future__ import annotations

import io
import json
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from .atomic import MANIFEST

BLOCK = 16 * 2**20
"""Bytes that a checksum covers: ranks share the checking of a file by blocks."""
PIECE = 2**20
"""Bytes that are read at once: few enough to be in the processor's cache when they are summed."""
FORMAT = 2


class CheckpointError(RuntimeError, OSError):
    """A checkpoint could not be written or read; the message names the file or directory and what is wrong with it."""


class CorruptFileError(CheckpointError, ValueError):
    """Files of a checkpoint are not as they were saved; the message names them. Nothing was loaded."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is dense, not quantized and of no subclass, so that its bytes are all there is to save."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain tensor on the host; its own memory if it is contiguous, else a copy."""
    run = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(run.view(torch.uint8).numpy())  # type: ignore[arg-type]


def checksum(tensor: torch.Tensor) -> int:
    """Of the dtype, the shape and, if it is plain, the bytes of a tensor that is not a DTensor, on any device."""
    kind = xxh3_64_intdigest(repr((tensor.dtype, tuple(tensor.shape))).encode())
    return xxh3_64_intdigest(raw(tensor.cpu()), kind) if is_plain(tensor) else kind


def read_all(descriptor: int, memory: memoryview, position: int, name: str) -> None:
    """Fill ``memory`` with the bytes of the file ``name`` from ``position`` on.

    Raises:
        OSError: naming the file, if it cannot be read.
        CorruptFileError: if it is too short.
    """
    while memory:
        try:
            count = os.preadv(descriptor, [memory], position)
        except OSError as error:
            raise OSError(error.errno, error.strerror, name) from error
        if not count:
            raise CorruptFileError(f"{name} ends at byte {position}: it was truncated while it was read")
        memory, position = memory[count:], position + count


@dataclass(frozen=True)
class FileSum:
    """The size and the checksums that a file must have.

    Args:
        size: bytes.
        blocks: checksum of each `BLOCK` bytes; the last block may be shorter.
    """

    size: int
    blocks: tuple[int, ...]


class RunningSum:
    """The `FileSum` of a file that is still being written."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks: list[int] = []
        self._open = xxh3_64()

    def add(self, data: memoryview) -> None:
        """The next bytes, 1-D and contiguous."""
        while data:
            room = BLOCK - self.size % BLOCK
            part, data = data[:room], data[room:]
            self._open.update(part)
            self.size += len(part)
            if not self.size % BLOCK:
                self._blocks.append(self._open.intdigest())
                self._open.reset()

    def result(self) -> FileSum:
        """The sum of all bytes so far."""
        last = (self._open.intdigest(),) if self.size % BLOCK else ()
        return FileSum(self.size, (*self._blocks, *last))


class SummingStream(io.RawIOBase):
    """A file that is written from its start to its end, and whose checksums are taken on the way.

    Args:
        file: opened for writing, without a buffer.
        advance: called with the number of bytes written.
    """

    def __init__(self, file: io.FileIO, advance: Callable[[int], None]):
        self._file, self._advance, self._sum = file, advance, RunningSum()
        self.error: BaseException | None = None
        """The first one, or an interrupt. torch's serialization mostly raises something else when its stream fails."""

    @property
    def sum(self) -> FileSum:
        """The sum of all that was written so far."""
        return self._sum.result()

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        try:
            # Not in smaller pieces: the page cache takes in large ones at once.
            for start in range(0, len(view), BLOCK):
                piece = view[start : start + BLOCK]
                self._sum.add(piece)
                left = piece
                while left:
                    left = left[self._file.write(left) :]
                self._advance(len(piece))
        except BaseException as error:
            self.error = self.error or error
            raise
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._sum.size

    def fileno(self) -> int:
        return self._file.fileno()


class SummedWriter(io.BufferedWriter):
    """What is written to a `SummingStream`, in pieces worth a call: torch's serialization gives a tensor in forty."""

    def __init__(self, stream: SummingStream):
        super().__init__(stream, PIECE)
        self._stream = stream

    @property
    def sum(self) -> FileSum:
        """The sum of all that was written to the file so far."""
        return self._stream.sum

    def flush(self) -> None:
        """Hand everything to the operating system. Does nothing once the file is closed: a stream of torch's around
        this one flushes it again when it is collected."""
        if not self.closed:
            super().flush()

    def fileno(self) -> int:
        """Of the file, to which everything was handed: torch asks for it to have it on the disk."""
        self.flush()
        return super().fileno()


@contextmanager
def summed(
    path: str | os.PathLike[str], mode: str, advance: Callable[[int], None] = lambda _: None
) -> Iterator[SummedWriter]:
    """A file that is opened for writing.

    Args:
        path: of the file.
        mode: as of `open`.
        advance: called with the number of bytes written.

    Raises:
        Exception: what kept it from being written, also where torch's serialization raised something else for it.
    """
    with io.FileIO(path, mode) as file, SummingStream(file, advance) as stream, SummedWriter(stream) as writer:
        try:
            yield writer
            writer.flush()
        except Exception as error:
            if stream.error is None or stream.error is error:
                raise
            raise stream.error from error


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        world_size: ranks that saved it.
        files: by name.
        unusual: keys of tensors that are not stored as one contiguous run of numbers.
    """

    world_size: int
    files: dict[str, FileSum]
    unusual: list[str]

    def write(self, directory: Path) -> None:
        """Write it into ``directory`` and to the disk."""
        files = {name: {"size": file.size, "sums": list(file.blocks)} for name, file in sorted(self.files.items())}
        body = {
            "format": FORMAT,
            "world_size": self.world_size,
            "block": BLOCK,
            "files": files,
            "unusual": self.unusual,
        }
        text = json.dumps(body)
        with open(directory / MANIFEST, "w") as file:
            # Its own checksum on a line of its own.
            file.write(f"{text}\n{xxh3_64_intdigest(text.encode())}\n")
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(directory: Path) -> Manifest:
        """The manifest of the checkpoint in ``directory``.

        Raises:
            CorruptFileError: if it is not as it was written.
            CheckpointError: if it is of a later version of this library.
        """
        path = directory / MANIFEST
        try:
            text, _, own_sum = path.read_bytes().partition(b"\n")
            if own_sum != b"%d\n" % xxh3_64_intdigest(text):
                raise ValueError(f"its checksum differs, or it is not of format {FORMAT}")
            body = json.loads(text)
            if body["format"] != FORMAT or body["block"] != BLOCK:
                raise CheckpointError(
                    f"{path} has format {body['format']}, which this version of shardwise cannot read"
                )
            files = {name: FileSum(file["size"], tuple(file["sums"])) for name, file in body["files"].items()}
            return Manifest(operator.index(body["world_size"]), files, list(map(str, body["unusual"])))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(f"{path} is damaged: {error}") from error


def sum_file(path: Path) -> FileSum:
    """The `FileSum` of a file as it is now."""
    size = path.stat().st_size
    return FileSum(size, tuple(_block_sums(path, range(-(-size // BLOCK)))))


def _block_sums(path: Path, indices: Sequence[int], advance: Callable[[int], None] = lambda _: None) -> Iterator[int]:
    """The checksums of blocks of a file as it is now."""
    memory = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as file:
        for index in indices:
            file.seek(index * BLOCK)
            running, left = xxh3_64(), BLOCK
            while left and (count := file.readinto(memory[:left])):
                running.update(memory[:count])
                left -= count
                advance(count)
            yield running.intdigest()


def find_damage(
    directory: Path, manifest: Manifest, part: int, parts: int, advance: Callable[[int], None]
) -> dict[str, str]:
    """Compare one of ``parts`` equal parts of a checkpoint's bytes with its manifest. The sizes of the files that have
    the part are compared first; part 0 compares the sizes of all files.

    Args:
        directory: of the checkpoint.
        manifest: of the checkpoint.
        part: which, from 0.
        parts: of about the same number of bytes.
        advance: called with the number of bytes compared.

    Returns:
        What is wrong, by name of the file.
    """
    blocks = [(name, index) for name, file in manifest.files.items() for index in range(len(file.blocks))]
    share = blocks[part * len(blocks) // parts : (part + 1) * len(blocks) // parts]
    by_file: dict[str, list[int]] = {}
    for name, index in share:
        by_file.setdefault(name, []).append(index)
    looked_at = manifest.files if part == 0 else by_file
    sizes = {name: _wrong_size(directory / name, manifest.files[name]) for name in looked_at}
    damage = {name: problem for name, problem in sizes.items() if problem}
    for name, indices in by_file.items():
        if name in damage:
            continue
        try:
            expected = [manifest.files[name].blocks[index] for index in indices]
            if expected != list(_block_sums(directory / name, indices, advance)):
                damage[name] = "its contents are not those that were saved (the checksum differs)"
        except OSError as error:
            damage[name] = f"it cannot be read: {error.strerror}"
    return damage


def _wrong_size(path: Path, file: FileSum) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not path.is_file():
        return "it is not a file"  # opening a pipe would wait for its other end
    return None if size == file.size else f"it has {size:,} bytes and was saved with {file.size:,}"
