"""Bars of an evaluation: exact comparison, what a path finds, and files that are refused with the line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_convert.errors import InputRefused
from mla_convert.eval.gate_paths import parse_path
from mla_convert.eval.gates import Gate, check_gates, load_gates
from mla_convert.manifests.evaluation.ladder import Finding
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt, GateResult
from tests.eval.receipts import quality_section, receipt, task_cell, window

KL = 10 / 100
FINDING = Finding(stage="key map", layer=1, what="pairs swapped", measured=0.5, allowed=0.1)


def example() -> EvaluationReceipt:
    """Two texts of which one is three times as bad, a finding, and tasks."""
    windows = [window("/texts/wiki.txt", 0), window("/texts/code.txt", 0, kl=30.0)]
    cells = [
        task_cell("needle", "kept", 0.0),
        task_cell("needle", "lost", 0.5),
        task_cell("copy", "uninformative", None),
    ]
    return receipt(quality_section(windows), findings=[FINDING], cells=cells, withheld="a call fell back unobserved")


def check(path: str, at_most: float | None = None, at_least: float | None = None) -> list[GateResult]:
    return list(check_gates(example(), [Gate(parse_path(path), at_most, at_least)]))


@given(value=st.floats(1e-6, 1e6))
def test_a_bar_met_exactly_passes_and_one_unit_beyond_fails(value: float) -> None:
    section = quality_section([window("wiki.txt", 0, tokens=1, kl=value)])
    path = parse_path("quality.overall.kl")
    up, down = math.nextafter(value, math.inf), math.nextafter(value, -math.inf)
    found = check_gates(
        receipt(section),
        [
            Gate(path, value, None),
            Gate(path, down, None),
            Gate(path, None, value),
            Gate(path, None, up),
            Gate(path, value, value),
        ],
    )

    assert [item.passed for item in found] == [True, False, True, False, True]
    assert {item.measured for item in found} == {value}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("quality.overall.ratio", math.exp(0.2)),
        ("quality.overall.ratio.high", 2.0),
        ("quality.overall.ratio.value", math.exp(0.2)),
        ("quality.domains[wiki.txt].kl", 0.1),
        ("quality.domains[texts/wiki.txt].kl", 0.1),
        ("quality.domains[/texts/code.txt].kl", 0.3),
        ("quality.domains", 2.0),
        ("quality.buckets[1].kl", 0.1),
        ("quality.overall.windows", 2.0),
        ("ladder.findings", 1.0),
        ("tasks.lost", 1.0),
        ("tasks.needle.kept", 1.0),
        ("tasks.copy.lost", 0.0),
        ("tasks.cells[needle,512,0.5].difference.low", -0.5),
        ("tasks.cells[copy].target_match", 0.75),
        ("systems.withheld", 1.0),
    ],
)
def test_figures_are_found(path: str, expected: float) -> None:
    [found] = check(path, at_most=expected)

    assert found.measured == pytest.approx(expected, rel=1e-12)


def test_speed_that_was_not_withheld_counts_nought() -> None:
    [found] = check_gates(receipt(None), [Gate(parse_path("systems.withheld"), 0.0, None)])

    assert (found.measured, found.passed) == (0, True)


@pytest.mark.parametrize(
    "path",
    [
        "quality.overall.kl.high",  # a figure without an interval
        "quality.domains[other.txt].kl",
        "quality.domains[iki.txt].kl",  # no part of a path
        "quality.long_context[*].kl",
        "quality.buckets[x].kl",
        "generation.target_repetition",  # a part that was not run
        "decomposition.parts[numeric].error",
        "tasks.passkey.lost",  # a task that was not run
    ],
)
def test_a_figure_that_is_not_there_fails_every_bar(path: str) -> None:
    for bar in ({"at_most": 1e9}, {"at_least": -1e9}):
        [found] = check(path, **bar)
        assert (found.figure, found.measured, found.passed) == (path, None, False)


def test_a_star_gives_each_item_a_result_of_its_own() -> None:
    found = check("quality.domains[*].kl", at_most=0.2)

    assert [(item.figure, item.passed) for item in found] == [
        ("quality.domains[/texts/wiki.txt].kl", True),
        ("quality.domains[/texts/code.txt].kl", False),
    ]
    assert [item.figure for item in check("tasks.cells[needle].source_match", at_least=1.0)] == [
        "tasks.cells[needle,512,0.0].source_match",
        "tasks.cells[needle,512,0.5].source_match",
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("quality.overall.perplexity", "no such figure; expected one of name, sha256"),
        ("conditions.seq_len", "no such figure; expected one that begins with ladder"),
        ("", "no such figure"),
        ("quality", "a part, where one figure is wanted"),
        ("quality.overall", "a part, where one figure is wanted"),
        ("quality.domains[*]", "a part, where one figure is wanted"),
        ("quality.domains.kl", r"a list without a choice; expected domains\[\*\]"),
        ("quality.overall[wiki].kl", "overall is no list"),
        ("quality.overall.name", "name is no number"),
        ("quality.overall.kl.value.high", "value has no parts"),
        ("quality.windows[3].kl", r"items of windows have no names; expected windows\[\*\]"),
        ("ladder.drift.kl", "kl is no figure"),
        ("tasks.cells[needle,512,0.5,1].source_match", "too many keys"),
        ("tasks.nothing.lost", "no such figure"),
        ("quality..overall", "not the name of a figure"),
        ("quality.overall.kl.", "not the name of a figure"),
        ("quality.domains[wiki.kl", "not the name of a figure"),
    ],
)
def test_paths_that_lead_to_no_figure_are_refused(path: str, message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        parse_path(path)


def load(folder: Path, text: str) -> tuple[Gate, ...]:
    file = folder / "gates.yaml"
    file.write_text(text, encoding="utf-8")
    return load_gates(file)


def test_a_file_of_bars(tmp_path: Path) -> None:
    text = """
# quality
quality.overall.ratio: {at_most: 1.25}
quality.domains[wiki.txt].kl:
  at_most: 2e-1
  at_least: -1
"quality.domains[*].top1": {at_least: 0.5}
ladder.findings: {at_most: 0}
"""
    gates = load(tmp_path, text)

    assert [(gate.path.text, gate.at_most, gate.at_least) for gate in gates] == [
        ("quality.overall.ratio", 1.25, None),
        ("quality.domains[wiki.txt].kl", 0.2, -1.0),
        ("quality.domains[*].top1", None, 0.5),
        ("ladder.findings", 0.0, None),
    ]
    assert [item.passed for item in check_gates(example(), gates)] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty gates file"),
        ("# nothing\n", "an empty gates file"),
        ("{}", "no bars in it"),
        ("- a\n", "line 1: not figures with their bars; .* found a list"),
        ("quality.overall.kl: 0.2\n", r"line 1: not a bar for quality.overall.kl; expected \{at_most"),
        ("\nquality.overall.kl: {}\n", "line 2: no bar for quality.overall.kl"),
        (
            "quality.overall.kl:\n  at_mots: 1\n",
            "line 2: an unknown kind of bar; expected at_most or at_least; found at_m",
        ),
        ("quality.overall.kl: {equals: 1}\n", "line 1: an unknown kind of bar"),
        ("quality.overall.kl: {at_most: low}\n", "line 1: a bar that is no number; .* found 'low'"),
        ("quality.overall.kl: {at_most: }\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: null}\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: true}\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: '0.2'}\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: .nan}\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: .inf}\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: 1e999}\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: 1:30}\n", "a bar that is no number"),
        ("quality.overall.kl: {at_most: [1]}\n", "a bar that is no number; .* found a list"),
        ("a: {at_most: 1}\n", "line 1: no such figure"),
        ("ladder.findings: {at_most: 0}\nquality.kl: {at_most: 1}\n", "line 2: no such figure"),
        (
            "quality.overall.kl: {at_most: 1}\nladder.findings: {at_most: 0}\nquality.overall.kl: {at_most: 2}\n",
            "line 3: quality.overall.kl is written twice; found line 1 as well",
        ),
        ("quality.overall.kl: {at_most: 1, at_most: 2}\n", "line 1: at_most is written twice"),
        ("quality.overall.kl: {at_most: 1, at_least: 2}\n", "line 1: a bar that nothing can meet"),
        ("quality.overall.kl: {at_most: 1\n", "line 2: not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("? [a]\n: 1\n", "line 1: a key that is no text"),
        ("[" * 5000, "nested too deeply|not YAML"),
    ],
)
def test_files_that_are_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputRefused, match=message) as caught:
        load(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1
    assert "gates.yaml" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no readable gates file"):
        load_gates(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputRefused, match="not UTF-8 text"):
        load_gates(tmp_path / "bytes.yaml")
    (tmp_path / "control.yaml").write_bytes(b"a: \x01\n")
    with pytest.raises(InputRefused, match="not YAML") as caught:
        load_gates(tmp_path / "control.yaml")
    assert len(str(caught.value).splitlines()) == 1
