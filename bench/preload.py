"""Small C libraries that are built here and preloaded into the measuring processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoCompilerError(RuntimeError):
    """This machine cannot build what is to be preloaded."""


@contextmanager
def preloaded(source: Path) -> Iterator[None]:
    """Processes started inside have the library that the C file ``source`` makes before the C library's functions.

    Raises:
        NoCompilerError: unless this is Linux with a C compiler named cc that builds it.
    """
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        raise NoCompilerError(f"preloading {source.name} needs Linux with glibc and a C compiler named cc")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / f"{source.stem}.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise NoCompilerError(f"cc could not build {source.name}: {done.stderr.strip().splitlines()[-1:]}")
        others = os.environ.get("LD_PRELOAD")
        with in_environment("LD_PRELOAD", f"{library} {others}" if others else str(library)):
            yield


@contextmanager
def in_environment(name: str, value: str) -> Iterator[None]:
    """Processes started inside see ``value`` in the environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
