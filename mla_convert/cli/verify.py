"""`mla-convert verify`: a converted folder against its manifest, and its source too if it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from mla_convert.cli.common import Debug, JsonFlag, run_command
from mla_convert.errors import CheckFailed, InputRefused

if TYPE_CHECKING:
    from rich.console import Console

    from mla_convert.manifests.problems import VerifyReport

HELP = (
    "Check a converted folder against its manifest: hash every file again, derive every shape, frequency and the "
    "identity again, and name all that is missing, extra, changed or invalid. Ends with exit code 3 where anything "
    "is, also where there is no manifest."
)
EXAMPLES = """
mla-convert verify OUT
mla-convert verify OUT --source SOURCE
mla-convert verify OUT --source model.gguf --json
"""


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Converted folder.")],
    source: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="What it was converted from, to be hashed again: folder, GGUF file or Hub id."
        ),
    ] = None,
    json_output: JsonFlag = False,
    debug: Debug = False,
) -> None:
    """Verify `out`."""

    def body() -> VerifyResult:
        from mla_convert.manifests.verify import verify_folder

        folder = out.expanduser()
        if not folder.is_dir():
            raise InputRefused(
                "no such converted folder",
                expected="a folder",
                found="a file" if folder.exists() else "nothing at that path",
                where=str(out),
            )
        original = None if source is None else _source_path(source, folder)
        return VerifyResult(out, original, verify_folder(folder, original))

    run_command(json_output, body, debug=debug)


def _source_path(source: str, folder: Path) -> Path:
    """The file or folder to hash: a path as it is, a Hub id as the snapshot that the manifest names."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    # Not needed for a path, and too slow to import without need.
    from mla_convert.convert.source_location import locate_source

    return locate_source(source, _recorded_revision(folder)).folder


def _recorded_revision(folder: Path) -> str | None:
    from mla_convert.manifests.models import MANIFEST_NAME, load

    return load(folder).source.revision if (folder / MANIFEST_NAME).is_file() else None


@dataclass(frozen=True)
class VerifyResult:
    """A report and how it is printed."""

    out: Path
    source: Path | None
    report: VerifyReport

    @property
    def exit_code(self) -> int:
        """3 where there is any problem."""
        return 0 if self.report.ok else CheckFailed.exit_code

    def to_json(self) -> Mapping[str, object]:
        """Verdict and problems."""
        return {"folder": self.out, "source": self.source, **self.report.model_dump(mode="json")}

    def render(self, console: Console) -> None:
        """The problems, one a line, by kind; then the verdict."""
        from rich.text import Text

        from mla_convert.manifests.problems import ProblemKind

        for kind in get_args(ProblemKind):
            for problem in self.report.problems:
                if problem.kind == kind:
                    console.print(Text(problem.render()), soft_wrap=True)
        counts = Counter(problem.kind for problem in self.report.problems)
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        scope = " and its source" if self.source is not None else ""
        verdict = f"ok: {self.out}{scope}" if self.report.ok else f"not ok: {self.out}: {found}"
        console.print(Text(verdict, style="green" if self.report.ok else "bold red"), soft_wrap=True)
