"""The main job, ``examples/train_lm.py``, run small on two gloo processes."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ..ranks.harness import Ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"
STEPS = 6
SMALL = [
    "--size=tiny",
    f"--steps={STEPS}",
    "--sequence-length=32",
    "--checkpoint-every=0",
    "--no-sample",
    "--threads=1",
]
LIMIT_SECONDS = 100
FIRST = ("--zero=3", "--tied")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small files of words, the same in every run."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    for index in range(12):
        words = generator.choices(["def", "return", "shard", "(x):", "\n    ", "=", "1"], k=400)
        (folder / f"module_{index}.py").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def train(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that runs the example and returns its log; the same arguments run once only.

    The example starts its processes for the first arguments. Others share processes that are kept, and not with other
    tests: the example counts all tensors that are alive.
    """
    kept = {world_size: Ranks(world_size) for world_size in (1, 2)}

    @functools.cache
    def run(*arguments: str) -> dict[str, Any]:
        log = tmp_path_factory.mktemp("log") / "log.json"
        everything = [*SMALL, f"--corpus={corpus}", f"--log-json={log}", *arguments]
        if arguments == FIRST:
            result = start(everything)
            stdout, stderr = result.communicate(timeout=LIMIT_SECONDS)
            assert result.returncode == 0, f"{stdout}\n{stderr}"
        else:
            options = {"arguments": everything, "rendezvous": str(log.with_name("rendezvous"))}
            kept[1 if "--nproc=1" in arguments else 2].run(__name__, "Training", options, LIMIT_SECONDS)
        return json.loads(log.read_text())

    yield run
    for processes in kept.values():
        processes.stop()


class Training:
    """What the example does in each of its processes, with a process group of its own."""

    @staticmethod
    def body(arguments: list[str], rendezvous: str) -> None:
        """In a process of the harness, whose group it replaces."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        join, where = dist.init_process_group, {"rank": rank, "world_size": world_size}
        # By files, as the harness does: a port that is free may not be any more when it is used.
        by_file = functools.partial(join, init_method=f"file://{rendezvous}.1", **where)
        with (
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world_size)),
            mock.patch.object(sys, "path", [str(EXAMPLE.parent), *sys.path]),
            mock.patch.object(dist, "init_process_group", by_file),
        ):
            from corpus import Corpus
            from options import parse_options
            from training import train

            options = parse_options(arguments)
            train(options, Corpus.load(options.corpus, options.sequence_length), threads=1)
        # The harness waits for all ranks in a group once more.
        join("gloo", init_method=f"file://{rendezvous}.2", **where)


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """The example's launcher; ``communicate`` returns only once every process that it started has ended."""
    # Aligned and unaligned tensors take different matrix kernels without this.
    environment = {**os.environ, "MKL_CBWR": "COMPATIBLE", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLE), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def start_long_run(corpus: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """A run that would take hours, past its first steps."""
    process = start([*SMALL, "--steps=1000000", f"--corpus={corpus}", f"--checkpoint-dir={tmp_path}"])
    assert process.stdout is not None
    # Its banner is written once all ranks have joined and sharded the model.
    assert "parameters" in process.stdout.readline()
    time.sleep(1)
    return process


@pytest.mark.parametrize(("zero", "head"), [(0, "--tied"), (1, "--tied"), (2, "--tied"), (0, "--untied")])
def test_every_stage_gives_the_same_losses(train: Any, zero: int, head: str) -> None:
    expected, log = train("--zero=3", head), train(f"--zero={zero}", head)
    assert len(log["losses"]) == STEPS
    assert log["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert log["gradient_norms"] == pytest.approx(expected["gradient_norms"], rel=1e-3)
    assert log["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1.5, 0.5, 0.5), (2, 1.5, 0.5, 0.5), (3, 0.5, 0.5, 0.5)],
)
def test_each_rank_holds_what_its_stage_says(
    train: Any, zero: int, parameters: float, gradients: float, optimizer: float
) -> None:
    log = train(f"--zero={zero}", "--tied")
    whole = log["unsharded_bytes"]
    for held in log["held_bytes"]:
        assert held["parameters"] + held["copies"] == pytest.approx(parameters * whole["parameters"], rel=0.02)
        assert held["gradients"] == pytest.approx(gradients * whole["gradients"], rel=0.02)
        assert held["optimizer"] == pytest.approx(optimizer * whole["optimizer"], rel=0.02)


def test_world_size_and_micro_batches_change_rounding_only(train: Any) -> None:
    expected = train("--zero=3", "--tied")["losses"]
    assert train("--zero=3", "--nproc=1", "--micro-batches=3")["losses"] == pytest.approx(expected, rel=1e-4)


def test_bf16_stays_near_float32(train: Any) -> None:
    assert train("--bf16")["losses"] == pytest.approx(train("--zero=3", "--tied")["losses"], rel=0.02)


def test_resume_continues_bit_for_bit_and_at_another_world_size(train: Any, tmp_path: Path) -> None:
    directory = [f"--checkpoint-dir={tmp_path}"]
    whole = train("--zero=3", "--checkpoint-every=4", *directory)
    # Only the newest counts: forget the one of the last step, as if the run had died before it.
    newest = sorted(tmp_path.glob("*/checkpoint-*"))[-1]
    assert newest.name.endswith(f"-step-{STEPS}")
    shutil.rmtree(newest)
    resumed = train("--zero=3", "--resume", *directory)
    assert resumed["first_step"] == 4
    assert resumed["losses"] == whole["losses"][4:]
    assert resumed["gradient_norms"] == whole["gradient_norms"][4:]
    alone = train("--zero=3", "--resume", "--nproc=1", *directory)
    assert alone["losses"] == pytest.approx(whole["losses"][4:], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zero=4"], "argument --zero: invalid choice: 4 (choose from 0, 1, 2, 3)"),
        (["--batch-size=7"], "--batch-size 7 must be a multiple of 2 processes x 1 micro-batches"),
        (["--corpus={}/missing"], "--corpus {}/missing: no such folder"),
        (["--corpus={}"], "--corpus {}: needs two or more *.py files, has 0"),
        (["--resume", "--checkpoint-dir={}"], "--resume: no checkpoint in {}/2m-tied"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    process = start([argument.format(tmp_path) for argument in arguments])
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, stdout) == (2, "")
    assert stderr == f"train_lm.py: {message.format(tmp_path)}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes_quietly(corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start_long_run(corpus, tmp_path)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + number
    assert stderr == "train_lm.py: interrupted; all processes have ended\n"


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_rank_that_dies_stops_the_others(corpus: Path, tmp_path: Path) -> None:
    process = start_long_run(corpus, tmp_path)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1
    assert stderr.endswith("; the others were stopped\n")
