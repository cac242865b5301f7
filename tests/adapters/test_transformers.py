"""Models of the transformers library, built from configs: sharded training is training on the joined batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import shardwise

from ..ranks.harness import on_ranks

VOCABULARY = 64
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            **SMALL,
        )
    )


def gpt2() -> Any:
    """Its head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SMALL
    )
    return GPT2LMHeadModel(config)


def t5() -> Any:
    """Encoder and decoder, with a relative position bias that only the first layer of each has."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=2, **SMALL
    )
    return T5ForConditionalGeneration(config)


def mixtral() -> Any:
    """Experts that only some tokens use."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        **SMALL,
    )
    return MixtralForCausalLM(config)


def blocks(model: Any) -> list[nn.Module]:
    """The layers that are units."""
    if hasattr(model, "encoder"):
        return [*model.encoder.block, *model.decoder.block]
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def build(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def wrap(model: Any, verb: Callable[..., Any], mesh: DeviceMesh) -> Any:
    for block in blocks(model):
        verb(block, mesh=mesh)
    verb(model, mesh=mesh)
    return model


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))
    return {"input_ids": tokens, "labels": tokens}


def train(model: Any, ranks: list[int], steps: int = 3) -> dict[str, torch.Tensor]:
    """Mean loss of each step over the batches of ``ranks``, and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result: dict[str, torch.Tensor] = {}
    for step in range(steps):
        losses = [model(**batch(step, rank)).loss for rank in ranks]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        result[f"loss{step}"] = torch.stack(losses).mean().detach()
    for name, parameter in model.named_parameters():
        result[name] = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
    return result


def assert_trains_like_the_whole(model: Any, make: Callable[[], Any]) -> None:
    ours = train(model, [dist.get_rank()])
    truth = train(build(make), list(range(dist.get_world_size())))
    for name, value in truth.items():
        if name.startswith("loss"):
            dist.all_reduce(ours[name])
            ours[name] /= dist.get_world_size()
        torch.testing.assert_close(ours[name], value, msg=lambda message, name=name: f"{name}: {message}")


@on_ranks(2, 3, make=[llama, gpt2, t5, mixtral], checkpointed=[False, True])
def test_training(make: Callable[[], Any], checkpointed: bool) -> None:
    model = wrap(build(make), shardwise.fully_shard, init_device_mesh("cpu", (dist.get_world_size(),)))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_like_the_whole(model, make)


@on_ranks(2, make=[llama, gpt2])
def test_bitwise_like_fsdp2(make: Callable[[], Any]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    ours = train(wrap(build(make), shardwise.fully_shard, mesh), [dist.get_rank()])
    theirs = train(wrap(build(make), torch_fully_shard, mesh), [dist.get_rank()])
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@on_ranks(2)
def test_tied_head_stays_tied() -> None:
    model = wrap(build(gpt2), shardwise.fully_shard, init_device_mesh("cpu", (2,)))
    assert model.lm_head.weight is model.transformer.wte.weight
    train(model, [dist.get_rank()])
    assert model.lm_head.weight is model.transformer.wte.weight


@on_ranks(2, make=[llama, gpt2, t5])
def test_generate_under_a_registered_forward_method(make: Callable[[], Any]) -> None:
    model = wrap(build(make), shardwise.fully_shard, init_device_mesh("cpu", (2,)))
    shardwise.register_fsdp_forward_method(model, "generate")
    prompt = batch(0, 0)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with torch.no_grad():
        ours = model.generate(prompt, **options)
    assert torch.equal(ours, build(make).eval().generate(prompt, **options))
    train(model, [dist.get_rank()], 1)


@on_ranks(2, 3, preset=["zero2", "zero3"])
def test_ranks_generate_different_numbers_of_tokens(preset: str) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    model = wrap(build(llama), functools.partial(shardwise.fully_shard, placements=preset), mesh).eval()
    prompt = batch(0, rank)["input_ids"]
    options = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model.generate(prompt, **options), build(llama).eval().generate(prompt, **options))


def layer_dropping() -> Any:
    """A model of sound that skips layers at random, unless it knows that it is sharded."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.5,
        mask_time_prob=0.0,
        vocab_size=32,
    )
    return Wav2Vec2ForCTC(config)


@on_ranks(2)
def test_ranks_that_would_drop_different_layers() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    results = []
    for verb in (shardwise.fully_shard, torch_fully_shard):
        model = build(layer_dropping)
        for layer in model.wav2vec2.encoder.layers:
            verb(layer, mesh=mesh)
        verb(model, mesh=mesh)
        torch.manual_seed(rank)
        for step in range(3):
            sound = torch.randn(2, 200, generator=torch.Generator().manual_seed(10 * step + rank))
            model(sound, labels=torch.full((2, 3), 5)).loss.backward()
        results.append([parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


class LowRank(nn.Module):
    """A frozen linear layer with a trainable update of rank two."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> Any:
    """A frozen Llama with low-rank updates of its query projections."""
    model = llama().requires_grad_(False)
    for block in blocks(model):
        block.self_attn.q_proj = LowRank(block.self_attn.q_proj)
        block.self_attn.q_proj.down.requires_grad_(True)
        block.self_attn.q_proj.up.requires_grad_(True)
    return model


@on_ranks(2)
def test_low_rank_updates_of_a_frozen_base() -> None:
    model = wrap(build(adapted), shardwise.fully_shard, init_device_mesh("cpu", (2,)))
    assert_trains_like_the_whole(model, adapted)
    model(**batch(9, dist.get_rank())).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("up.weight" in name or "down.weight" in name), name
    used = {
        parameter.grad.to_local().untyped_storage().nbytes()  # type: ignore[attr-defined]
        for parameter in model.parameters()
        if parameter.grad is not None
    }
    # Per layer 2 x 16 elements each way over 2 ranks, and one flag for each of the two, padded to 16 bytes.
    assert used == {4 * (2 * 16 + 4)}
