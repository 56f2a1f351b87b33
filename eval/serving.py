"""How a converted model is run: from its latent cache by a decode backend, or by stock transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.decode.abi import Backend
from mla_convert.decode.absorbed_module import AbsorbedHandle, AbsorbedOptions, use_absorbed
from mla_convert.decode.backends import dispatcher, known_backends
from mla_convert.decode.dispatch import AUTO, Dispatcher
from mla_convert.decode.receipt import ReceiptBook, Rejection
from mla_convert.errors import InputRefused
from mla_convert.eval.loading import hidden_states

STOCK = "stock"
# What a receipt says of a run that ended with its prefill.
EXPANDED = "expanded prefill"
MLA_TYPE = "deepseek_v3"
# No chunk is as long: every one is read from the pages.
NEVER_EXPAND = 1 << 62


@dataclass(frozen=True)
class Served:
    """A model that is being run in one way.

    Attributes:
        model: As loaded.
        requested: What was asked for.
        handle: Of the absorbed modules; None where stock transformers runs.
        book: What the backends ran.
        reason: Why `auto` runs stock transformers, or None.
    """

    model: Any
    requested: str
    handle: AbsorbedHandle | None
    book: ReceiptBook
    reason: str | None = None

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, chunk: int | None = None) -> Tensor:
        """(T,) token ids -> (T, D) float32: what the output head reads, the last norm included.

        Args:
            token_ids: One sequence.
            chunk: Tokens that are appended to the latent cache at a time, which bounds the memory of a long sequence;
                all at once where None. Without a latent cache everything runs at once.
        """
        if self.handle is None:
            return hidden_states(self.model, token_ids)
        cache = self.handle.new_cache(len(token_ids))
        parts = token_ids.split(len(token_ids) if chunk is None else chunk)
        states = [self.model.base_model(input_ids=part[None], cache=cache).last_hidden_state[0] for part in parts]
        return torch.cat(states).float()  # (T, D)

    @property
    def receipt(self) -> dict[str, object]:
        """What ran until now: the backend of most calls in front, and all kinds of calls under `receipts`.

        `expanded_calls` counts those of a layer that a prefill computed without a decode backend.
        """
        if self.handle is None:
            passed = [] if self.reason is None else [Rejection("absorbed", self.reason, absent=False)]
            rejected = [asdict(entry) for entry in passed]
            return {"requested": self.requested, "ran": STOCK, "rejected": rejected, **self.book.to_json()}
        expanded = self.handle.expanded_calls
        most = max(self.book.receipts, key=lambda receipt: receipt.calls, default=None)
        return {
            "requested": self.requested,
            "ran": EXPANDED if most is None else most.ran,
            "rejected": [] if most is None else [asdict(entry) for entry in most.rejected],
            "expanded_calls": expanded,
            **self.book.to_json(),
        }


def check_backend(name: str) -> None:
    """Refuse a name before anything is loaded.

    Raises:
        UsageFault: If no backend has it.
    """
    if name != STOCK:
        dispatcher(name, ReceiptBook())


@contextmanager
def served(
    model: Any, backend: str, *, from_pages: bool = False, backends: Sequence[Backend] | None = None
) -> Iterator[Served]:
    """Run a model by a decode backend while the context lasts.

    Args:
        model: As `load_model` returns it.
        backend: `auto`, `stock`, or the name of a decode backend. `auto` runs what is no MLA model by
            stock transformers.
        from_pages: Read long chunks from the pages as well, where a prefill would expand their keys and values.
        backends: Best first; all that there are where None.

    Raises:
        UsageFault: For a backend that there is not.
        EnvironmentFault: For a backend by name that is not on this machine.
        InputRefused: For a backend by name and a model without a latent cache.
    """
    book = ReceiptBook()
    if backend == STOCK:
        yield Served(model, backend, None, book)
        return
    decoder = Dispatcher(known_backends() if backends is None else backends, backend, book)
    decoder.require_present(model.device)
    kind = str(model.config.model_type)
    if kind != MLA_TYPE:
        if backend != AUTO:
            raise InputRefused(
                "a model without a latent cache",
                expected=f"a converted checkpoint, model type {MLA_TYPE}",
                found=kind,
                where=f"--backend {backend}",
                remedy=f"Take --backend {AUTO} or {STOCK}.",
            )
        yield Served(model, backend, None, book, f"model type {kind} has no latent cache")
        return
    options = AbsorbedOptions(expand_from=NEVER_EXPAND) if from_pages else AbsorbedOptions()
    with use_absorbed(model, decoder.run, options) as handle:
        yield Served(model, backend, handle, book)
