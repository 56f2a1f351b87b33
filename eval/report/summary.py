"""The top of the page: what was converted from what, the verdict in one sentence, and the key figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from mla_convert.eval.report.inputs import ReportInput
from mla_convert.eval.report.words import bytes_text, interval, number, percent, short
from mla_convert.manifests.evaluation.figure import Figure
from mla_convert.manifests.evaluation.quality import QualitySection
from mla_convert.manifests.evaluation.receipt import EvaluationReceipt
from mla_convert.manifests.evaluation.systems import CacheFigures, SpeedRow, SystemsSection
from mla_convert.manifests.models import ConversionManifest

NOT_RUN = "not run"


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures at the top.

    Attributes:
        name: What it is.
        text: As shown.
        value: Unrounded, None for a text.
        detail: Its interval, or what it is made of.
    """

    name: str
    text: str
    value: float | None
    detail: str


def source_name(manifest: ConversionManifest) -> str:
    """The source's last path part, or its Hub id."""
    location = manifest.source.location
    return location if manifest.source.kind == "hub" else PurePosixPath(location.replace("\\", "/")).name or location


def facts(given: ReportInput) -> tuple[tuple[str, str], ...]:
    """What was converted from what, as names and values."""
    manifest = given.manifest
    architecture, method = manifest.identity.architecture, manifest.method
    source, rope, rank = manifest.source, architecture.qk_rope_head_dim, architecture.kv_lora_rank
    widths = f"{rope} rotary + {rank} latent = {rope + rank}"
    pairs = [
        ("source", f"{source_name(manifest)} ({source.family}, {source.kind})"),
        ("profile", architecture.profile),
        ("widths", f"{widths} numbers per token and layer, {architecture.num_hidden_layers} layers"),
        ("cache", _cache_words(given)),
        ("method", f"rope {method.rope_policy}, factorization {method.factorization}, weighting {method.weighting}"),
        ("manifest", f"sha256:{given.manifest_sha256}"),
    ]
    if method.recipe is not None:
        pairs.append(("recipe", method.recipe))
    return tuple(pairs)


def verdict(given: ReportInput) -> str:
    """One sentence: faults or none, the worst layer and the worst domain."""
    receipt = given.receipt
    if receipt is None:
        return "Nothing has been evaluated yet: what follows is what the conversion itself recorded."
    ladder, quality = receipt.ladder, receipt.quality
    parts = []
    if ladder is None:
        parts.append("The ladder was not run, so nothing is said about faults")
    elif ladder.findings:
        first = ladder.findings[0]
        where = "" if first.layer is None else f" of layer {first.layer}"
        count = len(ladder.findings)
        parts.append(f"{count} {'fault was' if count == 1 else 'faults were'} found, the first in {first.stage}{where}")
    else:
        parts.append("No faults were found")
    if ladder is not None:
        worst = next(layer for layer in ladder.layers if layer.index == ladder.worst_layer)
        parts.append(f"the worst layer is {worst.index} (relative output error {number(worst.output_error)})")
    if quality is not None:
        domain = quality.worst_domain
        parts.append(f"the worst domain is {short(domain.name, 60)} (KL {number(domain.kl.value)} nats per token)")
    failed = sum(not gate.passed for gate in receipt.gates)
    if receipt.gates:
        parts.append("every gate held" if not failed else f"{failed} of {len(receipt.gates)} gates failed")
    return f"{'; '.join(parts)}."


def failing(receipt: EvaluationReceipt | None) -> bool:
    """Whether the evaluation found a fault or a gate did not hold."""
    if receipt is None:
        return False
    faults = receipt.ladder is not None and bool(receipt.ladder.findings)
    return faults or any(not gate.passed for gate in receipt.gates)


def key_figures(given: ReportInput) -> tuple[KeyFigure, ...]:
    """Quality, cache and speed; what was not run says so."""
    receipt = given.receipt
    quality = None if receipt is None else receipt.quality
    systems = None if receipt is None else receipt.systems
    return (*_quality(quality, given.manifest), _cache(systems, given.manifest), *_speed(systems))


def _quality(quality: QualitySection | None, manifest: ConversionManifest) -> Iterator[KeyFigure]:
    if quality is not None:
        overall = quality.overall
        yield _figure("perplexity ratio", overall.ratio)
        yield _figure("KL, nats per token", overall.kl)
        yield _share("same first token", overall.top1)
        yield _share("in the first five", overall.top5)
    elif (measured := manifest.measured) is not None:
        detail = f"measured at conversion, {measured.scored_tokens:,} tokens"
        yield KeyFigure("perplexity ratio", number(measured.ratio), measured.ratio, detail)
        yield KeyFigure("KL, nats per token", number(measured.kl), measured.kl, detail)
        yield KeyFigure("same first token", percent(measured.top1_agreement), measured.top1_agreement, detail)
    else:
        yield KeyFigure("quality", NOT_RUN, None, "no held-out text was evaluated")


def _figure(name: str, figure: Figure) -> KeyFigure:
    return KeyFigure(name, number(figure.value), figure.value, interval(figure))


def _share(name: str, figure: Figure) -> KeyFigure:
    ends = "no interval"
    if figure.low is not None and figure.high is not None:
        ends = f"{percent(figure.low)} to {percent(figure.high)}"
    return KeyFigure(name, percent(figure.value), figure.value, ends)


def cache_pair(systems: SystemsSection | None) -> tuple[CacheFigures, CacheFigures] | None:
    """Source and converted at the largest number of tokens that both were measured at, None without."""
    if systems is None:
        return None
    by_place = {(figures.subject, figures.tokens): figures for figures in systems.cache}
    shared = [tokens for subject, tokens in by_place if subject == "source" and ("target", tokens) in by_place]
    return (by_place["source", max(shared)], by_place["target", max(shared)]) if shared else None


def _cache(systems: SystemsSection | None, manifest: ConversionManifest) -> KeyFigure:
    pair = cache_pair(systems)
    if pair is None:
        planned = float(_planned_bytes(manifest))
        return KeyFigure("cache bytes per token", number(round(planned)), planned, "by formula; not measured")
    source, target = (figures.payload_bytes_per_token for figures in pair)
    detail = f"source {number(source)}: {percent(1 - target / source)} saved, {pair[1].dtype}"
    return KeyFigure("cache bytes per token", number(target), target, detail)


def _planned_bytes(manifest: ConversionManifest) -> int:
    cache = manifest.identity.cache
    return cache.bytes_per_token_per_layer * cache.layers


def _cache_words(given: ReportInput) -> str:
    receipt = given.receipt
    pair = cache_pair(None if receipt is None else receipt.systems)
    if pair is None:
        planned = _planned_bytes(given.manifest)
        return f"{bytes_text(planned)} per token by formula ({given.manifest.identity.cache.dtype}); not measured"
    source, target = (figures.payload_bytes_per_token for figures in pair)
    return (
        f"{bytes_text(source - target)} per token saved: {bytes_text(target)} instead of {bytes_text(source)} "
        f"({percent(1 - target / source)} less, {pair[1].dtype})"
    )


def _speed(systems: SystemsSection | None) -> Iterator[KeyFigure]:
    if systems is None:
        yield KeyFigure("speed", NOT_RUN, None, "the systems part was not run")
    elif systems.withheld is not None:
        yield KeyFigure("speed", "withheld", None, systems.withheld)
    elif (pair := _longest_pair(systems.rows)) is None:
        yield KeyFigure("speed", NOT_RUN, None, "no length was measured for both models")
    else:
        source, target = pair
        ratio = (target.tokens_per_s or 0.0) / (source.tokens_per_s or 1.0)
        detail = f"{number(target.tokens_per_s)} tokens/s at {target.prompt_tokens:,} × {target.batch}"
        yield KeyFigure("speed, times the source's", number(ratio), ratio, detail)


def _longest_pair(rows: Sequence[SpeedRow]) -> tuple[SpeedRow, SpeedRow] | None:
    """Source and converted at the longest prompt, smallest batch, that has a figure for both."""
    places: dict[tuple[int, int], dict[str, SpeedRow]] = {}
    for entry in rows:
        if entry.tokens_per_s:
            places.setdefault((entry.prompt_tokens, -entry.batch), {})[entry.subject] = entry
    full = {place: found for place, found in places.items() if len(found) == len(("source", "target"))}
    return (full[max(full)]["source"], full[max(full)]["target"]) if full else None
