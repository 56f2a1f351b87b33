"""The backends there are, best first."""

from __future__ import annotations

from mla_convert.decode.abi import Backend
from mla_convert.decode.dispatch import Dispatcher
from mla_convert.decode.flashinfer import FlashInferBackend
from mla_convert.decode.flashmla import FlashMLABackend
from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.decode.triton_backend import TritonBackend


def known_backends() -> tuple[Backend, ...]:
    """All of them, in the order in which `auto` tries those that are automatic."""
    return (
        TritonBackend(),
        TorchBackend(),
        FlashMLABackend(),
        FlashInferBackend(),
        ReferenceBackend(),
        TritonBackend(interpret=True),
    )


def dispatcher(requested: str, book: ReceiptBook) -> Dispatcher:
    """A dispatcher over all backends; see `Dispatcher`."""
    return Dispatcher(known_backends(), requested, book)
