"""Published conversion methods by name: each sets the options that make up the method, and nothing else.

Widths, profile, FreqFold, latent norm, dtype and calibration text stay the user's. Where a paper and its released code
differ, the paper is followed, and the row says where. `tests/convert/transcriptions/` holds the papers' equations,
written without this code, which the recipes are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import RecipeName
from mla_convert.errors import UsageFault


@dataclass(frozen=True)
class Recipe:
    """A method's name, its paper, and the option values that it stands for.

    Attributes:
        name: As in `--recipe`.
        paper: Paper and sections.
        differs: Where the released code does something else than the paper, and what a stock checkpoint changes.
        settings: Option name to value.
        calibrated: Whether the method measures anything on text.
    """

    name: RecipeName
    paper: str
    differs: str
    settings: Mapping[str, Any]
    calibrated: bool = True


_WEIGHT_SVD = {"factorization": "joint", "weighting": "weight", "gamma": "one", "balance": "none"}
# Raw second moments and nothing added to them.
_RAW = {"centring": "none", "damping": "none", "gamma": "one"}

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe(
                name="transmla",
                paper="TransMLA (arXiv 2502.07864), sections 4.2 (RoRoPE, eq. 19; FreqFold, appendix C) and 4.3 "
                "(balance, eq. 20; joint PCA of activations, appendix D)",
                differs="The released code picks FreqFold by perplexity on the evaluation text, we on calibration "
                "text; its balance is a ratio of channel norms, the paper's and ours of token norms",
                settings={
                    "rope_policy": "rorope",
                    "factorization": "joint",
                    "weighting": "activation",
                    "balance": "transmla",
                    **_RAW,
                },
            ),
            Recipe(
                name="mha2mla",
                paper="MHA2MLA (arXiv 2502.14837), sections 3.1 (S_2-norm) and 3.2 (joint SVD of the weights)",
                differs="A stock checkpoint has one frequency list, so layers and heads vote for it; the paper "
                "chooses pairs for each head of each layer",
                settings={"rope_policy": "2-norm", **_WEIGHT_SVD},
            ),
            Recipe(
                name="care",
                paper="CARE (arXiv 2603.17946): SVD whitened by the raw input covariance, keys and "
                "values apart, ranks by the rank-plus-one priority",
                differs="A stock checkpoint has one width, so keys and values compete for it within each layer and "
                "layers do not; rotary keys as in the released code, which is TransMLA's (RoRoPE); the released code "
                "whitens in float32 with a tenth of the mean variance added, the paper's shrinkage is not needed "
                "because nothing is inverted here",
                settings={
                    "rope_policy": "rorope",
                    "factorization": "split",
                    "weighting": "activation",
                    "rank_rule": "care",
                    "balance": "none",
                    **_RAW,
                },
            ),
            Recipe(
                name="x-ecomla",
                paper="X-EcoMLA (arXiv 2503.11132), SVD initialisation: rotary key from the mean over key heads of the "
                "last d_R columns, joint SVD of the whole keys and values, of which the first d_N columns are kept",
                differs="The paper does not say how columns are ordered; we order them by pair, so rotary rows keep "
                "partner and frequency. The released code takes the last rows of half-split heads, pairs "
                "neighbours among them and gives them new frequencies, which only training can repair. Ranks are "
                "the same in every layer, the query keeps its full rank",
                settings={"rope_policy": "mean", **_WEIGHT_SVD},
                calibrated=False,
            ),
            Recipe(
                name="elitekv",
                paper="EliteKV (arXiv 2503.01586): RoPElite, the greedy search, and the joint low-rank SVD",
                differs="A stock checkpoint has one frequency list, so layers and heads vote for it; scores of a "
                "sample of calibration windows are compared; the query heads of one key head are counted together",
                settings={"rope_policy": "greedy", **_WEIGHT_SVD},
            ),
            Recipe(
                name="optimal",
                paper="this project",
                differs="",
                settings={
                    "rope_policy": "optimal",
                    "factorization": "joint",
                    "weighting": "output",
                    "gamma": "measured",
                    "balance": "none",
                },
            ),
        )
    }
)


def check_recipe(name: str, given: Mapping[str, Any]) -> None:
    """Refuse options that say something else than the recipe.

    Args:
        name: Of the recipe.
        given: Options that were given, by name.

    Raises:
        UsageFault: Naming all of them, and what the recipe sets.
    """
    settings = RECIPES[name].settings
    wrong = {option: value for option, value in given.items() if option in settings and value != settings[option]}
    if wrong:
        raise UsageFault(
            f"options contradict --recipe {name}",
            expected=", ".join(f"{_option(option)} {settings[option]}" for option in wrong),
            found=", ".join(f"{_option(option)} {value}" for option, value in wrong.items()),
            remedy="Drop them, or drop --recipe and give every option.",
        )


def apply_recipe(options: ConvertOptions) -> ConvertOptions:
    """Options with those of their recipe filled in; as they are without one.

    Raises:
        UsageFault: If options that differ from their defaults contradict the recipe.
    """
    if options.recipe is None:
        return options
    defaults = {field.name: field.default for field in fields(ConvertOptions)}
    changed = {name: value for name, value in vars(options).items() if value != defaults[name]}
    check_recipe(options.recipe, changed)
    return replace(options, **RECIPES[options.recipe].settings)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
