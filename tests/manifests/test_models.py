from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mla_convert.errors import InputRefused
from mla_convert.manifests import models
from mla_convert.manifests.layers import RopeSlot
from tests.manifests.example import build

SCHEMA_FILE = Path(models.__file__).parent / "schemas" / "conversion-manifest-v1.json"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> models.ConversionManifest:
    return build(tmp_path_factory.mktemp("models"))[2]


def test_a_manifest_round_trips_through_its_text(manifest: models.ConversionManifest, tmp_path: Path) -> None:
    path = manifest.write(tmp_path)
    assert path == tmp_path / "mla_manifest.json"
    assert models.load(path) == manifest
    assert models.load(tmp_path) == manifest
    assert [entry.name for entry in tmp_path.iterdir()] == ["mla_manifest.json"]
    assert models.load(path).to_json_text() == manifest.to_json_text()


def test_the_text_is_sorted_and_indented(manifest: models.ConversionManifest) -> None:
    text = manifest.to_json_text()
    assert text.endswith("}\n")
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_a_manifest_is_frozen(manifest: models.ConversionManifest) -> None:
    with pytest.raises(ValueError, match="frozen"):
        manifest.canonical_mla_id = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("conversion-manifest/v1", "conversion-manifest/v2", "conversion-manifest/v2"),
        ('"adaptation": null', '"adaptation": {}', "adaptation: Input should be null"),
        ('"adaptation": null', '"adaptation": null, "note": ""', "note: Extra inputs"),
        ('"adaptation": null', '"adaptation": null, "adaptation": null', "written twice"),
        ('"seed": 0', '"seed": "0"', "seed: Input should be a valid integer"),
        ('"gamma": "measured"', '"gamma": "guessed"', "method.gamma"),
        ('"path": "config.json"', '"path": "../config.json"', "relative POSIX path"),
        ('"kv_head": null', '"kv_head": 0', "either a component over the heads or one kv_head"),
        ("{", "", "Extra data"),
    ],
)
def test_load_names_every_fault(
    manifest: models.ConversionManifest, tmp_path: Path, old: str, new: str, named: str
) -> None:
    path = tmp_path / "m.json"
    text = manifest.to_json_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputRefused) as caught:
        models.load(path)
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"schema_version": 1}'])
def test_load_refuses_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(InputRefused, match="not a valid conversion manifest"):
        models.load(path)


def test_load_refuses_bytes_that_are_no_text_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputRefused, match="not a valid conversion manifest"):
        models.load(tmp_path / "m.json")
    with pytest.raises(InputRefused, match="no readable manifest"):
        models.load(tmp_path)


def test_a_slot_has_one_origin() -> None:
    for component, head in ((None, None), (0, 0)):
        with pytest.raises(ValueError, match="either a component"):
            RopeSlot(slot=0, pair=0, frequency=1.0, component=component, kv_head=head, mixes=(0,))
    with pytest.raises(ValueError, match="one of those that it combines"):
        RopeSlot(slot=0, pair=0, frequency=1.0, component=0, kv_head=None, mixes=(1, 2))


def test_the_committed_schema_is_up_to_date() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == models.schema_text(), (
        "the models changed: write a new schema version, or refresh this one with "
        "`python -c \"from mla_convert.manifests.models import schema_text; print(schema_text(), end='')\""
        f" > {SCHEMA_FILE}`"
    )


def test_the_schema_forbids_unknown_fields_everywhere() -> None:
    schema = json.loads(models.schema_text())
    records = [schema, *schema["$defs"].values()]
    assert all(record["additionalProperties"] is False for record in records)
    assert "canonical_mla_id" in schema["required"]


def test_the_package_needs_no_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, mla_convert.manifests as m\n"
        "[importlib.import_module(f'{m.__name__}.{i.name}') for i in pkgutil.iter_modules(m.__path__)]\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
