"""`python -m bench`: measure, print tables, and write them as Markdown."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .cases import case_tables
from .checkpointing import checkpoint_tables
from .collectives import collective_tables
from .counts import count_tables
from .deepspeed import deepspeed_tables
from .exposed import exposed_tables
from .fairscale import fairscale_tables
from .gpu import gpu_tables
from .host import host_tables
from .lightning import lightning_tables
from .loading import loading_tables
from .memory import memory_tables
from .optimizer import optimizer_tables
from .paced import paced_tables
from .ranks import BenchError
from .report import Table, environment, write
from .settings import setting_tables
from .steps import step_tables

ROOT = Path(__file__).parent.parent
RESULTS, QUICK_RESULTS = ROOT / "bench" / "results", ROOT / "out" / "bench"
BENCHES: dict[str, tuple[str, Callable[[bool], list[Table]]]] = {
    "counts": ("Collectives and bytes of a step", count_tables),
    "cases": ("Collectives and bytes, case by case", case_tables),
    "fairscale": ("FairScale's optimizer and gradient sharding", fairscale_tables),
    "deepspeed": ("DeepSpeed's ZeRO", deepspeed_tables),
    "host": ("Host time", host_tables),
    "optimizer": ("Optimizer and clipping", optimizer_tables),
    "memory": ("Peak memory of a step", memory_tables),
    "loading": ("Loading and saving", loading_tables),
    "collectives": ("gloo's collectives", collective_tables),
    "steps": ("Step time", step_tables),
    "settings": ("Step time in other settings", setting_tables),
    "network": ("Communication that a step does not hide", exposed_tables),
    "paced": ("Step time over a slow link", paced_tables),
    "gpu": ("On one GPU", gpu_tables),
    "lightning": ("A Trainer's step", lightning_tables),
    "checkpoints": ("Checkpoints", checkpoint_tables),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure shardwise, torch FSDP2, DDP and no sharding side by side.",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(BENCHES),
        metavar="NAME",
        default=list(BENCHES),
        help=f"measure these alone: {', '.join(BENCHES)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"few rounds, for a look; results go to {QUICK_RESULTS.relative_to(ROOT)}",
    )
    parser.add_argument("--output", type=Path, help=f"directory of the results ({RESULTS.relative_to(ROOT)})")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the chosen measurements; gives the exit status."""
    options = parse(arguments)
    os.environ.update(OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99")
    # A terminated run ends its processes like an interrupted one.
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else 160)
    errors = Console(stderr=True)
    output = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    about = environment(shlex.join(["python", "-m", "bench", *arguments]))
    for line in about:
        console.print(line, style="dim", markup=False, highlight=False)
    failed = False
    for name in options.only:
        heading, measure = BENCHES[name]
        start = time.monotonic()
        try:
            with errors.status(f"{name} ..."):
                tables = measure(options.quick)
        except BenchError as error:
            errors.print(f"{name} failed: {error}", style="red", markup=False)
            failed = True
            continue
        except KeyboardInterrupt:
            errors.print("interrupted")
            return 130
        for table in tables:
            table.show(console)
        path = output / f"{name}.md"
        write(path, heading, tables, about)
        console.print(f"  {path} ({time.monotonic() - start:.0f} s)\n", style="dim", markup=False, highlight=False)
    return 1 if failed else 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
