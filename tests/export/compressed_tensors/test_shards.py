"""Shards, read by the library that others read them with."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from qtk.export.compressed_tensors import shards

TENSORS = {
    "a": torch.randn(5, 3).bfloat16(), "b": torch.arange(3), "c": torch.zeros(0, 4), "d": torch.randn(4, 3).mT,
    "e": torch.tensor(7, dtype=torch.int8), "f": torch.randn(3).to(torch.float8_e4m3fn), "g": torch.tensor([True]),
}


MANY = TENSORS | {f"layers.{layer}.weight": torch.randn(4, 5) for layer in range(20)}  # a header of more than 1 KB


def written(folder, tensors=TENSORS, room=0):
    writer = shards.Shards(folder, room)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.end()
    return sorted(path.name for path in folder.iterdir())


def same(found, tensor):
    return found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(
        found.contiguous().flatten().view(torch.uint8), tensor.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize(("tensors", "room"), [(TENSORS, 0), (MANY, 0), (MANY, len(MANY))])
def test_one_file_holds_all_tensors_aligned(tmp_path, tensors, room):
    assert written(tmp_path, tensors, room) == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same(found[name], each) for name, each in tensors.items())
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8:8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert all(each["data_offsets"][0] % tensors[name].element_size() == 0 for name, each in header.items())


def test_several_files_have_an_index_and_are_split_as_by_hugging_face(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "LARGEST_BYTES", 48)
    files = written(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.numel() * each.element_size() for each in TENSORS.values())
    found = {name: tensor for file in files[:-1] for name, tensor in load_file(tmp_path / file).items()}
    assert all(same(found[name], each) for name, each in TENSORS.items())
    assert all(same(read(), TENSORS[name]) for name, read in shards.readers(tmp_path).items())
    hub = pytest.importorskip("huggingface_hub")
    split = hub.split_torch_state_dict_into_shards(TENSORS, max_shard_size=48)
    assert index["weight_map"] == split.tensor_to_filename


def test_what_was_read_leaves_memory(tmp_path):
    written(tmp_path, {str(each): torch.ones(1 << 20) for each in range(8)})

    def resident():
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssFile")) / 1024

    before = resident()
    for read in shards.readers(tmp_path).values():
        assert float(read().sum()) == 1 << 20
    assert resident() - before < 8  # MB, of 32


def test_no_tensor_is_a_file_too(tmp_path):
    assert written(tmp_path, {}) == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors") == {}


def test_bytes_are_the_same_where_the_system_copies_all_a_part_or_nothing_of_a_file(tmp_path, monkeypatch):
    own, asked = os.copy_file_range, []

    def part(source, target, count, offset):
        asked.append(count)
        if len(asked) % 2 == 0:
            raise OSError(errno.EXDEV, "not supported")
        return own(source, target, max(1, count // 2), offset)

    def short(source, target, count, offset):
        return own(source, target, min(count, 5), offset)

    (tmp_path / "system").mkdir()
    expected = written(tmp_path / "system", MANY), (tmp_path / "system" / "model.safetensors").read_bytes()
    for name, copying in {"part": part, "short": short, "nothing": None}.items():
        if copying is None:
            monkeypatch.delattr(os, "copy_file_range")
        else:
            monkeypatch.setattr(os, "copy_file_range", copying)
        (tmp_path / name).mkdir()
        found = written(tmp_path / name, MANY), (tmp_path / name / "model.safetensors").read_bytes()
        assert found == expected
    assert len(asked) > 4


def test_with_room_for_the_header_bytes_are_written_once(tmp_path, monkeypatch):
    own, copied = os.copy_file_range, []
    monkeypatch.setattr(os, "copy_file_range", lambda *given: copied.append(own(*given)) or copied[-1])
    (tmp_path / "without").mkdir()
    for folder, room, least in ((tmp_path, len(MANY), 35), (tmp_path / "without", 0, 1700)):
        copied.clear()
        written(folder, MANY, room)
        assert least <= sum(copied) < 1.1 * least


def test_the_system_copies_what_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(shards.shutil, "copyfileobj", lambda source, target, size: left.append(source.read()))
    left: list[bytes] = []
    written(tmp_path)
    assert left
    assert not any(left)
    assert all(same(load_file(tmp_path / "model.safetensors")[name], each) for name, each in TENSORS.items())
