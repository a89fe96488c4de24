"""Conformance suite of directories: subclass :class:`DirectoryConformance`, define ``open_again`` and ``behind``."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import socket
from array import array
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from trajstore._core.files.base import Buffer, Directory, EncodedFile
from trajstore.errors import CorruptStoreError, StoreLockedError, UnsafeContentError

UNSAFE_NAMES = ("", "/", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a/", "C:/x", "a\\b", "a\0b", "a\nb")
"""Names that every call must refuse."""


def publish(directory: Directory, **files: bytes) -> None:
    """Publish files; ``__`` in a name stands for ``/``."""
    directory.publish([EncodedFile(name.replace("__", "/"), [data]) for name, data in files.items()])


def open_files(name: str) -> int:
    """Count this process's open files whose paths contain a test's name, caches included."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            path = os.readlink(f"/proc/self/fd/{number}")
            count += path.startswith("/") and name in path
    return count


class DirectoryConformance:
    """Subclass this and define the fixtures ``open_again`` and ``behind``; every test must pass."""

    @pytest.fixture
    def open_again(self) -> Callable[[], Directory]:
        """Return a function that opens the same place, empty at first, anew with each call, like another process."""
        raise NotImplementedError("define the fixture 'open_again' in the subclass")

    @pytest.fixture
    def behind(self) -> MutableMapping[str, bytes]:
        """Return the files of that place by name, accessed without the class under test."""
        raise NotImplementedError("define the fixture 'behind' in the subclass")

    @pytest.fixture
    def directory(self, open_again: Callable[[], Directory]) -> Directory:
        """A new, empty directory."""
        directory = open_again()
        directory.create()
        return directory

    def test_exists_when_something_is_in_it(self, open_again: Callable[[], Directory]) -> None:
        assert not open_again().exists()
        directory = open_again()
        directory.create()
        publish(directory, a__b=b"1")
        assert open_again().exists()

    def test_what_it_writes_lies_there(self, directory: Directory, behind: MutableMapping[str, bytes]) -> None:
        directory.create()
        assert directory.names() == directory.names("shards") == []
        publish(directory, top=b"0123456789", shards__one=b"", shards__deep__er__two=b"xyz")
        directory.append("log/1", b"a line\n")
        expected = {"top": b"0123456789", "shards/one": b"", "shards/deep/er/two": b"xyz", "log/1": b"a line\n"}
        assert dict(behind) == expected
        if directory.can_append:
            directory.append("log/1", b"another\n")
            assert behind["log/1"] == b"a line\nanother\n"
        else:
            with pytest.raises(OSError, match="log/1"):
                directory.append("log/1", b"another\n")
            assert behind["log/1"] == b"a line\n"
        publish(directory, top=b"new")
        assert behind["top"] == b"new"
        directory.remove(["top", "absent", "no/folder/absent", "shards/deep/er/two", "log/1"])
        directory.remove([])
        assert dict(behind) == {"shards/one": b""}

    def test_what_lies_there_is_read(self, directory: Directory, behind: MutableMapping[str, bytes]) -> None:
        for name, data in {"top": b"0123", "log/1": b"ab", "shards/deep/x": b"xyz"}.items():
            behind[name] = data
        assert directory.names() == ["log/1", "shards/deep/x", "top"]
        assert directory.sizes() == {"log/1": 2, "shards/deep/x": 3, "top": 4}
        assert directory.listing() == (["top"], ["log", "shards"])
        assert directory.read("top", 1) == b"123"
        assert directory.size("log/1") == 2
        assert directory.map("shards/deep/x", 3).view.tobytes() == b"xyz"
        del behind["log/1"]
        with pytest.raises(FileNotFoundError, match="log/1"):
            directory.read("log/1")

    def test_names_below_a_folder(self, directory: Directory) -> None:
        publish(directory, log__1=b"", log__2__3=b"", logs__1=b"", log2=b"")
        assert directory.names("log") == ["log/1", "log/2/3"]
        assert directory.names("log/2") == ["log/2/3"]
        assert directory.names("lo") == []
        assert directory.names("log2") == []

    def test_sizes_and_listing(self, directory: Directory) -> None:
        assert directory.sizes() == {}
        assert directory.listing() == ([], [])
        publish(directory, top=b"0123", log__1=b"ab", shards__deep__x=b"xyz")
        assert directory.sizes() == {"log/1": 2, "shards/deep/x": 3, "top": 4}
        assert directory.sizes("shards") == {"shards/deep/x": 3}
        assert directory.sizes("top") == directory.sizes("absent") == {}
        absent = [f"shards/{name}" for name in ("deep", "deep/y", "absent/x", "deep/x/y", 300 * "z")]
        assert directory.sizes_of(["shards/deep/x", *absent], "shards").tolist() == [3, *(-1 for _ in absent)]
        assert directory.sizes_of([], "shards").tolist() == []
        assert directory.listing() == (["top"], ["log", "shards"])
        assert directory.listing("shards") == ([], ["shards/deep"])
        assert directory.listing("log") == (["log/1"], [])
        assert directory.listing("top") == directory.listing("absent") == ([], [])

    def test_pieces_of_any_kind(self, directory: Directory) -> None:
        numbers = array("d", [1.0, -2.0])
        pieces: list[Buffer] = [b"a", bytearray(b"bc"), memoryview(b""), memoryview(numbers), b"z" * 5000]
        directory.publish([EncodedFile("file", pieces), EncodedFile("none", [])])
        assert directory.read("file") == b"abc" + numbers.tobytes() + b"z" * 5000
        assert directory.read("none") == b""

    def test_absent_files_are_named(self, directory: Directory) -> None:
        publish(directory, folder__file=b"")
        for name in ("absent", "folder/absent", "no/folder"):
            for call in (directory.read, directory.size):
                with pytest.raises(FileNotFoundError, match=name):
                    call(name)
            with pytest.raises(FileNotFoundError, match=name):
                directory.read(name, 3)
            with pytest.raises(CorruptStoreError, match=f"{name}: is missing, but the index names it"):
                directory.map(name)

    @pytest.mark.parametrize("name", UNSAFE_NAMES)
    def test_unsafe_names_are_refused(self, directory: Directory, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: directory.read(name),
            lambda: directory.size(name),
            lambda: directory.map(name),
            lambda: directory.publish([EncodedFile(name, [b"x"])]),
            lambda: directory.append(name, b"x"),
            lambda: directory.remove([name]),
        ]
        for call in calls:
            with pytest.raises(UnsafeContentError):
                call()
        assert directory.names() == []

    def test_maps_outlive_their_files_and_keep_no_descriptor(self, directory: Directory) -> None:
        publish(directory, shards__s=b"0123456789", shards__t=b"abc", shards__none=b"")
        before = open_files("shards/"), open_files("trajstore-cache-")
        mapped = directory.map("shards/s", 10)
        other = directory.map("shards/t", sequential=True)
        empty = directory.map("shards/none", 0)
        assert (open_files("shards/"), open_files("trajstore-cache-")) == before
        assert (len(mapped), len(other), len(empty)) == (10, 3, 0)
        directory.remove(["shards/s"])
        view = mapped.view
        del mapped
        gc.collect()
        assert bytes(view) == b"0123456789"
        assert (other.view.tobytes(), empty.view.tobytes()) == (b"abc", b"")
        assert view.readonly

    def test_maps_follow_a_replaced_file(self, directory: Directory) -> None:
        publish(directory, shards__s=b"0123")
        assert directory.map("shards/s").view.tobytes() == b"0123"
        publish(directory, shards__s=b"4567")
        assert directory.map("shards/s").view.tobytes() == b"4567"

    def test_files_of_another_size_are_not_mapped(self, directory: Directory) -> None:
        publish(directory, shards__s=b"0123")
        with pytest.raises(CorruptStoreError, match="shards/s: has 4 bytes, the index says 5"):
            directory.map("shards/s", 5)

    def test_files_are_brought_over(self, directory: Directory, open_again: Callable[[], Directory]) -> None:
        publish(directory, shards__a=b"0123", shards__b__c=b"45")
        open_again().bring(directory, [("shards/a", "copies/a", 4), ("shards/b/c", "copies/deep/c", 2)])
        directory.remove(["shards/a", "shards/b/c"])
        assert directory.read("copies/a") + directory.read("copies/deep/c") == b"012345"
        with pytest.raises(CorruptStoreError, match="absent"):
            directory.bring(open_again(), [("absent", "copies/absent", 1)])

    def test_one_writer(self, directory: Directory, open_again: Callable[[], Directory]) -> None:
        lock = directory.lock_writer()
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()} on {socket.gethostname()} since"):
            open_again().lock_writer()
        with pytest.raises(StoreLockedError):
            open_again().lock_writer()
        publish(directory, a=b"1")
        lock.release()
        lock.release()
        with open_again().lock_writer(), pytest.raises(StoreLockedError):
            directory.lock_writer()
        directory.lock_writer().release()

    def test_travels_to_another_process(self, directory: Directory) -> None:
        publish(directory, a=b"1")
        with directory.lock_writer():
            again: Directory = pickle.loads(pickle.dumps(directory))
            assert again.read("a") == b"1"
            assert again.map("a").view.tobytes() == b"1"

    def test_several_threads(self, directory: Directory) -> None:
        def work(number: int) -> bool:
            data = bytes([number]) * (1000 + number)
            directory.publish([EncodedFile(f"shards/{number}/{part}", [data]) for part in range(3)])
            name = f"shards/{number}/1"
            return directory.read(name) == directory.map(name).view.tobytes() == data

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(work, range(12)))
        assert len(directory.names("shards")) == 36

    def test_random_calls_agree_with_a_dict(
        self, directory: Directory, open_again: Callable[[], Directory], behind: MutableMapping[str, bytes]
    ) -> None:
        generator = random.Random(1)
        expected: dict[str, bytes] = {}
        names = [f"{folder}{stem}" for folder in ("", "log/", "shards/s.zarr/") for stem in ("a", "b", "c.0")]
        other = open_again()
        assert directory.url == other.url.rstrip("/")
        for _ in range(40):
            name, data = generator.choice(names), generator.randbytes(generator.randrange(40))
            action = generator.choice(["publish", "publish", "append", "remove"])
            if action == "publish":
                directory.publish([EncodedFile(name, [data])])
                expected[name] = data
            elif action == "remove":
                directory.remove([name])
                expected.pop(name, None)
            elif directory.can_append or name not in expected:
                directory.append(name, bytearray(data))
                expected[name] = expected.get(name, b"") + data
            assert other.names() == sorted(expected)
            if name in expected:
                offset = generator.randrange(45)
                assert other.read(name, offset) == expected[name][offset:]
                assert other.size(name) == len(expected[name])
        assert {name: other.read(name) for name in other.names()} == dict(behind) == expected
