"""Errors that are more than one builtin kind."""


class StateError(ValueError, RuntimeError):
    """A parameter or unit is not in the state that its use needs; the message names it and the remedy.

    A ValueError as all our errors about arguments are; a RuntimeError too because programs written for torch's
    FSDP2 catch that.
    """


class UnsupportedShardError(ValueError, NotImplementedError):
    """A tensor cannot be cut as asked; torch's FSDP2 raises NotImplementedError for it."""
