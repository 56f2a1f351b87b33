"""Everything that only a GPU can show, in one script: `python -m mla_convert.decode.device_check --json OUT`.

The ladder on the device, a CUDA graph replayed with other lengths, compute-sanitizer where it is installed, and the
benchmark. Ends within eight minutes on an H200: what is left over then is named as skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mla_convert.decode.abi import DecodeCall, SparseSelection
from mla_convert.decode.device_bench import BenchRow, DeviceRates, bench_cells, measure_cell, measure_rates
from mla_convert.decode.ladder import Deviation, LadderCase, build, deviation, exact, ladder
from mla_convert.decode.triton_backend import TritonBackend
from mla_convert.errors import CheckFailed, EnvironmentFault, MLAConvertError

MODULE = "mla_convert.decode.device_check"
BUDGET_SECONDS = 450.0
SANITIZER_SECONDS = 90
GRAPH_CASE = LadderCase(lengths=(0, 1, 127, 129, 1000), heads=9, tokens=2, d_c=512, d_r=64, page_size=64)
SANITIZED_CASE = LadderCase(heads=9, d_c=144, d_r=48, splits=2)


@dataclass(frozen=True)
class CaseResult:
    """One case of the ladder on the device."""

    name: str
    out: float
    lse: float
    passed: bool


@dataclass(frozen=True)
class SanitizerResult:
    """What compute-sanitizer said, or why it was not asked."""

    ran: bool
    passed: bool
    detail: str


@dataclass(frozen=True)
class DeviceReport:
    """All that a check found.

    Attributes:
        device: Name of the GPU.
        capability: Its compute capability, `sm_90`.
        versions: Of torch and Triton.
        cases: The ladder.
        graph: A captured graph, replayed with other queries and lengths than it was captured with.
        sanitizer: See `SanitizerResult`.
        rates: Measured copy bandwidth and matrix rate; None if time ran out.
        bench: The cells that were measured.
        skipped: What time did not allow.
        seconds: Of the whole check.
    """

    device: str
    capability: str
    versions: dict[str, str]
    cases: tuple[CaseResult, ...]
    graph: tuple[CaseResult, ...]
    sanitizer: SanitizerResult
    rates: DeviceRates | None
    bench: tuple[BenchRow, ...]
    skipped: tuple[str, ...]
    seconds: float

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of wrong answers; a missed speed is no failure."""
        wrong = [case.name for case in (*self.cases, *self.graph) if not case.passed]
        return (*wrong, *(() if self.sanitizer.passed or not self.sanitizer.ran else ("compute-sanitizer",)))

    def to_json(self) -> dict[str, object]:
        """As nested JSON values, with the missed goals of each cell."""
        fields = dataclasses.asdict(self)
        for row, found in zip(fields["bench"], self.bench, strict=True):
            row["name"], row["missed"] = found.cell.name, list(found.missed)
        return {**fields, "failed": list(self.failed)}


def judged(case: LadderCase, found: Deviation, name: str | None = None) -> CaseResult:
    """A deviation beside the case's limits."""
    return CaseResult(name or case.name, found.out, found.lse, found.within(case.dtype))


def moved(call: DecodeCall, device: torch.device) -> DecodeCall:
    """The same call with its tensors on `device`."""
    sparse = call.sparse
    if sparse is not None:
        sparse = SparseSelection(
            indices=sparse.indices.to(device),
            lengths=sparse.lengths.to(device),
            extra_pool=None if sparse.extra_pool is None else sparse.extra_pool.to(device),
            extra_indices=None if sparse.extra_indices is None else sparse.extra_indices.to(device),
            extra_lengths=None if sparse.extra_lengths is None else sparse.extra_lengths.to(device),
        )
    return replace(
        call,
        q=call.q.to(device),
        pool=call.pool.to(device),
        block_table=call.block_table.to(device),
        seq_lens=call.seq_lens.to(device),
        sparse=sparse,
        sinks=None if call.sinks is None else call.sinks.to(device),
    )


def check_case(case: LadderCase, device: torch.device) -> CaseResult:
    """One case of the ladder, on the device and in float64 on the CPU."""
    call = build(case)
    return judged(case, deviation(TritonBackend(splits=case.splits).run(moved(call, device)), exact(call)))


def check_graph(device: torch.device) -> tuple[CaseResult, ...]:
    """Capture once, then replay with shorter sequences and other queries in the same memory."""
    call = build(GRAPH_CASE)
    static = moved(call, device)
    backend = TritonBackend(splits=4)
    backend.run(static)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = backend.run(static)
    results = []
    for name, lengths, factor in (
        ("as captured", (0, 1, 127, 129, 1000), 1.0),
        ("replayed", (0, 0, 5, 128, 640), -0.5),
    ):
        changed = replace(call, q=call.q * factor, seq_lens=torch.tensor(lengths, dtype=torch.int32))
        static.q.copy_(changed.q)
        static.seq_lens.copy_(changed.seq_lens)
        graph.replay()
        torch.cuda.synchronize(device)
        results.append(judged(GRAPH_CASE, deviation(output, exact(changed)), f"graph, {name}"))
    return tuple(results)


def check_sanitizer() -> SanitizerResult:
    """One case under compute-sanitizer's memory check, in a process of its own."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return SanitizerResult(False, False, "compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", MODULE, "--one-case"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SANITIZER_SECONDS)
    except subprocess.TimeoutExpired:
        return SanitizerResult(False, False, f"no answer within {SANITIZER_SECONDS} s")
    return SanitizerResult(True, done.returncode == 0, (done.stdout + done.stderr).strip()[-600:])


def require_device() -> torch.device:
    """The first CUDA device.

    Raises:
        EnvironmentFault: Where there is none.
    """
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "the device check needs a CUDA device",
            expected="a GPU of compute capability 8.0 or newer and a CUDA build of torch",
            found=f"torch {torch.__version__} without a device",
            remedy="Run it on a machine with an NVIDIA GPU; the interpreter ladder in tests/decode needs none.",
        )
    return torch.device("cuda", 0)


def run_checks(device: torch.device) -> DeviceReport:
    """Everything, in the order of its weight, until the time is up."""
    import triton

    start = time.monotonic()
    cases = tuple(check_case(case, device) for case in ladder())
    graph = check_graph(device)
    rates = measure_rates(device)
    bench, skipped = [], []
    for cell in bench_cells():
        if time.monotonic() - start > BUDGET_SECONDS - SANITIZER_SECONDS:
            skipped.append(cell.name)
            continue
        bench.append(measure_cell(cell, rates, device))
        torch.cuda.empty_cache()
    sanitizer = check_sanitizer()
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceReport(
        torch.cuda.get_device_name(device),
        f"sm_{major}{minor}",
        {"torch": torch.__version__, "triton": triton.__version__},
        cases,
        graph,
        sanitizer,
        rates,
        tuple(bench),
        tuple(skipped),
        time.monotonic() - start,
    )


def table(report: DeviceReport) -> str:
    """The benchmark as text, a line for each cell."""
    lines = [f"{report.device}, {len(report.cases)} cases, failed: {', '.join(report.failed) or 'none'}"]
    if report.rates is not None:
        lines.append(
            f"copy {report.rates.copy_bytes_per_s / 1e12:.2f} TB/s, "
            f"bfloat16 matmul {report.rates.matmul_flops_per_s / 1e12:.0f} TFLOP/s"
        )
    for row in report.bench:
        peers = ", ".join(f"{peer.name} {_peer_text(row, peer.seconds, peer.reason)}" for peer in row.peers)
        lines.append(
            f"{row.cell.name}: {row.seconds * 1e6:.0f} µs, {row.ratios.bandwidth:.2f} of copy, "
            f"{row.ratios.matmul:.2f} of matmul ({row.ratios.bound}); {peers}"
            + (f"; missed: {'; '.join(row.missed)}" if row.missed else "")
        )
    return "\n".join([*lines, *(f"{name}: skipped, out of time" for name in report.skipped)])


def _peer_text(row: BenchRow, seconds: float | None, reason: str | None) -> str:
    return f"({reason})" if seconds is None else f"{seconds * 1e6:.0f} µs, {seconds / row.seconds:.2f} × its speed"


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the check and write the report.

    Raises:
        EnvironmentFault: Without a device.
        CheckFailed: If an answer is wrong; the report is written first.
    """
    parser = argparse.ArgumentParser(prog="python -m mla_convert.decode.device_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report here")
    parser.add_argument("--one-case", action="store_true", help="one small case and nothing else, for a sanitizer")
    options = parser.parse_args(None if arguments is None else list(arguments))
    device = require_device()
    if options.one_case:
        result = check_case(SANITIZED_CASE, device)
        if not result.passed:
            raise CheckFailed("a kernel's answer is wrong", found=str(result))
        return
    report = run_checks(device)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=2, default=str) + "\n", encoding="utf-8")
    print(table(report))
    if report.failed:
        raise CheckFailed("wrong answers on the device", found=", ".join(report.failed))


if __name__ == "__main__":
    try:
        main()
    except MLAConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
