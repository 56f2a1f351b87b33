"""Loads a written checkpoint with stock transformers, in a process of its own, and compares it with the probe.

Run as `python -m mla_convert.convert.reload_child FOLDER PROBE_FOLDER`; prints one JSON object. It knows the stock
layout from transformers' `DeepseekV3Attention` and shares no code with the writer. One layer is in memory at a time; a
model that fits the budget is then loaded and run whole as well, as a user would.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mla_convert.convert.written import EMBEDDING, WrittenCheckpoint


@dataclass(frozen=True)
class ProbeSettings:
    """What the parent says of the probe.

    Attributes:
        residual_scale: Factor on the residual stream of the written model.
        softmax_scale: The source's softmax scale, which the reference's queries are in.
        layer_tolerance: Relative error allowed in one layer.
        whole_model_bytes: Largest model, in float32, that is loaded whole as well.
    """

    residual_scale: float
    softmax_scale: float
    layer_tolerance: float
    whole_model_bytes: int


@dataclass(frozen=True)
class ReloadReport:
    """What came out of the reloaded files.

    Attributes:
        loading_problems: Missing, unexpected or mismatched tensors.
        max_abs_error: Largest |Δlogit|, of both ways to load.
        max_abs_logit: Largest |logit| expected.
        layer_errors: Relative error of each layer's output, each fed the expected input.
        first_difference: The first layer and tensor beyond the tolerance, None if there is none.
        whole_model: Whether `from_pretrained` loaded the whole model too.
        loss: Next-token loss on the window of text in the probe, nats per token; None where there is none.
    """

    loading_problems: tuple[str, ...]
    max_abs_error: float
    max_abs_logit: float
    layer_errors: tuple[float, ...]
    first_difference: str | None
    whole_model: bool
    loss: float | None = None


def relative(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; the plain norm where `expected` is zero."""
    size = float(expected.double().norm())
    return float((actual.double() - expected.double()).norm()) / (size if size > 0 else 1.0)


def compare(folder: Path, probe: Path) -> ReloadReport:
    """Load, run and compare.

    Args:
        folder: A written checkpoint.
        probe: Folder with `settings.json`, `expected.safetensors` (`ids`, `logits`, and `loss_ids` where there is text)
            and one file per layer.

    Raises:
        InputRefused: For weight files that cannot be read.
    """
    settings = ProbeSettings(**json.loads((probe / "settings.json").read_text(encoding="utf-8")))
    written = WrittenCheckpoint.open(folder)
    problems = written.problems()
    if problems:
        return _unloadable(problems)
    expected = load_file(probe / "expected.safetensors")
    logits: Tensor = expected["logits"]
    with torch.inference_mode():
        hidden, errors, first = _compare_layers(written, probe, expected["ids"], settings)
        differences = [written.logit_difference(hidden, logits)]
        loss = written.loss(expected["loss_ids"]) if "loss_ids" in expected else None
    whole = written.float32_bytes <= settings.whole_model_bytes
    if whole:
        model, problems = _load_whole(folder)
        if problems:
            return _unloadable(problems)
        with torch.inference_mode():
            differences.append((model(input_ids=expected["ids"], use_cache=False).logits - logits).abs().max())
    # Unlike Python's max, this one lets NaN through.
    largest = float(torch.stack([difference.double() for difference in differences]).max())
    return ReloadReport((), largest, float(logits.abs().max()), errors, first, whole, loss)


def _unloadable(problems: tuple[str, ...]) -> ReloadReport:
    return ReloadReport(problems, float("inf"), 0.0, (), problems[0], whole_model=False)


def _load_whole(folder: Path) -> tuple[Any, tuple[str, ...]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    model, info = loaded
    problems = [f"{kind.replace('_', ' ')}: {name}" for kind in info for name in sorted(map(str, info[kind]))]
    return model.eval(), tuple(problems)


def _compare_layers(
    written: WrittenCheckpoint, probe: Path, ids: Tensor, settings: ProbeSettings
) -> tuple[Tensor, tuple[float, ...], str | None]:
    """The model's last hidden state, and each layer's error when it is fed the reference's input.

    So a fault is seen where it is and not further down.
    """
    positions = torch.arange(ids.shape[1])[None]
    first: str | None = None
    hidden = embedded = written.embed(ids)
    rope = written.rotary(embedded, positions)
    errors = []
    for index in range(written.config.num_hidden_layers):
        stages = load_file(probe / f"layer_{index:04d}.safetensors")
        scaled = stages["input"] * settings.residual_scale
        if index == 0 and relative(embedded, scaled) > settings.layer_tolerance:
            first = EMBEDDING
        with written.layer(index) as layer:
            seen = _run_with_stages(layer, scaled, positions, rope)
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
            name = None if first is not None else _first_bad_stage(layer, seen, stages, settings)
        errors.append(relative(seen["hidden"] - scaled, (stages["hidden"] - stages["input"]) * settings.residual_scale))
        first = first if name is None else f"model.layers.{index}.{name}"
    return hidden, tuple(errors), first


def _run_with_stages(layer: Any, hidden: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    attention = layer.self_attn
    query = attention.q_proj if attention.q_b_proj is None else attention.q_b_proj
    watched: dict[str, nn.Module] = {
        "query": query,
        "kv_a": attention.kv_a_proj_with_mqa,
        "latent": attention.kv_a_layernorm,
        "kv_b": attention.kv_b_proj,
        "output": attention.o_proj,
    }

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
            seen[name] = result
            if name == "output":
                seen["heads"] = args[0]

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in watched.items()]
    try:
        seen["hidden"] = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _first_bad_stage(
    layer: Any, seen: dict[str, Tensor], stages: dict[str, Tensor], settings: ProbeSettings
) -> str | None:
    """The tensor to blame, in the order of the computation."""
    attention = layer.self_attn
    d_nope, d_value = attention.qk_nope_head_dim, attention.v_head_dim
    batch, length = seen["query"].shape[:2]
    query = seen["query"].view(batch, length, attention.num_heads, -1)
    # Stock attention scales by its own width; the reference's queries are in the source's scale.
    query = query * (attention.scaling / settings.softmax_scale)
    key_value = seen["kv_b"].view(batch, length, attention.num_heads, -1)
    up_scale = _up_scale(seen, stages)
    slots = 2 * stages["key_rope"].shape[-2]
    key_rope = seen["kv_a"][..., attention.kv_lora_rank :]
    query_name = "q_proj" if attention.q_b_proj is None else "q_b_proj"
    checks = (
        (f"self_attn.{query_name}.weight (content rows)", query[..., :d_nope], stages["query_content"]),
        (
            f"self_attn.{query_name}.weight (rope rows)",
            query[..., d_nope : d_nope + slots],
            stages["query_rope"].flatten(-2),
        ),
        ("self_attn.kv_a_proj_with_mqa.weight (rope rows)", key_rope[..., :slots], stages["key_rope"].flatten(-2)),
        (
            "self_attn.kv_a_proj_with_mqa.weight (latent rows) or kv_a_layernorm.weight",
            seen["latent"][..., : stages["latent"].shape[-1]] * up_scale,
            stages["latent"],
        ),
        ("self_attn.kv_b_proj.weight (content key rows)", key_value[..., :d_nope], stages["key_content"]),
        ("self_attn.kv_b_proj.weight (value rows)", key_value[..., d_nope : d_nope + d_value], stages["value"]),
        ("self_attn: rope_parameters or softmax scale", seen["heads"], stages["heads"].flatten(-2)),
        ("self_attn.o_proj", seen["output"], stages["output"] * settings.residual_scale),
        (
            "mlp or layer norms",
            seen["hidden"] - stages["input"] * settings.residual_scale,
            (stages["hidden"] - stages["input"]) * settings.residual_scale,
        ),
    )
    for name, actual, wanted in checks:
        if not relative(actual, wanted) <= settings.layer_tolerance:
            return name
    return None


def _up_scale(seen: dict[str, Tensor], stages: dict[str, Tensor]) -> float:
    """The fixed factor between the cached latent and the reference's; `kv_b_proj` undoes it."""
    rank = stages["latent"].shape[-1]
    cached = seen["latent"][..., :rank].double()
    power = float((cached * cached).sum())
    return float((cached * stages["latent"].double()).sum()) / power if power > 0 else 1.0


def main() -> None:
    """Entry point of the child process."""
    report = compare(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
