"""Does a model that decodes step by step stay what it is in one pass, and as close to its source?"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.eval.ladder.live import LiveRun
from mla_convert.eval.loading import plain_head
from mla_convert.eval.serving import Served
from mla_convert.manifests.evaluation.ladder import Drift

BLOCK_TOKENS = 32


@torch.inference_mode()
def measure_drift(served: Served, run: LiveRun, source_states: Tensor, source_head: Tensor) -> Drift:
    """Compare each appended step with the source and with one pass of stock transformers over the same tokens.

    Args:
        served: The model of the run.
        run: What it did.
        source_states: (T, D) float32 of the source on the run's tokens.
        source_head: (V, D).
    """
    head = plain_head(served.model, run.ids)
    # Without a cache the layers are those of stock transformers.
    whole = served.model.base_model(input_ids=run.ids[None], use_cache=False).last_hidden_state[0].float()
    kl, one_pass, errors, largest = [], [], [], []
    for part in torch.arange(run.prefill, len(run.ids)).split(BLOCK_TOKENS):
        source = (source_states[part] @ source_head.T).double().log_softmax(-1)  # (S, V)
        stepped, at_once = run.states[part] @ head.T, whole[part] @ head.T
        kl.append(divergence(source, stepped))
        one_pass.append(divergence(source, at_once))
        errors.append((stepped - at_once).abs().max())
        largest.append(at_once.abs().max())
    steps = torch.cat(kl)  # (steps,)
    quarter = max(1, len(steps) // 4)
    return Drift(
        prefill=run.prefill,
        steps=len(steps),
        kl=tuple(steps.tolist()),
        first_quarter_kl=float(steps[:quarter].mean()),
        last_quarter_kl=float(steps[-quarter:].mean()),
        one_pass_kl=float(torch.cat(one_pass).mean()),
        one_pass_error=float(torch.stack(errors).max() / torch.stack(largest).max().clamp(min=1e-30)),
    )


def divergence(source: Tensor, target_logits: Tensor) -> Tensor:
    """(S, V) float64 log-probabilities, (S, V) logits -> (S,) `KL(source ‖ target)`, nats."""
    return (source.exp() * (source - target_logits.double().log_softmax(-1))).sum(-1)
