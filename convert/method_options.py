"""Options of single methods: refused where they would change nothing."""

from __future__ import annotations

from typing import Literal

from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import Weighting
from mla_convert.convert.rorope import legal_folds
from mla_convert.convert.weights import AttentionShape
from mla_convert.errors import UsageFault

STRIDES = (0.5, 1.0, 2.0)


def check_stride(options: ConvertOptions) -> None:
    """Refuse a stride that there is not, or that the policy does not use.

    Raises:
        UsageFault: With what there is.
    """
    if options.rope_stride not in STRIDES:
        raise UsageFault("--rope-stride is out of range", expected="0.5, 1 or 2", found=str(options.rope_stride))
    if options.rope_stride != 1 and (options.rope_policy != "optimal" or options.lossless):
        raise UsageFault("--rope-stride is for --rope-policy optimal in the engine profile")


def check_method(options: ConvertOptions, weighting: Weighting) -> None:
    """Refuse options that the rest of the plan leaves nothing to do.

    Args:
        options: With those of a recipe filled in.
        weighting: Resolved.

    Raises:
        UsageFault: Naming the option and what it needs.
    """
    if options.freqfold is not None and options.rope_policy != "rorope":
        raise UsageFault("--freqfold is for --rope-policy rorope")
    if options.rank_rule != "spectra" and (options.factorization != "split" or options.key_rank is not None):
        raise UsageFault("--rank-rule is for --factorization split without --key-rank")
    if options.balance != "none":
        if weighting == "output":
            raise UsageFault(
                "--balance has no effect with --weighting output, which weighs keys and values by what they cost",
                remedy="Use --weighting activation or weight, or drop it.",
            )
        if options.factorization == "split":
            raise UsageFault("--balance is for --factorization joint, where keys and values share a rank")
        if not options.calibration:
            raise UsageFault("--balance needs calibration text", remedy="Give --calibration PATH.")
    for name in ("centring", "damping"):
        if getattr(options, name) != "auto" and weighting == "weight":
            raise UsageFault(f"--{name} has no effect with --weighting weight, which looks at no input")


def fold_of(shape: AttentionShape, options: ConvertOptions, slots: int) -> Literal["auto"] | int | None:
    """FreqFold of a plan, None for policies without one.

    Raises:
        UsageFault: If the fold does not fit the pairs and slots.
    """
    if options.rope_policy != "rorope" or options.lossless:
        return None
    legal = legal_folds(shape.pairs, slots)
    if options.freqfold in (None, "auto"):
        return "auto"
    fold = int(options.freqfold)
    if fold not in legal:
        raise UsageFault(
            f"--freqfold does not fit {slots} slots of {shape.pairs} pairs",
            expected=f"auto or one of {', '.join(map(str, legal))}",
            found=str(fold),
        )
    return fold
