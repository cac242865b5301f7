"""Starting the processes of a run, ending them together, and leaving quietly when asked to."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid

SHOW_CURSOR = b"\x1b[?25h\n"


def leave_on_signals() -> None:
    """Let SIGINT and SIGTERM end this worker at once, also inside of a collective that another rank never joins.

    Python's own handlers, and any written in Python, run when the collective returns: torchrun's agent would wait for
    30 seconds before it kills.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def launch(script: str, arguments: list[str], nproc: int, threads: int) -> int:
    """Run ``script`` in ``nproc`` ranks on this machine with torchrun's agent, and return the exit code.

    Where a rank fails, the agent ends the others.
    """
    exit_code = 128 + signal.SIGINT
    try:
        # The import takes seconds: inside, so that Ctrl-C during them is answered like any other.
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # The agent's own account of a failure is a page long; one line below replaces it.
        logging.disable(logging.CRITICAL)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)("-u", script, *arguments)
            return 0
        except ChildFailedError as error:
            _show_cursor()
            rank, failure = error.get_first_failure()
            print(f"train_lm.py: rank {rank} failed ({_describe(failure.exitcode)}); the others were stopped",
                  file=sys.stderr)  # fmt: skip
            return 1
        except SignalException as error:
            exit_code = 128 + error.sigval
    except KeyboardInterrupt:
        pass
    _show_cursor()
    print("train_lm.py: interrupted; all processes have ended", file=sys.stderr)
    return exit_code


def _show_cursor() -> None:
    """A worker that was ended while it drew progress has hidden it."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR)


def _describe(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal.Signals(-exit_code).name}"
