"""One GPU as one of 8 ranks: time of forward and backward, kernels launched, memory of a step, whole steps as CUDA
graphs; and as one of up to 1024 on a modelled network, communication that a step does not hide.

Collectives are copies on this GPU, queued as NCCL's kernels are: those of the modelled network, at first one that takes
no time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from .contenders import FSDP2, MIXED_PRECISION, SHARDWISE, UNSHARDED, Contender, make_contender
from .exposed import ON_CUDA, tables_on
from .model import Shape
from .network import modelled_network
from .ranks import BenchError, run_on_fake
from .report import NONE, Table, mebibytes, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 8
ENGINES = (UNSHARDED, SHARDWISE, FSDP2)
LIMIT = 240.0
WARM_UP = 3
BEFORE_CAPTURE = 4
"""Steps; what they make must not belong to a graph."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
COPIES = ("cudaMemcpy", "cudaMemset")


@dataclass(frozen=True)
class Work:
    """What all contenders do.

    Args:
        shape: of the model and its batch.
        precision: that engines compute and reduce in; without sharding, the model is in that of the parameters.
        rounds: timed.
    """

    shape: Shape
    precision: MixedPrecisionPolicy | None
    rounds: int

    def __str__(self) -> str:
        return f"{self.shape}, {'fp32' if self.precision is None else 'parameters bf16, reductions fp32'}"

    def contender(self, name: str) -> Contender:
        """One, on the GPU."""
        return make_contender(name, self.shape, self.precision, device="cuda")


HOST_BOUND, COMPUTE_BOUND = Shape(32, 64, batch=1, length=4), Shape(16, 2048, batch=8, length=1024)
WORKS = (Work(HOST_BOUND, None, 20), Work(COMPUTE_BOUND, MIXED_PRECISION, 20))


@dataclass(frozen=True)
class Footprint:
    """What one step takes.

    Args:
        launches: kernels of forward and backward.
        copies: copies and fills without a kernel, of the same.
        resident: bytes of parameters (shards), and of optimizer state.
        allocated: most bytes of tensors in a whole step, the optimizer's included.
        reserved: most bytes that the caching allocator took for them.
        split: most bytes of its blocks that were free beside others in use.
    """

    launches: int
    copies: int
    resident: int
    allocated: int
    reserved: int
    split: int


def gpu_tables(quick: bool) -> list[Table]:
    """Two tables for each work, one of graphs, and one for each number of ranks."""
    if not torch.cuda.is_available():
        return [Table("One GPU", ["not measured"], [["needs a GPU"]])]
    works = [replace(work, rounds=5) for work in WORKS] if quick else WORKS
    tables = [table for work in works for table in (_times(work), _footprints(work))]
    tables.append(_graphs_table(works[0]))
    return tables + tables_on("cuda", ON_CUDA, (SHARDWISE, FSDP2), 3 if quick else 5)


def _times(work: Work) -> Table:
    runs: dict[str, list[tuple[float, float]]] = run_on_fake(WORLD_SIZE, LIMIT, measure, work, WARM_UP)
    columns = ["contender", "host ms", "step ms", "± ms", "overhead ms", "overhead / FSDP2's"]
    table = Table(f"Forward + backward on one GPU, one of {WORLD_SIZE} ranks: {work}", columns)
    steps = {name: [step for _, step in found] for name, found in runs.items()}
    middle = {name: median(found) for name, found in steps.items()}
    for name, found in runs.items():
        overhead = middle[name] - middle[UNSHARDED]
        compared = [number(1e3 * overhead, 2), ratio(overhead, middle[FSDP2] - middle[UNSHARDED])]
        seconds = (median([host for host, _ in found]), middle[name], spread(steps[name]))
        cells = [name, *(number(1e3 * value, 2) for value in seconds)]
        table.rows.append([*cells, *([NONE, NONE] if name == UNSHARDED else compared)])
    table.notes = (
        f"{work.rounds} rounds after {WARM_UP} of warm-up. Collectives are copies on this GPU, one for each tensor.",
        "host: until everything is queued. step: until everything is done.",
        "overhead: a contender's step minus that without sharding.",
    )
    table.chart = "step ms"
    return table


def _footprints(work: Work) -> Table:
    columns = ["contender", "kernels/unit", "copies/unit", "resident MiB", "peak MiB", "reserved MiB"]
    columns += ["reserved / peak", "free between others MiB"]
    table = Table(f"Kernels and memory of a step on one GPU, one of {WORLD_SIZE} ranks: {work}", columns)
    units = work.shape.blocks + 1
    with ThreadPoolExecutor(len(ENGINES)) as beside:
        footprints = list(
            beside.map(lambda name: run_on_fake(WORLD_SIZE, LIMIT, measure_footprint, name, work), ENGINES)
        )
    for name, found in zip(ENGINES, footprints, strict=True):
        row = [name, number(found.launches / units), number(found.copies / units)]
        row += map(mebibytes, (found.resident, found.allocated, found.reserved))
        table.rows.append([*row, ratio(found.reserved, found.allocated), mebibytes(found.split)])
    table.notes = (
        f"{units} units (the blocks and the root). Kernels and copies: launched by forward and backward, as CUPTI "
        "counts them. Each contender in a process of its own.",
        "peak: allocated in a step with its optimizer. reserved: what the caching allocator took for it; reserved / "
        "peak and what lies free between others show fragmentation.",
    )
    table.chart = "peak MiB"
    return table


def measure(work: Work, warm_up: int) -> dict[str, list[tuple[float, float]]]:
    """In one process: seconds of the host and of the whole, of each contender's runs."""
    with modelled_network(WORLD_SIZE):
        actions: dict[str, Callable[[], tuple[float, float]]] = {}
        for name in ENGINES:
            actions[name] = functools.partial(_timed_run, work.contender(name))
        gc.collect()
        gc.freeze()
        return interleave(actions, warm_up, work.rounds)


def _timed_run(contender: Contender) -> tuple[float, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    contender.forward().backward()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    contender.optimizer.zero_grad()
    return queued - start, end - start


def _graphs_table(work: Work) -> Table:
    runs: dict[str, dict[str, list[float]]] = run_on_fake(WORLD_SIZE, LIMIT, measure_graphs, work)
    columns = ["contender", "step ms", "replay ms", "± ms", "step / replay", "replay / no sharding's"]
    table = Table(f"Whole steps as CUDA graphs on one GPU, one of {WORLD_SIZE} ranks: {work}", columns)
    plain = median(runs[UNSHARDED]["replay"])
    for name, found in runs.items():
        step, replay = median(found["step"]), median(found["replay"])
        cells = [number(1e3 * value, 2) for value in (step, replay, spread(found["replay"]))]
        table.rows.append([name, *cells, ratio(step, replay), ratio(replay, plain)])
    table.notes = (
        f"{work.rounds} rounds after {WARM_UP} of warm-up. Forward, backward, AdamW: queued by the host, or captured "
        "once and replayed. Collectives are copies on this GPU, one for each tensor.",
        "the losses of a replay and of the step that it replaces are the same bits.",
    )
    table.chart = "replay ms"
    return table


def measure_graphs(work: Work) -> dict[str, dict[str, list[float]]]:
    """In one process: seconds of each contender's steps and of replays of them."""
    with modelled_network(WORLD_SIZE):
        actions: dict[tuple[str, str], Callable[[], float]] = {}
        for name in ENGINES:
            one, other = work.contender(name), work.contender(name)
            for contender in (one, other):
                contender.optimizer = torch.optim.AdamW(contender.model.parameters(), lr=1e-4, capturable=True)
            replay = _captured(other)
            losses = [one.queue_step() for _ in range(BEFORE_CAPTURE + 1)]
            if not torch.equal(losses[-1], replay()):
                raise BenchError(f"{name}: a replay gives another loss than the step that it replaces")
            actions[name, "step"] = functools.partial(_timed, one.queue_step)
            actions[name, "replay"] = functools.partial(_timed, replay)
        gc.collect()
        gc.freeze()
        runs = interleave(actions, WARM_UP, work.rounds)
    return {name: {kind: runs[name, kind] for kind in ("step", "replay")} for name in ENGINES}


def _captured(contender: Contender) -> Callable[[], Tensor]:
    """What replays a step, captured after some others; gives its loss, and keeps what the graph reads and writes."""
    with beside_current_stream():
        for _ in range(BEFORE_CAPTURE):
            contender.queue_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = contender.queue_step()
    return functools.partial(_replay, contender, graph, loss)


@contextlib.contextmanager
def beside_current_stream() -> Iterator[None]:
    """On a stream that goes on where the current one is, which waits for it at the end: what a graph that is captured
    next must not hold is made there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _replay(_: Contender, graph: torch.cuda.CUDAGraph, loss: Tensor) -> Tensor:
    graph.replay()
    return loss


def _timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_footprint(name: str, work: Work) -> Footprint:
    """In a process of its own: one contender's."""
    with modelled_network(WORLD_SIZE):
        contender = work.contender(name)
        for _ in range(WARM_UP):
            contender.step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        contender.step()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        peaks = (int(stats[f"{kind}_bytes.all.peak"]) for kind in ("allocated", "reserved", "inactive_split"))
        return Footprint(*_launched(contender), contender.resident_bytes(), *peaks)


def _launched(contender: Contender) -> tuple[int, int]:
    """Kernels, and copies without one, of forward and backward."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        contender.forward().backward()
        torch.cuda.synchronize()
    contender.optimizer.zero_grad()
    counts = {event.key: event.count for event in profiler.key_averages()}
    launches, copies = (
        sum(count for key, count in counts.items() if key.startswith(names)) for names in (LAUNCHES, COPIES)
    )
    return launches, copies
