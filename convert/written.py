"""A written checkpoint read back one layer at a time, through the class that its configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from mla_convert.convert.tensor_files import TensorFiles, open_tensor_files, row_blocks

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROTARY = "model.rotary_emb."
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A written checkpoint: the class that its configuration names, without weights, and its files.

    Attributes:
        config: Its configuration.
        model: On the meta device.
        files: Its tensors, read one at a time.
    """

    config: Any
    model: Any
    files: TensorFiles

    @classmethod
    def open(cls, folder: Path) -> WrittenCheckpoint:
        """Read the configuration and the headers.

        Raises:
            InputRefused: For weight files that cannot be read.
        """
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return cls(config, model.eval(), open_tensor_files(folder))

    @property
    def float32_bytes(self) -> int:
        """Size of the model in float32."""
        return FLOAT32_BYTES * int(sum(value.numel() for value in self.model.parameters()))

    def problems(self) -> tuple[str, ...]:
        """Every tensor that the class has and the files lack, the other way round, or in another shape.

        `from_pretrained` is laxer: it skips names that a class declares harmless (`model.layers.61.*` here).
        """
        state = self.model.state_dict()
        tied = self.model.all_tied_weights_keys
        wanted = {name: tuple(value.shape) for name, value in state.items() if name not in tied}
        found = {name: info.shape for name, info in self.files.infos.items()}
        buffers = {name for name, _ in self.model.named_buffers() if not name.startswith(ROTARY)}
        return (
            *(f"missing keys: {name}" for name in sorted(wanted.keys() - found.keys())),
            *(f"unexpected keys: {name}" for name in sorted(found.keys() - wanted.keys())),
            *(
                f"mismatched keys: {name}"
                for name in sorted(wanted.keys() & found.keys())
                if wanted[name] != found[name]
            ),
            # Nothing in the files would say what they hold.
            *(f"unknown buffers: {name}" for name in sorted(buffers - state.keys())),
        )

    def read(self, name: str) -> Tensor:
        """One tensor in float32."""
        return self.files.read(name).float()

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D) float32."""
        return nn.functional.embedding(ids, self.files.read(EMBEDDING)).float()

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines; the skeleton's own frequencies are on the meta device."""
        made: tuple[Tensor, Tensor] = type(self.model.model.rotary_emb)(self.config)(hidden, position_ids=positions)
        return made

    @contextmanager
    def layer(self, index: int) -> Iterator[Any]:
        """One decoder layer with its weights, which go when the block ends."""
        layer = self.model.model.layers[index]
        prefix = f"model.layers.{index}."
        layer.load_state_dict({name: self.read(prefix + name) for name in layer.state_dict()}, strict=True, assign=True)
        try:
            yield layer
        finally:
            layer.to("meta")

    def logit_difference(self, hidden: Tensor, expected: Tensor) -> Tensor:
        """Largest |Δlogit| of the last layer's output (B, T, D) against (B, T, V), some rows of the head at a time."""
        differences, start = [], 0
        for logits in self.logit_blocks(hidden):
            differences.append((logits - expected[..., start : start + logits.shape[-1]]).abs().max())
            start += logits.shape[-1]
        return torch.stack(differences).max()

    def loss(self, ids: Tensor) -> float:
        """Mean negative log-likelihood of tokens 2 to T of (1, T), nats."""
        positions = torch.arange(ids.shape[1])[None]
        hidden = self.embed(ids)
        rope = self.rotary(hidden, positions)
        for index in range(self.config.num_hidden_layers):
            with self.layer(index) as layer:
                hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
        total = torch.full(ids[0, 1:].shape, float("-inf"))  # (T - 1,), log-sum-exp over the rows so far
        chosen, start = torch.zeros_like(total), 0
        for logits in self.logit_blocks(hidden[:, :-1]):
            total = torch.logaddexp(total, logits[0].logsumexp(-1))
            local = ids[0, 1:] - start
            inside = (local >= 0) & (local < logits.shape[-1])
            chosen[inside] = logits[0, inside].gather(-1, local[inside, None])[:, 0]
            start += logits.shape[-1]
        return float((total - chosen).mean())

    def logit_blocks(self, hidden: Tensor) -> Iterator[Tensor]:
        """(B, T, D) output of the last layer -> (B, T, rows) float32, some rows of the head at a time."""
        normed = self.normed(hidden)
        for rows in row_blocks(self.files.read(self.model.all_tied_weights_keys.get(HEAD, HEAD))):
            yield normed @ rows.float().T

    def normed(self, hidden: Tensor) -> Tensor:
        """(..., D) output of the last layer -> (..., D), after the model's last norm."""
        norm = self.model.model.norm
        norm.load_state_dict({"weight": self.read(NORM)}, strict=True, assign=True)
        out: Tensor = norm(hidden)
        return out
