"""The evaluation suite: checks the pair, runs its parts one after the other, and writes the receipt."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import UsageFault
from mla_convert.eval.domain_windows import TokenTexts, cut_by_text
from mla_convert.eval.evaluate import EvalOptions, Prepared, check_target, prepare
from mla_convert.eval.finite import refuse_not_finite
from mla_convert.eval.gates import Gate, check_gates
from mla_convert.eval.ladder.decomposition import measure_decomposition
from mla_convert.eval.ladder.measure import measure_ladder
from mla_convert.eval.ngram_overlap import find_overlap
from mla_convert.eval.serving import check_backend
from mla_convert.eval.suite_context import SuiteContext, SuiteName
from mla_convert.eval.suite_parts import KeptPart, PartStore
from mla_convert.eval.systems.measure import measure_systems
from mla_convert.eval.tasks.generation import measure_generation
from mla_convert.eval.tasks.measure import measure_tasks
from mla_convert.eval.text import overlap_with_calibration, refuse_overlap
from mla_convert.eval.text_quality import measure_quality
from mla_convert.manifests.digest import sha256_file
from mla_convert.manifests.environment import capture
from mla_convert.manifests.evaluation.ladder import DecompositionSection, LadderSection
from mla_convert.manifests.evaluation.quality import QualitySection
from mla_convert.manifests.evaluation.reading import RECEIPTS_FOLDER
from mla_convert.manifests.evaluation.receipt import (
    RECEIPT_PREFIX,
    ComparedFiles,
    Conditions,
    EvaluationReceipt,
    EvaluationText,
    PartTime,
)
from mla_convert.manifests.evaluation.systems import SystemsSection
from mla_convert.manifests.evaluation.tasks import GenerationSection, TasksSection
from mla_convert.manifests.models import MANIFEST_NAME
from mla_convert.manifests.record import Record
from mla_convert.progress import bar


@dataclass(frozen=True)
class Part:
    """One part of the suite.

    Attributes:
        measure: Does the work.
        section: What it returns.
        share: Of the suite's time, for the estimate.
    """

    measure: Callable[[SuiteContext], Record]
    section: type[Record]
    share: int


# In the order in which they run: what is cheap and may refuse first.
PARTS: Mapping[str, Part] = {
    "ladder": Part(measure_ladder, LadderSection, 30),
    "decomposition": Part(measure_decomposition, DecompositionSection, 10),
    "quality": Part(measure_quality, QualitySection, 20),
    "tasks": Part(measure_tasks, TasksSection, 15),
    "generation": Part(measure_generation, GenerationSection, 5),
    "systems": Part(measure_systems, SystemsSection, 20),
}


@dataclass(frozen=True)
class SuiteRequest:
    """What a user asks for.

    Attributes:
        target: The converted folder.
        source: Folder, GGUF file or Hub id.
        texts: Text sources as `read_corpus` takes them; each is a domain.
        options: Windows, seed and backend.
        suite: How much to measure.
        parts: Names out of `PARTS`.
        gates: Bars that the receipt must meet.
        strict: Refuse text that calibration has seen, be it a run of words, and text that cannot be checked for it.
    """

    target: Path
    source: str
    texts: tuple[str, ...]
    options: EvalOptions
    suite: SuiteName
    parts: tuple[str, ...] = tuple(PARTS)
    gates: tuple[Gate, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.parts if name not in PARTS]
        if unknown or not self.parts:
            raise UsageFault("no such part of the suite", expected=", ".join(PARTS), found=", ".join(unknown) or "none")


def run_suite(request: SuiteRequest, command: Sequence[str] | None = None) -> EvaluationReceipt:
    """Run the suite; parts that an interrupted run of the same request finished are not run again.

    Everything is computed from the files, loaded again by each part, one model in memory at a time.

    Args:
        request: What to do.
        command: Command line for the record; the process's own by default.

    Raises:
        UsageFault: For options that do not fit.
        InputRefused: If the folder does not verify, was made from another source or tokenizer, or has seen the text.
        CheckFailed: If a model computes NaN or infinity.
    """
    check_backend(request.options.backend)
    environment = capture(list(command if command is not None else sys.argv))
    prepared = prepare(request.source, request.texts, request.options)
    manifest = check_target(request.target, prepared)
    refuse_overlap(overlap_with_calibration(manifest, prepared.corpora), request.options.allow_overlap)
    refuse_not_finite(request.target)
    texts = _tokenised(prepared)
    overlap = find_overlap(manifest, prepared.corpora, prepared.source.location.folder, request.options.text_field)
    if request.strict:
        overlap.refuse()
    context = SuiteContext(prepared, request.target, manifest, request.suite)
    compared = ComparedFiles(
        source=prepared.source.location.given,
        source_digest=prepared.digests.checkpoint,
        target=str(request.target),
        manifest_sha256=sha256_file(request.target / MANIFEST_NAME),
        canonical_mla_id=manifest.canonical_mla_id,
    )
    conditions = _conditions(request, context, texts)
    store = PartStore.of(compared, conditions)
    sections, times = _run_parts(request.parts, context, store)
    receipt = EvaluationReceipt(
        compared=compared,
        conditions=conditions,
        overlap=overlap.records,
        overlap_unchecked=overlap.unchecked,
        **{name: sections.get(name) for name in PARTS},  # type: ignore[arg-type]
        gates=(),
        times=times,
        environment=environment.finish(),
    )
    return receipt.model_copy(update={"gates": check_gates(receipt, request.gates)})


def _run_parts(
    names: Sequence[str], context: SuiteContext, store: PartStore
) -> tuple[dict[str, Record], tuple[PartTime, ...]]:
    sections, times = {}, []
    with bar(sum(PARTS[name].share for name in names), "evaluation", unit="%") as progress:
        for name in (name for name in PARTS if name in names):
            part = PARTS[name]
            progress.set_postfix_str(name)
            kept = store.load(name, part.section)
            if kept is None:
                started = time.perf_counter()
                section = part.measure(context)
                kept = KeptPart(section, time.perf_counter() - started)
                store.keep(name, kept)
                times.append(PartTime(part=name, seconds=kept.seconds, reused=False))
            else:
                times.append(PartTime(part=name, seconds=kept.seconds, reused=True))
            sections[name] = kept.section
            progress.update(part.share)
    return sections, tuple(times)


def _tokenised(prepared: Prepared) -> TokenTexts:
    """The texts as tokens. Each is a domain of its own: given once, and as long as a window at least.

    Raises:
        UsageFault: If two texts hold the same documents.
        InputRefused: If one is shorter than a window.
    """
    seen: dict[tuple[str, ...], str] = {}
    for corpus in prepared.corpora:
        key = tuple(document.sha256 for document in corpus.documents)
        if key in seen:
            raise UsageFault("the same text twice", found=f"{seen[key]} and {corpus.name}", where="--text")
        seen[key] = corpus.name
    plan, tokenizer = prepared.plan, load_tokenizer(prepared.source.location.folder)
    each = replace(plan, max_tokens=max(plan.max_tokens, len(prepared.corpora) * plan.seq_len))
    texts = TokenTexts.of(prepared.corpora, tokenizer)
    cut_by_text(texts, each)
    return texts


def _conditions(request: SuiteRequest, context: SuiteContext, texts: TokenTexts) -> Conditions:
    prepared, options = context.prepared, request.options
    return Conditions(
        suite=request.suite,
        parts=tuple(name for name in PARTS if name in request.parts),
        backend=options.backend,
        seed=options.seed,
        seq_len=prepared.plan.seq_len,
        stride=prepared.plan.stride,
        max_tokens=options.max_tokens,
        dtype="float32",
        texts=tuple(
            EvaluationText(
                name=corpus.name,
                sha256=corpus.sha256,
                documents=len(corpus.documents),
                characters=corpus.characters,
                tokens=len(text.stream),
            )
            for corpus, text in zip(prepared.corpora, texts.texts, strict=True)
        ),
        ids_digest=prepared.windows.ids_digest,
        bos_policy=prepared.windows.bos_policy,
        added_ids=prepared.windows.added_ids,
    )


def write_receipt(receipt: EvaluationReceipt, target: Path) -> Path:
    """Write a receipt into `target/receipts` in one step, forget the parts that were kept for it, return its path.

    Its name is the time at which the run began and the first digits of its digest.
    """
    text = receipt.to_json_text().encode()
    moment = "".join(filter(str.isalnum, receipt.environment.started.split("+")[0].split(".")[0]))
    folder = target / RECEIPTS_FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{RECEIPT_PREFIX}{moment}-{hashlib.sha256(text).hexdigest()[:8]}.json"
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    PartStore.of(receipt.compared, receipt.conditions).clear()
    return path
