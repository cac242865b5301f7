"""Checksums of a checkpoint's files: taken while they are written, kept in its manifest, compared before it is read.

A checksum is the CRC-32 of sums of the bytes, taken as a table of 8-byte words: of its rows and of its columns. Damage
to at most three words of a table always shows in a sum, any other as likely as in a CRC-32 of the bytes, and it takes
a quarter of the time of that: without it, comparing would take longer than reading.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from .atomic import MANIFEST

BLOCK = 16 * 2**20
"""Bytes that a checksum covers: ranks share the checking of a file by blocks."""
PIECE = 2**20
"""Bytes of one table: small enough to be in the processor's cache when its sums are taken."""
ROW = 512
"""Words of a row: those of a page, which is what disks and file systems lose or exchange."""
FORMAT = 2


class CheckpointError(RuntimeError, OSError):
    """A checkpoint could not be written or read; the message names the file or directory and what is wrong with it."""


class CorruptFileError(CheckpointError, ValueError):
    """Files of a checkpoint are not as they were saved; the message names them. Nothing was loaded."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a run of numbers, and nothing more."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain tensor on the host; its own memory if it is contiguous, else a copy."""
    run = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(run.view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class FileSum:
    """What a file must be.

    Args:
        size: bytes.
        blocks: checksum of each `BLOCK` bytes, the last of what is left.
    """

    size: int
    blocks: tuple[int, ...]


class _Piece:
    """The memory of one table."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(PIECE))
        self._words = np.frombuffer(self.memory, "<u8").reshape(-1, ROW)

    def sum(self, count: int, before: int) -> int:
        """The checksum of the first ``count`` bytes and of what had the checksum ``before``."""
        self.memory[count:] = bytes(PIECE - count)
        return zlib.crc32(self._words.sum(1), zlib.crc32(self._words.sum(0), before))


class RunningSum:
    """The `FileSum` of a file that is still being written."""

    def __init__(self) -> None:
        self.size, self._blocks, self._piece = 0, [0], _Piece()

    def add(self, data: memoryview) -> None:
        """The next bytes, 1-D and contiguous."""
        while data:
            start = self.size % PIECE
            part, data = data[: PIECE - start], data[PIECE - start :]
            end = start + len(part)
            self._piece.memory[start:end] = part
            self.size += len(part)
            if end == PIECE:
                self._blocks[-1] = self._piece.sum(PIECE, self._blocks[-1])
                if not self.size % BLOCK:
                    self._blocks.append(0)

    def result(self) -> FileSum:
        """Of all bytes so far."""
        *blocks, last = self._blocks
        if rest := self.size % PIECE:
            last = self._piece.sum(rest, last)
        return FileSum(self.size, (*blocks, last) if self.size % BLOCK else tuple(blocks))


class SummingStream(io.RawIOBase):
    """A file that is written from its start to its end, and whose checksums are taken on the way.

    Args:
        file: opened for writing.
        advance: called with the number of bytes written.
    """

    def __init__(self, file: BinaryIO, advance: Callable[[int], None]):
        self._file, self._advance, self._sum = file, advance, RunningSum()
        self.error: OSError | None = None
        """The first one. When its stream fails, torch's serialization mostly raises something else."""

    @property
    def sum(self) -> FileSum:
        """Of all that was written so far."""
        return self._sum.result()

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        # Not in smaller pieces: the page cache takes in large ones at once.
        for start in range(0, len(view), BLOCK):
            piece = view[start : start + BLOCK]
            self._sum.add(piece)
            with self._noting_errors():
                self._file.write(piece)
            self._advance(len(piece))
        return len(view)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with self._noting_errors():
            self._file.flush()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._sum.size

    def fileno(self) -> int:
        return self._file.fileno()


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
            file.write(f"{text}\n{zlib.crc32(text.encode())}\n")
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Of a checkpoint.

        Raises:
            CorruptFileError: if it is not as it was written.
            CheckpointError: if it is of a later version of this library.
        """
        path = directory / MANIFEST
        try:
            text, _, own_sum = path.read_bytes().partition(b"\n")
            if own_sum != b"%d\n" % zlib.crc32(text):
                raise ValueError("its checksum differs")
            body = json.loads(text)
            if body["format"] != FORMAT or body["block"] != BLOCK:
                raise CheckpointError(
                    f"{path} has format {body['format']}, which this version of shardwise cannot read"
                )
            files = {name: FileSum(file["size"], tuple(file["sums"])) for name, file in body["files"].items()}
            return Manifest(body["world_size"], files, body["unusual"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFileError(f"{path} is damaged: {error}") from error


def sum_file(path: Path) -> FileSum:
    """Of a file as it is now."""
    size = path.stat().st_size
    return FileSum(size, tuple(_block_sums(path, range(-(-size // BLOCK)), lambda _: None)))


def _block_sums(path: Path, indices: Sequence[int], advance: Callable[[int], None]) -> Iterator[int]:
    """The checksums of blocks of a file as it is now."""
    piece = _Piece()
    with open(path, "rb", buffering=0) as file:
        for index in indices:
            file.seek(index * BLOCK)
            left, value = BLOCK, 0
            while left and (count := file.readinto(piece.memory)):
                while count < PIECE and (more := file.readinto(piece.memory[count:])):
                    count += more
                value = piece.sum(count, value)
                left -= PIECE
                advance(count)
            yield value


def find_damage(
    directory: Path, manifest: Manifest, part: int, parts: int, advance: Callable[[int], None]
) -> dict[str, str]:
    """Compare one of ``parts`` equal parts of a checkpoint's bytes with its manifest; the first also compares sizes.

    Args:
        directory: of the checkpoint.
        manifest: of the checkpoint.
        part: which, from 0.
        parts: of about the same number of bytes.
        advance: called with the number of bytes compared.

    Returns:
        What is wrong, by name of the file.
    """
    damage = {}
    if part == 0:
        damage = {
            name: problem for name, file in manifest.files.items() if (problem := _wrong_size(directory / name, file))
        }
    blocks = [(name, index) for name, file in manifest.files.items() for index in range(len(file.blocks))]
    share = blocks[part * len(blocks) // parts : (part + 1) * len(blocks) // parts]
    by_file: dict[str, list[int]] = {}
    for name, index in share:
        by_file.setdefault(name, []).append(index)
    for name, indices in by_file.items():
        try:
            expected = [manifest.files[name].blocks[index] for index in indices]
            if name not in damage and expected != list(_block_sums(directory / name, indices, advance)):
                damage[name] = "its contents are not those that were saved (the checksum differs)"
        except OSError as error:
            damage[name] = f"it cannot be read: {error.strerror}"
    return damage


def _wrong_size(path: Path, file: FileSum) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None if size == file.size else f"it has {size:,} bytes and was saved with {file.size:,}"
