"""The meter of allocated bytes: a small library preloaded into the measuring processes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SOURCE = Path(__file__).with_name("allocations.c")


class NoCompilerError(RuntimeError):
    """This machine cannot build the meter."""


@contextmanager
def preloaded_meter() -> Iterator[None]:
    """Processes started inside can make a `Meter`."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        raise NoCompilerError("counting allocations needs Linux with glibc and a C compiler named cc")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "allocations.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise NoCompilerError(f"cc could not build {SOURCE.name}: {done.stderr.strip().splitlines()[-1:]}")
        others = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = f"{library} {others}" if others else str(library)
        try:
            yield
        finally:
            if others is None:
                del os.environ["LD_PRELOAD"]
            else:
                os.environ["LD_PRELOAD"] = others


class Meter:
    """Bytes that this process has allocated since the meter was made, on all its threads."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("allocations_current", "allocations_highest"):
            getattr(self._library, name).restype = ctypes.c_long
        self._base = int(self._library.allocations_current())

    def current(self) -> int:
        """Bytes allocated now."""
        return int(self._library.allocations_current()) - self._base

    def highest_during(self, action: Callable[[], T]) -> tuple[T, int]:
        """What ``action()`` gives, and the most bytes that were allocated meanwhile."""
        self._library.allocations_start_phase()
        result = action()
        return result, int(self._library.allocations_highest()) - self._base
