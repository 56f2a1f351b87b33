"""The last pass: all attention weights together, fitted to the source's next-token distribution.

Every layer is held at once, with the source's embedding, norms, MLPs and head, which stay as they are. The loss is
`KL(source ‖ converted)`, the one that block reconstruction stands in for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mla_convert.convert.refinable import RefinableAttention
from mla_convert.convert.refine_fit import FitSettings, FitTrace, FitWindows, fit
from mla_convert.convert.source_model import StreamedSource, batches_of
from mla_convert.convert.states import FLOAT32_BYTES, StateStore
from mla_convert.progress import bar

# Held-out windows are run whole at every check, so a few must do.
HELD_WINDOWS = 4


class _Converted(nn.Module):
    """A decoder whose attention is being fitted; returns the normed last hidden state."""

    def __init__(
        self,
        streamed: StreamedSource,
        attentions: Sequence[RefinableAttention],
        layers: Sequence[Any],
        *,
        recompute: bool,
    ) -> None:
        super().__init__()
        self._recompute = recompute
        self.attentions = nn.ModuleList(attentions)
        self._streamed = streamed
        # Not registered: what belongs to the source is neither fitted nor part of the state that is kept.
        self._layers = tuple(layers)

    def forward(self, embedded: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        hidden = embedded
        for attention, layer in zip(self.attentions, self._layers, strict=True):
            if self._recompute:
                hidden = checkpoint(_run, attention, layer, hidden, use_reentrant=False)
            else:
                hidden = _run(attention, layer, hidden)
        return self._streamed.normed(hidden)


def _run(attention: nn.Module, layer: Any, hidden: Tensor) -> Tensor:
    middle = hidden + attention(layer.input_layernorm(hidden))
    out: Tensor = middle + layer.mlp(layer.post_attention_layernorm(middle))
    return out


@dataclass(frozen=True)
class _Divergence:
    """KL divergence of windows by number.

    Attributes:
        model: What is fitted.
        embedded: (N, T, D) embeddings of all windows.
        teacher: (N, T, D) the source's normed last hidden states.
        head: (V, D).
    """

    model: _Converted
    embedded: StateStore
    teacher: StateStore
    head: Tensor

    def __call__(self, windows: Sequence[int]) -> Tensor:
        """Mean over the tokens of `KL(source ‖ converted)`, nats."""
        losses = []
        for number in windows:
            chosen = slice(number, number + 1)
            with torch.no_grad():
                wanted = (self.teacher.read(chosen)[0] @ self.head.T).log_softmax(-1)  # (T, V)
            ours = (self.model(self.embedded.read(chosen))[0] @ self.head.T).log_softmax(-1)
            losses.append(nn.functional.kl_div(ours, wanted, reduction="batchmean", log_target=True))
        return torch.stack(losses).mean()


def refine_end_to_end(
    streamed: StreamedSource,
    attentions: Sequence[RefinableAttention],
    windows: FitWindows,
    settings: FitSettings,
    states: Callable[[], StateStore],
    activation_budget: int,
) -> FitTrace:
    """Fit all attention weights to the source's distribution, in place.

    Args:
        streamed: The source; all its layers are in memory while this runs.
        attentions: Of every layer.
        windows: To fit to and judge by.
        settings: Of the fit.
        states: Makes an empty store for the states of all windows.
        activation_budget: Most bytes to keep for the gradient of one window; past it layers are computed twice.
    """
    train, held = windows.split(settings.seed)
    token_ids = windows.ids
    with states() as embedded, states() as teacher, ExitStack() as stack:
        streamed.embed_into(embedded, token_ids)
        _run_source(streamed, token_ids, teacher)
        layers = [stack.enter_context(streamed.layer(index)) for index in range(len(attentions))]
        for layer in layers:
            layer.requires_grad_(False)
        needed = sum(map(activation_bytes, attentions, layers, [token_ids.shape[1]] * len(layers)))
        model = _Converted(streamed, attentions, layers, recompute=needed > activation_budget)
        divergence = _Divergence(model, embedded, teacher, torch.cat(list(streamed.head())))
        passes = settings.steps * settings.batch
        progress = stack.enter_context(bar(passes, "refining end to end", unit="window"))

        def loss(chosen: Sequence[int]) -> Tensor:
            if torch.is_grad_enabled():
                progress.update(1)
            return divergence(chosen)

        def report(step: int, now: float) -> None:
            progress.set_postfix_str(f"step {step}: held-out KL {now:.4f}")

        return fit(model, loss, train, held[:HELD_WINDOWS], settings, report)


def activation_bytes(attention: RefinableAttention, layer: Any, length: int) -> int:
    """About what one layer keeps for the gradient of one window of `length` tokens, float32."""
    width = attention.latent.shape[1]
    projected = 2 * attention.queries.shape[0] + attention.key_up.shape[0] + 2 * attention.value_up.shape[0]
    scores = 3 * attention.heads * length
    per_token = projected + scores + 4 * int(layer.mlp.up_proj.weight.shape[0]) + 8 * width
    return FLOAT32_BYTES * length * per_token


def _run_source(streamed: StreamedSource, token_ids: Tensor, teacher: StateStore) -> None:
    """The source's normed last hidden states of all windows."""
    for done in streamed.layers(token_ids, "teacher"):
        for batch in done.batches:
            teacher.write(batch.windows, batch.hidden)
    for windows in batches_of(teacher):
        teacher.write(windows, streamed.final_norm(teacher.read(windows)))
