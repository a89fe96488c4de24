"""The container of ``torch.save``: what we write torch reads, what torch writes we locate, and damage is refused."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.columns.flat import raw_bytes
from trajstore.columns.schema import dtypes
from trajstore.errors import ConfigurationError, CorruptStoreError, UnsafeContentError
from trajstore.formats.torch_zip import ALIGNMENT, TensorPlace, TensorSlot, damaged_members, locate, write_torch_zip
from trajstore.testing.formats import random_tensor, same_bytes


def slot(tensor: torch.Tensor, pieces: int = 1) -> TensorSlot:
    data = raw_bytes(tensor)
    cuts = [len(data) * i // pieces for i in range(pieces + 1)]
    return TensorSlot([data[a:b] for a, b in pairwise(cuts)], tensor.dtype, tuple(tensor.shape))


def written(obj: Any) -> tuple[bytes, list[int]]:
    pieces, offsets = write_torch_zip(obj)
    return b"".join(bytes(piece) for piece in pieces), offsets


def at(data: bytes, place: TensorPlace) -> torch.Tensor:
    """Read a located tensor the plain way."""
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    storage = raw.untyped_storage()
    tensor = torch.empty(0, dtype=place.dtype)
    if place.offset % place.dtype.itemsize:
        raw = raw[place.offset :].clone()
        return tensor.set_(raw.untyped_storage(), 0, place.shape, place.stride)
    return tensor.set_(storage, place.offset // place.dtype.itemsize, place.shape, place.stride)


@pytest.mark.parametrize("name", sorted(dtypes()))
@pytest.mark.parametrize("shape", [(3, 2), (0,), (2, 0, 3), (), (1,), (70,)])
def test_torch_reads_every_dtype_and_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, dtypes()[name], torch.Generator().manual_seed(3))
    data, offsets = written({"deep": [{"x": slot(tensor, 3)}, 7, "text", None, True]})
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    for mapped in (False, True):
        read = torch.load(path, weights_only=True, mmap=mapped)
        found = read["deep"][0]["x"]
        assert read["deep"][1:] == [7, "text", None, True]
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert same_bytes(found, tensor)
    assert offsets[0] % ALIGNMENT == 0
    assert data[offsets[0] : offsets[0] + tensor.nbytes] == bytes(raw_bytes(tensor))
    place = locate(data)["deep"][0]["x"]
    assert (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape))
    assert tensor.numel() == 0 or place.offset == offsets[0]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30))
def test_every_record_is_whole_aligned_and_checked(sizes: list[int]) -> None:
    tensors = [torch.arange(size, dtype=torch.int16) for size in sizes]
    data, offsets = written([slot(tensor, 2) for tensor in tensors])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert len(names) == len(set(names))
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    for read, tensor in zip(torch.load(io.BytesIO(data), weights_only=True), tensors, strict=True):
        assert torch.equal(read, tensor)
    for place, offset in zip(locate(data), offsets, strict=True):
        assert place.shape == (0,) or place.offset == offset


def test_a_slot_must_hold_what_it_says() -> None:
    with pytest.raises(ConfigurationError, match="was given 4 bytes"):
        write_torch_zip(TensorSlot([b"1234"], torch.float32, (2,)))


def saved(obj: Any, *, checksums: bool = True) -> bytes:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        target = io.BytesIO()
        torch.save(obj, target)
        return target.getvalue()
    finally:
        torch.serialization.set_crc32_options(before)


def test_files_of_torch_are_located_with_shared_storages_and_strides() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    data = saved({"whole": base, "rows": base[1:3], "turned": base.t(), "bf": base.to(torch.bfloat16), "n": 5})
    places = locate(data)
    assert places["n"] == 5
    for name, tensor in (("whole", base), ("rows", base[1:3]), ("turned", base.t()), ("bf", base.to(torch.bfloat16))):
        assert torch.equal(at(data, places[name]), tensor), name
    assert places["rows"].offset == places["whole"].offset + 6 * 4
    assert not places["turned"].is_contiguous
    assert places["rows"].is_contiguous


def test_what_cannot_be_located_is_said_to_be_so() -> None:
    target = io.BytesIO()
    torch.save({"x": torch.zeros(2)}, target, _use_new_zipfile_serialization=False)
    assert locate(target.getvalue()) is None
    assert locate(saved({"x": torch.eye(3).to_sparse()})) is None


def test_files_that_torch_wrote_without_checksums_are_located() -> None:
    tensor = torch.arange(9)
    data = saved({"a": tensor}, checksums=False)
    assert torch.equal(at(data, locate(data)["a"]), tensor)
    assert damaged_members(data) == []


def test_damaged_members_are_told_by_name() -> None:
    tensor = torch.arange(9) + 0x1234567
    data = bytearray(saved({"a": tensor}))
    assert damaged_members(data) == []
    data[data.index(tensor.numpy().tobytes()) + 5] ^= 4
    assert damaged_members(data) == ["archive/data/0"]
    assert damaged_members(b"no archive") == []


def test_code_in_a_file_of_torch_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    with pytest.raises(UnsafeContentError, match="file"):
        locate(saved({"x": torch.zeros(2), "bad": Hostile()}), source="some file")
    assert not marker.exists()


def test_compressed_archives_and_other_zips_are_refused() -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    with pytest.raises(CorruptStoreError):
        locate(target.getvalue())
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("readme.txt", b"hello")
    with pytest.raises(CorruptStoreError, match=r"data\.pkl"):
        locate(target.getvalue())


def test_truncation_anywhere_is_refused() -> None:
    data = saved({"x": torch.arange(100), "y": torch.ones(3)})
    for length in [*range(4, len(data), 37), len(data) - 1]:
        with pytest.raises(CorruptStoreError):
            locate(data[:length])


def test_changed_bytes_never_place_a_tensor_outside_the_file() -> None:
    data, _ = written({"x": slot(torch.arange(40)), "y": slot(torch.ones(3, 2))})
    rng = random.Random(5)
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = locate(bytes(changed))
        except (CorruptStoreError, UnsafeContentError):
            continue
        for place in (found or {}).values():
            if isinstance(place, TensorPlace):
                assert place.offset >= 0
                assert place.offset + place.nbytes <= len(data)


def test_a_directory_that_points_outside_is_refused() -> None:
    data, _ = written({"x": slot(torch.arange(40))})
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"data/0"))
    changed = bytearray(data)
    struct.pack_into("<II", changed, entry + 20, 1 << 30, 1 << 30)
    with pytest.raises(CorruptStoreError):
        locate(bytes(changed))
    assert zlib.crc32(bytes(changed)) != zlib.crc32(data)
