"""Run test bodies on several gloo processes: file rendezvous, a time limit on everything, the failing rank's traceback.

The processes are kept between tests, since importing torch takes seconds; each test gets a process group of its own.
A test that fails or hangs costs its processes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import itertools
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.debug",
    "shardwise",
    "tests.ranks.truth",
    __name__,  # which imports pytest
]
BACKEND = "gloo"
START_LIMIT = 120.0
TEST_LIMIT = 90.0
PEER_LIMIT = 10.0
"""Seconds that the other ranks get to notice a failure before they are killed."""
MOST_THREADS = 20
"""Process groups that torch's caches keep have a thread each, which wakes a hundred times a second: processes with more
are replaced."""


class RankError(AssertionError):
    """A rank failed; the message has its traceback.

    Args:
        message: for whoever reads it.
        tracebacks: of the ranks that failed; those that did not answer have none.
    """

    def __init__(self, message: str, tracebacks: dict[int, str]):
        super().__init__(message)
        self.tracebacks = tracebacks


def _use_one_gloo_thread() -> None:
    """Give each gloo group of this process one worker thread, of torch's two.

    After a collective a worker assigns the collective's name to a string of the group, without a lock. If two workers
    replace a name that is long enough for the heap (ALLGATHER_COALESCED, a DTensor's all-gather) at once, it is freed
    twice, which corrupts the heap (torch 2.13).
    """
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def make_with_one_thread(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **_: bool) -> None:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [gloo.create_default_device()], 1, timeout
        make(self, store, rank, size, options)

    gloo.__init__ = make_with_one_thread


def _serve(connection: Connection, rank: int, world_size: int, backend: str, modules: Sequence[str]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    # NCCL connects no two ranks on one GPU, unless it takes them for two machines'.
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_what_dtensors_keep

    from shardwise.core.posts import _worlds

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # torch.manual_seed records a stack trace, in case a device is used later: a millisecond for each call.
        torch.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    _use_one_gloo_thread()
    for name in modules:
        importlib.import_module(name)
    # The garbage collector need not search what is imported by now.
    gc.freeze()
    connection.send(("ready", None))
    last = ""
    while True:
        module, name, rendezvous, arguments = connection.recv()
        if module != last:
            # DTensor caches meshes, and takes a mesh with new groups of the same ranks for the old one.
            clear_what_dtensors_keep()
            last = module
        try:
            body = functools.reduce(getattr, [*name.split("."), "body"], importlib.import_module(module))
            torch.manual_seed(0)
            _worlds.clear()  # in another test, whose store is gone, one rank may have posted more often than another
            dist.init_process_group(
                backend,
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            # Bodies may leave the group at once, which fails a rank that is still connecting to the others.
            dist.barrier()
            result = body(**arguments)
            dist.barrier()
            dist.destroy_process_group()
            connection.send(("done", result))
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            os._exit(1)


class Ranks:
    """Processes for one world size, started when first used."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        """Start the processes, if they do not run, or too much runs in them."""
        if self.processes and all(
            process.is_alive() and _threads_of(process) <= MOST_THREADS for process in self.processes
        ):
            return
        self.stop()
        # Forked from a process that has only imported PRELOADED, which takes seconds.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, BACKEND, PRELOADED), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        self._collect(START_LIMIT)

    def stop(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()
            process.join(10)
        for connection in self.connections:
            connection.close()
        self.processes, self.connections = [], []

    def run(self, module: str, name: str, arguments: dict[str, Any], limit: float) -> list[Any]:
        """Run a test body on all ranks; return what each returned."""
        self.start()
        with tempfile.TemporaryDirectory() as directory:
            for connection in self.connections:
                connection.send((module, name, str(Path(directory) / "rendezvous"), arguments))
            return self._collect(limit)

    def _collect(self, limit: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        started = time.monotonic()
        deadline = started + limit
        while len(results) + len(failures) < self.world_size:
            waiting = [c for rank, c in enumerate(self.connections) if rank not in results and rank not in failures]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = self.connections.index(connection)  # type: ignore[arg-type]
                try:
                    kind, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    kind, value = "failed", "the process died"
                if kind == "failed":
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + PEER_LIMIT)
                else:
                    results[rank] = value
        missing = [rank for rank in range(self.world_size) if rank not in results and rank not in failures]
        if not failures and not missing:
            return [results[rank] for rank in range(self.world_size)]
        self.stop()
        report = [f"rank {rank}:\n{text}" for rank, text in failures.items()]
        if missing:
            report.append(f"ranks {missing} did not answer within {time.monotonic() - started:.0f} s")
        raise RankError("\n".join(report), failures)


def _threads_of(process: Any) -> int:
    tasks = Path(f"/proc/{process.pid}/task")
    return len(os.listdir(tasks)) if tasks.exists() else 0


def assert_others_name(killed: int, world_size: int, error: RankError) -> None:
    """Each rank but the one that was ``killed`` has stopped, since it waited for that, or for one that has told so."""
    tracebacks = dict(error.tracebacks)
    assert tracebacks.pop(killed) == "the process died"
    assert len(tracebacks) == world_size - 1, error
    assert all(f"waiting for rank {killed}" in traceback for traceback in tracebacks.values()), error


_pools: dict[int, Ranks] = {}


def ranks(world_size: int) -> Ranks:
    """The processes for a world size. Those of other sizes stay: idle they cost nothing, new ones take seconds."""
    return _pools.setdefault(world_size, Ranks(world_size))


@atexit.register
def _stop_all() -> None:
    for pool in _pools.values():
        pool.stop()


def on_ranks(*world_sizes: int, limit: float = TEST_LIMIT, **cases: Sequence[Any]) -> Callable[[Any], Any]:
    """Make a function a test that runs on every rank, for each world size and each combination of ``cases``.

    The body gets the case's values by name. It must be at the top level of its module.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        names = list(cases)
        combinations = list(itertools.product(*cases.values()))

        def run(world_size: int, case: tuple[Any, ...]) -> None:
            arguments = dict(zip(names, case, strict=True))
            ranks(world_size).run(body.__module__, body.__qualname__, arguments, limit)

        run.__name__, run.__doc__, run.__module__ = body.__name__, body.__doc__, body.__module__
        run.body = body  # type: ignore[attr-defined]
        identify = [("-".join(_case_name(value) for value in case)) or "all" for case in combinations]
        run = pytest.mark.parametrize("case", combinations, ids=identify)(run)
        return pytest.mark.parametrize("world_size", world_sizes, ids=lambda size: f"world{size}")(run)

    return decorate


def _case_name(value: Any) -> str:
    name = getattr(value, "__name__", None) or str(value).replace("torch.", "")
    return name.replace(" ", "")
