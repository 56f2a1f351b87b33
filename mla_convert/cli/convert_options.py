"""The options of `mla-convert convert`, as typer declares them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# The choices and defaults of `ConvertOptions`, whose module is too slow to import for `--help`.
ProfileChoice = Literal["auto", "engine", "hf", "full"]
PolicyChoice = Literal["optimal", "high", "low", "uniform", "2-norm", "greedy", "rorope", "mean"]
RecipeChoice = Literal["transmla", "mha2mla", "care", "x-ecomla", "elitekv", "optimal"]
FreqFoldChoice = Literal["auto", "1", "2", "4", "8"]
BalanceChoice = Literal["none", "transmla"]
RankRuleChoice = Literal["spectra", "care"]
CentringChoice = Literal["auto", "none"]
DampingChoice = Literal["auto", "none"]
FactorizationChoice = Literal["joint", "split"]
WeightingChoice = Literal["output", "activation", "weight"]
GammaChoice = Literal["measured", "one"]
NormChoice = Literal["auto", "epsilon", "constant"]
RefineChoice = Literal["block", "e2e"]
DtypeChoice = Literal["source", "float32", "bfloat16", "float16"]
CALIBRATION_TOKENS, CALIBRATION_WINDOW = 5120, 512
MEASURE_TOKENS = 4096
# Fitting has more to learn than second moments have.
REFINE_CALIBRATION_TOKENS = 20480
REFINE_STEPS, REFINE_BATCH, REFINE_TOKENS = 160, 1, 81920
REFINE_CONTINUED = 61440

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")]
Lossless = Annotated[
    bool,
    typer.Option("--lossless", help="Rotate all pairs and keep the full useful rank: the same function to rounding."),
]
KvLoraRank = Annotated[int | None, typer.Option(min=1, help="Width of the cached latent.")]
QkRopeHeadDim = Annotated[int | None, typer.Option(min=2, help="Width of the cached rotary key; even.")]
Width = Annotated[
    int | None,
    typer.Option(min=3, help="Sum of both widths; the split that is predicted to lose least is taken."),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="PERCENT", help="Most cached numbers, as a share of the source's, such as 25%."),
]
CacheBytes = Annotated[
    int | None, typer.Option(min=1, help="Most cache bytes per token, all layers, in the dtype that is written.")
]
MaxKL = Annotated[
    float | None,
    typer.Option(
        "--max-kl", min=0.0, metavar="NATS", help="Largest predicted KL per token; the narrowest cache that keeps it."
    ),
]
Measure = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH", help="Held-out text; the files are evaluated on it before OUT appears. Can be repeated."
    ),
]
MeasureTokens = Annotated[int, typer.Option(min=2, help="Tokens of held-out text, with --measure.")]
Refine = Annotated[
    RefineChoice | None,
    typer.Option(
        help="Fit each layer to the source's on calibration text after the closed form; e2e then fits all together."
    ),
]
RefineSteps = Annotated[int, typer.Option(min=1, help="Steps of each layer's fit, with --refine.")]
RefineBatch = Annotated[int, typer.Option(min=1, help="Windows per step, with --refine.")]
RefineContinued = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens that the source writes on from the calibration windows, to fit to as well, with --refine.",
    ),
]
RefineTokens = Annotated[int, typer.Option(min=1, help="Most tokens of the pass end to end, with --refine e2e.")]
Profile = Annotated[
    ProfileChoice, typer.Option(help="Form of the output; auto takes engine where it can carry the plan, else hf.")
]
RopePolicy = Annotated[
    PolicyChoice,
    typer.Option(help="Which rotary components stay rotary; optimal, 2-norm, greedy and rorope need calibration text."),
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
Recipe = Annotated[
    RecipeChoice | None,
    typer.Option(help="A method by name: sets rope policy, factorization, weighting, gamma and what belongs to them."),
]
FreqFold = Annotated[
    FreqFoldChoice | None,
    typer.Option(
        help="Neighbouring frequencies that rorope treats as one; auto chooses on the calibration text.",
        show_default="auto with --rope-policy rorope",
    ),
]
RopeStride = Annotated[
    float, typer.Option(help="Source pairs from one rotary slot to the next, optimal in engine: 0.5, 1 or 2.")
]
Balance = Annotated[
    BalanceChoice, typer.Option(help="Equal norms of keys and values before they are decomposed together.")
]
RankRule = Annotated[
    RankRuleChoice, typer.Option(help="How --factorization split shares the rank when no --key-rank is given.")
]
Centring = Annotated[
    CentringChoice,
    typer.Option(help="none judges inputs by raw second moments and adds no mean to the output, as papers do."),
]
Damping = Annotated[DampingChoice, typer.Option(help="none adds nothing to the covariance of the inputs.")]
LatentNorm = Annotated[
    NormChoice,
    typer.Option(help="How the stock norm on the latent is neutralised; auto takes constant for float16 only."),
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH[::weight=N]",
        help="Text file, JSONL, folder of them, pattern with *, datasets:NAME, or self for text that the source "
        "writes. Can be repeated; weights are shares of the tokens.",
    ),
]
CalibrationTokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens to measure on.",
        show_default=f"{CALIBRATION_TOKENS}; {REFINE_CALIBRATION_TOKENS} with --refine",
    ),
]
CalibrationWindow = Annotated[int, typer.Option(min=2, help="Tokens per window.")]
CalibrationLong = Annotated[
    int, typer.Option(min=0, help="Windows of 2,048 tokens besides, for what is attended to from far away.")
]
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
MEMORY_BUDGET = 2.0
MemoryBudget = Annotated[
    float,
    typer.Option(
        metavar="GIB",
        min=0.0,
        help="Hidden states of calibration text beyond this go to disk, and a model beyond it is not loaded whole to "
        "check it but layer by layer. Changes no result.",
    ),
]
