from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.convert.tensor_files import all_finite, open_tensor_files
from mla_convert.errors import InputRefused
from tests.pico import PicoOptions, build_pico_model, make_pico

FORMATS: dict[str, dict[str, Any]] = {
    "one safetensors file": {},
    "sharded safetensors": {"sharded": True},
    "one pickle": {"weight_format": "bin"},
    "sharded pickles": {"weight_format": "bin", "sharded": True},
}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return build_pico_model("llama", PicoOptions()).state_dict()


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_pico(tmp_path, sharded=True)


def refuse(folder: Path, match: str) -> InputRefused:
    with pytest.raises(InputRefused, match=match) as caught:
        open_tensor_files(folder)
    return caught.value


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_tensors(tmp_path: Path, kind: str, expected: dict[str, Tensor]) -> None:
    files = open_tensor_files(make_pico(tmp_path, **FORMATS[kind]))

    assert files.names == set(expected)
    assert (len(files.weight_files) > 1) is FORMATS[kind].get("sharded", False)
    for name, value in expected.items():
        assert files.info(name).shape == tuple(value.shape)
        assert files.info(name).dtype == torch.float32
        assert torch.equal(files.read(name), value)


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    """Every byte of every tensor is damaged, and nobody notices until one is read."""
    make_pico(tmp_path, dtype="bfloat16")
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = b"\xff" * (len(content) - start)
    path.write_bytes(content)

    files = open_tensor_files(tmp_path)

    assert files.info("model.norm.weight").dtype == torch.bfloat16
    assert bool(files.read("model.norm.weight").isnan().all())


def test_safetensors_are_preferred_to_a_pickle_beside_them(tmp_path: Path) -> None:
    make_pico(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")

    assert open_tensor_files(tmp_path).weight_files == ("model.safetensors",)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "model.safetensors" in str(refuse(tmp_path, "no weights").expected)


class Payload:
    """What an attacker would put into a pickle: it runs a function when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("shape", ["inside a state dict", "bare", "not a torch file"])
def test_a_malicious_pickle_is_refused_without_running_it(tmp_path: Path, shape: str) -> None:
    mark = tmp_path / "executed"
    path = tmp_path / "pytorch_model.bin"
    if shape == "not a torch file":
        path.write_bytes(pickle.dumps(Payload(mark), protocol=2))
    else:
        payload: Any = Payload(mark)
        torch.save({"model.norm.weight": payload} if shape == "inside a state dict" else payload, path)

    error = refuse(tmp_path, "it was not run")

    assert not mark.exists()
    assert "pytorch_model.bin" in str(error.where)
    # The test can fail: this pickle does run where it is trusted.
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"step": 3, "model": {"weight": torch.ones(1)}}, tmp_path / "pytorch_model.bin")

    refuse(tmp_path, "not a state dict")


def test_an_old_pickle_that_is_no_zip_file_is_read(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(expected, path, _use_new_zipfile_serialization=False)

    files = open_tensor_files(tmp_path)

    assert not zipfile.is_zipfile(path)
    assert torch.equal(files.read("model.norm.weight"), expected["model.norm.weight"])


def test_a_truncated_pickle_is_refused(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    buffer = io.BytesIO()
    torch.save(expected, buffer)
    (tmp_path / "pytorch_model.bin").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])

    refuse(tmp_path, "it was not run")


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = make_pico(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])

    assert str(path) in str(refuse(tmp_path, "damaged").where)


def edit_index(folder: Path, **weight_map: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= weight_map
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file", ["absent.safetensors", "../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""]
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, file: str) -> None:
    folder = make_pico(tmp_path / "inner", sharded=True)
    make_pico(tmp_path)  # ../model.safetensors does exist
    edit_index(folder, **{"model.norm.weight": file})

    error = refuse(folder, "not there")

    assert error.found == file


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded: Path) -> None:
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    holder = next(name for name in shards if "model.norm.weight" in load_file(sharded / name))
    other = next(name for name in shards if name != holder)

    edit_index(sharded, **{"model.norm.weight": other})

    error = refuse(sharded, "disagree")
    assert error.expected == f"model.norm.weight in {other}"
    assert error.found == f"in {holder}"


def test_an_index_that_leaves_a_tensor_out_is_refused(sharded: Path) -> None:
    edit_index(sharded, **{"model.norm.weight": None})

    assert "model.norm.weight" in str(refuse(sharded, "disagree").expected)


def test_an_index_that_names_a_tensor_too_many_is_refused(sharded: Path) -> None:
    first = min(path.name for path in sharded.glob("*.safetensors"))
    edit_index(sharded, **{"model.ghost.weight": first})

    assert "model.ghost.weight" in str(refuse(sharded, "disagree").expected)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_what_is_no_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)

    refuse(sharded, "index")


def test_a_tensor_stored_twice_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: value}, second)

    assert refuse(sharded, "twice").where == name


@pytest.mark.parametrize(
    "text", ['{"weight_map": 3}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}']
)
def test_an_index_of_the_wrong_types_is_refused(tmp_path: Path, text: str) -> None:
    folder = make_pico(tmp_path, sharded=True)
    (folder / "model.safetensors.index.json").write_text(text)

    with pytest.raises(InputRefused, match="index"):
        open_tensor_files(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    # Longer than a vector register, with a tail that is no multiple of one.
    whole = torch.linspace(-1, 1, 1003).to(dtype)

    assert all_finite(whole)
    assert all_finite(torch.empty(0, dtype=dtype))
    for place in (0, 17, 1002):
        spoiled = whole.clone()
        spoiled[place] = value
        assert not all_finite(spoiled)
        assert not all_finite(spoiled.view(17, 59).T)
