"""Options from a YAML file: what is taken, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from mla_convert.cli.plan_file import read_plan_file
from mla_convert.errors import UsageFault

OPTIONS: dict[str, Any] = {
    "lossless": bool,
    "kv_lora_rank": int | None,
    "weighting": Literal["output", "weight"] | None,
    "calibration": list[str] | None,
    "text_field": str,
    "rope_stride": float,
}


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return read_plan_file(path, OPTIONS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("kv_lora_rank: 152\nlossless: false", {"kv_lora_rank": 152, "lossless": False}),
        ("kv-lora-rank: 152", {"kv_lora_rank": 152}),
        ("kv_lora_rank: null\ntext_field: body", {"kv_lora_rank": None, "text_field": "body"}),
        ("calibration: a.txt", {"calibration": ["a.txt"]}),
        ("calibration: [a.txt, b/]", {"calibration": ["a.txt", "b/"]}),
        ("rope_stride: 0.5", {"rope_stride": 0.5}),
        ("rope_stride: 2", {"rope_stride": 2}),
        ("weighting: output", {"weighting": "output"}),
        ("text_field: '0123456'", {"text_field": "0123456"}),
    ],
)
def test_what_is_taken(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("lossless: true\nkv_lora_rnak: 3", 2, "no such option; found kv_lora_rnak. The nearest is kv_lora_rank."),
        ("out: x", 1, "no such option; found out"),
        ("kv_lora_rank: 3\n\nkv-lora-rank: 4", 3, "an option set twice"),
        ("kv_lora_rank: 3.5", 1, "expected a whole number; found 3.5"),
        ("kv_lora_rank: true", 1, "expected a whole number; found True"),
        ("kv_lora_rank: '3'", 1, "expected a whole number"),
        ("rope_stride: true", 1, "expected a number; found True"),
        ("rope_stride: '2'", 1, "expected a number"),
        ("lossless: 1", 1, "expected true or false; found 1"),
        ("weighting: loss", 1, "expected one of output, weight; found 'loss'"),
        ("weighting: [output]", 1, "expected one of output, weight"),
        ("calibration: [a.txt, 3]", 1, "expected a string or a list of strings"),
        ("text_field: off", 1, "expected a string"),
        ("text_field: 0123456", 1, "expected a string"),
        ("<<: {lossless: true}", 1, "no such option"),
    ],
)
def test_what_is_refused_with_file_and_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(UsageFault) as caught:
        read(tmp_path, text)

    assert str(caught.value).startswith(f"{tmp_path / 'plan.yaml'}, line {line}")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- lossless\n", "just text", "text_field: !!python/name:os.system x", "\x00"])
def test_a_file_that_is_no_mapping_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageFault) as caught:
        read(tmp_path, text)

    assert "\n" not in str(caught.value)
    assert str(tmp_path / "plan.yaml") in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(b"text_field: \xff\xfe")

    for name in ("plan.yaml", "nowhere.yaml"):
        with pytest.raises(UsageFault, match="unreadable YAML"):
            read_plan_file(tmp_path / name, OPTIONS)
