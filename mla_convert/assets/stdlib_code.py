"""Program code that needs no download: modules of the running Python's standard library.

The text differs from one Python version to the next, so figures measured on it belong to a version; the name of the
splits holds it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from mla_convert.assets.splits import TextSplits, write_document_splits
from mla_convert.convert.calibration_text import Document
from mla_convert.errors import EnvironmentFault

KIND = "stdlib-code"
# Written by many hands on many subjects, of 5,000 characters and more, and single files from Python 3.11 to 3.14.
MODULES = (
    "argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "difflib", "dis", "doctest", "enum", "filecmp", "fractions", "ftplib", "functools", "getopt", "gettext", "gzip",
    "heapq", "html/parser", "http/client", "http/cookies", "imaplib", "inspect", "ipaddress", "json/decoder",
    "json/encoder", "locale", "logging/__init__", "mailbox", "netrc", "optparse", "pdb", "pickle", "pickletools",
    "plistlib", "poplib", "pprint", "queue", "random", "selectors", "shelve", "shlex", "shutil", "smtplib",
    "socketserver", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit",
    "trace", "traceback", "typing", "unittest/case", "unittest/mock", "urllib/parse", "urllib/request",
    "uuid", "wave", "weakref", "webbrowser", "xml/dom/minidom", "xml/etree/ElementTree", "xml/sax/saxutils", "zipapp",
)  # fmt: skip


def read_modules(library: Path) -> tuple[Document, ...]:
    """The listed modules' source texts.

    Args:
        library: Folder of the standard library.

    Raises:
        EnvironmentFault: If one is not there as a readable source file.
    """
    found = []
    for module in MODULES:
        path = library / f"{module}.py"
        try:
            found.append(Document(f"{module}.py", path.read_text(encoding="utf-8")))
        except OSError as error:
            raise EnvironmentFault(
                "this Python comes without the sources of its standard library",
                expected="a file of Python 3.11 to 3.14",
                found=error.strerror,
                where=str(path),
                remedy="Install the full standard library, or give a text of your own.",
            ) from error
    return tuple(found)


def write_code_splits(folder: Path) -> TextSplits:
    """Write both splits below `folder`, or find them there.

    Raises:
        EnvironmentFault: If the interpreter comes without sources.
    """
    return write_document_splits(folder, KIND, read_modules(Path(sysconfig.get_paths()["stdlib"])))
