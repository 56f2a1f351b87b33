"""The options of `mla-convert eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Out = Annotated[Path | None, typer.Argument(metavar="OUT", help="Converted folder.", show_default=False)]
Source = Annotated[
    str | None, typer.Option(metavar="SOURCE", help="What it was converted from: folder, GGUF file or Hub id.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="Text file, JSONL, folder of them, or datasets:NAME. Can be repeated; in a suite each is a domain.",
    ),
]
Suite = Annotated[
    Literal["quick", "full"] | None, typer.Option(help="Run the whole suite, in minutes or in some twenty.")
]
Parts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Only this part of the suite: ladder, decomposition, quality, tasks, generation or systems. "
        "Can be repeated.",
    ),
]
Gates = Annotated[
    Path | None, typer.Option(metavar="FILE", help="YAML of bars that the suite must meet; see docs/evaluation.md.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse text that shares runs of 13 words with calibration text.")
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Say which differences of two suites' receipts are real, and do nothing else."),
]
MaxTokens = Annotated[
    int, typer.Option(min=2, help="Most tokens through each model; a seeded sample of windows beyond.")
]
SeqLen = Annotated[int, typer.Option(min=2, help="Tokens per window.")]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens between the starts of windows; each token is scored once.", show_default="--seq-len"
    ),
]
TextField = Annotated[str, typer.Option(help="Field of JSONL and dataset rows that holds the text.")]
AllowOverlap = Annotated[
    bool, typer.Option("--allow-overlap", help="Accept text that the conversion was calibrated on.")
]
