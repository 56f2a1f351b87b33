"""The gates that the tool itself applies, each with its reason (tolerances of tests: `tests/tolerances.py`)."""

from __future__ import annotations

RELOAD_RELATIVE = {"float32": 1e-3, "bfloat16": 1.5e-1, "float16": 3e-2}
"""max |Δlogit| over max |logit| of the reloaded files against the float64 reference (lossless plans: the source).

float32: measured about 1e-5; a layout, scale or norm fault gives 0.1 to 10. The half types round every weight once,
which grows with depth; a fault still stands out in `RELOAD_LAYER`, which looks at one layer at a time.
"""

RELOAD_LAYER = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
"""Relative error of one layer's attention and output, fed its own input, in the dtype of the files."""

SOURCE_READING = 1e-3
"""Our float64 reading of a source layer against its own float32 class: about 1e-6 when right, 1e-1 when wrong."""
