"""Settings for all tests: results that repeat bit for bit, and what processes import once for all."""

from __future__ import annotations

import gc
import importlib.util
import os

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from .ranks.harness import PRELOADED

FRAMEWORKS = {
    "lightning": ["lightning", "shardwise.lightning"],
    "fabric": ["lightning", "shardwise.fabric"],
    "mmengine": ["mmengine", "mmengine.runner", "shardwise.mmengine"],
    "transformers": ["transformers", "transformers.models.llama.modeling_llama"],
}
"""What ranks import for tests of each adapter: once, before they are forked, since it takes seconds."""


def pytest_configure(config: pytest.Config) -> None:
    # Others may use the same cores: what hangs, pytest's own limit ends.
    settings.register_profile("untimed", settings(), deadline=None)
    settings.load_profile("untimed")
    # yapf, which mmengine imports, shows its cache before it has written it: processes that import it first at the same
    # time may read an empty one. Here one process does, before there are others.
    if not hasattr(config, "workerinput") and importlib.util.find_spec("yapf") is not None:
        importlib.import_module("yapf")


def pytest_collection_finish() -> None:
    # The garbage collector need not search what is imported by now.
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item.path.stem for item in items}
    for adapter, modules in FRAMEWORKS.items():
        if f"test_{adapter}" in files and importlib.util.find_spec(modules[0]) is not None:
            PRELOADED.extend(module for module in modules if module not in PRELOADED)
