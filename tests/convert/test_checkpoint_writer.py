from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.convert import reload_check, reload_child, run, target
from mla_convert.convert.checkpoint import open_source
from mla_convert.convert.checkpoint_writer import (
    HEADER_ROOM,
    FolderTransaction,
    ShardWriter,
    refuse_existing,
    write_json,
)
from mla_convert.convert.options import ConvertOptions
from mla_convert.convert.run import convert, estimated_bytes
from mla_convert.errors import CheckFailed, EnvironmentFault, InputRefused, UsageFault
from mla_convert.manifests.digest import sha256_file
from mla_convert.manifests.safetensors_header import read_header
from tests.conftest import PicoFactory
from tests.convert.conftest import ConvertedFactory
from tests.convert.support import load_stock, logits_of, random_ids, read_json, relative_difference
from tests.pico import make_pico
from tests.tolerances import LOGITS_FLOAT32

LOSSLESS = ConvertOptions(lossless=True)


@pytest.fixture(autouse=True)
def _check_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_check, "_run_child", reload_child.compare)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


def test_one_shard_has_the_plain_name(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.add("b", torch.ones(3))
    writer.add("a", torch.zeros(2, 2, dtype=torch.bfloat16))
    writer.finish()

    assert names(tmp_path) == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["b"], torch.ones(3))
    assert writer.dtypes == ("bfloat16", "float32")


def test_shards_are_closed_at_their_size_and_indexed(tmp_path: Path) -> None:
    writer, tensors = ShardWriter(tmp_path, shard_bytes=100), {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    for name, value in tensors.items():
        writer.add(name, value)
    writer.finish()

    index = read_json(tmp_path / "model.safetensors.index.json")
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert names(tmp_path) == [*files, "model.safetensors.index.json"]
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"] == {"t0": files[0], "t1": files[0], "t2": files[1], "t3": files[1], "t4": files[2]}
    for name, value in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], value)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=10)
    for name in ("small", "large", "last"):
        writer.add(name, torch.ones(1 if name == "small" else 100))
    writer.finish()

    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_shard_is_closed_when_its_header_is_full(tmp_path: Path) -> None:
    writer, names_ = ShardWriter(tmp_path), [f"{'long' * 50}.{number}" for number in range(500)]
    for number, name in enumerate(names_):
        writer.add(name, torch.tensor([float(number)]))
    writer.finish()

    index = read_json(tmp_path / "model.safetensors.index.json")["weight_map"]
    assert len(set(index.values())) == 3
    for number, name in enumerate(names_):
        assert load_file(tmp_path / index[name])[name] == number
    for shard in set(index.values()):
        # The whole room is the header, so that tensors start on a page.
        assert (tmp_path / shard).read_bytes()[:8] == (HEADER_ROOM - 8).to_bytes(8, "little")
        assert read_header(tmp_path / shard).keys() == {name for name in names_ if index[name] == shard}


def test_every_tensor_starts_where_its_dtype_can_be_mapped(tmp_path: Path) -> None:
    writer, half = ShardWriter(tmp_path), torch.ones(3, dtype=torch.bfloat16)
    writer.add("half", half)
    writer.add("again", half)
    writer.add("full", torch.ones(3))
    writer.add("odd", half)
    writer.add("another", torch.ones(3))
    writer.finish()

    for shard in tmp_path.glob("*.safetensors"):
        assert all(entry.start % {"bfloat16": 2}.get(entry.dtype, 4) == 0 for entry in read_header(shard).values())
    index = read_json(tmp_path / "model.safetensors.index.json")["weight_map"]
    assert index["half"] == index["again"] == index["full"] == index["odd"] != index["another"]
    assert torch.equal(load_file(tmp_path / index["another"])["another"], torch.ones(3))


def test_no_tensor_is_held(tmp_path: Path) -> None:
    writer, tensor = ShardWriter(tmp_path), torch.ones(3)
    gone = weakref.ref(tensor)
    writer.add("a", tensor)
    del tensor

    assert gone() is None
    assert (tmp_path / "part-00000.safetensors").stat().st_size == HEADER_ROOM + 12


def test_a_name_is_written_once(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=4)
    writer.add("a", torch.ones(1))
    with pytest.raises(ValueError, match="a is written twice"):
        writer.add("a", torch.ones(1))
    writer.add("b", torch.ones(1))
    with pytest.raises(ValueError, match="a is written twice"):
        writer.add("a", torch.ones(1))


def test_tensors_that_share_storage_or_are_views_are_written_as_they_are(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    writer = ShardWriter(tmp_path)
    writer.add("whole", base)
    writer.add("again", base)
    writer.add("turned", base.T)
    base += 100  # what was added is a copy
    writer.finish()

    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["whole"], torch.arange(12.0).view(3, 4))
    assert torch.equal(stored["turned"], torch.arange(12.0).view(3, 4).T)


def test_a_sharded_target_loads_and_computes_the_same(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_shards(folder: Path) -> ShardWriter:
        return ShardWriter(folder, shard_bytes=40_000)

    monkeypatch.setattr(run, "ShardWriter", small_shards)
    source = pico(kv_heads=2, sharded=True)
    done = convert(str(source), tmp_path / "out", LOSSLESS, command=["test"])

    index = read_json(done.folder / "model.safetensors.index.json")
    shards = sorted(done.folder.glob("*.safetensors"))
    sizes = [sum(t.numel() * t.element_size() for t in load_file(shard).values()) for shard in shards]
    assert len(shards) > 3
    assert max(sizes) <= 40_000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: shard.name for shard in shards for name in load_file(shard)}
    ids = random_ids(97, 2, 40, seed=1)
    difference = relative_difference(logits_of(load_stock(done.folder), ids), logits_of(load_stock(source), ids))
    assert difference <= LOGITS_FLOAT32


@pytest.mark.parametrize("profile", ["engine", "hf"])
def test_the_size_is_known_before_the_work(converted: ConvertedFactory, profile: str) -> None:
    done = converted(source={"tie_word_embeddings": True, "rms_norm_eps": 1e-5}, lossless=True, profile=profile)
    tensors = load_file(done.folder / "model.safetensors").values()
    actual = sum(value.numel() * value.element_size() for value in tensors)

    estimate = estimated_bytes(open_source(str(done.source)), done.plan)

    # Left out: latent norms and biases.
    assert 0.98 * actual <= estimate <= actual


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_full_disk_is_seen_before_any_work(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**12, 10**12 - 1000, 1000))

    with pytest.raises(EnvironmentFault, match="not enough disk space") as caught:
        convert(str(pico()), tmp_path / "deep" / "out", LOSSLESS)

    assert caught.value.exit_code == 5
    assert caught.value.where == str(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("when", ["weights", "manifest", "the last rename"])
def test_a_disk_that_fills_up_leaves_nothing(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    source = pico()
    before = digests(source)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "weights":
        monkeypatch.setattr(ShardWriter, "add", full)
    elif when == "manifest":
        monkeypatch.setattr(run, "build_manifest", full)
    else:
        monkeypatch.setattr(FolderTransaction, "commit", full)

    with pytest.raises(OSError, match="No space left"):
        convert(str(source), tmp_path / "out", LOSSLESS)

    assert names(tmp_path) == []
    assert digests(source) == before


def test_an_opened_source_is_as_good_as_its_path(pico: PicoFactory, tmp_path: Path) -> None:
    by_path = convert(str(pico()), tmp_path / "a", LOSSLESS, command=["test"])
    opened = convert(open_source(str(pico())), tmp_path / "b", LOSSLESS, command=["test"])

    assert opened.plan == by_path.plan
    assert opened.manifest.canonical_mla_id == by_path.manifest.canonical_mla_id


def test_an_existing_output_is_refused(pico: PicoFactory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")

    with pytest.raises(UsageFault, match="the output folder exists") as caught:
        convert(str(pico()), out, LOSSLESS)
    assert "--overwrite" in str(caught.value.remedy)

    # Nor is a folder replaced that is no checkpoint.
    with pytest.raises(UsageFault, match="checkpoints only"):
        convert(str(pico()), out, LOSSLESS, overwrite=True)
    assert (out / "precious.txt").read_text() == "mine"
    assert names(tmp_path) == ["out"]


def test_a_file_or_a_link_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")

    for name in ("file", "link", "dangling"):
        for overwrite in (False, True):
            with pytest.raises(UsageFault, match="not a folder"):
                refuse_existing(tmp_path / name, overwrite=overwrite)


@pytest.mark.parametrize("inside", [".", "sub", "sub/deeper", ".."])
def test_the_source_is_never_the_output(pico: PicoFactory, tmp_path: Path, inside: str) -> None:
    source = shutil.copytree(pico(), tmp_path / "parent" / "source")
    before = digests(source)

    with pytest.raises(UsageFault):
        convert(str(source), source / inside, LOSSLESS, overwrite=True)

    assert digests(source) == before


def test_an_empty_folder_is_a_free_place(pico: PicoFactory, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    done = convert(str(pico()), tmp_path / "out", LOSSLESS, command=["test"])

    assert (done.folder / "mla_manifest.json").is_file()
    assert names(tmp_path) == ["out"]


def test_overwrite_replaces_the_old_folder_whole(pico: PicoFactory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(str(pico()), out, LOSSLESS, command=["test"])
    (out / "leftover.txt").write_text("of the old one")
    old = sha256_file(out / "model.safetensors")

    convert(str(pico(kv_heads=2)), out, LOSSLESS, overwrite=True, command=["test"])

    assert names(tmp_path) == ["out"]
    assert sha256_file(out / "model.safetensors") != old
    assert not (out / "leftover.txt").exists()


def test_the_old_folder_stays_until_the_new_one_is_checked(
    pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(str(pico()), out, LOSSLESS, command=["test"])
    before = digests(out)

    def spoiled(folder: Path, probe: Path) -> Any:
        assert digests(out) == before
        path = folder / "config.json"
        path.write_text(json.dumps({**read_json(path), "rope_interleave": False}), encoding="utf-8")
        return reload_child.compare(folder, probe)

    monkeypatch.setattr(reload_check, "_run_child", spoiled)
    with pytest.raises(CheckFailed, match="deleted"):
        convert(str(pico(kv_heads=2)), out, LOSSLESS, overwrite=True)

    assert digests(out) == before
    assert names(tmp_path) == ["out"]


def test_a_failed_check_leaves_no_output(pico: PicoFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layer: Any, plan: Any, norm: Any) -> Any:
        stock = original(layer, plan, norm)
        stock.tensors["o_proj.weight"] *= 1.01
        return stock

    original = target.stock_layer
    monkeypatch.setattr(target, "stock_layer", wrong)
    with pytest.raises(CheckFailed) as caught:
        convert(str(pico()), tmp_path / "out", LOSSLESS)

    assert caught.value.exit_code == 3
    assert caught.value.where == "model.layers.0.self_attn.o_proj"
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stops_the_work(tmp_path: Path, value: float) -> None:
    source = make_pico(tmp_path / "source")
    path = source / "model.safetensors"
    state = load_file(path)
    state["model.layers.3.mlp.gate_proj.weight"][0, 0] = value
    save_file(state, path, metadata={"format": "pt"})

    with pytest.raises(InputRefused, match="not finite") as caught:
        convert(str(source), tmp_path / "out", LOSSLESS)

    assert caught.value.where == "model.layers.3.mlp.gate_proj.weight"
    assert names(tmp_path) == ["source"]


def test_json_is_sorted_and_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": [1, 2]})

    assert (tmp_path / "a.json").read_text() == '{\n  "a": [\n    1,\n    2\n  ],\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "b.json", {"a": float("nan")})


def test_a_transaction_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    with FolderTransaction(tmp_path / "a" / "out", overwrite=False) as transaction:
        (transaction.working / "file").write_text("x")
        assert transaction.working.name.startswith(".out.incomplete")

    assert names(tmp_path / "a") == []


def test_a_commit_is_one_rename(tmp_path: Path) -> None:
    with FolderTransaction(tmp_path / "out", overwrite=False) as transaction:
        (transaction.working / "file").write_text("x")
        transaction.commit()

    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "x"


def test_the_remains_of_a_dead_run_are_cleared(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".out.incomplete-{dead.pid}").mkdir()
    alive = tmp_path / f".out.incomplete-{os.getppid()}"
    alive.mkdir()

    with FolderTransaction(tmp_path / "out", overwrite=False) as transaction:
        transaction.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "out"])


def test_a_run_killed_between_two_renames_gives_the_old_folder_back(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    old = tmp_path / f".out.replaced-{dead.pid}"
    old.mkdir()
    (old / "config.json").write_text("{}")

    with FolderTransaction(tmp_path / "out", overwrite=True):
        pass  # this run fails before its commit
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
