"""Collectives and bytes of what people do with `fully_shard`, beside torch FSDP2's, case by case.

The cases are data: `tests/unit/test_counts.py` asserts on the same table what `python -m bench --only cases` prints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import shardwise

from .contenders import FAKE_GROUPS_REDUCE, FSDP2, MIXED_PRECISION
from .counts import COUNTED, OperationCounter, bytes_to_send, flag_bytes
from .model import Shape, Transformer, loss_of, make_tokens
from .ranks import run_on_fake
from .report import NONE, Table, mebibytes, number

SHAPE = Shape(blocks=4, width=512, batch=1, length=16)
LIMIT = 300.0
WARM_UP = 2
"""Runs before the one that is counted: the order of units is known by then, and so is what stays gathered."""
MICRO_BATCHES = 3


@dataclass(frozen=True)
class Engine:
    """What is compared.

    Args:
        name: for the table.
        fully_shard: the verb.
        clip_grad_norm_: what its users clip with.
    """

    name: str
    fully_shard: Callable[..., Any]
    clip_grad_norm_: Callable[..., Tensor]


OURS = Engine("shardwise", shardwise.fully_shard, shardwise.clip_grad_norm_)
THEIRS = Engine(FSDP2, torch_fully_shard, torch.nn.utils.clip_grad_norm_)


# -- Models


def plain(shape: Shape) -> Transformer:
    """The model of the other measurements."""
    return Transformer(shape)


def tied(shape: Shape) -> Transformer:
    """The head is the embedding."""
    model = Transformer(shape)
    model.head.weight = model.embed.weight
    return model


def with_unused_parameters(shape: Shape) -> Transformer:
    """Each block has a matrix that its forward does not touch."""
    model = Transformer(shape)
    for block in model.blocks:
        block.spare = nn.Parameter(torch.zeros(shape.width, shape.width))
    return model


def with_repeated_blocks(shape: Shape) -> Transformer:
    """The blocks run twice, one after the other and then all again."""
    model = Transformer(shape)
    model.blocks.extend(list(model.blocks))
    return model


class Skipping(Transformer):
    """Its second block does not run while ``skips`` is set."""

    skips = False

    def forward(self, tokens: Tensor) -> Tensor:
        """As the model that it is made from."""
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index != 1 or not self.skips:
                x = block(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen linear layer and a trainable product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As the layer, for any number of leading dims."""
        return self.base(x) + self.up(self.down(x))


def with_adapters(shape: Shape) -> Transformer:
    """LoRA: everything frozen but the adapters of queries and values."""
    model = Transformer(shape).requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = Adapted(block.query), Adapted(block.value)
    return model


class Recomputed(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """As the block."""
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


def recomputing(shape: Shape, use_reentrant: bool) -> Transformer:
    """Every block is checkpointed."""
    model = Transformer(shape)
    model.blocks = nn.ModuleList(Recomputed(block, use_reentrant) for block in model.blocks)
    return model


# -- Ways to wrap


Verb = Callable[..., Any]
Options = Mapping[str, Any]


def each_block(verb: Verb, model: Transformer, mesh: DeviceMesh, options: Options) -> None:
    """A unit for every block, and the root with the rest."""
    for block in model.blocks.children():
        verb(block, mesh=mesh, **options)
    verb(model, mesh=mesh, **options)


def inside_checkpoints(verb: Verb, model: Transformer, mesh: DeviceMesh, options: Options) -> None:
    """Units that are called again by the checkpoint around them."""
    for recomputed in model.blocks.children():
        verb(recomputed.get_submodule("block"), mesh=mesh, **options)
    verb(model, mesh=mesh, **options)


def pairs_of_blocks(verb: Verb, model: Transformer, mesh: DeviceMesh, options: Options) -> None:
    """Two neighbours are one unit, and so are the last norm and the head."""
    blocks = list(model.blocks)
    for index in range(0, len(blocks), 2):
        verb(blocks[index : index + 2], mesh=mesh, **options)
    verb([model.norm, model.head], mesh=mesh, **options)
    verb(model, mesh=mesh, **options)


def ignoring_queries(verb: Verb, model: Transformer, mesh: DeviceMesh, options: Options) -> None:
    """A matrix and a vector of each block stay whole."""
    ignored = {parameter for block in model.blocks for parameter in (block.query.weight, block.norm_attention.weight)}
    each_block(verb, model, mesh, {**options, "ignored_params": ignored})


def reducing_unused(verb: Verb, model: Transformer, mesh: DeviceMesh, options: Options) -> None:
    """Gradients that do not exist are reduced as zeros, so that other ranks may have them."""
    each_block(verb, model, mesh, options)
    model.set_reduce_scatter_unused_params(True)


def beside_tensor_parallelism(verb: Verb, model: Transformer, mesh: DeviceMesh, options: Options) -> None:
    """The blocks' matrices are cut over the second axis, and their shards over the first."""
    columns, rows = ("query", "key", "value", "gate", "up"), ("out", "down")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    for block in model.blocks.children():
        parallelize_module(block, mesh["tensor"], plan)
    each_block(verb, model, mesh["shard"], options)


def beside_sequence_parallelism(verb: Verb, model: Transformer, mesh: DeviceMesh, options: Options) -> None:
    """Every parameter is a tensor-parallel one, and between the matrices the second axis cuts the sequence."""
    block_plan: dict[str, ParallelStyle] = {
        name: ColwiseParallel(input_layouts=Shard(1)) for name in ("query", "key", "value", "gate", "up")
    }
    block_plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")}
    block_plan |= {name: SequenceParallel() for name in ("norm_attention", "norm_feed_forward")}
    root_plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for block in model.blocks.children():
        parallelize_module(block, mesh["tensor"], block_plan)
    parallelize_module(model, mesh["tensor"], root_plan)
    each_block(verb, model, mesh["shard"], options)


def last_dim(parameter: nn.Parameter) -> Shard:
    """Matrices are cut on their columns."""
    return Shard(parameter.ndim - 1)


# -- What is run


def training_pass(engine: Engine, model: Any, tokens: Tensor) -> None:
    """Forward and backward."""
    loss_of(model, tokens).backward()


def clipped(engine: Engine, model: Any, tokens: Tensor) -> None:
    """Forward, backward, and the norm of the gradients."""
    training_pass(engine, model, tokens)
    engine.clip_grad_norm_(model.parameters(), 1.0)


def evaluation(engine: Engine, model: Any, tokens: Tensor) -> None:
    """Forward alone."""
    with torch.no_grad():
        loss_of(model, tokens)


def evaluation_then_training(engine: Engine, model: Any, tokens: Tensor) -> None:
    """A look at the loss before every step."""
    evaluation(engine, model, tokens)
    training_pass(engine, model, tokens)


def with_skips(engine: Engine, model: Any, tokens: Tensor) -> None:
    """A pass through all blocks and one without the second."""
    for skips in (False, True):
        model.skips = skips
        evaluation(engine, model, tokens)


def two_forwards(engine: Engine, model: Any, tokens: Tensor) -> None:
    """One backward of two losses."""
    (loss_of(model, tokens) + loss_of(model, tokens)).backward()


def micro_batches(engine: Engine, model: Any, tokens: Tensor, controls: Iterable[str]) -> None:
    """Several backwards; ``controls`` are setters that get False before all but the last."""
    for part in range(MICRO_BATCHES):
        for control in controls:
            getattr(model, control)(part == MICRO_BATCHES - 1)
        training_pass(engine, model, tokens)


# -- The cases


@dataclass(frozen=True)
class Case:
    """One way to use an engine.

    Args:
        name: for the table.
        axes: of the mesh, by name: ``shard``, and ``replicate`` before it or ``tensor`` after it.
        options: of `fully_shard`, for every unit.
        make: the model.
        wrap: how it becomes units.
        run: what is counted.
        reductions: how often each gradient is reduced over ``shard`` in a run.
        all_reduces: the same over ``replicate``.
        missing: what this torch lacks of what the case needs, in words; nothing if it can be counted.
    """

    name: str
    axes: Mapping[str, int] = field(default_factory=lambda: {"shard": 8})
    options: Options = field(default_factory=dict)
    make: Callable[[Shape], Transformer] = plain
    wrap: Callable[[Verb, Transformer, DeviceMesh, Options], None] = each_block
    run: Callable[[Engine, Any, Tensor], None] = training_pass
    reductions: int = 1
    all_reduces: int = 1
    missing: str = ""

    @property
    def ranks(self) -> int:
        """Processes of the mesh."""
        return math.prod(self.axes.values())

    def mesh(self) -> DeviceMesh:
        """On the default process group, which must have as many ranks."""
        return init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))

    def sent_flags(self, flags: int) -> float:
        """Bytes that shardwise has to send for flags of as many bytes, one fp32 number per trainable parameter.

        With each reduction goes whether a rank had a gradient at all: else ranks would disagree whether ``grad`` is
        None or zeros.
        """
        ranks, replicas = self.axes["shard"], self.axes.get("replicate", 1)
        reduced = bytes_to_send("reductions", flags * ranks, ranks)
        all_reduced = bytes_to_send("all-reduces", flags, replicas)
        return self.reductions * reduced + self.all_reduces * all_reduced


HSDP = {"replicate": 2, "shard": 2}
DP_TP = {"shard": 2, "tensor": 2}
RESHARD = {"reshard_after_forward": True}
SYNC, LAST, RESHARDS = "set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_backward"
UNUSED = "set_reduce_scatter_unused_params"
NO_UNUSED = "" if hasattr(FSDPModule, UNUSED) else f"whose FSDP2 has no {UNUSED}"
NO_RESULTS = "" if FAKE_GROUPS_REDUCE else "whose fake groups leave results as they find the memory"
"""Of use where what is sent depends on what was received."""
EACH_REDUCED = functools.partial(micro_batches, controls=())
LAST_REDUCED = functools.partial(micro_batches, controls=(SYNC,))
LAST_ANNOUNCED = functools.partial(micro_batches, controls=(SYNC, LAST))
KEEPING = functools.partial(micro_batches, controls=(SYNC, RESHARDS))
PARTIAL_SUMS = functools.partial(micro_batches, controls=("set_requires_all_reduce",))
REENTRANT, NOT_REENTRANT = (functools.partial(recomputing, use_reentrant=flag) for flag in (True, False))

CASES = (
    Case("reshard_after_forward=None"),
    Case("reshard_after_forward=True", options=RESHARD),
    Case("reshard_after_forward=False", options={"reshard_after_forward": False}),
    Case("reshard_after_forward=2 of 4", {"shard": 4}, {"reshard_after_forward": 2}),
    Case("sizes that do not divide: 7 ranks", {"shard": 7}),
    Case("shard_placement_fn: Shard(1)", options={"shard_placement_fn": last_dim}),
    Case("ignored_params", wrap=ignoring_queries),
    Case("lists of modules as units", wrap=pairs_of_blocks),
    Case("bf16 parameters, fp32 reductions", options={"mp_policy": MIXED_PRECISION}),
    Case("CPUOffloadPolicy", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    Case("micro-batches: each reduced", run=EACH_REDUCED, reductions=MICRO_BATCHES),
    Case("micro-batches: last reduced", run=LAST_REDUCED),
    Case("micro-batches: last reduced, set_is_last_backward", run=LAST_ANNOUNCED),
    Case("micro-batches: set_reshard_after_backward(False)", run=KEEPING),
    Case("micro-batches: nothing resharded", options={"reshard_after_forward": False}, run=KEEPING),
    Case("HSDP", HSDP),
    Case("HSDP: last micro-batch reduced", HSDP, run=LAST_REDUCED),
    Case("HSDP: set_requires_all_reduce(False)", HSDP, run=PARTIAL_SUMS, reductions=MICRO_BATCHES),
    Case("HSDP: clip_grad_norm_", HSDP, run=clipped),
    Case("dp x tp", DP_TP, wrap=beside_tensor_parallelism),
    Case("dp x tp: last micro-batch reduced", DP_TP, wrap=beside_tensor_parallelism, run=LAST_REDUCED),
    Case("dp x tp: sequence parallel, clip_grad_norm_", DP_TP, wrap=beside_sequence_parallelism, run=clipped),
    Case("frozen base with adapters (LoRA)", make=with_adapters),
    Case("checkpoint inside units", make=NOT_REENTRANT),
    Case("checkpoint inside units, reentrant", make=REENTRANT),
    Case("checkpoint around units", make=NOT_REENTRANT, wrap=inside_checkpoints),
    Case("checkpoint around units, reentrant", make=REENTRANT, wrap=inside_checkpoints),
    Case("tied embedding and head", make=tied),
    Case("unused parameters", make=with_unused_parameters, missing=NO_RESULTS),
    Case(f"unused parameters: {UNUSED}", make=with_unused_parameters, wrap=reducing_unused, missing=NO_UNUSED),
    Case("blocks that run twice in a forward", make=with_repeated_blocks),
    Case("two forwards before a backward", run=two_forwards),
    Case("clip_grad_norm_", run=clipped),
    Case("evaluation", run=evaluation, reductions=0),
    Case("evaluation, then training", run=evaluation_then_training),
    Case("evaluations, one skips a block", options=RESHARD, make=Skipping, run=with_skips, reductions=0),
)


@dataclass(frozen=True)
class Traffic:
    """What one run came to.

    Args:
        calls: collectives by kind.
        sent: bytes that a rank has to send, by kind.
        flags: how many bytes of these are shardwise's flags, by `Case.sent_flags`.
    """

    calls: Mapping[str, int]
    sent: Mapping[str, float]
    flags: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of all kinds."""
        return sum(self.sent.values())


def measure_case(case: Case, engine: Engine, shape: Shape = SHAPE) -> Traffic:
    """Count the last of some runs of ``case``, each with an optimizer step, on the default process group."""
    torch.manual_seed(1)
    model = case.make(shape)
    case.wrap(engine.fully_shard, model, case.mesh(), case.options)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, tokens = torch.optim.SGD(trainable, lr=1e-3), make_tokens(shape)
    counter = OperationCounter()
    for run in range(WARM_UP + 1):
        with counter if run == WARM_UP else nullcontext():
            case.run(engine, model, tokens)
            optimizer.step()
            optimizer.zero_grad()
    flags = case.sent_flags(flag_bytes(trainable)) if engine is OURS else 0.0
    return Traffic(dict(counter.counts), dict(counter.bytes_by_kind), flags)


def measure(ranks: int) -> dict[str, tuple[Traffic, Traffic]]:
    """On one rank of so many: both engines' traffic in each case that needs these."""
    cases = [case for case in CASES if case.ranks == ranks and not case.missing]
    return {case.name: (measure_case(case, OURS), measure_case(case, THEIRS)) for case in cases}


def case_tables(quick: bool) -> list[Table]:
    """One table with a row for each case."""
    found: dict[str, tuple[Traffic, Traffic]] = {}
    for ranks in sorted({case.ranks for case in CASES}):
        found |= run_on_fake(ranks, LIMIT, measure, ranks)
    kinds = [kind for kind in COUNTED if any(kind in traffic.calls for pair in found.values() for traffic in pair)]
    columns = ["case", *kinds, "MiB to send", f"{FSDP2}: MiB", "ratio", "bytes more", "of them flags"]
    table = Table(f"{OURS.name} / {FSDP2} on fake groups: {SHAPE}", columns)
    table.rows = [_row(case.name, *found[case.name], kinds) for case in CASES if not case.missing]
    left_out = [case for case in CASES if case.missing]
    table.notes = (
        f"collectives: {OURS.name}'s / {FSDP2}'s; of one run with its optimizer step, after {WARM_UP} others.",
        "8 ranks where the case does not say, 2 x 2 for HSDP and dp x tp; counted on rank 0.",
        f"micro-batches: {MICRO_BATCHES} of them. clip_grad_norm_: {OURS.name}'s own and torch's.",
        "MiB to send: per rank, of an algorithm without waste, over the group of each collective.",
        f"bytes more: {OURS.name}'s minus {FSDP2}'s.",
        f"flags: with each gradient {OURS.name} sends one number, so that ranks agree whether any had it.",
        *(f"left out with torch {torch.__version__}, {case.missing}: {case.name}" for case in left_out),
    )
    return [table]


def _row(name: str, ours: Traffic, theirs: Traffic, kinds: list[str]) -> list[str]:
    calls = [f"{ours.calls.get(kind, 0)} / {theirs.calls.get(kind, 0)}" for kind in kinds]
    quotient = number(ours.bytes / theirs.bytes, 6) if theirs.bytes else NONE
    more = [number(ours.bytes - theirs.bytes, 0), number(ours.flags, 0)]
    return [name, *calls, mebibytes(ours.bytes, 3), mebibytes(theirs.bytes, 3), quotient, *more]
