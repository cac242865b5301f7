"""Starting the processes of a run, ending them together, and leaving quietly when asked to."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from types import FrameType

SHOW_CURSOR = b"\x1b[?25h\n"


def leave_on_signals() -> None:
    """End this worker at once, with exit code 128 + signal, when it gets SIGINT or SIGTERM.

    It does not unwind: a traceback from wherever training was says nothing, and another rank may be waiting
    in a collective that this one will never join, where an orderly shutdown would wait too.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        if sys.stdout.isatty() and os.environ.get("RANK") == "0":
            os.write(sys.stdout.fileno(), SHOW_CURSOR)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def launch(script: str, arguments: list[str], nproc: int, threads: int) -> int:
    """Run ``script`` in ``nproc`` ranks on this machine with torchrun's agent, and return the exit code.

    Where a rank fails, the agent ends the others: within 30 seconds by force.
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
            rank, failure = error.get_first_failure()
            print(f"train_lm.py: rank {rank} failed ({_describe(failure.exitcode)}); the others were stopped",
                  file=sys.stderr)  # fmt: skip
            return 1
        except SignalException as error:
            exit_code = 128 + error.sigval
    except KeyboardInterrupt:
        pass
    print("train_lm.py: interrupted; all processes have ended", file=sys.stderr)
    return exit_code


def _describe(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal.Signals(-exit_code).name}"
