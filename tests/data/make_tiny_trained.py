"""Train the tiny Llama model that the tests convert, on real text.

A random model has flat spectra and attention without structure, so nothing that a conversion loses shows on
it. This one has learned enough English for its keys and values to have a decaying spectrum, and weighs a few
megabytes.

    OMP_NUM_THREADS=1 python tests/data/make_tiny_trained.py --out tests/data/tiny_trained
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mla_convert.assets.wikipedia import write_splits
from mla_convert.cache_dir import cache_root
from mla_convert.progress import track

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
SEQUENCE = 256
SAMPLE_TOKENS = 513
HELDOUT_WINDOWS = 256


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, beside the text."""

    steps: int
    batch: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    seed: int

    def rate_at(self, step: int) -> float:
        """Learning rate: linear warm-up, then a cosine down to a twentieth of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class LossPoint:
    """Mean cross-entropies in nats per token; `heldout` on the first windows of the held-out split."""

    step: int
    train: float
    heldout: float


@dataclass(frozen=True)
class Spectrum:
    """Singular values, descending, of one projection of one layer.

    `weight` are those of the matrix itself; `activation` those of its outputs (before rotation) on held-out
    text, centred, divided by the root of the number of tokens.
    """

    layer: int
    projection: str
    weight: list[float]
    activation: list[float]


@dataclass(frozen=True)
class Sample:
    """A held-out text short enough to keep with the model, and the model's loss on it (nats per token)."""

    title: str
    text: str
    tokens: int
    loss: float


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every text is representable without an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=512
    )


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts as one int64 stream, an end-of-text token in front of each."""
    pieces = [[tokenizer.eos_token_id, *tokenizer.encode(text)] for text in texts]
    return torch.tensor([token for piece in pieces for token in piece], dtype=torch.long)


def new_model(end_of_text: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=None,
            dtype="float32",
        )
    )


def random_windows(stream: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """One batch a step, [batch, SEQUENCE + 1]: shuffled windows, the grid shifted anew in every epoch."""
    generator = torch.Generator().manual_seed(recipe.seed)
    queue: list[int] = []
    while True:
        while len(queue) < recipe.batch:
            shift = int(torch.randint(SEQUENCE, (1,), generator=generator))
            starts = torch.arange(shift, len(stream) - SEQUENCE - 1, SEQUENCE)
            queue += starts[torch.randperm(len(starts), generator=generator)].tolist()
        taken, queue = queue[: recipe.batch], queue[recipe.batch :]
        yield torch.stack([stream[start : start + SEQUENCE + 1] for start in taken])


def window_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy of [batch, n + 1] tokens."""
    logits = model(batch[:, :-1], use_cache=False).logits  # [batch, n, vocabulary]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, stream: torch.Tensor, windows: int) -> float:
    """Mean loss over the first `windows` disjoint windows."""
    batches = [stream[i * SEQUENCE : (i + 1) * SEQUENCE + 1] for i in range(windows)]
    losses = [window_loss(model, torch.stack(batches[i : i + 8])).item() for i in range(0, windows, 8)]
    return sum(losses) / len(losses)


def train(
    model: LlamaForCausalLM, train_stream: torch.Tensor, heldout_stream: torch.Tensor, recipe: Recipe
) -> list[LossPoint]:
    """Train in place; returns a point about every fortieth of the run and at its end."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    every = max(1, recipe.steps // 40)
    curve: list[LossPoint] = []
    recent: list[float] = []
    windows = random_windows(train_stream, recipe)
    for step in track(range(recipe.steps), "train", unit="step"):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        loss = window_loss(model, next(windows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            measured = heldout_loss(model, heldout_stream, 16)
            curve.append(LossPoint(step + 1, round(sum(recent) / len(recent), 4), round(measured, 4)))
            recent = []
            print(json.dumps(asdict(curve[-1])), file=sys.stderr, flush=True)
    return curve


def unigram_cross_entropy(train_stream: torch.Tensor, heldout_stream: torch.Tensor) -> float:
    """Nats per token of the held-out stream under add-one token frequencies of the training stream."""
    counts = torch.bincount(train_stream, minlength=VOCABULARY).double() + 1
    return float(-torch.log(counts / counts.sum())[heldout_stream].mean())


@torch.no_grad()
def spectra(model: LlamaForCausalLM, stream: torch.Tensor) -> list[Spectrum]:
    """Weight and activation spectra of keys, values and both together, for every layer."""
    tokens = stream[: 64 * SEQUENCE].view(-1, SEQUENCE)
    result = []
    hidden = model.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    for index, layer in enumerate(model.model.layers):
        inputs = layer.input_layernorm(hidden[index]).flatten(0, 1).double()  # [tokens, hidden]
        key, value = layer.self_attn.k_proj.weight.double(), layer.self_attn.v_proj.weight.double()
        for name, weight in (("k", key), ("v", value), ("kv", torch.cat([key, value]))):
            outputs = inputs @ weight.T  # [tokens, rows]
            outputs = (outputs - outputs.mean(0)) / math.sqrt(len(outputs))
            rounded = [
                [float(f"{x:.4g}") for x in torch.linalg.svdvals(matrix).tolist()] for matrix in (weight, outputs)
            ]
            result.append(Spectrum(index, name, rounded[0], rounded[1]))
    return result


@torch.no_grad()
def heldout_sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, articles: list[dict[str, str]]
) -> Sample:
    """The start of the first held-out article that is long enough."""
    for article in articles:
        tokens = tokenizer.encode(article["text"])[:SAMPLE_TOKENS]
        text = str(tokenizer.decode(tokens))
        if len(tokens) == SAMPLE_TOKENS and tokenizer.encode(text) == tokens:
            loss = window_loss(model, torch.tensor([tokens])).item()
            return Sample(article["id"], text, SAMPLE_TOKENS, loss)
    raise ValueError("no held-out article is long enough for a sample")


def build(out: Path, recipe: Recipe) -> None:
    """Train and write `out`; it appears under its name only when it is whole."""
    began = time.perf_counter()
    torch.manual_seed(recipe.seed)
    splits = write_splits(cache_root() / "text")
    articles = {"calibration": read_jsonl(splits.calibration), "heldout": read_jsonl(splits.heldout)}
    tokenizer = train_tokenizer([article["text"] for article in articles["calibration"]])
    train_stream = encode_stream(tokenizer, [article["text"] for article in articles["calibration"]])
    heldout_stream = encode_stream(tokenizer, [article["text"] for article in articles["heldout"]])
    model = new_model(tokenizer.eos_token_id)
    curve = train(model, train_stream, heldout_stream, recipe)
    model.eval()
    tokens_seen = recipe.steps * recipe.batch * SEQUENCE
    report = {
        "command": "python " + " ".join(sys.argv),
        "recipe": {
            **asdict(recipe),
            "sequence": SEQUENCE,
            "optimizer": "AdamW, betas 0.9 and 0.95, clip 1.0",
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_seen": tokens_seen,
        "epochs": round(tokens_seen / len(train_stream), 2),
        "train_text": {**asdict(splits.calibration_facts), "tokens": len(train_stream)},
        "heldout_text": {**asdict(splits.heldout_facts), "tokens": len(heldout_stream)},
        "final_train_loss": curve[-1].train,
        "heldout_loss": heldout_loss(model, heldout_stream, HELDOUT_WINDOWS),
        "heldout_loss_tokens": HELDOUT_WINDOWS * SEQUENCE,
        "heldout_unigram_cross_entropy": unigram_cross_entropy(train_stream, heldout_stream),
        "sample": asdict(heldout_sample(model, tokenizer, articles["heldout"])),
        "loss_curve": [asdict(point) for point in curve],
        "spectra": [asdict(spectrum) for spectrum in spectra(model, heldout_stream)],
        "wall_seconds": round(time.perf_counter() - began, 1),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        staged = Path(scratch) / "model"
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        (staged / "training.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
        os.replace(staged, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist")
    parser.add_argument("--steps", type=int, default=3600, help="optimiser steps (default 3600)")
    parser.add_argument("--seed", type=int, default=1, help="of initialisation and shuffling (default 1)")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists already")
    recipe = Recipe(
        steps=arguments.steps,
        batch=8,
        learning_rate=3e-3,
        warmup_steps=100,
        weight_decay=0.1,
        seed=arguments.seed,
    )
    build(arguments.out, recipe)


if __name__ == "__main__":
    main()
