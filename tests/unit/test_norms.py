"""Norms of many tensors have the bits of the norms of each."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core import norms

SHAPES = [(), (1,), (0,), (3, 0), (5,), (7, 9), (3, 3, 3), (2, 1024), (norms.SMALL,), (norms.SMALL + 1,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
ORDERS = [2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf]


def drawn(shape: tuple[int, ...], is_transposed: bool, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.randn(shape, generator=generator)
    return tensor.mT if is_transposed and tensor.ndim > 1 else tensor


def reference(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    if not tensor.numel():
        return torch.tensor(math.inf if norm_type < 0 else 0.0)
    return torch.linalg.vector_norm(tensor, norm_type)


@given(
    chosen=st.lists(st.tuples(st.sampled_from(SHAPES), st.booleans()), min_size=1, max_size=24),
    dtype=st.sampled_from(DTYPES),
    norm_type=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=150)
def test_norms_of_many_are_those_of_each(
    chosen: list[tuple[tuple[int, ...], bool]], dtype: torch.dtype, norm_type: float, seed: int
) -> None:
    """Also of transposed ones, whose elements lie in another order."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [drawn(*one, generator).to(dtype) for one in chosen]
    found = norms.local_norms(tensors, norm_type)
    expected = torch.stack([reference(tensor, norm_type).to(dtype.to_real()) for tensor in tensors])
    assert torch.equal(found, expected)


def test_norms_of_several_dtypes_are_in_the_widest() -> None:
    tensors = [torch.full((4,), 3.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64) * 2]
    assert torch.equal(norms.local_norms(tensors, 2.0), torch.full((6,), 6.0, dtype=torch.float64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_number_that_is_not_finite_stays_with_its_tensor(value: float) -> None:
    tensors = [torch.ones(5) for _ in range(4)]
    tensors[2][3] = value
    found = norms.local_norms(tensors, 2.0)
    assert torch.isfinite(found).tolist() == [True, True, False, True]


def test_large_tensors_are_not_copied() -> None:
    large = [torch.ones(norms.SMALL + 1) for _ in range(8)]
    with torch.profiler.profile(profile_memory=True) as profile:
        norms.local_norms(large, 2.0)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert taken < large[0].nbytes


def test_the_default_device_is_not_the_tensors() -> None:
    sizes = [3, 5, 3]  # the first and the last are one tensor for the kernel
    with torch.device("meta"):
        found = norms.local_norms([torch.ones(size, device="cpu") for size in sizes], 2.0)
    torch.testing.assert_close(found, torch.tensor(sizes).sqrt())
