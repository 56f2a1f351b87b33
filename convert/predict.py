"""What a plan is expected to lose, from the closed form's residuals and the calibration statistics alone.

No token goes through a converted model: each layer's expected squared error of the attention output (math.md 2 and 3)
is set against what the layer's values write, the layers are added up, and a power law turns the sum into nats.

The first-order expansion takes errors at different keys as independent. What is lost with a rotation is not: it
swings with the distance and partly cancels in the average over keys, so it counts for less than what the latent loses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_convert.convert.calibrate import StatisticsStore
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.closed_form import ClosedForm, ConvertedLayer
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.rope_select import RopeSlots
from mla_convert.convert.selection import Measured
from mla_convert.convert.statistics import LayerStatistics
from mla_convert.convert.weights import LayerWeights

# Written beside every prediction: raised whenever the same plan would be predicted otherwise.
PREDICTOR = "closed-form-residuals/v2"
# Fitted to 20 plans of SmolLM2-135M, 80 to 192 of 384 numbers, and held to others in docs/fidelity.md. The order of
# plans follows from the weight alone; scale and power make it nats.
ROTATION_WEIGHT = 0.6
SCALE, POWER = 0.081, 1.37


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to lose.

    Attributes:
        kl: `KL(source ‖ target)`, nats per token.
        per_layer: Each layer's part of it.
    """

    kl: float
    per_layer: tuple[float, ...]


def predictable(plan: ConversionPlan) -> bool:
    """Whether the closed form of a plan measures what `predict` adds up: it must weigh errors by the output."""
    return plan.weighting == "output" and plan.rope_policy == "optimal" and plan.rope_stride != 0.5


def predict(source: SourceCheckpoint, store: StatisticsStore, plan: ConversionPlan) -> Prediction:
    """Predict the loss of a plan; the closed form of every layer is made and dropped again.

    Args:
        source: The source.
        store: Statistics of the plan's calibration text.
        plan: A plan for which `predictable` holds.
    """
    form = ClosedForm.of(source, plan, Measured(store, None))
    losses = []
    for layer in range(source.num_layers):
        weights, statistics = source.layer_weights(layer), store.load(layer)
        losses.append(layer_loss(plan, weights, statistics, form.convert(layer, weights, statistics)))
    return combine(losses)


def layer_loss(
    plan: ConversionPlan, weights: LayerWeights, statistics: LayerStatistics, converted: ConvertedLayer
) -> float:
    """One layer's expected squared output error over the squared norm of what its values write.

    Raises:
        ValueError: If the plan is not `predictable`.
    """
    factored = converted.quality.predicted_output_error
    if factored is None:
        raise ValueError(f"weighting {plan.weighting!r} does not measure the output error")
    rotary = rotation_loss(converted.slots, statistics, measured_gamma=plan.gamma == "measured")
    signal = value_signal(weights, statistics)
    # A layer that writes nothing has nothing to lose.
    return (max(factored, 0.0) + ROTATION_WEIGHT * rotary) / signal if signal > 0 else 0.0


def combine(losses: Sequence[float]) -> Prediction:
    """Layers' errors as one divergence, `SCALE·(Σ loss)^POWER`, shared out in proportion to the errors."""
    total = math.fsum(losses)
    kl = SCALE * total**POWER
    return Prediction(kl, tuple(kl * loss / total if total > 0 else 0.0 for loss in losses))


def rotation_loss(slots: RopeSlots, statistics: LayerStatistics, *, measured_gamma: bool) -> float:
    """Expected squared output error of replacing rotations by a constant: `λ·E|e^{-iθΔ} - c|²` (math.md 2)."""
    gamma = statistics.gamma  # (H, P)
    groups = statistics.key_second.shape[-1]
    lost = 1 - gamma.abs().square() if measured_gamma else 2 * (1 - gamma.real)
    diagonal = statistics.query_metric.diagonal(dim1=1, dim2=2)  # (H, d)
    power = (diagonal[:, : gamma.shape[1]] + diagonal[:, gamma.shape[1] :]) / 2  # (H, P)
    weight = (power * lost.clamp(min=0)).unflatten(0, (groups, -1)).sum(1).T  # (P, G)
    left = torch.eye(groups, dtype=torch.complex128).repeat(gamma.shape[1], 1, 1)  # (P, G, G)
    left = left - torch.einsum("spg,sph->pgh", slots.synthesis, slots.analysis)
    unrotated = torch.einsum("pgh,phk,pgk->pg", left, statistics.key_second, left.conj()).real
    return float((weight * unrotated).sum().clamp(min=0))


def value_signal(weights: LayerWeights, statistics: LayerStatistics) -> float:
    """`Σ_a π_a tr(W_O^a V C Vᵀ W_O^{aᵀ})`: what values write, as independent tokens, in the output's own units."""
    values = weights.v.repeat_interleave(weights.shape.heads_per_group, dim=0)  # (H, d, D)
    written = torch.einsum("hDv,hvd->hDd", weights.o, values)
    power = torch.einsum("hDd,de,hDe->h", written, statistics.value_input.second, written)
    return float((power * statistics.value_weight).sum())
