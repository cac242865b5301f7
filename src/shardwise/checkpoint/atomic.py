"""The directories of checkpoints: a checkpoint is complete under its own name, or it is not there.

A root holds ``checkpoint-000007``, or ``checkpoint-000007-step-1200`` if `save` was given the step. The number is the
order of saving, not the step: after a run has gone back to an older checkpoint, what it saves next is still the
newest. A draft has a hidden name until it is complete; renaming makes it a checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "shardwise.json"
"""Written last: a directory without it is not a checkpoint."""
DCP_METADATA = ".metadata"

_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)(?:-step-[0-9]+)?")
_DRAFT = re.compile(r"\.unfinished-([0-9]+)")
_DOOMED = ".deleted-"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/.*", re.DOTALL)
"""Of a path too, which keeps one slash of two; not a drive of Windows."""


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint that `shardwise.save` wrote into ``directory``.

    Half-written checkpoints, temporary data and everything else there is passed over. A checkpoint that another process
    is saving is not found until it is complete.

    Returns:
        Its path, below ``directory``; None if there is none, or no such directory.

    Raises:
        TypeError: if it is not a path.
        ValueError: for a URL, or a null character in it.
    """
    path_of(directory)
    found = checkpoints_in(Path(directory))
    return found[-1] if found else None


def path_of(directory: str | os.PathLike[str], argument: str = "directory") -> Path:
    """``directory`` as an absolute path.

    Args:
        directory: or a file.
        argument: what it is called in messages.

    Raises:
        TypeError: if it is not a path.
        ValueError: for a URL, or a null character in it.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a path, not {type(directory).__name__}")
    if "\0" in str(directory):
        raise ValueError(f"{argument} is no path, since it has a null character: {str(directory)!r}")
    refuse_url(directory)
    return Path(os.path.abspath(directory))


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL."""
    return bool(_URL.fullmatch(str(path)))


def refuse_url(path: str | os.PathLike[str]) -> None:
    """
    Raises:
        ValueError: for a URL, which would be taken for a directory of that name on this machine.
    """
    if is_url(path):
        raise ValueError(f"{path} is a URL: give the path of a directory that all ranks see")


def checkpoints_in(root: Path) -> list[Path]:
    """The complete checkpoints in ``root``, oldest first."""
    numbered = [(int(match[1]), name) for name in _names_in(root) if (match := _CHECKPOINT.fullmatch(name))]
    return [root / name for _, name in sorted(numbered) if (root / name / MANIFEST).is_file()]


def is_name_of_ours(name: str) -> bool:
    """Whether a directory of this name is a checkpoint of `shardwise.save`, or was to become one."""
    return bool(_CHECKPOINT.fullmatch(name) or _DRAFT.fullmatch(name) or name.startswith(_DOOMED))


def _names_in(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []


class Draft:
    """A checkpoint that is being written; one rank holds it for all.

    Args:
        root: directory for checkpoints, made if it does not exist. What interrupted saves left there is removed.
        step: part of the checkpoint's name, if not None.

    Raises:
        OSError: if the directory cannot be made or written.
    """

    def __init__(self, root: Path, step: int | None):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            _clean(root)
            matches = (_CHECKPOINT.fullmatch(name) or _DRAFT.fullmatch(name) for name in _names_in(root))
            number = 1 + max((int(match[1]) for match in matches if match), default=0)
            self.path = root / f".unfinished-{number:06d}"
            self.path.mkdir()
            # Held while it is written, so that the save of another run does not remove it as abandoned.
            self._lock = _take_lock(self.path)
        self.final = root / (f"checkpoint-{number:06d}" + ("" if step is None else f"-step-{step}"))

    def commit(self) -> None:
        """Make it a checkpoint; what is in it must be on the disk already.

        Raises:
            OSError: if it cannot be renamed.
        """
        sync_directory(self.path)
        self.path.rename(self.final)
        sync_directory(self.final.parent)
        self._unlock()

    def discard(self) -> None:
        """Remove it; what cannot be removed now, the next save removes."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        _release(lock)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints; warn of each that cannot be deleted."""
    for path in checkpoints_in(root)[:-keep]:
        doomed = root / (_DOOMED + path.name)
        try:
            # A half-deleted one must not look like a checkpoint.
            path.rename(doomed)
            _remove(doomed)
        except OSError as error:
            warnings.warn(f"shardwise.save could not delete the old checkpoint {path}: {error}", stacklevel=2)


def _remove(path: Path, *, as_far_as_possible: bool = False) -> None:
    """Delete a checkpoint; of a symbolic link to one, the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=as_far_as_possible)


def _clean(root: Path) -> None:
    for name in _names_in(root):
        path = root / name
        if name.startswith(_DOOMED):
            with suppress(OSError):
                _remove(path, as_far_as_possible=True)
        elif _DRAFT.fullmatch(name):
            lock = _take_lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                _release(lock)


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- Locks: the kernel releases them when their process ends, killed or not


def _take_lock(path: Path) -> int | None:
    """Lock a directory without waiting; None if another process has it. File systems without locks always grant it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor


def _release(lock: int | None) -> None:
    if lock is None:
        return
    with suppress(OSError):
        # Closing is not enough: a child process forked meanwhile has the file open too.
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        _release(descriptor)
