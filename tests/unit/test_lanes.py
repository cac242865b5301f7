"""Lanes by themselves, on a device whose streams only note what is asked of them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.comm import _digest, _Messages, failed_peer
from shardwise.core.lanes import AcceleratorDevice, Flight, HostDevice, current_world

SECOND = torch.device("cuda", 1)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In place of all that torch has for streams of devices; the first device is the current one."""
    module = MagicMock()
    module.current_device_index.return_value = 0
    module.current_stream.side_effect = lambda index: getattr(module, f"of_{index}")
    module.Stream.return_value.device_index = 1
    for name in ("current_device_index", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.accelerator, name, getattr(module, name))
    monkeypatch.setattr(torch, "Stream", module.Stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_work_is_waited_for_on_its_own_device(streams: MagicMock) -> None:
    ticket = AcceleratorDevice(SECOND).lane().submit(lambda: ())
    streams.of_1.reset_mock()
    ticket.wait()
    streams.of_1.wait_event.assert_called_once_with(ticket.event)


def test_both_devices_get_back_their_streams(streams: MagicMock) -> None:
    """What is set last sets the current device."""
    lane = AcceleratorDevice(SECOND).lane()
    with lane.own_memory():
        streams.set_stream.assert_called_once_with(streams.Stream.return_value)
    assert [call.args for call in streams.set_stream.call_args_list[1:]] == [(streams.of_1,), (streams.of_0,)]


@pytest.mark.parametrize("kind", [HostDevice, AcceleratorDevice])
def test_a_new_lane_waits_for_abandoned_works(
    fake_mesh: Callable[..., DeviceMesh], streams: MagicMock, kind: type[HostDevice] | type[AcceleratorDevice]
) -> None:
    fake_mesh(2)
    work = MagicMock()
    Flight([work])
    work.wait.assert_not_called()
    kind(SECOND).lane()
    work.wait.assert_called_once_with()


def message_to_come() -> tuple[_Messages, MagicMock]:
    group = MagicMock()
    work = group.recv.return_value
    work.is_completed.return_value = False
    return _Messages([(1, torch.ones(1))], [], group, 0, current_world()), work


def test_messages_of_a_world_that_is_gone_are_not_waited_for(fake_mesh: Callable[..., DeviceMesh]) -> None:
    fake_mesh(2)
    message, work = message_to_come()
    Flight([message])
    dist.destroy_process_group()
    fake_mesh(2)
    del message  # as when an exception has kept it
    for _ in range(2):
        HostDevice(SECOND).lane()
    work.wait.assert_not_called()


def test_a_message_is_waited_for_that_nobody_had_yet(fake_mesh: Callable[..., DeviceMesh]) -> None:
    fake_mesh(2)
    message, work = message_to_come()
    del message
    for _ in range(2):
        HostDevice(SECOND).lane()
    work.wait.assert_called_once_with()


def test_messages_of_which_one_failed(fake_mesh: Callable[..., DeviceMesh]) -> None:
    """The others are waited for once by the next lane, and what was received is not used."""
    fake_mesh(2)
    works = [MagicMock() for _ in range(3)]
    for work in works:
        work.is_completed.return_value = False
        work.wait.side_effect = functools.partial(setattr, work.is_completed, "return_value", True)

    def fail() -> None:
        works[1].is_completed.return_value = True
        raise RuntimeError("connection closed")

    works[1].wait.side_effect = fail
    group: Any = SimpleNamespace(recv=MagicMock(side_effect=works))
    group.send = group.recv
    messages = _Messages([(peer, torch.ones(1)) for peer in (1, 2)], [(3, torch.ones(1))], group, 0, current_world())
    with pytest.raises(RuntimeError, match="connection closed") as caught:
        messages.wait()
    assert failed_peer(caught.value) == 2
    with pytest.raises(RuntimeError, match="waited for before has failed"):
        messages.wait()
    del messages, caught
    gc.collect()
    for _ in range(3):
        HostDevice(SECOND).lane()
    assert [work.wait.call_count for work in works] == [1, 1, 1]


@pytest.mark.parametrize("where", ["in a work", "in a step"])
def test_each_work_is_waited_for_once_even_if_something_raises(
    fake_mesh: Callable[..., DeviceMesh], where: str
) -> None:
    fake_mesh(2)
    raising, works = MagicMock(side_effect=ValueError), [MagicMock(), MagicMock()]
    if where == "in a work":
        works[0].wait = raising
    ticket = HostDevice(SECOND).lane().submit(lambda: works, raising if where == "in a step" else lambda: ())
    with pytest.raises(ValueError):
        ticket.wait()
    del ticket
    HostDevice(SECOND).lane()  # which waits for abandoned works
    raising.assert_called_once()
    for work in works:
        work.wait.assert_called_once_with()


def test_tags_of_sizes_that_do_not_come_again_are_forgotten() -> None:
    for numel in range(10_000):
        _digest("gather", "", numel, torch.float32)
    assert _digest.cache_info().currsize < 5_000
