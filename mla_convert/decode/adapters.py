"""The weight that a projection multiplies by, adapters included, and what that weight is made of.

Absorption reads `kv_b_proj` as a matrix, where the expanded form calls it as a module: the two agree only if the
module is linear in its input, so what is not is refused here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mla_convert.errors import InputRefused

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as LoraLinear

SAMPLED_NUMBERS = 65_536


@dataclass(frozen=True)
class SourceVersion:
    """One tensor at one moment, told apart without reading it.

    Attributes:
        name: Of the tensor.
        shape: Its shape; another one where it is sharded otherwise.
        dtype: Its dtype; another one where it is converted or quantised.
        device: Where it lies.
        address: Of its first byte; another one where it was replaced.
        version: Torch's count of in-place changes; None for an inference tensor, which has none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    address: int
    version: int | None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> SourceVersion:
        """The present state of `tensor`."""
        version = None if tensor.is_inference() else tensor._version
        return cls(name, tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.data_ptr(), version)


@dataclass(frozen=True)
class AdapterState:
    """One LoRA adapter of one projection.

    Attributes:
        name: Of the adapter.
        active: Whether its delta is added as the projection runs.
        merged: Whether its delta is in the base weight.
        scaling: Factor on `B A`.
        sources: Of `A` and `B`.
    """

    name: str
    active: bool
    merged: bool
    scaling: float
    sources: tuple[SourceVersion, ...]


@dataclass(frozen=True)
class ProjectionState:
    """What the effective weight of one projection is made of.

    Attributes:
        base: Version of the base weight.
        adapters: In their order.
        module: Class of the projection.
    """

    base: SourceVersion
    adapters: tuple[AdapterState, ...]
    module: str


def is_plain(module: nn.Module) -> bool:
    """Whether the effective weight is the module's own."""
    return type(module) is nn.Linear


def require_absorbable(module: nn.Module, where: str) -> None:
    """Refuse a projection that is no fixed matrix.

    Args:
        module: The projection.
        where: Its name, for the refusal.

    Raises:
        InputRefused: Quantised or of a foreign class, with hooks, with an active LoRA bias, with DoRA or another
            variant, or with a LoRA dropout that is in training mode.
    """
    base = base_of(module)
    if type(base) is not nn.Linear:
        raise InputRefused(
            "a projection that cannot be absorbed",
            expected="torch.nn.Linear, alone or under PEFT's LoRA",
            found=f"{type(module).__module__}.{type(module).__qualname__}",
            where=where,
        )
    for part in (module, base):
        if part._forward_hooks or part._forward_pre_hooks:
            raise InputRefused(
                "a projection with forward hooks cannot be absorbed", found=type(part).__name__, where=where
            )
    lora = as_lora(module)
    if lora is not None:
        for name in _adding(lora):
            _require_linear(lora, name, f"{where}, adapter {name}")


def require_no_bias(module: nn.Module, where: str) -> None:
    """Refuse a bias where stock's architecture has none and no absorbed product has a place for one.

    Args:
        module: A projection that `require_absorbable` accepts.
        where: Its name, for the refusal.

    Raises:
        InputRefused: If its linear layer has a bias.
    """
    bias = getattr(base_of(module), "bias", None)
    if bias is not None:
        raise InputRefused(
            "a projection with a bias cannot be absorbed",
            expected="none, as the architecture has it",
            found=f"a bias of {tuple(bias.shape)}",
            where=where,
        )


def base_of(module: nn.Module) -> nn.Module:
    """The module below LoRA, or the module."""
    lora = as_lora(module)
    return module if lora is None else lora.get_base_layer()


def as_lora(module: nn.Module) -> LoraLinear | None:
    """The module as PEFT's LoRA over a linear one, or None. PEFT is imported only where it made the module."""
    if not type(module).__module__.startswith("peft."):
        return None
    from peft.tuners.lora.layer import Linear

    return module if type(module) is Linear else None


def effective_weight(module: nn.Module) -> Tensor:
    """(out, in): the base weight, plus `scaling · B A` of each adapter that is active and not merged.

    Detached. For a plain projection it is the weight itself, not a copy. The caller has called `require_absorbable`.
    """
    weight = _weight(base_of(module))
    lora = as_lora(module)
    if lora is None:
        return weight
    with torch.no_grad():
        for name in _adding(lora):
            delta: Tensor = lora.get_delta_weight(name)
            weight = weight + delta.to(weight.dtype)
    return weight


def projection_state(module: nn.Module, name: str) -> ProjectionState:
    """What `effective_weight` would be made of now. Reads no number."""
    base = SourceVersion.of(f"{name}.weight", _weight(base_of(module)))
    lora = as_lora(module)
    adapters = () if lora is None else tuple(_adapters(lora, name))
    return ProjectionState(base, adapters, f"{type(module).__module__}.{type(module).__qualname__}")


def content_digest(module: nn.Module) -> str:
    """SHA-256 over shape, dtype and at most 65,536 evenly spaced numbers of each tensor behind a projection.

    Finds what `SourceVersion` cannot: writes through `tensor.data`, which torch does not count.
    """
    digest = hashlib.sha256()
    for name, tensor in _tensors(module):
        flat = tensor.reshape(-1)
        sample = flat[:: -(-flat.numel() // SAMPLED_NUMBERS) or 1].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield "base", _weight(base_of(module))
    lora = as_lora(module)
    if lora is not None:
        for name in lora.lora_A:
            yield f"{name}.A", _weight(lora.lora_A[name])
            yield f"{name}.B", _weight(lora.lora_B[name])


def _weight(base: nn.Module) -> Tensor:
    weight = base.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _adding(lora: LoraLinear) -> list[str]:
    """Adapters whose delta is added as the projection runs, as PEFT decides it."""
    if lora.disable_adapters or lora.merged:
        return []
    return [name for name in lora.active_adapters if name in lora.lora_A]


def _adapters(lora: LoraLinear, name: str) -> Iterator[AdapterState]:
    active, merged = set(_adding(lora)), set(lora.merged_adapters)
    for adapter in lora.lora_A:
        sources = tuple(
            SourceVersion.of(f"{name}.{part}.{adapter}", _weight(matrices[adapter]))
            for part, matrices in (("lora_A", lora.lora_A), ("lora_B", lora.lora_B))
        )
        yield AdapterState(adapter, adapter in active, adapter in merged, float(lora.scaling[adapter]), sources)


def _require_linear(lora: LoraLinear, name: str, where: str) -> None:
    dropout = lora.lora_dropout[name]
    faults = {
        f"the variant {type(lora.lora_variant.get(name)).__name__}": name in lora.lora_variant,
        "a bias of its own": bool(lora.lora_bias.get(name, False)),
        "dropout in training mode": dropout.training and not isinstance(dropout, nn.Identity),
    }
    found = [fault for fault, present in faults.items() if present]
    if found:
        raise InputRefused(
            "an adapter whose delta is no fixed matrix cannot be absorbed",
            expected="plain LoRA, in evaluation mode",
            found=", ".join(found),
            where=where,
            remedy="Merge it, or put the model into evaluation mode.",
        )
