"""Collectives and bytes of a training step, counted."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core import comm
from shardwise.core.parameter import owner_of

from .contenders import CONTENDERS, FSDP2, SHARDWISE, make_contender
from .model import Shape
from .ranks import run_on_fake, run_on_gloo
from .report import NONE, Table, mebibytes

SHAPE = Shape(blocks=8, width=512, batch=1, length=16)
FAKE_WORLD_SIZE, GLOO_WORLD_SIZE = 8, 2
LIMIT = 120.0
STEPS = 3
"""Counted on their own; those with the fewest bytes on the network are shown, since others use it too."""

KINDS = {
    "c10d._allgather_base_": ("gathers", 1),
    "c10d.allgather_into_tensor_coalesced_": ("gathers", 1),
    "c10d.allgather_": ("gathers", 1),
    "c10d._reduce_scatter_base_": ("reductions", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reductions", 1),
    "c10d.reduce_scatter_": ("reductions", 1),
    "c10d.allreduce_": ("all-reduces", 0),
    "c10d.allreduce_coalesced_": ("all-reduces", 0),
    "c10d.send": ("sends", 0),
    "c10d.broadcast_": ("others", 0),
    "c10d.alltoall_base_": ("others", 1),
    "c10d.alltoall_": ("others", 1),
    "_c10d_functional.all_gather_into_tensor": ("gathers", 0),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("gathers", 0),
    "_c10d_functional.reduce_scatter_tensor": ("reductions", 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reductions", 0),
    "_c10d_functional.all_reduce": ("all-reduces", 0),
    "_c10d_functional.all_reduce_": ("all-reduces", 0),
    "_c10d_functional.all_reduce_coalesced": ("all-reduces", 0),
}
"""Kind of each operation, and which of its arguments is this rank's input. Operations missing here are others."""
IGNORED = (
    "c10d.recv_",
    "c10d.barrier",
    "c10d.monitored_barrier_",
    "_c10d_functional.wait_tensor",
    "_c10d_functional._wrap_tensor_autograd",
)
COUNTED = ("gathers", "reductions", "all-reduces", "sends", "others")


class OperationCounter(TorchDispatchMode):
    """Counts what is sent through c10d, and the bytes that this rank has to send for it, both by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes_by_kind: dict[str, float] = defaultdict(float)

    @property
    def bytes_sent(self) -> float:
        """Bytes of all kinds."""
        return sum(self.bytes_by_kind.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            # A mode runs before subclasses, and would not see the collectives that a DTensor's operation comes to.
            return NotImplemented
        name = str(func).rpartition(".")[0]
        if name.startswith(("c10d.", "_c10d_functional.")) and not name.startswith(IGNORED):
            kind, position = KINDS.get(name, ("others", 0))
            payload = sum(tensor.numel() * tensor.itemsize for tensor in _tensors(args[position]))
            self.counts[kind] += 1
            self.bytes_by_kind[kind] += bytes_to_send(kind, payload, _group_size(args))
        return func(*args, **(kwargs or {}))


COPIES = {"copy_", "clone", "_to_copy", "cat", "stack", "_chunk_cat", "_foreach_copy_", "split_with_sizes_copy"}
"""ATen operators that write bytes which exist already, in the same dtype or another."""


class CopyCounter(TorchDispatchMode):
    """Counts the bytes that operators copy, those inside of collectives aside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        operator = str(func).split(".")[1]
        if operator in COPIES:
            written = (kwargs or {}).get("out", result)
            self.bytes += sum(tensor.nbytes for tensor in _tensors(args[0] if written is None else written))
        return result


def bytes_to_send(kind: str, payload: int, size: int) -> float:
    """Bytes that each of ``size`` ranks has to send when its input has ``payload`` bytes."""
    others = size - 1
    if kind == "sends":
        return payload
    if kind == "gathers":
        return payload * others
    return payload * (others if kind == "reductions" else 2 * others) / size


def flag_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of shardwise's one fp32 number for each of the sharded ``parameters``, those of a unit padded to 16."""
    by_unit = Counter(owner for parameter in parameters if (owner := owner_of(parameter)) is not None)
    return sum(16 * math.ceil(count / 4) for count in by_unit.values())


def _group_size(args: Sequence[Any]) -> int:
    """Ranks of an operation: c10d's take a boxed process group, functional ones a group's name as their last."""
    if isinstance(args[-1], str):
        return _resolve_process_group(args[-1]).size()
    return next(dist.ProcessGroup.unbox(value).size() for value in args if isinstance(value, torch.ScriptObject))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


@contextmanager
def engine_calls(counts: Counter[str]) -> Iterator[None]:
    """Count the engine's own gathers and reductions, however a backend carries them out."""
    classes = (comm.Comm, comm.GlooComm, comm.PairwiseGlooComm)
    named = {"all_gather": "gathers", "reduce_scatter": "reductions"}
    replaced = [(cls, name, vars(cls)[name]) for cls in classes for name in named if name in vars(cls)]
    for cls, name, method in replaced:
        setattr(cls, name, _counting(method, counts, named[name]))
    try:
        yield
    finally:
        for cls, name, method in replaced:
            setattr(cls, name, method)


def _counting(method: Callable[..., Any], counts: Counter[str], kind: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        counts[kind] += 1
        return method(*args, **kwargs)

    return run


Count = tuple[dict[str, int], float, int, int]
"""Operations by kind, bytes that this rank has to send, bytes that it copies, bytes that crossed the machine's loopback
device."""


def count_tables(quick: bool) -> list[Table]:
    """The fake group of 8, where everything is a collective, and gloo with 2, where shardwise sends messages."""
    fake = run_on_fake(FAKE_WORLD_SIZE, LIMIT, measure, (SHARDWISE, FSDP2))
    gloo = run_on_gloo(GLOO_WORLD_SIZE, LIMIT, measure, CONTENDERS[1:])[0]
    notes = (
        "counted by a TorchDispatchMode that sees the c10d operations of one step after two others.",
        "MiB to send: per rank, of an algorithm without waste: (n-1)/n of a reduction's input, (n-1) times a gather's "
        "input, twice (n-1)/n of an all-reduce's, a message's own bytes.",
        "MiB copied: by operators of forward and backward outside of collectives, casts too.",
    )
    gloo_notes = (
        f"{SHARDWISE} sends messages here; its gathers and reductions are the engine's calls of `Comm`. Its all-gather "
        "puts a rank's own part in place by an operator, which is counted as a copy.",
        f"on the wire: per rank, what the kernel counted on the loopback device; least of {STEPS} steps. Unlike MiB to "
        "send it has what gloo adds: its reduce-scatter is an all-reduce.",
    )
    return [
        _table(f"Collectives of a step on a fake group of {FAKE_WORLD_SIZE}: {SHAPE}", fake, notes, wire=False),
        _table(f"Collectives of a step on {GLOO_WORLD_SIZE} gloo processes: {SHAPE}", gloo, gloo_notes, wire=True),
    ]


def _table(title: str, found: dict[str, Count], notes: Sequence[str], wire: bool) -> Table:
    table = Table(
        title, ["contender", *COUNTED, "MiB to send", "MiB copied", *(["MiB on the wire"] if wire else [])], notes=notes
    )
    for name, (counts, sent, copied, crossed) in found.items():
        cells = [name, *(str(counts.get(kind, 0)) for kind in COUNTED), mebibytes(sent), mebibytes(copied)]
        measured = mebibytes(crossed / GLOO_WORLD_SIZE) if crossed else NONE
        table.rows.append([*cells, *([measured] if wire else [])])
    return table


def measure(names: tuple[str, ...]) -> dict[str, Count]:
    """On one rank: each contender's counts."""
    return {name: _measure_one(name) for name in names}


def _measure_one(name: str) -> Count:
    real = dist.get_backend() == "gloo"
    contender = make_contender(name, SHAPE)
    contender.step()
    contender.step()
    found: list[Count] = []
    for _ in range(STEPS):
        logical: Counter[str] = Counter()
        if real:
            dist.barrier()
        before = _loopback_bytes()
        with CopyCounter() as copies, OperationCounter() as counter, engine_calls(logical):
            contender.forward().backward()
            copied = copies.bytes
            contender.update()
        if real:
            dist.barrier()
        counts = dict(counter.counts | logical if name == SHARDWISE and real else counter.counts)
        found.append((counts, counter.bytes_sent, copied, _loopback_bytes() - before))
    return min(found, key=lambda count: count[-1])


def _loopback_bytes() -> int:
    """Bytes that the machine's loopback device has carried so far; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.strip().startswith("lo:")), 0)
