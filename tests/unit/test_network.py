"""The modelled network: its arithmetic, its values, and both engines' schedules, by a clock that nobody waits for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.contenders import FSDP2, SHARDWISE, UNSHARDED, make_contender
from bench.exposed import (
    ENGINES,
    FSDP2_ASYNC,
    Collective,
    Overlap,
    Part,
    Plan,
    Run,
    ScheduleClock,
    Stepper,
    make_stepper,
    overlap_of,
    part_between,
    per_unit,
    plan_of,
    predicted_seconds,
)
from bench.model import Shape
from bench.network import (
    ALL_REDUCE,
    GATHER,
    INSTANT,
    REDUCE_SCATTER,
    Network,
    TimerLink,
    Transfer,
    Wires,
    modelled_network,
)
from bench.ranks import BenchError

from ..needs import needs_results

SHAPE = Shape(blocks=4, width=128, batch=1, length=8)
WORLD = 8
SLOW = Network(latency=0.25, bandwidth=1e6)
NETWORKS = {
    "hidden": Network(latency=0.01, bandwidth=1e7),
    "comparable": Network(latency=0.25, bandwidth=1e6),
    "endless": Network(latency=5.0, bandwidth=1e6),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would only get in each other's way: the models are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock() -> ScheduleClock:
    return ScheduleClock()


@pytest.fixture
def wires(clock: ScheduleClock) -> Iterator[Wires]:
    with modelled_network(WORLD, SLOW, clock) as made:
        yield made


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# -- Time


def test_a_link_serves_one_collective_at_a_time(clock: ScheduleClock) -> None:
    link = TimerLink(clock)
    assert link.occupy(GATHER, 0, 2.0).end == 2.0
    clock.advance(0.5)
    second = link.occupy(GATHER, 0, 1.0)
    assert (second.issued, second.start, second.end) == (0.5, 2.0, 3.0)
    clock.advance(9.5)
    third = link.occupy(GATHER, 0, 1.0)
    assert (third.issued, third.start, third.end) == (10.0, 10.0, 11.0)


def run_gather(size: int) -> object:
    return world()._allgather_base(torch.empty(WORLD * size), torch.ones(size))


def run_gathers(size: int) -> object:
    outputs, inputs = [torch.empty(WORLD * size), torch.empty(WORLD * 3)], [torch.ones(size), torch.ones(3)]
    return world().allgather_into_tensor_coalesced(outputs, inputs)


def run_reduction(size: int) -> object:
    return world()._reduce_scatter_base(torch.empty(size), torch.ones(WORLD * size))


def run_reductions(size: int) -> object:
    outputs, inputs = [torch.empty(size), torch.empty(3)], [torch.ones(WORLD * size), torch.ones(WORLD * 3)]
    return world().reduce_scatter_tensor_coalesced(outputs, inputs)


BYTES: dict[str, tuple[Callable[[int], object], Callable[[int], int]]] = {
    "gather": (run_gather, lambda size: 4 * size * (WORLD - 1)),
    "coalesced gather": (run_gathers, lambda size: 4 * (size + 3) * (WORLD - 1)),
    "reduce-scatter": (run_reduction, lambda size: 4 * size * (WORLD - 1)),
    "coalesced reduce-scatter": (run_reductions, lambda size: 4 * (size + 3) * (WORLD - 1)),
    "all-reduce": (lambda size: world().allreduce([torch.ones(WORLD * size)]), lambda size: 8 * size * (WORLD - 1)),
    "broadcast": (lambda size: dist.broadcast(torch.ones(size), 0, async_op=True), lambda size: 4 * size),
    "reduce": (lambda size: dist.reduce(torch.ones(size), 0, async_op=True), lambda size: 4 * size),
    "all-to-all": (
        lambda size: dist.all_to_all_single(torch.empty(WORLD * size), torch.ones(WORLD * size), async_op=True),
        lambda size: 4 * size * (WORLD - 1),
    ),
    "send": (lambda size: dist.isend(torch.ones(size), 1), lambda size: 4 * size),
    "receive": (lambda size: dist.irecv(torch.ones(size), 1), lambda size: 4 * size),
    "barrier": (lambda size: dist.barrier(async_op=True), lambda size: 0),
}


@pytest.mark.parametrize("name", BYTES)
def test_duration(wires: Wires, clock: ScheduleClock, name: str) -> None:
    """Latency once, and a ring's bytes; nothing passes before somebody waits."""
    run, sent = BYTES[name]
    work = run(5)
    assert clock.now() == 0
    assert not work.is_completed()  # type: ignore[attr-defined]
    work.wait()  # type: ignore[attr-defined]
    assert clock.now() == pytest.approx(0.25 + sent(5) / 1e6, rel=1e-12)
    assert work.is_completed()  # type: ignore[attr-defined]
    assert [transfer.sent for transfer in wires.log] == [sent(5)]


def test_who_comes_late_does_not_wait(wires: Wires, clock: ScheduleClock) -> None:
    work = run_gather(5)
    clock.advance(3.0)
    work.wait()  # type: ignore[attr-defined]
    assert clock.now() == 3.0


def test_synchronous_and_functional_collectives_wait(wires: Wires, clock: ScheduleClock) -> None:
    dist.all_reduce(torch.ones(WORLD))
    assert clock.now() == pytest.approx(0.25 + 8 * (WORLD - 1) / 1e6)
    summed = functional.all_reduce(torch.ones(WORLD), "sum", world())
    assert len(wires.log) == 2
    assert summed.sum().item() == WORLD
    assert clock.now() == pytest.approx(2 * (0.25 + 8 * (WORLD - 1) / 1e6))


def test_groups_of_the_same_ranks_share_a_link(wires: Wires, clock: ScheduleClock) -> None:
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    twin = dist.new_group(list(range(WORLD)))
    assert twin is not None
    wires.log.clear()
    for group in (world(), twin, mesh.get_group("shard"), mesh.get_group("replicate")):
        dist.all_reduce(torch.ones(8), group=group, async_op=True)
    assert [transfer.sent for transfer in wires.log] == [56.0, 56.0, 48.0, 32.0]
    starts = [transfer.start for transfer in wires.log]
    assert starts == [0.0, wires.log[0].end, 0.0, 0.0]


def test_an_instant_network_takes_no_time(wires: Wires, clock: ScheduleClock) -> None:
    wires.network = INSTANT
    run_gather(5).wait()  # type: ignore[attr-defined]
    assert clock.now() == 0
    assert INSTANT.seconds(1e12) == 0


# -- Values


def results() -> list[Tensor]:
    """Of every collective that an engine uses."""
    group, values = world(), torch.arange(16.0)
    gathered, scattered, summed = torch.full((128,), -1.0), torch.full((2,), -1.0), values.clone()
    more = [torch.full((64,), -1.0), torch.full((64,), -1.0)]
    parts = [torch.full((1,), -1.0), torch.full((1,), -1.0)]
    group._allgather_base(gathered, values).wait()
    group.allgather_into_tensor_coalesced(more, list(values.split(8))).wait()
    group._reduce_scatter_base(scattered, values).wait()
    group.reduce_scatter_tensor_coalesced(parts, list(values.split(8))).wait()
    dist.all_reduce(summed)
    objects: list[object] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": 0})
    assert objects == [{"rank": 0}] * WORLD
    return [gathered, scattered, summed, *more, *parts]


@needs_results
def test_moves_what_a_fake_group_moves(fake_mesh: Callable[..., DeviceMesh]) -> None:
    fake_mesh(WORLD)
    expected = results()
    dist.destroy_process_group()
    with modelled_network(WORLD, SLOW, ScheduleClock()):
        for found, value in zip(results(), expected, strict=True):
            assert torch.equal(found, value)


def losses(name: str) -> list[float]:
    contender = make_contender(name, SHAPE)
    return [contender.step() for _ in range(3)]


@pytest.mark.parametrize("name", [SHARDWISE, FSDP2])
@needs_results
def test_trains_as_on_a_fake_group(fake_mesh: Callable[..., DeviceMesh], name: str) -> None:
    fake_mesh(WORLD)
    expected = losses(name)
    dist.destroy_process_group()
    with modelled_network(WORLD, SLOW, ScheduleClock()) as wires:
        assert losses(name) == expected
    assert all(math.isfinite(loss) for loss in expected)
    assert {transfer.kind for transfer in wires.log} == {GATHER, REDUCE_SCATTER}


# -- Schedules


def plan(blocks: int, compute: float, gather: float, reduction: float) -> Plan:
    """Blocks compute, twice as long in backward, and nothing else does."""
    parts = [0.0, *[compute] * blocks, 0.0, 0.0, *[2 * compute] * blocks, 0.0]
    gathers = [Collective(0.0, 0.0), *[Collective(gather, 0.0)] * (2 * blocks)]
    reductions = [*[Collective(reduction, 0.0)] * blocks, Collective(0.0, 0.0)]
    return Plan([Part(seconds, seconds) for seconds in parts], gathers, reductions)


def test_predicted_without_overlap_is_the_sum() -> None:
    none = Overlap(gathers=False, reductions=False)
    assert predicted_seconds(plan(5, 1.0, 0.5, 0.25), none) == 5 * (1 + 2 + 2 * 0.5 + 0.25)


def test_predicted_with_overlap_hides_all_but_the_ends() -> None:
    """Two first gathers, since backward's first has nothing before it here, and the last reduction."""
    assert predicted_seconds(plan(5, 1.0, 0.5, 0.25), Overlap()) == 5 * 3 + 0.5 + 0.5 + 0.25


def test_predicted_on_a_slow_link() -> None:
    """By hand: gathers end at 4 and 8 and forward at 9; then gathers at 13 and 17 while the last block's backward ends
    at 15, its reduction at 20 while the first's ends at 19, and the first's reduction at 23."""
    assert predicted_seconds(plan(2, 1.0, 4.0, 3.0), Overlap()) == 23


def test_predicted_with_copies_and_installs() -> None:
    """Copies by the caller pass while the link works, and keep it from computing; installs are in no one's shadow."""
    parts = [Part(0.0, 0.0, installs=0.5), Part(1.0, 1.0), Part(0.0, 0.0)]
    parts += [Part(0.0, 0.0, installs=0.25), Part(2.0, 2.0), Part(0.0, 0.0)]
    gathers = [Collective(1.0, 0.0), Collective(2.0, 0.75), Collective(2.0, 3.0)]
    steps = Plan(parts, gathers, [Collective(1.0, 0.125), Collective(1.0, 0.0)])
    assert predicted_seconds(steps, Overlap()) == (1 + 2 + 0.5 + 1) + (3 + 0.25 + 2) + 1 + 1


def test_parts_are_told_apart() -> None:
    gather = Transfer(GATHER, 0, 0, issued=0.0, start=0.0, copied=1.0, arrived=12.0)
    following = Transfer(GATHER, 0, 0, issued=14.0, start=14.0, copied=2.0)
    reduction = Transfer(REDUCE_SCATTER, 0, 0, issued=11.0, start=11.0, copied=0.5, arrived=16.5)
    found = part_between(10.0, 17.0, [gather, reduction, following], starts_unit=True)
    assert found == Part(total=7.0, computes=1.5, copied=2.5, installs=3.0)
    assert part_between(10.0, 17.0, [gather, reduction, following], starts_unit=False).installs == 0


def test_collectives_that_fit_no_schedule() -> None:
    transfers = [Transfer(GATHER, 1e6, 0)] * 6
    assert per_unit(transfers, SLOW, GATHER, 3) == [Collective(2.5, 0.0)] * 3
    for units, kind in ((4, GATHER), (3, REDUCE_SCATTER)):
        with pytest.raises(BenchError, match="collectives"):
            per_unit(transfers, SLOW, kind, units)


def test_collectives_of_thin_tensors_are_their_units() -> None:
    """The root has nothing else, in forward before all others and in backward after them."""
    sent = {GATHER: 1e6, REDUCE_SCATTER: 1e6, ALL_REDUCE: 2e6}
    block, reduced, root = [GATHER, ALL_REDUCE], [REDUCE_SCATTER, ALL_REDUCE], [ALL_REDUCE]
    kinds = [*root, *block, *block, *block, *reduced, *block, *reduced, *root]
    transfers = [Transfer(kind, sent[kind], 0) for kind in kinds]
    both, alone = Collective(SLOW.seconds(1e6) + SLOW.seconds(2e6), 0.0), Collective(SLOW.seconds(2e6), 0.0)
    assert per_unit(transfers, SLOW, GATHER, 5) == [alone, both, both, both, both]
    assert per_unit(transfers, SLOW, REDUCE_SCATTER, 3) == [both, both, alone]


def make_computing(name: str, clock: ScheduleClock) -> Stepper:
    """A stepper whose blocks take longer and longer, twice that in backward, and whose norm takes some time too."""
    stepper = make_stepper(name, SHAPE, "cpu", clock)
    model = stepper.contender.model

    def computing(module: nn.Module, seconds: float) -> None:
        module.register_forward_pre_hook(lambda *_: clock.advance(seconds))
        module.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda _: clock.advance(2 * seconds)) and None
        )

    for index, block in enumerate(model.get_submodule("blocks").children()):
        computing(block, 1.0 + index / 4)
    computing(model.get_submodule("norm"), 0.375)
    return stepper


def runs_on(name: str, network: Network, clock: ScheduleClock) -> tuple[Run, Run]:
    """A step on an instant network and one on ``network``, when the order of units is known."""
    with modelled_network(WORLD, INSTANT, clock) as wires:
        stepper = make_computing(name, clock)
        for _ in range(2):
            stepper.run(wires, INSTANT)
        return stepper.run(wires, INSTANT), stepper.run(wires, network)


COMPUTED = 3 * (4 * 1.0 + 6 / 4 + 0.375)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
@pytest.mark.parametrize("name", ENGINES)
def test_engines_take_what_is_predicted(clock: ScheduleClock, name: str, network: Network) -> None:
    instant, run = runs_on(name, network, clock)
    assert instant.seconds == pytest.approx(COMPUTED, rel=1e-12)
    assert run.loss == instant.loss
    predicted = predicted_seconds(plan_of(instant, network), overlap_of(name, "cpu"))
    assert run.seconds == pytest.approx(predicted, rel=1e-12)
    assert run.seconds > COMPUTED


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
def test_no_engine_exposes_less(clock: ScheduleClock, network: Network) -> None:
    ours, theirs = (runs_on(name, network, clock)[1].seconds for name in (SHARDWISE, FSDP2_ASYNC))
    assert ours <= theirs


def test_all_but_the_ends_is_hidden(clock: ScheduleClock) -> None:
    """Where every collective is shorter than a block's computation: what is left is the root's gather, the first
    block's, and the reductions of the first block and the root."""
    network = NETWORKS["comparable"]
    run = runs_on(SHARDWISE, network, clock)[1]
    gathers = [transfer.seconds for transfer in run.transfers if transfer.kind == GATHER]
    reductions = [transfer.seconds for transfer in run.transfers if transfer.kind == REDUCE_SCATTER]
    backward_start = max(0.0, gathers[SHAPE.blocks + 1] - 2 * 0.375)
    exposed = gathers[0] + gathers[1] + backward_start + reductions[-2] + reductions[-1]
    assert run.seconds == pytest.approx(COMPUTED + exposed, rel=1e-9)


def test_next_unit_is_gathered_while_one_computes(clock: ScheduleClock) -> None:
    run = runs_on(SHARDWISE, NETWORKS["comparable"], clock)[1]
    blocks = run.blocks
    gathers = [transfer for transfer in run.transfers if transfer.kind == GATHER]
    starts, backward_starts = run.moments[1 : 1 + blocks], run.moments[3 + blocks : 3 + 2 * blocks]
    following, behind = gathers[2 : 1 + blocks], gathers[2 + blocks :]
    for transfers, begun in ((following, starts), (behind, backward_starts)):
        assert len(transfers) == blocks - 1
        for transfer, (start, end) in zip(transfers, itertools.pairwise(begun), strict=True):
            assert transfer.issued <= start  # before the wait for the one that begins then
            assert transfer.arrived == end
        assert any(transfer.issued < start for transfer, start in zip(transfers, begun, strict=False))


def test_one_reduction_is_under_way(clock: ScheduleClock) -> None:
    """Gradients of no more than two units take memory, however slow the link is."""
    run = runs_on(SHARDWISE, NETWORKS["endless"], clock)[1]
    reductions = [transfer for transfer in run.transfers if transfer.kind == REDUCE_SCATTER]
    assert len(reductions) == run.blocks + 1
    for transfer, following in itertools.pairwise(reductions):
        assert transfer.end <= following.issued


def test_the_unsharded_step_sends_nothing(wires: Wires, clock: ScheduleClock) -> None:
    run = make_computing(UNSHARDED, clock).run(wires, SLOW)
    assert run.seconds == pytest.approx(COMPUTED)
    assert run.blocks == SHAPE.blocks
    assert not run.transfers
