"""What a conversion did to each layer."""

from __future__ import annotations

from pydantic import Field, model_validator

from mla_convert.manifests.record import Record


class RopeSlot(Record):
    """One rotated pair of the target's shared rotary row, and the source component that it carries.

    `mixes` are the source pairs that it combines, `pair` the one of them whose frequency is closest to `frequency`.
    """

    slot: int = Field(ge=0)
    pair: int = Field(ge=0)
    frequency: float
    component: int | None
    kv_head: int | None
    mixes: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_origin(self) -> RopeSlot:
        if (self.component is None) == (self.kv_head is None):
            raise ValueError("a slot carries either a component over the heads or one kv_head")
        if self.pair not in self.mixes:
            raise ValueError("the pair of a slot is one of those that it combines")
        return self


class LayerReceipt(Record):
    """Ranks, rotary slots and measured errors of one converted layer; errors are relative Frobenius norms.

    The map errors and the weighted ones are those of the closed form. `written_*_probes` are of what was written,
    refinement included, in float64 before it was stored: random projections of what no change of basis alters, the
    score as a form of two inputs (its mean over the distances, and the rest) and the product of output and value
    projection. `mla/map_error.py` makes them again from the files.
    """

    index: int = Field(ge=0)
    kv_lora_rank: int = Field(gt=0)
    useful_rank: int = Field(ge=0)
    key_rank: int | None
    value_rank: int | None
    rope_slots: tuple[RopeSlot, ...]
    key_map_error: float = Field(ge=0)
    value_map_error: float = Field(ge=0)
    weighted_key_error: float | None = Field(ge=0)
    weighted_value_error: float | None = Field(ge=0)
    singular_energy_kept: float = Field(ge=0)
    predicted_output_error: float | None = Field(ge=0)
    written_content_probes: tuple[float, ...]
    written_position_probes: tuple[float, ...]
    written_value_probes: tuple[float, ...]
    singular_values: tuple[float, ...]
