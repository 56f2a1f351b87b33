"""Text from a checkpoint folder with transformers' `generate()`, a converted one from its latent cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.source_location import locate_source
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.decode.dispatch import AUTO
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval import defaults
from mla_convert.eval.cache_bytes import CacheMeasurement, count_cache, find_cache
from mla_convert.eval.loading import load_model
from mla_convert.eval.serving import check_backend, served
from mla_convert.manifests.models import MANIFEST_NAME, load

# Logits are divided by it in float32, which must not overflow.
LOWEST_TEMPERATURE = 1e-6
Ending = Literal["end-of-text", "length"]


@dataclass(frozen=True)
class GenerateOptions:
    """What a user asks for.

    Attributes:
        prompt: Text to continue, or the user's message with `chat`.
        max_new_tokens: Most tokens to add.
        temperature: 0 takes the likeliest token each time; above, tokens are drawn from the whole vocabulary.
        chat: Put the prompt through the tokenizer's chat template.
        seed: Of the draws.
        backend: What a converted model runs on, see `served`.

    Raises:
        UsageFault: For values out of range.
    """

    prompt: str
    max_new_tokens: int = defaults.NEW_TOKENS
    temperature: float = 0.0
    chat: bool = False
    seed: int = 0
    backend: str = AUTO

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageFault("--max-new-tokens is out of range", expected="1 or more", found=str(self.max_new_tokens))
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise UsageFault(
                "--temperature is out of range",
                expected=f"0, or {LOWEST_TEMPERATURE:g} or more",
                found=str(self.temperature),
                remedy="0 takes the likeliest token.",
            )


@dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
        checkpoint: What the user gave.
        canonical_mla_id: Of a converted folder, else None.
        options: What was asked for.
        text: The continuation, special tokens left out.
        prompt_ids: Tokens that went in.
        new_ids: Tokens that were added, an end token included.
        ending: Why it stopped.
        seconds: Time of `generate()`, without loading.
        cache: What the cache held at the end.
        receipt: What ran, see `Served.receipt`.
    """

    checkpoint: str
    canonical_mla_id: str | None
    options: GenerateOptions
    text: str
    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    ending: Ending
    seconds: float
    cache: CacheMeasurement
    receipt: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """The whole result."""
        return {
            "checkpoint": self.checkpoint,
            "canonical_mla_id": self.canonical_mla_id,
            "prompt": self.options.prompt,
            "text": self.text,
            "prompt_tokens": len(self.prompt_ids),
            "new_tokens": len(self.new_ids),
            "prompt_ids": list(self.prompt_ids),
            "new_ids": list(self.new_ids),
            "ending": self.ending,
            "seconds": self.seconds,
            "max_new_tokens": self.options.max_new_tokens,
            "temperature": self.options.temperature,
            "chat": self.options.chat,
            "seed": self.options.seed,
            "dtype": self.cache.dtype,
            "cache": self.cache.to_json(),
            "receipt": self.receipt,
        }


def _refuse_broken_text(prompt: str) -> None:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        # What the shell passed on as bytes that are no UTF-8 arrives as lone surrogates.
        raise InputRefused(f"the prompt is not Unicode text: {error.reason}", where="--prompt") from error


def generate(checkpoint: str, options: GenerateOptions) -> Generation:
    """Continue a prompt with a converted folder, or with a source as it is, in float32.

    Args:
        checkpoint: A folder, GGUF file or Hub id.
        options: What is wanted.

    Raises:
        InputRefused: If it cannot be loaded, has no tokenizer or chat template, or the prompt is empty or
            longer than the model's positions.
    """
    _refuse_broken_text(options.prompt)
    check_backend(options.backend)
    location = locate_source(checkpoint)
    identity, stored = _identity(location.folder, checkpoint)
    tokenizer = load_tokenizer(location.folder)
    prompt_ids = _prompt_ids(tokenizer, options, checkpoint)
    model = load_model(location.folder)
    _refuse_length(model, prompt_ids, options, checkpoint)
    started = time.perf_counter()
    with served(model, options.backend) as running:
        output = continue_ids(model, torch.tensor([prompt_ids]), options)
        seconds = time.perf_counter() - started
        cache = count_cache(find_cache(output), stored)
    new_ids = tuple(output.sequences[0, len(prompt_ids) :].tolist())
    return Generation(
        checkpoint=checkpoint,
        canonical_mla_id=identity,
        options=options,
        text=tokenizer.decode(new_ids, skip_special_tokens=True),
        prompt_ids=tuple(prompt_ids),
        new_ids=new_ids,
        ending="end-of-text" if new_ids and new_ids[-1] in end_ids(model) else "length",
        seconds=seconds,
        cache=cache,
        receipt=running.receipt,
    )


def _prompt_ids(tokenizer: Any, options: GenerateOptions, where: str) -> list[int]:
    if options.chat:
        if not tokenizer.chat_template:
            raise InputRefused("the tokenizer has no chat template", where=where, remedy="Leave --chat out.")
        messages = [{"role": "user", "content": options.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the opening tokens itself.
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(options.prompt)["input_ids"]
    if not ids:
        raise InputRefused("an empty prompt, and a tokenizer without an opening token", where="--prompt")
    return ids


def _refuse_length(model: Any, prompt_ids: list[int], options: GenerateOptions, where: str) -> None:
    positions = int(model.config.max_position_embeddings)
    if len(prompt_ids) + options.max_new_tokens > positions:
        raise InputRefused(
            "prompt and continuation are longer than the model's positions",
            expected=f"at most {positions} tokens",
            found=f"{len(prompt_ids)} + {options.max_new_tokens}",
            where=where,
        )


def _identity(folder: Path, checkpoint: str) -> tuple[str | None, torch.dtype]:
    """A converted folder's id, None for a source, and the dtype that attention weights are stored in."""
    if not (folder / MANIFEST_NAME).is_file():
        return None, open_source(checkpoint).attention_dtype
    manifest = load(folder)
    return manifest.canonical_mla_id, getattr(torch, manifest.method.output_dtype)


def end_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a text, by the checkpoint's generation settings."""
    ends = model.generation_config.eos_token_id
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)


@torch.inference_mode()
def continue_ids(model: Any, prompt: Tensor, options: GenerateOptions) -> Any:
    """Continue (B, T) prompts of one length, without padding, by what `options` says of the choice of tokens.

    Returns:
        What `generate()` returns; a sequence that ends before the others is filled up behind its end token.
    """
    from transformers import GenerationConfig

    # Named in full, because what is left open here is filled in from the checkpoint's generation_config.json.
    sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        **(sampling if options.temperature > 0 else {"do_sample": False}),
        max_new_tokens=options.max_new_tokens,
        repetition_penalty=1.0,
        num_beams=1,
        return_dict_in_generate=True,
        pad_token_id=next(iter(end_ids(model)), 0),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
