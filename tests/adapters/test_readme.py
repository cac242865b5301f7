"""The example in README.md runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("world_size", [1, 2])
def test_example_runs_and_learns(tmp_path: Path, world_size: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", str(script)]
    result = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    for rank in range(world_size):
        losses = re.findall(rf"rank {rank} step \d+ loss ([\d.]+)", result.stdout)
        assert len(losses) == 20
        assert float(losses[-1]) < float(losses[0])
