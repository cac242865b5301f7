"""Run a function on fresh processes of one process group; nothing here waits without a limit."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

COLLECTIVE_LIMIT = 60
"""Seconds after which gloo gives up on a collective."""
PEER_LIMIT = 5.0
"""Seconds that the other ranks get to report once one failed."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of the C library's `mallopt`."""


class BenchError(RuntimeError):
    """A measuring process failed or took too long."""


def run_on_gloo(world_size: int, limit: float, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``body(*args)`` on every rank of a gloo group, one thread each; gives every rank's result.

    Args:
        world_size: number of processes.
        limit: seconds until all are killed.
        body: a function at the top level of its module.
        args: picklable.
    """
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        return _run([("gloo", rendezvous, rank, world_size) for rank in range(world_size)], limit, body, args)


def run_on_fake(world_size: int, limit: float, body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body(*args)`` in one process that believes to be rank 0 of ``world_size``; nothing is communicated.

    ``limit`` is in seconds.
    """
    return _run([("fake", "", 0, world_size)], limit, body, args)[0]


def _run(
    groups: list[tuple[str, str, int, int]], limit: float, body: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for group in groups:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, group, body, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        return _collect(connections, limit)
    finally:
        for process in processes:
            process.kill()
            process.join(10)
        for connection in connections:
            connection.close()


def _collect(connections: list[Connection], limit: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + limit
    while len(results) + len(failures) < len(connections):
        waiting = [c for rank, c in enumerate(connections) if rank not in results and rank not in failures]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            try:
                succeeded, value = connection.recv()
            except (EOFError, ConnectionError):
                succeeded, value = False, "the process died"
            (results if succeeded else failures)[rank] = value
            if not succeeded:
                deadline = min(deadline, time.monotonic() + PEER_LIMIT)
    if failures:
        raise BenchError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    if len(results) < len(connections):
        raise BenchError(f"no answer within {limit:.0f} s")
    return [results[rank] for rank in range(len(connections))]


def _keep_freed_memory() -> None:
    """Let the C library give no freed memory back, as a GPU's caching allocator; else a step pays for the page faults
    of whatever was given back before, up to as long as it computes. Does nothing where there is no glibc."""
    if sys.platform.startswith("linux") and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _serve(
    connection: Connection, group: tuple[str, str, int, int], body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend, rendezvous, rank, world_size = group
    try:
        if backend == "fake":
            from torch.testing._internal.distributed.fake_pg import FakeStore

            # What is "received" is whatever was in memory: denormal numbers would cost time that no engine spends.
            torch.set_flush_denormal(True)
            _keep_freed_memory()
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        else:
            dist.init_process_group(
                backend,
                init_method=rendezvous,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=COLLECTIVE_LIMIT),
            )
        result = body(*args)
        if backend != "fake":
            dist.barrier()
        connection.send((True, result))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()
        # Not through destructors: a peer that was killed could keep them waiting.
        os._exit(0)
