"""The FairScale page's programs in ``examples/``, run as they are: by themselves, and by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = Path(__file__).parents[2] / "src"
LIMIT_SECONDS = 100
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@cache
def output_of(name: str, *launcher: str) -> list[str]:
    """The lines that the program prints."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, [str(SOURCE), environment.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**environment, "PYTHONPATH": path},
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout.strip().splitlines()


def losses(name: str, *launcher: str) -> list[float]:
    """The mean loss of each epoch."""
    return [float(word) for word in output_of(name, *launcher)[-1].split(": ")[1].split()]


@pytest.mark.parametrize(
    "case",
    [
        ("fairscale_ddp_oss.py",),
        ("fairscale_sharded_ddp.py", *TORCHRUN),
        ("fairscale_grad_scaler.py",),
        ("fairscale_fsdp.py", *TORCHRUN),
    ],
    ids=lambda case: case[0],
)
def test_learns(case: tuple[str, ...]) -> None:
    first, last = losses(*case)
    assert last < 0.75 * first
    # All train the same model on the same data, the last one in float16.
    expected = losses("fairscale_ddp_oss.py")
    assert [first, last] == pytest.approx(expected, abs=0.01 if "scaler" in case[0] else 0.0)


def test_wraps_what_the_page_says() -> None:
    assert output_of("fairscale_auto_wrap.py")[-1].startswith("wrapped 12 modules: encoder.layers.0, ")
