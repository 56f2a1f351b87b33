"""The source's states are computed once for a key and found again, and only whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_convert.errors import CheckFailed, InputRefused
from mla_convert.eval import source_states as module
from mla_convert.eval.source_states import source_states
from tests.eval.helpers import EvalPair
from tests.tolerances import LOGITS_FLOAT32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("MLA_CONVERT_CACHE", str(tmp_path))
    return tmp_path / "source-hidden"


def test_states_and_head_give_the_models_logits(lossy: EvalPair) -> None:
    states = source_states(lossy.source, lossy.digests, lossy.windows)
    with torch.inference_mode():
        logits = lossy.source_model()(input_ids=lossy.windows.ids).logits

    for index in range(len(logits)):
        ours = states.window(index) @ states.head.T
        assert float((ours - logits[index]).abs().max() / logits.abs().max()) < LOGITS_FLOAT32


def test_the_second_run_computes_nothing(lossy: EvalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    first = source_states(lossy.source, lossy.digests, lossy.windows)
    monkeypatch.setattr(module, "load_model", lambda folder: pytest.fail(f"loaded {folder}"))
    second = source_states(lossy.source, lossy.digests, lossy.windows)

    assert (first.reused, second.reused) == (False, True)
    assert first.digest == second.digest
    assert first.cache == second.cache
    assert torch.equal(first.window(1), second.window(1))


def test_the_key_holds_weights_configuration_and_tokens(lossy: EvalPair) -> None:
    digests, windows = lossy.digests, lossy.windows
    other_ids = windows.ids.clone()
    other_ids[0, 3] += 1
    other_weights = tuple(
        file.model_copy(update={"sha256": "0" * 64}) if file.path == "model.safetensors" else file
        for file in digests.files
    )
    variants = [
        (digests, windows),
        (replace(digests, files=other_weights), windows),
        (replace(digests, config="sha256:" + "0" * 64), windows),
        (digests, replace(windows, ids=other_ids)),
        (digests, replace(windows, ids=windows.ids.view(-1, 12))),
    ]
    keys = {source_states(lossy.source, files, cut).digest for files, cut in variants}

    assert len(keys) == len(variants)


def test_a_run_that_fails_leaves_nothing(lossy: EvalPair, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        source_states(lossy.source, lossy.digests, lossy.windows)

    assert list(cache.iterdir()) == []


def test_a_source_that_computes_nan_is_refused_and_not_kept(
    lossy: EvalPair, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = lossy.source_model()
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    monkeypatch.setattr(module, "load_model", lambda _folder: broken)

    with pytest.raises(CheckFailed, match="not finite"):
        source_states(lossy.source, lossy.digests, lossy.windows)
    assert not cache.exists()


def test_a_source_whose_head_does_more_is_refused(lossy: EvalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = lossy.source_model()
    odd.lm_head.bias = torch.nn.Parameter(torch.ones(97))
    monkeypatch.setattr(module, "load_model", lambda _folder: odd)

    with pytest.raises(InputRefused, match="more than one matrix product"):
        source_states(lossy.source, lossy.digests, lossy.windows)
