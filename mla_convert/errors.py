"""Every error a user can meet, each with the exit code it ends the process with.

Exit codes: 0 done, 2 usage, 3 a gate or check failed, 4 input refused, 5 environment
(memory, disk, device), 70 internal fault.
"""

from __future__ import annotations

from typing import ClassVar


class MLAConvertError(Exception):
    """Base of all errors raised on purpose; anything else is an internal fault (exit code 70)."""

    exit_code: ClassVar[int] = 70
    kind: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message = message
        self.expected = expected
        self.found = found
        self.where = where
        self.remedy = remedy
        super().__init__(self.render())

    def render(self) -> str:
        """One line: what is wrong, where, expected against found, and what to do."""
        parts = [self.message if self.where is None else f"{self.where}: {self.message}"]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        line = "; ".join(parts)
        return line if self.remedy is None else f"{line}. {self.remedy}"

    def to_json(self) -> dict[str, str | None]:
        """The fields of the error as one flat JSON object."""
        return {
            "kind": self.kind,
            "message": self.message,
            "expected": self.expected,
            "found": self.found,
            "where": self.where,
            "remedy": self.remedy,
        }


class UsageFault(MLAConvertError):
    """Options that contradict each other or lie outside their range."""

    exit_code = 2
    kind = "usage"


class CheckFailed(MLAConvertError):
    """A gate was run and did not hold."""

    exit_code = 3
    kind = "check-failed"


class InputRefused(MLAConvertError):
    """A source, text or folder that cannot be worked on as it is."""

    exit_code = 4
    kind = "input-refused"


class EnvironmentFault(MLAConvertError):
    """Memory, disk, device, network or a missing optional package."""

    exit_code = 5
    kind = "environment"
