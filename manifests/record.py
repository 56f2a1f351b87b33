"""The base of every manifest model, and the string types they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints


class Record(BaseModel):
    """A frozen record: unknown fields, coerced types, NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def check_relative_path(path: str) -> str:
    """Return `path` if it is a normal POSIX path below its folder, on every platform.

    Raises:
        ValueError: The path is absolute, has a `.`, `..` or empty part, a backslash, a colon or a NUL.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(mark in path for mark in ("\\", ":", "\0")):
        raise ValueError(f"not a relative POSIX path inside the folder: {path!r}")
    return path


RelativePath = Annotated[str, AfterValidator(check_relative_path)]
"""A file of a folder: relative, `/` between parts, never outside the folder."""

Sha256Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of one file's bytes: 64 lower-case hexadecimal digits."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
"""A digest of a canonical JSON text or of one file, with the name of its hash in front."""
