"""Loading and saving models as safetensors in the Hugging Face layout."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import torch
from torch import nn

from ..arguments import check_flag, is_whole_number
from ..core.agreement import doing
from ..core.device import untracked
from ..core.errors import is_explained
from .atomic import path_of, sync_directory
from .groups import warn_of_groups
from .integrity import CorruptFileError
from .interrupts import held
from .matching import IncompatibleKeys, Match, WeightsError, check_ties, match
from .peers import Peers
from .progress import Progress
from .tensor_files import (
    INDEX,
    SINGLE,
    PlannedFile,
    StoredTensor,
    TensorMover,
    index_of,
    plan_files,
    read_stored,
    version_of,
)
from .weights import ModelWeights, Region, Weight, peers_of, weights_of

ABANDONED_AFTER = 86400.0
"""Seconds without a write, after which an unfinished file is taken for that of a save that was killed."""

_ALSO_PLANNED = "max_shard_size or order of tensors"
"""What else the files follow from than the tensors: in which ranks may differ that have the same ones."""

Rename = Mapping[str, str] | Callable[[str], str | None]


# -- Loading


@held()
@torch.no_grad()
@doing("loading safetensors")
def load_safetensors(
    model: nn.Module,
    path_or_dir: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> IncompatibleKeys:
    """Load a model's parameters and persistent buffers by their names; all ranks that hold it call this.

    Each rank reads from the files the bytes of its own shards alone, and no more than a block of them at a time into
    host memory beside them. Values are converted to the dtypes that the model has. Parameters on the meta device get
    memory, as the same objects. Nothing is written before all headers were checked; if reading fails later, a forward
    of the units concerned is refused until something is loaded.

    Args:
        model: with units or without.
        path_or_dir: a ``.safetensors`` file, an index of several (a ``.json``), or a directory that has
            ``model.safetensors`` or ``model.safetensors.index.json``.
        strict: whether names missing in the files, and names that the model does not have, are errors. Of a tied
            parameter one name is enough.
        rename: from names in the files to names in the model, as a dict (others stay) or a function (which gives
            None for tensors to leave out).

    Returns:
        The missing and the unexpected names (none if ``strict``).

    Raises:
        FileNotFoundError: for a path, or a file that the index names, which does not exist.
        ValueError: (a `WeightsError`, which is a RuntimeError too) listing all missing, unexpected and mis-shaped
            names and impossible conversions together; (a `CorruptFileError`) naming a file that is damaged.
        TypeError: for an argument of a wrong type.
        OSError: if reading fails. Every error is raised on all ranks.
    """
    peers = peers_of(model)
    with peers.together():
        check_flag("load_safetensors", "strict", strict)
        loading = weights_of(model, asked_by="load_safetensors", plain_names=True)
        stored, problems = _renamed(read_stored(path_or_dir), rename)
        matches, keys = match(loading, stored, str(path_or_dir), strict=strict, problems=problems)
    _check_same(peers, stored, path_or_dir)
    with peers.together(), _Files() as files:
        mover = TensorMover()

        def differ(weight: Weight, one: str, other: str) -> bool:
            a, b = stored[one], stored[other]
            return mover.differ(files.of(a), a, files.of(b), b, weight.region, weight.dtype)

        check_ties(matches, path_or_dir, differ)
    # Apart: ranks may find their rows of a tie alike where others do not.
    with peers.together():
        for found in matches:
            found.weight.prepare_memory(loading.device)
    with peers.together(), _Files() as files:
        _read(matches, stored, files, shown=peers.is_first)
    with peers.together():  # extra state goes to code of the modules
        for found in matches:
            found.weight.accept_values()
    return keys


def _renamed(stored: Mapping[str, StoredTensor], rename: Rename | None) -> tuple[dict[str, StoredTensor], list[str]]:
    """Stored tensors by their names in the model, and what is wrong with the new names."""
    if rename is None:
        return dict(stored), []
    if not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(f"rename must be a dict or a function, not {type(rename).__name__}")
    old_names: dict[str, list[str]] = defaultdict(list)
    for old in stored:
        try:
            new = rename.get(old, old) if isinstance(rename, Mapping) else rename(old)
        except Exception as error:
            error.add_note(f"by rename, called with the name {old!r} of a tensor in the files")
            raise
        if new is not None and not isinstance(new, str):
            raise TypeError(f"rename gave {new!r} for {old!r}: it must give a name, or None to leave the tensor out")
        if new is not None:
            old_names[new].append(old)
    collisions = [
        f"renamed alike: {', '.join(map(repr, olds))} to {new!r}" for new, olds in old_names.items() if len(olds) > 1
    ]
    return {new: stored[olds[0]] for new, olds in old_names.items()}, collisions


def _check_same(peers: Peers, stored: Mapping[str, StoredTensor], path: object) -> None:
    """
    Raises:
        WeightsError: unless all ranks have read the same headers (each host may have files of its own).
    """
    # Sorted: tensors without elements start at the same byte, and the library gives them in any order.
    headers = sorted((key, s.key, s.label, s.shape, s.start) for key, s in stored.items())
    if (position := peers.position_unlike(headers)) is not None:
        first, other = peers.ranks[0], peers.ranks[position]
        raise WeightsError(f"{path} is not the same for all ranks: {other} reads other headers than {first}")


def _read(matches: Sequence[Match], stored: Mapping[str, StoredTensor], files: _Files, *, shown: bool) -> None:
    # In the order in which they lie in the files.
    sources = sorted(((stored[m.stored[0]], m.weight) for m in matches), key=lambda pair: (pair[0].file, pair[0].start))
    total = sum(weight.local.nbytes for _, weight in sources)
    with Progress("Loading", total, shown=shown) as progress:
        mover = TensorMover(progress.advance)
        for source, weight in sources:
            mover.read(files.of(source), source, weight.region, weight.local)


class _Files(contextlib.ExitStack):
    """The open files of stored tensors, while the context lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, int] = {}

    def of(self, stored: StoredTensor) -> int:
        """The descriptor of a stored tensor's file.

        Raises:
            CorruptFileError: if it is not the file whose header was read.
        """
        if stored.file not in self._open:
            self._open[stored.file] = descriptor = os.open(stored.file, os.O_RDONLY | os.O_CLOEXEC)
            self.callback(os.close, descriptor)
            if version_of(descriptor) != stored.version:
                raise CorruptFileError(f"{stored.file} was replaced or changed while it was read: load once more")
        return self._open[stored.file]


# -- Saving


@held()
@untracked()
@doing("saving safetensors")
def save_safetensors(model: nn.Module, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Save a model's parameters and persistent buffers for any reader of safetensors; all ranks that hold it call this.

    The directory gets ``model.safetensors``, or ``model-00001-of-0000n.safetensors`` … and an index. For
    transformers to load it, put the model's ``config.json`` beside. Names are those of the model as it was written,
    without what compiling or checkpointing of activations puts in between. Of a tied parameter one name is stored;
    of buffers, the first rank's values. Each rank writes its own rows, a block at a time; where ranks are on several
    hosts, tensors are gathered one at a time to the rank that writes their file. Files appear under their names when
    all are complete; those of an earlier save in the directory are replaced.

    Args:
        model: with units or without, and with values.
        directory: made if it does not exist.
        max_shard_size: of one file, in bytes or as in ``"5GB"`` (10^9) or ``"5GiB"`` (2^30). A larger tensor has a
            file of its own.

    Raises:
        ValueError: for an invalid size, a dtype that the format does not have, a tensor without values; or if ranks
            differ in the directory, in the size or in the shapes of tensors, such as buffers.
        TypeError: for an argument of a wrong type.
        OSError: if the directory cannot be written, or is full. Every error is raised on all ranks.
    """
    peers = peers_of(model)
    with peers.together():
        saving = weights_of(model, asked_by="save_safetensors", plain_names=True)
        path = path_of(directory)
        saving.check_values()
        names = {_name_to_store(model, weight): weight for weight in saving.weights}
        _check_storable(saving, names)
        tensors = {name: (weight.dtype, weight.shape) for name, weight in names.items()}
        files = plan_files(tensors, _parse_size(max_shard_size), _metadata(names))
    warn_of_groups("save_safetensors", peers, saving.tensors)
    # Each writes where its own plan says.
    peers.refuse_unlike("save_safetensors", tensors, [file.header for file in files], otherwise=_ALSO_PLANNED)
    given, rule = {"directory": path.resolve()}, "all ranks that hold the model save it together"
    target = _Target(path, files, token=peers.exchange_given(given, secrets.token_hex(4), rule)[0])
    try:
        with peers.together():
            if peers.is_first:
                target.create()
        _write(names, files, target, peers)
        with peers.together():
            if peers.is_first:
                parameters = sum(w.tensor.numel() for w in saving.weights if isinstance(w.tensor, nn.Parameter))
                target.publish(index_of(files, parameters) if len(files) > 1 else None)
    except BaseException as error:
        try:
            if peers.is_first:
                target.clean()
        finally:
            if not is_explained(error):  # else they cannot communicate
                peers.exchange(None)  # no rank goes on before the first one has cleaned up
        raise


def _parse_size(size: int | str) -> int:
    """
    Raises:
        TypeError: for neither a number nor a string.
        ValueError: if it is not a positive size.
    """
    if not (isinstance(size, str) or is_whole_number(size)):
        raise TypeError(f"max_shard_size must be bytes or a string such as '5GB', not {size!r}")
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        base = 1024 if found and found[3] else 1000
        count = int(Fraction(found[1]) * base ** " KMGT".index(found[2].upper() or " ")) if found else 0
    else:
        count = int(size)
    if count <= 0:
        raise ValueError(f"max_shard_size={size!r} is not a size: give bytes, or a string such as '5GB' or '500MiB'")
    return count


def _name_to_store(model: nn.Module, weight: Weight) -> str:
    """The one of a weight's names that transformers does not derive from another."""
    derived = tuple(getattr(model, "_tied_weights_keys", None) or ())
    own = [name for name in weight.names if not any(re.search(pattern, name) for pattern in derived)]
    return (own or weight.names)[0]


def _metadata(names: Mapping[str, Weight]) -> dict[str, str]:
    """What the safetensors library writes for torch: the format, and for names left out the name that is stored."""
    aliases = {alias: name for name, weight in names.items() for alias in weight.names if alias != name}
    return {**aliases, "format": "pt"}


def _check_storable(saving: ModelWeights, names: Mapping[str, Weight]) -> None:
    if saving.objects:
        raise ValueError(
            f"safetensors files hold tensors only, not the extra state {', '.join(map(repr, saving.objects))}"
        )
    if "__metadata__" in names:
        raise ValueError("safetensors files cannot hold a tensor named '__metadata__'")
    for weight in saving.weights:
        weight.check_region()


class _Target:
    """Files of a directory that appear there when all are complete, under temporary names until then.

    Args:
        directory: that gets the files.
        files: planned; one of them, or several with an index.
        token: part of the temporary names, the same on all ranks.
    """

    def __init__(self, directory: Path, files: Sequence[PlannedFile], token: str):
        self.directory, self.files, self._token = directory, files, token

    def _temporary(self, name: str) -> Path:
        return self.directory / f".{name}.{self._token}.partial"

    def create(self) -> None:
        """Make the directory, and the files with their headers and sizes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for entry in self.directory.glob(".model*.partial"):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > ABANDONED_AFTER:
                    entry.unlink()
        for file in self.files:
            with _naming(self.directory / file.name), self._temporary(file.name).open("xb") as created:
                created.write(file.header)
                created.truncate(file.size)

    def is_visible(self) -> bool:
        """Whether this rank sees what `create` made."""
        try:
            return all(self._temporary(file.name).stat().st_size == file.size for file in self.files)
        except OSError:
            return False

    @contextlib.contextmanager
    def opened(self, file: PlannedFile) -> Iterator[int]:
        """Descriptor to write one of the files; what was written is on disk afterwards."""
        descriptor = os.open(self._temporary(file.name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            with _naming(self.directory / file.name):
                yield descriptor
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self, index: bytes | None) -> None:
        """Give the files their names, and remove what an earlier save left. A reader, or a crash, finds the earlier
        weights or these; where both have files of the same names it may find no index for a moment, never a mixture.

        Args:
            index: of several files.
        """
        names = {file.name for file in self.files}
        if index is not None:
            with _naming(self.directory / INDEX), self._temporary(INDEX).open("xb") as created:
                created.write(index)
                created.flush()
                os.fsync(created.fileno())
            if any((self.directory / name).exists() for name in names):
                (self.directory / INDEX).unlink(missing_ok=True)
            names.add(INDEX)
        # The index last: without it no reader looks at the new files.
        for name in sorted(names, key=lambda name: name == INDEX):
            self._temporary(name).replace(self.directory / name)
        for entry in list(self.directory.iterdir()):
            is_weights = entry.name in (SINGLE, INDEX) or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", entry.name)
            if is_weights and entry.name not in names:
                entry.unlink()
        sync_directory(self.directory)

    def clean(self) -> None:
        """Remove what still has a temporary name."""
        for name in (*(file.name for file in self.files), INDEX):
            with contextlib.suppress(OSError):
                self._temporary(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make errors of the operating system name ``path``: those of writing to an open file name none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(names: Mapping[str, Weight], files: Sequence[PlannedFile], target: _Target, peers: Peers) -> None:
    """Fill the files: every rank its own regions where that is safe, otherwise one rank each file.

    Ranks of one host see the same file through one page cache. On several hosts they might not see it at all, and on
    NFS two hosts that write into one page may lose either's bytes.
    """
    seen = peers.exchange((_host(), target.is_visible()))
    if len(set(seen)) == 1 and seen[0][1]:
        with peers.together():
            _write_regions(names, files, target, peers)
    else:
        writers = [position for position, (_, visible) in enumerate(seen) if visible]
        _write_gathered(names, files, target, peers, writers)


def _host() -> str:
    """The same for processes of one kernel."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


def _write_regions(names: Mapping[str, Weight], files: Sequence[PlannedFile], target: _Target, peers: Peers) -> None:
    own = set()
    # In an order that ranks share, whatever that of their modules is.
    for number, (name, weight) in enumerate(sorted(names.items())):
        if weight.replica is None:  # buffers may differ: all are the first rank's
            writes = peers.is_first
        else:  # of the regions that several ranks hold, each writes some
            copy, copies = weight.replica
            writes = number % copies == copy
        if writes:
            own.add(name)
    total = sum(names[name].local.nbytes for name in own)
    with Progress("Saving", total, shown=peers.is_first) as progress:
        mover = TensorMover(progress.advance)
        for file in files:
            with target.opened(file) as descriptor:
                for name, start in file.starts.items():
                    if name in own:
                        weight = names[name]
                        mover.write(descriptor, start, weight.shape, weight.region, weight.local)


def _gather(weight: Weight, peers: Peers) -> torch.Tensor:
    """The whole tensor; of one that every rank has, the first rank's."""
    whole = weight.gather()
    if weight.replica is None:
        whole = whole.to(peers.device, copy=True).contiguous()
        peers.broadcast(whole)
    return whole


def _write_gathered(
    names: Mapping[str, Weight],
    files: Sequence[PlannedFile],
    target: _Target,
    peers: Peers,
    writers: Sequence[int],
) -> None:
    failure: Exception | None = None
    with Progress("Saving", sum(file.size for file in files), shown=peers.is_first) as progress:
        mover = TensorMover()
        for number, file in enumerate(files):
            writes = peers.position == writers[number % len(writers)]
            for name, start in file.starts.items():
                weight = names[name]
                whole = _gather(weight, peers)
                progress.advance(whole.nbytes)
                try:
                    if writes and failure is None:
                        with target.opened(file) as descriptor:
                            region = Region((0,) * len(weight.shape), weight.shape)
                            mover.write(descriptor, start, weight.shape, region, whole)
                except Exception as error:
                    failure = error  # raised at the end: until then the others wait for this rank's shards
    with peers.together():
        if failure is not None:
            raise failure
