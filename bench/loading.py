"""Time and peak host memory of loading and saving a model, against torch's distributed checkpoints and transformers.

Every sample is taken by fresh processes: what one contender leaves behind (freed memory that stays resident, lazily
imported modules) does not count for the next.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from .ranks import BenchError, run_on_gloo
from .report import NONE, Table, mebibytes, number, ratio
from .timing import interleave, median, spread

WORLD_SIZE = 2
LIMIT = 300.0
SHARDWISE, DCP, TRANSFORMERS = "shardwise", "plain DCP", "transformers"
CONTENDERS = (SHARDWISE, DCP, TRANSFORMERS)
WHAT = {
    "load": {
        SHARDWISE: "shardwise: load_safetensors into a sharded model on meta",
        DCP: "plain DCP: to_empty and load into an FSDP2 model on meta",
        TRANSFORMERS: "transformers: from_pretrained on every rank, then FSDP2",
    },
    "save": {
        SHARDWISE: "shardwise: save_safetensors",
        DCP: "plain DCP: save",
        TRANSFORMERS: "transformers: whole state dict on rank 0, save_pretrained",
    },
}


@dataclass(frozen=True)
class Sample:
    """One loading or saving on one rank.

    Args:
        seconds: between two barriers.
        peak: bytes resident at most, above those before; pages of mapped files count.
        read: bytes that read calls took.
    """

    seconds: float
    peak: int
    read: int


def loading_tables(quick: bool) -> list[Table]:
    """One table for loading, from the page cache and from the disk, and one for saving."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return [Table("Loading and saving", ["not measured"], [["needs transformers"]])]
    layers, rounds = (2, 1) if quick else (18, 3)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run_on_gloo(WORLD_SIZE, LIMIT, prepare, directory / "small", 1)
        size = run_on_gloo(WORLD_SIZE, LIMIT, prepare, directory, layers)[0]
        return [
            _table("load", "Loading, files in the page cache", directory, layers, rounds, size, cold=False),
            _table("load", "Loading, files on the disk only", directory, layers, max(1, rounds // 2), size, cold=True),
            _table("save", "Saving", directory, layers, rounds, size, cold=False),
        ]


def _table(verb: str, title: str, directory: Path, layers: int, rounds: int, size: int, *, cold: bool) -> Table:
    def sampler(name: str) -> Callable[[], tuple[float, int, int]]:
        def run() -> tuple[float, int, int]:
            if cold:
                _evict(directory)
            ranks: list[Sample] = run_on_gloo(WORLD_SIZE, LIMIT, measure, verb, name, directory, layers)
            return tuple(max(getattr(rank, field) for rank in ranks) for field in ("seconds", "peak", "read"))  # type: ignore[return-value]

        return run

    samples = interleave({name: sampler(name) for name in CONTENDERS}, 0, rounds)
    columns = ["contender", "s", "± s", "s / DCP's", "peak MiB", "peak / transformers'", "read MiB"]
    table = Table(f"{title}: {mebibytes(size, 0)} MiB fp32, world {WORLD_SIZE}", columns)
    middle = {n: [median([s[field] for s in taken]) for field in range(3)] for n, taken in samples.items()}
    for name, (seconds, peak, read) in middle.items():
        row = [number(seconds, 2), number(spread([s[0] for s in samples[name]]), 2), ratio(seconds, middle[DCP][0])]
        row += [mebibytes(peak, 0), ratio(peak, middle[TRANSFORMERS][1])]
        table.rows.append([WHAT[verb][name], *row, mebibytes(read, 0) if verb == "load" else NONE])
    kept = f", of which the rank's shards are {mebibytes(size / WORLD_SIZE, 0)} MiB" if verb == "load" else ""
    flushed = "; files are flushed to the disk by the first two" if verb == "save" else ""
    table.notes = (
        f"the worse rank; median of {rounds} runs in fresh processes{flushed}",
        f"peak: resident memory above that before, mapped files included{kept}.",
    )
    return table


# -- In the measuring processes


def prepare(directory: Path, layers: int) -> int:
    """Write the checkpoints that are loaded later; gives the bytes of the weights."""
    import torch.distributed.checkpoint as dcp

    _hide_bars()
    torch.manual_seed(0)
    model = _make_model(layers)
    if dist.get_rank() == 0:
        model.save_pretrained(directory / "transformers", max_shard_size="500MB")
    dcp.save({"model": _shard(model, torch_fully_shard).state_dict()}, checkpoint_id=directory / "dcp")
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def measure(verb: str, name: str, directory: Path, layers: int) -> Sample:
    """On one rank: one loading or saving by one contender, when the disk has nothing left to do."""
    actions = {"load": (_load_ours, _load_dcp, _load_transformers), "save": (_save_ours, _save_dcp, _save_transformers)}
    action = actions[verb][CONTENDERS.index(name)]
    _hide_bars()
    # What is imported and set up on first use must not count.
    action(directory / "small", 1)()
    prepared = action(directory, layers)
    if dist.get_rank() == 0:
        for path in list(directory.rglob("saved by *")):
            shutil.rmtree(path)
        os.sync()
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, read, start = _status("VmRSS"), _bytes_read(), time.perf_counter()
    kept = prepared()
    dist.barrier()
    sample = Sample(time.perf_counter() - start, _status("VmHWM") - before, _bytes_read() - read)
    del kept
    return sample


def _hide_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _make_model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=8192,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def _shard(model: Any, verb: Callable[..., Any]) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        verb(layer, mesh=mesh)
    return verb(model, mesh=mesh)


def _on_meta(layers: int) -> Any:
    with torch.device("meta"):
        return _make_model(layers)


def _load_ours(directory: Path, layers: int) -> Callable[[], nn.Module]:
    import shardwise
    from shardwise.checkpoint.safetensors import load_safetensors

    model = _shard(_on_meta(layers), shardwise.fully_shard)

    def load() -> nn.Module:
        load_safetensors(model, directory / "transformers")
        return model

    return load


def _load_dcp(directory: Path, layers: int) -> Callable[[], nn.Module]:
    import torch.distributed.checkpoint as dcp

    model = _shard(_on_meta(layers), torch_fully_shard)

    def load() -> nn.Module:
        model.to_empty(device="cpu")
        dcp.load({"model": model.state_dict()}, checkpoint_id=directory / "dcp")
        return model

    return load


def _load_transformers(directory: Path, layers: int) -> Callable[[], nn.Module]:
    from transformers import LlamaForCausalLM

    return lambda: _shard(LlamaForCausalLM.from_pretrained(directory / "transformers"), torch_fully_shard)


def _save_ours(directory: Path, layers: int) -> Callable[[], object]:
    import shardwise
    from shardwise.checkpoint.safetensors import save_safetensors

    model = _shard(_make_model(layers), shardwise.fully_shard)
    return lambda: save_safetensors(model, directory / "saved by shardwise")


def _save_dcp(directory: Path, layers: int) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp

    model = _shard(_make_model(layers), torch_fully_shard)
    return lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "saved by DCP")


def _save_transformers(directory: Path, layers: int) -> Callable[[], object]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = _shard(_make_model(layers), torch_fully_shard)

    def save() -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            model.save_pretrained(directory / "saved by transformers", state_dict=state)

    return save


# -- What the kernel counts


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise BenchError(f"this kernel does not tell {name}")


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _evict(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
