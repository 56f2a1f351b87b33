"""The whole part on a tiny pair: what is measured, beside what, and when it is withheld."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mla_convert.decode.receipt import ReceiptBook
from mla_convert.decode.reference import ReferenceBackend
from mla_convert.decode.torch_backend import TorchBackend
from mla_convert.errors import EnvironmentFault
from mla_convert.eval.serving import Served, served
from mla_convert.eval.systems.measure import Instruments, measure_with
from mla_convert.manifests.evaluation.systems import SystemsSection
from tests.eval.helpers import EvalPair
from tests.eval.systems.helpers import (
    CALLS,
    LAYERS,
    RUNS,
    TINY,
    Better,
    Borrowing,
    Forgetting,
    Inventing,
    Renaming,
    Ticking,
    WithBook,
    context_of,
    expanded_with_a_receipt,
    figures_of,
    measure,
    secretly_expanded,
    secretly_stock,
)


@pytest.fixture(scope="module")
def section(lossy: EvalPair) -> SystemsSection:
    """By the default backend."""
    return measure(lossy)


def test_auto_on_a_cpu_runs_the_torch_backend_for_every_step(section: SystemsSection) -> None:
    dispatch = section.dispatch

    assert section.withheld is None
    assert (dispatch.requested, dispatch.ran, dispatch.unobserved_fallbacks) == ("auto", "torch", 0)
    assert dispatch.calls == dispatch.expected_calls == CALLS
    assert dispatch.expanded_calls == RUNS * LAYERS
    if not torch.cuda.is_available():
        assert [reason.partition(":")[0] for reason in dispatch.rejected] == ["triton"]


def test_both_models_have_a_row_for_each_workload_and_the_times_of_the_clock(section: SystemsSection) -> None:
    found = [(row.subject, row.prompt_tokens, row.batch, row.repeats) for row in section.rows]

    assert found == [(name, *cell) for name in ("source", "target") for cell in ((12, 1, 2), (70, 1, 1), (12, 3, 1))]
    for row in section.rows:
        # The clock is read at the start, at the first token and at the end: one second, and one for three tokens.
        assert (row.ttft_s, row.tpot_s) == (1.0, 1 / 3)
        assert row.tokens_per_s == row.goodput_tokens_per_s == row.batch * 4 / 2
        assert row.peak_bytes is not None
        assert row.peak_bytes >= 0
    assert [(limit.prompt_tokens, limit.ttft_s, limit.tpot_s) for limit in section.objective.limits] == [
        (12, 1.5, 0.5),
        (70, 1.5, 0.5),
    ]


def test_the_cache_is_that_of_the_run_beside_the_formula(section: SystemsSection) -> None:
    source, target = section.cache

    assert (source.subject, target.subject) == ("source", "target")
    # 12 and 4 tokens, less the last one, which is not fed back; 2·G·d and d_c + d_R numbers in 4 layers of float32.
    assert source.tokens == target.tokens == 15
    assert source.formula_bytes_per_token == source.payload_bytes_per_token == 2 * 2 * 16 * 4 * 4
    assert target.formula_bytes_per_token == target.payload_bytes_per_token == 36 * 4 * 4
    assert source.resident_bytes == 15 * 2 * 2 * 16 * 4 * 4
    assert (source.page_bytes, source.scale_bytes, source.metadata_bytes) == (None, 0, 0)
    assert target.page_bytes == 64 * 36 * 4 * 4
    assert target.metadata_bytes > 0
    assert target.resident_bytes == target.page_bytes + target.metadata_bytes


def test_stock_that_is_asked_for_is_no_fallback(lossy: EvalPair) -> None:
    found = measure(lossy, "stock")

    assert found.withheld is None
    assert (found.dispatch.ran, found.dispatch.calls, found.dispatch.expected_calls) == ("stock", 0, 0)
    assert found.dispatch.expanded_calls == 0
    assert found.cache[1].page_bytes is None
    assert found.cache[1].payload_bytes_per_token == 36 * 4 * 4


def test_a_backend_by_name_runs_or_is_refused(lossy: EvalPair) -> None:
    found = measure(lossy, "reference")
    assert (found.withheld, found.dispatch.ran, found.dispatch.calls) == (None, "reference", CALLS)
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentFault, match="triton"):
            measure(lossy, "triton")


def test_a_fallback_with_its_reason_on_the_receipt_is_counted_and_shown(lossy: EvalPair) -> None:
    found = measure(lossy, backends=lambda: (Better(), TorchBackend()))

    assert found.withheld is None
    # The one run with a batch.
    assert (found.dispatch.ran, found.dispatch.fallbacks) == ("better", 3 * LAYERS)
    assert figures_of(found)["ttft_s"] == len(found.rows)


@pytest.mark.parametrize(
    ("instruments", "unobserved", "said"),
    [
        pytest.param({"serve": secretly_stock}, CALLS, f"0 of {CALLS} decode calls", id="stock"),
        pytest.param({"serve": secretly_expanded}, CALLS, f"{CALLS} calls more than the prefills'", id="expanded"),
        pytest.param({"serve": expanded_with_a_receipt}, CALLS, "never reached the backend", id="invented calls"),
        pytest.param({"serve": WithBook(Renaming())}, CALLS, "never reached the backend", id="renamed"),
        pytest.param({"serve": WithBook(Forgetting())}, CALLS // 2, f"{CALLS // 2} of {CALLS}", id="forgotten"),
        pytest.param({"serve": WithBook(Inventing())}, CALLS, "never reached the backend", id="doubled"),
        pytest.param({"serve": WithBook(ReceiptBook(), "reference")}, CALLS, "not run on what was asked", id="other"),
        # In the audited run, the warm-up, alone.
        pytest.param({"backends": lambda: (Borrowing(),)}, 3 * LAYERS, "inside on another backend", id="borrowed"),
    ],
)
def test_a_planted_fallback_withholds_every_figure(
    lossy: EvalPair, instruments: dict[str, Any], unobserved: int, said: str
) -> None:
    found = measure(lossy, **instruments)

    assert found.withheld is not None
    assert said in found.withheld
    assert found.dispatch.unobserved_fallbacks == unobserved
    assert not figures_of(found)
    assert found.objective.limits == ()
    assert len(found.rows) == 6


def test_what_really_ran_is_named_whatever_the_receipt_says(lossy: EvalPair) -> None:
    assert measure(lossy, serve=WithBook(Renaming())).dispatch.ran == "torch"
    assert measure(lossy, serve=secretly_stock).dispatch.ran == "stock"


def test_steps_that_rebuild_keys_and_values_are_seen_even_where_every_counter_is_right(lossy: EvalPair) -> None:
    @contextmanager
    def twice(model: Any, backend: str, *, backends: Any) -> Iterator[Served]:
        with served(model, backend, backends=backends) as running:
            part = model.model.layers[1].self_attn

            def stock_too(_module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
                part.kv_b_proj(torch.zeros(*inputs[0].shape[:2], part.kv_lora_rank))

            hook = part.kv_a_layernorm.register_forward_hook(stock_too)
            yield running
            hook.remove()

    found = measure(lossy, serve=twice)

    assert found.dispatch.calls == found.dispatch.expected_calls
    assert found.withheld == "an unobserved fallback: keys and values were rebuilt 4 times in steps of the audited run"


def test_a_better_candidate_that_nobody_asked_is_no_reason(lossy: EvalPair) -> None:
    def without_the_first(model: Any, backend: str, *, backends: Any) -> Any:
        return served(model, backend, backends=backends[1:])

    found = measure(lossy, serve=without_the_first, backends=lambda: (Better(), TorchBackend()))

    assert found.withheld is not None
    assert "no reason is recorded" in found.withheld


def test_models_that_do_not_fit_together_run_one_at_a_time_and_say_so(lossy: EvalPair, section: SystemsSection) -> None:
    apart = measure(lossy, available_bytes=lambda: 1000)

    assert (section.models_in_memory, apart.models_in_memory) == ("together", "one at a time")
    assert apart.withheld is None
    assert apart.dispatch == section.dispatch
    assert apart.cache == section.cache


def test_a_second_run_gives_the_same_but_for_memory(lossy: EvalPair, section: SystemsSection) -> None:
    def but_memory(one: SystemsSection) -> SystemsSection:
        return one.model_copy(update={"rows": tuple(row.model_copy(update={"peak_bytes": 0}) for row in one.rows)})

    assert but_memory(measure(lossy)) == but_memory(section)


def test_no_profiler_is_left_behind(lossy: EvalPair) -> None:
    before = sys.getprofile()
    instruments = Instruments(clock=Ticking(), backends=lambda: (ReferenceBackend(),))
    measure_with(context_of(lossy, "reference"), TINY, instruments)

    assert sys.getprofile() is before
