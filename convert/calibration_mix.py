"""Seeded windows of calibration tokens, drawn from one text or from several by their shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.convert.calibration_text import Corpus, Document
from mla_convert.errors import InputRefused

# A document of so many bytes per wanted token holds a whole window in all but a few languages and tokenizers.
BYTES_PER_TOKEN = 6


@dataclass(frozen=True)
class TokenWindows:
    """Windows of calibration tokens.

    Attributes:
        ids: (N, T) int64.
        documents: Those the windows touch, in the order of the corpora.
        corpus: Index of the corpus that each window is from.
        exhausted: Indices of the corpora that had less text than their share.
    """

    ids: Tensor
    documents: tuple[Document, ...]
    corpus: tuple[int, ...]
    exhausted: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.ids.numel())

    def of_corpus(self, index: int) -> Tensor:
        """(n, T) the windows of one corpus."""
        chosen = [row for row, corpus in enumerate(self.corpus) if corpus == index]
        return self.ids[chosen]


def apportion(count: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Share out `count` windows by largest remainders, at least one each where there are enough.

    Args:
        count: Windows.
        weights: Positive, of any sum.
    """
    total = sum(weights)
    quotas = [count * weight / total for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda index: shares[index] - quotas[index])
    for index in by_remainder[: count - sum(shares)]:
        shares[index] += 1
    while count >= len(weights) and 0 in shares:
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(0)] += 1
    return tuple(shares)


def sample_windows(
    corpora: tuple[Corpus, ...],
    tokenizer: Any,
    *,
    tokens: int,
    length: int,
    seed: int,
    weights: Sequence[float] | None = None,
    whole: bool = False,
) -> TokenWindows:
    """Draw seeded windows from as many documents as there are windows, or from all documents in turn.

    Within a corpus, documents are shuffled; each gives one random, not yet used slice of at most `length` tokens a
    round, and the slices are joined and cut into windows. Breadth of documents matters more to the statistics than
    length. Which slices a corpus gives does not depend on the others. Where a corpus runs out, the others take over
    its share. Windows of all corpora are interleaved, so that any run of them is a mixture.

    Args:
        corpora: Where the text comes from.
        tokenizer: The source's.
        tokens: Number of calibration tokens; rounded down to whole windows, at least one.
        length: Tokens per window.
        seed: Of the shuffle and the slices.
        weights: Shares of the tokens, in any unit; equal by default.
        whole: Take whole windows of single documents before joining shorter ones.

    Raises:
        InputRefused: If the text is shorter than one window; with `whole`, only if all texts together are.
    """
    streams = [_WindowStream(corpus, tokenizer, length, seed, whole=whole) for corpus in corpora]
    counts = _fill(streams, list(weights or [1.0] * len(streams)), max(1, tokens // length))
    short = [stream for stream in streams if not stream.windows]
    if (short and not whole) or len(short) == len(streams):
        raise InputRefused(
            "the calibration text is shorter than one window",
            expected=f"at least {length} tokens",
            found=f"{short[0].left_over} tokens",
            where=", ".join(stream.corpus.name for stream in short),
            remedy="Give more text or smaller windows.",
        )
    order = sorted(
        ((number + 0.5) / count, index, number) for index, count in enumerate(counts) for number in range(count)
    )
    return TokenWindows(
        ids=torch.tensor([streams[index].windows[number] for _, index, number in order], dtype=torch.int64),
        documents=tuple(document for stream in streams for document in stream.documents),
        corpus=tuple(index for _, index, _ in order),
        exhausted=tuple(index for index, stream in enumerate(streams) if stream.dry),
    )


def _fill(streams: Sequence[_WindowStream], weights: Sequence[float], wanted: int) -> list[int]:
    """Windows of each stream, in their shares as far as the texts go."""
    counts = [0] * len(streams)
    flowing = list(range(len(streams)))
    while flowing and sum(counts) < wanted:
        extra = apportion(wanted - sum(counts), [weights[index] for index in flowing])
        for index, more in zip(flowing, extra, strict=True):
            counts[index] = streams[index].grow(counts[index] + more)
        flowing = [index for index in flowing if not streams[index].dry]
    return counts


class _WindowStream:
    """Windows of one corpus, made as they are asked for.

    Args:
        corpus: Where the text comes from.
        tokenizer: The source's.
        length: Tokens per window.
        seed: Of the shuffle and the slices.
        whole: See `sample_windows`.
    """

    def __init__(self, corpus: Corpus, tokenizer: Any, length: int, seed: int, *, whole: bool) -> None:
        self.corpus, self.windows, self.dry = corpus, list[list[int]](), False
        self._length, self._whole = length, whole
        self._rest: list[int] = []
        self._used: set[int] = set()
        slicer = _Slicer(corpus.documents, tokenizer, length, torch.Generator().manual_seed(seed))
        self._pieces = slicer.whole_first() if whole else slicer.slices()

    def grow(self, count: int) -> int:
        """Make up to `count` windows; returns how many of those there are."""
        while len(self.windows) < count:
            found = next(self._pieces, None)
            if found is None:
                self.dry = True
                break
            index, piece = found
            self._used.add(index)
            if self._whole and len(piece) == self._length:
                self.windows.append(piece)
                continue
            self._rest.extend(piece)
            if len(self._rest) >= self._length:
                self.windows.append(self._rest[: self._length])
                del self._rest[: self._length]
        return min(count, len(self.windows))

    @property
    def left_over(self) -> int:
        """Tokens that fill no window."""
        return len(self._rest)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Those that were read, in the order of the corpus."""
        return tuple(self.corpus.documents[index] for index in sorted(self._used))


@dataclass(frozen=True)
class _Slicer:
    """Slices of documents, in an order that the generator decides."""

    documents: Sequence[Document]
    tokenizer: Any
    length: int
    generator: torch.Generator

    def slices(self) -> Iterator[tuple[int, list[int]]]:
        """One slice of each document a round, in a shuffled order, until all are used up."""
        yield from self._in_rounds(self._shuffled(), self._any_of)

    def whole_first(self) -> Iterator[tuple[int, list[int]]]:
        """All whole slices, in rounds, before the documents that are too short for one."""
        order, short = self._shuffled(), list[tuple[int, list[int]]]()
        size = {index: len(self.documents[index].text.encode()) for index in order}
        # A token is a byte or more; those that are likely to be long enough are read first.
        able = [index for index in order if size[index] >= self.length]
        able.sort(key=lambda index: size[index] < BYTES_PER_TOKEN * self.length)

        def whole_of(index: int) -> list[list[int]]:
            ids = self._ids(index)
            if len(ids) < self.length:
                short.append((index, ids))
            return self._cut(ids[: len(ids) // self.length * self.length])

        yield from self._in_rounds(able, whole_of)
        yield from short
        yield from self._in_rounds([index for index in order if size[index] < self.length], self._any_of)

    def _shuffled(self) -> list[int]:
        order: list[int] = torch.randperm(len(self.documents), generator=self.generator).tolist()
        return order

    @staticmethod
    def _in_rounds(order: list[int], slices_of: Callable[[int], list[list[int]]]) -> Iterator[tuple[int, list[int]]]:
        left: dict[int, list[list[int]]] = {}
        for index in order:
            left[index] = slices_of(index)
            if left[index]:
                yield index, left[index].pop()
        while any(left.values()):
            for index in order:
                if left[index]:
                    yield index, left[index].pop()

    def _any_of(self, index: int) -> list[list[int]]:
        return self._cut(self._ids(index))

    def _ids(self, index: int) -> list[int]:
        document = self.documents[index]
        encoded = self.tokenizer(document.text, add_special_tokens=not document.spelled_out, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _cut(self, ids: list[int]) -> list[list[int]]:
        """Slices of at most `length` tokens, shuffled."""
        pieces = [ids[start : start + self.length] for start in range(0, len(ids), self.length)]
        return [pieces[number] for number in torch.randperm(len(pieces), generator=self.generator).tolist()]
