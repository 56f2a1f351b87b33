"""What an MLA layer costs by arithmetic alone: parameters, projections, cache, intensity (seed 1, 0x02, 0x06, 0x09).

Logical counts: no norms, no softmax, no padding, no page rounding. A multiply-add is two FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TypeVar

from mla_convert.errors import InputRefused, UsageFault

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})
FP8_GROUP = 128
FP8_ALIGNMENT = 4
T = TypeVar("T")


@dataclass(frozen=True)
class MLAShape:
    """Sizes of one model's MLA layers, in DeepSeek-V2's letters.

    Attributes:
        layers: L.
        hidden: d.
        heads: H.
        q_lora_rank: d_c' of the query bottleneck, or None.
        kv_lora_rank: d_c.
        nope: d_N.
        rope: d_R.
        value: d_V.
    """

    layers: int
    hidden: int
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    value: int

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size is not None and size < (0 if name == "rope" else 1):
                raise InputRefused("a size of an MLA layer", expected="a positive number", found=str(size), where=name)

    @property
    def latent_row(self) -> int:
        """Numbers cached per token and layer: `d_c + d_R`."""
        return self.kv_lora_rank + self.rope

    @property
    def expanded_row(self) -> int:
        """Numbers of keys and values of all heads: `H (d_N + d_R) + H d_V`."""
        return self.heads * (self.nope + self.rope + self.value)

    @property
    def query_parameters(self) -> int:
        """`P_Q` (seed 1, 0x02)."""
        width = self.heads * (self.nope + self.rope)
        return self.hidden * width if self.q_lora_rank is None else self.q_lora_rank * (self.hidden + width)

    @property
    def linear_parameters(self) -> int:
        """`P_Q + P_KV + P_O` of one layer (seed 1, 0x02)."""
        key_value = self.hidden * self.latent_row + self.kv_lora_rank * self.heads * (self.nope + self.value)
        return self.query_parameters + key_value + self.hidden * self.heads * self.value


PRESETS: Mapping[str, MLAShape] = MappingProxyType(
    {
        "deepseek-v2": MLAShape(60, 5120, 128, 1536, 512, 128, 64, 128),
        "deepseek-v3": MLAShape(61, 7168, 128, 1536, 512, 128, 64, 128),
    }
)


@dataclass(frozen=True)
class Device:
    """Peak rates as somebody published them.

    Attributes:
        flops: Dense bf16 multiply-adds counted as two, per second.
        bandwidth: Bytes per second of device memory.
        source: Who says so.
    """

    flops: float
    bandwidth: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which the arithmetic, not the memory, is the limit."""
        return self.flops / self.bandwidth


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "a100": Device(312e12, 2.039e12, "NVIDIA A100 80GB SXM data sheet, bf16 without sparsity"),
        "h100": Device(989.5e12, 3.35e12, "NVIDIA H100 SXM data sheet, half of the bf16 rate with sparsity"),
        "h200": Device(989.5e12, 4.8e12, "NVIDIA H200 SXM data sheet, half of the bf16 rate with sparsity"),
        "h800": Device(865e12, 3.35e12, "FlashMLA deep dive: H800 SXM5, practical throttled rate"),
        "b200": Device(2.25e15, 8e12, "NVIDIA HGX B200 data sheet, an eighth, half of the bf16 rate with sparsity"),
        "l40s": Device(362e12, 0.864e12, "NVIDIA L40S data sheet, bf16 without sparsity"),
        "rtx4090": Device(165.2e12, 1.008e12, "NVIDIA Ada white paper, bf16 with fp32 sums, without sparsity"),
    }
)


@dataclass(frozen=True)
class Workload:
    """What is asked of the model.

    Attributes:
        batch: B, sequences.
        queries: T_q, new tokens of each.
        history: T, cached tokens of each.
        dtype: Of weights and cache.
    """

    batch: int
    queries: int
    history: int
    dtype: str


@dataclass(frozen=True)
class Ledger:
    """The figures, in the order in which they are printed. Sizes in bytes, rates in FLOPs per byte.

    Attributes:
        attention_linear_parameters: Of one layer.
        projection_flops: Of one layer, for `B T_q` rows.
        cache_bytes_per_token_per_layer: Latent row.
        expanded_bytes_per_token_per_layer: Keys and values of all heads.
        expanded_to_latent_ratio: Of the two.
        cache_bytes: Latent rows of `B T` tokens in all layers.
        expanded_cache_bytes: The same expanded.
        fp8_row_bytes: E4M3 latent, float32 scales for each 128, bf16 rotary part.
        fp8_to_bf16_ratio: Of such a row to a bf16 row.
        absorbed_product_bytes: `W_VO` of one layer, should it be stored.
        arithmetic_intensity: `H s_q (d_k + d_v) / d_k` at two bytes a number, of absorbed decode over a long history.
        crossover_tokens: Cached tokens above which absorbing the content key takes fewer multiply-adds; None where it
            never does.
        device: Name, or None.
        ridge: Of the device, or None.
        bound: "memory" or "compute" by intensity and ridge, or None without a device.
    """

    attention_linear_parameters: int
    projection_flops: int
    cache_bytes_per_token_per_layer: int
    expanded_bytes_per_token_per_layer: int
    expanded_to_latent_ratio: float
    cache_bytes: int
    expanded_cache_bytes: int
    fp8_row_bytes: int
    fp8_to_bf16_ratio: float
    absorbed_product_bytes: int
    arithmetic_intensity: float
    crossover_tokens: float | None
    device: str | None
    ridge: float | None
    bound: str | None


def make_ledger(shape: MLAShape, work: Workload, device: str | None = None) -> Ledger:
    """All figures of one shape and workload.

    Raises:
        UsageFault: If the device or the dtype is not in the table.
    """
    size = _lookup(DTYPE_BYTES, work.dtype, "a dtype")
    chip = None if device is None else _lookup(DEVICES, device, "a device")
    latent, expanded = shape.latent_row * size, shape.expanded_row * size
    tokens = work.batch * work.history * shape.layers
    fp8 = fp8_row_bytes(shape.kv_lora_rank, shape.rope)
    intensity = arithmetic_intensity(shape, work.queries, size)
    return Ledger(
        attention_linear_parameters=shape.linear_parameters,
        projection_flops=2 * work.batch * work.queries * shape.linear_parameters,
        cache_bytes_per_token_per_layer=latent,
        expanded_bytes_per_token_per_layer=expanded,
        expanded_to_latent_ratio=expanded / latent,
        cache_bytes=latent * tokens,
        expanded_cache_bytes=expanded * tokens,
        fp8_row_bytes=fp8,
        fp8_to_bf16_ratio=fp8 / (2 * shape.latent_row),
        absorbed_product_bytes=shape.heads * shape.hidden * shape.kv_lora_rank * size,
        arithmetic_intensity=intensity,
        crossover_tokens=crossover_tokens(shape, work.queries),
        device=device,
        ridge=None if chip is None else chip.ridge,
        bound=None if chip is None else ("compute" if intensity > chip.ridge else "memory"),
    )


def arithmetic_intensity(shape: MLAShape, queries: int, size: int = 2) -> float:
    """`2 H s_q (d_k + d_v) / (d_k · bytes)` with `d_k = d_c + d_R`, `d_v = d_c` (seed 1, 0x09)."""
    width = shape.latent_row
    return 2 * shape.heads * queries * (width + shape.kv_lora_rank) / (width * size)


def crossover_tokens(shape: MLAShape, queries: int) -> float | None:
    """`T_q d_N d_c / (d_c d_N + T_q d_N − T_q d_c)`, None where that is not positive (seed 1, 0x04; math.md 5)."""
    product = shape.nope * shape.kv_lora_rank
    rest = product + queries * (shape.nope - shape.kv_lora_rank)
    return queries * product / rest if rest > 0 else None


def fp8_row_bytes(latent: int, rope: int) -> int:
    """656 for 512 + 64 (seed 1, 0x0B): latent bytes, a float32 scale for each 128 of them, bf16 rotary part."""
    return _aligned(_aligned(latent) + 4 * -(-latent // FP8_GROUP) + 2 * rope)


def _aligned(size: int) -> int:
    return -(-size // FP8_ALIGNMENT) * FP8_ALIGNMENT


def _lookup(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise UsageFault(f"{what} that is not in the table", expected=", ".join(table), found=name)
    return table[name]
