"""Accidental damage by disks, copies and people."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

NONSENSE = (b"", b"{}", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 3000, b"1" * 400, b"NaN", b"\x80\x04K\x01.")

Files = Mapping[str, bytes]


def disturb(path: Path, files: Files, chance: random.Random) -> str:
    """Damage one or two files of a directory; return a description.

    Args:
        path: the directory.
        files: its contents.
        chance: source of randomness.
    """
    done = [_disturb_one(path, files, chance)]
    while chance.random() < 0.2 and len(done) < 2:
        done.append(_disturb_one(path, files, chance))
    return ", ".join(done)


def choose(files: Files, chance: random.Random) -> str:
    """Return the name of a file: choose a folder, or the top level, then a file in it."""
    folders: dict[str, list[str]] = {}
    for name in files:
        parts = name.split("/")
        group = "/".join(parts[:-1][:2])
        # Files at the top level are one group each: there are few, and all others depend on them.
        folders.setdefault(group or name, []).append(name)
    groups = sorted(folders)
    weights = [3 if any(word in group for word in ("shards", "log", "trajectory_")) else 2 for group in groups]
    weights = [1 if group.endswith(("readers", "writer.lock")) else w for group, w in zip(groups, weights, strict=True)]
    return chance.choice(folders[chance.choices(groups, weights)[0]])


def _disturb_one(path: Path, files: Files, chance: random.Random) -> str:
    name = choose(files, chance)
    file = path / name
    data = file.read_bytes() if file.exists() else b""  # may have been removed by the first damage
    if chance.random() < 0.12:
        file.unlink(missing_ok=True)
        return f"removed {name}"
    if chance.random() < 0.12:
        other = choose(files, chance)
        theirs = (path / other).read_bytes() if (path / other).exists() else b""
        file.write_bytes(theirs)
        (path / other).write_bytes(data)
        return f"swapped {name} and {other}"
    change = _lines if name.endswith(".log") and chance.random() < 0.4 else chance.choice(_CHANGES)
    what, changed = change(data, chance)
    file.write_bytes(changed)
    return f"{what} of {name}"


Change = Callable[[bytes, random.Random], tuple[str, bytes]]


def _flip(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    if not data:
        return _grow(data, chance)
    at, bit = chance.randrange(len(data)), chance.randrange(8)
    return f"flipped bit {bit} in byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _cut(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    at = chance.randrange(len(data)) if data else 0
    return f"cut at byte {at} of {len(data)}", data[:at]


def _cut_a_little(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    count = chance.randint(1, 12)
    return f"cut {count} bytes off the end", data[:-count]


def _grow(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    more = chance.randbytes(chance.choice((1, 3, 16, 50, 4096)))
    return f"grew by {len(more)} bytes", data + more


def _zero(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    at = chance.randrange(len(data)) if data else 0
    count = min(chance.choice((1, 16, 512, 4096)), len(data) - at)
    return f"zeroed {count} bytes from {at}", data[:at] + bytes(count) + data[at + count :]


def _twice(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    start, stop = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return f"bytes {start} to {stop} twice", data[:stop] + data[start:]


def _replace(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    new = chance.choice(NONSENSE)
    return f"replaced by {new[:12]!r}", new


def _lines(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return _cut(data, chance)
    one, other = chance.sample(range(len(lines)), 2)
    done = chance.choice(
        (f"removed line {one}", f"line {one} once more before line {other}", f"exchanged lines {one} and {other}")
    )
    if done.startswith("exchanged"):
        lines[one], lines[other] = lines[other], lines[one]
    elif done.startswith("removed"):
        del lines[one]
    else:
        lines.insert(other, lines[one])
    return done, b"".join(lines)


_CHANGES: tuple[Change, ...] = (_flip, _flip, _flip, _flip, _cut, _cut_a_little, _grow, _zero, _zero, _twice, _replace)
