"""A checkpoint folder as a stock transformers model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import InputRefused

# float32 rounding of one matrix product; a head with a bias, a scale or a cap differs by far more.
HEAD_TOLERANCE = 1e-4
HEAD_PROBE_TOKENS = 16


def load_model(folder: Path) -> Any:
    """Load a checkpoint for inference, refusing one whose tensors do not fit its class exactly.

    Args:
        folder: A local folder with `config.json` and weights.

    Returns:
        The model of the class that transformers chooses, in float32, in evaluation mode.

    Raises:
        InputRefused: If transformers cannot load it, or a tensor is missing, left over or of another shape.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputRefused(f"transformers cannot load it: {reason}", where=str(folder)) from error
    model, info = loaded
    problems = [f"{kind.replace('_', ' ')}: {name}" for kind in info for name in sorted(map(str, info[kind]))]
    if problems:
        raise InputRefused(
            f"the weights do not fit the model in {len(problems)} places",
            found=problems[0],
            where=str(folder),
        )
    return model.eval()


@torch.inference_mode()
def hidden_states(model: Any, token_ids: Tensor) -> Tensor:
    """(T,) token ids -> (T, D) float32: what the output head reads, the last norm included."""
    states: Tensor = model.base_model(input_ids=token_ids[None], use_cache=False).last_hidden_state
    return states[0].float()


@torch.inference_mode()
def plain_head(model: Any, token_ids: Tensor) -> Tensor:
    """The (V, D) weight of the output head, once it is seen that logits are `hidden @ weight.T` and no more.

    Args:
        model: A loaded model.
        token_ids: (T,) tokens to try it on; the first few are enough.

    Raises:
        InputRefused: If the logits are something else: a bias, a scale or a soft cap on top.
    """
    probe = token_ids[:HEAD_PROBE_TOKENS]
    weight: Tensor = model.get_output_embeddings().weight.detach()
    logits: Tensor = model(input_ids=probe[None], use_cache=False).logits[0]
    ours = hidden_states(model, probe) @ weight.T
    error = float((ours - logits).abs().max() / logits.abs().max().clamp(min=1e-30))
    if error > HEAD_TOLERANCE:
        raise InputRefused(
            "the output head does more than one matrix product",
            expected=f"logits within {HEAD_TOLERANCE:g} of hidden @ weight.T",
            found=f"{error:.3g}",
            where=type(model).__name__,
        )
    return weight
