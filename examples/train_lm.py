"""Train a byte-level language model, sharded over processes with ``shardwise.fully_shard``.

Starts its own processes (``python examples/train_lm.py --nproc 2``), or runs as one of those that torchrun
starts (``torchrun --nproc-per-node 2 examples/train_lm.py``). The training itself is in ``training.py``.
"""

from __future__ import annotations

import os
import sys
import traceback

from corpus import Corpus, CorpusError
from launch import launch, leave_on_signals
from options import OptionError, complain, parse_options


def main(arguments: list[str]) -> int:
    """Run with ``arguments`` and return the exit code: 2 for a mistake of the user's, told in one line."""
    is_worker = "RANK" in os.environ
    if is_worker:
        leave_on_signals()
    try:
        options = parse_options(arguments)
        corpus = Corpus.load(options.corpus, options.sequence_length)
    except (OptionError, CorpusError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        return 130
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc))
    threads = options.threads or max(1, (os.cpu_count() or 1) // processes)
    if not is_worker:
        return launch(os.path.abspath(__file__), arguments, options.nproc, threads)
    try:
        # After the checks above, because importing torch takes seconds.
        from training import train

        train(options, corpus, threads)
        exit_code = 0
    except Exception:
        traceback.print_exc()
        exit_code = 1
    # Skip the interpreter's shutdown: after an error it may wait for collectives that other ranks never join,
    # and after success a gloo thread that drops its last tensor during it aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
