"""Checkpoints in Lightning's two formats: one file of `torch.save`, or a directory of `torch.distributed.checkpoint`.

In a directory, models and optimizers are `torch.distributed.checkpoint`'s, by names as `torch.distributed.checkpoint.
state_dict` makes them, and all else is in ``meta.pt``, as Lightning's own strategies write it.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.atomic import DCP_METADATA, MANIFEST, path_of, sync_directory
from ..checkpoint.integrity import CheckpointError, FileSum, Manifest, summed
from ..checkpoint.interrupts import held
from ..checkpoint.model_state import SavedModel, check_fit
from ..checkpoint.names import parameter_names
from ..checkpoint.objects import as_saved, key_of, leaves
from ..checkpoint.optimizer_state import SavedOptimizer, optimizer_paths
from ..checkpoint.ranks import saving_ranks
from ..checkpoint.sharded import open_checked
from ..checkpoint.weights import weights_of
from ..checkpoint.writing import naming, write_leaves
from ..core.device import not_inference
from ..core.errors import listed
from .replacing import METADATA, foreign_in, is_sharded, remove, staying, take_place_of


class Kind(Enum):
    """What is at a path."""

    NOTHING = "nothing"
    FILE = "a file"
    SHARDED = "a sharded checkpoint"
    DIRECTORY = "a directory that is not a sharded checkpoint"


def _kind(path: Path) -> Kind:
    if path.is_dir():
        return Kind.SHARDED if is_sharded(path) else Kind.DIRECTORY
    return Kind.FILE if path.exists() else Kind.NOTHING


def place_of(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint for ``path`` is written that takes the place of a symbolic link there, as
    `ModelCheckpoint(save_last="link")` makes to one of the best; links above are followed.

    Raises:
        TypeError: if it is not a path.
        ValueError: for a URL.
    """
    absolute = path_of(path, "path")
    return absolute.parent.resolve() / absolute.name


def target_of(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint for ``path`` is written: an absolute path behind symbolic links, which stay.

    Raises:
        TypeError: if it is not a path.
        ValueError: for a URL.
    """
    return path_of(path, "path").resolve()


def agreed_kind(path: Path) -> Kind:
    """What all ranks find at ``path``. A collective: each kind is read by other collectives, so ranks must agree.

    Raises:
        FileNotFoundError: on all ranks, if they find different things.
    """
    ranks = saving_ranks()
    with ranks.together():
        own = _kind(path)
    found = ranks.exchange(own)
    for rank, kind in enumerate(found):
        if kind is not found[0]:
            raise FileNotFoundError(
                f"{path} is {found[0].value} for rank 0 and {kind.value} for rank {rank}: every rank reads its part of "
                "a checkpoint, so all must find it at the same path"
            )
    return found[0]


def read_file(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """What `torch.save` wrote into a file, its tensors on the host and not read from the disk before they are used.

    A collective: what fails on one rank is raised on all.

    Raises:
        CheckpointError: naming the file, if it is damaged.
        UnpicklingError: for objects that ``weights_only`` refuses.
        ValueError: for a directory.
    """
    with saving_ranks().together():
        if path.is_dir():
            raise ValueError(
                f"{path} is a directory without {DCP_METADATA}, so it is not a sharded checkpoint, and a full one is a "
                "file: pass the path that the checkpoint was saved to"
            )
        with _reading(path):
            return cast(dict[str, Any], _mapped(path, weights_only))


def _mapped(path: Path, weights_only: bool | None) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except (RuntimeError, pickle.UnpicklingError) as error:
        if "mmap" not in str(error):
            raise
        # Written before torch used zip files.
        return torch.load(path, map_location="cpu", weights_only=weights_only)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in what `torch.load` raises, which may be anything if the file is damaged."""
    try:
        yield
    except Exception as error:
        # Where a file ends too early, torch's reader seeks to before its beginning.
        ends_early = isinstance(error, OSError) and error.errno == errno.EINVAL
        if isinstance(error, pickle.UnpicklingError):  # others tell this and the next by their type
            raise pickle.UnpicklingError(f"{path} cannot be read: {error}") from error
        if isinstance(error, OSError) and not ends_early:
            error.add_note(f"shardwise: while {path} was read")
            raise
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file, and leave what was at ``path`` until it is complete; for one rank.

    The old file is never written into: tensors that `read_file` returned may still be mapped from it.

    Raises:
        FileExistsError: for a device, a pipe or a socket.
        IsADirectoryError: if there is a directory with something else than a checkpoint.
    """
    refuse_directory(path)
    _refuse_device(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.unfinished")
    remove(draft)
    try:
        write(draft)
        take_place_of(path, draft)
    finally:
        remove(draft)


def save_file(path: Path, content: Any) -> FileSum:
    """`torch.save` that ends when the file is on the disk; gives its checksums.

    Raises:
        CheckpointError: naming the file, if it cannot be written.
        TypeError: naming the file, if something cannot be pickled.
    """
    with naming(path), summed(path, "wb") as stream:
        try:
            torch.save(content, cast(IO[bytes], stream))
        except (AttributeError, pickle.PicklingError, TypeError) as error:
            raise TypeError(f"{path} cannot be saved, since something in it cannot be pickled: {error}") from error
        stream.flush()
        os.fsync(stream.fileno())
    return stream.sum


@held()
@torch.no_grad()
def write_directory(path: Path, sharded: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write a sharded checkpoint; the one that was at ``path`` stays until it is complete. A collective of all ranks.

    Args:
        path: of a directory, in which files that are no part of a checkpoint stay as they are; the same on all ranks,
            which all see it.
        sharded: trees of tensors and objects, the same keys on all ranks.
        rest: of the first rank: goes into ``meta.pt``.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write, or ``path`` is a device, a pipe or a socket.
    """
    ranks, draft = saving_ranks(), path.with_name(f".{path.name}.unfinished")
    with not_inference(), staying(path):
        try:
            with ranks.together(), naming(path):
                if ranks.is_first:
                    _refuse_device(path)
                    remove(draft)
                    draft.mkdir(parents=True)
                items = {where: as_saved(value, key_of(where)) for where, value in leaves(sharded)}
            manifest = write_leaves(draft, items, ranks)
            with ranks.together(), naming(path):
                if manifest is not None:
                    manifest.files[METADATA] = save_file(draft / METADATA, dict(rest))
                    manifest.write(draft)
                    sync_directory(draft)
                    take_place_of(path, draft)
        except BaseException:
            if ranks.is_first:
                with suppress(OSError):  # the first error is the one to report
                    remove(draft)
            raise


class SavedDirectory:
    """A sharded checkpoint to load from; opening and loading are collectives of all ranks.

    Raises:
        CorruptFileError: naming the files that are not as they were saved, if it was written by this library.
    """

    def __init__(self, path: Path, *, weights_only: bool | None):
        self._path, self._weights_only = path, weights_only
        self._ranks = ranks = saving_ranks()
        own: Manifest | None = None
        with ranks.together():
            if ranks.is_first and (path / MANIFEST).is_file():
                own = Manifest.read(path)
        # Only numbers and names are pickled in it; everything else is in ``meta.pt``.
        self._stored = open_checked(path, ranks.exchange(own)[0], ranks, weights_only=True)

    def has(self, name: str) -> bool:
        """Whether something was saved under ``name``."""
        return bool(self._stored.below(f"{name}."))

    def metadata(self, *, required: bool = False) -> dict[str, Any]:
        """The contents of ``meta.pt``: what is not sharded.

        Raises:
            CheckpointError: if it is ``required``, and not there.
        """
        file, loaded = self._path / METADATA, dict[str, Any]()
        with self._ranks.together(), _reading(file):
            if file.is_file():
                loaded = torch.load(file, map_location="cpu", weights_only=self._weights_only)
            elif required:
                raise CheckpointError(f"{self._path} has no {METADATA}, so it is not a whole checkpoint of a Trainer")
        return loaded

    def check_model(self, name: str, model: nn.Module, *, strict: bool) -> SavedModel:
        """What it has of ``model`` under ``name``.

        Raises:
            ValueError: listing what does not fit.
        """
        with self._ranks.together():
            saved = self._model(name, model)
            misfit = saved.misfit()
        check_fit(self._ranks, self._path, misfit, strict)
        return saved

    def _model(self, name: str, model: nn.Module) -> SavedModel:
        saved = SavedModel(self._stored, model, f"{name}.", is_given=True)
        # Other strategies use other names, so another prefix is fine unless something has this one.
        if name and saved.prefix != f"{name}." and self.has(name):
            raise ValueError(
                f"the checkpoint {self._path} has something else than this model under {name!r}: its parameters were "
                f"found as {saved.keys()[:3]}"
            )
        return saved

    @torch.no_grad()
    def load_model(self, name: str, model: nn.Module, *, strict: bool) -> None:
        """Read a model's values into its own memory; parameters on the meta device get memory.

        Raises:
            ValueError: listing what does not fit.
        """
        with not_inference():
            saved = self.check_model(name, model, strict=strict)
            with self._ranks.together():
                objects, targets = self._stored.read_objects(saved.keys()), saved.targets()
                self._stored.read(dict(targets))
                saved.load({**objects, **targets}, strict=strict)

    @torch.no_grad()
    def load_optimizer(self, name: str, optimizer: Optimizer, model: nn.Module) -> None:
        """Read an optimizer's state and settings.

        Raises:
            ValueError: if it has other param groups than were saved, or nothing was saved under ``name``.
        """
        with not_inference(), self._ranks.together():
            # Below its own name only: others may be there.
            paths = optimizer_paths(self._stored, (f"{name}.",))
            paths = {key: where for key, where in paths.items() if key.startswith(f"{name}.")}
            if not paths:
                raise ValueError(f"the checkpoint {self._path} has no optimizer {name!r}; it has {self._stored.tops()}")
            objects = self._stored.read_objects(paths)
            tensors = {key: kind for key, kind in self._stored.tensors().items() if key in paths}
            saved = SavedOptimizer([optimizer], parameter_names(model), tensors, paths, objects)
            targets = saved.targets(weights_of(model).device)
            self._stored.read(dict(targets))
            saved.load(targets)


def refuse_directory(path: Path) -> None:
    """
    Raises:
        IsADirectoryError: if there is a directory with something else than a checkpoint, in the place of a full one.
    """
    if not path.is_dir() or path.is_symlink():
        return
    if not is_sharded(path):
        raise IsADirectoryError(f"{path} is a directory, and a full checkpoint is one file: choose another path")
    if others := foreign_in(path):
        names = listed([entry.name for entry in others])
        raise IsADirectoryError(
            f"{path} is a sharded checkpoint with other files beside it ({names}), which a full checkpoint, one file, "
            "would delete: choose another path, or move them away"
        )


def _refuse_device(path: Path) -> None:
    """
    Raises:
        FileExistsError: for what is neither a file nor a directory: renaming a checkpoint there would delete it.
    """
    if path.exists() and not (path.is_file() or path.is_dir() or path.is_symlink()):
        raise FileExistsError(
            f"{path} is a device, a pipe or a socket, whose place a checkpoint would take: choose another path"
        )


def prepare_file(path: str | Path) -> None:
    """Make room for a full checkpoint in the place of a sharded one, which is deleted, or of a symbolic link; for one
    rank.

    Raises:
        IsADirectoryError: as of `refuse_directory`.
    """
    directory = Path(path)
    refuse_directory(directory)
    if directory.is_symlink():
        directory.unlink()
    elif directory.is_dir():
        shutil.rmtree(directory)
