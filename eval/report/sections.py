"""The sections of the page in their order, each with what it shows or the reason why it shows nothing."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from mla_convert.eval.report.chart import Chart
from mla_convert.eval.report.inputs import ReportInput
from mla_convert.eval.report.layer_charts import conversion_error_chart, ladder_chart, rope_chart, spectra_chart
from mla_convert.eval.report.quality_charts import domain_chart, drift_chart, position_chart
from mla_convert.eval.report.system_charts import (
    cache_chart,
    decomposition_chart,
    frontier_chart,
    speed_chart,
    speed_table,
)
from mla_convert.eval.report.table import Table, row, table
from mla_convert.eval.report.task_charts import needle_chart, task_table
from mla_convert.eval.report.words import percent
from mla_convert.manifests.environment import Environment
from mla_convert.manifests.evaluation.tasks import GenerationSample

PROGRAM = "mla-convert"
_OWN_NAMES = frozenset({PROGRAM, f"{PROGRAM}.exe", "main.py", "__main__.py"})


@dataclass(frozen=True)
class Document:
    """A text in a folded box: JSON, or a command."""

    title: str
    text: str
    folded: bool = True


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        key: Its id.
        heading: As shown.
        words: Paragraphs.
        charts: Each with its table folded beneath.
        tables: Shown open.
        samples: Generated texts.
        documents: Texts in boxes.
        missing: Why there is nothing to show, None where there is something.
    """

    key: str
    heading: str
    words: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    samples: tuple[GenerationSample, ...] = ()
    documents: tuple[Document, ...] = ()
    missing: str | None = None


def sections(given: ReportInput) -> tuple[Section, ...]:
    """All sections; each is there whether or not its part was run."""
    makers: tuple[Callable[[ReportInput], Section], ...] = (
        _conversion,
        _faults,
        _layers,
        _spectra,
        _rope,
        _quality,
        _tasks,
        _generation,
        _drift,
        _decomposition,
        _systems,
        _frontier,
        _gates,
        _evidence,
    )
    return tuple(make(given) for make in makers)


def _not_run(given: ReportInput, part: str) -> str:
    if given.receipt is None:
        return f"The folder has not been evaluated: {part} has not been run."
    return f"This evaluation did not ask for it: {part} has not been run."


def _conversion(given: ReportInput) -> Section:
    manifest = given.manifest
    check, prediction, measured = manifest.reload_check, manifest.prediction, manifest.measured
    rows = [
        row([f"reload check, {check.kind}", check.relative_error, "passed" if check.passed else "failed"]),
        row(["tolerance of that check", check.tolerance, check.dtype]),
    ]
    if prediction is not None:
        rows.append(row(["predicted KL, nats per token", prediction.predicted_kl, prediction.predictor]))
    if measured is not None:
        rows.append(row(["measured KL, nats per token", measured.kl, f"{measured.scored_tokens:,} tokens"]))
        rows.append(row(["measured perplexity ratio", measured.ratio, ", ".join(measured.text)]))
    if manifest.calibration is not None:
        names = ", ".join(text.name for text in manifest.calibration.texts)
        rows.append(row(["calibration tokens", manifest.calibration.tokens, names]))
    if manifest.refinement is not None and manifest.refinement.end_to_end is not None:
        fit = manifest.refinement.end_to_end
        rows.append(row(["held-out KL after refinement", fit.after, f"before: {fit.before:.4g}"]))
    made = table("What the conversion itself recorded", ["what", "value", "note"], rows)
    warnings = tuple(f"Warning: {warning}" for warning in manifest.warnings)
    return Section("conversion", "The conversion", words=warnings, tables=(made,))


def _faults(given: ReportInput) -> Section:
    ladder = None if given.receipt is None else given.receipt.ladder
    if ladder is None:
        return Section("faults", "Faults", missing=_not_run(given, "the ladder, which looks for faults,"))
    if not ladder.findings:
        return Section("faults", "Faults", words=("None: what the conversion changed, it changed by approximation.",))
    rows = [
        row(
            [
                finding.stage,
                "all" if finding.layer is None else str(finding.layer),
                finding.what,
                finding.measured,
                finding.allowed,
            ],
            bad=True,
        )
        for finding in ladder.findings
    ]
    made = table("What was found", ["stage", "layer", "what", "measured", "allowed"], rows)
    return Section("faults", "Faults", tables=(made,))


def _layers(given: ReportInput) -> Section:
    heading = "Layers"
    ladder = None if given.receipt is None else given.receipt.ladder
    if ladder is None:
        words = (_not_run(given, "the ladder"),)
        return Section("layers", heading, words=words, charts=(conversion_error_chart(given.manifest.layers),))
    charts = (ladder_chart(ladder),)
    cache = [
        row(
            [
                str(rows.layer),
                rows.tokens,
                rows.width,
                rows.expected_width,
                rows.dtype,
                rows.latent_error,
                rows.rope_error,
                rows.explanation or "",
            ],
            bad=rows.explanation is not None or rows.width != rows.expected_width,
        )
        for rows in ladder.cache_rows
    ]
    columns = ["layer", "tokens", "width", "expected", "dtype", "latent error", "rope error", "explanation"]
    tables = (table("Rows of the live cache", columns, cache),) if cache else ()
    return Section("layers", heading, charts=charts, tables=tables)


def _spectra(given: ReportInput) -> Section:
    chart = spectra_chart(given.manifest)
    if chart is None:
        return Section("spectra-section", "Singular values", missing="The manifest holds no singular values.")
    return Section("spectra-section", "Singular values", charts=(chart,))


def _rope(given: ReportInput) -> Section:
    chart = rope_chart(given.manifest)
    if chart is None:
        return Section("rope-section", "Rotary slots", missing="The manifest holds no rotary slots.")
    return Section("rope-section", "Rotary slots", charts=(chart,))


def _quality(given: ReportInput) -> Section:
    quality = None if given.receipt is None else given.receipt.quality
    if quality is None:
        return Section("quality", "Quality", missing=_not_run(given, "the quality part"))
    charts = [domain_chart(quality)]
    if quality.buckets:
        charts.insert(0, position_chart(quality))
    resampling = quality.resampling
    drawn = f"{resampling.resamples:,} resamples of whole windows, seed {resampling.seed}"
    words = (
        f"Windows of {quality.seq_len:,} tokens, stride {quality.stride:,}, BOS {quality.bos_policy}, {quality.dtype}.",
        f"Intervals hold {percent(resampling.confidence)} of {drawn}.",
    )
    return Section("quality", "Quality", words=words, charts=tuple(charts))


def _tasks(given: ReportInput) -> Section:
    heading = "Tasks"
    tasks = None if given.receipt is None else given.receipt.tasks
    if tasks is None:
        return Section("tasks", heading, missing=_not_run(given, "the tasks part"))
    chart = needle_chart(tasks)
    others = task_table(tasks, needle=chart is None)
    silent = sum(cell.verdict == "uninformative" for cell in tasks.cells)
    words = (
        f"{tasks.rule} Seed {tasks.seed}.",
        f"{silent} of {len(tasks.cells)} cells are uninformative: hatched in charts, grey in tables, no pass.",
        *(f"Left out: {item.task} at {item.length:,} tokens, {item.reason}." for item in tasks.left_out),
    )
    return Section(
        "tasks",
        heading,
        words=words,
        charts=() if chart is None else (chart,),
        tables=() if others is None else (others,),
    )


def _generation(given: ReportInput) -> Section:
    part = None if given.receipt is None else given.receipt.generation
    if part is None:
        return Section("generation", "Generation", missing=_not_run(given, "the generation part"))
    rows = [
        row(["median tokens until the first difference", part.median_identical_prefix]),
        row(["repetition, source", part.source_repetition]),
        row(["repetition, converted", part.target_repetition]),
        row(["tokens asked for", part.new_tokens]),
    ]
    made = table("Stability of greedy generation", ["what", "value"], rows)
    return Section("generation", "Generation", tables=(made,), samples=part.samples)


def _drift(given: ReportInput) -> Section:
    ladder = None if given.receipt is None else given.receipt.ladder
    if ladder is None or not ladder.drift.kl:
        return Section("drift-section", "Repeated decoding", missing=_not_run(given, "repeated decoding"))
    return Section("drift-section", "Repeated decoding", charts=(drift_chart(ladder.drift),))


def _decomposition(given: ReportInput) -> Section:
    heading = "Error decomposition"
    part = None if given.receipt is None else given.receipt.decomposition
    if part is None or not part.parts:
        return Section("decomposition-section", heading, missing=_not_run(given, "the decomposition"))
    return Section("decomposition-section", heading, charts=(decomposition_chart(part),))


def _systems(given: ReportInput) -> Section:
    systems = None if given.receipt is None else given.receipt.systems
    if systems is None:
        return Section("systems", "Cache and speed", missing=_not_run(given, "the systems part"))
    ran, objective = systems.dispatch, systems.objective
    fell_back = f"{ran.fallbacks:,} fell back, {ran.unobserved_fallbacks:,} of them unobserved"
    limits = "; ".join(
        f"{limit.prompt_tokens:,} tokens: {limit.ttft_s:.4g} s to the first, {limit.tpot_s:.4g} s for each further"
        for limit in objective.limits
    )
    words = [
        f"{systems.device}, threads: {systems.threads}, {systems.dtype}.",
        f"Asked for {ran.requested}, ran {ran.ran}: {ran.calls:,} calls, {fell_back}.",
        f"Goodput counts requests within the objective: {objective.rule}" + (f" ({limits})" if limits else ""),
        *(f"Not used: {reason}" for reason in ran.rejected),
    ]
    if systems.withheld is not None:
        words.append(f"Speed is withheld: {systems.withheld}")
    speed = speed_chart(systems)
    charts = [cache_chart(systems.cache)] if systems.cache else []
    tables: tuple[Table, ...] = ()
    if speed is not None:
        charts.append(speed)
    elif systems.rows:
        tables = (speed_table("Runs whose speed is withheld", systems.rows),)
    return Section("systems", "Cache and speed", words=tuple(words), charts=tuple(charts), tables=tables)


def _frontier(given: ReportInput) -> Section:
    if given.frontier is None:
        return Section(
            "frontier-section", "Frontier", missing="No frontier was given: it has not been run for this report."
        )
    return Section("frontier-section", "Frontier", charts=(frontier_chart(given.frontier),))


def _gates(given: ReportInput) -> Section:
    if given.receipt is None:
        return Section("gates", "Gates", missing=_not_run(given, "a gates file"))
    if not given.receipt.gates:
        return Section("gates", "Gates", missing="No gates were set.")
    rows = [
        row(
            [
                gate.figure,
                gate.at_least,
                gate.at_most,
                gate.measured,
                "held" if gate.passed else "failed" if gate.measured is not None else "failed: no such figure",
            ],
            bad=not gate.passed,
        )
        for gate in given.receipt.gates
    ]
    made = table("Bars and what was measured", ["figure", "at least", "at most", "measured", "result"], rows)
    return Section("gates", "Gates", tables=(made,))


def _evidence(given: ReportInput) -> Section:
    documents = [Document("Command of the conversion", command_text(given.manifest.environment), folded=False)]
    tables = [_environment_table("Environment of the conversion", given.manifest.environment)]
    if given.receipt_file is not None:
        receipt = given.receipt_file.receipt
        documents.append(
            Document("Command that repeats the evaluation", command_text(receipt.environment), folded=False)
        )
        tables.append(_environment_table("Environment of the evaluation", receipt.environment))
        tables += _conditions(given)
        name = f"{given.receipt_file.path.name}, sha256:{given.receipt_file.sha256}"
        documents.append(Document(f"Receipt: {name}", receipt.to_json_text()))
    documents.append(Document(f"Manifest, sha256:{given.manifest_sha256}", given.manifest.to_json_text()))
    return Section(
        "evidence", "Manifest, receipt and how to repeat it", tables=tuple(tables), documents=tuple(documents)
    )


def _conditions(given: ReportInput) -> list[Table]:
    receipt = given.receipt
    if receipt is None:
        return []
    texts = [
        row([text.name, text.documents, text.characters, text.tokens, text.sha256]) for text in receipt.conditions.texts
    ]
    made = [table("Texts", ["text", "documents", "characters", "tokens", "sha256"], texts)]
    if receipt.overlap:
        overlap = [row([found.document, found.by, found.share], bad=True) for found in receipt.overlap]
        made.append(table("Text that calibration or training has seen", ["document", "by", "share"], overlap))
    times = [row([time.part, time.seconds, "yes" if time.reused else "no"]) for time in receipt.times]
    made.append(table("Time of each part", ["part", "seconds", "found from an interrupted run"], times))
    return made


def _environment_table(caption: str, environment: Environment) -> Table:
    rows = [
        row(["Python", f"{environment.implementation} {environment.python}"]),
        row(["platform", f"{environment.platform}, {environment.machine}"]),
        row(["CPUs", environment.cpu_count]),
        row(["memory, bytes", environment.memory_bytes]),
        row(["started", environment.started]),
        row(["finished", environment.finished or "–"]),
        *(row([name, version]) for name, version in sorted(environment.packages.items())),
    ]
    return table(caption, ["what", "value"], rows)


def command_text(environment: Environment) -> str:
    """The recorded command as it is typed; the program's own file is called by its name."""
    program, *arguments = environment.command or (PROGRAM,)
    name = PROGRAM if PurePath(program).name in _OWN_NAMES else program
    return shlex.join([name, *arguments])
