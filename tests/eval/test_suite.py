"""The suite as a whole: one receipt, parts kept over an interruption, refusals before any work."""

from __future__ import annotations

import errno
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mla_convert.cache_dir import cache_root
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval import suite
from mla_convert.eval.evaluate import EvalOptions, evaluate
from mla_convert.eval.finite import refuse_not_finite
from mla_convert.eval.gates import load_gates
from mla_convert.eval.suite import PARTS, SuiteRequest, run_suite, write_receipt
from mla_convert.eval.suite_context import SuiteContext
from mla_convert.manifests.evaluation.ladder import DecompositionSection
from mla_convert.manifests.evaluation.reading import load_receipt
from mla_convert.manifests.record import Record
from mla_convert.manifests.verify import verify_folder
from tests.eval.helpers import MAX_TOKENS, SEQ_LEN, EvalPair, write_text

OPTIONS = EvalOptions(max_tokens=MAX_TOKENS, seq_len=SEQ_LEN, resamples=50)
QUICK = ("ladder", "decomposition", "quality")


@pytest.fixture
def request_of(lossy: EvalPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteRequest:
    """A request on a copy of the lossy conversion, with a cache of its own."""
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path / "cache"))
    target = Path(shutil.copytree(lossy.target, tmp_path / "out"))
    return SuiteRequest(target, lossy.source_folder, (str(lossy.text),), OPTIONS, "quick", QUICK)


def test_the_receipt_has_what_was_asked_and_its_figures_are_those_of_a_plain_evaluation(
    request_of: SuiteRequest, tmp_path: Path
) -> None:
    gates = tmp_path / "bars.yaml"
    gates.write_text("ladder.findings: {at_most: 0}\nquality.overall.ratio: {at_most: 0.5}\n", encoding="utf-8")
    receipt = run_suite(replace(request_of, gates=load_gates(gates)), ["mla-convert", "eval"])
    path = write_receipt(receipt, request_of.target)
    plain = evaluate(request_of.target, request_of.source, request_of.texts, OPTIONS)

    assert receipt.ladder is not None
    assert receipt.ladder.findings == ()
    assert receipt.quality is not None
    assert receipt.quality.overall.kl.value == pytest.approx(plain.figures.kl, rel=1e-9)
    assert (receipt.tasks, receipt.generation, receipt.systems) == (None, None, None)
    assert [(gate.figure, gate.passed) for gate in receipt.gates] == [
        ("ladder.findings", True),
        ("quality.overall.ratio", False),
    ]
    assert [part.part for part in receipt.times] == list(QUICK)
    assert receipt.compared.canonical_mla_id == plain.subjects.canonical_mla_id
    assert receipt.environment.command == ("mla-convert", "eval")
    assert load_receipt(request_of.target) == receipt
    assert path.parent == request_of.target / "receipts"
    assert verify_folder(request_of.target).ok
    assert list((cache_root() / "evaluations").iterdir()) == []


def test_an_interrupted_run_goes_on_with_the_part_it_was_in(
    request_of: SuiteRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def stopping(_context: SuiteContext) -> Record:
        raise KeyboardInterrupt

    def counting(name: str) -> None:
        part = PARTS[name]

        def measure(context: SuiteContext) -> Record:
            ran.append(name)
            return part.measure(context)

        parts[name] = replace(part, measure=measure)

    parts = dict(PARTS)
    for name in QUICK:
        counting(name)
    monkeypatch.setattr(suite, "PARTS", {**parts, "decomposition": replace(PARTS["decomposition"], measure=stopping)})
    with pytest.raises(KeyboardInterrupt):
        run_suite(request_of)
    monkeypatch.setattr(suite, "PARTS", parts)

    receipt = run_suite(request_of)

    assert ran == ["ladder", "decomposition", "quality"]
    assert [(part.part, part.reused) for part in receipt.times] == [
        ("ladder", True),
        ("decomposition", False),
        ("quality", False),
    ]
    write_receipt(receipt, request_of.target)
    run_suite(replace(request_of, parts=("ladder",)))
    assert ran == ["ladder", "decomposition", "quality", "ladder"]


@pytest.mark.parametrize("damage", ["", "{", '{"seconds": 1, "section": {}}', '{"section": null}'])
def test_a_part_that_cannot_be_read_is_measured_again(
    damage: str, request_of: SuiteRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    section = DecompositionSection(tokens=3, parts=())

    def measure(_context: SuiteContext) -> Record:
        calls.append("decomposition")
        return section

    def stop(_context: SuiteContext) -> Record:
        raise KeyboardInterrupt

    cheap = {"decomposition": replace(PARTS["decomposition"], measure=measure)}
    asked = replace(request_of, parts=("decomposition", "quality"))
    monkeypatch.setattr(suite, "PARTS", {**cheap, "quality": replace(PARTS["quality"], measure=stop)})
    with pytest.raises(KeyboardInterrupt):
        run_suite(asked)
    (kept,) = (cache_root() / "evaluations").glob("*/decomposition.json")
    kept.write_text(damage, encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        run_suite(asked)
    assert calls == ["decomposition"] * 2
    assert json.loads(kept.read_text(encoding="utf-8"))["section"] == section.model_dump(mode="json")


def test_unknown_parts_and_none_at_all_are_refused(request_of: SuiteRequest) -> None:
    for parts in ((), ("ladder", "nonsense")):
        with pytest.raises(UsageFault, match="no such part"):
            replace(request_of, parts=parts)


def test_refusals_come_before_any_part(
    request_of: SuiteRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_context: SuiteContext) -> Record:
        raise AssertionError("a part ran")

    monkeypatch.setattr(suite, "PARTS", {name: replace(part, measure=never) for name, part in PARTS.items()})
    short = write_text(tmp_path / "short.txt", SEQ_LEN - 4, seed=3)
    with pytest.raises(InputRefused, match="shorter than one window"):
        run_suite(replace(request_of, texts=(str(short),)))
    weights = next(request_of.target.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    weights.write_bytes(bytes(content))
    with pytest.raises(InputRefused, match="does not verify"):
        run_suite(request_of)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.tensor([1.0, math.inf])}, tmp_path / "model.safetensors")
    with pytest.raises(InputRefused, match="b: a weight that is not finite"):
        refuse_not_finite(tmp_path)


def test_texts_are_checked_whatever_parts_are_run(request_of: SuiteRequest, tmp_path: Path) -> None:
    asked = replace(request_of, parts=("decomposition",))
    (text,) = asked.texts
    with pytest.raises(UsageFault, match="the same text twice"):
        run_suite(replace(asked, texts=(text, text)))
    short = write_text(tmp_path / "short.txt", SEQ_LEN - 4, seed=3)
    with pytest.raises(InputRefused, match="shorter than"):
        run_suite(replace(asked, texts=(text, str(short))))


def _full(_source: object, _target: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_receipt_that_cannot_be_written_keeps_the_parts(request_of: SuiteRequest) -> None:
    asked = replace(request_of, parts=("decomposition",))
    receipt = run_suite(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite.os, "replace", _full)
        with pytest.raises(OSError, match="No space left"):
            write_receipt(receipt, asked.target)
    assert list((asked.target / "receipts").iterdir()) == []

    again = run_suite(asked)

    assert [part.reused for part in again.times] == [True]
    write_receipt(again, asked.target)
    assert [part.reused for part in run_suite(asked).times] == [False]
