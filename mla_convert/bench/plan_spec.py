"""The short form in which benches name a plan.

`engine:40+152`, `hf:48+144:2-norm`, `hf:32+160:transmla`, `engine:40+152:block` or `engine:40+152:e2e:self`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import get_args

from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import SELF_TEXT, ProfileName, RecipeName, RefineKind, RopePolicy
from mla_convert.convert.recipes import RECIPES
from mla_convert.errors import UsageFault

DEFAULT_POLICY: RopePolicy = "optimal"
_FORM = re.compile(r"(?P<profile>[a-z]+):(?P<rope>\d+)\+(?P<latent>\d+)(?P<rest>(?::[a-z0-9-]+)*)")
# `optimal` is both, and means the same as either.
_RECIPES = tuple(name for name in get_args(RecipeName) if name not in get_args(RopePolicy))


@dataclass(frozen=True)
class PlanSpec:
    """A plan by profile, widths and rope policy or recipe.

    Attributes:
        profile: Output profile.
        rope: `qk_rope_head_dim`.
        latent: `kv_lora_rank`.
        policy: Rope policy; left alone where a recipe is named.
        recipe: Published method, or None.
        refine: Fitting after the closed form, or None.
        own_text: Whether half of the calibration is text that the source writes.
    """

    profile: ProfileName
    rope: int
    latent: int
    policy: RopePolicy = DEFAULT_POLICY
    recipe: RecipeName | None = None
    refine: RefineKind | None = None
    own_text: bool = False

    @classmethod
    def parse(cls, text: str) -> PlanSpec:
        """Read `profile:rope+latent[:policy or recipe][:block or e2e][:self]`.

        Raises:
            UsageFault: If it has another form, or names what there is not.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageFault(
                "not a plan",
                expected="profile:rope+latent[:policy or recipe][:block or e2e][:self], such as engine:40+152",
                found=text,
                where="--plan",
            )
        profile = _one_of(found["profile"], get_args(ProfileName), "profile")
        words = [word for word in found["rest"].split(":") if word]
        own_text = words[-1:] == [SELF_TEXT]
        words = words[:-1] if own_text else words
        refine = words.pop() if words and words[-1] in get_args(RefineKind) else None
        if len(words) > 1:
            raise UsageFault("more than one rope policy or recipe", found=text, where="--plan")
        known = (*get_args(RopePolicy), *_RECIPES)
        method = _one_of(words[0] if words else DEFAULT_POLICY, known, "rope policy or recipe")
        named = {"recipe": method} if method in _RECIPES else {"policy": method}
        if method in _RECIPES and not RECIPES[method].calibrated and (own_text or refine):
            raise UsageFault(
                f"recipe {method} uses no text, so nothing of it can be refined", found=text, where="--plan"
            )
        made = cls(profile, int(found["rope"]), int(found["latent"]), **named)  # type: ignore[arg-type]
        return replace(made, refine=refine, own_text=own_text)  # type: ignore[arg-type]

    def __str__(self) -> str:
        method = self.recipe or self.policy
        words = [
            f"{self.profile}:{self.rope}+{self.latent}",
            method if method != DEFAULT_POLICY else None,
            self.refine,
            SELF_TEXT if self.own_text else None,
        ]
        return ":".join(word for word in words if word)

    @property
    def width(self) -> int:
        """Numbers cached per token and layer."""
        return self.rope + self.latent

    def options(self, calibration: str, tokens: int, seed: int) -> ConvertOptions:
        """The conversion that this plan stands for."""
        calibrated = self.recipe is None or RECIPES[self.recipe].calibrated
        texts = (calibration, SELF_TEXT) if self.own_text else (calibration,)
        return ConvertOptions(
            kv_lora_rank=self.latent,
            qk_rope_head_dim=self.rope,
            profile=self.profile,
            rope_policy=self.policy,
            recipe=self.recipe,
            calibration=texts if calibrated else (),
            calibration_tokens=tokens,
            refine=self.refine,
            seed=seed,
        )


def _one_of(value: str, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        raise UsageFault(f"no such {what}", expected=", ".join(known), found=value, where="--plan")
    return value
