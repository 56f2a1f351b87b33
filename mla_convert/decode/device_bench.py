"""Decode kernels timed on a GPU beside what the same GPU copies and multiplies, and beside other libraries."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mla_convert.decode.abi import DecodeCall
from mla_convert.decode.flashinfer import FlashInferBackend
from mla_convert.decode.flashmla import FlashMLABackend
from mla_convert.decode.rows import RowFormat
from mla_convert.decode.triton_backend import LaunchReport, TritonBackend

PAGE = 64
REPEATS = 30
FLUSH_BYTES = 256 * 1024 * 1024
"""More than any GPU's second-level cache: between two runs the rows must leave it."""

BANDWIDTH_GOAL = 0.75
"""Share of the copy bandwidth where a cell is bound by memory."""

FLASHMLA_GOAL, FLASHMLA_HEADS = 0.85, 32
"""Speed beside FlashMLA, up to so many heads."""

VLLM_MODULES = ("vllm.v1.attention.ops.triton_decode_attention", "vllm.attention.ops.triton_decode_attention")
VLLM_SPLITS = 4
"""What vLLM's Triton MLA backend launches with."""


@dataclass(frozen=True)
class BenchCell:
    """One decode step of one layer in bfloat16."""

    batch: int
    length: int
    heads: int
    d_c: int
    d_r: int
    tokens: int = 1

    @property
    def name(self) -> str:
        """B, L, H, widths and queries."""
        return f"B{self.batch} L{self.length} H{self.heads} {self.d_c}+{self.d_r} s_q {self.tokens}"

    @property
    def bytes(self) -> int:
        """Least traffic: every cached row once, queries and outputs once."""
        rows = self.batch * self.length * (self.d_c + self.d_r) * 2
        return rows + self.batch * self.tokens * self.heads * (2 * (self.d_c + self.d_r) + 2 * self.d_c + 4)

    @property
    def flops(self) -> int:
        """Of scores and weighted latents (seed 1, 0x09)."""
        return 2 * self.batch * self.tokens * self.heads * self.length * (2 * self.d_c + self.d_r)


def bench_cells() -> tuple[BenchCell, ...]:
    """The shapes of the benchmark."""
    wide = tuple(BenchCell(128, 4096, heads, 512, 64) for heads in (16, 32, 128))
    narrow = (BenchCell(128, 4096, 16, 256, 32), BenchCell(128, 4096, 9, 144, 48), BenchCell(128, 4096, 16, 384, 32))
    return (*wide, *narrow, BenchCell(1, 16384, 16, 512, 64), BenchCell(128, 4096, 16, 512, 64, 4))


@dataclass(frozen=True)
class DeviceRates:
    """What the device does with torch's own kernels.

    Attributes:
        copy_bytes_per_s: Read plus written, of a 2 GiB copy.
        matmul_flops_per_s: Of a bfloat16 product of 8192 × 8192 matrices.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True)
class Peer:
    """Another library at one cell: its time, or why there is none."""

    name: str
    seconds: float | None
    reason: str | None
    padded: bool = False


@dataclass(frozen=True)
class Ratios:
    """A time beside the device's rates.

    Attributes:
        bound: `memory` or `compute`: which of the two would take longer at the measured rates.
        bandwidth: Share of the copy bandwidth.
        matmul: Share of the product's rate.
        roofline: Share of the speed that the slower of the two allows.
    """

    bound: str
    bandwidth: float
    matmul: float
    roofline: float


@dataclass(frozen=True)
class BenchRow:
    """One cell measured."""

    cell: BenchCell
    seconds: float
    ratios: Ratios
    peers: tuple[Peer, ...]
    launch: LaunchReport | None

    @property
    def missed(self) -> tuple[str, ...]:
        """Goals that this cell has and misses."""
        found = []
        if self.ratios.bound == "memory" and self.ratios.bandwidth < BANDWIDTH_GOAL:
            found.append(f"{self.ratios.bandwidth:.2f} of the copy bandwidth, goal {BANDWIDTH_GOAL}")
        for peer in self.peers:
            if peer.name != "flashmla" or peer.seconds is None or peer.padded or self.cell.heads > FLASHMLA_HEADS:
                continue
            if peer.seconds / self.seconds < FLASHMLA_GOAL:
                found.append(f"{peer.seconds / self.seconds:.2f} × FlashMLA, goal {FLASHMLA_GOAL}")
        return tuple(found)


def ratios(cell: BenchCell, seconds: float, rates: DeviceRates) -> Ratios:
    """A measured time beside the measured rates."""
    moving, multiplying = cell.bytes / rates.copy_bytes_per_s, cell.flops / rates.matmul_flops_per_s
    bound = "memory" if moving >= multiplying else "compute"
    return Ratios(bound, moving / seconds, multiplying / seconds, max(moving, multiplying) / seconds)


def build_cell(cell: BenchCell, device: torch.device) -> DecodeCall:
    """A full batch of random rows in shuffled pages."""
    draw = torch.Generator(device).manual_seed(0)
    pages = -(-cell.length // PAGE)
    width = cell.d_c + cell.d_r
    kind = {"generator": draw, "device": device, "dtype": torch.bfloat16}
    pool = torch.randn(cell.batch * pages, PAGE, width, **kind)  # type: ignore[call-overload]
    q = torch.randn(cell.batch, cell.tokens, cell.heads, width, **kind)  # type: ignore[call-overload]
    table = torch.randperm(cell.batch * pages, generator=draw, device=device).view(cell.batch, pages).to(torch.int32)
    lengths = torch.full((cell.batch,), cell.length, dtype=torch.int32, device=device)
    return DecodeCall(q, pool, RowFormat.plain(cell.d_c, cell.d_r, "bfloat16"), table, lengths, width**-0.5)


def measure_rates(device: torch.device) -> DeviceRates:
    """Copy bandwidth and matrix rate, measured before anything is compared with them."""
    size, side = 2 * 1024**3, 8192
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = time_graph(lambda: target.copy_(source), device)
    matrix = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    multiplying = time_graph(lambda: matrix @ matrix, device)
    return DeviceRates(2 * size / copying, 2 * side**3 / multiplying)


def time_graph(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one replay of `work` captured as a CUDA graph, with a cold second-level cache."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return float(statistics.median(times))


def measure_cell(cell: BenchCell, rates: DeviceRates, device: torch.device) -> BenchRow:
    """Time the bundled kernels and every peer on one cell."""
    call = build_cell(cell, device)
    backend = TritonBackend()
    seconds = time_graph(lambda: backend.run(call), device)
    return BenchRow(cell, seconds, ratios(cell, seconds, rates), tuple(_peers(call, device)), backend.describe(call))


def _peers(call: DecodeCall, device: torch.device) -> Iterator[Peer]:
    flashmla, flashinfer = FlashMLABackend(), FlashInferBackend()
    reason = flashmla.unfit(call)
    padded = reason is None and flashmla.padding(call).pool_bytes > 0
    yield _peer("flashmla", reason, lambda: lambda: flashmla.run(call), device, padded)
    reason = flashinfer.unfit(call)
    padded = reason is None and flashinfer.padding(call).pool_bytes > 0
    yield _peer("flashinfer", reason, lambda: flashinfer.planned(call), device, padded)
    reason = "not installed" if importlib.util.find_spec("vllm") is None else None
    if reason is None and call.q.shape[1] > 1:
        reason = "one query a sequence"
    yield _peer("vllm-triton", reason, lambda: vllm_decode(call), device, padded=False)


def _peer(
    name: str, reason: str | None, prepare: Callable[[], Callable[[], object]], device: torch.device, padded: bool
) -> Peer:
    """A peer's time; its own refusal, whatever it says, is a finding and not the end of the check."""
    if reason is not None:
        return Peer(name, None, reason)
    try:
        return Peer(name, time_graph(prepare(), device), None, padded)
    except (ImportError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        return Peer(name, None, f"{type(error).__name__}: {error}"[:300])


def vllm_decode(call: DecodeCall) -> Callable[[], object]:
    """VLLM's Triton decode kernel on a call with one query a sequence.

    Raises:
        ImportError: Where this version has it nowhere known.
    """
    found = next((name for name in VLLM_MODULES if _exists(name)), None)
    if found is None:
        raise ImportError(f"vllm has none of {', '.join(VLLM_MODULES)}")
    decode = importlib.import_module(found).decode_attention_fwd
    q = call.q[:, 0]  # (B, H, d_c + d_R)
    width = call.format.latent_width
    keys = call.pool.unsqueeze(2)  # (pages, P, 1, d_c + d_R)
    out = q.new_empty(*q.shape[:2], width)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    partial = q.new_empty(*q.shape[:2], VLLM_SPLITS, width + 1, dtype=torch.float32)
    values, table, lengths = keys[..., :width], call.block_table, call.seq_lens
    return lambda: decode(q, keys, values, out, lse, table, lengths, partial, VLLM_SPLITS, call.scale, call.page_size)


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
