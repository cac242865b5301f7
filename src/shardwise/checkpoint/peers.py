"""Peers: the ranks that hold one model between them, and how they agree when each has worked by itself."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.agreement import communicating
from ..core.comm import comm_for
from ..core.errors import listed
from ..core.mesh import mesh_device
from .interrupts import held

T = TypeVar("T")

AGREEING = "agreeing with the other ranks"
"""What ranks that wait in vain were doing, if no verb tells."""
HAPPENED = "shardwise: this happened on rank"
"""A note of an error that another rank raised first."""


class Peers:
    """The ranks of a mesh, or this process alone. The first is the one with the lowest rank.

    Args:
        mesh: any number of axes; None for this process alone.
    """

    def __init__(self, mesh: DeviceMesh | None = None):
        self.mesh, self.ranks, self.position = mesh, [0], 0
        self.device = torch.device("cpu")
        self._axes: list[tuple[dist.ProcessGroup, int, bool]] = []
        if mesh is not None:
            self._read(mesh)

    def _read(self, mesh: DeviceMesh) -> None:
        own = mesh.get_coordinate()
        assert own is not None, "this rank is not part of the mesh that its model is on"
        self.ranks = sorted(mesh.mesh.flatten().tolist())
        self.position = self.ranks.index(dist.get_rank())
        self.device = mesh_device(mesh)
        first = (mesh.mesh == self.ranks[0]).nonzero()[0].tolist()
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                # `broadcast` goes along one axis after the other.
                takes_part = list(own[axis + 1 :]) == first[axis + 1 :]
                source = int(mesh.mesh[(*own[:axis], first[axis], *own[axis + 1 :])])
                group = mesh.get_group(axis)
                # Groups have their ranks in another order than the mesh, if that is not ascending.
                self._axes.append((group, dist.get_group_rank(group, source), takes_part))

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first."""
        return self.position == 0

    def exchange(self, value: T) -> list[T]:
        """All ranks' values (picklable), in the order of their ranks."""
        known = {self.ranks[self.position]: value}
        for group, _, _ in self._axes:
            comm = comm_for(group, self.device)
            with communicating(AGREEING, comm):
                gathered: list[dict[int, T]] = comm.gather_objects(known)
            known = {rank: given for part in gathered for rank, given in part.items()}
        return [known.get(rank, value) for rank in self.ranks]

    def exchange_given(self, given: Mapping[str, object], value: T, rule: str) -> list[T]:
        """`exchange`, of ranks that were given the same.

        Args:
            given: arguments by name; None of one that another rank tells.
            value: to exchange.
            rule: that ranks break which were given different ones, for the message.

        Raises:
            ValueError: on all ranks, naming an argument that differs.
        """
        told = self.exchange((given, value))
        first, _ = told[0]
        for rank, (other, _) in zip(self.ranks, told, strict=True):
            for name, argument in other.items():
                if argument != first[name] and None not in (argument, first[name]):
                    raise ValueError(
                        f"{name} is {first[name]} on rank {self.ranks[0]} and {argument} on rank {rank}: {rule}"
                    )
        return [one for _, one in told]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the first rank's ``tensor``, contiguous, on `device` and of any dtype."""
        # As bytes: not every backend knows every dtype.
        data = tensor.view(-1).view(torch.uint8)
        for group, source, takes_part in self._axes:
            if takes_part:
                with communicating("sending values from the first rank", comm_for(group, self.device)):
                    dist.broadcast(data, group=group, group_src=source)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What a rank does inside by itself, without collectives, succeeds on all ranks or raises on all.

        Raises:
            Exception: the one of the first rank that failed, on every rank. What is none, such as an interrupt, is
                raised on its own rank, and as a RuntimeError on the others.
        """
        own: BaseException | None = None
        with held():
            try:
                yield
            except BaseException as error:  # the other ranks must not go on by themselves
                own = error
            failures = zip(self.ranks, self.exchange(_portable(own)), strict=True)
        rank, first = next(((rank, failure) for rank, failure in failures if failure is not None), (0, None))
        if first is None:
            return
        is_same = own is not None and (type(own), str(own)) == (type(first), str(first))
        is_first = rank == self.ranks[self.position]
        if own is not None and (is_first or is_same or not isinstance(own, Exception)):
            raise own
        if not any(note.startswith(HAPPENED) for note in getattr(first, "__notes__", ())):  # else others told it
            first.add_note(f"{HAPPENED} {rank}")
        raise first from own

    def position_unlike(self, value: object) -> int | None:
        """Position of the first rank whose ``value`` has another ``repr`` than the first rank's; None if there is none.
        A collective, small however large the value is."""
        return self.positions_unlike(value)[0]

    def positions_unlike(self, *values: object) -> list[int | None]:
        """`position_unlike` for each of ``values``, in one collective."""
        told = self.exchange([hashlib.sha256(repr(value).encode()).hexdigest() for value in values])
        return [
            next((at for at, digest in enumerate(each) if digest != each[0]), None) for each in zip(*told, strict=True)
        ]

    def refuse_unlike(self, verb: str, tensors: Mapping[str, object], plan: object, *, otherwise: str) -> None:
        """Refuse ranks that are about to do different things: each would mix up its tensors with another's.

        Args:
            verb: the function that they are in, for the message.
            tensors: dtype and shape of each tensor that this rank has, by name.
            plan: what this rank is about to do; the same where its ``repr`` is. It follows from ``tensors`` and from
                one other thing.
            otherwise: the name of that thing, for ranks that have the same ``tensors``.

        Raises:
            ValueError: on all ranks, unless all plan the same.
        """
        if (position := self.position_unlike(plan)) is None:
            return
        found = self.exchange(tensors)
        first, other = found[0], found[position]
        unlike = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        what = f"{listed(unlike)} (other dtypes or shapes, or one lacks them)" if unlike else otherwise
        raise ValueError(
            f"{verb}: ranks {self.ranks[0]} and {self.ranks[position]} do not have the same {what}, and all ranks that "
            "hold the model do this together"
        )


def _portable(error: BaseException | None) -> Exception | None:
    """``error`` as it can be sent to other processes."""
    if error is None:
        return None
    with contextlib.suppress(Exception):  # pickling runs code of the error's class
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(error, Exception) and type(copy) is type(error) and str(copy) == str(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def common_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """The one of ``meshes`` that has the ranks of all of them; None if ``meshes`` is empty.

    Raises:
        ValueError: if none has all ranks.
    """
    if not meshes:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks = set(largest.mesh.flatten().tolist())
    for mesh in meshes:
        if not ranks.issuperset(mesh.mesh.flatten().tolist()):
            raise ValueError(
                f"the model's parameters are on {largest} of ranks {sorted(ranks)} and on {mesh} of ranks "
                f"{mesh.mesh.flatten().tolist()}, and neither has all ranks of the other: load and save the parts of "
                "the model one by one"
            )
    return largest


def world_mesh() -> DeviceMesh | None:
    """All ranks of the default process group; None if there is none."""
    if not dist.is_initialized():
        return None
    world, accelerator = dist.group.WORLD, torch.accelerator.current_accelerator()
    assert world is not None
    on_host = accelerator is None or dist.get_backend() in ("gloo", "mpi", "fake")
    return DeviceMesh.from_group(world, "cpu" if accelerator is None or on_host else accelerator.type)
