"""The one table of numeric tolerances used by the tests, each with its reason.

Every value bounds a *relative* error unless its reason says otherwise.
"""

from __future__ import annotations

FLOAT64_ALGEBRA = 1e-10
"""Two float64 orderings of one algebraic expression over at most a few thousand terms."""

LOGITS_FLOAT32 = 1e-3
"""max |Δlogit| over max |logit| after a float32 round trip: a right conversion gives about 1e-5, a fault 0.1 to 10."""

DEQUANTISED_LOGITS = 1e-6
"""max |Δlogit| over max |logit| of one float32 model after writing and reading: the weights are bit-equal."""

RECORDED_LOSS = 1e-3
"""A loss of the tiny trained model beside the one in training.json: other CPUs add up differently."""

RECORDED_SPECTRUM = 1e-3
"""Singular values of float32 weights beside those in training.json, which keeps four digits."""

LOSSLESS_KL = 1e-8
"""Absolute, nats per token: float32 rounding of the logits enters squared, about 1e-11; the bar is design.md's."""

WINDOW_SCORES = 1e-4
"""Sums of log-probabilities from states and head apart beside those of the model's own logits: float32, about 1e-6."""

ROTARY_FLOAT32 = 1e-5
"""Frequencies beside transformers', which raises the base to a power in float32."""

STOCK_NORM_FLOAT32 = 1e-5
"""Float64 algebra beside a stock module whose RMSNorm computes in float32 (a few units of 6e-8, times a short sum)."""

NEUTRAL_NORM_FLOAT32 = 1e-6
"""A latent norm drowned in its epsilon: 7e-7 by design.md, which is float32 rounding of the norm itself."""

NEUTRAL_NORM_CONSTANT = 1e-5
"""A latent norm held by a constant channel: half the square of the latent's share of the channel, at most 2^-18."""

HALF_OVER_SOURCE = 1.5
"""Error of a bf16 or fp16 target over that of its source in the same arithmetic: its queries, keys and values are
rounded once more than the source's (measured: 0.9 to 1.1)."""

TRANSCRIPTION = 1e-6
"""A recipe beside its paper's equations in float64: the project's bar; PCA's squared condition leaves 1e-9."""

FLOAT32_ATTENTION = 1e-5
"""Attention in float32 against float64, relative to the largest output: measured 1e-6; a dropped bias gives 1e-1."""

KERNEL_FLOAT32 = 4e-6
"""Absolute, outputs of order one: a float32 kernel sums some hundred terms in its own order (measured 3e-7)."""

KERNEL_FLOAT16 = 2e-3
"""Absolute: weights and output are rounded to 11 bits, half a unit of numbers up to 4 each (measured 5e-4)."""

KERNEL_BFLOAT16 = 1.6e-2
"""Absolute: the same with 8 bits, 2^-9 of numbers up to 4 (measured 8e-3)."""

KERNEL_LSE = 4e-6
"""Absolute, LSE up to 10 in float32, whose unit there is 9.5e-7; a base-2 or half-precision LSE is off by 1e-2."""

KERNEL_RESPLIT = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Absolute: one kernel beside itself with other splits or pages: its own rounding, half of the bars above."""
