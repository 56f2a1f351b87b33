"""Tiny random checkpoints of every supported family, written by transformers' own classes.

The defaults are the smallest source that maps onto MLA exactly: 4 query heads, one KV head of size 16
(so that heads x head size differs from the hidden width), random norm weights, and weights large enough
that a fault in the layout moves the logits by whole units.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

Dtype = Literal["float32", "bfloat16", "float16"]
WeightFormat = Literal["safetensors", "bin"]

SHARD_BYTES = 40_000
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
# Every printable ASCII character and the newline, less "`" and "~": with the three above exactly 97.
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 126) if chr(code) != "`")
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@dataclass(frozen=True)
class Family:
    """The transformers classes of one family, and what its configuration needs beyond the shared fields."""

    config: str
    model: str
    fixed: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    # Mistral's class default is a window of 4,096; released models from v0.2 on have none.
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
}


class PicoKeywords(TypedDict, total=False):
    """The options of `make_pico`; defaults and meanings are those of `PicoOptions`."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    intermediate_size: int
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any] | None
    max_position_embeddings: int
    rms_norm_eps: float
    dtype: Dtype
    sharded: bool
    weight_format: WeightFormat
    weight_std: float
    tokenizer: bool
    chat_template: bool
    seed: int
    config: Mapping[str, Any]


@dataclass(frozen=True)
class PicoOptions:
    """One tiny model. `config` is passed on to the configuration class last, so it overrides the rest."""

    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 16
    hidden_size: int = 48
    num_layers: int = 4
    vocab_size: int = 97
    intermediate_size: int = 64
    tie_word_embeddings: bool = False
    rope_parameters: Mapping[str, Any] | None = None
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-6
    dtype: Dtype = "float32"
    sharded: bool = False
    weight_format: WeightFormat = "safetensors"
    weight_std: float = 0.3
    tokenizer: bool = True
    chat_template: bool = False
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


def make_pico(folder: Path, family: str = "llama", **options: Unpack[PicoKeywords]) -> Path:
    """Write one tiny random model, its configuration and its tokenizer into `folder`, and return `folder`.

    The same options always give the same bytes. Matrices, embeddings and biases are normal with
    standard deviation `weight_std`; norm weights are uniform in 0.5 to 1.5, so that a norm that is
    dropped or doubled shows.
    """
    chosen = PicoOptions(**options)
    folder.mkdir(parents=True, exist_ok=True)
    model = build_pico_model(family, chosen)
    if chosen.weight_format == "safetensors":
        model.save_pretrained(folder, max_shard_size=SHARD_BYTES if chosen.sharded else "1GB")
    else:
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        _save_bin(model.state_dict(), folder, chosen.sharded)
    if chosen.tokenizer:
        _save_tokenizer(folder, chosen, family)
    return folder


def build_pico_model(family: str, options: PicoOptions) -> transformers.PreTrainedModel:
    """The model of `make_pico` in memory, in evaluation mode."""
    recipe = FAMILIES[family]
    rope = options.rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0}
    fields: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": options.max_position_embeddings,
        "rms_norm_eps": options.rms_norm_eps,
        "rope_parameters": dict(rope),
        "tie_word_embeddings": options.tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = getattr(transformers, recipe.config)(**{**fields, **recipe.fixed, **options.config})
    # Forked: a model made on demand must not shift the random numbers of the test that asked for it.
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, recipe.model)(config)
    _randomise(model, options)
    model.to(getattr(torch, options.dtype))
    return model.eval()


def _randomise(model: transformers.PreTrainedModel, options: PicoOptions) -> None:
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, options.weight_std, generator=generator)


def _save_bin(state: Mapping[str, torch.Tensor], folder: Path, sharded: bool) -> None:
    if not sharded:
        torch.save(dict(state), folder / "pytorch_model.bin")
        return
    names = list(state)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        shard = f"pytorch_model-{number:05d}-of-{len(parts):05d}.bin"
        # Cloned: a slice of the dictionary must not drag aliased storage of another shard along.
        torch.save({name: state[name].clone() for name in part}, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _save_tokenizer(folder: Path, options: PicoOptions, family: str) -> None:
    """One token per character, byte-level without merges: the form that every family's tokenizer class keeps.

    The vocabulary is cut to the model's; what lies outside reads as `<unk>`.
    """
    characters = CHARACTERS.replace(" ", "Ġ").replace("\n", "Ċ")  # as ByteLevel spells them
    tokens = [*SPECIAL_TOKENS, *characters][: options.vocab_size]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    if options.chat_template:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    if family == "qwen2":
        # Beside `qwen2` transformers takes this class whatever the file says; released files name it.
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
