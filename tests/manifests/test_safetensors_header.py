from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mla_convert.errors import InputRefused
from mla_convert.manifests.safetensors_header import DTYPES, read_header

Entry = dict[str, object]
TWO: dict[str, Entry] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}


def write(path: Path, header: object, data: int, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * data)
    return path


def test_it_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "w": torch.zeros(3, 4, dtype=torch.bfloat16),
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 5, dtype=torch.float16),
        "i": torch.zeros(7, dtype=torch.int64),
        "flag": torch.zeros(2, dtype=torch.bool),
        "f8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    assert {name: (f"torch.{t.dtype}", t.shape, t.bytes) for name, t in header.items()} == {
        name: (str(t.dtype), tuple(t.shape), t.numel() * t.element_size()) for name, t in tensors.items()
    }


def test_every_dtype_name_and_size_is_torchs() -> None:
    for name, size in DTYPES.values():
        assert getattr(torch, name).itemsize == size


def test_a_handwritten_header_in_any_order_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m", dict(reversed(TWO.items())), 26)
    assert [(t.name, t.start, t.end) for t in read_header(path).values()] == [("a", 0, 24), ("b", 24, 26)]


@pytest.mark.parametrize("data", [25, 27, 0])
def test_offsets_must_fill_the_data_region(tmp_path: Path, data: int) -> None:
    with pytest.raises(InputRefused, match="do not fill the data region"):
        read_header(write(tmp_path / "m", TWO, data))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("b", {"data_offsets": [25, 27]}, "leaves a gap or overlaps"),
        ("b", {"data_offsets": [22, 24]}, "leaves a gap or overlaps"),
        ("a", {"shape": [3, 3]}, "bytes of tensor 'a'"),
        ("a", {"dtype": "F64"}, "bytes of tensor 'a'"),
        ("a", {"dtype": "F33"}, "dtype of tensor 'a'"),
        ("a", {"dtype": None}, "dtype of tensor 'a'"),
        ("a", {"shape": [-2, -3]}, "entry of tensor 'a'"),
        ("a", {"shape": [2, True]}, "entry of tensor 'a'"),
        ("a", {"shape": 6}, "entry of tensor 'a'"),
        ("a", {"data_offsets": [0, 24, 24]}, "entry of tensor 'a'"),
        ("a", {"data_offsets": None}, "entry of tensor 'a'"),
    ],
)
def test_a_malformed_entry_is_named(tmp_path: Path, name: str, change: Entry, message: str) -> None:
    header = {**TWO, name: {**TWO[name], **change}}
    with pytest.raises(InputRefused, match=message):
        read_header(write(tmp_path / "m", header, 26))


def test_an_entry_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="dtype of tensor 'a'"):
        read_header(write(tmp_path / "m", {"a": 1}, 0))


@pytest.mark.parametrize("text", [b"[]", b"{", b"", b"\xff", b'{"a":1,"a":1}', b"[" * 100_000])
def test_a_header_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(InputRefused, match="not valid JSON"):
        read_header(write(tmp_path / "m", text, 0))


@pytest.mark.parametrize("length", [27, 2**40, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    with pytest.raises(InputRefused, match="longer than the file"):
        read_header(write(tmp_path / "m", b"{}", 0, length=length))


def test_a_cut_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"\0\0\0")
    with pytest.raises(InputRefused, match="longer than the file"):
        read_header(tmp_path / "m")
    with pytest.raises(InputRefused, match="cannot be read"):
        read_header(tmp_path / "none")


@given(st.data())
def test_no_single_byte_of_damage_raises_anything_but_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("fuzz") / "m", TWO, 26)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 27))
    content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        header = read_header(path)
    except InputRefused:
        return
    assert sum(tensor.bytes for tensor in header.values()) == 26
