"""Receipts made by hand, with every part in every state that a report has to show."""

from __future__ import annotations

import math
from typing import Any, Literal

from mla_convert.manifests.environment import Environment
from mla_convert.manifests.evaluation import ladder, quality, systems, tasks
from mla_convert.manifests.evaluation.figure import Figure, Resampling
from mla_convert.manifests.evaluation.receipt import (
    ComparedFiles,
    Conditions,
    EvaluationReceipt,
    EvaluationText,
    GateResult,
    OverlapRecord,
    PartTime,
)

MANIFEST_SHA256 = "a" * 64
HOSTILE = "<script>alert(1)</script>&\"' $\\frac$ \u202egnp.exe\x00 \x1b[31m </svg><img src=x onerror=alert(1)> 漢字 🙂"
FAULT = ladder.Finding(stage="value map", layer=1, what="one layer's V is scaled", measured=2.0, allowed=1e-4)


def wave(index: int, scale: float = 1.0) -> float:
    """A positive number with many digits that differs from index to index."""
    return scale * (1.1 + math.sin(1.7 * index + 0.3))


def figure(index: int, scale: float = 1.0, *, bare: bool = False) -> Figure:
    """A figure with an interval, or without one."""
    value = wave(index, scale)
    return Figure(value=value) if bare else Figure(value=value, low=0.9 * value, high=1.15 * value)


def share(index: int) -> Figure:
    """A share of 1 with an interval."""
    value = 0.5 + 0.4 * math.sin(index)
    return Figure(value=value, low=value - 0.05, high=value + 0.05)


def layer_errors(index: int, *, zero: bool = False) -> ladder.LayerLadder:
    """One layer's errors, over some decades; of a lossless conversion all zero."""
    names = [name for name in ladder.LayerLadder.model_fields if name not in ("index", "singular_energy_kept")]
    errors = {
        name: 0.0 if zero else min(1.0, wave(index + 3 * place, 10.0 ** -(place % 5) / 3))
        for place, name in enumerate(names)
    }
    return ladder.LayerLadder(index=index, singular_energy_kept=1.0 if zero else 0.99 - 1e-3 * (index % 7), **errors)


def ladder_section(layers: int, *, zero: bool = False, findings: tuple[ladder.Finding, ...] = ()) -> Any:
    """A ladder with 64 decode steps."""
    return ladder.LadderSection(
        windows=4,
        window_length=128,
        distances=(0, 1, 16),
        layers=tuple(layer_errors(index, zero=zero) for index in range(layers)),
        cache_rows=tuple(cache_rows(index) for index in range(min(layers, 3))),
        drift=ladder.Drift(
            prefill=64,
            steps=64,
            kl=tuple(0.0 if zero else wave(step, 0.1) for step in range(64)),
            first_quarter_kl=0.1234567,
            last_quarter_kl=0.2345678,
            one_pass_kl=0.1111111,
            one_pass_error=1.5e-6,
        ),
        findings=findings,
    )


def cache_rows(layer: int) -> ladder.CacheRows:
    """Right rows."""
    return ladder.CacheRows(
        layer=layer,
        tokens=70,
        width=10,
        expected_width=10,
        dtype="float32",
        latent_error=1.5e-7,
        rope_error=2.5e-7,
        explanation=None,
    )


def text_quality(name: str, index: int, *, bare: bool = False) -> quality.TextQuality:
    """Quality on one text."""
    return quality.TextQuality(
        name=name,
        sha256="b" * 64,
        windows=1 if bare else 7,
        tokens=3577,
        source_perplexity=figure(index, 10, bare=bare),
        target_perplexity=figure(index + 1, 12, bare=bare),
        ratio=figure(index + 2, 1.2, bare=bare),
        kl=figure(index + 3, 0.2, bare=bare),
        top1=share(index),
        top5=share(index + 1),
        ece_source=figure(index, 0.02),
        ece_target=figure(index, 0.03),
    )


def bucket(index: int, width: int = 64) -> quality.PositionBucket:
    """One bucket of positions."""
    return quality.PositionBucket(
        first=index * width,
        last=(index + 1) * width - 1,
        tokens=width * 7,
        source_perplexity=wave(index, 11),
        target_perplexity=wave(index, 13),
        ratio=figure(index, 1.1),
        kl=figure(index, 0.3),
    )


def quality_section(names: tuple[str, ...]) -> quality.QualitySection:
    """Quality on texts of these names."""
    return quality.QualitySection(
        dtype="float32",
        seq_len=512,
        stride=512,
        bos_policy="first window",
        overall=text_quality("all texts", 9),
        domains=tuple(text_quality(name, index, bare=index == 1) for index, name in enumerate(names)),
        buckets=tuple(bucket(index) for index in range(8)),
        long_context=tuple(bucket(index, 512) for index in range(4)),
        long_seq_len=2048,
        windows=(
            quality.WindowSums(
                text=names[0],
                start=0,
                ids_digest="sha256:" + "0" * 64,
                tokens=511,
                source_nll=1.5,
                target_nll=1.75,
                kl=0.25,
                top1=300,
                top5=400,
            ),
        ),
        resampling=Resampling(resamples=1000, confidence=0.95, seed=0),
    )


def task_cell(task: tasks.TaskName, index: int, length: int, depth: float | None, verdict: tasks.Verdict) -> Any:
    """One cell."""
    silent = verdict == "uninformative"
    return tasks.TaskCell(
        task=task,
        length=length,
        depth=depth,
        prompts=8,
        answer_tokens=3.5,
        source_logprob=-wave(index, 4 if silent else 0.4),
        target_logprob=-wave(index + 1, 5),
        chance_logprob=-12.25,
        difference=figure(index, -0.5),
        source_match=0.125 if silent else 0.875,
        target_match=0.25 if verdict == "lost" else 0.75,
        verdict=verdict,
    )


def tasks_section(*, only: tasks.Verdict | None = None) -> tasks.TasksSection:
    """All tasks; `only` gives every cell that verdict."""
    verdicts: tuple[tasks.Verdict, ...] = ("kept", "kept", "lost", "uninformative")
    needles = [(length, depth) for length in (256, 512, 1024, 2048) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)]
    cells = [
        task_cell("needle", index, length, depth, only or verdicts[(index * 7) % 4])
        for index, (length, depth) in enumerate(needles)
    ]
    others: tuple[tasks.TaskName, ...] = ("passkey", "key-value", "copy", "induction", "counting")
    cells += [task_cell(task, index, 512, None, only or verdicts[index % 4]) for index, task in enumerate(others)]
    return tasks.TasksSection(
        seed=0,
        ran="torch",
        informative_match=0.5,
        rule="The source is right in half.",
        resampling=Resampling(resamples=2000, confidence=0.95, seed=0),
        cells=tuple(cells),
        left_out=(tasks.LeftOut(task="counting", length=1024, reason="the tokenizer has no digits"),),
    )


def generation_section(text: str) -> tasks.GenerationSection:
    """Two samples that hold `text`."""
    samples = tuple(
        tasks.GenerationSample(
            prompt=f"{index}. The Sun is {text}",
            source_text=f" a star. {text} " + "It is very hot. " * 12,
            target_text=f" a planet. {text} " + "It is it is it is. " * 12,
            identical_prefix=3 + index,
            source_repetition=0.0625,
            target_repetition=0.4375,
            source_invalid_utf8=0,
            target_invalid_utf8=index,
            source_ended=False,
            target_ended=True,
        )
        for index in range(2)
    )
    return tasks.GenerationSection(
        seed=0,
        prompt_tokens=16,
        new_tokens=64,
        samples=samples,
        median_identical_prefix=3.5,
        source_repetition=0.0625,
        target_repetition=0.4375,
    )


def systems_section(*, withheld: str | None = None) -> systems.SystemsSection:
    """Cache and speed of both models at two lengths and two batches."""
    subjects: tuple[Literal["source", "target"], ...] = ("source", "target")
    shown = withheld is None
    rows = [
        systems.SpeedRow(
            subject=subject,
            prompt_tokens=tokens,
            new_tokens=32,
            batch=batch,
            repeats=3,
            ttft_s=wave(place, 0.2) if shown else None,
            tpot_s=wave(place, 0.03) if shown else None,
            tokens_per_s=wave(place, 40) if shown else None,
            goodput_tokens_per_s=wave(place, 35) if shown else None,
            peak_bytes=120_000_000 + place if shown else None,
        )
        for place, (tokens, batch, subject) in enumerate(
            (t, b, s) for t in (256, 2048) for b in (1, 4) for s in subjects
        )
    ]
    return systems.SystemsSection(
        device="cpu",
        threads=1,
        dtype="float32",
        models_in_memory="together",
        cache=tuple(cache_figures(subject) for subject in subjects),
        objective=systems.Objective(
            rule="twice the source's median at batch 1",
            factor=2.0,
            limits=(systems.ObjectiveLimit(prompt_tokens=128, ttft_s=0.5, tpot_s=0.06),) if shown else (),
        ),
        rows=tuple(rows),
        dispatch=systems.DispatchFigures(
            requested="auto",
            ran="torch",
            rejected=("triton: no GPU",),
            calls=960,
            expected_calls=960,
            expanded_calls=30,
            fallbacks=0 if shown else 4,
            unobserved_fallbacks=0 if shown else 4,
        ),
        withheld=withheld,
    )


def cache_figures(subject: Literal["source", "target"]) -> systems.CacheFigures:
    """The source caches twice as much."""
    numbers = 384 if subject == "source" else 192
    return systems.CacheFigures(
        subject=subject,
        tokens=512,
        dtype="float32",
        numbers_per_token=numbers * 30,
        formula_bytes_per_token=4.0 * numbers * 30,
        payload_bytes_per_token=4.0 * numbers * 30,
        scale_bytes=0,
        metadata_bytes=4096,
        page_bytes=None if subject == "source" else 65536,
        resident_bytes=4 * numbers * 30 * 512 + 4096,
    )


def decomposition() -> ladder.DecompositionSection:
    """Every kind of part, one of them not measured."""
    names: tuple[Any, ...] = ("conversion", "absorption", "numeric", "numeric", "selection", "runtime")
    variants = ("closed form", "absorbed", "bfloat16", "fp8 pages", "dense", "triton")
    errors = (0.21, 3e-7, 4e-3, 2e-2, 0.0, None)
    return ladder.DecompositionSection(
        tokens=128,
        parts=tuple(
            ladder.ErrorPart(
                name=name,
                variant=variant,
                error=error,
                held_fixed="float64, reference backend",
                note=None if error is not None else "no GPU here",
            )
            for name, variant, error in zip(names, variants, errors, strict=True)
        ),
    )


def environment(command: tuple[str, ...] = ("/usr/bin/mla-convert", "eval", "OUT", "--text", "a b.txt")) -> Environment:
    """A fixed machine."""
    return Environment(
        python="3.11.7",
        implementation="CPython",
        platform="Linux",
        machine="x86_64",
        cpu_count=2,
        memory_bytes=8 << 30,
        packages={"torch": "2.13.0"},
        command=command,
        started="2026-01-02T03:04:05+00:00",
        finished=None,
    )


def minimal(sha256: str = MANIFEST_SHA256, **parts: Any) -> EvaluationReceipt:
    """A receipt with no part but those given."""
    fields: dict[str, Any] = {
        "compared": ComparedFiles(
            source="source",
            source_digest="sha256:" + "c" * 64,
            target="out",
            manifest_sha256=sha256,
            canonical_mla_id="sha256:" + "d" * 64,
        ),
        "conditions": Conditions(
            suite="quick",
            parts=("quality",),
            backend="auto",
            seed=0,
            seq_len=512,
            stride=512,
            max_tokens=16384,
            dtype="float32",
            texts=(EvaluationText(name="a.txt", sha256="e" * 64, documents=3, characters=999, tokens=400),),
            ids_digest="sha256:" + "f" * 64,
            bos_policy="first window",
            added_ids=(),
        ),
        "overlap": (),
        "ladder": None,
        "decomposition": None,
        "quality": None,
        "tasks": None,
        "generation": None,
        "systems": None,
        "gates": (),
        "times": (PartTime(part="quality", seconds=12.5, reused=False),),
        "environment": environment(),
    }
    return EvaluationReceipt(**{**fields, **parts})


def full(sha256: str = MANIFEST_SHA256, *, layers: int = 12, text: str = "", **parts: Any) -> EvaluationReceipt:
    """A receipt with every part; `text` is woven into everything that comes from outside."""
    fields: dict[str, Any] = {
        "ladder": ladder_section(layers, findings=(FAULT,)),
        "decomposition": decomposition(),
        "quality": quality_section((f"wikipedia {text}", f"python code {text}", f"dialogues {text}")),
        "tasks": tasks_section(),
        "generation": generation_section(text),
        "systems": systems_section(),
        "gates": (
            GateResult(figure=f"quality.overall.kl {text}", at_most=0.1, at_least=None, measured=0.2, passed=False),
            GateResult(figure="quality.overall.top1", at_most=None, at_least=0.5, measured=0.7, passed=True),
        ),
        "overlap": (OverlapRecord(document=f"doc {text}", by="n-gram", share=0.25),),
    }
    return minimal(sha256, **{**fields, **parts})
