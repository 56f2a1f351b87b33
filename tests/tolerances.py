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

ABSORBED_FLOAT64 = 1e-12
"""Expanded beside absorbed attention in float64, over chunks: the project's bar; measured 2e-15."""

HAND_EXAMPLE = 1e-6
"""Absolute: six printed digits of a worked example whose norm's epsilon moves the seventh."""

ABSORBED_LOGITS = 1e-5
"""Logits of absorbed beside stock attention in float32: another order of sums; measured 3e-6."""

DECODE_FLOAT32 = 4e-6
"""Absolute, outputs of order 1: float32 decoding beside float64 on the same rows, measured up to 1.5e-6."""

DECODE_LSE = 4e-6
"""Absolute, for values of order 5: a float32 LSE, one unit is 5e-7 there; base 2 or bf16 would be 1e-2 off."""

DECODE_ROUNDED_OUTPUT = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Absolute, outputs of order 1 to 4: one rounding to the query's dtype (2^-11 and 2^-8 of 4)."""

E4M3_ROUNDING = 2**-4
"""Half a unit of three mantissa bits, of a normal E4M3 number."""

FORMAT_LATENT = {"fp8": (1e-2, 4e-2), "float16": (5e-4, 3e-3), "float32": (5e-4, 3e-3)}
"""Rows beside bf16 rows: E4M3 rounds to 2^-4 at worst, 2.6e-2 in the mean of squares; the finer formats show the
rounding of bf16 itself (2^-9 at worst, 1.6e-3). Less than the lower bound: the rows were not in the format."""

FORMAT_OUTPUT = {"fp8": 7e-2, "float16": 5e-3, "float32": 5e-3}
"""Averaging shrinks rows and their errors alike; the weights move as well: twice the rows' error is measured."""

FORMAT_LSE = {"fp8": 3e-2, "float16": 3e-3, "float32": 3e-3}
"""Nats; a score of size 1 to 4 moves by its rows' relative error, and the LSE by no more than the scores."""

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
