"""Stream faults, found without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise import CPUOffloadPolicy, FSDPCommContext, MixedPrecisionPolicy, OffloadPolicy, Placements, fully_shard
from shardwise.core.comm import Comm
from shardwise.core.pending import PendingReductions

from ..models import Transformer, inputs_for
from .schedule import Logged, RecordingDevice, RecordingLane, RecordingTicket, Watched, faults

Mesh = Callable[..., DeviceMesh]


def recorded(
    mesh: DeviceMesh,
    prepare: Callable[[Transformer], None] = lambda model: None,
    micro_batches: int = 1,
    after_update: Callable[[Transformer, RecordingDevice], None] = lambda model, device: None,
    before_batch: Callable[[Transformer, bool], None] = lambda model, is_last: None,
    loss_of: Callable[[Transformer, torch.Tensor, RecordingDevice], torch.Tensor] = lambda _, out, device: out.sum(),
    **options: Any,
) -> list[Logged]:
    """The log of three iterations of a small transformer whose shards are changed between them."""
    device, context = RecordingDevice(), FSDPCommContext("cpu")
    context.use_device(device)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, comm_ctx=context, **options)
    fully_shard(model, mesh=mesh, **options)
    prepare(model)
    parameters = list(model.parameters())
    with Watched(device) as watched:
        for _ in range(3):
            for micro_batch in range(micro_batches):
                model.set_is_last_backward(micro_batch == micro_batches - 1)  # type: ignore[operator]
                before_batch(model, micro_batch == micro_batches - 1)
                loss_of(model, model(inputs_for(model, 0)), device).backward()
            for parameter in parameters:
                with torch.no_grad():
                    parameter.to_local().sub_(parameter.grad.to_local())  # type: ignore[attr-defined, union-attr]
                parameter.grad = None
            after_update(model, device)
        watched.sweep()
    return device.log


def prefetch_two(model: Transformer) -> None:
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])  # type: ignore[operator]
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(0, index - 2) : index])))  # type: ignore[operator]


def keep_three_buffers(model: Transformer) -> None:
    model.set_reduce_scatter_max_input_buffers(3)  # type: ignore[operator]


def keep_unsharded(model: Transformer) -> None:
    model.set_reshard_after_backward(False)  # type: ignore[operator]


def nothing(model: Transformer) -> None:
    pass


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("prepare", [nothing, prefetch_two, keep_three_buffers])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_presets(fake_mesh: Mesh, preset: str, prepare: Any, micro_batches: int, policy: MixedPrecisionPolicy) -> None:
    placements = getattr(Placements, preset)
    log = recorded(fake_mesh(2), prepare, micro_batches, placements=placements, mp_policy=policy)
    assert faults(log) == []
    assert any(entry.kind == "use" and entry.stream for entry in log)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("prepare", [nothing, keep_three_buffers])
@pytest.mark.parametrize("nbytes", [2**15, 2**21])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_small_units_together(
    fake_mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    prepare: Any,
    nbytes: int,
    policy: MixedPrecisionPolicy,
) -> None:
    for room in ("batch", "pending"):
        monkeypatch.setattr(f"shardwise.core.{room}.JOINT_BYTES", nbytes)
    mesh, placements, issued = fake_mesh(2), getattr(Placements, preset), []
    for many in (100, 2):
        monkeypatch.setattr("shardwise.core.batch.MANY", many)
        log = recorded(mesh, prepare, micro_batches=2, placements=placements, mp_policy=policy)
        assert faults(log) == []
        issued.append([entry.name for entry in log if "c10d" in entry.name])
    assert len(issued[1]) < len(issued[0]), "otherwise nothing went together"


class Branches(torch.nn.Module):
    """Two branches, of which one computes on a side stream."""

    def __init__(self, device: RecordingDevice):
        super().__init__()
        self.device = device
        self.branches = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(10)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = self.device
        device.wait(9, device.record(0))
        outputs = []
        for stream, branch in zip((0, 9), self.branches, strict=True):
            device.before_submit()
            device.current, output = stream, x
            for layer in cast(torch.nn.ModuleList, branch):
                output = layer(output)
            outputs.append(output)
        device.before_submit()
        device.current = 0
        device.wait(0, device.record(9))
        return outputs[0] + outputs[1]


@pytest.mark.parametrize(("preset", "gathers"), [("zero2", 20 + 2), ("zero3", 20 + 2 + 1)])
def test_small_units_together_on_two_streams(fake_mesh: Mesh, preset: str, gathers: int) -> None:
    """Each unit is put in its place on the stream that it computes on."""
    device, context, mesh = RecordingDevice(), FSDPCommContext("cpu"), fake_mesh(2)
    context.use_device(device)
    model = Branches(device)
    for layer in (layer for branch in model.branches for layer in cast(Any, branch)):
        fully_shard(layer, mesh=mesh, placements=preset, comm_ctx=context)
    fully_shard(model, mesh=mesh, placements=preset)
    with Watched(device) as watched:
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(2, 8))
                for parameter in model.parameters():
                    parameter.mul_(1)
        watched.sweep()
    assert faults(device.log) == []
    assert sum("allgather" in entry.name for entry in device.log) == gathers, "otherwise nothing went together"


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_resharding(fake_mesh: Mesh, reshard: bool | int) -> None:
    assert faults(recorded(fake_mesh(4), reshard_after_forward=reshard)) == []


@pytest.mark.parametrize("offload", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def test_two_axes(fake_mesh: Mesh, offload: OffloadPolicy) -> None:
    assert faults(recorded(fake_mesh(2, 2), offload_policy=offload, micro_batches=2)) == []


@pytest.mark.parametrize("prepare", [nothing, keep_three_buffers])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_on_their_way_to_the_host(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, prepare: Any, micro_batches: int
) -> None:
    monkeypatch.setattr("shardwise.core.gradient.is_elsewhere", lambda tensor, device: True)
    log = recorded(fake_mesh(2), prepare, micro_batches, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert faults(log) == []
    copies = [entry for entry in log if entry.name.startswith("aten._foreach_copy_") and entry.stream]
    assert copies, "gradients are copied beside the computation"


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_gathers_after_the_optimizers_event(fake_mesh: Mesh, preset: str, policy: MixedPrecisionPolicy) -> None:
    def after_update(model: Transformer, device: RecordingDevice) -> None:
        model.set_post_optim_event(device.record(0))  # type: ignore[operator]
        mark = device.record(0)
        # What is queued before the next forward is not waited for, though its memory is freed.
        (torch.ones(1000) * 2).sum()
        marks.append((mark, device.record(0)))

    marks: list[tuple[int, int]] = []
    placements = getattr(Placements, preset)
    log = recorded(fake_mesh(2), after_update=after_update, placements=placements, mp_policy=policy)
    assert faults(log) == []
    waits = [entry.event for entry in log if entry.kind == "wait" and entry.stream]
    first = [next(event for event in waits if event > mark or event == mark - 1) for mark, _ in marks[:-1]]
    assert all(event < mark for event, (mark, _) in zip(first, marks, strict=False))


@pytest.mark.parametrize("reason", ["", "a write", "a capture"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_the_first_gather_of_backward_runs_beside_the_loss(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, policy: MixedPrecisionPolicy, reason: str
) -> None:
    """Unless there is a reason to wait: what does not wait is in no graph that is captured."""

    def loss_of(model: Transformer, output: torch.Tensor, device: RecordingDevice) -> torch.Tensor:
        monkeypatch.setattr(RecordingLane, "is_captured", reason == "a capture" and len(marks) == 1)
        if reason == "a write":
            with torch.no_grad():
                model.layers[-1].up.weight.to_local().add_(1)  # type: ignore[union-attr, operator]
        marks.append(device.record(0))
        return output.float().square().sum()

    marks: list[int] = []
    log = recorded(fake_mesh(2), loss_of=loss_of, mp_policy=policy)
    assert faults(log) == []
    for iteration, mark in enumerate(marks):
        start = next(i for i, entry in enumerate(log) if entry.kind == "record" and entry.event == mark)
        end = next(i for i in range(start, len(log)) if "allgather" in log[i].name)
        lane = log[end].stream
        waits = [entry.event for entry in log[start:end] if entry.kind == "wait" and entry.stream == lane]
        assert bool(waits) == (reason == "a write" or (reason == "a capture" and iteration == 1))


def keep_storage(model: Transformer) -> None:
    model.set_keep_unsharded_storage(True)  # type: ignore[operator]


@pytest.mark.parametrize("prepare", [nothing, keep_storage, keep_unsharded])
@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_tensors_sent_alone(
    fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, prepare: Any, size: int, policy: MixedPrecisionPolicy
) -> None:
    """Gathers go straight to where parameters are read; on many ranks some are sums over those."""
    monkeypatch.setattr(Comm, "packs", lambda self, chunk_bytes: False)
    monkeypatch.setattr(Comm, "thin_from_bytes", 0)
    assert faults(recorded(fake_mesh(size), prepare, micro_batches=2, mp_policy=policy)) == []


def test_resharding_what_was_gathered_ahead(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(model: Transformer, output: torch.Tensor, device: RecordingDevice) -> torch.Tensor:
        loss = output.sum()
        model.set_reshard_after_backward(True)  # type: ignore[operator]
        loss.backward(retain_graph=True)
        model.set_reshard_after_backward(False)  # type: ignore[operator]
        loss.backward(retain_graph=True)
        # Of what this backward kept, forward keeps a part.
        return cast(torch.Tensor, model(inputs_for(model, 0))).sum()

    monkeypatch.setattr(Comm, "packs", lambda self, chunk_bytes: False)
    assert faults(recorded(fake_mesh(4), loss_of=loss_of, reshard_after_forward=2)) == []


@pytest.mark.parametrize("waits", [True, False])
def test_two_gathers_that_run_ahead(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """One after the other in the same memory, where the lane waits for nothing else in between; also that the checker
    sees memory that it takes too early."""
    device, context = RecordingDevice(), FSDPCommContext("cpu")
    context.use_device(device)
    model = fully_shard(torch.nn.Linear(8, 8), mesh=fake_mesh(2), comm_ctx=context, reshard_after_forward=True)
    if not waits:
        monkeypatch.setattr(RecordingLane, "wait_for_computation", lambda self: None)
    with Watched(device) as watched:
        loss = model(torch.ones(2, 8, requires_grad=True)).square().sum()
        model.set_is_last_backward(False)
        loss.backward(retain_graph=True)
        model.set_is_last_backward(True)
        loss.backward()
        watched.sweep()
    found = faults(device.log)
    assert any("freed while in use" in fault for fault in found) != waits, found


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_sums_kept_for_a_later_all_reduce(fake_mesh: Mesh, preset: str, policy: MixedPrecisionPolicy) -> None:
    def before_batch(model: Transformer, is_last: bool) -> None:
        model.set_requires_all_reduce(is_last)  # type: ignore[operator]

    options = {"placements": getattr(Placements, preset), "mp_policy": policy}
    assert faults(recorded(fake_mesh(2, 2), micro_batches=3, before_batch=before_batch, **options)) == []


def test_deletion_with_a_gather_under_way(fake_mesh: Mesh) -> None:
    device, context = RecordingDevice(), FSDPCommContext("cpu")
    context.use_device(device)
    model = fully_shard(Transformer(), mesh=fake_mesh(2), comm_ctx=context, mp_policy=BF16)
    with Watched(device) as watched:
        handle = model.unshard(async_op=True)
        del handle
        del model, context
        watched.sweep()
        torch.ones(1).add_(1)
    assert any(entry.kind == "free" for entry in device.log)
    assert faults(device.log) == []


def test_a_hook_that_raises_on_the_lane(fake_mesh: Mesh) -> None:
    device, context = RecordingDevice(), FSDPCommContext("cpu")
    context.use_device(device)
    model = fully_shard(Transformer(), mesh=fake_mesh(2), comm_ctx=context, mp_policy=BF16)

    def hook(tensor: torch.Tensor) -> None:
        tensor.mul_(2)
        raise KeyError("on purpose")

    model.set_all_reduce_hook(hook)
    with Watched(device) as watched:
        with pytest.raises(KeyError, match="on purpose"):
            model(inputs_for(Transformer(), 0)).sum().backward()
        model.reset_iter_state()
        assert device.current == 0
        model.set_all_reduce_hook(lambda tensor: None)
        model(inputs_for(Transformer(), 0)).sum().backward()
        watched.sweep()
    assert faults(device.log) == []


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_shards_written_after_the_optimizers_event(fake_mesh: Mesh, preset: str) -> None:
    def after_update(model: Transformer, device: RecordingDevice) -> None:
        model.set_post_optim_event(device.record(0))  # type: ignore[operator]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().clamp_(-1, 1)  # type: ignore[attr-defined]

    assert faults(recorded(fake_mesh(2), after_update=after_update, placements=getattr(Placements, preset))) == []


def test_parameters_kept_between_micro_batches(fake_mesh: Mesh) -> None:
    assert faults(recorded(fake_mesh(2), keep_unsharded)) == []


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_thin_tensors(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch, param_dtype: Any) -> None:
    monkeypatch.setattr(Comm, "thin_from_bytes", 0)
    log = recorded(fake_mesh(32), mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    assert any(entry.name == "c10d.allreduce_.default" for entry in log)
    assert faults(log) == []


def test_the_checker_sees_missing_waits(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = fake_mesh(2)
    monkeypatch.setattr(RecordingTicket, "wait", lambda self: None)
    found = faults(recorded(mesh))
    assert any("reads before c10d" in fault for fault in found)
    assert any("freed while in use by c10d" in fault for fault in found)


def test_the_checker_sees_memory_freed_too_early(fake_mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = fake_mesh(2)
    add = PendingReductions.add

    def forget_inputs(self: PendingReductions, reduction: Any) -> None:
        reduction._staged = reduction._staging = None
        reduction._ticket.steps = ()
        add(self, reduction)

    monkeypatch.setattr(PendingReductions, "add", forget_inputs)
    assert any("freed while in use by c10d._reduce_scatter_base_" in fault for fault in faults(recorded(mesh)))
