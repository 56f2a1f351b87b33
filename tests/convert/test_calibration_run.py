"""Calibration on several texts: what is drawn from each, measured on it and recorded about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.convert.calibrate import calibrate
from mla_convert.convert.calibration_evidence import CalibrationEvidence, calibration_record
from mla_convert.convert.calibration_run import check_texts, gather
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.planning import make_plan, split_weight
from mla_convert.convert.receipts import digest_of_source
from mla_convert.errors import InputRefused, UsageFault
from tests.conftest import PicoFactory
from tests.convert.support import tensors_of
from tests.tolerances import FLOAT64_ALGEBRA

WIDTHS: dict[str, Any] = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
# Long windows are as long as the model's positions where those are fewer than 2,048.
POSITIONS = 96


@pytest.fixture(scope="module")
def source(pico: PicoFactory) -> SourceCheckpoint:
    return open_source(
        str(pico("llama", kv_heads=2, num_layers=2, max_position_embeddings=POSITIONS, chat_template=True))
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Eight pieces of prose of 300 characters, and twenty short conversations."""
    folder = tmp_path_factory.mktemp("texts")
    prose = [{"id": f"p{i}", "text": f"Part {i} of the text. " * 14} for i in range(8)]
    talks = [{"id": f"t{i}", "prompt": f"Say {i}.", "response": "Here it is: " + str(i) * 20} for i in range(20)]
    for name, rows in (("prose", prose), ("talks", talks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / "prose.jsonl"), str(folder / "talks.jsonl")


def run(source: SourceCheckpoint, cache: Path, *calibration: str, **options: Any) -> CalibrationEvidence:
    sizes = {"calibration_tokens": 320, "calibration_window": 32, **options}
    plan = make_plan(source, ConvertOptions(**WIDTHS, calibration=calibration, **sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CONVERT_CACHE", str(cache))
        found = gather(source, digest_of_source(source), plan)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def mixed(source: SourceCheckpoint, texts: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three to one, and two long windows."""
    cache = tmp_path_factory.mktemp("cache")
    return run(source, cache, f"{texts[0]}::weight=3", texts[1], calibration_long=2), cache


def test_each_text_is_recorded_with_what_was_drawn_from_it(
    source: SourceCheckpoint, mixed: Any, texts: tuple[str, str]
) -> None:
    evidence: CalibrationEvidence = mixed[0]
    plan = make_plan(
        source,
        ConvertOptions(
            **WIDTHS,
            calibration=(f"{texts[0]}::weight=3", texts[1]),
            calibration_tokens=320,
            calibration_window=32,
            calibration_long=2,
        ),
    )
    record = calibration_record(plan, source, evidence)

    assert [text.name for text in record.texts] == list(texts)
    assert [text.weight for text in record.texts] == [0.75, 0.25]
    # Three quarters of ten windows are seven and a half: largest remainders, the first of equals.
    assert [text.windows for text in record.texts] == [8, 2]
    assert [text.long_windows for text in record.texts] == [1, 1]
    assert (record.windows, record.window_length) == (10, 32)
    assert (record.long_windows, record.long_window_length) == (2, POSITIONS)
    assert [text.tokens for text in record.texts] == [8 * 32 + POSITIONS, 2 * 32 + POSITIONS]
    assert record.tokens == 320 + 2 * POSITIONS
    assert record.chat_template_sha256 is not None
    assert record.self_text is None
    assert len({document.id for document in record.documents}) == len(record.documents)


def test_shares_add_up_and_are_not_those_of_the_tokens(mixed: Any) -> None:
    evidence: CalibrationEvidence = mixed[0]

    for share in ("key_share", "value_share"):
        shares = [getattr(summary, share) for summary in evidence.summaries]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) > 0
        # What attention makes of a token is another matter than how many there are.
        assert shares[0] != pytest.approx(evidence.summaries[0].tokens / evidence.tokens, rel=1e-3)
    assert all(summary.mean_square_input > 0 for summary in evidence.summaries)


def test_the_summary_is_that_of_the_statistics(source: SourceCheckpoint, mixed: Any) -> None:
    evidence, cache = mixed
    total = evidence.store.totals(source.num_layers)

    for layer in range(source.num_layers):
        statistics = evidence.store.load(layer)
        assert int(total[layer, 0]) == int(statistics.tokens) == evidence.tokens
        assert torch.allclose(total[layer, :3], statistics.weight, rtol=FLOAT64_ALGEBRA)
        power = float(statistics.input.second.trace()) * evidence.tokens
        assert float(total[layer, 3]) == pytest.approx(power, rel=FLOAT64_ALGEBRA)
    assert len(evidence.store.folders) == len(list((cache / "statistics").iterdir())) == 4


def test_texts_together_are_as_if_measured_at_once(
    source: SourceCheckpoint, texts: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = run(source, tmp_path, *texts)
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path))

    at_once = calibrate(source, "sha256:source", evidence.windows.ids)

    for layer in range(source.num_layers):
        found, expected = tensors_of(evidence.store.load(layer)), tensors_of(at_once.load(layer))
        for name, value in expected.items():
            # The source runs in float32, in batches of other windows.
            scale = float(value.abs().max())
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-4 * scale), name
    assert evidence.store.digest != at_once.digest


def test_a_text_is_not_measured_again_beside_another(mixed: Any, source: SourceCheckpoint, texts: Any) -> None:
    evidence, cache = mixed
    before = set((cache / "statistics").iterdir())

    alone = run(source, cache, texts[0], calibration_tokens=8 * 32)

    assert alone.store.reused
    assert set((cache / "statistics").iterdir()) == before
    assert alone.store.folders == evidence.store.folders[:1]
    assert alone.chat_template_sha256 is None


def test_a_text_that_runs_out_is_named(source: SourceCheckpoint, texts: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("A few words only, no more than these here.")

    evidence = run(source, tmp_path / "cache", texts[0], str(tmp_path / "few.txt"), calibration_long=40)

    assert [evidence.windows.corpus.count(index) for index in (0, 1)] == [9, 1]
    assert len(evidence.warnings) == 2
    assert "few.txt has fewer calibration tokens than its share: 32" in evidence.warnings[0]
    assert "long windows of 40" in evidence.warnings[1]


def test_texts_are_looked_at_before_any_work(source: SourceCheckpoint, texts: tuple[str, str], tmp_path: Path) -> None:
    sizes = {**WIDTHS, "calibration_window": 32}
    good = make_plan(source, ConvertOptions(**sizes, calibration=(*texts, "self", "datasets:none/such")))
    check_texts(source, good)

    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    bad = make_plan(source, ConvertOptions(**sizes, calibration=(texts[0], str(tmp_path / "bad.jsonl"))))
    with pytest.raises(InputRefused, match="cannot be read"):
        check_texts(source, bad)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.txt", ("a.txt", 1.0)),
        ("a.txt::weight=2", ("a.txt", 2.0)),
        ("a@3/b:c.txt::weight=0.25", ("a@3/b:c.txt", 0.25)),
        ("datasets:acme/x::train::weight=1e1", ("datasets:acme/x::train", 10.0)),
        ("datasets:acme/x::train", ("datasets:acme/x::train", 1.0)),
    ],
)
def test_weights_stand_behind_the_name(given: str, expected: tuple[str, float]) -> None:
    assert split_weight(given) == expected


@pytest.mark.parametrize("weight", ["", "two", "0", "-1", "inf", "nan"])
def test_a_weight_is_a_positive_number(weight: str) -> None:
    with pytest.raises(UsageFault, match="no positive number"):
        split_weight(f"a.txt::weight={weight}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": ("a", "a::weight=2")}, "given twice"),
        ({"calibration": ("a", "b", "c"), "calibration_tokens": 2 * POSITIONS}, "more calibration texts than windows"),
        ({"calibration": ("a",), "calibration_long": 2, "calibration_window": POSITIONS}, "no longer windows"),
        ({"calibration": ("self",), "calibration_long": 2, "calibration_window": 32}, "needs text besides"),
    ],
)
def test_plans_that_cannot_be_followed(source: SourceCheckpoint, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        make_plan(source, ConvertOptions(**{**WIDTHS, "calibration_window": POSITIONS, **options}))
