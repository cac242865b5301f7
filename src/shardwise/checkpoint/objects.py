"""What a checkpoint holds beside tensors: numbers, containers, whatever users add; pickled at the time of saving."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import io
import pathlib
import sys
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

Path = tuple[str | int, ...]
"""Where a leaf is in a tree of dicts and lists: keys (as strings) and positions."""


def key_of(path: Path) -> str:
    """The name by which `torch.distributed.checkpoint` knows a leaf."""
    return ".".join(map(str, path))


SHARDED = "__shardwise_sharded__"
"""Key of the one-item dict that stands for a sharded tensor in a pickled tree; the item is the tensor's name."""
_OF_SHARDED = b"\nDTensorSpec\n"
"""In the pickle of whatever holds a sharded tensor, wherever it does: each has a spec, and nothing else."""


class UnsafeObjectError(ValueError):
    """An object would run code that the checkpoint names, when it is loaded."""


@dataclass(frozen=True)
class Pickled:
    """An object as it was when it was pickled."""

    data: bytes


def pickled(value: Any, where: str) -> Pickled:
    """``value`` as it is now.

    Args:
        value: anything that can be pickled.
        where: what it is called in messages.

    Raises:
        TypeError: if it cannot be pickled, or has sharded tensors inside, of which it would have this rank's part.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # pickling runs code of the object's own
        raise TypeError(f"{where} cannot be saved, since it cannot be pickled: {error}") from error
    data = stream.getvalue()
    if _OF_SHARDED in data:
        inside = "an object" if isinstance(value, (dict, list)) else f"a {type(value).__name__}"
        raise TypeError(
            f"{where} cannot be saved, since it has sharded tensors inside of {inside}: keep them in lists, or in "
            "dicts whose keys are strings, or leave out what has it, such as an optimizer"
        )
    return Pickled(data)


def as_saved(value: Any, where: str) -> torch.Tensor | Pickled:
    """A leaf as it is saved: a tensor itself, anything else as it is now, which a tensor without values is too.

    Args:
        value: any leaf.
        where: what it is called in messages.

    Raises:
        TypeError: for a tensor that is not dense, of which ranks hold terms of a sum, or what cannot be pickled.
    """
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return pickled(value, where)
    if isinstance(value, DTensor) and is_sum(value):
        raise TypeError(
            f"{where} is a DTensor placed as {value.placements}, of which each rank holds a part that is yet to be "
            "reduced: keep what its redistribute(placements=...) to Replicate() or Shard(dim) gives"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"{where} is a tensor of layout {value.layout}: checkpoints hold dense tensors only")
    return value.detach()


def is_sum(tensor: DTensor) -> bool:
    """Whether ranks hold parts of ``tensor`` that are yet to be reduced, as after sums over a sharded dim."""
    return any(placement.is_partial() for placement in tensor.placements)


def warn_of_unsafe(item: Pickled, where: str) -> None:
    """Warn if `unpickled` will not take ``item`` without being told to."""
    with _allowing_safe_types():
        unsafe = get_unsafe_globals_in_checkpoint(io.BytesIO(item.data))
    if unsafe:
        warnings.warn(
            f"{where} has objects of {', '.join(unsafe)}: to load them, shardwise.load needs weights_only=False, or "
            "torch.serialization.add_safe_globals with these types",
            stacklevel=2,
        )


def unpickled(stream: io.BytesIO, where: str, weights_only: bool) -> Any:
    """The object that `pickled` took, with its tensors on the kind of device they had, or else on the CPU.

    Args:
        stream: of what was pickled.
        where: what it is called in messages.
        weights_only: whether to refuse everything that is not a tensor, a number, a string, an array, a date, or a
            container of such, because unpickling other objects runs code that the file names.

    Raises:
        UnsafeObjectError: if it has such objects.
    """
    with _allowing_safe_types() if weights_only else contextlib.nullcontext():
        try:
            return torch.load(stream, weights_only=weights_only, map_location=_place)
        except UnpicklingError as error:
            if not weights_only:
                raise
            stream.seek(0)
            unsafe = get_unsafe_globals_in_checkpoint(stream)
            raise UnsafeObjectError(
                f"{where} has objects ({', '.join(unsafe) or error}) whose loading runs code that the checkpoint "
                "names: if you trust it, pass weights_only=False, or allow their types by "
                "torch.serialization.add_safe_globals"
            ) from error


def _place(storage: Any, location: str) -> Any:
    kind = location.split(":")[0]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Not the saved index: this rank's device may have another index than the saving rank's.
    return storage.to(device=accelerator) if accelerator is not None and kind == accelerator.type else storage


def _allowing_safe_types() -> contextlib.AbstractContextManager[Any]:
    # Without types that are already allowed: torch would withdraw those when the context ends.
    known = get_safe_globals()
    return safe_globals([kind for kind in _safe_types() if kind not in known])


@functools.cache
def _safe_types() -> list[Any]:
    """Types, beyond those that `torch.load` accepts, whose construction runs no code but their own."""
    builtin = [bool, bytes, dict, float, frozenset, int, list, range, set, slice, str, tuple]
    dates = [datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone]
    others = [decimal.Decimal, fractions.Fraction, uuid.UUID, uuid.SafeUUID]
    paths = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath]
    return [*builtin, *dates, *others, *paths, *(numpy_types() if "numpy" in sys.modules else [])]


def numpy_types() -> list[Any]:
    """What pickles of numpy's arrays and numbers name, for `torch.serialization.safe_globals`."""
    import numpy as np

    rebuild: dict[str, Any] = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    # numpy 1 and 2 have these functions in modules of other names, and either reads what the other wrote.
    modules = [f"numpy.{core}.multiarray" for core in ("core", "_core")]
    named = [(function, f"{module}.{name}") for module in modules for name, function in rebuild.items()]
    return [np.ndarray, np.dtype, *named, *{type(np.dtype(code)) for code in np.typecodes["All"]}]


# -- Trees


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a tree as `torch.distributed.checkpoint` sees them: it looks into mappings, and into lists that
    have tensors or mappings in them. But mappings that are empty, or have keys that are not strings, would not come
    back as they were: without tensors inside they are leaves, as dicts."""
    if isinstance(value, Mapping) and (has_tensors(value) or (value and all(type(key) is str for key in value))):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif _is_list_of_more(value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, _as_dicts(value)


def has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a tree of mappings and lists with one."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return isinstance(value, torch.Tensor) or any(map(has_tensors, items))


def _as_dicts(value: Any) -> Any:
    return {key: _as_dicts(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _is_list_of_more(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, (Mapping, torch.Tensor)) or _is_list_of_more(item) for item in value
    )


def tree_of(items: Iterable[tuple[Path, Any]]) -> Any:
    """The tree that has these leaves; every mapping in it is a dict."""
    children: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in items:
        if not path:
            return value
        children.setdefault(path[0], []).append((path[1:], value))
    built = {key: tree_of(below) for key, below in children.items()}
    return [built[key] for key in sorted(built)] if built and all(isinstance(key, int) for key in built) else built


def is_kept_by_leaves(value: Any) -> bool:
    """Whether ``tree_of(leaves(value))`` equals ``value``."""
    if isinstance(value, Mapping):
        plain = type(value) is dict and bool(value) and all(type(key) is str for key in value)
        return plain and all(map(is_kept_by_leaves, value.values()))
    return not _is_list_of_more(value) or all(map(is_kept_by_leaves, value))


# -- What users add


def is_stateful(value: Any) -> bool:
    """Whether it has a state of its own to save: a scheduler, a data loader, a gradient scaler, an average."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(callable(method) for method in methods)


def capture(value: Any, sharded: dict[str, DTensor], path: Path = ()) -> Any:
    """``value`` with objects replaced by their state dicts, and sharded tensors by marks.

    Args:
        value: a tree of dicts, lists and tuples.
        sharded: receives the sharded tensors, by the names in their marks.
        path: of ``value`` in the whole tree.
    """
    marks: list[tuple[Path, dict[str, str], DTensor]] = []
    captured = _mark(value, marks, path)
    # Not as they come: where keys have dots, paths have names in common, and ranks have dicts in other orders.
    for where, mark, tensor in sorted(marks, key=lambda one: [(str(key), type(key).__name__) for key in one[0]]):
        name = key_of(where)
        while name in sharded:
            name += "_"
        sharded[name], mark[SHARDED] = tensor, name
    return captured


def is_shared(name: str, sharded: Collection[str]) -> bool:
    """Whether `capture` gave ``name``, one of those of ``sharded``, where paths have a name in common."""
    return f"{name}_" in sharded or (name.endswith("_") and name[:-1] in sharded)


def _mark(value: Any, marks: list[tuple[Path, dict[str, str], DTensor]], path: Path) -> Any:
    """As `capture`; ``marks`` receives the sharded tensors with their paths and marks, which have no names yet."""
    if is_stateful(value):
        value = value.state_dict()
    if isinstance(value, DTensor):
        mark: dict[str, str] = {}
        marks.append((path, mark, value))
        return mark
    return _map_items(value, lambda key, item: _mark(item, marks, (*path, key)))


def release(value: Any, sharded: Mapping[str, torch.Tensor]) -> Any:
    """What `capture` returned, with marks replaced by the tensors of ``sharded``."""
    if isinstance(value, dict) and value.keys() == {SHARDED}:
        return sharded[value[SHARDED]]
    return _map_items(value, lambda _, item: release(item, sharded))


def _map_items(value: Any, function: Callable[[Any, Any], Any]) -> Any:
    if isinstance(value, dict):
        items = {key: function(key, item) for key, item in value.items()}
        if all(new is old for new, old in zip(items.values(), value.values(), strict=True)):
            return value
        return items if type(value) is not collections.OrderedDict else collections.OrderedDict(items)
    if isinstance(value, (list, tuple)):
        parts = [function(index, item) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return _like(value, parts)
    return value


def _like(value: Any, items: Sequence[Any]) -> Any:
    """A list or tuple of the class of ``value``, with ``items``; ``_fields`` tells named tuples."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def check_form(given: Any, loaded: Any, where: str) -> None:
    """See that `restore` finds something for each object with a state.

    Args:
        given: what the caller passed.
        loaded: what the checkpoint has, its tensors or not.
        where: what it is called in messages.

    Raises:
        ValueError: if the checkpoint has nothing for an object with a state, or another form.
    """
    if is_stateful(given):
        return  # it knows what it takes
    if isinstance(given, dict) and isinstance(loaded, Mapping):
        for key, item in given.items():
            if key not in loaded and _has_stateful(item):
                raise ValueError(f"{where} of the checkpoint has no {key!r}; it has {', '.join(map(repr, loaded))}")
        for key, item in loaded.items():
            check_form(given.get(key), item, f"{where}[{key!r}]")
    elif _are_alike(given, loaded):
        for index, (old, new) in enumerate(zip(given, loaded, strict=True)):
            check_form(old, new, f"{where}[{index}]")
    elif _has_stateful(given):
        raise ValueError(
            f"{where} of the checkpoint has the form {_form_of(loaded)}, and what is to be filled {_form_of(given)}: "
            "its objects would not be loaded; pass the form that was saved"
        )


def restore(given: Any, loaded: Any, where: str) -> Any:
    """Put what was loaded into what the caller has: objects with a state take theirs, dicts and lists are filled.

    Args:
        given: what the caller passed.
        loaded: with state dicts in the place of objects; `check_form` has seen it.
        where: what it is called in messages.

    Returns:
        ``given`` if it could be filled, else ``loaded``.
    """
    if is_stateful(given):
        try:
            given.load_state_dict(loaded)
        except Exception as error:
            error.add_note(f"when the {type(given).__name__} that was passed took {where} of the checkpoint")
            raise
        # torchdata's loaders make their iterators when they are asked for their state, and draw a number: now, before
        # the generators are restored, as when they were saved. Their workers are as in training.
        with torch.enable_grad():
            given.state_dict()
        return given
    if isinstance(given, dict) and isinstance(loaded, Mapping):
        for key, item in loaded.items():
            given[key] = restore(given.get(key), item, f"{where}[{key!r}]")
        return given
    if _are_alike(given, loaded):
        pairs = enumerate(zip(given, loaded, strict=True))
        items = [restore(old, new, f"{where}[{index}]") for index, (old, new) in pairs]
        if isinstance(given, tuple):
            return _like(given, items)
        given[:] = items
        return given
    return loaded


def _are_alike(given: Any, loaded: Any) -> bool:
    """Whether both are sequences of as many items; tuples are saved as such, or as lists."""
    if isinstance(given, list):
        return isinstance(loaded, list) and len(given) == len(loaded)
    return isinstance(given, tuple) and isinstance(loaded, (list, tuple)) and len(given) == len(loaded)


def _has_stateful(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return is_stateful(value) or any(map(_has_stateful, items))


def _form_of(value: Any) -> str:
    length = f" of {len(value)} items" if isinstance(value, (list, tuple)) else ""
    return type(value).__name__ + length
