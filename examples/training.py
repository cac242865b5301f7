"""The training loop of ``train_lm.py``: build, shard, train, validate, and say what it took."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW

import shardwise
from corpus import Corpus
from options import SIZES, Options
from report import HeldBytes, ProgressDisplay, held_bytes, held_table, unsharded_bytes
from shardwise import MixedPrecisionPolicy, Placements, clip_grad_norm_, fully_shard
from shardwise.optim import flat
from transformer import Transformer, TransformerConfig

PRESETS = (Placements.ddp, Placements.zero1, Placements.zero2, Placements.zero3)
WEIGHT_DECAY = 0.1
LARGEST_NORM = 1.0
KEPT_CHECKPOINTS = 2
VALIDATION_WINDOWS = 384
REPORT_EVERY = 5
NO_TOKEN = -100
SAMPLE_BYTES = 300
SAMPLE_PROMPT = b"\n\nclass "
SAMPLE_TEMPERATURE = 0.7


def train(options: Options, corpus: Corpus, threads: int) -> None:
    """Train as one rank of the process group that torchrun's environment variables describe."""
    torch.set_num_threads(threads)
    device = _device()
    # The limit is for a rank that hangs; one that fails closes its connections, which the others see at once.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    console = Console(highlight=False)
    is_first = dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    model = build_model(options, mesh)
    optimizer = build_optimizer(model, options.lr)
    first_step = 0
    if options.resume:
        first_step = _resume(options, model, optimizer)
    parameter_count = sum(p.numel() for p in model.parameters())
    if is_first:
        console.print(
            f"{parameter_count:,} parameters on {mesh.size()} x {device.type}, "
            f"ZeRO-{options.zero}; {len(corpus.training):,} bytes of {corpus.files} files"
            + (f"; from step {first_step}" if first_step else ""),
            soft_wrap=True,
        )
    log: dict[str, Any] = {"first_step": first_step, "losses": [], "gradient_norms": []}
    with ProgressDisplay(
        console, is_first, first_step, options.steps, options.batch_size * options.sequence_length
    ) as display:
        train_steps(options, corpus, model, optimizer, device, display, log)
    shardwise.wait()  # for the last checkpoint
    held, unsharded = held_bytes(model, optimizer), unsharded_bytes(model, optimizer)
    optimizer.zero_grad()
    log["validation_loss"] = validate(options, corpus, model, device)
    _report(options, corpus, console, log, held, unsharded, parameter_count)
    if options.sample:
        text = generate(model, options, device)
        if is_first:
            console.print(Panel(_printable(text), title=f"a sample of {SAMPLE_BYTES} bytes"))
    dist.destroy_process_group()


def _device() -> torch.device:
    """This rank's GPU where the machine has one for every local rank, else the CPU."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_world:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def build_model(options: Options, mesh: DeviceMesh) -> Transformer:
    """The sharded model: each block is one unit, the rest is the root's.

    It is made on the meta device, sharded, and materialized one tensor at a time, so no rank ever holds more than its
    shards and one unit. The weights are those that one process alone would draw, at any number of ranks.
    """
    layers, width = SIZES[options.size]
    with shardwise.init_on_meta():
        model = Transformer(TransformerConfig(layers, width, options.tied))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shared = {
        "mesh": mesh,
        "placements": PRESETS[options.zero],
        "mp_policy": bf16 if options.bf16 else MixedPrecisionPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **shared)
    fully_shard(model, **shared)
    return shardwise.materialize(model, seed=options.seed)


def build_optimizer(model: nn.Module, lr: float) -> AdamW:
    """AdamW that decays matrices only and steps a unit's shards as one tensor."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return flat(AdamW, groups, lr=lr, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a twentieth of the steps, then half a cosine down to a twentieth of ``peak``."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_steps(
    options: Options,
    corpus: Corpus,
    model: Transformer,
    optimizer: AdamW,
    device: torch.device,
    display: ProgressDisplay,
    log: dict[str, Any],
) -> None:
    """Run the steps from ``log["first_step"]`` on, with checkpoints on the way; extends the log's lists."""
    pending: list[Tensor] = []
    for step in range(log["first_step"], options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        optimizer.zero_grad()
        loss = _accumulate(options, corpus, model, step, device)
        norm = clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        pending.append(torch.stack([loss, norm.detach()]))
        done = step + 1
        if done % REPORT_EVERY == 0 or done == options.steps:
            # One collective and one wait for the device per several steps, not per step. The collective adds
            # in an order that depends on how many steps it got; in float64 that does not show.
            numbers = torch.stack(pending).double()
            dist.all_reduce(numbers)
            losses, norms = (numbers / dist.get_world_size()).T.tolist()
            log["losses"] += losses
            log["gradient_norms"] += norms
            pending.clear()
            display.update(done, losses[-1])
        is_due = options.checkpoint_every and done % options.checkpoint_every == 0
        if is_due or (options.checkpoint_every and done == options.steps):
            # Written beside the next steps, and numbered in the order of writing: a new run in the same folder never
            # replaces an older one's.
            shardwise.save(
                options.run_dir,
                model=model,
                optimizer=optimizer,
                extra={"step": done},
                step=done,
                keep=KEPT_CHECKPOINTS,
                async_=True,
            )


def _accumulate(options: Options, corpus: Corpus, model: Transformer, step: int, device: torch.device) -> Tensor:
    """Forward and backward over this rank's micro-batches; returns their mean loss, in nats per byte."""
    tokens = corpus.batch(options.seed, step, options.batch_size, options.sequence_length)
    own = torch.from_numpy(tokens).chunk(dist.get_world_size())[dist.get_rank()].to(device)
    total = torch.zeros((), device=device)
    for index, rows in enumerate(own.chunk(options.micro_batches)):
        is_last = index == options.micro_batches - 1
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        loss = _loss(model, rows) / options.micro_batches
        loss.backward()
        total += loss.detach()
    return total


def _loss(model: Transformer, rows: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(rows[:, :-1].clamp(min=0))
    return F.cross_entropy(
        logits.flatten(0, 1).float(), rows[:, 1:].flatten(), ignore_index=NO_TOKEN, reduction=reduction
    )


def _resume(options: Options, model: Transformer, optimizer: AdamW) -> int:
    return int(shardwise.load(options.run_dir, model=model, optimizer=optimizer)["step"])


@torch.no_grad()
def validate(options: Options, corpus: Corpus, model: Transformer, device: torch.device) -> float:
    """Mean loss over windows spread evenly over the held-out files, in nats per byte, on all ranks alike."""
    windows = torch.from_numpy(corpus.validation(VALIDATION_WINDOWS, options.sequence_length))
    world_size = dist.get_world_size()
    # Ranks gather parameters together, so each must run as many forwards as the others: rows without a
    # target fill up the last ones.
    rows = F.pad(windows, (0, 0, 0, -len(windows) % world_size), value=NO_TOKEN)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for own in rows[dist.get_rank() :: world_size].split(math.ceil(options.batch_size / world_size)):
        totals[0] += _loss(model, own.to(device), "sum")
        totals[1] += (own[:, 1:] != NO_TOKEN).sum()
    model.train()
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def _printable(text: bytes) -> Text:
    """``text`` without what would steer a terminal."""
    decoded = text.decode(errors="replace")
    return Text("".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in decoded))


@torch.no_grad()
def generate(model: Transformer, options: Options, device: torch.device) -> bytes:
    """Sample text after a fixed prompt; all ranks run each forward together and draw the same bytes."""
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.tensor([list(SAMPLE_PROMPT)])
    model.eval()
    while tokens.shape[1] < SAMPLE_BYTES:
        logits = model(tokens[:, -options.sequence_length :].to(device))[:, -1].float().cpu()
        probabilities = torch.softmax(logits / SAMPLE_TEMPERATURE, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    model.train()
    return bytes(tokens[0].tolist())


def _report(options: Options, corpus: Corpus, console: Console, log: dict[str, Any], held: HeldBytes,
            unsharded: HeldBytes, parameter_count: int) -> None:  # fmt: skip
    """Print the validation loss and the table of held bytes on rank 0, and write the log there."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, held)
    if dist.get_rank() != 0:
        return
    console.print(
        f"validation loss {log['validation_loss']:.3f} nats per byte on held-out files "
        f"(unigram entropy {corpus.unigram_entropy():.3f}, bigram entropy {corpus.bigram_entropy():.3f})",
        soft_wrap=True,
    )
    console.print(held_table(ranks, unsharded, parameter_count))
    if options.log_json:
        log["held_bytes"] = [asdict(rank) for rank in ranks]
        log["unsharded_bytes"] = asdict(unsharded)
        options.log_json.write_text(json.dumps(log, indent=1))
