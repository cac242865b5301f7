"""Lanes by themselves, on a device whose streams only note what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.lanes import AcceleratorDevice, Flight, HostDevice

SECOND = torch.device("cuda", 1)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In place of the module of every device."""
    module = MagicMock()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_work_is_waited_for_on_its_own_device(streams: MagicMock) -> None:
    ticket = AcceleratorDevice(SECOND).lane().submit(lambda: ())
    streams.current_stream.reset_mock()
    ticket.wait()
    streams.current_stream.assert_called_once_with(SECOND)


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
