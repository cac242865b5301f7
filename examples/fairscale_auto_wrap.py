"""Wrapping submodules by their size: the FairScale page's last example, with another import and its names mended.

python examples/fairscale_auto_wrap.py
"""

from __future__ import annotations

import torch

from shardwise.fairscale import FSDP, DummyProcessGroup, auto_wrap, enable_wrap, wrap


def main() -> None:
    tfmr = torch.nn.Transformer(num_encoder_layers=2, num_decoder_layers=2)

    group = DummyProcessGroup(rank=0, size=1)
    fsdp_params = {"mixed_precision": True, "flatten_parameters": True}
    with enable_wrap(wrapper_cls=FSDP, process_group=group, **fsdp_params):
        # Wraps layer in FSDP by default if within context
        l1 = wrap(torch.nn.Linear(5, 5))
        assert isinstance(l1, FSDP)
        assert l1.mixed_precision
        assert l1.flatten_parameters
        # Separately wraps children modules with more than 1e6 params
        l2 = auto_wrap(tfmr, min_num_params=1e6)
        assert isinstance(l2, torch.nn.Transformer)
        for layer in l2.encoder.layers:
            assert isinstance(layer, FSDP)
            assert layer.mixed_precision
            assert layer.flatten_parameters
            assert isinstance(layer.linear1, FSDP)
            assert isinstance(layer.linear2, FSDP)
            assert not isinstance(layer.self_attn, FSDP)  # self attention is not auto-wrapped

    wrapped = [name for name, module in l2.named_modules() if isinstance(module, FSDP)]
    print(f"wrapped {len(wrapped)} modules: {', '.join(wrapped)}")


if __name__ == "__main__":
    main()
