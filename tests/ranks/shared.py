"""What the ranks of a test share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


@contextmanager
def shared_directory() -> Iterator[Path]:
    """One temporary directory for all ranks."""
    own = tempfile.TemporaryDirectory()
    names: list[Any] = [own.name]
    dist.broadcast_object_list(names)
    yield Path(names[0])
    dist.barrier()
    own.cleanup()
