"""Ways to train, as data, and the one body that trains them on a GPU as on the CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import CPUOffloadPolicy, FSDPCommContext, MixedPrecisionPolicy
from shardwise.core.comm import Comm

from ..models import MLP, ConvNet, Transformer, inputs_for, wrap

DEVICE = os.environ.get("SHARDWISE_REHEARSE") or "cuda"
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "simulated": "cpu:gloo,simulated:simulated", "cpu": "gloo"}
"""Of process groups for the host and for the device under test."""
ALONE = {"cuda": "nccl", "simulated": "simulated_alone", "cpu": "gloo"}
"""Of process groups as most programs make them, for the device alone."""
BF16 = torch.bfloat16

Results = dict[str, torch.Tensor]
Prepare = Callable[[Any], None]


def nothing(model: Any, is_last: bool = True) -> None:
    """Leave everything at its default."""


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        model: makes it, unwrapped, on the CPU.
        axes: of the mesh, where there are enough ranks for them.
        options: of `fully_shard`.
        wrapping: applies the verb to the model's units.
        prepare: what the user sets on the wrapped model.
        before: what the user does before each micro-batch, told whether it is the step's last.
        after: what the user does after each optimizer step.
        micro_batches: in a step.
        dtype: that the model computes in.
    """

    model: Callable[[], nn.Module] = Transformer
    axes: tuple[int, ...] = (2,)
    options: dict[str, Any] = field(default_factory=dict)
    wrapping: Callable[..., nn.Module] = wrap
    prepare: Prepare = nothing
    before: Callable[[Any, bool], None] = nothing
    after: Prepare = nothing
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32


# -- The body


def set_up(device: str) -> None:
    """Use the first GPU, whatever the rank, and as many bits as the CPU does."""
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(0)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def is_on(device: str, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all of ``tensors``, of which there are some, lie on devices of that type."""
    return {tensor.device.type for tensor in tensors} == {device}


def use_device_alone() -> None:
    """Replace the process group by one that communicates nothing that lies on the host."""
    store = dist.PrefixStore("alone", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(ALONE[DEVICE], store=store, rank=rank, world_size=size)


def mesh_on(device: str, axes: tuple[int, ...]) -> DeviceMesh:
    """A mesh of ``axes`` as far as there are ranks: every axis is of one rank in a world of one."""
    set_up(device)
    size = dist.get_world_size()
    names = ("replicate", "shard")[-len(axes) :]
    return init_device_mesh(device, tuple(min(axis, size) for axis in axes), mesh_dim_names=names)


def build(device: str, case: Case) -> Any:
    """The wrapped model of a case."""
    torch.manual_seed(1)
    model = case.wrapping(case.model(), shardwise.fully_shard, mesh=mesh_on(device, case.axes), **case.options)
    case.prepare(model)
    return model


def train(device: str, case: Case, steps: int = 2) -> Results:
    """Losses, gradient norms, and this rank's parts of the last gradients and of the parameters; all on the CPU.

    Inputs come from the CPU, which the root moves.
    """
    model = build(device, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: Results = {}
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(case.micro_batches):
            case.before(model, part == case.micro_batches - 1)
            x = inputs_for(model, seed=100 * step + 10 * part + dist.get_rank())
            loss = model(x).float().square().mean()
            loss.backward()
            results[f"loss {step}.{part}"] = loss.detach()
        results[f"norm {step}"] = shardwise.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        case.after(model)
    for name, parameter in model.named_parameters():
        results[name] = parameter.to_local()
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad.to_local()
    results |= dict(model.named_buffers())
    return {name: value.detach().float().cpu() for name, value in results.items()}


def give_ranks_the_same(monkeypatch: pytest.MonkeyPatch, pause: Callable[[], None] = lambda: None) -> None:
    """Collectives are copies on the current stream, as if all ranks had this one's data; they ``pause`` around them."""
    Tensors = Sequence[torch.Tensor]  # noqa: N806

    def all_gather(comm: Comm, outputs: Tensors, inputs: Tensors, purpose: str = "") -> list[Any]:
        pause()
        for output, input_ in zip(outputs, inputs, strict=True):
            for part in output.chunk(comm.size):
                part.copy_(input_)
        pause()
        return []

    def reduce_scatter(comm: Comm, outputs: Tensors, inputs: Tensors, *, mean: bool, purpose: str = "") -> list[Any]:
        pause()
        for output, input_ in zip(outputs, inputs, strict=True):
            torch.sum(input_.view(comm.size, -1), 0, out=output).div_(comm.size if mean else 1)
        pause()
        return []

    def all_reduce(comm: Comm, tensor: torch.Tensor, *, mean: bool) -> list[Any]:
        pause()
        # The mean of the same values would be those, and nobody would miss it.
        tensor.mul_(0.75)
        return []

    for function in (all_gather, reduce_scatter, all_reduce):
        monkeypatch.setattr(Comm, function.__name__, function)


def assert_same(ours: Results, truth: Results, dtype: torch.dtype = torch.float32) -> None:
    """Both trained to the same, as closely as ``dtype`` can tell."""
    assert ours.keys() == truth.keys()
    for name, expected in truth.items():
        tolerance: dict[str, Any] = {}
        if dtype is not torch.float32 and expected.numel():
            # An element is as wrong as the terms of its sum, which may be much larger than it is. Twice the error that
            # bfloat16 makes here on the CPU.
            tolerance = {"rtol": 3e-2, "atol": 3e-2 * float(expected.abs().max())}
        torch.testing.assert_close(ours[name], expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def compare(case: Case) -> None:
    """The device under test trains a case as the CPU does."""
    assert_same(train(DEVICE, case), train("cpu", case), case.dtype)


# -- Strategies, schedules and micro-batches


def prefetch(count: int, model: Any) -> None:
    """Each layer asks for the ``count`` that come next, in both directions."""
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + count])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - count) : index][::-1])


def by_sync(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def by_last_backward(model: Any, is_last: bool) -> None:
    model.set_is_last_backward(is_last)


def keeping_parameters(model: Any, is_last: bool) -> None:
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


def partial_sums(model: Any, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


AXES = {"ddp": (2,), "zero1": (2,), "zero2": (2,), "zero3": (2,), "hsdp": (2, 1), "hsdp_sharded": (1, 2)}
PREFETCHES: dict[str, Prepare] = {
    "default": nothing,
    "one": functools.partial(prefetch, 1),
    "two": functools.partial(prefetch, 2),
}
ACCUMULATIONS: dict[str, Case] = {
    "none": Case(),
    "by_sync": Case(before=by_sync, micro_batches=2),
    "by_last_backward": Case(before=by_last_backward, micro_batches=2),
    "keeping_parameters": Case(before=keeping_parameters, micro_batches=2),
    "partial_sums": Case(before=partial_sums, micro_batches=3),
}
PRECISIONS: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
}


def preset_case(preset: str, prefetching: str, accumulation: str, precision: str) -> Case:
    """One point of the grid."""
    policy = PRECISIONS[precision]
    options = {"placements": preset.removesuffix("_sharded"), "mp_policy": policy}
    dtype = policy.param_dtype or torch.float32
    pattern = ACCUMULATIONS[accumulation]
    return replace(pattern, axes=AXES[preset], options=options, prepare=PREFETCHES[prefetching], dtype=dtype)


# -- Features


class Checkpointed(Transformer):
    """Every layer under activation checkpointing."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class PartlyUsed(Transformer):
    """Of two parameters of the root one is used by the last rank only, and the other by none."""

    def __init__(self) -> None:
        super().__init__()
        self.by_last, self.by_none = nn.Parameter(torch.full((4,), 0.3)), nn.Parameter(torch.ones(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output = super().forward(tokens)
        return output * self.by_last.sum() if dist.get_rank() == dist.get_world_size() - 1 else output


def frozen() -> nn.Module:
    """A transformer of which only the norms and the head are trained."""
    model = Transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "head" in name)
    return model


def wrap_without_root(model: nn.Module, verb: Callable[..., Any], **options: Any) -> nn.Module:
    """Each part is a unit, and a shared context joins them."""
    context = FSDPCommContext(options["mesh"].device_type)
    for name, part in [*model.named_children(), *model.get_submodule("layers").named_children()]:
        if not isinstance(part, nn.ModuleList):
            verb(part, comm_ctx=context, module_fqn=name, **options)
    return model


def wrap_with_layers_offloaded(model: nn.Module, verb: Callable[..., Any], **options: Any) -> nn.Module:
    """Each layer's shards are on the host, and the root's where it computes."""
    for layer in model.layers:  # type: ignore[union-attr]
        verb(layer, offload_policy=CPUOffloadPolicy(), **options)
    verb(model, **options)
    return model


def units(model: Any) -> list[Any]:
    """The layers and the root."""
    return [*model.layers, model]


def device_of(model: Any) -> str:
    """Where a wrapped model computes."""
    kind: str = next(model.parameters()).device_mesh.device_type
    return kind


def halve_in_stream(model: Any) -> None:
    """An all-reduce hook that works on a stream of its own."""
    device = device_of(model)
    stream = torch.get_device_module(device).Stream() if device != "cpu" else None
    for unit in units(model):
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)


def let_prefetch_early(model: Any) -> None:
    """An event after the optimizer, and computation after the event that the next gathers need not wait for."""
    if device_of(model) == "cuda":
        event = torch.Event(device="cuda")
        event.record()
        model.set_post_optim_event(event)
    torch.full((2**16,), 2.0, device=device_of(model)).mul_(2).sum()


def unshard_early(model: Any, is_last: bool) -> None:
    """Start all gathers before forward and wait for one of them."""
    handles = [layer.unshard(async_op=True) for layer in model.layers]
    handles[0].wait()
    weight = model.layers[0].up.weight
    assert not hasattr(weight, "to_local")
    assert weight.device.type == device_of(model)
    assert weight.shape == (64, 16)


class PlannedError(Exception):
    """What the cases raise."""


def fail_before(hook: str, model: Any, is_last: bool) -> None:
    """One iteration fails in the hook of a layer, and the user resets."""

    def fail(*_: Any) -> None:
        raise PlannedError

    handle = getattr(model.layers[1], hook)(fail)
    with pytest.raises(PlannedError):
        model(inputs_for(model, 99)).float().square().mean().backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()


def compile_layers(model: Any) -> None:
    """Compile each wrapped layer, on a GPU to kernels."""
    for layer in model.layers:
        layer.compile(backend="inductor" if device_of(model) == "cuda" else "eager")


def on_each_unit(method: str, *arguments: Any) -> Prepare:
    """Call a method of every unit."""

    def prepare(model: Any) -> None:
        for unit in units(model):
            getattr(unit, method)(*arguments)

    return prepare


OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
MIXED: dict[str, Any] = {"mp_policy": PRECISIONS["bf16"]}

FEATURES: dict[str, Case] = {
    "uneven_shards": Case(MLP),
    "uneven_shards_in_bf16": Case(MLP, options=MIXED, dtype=BF16),
    "empty_shards": Case(functools.partial(MLP, (7, 2, 5, 1))),
    "buffers": Case(ConvNet),
    "tied": Case(functools.partial(Transformer, tied=True)),
    "frozen": Case(frozen),
    "unused": Case(PartlyUsed),
    "unused_in_replicas": Case(PartlyUsed, axes=(2, 1), micro_batches=2),
    "unused_in_partial_sums": Case(PartlyUsed, axes=(2, 1), before=partial_sums, micro_batches=2),
    "unused_and_offloaded": Case(PartlyUsed, options=OFFLOAD),
    "reentrant_checkpointing": Case(functools.partial(Checkpointed, True)),
    "checkpointing": Case(functools.partial(Checkpointed, False)),
    "never_resharded": Case(options={"reshard_after_forward": False}),
    "offloaded": Case(options=OFFLOAD),
    "offloaded_in_bf16": Case(options=OFFLOAD | MIXED, dtype=BF16),
    "offloaded_micro_batches": Case(options=OFFLOAD, before=by_last_backward, micro_batches=3),
    "offloaded_unpinned": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "offloaded_in_part": Case(wrapping=wrap_with_layers_offloaded),
    "offloaded_frozen": Case(frozen, options=OFFLOAD),
    "without_root": Case(wrapping=wrap_without_root),
    "three_reductions": Case(prepare=lambda model: model.set_reduce_scatter_max_input_buffers(3)),
    "separate_group": Case(prepare=lambda model: model.set_separate_reduce_scatter_group()),
    "hook_in_stream": Case(prepare=halve_in_stream),
    "divide_factor": Case(prepare=on_each_unit("set_gradient_divide_factor", 3.0)),
    "sums": Case(prepare=on_each_unit("set_force_sum_reduction_for_comms", True)),
    "process_group_memory": Case(prepare=on_each_unit("set_allocate_memory_from_process_group_for_comm", True)),
    "optimizer_event": Case(after=let_prefetch_early),
    "optimizer_event_in_bf16": Case(options=MIXED, after=let_prefetch_early, dtype=BF16),
    "unsharded_early": Case(before=unshard_early),
    "exception_in_forward": Case(before=functools.partial(fail_before, "register_forward_hook")),
    "exception_in_backward": Case(before=functools.partial(fail_before, "register_full_backward_hook")),
}
