"""The ladder's loop: source and conversion side by side, two layers in memory at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.reload_child import relative
from mla_convert.convert.source_model import StreamedSource
from mla_convert.convert.weights import LayerWeights
from mla_convert.errors import CheckFailed
from mla_convert.eval.ladder.scores import ScoreErrors, WindowAttention, score_errors, source_window, target_window
from mla_convert.eval.ladder.source_maps import source_maps
from mla_convert.eval.ladder.target_layers import TargetLayers
from mla_convert.manifests.evaluation.ladder import LayerLadder
from mla_convert.mla.attention import MLAFactors
from mla_convert.mla.map_error import (
    InputMetric,
    LayerMaps,
    MapErrors,
    MapProbes,
    map_errors,
    map_probes,
    maps_of_factors,
)
from mla_convert.progress import track


@dataclass(frozen=True)
class LayerFindings:
    """One layer's line of the ladder, and what is judged besides.

    Attributes:
        line: For the receipt.
        maps: Distance of the maps with every input direction alike.
        probes: Of the converted maps, in the source's scale.
        class_error: Output of transformers' own attention class against the factors, relative.
        spread: Standard deviation of the latent norm's factor over the tokens, relative to its mean.
    """

    line: LayerLadder
    maps: MapErrors
    probes: MapProbes
    class_error: float
    spread: float


@dataclass(frozen=True)
class LadderRun:
    """All layers, and the parts around them.

    Attributes:
        layers: In order.
        embedding_error: Of the converted embedding, relative.
        logit_error: Of the converted last norm and head on the source's own states, relative.
    """

    layers: tuple[LayerFindings, ...]
    embedding_error: float
    logit_error: float


@dataclass(frozen=True)
class _Ran:
    """One layer's stages over all windows, float32 (N, T, D)."""

    normed: Tensor
    attended: Tensor
    middle: Tensor
    after: Tensor


@dataclass(frozen=True)
class _Fed:
    """Parts of a converted layer, each given what the source's has, (N, T, D)."""

    normed: Tensor
    attended: Tensor
    mlp: Tensor


@dataclass(frozen=True)
class Ladder:
    """A pair of checkpoints and the windows that go through both.

    Attributes:
        source: The source.
        target: The conversion.
        ids: (N, T) int64.
    """

    source: SourceCheckpoint
    target: TargetLayers
    ids: Tensor

    @torch.inference_mode()
    def run(self) -> LadderRun:
        """Every layer in turn, and what stands before and behind them.

        Raises:
            CheckFailed: For activations that are not finite, naming the model and the layer.
        """
        streamed, written = StreamedSource(self.source), self.target.written
        scale = self.target.residual_scale
        stream, converted = streamed.embed(self.ids), written.embed(self.ids)
        embedding = relative(converted / scale, stream)
        rope = streamed.rotary(self.ids.shape[1])
        target_rope = written.rotary(converted, torch.arange(self.ids.shape[1])[None])
        found = []
        for index in track(range(self.source.num_layers), "ladder"):
            with streamed.layer(index) as layer:
                ours = _run(layer, stream, rope)
            with written.layer(index) as layer:
                own = _run(layer, converted, target_rope)
                fed = _Fed(
                    layer.input_layernorm(stream * scale),
                    _attend(layer, ours.normed, target_rope),
                    _mlp(layer, ours.middle * scale) / scale,
                )
            _require_finite(index, ours.after, own.after)
            found.append(self._judge(index, ours, own, fed))
            stream, converted = ours.after, own.after
        last = stream[:, -1:]
        logits = torch.cat(list(written.logit_blocks(last * scale)), dim=-1)
        return LadderRun(tuple(found), embedding, relative(logits, streamed.logits(last)))

    def _judge(self, index: int, ours: _Ran, own: _Ran, fed: _Fed) -> LayerFindings:
        weights, factors = self.source.layer_weights(index), self.target.factors(index)
        frequencies, scale = self.source.rope.frequencies, self.target.residual_scale
        maps = source_maps(weights, frequencies), _maps(factors, scale)
        flat = ours.normed.double().flatten(0, 1)  # (N·T, D)
        covariance = (flat - flat.mean(0)).T @ (flat - flat.mean(0)) / len(flat)
        metric = InputMetric(flat.T @ flat / len(flat), covariance)
        plain, weighted = map_errors(*maps), map_errors(*maps, metric)
        scores, outputs = self._windows(weights, factors, ours.normed.double(), frequencies)
        expected = torch.stack(outputs)
        line = LayerLadder(
            index=index,
            key_map_error=plain.key,
            weighted_key_map_error=weighted.key,
            value_map_error=plain.value,
            weighted_value_map_error=weighted.value,
            singular_energy_kept=energy_kept(weights, metric.key, factors),
            content_score_error=_root(scores.content),
            position_score_error=_root(scores.position),
            score_error=_root(scores.score),
            row_max_error=scores.row_max / scores.rows,
            lse_error=scores.lse / scores.rows,
            total_variation=min(1.0, scores.total_variation / scores.rows),
            output_error=relative(expected / scale, ours.attended),
            prefix_output_error=relative(own.attended / scale, ours.attended),
            stream_error=relative(own.after / scale, ours.after),
            rest_error=max(relative(fed.mlp, ours.after - ours.middle), relative(fed.normed, ours.normed)),
        )
        return LayerFindings(
            line, plain, map_probes(maps[1]), relative(fed.attended, expected), norm_spread(factors, flat)
        )

    def _windows(
        self, weights: LayerWeights, factors: MLAFactors, inputs: Tensor, frequencies: Tensor
    ) -> tuple[ScoreErrors, list[Tensor]]:
        total: ScoreErrors | None = None
        outputs = []
        for window in inputs:
            theirs: WindowAttention = target_window(factors, window)
            errors = score_errors(source_window(weights, window, frequencies), theirs)
            total = errors if total is None else total.plus(errors)
            outputs.append(theirs.output)
        assert total is not None  # there is at least one window
        return total, outputs


def energy_kept(weights: LayerWeights, covariance: Tensor, factors: MLAFactors) -> float:
    """Share of the squared spectrum of keys and values on this text that as many numbers as are cached can carry.

    Args:
        weights: Of the source.
        covariance: (D, D) of the layer's inputs.
        factors: Of the conversion; says how many numbers a row has.
    """
    rows = torch.cat([weights.k, weights.v]).flatten(0, 1)  # (2·G·d, D)
    spectrum = torch.linalg.eigvalsh(rows @ covariance @ rows.T).clamp(min=0).flip(0)  # (2·G·d,)
    total = float(spectrum.sum())
    return float(spectrum[: factors.kv_down.shape[0]].sum()) / total if total > 0 else 1.0


def norm_spread(factors: MLAFactors, inputs: Tensor) -> float:
    """Of the latent norm's factor over the tokens: standard deviation over mean; 0 where the norm does nothing.

    Args:
        factors: Of the conversion.
        inputs: (N, D) float64, after the layer's input norm.
    """
    if factors.latent_norm is None:
        return 0.0
    width = factors.latent_width
    raw = inputs @ factors.kv_down[:width].T  # (N, d_c)
    raw = raw if factors.kv_down_bias is None else raw + factors.kv_down_bias[:width]
    factor = (raw.square().mean(-1) + factors.latent_norm.eps).rsqrt()  # (N,)
    return float(factor.std(correction=0) / factor.mean())


def _maps(factors: MLAFactors, scale: float) -> LayerMaps:
    """The conversion's maps in the source's scale: what its output carries of the residual scale is no error."""
    maps = maps_of_factors(factors)
    return replace(maps, values=replace(maps.values, output=maps.values.output / scale))


def _run(layer: Any, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> _Ran:
    """(N, T, D) through one pre-norm decoder layer."""
    normed = layer.input_layernorm(hidden)
    attended = _attend(layer, normed, rope)
    middle = hidden + attended
    return _Ran(normed, attended, middle, middle + _mlp(layer, middle))


def _attend(layer: Any, normed: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    positions = torch.arange(normed.shape[1])[None]
    attended: Tensor = layer.self_attn(
        hidden_states=normed, attention_mask=None, position_ids=positions, position_embeddings=rope
    )[0]
    return attended


def _mlp(layer: Any, middle: Tensor) -> Tensor:
    added: Tensor = layer.mlp(layer.post_attention_layernorm(middle))
    return added


def _root(squares: tuple[float, float]) -> float:
    error, size = squares
    return math.sqrt(error / size) if size > 0 else math.sqrt(error)


def _require_finite(index: int, source: Tensor, target: Tensor) -> None:
    for name, hidden in (("source", source), ("target", target)):
        if not bool(torch.isfinite(hidden).all()):
            raise CheckFailed(
                f"the {name} computes values that are not finite", found="NaN or infinity", where=f"layer {index}"
            )
