"""The training text: the bytes of every Python file in a folder, and what simple statistics predict of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Other people's packages, tests (the largest part of the standard library, and full of odd data), and two
# packages of generated tables.
EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
# One file in sixteen is held out: those whose path has a digest with four leading zero bits.
HELD_OUT_BELOW = b"\x0f" + 31 * b"\xff"


class CorpusError(ValueError):
    """A folder that cannot be trained on; its message is one line for the user."""


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, each one run of bytes with a zero byte after every file."""

    training: Bytes
    held_out: Bytes
    files: int

    @staticmethod
    def load(folder: Path, sequence_length: int) -> Corpus:
        """Read the ``*.py`` files below ``folder``, sorted; a hash of its path decides which are held out.

        Raises:
            CorpusError: where either part has no room for one sequence of ``sequence_length`` bytes.
        """
        if not folder.is_dir():
            raise CorpusError(f"--corpus {folder}: no such folder")
        paths = _python_files(folder)
        if len(paths) < 2:
            raise CorpusError(f"--corpus {folder}: needs two or more *.py files, has {len(paths)}")
        hashes = {path: hashlib.sha256(path.as_posix().encode()).digest() for path in paths}
        # At least one file is held out, however few there are.
        last_held_out = max(HELD_OUT_BELOW, min(hashes.values()))
        parts = {True: b"", False: b""}
        for held_out in parts:
            chosen = (path for path in paths if (hashes[path] <= last_held_out) == held_out)
            parts[held_out] = b"".join((folder / path).read_bytes() + b"\0" for path in chosen)
        for held_out, text in parts.items():
            if len(text) <= sequence_length:
                name = "held-out" if held_out else "training"
                raise CorpusError(
                    f"--corpus {folder}: its {name} files have {len(text)} bytes, "
                    f"less than one sequence of {sequence_length} needs"
                )
        training, held_out_text = (np.frombuffer(parts[part], np.uint8) for part in (False, True))
        return Corpus(training, held_out_text, len(paths))

    def batch(self, seed: int, step: int, batch_size: int, sequence_length: int) -> npt.NDArray[np.int64]:
        """The tokens of one step for all ranks, shape ``(batch_size, sequence_length + 1)``.

        A pure function of its arguments: each rank takes its rows of it, so the data of a step depend neither
        on the world size nor on the steps before.
        """
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))
        starts = generator.integers(0, len(self.training) - sequence_length, batch_size)
        return _windows(self.training, starts, sequence_length)

    def validation(self, count: int, sequence_length: int) -> npt.NDArray[np.int64]:
        """Up to ``count`` windows spread evenly over the held-out text, ``(n, sequence_length + 1)``."""
        last = len(self.held_out) - sequence_length - 1
        starts = np.unique(np.linspace(0, last, count).astype(np.int64))
        return _windows(self.held_out, starts, sequence_length)

    def unigram_entropy(self) -> float:
        """Cross-entropy of the held-out text under the training bytes' frequencies, in nats per byte."""
        return float(-np.log(_frequencies(self.training))[self.held_out].mean())

    def bigram_entropy(self) -> float:
        """As `unigram_entropy`, where each byte is predicted from the one before it."""
        pairs = self.training[:-1].astype(np.int64) * 256 + self.training[1:]
        counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256)
        # A byte seldom seen falls back to the unigram frequencies, which weigh as much as one observation.
        smoothed = counts + _frequencies(self.training)
        conditional = smoothed / smoothed.sum(axis=1, keepdims=True)
        return float(-np.log(conditional[self.held_out[:-1], self.held_out[1:]]).mean())


def _python_files(folder: Path) -> list[Path]:
    """Paths relative to ``folder``, sorted; excluded folders, which may be vast, are not entered."""
    paths = []
    for parent, children, names in os.walk(folder):
        children[:] = (child for child in children if child not in EXCLUDED)
        paths += [Path(parent, name).relative_to(folder) for name in names if name.endswith(".py")]
    return sorted(paths)


def _frequencies(text: Bytes) -> npt.NDArray[np.float64]:
    counts = np.bincount(text, minlength=256) + 1.0
    return counts / counts.sum()


def _windows(text: Bytes, starts: npt.NDArray[np.int64], sequence_length: int) -> npt.NDArray[np.int64]:
    return text[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int64)
