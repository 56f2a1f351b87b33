"""Faults for the ladder to find: in the files of a conversion, and in the running model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mla_convert.decode.abi import DecodeCall, DecodeOutput
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.manifests.evaluation.ladder import Stage

LAYER = 1
ATTENTION = f"model.layers.{LAYER}.self_attn."


@dataclass(frozen=True)
class FileFault:
    """A change of the written tensors, and where the ladder must see it."""

    change: Callable[[dict[str, Tensor], Any], None]
    stage: Stage
    layer: int | None


@dataclass(frozen=True)
class RunFault:
    """A change of the loaded model or of its decoder, and what the ladder must say."""

    model: Callable[[Any], None] | None
    decoder: Callable[[DecodeCall], DecodeOutput] | None
    stage: Stage
    layer: int | None
    says: str


def damaged_copy(folder: Path, out: Path, change: Callable[[dict[str, Tensor], Any], None]) -> Path:
    """A copy of a converted folder with its tensors changed; its manifest is left as it was."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        if any(name.startswith(ATTENTION) for name in tensors) or len(list(out.glob("*.safetensors"))) == 1:
            change(tensors, config)
        save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})
    return out


def _rope_rows(config: Any) -> tuple[int, int]:
    return int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])


def _swap_rope_layout(tensors: dict[str, Tensor], config: Any) -> None:
    """Rotary rows of one layer laid out half-split where the configuration says interleaved."""
    nope, rope = _rope_rows(config)
    order = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])
    queries = tensors[ATTENTION + "q_proj.weight"].view(config["num_attention_heads"], nope + rope, -1)
    queries[:, nope:] = queries[:, nope:][:, order].clone()
    down = tensors[ATTENTION + "kv_a_proj_with_mqa.weight"]
    down[-rope:] = down[-rope:][order].clone()


def _by_head(tensors: dict[str, Tensor], config: Any) -> Tensor:
    return tensors[ATTENTION + "kv_b_proj.weight"].view(
        config["num_attention_heads"], config["qk_nope_head_dim"] + config["v_head_dim"], -1
    )


def _scale_values(tensors: dict[str, Tensor], config: Any) -> None:
    _by_head(tensors, config)[:, config["qk_nope_head_dim"] :] *= 1.02


def _forget_a_heads_keys(tensors: dict[str, Tensor], config: Any) -> None:
    _by_head(tensors, config)[0, : config["qk_nope_head_dim"]] = 0


def _turn_rope_queries_back(tensors: dict[str, Tensor], config: Any) -> None:
    nope, rope = _rope_rows(config)
    queries = tensors[ATTENTION + "q_proj.weight"].view(config["num_attention_heads"], nope + rope, -1)
    queries[:, nope + 1 :: 2] *= -1


def _scale(name: str, factor: float) -> Callable[[dict[str, Tensor], Any], None]:
    def change(tensors: dict[str, Tensor], _config: Any) -> None:
        tensors[name] *= factor

    return change


def _swap_output_heads(tensors: dict[str, Tensor], config: Any) -> None:
    output = tensors[ATTENTION + "o_proj.weight"].view(-1, config["num_attention_heads"], config["v_head_dim"])
    output[:, [0, 1]] = output[:, [1, 0]].clone()


def _wake_the_latent_norm(tensors: dict[str, Tensor], _config: Any) -> None:
    """Rows as large as the norm expects them: it then divides by each token's own length."""
    down, weight = tensors[ATTENTION + "kv_a_proj_with_mqa.weight"], tensors[ATTENTION + "kv_a_layernorm.weight"]
    latent = weight.shape[0]
    down[:latent] *= 1.0 / down[:latent].norm()
    weight *= 0.1


def _noise(part: str, share: float) -> Callable[[dict[str, Tensor], Any], None]:
    """Random noise of a share of a tensor's own size, in no direction in particular."""

    def change(tensors: dict[str, Tensor], _config: Any) -> None:
        weight = tensors[ATTENTION + part]
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        weight += (noise * share * weight.float().norm() / noise.norm()).to(weight.dtype)

    return change


def _unused_row(tensors: dict[str, Tensor], _config: Any) -> None:
    """A token that no window holds."""
    tensors["model.embed_tokens.weight"][1] *= -1


FILE_FAULTS: Mapping[str, FileFault] = {
    "noise of a thousandth in kv_b_proj": FileFault(_noise("kv_b_proj.weight", 1e-3), "value map", LAYER),
    "noise of a thousandth in o_proj": FileFault(_noise("o_proj.weight", 1e-3), "value map", LAYER),
    "an embedding that no window uses": FileFault(_unused_row, "logits", None),
    "rope layout swapped in one layer": FileFault(_swap_rope_layout, "position score", LAYER),
    "rotary queries mirrored in one layer": FileFault(_turn_rope_queries_back, "position score", LAYER),
    "values of one layer scaled by 1.02": FileFault(_scale_values, "value map", LAYER),
    "heads swapped in the output projection": FileFault(_swap_output_heads, "value map", LAYER),
    "one head's content keys forgotten": FileFault(_forget_a_heads_keys, "content score", LAYER),
    "latent norm active in one layer": FileFault(_wake_the_latent_norm, "latent row", LAYER),
    "MLP of one layer scaled": FileFault(
        _scale(f"model.layers.{LAYER}.mlp.down_proj.weight", 1.01), "rest of the layer", LAYER
    ),
    "input norm of one layer scaled": FileFault(
        _scale(f"model.layers.{LAYER}.input_layernorm.weight", 1.01), "rest of the layer", LAYER
    ),
    "last norm scaled": FileFault(_scale("model.norm.weight", 1.01), "logits", None),
}


def _norm_twice(model: Any) -> None:
    attention = model.model.layers[LAYER].self_attn
    norm = attention.kv_a_layernorm
    attention.kv_a_layernorm = _Twice(norm)


class _Twice(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.weight = norm, norm.weight

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.norm(self.norm(rows))
        return out


class _Never(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, rows: Tensor) -> Tensor:
        return rows


def _norm_never(model: Any) -> None:
    attention = model.model.layers[LAYER].self_attn
    attention.kv_a_layernorm = _Never(attention.kv_a_layernorm)


def _positions(change: Callable[[Tensor], Tensor], layer: int | None) -> Callable[[Any], None]:
    """Other positions for one layer, or for all."""

    def install(model: Any) -> None:
        rotary = model.model.rotary_emb
        if layer is None:
            rotary.register_forward_pre_hook(lambda _module, args: (args[0], change(args[1])))
            return

        def hook(_module: Any, args: Any, kwargs: Any) -> Any:
            hidden = kwargs["hidden_states"]
            places = change(kwargs["position_ids"])
            return args, {**kwargs, "position_embeddings": rotary(hidden, position_ids=places)}

        model.model.layers[layer].self_attn.register_forward_pre_hook(hook, with_kwargs=True)

    return install


def forget_the_first_page(call: DecodeCall) -> DecodeOutput:
    """A window where there is none: the oldest page of each sequence is not read."""
    page = call.pool.shape[1]
    if int(call.seq_lens.min()) <= page:
        return TorchBackend().run(call)
    return TorchBackend().run(
        replace(call, block_table=call.block_table[:, 1:].contiguous(), seq_lens=call.seq_lens - page)
    )


def overwrite_the_newest_row(call: DecodeCall) -> DecodeOutput:
    """Each appended row is lost in the cache once it has been read."""
    done = TorchBackend().run(call)
    if call.q.shape[1] == 1:
        last = int(call.seq_lens[0]) - 1
        page = int(call.block_table[0, last // call.pool.shape[1]])
        call.pool[page, last % call.pool.shape[1]] = 0
    return done


def scale_the_scores(call: DecodeCall) -> DecodeOutput:
    """A backend with a softmax scale of its own."""
    return TorchBackend().run(replace(call, scale=call.scale * 1.1))


# Below the rounding of half types, or made of the constants that the norm has in float32.
FLOAT32_ONLY = frozenset({name for name in FILE_FAULTS if name.startswith(("noise", "latent norm"))})

RUN_FAULTS: Mapping[str, RunFault] = {
    "latent norm applied twice": RunFault(_norm_twice, None, "latent row", LAYER, "the latent norm was applied twice"),
    "latent cached before its norm": RunFault(_norm_never, None, "latent row", LAYER, "cached before the latent norm"),
    "cache off by one position": RunFault(
        _positions(lambda places: places + 1, None), None, "rope row", 0, "positions are off by +1"
    ),
    "one layer off by one position": RunFault(
        _positions(lambda places: places + 1, LAYER), None, "rope row", LAYER, "positions are off by +1"
    ),
    "keys not rotated in one layer": RunFault(
        _positions(lambda places: places * 0, LAYER), None, "rope row", LAYER, "not rotated"
    ),
    "window lost": RunFault(None, forget_the_first_page, "visible set", 0, "the last query sees the newest"),
    "appended rows lost": RunFault(
        None, overwrite_the_newest_row, "latent row", 0, "right for the prefill, wrong from appended token"
    ),
    "another softmax scale": RunFault(
        None, scale_the_scores, "attention probability", 0, "outputs over right inputs differ"
    ),
}
