"""Block reconstruction: each converted layer fitted to what the source's layer does to the residual stream.

Layer by layer, after the closed form. Inputs come from the prefix as it has been converted and fitted so far, the goal
from the source, so a layer makes good what those before it lost and errors do not add up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.convert.refinable import RefinableAttention
from mla_convert.convert.refine_fit import FitSettings, FitTrace, FitWindows, fit
from mla_convert.convert.source_model import StreamedSource, batches_of
from mla_convert.convert.states import StateStore
from mla_convert.errors import EnvironmentFault
from mla_convert.mla.weights import MLALayerWeights
from mla_convert.progress import bar

SILENT = 1e-12
# Distance, in what the source's attention adds on average, from which a token's weight falls.
SOFTENED = 10.0


@dataclass(frozen=True)
class BlockFit:
    """The fitted layers in a folder, one file each.

    Attributes:
        folder: Where they lie.
        traces: What the fit of each layer did to its held-out loss.
    """

    folder: Path
    traces: tuple[FitTrace, ...]


def refine_blocks(
    streamed: StreamedSource,
    closed_form: Callable[[int], MLALayerWeights],
    layers: int,
    windows: FitWindows,
    settings: FitSettings,
    states: Callable[[], StateStore],
    folder: Path,
) -> BlockFit:
    """Fit all layers in turn; layers whose file is in `folder` already are taken from there.

    Args:
        streamed: The source.
        closed_form: Start of each layer by its index.
        layers: Number of layers.
        windows: To fit to and judge by.
        settings: Of each layer's fit.
        states: Makes an empty store for the states of all windows.
        folder: Where each layer is written as soon as it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rope = streamed.rotary(windows.ids.shape[1])
    traces = []
    with states() as source, states() as converted, bar(layers, "refining") as progress:
        streamed.embed_into(source, windows.ids)
        streamed.embed_into(converted, windows.ids)
        for index in range(layers):
            attention = RefinableAttention(closed_form(index))
            with streamed.layer(index) as layer:
                scale = _to_middle(layer, source, rope)
                block = _Block(layer, source, converted, scale)
                path = folder / layer_file(index)
                if path.is_file():
                    trace = load_layer(attention, path)
                else:
                    trace = _fit(attention, block, windows, settings)
                    _save(attention, trace, path)
                block.advance(attention)
            traces.append(trace)
            progress.update(1)
            progress.set_postfix_str(f"layer {index}: {trace.before:.3g} → {trace.after:.3g}")
    return BlockFit(folder, tuple(traces))


def layer_file(index: int) -> str:
    """Name of one fitted layer's file."""
    return f"layer_{index:04d}.safetensors"


def load_layer(attention: RefinableAttention, path: Path) -> FitTrace:
    """Read a fitted layer into `attention`.

    Raises:
        EnvironmentFault: If the file is damaged.
    """
    try:
        attention.load_state_dict(load_file(path), strict=True)
        with safe_open(path, framework="pt") as file:
            noted = file.metadata()
        return FitTrace(float(noted["before"]), float(noted["after"]), int(noted["kept_step"]))
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise EnvironmentFault(
            f"a damaged refined layer in the cache: {error}", where=str(path), remedy="Delete that file."
        ) from error


def _save(attention: RefinableAttention, trace: FitTrace, path: Path) -> None:
    """One step from absent to whole, so that a run that is killed can go on with the layer it was in."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    noted = {"before": repr(trace.before), "after": repr(trace.after), "kept_step": str(trace.kept_step)}
    save_file({name: value.contiguous() for name, value in attention.state_dict().items()}, partial, metadata=noted)
    os.replace(partial, path)


@torch.no_grad()
def _to_middle(layer: Any, source: StateStore, rope: tuple[Tensor, Tensor]) -> float:
    """Add the source's attention to its stream; mean of `|attention|²` over the stream's mean square, per number.

    At least `SILENT`, so that a layer that adds nothing has a loss.
    """
    positions = torch.arange(source.shape[1])[None]
    total = 0.0
    for windows in batches_of(source):
        hidden = source.read(windows)
        added = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden),
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rope,
        )[0]
        middle = hidden + added
        total += float((added.square().mean(-1) / _power(middle)).sum())
        source.write(windows, middle)
    return max(total / (source.shape[0] * source.shape[1]), SILENT)


def _power(stream: Tensor) -> Tensor:
    """(B, T, D) -> (B, T) mean square: the scale on which the next norm reads a token."""
    return stream.square().mean(-1).clamp(min=torch.finfo(stream.dtype).tiny)


@dataclass(frozen=True)
class _Block:
    """One layer between the two streams.

    Attributes:
        layer: The source's, with weights.
        source: The source's stream after its attention.
        converted: The converted model's stream before this layer.
        scale: What the source's attention adds, see `_to_middle`; the unit of the loss.
    """

    layer: Any
    source: StateStore
    converted: StateStore
    scale: float

    def loss(self, attention: RefinableAttention, windows: Sequence[int]) -> Tensor:
        """Squared distance of the streams after attention, each token on its own scale, over `scale`: mean, softened.

        A token whose stream came out wrong altogether, such as an attention sink that did not become one, is worth
        hundreds of others and cannot be mended here; the logarithm keeps it from being all that is fitted.
        """
        with torch.no_grad():
            hidden = torch.cat([self.converted.read(slice(number, number + 1)) for number in windows])
            middle = torch.cat([self.source.read(slice(number, number + 1)) for number in windows])
            inputs = self.layer.input_layernorm(hidden)
        error = hidden + attention(inputs) - middle  # (B, T, D)
        relative = error.square().mean(-1) / (_power(middle) * self.scale)  # (B, T)
        loss: Tensor = SOFTENED * (relative / SOFTENED).log1p().mean()
        return loss

    @torch.no_grad()
    def advance(self, attention: RefinableAttention) -> None:
        """Both streams through the rest of the layer."""
        for windows in batches_of(self.source):
            self.source.write(windows, self._rest(self.source.read(windows)))
            hidden = self.converted.read(windows)
            self.converted.write(windows, self._rest(hidden + attention(self.layer.input_layernorm(hidden))))

    def _rest(self, middle: Tensor) -> Tensor:
        out: Tensor = middle + self.layer.mlp(self.layer.post_attention_layernorm(middle))
        return out


def _fit(attention: RefinableAttention, block: _Block, windows: FitWindows, settings: FitSettings) -> FitTrace:
    train, held = windows.split(settings.seed)
    return fit(attention, lambda chosen: block.loss(attention, chosen), train, held, settings)
