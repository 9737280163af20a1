"""Audit a Hugging Face Trainer, and report on it.

    python pipelines/hf_trainer.py [--out DIR] [--steps N] [--workers N]

The one line that audits it is marked; the Trainer is an ordinary one. The model is a small GPT-2 on
bytes, made from a configuration; the corpus is the demo's. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from auditor import Run
from auditor.clean.mixes import MixSampler
from auditor.demo.corpus import BATCH_SAMPLES, WEIGHTS, WINDOW_BYTES, ShardRows, build, encode
from auditor.record.frameworks.transformers import audited
from auditor.show.produce import produce


def batch_of(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Bytes int64 [B, T], padded with -1, as GPT-2 takes them."""
    return {"input_ids": tokens.clamp(min=0), "labels": tokens.masked_fill(tokens < 0, -100)}


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    return batch_of(torch.tensor([sample["input_ids"] for sample in samples]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("hf-trainer"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    out, steps = arguments.out, arguments.steps

    corpus = build(out / "data", seed=0, steps=steps, plant=True)
    rows = ShardRows(corpus.shards)
    mix = MixSampler(rows.sources, WEIGHTS, seed=0, n_samples=steps * BATCH_SAMPLES)
    dataset = Dataset.from_list(rows.rows).select(list(mix))
    dataset = dataset.map(lambda row: {"input_ids": encode(row["text"]).tolist()})

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=WINDOW_BYTES, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            str(out / "checkpoints"),
            max_steps=steps,
            per_device_train_batch_size=BATCH_SAMPLES,
            train_sampling_strategy="sequential",  # the rows are in the order of the mix
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=arguments.workers,
        ),
        train_dataset=dataset,  # id, source, shard and row are kept by the record alone
        data_collator=collate,
    )
    trainer = audited(trainer, run=out / "run", every=5, probe=batch_of(corpus.probe))  # the line
    trainer.train()

    run = Run.open(out / "run")
    report = produce(run)
    print(report.explanation.verdict)
    print(f"page: {report.html}")


if __name__ == "__main__":
    main()
