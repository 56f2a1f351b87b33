"""Source and target on the same windows, one window at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mla_convert.errors import CheckFailed
from mla_convert.eval.bootstrap import WindowScores
from mla_convert.eval.loading import plain_head
from mla_convert.eval.serving import Served
from mla_convert.eval.source_states import SourceStates
from mla_convert.eval.text import EvalWindows
from mla_convert.eval.token_scores import TokenScores, score_tokens
from mla_convert.progress import track

# Elements of one block of float64 logits (64 MB); a block holds whole rows of the vocabulary. glibc keeps blocks of up
# to 32 MB on its heap, where aligned ones leave holes: memory then grows with every window.
BLOCK_ELEMENTS = 8_000_000


def score_windows(source: SourceStates, target: Served, windows: EvalWindows) -> WindowScores:
    """Score a target beside its source.

    Args:
        source: The source's states on the same windows.
        target: The target, as it is run.
        windows: Tokens and which of them are scored.

    Raises:
        CheckFailed: If logits are not finite, naming the model and the window.
        InputRefused: If the target's head is more than a matrix product.
    """
    rows = [(len(scores.kl), *scores.sums.tolist()) for scores in token_scores(source, target, windows)]
    columns = np.array(rows, dtype=np.float64).T
    return WindowScores(*columns)


def token_scores(
    source: SourceStates, target: Served, windows: EvalWindows, chunk: int | None = None
) -> Iterator[TokenScores]:
    """The scores of each window's scored tokens, window by window; see `score_windows` and `Served.hidden_states`."""
    head = plain_head(target.model, windows.ids[0])
    for index in track(range(len(windows.ids)), "scoring the target", unit="window"):
        ids, first = windows.ids[index], windows.first_scored[index]
        context = slice(first - 1, len(ids) - 1)  # the state at t - 1 predicts token t
        ours, theirs = source.window(index)[context], target.hidden_states(ids, chunk)[context]
        scores = _score_window(ours, source.head, theirs, head, ids[first:])
        _refuse_not_finite(scores.sums, index)
        yield scores


def source_perplexity(source: SourceStates, windows: EvalWindows) -> float:
    """Perplexity of the source alone, on the tokens that `score_windows` scores."""
    total = 0.0
    for index in track(range(len(windows.ids)), "scoring the source", unit="window"):
        ids, first = windows.ids[index], windows.first_scored[index]
        states = source.window(index)[first - 1 : len(ids) - 1]
        total += float(_score_window(states, source.head, states, source.head, ids[first:]).source_nll.sum())
    return math.exp(total / windows.scored_tokens)


def _refuse_not_finite(sums: Tensor, window: int) -> None:
    finite = torch.isfinite(sums).tolist()
    if not all(finite):
        raise CheckFailed(
            f"the {'target' if finite[0] else 'source'} gives scores that are not finite",
            expected="finite logits",
            found="NaN or infinity",
            where=f"window {window}",
        )


@torch.inference_mode()
def _score_window(
    source: Tensor, source_head: Tensor, target: Tensor, target_head: Tensor, wanted: Tensor
) -> TokenScores:
    """`score_tokens` of one window in blocks: (S, D), (V, D), (S, D), (V, D), (S,)."""
    block = max(1, BLOCK_ELEMENTS // source_head.shape[0])
    parts = []
    for start in range(0, len(wanted), block):
        part = slice(start, start + block)
        parts.append(score_tokens(source[part] @ source_head.T, target[part] @ target_head.T, wanted[part]))
    return TokenScores.join(parts)
