"""A converted folder against its source on held-out text: check both, run both, compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mla_convert.convert.calibration_text import Corpus, read_corpus
from mla_convert.convert.checkpoint import SourceCheckpoint, open_source
from mla_convert.convert.receipts import SourceDigests, digest_of_source
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.decode.dispatch import AUTO
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval import defaults
from mla_convert.eval.bootstrap import DEFAULT_RESAMPLES, bootstrap, figures
from mla_convert.eval.cache_bytes import measure_cache
from mla_convert.eval.evaluation import Evaluation, Subjects, TextFacts
from mla_convert.eval.loading import load_model
from mla_convert.eval.quality import score_windows
from mla_convert.eval.serving import check_backend, served
from mla_convert.eval.source_states import source_states
from mla_convert.eval.text import (
    EvalWindows,
    SharedDocument,
    WindowPlan,
    cut_windows,
    overlap_with_calibration,
    refuse_overlap,
    text_digest,
)
from mla_convert.manifests.digest import sha256_file
from mla_convert.manifests.environment import capture
from mla_convert.manifests.models import MANIFEST_NAME, ConversionManifest, load
from mla_convert.manifests.verify import verify_folder


@dataclass(frozen=True)
class EvalOptions:
    """What a user asks for.

    Attributes:
        max_tokens: Most tokens that go through each model.
        seq_len: Tokens per window.
        stride: Tokens between the starts of windows; None takes `seq_len`.
        seed: Of the choice of windows and of the resampling.
        resamples: Of the bootstrap.
        allow_overlap: Accept text that calibration has read.
        text_field: Field of JSONL and dataset rows.
        backend: What the target runs on, see `served`.
    """

    max_tokens: int = defaults.MAX_TOKENS
    seq_len: int = defaults.SEQ_LEN
    stride: int | None = None
    seed: int = 0
    resamples: int = DEFAULT_RESAMPLES
    allow_overlap: bool = False
    text_field: str = "text"
    backend: str = AUTO

    @property
    def window_plan(self) -> WindowPlan:
        """The windows that these options ask for."""
        return WindowPlan(
            self.seq_len, self.seq_len if self.stride is None else self.stride, self.max_tokens, self.seed
        )


@dataclass(frozen=True)
class Prepared:
    """A source and a text, ready for any number of targets; no model has been run.

    Attributes:
        source: The opened source.
        digests: Of its files.
        corpora: The texts.
        plan: Which windows were cut.
        windows: The windows.
        options: What was asked for.
    """

    source: SourceCheckpoint
    digests: SourceDigests
    corpora: tuple[Corpus, ...]
    plan: WindowPlan
    windows: EvalWindows
    options: EvalOptions


def prepare(source: str | SourceCheckpoint, texts: Sequence[str], options: EvalOptions) -> Prepared:
    """Open the source, read the text and cut it into windows.

    Args:
        source: Folder, GGUF file or Hub id, or an opened source.
        texts: Text sources as `read_corpus` takes them.
        options: What is wanted.

    Raises:
        UsageFault: For options that do not fit together, or windows longer than the source's positions.
        InputRefused: For a source or text that cannot be used.
    """
    plan = options.window_plan
    if not texts:
        raise UsageFault("no text to evaluate on", expected="at least one --text")
    opened = open_source(source) if isinstance(source, str) else source
    positions = int(opened.config.max_position_embeddings)
    if plan.seq_len > positions:
        raise UsageFault(
            "--seq-len is longer than the source's positions",
            expected=f"at most {positions}",
            found=str(plan.seq_len),
        )
    corpora = tuple(read_corpus(text, options.text_field) for text in texts)
    windows = cut_windows(corpora, load_tokenizer(opened.location.folder), plan)
    largest, size = int(windows.ids.max()), int(opened.config.vocab_size)
    if largest >= size:
        raise InputRefused(
            "the tokenizer is not the model's",
            expected=f"token ids below {size}",
            found=str(largest),
            where=str(opened.location.folder),
        )
    return Prepared(opened, digest_of_source(opened), corpora, plan, windows, options)


def evaluate(
    target: Path,
    source: str,
    texts: Sequence[str],
    options: EvalOptions,
    command: Sequence[str] | None = None,
) -> Evaluation:
    """Evaluate one converted folder; see `prepare` and `evaluate_target`."""
    return evaluate_target(prepare(source, texts, options), target, command)


def evaluate_target(prepared: Prepared, target: Path, command: Sequence[str] | None = None) -> Evaluation:
    """Compare a converted folder with its source; one model is in memory at a time.

    Args:
        prepared: The source and the text.
        target: A converted folder.
        command: Command line for the record; the process's own by default.

    Raises:
        InputRefused: If the folder does not verify, was made from another source or with another tokenizer,
            or has seen the text in calibration.
        CheckFailed: If a model computes NaN or infinity.
    """
    check_backend(prepared.options.backend)
    environment = capture(list(command if command is not None else sys.argv))
    manifest = check_target(target, prepared)
    shared = overlap_with_calibration(manifest, prepared.corpora)
    refuse_overlap(shared, prepared.options.allow_overlap)
    states = source_states(prepared.source, prepared.digests, prepared.windows)
    model = load_model(target)
    with served(model, prepared.options.backend, from_pages=True) as running:
        scores = score_windows(states, running, prepared.windows)
        target_cache = measure_cache(model, getattr(torch, manifest.method.output_dtype))
        receipt = running.receipt
    return Evaluation(
        subjects=Subjects(
            source=prepared.source.location.given,
            source_digest=prepared.digests.checkpoint,
            target=str(target),
            manifest_sha256=sha256_file(target / MANIFEST_NAME),
            canonical_mla_id=manifest.canonical_mla_id,
        ),
        figures=figures(scores),
        intervals=bootstrap(scores, prepared.options.seed, prepared.options.resamples),
        scores=scores,
        source_cache=states.cache,
        target_cache=target_cache,
        receipt=receipt,
        text=_text_facts(prepared, shared),
        seq_len=prepared.plan.seq_len,
        stride=prepared.plan.stride,
        seed=prepared.plan.seed,
        source_reused=states.reused,
        environment=environment.finish(),
    )


def check_target(target: Path, prepared: Prepared) -> ConversionManifest:
    """Verify a converted folder and that it was made from the prepared source; see `check_pair`."""
    return check_pair(target, prepared.source, prepared.digests)


def check_pair(target: Path, source: SourceCheckpoint, digests: SourceDigests) -> ConversionManifest:
    """Verify a converted folder and that it was made from a source.

    Raises:
        InputRefused: Naming the first thing that is wrong.
    """
    report = verify_folder(target)
    if not report.ok:
        raise InputRefused(
            f"the converted folder does not verify: {report.problems[0].render()}",
            where=str(target),
            remedy="mla-convert verify lists every problem.",
        )
    manifest = load(target)
    for what, recorded, found in (
        ("source's weights", manifest.source.checkpoint_digest, digests.checkpoint),
        ("source's configuration", manifest.source.config_digest, digests.config),
        ("tokenizer", manifest.identity.checkpoint.tokenizer_digest, digests.tokenizer),
    ):
        if recorded != found:
            raise InputRefused(
                f"the {what} differs from that in the manifest",
                expected=str(recorded),
                found=str(found),
                where=source.location.given,
            )
    return manifest


def _text_facts(prepared: Prepared, shared: tuple[SharedDocument, ...]) -> TextFacts:
    corpora, windows = prepared.corpora, prepared.windows
    return TextFacts(
        names=tuple(corpus.name for corpus in corpora),
        sha256=text_digest(corpora),
        documents=sum(len(corpus.documents) for corpus in corpora),
        characters=sum(corpus.characters for corpus in corpora),
        text_tokens=windows.text_tokens,
        windows=len(windows.ids),
        tokens=windows.tokens,
        scored_tokens=windows.scored_tokens,
        ids_digest=windows.ids_digest,
        bos_policy=windows.bos_policy,
        added_ids=windows.added_ids,
        shared_with_calibration=shared,
    )
