"""Programs with many cases in one launch, since starting Lightning's processes takes longer than most cases.

A test module is its own program: ``python MODULE.py GROUP DIRECTORY`` runs the cases of a group one after the other, on
every rank, and each rank writes down how each went. A test then asks for one case.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT = 240
"""Seconds for one launch."""
ROOT = Path(__file__).parents[2]
Cases = Mapping[str, Mapping[str, Callable[[Path], None]]]


def run_cases(cases: Cases) -> None:
    """Run the cases of the group that the command line names, as a program; stop at the first that fails.

    Each gets the group's directory; those of other groups are beside it.
    """
    group, directory = sys.argv[1], Path(sys.argv[2])
    own = directory / group
    own.mkdir(exist_ok=True)
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    for name, case in cases[group].items():
        started = time.monotonic()
        error = None
        try:
            case(own)
        except BaseException:
            error = traceback.format_exc()
        with open(directory / f"{group}.{rank}.jsonl", "a") as file:
            file.write(json.dumps({"case": name, "error": error, "seconds": time.monotonic() - started}) + "\n")
        if error is not None:
            # Without destructors, which may wait for the other rank.
            os._exit(1)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # the launcher ends all when the first one has ended
    sys.stdout.flush()
    os._exit(0)


@functools.cache
def shared_directory() -> Path:
    """The directory in which all programs of this test run keep their files."""
    directory = tempfile.TemporaryDirectory(prefix="shardwise-lightning-")
    _kept.append(directory)
    return Path(directory.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def launched(program: str, group: str, ranks: int, torchrun: bool) -> dict[int, dict[str, dict[str, Any]]]:
    """The outcomes of the cases of ``group``, by rank, and under -1 the log; launched once.

    Args:
        program: path of the test module.
        group: of its cases.
        ranks: that it has.
        torchrun: whether torchrun starts them; otherwise Lightning does.
    """
    directory = shared_directory()
    command = [sys.executable, program, group, str(directory)]
    if torchrun:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, *command[1:]]
    log = directory / f"{group}.log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, env=_environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=directory
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its children too: a failed rank leaves the others waiting.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcomes: dict[int, dict[str, dict[str, Any]]] = {}
    for rank in range(ranks):
        file_ = directory / f"{group}.{rank}.jsonl"
        lines = file_.read_text().splitlines() if file_.is_file() else []
        outcomes[rank] = {item["case"]: item for item in map(json.loads, lines)}
    outcomes[-1] = {"log": {"text": log.read_text()[-6000:]}}
    return outcomes


def output_of(program: Path) -> list[str]:
    """The lines that are printed by a program that starts its own processes."""
    result = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=LIMIT, env=_environment(), check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout.strip().splitlines()


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    remove = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED")
    environment = {key: value for key, value in os.environ.items() if key not in remove}
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}


def check_case(program: str, group: str, case: str, ranks: int = 2, *, torchrun: bool = False) -> None:
    """A case succeeded on every rank."""
    outcomes = launched(program, group, ranks, torchrun)
    found = {rank: outcomes[rank].get(case) for rank in range(ranks)}
    errors = [f"rank {rank}:\n{item['error']}" for rank, item in found.items() if item and item["error"]]
    assert not errors, "\n".join(errors)
    missing = [rank for rank, item in found.items() if item is None]
    failed = {rank: [name for name, item in outcomes[rank].items() if item.get("error")] for rank in range(ranks)}
    assert not missing, f"ranks {missing} did not finish it (failed before: {failed})\n{outcomes[-1]['log']['text']}"
