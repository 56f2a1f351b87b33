"""`mla-convert convert`: write a source as an MLA checkpoint that stock transformers loads."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_type_hints

import typer

from mla_convert.cli.common import Debug, JsonFlag, Seed, run_command
from mla_convert.cli.inspect import Revision, Source, open_revision
from mla_convert.cli.plan_file import read_plan_file
from mla_convert.errors import UsageFault

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mla_convert.convert.inspection import Preview
    from mla_convert.convert.options import ConvertOptions
    from mla_convert.convert.run import Conversion

HELP = (
    "Write SOURCE as a Multi-head Latent Attention checkpoint in OUT, with a manifest. The plan is printed before "
    "work starts. The written files are loaded again by stock transformers and compared before OUT appears; "
    "a run that fails or is interrupted leaves no OUT."
)
EXAMPLES = """
mla-convert convert SOURCE OUT --lossless
mla-convert convert SOURCE OUT --qk-rope-head-dim 40 --kv-lora-rank 152 --calibration books/
mla-convert convert model.gguf OUT --rope-policy high --qk-rope-head-dim 48 --kv-lora-rank 144
mla-convert convert SOURCE OUT --config plan.yaml --profile hf --dry-run --json
"""

# The choices and defaults of `ConvertOptions`, whose module is too slow to import for `--help`.
ProfileChoice = Literal["auto", "engine", "hf", "full"]
PolicyChoice = Literal["optimal", "high", "low", "uniform", "2-norm"]
FactorizationChoice = Literal["joint", "split"]
WeightingChoice = Literal["output", "activation", "weight"]
GammaChoice = Literal["measured", "one"]
NormChoice = Literal["auto", "epsilon", "constant"]
DtypeChoice = Literal["source", "float32", "bfloat16", "float16"]
CALIBRATION_TOKENS, CALIBRATION_WINDOW = 5120, 512

NOT_IN_PLAN_FILE = ("ctx", "source", "out", "config", "json_output", "debug", "return")
# What a lossless plan leaves no choice of, and what only calibration text gives a meaning.
SET_BY_LOSSLESS = ("rope_policy", "factorization", "key_rank", "weighting", "gamma", "calibration")
OF_CALIBRATION = ("calibration_tokens", "calibration_window", "text_field")


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the options of a YAML file as defaults of the command line; runs before all other options.

    Raises:
        UsageFault: See `read_plan_file`.
    """
    if path is not None and not ctx.resilient_parsing:
        hints = {name: hint for name, hint in get_type_hints(command).items() if name not in NOT_IN_PLAN_FILE}
        ctx.default_map = read_plan_file(path, hints)
    return path


Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")]
Lossless = Annotated[
    bool,
    typer.Option("--lossless", help="Rotate all pairs and keep the full useful rank: the same function to rounding."),
]
KvLoraRank = Annotated[int | None, typer.Option(min=1, help="Width of the cached latent.")]
QkRopeHeadDim = Annotated[int | None, typer.Option(min=2, help="Width of the cached rotary key; even.")]
Profile = Annotated[
    ProfileChoice, typer.Option(help="Form of the output; auto takes engine where it can carry the plan, else hf.")
]
RopePolicy = Annotated[
    PolicyChoice, typer.Option(help="Which rotary components stay rotary; optimal and 2-norm need calibration text.")
]
Factorization = Annotated[
    FactorizationChoice, typer.Option(help="One latent for keys and values together, or a part of it for each.")
]
KeyRank = Annotated[
    int | None,
    typer.Option(min=0, help="Latent rows for keys, with --factorization split.", show_default="by the spectra"),
]
Weighting = Annotated[
    WeightingChoice | None,
    typer.Option(
        help="The error that is made small: of the attention output, of keys and values, or of the weights.",
        show_default="output with calibration text, else weight",
    ),
]
Gamma = Annotated[
    GammaChoice | None,
    typer.Option(
        help="Constant in place of a removed rotation.", show_default="measured with calibration text, else one"
    ),
]
LatentNorm = Annotated[
    NormChoice,
    typer.Option(help="How the stock norm on the latent is neutralised; auto takes constant for float16 only."),
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Text file, JSONL, folder of them, or datasets:NAME. Can be repeated."),
]
CalibrationTokens = Annotated[int, typer.Option(min=2, help="Tokens to measure on.")]
CalibrationWindow = Annotated[int, typer.Option(min=2, help="Tokens per window.")]
TextField = Annotated[str, typer.Option(help="Field of JSONL and dataset rows that holds the text.")]
Dtype = Annotated[DtypeChoice, typer.Option(help="Dtype of what is written; source keeps each tensor's own.")]
PadCache = Annotated[
    str | None,
    typer.Option(
        metavar="RANK+ROPE", help="Store these widths, filled up with rows of zeros; 512+64 is what kernels take."
    ),
]
DryRunFlag = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that is in OUT.")]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="YAML",
        callback=read_config,
        is_eager=True,
        help="File with these options by name, such as kv_lora_rank: 152. The command line overrides it.",
    ),
]


def command(
    ctx: typer.Context,
    source: Source,
    out: Out,
    lossless: Lossless = False,
    kv_lora_rank: KvLoraRank = None,
    qk_rope_head_dim: QkRopeHeadDim = None,
    profile: Profile = "auto",
    rope_policy: RopePolicy = "optimal",
    factorization: Factorization = "joint",
    key_rank: KeyRank = None,
    weighting: Weighting = None,
    gamma: Gamma = None,
    latent_norm: LatentNorm = "auto",
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = CALIBRATION_TOKENS,
    calibration_window: CalibrationWindow = CALIBRATION_WINDOW,
    text_field: TextField = "text",
    dtype: Dtype = "source",
    pad_cache: PadCache = None,
    revision: Revision = None,
    seed: Seed = 0,
    dry_run: DryRunFlag = False,
    overwrite: Overwrite = False,
    config: Config = None,  # noqa: ARG001 - `read_config` has read it
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Convert `source` into `out`."""

    def body() -> ConvertResult | DryRun:
        from mla_convert.convert.options import ConvertOptions

        refuse_idle(ctx)
        options = ConvertOptions(
            lossless=lossless,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            profile=profile,
            rope_policy=rope_policy,
            factorization=factorization,
            key_rank=key_rank,
            weighting=weighting,
            gamma=gamma or "measured",
            latent_norm=latent_norm,
            dtype=dtype,
            pad_cache=_pad_widths(pad_cache),
            calibration=tuple(calibration or ()),
            calibration_tokens=calibration_tokens,
            calibration_window=calibration_window,
            text_field=text_field,
            seed=seed,
        )
        return _run(source, revision, out, options, overwrite=overwrite, dry_run=dry_run)

    run_command(json_output, body, debug=debug)


def _run(
    source: str, revision: str | None, out: Path, options: ConvertOptions, *, overwrite: bool, dry_run: bool
) -> ConvertResult | DryRun:
    from mla_convert.convert.calibration_text import read_corpus
    from mla_convert.convert.checkpoint_writer import absolute, refuse_existing
    from mla_convert.convert.inspection import preview_conversion
    from mla_convert.convert.planning import make_plan
    from mla_convert.convert.run import check_disk, convert, refuse_inside

    started = time.perf_counter()
    out = absolute(out)
    refuse_existing(out, overwrite=overwrite)
    checkpoint = open_revision(source, revision)
    refuse_inside(out, checkpoint.location.folder)
    plan = make_plan(checkpoint, options)
    check_disk(out, checkpoint, plan)
    preview = preview_conversion(checkpoint, plan, out)
    if dry_run:
        for text in options.calibration:
            # A dataset may have to be downloaded, which writes to its cache.
            if not text.startswith("datasets:"):
                read_corpus(text, options.text_field)
        return DryRun(preview)
    _print_preview(preview)
    done = convert(checkpoint, out, options, overwrite=overwrite)
    return ConvertResult(done, preview, time.perf_counter() - started)


def refuse_idle(ctx: typer.Context) -> None:
    """Refuse options that were given and would change nothing.

    Raises:
        UsageFault: Naming the option and what it needs.
    """
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    asked = {name: ctx.params[name] for name in given}
    idle, reason, remedy = [], "", ""
    if asked.get("lossless"):
        idle, reason = [name for name in (*SET_BY_LOSSLESS, *OF_CALIBRATION) if name in given], "with --lossless"
        remedy = "Drop it."
    elif not asked.get("calibration"):
        measured = ("gamma",) if asked.get("gamma") == "measured" else ()
        idle, reason = [name for name in (*OF_CALIBRATION, *measured) if name in given], "without calibration text"
        remedy = "Give --calibration PATH, or drop it."
    if idle:
        raise UsageFault(f"{', '.join(map(_option, idle))} has no effect {reason}", remedy=remedy)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pad_widths(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)\+(\d+)", text)
    if found is None:
        raise UsageFault("not two widths", expected="RANK+ROPE, such as 512+64", found=text, where="--pad-cache")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class DryRun:
    """A preview as a result."""

    preview: Preview

    def to_json(self) -> Mapping[str, object]:
        """See `Preview.to_json`."""
        return {"dry_run": True, **self.preview.to_json()}

    def render(self, console: Console) -> None:
        """The plan, and that nothing was written."""
        console.print(_grid(_plan_rows(self.preview)))
        console.print("dry run: nothing was written")


@dataclass(frozen=True)
class ConvertResult:
    """A finished conversion and how it is printed."""

    conversion: Conversion
    preview: Preview
    seconds: float

    def to_json(self) -> Mapping[str, object]:
        """Plan, identity, evidence and time."""
        from mla_convert.manifests.models import MANIFEST_NAME

        manifest = self.conversion.manifest
        calibration = manifest.calibration
        return {
            "dry_run": False,
            **self.preview.to_json(),
            "files": sorted([*(file.path for file in manifest.outputs.files), MANIFEST_NAME]),
            "total_bytes": manifest.outputs.total_bytes,
            "canonical_mla_id": manifest.canonical_mla_id,
            "reload_check": manifest.reload_check.model_dump(mode="json"),
            "layer_errors": self._layer_errors(),
            "calibration": None if calibration is None else calibration.model_dump(mode="json", exclude={"documents"}),
            "warnings": manifest.warnings,
            "seconds": self.seconds,
        }

    def render(self, console: Console) -> None:
        """Where it is, what it is, and how well it holds; the plan has been printed before."""
        manifest, check = self.conversion.manifest, self.conversion.manifest.reload_check
        reloaded = (
            f"{check.kind}: max |Δlogit| {check.max_abs_logit_error:.2g}, {check.relative_error:.2g} of max |logit|; "
            f"at most {check.tolerance:g}"
        )
        rows = [
            ("written", f"{self.conversion.folder} ({_size(manifest.outputs.total_bytes)})"),
            ("plan", manifest.method.plan_id),
            ("identity", manifest.canonical_mla_id),
            ("reloaded", reloaded),
        ]
        for name, found in self._layer_errors().items():
            if found is not None:
                worst = f"worst {found['worst']:.3g} in layer {found['worst_layer']}"
                rows.append((name.replace("_", " "), f"mean {found['mean']:.3g}, {worst}"))
        rows += [("warning", warning) for warning in manifest.warnings]
        console.print(_grid([*rows, ("time", f"{self.seconds:.1f} s")]))

    def _layer_errors(self) -> dict[str, dict[str, float] | None]:
        """Mean and worst over the layers of each relative error; None where it was not measured."""
        found: dict[str, dict[str, float] | None] = {}
        for name in ("key_map_error", "value_map_error", "weighted_key_error", "weighted_value_error"):
            errors = [error for layer in self.conversion.manifest.layers if (error := getattr(layer, name)) is not None]
            found[name] = None
            if errors:
                worst = max(range(len(errors)), key=errors.__getitem__)
                found[name] = {"mean": sum(errors) / len(errors), "worst": errors[worst], "worst_layer": worst}
        return found


def _print_preview(preview: Preview) -> None:
    from rich.console import Console

    Console(stderr=True).print(_grid(_plan_rows(preview)))


def _plan_rows(preview: Preview) -> list[tuple[str, str]]:
    plan, before, after = preview.plan, preview.source_cache, preview.target_cache
    numbers = f"{before.numbers_per_token_per_layer:,} → {after.numbers_per_token_per_layer:,}"
    share = after.numbers_per_token_per_layer / before.numbers_per_token_per_layer
    spec = plan.calibration
    texts = "" if spec is None else f"{spec.tokens:,} tokens in windows of {spec.window} of {', '.join(spec.texts)}"
    padding = f", filled up from {plan.useful_rank}+{2 * plan.rope_slots}" if plan.padded else ""
    residual = "as it is" if plan.residual_scale == 1 else f"times {plan.residual_scale:.4g}, for the norms' epsilon"
    biases = "; attention has biases" if plan.attention_bias else ""
    return [
        ("plan", plan.plan_id),
        ("profile", f"{plan.profile}{', lossless' if plan.lossless else ''}{biases}"),
        ("widths", f"kv_lora_rank {plan.kv_lora_rank}, qk_rope_head_dim {plan.qk_rope_head_dim}{padding}"),
        ("", f"qk_nope_head_dim {plan.qk_nope_head_dim}, v_head_dim {plan.v_head_dim}"),
        ("cache", f"{numbers} numbers per token and layer ({share:.1%})"),
        ("", f"{before.bytes_per_token:,} → {after.bytes_per_token:,} bytes per token ({after.dtype})"),
        ("rope policy", plan.rope_policy),
        ("factorization", f"{plan.factorization}, weighting {plan.weighting}, gamma {plan.gamma}"),
        ("calibration", texts or "none"),
        ("latent norm", f"{plan.latent_norm} route"),
        ("residual", residual),
        ("dtype", f"{plan.dtype}; attention {plan.attention_dtype}"),
        ("writes", f"{_size(preview.weight_bytes)} of weights into {preview.out}{' (replaced)' * preview.overwrite}"),
        ("", ", ".join(preview.files)),
    ]


def _grid(rows: list[tuple[str, str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    return grid


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
