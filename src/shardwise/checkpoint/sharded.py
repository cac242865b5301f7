"""The verbs: save and load a training run, at any number of ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..arguments import check_flag, check_flags, is_whole_number
from ..core.agreement import doing
from ..core.device import local_of, not_inference, untracked
from ..core.errors import StateError, is_explained, listed
from .asynchronous import background, host_copies, tell
from .atomic import DCP_METADATA, MANIFEST, Draft, checkpoints_in, is_name_of_ours, latest, path_of, prune
from .contents import apart, contents, digests, refuse_lost, shares
from .groups import warn_of_groups
from .integrity import CheckpointError, CorruptFileError, Manifest, find_damage
from .interrupts import held
from .model_state import check_fit
from .objects import Path as LeafPath
from .objects import Pickled, is_stateful, key_of
from .optimizer_state import optimizers_in
from .progress import Progress
from .ranks import SavingRanks, saving_ranks
from .reading import StoredData
from .restoring import Restoring, Wanted
from .writing import Leaves, naming, write_leaves

Optimizers = Optimizer | Iterable[Optimizer] | Mapping[Any, Optimizer]

_TOGETHER = "all ranks of the default process group save and load one checkpoint together"


@held()
@untracked()
def save(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    extra: Any = None,
    async_: bool = False,
    step: int | None = None,
    keep: int | None = None,
) -> Path:
    """Save a training run as a new checkpoint in ``directory``.

    ``directory`` is the root of many checkpoints: each call writes a new one beside those that are there, as a hidden
    draft, which it renames once it is on the disk. A process killed at any moment leaves the checkpoints of before
    whole, and `latest` finds the newest complete one. What killed saves left behind, the next save removes.

    A collective: all ranks of the default process group call it, between optimizer steps (unreduced gradients are not
    saved). A checkpoint is a directory of `torch.distributed.checkpoint` with the keys ``model`` and ``optimizer`` as
    `torch.distributed.checkpoint.state_dict` makes them, so plain DCP and FSDP2 programs can load it. The states of
    every rank's random number generators are saved too.

    Args:
        directory: seen by all ranks; made if it does not exist.
        model: sharded or not.
        optimizer: of ``model``'s parameters, as it is (without state before its first step); several in a list or dict.
        scheduler: has ``state_dict`` and ``load_state_dict``; or a container of such.
        extra: anything that can be pickled. Objects with ``state_dict`` and ``load_state_dict`` in its dicts, lists and
            tuples (data loaders, gradient scalers, `shardwise.EMA`) are saved by their state. Ranks may differ in it;
            sharded tensors are saved sharded.
        async_: return as soon as everything is copied to the host's memory, and write beside training. The next save,
            `load` or `wait` waits for this one and raises what made it fail. The process does not end before.
        step: a number for the name of the checkpoint.
        keep: delete all but the newest ``keep`` checkpoints, once this one is complete; by default none is deleted.

    Returns:
        The path of the checkpoint, below ``directory``; with ``async_`` it will be there later.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write; the draft is removed, older checkpoints are intact.
        StateError: if parameters have no values yet.
        TypeError: for an argument of a wrong type, or what cannot be pickled.
        ValueError: if the optimizer has parameters that ``model`` does not have, a number is out of range, or ranks
            give different directories or settings, or not all parts of the model.
    """
    with doing("saving a checkpoint to", directory):
        ranks, failed = saving_ranks(), background.take_error()

        def collect() -> tuple[Leaves, Collection[LeafPath]]:
            tell(failed)
            _check_settings(async_, step, keep)
            leaves, left = contents(_module(model), _optimizers(model, optimizer), _scheduler(scheduler), extra)
            return host_copies(leaves) if async_ else leaves, left

        leaves, draft, path, final = _begin(ranks, directory, (step, keep, async_), model, collect)
        work = functools.partial(_write, path, leaves, ranks, draft, keep, shown=not async_)
        _start(work, draft) if async_ else work()
        return final


def _start(work: Callable[[], None], draft: Draft | None) -> None:
    """Begin ``work``, which fills ``draft``, beside training."""
    try:
        background.start(work)
    except StateError:
        if draft is not None:
            draft.discard()
        raise


def _begin(
    ranks: SavingRanks,
    directory: str | os.PathLike[str],
    settings: tuple[int | None, int | None, bool],
    model: nn.Module | None,
    collect: Callable[[], tuple[Leaves, Collection[LeafPath]]],
) -> tuple[Leaves, Draft | None, Path, Path]:
    """Collect this rank's leaves and make a draft. Returns the leaves, the draft (None but on the first rank), the path
    of the draft and that of the checkpoint.

    Args:
        ranks: that save it.
        directory: root of the checkpoint.
        settings: the arguments ``step``, ``keep`` and ``async_``, in which ranks must not differ.
        model: or None.
        collect: gives the leaves, and the paths of those that are left to other ranks.
    """
    draft: Draft | None = None
    try:
        with ranks.together():
            root = path_of(directory)
            leaves, left = collect()
            own = digests(leaves, model)
            draft = _new_draft(root, settings[0]) if ranks.is_first else None
        warn_of_groups(
            "save", ranks, {key_of(path): leaf for path, leaf in leaves.items() if not isinstance(leaf, Pickled)}
        )
        paths = (draft.path, draft.final) if draft is not None else None
        given = {"directory": root, **dict(zip(("step", "keep", "async_"), settings, strict=True))}
        exchanged = ranks.exchange_given(given, (own, shares(leaves, left), paths), _TOGETHER)
        refuse_lost(told for _, told, _ in exchanged)
        path, final = cast(tuple[Path, Path], exchanged[0][2])
    except BaseException as error:
        _abandon(draft, ranks, error)
        raise
    leaves = apart(leaves, [found for found, _, _ in exchanged], ranks.position)
    return leaves, draft, path, final


def _write(path: Path, leaves: Leaves, ranks: SavingRanks, draft: Draft | None, keep: int | None, shown: bool) -> None:
    """Fill a draft, which the first rank holds, and make it a checkpoint."""
    total = sum(map(_size, leaves.values()))
    # Again: on a thread of its own nothing has told it.
    with doing("saving a checkpoint to", path.parent):
        try:
            with Progress("Saving", total, shown=shown and ranks.is_first) as progress:
                manifest = write_leaves(path, leaves, ranks, progress.advance)
            with ranks.together(), naming(path):
                if draft is not None and manifest is not None:
                    manifest.write(path)
                    draft.commit()
                    if keep is not None:
                        prune(draft.final.parent, keep)
        except BaseException as error:
            _abandon(draft, ranks, error)
            raise


def _abandon(draft: Draft | None, ranks: SavingRanks, error: BaseException) -> None:
    """Remove a draft, before any rank goes on."""
    if draft is not None:
        draft.discard()
    # Where communication itself failed this one would wait in vain, and those that wait for it until it ends.
    if not is_explained(error):
        with suppress(Exception):
            ranks.exchange(None)


@held()
def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    extra: Any = None,
    rng: bool = True,
    strict: bool = True,
    weights_only: bool = True,
) -> Any:
    """Load a checkpoint into what a training run consists of, at any number of ranks, in place.

    A collective: all ranks of the default process group call it. All bytes of a checkpoint of `save` are compared
    with their checksums first, each rank a part: a damaged one changes nothing. Checkpoints that
    `torch.distributed.checkpoint` wrote (those of FSDP2 programs, whole state dicts, optimizers flattened or not) are
    loaded too, without checksums: the model from under ``model``, the optimizer from ``optimizer`` or ``optim``.

    Args:
        directory: a root, of which the newest complete checkpoint is loaded, or a checkpoint.
        model: may be sharded in another way than it was saved, or not at all; parameters on the meta device get
            memory. Its dtypes stay.
        optimizer: with the param groups that it was saved with, in any order; or several. Its old state is dropped. A
            group may have the parameters of several saved ones, by any ranks, with equal settings (pipeline stages).
        scheduler: as saved.
        extra: what to fill: objects with ``load_state_dict`` take their state, dicts the saved items.
        rng: whether to continue with the saved states of random number generators. At the world size that saved,
            every rank has its own ones again. At another one rank ``r`` has those of the saved rank ``r``, and
            further ranks have streams of their own, seeded from those of rank 0 and their number; a generator
            that was in the same state on all ranks is so again.
        strict: whether names that only the model or only the checkpoint has are an error.
        weights_only: whether to refuse objects whose loading runs code that the checkpoint names: all but tensors,
            numbers, strings, arrays, dates, paths, containers of such, and types allowed by
            `torch.serialization.add_safe_globals`.

    Returns:
        The saved ``extra``: the object that was passed, filled, or what was saved, with state dicts in the place of
        objects that have them; None if nothing was saved. Where ranks differed, a rank has its own at the world size
        that saved, and that of rank 0 at another one.

    Raises:
        CorruptFileError: naming the files that are not as they were saved.
        CheckpointError: if it cannot be read; or, once, what made the last save with ``async_`` fail.
        FileNotFoundError: if there is no checkpoint.
        TypeError: for an argument of a wrong type.
        ValueError: listing what the checkpoint lacks, or what does not fit; or if ranks give different directories.
    """
    with doing("loading a checkpoint from", directory):
        ranks, failed = saving_ranks(), background.take_error()
        with ranks.together():
            tell(failed)
            check_flags(load, "load", {"rng": rng, "strict": strict, "weights_only": weights_only})
            wanted = Wanted(_module(model), _optimizers(model, optimizer), _scheduler(scheduler), extra, rng)
            found = _find(root := path_of(directory), ranks)
        path, manifest = ranks.exchange_given({"directory": root}, found, _TOGETHER)[0]
        share = sum(file.size for file in manifest.files.values()) // ranks.size if manifest is not None else 0
        with Progress("Loading", 2 * share, shown=ranks.is_first) as progress, torch.no_grad(), not_inference():
            stored = open_checked(path, manifest, ranks, weights_only, progress.advance)
            return _restore(stored, wanted, ranks, strict, progress)


def _restore(stored: StoredData, wanted: Wanted, ranks: SavingRanks, strict: bool, progress: Progress) -> Any:
    """Fill what is wanted with what is stored; return the saved extra."""
    with ranks.together():
        restoring = Restoring(stored, ranks.position, ranks.size, wanted)
        misfit = restoring.misfit()
    check_fit(ranks, stored.directory, misfit, strict)
    with ranks.together():
        restoring.read(progress.advance)
    with ranks.together():
        return restoring.hand_over(strict=strict)


def open_checked(
    path: Path,
    manifest: Manifest | None,
    ranks: SavingRanks,
    weights_only: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> StoredData:
    """Open a checkpoint whose files, where it has a manifest, are as they were saved; each rank compares a part. A
    collective.

    Args:
        path: of the checkpoint.
        manifest: of the checkpoint; None if another program wrote it.
        ranks: that share the work.
        weights_only: whether to refuse objects that run code when they are loaded.
        advance: called with the number of bytes compared.

    Raises:
        CorruptFileError: on all ranks, naming all files that one of them found damaged.
        CheckpointError: on all ranks, if its metadata are not those of a checkpoint.
    """
    if manifest is not None:
        _check_files(path, manifest, ranks, advance)
    with ranks.together():
        return StoredData.open(path, manifest, weights_only)


def _check_files(path: Path, manifest: Manifest, ranks: SavingRanks, advance: Callable[[int], None]) -> None:
    with ranks.together():
        found = find_damage(path, manifest, ranks.position, ranks.size, advance)
    damage = {name: problem for own in reversed(ranks.exchange(found)) for name, problem in own.items()}
    if not damage:
        return
    found_damaged = (f"{path / name} is damaged: {problem}" for name, problem in sorted(damage.items()))
    raise CorruptFileError(f"{'; '.join(found_damaged)}. {_beside(path)}")


def _beside(path: Path) -> str:
    """What a message says that a checkpoint is not loaded, and which others there are."""
    others = [other.name for other in checkpoints_in(path.parent) if other != path]
    return f"Nothing was loaded; beside it there are {', '.join(others)}" if others else "Nothing was loaded"


def _find(path: Path, ranks: SavingRanks) -> tuple[Path, Manifest | None]:
    """The checkpoint at ``path`` and its manifest; None if another program wrote it. Only the first rank looks."""
    if not ranks.is_first:
        return path, None
    if not (path / MANIFEST).is_file():
        if (path / DCP_METADATA).is_file() and not is_name_of_ours(path.name):
            return path, None
        if (newest := latest(path)) is None:
            raise _nothing_in(path)
        path = newest
    try:
        return path, Manifest.read(path)
    except CheckpointError as error:
        raise type(error)(f"{error}. {_beside(path)}") from error


def _nothing_in(path: Path) -> OSError:
    if is_name_of_ours(path.name) and path.is_dir():
        return CheckpointError(f"{path} has no {MANIFEST}, so it is not a complete checkpoint")
    found = listed(sorted(os.listdir(path))) if path.is_dir() else ""
    there = f"there are only {found}" if found else "it is empty" if path.is_dir() else "no such directory"
    return FileNotFoundError(f"no complete checkpoint in {path}: {there}")


def _new_draft(root: Path, step: int | None) -> Draft:
    try:
        return Draft(root, step)
    except OSError as error:
        raise CheckpointError(f"no checkpoint can be written into {root}: {error}") from error


def _check_settings(async_: bool, step: int | None, keep: int | None) -> None:
    check_flag("save", "async_", async_)
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and not is_whole_number(value):
            raise TypeError(f"{name} must be an int or None, not {value!r}")
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def _module(model: nn.Module | None) -> nn.Module | None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, not {type(model).__name__}")
    return model


def _optimizers(model: nn.Module | None, optimizer: Optimizers | None) -> list[Optimizer]:
    optimizers = optimizers_in(optimizer)
    if optimizers and model is None:
        raise ValueError("an optimizer is saved by the names of its parameters: pass the model that has them too")
    return optimizers


def _scheduler(scheduler: Any) -> Any:
    items = scheduler.values() if isinstance(scheduler, dict) else scheduler
    for item in items if isinstance(items, Iterable) else [scheduler]:
        if item is not None and not is_stateful(item):
            raise TypeError(f"scheduler must have state_dict and load_state_dict, or contain such; not {item!r}")
    return scheduler


def _size(leaf: torch.Tensor | Pickled) -> int:
    if isinstance(leaf, Pickled):
        return len(leaf.data)
    return local_of(leaf).nbytes
