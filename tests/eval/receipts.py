"""Evaluation receipts made up in a test: a quality part from sums of windows, other parts as far as they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mla_convert.manifests.digest import sha256_json
from mla_convert.manifests.environment import capture
from mla_convert.manifests.evaluation.figure import Figure, Resampling
from mla_convert.manifests.evaluation.ladder import Finding, LadderSection
from mla_convert.manifests.evaluation.quality import PositionBucket, QualitySection, TextQuality, WindowSums
from mla_convert.manifests.evaluation.receipt import ComparedFiles, Conditions, EvaluationReceipt
from mla_convert.manifests.evaluation.systems import SystemsSection
from mla_convert.manifests.evaluation.tasks import TaskCell, TasksSection

DIGEST = sha256_json("digest")
HEX = DIGEST.removeprefix("sha256:")


def window(text: str, start: int, **sums: float) -> WindowSums:
    """A window of 100 tokens; `sums` replace the plain ones."""
    fields = {"source_nll": 300.0, "target_nll": 320.0, "kl": 10.0, "top1": 80, "top5": 95, "tokens": 100, **sums}
    return WindowSums.model_validate(
        {"text": text, "start": start, "ids_digest": sha256_json([text.rsplit("/")[-1], start]), **fields}
    )


def text_sha256(name: str) -> str:
    """The digest that these receipts give to a text of that file name."""
    return sha256_json(name.rsplit("/")[-1]).removeprefix("sha256:")


def text_quality(name: str, sha256: str, windows: Sequence[WindowSums]) -> TextQuality:
    """Figures of windows, those of calibration made up."""
    tokens = sum(item.tokens for item in windows)
    source, target = (sum(getattr(item, f"{side}_nll") for item in windows) / tokens for side in ("source", "target"))
    top1, top5, kl = (sum(getattr(item, key) for item in windows) / tokens for key in ("top1", "top5", "kl"))
    return TextQuality(
        name=name,
        sha256=sha256,
        windows=len(windows),
        tokens=tokens,
        source_perplexity=Figure(value=math.exp(source)),
        target_perplexity=Figure(value=math.exp(target)),
        ratio=Figure(value=math.exp(target - source), low=1.0, high=2.0),
        kl=Figure(value=kl),
        top1=Figure(value=top1),
        top5=Figure(value=top5),
        ece_source=Figure(value=0.02),
        ece_target=Figure(value=0.03),
    )


def quality_section(windows: Sequence[WindowSums], **fields: object) -> QualitySection:
    """A section of these windows; `fields` replace single ones."""
    names = list(dict.fromkeys(item.text for item in windows))
    domains = tuple(
        text_quality(name, text_sha256(name), [item for item in windows if item.text == name]) for name in names
    )
    bucket = PositionBucket(
        first=1,
        last=15,
        tokens=60,
        source_perplexity=20.0,
        target_perplexity=22.0,
        ratio=Figure(value=1.1),
        kl=Figure(value=0.1),
    )
    plain: dict[str, object] = {
        "dtype": "float32",
        "seq_len": 101,
        "stride": 101,
        "bos_policy": "none",
        "overall": text_quality("all texts", HEX, windows),
        "domains": domains,
        "buckets": (bucket,),
        "long_context": (),
        "long_seq_len": None,
        "windows": tuple(windows),
        "resampling": Resampling(resamples=100, confidence=0.95, seed=0),
    }
    return QualitySection.model_validate({**plain, **fields})


def task_cell(task: str, verdict: str, depth: float | None) -> TaskCell:
    """A cell at length 512."""
    return TaskCell.model_validate(
        {
            "task": task,
            "length": 512,
            "depth": depth,
            "prompts": 4,
            "answer_tokens": 2.0,
            "source_logprob": -0.5,
            "target_logprob": -0.75,
            "chance_logprob": -9.0,
            "difference": Figure(value=-0.25, low=-0.5, high=0.0),
            "source_match": 1.0,
            "target_match": 0.75,
            "verdict": verdict,
        }
    )


def receipt(
    quality: QualitySection | None,
    *,
    findings: Sequence[Finding] = (),
    cells: Sequence[TaskCell] | None = None,
    withheld: str | None = None,
    source_digest: str = DIGEST,
    target: str = "out",
) -> EvaluationReceipt:
    """A receipt. Parts that others fill hold no more than what is read here."""
    return EvaluationReceipt(
        compared=ComparedFiles(
            source="source",
            source_digest=source_digest,
            target=target,
            manifest_sha256=sha256_json(target).removeprefix("sha256:"),
            canonical_mla_id=DIGEST,
        ),
        conditions=Conditions(
            suite="quick",
            parts=("quality",),
            backend="auto",
            seed=0,
            seq_len=101,
            stride=101,
            max_tokens=4096,
            dtype="float32",
            texts=(),
            ids_digest=DIGEST,
            bos_policy="none",
            added_ids=(),
        ),
        overlap=(),
        ladder=LadderSection.model_construct(findings=tuple(findings)),
        decomposition=None,
        quality=quality,
        tasks=None if cells is None else TasksSection.model_construct(cells=tuple(cells)),
        generation=None,
        systems=SystemsSection.model_construct(withheld=withheld),
        gates=(),
        times=(),
        environment=capture(["test"]),
    )
