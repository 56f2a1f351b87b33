"""Loads a written checkpoint with stock transformers, in a process of its own, and compares it with the probe.

Run as `python -m mla_convert.convert.reload_child FOLDER PROBE_FOLDER`; prints one JSON object. It knows the stock
layout from transformers' `DeepseekV3Attention` and shares no code with the writer. One layer is in memory at a time; a
model that fits the budget is then loaded and run whole as well, as a user would.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from mla_convert.convert.tensor_files import TensorFiles, open_tensor_files, row_blocks

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROTARY = "model.rotary_emb."
FLOAT32_BYTES = 4


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
    written = _Written.open(folder)
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


@dataclass(frozen=True)
class _Written:
    """A written checkpoint: the class that its configuration names, without weights, and its files.

    Attributes:
        config: Its configuration.
        model: On the meta device.
        files: Its tensors, read one at a time.
    """

    config: Any
    model: Any
    files: TensorFiles

    @classmethod
    def open(cls, folder: Path) -> _Written:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return cls(config, model.eval(), open_tensor_files(folder))

    @property
    def float32_bytes(self) -> int:
        """Size of the model in float32."""
        return FLOAT32_BYTES * int(sum(value.numel() for value in self.model.parameters()))

    def problems(self) -> tuple[str, ...]:
        """Every tensor that the class has and the files lack, the other way round, or in another shape.

        `from_pretrained` is laxer: it skips names that a class declares harmless (`model.layers.61.*` here).
        """
        state = self.model.state_dict()
        tied = self.model.all_tied_weights_keys
        wanted = {name: tuple(value.shape) for name, value in state.items() if name not in tied}
        found = {name: info.shape for name, info in self.files.infos.items()}
        buffers = {name for name, _ in self.model.named_buffers() if not name.startswith(ROTARY)}
        return (
            *(f"missing keys: {name}" for name in sorted(wanted.keys() - found.keys())),
            *(f"unexpected keys: {name}" for name in sorted(found.keys() - wanted.keys())),
            *(
                f"mismatched keys: {name}"
                for name in sorted(wanted.keys() & found.keys())
                if wanted[name] != found[name]
            ),
            # Nothing in the files would say what they hold.
            *(f"unknown buffers: {name}" for name in sorted(buffers - state.keys())),
        )

    def read(self, name: str) -> Tensor:
        """One tensor in float32."""
        return self.files.read(name).float()

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D) float32."""
        return nn.functional.embedding(ids, self.files.read(EMBEDDING)).float()

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines; the skeleton's own frequencies are on the meta device."""
        made: tuple[Tensor, Tensor] = type(self.model.model.rotary_emb)(self.config)(hidden, position_ids=positions)
        return made

    @contextmanager
    def layer(self, index: int) -> Iterator[Any]:
        """One decoder layer with its weights, which go when the block ends."""
        layer = self.model.model.layers[index]
        prefix = f"model.layers.{index}."
        layer.load_state_dict({name: self.read(prefix + name) for name in layer.state_dict()}, strict=True, assign=True)
        try:
            yield layer
        finally:
            layer.to("meta")

    def logit_difference(self, hidden: Tensor, expected: Tensor) -> Tensor:
        """Largest |Δlogit| of the last layer's output (B, T, D) against (B, T, V), some rows of the head at a time."""
        differences, start = [], 0
        for logits in self._logits(hidden):
            differences.append((logits - expected[..., start : start + logits.shape[-1]]).abs().max())
            start += logits.shape[-1]
        return torch.stack(differences).max()

    def loss(self, ids: Tensor) -> float:
        """Mean negative log-likelihood of tokens 2 to T of (1, T), nats."""
        positions = torch.arange(ids.shape[1])[None]
        hidden = self.embed(ids)
        rope = self.rotary(hidden, positions)
        for index in range(self.config.num_hidden_layers):
            with self.layer(index) as layer:
                hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
        total = torch.full(ids[0, 1:].shape, float("-inf"))  # (T - 1,), log-sum-exp over the rows so far
        chosen, start = torch.zeros_like(total), 0
        for logits in self._logits(hidden[:, :-1]):
            total = torch.logaddexp(total, logits[0].logsumexp(-1))
            local = ids[0, 1:] - start
            inside = (local >= 0) & (local < logits.shape[-1])
            chosen[inside] = logits[0, inside].gather(-1, local[inside, None])[:, 0]
            start += logits.shape[-1]
        return float((total - chosen).mean())

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """(B, T, D) output of the last layer -> (B, T, rows) float32, some rows of the head at a time."""
        norm = self.model.model.norm
        norm.load_state_dict({"weight": self.read(NORM)}, strict=True, assign=True)
        normed = norm(hidden)
        for rows in row_blocks(self.files.read(self.model.all_tied_weights_keys.get(HEAD, HEAD))):
            yield normed @ rows.float().T


def _load_whole(folder: Path) -> tuple[Any, tuple[str, ...]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    model, info = loaded
    problems = [f"{kind.replace('_', ' ')}: {name}" for kind in info for name in sorted(map(str, info[kind]))]
    return model.eval(), tuple(problems)


def _compare_layers(
    written: _Written, probe: Path, ids: Tensor, settings: ProbeSettings
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
