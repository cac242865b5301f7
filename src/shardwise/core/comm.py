"""Collectives over one process group, chosen by backend; nothing else in the engine talks to a process group.

gloo: up to `PAIRWISE_WORLD_SIZE` ranks every rank sends to every other rank straight from and into the tensors.
That takes no staging copy, and at 10 MB half the time of gloo's own all-gather and a third of its reduce-scatter
(which clones its input and all-reduces it); `bench/collectives.py` measures it.
Others (NCCL, fake): one coalesced call. Groups written in Python: one public call for each tensor.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import math
import operator
import sys
import threading
import time
import uuid
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain, repeat
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .device import is_fake, unrecorded
from .errors import StateError
from .lanes import Waitable, abandon, current_world

PAIRWISE_WORLD_SIZE = 8
PACK_BELOW_BYTES = 128 * 1024
"""A chunk below this is sent with others in one staging run: a message costs as long as copying so much."""
PACK_WHOLE_BELOW_BYTES = 2**20
"""Where one call sends any number of tensors, a whole tensor of this size or more is never staged: in a large world
every chunk is small, so everything would be copied and held twice."""
DIRECT_BELOW_BYTES = 4 * 2**20
"""Among more than two ranks, gloo's own reduce and broadcast are faster for whole tensors from this size on than direct
messages, all of which the owner would have to send or hold."""
EXIT_PAUSE_SECONDS = 0.02
NO_STORE = (RuntimeError, ValueError, KeyError)
"""What is raised where a store is gone or never was, as of a fake group, and where the process group was destroyed."""

# torch 2.13 renames them, and warns of the old names.
_public_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_public_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Comm]] = weakref.WeakKeyDictionary()
_groups_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""How many groups `new_group_of` has made of the same ranks, by the default group of that time."""
_second_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""What `second_comm_of` has made for each group."""


class _Done:
    """Work that another step of the same collective finishes."""

    __slots__ = ("finish", "works")

    def __init__(self, works: Sequence[Waitable], finish: Callable[[], object]):
        self.works, self.finish = works, finish

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        finish, self.finish = self.finish, bool  # once: an average would be divided again
        finish()


Messages: TypeAlias = Sequence[tuple[int, torch.Tensor]]
"""Ranks and what comes from or goes to them."""


class _Messages:
    """Messages from and to other ranks of the group, kept alive until they are complete; `failed_peer` tells of an
    exception whose it was.

    Args:
        received: ranks and the tensors that come from them.
        sent: ranks and the tensors that go to them.
        group: that of the ranks.
        tag: alike on both ranks.
        world: a reference to the default process group of this time.
    """

    __slots__ = ("has_failed", "peers", "works", "world")

    def __init__(self, received: Messages, sent: Messages, group: dist.ProcessGroup, tag: int, world: weakref.ref[Any]):
        self.works: list[Any] = []
        self.has_failed = False
        all_of_them = (*received, *sent)
        self.peers, self.world = [peer for peer, _ in all_of_them], world
        calls = chain(repeat(group.recv, len(received)), repeat(group.send, len(sent)))
        tensors = [[tensor] for _, tensor in all_of_them]
        # All at once: no signal's handler runs in between, whose exception (Ctrl-C) would leave those messages without
        # their other end that were started.
        started = map(operator.call, calls, tensors, self.peers, repeat(tag))
        try:
            self.works.extend(started)
        except RuntimeError as error:  # gloo refuses messages once it knows that the other rank is gone
            self._name_peer(error, len(self.works))
            with contextlib.suppress(RuntimeError):  # the rest, for which other ranks wait
                self.works.extend(started)
            raise

    def wait(self) -> None:
        if self.has_failed:
            raise StateError("a message that was waited for before has failed")
        for number, work in enumerate(self.works):
            if not work.is_completed():  # once it is, gloo would wait for another one, which never comes
                try:
                    work.wait()
                except RuntimeError as error:
                    self.has_failed = True
                    self._name_peer(error, number)
                    raise
        self.works.clear()  # they hold the tensors

    def __del__(self, abandon: Callable[..., None] = abandon) -> None:
        # An exception may come between them and whoever is to wait for them, and keep them until there is another
        # world.
        if left := [work for work in getattr(self, "works", ()) if not work.is_completed()]:
            abandon(left, self.world)

    def _name_peer(self, error: RuntimeError, number: int) -> None:
        error.__dict__["_shardwise_peer"] = self.peers[number]


def failed_peer(error: RuntimeError) -> int | None:
    """The rank, of the group that communicates, with which a message failed by ``error``; None if it was another
    collective, of which gloo does not tell."""
    peer: int | None = error.__dict__.get("_shardwise_peer")
    return peer


class _Counted:
    """A collective operator as `CommDebugMode` sees it, which does nothing."""

    def __init__(self, name: str):
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self) -> None: ...

    def __str__(self) -> str:
        return str(self._overloadpacket)


def _let_count(name: str) -> None:
    """Let torch's `CommDebugMode` count a collective that is made of messages, of which it counts none, as that of
    c10d with this ``name``."""
    # Not imported here: that imports the compiler, which takes seconds, within whatever mode is active.
    if torch._C._len_torch_dispatch_stack() and (debug := sys.modules.get("torch.distributed.tensor.debug")):
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, debug.CommDebugMode):
                mode.__torch_dispatch__(_Counted(name), ())


class Comm:
    """Collectives of one process group. All tensors are 1-D and contiguous; works are waited for by the caller."""

    thin_from_bytes: float = 2**20
    """Thin tensors are summed over ranks, in a collective of their own, where that saves so many bytes of padding."""
    alone_bytes = 16 * 2**20
    """A whole tensor of so many bytes is sent from and to its own memory, a smaller one in a run with others."""
    run_bytes = 25 * 2**20
    """Largest run of several whole tensors: one run is sent while the gradients of the next are computed."""
    coalesces = True
    """Whether one call takes several tensors, and copies none."""
    is_asynchronous = False
    """Whether collectives run beside the current stream, and not on it, which on an accelerator is that of a `Lane` and
    has a higher priority than NCCL's own."""
    reductions = 0
    """How often this rank has begun to reduce the gradients of a group over these ranks: as often as the others."""

    def __init__(self, group: dist.ProcessGroup):
        # Weak, since the group is the key by which this object is found; the mesh keeps it alive.
        self._group = weakref.ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        group = self._group()
        assert group is not None, "the process group was destroyed"
        return group

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], purpose: str = ""
    ) -> list[Waitable]:
        """Fill ``outputs[i]`` (size x n_i elements) with all ranks' ``inputs[i]`` (n_i elements), in rank order.

        Ranks that name another ``purpose`` do not take these for theirs, where the backend can tell.
        """
        outputs, inputs = _reals(outputs), _reals(inputs)
        if self._sends_together(inputs):
            options = _options(AllgatherOptions, asynchronous=self.is_asynchronous)
            return _started(self.group.allgather_into_tensor_coalesced(outputs, inputs, options))
        return _started(*(self._gather(*pair) for pair in zip(outputs, inputs, strict=True)))

    def _sends_together(self, tensors: Sequence[torch.Tensor]) -> bool:
        # torch has no such call for fake tensors.
        return len(tensors) > 1 and self.coalesces and not is_fake(tensors[0])

    def _gather(self, output: torch.Tensor, input_: torch.Tensor) -> Waitable | None:
        return _all_gather_single(output, input_, self.group, self.is_asynchronous)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, mean: bool, purpose: str = ""
    ) -> list[Waitable]:
        """Fill ``outputs[i]`` (n_i elements) with the sum (``mean``: the mean) over ranks of their part of
        ``inputs[i]`` (size x n_i elements); ``purpose`` as of `all_gather`."""
        outputs, inputs, op = _reals(outputs), _reals(inputs), reduce_op(mean)
        if self._sends_together(inputs):
            options = _options(dist.ReduceScatterOptions, op, self.is_asynchronous)
            return _started(self.group.reduce_scatter_tensor_coalesced(outputs, inputs, options))
        return _started(*(self._scatter(*pair, op) for pair in zip(outputs, inputs, strict=True)))

    def _scatter(self, output: torch.Tensor, input_: torch.Tensor, op: Any) -> Waitable | None:
        return _reduce_scatter_single(output, input_, self.group, op, self.is_asynchronous)

    def packs(self, chunk_bytes: int) -> bool:
        """Whether a tensor of which each rank has ``chunk_bytes`` travels with others."""
        return chunk_bytes < PACK_BELOW_BYTES and chunk_bytes * self.size < PACK_WHOLE_BELOW_BYTES

    def unite(self, tensor: torch.Tensor) -> list[Waitable]:
        """Replace each element of ``tensor`` (a multiple of 4 bytes) by that of the one rank where it is not zero."""
        # As integers: -0.0 and every NaN stay what they are.
        return self.all_reduce(tensor.view(torch.int32), mean=False)

    def all_reduce(self, tensor: torch.Tensor, *, mean: bool) -> list[Waitable]:
        """Replace ``tensor`` by its sum (``mean``: mean) over ranks."""
        # The public wrapper looks for four other uses first, as long as the call itself takes.
        options = _options(dist.AllreduceOptions, reduce_op(mean), self.is_asynchronous)
        return _started(self.group.allreduce([_real(tensor)], options))

    def broadcast(self, tensor: torch.Tensor, owner: int) -> list[Waitable]:
        """Replace ``tensor`` by that of rank ``owner``."""
        return [dist.broadcast(tensor, group=self.group, group_src=owner, async_op=True)]

    def reduce(self, tensor: torch.Tensor, owner: int) -> list[Waitable]:
        """Replace ``tensor`` of rank ``owner`` by its sum over ranks; what other ranks then hold is undefined."""
        return [dist.reduce(tensor, group=self.group, group_dst=owner, async_op=True)]

    def move(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Replace ``tensor`` of rank ``target`` by that of rank ``source`` and wait; only those two need to call it."""
        if source == target:
            return
        if self.rank == source:
            dist.send(tensor, group=self.group, group_dst=target)
        elif self.rank == target:
            dist.recv(tensor, group=self.group, group_src=source)

    def global_rank(self, rank: int) -> int:
        """Number of ``rank`` in the default group."""
        return dist.get_global_rank(self.group, rank)

    def known_rank(self, rank: int) -> int | None:
        """`global_rank`; None once the group was destroyed, which then does not tell."""
        with contextlib.suppress(*NO_STORE):
            return self.global_rank(rank)
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        """What every rank passed, in rank order; pickled, so for small things."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @property
    def host_device(self) -> torch.device:
        """Where tensors that lie on the host have to be communicated: there, if the group has a backend for it; where
        torch itself sends pickled objects, which is nowhere else to be asked."""
        return torch.device(dist.distributed_c10d._get_object_coll_device(self.group))

    def all_reduce_now(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over ranks and wait."""
        dist.all_reduce(tensor, group=self.group)

    def all_reduce_largest(self, tensor: torch.Tensor) -> None:
        """Replace each element by its largest value over ranks and wait; where one is NaN, by any of them."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)

    def widen(self, smallest: int, largest: int, device: torch.device) -> tuple[int, int]:
        """The smallest of all ranks' ``smallest`` and the largest of their ``largest``, below 2^63; waits."""
        # The smallest is shown by the same maximum, of its negative.
        extremes = torch.tensor([-smallest, largest], device=device)
        self.all_reduce_largest(extremes)
        negative, largest = extremes.tolist()
        return -negative, largest


class GrouplessComm(Comm):
    """Ranks without a process group: this one alone, where nothing is sharded, or several, of which it can be told what
    they hold, and to which nothing can be sent."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @property
    def group(self) -> dist.ProcessGroup:
        """
        Raises:
            StateError: always.
        """
        if self.size == 1:
            raise StateError("nothing is sharded over ranks here, so there is no process group to communicate in")
        raise StateError(
            f"rank {self.rank} of {self.size} has no process group to communicate in: set process_group to one of as "
            "many ranks first"
        )


class GlooComm(Comm):
    """gloo: asynchronous on its own threads; its averaging is a sum and a division."""

    alone_bytes = 2**20
    run_bytes = 4 * 2**20
    coalesces = False  # its coalesced all-gather copies everything through one more buffer
    is_asynchronous = True

    def packs(self, chunk_bytes: int) -> bool:
        return chunk_bytes < PACK_BELOW_BYTES

    def _gather(self, output: torch.Tensor, input_: torch.Tensor) -> Waitable | None:
        # As bytes, as in `broadcast`, since it refuses bool, complex ones, and small floats and integers.
        return super()._gather(output.view(torch.uint8), input_.view(torch.uint8))

    def broadcast(self, tensor: torch.Tensor, owner: int) -> list[Waitable]:
        return super().broadcast(tensor.view(torch.uint8), owner)

    def all_reduce(self, tensor: torch.Tensor, *, mean: bool) -> list[Waitable]:
        works = super().all_reduce(tensor, mean=False)
        return [_Done(works, lambda: tensor.div_(self.size))] if mean else works


class PairwiseGlooComm(GlooComm):
    """gloo with few ranks: direct messages. Every operation has a tag of its own, the same on all ranks."""

    alone_bytes = PACK_BELOW_BYTES
    thin_from_bytes = math.inf
    """Never: nothing is padded more than to the number of ranks, and sums are in torch's order."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        self._operations, self._world = 0, current_world()

    def _tag(self, kind: str, part: torch.Tensor, purpose: str = "") -> int:
        """Of messages like ``part``."""
        # Far from the small tags that users choose for messages of their own. Ranks of which one left out a unit, or
        # froze a parameter, would otherwise take each other's messages: gloo ends a process if they are too long, and
        # tells nobody if not.
        self._operations = (self._operations + 1) % 2**14
        return 2**30 + (_digest(kind, purpose, part.numel(), part.dtype) << 14) + self._operations

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _exchange(self, tag: int, received: Messages, sent: Messages) -> Waitable:
        """Start to receive and send tensors, from and to the ranks that are given with them."""
        # Such a work ends its profiler event when it is waited for, and writes to freed memory if the profiler was
        # stopped before.
        with unrecorded():
            return _Messages(received, sent, self.group, tag, self._world)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], purpose: str = ""
    ) -> list[Waitable]:
        _let_count("_allgather_base_")
        works: list[Waitable] = []
        for output, input_ in zip(outputs, inputs, strict=True):
            parts, peers, tag = output.split(input_.numel()), self._peers(), self._tag("gather", input_, purpose)
            works.append(self._exchange(tag, [(peer, parts[peer]) for peer in peers], [*zip(peers, repeat(input_))]))
            if parts[self.rank].data_ptr() != input_.data_ptr():
                parts[self.rank].copy_(input_)
        return works

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, mean: bool, purpose: str = ""
    ) -> list[Waitable]:
        _let_count("_reduce_scatter_base_")
        pairs = zip(outputs, inputs, strict=True)
        return [
            self._reduce_scatter_one(output, input_, mean, self._tag("reduce", output, purpose))
            for output, input_ in pairs
        ]

    def _reduce_scatter_one(self, output: torch.Tensor, input_: torch.Tensor, mean: bool, tag: int) -> Waitable:
        parts, peers = input_.split(output.numel()), self._peers()
        # The last peer's part, which is added first, arrives in the output itself.
        spare = input_.new_empty((self.size - 2) * output.numel())
        received = [*(spare.split(output.numel()) if self.size > 2 else ()), output]
        messages = self._exchange(tag, [*zip(peers, received, strict=True)], [(peer, parts[peer]) for peer in peers])
        # gloo's ring adds from the rank before this one downwards and this one's own part last: the same bits.
        terms = [*reversed(received), parts[self.rank]]

        def add() -> None:
            torch.add(terms[0], terms[1], out=output)
            for term in terms[2:]:
                output.add_(term)
            if mean:
                output.div_(self.size)
            terms.clear()

        return _Done([messages], add)

    def _sends_whole(self, tensor: torch.Tensor) -> bool:
        return self.size == 2 or tensor.nbytes < DIRECT_BELOW_BYTES

    def broadcast(self, tensor: torch.Tensor, owner: int) -> list[Waitable]:
        if not self._sends_whole(tensor):
            return super().broadcast(tensor, owner)
        _let_count("broadcast_")
        tag = self._tag("broadcast", tensor)
        if self.rank != owner:
            return [self._exchange(tag, [(owner, tensor)], ())]
        return [self._exchange(tag, (), [*zip(self._peers(), repeat(tensor))])]

    def reduce(self, tensor: torch.Tensor, owner: int) -> list[Waitable]:
        if not self._sends_whole(tensor):
            return super().reduce(tensor, owner)
        _let_count("reduce_")
        tag = self._tag("sum", tensor)
        if self.rank != owner:
            return [self._exchange(tag, (), [(owner, tensor)])]
        received = list(tensor.new_empty((self.size - 1, tensor.numel())))
        messages = self._exchange(tag, [*zip(self._peers(), received, strict=True)], ())

        def add() -> None:
            for part in received:
                tensor.add_(part)
            received.clear()

        return [_Done([messages], add)]


class PythonComm(Comm):
    """A process group that is written in Python and has no backends, such as torch's for threads, or one that replaces
    ranks that fail: by torch's public functions, as of each tensor alone is all that such groups have in common."""

    coalesces = False

    def _gather(self, output: torch.Tensor, input_: torch.Tensor) -> Waitable | None:
        work: Waitable | None = _public_all_gather(output, input_, self.group, async_op=True)
        return work

    def _scatter(self, output: torch.Tensor, input_: torch.Tensor, op: Any) -> Waitable | None:
        work: Waitable | None = _public_reduce_scatter(output, input_, op, self.group, async_op=True)
        return work

    def reduce(self, tensor: torch.Tensor, owner: int) -> list[Waitable]:
        return self.all_reduce(tensor, mean=False)  # the group for threads has no other sum


@functools.lru_cache(2**12)  # sizes and purposes may be others in each iteration
def _digest(*described: object) -> int:
    return zlib.crc32(repr(described).encode()) % 2**16


class StagedCollective(Protocol):
    """A user's own all-gather or reduce-scatter: torch FSDP2's ``AllGather`` and ``ReduceScatter`` objects are such.

    ``allocate`` gives the staging buffers, the call communicates: ``output_tensor``, ``input_tensor``, ``group`` and,
    for a reduce-scatter, ``op``, all by keyword.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def __call__(self, **arguments: Any) -> Waitable | None: ...


def by_custom(
    custom: StagedCollective, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], **arguments: Any
) -> list[Waitable]:
    """Call ``custom`` for each pair of tensors."""
    pairs = zip(outputs, inputs, strict=True)
    return _started(*(custom(output_tensor=output, input_tensor=input_, **arguments) for output, input_ in pairs))


def _make_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have ``group`` connected on ``device``. A collective."""
    # NCCL connects at the first collective of its own (a barrier of a group with gloo too is not one).
    dist.all_reduce(torch.zeros(1, device=device), group=group)


class ProcessGroupMemory:
    """The default all-gather and reduce-scatter, staged in memory of the process group's own allocator, where it has
    one (NCCL's registered memory). To make it is a collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        if group._get_backend(device).supports_tensor_alloc(device):
            _make_communicator(group, device)  # which has the allocator

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = self.group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            tensor: torch.Tensor = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
            return tensor
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> Waitable | None:
        output, input_, group = arguments["output_tensor"], arguments["input_tensor"], arguments["group"]
        if "op" in arguments:
            return _reduce_scatter_single(output, input_, group, arguments["op"])
        return _all_gather_single(output, input_, group)


class SymmetricMemoryGather:
    """The default all-gather, staged in symmetric memory, for which NCCL has faster kernels."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, backend: str):
        self.group = group
        symmetric_memory.set_backend(cast(Literal["NCCL"], backend))
        _make_communicator(group, device)  # for the rendezvous

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> Waitable | None:
        if (group := arguments["group"]) is self.group:  # no other is known to be connected
            symmetric_memory.rendezvous(arguments["output_tensor"], group=group.group_name)
        return _all_gather_single(arguments["output_tensor"], arguments["input_tensor"], group)


def require_symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str, unit: str) -> None:
    """
    Raises:
        ValueError: unless ``group`` communicates by a backend with symmetric memory.
    """
    name = _backend_name(group, device)
    if backend != "NCCL" or "nccl" not in name:
        raise ValueError(
            f"symmetric memory was asked for unit {unit!r} with backend {backend!r} on {device.type}: it needs NCCL "
            f"on CUDA, and the unit's process group uses {name or 'Python'!r}"
        )


class _Naming:
    """What torch calls the groups that threads make now, each of which may be a rank.

    torch names a group by how many this process knows: ranks that know more or fewer would wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._original = distributed_c10d._hash_ranks_to_str

    @contextlib.contextmanager
    def next_group(self, name: str) -> Iterator[None]:
        """Inside, what this thread makes is called ``name``."""
        thread = threading.get_ident()
        with self._lock:  # not for longer, since making a group waits for other threads
            if not self._names:
                self._original = distributed_c10d._hash_ranks_to_str
                distributed_c10d._hash_ranks_to_str = self._name
            self._names[thread] = name
        try:
            yield
        finally:
            with self._lock:
                del self._names[thread]
                if not self._names:
                    distributed_c10d._hash_ranks_to_str = self._original

    def _name(self, ranks: list[int]) -> str:
        return self._names.get(threading.get_ident()) or self._original(ranks)


_naming = _Naming()


def new_group_of(ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """A new process group of ``ranks``, which all call this, and no others.

    Args:
        ranks: in the default group.
        purpose: part of its name.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _groups_made.setdefault(world, Counter())
    made[*ranks] += 1
    name = hashlib.sha1(f"{purpose} {[*ranks]} {made[*ranks]}".encode(), usedforsecurity=False).hexdigest()
    # From a default group that is bound to a device torch would split it, for which NCCL waits for all of its ranks.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        with _naming.next_group(name):
            group = dist.new_group(
                [*ranks], _time_limit(world), use_local_synchronization=True, group_desc=f"shardwise_{purpose}"
            )
    finally:
        world.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup)
    return group


def second_comm_of(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """Collectives of the same ranks over a communicator of their own, so that they run beside the others'; one for all
    models, since it takes connections and memory. The first call for each group is a collective."""
    if group not in _second_groups:
        _second_groups[group] = new_group_of(dist.get_process_group_ranks(group), "reduce")
    return comm_for(_second_groups[group], device)


def connect(world: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """gloo connections between the ranks of a process group, which outlive it; with its time limit. A collective."""
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, group=world, group_src=0)
    store = PrefixStore(name[0], default_store())
    _let_gloo_finish_before_exit()
    timeout = _time_limit(world) or dist.constants.default_pg_timeout
    return dist.ProcessGroupGloo(store, world.rank(), world.size(), timeout)


def default_store() -> Store:
    """That by which the ranks of the default group have met; torch gives users only stores that they made."""
    return dist.distributed_c10d._get_default_store()


def _time_limit(group: dist.ProcessGroup) -> timedelta | None:
    """Of the collectives of ``group``, which only its backend's private options tell; None if they do not, as those of
    one that is written in Python or a fake."""
    backend: Any = group._get_backend(group._device_types[0]) if group._device_types else None
    with contextlib.suppress(AttributeError, RuntimeError):  # the latter of backends that have no options
        limit: timedelta = backend.options._timeout
        return limit
    return None


def comm_for(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """The collectives of ``group`` on ``device``; one object for both, since operations are numbered."""
    known = _comms.setdefault(group, {})
    if (comm := known.get(device.type)) is None:
        comm = known[device.type] = _make_comm(group, device)
    return comm


def _make_comm(group: dist.ProcessGroup, device: torch.device) -> Comm:
    if not (name := _backend_name(group, device)):
        return PythonComm(group)
    if "gloo" not in name:
        return Comm(group)
    _let_gloo_finish_before_exit()
    # gloo's messages and coalesced gathers take the pointers of CUDA tensors for the host's.
    direct = device.type == "cpu" and 1 < group.size() <= PAIRWISE_WORLD_SIZE
    return PairwiseGlooComm(group) if direct else GlooComm(group)


@functools.cache
def _let_gloo_finish_before_exit() -> None:
    """Keep a process that ends right after a collective from being aborted ("terminate called without an active
    exception")."""
    # A thread of gloo's that drops finished work takes the interpreter's lock for its tensors; once the interpreter has
    # begun to end, that ends the thread, and with it the process. While this one sleeps the lock is free. Nothing tells
    # when the threads are done but the end of the group, which a mesh or the user may hold.
    atexit.register(time.sleep, EXIT_PAUSE_SECONDS)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Empty for a group that is written in Python."""
    # A mixed group ("cpu:gloo,cuda:nccl") has a backend per device, which only the private getter tells.
    return "" if not group._device_types else str(group._get_backend(device).name())


def reduce_op(mean: bool) -> Any:
    """The operator of a reduction."""
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor, which NCCL does not know, as its real and imaginary parts."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _reals(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Hardly ever there are complex ones, and a unit may have many tensors.
    return [*map(_real, tensors)] if any(map(torch.Tensor.is_complex, tensors)) else [*tensors]


def _started(*works: Waitable | None) -> list[Waitable]:
    """Of a collective that runs on the current stream a backend may give nothing to wait for."""
    return [work for work in works if work is not None]


def _all_gather_single(
    output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup, asynchronous: bool = False
) -> Waitable | None:
    options = _options(AllgatherOptions, asynchronous=asynchronous)
    # The public wrapper has another name before and after torch 2.13.
    work: Waitable | None = group._allgather_base(output, input_, options)
    return work


def _reduce_scatter_single(
    output: torch.Tensor, input_: torch.Tensor, group: dist.ProcessGroup, op: Any, asynchronous: bool = False
) -> Waitable | None:
    options = _options(dist.ReduceScatterOptions, op, asynchronous)
    work: Waitable | None = group._reduce_scatter_base(output, input_, options)
    return work


@functools.cache
def _options(kind: type[Any], op: Any = None, asynchronous: bool = False) -> Any:
    """Options of a collective that runs on the current stream, or beside it."""
    options = kind()
    options.asyncOp = asynchronous
    if op is not None:
        options.reduceOp = op
    return options
