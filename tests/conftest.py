"""Settings for all tests: results that repeat bit for bit, and an order that starts few processes."""

from __future__ import annotations

import os

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from .ranks.harness import world_size_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=world_size_of)
