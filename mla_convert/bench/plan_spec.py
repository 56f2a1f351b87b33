"""The short form in which benches name a plan: `engine:40+152`, `hf:48+144:2-norm` or `hf:32+160:transmla`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ProfileName, RecipeName, RopePolicy
from mla_convert.convert.recipes import RECIPES
from mla_convert.errors import UsageFault

DEFAULT_POLICY: RopePolicy = "optimal"
_FORM = re.compile(r"(?P<profile>[a-z]+):(?P<rope>\d+)\+(?P<latent>\d+)(?::(?P<method>[a-z0-9-]+))?")
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
    """

    profile: ProfileName
    rope: int
    latent: int
    policy: RopePolicy = DEFAULT_POLICY
    recipe: RecipeName | None = None

    @classmethod
    def parse(cls, text: str) -> PlanSpec:
        """Read `profile:rope+latent[:policy or recipe]`.

        Raises:
            UsageFault: If it has another form, or names a profile, policy or recipe that there is not.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageFault(
                "not a plan",
                expected="profile:rope+latent[:policy or recipe], such as engine:40+152",
                found=text,
                where="--plan",
            )
        profile = _one_of(found["profile"], get_args(ProfileName), "profile")
        known = (*get_args(RopePolicy), *_RECIPES)
        method = _one_of(found["method"] or DEFAULT_POLICY, known, "rope policy or recipe")
        named = {"recipe": method} if method in _RECIPES else {"policy": method}
        return cls(profile, int(found["rope"]), int(found["latent"]), **named)  # type: ignore[arg-type]

    def __str__(self) -> str:
        name = f"{self.profile}:{self.rope}+{self.latent}"
        method = self.recipe or self.policy
        return name if method == DEFAULT_POLICY else f"{name}:{method}"

    @property
    def width(self) -> int:
        """Numbers cached per token and layer."""
        return self.rope + self.latent

    def options(self, calibration: str, tokens: int, seed: int) -> ConvertOptions:
        """The conversion that this plan stands for."""
        calibrated = self.recipe is None or RECIPES[self.recipe].calibrated
        return ConvertOptions(
            kv_lora_rank=self.latent,
            qk_rope_head_dim=self.rope,
            profile=self.profile,
            rope_policy=self.policy,
            recipe=self.recipe,
            calibration=(calibration,) if calibrated else (),
            calibration_tokens=tokens,
            seed=seed,
        )


def _one_of(value: str, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        raise UsageFault(f"no such {what}", expected=", ".join(known), found=value, where="--plan")
    return value
