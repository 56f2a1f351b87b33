"""The rotary angles that are re-derived from a config are those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from mla_convert.manifests.check_config import derive_rotation
from mla_convert.manifests.check_records import FREQUENCY_TOLERANCE

FACTORS = [1.0, 1.5, 0.25, 700.0]
CASES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "a derived base": {"rope_type": "default", "rope_theta": 123.456},
    "longrope without scaling": {"factor": 1.0},
    "longrope scaled by its factor": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope scaled by the lengths": {"original_max_position_embeddings": 64},
    "longrope with its own factor": {"factor": 4.0, "attention_factor": 1.25},
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_scaling_are_the_frameworks(name: str) -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": FACTORS,
        "long_factor": FACTORS,
    }
    fields = CASES[name] if "rope_type" in CASES[name] else {**longrope, **CASES[name]}
    config = DeepseekV3Config(qk_rope_head_dim=8, max_position_embeddings=256, rope_parameters=dict(fields))
    stock = DeepseekV3RotaryEmbedding(config)
    derived = derive_rotation({"max_position_embeddings": 256, **fields}, 8)
    np.testing.assert_allclose(derived.frequencies, stock.inv_freq.numpy(), rtol=FREQUENCY_TOLERANCE)
    assert derived.attention_scaling == pytest.approx(stock.attention_scaling, rel=FREQUENCY_TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"rope_type": "default"}, KeyError),
        ({"rope_theta": "10000"}, TypeError),
        ({"rope_theta": True}, TypeError),
        ({"rope_theta": 0}, ValueError),
        ({"rope_theta": 1e4, "type": "linear", "factor": 2.0}, ValueError),
        (
            {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            ValueError,
        ),
        (
            {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [0.0], "long_factor": [0.0]},
            ValueError,
        ),
    ],
)
def test_a_rotation_that_cannot_be_derived_is_refused(fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        derive_rotation(fields, 8)
