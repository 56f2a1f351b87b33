"""Conversations in data: the forms that are read, and what a tokenizer's template makes of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from mla_convert.convert.calibration_text import Document, read_corpus
from mla_convert.convert.chat_text import ChatTemplate, Message, chat_messages
from mla_convert.convert.tokenizer import load_tokenizer
from mla_convert.errors import InputRefused
from tests.conftest import PicoFactory
from tests.pico import CHAT_TEMPLATE

TURNS = (Message("user", "hi"), Message("assistant", "hello"))
RENDERED = "user: hi\nassistant: hello\n"
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            {"role": "assistant", "content": "hello"},
        ]
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    "roles": {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    "exchange": {"prompt": "hi", "response": "hello"},
}


@pytest.fixture(scope="module")
def chat(pico: PicoFactory) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(pico(chat_template=True)))


def write_jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_conversation(tmp_path: Path, chat: ChatTemplate, form: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {**FORMS[form], "id": "one"})

    assert chat_messages(FORMS[form], "here") == TURNS
    assert read_corpus(path, chat=chat).documents == (Document("one", RENDERED, spelled_out=True),)


def test_a_text_field_is_taken_before_a_conversation(tmp_path: Path, chat: ChatTemplate) -> None:
    rows = ({**form, "text": "plain"} for form in FORMS.values())
    path = write_jsonl(tmp_path / "a.jsonl", *rows)

    assert {(item.text, item.spelled_out) for item in read_corpus(path, chat=chat).documents} == {("plain", False)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "cannot be read"),
        ({"messages": "hi"}, "cannot be read"),
        ({"messages": [{"role": "user"}]}, "cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "cannot be read"),
        ({"conversations": [["human", "hi"]]}, "cannot be read"),
        ({"prompt": "hi"}, "without text"),
        ({"prompt": "hi", "response": None}, "without text"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(
    tmp_path: Path, chat: ChatTemplate, row: dict[str, Any], message: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", FORMS["messages"], row)

    with pytest.raises(InputRefused, match=message) as caught:
        read_corpus(path, chat=chat)
    assert caught.value.where == f"{path}, line 2"


def test_a_tokenizer_without_template_is_refused(tmp_path: Path, pico: PicoFactory) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", FORMS["messages"])
    without = ChatTemplate(load_tokenizer(pico()))

    with pytest.raises(InputRefused, match="without chat template") as caught:
        read_corpus(path, chat=without)
    assert caught.value.where == f"{path}, line 1"
    assert without.sha256 is None
    with pytest.raises(InputRefused, match="where plain text is wanted"):
        read_corpus(path)


def test_the_template_is_known_by_its_digest(chat: ChatTemplate) -> None:
    assert chat.sha256 == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()


def test_what_a_template_refuses_is_named(pico: PicoFactory) -> None:
    tokenizer = load_tokenizer(pico())
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(InputRefused, match="roles must alternate") as caught:
        ChatTemplate(tokenizer).render(TURNS, "line 3")
    assert caught.value.where == "line 3"


def test_a_template_that_prints_the_date_prints_the_same_every_day(pico: PicoFactory) -> None:
    tokenizer = load_tokenizer(pico())
    tokenizer.chat_template = (
        "{% if strftime_now is defined %}Today: {{ strftime_now('%d %B %Y') }}\n{% endif %}" + CHAT_TEMPLATE
    )

    assert ChatTemplate(tokenizer).render(TURNS, "here") == "Today: 26 Jul 2024\n" + RENDERED


def test_conversations_of_a_dataset(monkeypatch: pytest.MonkeyPatch, chat: ChatTemplate) -> None:
    rows = datasets.Dataset.from_dict({"messages": [FORMS["messages"]["messages"]], "source": ["x"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda _identifier, split: rows)  # noqa: ARG005

    assert read_corpus("datasets:acme/chat", chat=chat).documents == (Document("acme/chat:0", RENDERED, True),)
