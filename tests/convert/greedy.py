"""Greedy continuations of two models, compared token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.tolerances import LOGITS_FLOAT32

NEW_TOKENS = 64


def generated(model: Any, ids: Tensor, mask: Tensor, *, use_cache: bool) -> tuple[Tensor, Tensor]:
    """Greedy continuation: tokens (B, 64) and the logits that chose them (B, 64, V)."""
    done = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(done.logits, dim=1).double()
    # The end token is forbidden, so that every row has all its tokens.
    logits[:, :, model.config.eos_token_id] = float("-inf")
    return done.sequences[:, ids.shape[1] :], logits


def assert_same_text(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Equal tokens, or a first difference where the two likeliest tokens lie closer than the tolerance."""
    for row in range(len(expected[0])):
        different = torch.nonzero(found[0][row] != expected[0][row]).flatten()
        if len(different):
            step = int(different[0])
            logits = expected[1][row, step]
            best, second = logits.topk(2).values.tolist()
            scale = float(logits[logits.isfinite()].abs().max())
            assert best - second <= LOGITS_FLOAT32 * scale, f"row {row}, step {step}"
