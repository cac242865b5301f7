"""Models that are built on the meta device and get their values when they are sharded."""

from .context import init_on_meta
from .materialize import materialize

__all__ = ["init_on_meta", "materialize"]
