"""Technical documentation with code that needs no download: the language reference of the running Python.

`help("topics")` prints it. The text differs a little from one Python version to the next, so figures measured on it
belong to a version; the name of the splits holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mla_convert.assets.splits import TextSplits, write_document_splits
from mla_convert.convert.calibration_text import Document
from mla_convert.errors import EnvironmentFault

KIND = "pydoc"
# Shorter ones are headings, lists of names and the like, which may stand in both files.
SHARED_PARAGRAPH_CHARACTERS = 40


def read_topics() -> dict[str, str]:
    """Text of each topic of the running interpreter, as pydoc keeps it.

    Raises:
        EnvironmentFault: If the interpreter comes without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise EnvironmentFault(
            "this Python comes without the texts of help()",
            expected="the module pydoc_data.topics",
            found=str(error),
            remedy="Install the full standard library, or give a text of your own.",
        ) from error
    return dict(topics)


def distinct_documents(topics: Mapping[str, str]) -> Iterator[Document]:
    """Topics in the order of their names, each without the paragraphs that stood in an earlier one.

    Topics are excerpts of one manual and overlap: a quarter of the paragraphs would stand in both splits.
    """
    seen: set[str] = set()
    for name in sorted(topics):
        kept = []
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) >= SHARED_PARAGRAPH_CHARACTERS:
                if key in seen:
                    continue
                seen.add(key)
            kept.append(paragraph)
        text = "\n\n".join(kept).strip("\n")
        if len(text) >= SHARED_PARAGRAPH_CHARACTERS:
            yield Document(name, text + "\n")


def write_topic_splits(folder: Path) -> TextSplits:
    """Write both splits below `folder`, or find them there.

    Raises:
        EnvironmentFault: If the interpreter comes without the texts.
    """
    return write_document_splits(folder, KIND, tuple(distinct_documents(read_topics())))
