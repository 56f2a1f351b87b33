"""What the adapters of foreign kernels share: those are built for 512+64, and rows of other widths are filled up."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mla_convert.decode.abi import DecodeCall, DecodeOutput, LaunchFigures

LATENT, ROPE = 512, 64


@dataclass(frozen=True)
class Padding:
    """What a foreign kernel computes beyond what was asked, for a receipt.

    Attributes:
        latent: Zeros put behind each latent.
        rope: Zeros put behind each rotary part.
        heads: Heads that are computed and dropped.
        pool_bytes: Bytes of the padded copy of the pool; 0 where the pool is read in place.
    """

    latent: int = 0
    rope: int = 0
    heads: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True)
class ForeignBackend(ABC):
    """A backend whose kernels come from another package.

    Attributes:
        module: The package, or what stands in for it; None looks for the installed one.
        capability: Of the device, or None to ask the device.
    """

    module: Any = None
    capability: tuple[int, int] | None = None

    package: ClassVar[str]

    @property
    def automatic(self) -> bool:
        """By name only: it has not been measured beside the bundled kernels here."""
        return False

    def absent(self, device: torch.device) -> str | None:
        """The package, or a CUDA device."""
        if self.module is None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return f"the tensors are on {device}" if self.capability is None and device.type != "cuda" else None

    def unfit(self, call: DecodeCall) -> str | None:
        """Why the package cannot run `call`, here or at all; None if it can."""
        absent = self.absent(call.q.device)
        if absent is not None:
            return absent
        return self.limits(call, self.capability or torch.cuda.get_device_capability(call.q.device))

    @abstractmethod
    def limits(self, call: DecodeCall, capability: tuple[int, int]) -> str | None:
        """Why `call` lies outside of the kernels' limits on a device; None if it does not."""

    def padding(self, call: DecodeCall) -> Padding:
        """What a run of `call` adds to it."""
        return padding_of(call)

    def launch(self, call: DecodeCall) -> LaunchFigures:
        """What is padded; the kernel is not ours to describe."""
        return LaunchFigures(padded_bytes=self.padding(call).pool_bytes)


def padding_of(call: DecodeCall) -> Padding:
    """Zeros that bring a dense call to 512+64."""
    latent, rope = LATENT - call.format.latent_width, ROPE - call.format.rope_width
    rows = call.pool.shape[0] * call.pool.shape[1]
    size = rows * (LATENT + ROPE) * call.pool.element_size() if latent or rope else 0
    return Padding(latent, rope, 0, size)


def pad_parts(rows: Tensor, latent_width: int, padding: Padding) -> Tensor:
    """Zeros behind the latent and behind the rotary part of (…, d_c + d_R); the tensor itself where none are due."""
    if not padding.latent and not padding.rope:
        return rows
    latent, rope = rows[..., :latent_width], rows[..., latent_width:]
    return torch.cat([functional.pad(latent, (0, padding.latent)), functional.pad(rope, (0, padding.rope))], dim=-1)


def seen_rows(call: DecodeCall) -> Tensor:
    """(B, s_q) rows that each query sees, on the call's device."""
    if call.sparse is not None:
        sparse = call.sparse
        return sparse.lengths if sparse.extra_lengths is None else sparse.lengths + sparse.extra_lengths
    tokens = call.q.shape[1]
    behind = torch.arange(tokens - 1, -1, -1, device=call.q.device) * int(call.causal)
    return (call.seq_lens[:, None] - behind[None, :]).clamp_min(0)


def blank_unseen(out: Tensor, lse: Tensor, seen: Tensor) -> DecodeOutput:
    """0 and −inf where a query sees nothing; kernels differ there (FlashMLA's LSE is +inf, FlashInfer's −5·10⁴)."""
    empty = (seen == 0)[:, :, None]  # (B, s_q, 1)
    return DecodeOutput(out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf")))
