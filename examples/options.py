"""The options of ``train_lm.py``: parsed and checked without torch, so that a mistake is answered at once."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# name -> (layers, width); the first is for tests, and the last ones need a cluster
SIZES: dict[str, tuple[int, int]] = {
    "tiny": (2, 64),
    "2m": (3, 256),
    "10m": (6, 384),
    "50m": (10, 640),
    "125m": (18, 768),
    "350m": (28, 1024),
    "1b": (20, 2048),
    "7b": (34, 4096),
    "13b": (41, 5120),
    "70b": (86, 8192),
}

ZERO_HELP = "shard 0: nothing; 1: optimizer state; 2: and gradients; 3: and parameters (%(default)s)"
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


class OptionError(ValueError):
    """A mistake in the options or in what they name; its message is one line for the user."""


@dataclass(frozen=True)
class Options:
    """What one run does; the fields are the command line's options."""

    nproc: int
    zero: int
    size: str
    tied: bool
    bf16: bool
    steps: int
    batch_size: int
    micro_batches: int
    sequence_length: int
    lr: float
    seed: int
    threads: int
    corpus: Path
    checkpoint_dir: Path
    checkpoint_every: int
    resume: bool
    sample: bool
    log_json: Path | None

    @property
    def run_dir(self) -> Path:
        """Where checkpoints of models of this shape are."""
        return self.checkpoint_dir / f"{self.size}-{'tied' if self.tied else 'untied'}"


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="train_lm.py",
        description="Train a byte-level language model on the Python standard library's source, sharded.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--nproc",
        type=int,
        default=2,
        help="processes; under torchrun, what it starts (%(default)s)",
    )
    add("--zero", type=int, default=3, choices=range(4), help=ZERO_HELP)
    add("--size", default="2m", choices=SIZES, help="about this many parameters (%(default)s)")
    add(
        "--tied",
        action="store_true",
        default=True,
        help="the head shares the embedding's weight (default)",
    )
    add("--untied", dest="tied", action="store_false", help="the head has a weight of its own")
    add("--bf16", action="store_true", help="compute in bfloat16, reduce gradients in float32")
    add("--steps", type=int, default=400, help="optimizer steps (%(default)s)")
    add("--batch-size", type=int, default=12, help="sequences per step, over all processes (%(default)s)")
    add("--micro-batches", type=int, default=1, help="backward passes per step (%(default)s)")
    add("--sequence-length", type=int, default=128, help="bytes per sequence (%(default)s)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights, the data order and the sample (%(default)s)")
    add("--threads", type=int, default=0, help="CPU threads per process; 0 divides the cores (%(default)s)")
    add("--corpus", type=Path, default=STANDARD_LIBRARY, help="folder of *.py files (%(default)s)")
    add("--checkpoint-dir", type=Path, default=Path("out/train_lm"), help="keeps the newest 2 (%(default)s)")
    add(
        "--checkpoint-every",
        type=int,
        default=200,
        help="steps between; 0 for none (%(default)s)",
    )
    add("--resume", action="store_true", help="continue from the newest checkpoint in --checkpoint-dir")
    add("--no-sample", dest="sample", action="store_false", help="generate no text at the end")
    add("--log-json", type=Path, help="write every step's loss and gradient norm to this file")
    return parser


def parse_options(arguments: list[str]) -> Options:
    """Parse and check the command line.

    Raises:
        OptionError: naming the option that is wrong and what it may be.
    """
    options = Options(**vars(_parser().parse_args(arguments)))
    _check(options, int(os.environ.get("WORLD_SIZE", options.nproc)))
    return options


def _check(options: Options, world_size: int) -> None:
    for name in ("nproc", "steps", "batch_size", "micro_batches", "sequence_length"):
        if (value := getattr(options, name)) < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name in ("threads", "checkpoint_every", "seed"):
        if (value := getattr(options, name)) < 0:
            raise OptionError(f"--{name.replace('_', '-')} must not be negative, not {value}")
    if not options.lr > 0:
        raise OptionError(f"--lr must be positive, not {options.lr}")
    if options.batch_size % (world_size * options.micro_batches):
        raise OptionError(
            f"--batch-size {options.batch_size} must be a multiple of "
            f"{world_size} processes x {options.micro_batches} micro-batches"
        )
    if options.log_json and not options.log_json.absolute().parent.is_dir():
        raise OptionError(f"--log-json {options.log_json}: no such folder")
    if options.checkpoint_dir.exists() and not options.checkpoint_dir.is_dir():
        raise OptionError(f"--checkpoint-dir {options.checkpoint_dir}: not a folder")
    if options.resume:
        _check_resume(options)


def _check_resume(options: Options) -> None:
    step = newest_step(options.run_dir)
    if step is None:
        others = sorted(path.name for path in options.checkpoint_dir.glob("*-*tied") if newest_step(path) is not None)
        hint = f"; there are some of other models: {', '.join(others)}" if others else ""
        raise OptionError(f"--resume: no checkpoint in {options.run_dir}{hint}")
    if step >= options.steps:
        raise OptionError(f"--resume: {options.run_dir} is at step {step} already; give more than that as --steps")


def newest_step(directory: Path) -> int | None:
    """The step of the newest complete checkpoint, or None. `shardwise.latest` finds it too, but needs torch."""
    complete = sorted(path.parent.name for path in directory.glob("checkpoint-*-step-*/shardwise.json"))
    return int(complete[-1].rpartition("-")[2]) if complete else None


def complain(error: Exception) -> None:
    """Write one line about ``error`` to stderr, once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"train_lm.py: {error}", file=sys.stderr, flush=True)
