"""Process groups as FairScale's arguments give them, real ones and stand-ins, and the devices they compute on."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..arguments import refuse_outside
from ..core.agreement import communicating
from ..core.comm import Comm, GrouplessComm, comm_for, second_comm_of
from ..core.flat import FlatShards
from ..core.mesh import DataParallelRanks
from ..core.parameter import owner_of
from ..placements import Placements


def given_group(process_group: Any) -> Any:
    """``process_group``, or that of all ranks.

    Raises:
        TypeError: if it is neither a process group nor a stand-in with ``rank()`` and ``size()``.
        ValueError: if this process is not in the group.
        RuntimeError: if none is given and torch.distributed is not initialized.
    """
    if process_group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "FullyShardedDataParallel shards over the ranks of a process group and there is none: call "
                "torch.distributed.init_process_group first, or pass process_group=DummyProcessGroup(rank, size)"
            )
        return dist.group.WORLD
    refuse_outside("process_group", process_group)
    if not _is_group(process_group):
        raise TypeError(f"process_group must be a process group, not {type(process_group).__name__}")
    return process_group


def _is_group(given: Any) -> bool:
    return callable(getattr(given, "rank", None)) and callable(getattr(given, "size", None))


def given_reduce_group(given: Any) -> Any:
    """The ranks' group for gradients: None for that of the gathers, ``"reduce_scatter"`` for a communicator of its own,
    or a group.

    Raises:
        TypeError: if ``given`` is neither of these, nor the default's name, nor a member of FairScale's enumeration.
        ValueError: if this process is not in the group.
    """
    name = getattr(given, "value", given)
    if given is None or name == "default":
        return None
    if name == "reduce_scatter":
        return name
    refuse_outside("process_group_reduce_scatter", given)
    if not _is_group(given):
        raise TypeError(
            f"process_group_reduce_scatter must be a process group, 'default', 'reduce_scatter' or None, not {given!r}"
        )
    return given


def name_of_reduce_group(group: Any) -> str:
    """What all ranks have to give alike of a `given_reduce_group`."""
    return "default" if group is None else group if isinstance(group, str) else f"a group of {group.size()} ranks"


def is_stand_in(group: Any) -> bool:
    """Whether ``group`` only tells rank and size."""
    return not isinstance(group, dist.ProcessGroup)


def ranks_of(group: Any, device: torch.device) -> DataParallelRanks:
    """The ranks of ``group``, over which everything is sharded."""
    return DataParallelRanks(Placements.zero3, device, comm_of(group, device), ())


def comm_of(group: Any, device: torch.device) -> Comm:
    """Collectives of ``group``; a stand-in for several ranks has none."""
    if not is_stand_in(group):
        return comm_for(group, device)
    return GrouplessComm(group.rank(), group.size())


def compute_device_of(group: Any, module: nn.Module) -> torch.device:
    """Where the parameters are if that is an accelerator, otherwise where ``group`` communicates."""
    first = next(module.parameters(), None)
    if first is not None and first.device.type not in ("cpu", "meta"):
        return first.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or is_stand_in(group):
        return torch.device("cpu")
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    # gloo names every device, and is what CPUs use.
    if backends.get(accelerator.type, "gloo") == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def reduce_comm_of(group: Any, comm: Comm, device: torch.device) -> Comm | None:
    """Collectives for reductions if they are not those of the gathers.

    Args:
        group: as `given_reduce_group` gives it.
        comm: of the gathers.
        device: that computes.
    """
    if group is None or comm.size == 1 or isinstance(comm, GrouplessComm):
        return None
    if group == "reduce_scatter":
        return second_comm_of(comm.group, device)
    if group.size() != comm.size:
        _warn_of_other_ranks(f"{group.size()} ranks", comm.size)
        return None
    if is_stand_in(group):
        return None
    # Of as many other ranks, each would give this one gradients of elements that are another's.
    own, others = dist.get_process_group_ranks(comm.group), dist.get_process_group_ranks(group)
    if own != others:
        _warn_of_other_ranks(f"ranks {others}", own)
        return None
    return comm_for(group, device)


def _warn_of_other_ranks(found: str, own: object) -> None:
    warnings.warn(
        f"process_group_reduce_scatter has {found} and process_group {own}: gradients are reduced over process_group",
        stacklevel=5,
    )


def describe(tensor: torch.Tensor) -> str:
    """What has to be the same of a tensor on all ranks, so that they issue the same collectives."""
    kind = [type(tensor).__name__] * isinstance(tensor, DTensor) + ["on meta"] * tensor.is_meta
    kind += [str(tensor.layout)] * (tensor.layout is not torch.strided)
    shape = "without a shape yet" if is_lazy(tensor) else str(tuple(tensor.shape))
    kind += [f"requires_grad={tensor.requires_grad}"] * isinstance(tensor, nn.Parameter)
    return " ".join([shape, str(tensor.dtype), *kind])


def describe_settings(settings: Mapping[str, object]) -> list[tuple[str, ...]]:
    """What has to be the same of ``settings`` on all ranks, for `check_same_on_ranks`."""
    return [("setting", f"{name}={value}") for name, value in settings.items()]


def refuse_sparse(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """
    Raises:
        ValueError: naming a tensor that has no memory to be sent as it is.
    """
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name!r} is a tensor of layout {tensor.layout}, and all ranks get the first rank's parameters and "
                "buffers, which must be dense for it: keep it as an attribute that is not registered, or make it dense"
            )


def refuse_shards(wrapper: str, named: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> None:
    """
    Raises:
        ValueError: naming a parameter of which ranks of ``group`` have different parts: sent as a whole, one would
            replace the others.
    """
    ranks = set(dist.get_process_group_ranks(group))
    for name, tensor in named:
        if len(ranks) > 1 and (isinstance(tensor, DTensor) or len(ranks.intersection(_ranks_with_parts(tensor))) > 1):
            raise ValueError(
                f"{wrapper}: {name} is sharded, and here whole parameters are given to ranks: leave out what is "
                "sharded, and step it by a plain torch optimizer, whose state is in shards as the parameters are"
            )


def _ranks_with_parts(parameter: torch.Tensor) -> list[int]:
    """The processes that have the parts of a 1-D shard; of any other parameter, none."""
    owner = owner_of(parameter)
    if not isinstance(owner, FlatShards) or isinstance(owner.mesh.shard, GrouplessComm):
        return []
    return dist.get_process_group_ranks(owner.mesh.shard.group)


def check_same_on_ranks(
    wrapper: str, comm: Comm, described: Sequence[tuple[str, ...]], device: torch.device, told: Any = None
) -> list[Any]:
    """Compare what each rank's ``wrapper`` holds; a collective, small where all is the same.

    Args:
        wrapper: its name.
        comm: the ranks.
        described: what this rank's holds.
        device: on which to communicate.
        told: what may differ.

    Returns:
        What each rank has told.

    Raises:
        ValueError: naming what is not the same on all ranks.
    """
    what = f"comparing the parameters of {wrapper} on all ranks"
    number = int.from_bytes(hashlib.sha256(repr((described, told)).encode()).digest()[:7], "big")
    with communicating(what, comm):
        smallest, largest = comm.widen(number, number, device)
    if smallest == largest:
        return [told] * comm.size
    with communicating(what, comm):
        everyone = comm.gather_objects((described, told))
    for rank, (theirs, _) in enumerate(everyone):
        for first, other in itertools.zip_longest(everyone[0][0], theirs):
            if first != other:
                raise ValueError(
                    f"{wrapper}: ranks have different parameters: {_shown(first)} on rank 0, {_shown(other)} on rank "
                    f"{rank} of the group; build the same model and optimizers, with the same settings, on all ranks"
                )
    return [more for _, more in everyone]


def _shown(described: tuple[str, ...] | None) -> str:
    return " ".join(described) if described is not None else "none"


def raise_on_all(failure: Exception | None, what: str, group: Any, device: torch.device) -> None:
    """Raise what went wrong on this rank of ``group``, or else on another; a collective.

    Raises:
        Exception: ``failure``.
        RuntimeError: saying that ``what`` failed on another rank, and how.
    """
    everyone: list[Any] = []
    if not is_stand_in(group) and group.size() > 1:
        comm, said = comm_of(group, device), failure and str(failure)
        with communicating(f"ending {what} on all ranks", comm):
            everyone = comm.gather_objects(said)
    if failure is not None:
        raise failure
    for rank, text in enumerate(everyone):
        if text is not None:
            raise RuntimeError(f"{what} failed on rank {rank} of the group: {text}")
