"""From a plan's calibration texts to what was measured on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_convert.convert.calibrate import StatisticsStore, calibrate
from mla_convert.convert.calibration_evidence import CalibrationEvidence, TextSummary
from mla_convert.convert.calibration_mix import TokenWindows, apportion, sample_windows
from mla_convert.convert.calibration_text import Corpus, read_corpus
from mla_convert.convert.chat_text import ChatTemplate
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.factorize import damping_for
from mla_convert.convert.plan import SELF_TEXT, CalibrationSpec, ConversionPlan
from mla_convert.convert.receipts import SourceDigests
from mla_convert.convert.self_text import SelfText, SelfTextSettings, write_self_text
from mla_convert.convert.states import MEMORY_BUDGET_BYTES
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import sha256_json


def check_texts(source: SourceCheckpoint, plan: ConversionPlan) -> None:
    """Read the calibration texts, except those that have to be downloaded or written first.

    Raises:
        InputRefused: See `read_corpus`.
    """
    spec = plan.calibration
    if spec is not None:
        chat = ChatTemplate(load_tokenizer(source.location.folder))
        for name in spec.texts:
            # A dataset may have to be downloaded, which writes to its cache.
            if name != SELF_TEXT and not name.startswith("datasets:"):
                read_corpus(name, spec.text_field, chat)


def gather(
    source: SourceCheckpoint,
    digests: SourceDigests,
    plan: ConversionPlan,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
) -> CalibrationEvidence | None:
    """Read the texts, draw windows and measure every layer on them; None for a plan without calibration.

    Raises:
        InputRefused: For texts or a tokenizer that cannot be used.
        CheckFailed: If a layer of the source does not compute what its weights say.
    """
    spec = plan.calibration
    if spec is None:
        return None
    texts = _Texts.read(source, digests, plan, spec)
    short, long = texts.short_windows(), texts.long_windows()
    _check_ids([short] if long is None else [short, long], source)
    # The configuration decides activations as much as the weights do.
    key = sha256_json([digests.checkpoint, digests.config])
    stores = [
        _measure(source, key, texts, index, (short, long), memory_budget_bytes) for index in range(len(texts.corpora))
    ]
    tokens = short.tokens + (0 if long is None else long.tokens)
    return CalibrationEvidence(
        corpora=texts.corpora,
        windows=short,
        long_windows=long,
        store=StatisticsStore.joined(stores),
        damping=damping_for(tokens, source.shape.hidden_size),
        summaries=_summaries(stores, source.num_layers),
        chat_template_sha256=texts.chat_template_sha256,
        self_text=None if texts.own is None else texts.own.record,
        warnings=texts.warnings(short, long),
    )


@dataclass(frozen=True)
class _Texts:
    """The texts of one calibration, all read."""

    spec: CalibrationSpec
    seed: int
    tokenizer: Any
    corpora: tuple[Corpus, ...]
    own: SelfText | None

    @classmethod
    def read(
        cls, source: SourceCheckpoint, digests: SourceDigests, plan: ConversionPlan, spec: CalibrationSpec
    ) -> _Texts:
        """Read what is there, then let the source write what it is to write."""
        tokenizer = load_tokenizer(source.location.folder)
        chat, own = ChatTemplate(tokenizer), None
        given = {name: read_corpus(name, spec.text_field, chat) for name in spec.texts if name != SELF_TEXT}
        if SELF_TEXT in spec.texts:
            windows = apportion(spec.tokens // spec.window, spec.weights)[spec.texts.index(SELF_TEXT)]
            settings = SelfTextSettings(tokens=windows * spec.window, length=spec.window, seed=plan.seed)
            key = sha256_json([digests.checkpoint, digests.config, digests.tokenizer])
            own = write_self_text(source, key, tokenizer, settings)
            given[SELF_TEXT] = own.corpus
        return cls(spec, plan.seed, tokenizer, tuple(given[name] for name in spec.texts), own)

    def short_windows(self) -> TokenWindows:
        """The windows that `--calibration-tokens` asks for."""
        spec = self.spec
        return sample_windows(
            self.corpora, self.tokenizer, tokens=spec.tokens, length=spec.window, seed=self.seed, weights=spec.weights
        )

    def long_windows(self) -> TokenWindows | None:
        """The windows that `--calibration-long` asks for, from all texts but the source's own, which are short."""
        spec = self.spec
        if spec.long_windows == 0:
            return None
        chosen = [index for index, corpus in enumerate(self.corpora) if corpus.kind != "self"]
        drawn = sample_windows(
            tuple(self.corpora[index] for index in chosen),
            self.tokenizer,
            tokens=spec.long_windows * spec.long_window,
            length=spec.long_window,
            seed=self.seed,
            weights=[spec.weights[index] for index in chosen],
            whole=True,
        )
        corpus, exhausted = (tuple(chosen[index] for index in part) for part in (drawn.corpus, drawn.exhausted))
        return TokenWindows(drawn.ids, drawn.documents, corpus, exhausted)

    @property
    def chat_template_sha256(self) -> str | None:
        """Digest of the chat template, None where no document went through it."""
        through = any(document.spelled_out for corpus in self.corpora for document in corpus.documents)
        return ChatTemplate(self.tokenizer).sha256 if through else None

    def warnings(self, short: TokenWindows, long: TokenWindows | None) -> tuple[str, ...]:
        """Texts that were shorter than their share."""
        found = []
        if len(self.corpora) > 1:
            found += [
                f"{self.corpora[index].name} has fewer calibration tokens than its share: "
                f"{int(short.of_corpus(index).numel())}; the other texts took over the rest"
                for index in short.exhausted
            ]
        if long is not None and len(long.ids) < self.spec.long_windows:
            found.append(f"the text gave {len(long.ids)} long windows of {self.spec.long_windows} asked for")
        return tuple(found)


def _check_ids(drawn: Sequence[TokenWindows], source: SourceCheckpoint) -> None:
    largest = max(int(windows.ids.max()) for windows in drawn)
    if largest >= source.config.vocab_size:
        raise InputRefused(
            "the tokenizer is not the model's",
            expected=f"token ids below {source.config.vocab_size}",
            found=str(largest),
            where=str(source.location.folder),
        )


def _measure(
    source: SourceCheckpoint,
    key: str,
    texts: _Texts,
    index: int,
    windows: tuple[TokenWindows, TokenWindows | None],
    memory_budget_bytes: int,
) -> StatisticsStore:
    """Statistics on the short and long windows of one text."""
    short, long = windows
    of_text = f" on {texts.corpora[index].name}" if len(texts.corpora) > 1 else ""
    stores = [calibrate(source, key, short.of_corpus(index), f"calibrating{of_text}", memory_budget_bytes)]
    if long is not None and index in long.corpus:
        label = f"calibrating{of_text}, long windows"
        stores.append(calibrate(source, key, long.of_corpus(index), label, memory_budget_bytes))
    return StatisticsStore.joined(stores)


def _summaries(stores: Sequence[StatisticsStore], layers: int) -> tuple[TextSummary, ...]:
    totals = torch.stack([store.totals(layers) for store in stores])  # (S, L, 4)
    # A layer that adds nothing has no weights to share.
    share = totals / totals.sum(0).clamp(min=torch.finfo(totals.dtype).tiny)  # (S, L, 4)
    return tuple(
        TextSummary(
            tokens=int(total[0, 0]),
            mean_square_input=float((total[:, 3] / total[:, 0]).mean()),
            key_share=min(1.0, float(own[:, 1].mean())),
            value_share=min(1.0, float(own[:, 2].mean())),
        )
        for total, own in zip(totals, share, strict=True)
    )
