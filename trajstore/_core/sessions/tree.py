"""The tree of a session's calls. Pure: finds parents, and yields paths."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """One call of a model. L = tokens of its prompt and of its answer. Immutable.

    Attributes:
        number: position among the calls of its session.
        id: unique within its session.
        parent: the call that it continues: its prompt begins with all tokens of the parent. None for a root.
        base: the call with which it shares most tokens, for storage; None if it shares none.
        taken: number of tokens that it shares with ``base``.
        start: tokens of the prompt, where the sampled tokens begin.
        added: tokens after the shared ones ``[L - taken]``, int32: the rest of the prompt, and the sampled ones.
        log_probs: of the sampled tokens ``[L - start]``, float32, natural logarithm; None if unknown.
        kept: number of messages that it has in common with ``parent``.
        messages: its messages after those.
        policy_version: training step whose weights sampled; None if unknown.
        finish_reason: why the model stopped; empty if unknown.
        metadata: any JSON.
        time: µs since 1970.
        gap: why its tokens are unknown; None for an ordinary call.
    """

    number: int
    id: str
    parent: Call | None = None
    base: Call | None = None
    taken: int = 0
    start: int = 0
    added: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    log_probs: LogProbs | None = None
    kept: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    policy_version: int | None = None
    finish_reason: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    time: int = 0
    gap: str | None = None

    def __repr__(self) -> str:
        return f"Call({self.id!r}, parent={self.parent and self.parent.id!r}, start={self.start}, stop={self.stop})"

    @property
    def stop(self) -> int:
        """L, the number of its tokens."""
        return self.taken + len(self.added)

    @property
    def tokens(self) -> Tokens:
        """Its prompt and sampled tokens ``[L]``."""
        tokens = np.empty(self.stop, np.int32)
        call: Call | None = self
        end = self.stop
        while call is not None and end:
            tokens[call.taken : end] = call.added[: max(0, end - call.taken)]
            end = min(end, call.taken)
            call = call.base
        return tokens

    @property
    def prompt_ids(self) -> Tokens:
        """The tokens of its prompt ``[start]``."""
        return self.tokens[: self.start]

    @property
    def sampled_ids(self) -> Tokens:
        """The sampled tokens ``[L - start]``."""
        return self.added[self.start - self.taken :]

    @property
    def line(self) -> list[Call]:
        """The calls from the root to this one."""
        calls: list[Call] = []
        call: Call | None = self
        while call is not None:
            calls.append(call)
            call = call.parent
        return calls[::-1]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages of its prompt, and its answer."""
        messages: list[dict[str, Any]] = []
        for call in self.line:
            messages[call.kept :] = call.messages
        return messages


class _Segment:
    """Consecutive tokens of calls of which each continues the one before."""

    __slots__ = ("branches", "calls", "content", "start", "stops")

    def __init__(self, start: int) -> None:
        self.start = start
        self.content = bytearray()  # int32: compared and copied without numpy, which would let other threads run
        self.calls: list[Call] = []
        self.stops: list[int] = []
        self.branches: list[_Segment] = []

    def add(self, call: Call) -> None:
        self.content += call.added.tobytes()
        self.calls.append(call)
        self.stops.append(call.stop)

    def match(self, prompt: Tokens, content: bytes) -> int:
        """Return where a prompt first differs from the segment, at most at the end of either.

        Args:
            prompt: equals the tokens before the segment.
            content: its bytes.
        """
        begin, width = self.start * prompt.itemsize, prompt.itemsize
        if content[begin : begin + width] != self.content[:width]:
            return self.start
        if content.startswith(self.content, begin):
            return self.stops[-1]
        theirs = prompt[self.start : self.stops[-1]]
        differs = np.frombuffer(self.content[: theirs.nbytes], np.int32) != theirs
        return self.start + (int(differs.argmax()) if differs.any() else len(theirs))


class CallTree:
    """The calls of a session. Not thread-safe: guarded by ``Session._lock``.

    Attributes:
        calls: all of them, also the gaps, as added.
        by_id: the same by id.
    """

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self.calls: list[Call] = []
        self.by_id: dict[str, Call] = {}
        self._roots: list[_Segment] = []
        self._segments: list[_Segment | None] = []  # by the number of the call
        for call in calls:
            self.add(call)

    def find(self, prompt: Tokens) -> tuple[Call | None, Call | None, int]:
        """Return parent, base and the number of shared tokens of a call with this prompt.

        The parent is the call whose tokens are the longest prefix of the prompt; of several, the newest.
        """
        parent: Call | None = None
        base: Call | None = None
        taken = 0
        content = prompt.tobytes()
        todo = list(self._roots)
        while todo:
            segment = todo.pop()
            end = segment.match(prompt, content)
            todo += [branch for branch in segment.branches if branch.start <= end]
            if end > taken:
                base, taken = segment.calls[bisect_left(segment.stops, end)], end
            whole = bisect_right(segment.stops, end) - 1
            if whole >= 0:
                call = segment.calls[whole]
                if parent is None or (call.stop, call.number) > (parent.stop, parent.number):
                    parent = call
        return parent, base, taken

    def add(self, call: Call) -> None:
        """Add a call whose number is that of the calls before."""
        segment: _Segment | None = None
        if call.gap is None:
            above = None if call.base is None else self._segments[call.base.number]
            if above is not None and above.stops[-1] == call.taken:
                segment = above
            else:
                segment = _Segment(call.taken)
                (self._roots if above is None else above.branches).append(segment)
            segment.add(call)
        self.calls.append(call)
        self.by_id[call.id] = call
        self._segments.append(segment)

    def leaves(self) -> Iterator[Call]:
        """Yield the calls that no other continues, each the end of a path, as added."""
        continued = {call.parent.number for call in self.calls if call.parent is not None}
        return (call for call in self.calls if call.gap is None and call.number not in continued)
