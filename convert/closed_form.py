"""The closed form of a plan, layer by layer, with nothing written: what `run` writes and `predict` judges."""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.convert.calibrate import StatisticsStore
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.factorize import damping_for
from mla_convert.convert.layer import LayerPlan, LayerQuality, convert_layer
from mla_convert.convert.plan import ConversionPlan
from mla_convert.convert.rope_select import RopeSlots
from mla_convert.convert.selection import Selection, select
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
    def of(cls, source: SourceCheckpoint, plan: ConversionPlan, store: StatisticsStore | None) -> ClosedForm:
        """Choose the model's frequency list; `store` is None where the plan needs no statistics."""
        return cls(source, plan, select(plan, source, store))

    def convert(self, weights: LayerWeights, statistics: LayerStatistics | None) -> ConvertedLayer:
        """Resolve the plan for one layer and convert it.

        Args:
            weights: The source layer, float64.
            statistics: Its calibration, None where the plan needs none.
        """
        plan, slots = self.plan, self.selection.slots(statistics)
        layer_plan = LayerPlan(
            slots=slots,
            qk_nope_head_dim=plan.qk_nope_head_dim,
            kv_lora_rank=plan.useful_rank,
            factorization=plan.factorization,
            key_rank=plan.key_rank,
            weighting=plan.weighting,
            measured_gamma=plan.gamma == "measured",
            output_constant=plan.attention_bias,
            damping=0.0 if statistics is None else damping_for(int(statistics.tokens), self.source.shape.hidden_size),
        )
        converted, quality = convert_layer(weights, statistics, self.source.rope.frequencies, layer_plan)
        return ConvertedLayer(slots, converted, quality)
