"""How a complete checkpoint comes under its name, where an older one, or files of others, may be."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..checkpoint.atomic import DCP_METADATA, MANIFEST, sync_directory

METADATA = "meta.pt"
_OWN = re.compile("|".join([*map(re.escape, (DCP_METADATA, MANIFEST, METADATA)), r"__[0-9]+_[0-9]+\.distcp"]))
"""Names of the files of a sharded checkpoint."""
_HERE, _RENAME_EXCHANGE = -100, 2
"""Of Linux: paths relative to the working directory, and the flag of renameat2."""


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is a directory of `torch.distributed.checkpoint`."""
    return (path / DCP_METADATA).is_file()


def foreign_in(path: Path) -> list[Path]:
    """What is in a directory and no file of a sharded checkpoint."""
    return sorted(entry for entry in path.iterdir() if not _OWN.fullmatch(entry.name))


def take_place_of(path: Path, draft: Path) -> None:
    """Give ``draft``, a complete checkpoint, the name ``path``. An older checkpoint there, or a symbolic link, is
    replaced at once; foreign files in its directory stay, and what the link leads to.

    Raises:
        OSError: if that is not possible.
    """
    if path.is_symlink():
        _replace_link(path, draft)
        return
    doomed = path.with_name(f".{path.name}.deleted")
    if draft.is_dir():
        if path.is_dir() and not is_sharded(path):
            _fill(path, draft)
            return
        # Without `_exchanged`, one that was killed between its two renamings left them there.
        _carry(path if path.exists() else doomed, draft)
    remove(doomed)
    if not path.is_dir() and not (draft.is_dir() and path.exists()):
        draft.rename(path)
    elif _exchanged(draft, path):
        draft.rename(doomed)
    else:
        path.rename(doomed)
        draft.rename(path)
    sync_directory(path.parent)
    if path.is_dir():
        _carry(doomed, path)  # what others have made there meanwhile
    remove(doomed)


def _replace_link(path: Path, draft: Path) -> None:
    if draft.is_dir() and _exchanged(draft, path):
        draft.unlink()
    else:
        if draft.is_dir():
            path.unlink()
        draft.rename(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def staying(path: Path) -> Iterator[None]:
    """Keep the name of this process's working directory, if that is ``path`` or in it, which `take_place_of` replaces
    inside: without one no relative path can be used."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        yield  # it had none before
        return
    try:
        yield
    finally:
        if here.is_relative_to(path):
            with contextlib.suppress(OSError):  # what is in the place now need not have the same directories inside
                os.chdir(here)


def remove(path: Path) -> None:
    """Remove what an earlier save, which may have been of the other kind and killed, left at ``path``, if anything."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _fill(path: Path, draft: Path) -> None:
    """Move the files of ``draft`` into a directory that has no checkpoint, which may be somebody's working directory.

    What makes it one comes last.
    """
    names = {entry.name for entry in draft.iterdir()}
    for name in names - {DCP_METADATA}:
        (draft / name).rename(path / name)
    for entry in path.iterdir():
        if _OWN.fullmatch(entry.name) and entry.name not in names:  # of one that was killed here
            entry.unlink()
    sync_directory(path)
    (draft / DCP_METADATA).rename(path / DCP_METADATA)
    sync_directory(path)
    draft.rmdir()


def _carry(source: Path, target: Path) -> None:
    """Give the directory ``target`` the foreign files of ``source`` too, if that is a directory."""
    if source.is_dir():
        _link_all(foreign_in(source), target)


def _link_all(entries: Iterable[Path], target: Path) -> None:
    """Let the directory ``target`` have the files of ``entries``, and of directories in it, beside what it has."""
    for entry in entries:
        there = target / entry.name
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if entry.is_dir() and not entry.is_symlink():
                there.mkdir(exist_ok=True)
                _link_all(entry.iterdir(), there)
                shutil.copystat(entry, there)
            elif not os.path.lexists(there):
                _link(entry, there)
    sync_directory(target)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; where there are no such, copy it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two paths change names at once, so that nobody, killed or reading, finds one of them missing; return whether
    the system can do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(_HERE, names[0], _HERE, names[1], _RENAME_EXCHANGE) == 0
