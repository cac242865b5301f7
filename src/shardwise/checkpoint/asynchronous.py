"""Saving beside training: copies of what is saved, and the thread that writes them."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..core.device import HOST, local_of, pins_memory, spec_of, wrap_local
from ..core.errors import StateError
from .integrity import is_plain
from .objects import Path

_logger = logging.getLogger("shardwise")


@torch.no_grad()
def host_copies(leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """``leaves`` with each tensor replaced by a finished copy in host memory."""
    copies = {path: _copy(value) if isinstance(value, torch.Tensor) else value for path, value in leaves.items()}
    # Each was queued where its tensor lies, on the current stream of that device.
    for device in {local_of(value).device for value in leaves.values() if isinstance(value, torch.Tensor)}:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
    return copies


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor).detach()
    if not is_plain(local):  # of quantized tensors and subclasses the numbers are not all
        return local.to("cpu", copy=True)
    pinned = local.device.type != "cpu" and pins_memory(HOST)
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pinned)
    copy.copy_(local, non_blocking=True)
    return wrap_local(copy, spec_of(tensor)) if isinstance(tensor, DTensor) else copy


def _forget_locals(error: BaseException | None) -> None:
    """Clear the local variables of the frames that raised ``error``. They hold copies of the whole run, and writers of
    torch's, which write when they are collected: once Python has shut down, that crashes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Background:
    """One piece of work at a time, on a thread of its own. The process does not end before it is done."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Take nothing to be under way, as in a forked process, which does not have the thread."""
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._error: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work``.

        Raises:
            StateError: if something is under way, that another thread has begun.
        """
        if self._thread is not None:
            raise StateError("another thread of this process is saving a checkpoint too: save from one at a time")
        self._done.clear()
        # An argument, not a closure's cell, which the traceback of an error would keep alive.
        self._thread = threading.Thread(target=self._run, args=(work,), name="shardwise.save")
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had; the other ranks write already, and wait for this one
            self._thread = None
            self._run(work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def finish(self) -> None:
        """Wait until nothing is under way."""
        if (thread := self._thread) is not None:  # other threads may wait too
            self._done.wait()  # an interrupted `join` would take the thread for ended (until Python 3.13)
            thread.join()
            self._thread = None
            _forget_locals(self._error)

    def take_error(self) -> Exception | None:
        """Wait until nothing is under way, then return and forget the error it ended with, if any."""
        self.finish()
        error, self._error = self._error, None
        return error


def tell(failed: Exception | None) -> None:
    """Raise what `Background.take_error` gave."""
    if failed is not None:
        raise failed


background = Background()
os.register_at_fork(after_in_child=background.forget)


@atexit.register
def _report_last_error() -> None:
    if (error := background.take_error()) is not None:
        _logger.error("shardwise.save: the last checkpoint was not saved: %s", error)


def wait() -> None:
    """Wait until the checkpoint that `shardwise.save` with ``async_=True`` is writing is complete, if there is one.

    Raises:
        Exception: what made that save fail; raised once. The previous checkpoints are intact.
    """
    tell(background.take_error())
