from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from mla_convert.convert.source_location import HUB_FILES, locate_source
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory

REVISION = "0123456789abcdef0123456789abcdef01234567"
OTHER_REVISION = "f" * 40

# A fresh process, once for all cases: huggingface_hub reads its environment when it is imported.
OPEN = """
import json, sys
from mla_convert.convert.checkpoint import open_source
from mla_convert.errors import MLAConvertError
found = {}
for case in sys.argv[1:]:
    given, _, revision = case.partition("@")
    try:
        location = open_source(given, revision or None).location
        found[case] = [location.kind, str(location.folder), location.revision]
    except MLAConvertError as error:
        found[case] = [error.kind, error.where, str(error)]
print(json.dumps(found))
"""
CASES = ("acme/pico", "acme/pico@v2", "acme/absent", "acme/pico@v3")
Opened = dict[str, list[str]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, pico: PicoFactory) -> Path:
    """A hub cache as huggingface_hub lays it out, with one model and two revisions."""
    home = tmp_path_factory.mktemp("hf")
    model = home / "hub" / "models--acme--pico"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    (model / "refs" / "v2").write_text(OTHER_REVISION)
    shutil.copytree(pico(), model / "snapshots" / REVISION)
    shutil.copytree(pico(kv_heads=2), model / "snapshots" / OTHER_REVISION)
    return home


@pytest.fixture(scope="module")
def opened(hub: Path) -> Opened:
    """What each of `CASES` comes to with that cache, offline."""
    environment = {**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *CASES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result: Opened = json.loads(done.stdout)
    return result


def test_a_hub_id_is_taken_from_the_local_cache(opened: Opened, hub: Path) -> None:
    snapshot = hub / "hub" / "models--acme--pico" / "snapshots" / REVISION

    assert opened["acme/pico"] == ["hub", str(snapshot), REVISION]


def test_a_revision_of_a_hub_id(opened: Opened) -> None:
    assert opened["acme/pico@v2"][2] == OTHER_REVISION


@pytest.mark.parametrize("case", ["acme/absent", "acme/pico@v3"])
def test_what_is_not_cached_is_a_fault_of_the_environment(opened: Opened, case: str) -> None:
    kind, where, message = opened[case]

    assert (kind, where) == ("environment", case.partition("@")[0])
    assert "offline" in message
    assert "local folder" in message


def test_a_folder(pico: PicoFactory) -> None:
    found = locate_source(str(pico()))

    assert (found.kind, found.folder, found.revision) == ("hf-folder", pico().resolve(), None)


def test_a_folder_is_preferred_to_a_hub_id(tmp_path: Path, pico: PicoFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(pico(), tmp_path / "acme" / "pico")
    monkeypatch.chdir(tmp_path)

    assert locate_source("acme/pico").folder == (tmp_path / "acme" / "pico").resolve()


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="not a Hugging Face checkpoint"):
        locate_source(str(tmp_path))


@pytest.mark.parametrize("given", ["/nowhere/at/all", "./absent/model", "one-word", "a/b/c", "~/absent", "../up/one"])
def test_what_is_nowhere_is_refused(given: str) -> None:
    with pytest.raises(InputRefused, match="no such source") as caught:
        locate_source(given)

    assert "Hub id" in str(caught.value.expected)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"something else")

    with pytest.raises(InputRefused, match="GGUF"):
        locate_source(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize("given", ["bad id/model", "acme/..", "acme/.hidden.", "-x/y"])
def test_an_impossible_hub_id_is_refused(given: str) -> None:
    with pytest.raises(InputRefused, match="Hub"):
        locate_source(given)


@pytest.mark.parametrize("name", ["LICENCE", "LICENCE.md", "USE_POLICY.md", "vocab.bpe", "tokenizer.model"])
def test_what_is_copied_is_fetched(name: str) -> None:
    assert any(fnmatch(name, pattern) for pattern in HUB_FILES)
