"""Errors that are more than one builtin kind, notes on those of the backends, and names in messages."""

from __future__ import annotations

from collections.abc import Iterable

_EXPLAINED = "shardwise: this happened while"


def explain(error: RuntimeError, what: str, cause: str, rule: str) -> None:
    """Add to a communication error what was being communicated, and its ``cause``, or if that is empty, the ``rule``
    that another rank may have broken."""
    often = f"Another rank failed or stopped, or does something else: {rule}"
    error.add_note(f"{_EXPLAINED} {what}. {cause[:1].upper() + cause[1:] or often}.")


def is_explained(error: BaseException) -> bool:
    """Whether `explain` was given ``error``: what failed is communication, not what the module computes."""
    return any(note.startswith(_EXPLAINED) for note in getattr(error, "__notes__", ()))


class StateError(ValueError, RuntimeError):
    """A parameter or unit is not in the state that its use needs; the message names it and the remedy.

    A ValueError as all our errors about arguments are; a RuntimeError too because programs written for torch's
    FSDP2 catch that.
    """


class UnsupportedShardError(ValueError, NotImplementedError):
    """A tensor cannot be cut as asked; torch's FSDP2 raises NotImplementedError for it."""


SHOWN = 10
"""Names that a message lists at most."""


def listed(names: Iterable[str]) -> str:
    """Names for a message."""
    ordered = list(names)
    return ", ".join(map(repr, ordered[:SHOWN])) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")
