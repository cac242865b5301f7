"""Directories that transformers wrote, and that transformers reads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.checkpoint.safetensors import load_safetensors, save_safetensors

from ..ranks.harness import on_ranks
from ..ranks.shared import shared_directory
from ..ranks.truth import whole
from .test_transformers import blocks, gpt2, llama, mixtral, t5

Make = Callable[[], Any]


def tied_llama() -> Any:
    from transformers import LlamaForCausalLM

    config = llama().config
    config.tie_word_embeddings = True
    return LlamaForCausalLM(config)


def build(make: Make, seed: int) -> Any:
    torch.manual_seed(seed)
    return make().eval()


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        shardwise.fully_shard(block, mesh=mesh)
    return shardwise.fully_shard(model, mesh=mesh)


def on_meta_but_buffers(make: Make) -> Any:
    """As `init_on_meta` does: parameters without memory, buffers with values."""
    model = make().eval()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(3, 19).view(2, 8)
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=tokens, **extra).logits  # type: ignore[no-any-return]


def by_rank_zero(action: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def assert_same(model: Any, truth: Any) -> None:
    state = model.state_dict()
    assert state.keys() == truth.state_dict().keys()
    for name, value in truth.state_dict().items():
        assert torch.equal(whole(state[name]), value), name
    assert torch.equal(logits(model), logits(truth))


@on_ranks(1, 2, 3, 4)
def test_loads_what_transformers_saved() -> None:
    for make in (llama, tied_llama, gpt2, t5):
        truth = build(make, 1)
        with shared_directory() as directory:
            by_rank_zero(lambda truth=truth: truth.save_pretrained(directory, max_shard_size="8KB"))
            assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
            for model in (build(make, 2), on_meta_but_buffers(make)):
                assert load_safetensors(sharded(model), directory) == ([], [])
                assert_same(model, truth)
                assert logits(model).isfinite().all()


@on_ranks(1, 2, 3, 4)
def test_transformers_loads_what_we_saved() -> None:
    for make in (llama, tied_llama, gpt2, t5, mixtral):
        truth = build(make, 1)
        with shared_directory() as directory:
            save_safetensors(sharded(build(make, 1)), directory, max_shard_size="8KB")
            by_rank_zero(lambda truth=truth: truth.config.save_pretrained(directory))
            assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
            loaded, info = type(truth).from_pretrained(directory, output_loading_info=True)
            assert not any(info.values()), info
            assert_same(loaded.eval(), truth)


@on_ranks(2)
def test_the_same_names_as_save_pretrained() -> None:
    for make in (llama, tied_llama, gpt2, t5):
        with shared_directory() as directory:
            save_safetensors(sharded(build(make, 1)), directory / "ours")
            by_rank_zero(lambda make=make: build(make, 1).save_pretrained(directory / "theirs"))
            from safetensors import safe_open

            ours, theirs = (safe_open(directory / name / "model.safetensors", "pt") for name in ("ours", "theirs"))
            assert set(ours.keys()) == set(theirs.keys())
            assert ours.metadata()["format"] == "pt"


@on_ranks(2)
def test_checkpoint_of_the_bare_model_by_rename() -> None:
    """The hub's GPT-2 has neither the prefix nor the head, and has masks of an old version beside."""
    truth = build(gpt2, 1)
    with shared_directory() as directory:
        by_rank_zero(lambda: truth.transformer.save_pretrained(directory))
        by_rank_zero(lambda: add_tensor(directory / "model.safetensors", "h.0.attn.bias"))
        model = sharded(build(gpt2, 2))
        with pytest.raises(ValueError, match=r"missing keys: 'transformer\.wte\.weight', 'lm_head\.weight'"):
            load_safetensors(model, directory)
        assert load_safetensors(model, directory, rename=lambda name: f"transformer.{name}") == ([], [])
        assert_same(model, truth)


def add_tensor(path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    save_file(load_file(path) | {name: torch.tensor(-1e4)}, path, metadata={"format": "pt"})


@on_ranks(1, 2)
def test_tensors_that_transformers_renames() -> None:
    """As docs/weights.md has it. Its rules are found by the names of classes."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    truth = GPTNeoXForCausalLM(config)
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    recipe = textwrap.dedent(re.findall(r"```python\n(  from transformers.*?)```", page, flags=re.DOTALL)[0])
    before, after = recipe.split("...\n")
    with shared_directory() as directory:
        if dist.get_rank() == 0:
            truth.save_pretrained(directory)
        dist.barrier()
        with shardwise.init_on_meta():
            model = GPTNeoXForCausalLM(config)
        with pytest.raises(ValueError, match=r"missing keys: 'lm_head.weight'\n  unexpected keys: 'embed_out.weight'"):
            load_safetensors(model, directory)
        names = {"model": model, "load_safetensors": load_safetensors, "directory": directory}
        exec(before, names)
        shardwise.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        exec(after, names)
        for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs)
