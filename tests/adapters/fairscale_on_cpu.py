"""FairScale's own FullyShardedDataParallel where there is no GPU: its streams and moves to CUDA become no-ops.

Pass ``bucket_cap_mb=0``: gloo takes no buckets of two dims.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

needs_fairscale = pytest.mark.skipif(
    importlib.util.find_spec("fairscale") is None,
    reason="compares with FairScale: pip install fairscale==0.4.13 --no-build-isolation",
)


class _Stream:
    """Always the current one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = None  # type: ignore[assignment]

    def wait_stream(self, other: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@contextlib.contextmanager
def fairscale_fsdp() -> Iterator[Any]:
    """The class, usable inside of the context."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as module

    logging.getLogger("fairscale").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:

        def patch(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        patch(torch.cuda, "is_available", lambda: True)
        # Where torch is built for CUDA, its optimizers would ask the device that is not there for its stream; those of
        # torch 2.11 ask in another way, however it is built.
        patch(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        for name in ("synchronize", "current_stream", "Stream", "stream"):
            patch(torch.cuda, name, lambda *args, **kwargs: _Stream())
        patch(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
        patch(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch(module, "validate_process_group", lambda *args: None)
        patch(module, "_get_default_cuda_device", lambda wrapped: torch.device("cpu"))
        yield FullyShardedDataParallel
