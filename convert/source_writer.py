"""The source as a writer: text drawn from its own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from mla_convert.progress import track


class SourceWriter:
    """The whole source in float32, for sampling: four bytes for each of its parameters, and a cache for each row."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
        ends = self._model.generation_config.eos_token_id
        self.ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        self.filler = self.ends[0] if self.ends else 0

    def extend(
        self,
        openings: Sequence[Sequence[int]],
        length: int,
        *,
        temperature: float,
        top_p: float,
        may_end: bool,
        label: str,
    ) -> Tensor:
        """Openings, filled up on the left to one width, with what the source adds: (B, length) token ids.

        Draws from torch's global generator; the caller seeds it.

        Args:
            openings: Token ids of each row.
            length: Of every row at the end.
            temperature: Of the draws.
            top_p: Share of the distribution that is drawn from.
            may_end: Whether an end token may be drawn; after one a row is filled up.
            label: Of the progress bar.
        """
        width = max(map(len, openings))
        ids = torch.tensor([[self.filler] * (width - len(row)) + list(row) for row in openings])  # (B, width)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in openings])  # (B, width)
        added = length - width
        # generate() fills what a configuration leaves at its default from the model's, such as a repetition penalty.
        self._model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
            max_new_tokens=added,
            min_new_tokens=None if may_end else added,
            eos_token_id=list(self.ends) or None,
            pad_token_id=self.filler,
        )
        out: Tensor = self._model.generate(ids, attention_mask=mask, streamer=_Progress(added, label))
        return out


class _Progress(BaseStreamer):
    """A bar over the tokens of one batch."""

    def __init__(self, tokens: int, label: str) -> None:
        self._bar = track(range(tokens + 1), label, unit="token")

    def put(self, value: Tensor) -> None:  # noqa: ARG002 - the interface of transformers
        """One more token for every row."""
        next(self._bar, None)

    def end(self) -> None:
        """Close the bar."""
        for _ in self._bar:
            pass
