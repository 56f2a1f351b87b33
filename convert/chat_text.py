"""Conversations in rows of data, and as the text that a tokenizer's chat template makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_convert.errors import InputRefused

# Speakers of ShareGPT files; other names are roles already.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
# Templates that print today's date would give another text every day.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, which may have none until a conversation asks for it.

    Attributes:
        tokenizer: The source's.
    """

    tokenizer: Any

    @property
    def text(self) -> str | None:
        """The template that is applied, None where there is none."""
        try:
            template: str = self.tokenizer.get_chat_template()
        except ValueError:
            return None
        return template

    @property
    def sha256(self) -> str | None:
        """Digest of the template's text."""
        return None if self.text is None else hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def render(self, messages: Sequence[Message], where: str, *, answer: bool = False) -> str:
        """A conversation as the model was trained to see it.

        Args:
            messages: Its turns.
            where: Where it stands, for errors.
            answer: Whether to end where the assistant's next turn begins.

        Raises:
            InputRefused: If there is no template, or it does not take this conversation.
        """
        from jinja2 import TemplateError

        template = self.text
        if template is None:
            raise InputRefused(
                "a conversation, and a tokenizer without chat template",
                expected="a chat_template beside the source's tokenizer",
                where=where,
                remedy="Give plain text in a text field, or add the model's chat_template.jinja to its folder.",
            )
        if "strftime_now" in template:
            template = FIXED_DATE + template
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns, chat_template=template, tokenize=False, add_generation_prompt=answer
            )
        except (TemplateError, ValueError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputRefused(f"the chat template refuses this conversation: {reason}", where=where) from error
        return text


def chat_messages(row: Mapping[str, Any], where: str) -> tuple[Message, ...] | None:
    """The conversation that a row holds, None where it holds none.

    `messages` is a list of `{role, content}`, `conversations` of `{from, value}` (ShareGPT) or of the former;
    `prompt` and `response` are one exchange.

    Raises:
        InputRefused: For a conversation that is none of these.
    """
    for field in ("messages", "conversations"):
        if row.get(field) is not None:
            turns = row[field]
            if not isinstance(turns, list) or not turns:
                raise _no_conversation(f"a list of turns in {field!r}", turns, where)
            return tuple(_message(turn, where) for turn in turns)
    prompt, response = row.get("prompt"), row.get("response")
    if isinstance(prompt, str) and isinstance(response, str):
        return Message("user", prompt), Message("assistant", response)
    return None


def _message(turn: Any, where: str) -> Message:
    if isinstance(turn, Mapping):
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(content, list):
            content = _joined(content)
        if isinstance(role, str) and isinstance(content, str):
            return Message(ROLES.get(role, role), content)
    raise _no_conversation("turns with role and content, or from and value, of text", turn, where)


def _joined(parts: list[Any]) -> str | None:
    """Text of a content that is a list of parts; None where a part is something else."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]


def _no_conversation(expected: str, found: object, where: str) -> InputRefused:
    shown = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
    return InputRefused("a conversation that cannot be read", expected=expected, found=shown, where=where)
