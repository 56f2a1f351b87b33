"""What `mla-convert frontier --json` printed, as far as the report shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mla_convert.errors import InputRefused
from mla_convert.manifests.models import faults


class _Part(BaseModel):
    # The file has more than is shown here.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class MeasuredPoint(_Part):
    """A plan that was written, loaded again and evaluated."""

    kl: float
    target_perplexity: float = Field(gt=0)
    ratio: float = Field(gt=0)
    top1_agreement: float = Field(ge=0, le=1)


class FrontierPoint(_Part):
    """One plan; `kl` in nats per token."""

    name: str
    width: int = Field(gt=0)
    bytes_per_token: int = Field(gt=0)
    recipe: str | None
    predicted_kl: float | None
    best: bool
    measured: MeasuredPoint | None


class FrontierSource(_Part):
    """What the source caches, and its perplexity where there was text."""

    width: int = Field(gt=0)
    bytes_per_token: int = Field(gt=0)
    dtype: str
    perplexity: float | None


class FrontierFile(_Part):
    """All plans."""

    schema_version: Literal["mla-convert/frontier/v1"]
    model: str
    source: FrontierSource
    points: tuple[FrontierPoint, ...] = Field(min_length=1)


def read_frontier(path: Path) -> FrontierFile:
    """Read the output of `mla-convert frontier --json`.

    Raises:
        InputRefused: There is no such file, or it is something else.
    """
    try:
        return FrontierFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputRefused("no readable frontier", where=str(path), found=str(error)) from error
    except ValidationError as error:
        raise InputRefused(
            "not a frontier",
            where=str(path),
            expected="what mla-convert frontier --json prints",
            found=faults(error)[0],
        ) from error
