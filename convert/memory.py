"""How much memory a conversion may take: what the tests and `bench scaling` hold it to (docs/method.md, "Memory")."""

from __future__ import annotations

from dataclasses import dataclass

from mla_convert.convert.checkpoint import SourceCheckpoint

FLOAT32_BYTES, FLOAT64_BYTES = 4, 8


@dataclass(frozen=True)
class MemoryBound:
    """Private bytes that a conversion may take on top of what a process with its imports, tokenizer and text has.

    Attributes:
        embeddings: One matrix of embeddings, float32.
        layers: Two layers of weights, float64, in which all is computed.
        statistics: What is measured of a layer, once in sum and once of a window, float64.
        states: Hidden states of the calibration tokens, float32, up to the memory budget.
    """

    embeddings: int
    layers: int
    statistics: int
    states: int

    @property
    def total(self) -> int:
        """All four."""
        return self.embeddings + self.layers + self.statistics + self.states


def memory_bound(source: SourceCheckpoint, calibration_tokens: int, budget_bytes: int) -> MemoryBound:
    """The bound for one source.

    Args:
        source: An opened source; its headers are enough.
        calibration_tokens: 0 for none.
        budget_bytes: `--memory-budget`. A written model that fits it is also loaded whole, by a process of its own.
    """
    shape = source.shape
    hidden, heads, groups, head_dim = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    prefix = "model.layers.{}."
    layers = [
        sum(
            _count(source, name)
            for name in source.files.names
            if name.startswith(prefix.format(layer)) and not name.endswith("inv_freq")
        )
        for layer in range(source.num_layers)
    ]
    # Three second moments with means and weights, the query metric, and per pair the key moments, γ, its weight and the
    # norms.
    measured = 3 * (hidden * (hidden + 1) + 1) + heads * head_dim**2
    measured += shape.pairs * (2 * groups**2 + 4 * heads + groups) + heads
    return MemoryBound(
        embeddings=int(source.config.vocab_size) * hidden * FLOAT32_BYTES,
        layers=2 * max(layers) * FLOAT64_BYTES,
        statistics=2 * measured * FLOAT64_BYTES if calibration_tokens else 0,
        states=min(calibration_tokens * hidden * FLOAT32_BYTES, budget_bytes),
    )


def _count(source: SourceCheckpoint, name: str) -> int:
    count = 1
    for size in source.files.info(name).shape:
        count *= size
    return count
