"""`mla-convert ledger`: what MLA layers of a shape cost by arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli.common import Debug, JsonFlag, run_command
from mla_convert.errors import InputRefused
from mla_convert.mla.ledger import DEVICES, DTYPE_BYTES, PRESETS, Ledger, MLAShape, Workload, make_ledger

if TYPE_CHECKING:
    from rich.console import Console

HELP = (
    "Count what the MLA layers of a model cost: parameters, projection FLOPs, cache bytes beside expanded keys and "
    "values, arithmetic intensity beside a device's ridge. Arithmetic alone: nothing is loaded or measured."
)
EXAMPLES = """
mla-convert ledger deepseek-v2 --device h200
mla-convert ledger OUT --batch 8 --history 32768
mla-convert ledger path/to/config.json --json
"""
SIZES: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}
DEFAULT_DTYPE = "bfloat16"
LONGEST_SHOWN = 200
# Far above any model or service, and still exact as a float.
MOST = 1 << 50


def command(
    shape: Annotated[
        str,
        typer.Argument(metavar="CONFIG|OUT|NAME", help=f"A config.json, a folder with one, or {', '.join(PRESETS)}."),
    ],
    device: Annotated[str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(DEVICES)}.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences.")] = 1,
    queries: Annotated[int, typer.Option(min=1, max=MOST, help="New tokens of each sequence.")] = 1,
    history: Annotated[int, typer.Option(min=0, max=MOST, help="Cached tokens of each sequence.")] = 4096,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"One of {', '.join(DTYPE_BYTES)}; the config's, or {DEFAULT_DTYPE}, unless given."
        ),
    ] = None,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Print the ledger of `shape`."""

    def body() -> LedgerResult:
        sizes, own_dtype = read_shape(shape, dtype)
        work = Workload(batch, queries, history, own_dtype)
        return LedgerResult(shape, sizes, work, make_ledger(sizes, work, device))

    run_command(json_output, body, debug=debug)


def read_shape(name: str, dtype: str | None = None) -> tuple[MLAShape, str]:
    """Sizes and dtype of a preset, a configuration file, or a folder with one; `dtype` stands before its own.

    Raises:
        InputRefused: If there is no such thing, or it describes no MLA model.
    """
    if name in PRESETS and not Path(name).exists():
        return PRESETS[name], dtype or DEFAULT_DTYPE
    try:
        path = Path(name).expanduser()
        found = path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputRefused(f"a path that cannot be read: {error}", where=name[:LONGEST_SHOWN]) from error
    if not found:
        raise InputRefused(
            "neither a preset nor a configuration",
            expected=f"a path, or {', '.join(PRESETS)}",
            found=name[:LONGEST_SHOWN],
        )
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputRefused("no configuration", expected="a config.json", where=str(path.parent)) from error
    except OSError as error:
        raise InputRefused(f"a configuration that cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise InputRefused(
            "a configuration that is no JSON", found=str(error)[:LONGEST_SHOWN], where=str(path)
        ) from error
    if not isinstance(config, dict):
        raise InputRefused("a configuration", expected="a JSON object", found=type(config).__name__, where=str(path))
    return _shape(config, str(path)), dtype or _dtype(config, str(path))


def _shape(config: Mapping[str, object], where: str) -> MLAShape:
    if "kv_lora_rank" not in config:
        kind = config.get("model_type", "an unnamed model")
        raise InputRefused(
            "not an MLA model: it caches keys and values of its heads",
            expected="kv_lora_rank and the widths beside it",
            found=f"{kind} with {config.get('num_key_value_heads', 'no')} key/value heads",
            where=where,
            remedy="Convert it first; `mla-convert inspect` shows what a source caches.",
        )
    sizes = {field: _whole(config, key, where) for field, key in SIZES.items()}
    q_lora = None if config.get("q_lora_rank") is None else _whole(config, "q_lora_rank", where)
    return MLAShape(q_lora_rank=q_lora, **sizes)


def _whole(config: Mapping[str, object], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MOST:
        raise InputRefused(
            "a size of the model", expected="a whole number", found=repr(value)[:LONGEST_SHOWN], where=f"{where}: {key}"
        )
    return value


def _dtype(config: Mapping[str, object], where: str) -> str:
    found = config.get("dtype") or config.get("torch_dtype") or DEFAULT_DTYPE
    name = str(found).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise InputRefused(
            "a dtype that the ledger does not know",
            expected=", ".join(DTYPE_BYTES),
            found=name[:LONGEST_SHOWN],
            where=f"{where}: dtype",
            remedy="Give --dtype.",
        )
    return name


@dataclass(frozen=True)
class LedgerResult:
    """A ledger and how it is printed."""

    name: str
    shape: MLAShape
    work: Workload
    ledger: Ledger

    def to_json(self) -> Mapping[str, object]:
        """What was asked, then the figures."""
        device = self.ledger.device
        source = None if device is None else DEVICES[device].source
        asked = {"name": self.name, "shape": asdict(self.shape), "workload": asdict(self.work)}
        return {**asked, **asdict(self.ledger), "device_source": source}

    def render(self, console: Console) -> None:
        """One figure a line."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, value in self._lines():
            table.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
        console.print(table)

    def _lines(self) -> list[tuple[str, str]]:
        done, work = self.ledger, self.work
        asked = f"{work.batch} × {work.queries} new tokens"
        history = f"{work.batch} × {work.history:,} tokens, {self.shape.layers} layers"
        cross = "never" if done.crossover_tokens is None else f"{done.crossover_tokens:.2f} cached tokens"
        lines = [
            ("parameters", f"{done.attention_linear_parameters:,} in the matrices of one layer's attention"),
            ("projections", f"{done.projection_flops:,} FLOPs in one layer for {asked}"),
            ("cached row", f"{done.cache_bytes_per_token_per_layer:,} bytes per token and layer ({work.dtype})"),
            (
                "expanded",
                f"{done.expanded_bytes_per_token_per_layer:,} bytes, {done.expanded_to_latent_ratio:.1f} times",
            ),
            ("FP8 row", f"{done.fp8_row_bytes:,} bytes, {done.fp8_to_bf16_ratio:.3f} of bf16"),
            ("cache", f"{_size(done.cache_bytes)} for {history}; expanded {_size(done.expanded_cache_bytes)}"),
            ("W_VO", f"{_size(done.absorbed_product_bytes)} per layer, should it be stored"),
            ("crossover", f"{cross}, above which absorbing the content key takes fewer multiply-adds"),
            ("intensity", f"{done.arithmetic_intensity:.1f} FLOPs per byte of cache"),
        ]
        if done.device is not None:
            source = DEVICES[done.device].source
            lines.append(("ridge", f"{done.ridge:.1f} FLOPs per byte, so bound by {done.bound} ({source})"))
        return lines


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} bytes"
