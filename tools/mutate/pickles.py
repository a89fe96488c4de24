"""Hostile pickles and zip archives: they run code, exhaust memory or time, or declare wrong sizes."""

from __future__ import annotations

import io
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HUGE = (0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def _called(module: str, name: str, *arguments: Any) -> bytes:
    """Return a pickle of protocol 3 that calls ``module.name(*arguments)``."""
    return b"\x80\x03c" + f"{module}\n{name}\n".encode() + _body(arguments) + b"R."


def _stack_called(module: str, name: str, *arguments: Any) -> bytes:
    """Return the same as a pickle of protocol 4, through STACK_GLOBAL."""
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + names + b"\x93" + _body(arguments) + b"R."


def _body(value: Any) -> bytes:
    """Return a pickle without its first two bytes and its last."""
    return pickle.dumps(value, protocol=3)[2:-1]


def code(canary: Path, chance: random.Random) -> bytes:
    """Return a pickle that creates the file ``canary`` if any of its calls runs."""
    shell, statement = f"touch {canary}", f"open({str(canary)!r}, 'w').close()"
    calls: list[tuple[Any, ...]] = [
        ("os", "system", shell),
        ("posix", "system", shell),
        ("subprocess", "getoutput", shell),
        ("subprocess", "Popen", ["touch", str(canary)]),
        ("builtins", "eval", statement),
        ("builtins", "exec", statement),
        ("__builtin__", "exec", statement),
        ("pathlib", "Path.touch", canary.as_posix()),
        ("builtins", "open", str(canary), "w"),
        ("torch.serialization", "load", str(canary)),
        ("torch", "save", 1, str(canary)),
        ("numpy", "save", str(canary), 1),
        ("runpy", "run_path", str(canary)),
    ]
    module, name, *arguments = chance.choice(calls)
    attack = chance.choice((_called, _stack_called))(module, name, *arguments)
    place = chance.randrange(4)
    if place == 0:
        return attack
    inner = attack[2:-1]
    if place == 1:  # after plain data, and discarded
        return b"\x80\x04" + _body({"columns": {}}) + inner + b"0."
    if place == 2:  # as the key of a dict
        return b"\x80\x04}" + inner + b"K\x01s."
    return b"\x80\x04](" + inner * 3 + b"e."


def bomb(chance: random.Random) -> bytes:
    """Return a short pickle that declares, nests or repeats a lot."""
    size = chance.choice(_HUGE)
    eight, four = struct.pack("<Q", size & (1 << 64) - 1), struct.pack("<I", size & 0xFFFFFFFF)
    return chance.choice(
        [
            # BINBYTES8, BINUNICODE8, BYTEARRAY8, FRAME; BINBYTES, LONG4, LONG_BINPUT far out in the memo, LONG_BINGET
            *(b"\x80\x05" + code + eight + b"N." for code in (b"\x8e", b"\x8d", b"\x96", b"\x95")),
            *(b"\x80\x04" + code + four + b"x." for code in (b"B", b"\x8b", b"Nr", b"j")),
            b"\x80\x04Np" + str(size).encode() + b"\n.",  # PUT
            b"\x80\x04]q\x00" + b"(h\x00h\x00h\x00h\x00lq\x00" * 60 + b".",  # a list of lists of ..., 4 ** 60 of them
            b"\x80\x04(" + b"h\x00" * 9 + b".",
            b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",  # nested lists
            b"\x80\x04" + b"(" * 50_000 + b"t" * 50_000 + b".",  # nested tuples
            b"\x80\x04)" + b"\x85" * 50_000 + b".",
            b"\x80\x04]q\x00h\x00a.",  # a list that holds itself
            b"\x80\x04}q\x00h\x00h\x00s.",  # a dict as its own key
            b"\x80\x04I" + b"9" * 20_000 + b"\n.",  # a number that is slow to parse
            b"\x80\x04cbuiltins\nbytearray\n" + b"J" + struct.pack("<i", 0x7FFFFFFF) + b"\x85R.",
            b"\x80\x04cbuiltins\nrange\nK\x00J" + struct.pack("<i", 0x7FFFFFFF) + b"\x86R.",
            _called("collections", "OrderedDict", [[[1, 2]] * 3]),
            _called("numpy", "dtype", "V2147483647"),
            _called("torch", "zeros", size & 0x7FFFFFFF),
            _called("torch._utils", "_rebuild_tensor_v2", None, 0, (size,), (0,), False, None),
            _called("torch.storage", "_load_from_bytes", _called("os", "getcwd")),
            _called("torch.storage", "_load_from_bytes", b"\x80\x04\x8e" + eight),
            _called("copyreg", "_reconstructor", 1, 2, 3),
            b"\x80\x04c\n\n.",
            b"\x80\x04N" * 3,
        ]
    )


def wrong_shape(pickled: bytes, chance: random.Random) -> bytes:
    """Return a pickle of ordinary values with some numbers or types replaced."""
    where = [
        at for at in range(2, len(pickled) - 1) if pickled[at : at + 1] in (b"K", b"M", b"J", b"\x8c", b"U", b"X", b"G")
    ]
    changed = bytearray(pickled)
    for at in chance.sample(where, min(len(where), chance.randint(1, 3))):
        if chance.random() < 0.3:
            changed[at : at + 1] = chance.choice((b"N", b"\x88", b"]", b"}", b")"))
        elif at + 1 < len(changed):
            changed[at + 1] = chance.choice((0, 1, 127, 128, 255))
    return bytes(changed)


def torch_zip(program: bytes, records: dict[str, bytes]) -> bytes:
    """Return an archive as ``torch.save`` makes it, with this ``data.pkl``."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program)
        for name, data in records.items():
            archive.writestr(name, data)
    return target.getvalue()


def with_program(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a torch archive with another ``data.pkl`` and correct checksums."""
    with zipfile.ZipFile(io.BytesIO(archive)) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    program = records.pop(next(name for name in records if name.endswith("data.pkl")))
    return torch_zip(change(program), records)


_ZIP_FIELDS = {
    b"PK\x05\x06": ((8, 2), (12, 4), (16, 4)),  # the directory: number of entries, size, offset
    # An entry: flags, method, sizes one by one and together, lengths of name, extra field and comment, offset.
    b"PK\x01\x02": ((8, 2), (10, 2), (20, 4), (24, 4), (20, 8), (28, 2), (30, 2), (32, 2), (42, 4)),
    b"PK\x03\x04": ((6, 2), (8, 2), (26, 2), (28, 2)),  # a record: flags, method, lengths of name and extra field
}
"""Offset and size of fields by the magic of what they are in: PKWARE APPNOTE 6.3.10, 4.3.7, 4.3.12, 4.3.16."""


def lying_zip(archive: bytes, chance: random.Random) -> bytes:
    """Return an archive with a false directory, or one that is compressed a thousandfold."""
    if chance.random() < 0.1:
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("archive/data.pkl", b"\x80\x04" + b"N0" * 200_000 + b"N.")
            packed.writestr("archive/data/0", bytes(4_000_000))
        return target.getvalue()
    magic = chance.choice(list(_ZIP_FIELDS))
    places = [found.start() for found in re.finditer(re.escape(magic), archive)]
    if not places:
        return archive + magic
    offset, size = chance.choice(_ZIP_FIELDS[magic])
    at, other = (chance.choice(places) + offset for _ in range(2))
    lies = [2 * struct.pack("<I", lie) for lie in (0, 1, 8, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF, len(archive))]
    lie = chance.choice([archive[other : other + size], *lies])[:size]
    return archive[:at] + lie + archive[at + size :]
