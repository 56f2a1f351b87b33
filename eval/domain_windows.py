"""Windows that belong to one text each, so that every text has figures of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_convert.convert.calibration_text import Corpus
from mla_convert.errors import InputRefused, UsageFault
from mla_convert.eval.text import (
    EvalWindows,
    WindowPlan,
    added_tokens,
    choose_windows,
    count_windows,
    first_scored,
    slice_windows,
    tokenise,
)


@dataclass(frozen=True)
class TokenText:
    """One text as tokens.

    Attributes:
        name: What the user gave.
        sha256: Digest of its documents and their names.
        stream: Its tokens.
    """

    name: str
    sha256: str
    stream: tuple[int, ...]


@dataclass(frozen=True)
class TokenTexts:
    """All texts as tokens, and what the tokenizer adds to each of their documents."""

    texts: tuple[TokenText, ...]
    added_ids: tuple[int, ...]

    @classmethod
    def of(cls, corpora: Sequence[Corpus], tokenizer: Any) -> TokenTexts:
        """Tokenise the texts.

        Raises:
            UsageFault: For a text that is given twice, which would count twice.
        """
        seen: dict[str, str] = {}
        for corpus in corpora:
            if corpus.name in seen or corpus.sha256 in seen.values():
                raise UsageFault("a text is given twice", expected="each --text once", found=corpus.name)
            seen[corpus.name] = corpus.sha256
        texts = (TokenText(item.name, item.sha256, tuple(tokenise([item], tokenizer))) for item in corpora)
        return cls(tuple(texts), added_tokens(tokenizer))


@dataclass(frozen=True)
class DomainWindows:
    """Windows and the text that each is from.

    Attributes:
        windows: In the order of the texts; `starts` are positions in the window's own text.
        text: (N,) index of each window's text.
        texts: The texts.
    """

    windows: EvalWindows
    text: tuple[int, ...]
    texts: tuple[TokenText, ...]


def cut_by_text(given: TokenTexts, plan: WindowPlan) -> DomainWindows:
    """Cut every text by itself as `cut_windows` does, `max_tokens` shared evenly between the texts.

    A text with fewer windows than its share leaves the rest to the others. With one text the windows are those of
    `cut_windows`.

    Raises:
        InputRefused: If a text is shorter than one window.
        UsageFault: If `max_tokens` has no window for each text.
    """
    available = [count_windows(len(text.stream), plan) for text in given.texts]
    for text, count in zip(given.texts, available, strict=True):
        if count == 0:
            raise InputRefused(
                "a text is shorter than one window",
                expected=f"at least {plan.seq_len} tokens",
                found=f"{len(text.stream)} tokens",
                where=text.name,
                remedy="Give more of it or a smaller --seq-len.",
            )
    wanted = plan.max_tokens // plan.seq_len
    if wanted < len(available):
        raise UsageFault(
            "--max-tokens has no window for each text",
            expected=f"at least {len(available) * plan.seq_len}",
            found=str(plan.max_tokens),
        )
    return _cut(given, plan, share_evenly(available, wanted))


def cut_long(given: TokenTexts, length: int, most: int, seed: int) -> DomainWindows | None:
    """At most `most` windows of `length` tokens, in turn from the texts that are long enough; None if none is."""
    plan = WindowPlan(length, length, most * length, seed)
    shares = share_evenly([count_windows(len(text.stream), plan) for text in given.texts], most)
    return _cut(given, plan, shares) if sum(shares) else None


def share_evenly(available: Sequence[int], wanted: int) -> list[int]:
    """Deal `wanted` out in turn to those that have something left."""
    shares = [0] * len(available)
    while sum(shares) < min(wanted, sum(available)):
        for index, most in enumerate(available):
            if shares[index] < most and sum(shares) < wanted:
                shares[index] += 1
    return shares


def _cut(given: TokenTexts, plan: WindowPlan, shares: Sequence[int]) -> DomainWindows:
    pieces, starts, owners = [], list[int](), list[int]()
    for index, (text, share) in enumerate(zip(given.texts, shares, strict=True)):
        if share == 0:
            continue
        chosen = choose_windows(count_windows(len(text.stream), plan), share, plan.seed)
        own = [number * plan.stride for number in chosen]
        pieces.append(slice_windows(text.stream, own, plan.seq_len))  # (n, T)
        starts += own
        owners += [index] * len(own)
    windows = EvalWindows(
        ids=torch.cat(pieces),  # (N, T)
        starts=tuple(starts),
        first_scored=tuple(first_scored(start, plan) for start in starts),
        added_ids=given.added_ids,
        text_tokens=sum(len(text.stream) for text in given.texts),
    )
    return DomainWindows(windows, tuple(owners), given.texts)
