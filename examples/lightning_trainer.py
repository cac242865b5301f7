"""A small language model, trained by Lightning's Trainer on two processes, stopped, and continued from its checkpoint.

python examples/lightning_trainer.py
torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import asyncio
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import shardwise.lightning
from corpus import Corpus
from transformer import Block, Transformer, TransformerConfig

DEVICES, LENGTH, WINDOWS = 2, 64, 512


class Windows(Dataset[Tensor]):
    """Sequences of the source text of Python's `asyncio`, each with the byte that follows it."""

    def __init__(self) -> None:
        corpus = Corpus.load(Path(asyncio.__file__).parent, LENGTH)
        self.tokens = torch.from_numpy(corpus.batch(seed=0, step=0, batch_size=WINDOWS, sequence_length=LENGTH))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class LanguageModel(lightning.LightningModule):
    """Nothing in it knows of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(TransformerConfig(layers=2, width=128))

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of each byte after the first, in nats."""
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        return self.loss(tokens)

    def validation_step(self, tokens: Tensor, index: int) -> None:
        self.log("loss", self.loss(tokens), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def fit(epochs: int, checkpoint: Path | None, directory: Path) -> tuple[lightning.Trainer, float]:
    """Train until ``epochs`` are done; return the Trainer and the loss of the last validation."""
    strategy = shardwise.lightning.DDPFullyShardedStrategy(auto_wrap_policy={Block})
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=DEVICES,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    loader = DataLoader(Windows(), batch_size=16)
    trainer.fit(LanguageModel(), loader, loader, ckpt_path=checkpoint)
    return trainer, float(trainer.callback_metrics["loss"])


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as directory:
        trainer, first = fit(1, None, Path(directory))
        # The directory of rank 0 counts; whole weights, under the names that they have without sharding.
        checkpoint = Path(trainer.strategy.broadcast(f"{directory}/model.ckpt"))
        trainer.save_checkpoint(checkpoint)
        trainer, second = fit(2, checkpoint, Path(directory))
        if trainer.is_global_zero:
            LanguageModel().load_state_dict(torch.load(checkpoint)["state_dict"])
            print(f"loss after each epoch, in nats per byte: {first:.3f} {second:.3f}", flush=True)
        trainer.strategy.barrier()


if __name__ == "__main__":
    main()
