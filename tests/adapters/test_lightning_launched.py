"""Trainers and Fabrics in processes that Lightning (the examples) and torchrun (under the other names) start.

What they do once they run is tested in ranks that are there already, by `test_lightning` and `test_fabric`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from tests.adapters.launching import ROOT, check_case, launched, output_of, run_cases
from tests.adapters.lightning_ranks import module_of

RANKS = 2
NAMES = "pytorch_lightning", "lightning_fabric"
"""Packages of the Trainer and of Fabric; the examples use the others."""


def start(directory: Path) -> None:
    """The first one starts the other processes."""
    import torch
    import torch.distributed as dist

    import shardwise.fabric
    import shardwise.lightning  # noqa: F401

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    assert not dist.is_initialized()
    name, other = NAMES
    fabric = importlib.import_module(other).Fabric(accelerator="cpu", devices=RANKS, strategy="shardwise")
    fabric.launch()
    assert fabric.world_size == dist.get_world_size() == RANKS
    used = importlib.import_module(name).Trainer(
        accelerator="cpu", devices=RANKS, strategy="shardwise", logger=False, enable_checkpointing=False
    )
    assert used.world_size == RANKS


def other_numbers(directory: Path) -> None:
    """Devices that are not the processes which torchrun started: some data would be dealt to no process."""
    name, other = NAMES
    for devices in (1, RANKS + 1):
        options: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "strategy": "shardwise"}
        with pytest.raises(ValueError, match=rf"devices={devices}.* world size \({RANKS}\)"):
            importlib.import_module(other).Fabric(**options).launch()
        used = importlib.import_module(name).Trainer(**options, logger=False, enable_checkpointing=False)
        with pytest.raises(ValueError, match=rf"devices={devices}.* world size \({RANKS}\)"):
            used.fit(module_of(str(Path(__file__).with_name("test_lightning.py")), name).Module(), [])


def trainer(directory: Path) -> None:
    cases = module_of(str(Path(__file__).with_name("test_lightning.py")), NAMES[0])
    cases.fit_by_both_names(directory)
    cases.every_stage(directory)


def fabric(directory: Path) -> None:
    cases = module_of(str(Path(__file__).with_name("test_fabric.py")), NAMES[1])
    cases.meta_optimizer(directory)
    cases.messages(directory)


CASES: dict[str, dict[str, Callable[[Path], None]]] = {
    "torchrun": {case.__name__: case for case in (start, other_numbers, trainer, fabric)}
}


@functools.cache
def programs() -> dict[str, Future[Any]]:
    """All programs, two at a time: for half of its time each is one process that imports Lightning."""
    pool = ThreadPoolExecutor(2)
    examples = {name: pool.submit(output_of, ROOT / "examples" / name) for name in EXAMPLES}
    return {**examples, "torchrun": pool.submit(launched, __file__, "torchrun", RANKS, True)}


EXAMPLES = "lightning_trainer.py", "fabric_meta_init.py"


@pytest.mark.parametrize("case", ["start", "other_numbers", "trainer", "fabric"])
def test_torchrun(case: str) -> None:
    programs()["torchrun"].result()
    check_case(__file__, "torchrun", case, RANKS, torchrun=True)


def test_trainer_example() -> None:
    losses = programs()[EXAMPLES[0]].result()[-1]
    assert losses.startswith("loss after each epoch")
    first, second = (float(word) for word in losses.split()[-2:])
    assert second < first - 0.1 < 3.5


def test_fabric_example() -> None:
    lines = programs()[EXAMPLES[1]].result()
    assert "before setup: 0.0 MB of parameters" in lines
    assert "after setup: 6.6 MB of parameters on each of 2 processes" in lines
    assert "loaded after step 5: the same model" in lines


if __name__ == "__main__":
    run_cases(CASES)
