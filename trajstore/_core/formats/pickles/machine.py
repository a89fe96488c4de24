"""The pickle virtual machine, restricted to data.

It differs from the standard library's in that ``resolve`` defines the meaning of names, only objects of the
caller's own classes accept state, and every size is compared with the available bytes.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from trajstore._core.formats.pickles.safe_values import (
    RefusedError,
    Token,
    UnfitError,
    Unwanted,
    check_key,
    check_nesting,
    require,
    set_state,
)
from trajstore.errors import CorruptStoreError, TrajstoreError, UnsafeContentError

Resolve = Callable[[str, str], Any]
PersistentLoad = Callable[[Any], Any]

_FLOAT = struct.Struct(">d")
_INT = struct.Struct("<i")
_DAMAGE = (
    *(IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError),
    *(struct.error, RuntimeError, MemoryError, RecursionError, UnfitError),
)


class Machine:
    """Runs the one pickle that begins at ``position`` of ``data``.

    Args:
        data: bytes that contain the pickle.
        resolve: returns the object for a name, (module, name).
        persistent_load: returns the object for a persistent id; None = no such ids.
        source: name of the pickle in messages.
        position: of its beginning; afterwards, of its end.
    """

    def __init__(
        self, data: memoryview, resolve: Resolve, persistent_load: PersistentLoad | None, source: str, position: int = 0
    ) -> None:
        self.data = data
        self.position = position
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._resolve = resolve
        self._persistent_load = persistent_load
        self._source = source
        self._below: list[list[Any]] = []  # stacks interrupted by a MARK
        self._stand_ins: dict[int, Any] = {}  # by id(), objects of the caller's classes: only these accept state
        self._states: list[Any] = []

    def run(self) -> Any:
        """Run the pickle and return its object.

        Raises:
            UnsafeContentError: the pickle names something that is not admitted; nothing of it was run.
            CorruptStoreError: this is not a pickle, it is truncated, or a size exceeds its data.
        """
        try:
            result = self._run()
            check_nesting([result, *self._states], limit=64 * len(self.data) + 10_000)
        except TrajstoreError:
            raise
        except RefusedError as error:
            raise UnsafeContentError(f"{self._source}: {error}; nothing of it was run") from error
        except _DAMAGE as error:
            raise CorruptStoreError(
                f"{self._source}: damaged or not a pickle, at byte {self.position}: {error or type(error).__name__}"
            ) from error
        return result

    def _run(self) -> Any:
        data, position, stack = self.data, self.position, self.stack
        while True:
            operation = data[position]
            # The opcodes of long lists of numbers come first, without a call.
            if operation == 0x4D:  # BININT2
                stack.append(data[position + 1] | data[position + 2] << 8)
                position += 3
            elif operation == 0x4B:  # BININT1
                stack.append(data[position + 1])
                position += 2
            elif operation == 0x47:  # BINFLOAT
                stack.append(_FLOAT.unpack_from(data, position + 1)[0])
                position += 9
            elif operation == 0x4A:  # BININT
                stack.append(_INT.unpack_from(data, position + 1)[0])
                position += 5
            elif operation == 0x2E:  # STOP
                self.position = position + 1
                return stack.pop()
            else:
                self.position = position + 1
                method = _OPERATIONS.get(operation)
                if method is None:
                    raise UnfitError(f"operation {operation:#04x} is unknown")
                method(self)
                position, stack = self.position, self.stack

    # -- reading ---------------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        start, end = self.position, self.position + count
        require(end <= len(self.data), f"{count} bytes are announced, {len(self.data) - start} are there")
        self.position = end
        return self.data[start:end]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self, encoding: str = "utf-8") -> str:
        start = end = self.position
        while self.data[end] != 0x0A:
            end += 1
        self.position = end + 1
        return str(self.data[start:end], encoding)

    def until_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._below.pop()
        return items

    # -- operations ------------------------------------------------------------------------------

    def proto(self) -> None:
        require(self.number(1) <= pickle.HIGHEST_PROTOCOL, "an unknown pickle protocol")

    def frame(self) -> None:
        self.take(8)

    def mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.until_mark()

    def dup(self) -> None:
        self.stack.append(self.stack[-1])

    def dict_mark(self) -> None:
        items = self.until_mark()
        self.stack.append({})
        self.set_items(items)

    def frozenset_mark(self) -> None:
        items = self.until_mark()
        for item in items:
            check_key(item)
        self.stack.append(frozenset(items))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Unwanted:
            return
        require(type(target) is list, f"items are appended to a {type(target).__name__}")
        target.extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Unwanted:
            return
        require(type(target) in (dict, OrderedDict), f"keys are set in a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    def add_items(self) -> None:
        items = self.until_mark()
        target = self.stack[-1]
        require(type(target) is set, f"elements are added to a {type(target).__name__}")
        for item in items:
            check_key(item)
            target.add(item)

    # -- names and calls -------------------------------------------------------------------------

    def push_global(self) -> None:
        module = self.line()
        self.stack.append(self._resolve(module, self.line()))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        require(type(name) is str and type(module) is str, "a name that is not a text")
        self.stack.append(self._resolve(module, name))

    def reduce(self) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        require(type(arguments) is tuple, "arguments that are not a tuple")
        self._apply(target, arguments, {})

    def new_object(self) -> None:
        self._new_object({})

    def new_object_ex(self) -> None:
        self._new_object(self.stack.pop())

    def _new_object(self, keywords: Any) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        require(type(arguments) is tuple and type(keywords) is dict, "arguments that are not a tuple")
        require(isinstance(target, Token) and target.stand_in, "an object of something that is not a class")
        self._apply(target, arguments, keywords)

    def _apply(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        require(isinstance(target, Token) and target.call is not None, f"a {type(target).__name__} is called")
        if target.left_out:
            self.stack.append(Unwanted())
            return
        value = target.call(*arguments, **keywords)
        if target.stand_in:
            self._states.append((arguments, keywords))
        if target.stand_in or target.name == "copyreg._reconstructor":
            self._stand_ins[id(value)] = value
        self.stack.append(value)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Unwanted:
            return
        if id(target) not in self._stand_ins:
            set_state(target, state)
            return
        self._states.append(state)
        if hasattr(target, "__setstate__"):
            target.__setstate__(state)
            return
        if type(state) is tuple and len(state) == 2 and state[1] is None:
            state = state[0]
        require(type(state) is dict and all(type(key) is str for key in state), "a state that is not a dict")
        vars(target).update(state)

    def persistent(self) -> None:
        if self._persistent_load is None:
            raise UnfitError("a persistent id, where there is nothing it could mean")
        self.stack.append(self._persistent_load(self.stack.pop()))


_Operation = Callable[[Machine], object]


def _push(make: Callable[[Machine], Any]) -> _Operation:
    """Return the operation that pushes the result of ``make``."""

    def push(machine: Machine) -> None:
        value = make(machine)  # may switch to another stack
        machine.stack.append(value)

    return push


def _counted(kind: Callable[[memoryview], Any], width: int) -> _Operation:
    """Push the result of ``kind`` on bytes preceded by their count, a number of ``width`` bytes."""
    return _push(lambda machine: kind(machine.take(machine.number(width))))


def _put(width: int) -> _Operation:
    """Memoize the top of the stack under a number of ``width`` bytes; 0 = a line of text."""

    def put(machine: Machine) -> None:
        machine.memo[machine.number(width) if width else int(machine.line())] = machine.stack[-1]

    return put


def _get(width: int) -> _Operation:
    return _push(lambda machine: machine.memo[machine.number(width) if width else int(machine.line())])


def _tuple(count: int) -> _Operation:
    def make(machine: Machine) -> None:
        require(len(machine.stack) >= count, "a tuple lacks items")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return make


def _whole(line: str) -> int | bool:
    return {"00": False, "01": True}[line] if line in ("00", "01") else int(line)


def _text(raw: memoryview) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _ascii(raw: memoryview) -> str:
    return str(raw, "ascii")


def _long(raw: memoryview) -> int:
    return int.from_bytes(raw, "little", signed=True)


# Machine._run handles STOP, BININT, BININT1, BININT2 and BINFLOAT.
# Unsupported: persistent ids as text, INST and OBJ (old classes), the extension registry, out-of-band buffers.
_OPERATIONS: Mapping[int, _Operation] = {
    pickle.PROTO[0]: Machine.proto,
    pickle.FRAME[0]: Machine.frame,
    pickle.MARK[0]: Machine.mark,
    pickle.POP[0]: Machine.pop,
    pickle.POP_MARK[0]: Machine.until_mark,
    pickle.DUP[0]: Machine.dup,
    pickle.NONE[0]: _push(lambda machine: None),
    pickle.NEWTRUE[0]: _push(lambda machine: True),
    pickle.NEWFALSE[0]: _push(lambda machine: False),
    pickle.INT[0]: _push(lambda machine: _whole(machine.line())),
    pickle.LONG[0]: _push(lambda machine: int(machine.line().removesuffix("L"))),
    pickle.FLOAT[0]: _push(lambda machine: float(machine.line())),
    pickle.UNICODE[0]: _push(lambda machine: machine.line("raw-unicode-escape")),
    pickle.LONG1[0]: _counted(_long, 1),
    pickle.LONG4[0]: _counted(_long, 4),
    pickle.BINSTRING[0]: _counted(_ascii, 4),
    pickle.SHORT_BINSTRING[0]: _counted(_ascii, 1),
    pickle.SHORT_BINUNICODE[0]: _counted(_text, 1),
    pickle.BINUNICODE[0]: _counted(_text, 4),
    pickle.BINUNICODE8[0]: _counted(_text, 8),
    pickle.SHORT_BINBYTES[0]: _counted(bytes, 1),
    pickle.BINBYTES[0]: _counted(bytes, 4),
    pickle.BINBYTES8[0]: _counted(bytes, 8),
    pickle.BYTEARRAY8[0]: _counted(bytearray, 8),
    pickle.EMPTY_LIST[0]: _push(lambda machine: []),
    pickle.EMPTY_DICT[0]: _push(lambda machine: {}),
    pickle.EMPTY_SET[0]: _push(lambda machine: set()),
    pickle.EMPTY_TUPLE[0]: _push(lambda machine: ()),
    pickle.TUPLE1[0]: _tuple(1),
    pickle.TUPLE2[0]: _tuple(2),
    pickle.TUPLE3[0]: _tuple(3),
    pickle.TUPLE[0]: _push(lambda machine: tuple(machine.until_mark())),
    pickle.LIST[0]: _push(Machine.until_mark),
    pickle.DICT[0]: Machine.dict_mark,
    pickle.FROZENSET[0]: Machine.frozenset_mark,
    pickle.APPEND[0]: lambda machine: machine.extend([machine.stack.pop()]),
    pickle.APPENDS[0]: lambda machine: machine.extend(machine.until_mark()),
    pickle.SETITEM[0]: Machine.set_item,
    pickle.SETITEMS[0]: lambda machine: machine.set_items(machine.until_mark()),
    pickle.ADDITEMS[0]: Machine.add_items,
    pickle.PUT[0]: _put(0),
    pickle.BINPUT[0]: _put(1),
    pickle.LONG_BINPUT[0]: _put(4),
    pickle.MEMOIZE[0]: Machine.memoize,
    pickle.GET[0]: _get(0),
    pickle.BINGET[0]: _get(1),
    pickle.LONG_BINGET[0]: _get(4),
    pickle.GLOBAL[0]: Machine.push_global,
    pickle.STACK_GLOBAL[0]: Machine.stack_global,
    pickle.REDUCE[0]: Machine.reduce,
    pickle.NEWOBJ[0]: Machine.new_object,
    pickle.NEWOBJ_EX[0]: Machine.new_object_ex,
    pickle.BUILD[0]: Machine.build,
    pickle.BINPERSID[0]: Machine.persistent,
}
