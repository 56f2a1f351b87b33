"""Evaluation text as windows of tokens, and whether calibration has seen it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mla_convert.convert.calibration_text import Corpus
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.manifests.digest import sha256_json
from mla_convert.manifests.models import ConversionManifest
from mla_convert.progress import track

BosPolicy = Literal["per-document", "none"]
SharedBy = Literal["text", "name"]


@dataclass(frozen=True)
class WindowPlan:
    """Which windows are cut from a text.

    Attributes:
        seq_len: Tokens per window.
        stride: Tokens from the start of one window to the start of the next; at most `seq_len`.
        max_tokens: Most tokens that go through a model, tokens of overlapping windows counted each time.
        seed: Of the choice of windows where the text has more than `max_tokens`.

    Raises:
        UsageFault: For sizes that do not fit together.
    """

    seq_len: int
    stride: int
    max_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UsageFault(
                "a window needs a token to predict from and one to predict", expected="--seq-len 2 or more"
            )
        if not 1 <= self.stride <= self.seq_len:
            raise UsageFault(
                "--stride is out of range",
                expected=f"1 to --seq-len ({self.seq_len})",
                found=str(self.stride),
                remedy="A longer stride would leave text out.",
            )
        if self.max_tokens < self.seq_len:
            raise UsageFault(
                "--max-tokens is shorter than one window",
                expected=f"at least {self.seq_len}",
                found=str(self.max_tokens),
            )


@dataclass(frozen=True)
class EvalWindows:
    """Windows of tokens and which of them are scored.

    Attributes:
        ids: (N, T) int64.
        starts: (N,) position of each window in the text, ascending.
        first_scored: (N,) index of the first token that a window scores; 1 or more, so that it has a context.
        added_ids: Tokens that the tokenizer adds to each document by itself.
        text_tokens: Tokens of the whole text.
    """

    ids: Tensor
    starts: tuple[int, ...]
    first_scored: tuple[int, ...]
    added_ids: tuple[int, ...]
    text_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens that go through a model."""
        return int(self.ids.numel())

    @property
    def scored_tokens(self) -> int:
        """Tokens whose prediction is scored."""
        return sum(self.ids.shape[1] - first for first in self.first_scored)

    @property
    def bos_policy(self) -> BosPolicy:
        """Whether each document opens with the tokenizer's own tokens; none are added at a window's start."""
        return "per-document" if self.added_ids else "none"

    @property
    def ids_digest(self) -> str:
        """Digest of the windows' tokens."""
        return sha256_json({"shape": list(self.ids.shape), "ids": self.ids.flatten().tolist()})


def text_digest(corpora: Sequence[Corpus]) -> str:
    """Hexadecimal digest of all texts in the order given; of one text, that text's own."""
    if len(corpora) == 1:
        return corpora[0].sha256
    return hashlib.sha256("".join(corpus.sha256 for corpus in corpora).encode()).hexdigest()


def cut_windows(corpora: Sequence[Corpus], tokenizer: Any, plan: WindowPlan) -> EvalWindows:
    """Tokenise the documents, join them in order and cut windows.

    A window scores the tokens that the one before it in the text did not hold: with `stride` equal to
    `seq_len` all but its first, which has no context; with a shorter stride its last `stride` tokens. Where
    the text has more windows than `max_tokens` allows, a seeded sample of them is taken, in the order of the
    text. Tokens past the last whole window are left out.

    Args:
        corpora: The texts.
        tokenizer: The source's.
        plan: Sizes and seed.

    Raises:
        InputRefused: If the text is shorter than one window.
    """
    stream = tokenise(corpora, tokenizer)
    available = count_windows(len(stream), plan)
    if available == 0:
        raise InputRefused(
            "the text is shorter than one window",
            expected=f"at least {plan.seq_len} tokens",
            found=f"{len(stream)} tokens",
            where=", ".join(corpus.name for corpus in corpora),
            remedy="Give more text or a smaller --seq-len.",
        )
    starts = [number * plan.stride for number in choose_windows(available, plan.max_tokens // plan.seq_len, plan.seed)]
    return EvalWindows(
        ids=slice_windows(stream, starts, plan.seq_len),
        starts=tuple(starts),
        first_scored=tuple(first_scored(start, plan) for start in starts),
        added_ids=added_tokens(tokenizer),
        text_tokens=len(stream),
    )


def tokenise(corpora: Sequence[Corpus], tokenizer: Any) -> list[int]:
    """Tokens of all documents in order, each opened as the tokenizer opens it."""
    documents = [document for corpus in corpora for document in corpus.documents]
    stream: list[int] = []
    for document in track(documents, "tokenising", unit="document"):
        stream.extend(tokenizer(document.text, verbose=False)["input_ids"])
    return stream


def added_tokens(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer adds to each document by itself."""
    return tuple(tokenizer("", verbose=False)["input_ids"])


def count_windows(tokens: int, plan: WindowPlan) -> int:
    """Whole windows that so many tokens hold."""
    return (tokens - plan.seq_len) // plan.stride + 1 if tokens >= plan.seq_len else 0


def choose_windows(available: int, wanted: int, seed: int) -> list[int]:
    """Numbers of `wanted` windows, or of all where there are no more, ascending; the seed decides which."""
    if available <= wanted:
        return list(range(available))
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return sorted(order[:wanted].tolist())


def slice_windows(stream: Sequence[int], starts: Sequence[int], length: int) -> Tensor:
    """(N, T) int64 slices of a stream of tokens."""
    tokens = torch.tensor(stream, dtype=torch.int64)
    return torch.stack([tokens[start : start + length] for start in starts])


def first_scored(start: int, plan: WindowPlan) -> int:
    """Index of the first token that the window at `start` scores, see `cut_windows`."""
    return 1 if start == 0 else max(1, plan.seq_len - plan.stride)


@dataclass(frozen=True)
class SharedDocument:
    """A document that calibration has read as well.

    Attributes:
        name: Its name in the evaluation text.
        by: Whether text or only the name is the same.
    """

    name: str
    by: SharedBy


def overlap_with_calibration(manifest: ConversionManifest, corpora: Sequence[Corpus]) -> tuple[SharedDocument, ...]:
    """Documents of an evaluation text whose text or name is among those that calibration has read."""
    if manifest.calibration is None:
        return ()
    documents = manifest.calibration.documents
    return shared_documents({item.id for item in documents}, {item.sha256 for item in documents}, corpora)


def shared_documents(
    names: AbstractSet[str], texts: AbstractSet[str], corpora: Sequence[Corpus]
) -> tuple[SharedDocument, ...]:
    """Documents of `corpora` whose name or text digest is among those given."""
    found = []
    for corpus in corpora:
        for document in corpus.documents:
            if document.sha256 in texts:
                found.append(SharedDocument(document.name, "text"))
            elif document.name in names:
                found.append(SharedDocument(document.name, "name"))
    return tuple(found)


def refuse_overlap(
    shared: Sequence[SharedDocument],
    allowed: bool,
    remedy: str = "Use other text, or --allow-overlap to measure on it knowingly.",
) -> None:
    """Refuse evaluation text that calibration has read, unless allowed.

    Raises:
        InputRefused: Naming the first such document and what is shared.
    """
    if shared and not allowed:
        first = shared[0]
        raise InputRefused(
            f"{len(shared)} document(s) of the text were calibration text of this conversion",
            expected="held-out text",
            found=f"{first.name!r} (same {first.by})",
            remedy=remedy,
        )
