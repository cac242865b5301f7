"""Texts that the ranks of a process group let each other read, in the store by which they have met; nobody waits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .comm import NO_STORE, Comm, default_store
from .errors import StateError

KEPT = 256
"""Posts of a rank on one topic that others can read, the latest: a program that makes one model after the other would
fill the store. As many as no rank is ahead of another: models that post together may communicate apart."""
_posts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How often this process has posted in each place, by the default group of that time: a process group that is made
again may have the name of the one before, and one with two backends has a `Comm` for each."""
_worlds: Counter[str] = Counter()
"""In how many default groups this process has posted in each place: the store of the next may be that of the last, and
have its posts still."""
told_failures: weakref.WeakKeyDictionary[Comm, str] = weakref.WeakKeyDictionary()
"""How this rank failed, by the ranks that it has told so and that may wait because of it."""


def post(comm: Comm, text: str, topic: str = "") -> str:
    """Let the other ranks of ``comm`` read ``text``; gives its number, the same on all ranks that post as often on
    ``topic``, and empty if it cannot be read."""
    with contextlib.suppress(*NO_STORE):
        store, place = _store(comm)
        assert dist.group.WORLD is not None
        posts = _posts.setdefault(dist.group.WORLD, Counter())
        _worlds[place] = _world(place)
        posts.setdefault(place, 0)
        posts[topic + place] += 1
        count, prefix = posts[topic + place], f"{_worlds[place]}.{topic}"
        store.set(f"{prefix}{count}/{comm.rank}", text)
        if count > KEPT:
            with contextlib.suppress(*NO_STORE):  # not every store can
                store.delete_key(f"{prefix}{count - KEPT}/{comm.rank}")
        return f"{prefix}{count}"
    return ""


def posted_by(comm: Comm, rank: int, number: str) -> str | None:
    """What ``rank`` has posted under ``number``; None if it has not yet, or nobody can tell."""
    key = f"{number}/{rank}"
    with contextlib.suppress(*NO_STORE):
        store, _ = _store(comm)
        if store.check([key]):
            return store.get(key).decode() or None  # torch 2.15's store of fake groups has all keys, without values
    return None


def post_last(comm: Comm, topic: str, text: str) -> None:
    """Let the other ranks of ``comm`` read ``text``, in the place of what this one posted last on ``topic`` by this."""
    with contextlib.suppress(*NO_STORE):
        store, place = _store(comm)
        store.set(f"{_world(place)}.{topic}/{comm.rank}", text)


def last_posted_by(comm: Comm, rank: int, topic: str) -> str | None:
    """What ``rank`` has posted last on ``topic`` by `post_last`; None if nothing, or nobody can tell."""
    with contextlib.suppress(*NO_STORE):
        return posted_by(comm, rank, f"{_world(_store(comm)[1])}.{topic}")
    return None


def post_failure(comm: Comm, text: str) -> None:
    """Let `failure_elsewhere` of the other ranks find that this one failed, how ``text`` says; empty once it is
    over."""
    text = text.encode(errors="replace").decode()  # messages have names of files, which need not be text
    if text == told_failures.get(comm, ""):
        return
    if text:
        told_failures[comm] = text
    else:
        del told_failures[comm]
    post_last(comm, "failed", text)


def failure_elsewhere(comm: Comm) -> tuple[int, str] | None:
    """Another rank that has told that it failed, by its number in the default group, and how; None if none has.

    Not one that failed as this one did: exceptions that end forward on purpose are raised on all ranks.
    """
    told = told_failures.get(comm, "")
    for rank in range(comm.size):
        if rank != comm.rank and (text := last_posted_by(comm, rank, "failed")) and text != told:
            return comm.global_rank(rank), text
    return None


def _store(comm: Comm) -> tuple[Store, str]:
    """Where these ranks post, and no others, and what that is called."""
    group, store = comm.group, default_store()
    if _is_deleted(store):
        raise StateError("the file by which the ranks have met is gone")
    # Other ranks may have had a group of this name, in another world.
    described = f"{group.group_name} {dist.get_process_group_ranks(group)}"
    place = hashlib.sha1(described.encode(), usedforsecurity=False).hexdigest()
    return PrefixStore(f"shardwise/{place}", store), place


def _world(place: str) -> int:
    """The number of the default group among those in which this process has posted, or will, in ``place``."""
    assert dist.group.WORLD is not None
    return _worlds[place] + (place not in _posts.get(dist.group.WORLD, ()))


def _is_deleted(store: Any) -> bool:
    """Whether ``store`` is a file that is gone: it would wait for that, as if a rank had yet to come."""
    while (wrapped := getattr(store, "underlying_store", None)) is not None:
        store = wrapped
    path = getattr(store, "path", None)
    return path is not None and not os.path.exists(path)
