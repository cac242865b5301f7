"""Models of the transformers library, built from configs on the meta device, are those of a plain construction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.init import init_on_meta, materialize

from ..ranks.harness import on_ranks
from ..ranks.truth import whole
from .test_transformers import SMALL, batch, gpt2, llama, mixtral, t5, wrap

Make = Callable[[], Any]

TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {**TEXT, "image_size": 16, "patch_size": 4}
SOUND = {**TEXT, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "vocab_size": 32}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}


def from_config(model: str, config: str, **options: Any) -> Make:
    def make() -> Any:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    make.__name__ = model
    return make


def tied_llama_in_bfloat16() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**TEXT, **SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    text, image = {**TEXT, "projection_dim": 8, "vocab_size": 64}, {**IMAGE, "projection_dim": 8}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=8))


PLAIN: list[Make] = [
    *(llama, gpt2, t5, mixtral, clip, tied_llama_in_bfloat16),
    from_config("BertForMaskedLM", "BertConfig", **TEXT, **SMALL),
    from_config("ViTForImageClassification", "ViTConfig", **IMAGE),
    from_config("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, **IMAGE),
    from_config("SwinModel", "SwinConfig", image_size=32, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4),
    from_config("Wav2Vec2ForCTC", "Wav2Vec2Config", **SOUND),
    from_config("MambaForCausalLM", "MambaConfig", hidden_size=16, state_size=4, num_hidden_layers=2, **SMALL),
    from_config("BloomForCausalLM", "BloomConfig", hidden_size=16, n_layer=2, n_head=2, **SMALL),
    from_config("ResNetModel", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
]


def built(make: Make, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return make()


def on_meta(make: Make, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    with init_on_meta():
        return make()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors that are plain attributes, whole."""
    found = {name: whole(value) for name, value in model.named_parameters(remove_duplicate=False)}
    found |= dict(model.named_buffers())
    for name, module in model.named_modules():
        attributes = {f"{name}.{key}": value for key, value in module.__dict__.items()}
        found |= {key: value for key, value in attributes.items() if isinstance(value, torch.Tensor)}
    return found


def assert_is(model: nn.Module, truth: nn.Module) -> None:
    ours, theirs = tensors(model), tensors(truth)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), f"{name} differs"
    assert len(list(model.parameters())) == len(list(truth.parameters()))


@pytest.mark.parametrize("make", PLAIN, ids=lambda make: make.__name__)
def test_equals_plain_construction(make: Make) -> None:
    truth = built(make)
    after = torch.get_rng_state()
    model = on_meta(make)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    copied = copy.deepcopy(model)
    assert_is(materialize(model), truth)
    assert torch.equal(torch.get_rng_state(), after)
    assert_is(materialize(copied, seed=5), truth)
    assert_is(materialize(on_meta(make, seed=6), seed=5), truth)


@on_ranks(2, 3, make=[llama, gpt2, t5, mixtral])
def test_sharded_and_trained_as_if_built_with_values(make: Make) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = wrap(on_meta(make, seed=dist.get_rank()), fully_shard, mesh)
    materialize(model, seed=5)
    assert_is(model, built(make))
    losses = [other(**batch(0, dist.get_rank())).loss for other in (model, wrap(built(make), fully_shard, mesh))]
    assert torch.equal(*losses)
    losses[0].backward()


@on_ranks(2, make=[llama, mixtral])
def test_put_on_meta_by_others(make: Make) -> None:
    """Initializers of the model itself, among them those of rotary tables, which no checkpoint has."""
    with torch.device("meta"):
        model = make()
    wrap(model, fully_shard, init_device_mesh("cpu", (2,)))
    materialize(model, seed=5)
    assert_is(model, built(make))
    model(**batch(0, dist.get_rank())).loss.backward()


def test_what_the_models_initializer_forgets_is_named() -> None:
    with torch.device("meta"):
        model = clip()
    with pytest.raises(RuntimeError, match=r"root module \(CLIPModel\): parameter 'logit_scale'"):
        materialize(model)
