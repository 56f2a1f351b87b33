"""Which backend answers, and what the receipt says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from mla_convert.decode.abi import DecodeCall, DecodeOutput, LaunchFigures, check_call
from mla_convert.decode.dispatch import Dispatcher
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.rows import RowFormat
from mla_convert.errors import EnvironmentFault, InputRefused, UsageFault

FORMAT = RowFormat.plain(4, 2, "float32")


@dataclass(frozen=True)
class Fake:
    """Answers with its own number."""

    name: str
    answer: float
    automatic: bool = True
    lacks: str | None = None
    most_heads: int = 100

    def absent(self, device: torch.device) -> str | None:
        return self.lacks

    def unfit(self, call: DecodeCall) -> str | None:
        heads = call.q.shape[2]
        return None if heads <= self.most_heads else f"at most {self.most_heads} heads, the call has {heads}"

    def run(self, call: DecodeCall) -> DecodeOutput:
        shape = call.q.shape[:3]
        return DecodeOutput(torch.full((*shape, call.format.latent_width), self.answer), torch.zeros(shape))

    def launch(self, call: DecodeCall) -> LaunchFigures:
        return LaunchFigures(tile=self.name, splits=int(call.q.shape[0]))


FAST = Fake("fast", 1.0, most_heads=8)
MISSING = Fake("missing", 2.0, lacks="not installed")
PLAIN = Fake("plain", 3.0)
SLOW = Fake("slow", 4.0, automatic=False)
ALL = (MISSING, FAST, PLAIN, SLOW)


def call_of(heads: int = 4, batch: int = 1) -> DecodeCall:
    return DecodeCall(
        q=torch.zeros(batch, 1, heads, 6),
        pool=torch.zeros(2, 4, 6),
        format=FORMAT,
        block_table=torch.zeros(batch, 1, dtype=torch.int32),
        seq_lens=torch.ones(batch, dtype=torch.int32),
        scale=1.0,
    )


def test_auto_takes_the_first_that_fits_and_names_those_it_passed_over() -> None:
    book = ReceiptBook()
    dispatcher = Dispatcher(ALL, "auto", book)
    assert float(dispatcher.run(call_of()).out[0, 0, 0, 0]) == 1.0
    (receipt,) = book.receipts
    assert (receipt.ran, receipt.fallback, receipt.calls) == ("fast", False, 1)
    assert [(entry.backend, entry.reason, entry.absent) for entry in receipt.rejected] == [
        ("missing", "not installed", True)
    ]
    assert receipt.launch.tile == "fast"
    assert book.fallbacks == 0


def test_a_call_outside_the_limits_of_the_best_is_counted_as_a_fallback() -> None:
    book = ReceiptBook()
    dispatcher = Dispatcher(ALL, "auto", book)
    for heads in (4, 9, 9, 4, 9):
        dispatcher.run(call_of(heads))
    assert {receipt.ran: receipt.calls for receipt in book.receipts} == {"fast": 2, "plain": 3}
    assert (book.calls, book.fallbacks) == (5, 3)
    written = book.to_json()
    assert written["fallbacks"] == 3
    assert isinstance(written["versions"], dict)
    assert written["versions"]["torch"] == torch.__version__


def test_calls_of_another_shape_have_a_receipt_of_their_own() -> None:
    book = ReceiptBook()
    dispatcher = Dispatcher(ALL, "auto", book)
    dispatcher.run(call_of(batch=1))
    dispatcher.run(call_of(batch=2))
    assert [receipt.launch.splits for receipt in book.receipts] == [1, 2]


def test_a_backend_that_is_not_automatic_runs_only_by_name() -> None:
    book = ReceiptBook()
    assert float(Dispatcher(ALL, "slow", book).run(call_of()).out[0, 0, 0, 0]) == 4.0
    with pytest.raises(InputRefused, match="fast: at most 8 heads"):
        Dispatcher((FAST, SLOW), "auto", ReceiptBook()).run(call_of(9))


def test_a_backend_asked_for_by_name_runs_or_says_why_not() -> None:
    book = ReceiptBook()
    with pytest.raises(InputRefused, match="at most 8 heads, the call has 9"):
        Dispatcher(ALL, "fast", book).run(call_of(9))
    with pytest.raises(EnvironmentFault, match="not installed"):
        Dispatcher(ALL, "missing", book).run(call_of())
    with pytest.raises(UsageFault, match="expected auto, missing, fast, plain, slow"):
        Dispatcher(ALL, "flash", book)
    assert book.calls == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(1, 1, 4, 5)}, "q"),
        ({"q": torch.zeros(1, 1, 4, 6, dtype=torch.int32)}, "q"),
        ({"pool": torch.zeros(2, 4, 7)}, "pool"),
        ({"pool": torch.zeros(2, 4, 6, dtype=torch.float16)}, "pool"),
        ({"pool": torch.zeros(2, 6, 4).transpose(1, 2)}, "pool"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table"),
        ({"block_table": torch.zeros(1, 1)}, "block_table"),
        ({"seq_lens": torch.ones(2, dtype=torch.int32)}, "seq_lens"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_a_malformed_call_is_refused_by_the_name_of_its_field(change: dict[str, object], named: str) -> None:
    with pytest.raises(InputRefused) as caught:
        check_call(replace(call_of(), **change))  # type: ignore[arg-type]
    assert caught.value.where == named
