"""The closed form of a plan, layer by layer, with nothing written: what `run` writes and `predict` judges."""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.convert.attention_sample import sample_attention
from mla_convert.convert.calibration_evidence import CalibrationEvidence
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.factorize import damping_for
from mla_convert.convert.layer import LayerPlan, LayerQuality, convert_layer
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.rope_select import RopeSlots
from mla_convert.convert.selection import Measured, Selection, needs_sample, select
from mla_convert.convert.statistics import LayerStatistics
from mla_convert.convert.weights import LayerWeights
from mla_convert.mla.weights import MLALayerWeights


@dataclass(frozen=True)
class ConvertedLayer:
    """One layer in closed form.

    Attributes:
        slots: Its rotary slots.
        weights: The MLA layer, float64.
        quality: Its distance from the source, by its maps.
    """

    slots: RopeSlots
    weights: MLALayerWeights
    quality: LayerQuality


@dataclass(frozen=True)
class ClosedForm:
    """A plan with its frequency list, ready to convert any layer.

    Attributes:
        source: The source.
        plan: What to do.
        selection: Rotary slots of every layer.
    """

    source: SourceCheckpoint
    plan: ConversionPlan
    selection: Selection

    @classmethod
    def of(cls, source: SourceCheckpoint, plan: ConversionPlan, measured: Measured | None) -> ClosedForm:
        """Choose the model's frequency list; `measured` is None where the plan needs no statistics."""
        return cls(source, plan, select(plan, source, measured))

    def convert(self, layer: int, weights: LayerWeights, statistics: LayerStatistics | None) -> ConvertedLayer:
        """Resolve the plan for one layer and convert it.

        Args:
            layer: Index.
            weights: The source layer, float64.
            statistics: Its calibration, None where the plan needs none.
        """
        plan, slots = self.plan, self.selection.slots(layer, weights)
        damping = 0.0
        if statistics is not None and plan.damping == "auto":
            damping = damping_for(int(statistics.tokens), self.source.shape.hidden_size)
        layer_plan = LayerPlan(
            slots=slots,
            qk_nope_head_dim=plan.qk_nope_head_dim,
            kv_lora_rank=plan.useful_rank,
            factorization=plan.factorization,
            key_rank=plan.key_rank,
            weighting=plan.weighting,
            measured_gamma=plan.gamma == "measured",
            output_constant=plan.attention_bias,
            damping=damping,
            centred=plan.centring == "auto",
            balance=self.selection.balance(layer, weights, slots),
            rank_rule=plan.rank_rule,
            whole_keys=plan.rope_policy == "mean",
        )
        converted, quality = convert_layer(weights, statistics, layer_plan)
        return ConvertedLayer(slots, converted, quality)


def measure_for(
    source: SourceCheckpoint, plan: ConversionPlan, evidence: CalibrationEvidence | None
) -> Measured | None:
    """What calibration measured, with attention inputs where the plan asks for them; None without calibration."""
    if evidence is None:
        return None
    sample = sample_attention(source, evidence.store.digest, evidence.windows.ids) if needs_sample(plan) else None
    return Measured(evidence.store, sample)
