"""Tensors that are kept beside a model: what copies, pickles and deleted files do to them."""

import copy
import gc
import os
import pickle

import pytest
import torch

from qtk.errors import CalibrationError
from qtk.quantizers.original import KeptTensor, Original


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_tensor_is_a_copy_that_copies_share_and_pickles_hold(folder, on_disk, dtype):
    x = torch.randn(5, 3, dtype=dtype).mT
    kept, before = KeptTensor(x, on_disk=on_disk), x.clone()
    x.zero_()
    assert torch.equal(kept.load(), before)
    assert copy.deepcopy(kept) is kept
    assert len(os.listdir(folder)) == on_disk
    pickled = pickle.dumps(kept)
    del kept
    gc.collect()
    assert not os.listdir(folder)
    assert torch.equal(pickle.loads(pickled).load(), before)


def test_a_deleted_file_is_seen_and_named(folder):
    kept = KeptTensor(torch.ones(2), on_disk=True)
    original = Original(kept, None, None, False, "", None)
    assert original.is_there
    (path,) = folder.iterdir()
    path.unlink()
    assert not original.is_there
    with pytest.raises(CalibrationError, match="cannot read a kept weight"):
        kept.load()


def test_a_directory_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/no/such/directory")
    with pytest.raises(CalibrationError, match="set TMPDIR"):
        KeptTensor(torch.ones(2), on_disk=True)


def test_a_forked_process_does_not_delete_the_file(folder):
    kept = KeptTensor(torch.ones(2), on_disk=True)
    child = os.fork()
    if not child:
        del kept
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(kept.load(), torch.ones(2))
