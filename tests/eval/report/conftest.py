"""Pages, each written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mla_convert.eval.report.inputs import ReportInput
from mla_convert.eval.report.page import Report
from mla_convert.manifests.models import ConversionManifest
from tests.eval.report import inputs, receipts

LAYERS = 5
MakeManifest = Callable[[int], ConversionManifest]


@pytest.fixture(scope="session")
def make_manifest(tmp_path_factory: pytest.TempPathFactory) -> MakeManifest:
    """A manifest of so many layers."""
    made: dict[int, ConversionManifest] = {}

    def make(layers: int) -> ConversionManifest:
        if layers not in made:
            made[layers] = inputs.manifest(tmp_path_factory.mktemp("manifest"), layers)
        return made[layers]

    return make


@pytest.fixture(scope="session")
def full_input(make_manifest: MakeManifest) -> ReportInput:
    """Everything there is."""
    return inputs.given(make_manifest(LAYERS), receipts.full(layers=LAYERS), inputs.frontier())


@pytest.fixture(scope="session")
def full_page(full_input: ReportInput) -> str:
    """The page of everything."""
    return Report.of(full_input).html()


@pytest.fixture(scope="session")
def hostile_page(make_manifest: MakeManifest) -> str:
    """The page of everything, with markup, formulas and control characters in every foreign text."""
    made = receipts.full(layers=LAYERS, text=receipts.HOSTILE)
    environment = receipts.environment(("mla-convert", "eval", receipts.HOSTILE))
    manifest = make_manifest(LAYERS).model_copy(update={"warnings": (receipts.HOSTILE,)})
    made = made.model_copy(update={"environment": environment})
    return Report.of(inputs.given(manifest, made, inputs.frontier(receipts.HOSTILE))).html()


@pytest.fixture(scope="session")
def bare_page(make_manifest: MakeManifest) -> str:
    """The page of a folder that has not been evaluated."""
    return Report.of(inputs.given(make_manifest(LAYERS), None)).html()


@pytest.fixture(scope="session")
def lossless_page(make_manifest: MakeManifest) -> str:
    """One layer, errors of zero, no faults, no informative cell, speed withheld."""
    made = receipts.full(
        layers=1,
        ladder=receipts.ladder_section(1, zero=True),
        tasks=receipts.tasks_section(only="uninformative"),
        systems=receipts.systems_section(withheld="4 fallbacks were not observed"),
        gates=(),
    )
    return Report.of(inputs.given(make_manifest(1), made)).html()


@pytest.fixture(scope="session")
def full_file(full_page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of everything as a file."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(full_page, encoding="utf-8")
    return path
