"""The bundled GPU backend, and the same kernels in Triton's interpreter on a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_convert.decode.abi import DecodeCall, DecodeOutput, LaunchFigures
from mla_convert.decode.scheduling import Schedule
from mla_convert.decode.tiles import TileConfig, shared_memory_limit, tile_bytes
from mla_convert.decode.triton_launch import MAX_SPLITS, MERGE_WARPS, Geometry, LaunchPlan, plan_launch
from mla_convert.decode.values import check_values

if TYPE_CHECKING:
    from mla_convert.decode.triton_aot import Resources

LOG2_E = 1.4426950408889634
MAX_LATENT = 1024
MAX_ROPE = 128
MIN_ARCH = 80
INTERPRETED_ARCH = 90
INTERPRETED_PROCESSORS = 2
"""What the interpreter pretends to be; few programs, because each takes milliseconds."""


@dataclass(frozen=True)
class LaunchReport:
    """Resources of a call's launch, for a receipt.

    Attributes:
        backend: Name.
        arch: `sm_90` and so on, or `interpreter`.
        tile: Of the split kernel.
        splits: Runs of each group's keys.
        grid: Programs of the split kernel.
        page_size: P.
        padded_bytes: Bytes of a tile's row that hold no number of the cached row.
        workspace_bytes: Of the partial results.
        resources: Registers, spills and shared memory of the split kernel; None in the interpreter, which has none.
    """

    backend: str
    arch: str
    tile: TileConfig
    splits: int
    grid: tuple[int, ...]
    page_size: int
    padded_bytes: int
    workspace_bytes: int
    resources: Resources | None


@dataclass(frozen=True)
class TritonBackend:
    """Split over the cached rows and exact merge (triton_kernels.py).

    Attributes:
        interpret: Run in Triton's interpreter on a CPU: slow, for checks.
        splits: Instead of the number that the shape asks for.
        tile: Instead of the tile that device and shape ask for.
    """

    interpret: bool = False
    splits: int | None = None
    tile: TileConfig | None = None

    @property
    def name(self) -> str:
        """`triton`, or `triton-interpret` on a CPU."""
        return "triton-interpret" if self.interpret else "triton"

    @property
    def automatic(self) -> bool:
        """Compiled; the interpreter is for checks."""
        return not self.interpret

    def absent(self, device: torch.device) -> str | None:
        """Triton, or a device that its kernels run on."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type != ("cpu" if self.interpret else "cuda"):
            return f"the tensors are on {device}"
        if not self.interpret and _arch(device) < MIN_ARCH:
            return f"the device is sm_{_arch(device)}, older than sm_{MIN_ARCH}"
        return None

    def unfit(self, call: DecodeCall) -> str | None:
        """Why the kernels cannot run `call`, here or at all; None if they can."""
        absent = self.absent(call.q.device)
        if absent is not None:
            return absent
        if self.splits is not None and not 1 <= self.splits <= MAX_SPLITS:
            return f"{self.splits} splits are not in 1 … {MAX_SPLITS}"
        return _unfit_rows(call) or _unfit_scales(call) or self._unfit_tile(call)

    def _unfit_tile(self, call: DecodeCall) -> str | None:
        plan, form = self.plan(call), call.format
        scaled = form.scale_group is not None
        needed = tile_bytes(plan.tile, form.latent_width, form.rope_width, plan.geometry.dtype, scaled)
        limit = shared_memory_limit(INTERPRETED_ARCH if self.interpret else _arch(call.q.device))
        return f"a tile takes {needed} bytes of shared memory of {limit}" if needed > limit else None

    def run(self, call: DecodeCall, schedule: Schedule | None = None) -> DecodeOutput:
        """Compute `call`.

        Args:
            call: What `unfit` passes and `check_call` accepts.
            schedule: A split count and tile made before for the same key; None plans anew, from the shape alone.

        Raises:
            InputRefused: If the schedule was made for other inputs.
        """
        if self.interpret:
            # A wrong page is memory of this process there.
            check_values(call)
        plan = self.plan(call)
        if schedule is not None:
            schedule.require(call)
            plan = LaunchPlan(plan.geometry, schedule.tile, schedule.splits, self.interpret)
        with _on_device(call.q.device):
            return _launch(plan, call, interpreted_kernels() if self.interpret else compiled_kernels())

    def plan(self, call: DecodeCall) -> LaunchPlan:
        """Tile, splits and grid; of the shape and the device, not of the lengths."""
        device = call.q.device
        arch, processors = INTERPRETED_ARCH, INTERPRETED_PROCESSORS
        if not self.interpret:
            arch = _arch(device)
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        geometry = Geometry.of(call)
        return plan_launch(geometry, arch, processors, interpret=self.interpret, tile=self.tile, splits=self.splits)

    def describe(self, call: DecodeCall) -> LaunchReport:
        """What a run of `call` takes of the device. Compiles, and reads the compiled kernel with Triton's own tools."""
        plan = self.plan(call)
        resources = None
        if not self.interpret:
            from mla_convert.decode.triton_aot import resources_of

            arguments = _Arguments.of(plan, call)
            with _on_device(call.q.device):
                compiled = compiled_kernels().split_kernel.warmup(
                    *arguments.split, grid=plan.grid, **_split_keywords(plan)
                )
            resources = resources_of(compiled, _arch(call.q.device))
        return LaunchReport(
            self.name,
            "interpreter" if self.interpret else f"sm_{_arch(call.q.device)}",
            plan.tile,
            plan.splits,
            plan.grid,
            call.page_size,
            plan.padded_numbers * call.q.element_size(),
            plan.workspace_bytes,
            resources,
        )

    def launch(self, call: DecodeCall) -> LaunchFigures:
        """What `describe` finds, for a receipt."""
        report = self.describe(call)
        tile, resources = report.tile, report.resources
        return LaunchFigures(
            tile=f"{tile.block_m}x{tile.block_n}, {tile.warps} warps, {tile.stages} stages, {report.arch}",
            splits=report.splits,
            registers=None if resources is None else resources.registers,
            spilled_bytes=None if resources is None else resources.spill_stores,
            shared_bytes=None if resources is None else resources.shared_memory,
            padded_bytes=report.padded_bytes,
        )


def _unfit_rows(call: DecodeCall) -> str | None:
    form = call.format
    if call.q.dtype == torch.float64:
        return "a float64 query is the reference's"
    if form.latent_width > MAX_LATENT or form.rope_width > MAX_ROPE:
        return f"{form.latent_width}+{form.rope_width} numbers of a row are more than {MAX_LATENT}+{MAX_ROPE}"
    rows = form.rope_dtype
    if call.q.dtype != torch.float32 and rows != str(call.q.dtype).removeprefix("torch."):
        return f"{rows} rows would be rounded to the query's {call.q.dtype}"
    return None


def _unfit_scales(call: DecodeCall) -> str | None:
    """FP8 rows are read as bytes, and their scales and rotary part through wider pointers into them."""
    form = call.format
    if form.scale_group is None:
        return None
    if form.scale_group < form.latent_width and form.scale_group & (form.scale_group - 1):
        return f"{form.scale_group} latents under one scale are no power of two"
    pools = [call.pool]
    if call.sparse is not None and call.sparse.extra_pool is not None:
        pools.append(call.sparse.extra_pool)
    needed = form.rope_offset + form.rope_width * getattr(torch, form.rope_dtype).itemsize
    places = [int(number) for pool in pools for number in (pool.storage_offset(), *pool.stride()[:2])]
    if form.row_bytes < needed or any(place % 4 for place in places):
        return f"scales or rotary part of a {form.row_bytes}-byte row would lie across 4-byte words"
    return None


@dataclass(frozen=True)
class _Arguments:
    """Positional arguments of the two kernels, and the tensors they write."""

    split: tuple[Any, ...]
    merge: tuple[Any, ...]
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, plan: LaunchPlan, call: DecodeCall) -> _Arguments:
        geometry = plan.geometry
        q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()
        shape = (geometry.batch, geometry.tokens, geometry.heads)
        # The interpreter's cast to bfloat16 truncates: it stores float32, and torch rounds.
        out = q.new_empty((*shape, geometry.form.latent_width), dtype=torch.float32 if plan.interpret else q.dtype)
        lse = q.new_empty(shape, dtype=torch.float32)
        partial, partial_lse = out, lse
        if plan.splits > 1:
            sizes = (geometry.groups, plan.splits, geometry.rows)
            partial = q.new_empty((*sizes, geometry.form.latent_width), dtype=torch.float32)
            partial_lse = q.new_empty(sizes, dtype=torch.float32)
        pool, places, lengths, extra_pool, extra_places, extra_lengths = _segments(call)
        sinks = call.sinks.contiguous() if call.sinks is not None else lse
        split = (
            *(q, pool, places, lengths, extra_pool, extra_places, extra_lengths, sinks, out, lse, partial, partial_lse),
            call.scale * LOG2_E,
            *q.stride()[:3],
            *(pool.stride(0), pool.stride(1), places.stride(-2)),
            *(extra_pool.stride(0), extra_pool.stride(1), extra_places.stride(-2)),
            geometry.rows,
        )
        return cls(split, (partial, partial_lse, sinks, out, lse, geometry.rows), out, lse)


def _segments(call: DecodeCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pool, places and lengths of the keys and of the extra keys; without those, the first three once more."""
    if call.sparse is None:
        table = call.block_table if call.block_table.stride(-1) == 1 else call.block_table.contiguous()
        first = (call.pool, table, call.seq_lens.contiguous())
        return (*first, *first)
    sparse = call.sparse
    first = (call.pool, sparse.indices.contiguous(), sparse.lengths.contiguous())
    if sparse.extra_pool is None or sparse.extra_indices is None or sparse.extra_lengths is None:
        return (*first, *first)
    return (*first, sparse.extra_pool, sparse.extra_indices.contiguous(), sparse.extra_lengths.contiguous())


def _launch(plan: LaunchPlan, call: DecodeCall, kernels: ModuleType) -> DecodeOutput:
    arguments = _Arguments.of(plan, call)
    kernels.split_kernel[plan.grid](*arguments.split, **_split_keywords(plan))
    if plan.splits > 1:
        kernels.merge_kernel[plan.merge_grid](*arguments.merge, **plan.merge_constants(), num_warps=MERGE_WARPS)
    return DecodeOutput(arguments.out.to(call.q.dtype), arguments.lse)


def _split_keywords(plan: LaunchPlan) -> dict[str, Any]:
    import triton.language as tl

    constants = plan.split_constants()
    dtypes = {name: getattr(tl, str(constants[name])) for name in ("ROPE", "COMPUTE")}
    return {**constants, **dtypes, "num_warps": plan.tile.warps, "num_stages": plan.tile.stages}


def compiled_kernels() -> ModuleType:
    """The module of the kernels."""
    from mla_convert.decode import triton_kernels

    return triton_kernels


@cache
def interpreted_kernels() -> ModuleType:
    """A second copy of the kernels' module, whose functions run in the interpreter.

    Triton decides when it decorates a function, by a setting that is changed back once the copy is loaded: the first
    module, and all else in the process, stay compiled.
    """
    import triton

    spec = importlib.util.find_spec("mla_convert.decode.triton_kernels")
    if spec is None or spec.loader is None:
        raise ImportError("mla_convert.decode.triton_kernels is not where this module is")
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


def _arch(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
