"""Marks of tests that need more than the oldest torch that is supported has."""

from __future__ import annotations

import pytest

from bench.contenders import FAKE_GROUPS_REDUCE, IS_NEWER

needs_named_axes = pytest.mark.skipif(
    not IS_NEWER, reason="FSDP2 of torch 2.11 has no DataParallelMeshDims, and one mesh for all parameters"
)
needs_results = pytest.mark.skipif(
    not FAKE_GROUPS_REDUCE, reason="fake groups of torch 2.11 and 2.12 leave results as they find the memory"
)
needs_compiled_steps = pytest.mark.skipif(
    not IS_NEWER, reason="FSDP2 of torch 2.11 fails in a compiled step with unshard()"
)
needs_dtensors_on_threads = pytest.mark.skipif(
    not IS_NEWER, reason="once threads have used DTensors of torch 2.11, the next use of one ends the process"
)
needs_named_meshes = pytest.mark.skipif(not IS_NEWER, reason="not all errors of torch 2.11 tell which meshes differ")
