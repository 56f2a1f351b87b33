"""The short form in which benches name a plan: `engine:40+152` or `hf:48+144:2-norm`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.plan import ProfileName, RopePolicy
from mla_convert.errors import UsageFault

DEFAULT_POLICY: RopePolicy = "optimal"
_FORM = re.compile(r"(?P<profile>[a-z]+):(?P<rope>\d+)\+(?P<latent>\d+)(?::(?P<policy>[a-z0-9-]+))?")


@dataclass(frozen=True)
class PlanSpec:
    """A plan by profile, widths and rope policy.

    Attributes:
        profile: Output profile.
        rope: `qk_rope_head_dim`.
        latent: `kv_lora_rank`.
        policy: Rope policy.
    """

    profile: ProfileName
    rope: int
    latent: int
    policy: RopePolicy = DEFAULT_POLICY

    @classmethod
    def parse(cls, text: str) -> PlanSpec:
        """Read `profile:rope+latent[:policy]`.

        Raises:
            UsageFault: If it has another form, or names a profile or policy that there is not.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageFault(
                "not a plan",
                expected="profile:rope+latent[:policy], such as engine:40+152",
                found=text,
                where="--plan",
            )
        profile = _one_of(found["profile"], get_args(ProfileName), "profile")
        policy = _one_of(found["policy"] or DEFAULT_POLICY, get_args(RopePolicy), "rope policy")
        return cls(profile, int(found["rope"]), int(found["latent"]), policy)  # type: ignore[arg-type]

    def __str__(self) -> str:
        name = f"{self.profile}:{self.rope}+{self.latent}"
        return name if self.policy == DEFAULT_POLICY else f"{name}:{self.policy}"

    @property
    def width(self) -> int:
        """Numbers cached per token and layer."""
        return self.rope + self.latent

    def options(self, calibration: str, tokens: int, seed: int) -> ConvertOptions:
        """The conversion that this plan stands for."""
        return ConvertOptions(
            kv_lora_rank=self.latent,
            qk_rope_head_dim=self.rope,
            profile=self.profile,
            rope_policy=self.policy,
            calibration=(calibration,),
            calibration_tokens=tokens,
            seed=seed,
        )


def _one_of(value: str, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        raise UsageFault(f"no such {what}", expected=", ".join(known), found=value, where="--plan")
    return value
