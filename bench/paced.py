"""A training step whose processes are connected by a slow link: TCP sockets that the kernel paces.

Unlike on the modelled network (exposed.py) the collectives are real, gloo's, and cost processor time.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .contenders import CONTENDERS, FSDP2, UNSHARDED, Contender, make_contender
from .model import Shape
from .preload import NoCompilerError, in_environment, preloaded
from .ranks import BenchError, run_on_gloo
from .report import NONE, Table, number, ratio
from .steps import COMPUTE_HEAVY, LOSS_TOLERANCE, PARAMETER_HEAVY
from .timing import interleave, median, spread

WORLD_SIZE = 2
RATES = (1_000_000_000, 250_000_000, 125_000_000)
"""Bytes per second, each way."""
LIMIT = 300.0
MAX_PACING_RATE_AT, BYTES_SENT_AT = 112, 200
"""Where the kernel's ``struct tcp_info`` has these two, of 8 bytes each."""
BARRIER_BYTES = 4096
"""A socket that sent less in a step carried no more than the barrier after it."""
LARGE_SECONDS = 0.25
"""That what shows the rates which gloo reaches takes at the full one."""


@dataclass(frozen=True)
class Run:
    """One step of one process.

    Args:
        seconds: of the step.
        processor_seconds: of all threads meanwhile.
        sent: bytes that each socket sent, of those that carried more than a barrier.
        loss: in nats per token.
    """

    seconds: float
    processor_seconds: float
    sent: tuple[int, ...]
    loss: float


Runs = dict[str, list[Run]]


def paced_tables(quick: bool) -> list[Table]:
    """One table per model."""
    rounds = 2 if quick else 5
    try:
        return [_table(shape, warm_up=2, rounds=rounds) for shape in (COMPUTE_HEAVY, PARAMETER_HEAVY)]
    except NoCompilerError as error:
        return [Table("A step over a slow link", ["not measured"], [[str(error)]])]


def _table(shape: Shape, warm_up: int, rounds: int) -> Table:
    columns = ["contender, rate", "step ms", "± ms", "CPU ms", "sent MB", "on the link ms", "bound ms"]
    columns += ["step / bound", "overhead ms", "overhead / FSDP2's"]
    table = Table(f"Step of {WORLD_SIZE} gloo processes over paced sockets: {shape}", columns)
    reached = []
    for rate in RATES:
        with preloaded(Path(__file__).with_name("pacing.c")), in_environment("PACED_TO", str(rate)):
            by_rank = run_on_gloo(WORLD_SIZE, LIMIT, measure, shape, rate, warm_up, rounds)
        rates, runs = zip(*by_rank, strict=True)
        messages, gather = (number(min(found) / 1e6, 0) for found in zip(*rates, strict=True))
        reached.append(f"{messages} and {gather} of {number(rate / 1e6, 0)}")
        table.rows += _rows(_slowest(runs), rate)
    table.notes = (
        f"{rounds} rounds after {warm_up} of warm-up; a round is one step of each, the slower rank counts; "
        "± is half the distance between the quartiles. CPU: of one process, all its threads.",
        "the kernel sends at most at the rate, each way and each socket (SO_MAX_PACING_RATE, set by a preloaded "
        "`pacing.c`). Every step was checked to send through one socket alone, so that is the rate of the link. In "
        "one large transfer gloo's messages, both ways at once, and its all-gather, which waits in between, reached "
        f"{'; '.join(reached)} MB/s.",
        "one processor core for each process: a step takes its CPU ms at least, and sending and receiving take some.",
        "sent: by one process, as the kernel counts. on the link: that / rate. bound: on the link, or the step without "
        "sharding if that is longer. overhead: the step minus that without sharding.",
        f"all contenders reported the same loss to within {LOSS_TOLERANCE:g} nats.",
    )
    table.chart = "step / bound"
    return table


def _slowest(ranks: Sequence[Runs]) -> Runs:
    """Of every step that rank's run which took longest; checked for a fair comparison."""
    slowest: Runs = {}
    for name in CONTENDERS:
        steps = list(zip(*(runs[name] for runs in ranks), strict=True))
        sockets = max(len(run.sent) for runs in steps for run in runs)
        if sockets > 1:
            raise BenchError(f"{name} sent over {sockets} sockets, each of which is as fast as the link should be")
        slowest[name] = [max(runs, key=lambda run: run.seconds) for runs in steps]
    losses = {name: runs[-1].loss for name, runs in slowest.items()}
    if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE:
        raise BenchError(f"the contenders' losses differ: {losses}")
    return slowest


def _rows(runs: Mapping[str, Sequence[Run]], rate: int) -> list[list[str]]:
    steps = {name: median([run.seconds for run in found]) for name, found in runs.items()}
    reference = steps[FSDP2] - steps[UNSHARDED]
    rows = []
    for name, found in runs.items():
        sent = median([sum(run.sent) for run in found])
        bound, overhead = max(steps[UNSHARDED], sent / rate), steps[name] - steps[UNSHARDED]
        compared = [ratio(steps[name], bound), number(1e3 * overhead), ratio(overhead, reference)]
        row = [f"{name}, {number(rate / 1e6, 0)} MB/s", number(1e3 * steps[name])]
        row += [number(1e3 * spread([run.seconds for run in found]))]
        row += [number(1e3 * median([run.processor_seconds for run in found]))]
        row += [number(sent / 1e6), number(1e3 * sent / rate), number(1e3 * bound)]
        rows.append(row + (compared if name != UNSHARDED else [compared[0], NONE, NONE]))
    return rows


# -- On one rank -------------------------------------------------------------------------------------------------


def measure(shape: Shape, rate: int, warm_up: int, rounds: int) -> tuple[tuple[float, float], Runs]:
    """The rates that gloo reaches, and each contender's steps."""
    actions: dict[str, Callable[[], Run]] = {}
    for name in CONTENDERS:
        actions[name] = functools.partial(_step, make_contender(name, shape), rate)
    gc.collect()
    gc.freeze()
    return _rates_reached(int(rate * LARGE_SECONDS)), interleave(actions, warm_up, rounds)


def _rates_reached(size: int) -> tuple[float, float]:
    """Bytes per second each way of messages to the other rank, and of an all-gather; ``size`` bytes from each."""
    own, outputs = torch.ones(size, dtype=torch.uint8), list(torch.ones(WORLD_SIZE, size, dtype=torch.uint8))
    peer = 1 - dist.get_rank()

    def exchange() -> None:
        for work in (dist.irecv(outputs[peer], peer), dist.isend(own, peer)):
            assert work is not None
            work.wait()

    def seconds(transfer: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        transfer()
        return time.perf_counter() - start

    ways: dict[str, Callable[[], object]] = {
        "messages": exchange,
        "gather": functools.partial(dist.all_gather, outputs, own),
    }
    found = interleave({name: functools.partial(seconds, way) for name, way in ways.items()}, 1, 3)
    return size / median(found["messages"]), size / median(found["gather"])


def _step(contender: Contender, rate: int) -> Run:
    # What was sent has been received, all of it, once both are through the barrier that follows it.
    dist.barrier()
    before = sent_by_sockets(rate)
    start, processor_start = time.perf_counter(), time.process_time()
    loss = contender.step()
    end, processor_end = time.perf_counter(), time.process_time()
    dist.barrier()
    sent = (now - before.get(descriptor, 0) for descriptor, now in sent_by_sockets(rate).items())
    carried = tuple(bytes_ for bytes_ in sent if bytes_ > BARRIER_BYTES)
    return Run(end - start, processor_end - processor_start, carried, loss)


def sent_by_sockets(rate: int) -> dict[int, int]:
    """Bytes that each connected TCP socket of this process has sent so far, by its descriptor.

    Raises:
        BenchError: if one sends faster than ``rate`` bytes per second.
    """
    sent: dict[int, int] = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            opened = socket.socket(fileno=descriptor)
        except OSError:
            continue
        try:
            opened.getpeername()
            about = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        finally:
            opened.detach()
        if (limit := struct.unpack_from("=Q", about, MAX_PACING_RATE_AT)[0]) > rate:
            raise BenchError(f"a socket is paced to {limit} bytes per second, not to {rate}")
        sent[descriptor] = struct.unpack_from("=Q", about, BYTES_SENT_AT)[0]
    return sent
