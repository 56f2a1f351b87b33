"""MediaWiki markup to plain prose: small, ordered passes, no template expansion.

A handful of templates that carry running text (quotations, foreign words, converted units) keep it; every
other template, table, footnote, formula and image is dropped whole. Lists and headings become plain lines.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

_Replacement = Callable[[re.Match[str]], str]

_DROPPED_ELEMENTS = "ref|math|gallery|source|syntaxhighlight|timeline|score|imagemap|table|references"
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_NOWIKI = re.compile(r"<nowiki>(.*?)</nowiki>", re.DOTALL | re.IGNORECASE)
_EMPTY_ELEMENT = re.compile(rf"<(?:{_DROPPED_ELEMENTS})\b[^<>]*/\s*>", re.IGNORECASE)
_ELEMENT = re.compile(rf"<({_DROPPED_ELEMENTS})\b[^<>]*>.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
_BREAK = re.compile(r"<(?:br|hr)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_INNERMOST_MARKUP = re.compile(
    r"\{\{(?:(?!\{\{|\}\}|\[\[|\]\]).)*\}\}|\[\[(?:(?!\{\{|\}\}|\[\[|\]\]).)*\]\]", re.DOTALL
)
_INNERMOST_TEMPLATE = re.compile(r"\{\{(?:(?!\{\{|\}\}).)*\}\}", re.DOTALL)
_INNERMOST_TABLE = re.compile(r"^[ :*]*\{\|(?:(?!^[ :*]*\{\||^\s*\|\}).)*^\s*\|\}", re.DOTALL | re.MULTILINE)
_INNERMOST_LINK = re.compile(r"\[\[(?:(?!\[\[|\]\]).)*\]\]", re.DOTALL)
_EXTERNAL_LINK = re.compile(r"\[(?:(?:https?:|ftp:)?//|mailto:)[^\s\[\]]+(?:[ \t]+([^\[\]]*))?\]")
_HEADING = re.compile(r"^(={1,6})\s*(.*?)\s*\1\s*$")
_LIST_MARKER = re.compile(r"^[*#:;]+\s*")
_MAGIC_WORD = re.compile(r"__[A-Z]{3,}__")
_LEFTOVER_LINE = re.compile(r"^\s*(?:\||!|\{\||-{4,}|\}\})")
_EMPTY_BRACKETS = re.compile(r"[(\[][\s,;:]*[)\]]")
_BRACKET_GAP = re.compile(r"\(\s*[,;:]*\s+")
_SPACE_BEFORE_PUNCTUATION = re.compile(r"[ \t]+([,.;:!?)](?:\s|$))")
_INTERLANGUAGE = re.compile(r"^[a-z]{2,3}(?:-[a-z-]+)?$")

_DROPPED_NAMESPACES = frozenset({"file", "image", "category", "media", "template", "special"})
_DROPPED_SECTIONS = frozenset(
    {
        "bibliography", "citations", "external links", "footnotes", "further reading", "gallery", "notes",
        "notes and references", "references", "references and notes", "see also", "sources",
    }
)  # fmt: skip
# Templates whose running text is kept, with the position of the argument that carries it.
_TEXT_ARGUMENT = {
    "angbr": 1, "blockquote": 1, "cquote": 1, "em": 1, "ipa": 1, "lang": 2, "linktext": 1, "nihongo": 1,
    "nobold": 1, "nobr": 1, "nowrap": 1, "quotation": 1, "quote": 1, "rtl-lang": 2, "sc": 1, "small": 1,
    "smallcaps": 1, "smaller": 1, "sub": 1, "sup": 1, "tooltip": 1, "transl": 2, "visible anchor": 1, "vr": 1,
}  # fmt: skip
_SYMBOLS = {
    "!": "|", "'": "'", "'s": "'s", "=": "=", "mdash": "—", "mdashb": "—", "nbsp": " ", "ndash": "–",
    "snd": " – ", "spaced ndash": " – ",
}  # fmt: skip
_RANGE_WORDS = frozenset({"to", "and", "or", "by", "x", "-", "–"})
_NAMED_ARGUMENT = re.compile(r"^\s*([\w -]+?)\s*=(?!=)")


def clean_wikitext(source: str) -> str:
    """Turn the source of one article into prose.

    Args:
        source: MediaWiki markup as it stands in a dump, XML entities already resolved.

    Returns:
        Paragraphs, list items and headings, one a line, paragraphs apart by one empty line; empty where
        the article holds nothing but markup.
    """
    text = _COMMENT.sub("", source)
    text = _NOWIKI.sub(lambda match: _as_entities(match.group(1)), text)
    text = _EMPTY_ELEMENT.sub("", text)
    text = _ELEMENT.sub("", text)
    # Before the internal links, so that `caption [http://x label]]]` closes the right bracket, and after them
    # for labels that hold one.
    text = _EXTERNAL_LINK.sub(lambda match: match.group(1) or "", text)
    text = _substitute_innermost(_INNERMOST_MARKUP, _markup_text, text)
    text = _substitute_innermost(_INNERMOST_TABLE, lambda _: "", text)
    # What an unbalanced bracket of the other kind still hides.
    text = _substitute_innermost(_INNERMOST_TEMPLATE, _markup_text, text)
    text = _substitute_innermost(_INNERMOST_LINK, _markup_text, text)
    text = _EXTERNAL_LINK.sub(lambda match: match.group(1) or "", text)
    text = _BREAK.sub(" ", text)
    text = _MAGIC_WORD.sub("", _TAG.sub("", text))
    lines = [_without_emphasis(line) for line in text.split("\n")]
    return _tidy(html.unescape("\n".join(_prose_lines(lines))))


def _as_entities(text: str) -> str:
    """Hide markup characters from the later passes; the last pass resolves entities again."""
    return "".join(c if c.isalnum() or c.isspace() or c in "&;" else f"&#{ord(c)};" for c in text)


def _substitute_innermost(pattern: re.Pattern[str], replace: _Replacement, text: str) -> str:
    """Apply `pattern`, which matches only what holds no match of itself, until nothing is left to replace."""
    count = 1
    while count:
        text, count = pattern.subn(replace, text)
    return text


def _markup_text(match: re.Match[str]) -> str:
    """Prose of one template or internal link that holds neither."""
    inner = match.group(0)[2:-2]
    return _template_text(inner) if match.group(0).startswith("{") else _link_text(inner)


def _template_text(inner: str) -> str:
    """What a template leaves in the prose: nothing, unless it is one that carries running text."""
    name, *arguments = [part.strip() for part in inner.split("|")]
    name = name.lower().replace("_", " ")
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    matches = [(a, _NAMED_ARGUMENT.match(a)) for a in arguments]
    named = {match.group(1): a[match.end() :].strip() for a, match in matches if match}
    plain = [a for a, match in matches if not match]
    if name in ("convert", "cvt"):
        return " ".join(plain[:4] if len(plain) > 3 and plain[1] in _RANGE_WORDS else plain[:2])
    if name == "chem":
        return "".join(plain)
    if name == "as of":
        return " ".join(["as of" if "lc" in named else "As of", *plain])
    position = 1 if name.startswith("lang-") else _TEXT_ARGUMENT.get(name)
    if position is None:
        return ""
    fallback = plain[position - 1] if len(plain) >= position else ""
    return named.get(str(position), named.get("text", fallback))


def _link_text(inner: str) -> str:
    """The label of an internal link; nothing for files, categories and links to other languages."""
    target, separator, label = inner.partition("|")
    namespace = target.partition(":")[0].strip().lower() if ":" in target else ""
    if namespace in _DROPPED_NAMESPACES:
        return ""
    if separator:
        return label.rpartition("|")[2] or target
    return "" if _INTERLANGUAGE.match(namespace) else target.lstrip(":")


def _without_emphasis(line: str) -> str:
    """Remove the quote runs of bold and italics, keeping the apostrophe of `''Title'''s`."""
    runs = [len(run) for run in re.findall(r"'{2,}", line)]
    italics = sum(run in (2, 5) for run in runs)
    bolds = sum(run in (3, 5) for run in runs)
    if italics % 2 and bolds % 2:
        line = re.sub(r"(?<=\w)'''(?!')", "'", line, count=1)
    line = re.sub(r"'{4}(?!')", "'", line)
    return re.sub(r"'{5}|'{2,3}", "", line)


def _prose_lines(lines: list[str]) -> list[str]:
    """Strip list markers and heading signs; drop sections of references and headings without a body."""
    kept: list[str] = []
    pending: list[tuple[int, str]] = []  # headings that wait for a first line of text below them
    dropped_level = 0  # level of the reference-like section being skipped, 0 outside one
    for line in lines:
        heading = _HEADING.match(line)
        if heading is not None:
            level, title = len(heading.group(1)), heading.group(2)
            if dropped_level and level > dropped_level:
                continue
            dropped_level = level if title.strip().lower() in _DROPPED_SECTIONS else 0
            pending = [(above, name) for above, name in pending if above < level]
            if not dropped_level and title:
                pending.append((level, title))
            continue
        if dropped_level or _LEFTOVER_LINE.match(line):
            continue
        body = _LIST_MARKER.sub("", line).strip()
        if body and pending:
            kept.extend(part for _, title in pending for part in ("", title, ""))
            pending = []
        kept.append(body)
    return kept


def _tidy(text: str) -> str:
    """Close the gaps that dropped markup left: empty brackets, doubled spaces, stray empty lines."""
    text = text.replace("\u00a0", " ").replace("\u200e", "")
    text = _EMPTY_BRACKETS.sub("", text)
    text = _BRACKET_GAP.sub("(", text)
    text = re.sub(r"[ \t]{2,}", " ", text)
    text = _SPACE_BEFORE_PUNCTUATION.sub(r"\1", text)
    lines = [line.strip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
