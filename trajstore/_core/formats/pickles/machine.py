"""The standard library's pickle machine, restricted to data.

It differs from ``pickle.Unpickler`` in that ``resolve`` defines the meaning of names, only objects of the
caller's own classes accept state, hashed keys are limited, and every size is compared with the available bytes.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

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

_DAMAGE = (
    *(IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, pickle.UnpicklingError),
    *(struct.error, RuntimeError, MemoryError, RecursionError, UnfitError),
)


class _File:
    """The bytes of a pickle as the file that the standard library's machine reads."""

    def __init__(self, data: memoryview, position: int) -> None:
        self.data = data
        self.position = position

    def read(self, count: int) -> bytes:
        start, end = self.position, self.position + count
        require(end <= len(self.data), f"{count} bytes are announced, {len(self.data) - start} are there")
        self.position = end
        return self.data[start:end].tobytes()

    def readline(self) -> bytes:
        end = self.position
        while self.data[end] != 0x0A:
            end += 1
        return self.read(end + 1 - self.position)


class Machine(pickle._Unpickler):
    """Runs the one pickle that begins at ``position`` of ``data``.

    The implementation in Python is used because the one in C has no operations to replace.

    Args:
        data: bytes that contain the pickle.
        resolve: returns the object for a name, (module, name).
        persistent_load: returns the object for a persistent id; None = no such ids.
        source: name of the pickle in messages.
        position: of its beginning.
    """

    stack: list[Any]
    read: Callable[[int], bytes]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self, data: memoryview, resolve: Resolve, persistent_load: PersistentLoad | None, source: str, position: int = 0
    ) -> None:
        self._file = _File(data, position)
        super().__init__(self._file)
        self.find_class = resolve  # type: ignore[method-assign, assignment]
        if persistent_load is not None:
            self.persistent_load = persistent_load  # type: ignore[method-assign, assignment]
        self._source = source
        self._stand_ins: dict[int, Any] = {}  # by id(), objects of the caller's classes: only these accept state
        self._states: list[Any] = []

    def load(self) -> Any:
        """Run the operations up to STOP; lists of numbers are read without a call."""
        file, data = self._file, self._file.data
        self.read, self.readline = file.read, file.readline
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        try:
            while True:
                operation, position = data[file.position], file.position + 1
                file.position = position
                if operation == 0x4B:  # BININT1
                    self.append(data[position])
                    file.position = position + 1
                elif operation == 0x4D:  # BININT2
                    self.append(data[position] | data[position + 1] << 8)
                    file.position = position + 2
                elif operation == 0x47:  # BINFLOAT
                    self.append(_FLOAT.unpack_from(data, position)[0])
                    file.position = position + 8
                else:
                    self.dispatch[operation](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value

    @property
    def position(self) -> int:
        """The position behind the last byte read."""
        return self._file.position

    def run(self) -> Any:
        """Run the pickle and return its object.

        Raises:
            UnsafeContentError: the pickle names something that is not admitted; nothing of it was run.
            CorruptStoreError: this is not a pickle, it is truncated, or a size exceeds its data.
        """
        try:
            result = self.load()
            check_nesting([result, *self._states], limit=64 * len(self._file.data) + 10_000)
        except TrajstoreError:
            raise
        except RefusedError as error:
            raise UnsafeContentError(f"{self._source}: {error}; nothing of it was run") from error
        except _DAMAGE as error:
            raise CorruptStoreError(
                f"{self._source}: damaged or not a pickle, at byte {self.position}: {error or type(error).__name__}"
            ) from error
        return result

    # -- operations that allocate a claimed size, hash, or change objects --------------------------------

    def _unsupported(self) -> None:
        raise UnfitError(f"operation {self._file.data[self.position - 1]:#04x} is unknown")

    def _frame(self) -> None:
        self.read(8)

    def _byte_array(self) -> None:
        self.stack.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    def _frozen_set(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        self.stack.append(frozenset(items))

    def _add_items(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        require(type(target) is set, f"elements are added to a {type(target).__name__}")
        for item in items:
            check_key(item)
            target.add(item)

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not Unwanted:
            require(type(target) is list, f"items are appended to a {type(target).__name__}")
            target.extend(items)

    def _dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._set_items(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Unwanted:
            return
        require(type(target) in (dict, OrderedDict), f"keys are set in a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    # -- calls and state ---------------------------------------------------------------------------------

    def _reduce(self) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        self._apply(target, arguments, {})

    def _new_object(self, keywords: Any) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        require(isinstance(target, Token) and target.stand_in, "an object of something that is not a class")
        self._apply(target, arguments, keywords)

    def _apply(self, target: Any, arguments: Any, keywords: Any) -> None:
        require(type(arguments) is tuple and type(keywords) is dict, "arguments that are not a tuple")
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

    def _build(self) -> None:
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

    _INHERITED = (
        *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2),
        *(pickle.LONG, pickle.LONG1, pickle.LONG4, pickle.FLOAT, pickle.BINFLOAT, pickle.UNICODE, pickle.BINSTRING),
        *(pickle.SHORT_BINSTRING, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
        *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8, pickle.EMPTY_LIST, pickle.EMPTY_DICT),
        *(pickle.EMPTY_SET, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.LIST, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GET, pickle.BINGET),
        *(pickle.LONG_BINGET, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
    )
    """Operations that make data of their own bytes, or ask ``find_class`` or ``persistent_load``."""

    # Unsupported: persistent ids as text, INST and OBJ (old classes), the extension registry, out-of-band buffers.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **dict.fromkeys(range(256), _unsupported),
        **{operation[0]: pickle._Unpickler.dispatch[operation[0]] for operation in _INHERITED},
        pickle.FRAME[0]: _frame,
        pickle.BYTEARRAY8[0]: _byte_array,
        pickle.FROZENSET[0]: _frozen_set,
        pickle.ADDITEMS[0]: _add_items,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.DICT[0]: _dict,
        pickle.SETITEM[0]: lambda self: self._set_items([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: lambda self: self._new_object({}),
        pickle.NEWOBJ_EX[0]: lambda self: self._new_object(self.stack.pop()),
        pickle.BUILD[0]: _build,
    }
