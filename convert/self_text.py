"""Calibration text that the source writes itself: for those who have none, and as breadth beside what they have.

The idea is that of data-free quantisation, LLM-QAT (arXiv 2305.17888, section 3.1): what a model samples resembles
what it was trained on. Half of the documents begin with nothing but the model's usual opening, half with a prompt.

The whole source is loaded, see `SourceWriter`, with the cache of `BATCH` documents.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mla_convert.cache_dir import cache_root, fill_once
from mla_convert.convert.calibration_text import Corpus, Document, make_corpus, read_corpus
from mla_convert.convert.chat_text import ChatTemplate, Message
from mla_convert.convert.checkpoint import SourceCheckpoint
from mla_convert.convert.plan import SELF_TEXT
from mla_convert.convert.self_prompts import PROMPTS
from mla_convert.convert.source_writer import SourceWriter
from mla_convert.errors import InputRefused
from mla_convert.manifests.digest import sha256_json
from mla_convert.manifests.models import SelfTextRecord

# The source's own distribution, less the tail that small models fall into nonsense from.
TEMPERATURE, TOP_P = 1.0, 0.95
BATCH = 16
# Documents that end early are made up for, up to this many times the documents that would be enough.
MOST_ATTEMPTS = 8
FILE, RECORD = "self.jsonl", "record.json"


@dataclass(frozen=True)
class SelfTextSettings:
    """What decides the text, beside the source.

    Attributes:
        tokens: Tokens wanted.
        length: Most tokens of one document, prompt included.
        seed: Of the draws and the order of the prompts.
    """

    tokens: int
    length: int
    seed: int


@dataclass(frozen=True)
class SelfText:
    """The text and how it came about."""

    corpus: Corpus
    record: SelfTextRecord


def write_self_text(
    source: SourceCheckpoint, source_digest: str, tokenizer: Any, settings: SelfTextSettings
) -> SelfText:
    """Let the source write text, or find what it wrote before.

    Args:
        source: The source.
        source_digest: Digest of its weights, configuration and tokenizer.
        tokenizer: The source's.
        settings: How much.

    Raises:
        InputRefused: If it ends every document before it begins.
    """
    chat = ChatTemplate(tokenizer)
    digest = sha256_json(
        {
            "source": source_digest,
            "settings": asdict(settings),
            "prompts": PROMPTS,
            "template": chat.sha256,
            "sampling": [TEMPERATURE, TOP_P, BATCH],
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
        }
    )
    folder = self_text_file(digest).parent
    if not (folder / RECORD).is_file():
        with fill_once(folder) as working:
            _Writer(source.location.folder, tokenizer, chat, settings).write(working, digest)
    record = SelfTextRecord.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
    written = read_corpus(str(folder / FILE)).documents
    documents = tuple(Document(item.name, item.text, spelled_out=True) for item in written)
    return SelfText(make_corpus(SELF_TEXT, "self", documents), record)


def self_text_file(digest: str) -> Path:
    """Where the text of that digest (see `SelfTextRecord`) is kept; it may have been deleted."""
    return cache_root() / "self-text" / digest.removeprefix("sha256:") / FILE


class _Writer:
    """One run of the source over batches of openings."""

    def __init__(self, folder: Path, tokenizer: Any, chat: ChatTemplate, settings: SelfTextSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._openings = _openings(tokenizer, chat, settings)
        self._source = SourceWriter(folder)

    def write(self, folder: Path, digest: str) -> None:
        """Fill `folder` with the documents and the record of them."""
        wanted, length = self._settings.tokens, self._settings.length
        documents: list[Document] = []
        total, used = 0, 0
        most = MOST_ATTEMPTS * math.ceil(wanted / length)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._settings.seed)
            while total < wanted and used < most:
                usual = total / used if total else length
                count = min(BATCH, most - used, math.ceil((wanted - total) / usual))
                rows = [self._openings[(used + number) % len(self._openings)] for number in range(count)]
                for number, ids in enumerate(self._continued(rows, f"writing text, {total:,} of {wanted:,} tokens")):
                    text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                    if text.strip():
                        documents.append(Document(f"{SELF_TEXT}:{used + number:04d}", text))
                        total += len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
                used += count
        if not documents:
            raise InputRefused("the source writes no text: it ends every document at once", where=SELF_TEXT)
        prompted = sum(len(self._openings[number % len(self._openings)]) > 1 for number in range(used))
        record = SelfTextRecord(
            digest=digest,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            seed=self._settings.seed,
            prompts=prompted,
            unprompted=used - prompted,
        )
        lines = [json.dumps({"id": item.name, "text": item.text}, ensure_ascii=False) + "\n" for item in documents]
        (folder / FILE).write_text("".join(lines), encoding="utf-8", newline="\n")
        (folder / RECORD).write_text(record.model_dump_json(), encoding="utf-8")

    def _continued(self, openings: list[list[int]], label: str) -> list[list[int]]:
        """Openings with what the source adds, up to and with its end token."""
        length = self._settings.length
        out = self._source.extend(
            openings, length, temperature=TEMPERATURE, top_p=TOP_P, may_end=True, label=label
        )  # (B, length)
        width = max(map(len, openings))
        return [row + self._ended(new) for row, new in zip(openings, out[:, width:].tolist(), strict=True)]

    def _ended(self, ids: list[int]) -> list[int]:
        stops = [position for position, token in enumerate(ids) if token in self._source.ends]
        return ids[: stops[0] + 1] if stops else ids


def _openings(tokenizer: Any, chat: ChatTemplate, settings: SelfTextSettings) -> list[list[int]]:
    """Token ids that documents begin with: the usual opening and a prompt in turn, prompts in a seeded order.

    A prompt of more than half the document's length is left out.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(PROMPTS), generator=generator).tolist()
    begin = _beginning(tokenizer)
    found = []
    for prompt in (PROMPTS[number] for number in order):
        if chat.text is None:
            ids = tokenizer(prompt, verbose=False)["input_ids"]
        else:
            text = chat.render([Message("user", prompt)], SELF_TEXT, answer=True)
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if 2 * len(ids) <= settings.length:
            found += [begin, ids]
    return found or [begin]


def _beginning(tokenizer: Any) -> list[int]:
    """What the model's texts begin with: what its tokenizer opens every text with, or the token between texts."""
    opening: list[int] = tokenizer("")["input_ids"]
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if not opening and token is not None:
            opening = [token]
    if not opening:
        raise InputRefused(
            "the source has no token to begin a text with",
            expected="a bos_token or eos_token beside its tokenizer",
            where=SELF_TEXT,
        )
    return opening[:1]
