"""The first loss a user would see: source and written files on one window of calibration text.

Calibration text is no held-out text, and one window is few tokens: this is a smoke alarm, not a measurement. It rings
where the written model is worse than one that knows nothing, whose loss is ln(vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.source_model import StreamedSource
from mla_convert.manifests.quality import CalibrationLoss

LOSS_TOKENS = 512


@dataclass(frozen=True)
class LossProbe:
    """Tokens for the written files to be scored on, and what the source makes of them.

    Attributes:
        ids: (1, T) int64.
        source_loss: Mean negative log-likelihood of tokens 2 to T under the source, nats.
        vocab_size: Of the source.
    """

    ids: Tensor
    source_loss: float
    vocab_size: int

    @classmethod
    def measure(cls, source: SourceCheckpoint, windows: Tensor) -> LossProbe:
        """Run the source over the beginning of the first of (N, T) windows, layer by layer."""
        ids = windows[:1, :LOSS_TOKENS]
        streamed = StreamedSource(source)
        hidden = streamed.embed(ids)
        for done in streamed.layers(ids, "source loss"):
            (batch,) = done.batches
            hidden = batch.hidden
        return cls(ids, next_token_loss(streamed.logit_blocks(hidden[:, :-1]), ids), int(source.config.vocab_size))

    def record(self, target_loss: float) -> CalibrationLoss:
        """Both losses as the manifest has them."""
        scored = self.ids.shape[1] - 1
        uniform = math.log(self.vocab_size)
        return CalibrationLoss(source=self.source_loss, target=target_loss, tokens=scored, uniform=uniform)


@torch.inference_mode()
def next_token_loss(blocks: Iterable[Tensor], ids: Tensor) -> float:
    """Mean negative log-likelihood of each token after the first, nats.

    Args:
        blocks: (1, T - 1, rows) logits at all positions but the last, for one part of the vocabulary after the other:
            all together are as large as an embedding.
        ids: (1, T).
    """
    wanted = ids[0, 1:]
    total = torch.full(wanted.shape, float("-inf"))  # (T - 1,) log-sum-exp over the rows so far
    chosen, start = torch.full(wanted.shape, float("nan")), 0
    for logits in blocks:
        total = torch.logaddexp(total, logits[0].float().logsumexp(-1))
        local = wanted - start
        inside = (local >= 0) & (local < logits.shape[-1])
        chosen[inside] = logits[0, inside].float().gather(-1, local[inside, None])[:, 0]
        start += logits.shape[-1]
    return float((total - chosen).mean())


def chance_warning(loss: float, uniform: float, source_loss: float, where: str) -> str | None:
    """What to say of a target that predicts worse than chance; None where it does not.

    Args:
        loss: The target's, nats per token.
        uniform: ln(vocabulary), the loss of a model that gives every token the same probability.
        source_loss: The source's on the same tokens.
        where: On what text.
    """
    if loss <= uniform:
        return None
    return (
        f"WORSE THAN CHANCE: the converted checkpoint loses {loss:.2f} nats per token on {where}, a model that knows "
        f"nothing ln(vocabulary) = {uniform:.2f}; the source {source_loss:.2f}. Widen the cache, or do not use it."
    )
