"""Agent sessions for the page: those that are not rollouts yet, and the calls of a session as a tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trajstore._core.columns.facts import SESSION
from trajstore._core.files.base import Directory
from trajstore._core.files.local import LocalDirectory
from trajstore._core.sessions.folder import CallsFolder, Recorded, SessionInfo
from trajstore._core.sessions.rows import described, path_rows
from trajstore._core.sessions.tree import CallTree
from trajstore.operations.trajectory_report import columns_of, gap_of, path_of, values_of
from trajstore.query.documents import calls_in, name_of
from trajstore.trajectory import AgentTrajectory
from trajstore.view.answers import Answer, plain, plain_dict

MOST = 200
"""Maximum number of open sessions in a list, the newest."""

_MOST_SAID = 4
"""Maximum number of messages of a call whose beginning is in a tree, the newest."""

_BEGINNING = 160
"""Number of characters of a message in a tree."""

Row = tuple[str | None, AgentTrajectory]
"""Id as displayed of a rollout that is a path of a session, None if it is not in the store yet; its contents."""


class OpenSessions:
    """Sessions of some stores that are not rollouts yet, as their journals have them. For one thread."""

    def __init__(self) -> None:
        self._folders: dict[str, CallsFolder] = {}
        self._listed: list[SessionInfo] = []

    def refresh(self, directories: Iterable[Directory]) -> bool:
        """Read what was appended to the journals; return whether any session is another.

        Args:
            directories: of the stores; those in an object store have no sessions.
        """
        local = {each.url: each.root for each in directories if isinstance(each, LocalDirectory)}
        self._folders = {url: self._folders.get(url) or CallsFolder(root, None) for url, root in local.items()}
        before = self._listed
        self._listed = [session for folder in self._folders.values() for session in folder.listed()]
        return self._listed != before

    def listed(self) -> Answer:
        """Return the sessions, newest call first: ``{"sessions", "of", "damaged"}``.

        A session has the attributes of :class:`trajstore.SessionInfo`, times in milliseconds. ``of`` is their number,
        of which the newest are listed; ``damaged`` has a sentence for each damaged record of a journal.
        """
        newest = sorted(self._listed, key=lambda session: session.last, reverse=True)
        return {
            "sessions": [_in_milliseconds(session) for session in newest[:MOST]],
            "of": len(newest),
            "damaged": [
                f"{file.name}: the record at byte {begin:,} is damaged and left out; see `trajstore verify`"
                for folder in self._folders.values()
                for file in folder.files.values()
                for begin in file.damaged
            ],
        }

    def tree(self, session_id: str) -> Answer | None:
        """Return a session with the tree of its durable calls; None if it is not open.

        The keys are those of a session in :meth:`listed`, and of :func:`tree_of`.

        Raises:
            CorruptStoreError: a call is damaged.
        """
        info = next((session for session in self._listed if session.id == session_id), None)
        if info is None or (found := self._tree(session_id)) is None:
            return None
        recorded, tree = found
        gaps = [described(call) for call in tree.by_id.values() if call.gap is not None]
        rows: list[Row] = [(None, row) for row in _rows(recorded, tree)]
        return {**_in_milliseconds(info), **tree_of(rows, gaps)}

    def path(self, session_id: str, call_id: str) -> AgentTrajectory | None:
        """Return the rollout of the first path of a session that has a call, as of now; None if it is not open.

        Raises:
            CorruptStoreError: a call is damaged.
        """
        if (found := self._tree(session_id)) is None:
            return None
        return next(
            (row for row in _rows(*found) if any(call["id"] == call_id for call in row.metadata[SESSION]["calls"])),
            None,
        )

    def _tree(self, session_id: str) -> tuple[Recorded, CallTree] | None:
        for folder in self._folders.values():
            if (recorded := folder.current().get(session_id)) is not None:
                return recorded, CallTree(folder.files[recorded.journal].calls(recorded))
        return None


def _rows(recorded: Recorded, tree: CallTree) -> list[AgentTrajectory]:
    return path_rows(recorded.id, tree, recorded.fields, recorded.finish)


def _in_milliseconds(session: SessionInfo) -> Answer:
    return {**asdict(session), "opened": session.opened // 1000, "last": session.last // 1000}


def tokens_of(trajectory: AgentTrajectory) -> int:
    """Return the number of tokens of a rollout: of its longest column."""
    columns = columns_of(trajectory).items()
    return max((len(tensor) for name, tensor in columns if not name.startswith("notes.")), default=0)


def tree_of(rows: Sequence[Row], gaps: Sequence[Mapping[str, Any]] = ()) -> Answer:
    """Return the calls of some rows of a session as a tree: ``{"calls", "incomplete", "left_out"}``.

    A call has the keys of ``path_of`` (``operations/trajectory_report``), and ``parent`` and ``base`` (places in
    ``calls``; a parent comes first), ``added`` (tokens of its prompt that are neither its parent's nor shared with its
    base), ``log_prob`` and ``least`` (mean and minimum over its sampled tokens), ``said`` (role and beginning of the
    newest messages that it added), ``path`` (the first that has it) and ``row`` (id of that rollout), ``trained``
    (paths whose loss has it; None without masks), and ``end`` (the path that ends with it). Calls are in the order in
    which they were added, if they have numbers, otherwise path by path.

    Args:
        rows: of one session, in the order of their paths.
        gaps: the session's incomplete calls; those of the rows, if empty.
    """
    calls: dict[tuple[str, int, int], Answer] = {}
    incomplete, left_out = [gap_of(gap) for gap in gaps], []
    for shown, row in rows:
        session, unplaced = path_of(row, tokens_of(row))
        if session is None:
            continue
        left_out += [f"path {session['path']}: {text}" for text in unplaced]
        incomplete = incomplete or session["incomplete"]
        above: Answer | None = None
        for at, call in enumerate(session["calls"]):
            key = call["id"], call["start"], call["stop"]
            if key not in calls:
                after = session["calls"][at + 1 :]
                calls[key] = {
                    **plain_dict(call),
                    "id": call["id"],
                    "trained": None if call["trained"] is None else [],
                    "above": above,
                }
                calls[key] |= {"path": session["path"], "row": shown, "end": None, **_log_probs(row, call)}
                calls[key]["said"] = _said(row.messages, call["messages"], after[0]["messages"] if after else None)
            if call["trained"]:
                calls[key]["trained"].append(session["path"])
            above = calls[key]
        if above is not None:
            above["end"] = session["path"]
    return {
        "calls": _in_order(list(calls.values())),
        "incomplete": [plain_dict(gap) for gap in incomplete],
        "left_out": left_out,
    }


def _log_probs(row: AgentTrajectory, call: Answer) -> Answer:
    """Return mean and minimum of the log-probs of a call's sampled tokens; None if there are none."""
    values = row.old_log_probs if row.rollout_log_probs is None else row.rollout_log_probs
    if values is not None:
        values = values_of(values, call, tokens_of(row), row.response_start).double()
    if values is None or not values.numel():
        return {"log_prob": None, "least": None}
    return {"log_prob": plain(float(values.mean())), "least": plain(float(values.min()))}


def _said(messages: Sequence[Any], own: Sequence[int] | None, later: Sequence[int] | None) -> list[tuple[str, str]]:
    """Return role and beginning of the newest messages of a call; those that a later call replaced are left out."""
    if own is None:
        return []
    end = own[1] if later is None else min(own[1], later[0])
    return [_beginning(message) for message in messages[own[0] : end][-_MOST_SAID:]]


def _beginning(message: Any) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        return "", str(message)[:_BEGINNING]
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    text = " ".join(text[:_BEGINNING] for text in texts if isinstance(text, str)).strip()
    text = text or " ".join(f"calls {name_of(call)}" for call in calls_in(message))
    return str(message.get("role", ""))[:_BEGINNING], text[:_BEGINNING]


def _in_order(calls: list[Answer]) -> list[Answer]:
    """Return calls in the order of their numbers, if each has one that is above its parent's, with places of others."""
    numbers = [call["number"] for call in calls]
    parents = [call["above"] and call["above"]["number"] for call in calls]
    if None not in numbers and all(
        parent is None or parent < number for parent, number in zip(parents, numbers, strict=True)
    ):
        calls = sorted(calls, key=lambda call: call["number"])
    places = {id(call): place for place, call in enumerate(calls)}
    by_name = {call["id"]: place for place, call in enumerate(calls)}
    ordered = []
    for call in calls:
        above = call["above"]
        base = by_name.get(call["base"])
        base = base if base is not None and base < places[id(call)] else None
        shown = {name: value for name, value in call.items() if name != "above"}
        taken = max(0 if above is None else above["stop"], (call["shared"] or 0) if base is not None else 0)
        shown |= {"parent": None if above is None else places[id(above)], "base": base}
        ordered.append(shown | {"added": max(0, call["start"] - taken)})
    return ordered
