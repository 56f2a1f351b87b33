from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_convert.decode.format_error import format_error
from mla_convert.decode.rows import FLASHMLA_FP8, FP8_MAX, RowFormat, decode, encode
from mla_convert.errors import CheckFailed, InputRefused
from tests.tolerances import E4M3_ROUNDING, FORMAT_LATENT, FORMAT_LSE, FORMAT_OUTPUT

FLASH = RowFormat.flashmla_fp8()


def random_rows(form: RowFormat, count: int = 5, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.exp(spread * torch.randn(count, 1))
    return scale * torch.randn(count, form.latent_width), torch.randn(count, form.rope_width)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rope", [0, 40])
def test_a_plain_row_is_its_numbers_in_one_dtype(dtype: str, rope: int) -> None:
    form = RowFormat.plain(152, rope, dtype)  # type: ignore[arg-type]
    c_kv, k_rope = random_rows(form)

    rows = encode(form, c_kv, k_rope)

    expected = torch.cat([c_kv, k_rope], -1).to(getattr(torch, dtype))
    assert torch.equal(rows, expected)
    assert torch.equal(decode(form, rows, torch.float64), expected.double())
    assert form.row_bytes == rows.shape[-1] * rows.element_size()


def test_the_flashmla_row_byte_by_byte() -> None:
    """512 E4M3 codes, four little-endian float32 scales, 64 bf16: read here with struct alone (seed 1, 0x0B)."""
    c_kv, k_rope = random_rows(FLASH, 3)
    rows = encode(FLASH, c_kv, k_rope)

    assert (FLASH.name, FLASH.row_bytes, rows.shape[-1], rows.dtype) == (FLASHMLA_FP8, 656, 656, torch.uint8)
    for row, latent, rope in zip(rows, c_kv, k_rope, strict=True):
        raw = bytes(row.tolist())
        scales = struct.unpack("<4f", raw[512:528])
        for group in range(4):
            part = latent[128 * group : 128 * (group + 1)]
            assert scales[group] == (part.abs().max() / 448).item()
            for code, number in zip(raw[128 * group : 128 * (group + 1)], part.tolist(), strict=True):
                assert abs(_e4m3(code) * scales[group] - number) <= max(
                    E4M3_ROUNDING * abs(number), 2**-10 * scales[group]
                )
        for place in range(64):
            bits = int.from_bytes(raw[528 + 2 * place : 530 + 2 * place], "little")
            assert struct.unpack("<f", struct.pack("<I", bits << 16))[0] == rope[place].bfloat16().float().item()


def _e4m3(code: int) -> float:
    """FP8 Formats for Deep Learning, table 1: bias 7, no infinities."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    assert (exponent, mantissa) != (15, 7)  # NaN
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 70),
    st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e4, 1e30]),
    st.integers(0, 99),
)
def test_any_width_and_size_survives_the_scaled_row(latent: int, rope: int, size: float, seed: int) -> None:
    form = RowFormat.grouped_fp8(latent, rope)
    generator = torch.Generator().manual_seed(seed)
    c_kv = torch.randn(2, 3, latent, generator=generator) * size
    k_rope = torch.randn(2, 3, rope, generator=generator)

    rows = encode(form, c_kv, k_rope)
    found = decode(form, rows)

    assert rows.shape == (2, 3, form.row_bytes)
    assert form.scale_offset % 4 == form.row_bytes % 4 == 0
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found[..., latent:], k_rope.bfloat16().float())
    for start in range(0, latent, 128):
        exact, part = c_kv[..., start : start + 128], found[..., start : min(start + 128, latent)]
        # Half a unit of E4M3 and of bf16; below 2^-6 of the scaled range half a subnormal step.
        allowed = exact.abs() * (E4M3_ROUNDING + 2**-8) + exact.abs().amax(-1, keepdim=True) / FP8_MAX * 2**-9
        assert bool(((part - exact).abs() <= allowed + 1e-38 * 0.02).all())


def test_a_latent_of_zeros_stays_zeros() -> None:
    rows = encode(FLASH, torch.zeros(1, 512), torch.ones(1, 64))

    assert torch.equal(decode(FLASH, rows)[0, :512], torch.zeros(512))


def test_the_largest_number_of_a_group_is_the_largest_code() -> None:
    c_kv = torch.rand(1000, 512) + 0.1

    rows = encode(FLASH, c_kv, torch.zeros(1000, 64))

    codes = rows[:, :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    assert torch.equal(codes.amax(-1), torch.full((1000, 4), FP8_MAX))


@pytest.mark.parametrize("form", [FLASH, RowFormat.grouped_fp8(512, 64), RowFormat.plain(512, 64, "float16")])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["latent", "rope"])
def test_a_number_that_is_not_finite_is_refused(form: RowFormat, number: float, place: str) -> None:
    c_kv, k_rope = random_rows(form)
    (c_kv if place == "latent" else k_rope)[3, 7] = number

    with pytest.raises(CheckFailed, match="cannot hold"):
        encode(form, c_kv, k_rope)


@pytest.mark.parametrize(("form", "number"), [(RowFormat.plain(8, 0, "float16"), 1e5), (FLASH, 3.4e38)])
def test_a_number_beyond_the_dtype_it_is_computed_in_is_refused(form: RowFormat, number: float) -> None:
    """A scale could hold 3.4e38; the bf16 that the latent is computed in could not."""
    with pytest.raises(CheckFailed, match="cannot hold"):
        encode(form, torch.full((1, form.latent_width), number), torch.zeros(1, form.rope_width))


def test_formats_of_the_same_bytes_are_not_confused() -> None:
    """At 512 + 64 both are 656 bytes; the name decides."""
    other = RowFormat.grouped_fp8(512, 64)

    assert other.row_bytes == FLASH.row_bytes
    assert other != FLASH
    with pytest.raises(InputRefused, match="another format"):
        FLASH.require(other, "a pool")
    with pytest.raises(InputRefused, match="another format"):
        other.require(FLASH, "a pool")
    FLASH.require(RowFormat.flashmla_fp8(), "a pool")


@pytest.mark.parametrize(
    "fields",
    [
        (FLASHMLA_FP8, 1, 256, 64, "float8_e4m3fn", "bfloat16", 128),
        (FLASHMLA_FP8, 2, 512, 64, "float8_e4m3fn", "bfloat16", 128),
        (FLASHMLA_FP8, 1, 512, 64, "float8_e4m3fn", "float16", 128),
        ("other", 1, 512, 64, "float8_e4m3fn", "bfloat16", None),
        ("other", 1, 512, 64, "bfloat16", "bfloat16", 128),
        ("other", 1, 0, 64, "bfloat16", "bfloat16", None),
        ("other", 1, 512, -1, "bfloat16", "bfloat16", None),
    ],
)
def test_impossible_formats_are_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises(InputRefused):
        RowFormat(*fields)  # type: ignore[arg-type]


def test_rows_of_other_widths_are_refused() -> None:
    with pytest.raises(InputRefused, match="no rows of this format"):
        encode(FLASH, torch.zeros(1, 511), torch.zeros(1, 64))
    with pytest.raises(InputRefused, match="no rows of this format"):
        decode(FLASH, torch.zeros(1, 655, dtype=torch.uint8))
    with pytest.raises(InputRefused, match="no rows of this format"):
        decode(FLASH, torch.zeros(1, 656, dtype=torch.int8))


@pytest.mark.parametrize(
    "form",
    [
        FLASH,
        RowFormat.grouped_fp8(152, 40),
        RowFormat.grouped_fp8(96, 24),
        RowFormat.plain(152, 40, "float16"),
        RowFormat.plain(152, 40, "float32"),
    ],
)
def test_error_of_a_format_beside_bf16_rows(form: RowFormat) -> None:
    c_kv, k_rope = random_rows(form, 300, spread=0.3)
    queries = torch.randn(4, 9, form.latent_width + form.rope_width)

    found = format_error(form, c_kv, k_rope, queries, (form.latent_width + form.rope_width) ** -0.5)

    kind = "fp8" if form.scales else form.latent_dtype
    low, high = FORMAT_LATENT[kind]
    assert low < found.latent < high
    assert 0 < found.output < FORMAT_OUTPUT[kind]
    assert 0 < found.lse < FORMAT_LSE[kind]
    assert found.row_bytes == form.row_bytes / (2 * (form.latent_width + form.rope_width))


def test_bf16_beside_itself_has_no_error() -> None:
    form = RowFormat.plain(96, 24, "bfloat16")
    c_kv, k_rope = random_rows(form, 30)

    found = format_error(form, c_kv, k_rope, torch.randn(1, 2, 120), 0.1)

    assert (found.latent, found.output, found.lse, found.row_bytes) == (0, 0, 0, 1)


def test_the_ratio_of_the_flashmla_row() -> None:
    """Seed 1, 0x0B: 656 / 1152."""
    assert FLASH.row_bytes / RowFormat.plain(512, 64, "bfloat16").row_bytes == 656 / 1152


def test_every_code_is_read_as_torch_casts_it() -> None:
    """NaN among them: what was never written must not become a number."""
    codes = torch.arange(256, dtype=torch.uint8)
    rows = torch.zeros(1, FLASH.row_bytes, dtype=torch.uint8)
    rows[0, :256], rows[0, 256:512] = codes, codes.flip(0)
    rows[0, 512:528] = torch.ones(4).view(torch.uint8)

    expected = torch.cat([codes, codes.flip(0)]).view(torch.float8_e4m3fn).float()

    assert torch.equal(decode(FLASH, rows)[0, :512].nan_to_num(1e9), expected.nan_to_num(1e9))
