"""The example in README.md runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_example_runs_learns_and_goes_on(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "example.py").write_text(blocks[0])
    begun, went_on = (losses_of(tmp_path, world_size) for world_size in (1, 2))
    for losses in begun:
        assert [*losses] == [*range(20)]
        assert losses[19] < losses[0]
    for losses in went_on:
        assert [*losses] == [*range(20, 40)]
    assert went_on[0][20] < begun[0][0]  # rank 0 has the same data at each world size


def losses_of(directory: Path, world_size: int) -> list[dict[int, float]]:
    """What each rank prints: losses by step."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", "example.py"]
    result = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    printed = [re.findall(rf"rank {rank} step (\d+) loss ([\d.]+)", result.stdout) for rank in range(world_size)]
    return [{int(step): float(loss) for step, loss in found} for found in printed]
