"""Cases with Trainers and Fabrics on ranks that run already, as Lightning finds them under any launcher.

Most of what a launched program costs is the import of Lightning, by each of its processes. A rank here imports it once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.adapters.launching import shared_directory
from tests.ranks.harness import ranks

LIMIT = 120.0
"""Seconds for one case."""
_done: set[tuple[Any, ...]] = set()


def check_in_ranks(
    program: str, group: str, case: str, world_size: int, *, namespace: str = "", after: Sequence[Any] = ()
) -> None:
    """A function of a test module succeeds on every rank.

    Args:
        program: path of the test module.
        group: name of the directory that the case gets; those of other groups are beside it.
        case: name of the function, which takes that directory.
        world_size: of the ranks.
        namespace: ``NAMESPACE`` of the module, if not its own.
        after: group, case and world size of the case that writes the files which this one reads.
    """
    if after and (program, *after, namespace) not in _done:
        check_in_ranks(program, *after, namespace=namespace)
    directory = shared_directory() / group
    directory.mkdir(exist_ok=True)
    arguments = {"program": program, "case": case, "directory": str(directory), "namespace": namespace}
    ranks(world_size).run(__name__, "run_case", arguments, LIMIT)
    _done.add((program, group, case, world_size, namespace))


def _run_case(program: str, case: str, directory: str, namespace: str) -> None:
    module = module_of(program, namespace)
    environment = dict(os.environ)
    os.environ["NODE_RANK"] = "0"
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(module, case)(Path(directory))
    finally:
        # Lightning keeps ranks, seeds and addresses in the environment.
        os.environ.clear()
        os.environ.update(environment)


class run_case:  # noqa: N801  (as the harness looks for it)
    body = staticmethod(_run_case)


@functools.cache
def module_of(program: str, namespace: str) -> ModuleType:
    """The test module, with the name of Lightning that it is to use."""
    name = f"tests.adapters.{Path(program).stem}"
    if not namespace:
        return importlib.import_module(name)
    name = f"{name}_{namespace}"
    spec = importlib.util.spec_from_file_location(name, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["NAMESPACE"] = namespace
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
