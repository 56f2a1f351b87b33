"""Parts of the error, each of which must move alone when its cause does."""

from __future__ import annotations

import pytest

from mla_convert.decode.rows import FLASHMLA_FP8, GROUPED_FP8
from mla_convert.eval.ladder.decomposition import HELD, measure_decomposition, row_formats
from mla_convert.mla.attention import LatentRows
from tests.convert.support import normal
from tests.eval.ladder.cases import Case
from tests.tolerances import ABSORBED_FLOAT64, DECODE_FLOAT32, DECODE_ROUNDED_OUTPUT


def test_parts_of_a_lossy_conversion(lossy_case: Case) -> None:
    section = measure_decomposition(lossy_case.context)
    found = {(part.name, part.variant): part.error for part in section.parts}

    assert {name for name, _ in found} == set(HELD)
    assert found["absorption", "expanded to absorbed"] < ABSORBED_FLOAT64
    assert found["selection", "dense"] < ABSORBED_FLOAT64
    assert found["runtime", "float32 rows"] < 10 * DECODE_FLOAT32
    assert found["numeric", "float32 rows"] < DECODE_FLOAT32
    assert (
        DECODE_FLOAT32
        < found["numeric", "float16 rows"]
        < found["numeric", "bfloat16 rows"]
        < DECODE_ROUNDED_OUTPUT["bfloat16"]
    )
    assert found["numeric", "bfloat16 rows"] < found["numeric", f"{GROUPED_FP8} rows"]
    assert found["conversion", "source to expanded"] > 0.01


@pytest.mark.parametrize(("widths", "name"), [((512, 64), FLASHMLA_FP8), ((152, 40), GROUPED_FP8)])
def test_the_fp8_row_is_the_one_of_its_widths(widths: tuple[int, int], name: str) -> None:
    rows = LatentRows(normal(1, 2, widths[0], seed=1), normal(1, 2, widths[1], seed=2))
    formats = row_formats(rows)
    assert len(formats) == 4
    assert list(formats)[-1] == name
