"""The device "simulated": an accelerator for machines that have none.

Its tensors do not mix with the host's, and its memory holds NaN until something is written and once it is free
(`simulated.cpp`, which is built when this module is imported). Streams and events exist, and everything runs at once:
what streams get wrong `tests/unit/test_schedule.py` finds. The backend "simulated" communicates by gloo.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers its backend

NAME = "simulated"
ALONE = "simulated_alone"
"""A second backend, which communicates nothing that lies on the host."""
SOURCE = Path(__file__).with_name("simulated.cpp")


def _library() -> Path:
    """The built library; other processes may build it at the same time."""
    torch_path = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"shardwise_simulated_{os.getuid()}_{key}.so"
    if not built.exists():
        compiler = shutil.which("c++")
        if compiler is None:
            raise RuntimeError("the simulated device needs a C++ compiler named c++")
        draft = built.with_suffix(f".{os.getpid()}")
        include = torch_path / "include"
        folders = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{torch_path / 'lib'}"]
        flags = [
            "-std=c++20",
            "-O1",
            "-w",
            "-fPIC",
            "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
        subprocess.run([compiler, *flags, "-o", str(draft), str(SOURCE), *folders, *libraries], check=True, timeout=300)
        draft.replace(built)
    return built


# -- What torch asks of a device's module


class Event:
    """Done as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """A number."""

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None):
        self.number = torch.ops.simulated.new_stream() if number is None else number
        self.device = torch.device(NAME, 0)

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Operators inside run on a stream."""
    before = torch.ops.simulated.current_stream()
    if chosen is not None:
        torch.ops.simulated.set_stream(chosen.number)
    try:
        yield
    finally:
        torch.ops.simulated.set_stream(before)


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """Inside, it is an error that the host waits for what the device computes: for a value, or in a copy."""
    torch.ops.simulated.refuse_waits(True)
    try:
        yield
    finally:
        torch.ops.simulated.refuse_waits(False)


def _make_module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    functions: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "current_stream": lambda device=None: Stream(number=torch.ops.simulated.current_stream()),
        "default_stream": lambda device=None: Stream(number=0),
        "device": lambda device: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        # Its random operators take the host's numbers.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": lambda device=None: torch.ops.simulated.peak(),
        "memory_allocated": lambda device=None: torch.ops.simulated.allocated(),
        "reset_peak_memory_stats": lambda device=None: torch.ops.simulated.reset_peak(),
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "synchronize": lambda device=None: None,
        "_is_in_bad_fork": lambda: False,
    }
    module.__dict__.update(functions, Event=Event, Stream=Stream, stream=stream)
    return module


# -- Collectives


class _Done(dist._Work):  # type: ignore[name-defined]
    """Work that is over."""

    def __init__(self, result: Any):
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _done(result: Any, options: Any) -> _Done | None:
    """Nothing for a collective on the current stream, as NCCL gives."""
    return None if options is not None and not options.asyncOp else _Done(result)


class SimulatedGroup(dist.ProcessGroup):
    """Communicates what lies on the host or on the simulated device by gloo.

    Args:
        gloo: of the same ranks.
        rank: of this process.
        size: number of ranks.
        timeout: of each collective.
        takes_host: whether it communicates what lies on the host too, and not on the device alone, as NCCL does.
    """

    def __init__(self, gloo: Any, rank: int, size: int, timeout: timedelta, takes_host: bool):
        super().__init__(rank, size)
        self._takes_host, self._gloo, self._timeouts = takes_host, gloo, types.SimpleNamespace(_timeout=timeout)
        self._name = ""

    # torch keeps names in backends of its own alone.
    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [*[torch.device("cpu")][: self._takes_host], torch.device(NAME)]

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return types.SimpleNamespace(name=lambda: NAME if device.type == NAME else "gloo", options=self._timeouts)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != NAME:
            assert self._takes_host, "no backend communicates what lies on the host"
            return tensor
        with torch.no_grad():
            host: torch.Tensor = torch.ops.simulated.on_host(tensor)
            return host

    def _sum(self, tensor: torch.Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        is_mean = op == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if is_mean else op
        self._gloo.allreduce([tensor], options).wait()
        if is_mean:
            tensor.div_(self.size(), rounding_mode=None if tensor.is_floating_point() else "trunc")

    @torch.no_grad()
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        for tensor in tensors:
            self._sum(self._on_host(tensor), dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return _done(tensors, opts)

    @torch.no_grad()
    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        parts = list(self._on_host(output).view(-1).chunk(self.size()))
        received = [torch.empty_like(part) for part in parts]
        self._gloo.allgather([received], [self._on_host(given).reshape(-1)]).wait()
        torch._foreach_copy_(parts, received)
        return _done(output, opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return _done(outputs, opts)

    @torch.no_grad()
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        hosts = [[self._on_host(tensor) for tensor in own] for own in outputs]
        self._gloo.allgather(hosts, [self._on_host(tensor) for tensor in inputs]).wait()
        return _Done(outputs)

    @torch.no_grad()
    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        terms = self._on_host(given).reshape(-1).clone()
        self._sum(terms, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        self._on_host(output).view(-1).copy_(terms.chunk(self.size())[self.rank()])
        return _done(output, opts)

    # What torch 2.15 calls the two in its functions.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, given, opts)
        return _done(outputs, opts)

    def _run(self, method: str, tensors: Sequence[torch.Tensor], *arguments: Any) -> Any:
        return getattr(self._gloo, method)([self._on_host(tensor) for tensor in tensors], *arguments)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        self._run("broadcast", tensors, options).wait()
        return _Done(tensors)

    def reduce(self, tensors: Any, options: Any) -> Any:
        self._run("reduce", tensors, options).wait()
        return _Done(tensors)

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Any:
        hosts = [[self._on_host(tensor) for tensor in own] for own in inputs]
        self._gloo.scatter([self._on_host(tensor) for tensor in outputs], hosts, options).wait()
        return _Done(outputs)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._run("send", tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        return self._run("recv", tensors, rank, tag)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def _make_group(store: Any, rank: int, size: int, timeout: timedelta, *, takes_host: bool = True) -> SimulatedGroup:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return SimulatedGroup(gloo, rank, size, timeout, takes_host)


# torch's recorder of collectives asks a group for its name in a way that only torch's own backends can answer.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

if not hasattr(torch, NAME):
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(_library())
    torch._register_device_module(NAME, _make_module())
    sys.modules[f"torch.{NAME}"] = getattr(torch, NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, _make_group, devices=[NAME, "cpu"])
    dist.Backend.register_backend(ALONE, functools.partial(_make_group, takes_host=False), devices=[NAME])
    dist.Backend.backend_capability["fake"].append(NAME)
