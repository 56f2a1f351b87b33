"""Two evaluations against each other: planted differences found, others not, A and B mirrored."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path

import pytest
from rich.console import Console

from mla_convert.errors import InputRefused
from mla_convert.eval.compare import Comparison, Difference, compare_receipts, windows_needed
from mla_convert.manifests.evaluation.quality import WindowSums
from mla_convert.manifests.evaluation.reading import load_receipt
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
from tests.eval.receipts import quality_section, receipt, window
from tests.tolerances import FLOAT64_ALGEBRA

LONG_NAME = "/a/very/long/folder/name/that/no/table/has/room/for/wiki.txt"


def windows(cost: float = 0.1, kl: float = 0.1, top1: int = 80, count: int = 12, noise: int = 1) -> list[WindowSums]:
    """Two texts whose windows differ much in difficulty, and a target that costs `cost` nats per token."""
    hard, own = random.Random(0), random.Random(noise)
    made = []
    for number in range(count):
        source = 100 * hard.uniform(2, 4)
        sums = {
            "source_nll": source,
            "target_nll": source + 100 * cost * own.uniform(0.8, 1.2),
            "kl": 100 * kl * own.uniform(0.8, 1.2),
            "top1": top1 + own.randrange(-3, 4),
        }
        made.append(window("wiki.txt" if number % 2 == 0 else "code.txt", number * 101, **sums))
    return made


def made(*args: WindowSums, target: str = "out", **fields: object) -> EvaluationReceipt:
    return receipt(quality_section(args, **fields), target=target)


def verdicts(comparison: Comparison) -> dict[tuple[str, str], str]:
    return {(text.name, item.figure): item.verdict for text in comparison.texts for item in text.differences}


def test_a_receipt_against_itself_has_no_real_difference() -> None:
    one = made(*windows())
    found = compare_receipts(one, one, seed=0, resamples=200)

    assert set(verdicts(found).values()) == {"no real difference"}
    for text in found.texts:
        for item in text.differences:
            assert item.difference == 0
            assert item.interval is not None
            assert (item.interval.low, item.interval.high) == (0, 0)
    assert [(text.name, text.windows, text.tokens) for text in found.texts] == [
        ("all texts", 12, 1200),
        ("wiki.txt", 6, 600),
        ("code.txt", 6, 600),
    ]


def test_a_planted_difference_is_found_though_texts_vary_more() -> None:
    found = compare_receipts(made(*windows()), made(*windows(0.15, 0.15, 70, noise=2)), seed=0, resamples=400)

    assert set(verdicts(found).values()) == {"A is better"}
    ratio = found.texts[0].differences[0]
    assert ratio.interval is not None
    assert ratio.interval.low < math.exp(0.15) - math.exp(0.1) < ratio.interval.high


def test_a_difference_on_one_text_shows_there_alone() -> None:
    before = windows()
    worse = [item.model_copy(update={"kl": item.kl * 2 + 1}) if item.text == "code.txt" else item for item in before]
    found = verdicts(compare_receipts(made(*before), made(*worse), seed=0, resamples=200))

    assert {key for key, verdict in found.items() if verdict == "A is better"} == {
        ("all texts", "kl"),
        ("code.txt", "kl"),
    }


def test_noise_is_no_difference() -> None:
    found = compare_receipts(made(*windows(noise=1)), made(*windows(noise=5)), seed=0, resamples=400)

    assert found.texts[0].differences[0].verdict == "no real difference"
    assert found.texts[0].differences[0].difference != 0


def test_b_against_a_is_the_mirror_image() -> None:
    one, other = made(*windows()), made(*reversed(windows(0.12, 0.12, 76, noise=2)))
    forth, back = (compare_receipts(*pair, seed=1, resamples=200) for pair in ((one, other), (other, one)))
    swapped = {"A is better": "B is better", "B is better": "A is better"}

    there = {text.name: text.differences for text in forth.texts}
    for text in back.texts:
        for item, mirrored in zip(there[text.name], text.differences, strict=True):
            assert (item.a, item.b, item.difference) == (mirrored.b, mirrored.a, -mirrored.difference)
            assert item.interval is not None
            assert mirrored.interval is not None
            assert [item.interval.low, item.interval.high] == pytest.approx(
                [-mirrored.interval.high, -mirrored.interval.low], rel=FLOAT64_ALGEBRA
            )
            assert mirrored.verdict == swapped.get(item.verdict, item.verdict)
    assert "A is better" in verdicts(forth).values()


@pytest.mark.parametrize(("count", "expected"), [(5, "too few windows"), (6, "A is better")])
def test_few_windows_prove_nothing_however_they_agree(count: int, expected: str) -> None:
    wiki = [item for item in windows(count=12) if item.text == "wiki.txt"][:count]
    worse = [item.model_copy(update={"kl": item.kl + 5}) for item in wiki]
    found = compare_receipts(made(*wiki), made(*worse), seed=0, resamples=200)

    assert verdicts(found)["all texts", "kl"] == expected
    assert windows_needed(0.95) == 6


def test_a_single_window_has_no_interval() -> None:
    one = made(window("wiki.txt", 0))
    found = compare_receipts(one, one, seed=0, resamples=50).texts[0].differences[0]

    assert found == Difference("ratio", found.a, found.a, 0.0, None, "too few windows")
    assert found.a == pytest.approx(math.exp(20 / 100), rel=FLOAT64_ALGEBRA)


def test_only_windows_that_both_have_count() -> None:
    all_windows = windows()
    other = [*all_windows[:8], all_windows[8].model_copy(update={"tokens": 99})]
    found = compare_receipts(made(*all_windows), made(*other), seed=0, resamples=50)

    assert (found.texts[0].windows, found.left_out) == (8, 5)


def test_texts_are_the_same_by_their_digest_not_by_their_path() -> None:
    moved = [item.model_copy(update={"text": f"/elsewhere/{item.text}"}) for item in windows()]

    assert compare_receipts(made(*windows()), made(*moved), seed=0, resamples=50).texts[0].windows == 12


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (receipt(quality_section(windows()), source_digest="sha256:" + "1" * 64), "the sources of the two"),
        (made(*(item for item in windows() if item.text == "wiki.txt")), "the texts of the two"),
        (made(*windows(), seq_len=50), "the window lengths of the two evaluations differ; expected 101 .A.; found 50"),
        (made(*windows(), stride=50), "the strides of the two"),
        (made(*windows(), bos_policy="per-document"), "the BOS policies of the two"),
        (made(*windows(), dtype="float64"), "the dtypes of the two"),
        (receipt(None), "B has no quality part"),
        (made(*(item.model_copy(update={"start": item.start + 1}) for item in windows())), "no window in common"),
    ],
)
def test_evaluations_that_are_not_alike_are_refused_in_one_line(other: EvaluationReceipt, message: str) -> None:
    with pytest.raises(InputRefused, match=message) as caught:
        compare_receipts(made(*windows()), other, seed=0, resamples=50)
    assert len(str(caught.value).splitlines()) == 1


def test_the_table_fits_a_hundred_columns_and_says_who_is_better() -> None:
    renamed = [item.model_copy(update={"text": LONG_NAME}) for item in windows() if item.text == "wiki.txt"]
    worse = [item.model_copy(update={"kl": item.kl * 2}) for item in renamed]
    found = compare_receipts(made(*renamed), made(*worse), seed=0, resamples=50)
    output = io.StringIO()
    found.render(Console(file=output, width=100))
    lines = output.getvalue().splitlines()
    table = lines[2 : next(number for number, line in enumerate(lines) if line.startswith("[ , ]"))]

    assert max(map(len, table)) <= 100
    assert sum("KL, nats" in line and "A is better" in line for line in table) == 2
    assert sum("not real" in line for line in table) == 4
    assert any("…" in line and "wiki.txt" in line for line in table)


def test_json_has_every_number_unrounded() -> None:
    found = compare_receipts(made(*windows()), made(*windows(noise=4), target="b"), seed=3, resamples=50)
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))

    assert (read["a"], read["b"], read["seed"], read["resamples"]) == ("out", "b", 3, 50)
    assert read["texts"][0]["differences"][1]["difference"] == found.texts[0].differences[1].difference


class TestLoading:
    def save(self, file: Path, started: str, target: str) -> None:
        one = made(*windows(), target=target)
        dated = one.model_copy(update={"environment": one.environment.model_copy(update={"started": started})})
        # Parts made for these tests are not whole.
        whole = dated.model_copy(update={"ladder": None, "systems": None})
        file.parent.mkdir(exist_ok=True)
        file.write_text(whole.to_json_text(), encoding="utf-8")

    def test_the_newest_of_a_converted_folder_by_its_own_record(self, tmp_path: Path) -> None:
        self.save(tmp_path / "receipts" / "eval-b.json", "2026-01-01T00:00:00+00:00", "old")
        self.save(tmp_path / "receipts" / "eval-a.json", "2026-01-02T00:00:00+00:00", "new")

        assert load_receipt(tmp_path).compared.target == "new"
        assert load_receipt(tmp_path / "receipts").compared.target == "new"
        assert load_receipt(tmp_path / "receipts" / "eval-b.json").compared.target == "old"

    def test_a_folder_without_a_receipt(self, tmp_path: Path) -> None:
        with pytest.raises(InputRefused, match="no evaluation receipt"):
            load_receipt(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"overlap": [], "overlap": []}', "\ud800"])
    def test_what_is_no_receipt(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "eval-x.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(InputRefused, match="not a valid evaluation receipt") as caught:
            load_receipt(tmp_path)
        assert len(str(caught.value).splitlines()) == 1

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputRefused, match="no readable evaluation receipt"):
            load_receipt(tmp_path / "eval-x.json")
