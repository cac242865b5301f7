"""Checkpoints: sharded ones, safetensors, full state."""

from .asynchronous import wait
from .atomic import latest
from .full_state import full_state_dict, load_full_state_dict
from .integrity import CheckpointError, CorruptFileError
from .safetensors import load_safetensors, save_safetensors
from .sharded import load, save

__all__ = [
    "CheckpointError",
    "CorruptFileError",
    "full_state_dict",
    "latest",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "save",
    "save_safetensors",
    "wait",
]
