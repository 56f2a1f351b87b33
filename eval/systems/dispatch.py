"""Whether the target ran on what was asked for: receipts against what was witnessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mla_convert.decode.absorbed_module import EXPAND_FROM
from mla_convert.decode.dispatch import AUTO
from mla_convert.decode.receipt import DecodeReceipt
from mla_convert.eval.serving import EXPANDED, STOCK, Served
from mla_convert.eval.systems.sizes import Sizes
from mla_convert.eval.systems.witness import Witness
from mla_convert.manifests.evaluation.systems import DispatchFigures


@dataclass(frozen=True)
class Expected:
    """What runs have to make of their passes, in calls of a layer.

    Attributes:
        calls: Answered by a decode backend: every step, and prompts that are too short to be expanded.
        expansions: Prompts whose keys and values are rebuilt.
    """

    calls: int
    expansions: int


@dataclass(frozen=True)
class Expectation:
    """Of the warm-up, which is audited, and of all runs with it."""

    audited: Expected
    total: Expected


def expectation(sizes: Sizes, layers: int) -> Expectation:
    """Each run is a prefill, and a step for each new token but the first."""

    def of(prompts: Sequence[int]) -> Expected:
        expanded = sum(prompt >= EXPAND_FROM for prompt in prompts)
        return Expected(layers * (len(prompts) * sizes.new_tokens - expanded), layers * expanded)

    warm_up = sizes.warm_up.prompt_tokens
    timed = [cell.prompt_tokens for cell in sizes.cells for _ in range(cell.repeats)]
    return Expectation(of([warm_up]), of([warm_up, *timed]))


@dataclass(frozen=True)
class _Fault:
    """Calls that ran otherwise than was asked or recorded, and what of it shows."""

    calls: int
    what: str


@dataclass(frozen=True)
class Verdict:
    """The section's dispatch record, and why speed must not be shown, or None."""

    figures: DispatchFigures
    withheld: str | None


def judge(asked: str, running: Served, witness: Witness, expected: Expectation) -> Verdict:
    """Compare what was asked for, what the receipts say and what was witnessed.

    Stock transformers that was asked for, or that `auto` took for a recorded reason, is no fallback to hide; every
    other run must show as many calls of a backend as its passes need, on the receipt and in the backend alike.

    Args:
        asked: The backend that the user asked for.
        running: The model as it was run, after all runs.
        witness: What was counted.
        expected: What the passes need.
    """
    stock = asked == STOCK or (asked == AUTO and running.handle is None and running.reason is not None)
    faults = () if stock else _faults(asked, running, witness, expected)
    book = running.book
    most = max(book.receipts, key=lambda receipt: receipt.calls, default=None)
    rejected = [f"{one.backend}: {one.reason}" for one in (most.rejected if most is not None else ())]
    if running.handle is None and running.reason is not None:
        rejected.append(f"absorbed: {running.reason}")
    figures = DispatchFigures(
        requested=asked,
        ran=_ran(running, witness),
        rejected=tuple(rejected),
        calls=book.calls,
        expected_calls=0 if stock else expected.total.calls,
        expanded_calls=_expanded_calls(running),
        fallbacks=book.fallbacks,
        unobserved_fallbacks=max((fault.calls for fault in faults), default=0),
    )
    reasons = "; ".join(fault.what for fault in faults)
    return Verdict(figures, f"an unobserved fallback: {reasons}" if faults else None)


def _ran(running: Served, witness: Witness) -> str:
    """The backend that most calls reached."""
    if witness.reached:
        return witness.reached.most_common(1)[0][0]
    return STOCK if running.handle is None else EXPANDED


def _expanded_calls(running: Served) -> int:
    return 0 if running.handle is None else running.handle.expanded_calls


def _faults(asked: str, running: Served, witness: Witness, expected: Expectation) -> tuple[_Fault, ...]:
    recorded: Counter[str] = Counter()
    for receipt in running.book.receipts:
        recorded[receipt.ran] += receipt.calls
    needed = expected.total.calls
    missing = needed - recorded.total()
    expanded = _expanded_calls(running) - expected.total.expansions
    rebuilt = witness.expansions - expected.audited.expansions
    misnamed = (recorded - witness.reached).total()
    unrecorded = (witness.reached - recorded).total()
    inner = sum(count for name, count in witness.entered.items() if name not in recorded)
    unexplained = sum(receipt.calls for receipt in running.book.receipts if not _explained(asked, receipt, witness))
    found = (
        _Fault(missing, f"{recorded.total()} of {needed} decode calls are on the receipt"),
        _Fault(expanded, f"{expanded} calls more than the prefills' were expanded"),
        _Fault(rebuilt, f"keys and values were rebuilt {rebuilt} times in steps of the audited run"),
        _Fault(misnamed, f"{misnamed} calls on the receipt never reached the backend it names"),
        _Fault(unrecorded, f"{unrecorded} calls of a backend are not on the receipt"),
        _Fault(inner, f"{inner} calls of the audited run ran inside on another backend than the receipt names"),
        _Fault(unexplained, f"{unexplained} calls did not run on what was asked for, and no reason is recorded"),
    )
    return tuple(fault for fault in found if fault.calls > 0)


def _explained(asked: str, receipt: DecodeReceipt, witness: Witness) -> bool:
    """Whether it is what was asked for, or each better candidate of `auto` is recorded as passed over."""
    if asked != AUTO:
        return receipt.ran == asked
    candidates = [backend.name for backend in witness.backends if backend.automatic]
    if receipt.ran not in candidates:
        return False
    passed = {rejection.backend for rejection in receipt.rejected}
    return set(candidates[: candidates.index(receipt.ran)]) <= passed
