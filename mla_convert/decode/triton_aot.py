"""Compiling the decode kernels without a GPU, and the resources that the result takes.

Triton ships NVIDIA's assembler and object dump; both run on any machine. `python -m mla_convert.decode.triton_aot`
prints the table of all cells.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert.decode.rows import RowFormat
from mla_convert.decode.tiles import Dtype, TileConfig, shared_memory_limit
from mla_convert.decode.triton_launch import MERGE_WARPS, Geometry, LaunchPlan, plan_launch
from mla_convert.errors import EnvironmentFault

ARCHITECTURES = (80, 86, 89, 90, 100, 120)

PROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}
"""Multiprocessors of A100, A40, L40, H200, B200 and RTX 5090's class: only the split count depends on them."""

WGMMA_SPILL = 16
"""Bytes that the wgmma tile of sm_90 may spill at 512+64; every other tile none."""

POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes.

    Attributes:
        registers: Per thread.
        spill_stores: Bytes per thread written to local memory for want of registers.
        spill_loads: Bytes read back.
        shared_memory: Bytes per program, what a launch asks for included.
        matrix_unit: `wgmma`, `tcgen05.mma`, `mma.sync` or `fma`: what multiplies.
        asynchronous_copies: Whether loads go to shared memory on their own (cp.async).
    """

    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    matrix_unit: str
    asynchronous_copies: bool


@dataclass(frozen=True)
class CompiledCell:
    """One shape compiled for one architecture."""

    arch: int
    plan: LaunchPlan
    resources: Resources

    @property
    def spill_limit(self) -> int:
        """Bytes that the split kernel may spill here."""
        return WGMMA_SPILL if self.arch == 90 and self.resources.matrix_unit == "wgmma" else 0

    def faults(self) -> list[str]:
        """What is over its limit; empty where the cell passes the gate."""
        found = []
        if self.resources.spill_stores > self.spill_limit or self.resources.spill_loads > self.spill_limit:
            found.append(f"{self.resources.spill_stores}+{self.resources.spill_loads} bytes spilled")
        limit = shared_memory_limit(self.arch)
        if self.resources.shared_memory > limit:
            found.append(f"{self.resources.shared_memory} bytes of shared memory of {limit}")
        return found


def decode_geometry(
    form: RowFormat,
    *,
    heads: int,
    tokens: int = 1,
    dtype: Dtype = "bfloat16",
    batch: int = 128,
    length: int = 4096,
    page_size: int = 64,
) -> Geometry:
    """Geometry of a dense batch, for a compilation without tensors."""
    return Geometry(batch, tokens, heads, form, dtype, page_size, 0, tokens > 1, False, False, length)


def compile_cell(geometry: Geometry, arch: int, tile: TileConfig | None = None) -> CompiledCell:
    """Compile the split kernel as a launch on `arch` would, and read its resources.

    Raises:
        EnvironmentFault: If Triton's assembler fails.
    """
    from mla_convert.decode import triton_kernels

    plan = plan_launch(geometry, arch, PROCESSORS[arch], tile=tile)
    options = {"num_warps": plan.tile.warps, "num_stages": plan.tile.stages}
    compiled = _compile(triton_kernels.split_kernel, _constants(plan), geometry, arch, options)
    return CompiledCell(arch, plan, resources_of(compiled, arch))


def compile_merge(geometry: Geometry, arch: int, splits: int) -> Resources:
    """Compile the merge kernel of a launch with so many splits, and read its resources.

    Raises:
        EnvironmentFault: If Triton's assembler fails.
    """
    from mla_convert.decode import triton_kernels

    plan = plan_launch(geometry, arch, PROCESSORS[arch], splits=splits)
    options = {"num_warps": MERGE_WARPS}
    return resources_of(_compile(triton_kernels.merge_kernel, plan.merge_constants(), geometry, arch, options), arch)


def _compile(kernel: Any, constants: dict[str, object], geometry: Geometry, arch: int, options: dict[str, int]) -> Any:
    """Compile with the types and divisibility hints that a launch on tensors would give."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    runtime = _runtime_types(geometry)
    signature = {name: "constexpr" if name in constants else runtime[name][0] for name in kernel.arg_names}
    hints = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if name in runtime and runtime[name][1]
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _constants(plan: LaunchPlan) -> dict[str, object]:
    import triton.language as tl

    constants = plan.split_constants()
    return {**constants, **{name: getattr(tl, str(constants[name])) for name in ("ROPE", "COMPUTE")}}


def _runtime_types(geometry: Geometry) -> dict[str, tuple[str, bool]]:
    """Type of each runtime argument, and whether the launcher finds it to be a multiple of 16."""
    form = geometry.form
    width = form.latent_width + form.rope_width
    query = POINTERS[geometry.dtype]
    pool = "*u8" if form.scale_group is not None else POINTERS[form.rope_dtype]
    places, lengths = ("*i64", "*i32") if geometry.sparse else ("*i32", "*i32")
    pointers = {
        "Q": query,
        "POOL": pool,
        "PLACES": places,
        "LENGTHS": lengths,
        "OUT": query,
        "LSE": "*fp32",
        "EXTRA_POOL": pool,
        "EXTRA_PLACES": places,
        "EXTRA_LENGTHS": lengths,
        "SINKS": "*fp32",
        "PARTIAL": "*fp32",
        "PARTIAL_LSE": "*fp32",
    }
    row = form.pool_width
    strides = {
        "q_batch": geometry.tokens * geometry.heads * width,
        "q_token": geometry.heads * width,
        "q_head": width,
        "page_stride": geometry.page_size * row,
        "row_stride": row,
        "places_stride": 0,
        "extra_page": geometry.extra_page_size * row,
        "extra_row": row,
        "extra_places": 0,
        "ROWS": geometry.rows,
    }
    return {
        **{name: (kind, True) for name, kind in pointers.items()},
        **{name: ("i32", number > 0 and number % 16 == 0) for name, number in strides.items()},
        "scale": ("fp32", False),
    }


def resources_of(compiled: Any, arch: int) -> Resources:
    """Read registers and shared memory from the machine code, spills from the assembler's report.

    Args:
        compiled: Triton's compiled kernel, with its `ptx` and `cubin`.
        arch: Compute capability.

    Raises:
        EnvironmentFault: If one of the tools that ship with Triton fails or reports something else.
    """
    import triton

    ptx: str = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        code, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        code.write_bytes(compiled.asm["cubin"])
        text.write_text(ptx, encoding="utf-8")
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(code))
        nvidia = triton.knobs.nvidia
        assembler = nvidia.ptxas_blackwell.path if arch >= 100 else nvidia.ptxas.path
        target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
        report = _tool(
            assembler, "-v", "--regAllocOptLevel=2", f"--gpu-name={_only(target, ptx)[0]}", str(text), "-o", "/dev/null"
        )
    registers = _only(re.search(r"REG:(\d+)", usage), usage)[0]
    stores, loads = _only(re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report), report)
    unit = next((unit for unit in ("wgmma", "tcgen05.mma", "mma.sync") if unit in ptx), "fma")
    return Resources(int(registers), int(stores), int(loads), int(compiled.metadata.shared), unit, "cp.async" in ptx)


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentFault(
            "a tool that ships with Triton failed", found=(done.stderr or done.stdout).strip()[:500], where=command[0]
        )
    return done.stdout + done.stderr


def _only(match: re.Match[str] | None, text: str) -> tuple[str, ...]:
    if match is None:
        raise EnvironmentFault("a tool that ships with Triton reported something else", found=text.strip()[:500])
    return match.groups()


def main() -> None:
    """Print the resources of every architecture at the benchmark's shapes."""
    for arch in ARCHITECTURES:
        for d_c, d_r, heads in ((512, 64, 16), (512, 64, 32), (512, 64, 128), (256, 32, 16), (384, 32, 16)):
            geometry = decode_geometry(RowFormat.plain(d_c, d_r, "bfloat16"), heads=heads)
            cell = compile_cell(geometry, arch)
            print(
                f"sm_{arch} {d_c}+{d_r} H{heads} {cell.plan.tile} {cell.resources} {cell.faults() or 'ok'}", flush=True
            )


if __name__ == "__main__":
    main()
