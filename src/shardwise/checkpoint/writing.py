"""Writes leaves to files in the format of `torch.distributed.checkpoint`, with its planner.

Two things differ from torch's writer. Checksums are taken while the bytes are written. Tensors are written from where
they are, without a copy and without the slow checksum of torch's serialization, which nothing compares.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.serialization import get_crc32_options, set_crc32_options

from ..core.device import HOST
from ..core.errors import listed
from .atomic import DCP_METADATA
from .integrity import CheckpointError, FileSum, Manifest, is_plain, raw, sum_file, summed
from .objects import Path, Pickled, key_of
from .ranks import SavingRanks

COPY_AHEAD = 10_000_000
"""Bytes that are copied from a device while others are written; DCP's default."""
Leaves = Mapping[Path, Any]
"""What this rank gives to a checkpoint: tensors and `Pickled` objects."""


class _SavePlanner(DefaultSavePlanner):
    """Plans leaves that are flat already. The lowest rank that has a key writes it, so that buffers in which ranks
    differ all come from the same rank."""

    def __init__(self, leaves: Leaves):
        super().__init__(dedup_save_to_lowest_rank=True)
        self._leaves = leaves
        self.unusual: list[str] = []
        """Keys of tensors that are not plain (see `is_plain`), which torch serializes in a way of its own."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = {key_of(path): value for path, value in self._leaves.items()}
        self.mappings = {key_of(path): path for path in self._leaves}
        if len(self.mappings) < len(self._leaves):
            twice = [path for path in self._leaves if self.mappings[key_of(path)] != path]
            raise ValueError(f"two things to save have the same name: {listed(map(key_of, twice))}")
        self.is_coordinator = is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        try:
            if len(all_plans) == 1 and _incomplete(all_plans):  # of one rank torch does not look
                raise ValueError("one process saves alone, as after destroy_process_group(), what several share")
            return super().create_global_plan(all_plans)
        except ValueError as error:
            raise ValueError(
                "what the ranks give does not make up whole tensors: each rank that holds a part of the model, of the "
                "optimizer or of a tensor in extra has to pass it, under names that no other model has; "
                f"incomplete: {listed(_incomplete(all_plans))} ({error})"
            ) from error

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.lookup_object(write_item.index)
        if isinstance(value, Pickled):
            return io.BytesIO(value.data)
        tensor = cast(torch.Tensor, value).detach()
        if is_plain(tensor):
            return _alone_in_storage(tensor)
        self.unusual.append(write_item.index.fqn)
        return tensor


def _incomplete(plans: list[SavePlan]) -> list[str]:
    """Keys of tensors whose parts have fewer or more elements than they have themselves."""
    sizes, parts = dict[str, int](), dict[MetadataIndex, int]()
    for item in (item for plan in plans for item in plan.items):
        if (data := item.tensor_data) is not None:
            sizes[item.index.fqn], parts[item.index] = data.size.numel(), data.chunk.sizes.numel()
    found = dict.fromkeys(sizes, 0)
    for index, size in parts.items():
        found[index.fqn] += size
    return [key for key, size in sizes.items() if found[key] != size]


def _alone_in_storage(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` made contiguous, in a storage that has nothing else: DCP copies any other before it writes it. On the
    host the memory is the same if it is contiguous."""
    if not tensor.numel():
        return tensor
    if tensor.device.type != "cpu":
        return tensor.resolve_conj().resolve_neg().contiguous()
    return torch.frombuffer(raw(tensor), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


class _SummingFileSystem(FileSystem):
    """Files whose checksums are known when they are written."""

    def __init__(self, advance: Callable[[int], None]):
        self._advance = advance
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with summed(path, mode, self._advance) as stream:
            yield stream
        self.sums[os.path.basename(path)] = stream.sum


def write_leaves(
    directory: FilePath, leaves: Leaves, ranks: SavingRanks, advance: Callable[[int], None] = lambda _: None
) -> Manifest | None:
    """Write what all ranks give, together, and wait until it is on the disk.

    Args:
        directory: that exists and is empty; all ranks see it.
        leaves: of this rank; every rank gives its part of a sharded tensor, one rank or more a replicated tensor.
        ranks: that write it.
        advance: called with the number of bytes written.

    Returns:
        What was written, on the first rank; None on the others.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write.
        ValueError: on all ranks, if what they give does not make up whole tensors.
    """
    planner, files = _SavePlanner(leaves), _SummingFileSystem(advance)
    # DCP copies ahead on the thread's current device, which in our background thread may be another rank's.
    on_host = all(leaf.device.type == "cpu" for leaf in leaves.values() if isinstance(leaf, torch.Tensor))
    writer = FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=0 if on_host else COPY_AHEAD)
    writer.fs = files
    with ranks.together():
        planner.set_up_planner({}, None, ranks.is_first)
        writer.set_up_storage_writer(ranks.is_first, rank=ranks.position, use_collectives=True)
        with HOST:  # torch reads offsets from tensors on the default device
            plan = planner.create_local_plan()
    plans, metadata = ranks.gather(plan), None
    with ranks.together():
        if plans is not None:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
    plan = planner.finish_plan(ranks.scatter(plans))
    with ranks.together(), naming(directory), _without_inner_checksums():
        results = writer.write_data(plan, planner).value()
    gathered, manifest = ranks.gather((results, dict(files.sums), planner.unusual)), None
    with ranks.together(), naming(directory):
        if gathered is not None and metadata is not None:
            writer.finish(metadata, [results for results, _, _ in gathered])
            sums = {name: total for _, own, _ in gathered for name, total in own.items()}
            sums[DCP_METADATA] = sum_file(directory / DCP_METADATA)
            manifest = Manifest(ranks.size, sums, sorted({key for _, _, own in gathered for key in own}))
    return manifest


@contextmanager
def naming(directory: FilePath) -> Iterator[None]:
    """Raise errors of the operating system as a `CheckpointError` that names the directory."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"writing a checkpoint into {directory} failed: {error}; all ranks must see the same directory"
        ) from error
    except OSError as error:
        raise CheckpointError(f"writing a checkpoint into {directory} failed: {error}") from error


@contextmanager
def _without_inner_checksums() -> Iterator[None]:
    # They take most of the time of saving, `torch.load` does not look at them, and the manifest has better ones.
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
