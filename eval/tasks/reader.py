"""Log-probabilities of answers from a live cache; what neighbouring prompts begin with is read once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from mla_convert.decode.absorbed_module import EXPAND_FROM
from mla_convert.errors import CheckFailed
from mla_convert.eval.loading import plain_head
from mla_convert.eval.serving import Served
from mla_convert.eval.tasks.prompts import Ids, common_prefix

# Longer chunks of an absorbed model are computed like a prefill.
DECODE_CHUNK = EXPAND_FROM - 1


@dataclass(frozen=True)
class AnswerScore:
    """Of one answer behind its context.

    Attributes:
        logprob: Of all its tokens, each behind those before it, nats.
        match: Whether each of them is the likeliest, which is to say that greedy decoding gives the answer.
    """

    logprob: float
    match: bool


class Reader:
    """A model that reads prompts as it would be served: the context as a prefill, the answer from the cache.

    The predictions that count are those of decoding, so that on a latent cache a decode backend makes them. The
    cache is kept between prompts and cut back to what the next one shares with it; logits are only computed where
    an answer is.
    """

    def __init__(self, running: Served) -> None:
        self._running = running
        self._head: Tensor | None = None  # (V, D)
        self._cache: Cache | None = None
        self._read: Ids = ()
        # Of the last answer: its first row holds for any answer of one token behind the same context.
        self._context: Ids = ()
        self._logits = torch.empty(0, 0)  # (A, V)

    @torch.inference_mode()
    def score(self, context: Ids, answer: Ids) -> AnswerScore:
        """Score an answer, teacher-forced.

        Args:
            context: What stands before it, at least one token.
            answer: At least one token.

        Raises:
            CheckFailed: If logits are not finite.
            InputRefused: If the model's head is more than a matrix product.
        """
        if self._head is None:
            self._head = plain_head(self._running.model, torch.tensor(context))
        if len(answer) > 1 or self._context != context:
            states = self._states(context + answer[:-1], len(context) - 1)  # (A, D)
            self._logits, self._context = self._finite((states @ self._head.T).double()), context  # (A, V)
        logits, wanted = self._logits[: len(answer)], torch.tensor(answer)
        chosen = logits.log_softmax(-1).gather(1, wanted[:, None])  # (A, 1)
        return AnswerScore(float(chosen.sum()), bool((logits.argmax(-1) == wanted).all()))

    def _finite(self, logits: Tensor) -> Tensor:
        if not bool(torch.isfinite(logits).all()):
            raise CheckFailed(
                "logits that are not finite", found="NaN or infinity", where=str(self._running.model.config.model_type)
            )
        return logits

    def _states(self, ids: Ids, first: int) -> Tensor:
        """(T - first, D): what the head reads at `first` and behind."""
        keep = min(common_prefix(self._read, ids), first)
        if self._cache is None or keep == 0:
            self._cache, keep = self._empty(len(ids)), 0
        elif keep < len(self._read):
            self._cache.crop(keep - len(self._read))
        if len(ids) - keep > DECODE_CHUNK and keep < first:
            self._forward(ids[keep:first])
            keep = first
        chunks = [self._forward(ids[at : at + DECODE_CHUNK]) for at in range(keep, len(ids), DECODE_CHUNK)]
        self._read = ids
        return torch.cat(chunks)[first - keep :]

    def _forward(self, ids: Ids) -> Tensor:
        outputs = self._running.model.base_model(input_ids=torch.tensor([ids]), cache=self._cache, use_cache=True)
        states: Tensor = outputs.last_hidden_state
        return states[0].float()  # (T, D)

    def _empty(self, tokens: int) -> Cache:
        handle = self._running.handle
        # Without a configuration every layer keeps all keys, so that any of them can be dropped again.
        return DynamicCache() if handle is None else handle.new_cache(tokens)
