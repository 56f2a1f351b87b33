"""The runner over lm-eval, with a stand-in for it, and with lm-eval itself where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import CheckFailed, EnvironmentFault, InputRefused, UsageFault
from mla_convert.eval.harness import HarnessOptions, run_harness
from mla_convert.manifests.evaluation.harness import HarnessReceipt
from tests.conftest import PicoFactory
from tests.eval.harness_standin import write_standin
from tests.eval.helpers import EvalPair
from tests.tolerances import WINDOW_SCORES

TEXTS = ("the quick brown fox", "jumps over the lazy dog", "and does not mind")
# A task as the harness documents it; its data file is found from the working directory.
TASK = """
task: words
dataset_path: json
dataset_kwargs:
  data_files:
    test: words.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: answer
doc_to_choice: ["a", "b"]
metric_list:
  - metric: acc
metadata:
  version: 2.0
"""


def _forget_the_harness() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        del sys.modules[name]


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in as `lm_eval`."""
    _forget_the_harness()
    monkeypatch.syspath_prepend(str(write_standin(tmp_path / "site")))
    yield
    _forget_the_harness()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with one task and its data."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "words.yaml").write_text(TASK, encoding="utf-8")
    rows = [json.dumps({"text": text, "answer": index % 2}) for index, text in enumerate(TEXTS)]
    (folder / "words.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def run(pair: EvalPair, tasks: Path | None, **options: Any) -> HarnessReceipt:
    chosen = HarnessOptions(tasks=options.pop("names", ("words",)), task_path=tasks, **options)
    return run_harness(pair.target, pair.source_folder, chosen, ["mla-convert", "harness"])


def mean_logprob(model: Any, pair: EvalPair) -> float:
    """What the stand-in computes."""
    tokenizer = load_tokenizer(pair.source.location.folder)
    means = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            logits = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        means.append(float(logits.gather(1, ids[0, 1:, None]).mean()))
    return sum(means) / len(means)


@pytest.mark.usefixtures("standin")
def test_both_models_are_asked_and_their_figures_stand_side_by_side(lossy: EvalPair, tasks: Path) -> None:
    receipt = run(lossy, tasks)

    figure, words = receipt.metrics
    assert figure.source == pytest.approx(mean_logprob(lossy.source_model(), lossy), rel=WINDOW_SCORES)
    assert figure.target == pytest.approx(mean_logprob(lossy.model(), lossy), rel=WINDOW_SCORES)
    assert figure.target is not None
    assert figure.source is not None
    assert figure.difference == figure.target - figure.source != 0
    assert (figure.metric, figure.filter, figure.higher_is_better, figure.source_stderr) == (
        "logprob",
        "none",
        True,
        0.5,
    )
    assert (words.source, words.target, words.difference, words.source_stderr) == (None, None, None, None)


@pytest.mark.usefixtures("standin")
def test_the_receipt_says_what_was_run_on_what(lossy: EvalPair, tasks: Path) -> None:
    receipt = run(lossy, tasks, limit=2, batch_size=3, seed=5)

    (task,) = receipt.tasks
    assert (task.task, task.version, task.shots, task.examples) == ("words", "1.0", 0, 2)
    assert receipt.harness == "lm_eval 0.0"
    assert receipt.compared.source_digest == lossy.digests.checkpoint
    assert [file.path for file in receipt.task_files] == ["words.jsonl", "words.yaml"]
    assert receipt == HarnessReceipt.model_validate_json(receipt.to_json_text())
    import lm_eval

    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 5)
    expected = {"tasks": ["words"], "limit": 2, "batch_size": 3, **seeds}
    first, second = lm_eval.CALLS
    assert first == second == expected


@pytest.mark.usefixtures("standin")
def test_two_models_with_different_prompts_cannot_be_compared(
    lossy: EvalPair, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.models.huggingface as standin

    monkeypatch.setattr(standin, "SALT", "x")

    with pytest.raises(CheckFailed, match="not given the same prompts"):
        run(lossy, tasks)


@pytest.mark.usefixtures("standin")
def test_wrong_tasks_data_and_folders_are_refused(lossy: EvalPair, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"does not know.*nonsense"):
        run(lossy, tasks, names=("words", "nonsense"))
    with pytest.raises(InputRefused, match="no such folder of tasks"):
        run(lossy, tmp_path / "nowhere")
    (tasks / "words.jsonl").unlink()
    with pytest.raises(EnvironmentFault, match=r"data cannot be read.*words\.jsonl"):
        run(lossy, tasks)


@pytest.mark.usefixtures("standin")
def test_another_source_or_a_folder_that_does_not_verify_is_refused_before_any_model_runs(
    lossy: EvalPair, tasks: Path, pico: PicoFactory, tmp_path: Path
) -> None:
    with pytest.raises(InputRefused, match="weights differs"):
        run_harness(lossy.target, str(pico("llama", kv_heads=2, seed=9)), HarnessOptions(("words",), tasks))
    broken = tmp_path / "broken"
    shutil.copytree(lossy.target, broken)
    (broken / "config.json").write_text("{}")
    with pytest.raises(InputRefused, match="does not verify"):
        run_harness(broken, lossy.source_folder, HarnessOptions(("words",), tasks))
    import lm_eval

    assert lm_eval.CALLS == []


@pytest.mark.skipif(util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_the_harness_one_line_says_how_to_get_it(lossy: EvalPair) -> None:
    with pytest.raises(EnvironmentFault, match=r"pip install 'mla-convert\[harness\]'"):
        run(lossy, None)


@pytest.mark.parametrize("options", [{"tasks": ()}, {"tasks": ("",)}, {"limit": 0}, {"batch_size": 0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(UsageFault):
        HarnessOptions(**{"tasks": ("a",), **options})


def test_the_real_harness_runs_a_task_from_local_files(
    lossless: EvalPair, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra [harness])")
    monkeypatch.chdir(tasks)
    before = dict(os.environ)

    receipt = run(lossless, tasks, batch_size=2)

    (task,) = receipt.tasks
    assert (task.task, task.version, task.examples, task.shots) == ("words", "2.0", 3, 0)
    accuracy = {metric.metric: metric for metric in receipt.metrics}["acc"]
    # A lossless conversion gives the same answers.
    assert accuracy.source == accuracy.target
    assert accuracy.difference == 0
    assert accuracy.source_stderr is not None
    assert accuracy.higher_is_better
    assert receipt.offline
    assert {name: os.environ.get(name) for name in before} == before
