"""What the simulated device is to show, it shows."""

from __future__ import annotations

import pytest
import torch

from .cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "simulated", reason="another device")


def test_memory_is_nan_until_it_is_written() -> None:
    assert torch.empty(100, device=DEVICE).isnan().all()
    assert torch.empty(100, device=DEVICE, dtype=torch.bfloat16).isnan().all()


def test_memory_that_was_freed_does_not_come_back() -> None:
    tensor = torch.ones(100, device=DEVICE)
    view = tensor[10:]
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(400)
    assert view.isnan().all()


def test_tensors_of_the_host_do_not_mix_with_its_own() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    assert (torch.ones(3, device=DEVICE) * torch.tensor(2.0)).sum().item() == 6


def test_waits_are_refused_where_they_are_not_wanted() -> None:
    from .simulated import refusing_waits

    tensor = torch.ones(3, device=DEVICE)
    waits = [tensor.tolist, tensor.sum().item, tensor.cpu, lambda: tensor[[0, 2]], lambda: tensor.new_tensor([1.0])]
    for wait in waits:
        wait()
        with pytest.raises(RuntimeError, match="the host waits"), refusing_waits():
            wait()
    with refusing_waits():
        tensor.add_(1).mul_(torch.arange(3.0).to(DEVICE, non_blocking=True))
    assert tensor.tolist() == [0, 2, 4]


def test_bytes_are_counted() -> None:
    memory = torch.get_device_module(DEVICE)
    before = memory.memory_allocated()
    tensor = torch.ones(1000, device=DEVICE)
    assert memory.memory_allocated() - before == 4000
    del tensor
    assert memory.memory_allocated() == before
