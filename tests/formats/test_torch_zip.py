"""The container of ``torch.save``: torch reads our files, we locate tensors in torch's, and damage is refused."""

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

from tests.support.equality import same
from tests.support.formats import FormatConformance, random_tensor
from trajstore._core.columns.flat import raw_bytes
from trajstore._core.columns.schema import dtypes
from trajstore._core.formats import zip_members
from trajstore._core.formats.base import TrajectoryFormat
from trajstore._core.formats.pkl import PklFormat
from trajstore._core.formats.pt import PtFormat
from trajstore._core.formats.torch_zip import (
    ALIGNMENT,
    TensorPlace,
    TensorSlot,
    UnplacedTensor,
    damaged_members,
    locate,
    write_torch_zip,
)
from trajstore.errors import ConfigurationError, CorruptStoreError, StoreError, UnsafeContentError


def slot(tensor: torch.Tensor, pieces: int = 1) -> TensorSlot:
    data = raw_bytes(tensor)
    cuts = [len(data) * i // pieces for i in range(pieces + 1)]
    return TensorSlot([data[a:b] for a, b in pairwise(cuts)], tensor.dtype, tuple(tensor.shape))


def written(obj: Any) -> tuple[bytes, list[int]]:
    pieces, offsets = write_torch_zip(obj)
    return b"".join(bytes(piece) for piece in pieces), offsets


def at(data: bytes, place: TensorPlace) -> torch.Tensor:
    """Return the located tensor from ``data``, by plain torch calls."""
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
        tensor_read = read["deep"][0]["x"]
        assert read["deep"][1:] == [7, "text", None, True]
        assert tensor_read.dtype == tensor.dtype
        assert tensor_read.shape == tensor.shape
        assert same(tensor_read, tensor)
    assert offsets[0] % ALIGNMENT == 0
    assert data[offsets[0] : offsets[0] + tensor.nbytes] == bytes(raw_bytes(tensor))
    place = locate(data)["deep"][0]["x"]
    assert (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape))
    assert tensor.numel() == 0 or place.offset == offsets[0]


def test_a_slot_must_hold_what_it_says() -> None:
    with pytest.raises(ConfigurationError, match="was given 4 bytes"):
        write_torch_zip(TensorSlot([b"1234"], torch.float32, (2,)))


def saved(obj: Any, **options: Any) -> bytes:
    target = io.BytesIO()
    torch.save(obj, target, **options)
    return target.getvalue()


def test_files_that_torch_wrote_without_checksums_are_located() -> None:
    tensor = torch.arange(9)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved({"a": tensor})
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(at(data, locate(data)["a"]), tensor)
    assert damaged_members(data) == []


def test_changed_bytes_never_place_a_tensor_outside_the_file() -> None:
    data, _ = written({"x": slot(torch.arange(40)), "y": slot(torch.ones(3, 2))})
    rng = random.Random(5)
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        try:
            places = locate(bytes(changed))
        except (CorruptStoreError, UnsafeContentError):
            continue
        for place in (places or {}).values():
            if isinstance(place, TensorPlace):
                assert place.offset >= 0
                assert place.offset + place.nbytes <= len(data)


# -- archives byte by byte: torch's alignment, sizes beyond 4 GiB, and false claims --


def test_records_lie_where_torch_puts_them() -> None:
    tensors = {f"c{i}": torch.arange(i, dtype=torch.float32) for i in range(12)} | {
        "u": torch.arange(6).to(torch.uint16)
    }
    ours, theirs = written({key: slot(tensor) for key, tensor in tensors.items()})[0], saved(tensors)
    with zipfile.ZipFile(io.BytesIO(ours)) as left, zipfile.ZipFile(io.BytesIO(theirs)) as right:
        for name in left.namelist():
            mine, other = left.getinfo(name), right.getinfo(name)
            assert (mine.header_offset, mine.file_size, mine.CRC) == (other.header_offset, other.file_size, other.CRC)
            assert (mine.flag_bits, mine.compress_type) == (other.flag_bits, other.compress_type), name
        end = left.getinfo("archive/version").header_offset
    assert ours[:end] == theirs[:end]


@pytest.mark.parametrize("limit", [0, 200, 1500])
def test_sixty_four_bit_sizes_and_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Archives write numbers beyond 4 GiB differently; here ``limit`` takes the place of 4 GiB."""
    tensors = [torch.randn(shape) for shape in ((0,), (5,), (100,), (3, 7))]
    packed = [slot(tensor) for tensor in tensors]
    with monkeypatch.context() as patch:
        patch.setattr(zip_members, "_ZIP64_FROM", limit)
        pieces, offsets = write_torch_zip(packed)
    data = b"".join(pieces)
    assert any(struct.pack("<2H", 1, size) in data for size in (8, 16, 24))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        assert all(torch.equal(left, right) for left, right in zip(loaded, tensors, strict=True))
    assert [place.offset for place in locate(data)] == offsets


def test_a_known_checksum_is_taken() -> None:
    tensor = torch.arange(6)
    known = TensorSlot([raw_bytes(tensor)], tensor.dtype, (6,), crc32=zlib.crc32(raw_bytes(tensor)))
    assert written([known]) == written([slot(tensor)])


def test_a_slot_that_is_used_twice_is_written_once() -> None:
    shared = slot(torch.arange(3))
    pieces, offsets = write_torch_zip([shared, shared])
    assert len(offsets) == 1
    first, second = torch.load(io.BytesIO(b"".join(pieces)), weights_only=True)
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("foreign", [torch.ones(1), object(), Path("x"), io.BytesIO()])
def test_only_plain_content_is_written(foreign: Any) -> None:
    with pytest.raises(ConfigurationError, match=type(foreign).__name__):
        write_torch_zip({"x": [foreign]})


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.tensor([1 + 2j]).conj()], ids=["sparse", "conj"])
def test_tensors_that_are_no_region_of_the_file_have_no_place(tensor: torch.Tensor) -> None:
    unplaced, place = locate(saved([tensor, torch.ones(2)]))
    assert isinstance(unplaced, UnplacedTensor)
    assert isinstance(place, TensorPlace)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (saved([torch.ones(2)], _use_new_zipfile_serialization=False), "not a file of torch.save since torch 1.6"),
        (b"", "not a file of torch.save"),
        (b"not an archive", "not a file of torch.save"),
        (written([slot(torch.ones(2))])[0].replace(b"ZZlittle", b"ZZ big  "), "other byte order"),
    ],
    ids=["legacy", "empty", "text", "byte order"],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptStoreError, match=message):
        locate(data)


GOOD, _ = written({"a": slot(torch.arange(40)), "b": slot(torch.ones(3))})


def rewritten(data: bytes, **changes: Any) -> bytes:
    """Return ``data`` with changed fields in the zip directory's entry of data/0."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start = archive.start_dir
    position = data.index(b"PK\x01\x02", data.index(b"archive/byteorder", start))
    fields = list(zip_members._CENTRAL.unpack_from(data, position))
    names = {"flags": 3, "method": 4, "crc": 7, "stored": 8, "size": 9, "name": 10, "extra": 11, "header": 16}
    for key, value in changes.items():
        fields[names[key]] = value
    result = bytearray(data)
    zip_members._CENTRAL.pack_into(result, position, *fields)
    return bytes(result)


def offset_of(data: bytes, name: str) -> int:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.getinfo(f"archive/{name}").header_offset


HOSTILE = {
    "compressed": rewritten(GOOD, method=8),
    "encrypted": rewritten(GOOD, flags=0x0809),
    "sizes differ": rewritten(GOOD, stored=8),
    "too long": rewritten(GOOD, stored=328, size=328),
    "longer than the file": rewritten(GOOD, stored=1 << 31, size=1 << 31),
    "header outside": rewritten(GOOD, header=1 << 31),
    "header within data": rewritten(GOOD, header=offset_of(GOOD, "data/0") + 1),
    "header of another": rewritten(GOOD, header=offset_of(GOOD, "data/1")),
    "zip64 without field": rewritten(GOOD, header=0xFFFFFFFF),
    "name too long": rewritten(GOOD, name=60000),
    "extra too long": rewritten(GOOD, extra=60000),
    "no end": GOOD[:-22],
    "one member": GOOD[: offset_of(GOOD, "data/1")],
    "only the beginning": GOOD[:4],
    "tail": GOOD + b"x",
    "head": b"PK\x03\x04" + GOOD,
    "no data.pkl": GOOD.replace(b"archive/data.pkl", b"archive/data.pkx"),
    "two of a name": GOOD.replace(b"archive/data/1", b"archive/data/0"),
    "absent storage": GOOD.replace(b"archive/data/1", b"archive/data/7"),
    "compressed throughout": b"",
}
with io.BytesIO() as _target:
    with zipfile.ZipFile(_target, "w", zipfile.ZIP_DEFLATED) as _archive, zipfile.ZipFile(io.BytesIO(GOOD)) as _good:
        for _name in _good.namelist():
            _archive.writestr(_name, _good.read(_name))
    HOSTILE["compressed throughout"] = _target.getvalue()


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_archives_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptStoreError, match=r"some\.pt"):
        locate(data, source="some.pt")


def test_members_that_overlap_are_named() -> None:
    reach = offset_of(GOOD, "data/1") - offset_of(GOOD, "data/0")
    with pytest.raises(CorruptStoreError, match="'archive/data/0' and 'archive/data/1' overlap"):
        locate(rewritten(GOOD, stored=reach, size=reach))


def with_program(program: bytes) -> bytes:
    """Return an archive with another data.pkl and the storages of ``GOOD``."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(GOOD)) as good, zipfile.ZipFile(target, "w") as archive:
        for name in good.namelist():
            archive.writestr(name, program if name == "archive/data.pkl" else good.read(name))
    return target.getvalue()


def program_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def test_other_writers_of_zip_are_read() -> None:
    data = with_program(program_of(GOOD))
    place = locate(data)["a"]
    assert data[place.offset : place.offset + place.nbytes] == torch.arange(40).numpy().tobytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"K\x28\x85", b"K\x29\x85"),  # 41 elements
        (b"K\x28tq\x07Q", b"K\x27tq\x07Q"),  # a storage of 39 elements
        (b"X\x07\x00\x00\x00storage", b"X\x07\x00\x00\x00garbage"),
        (b"ctorch\nLongStorage", b"ctorch\nByteStorage"),
        (b"ctorch\nLongStorage", b"ctorch\nfloat64"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00."),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"),
    ],
)
def test_tensors_must_fit_their_storages(before: bytes, after: bytes) -> None:
    program = program_of(GOOD)
    assert before in program
    with pytest.raises(StoreError):
        locate(with_program(program.replace(before, after)))


def test_expanded_tensors_are_refused() -> None:
    with pytest.raises(UnsafeContentError, match="contiguous copy"):
        locate(saved([torch.ones(1).expand(1 << 40)]))


# -- Shards in this container and pickled ones: conformance suite --


class TestPklConformance(FormatConformance):
    @pytest.fixture
    def format(self) -> TrajectoryFormat:
        return PklFormat()


class TestPtConformance(FormatConformance):
    @pytest.fixture
    def format(self) -> TrajectoryFormat:
        return PtFormat()
