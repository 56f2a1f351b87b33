"""The outcome of `mla-convert frontier`: plans, what was predicted and measured of them, and how well the two agree."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mla_convert.convert.predict import PREDICTOR
from mla_convert.eval.evaluate import Prepared
from mla_convert.eval.evaluation import Evaluation
from mla_convert.eval.rank_correlation import spearman
from mla_convert.eval.text import text_digest
from mla_convert.manifests.environment import Environment

FRONTIER_SCHEMA = "mla-convert/frontier/v1"


@dataclass(frozen=True)
class FrontierPoint:
    """One plan.

    Attributes:
        profile: Output profile.
        qk_rope_head_dim: Rotary width.
        kv_lora_rank: Latent width.
        recipe: Published method, None for our own plans.
        bytes_per_token: Cache bytes of all layers.
        dtype: In which they are counted.
        predicted_kl: Nats per token, None for recipes.
        best: Whether it is predicted to lose least of its width.
        measured: Of the written and reloaded files, None where not asked for.
    """

    profile: str
    qk_rope_head_dim: int
    kv_lora_rank: int
    recipe: str | None
    bytes_per_token: int
    dtype: str
    predicted_kl: float | None
    best: bool
    measured: Evaluation | None

    @property
    def width(self) -> int:
        """Numbers per token and layer."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    @property
    def name(self) -> str:
        """`profile:rope+latent`, and the recipe where it is one."""
        name = f"{self.profile}:{self.qk_rope_head_dim}+{self.kv_lora_rank}"
        return name if self.recipe is None else f"{name} {self.recipe}"

    def to_json(self) -> dict[str, object]:
        """The point; `measured` has figures and their intervals."""
        done = self.measured
        figures = None if done is None else {**asdict(done.figures), "intervals": _intervals(done)}
        fields = {name: value for name, value in vars(self).items() if name != "measured"}
        return {"name": self.name, "width": self.width, **fields, "measured": figures}


def _intervals(done: Evaluation) -> dict[str, object] | None:
    return None if done.intervals is None else asdict(done.intervals)


@dataclass(frozen=True)
class SourcePoint:
    """The source: what it caches and, where there is text, its perplexity."""

    width: int
    bytes_per_token: int
    dtype: str
    perplexity: float | None


@dataclass(frozen=True)
class TextUsed:
    """The held-out text and how it was cut."""

    names: tuple[str, ...]
    sha256: str
    tokens: int
    scored_tokens: int
    window: int
    stride: int
    seed: int

    @classmethod
    def of(cls, prepared: Prepared) -> TextUsed:
        """The text of a prepared evaluation."""
        windows, plan = prepared.windows, prepared.plan
        return cls(
            names=tuple(corpus.name for corpus in prepared.corpora),
            sha256=text_digest(prepared.corpora),
            tokens=windows.tokens,
            scored_tokens=windows.scored_tokens,
            window=plan.seq_len,
            stride=plan.stride,
            seed=plan.seed,
        )


@dataclass(frozen=True)
class RankAgreement:
    """Spearman's correlation of predicted with measured KL.

    Attributes:
        width: Plans of this width only; None for all of them.
        plans: How many were both predicted and measured.
        spearman: None where there is no order to compare.
    """

    width: int | None
    plans: int
    spearman: float | None


@dataclass(frozen=True)
class FrontierReport:
    """All points.

    Attributes:
        model: The source as given.
        source: Its own point.
        points: Plans, widest first, then recipes.
        text: Held-out text, None without.
        calibration: Calibration texts.
        calibration_tokens: Tokens that the statistics are of.
        environment: Versions, machine and command line.
    """

    model: str
    source: SourcePoint
    points: tuple[FrontierPoint, ...]
    text: TextUsed | None
    calibration: tuple[str, ...]
    calibration_tokens: int
    environment: Environment

    def rank_agreement(self) -> tuple[RankAgreement, ...]:
        """Over all plans, then within each width that has at least two."""
        judged = [point for point in self.points if point.predicted_kl is not None and point.measured is not None]
        widths = dict.fromkeys(point.width for point in judged)
        groups: list[tuple[int | None, list[FrontierPoint]]] = [(None, judged)]
        groups += [(width, [point for point in judged if point.width == width]) for width in widths]
        return tuple(_agreement(width, group) for width, group in groups if len(group) >= 2)

    def to_json(self) -> dict[str, object]:
        """The whole report."""
        return {
            "schema_version": FRONTIER_SCHEMA,
            "model": self.model,
            "predictor": PREDICTOR,
            "source": asdict(self.source),
            "points": [point.to_json() for point in self.points],
            "rank_agreement": [asdict(agreement) for agreement in self.rank_agreement()],
            "text": None if self.text is None else asdict(self.text),
            "calibration": {"texts": self.calibration, "tokens": self.calibration_tokens},
            "environment": self.environment.model_dump(mode="json"),
        }


def _agreement(width: int | None, points: list[FrontierPoint]) -> RankAgreement:
    pairs = [
        (point.predicted_kl, point.measured.figures.kl)
        for point in points
        if point.predicted_kl is not None and point.measured is not None
    ]
    predicted, measured = zip(*pairs, strict=True)
    return RankAgreement(width, len(pairs), spearman(predicted, measured))
