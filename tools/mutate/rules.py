"""Permitted effects of damage: the level of a change, and the report that each level requires.

``weigh`` compares the files before and after, without the code that reads directories:

============ ============================================================================================
``NOTHING``  nothing that a reader needs has changed. ``verify`` finds nothing, and everything is served. Not
             needed: ``writer.lock``, ``readers/``, spaces in ``metadata.json``, a repeated record of the log,
             files without a reference, the copy of the index while the index is intact.
``TAIL``     the log ends earlier, after whole records or within one without a line feed, as after a crash. The
             state of that time is served, and ``verify`` notes the remaining files. If a later pin remains, or
             higher ids in the metadata, it is ``DAMAGE``: that state was acknowledged.
``UNPINNED`` a pin's file is missing, as after an unpin. Everything else is unchanged.
``CONTENT``  a ``.pt`` file of RLinf's layout: zip archives have checksums of the records, but not of the
             headers around them. ``verify`` reports it, or everything is served unchanged.
             The same holds for a store's shards if a pin is missing too: perhaps only that pin needed them.
``DAMAGE``   any other change under a checksum, and any missing file of the index: ``verify`` reports it.
``UNCOVERED`` only parts without a checksum differ: the JSON files of RLinf's layout, its pickles, the three
             files of an experience pool, archives with corrected checksums. Or the oldest files of RLinf's
             layout are missing, as in its checkpoints in memory: ``verify`` notes that.
``FORGED``   checksums were corrected. CRC-32 is no signature: another consistent directory is another
             directory.
============ ============================================================================================

Always: only documented errors, no code run, no file outside changed. If ``verify`` finds nothing, everything in the
index can be read. Contents of unchanged files are served unchanged if the index is unchanged too.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import orjson

from tools.mutate.pristine import Kind
from tools.mutate.probe import REFUSED, Look, Report

Files = Mapping[str, bytes]


class Level(Enum):
    """Level of a mutation; see the module."""

    NOTHING = "nothing that matters"
    TAIL = "newest commits cut off"
    UNPINNED = "pin removed"
    CONTENT = "zip archive changed"
    DAMAGE = "checksummed bytes changed"
    UNCOVERED = "no checksum"
    FORGED = "checksums made right"


@dataclass(frozen=True)
class Stakes:
    """The effect of a mutation on the files.

    Attributes:
        level: as above.
        records: with ``TAIL``, the number of remaining log records.
        changed: names of the files that differ or are missing.
        cut: whether the log also ends as after a crash, and no remaining file shows its former end.
    """

    level: Level
    records: int = 0
    changed: frozenset[str] = frozenset()
    cut: bool = False


@dataclass(frozen=True)
class Pristine:
    """Facts of the undamaged directory.

    Attributes:
        files: its content.
        look: reads it with a given number of log records.
        records: number of log records.
        homes: names of each trajectory's files, by the name of its fact.
    """

    files: Files
    look: Callable[[int], Report]
    records: int
    homes: Mapping[str, frozenset[str]]

    @cached_property
    def whole(self) -> Report:
        """Report of the undamaged directory."""
        return self.look(self.records)

    @cached_property
    def snapshot(self) -> Report:
        """Report of the undamaged directory without its log."""
        return self.look(0)


# -- changes ----------------------------------------------------------------------------------------


def weigh(kind: Kind, before: Files, after: Files, *, forged: bool) -> Stakes:
    """Return the level of the difference between two sets of files."""
    changed = frozenset(name for name in before if after.get(name) != before[name])
    if forged and kind.checksums:
        return Stakes(Level.FORGED, changed=changed)
    if not kind.checksums:
        return Stakes(_weigh_foreign(before, after, changed, forged=forged), changed=changed)
    folders = sorted({name.removesuffix("metadata.json") for name in before if name.endswith("metadata.json")})
    found = [_weigh_store(_below(before, folder), _below(after, folder)) for folder in folders]
    for level in (Level.DAMAGE, Level.TAIL, Level.UNPINNED):
        for stakes in found:
            if stakes.level is level:
                return Stakes(level, stakes.records, changed, any(change.cut for change in found))
    return Stakes(Level.NOTHING, changed=changed)


def _below(files: Files, folder: str) -> Files:
    return {name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)}


def _weigh_store(before: Files, after: Files) -> Stakes:
    whole = _records(before)
    left, torn = _common(whole, b"".join(after.get(name, b"") for name in sorted(before) if name.startswith("log/")))
    if b"\n" in torn or _lacks_its_end(whole[left:], torn):
        torn_lines = torn.splitlines(keepends=True)
        end = max((number for number, line in enumerate(whole, 1) if line in torn_lines), default=left)
        return Stakes(Level.DAMAGE, cut=end < len(whole) and not _tells_more(before, after, end))
    given_up = {name for line in whole[left:] for name in _files_of(orjson.loads(line[9:]))}
    levels = set()
    for name, data in before.items():
        found = after.get(name)
        if found == data or name == "writer.lock" or name.startswith(("readers/", "log/")) or name in given_up:
            continue
        if name == "index_copy.json" and found is None:  # optional
            continue
        if name == "metadata.json" and found is not None and _json(found) == _json(data):
            continue
        if name.startswith("pins/") and (found is None or f"{name.split('.')[0]}.json" not in after):
            levels.add(Level.UNPINNED)  # values of a removed pin are not read any more
        else:
            # Shards that only a removed pin needed are not read any more.
            levels.add(Level.CONTENT if name.startswith("shards/") and _pins_are_gone(before, after) else Level.DAMAGE)
    if left < len(whole) or torn:
        levels.add(Level.DAMAGE if _tells_more(before, after, left) else Level.TAIL)
    # The first level is the strictest.
    for level in (Level.DAMAGE, Level.TAIL, Level.UNPINNED):
        if level in levels:
            return Stakes(level, left, cut=Level.TAIL in levels)
    return Stakes(Level.NOTHING)


def _tells_more(before: Files, after: Files, records: int) -> bool:
    """Return whether a remaining pin or the metadata show that the log had more records."""
    beyond = any(name in after for name in pins_beyond(before, records))
    return beyond or (
        after.get("metadata.json") == before["metadata.json"] and _counter(before) > next_id(before, records)
    )


def _lacks_its_end(rest: Sequence[bytes], torn: bytes) -> bool:
    """Return whether a whole record remains with another byte as its line feed, which no crash causes."""
    return bool(rest) and torn[:-1] == rest[0].rstrip(b"\n") and torn[-1:] not in (b"", b"\n", b"\0")


def pins_beyond(files: Files, records: int) -> list[str]:
    """Return the pins that were made after this number of log records."""
    last = [orjson.loads(line[9:]) for line in _records(files)[:records]][-1:]
    generation = (last or [orjson.loads(files["metadata.json"])])[0]["generation"]
    pins = {name: orjson.loads(data)["pin"] for name, data in files.items() if re.fullmatch(r"pins/.*\.json", name)}
    return [name for name, pin in pins.items() if pin["generation"] > generation]


def next_id(files: Files, records: int) -> int:
    """Return the next free id after this number of log records."""
    adds = [record for record in map(_record, _records(files)[:records]) if record["operation"] == "add"]
    parts = [part for record in adds for part in record["shards"]]
    ids: list[int] = [last for part in parts for _, last in part["entries"]["ids"]]
    begin: int = orjson.loads(files["trajectory_index.json"])["snapshot"]["next_id"]
    return max([begin, *(last + 1 for last in ids)])


def _record(line: bytes) -> dict[str, Any]:
    record: dict[str, Any] = orjson.loads(line[9:])
    return record


def _counter(files: Files) -> int:
    """Return the next id according to the metadata."""
    counter: int = orjson.loads(files["metadata.json"])["trajectory_counter"]
    return counter


def _files_of(record: dict[str, Any]) -> list[str]:
    """Return the names of the files that a log record adds: of one shard, of several, or of values by row."""
    parts = [*record.get("shards", [record]), record.get("rows") or {}]
    shards = [part["shard"] for part in parts if "shard" in part]
    return [file[0] for shard in shards for file in shard.get("files", ())]


def _pins_are_gone(before: Files, after: Files) -> bool:
    return any(name.startswith("pins/") and name not in after for name in before)


def _json(data: bytes) -> bytes | None:
    """Return a JSON text in canonical form; None for another text."""
    try:
        return orjson.dumps(orjson.loads(data), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:
        return None
    except TypeError:  # nested too deeply for the encoder
        return data


def _records(files: Files) -> list[bytes]:
    """Return the log's lines with a correct checksum, line feeds included."""
    lines = [
        line for name in sorted(files) if name.startswith("log/") for line in files[name].splitlines(keepends=True)
    ]
    return [line for line in lines if b"%08x" % zlib.crc32(line[9:-1]) == line[:8]]


def _common(records: Sequence[bytes], log: bytes) -> tuple[int, bytes]:
    """Return the number of intact records at the start of a damaged log, and the bytes after them."""
    count = 0
    while log:
        end = log.find(b"\n") + 1
        line = log[:end]
        if count < len(records) and line == records[count]:
            count += 1
        elif not end or line not in records[:count]:
            break
        log = log[end:]
    return count, log


def _weigh_foreign(before: Files, after: Files, changed: frozenset[str], *, forged: bool) -> Level:
    levels = set()
    unwritten = _oldest_gone(before, after)
    for name in changed:
        found = after.get(name)
        if found is None:
            levels.add(Level.UNCOVERED if name in unwritten else Level.DAMAGE)
        elif name.endswith(".pt") and not forged:
            levels.add(Level.CONTENT)
        elif not (name.endswith(".json") and _json(found) is not None and _json(found) == _json(before[name])):
            levels.add(Level.UNCOVERED)
    # Damage without a checksum can hide other damage: an index that no longer names a missing file.
    for level in (Level.UNCOVERED, Level.DAMAGE, Level.CONTENT):
        if level in levels:
            return level
    return Level.NOTHING


def _oldest_gone(before: Files, after: Files) -> set[str]:
    """Return missing files of RLinf's layout that are older than all remaining ones; none if none remain."""
    found = {int(match[1]): name for name in before if (match := re.fullmatch(r"trajectory_(\d+)_.*", name))}
    left = min((number for number, name in found.items() if name in after), default=-1)
    return {name for number, name in found.items() if number < left}


# -- judgement --------------------------------------------------------------------------------------


def judge(kind: Kind, stakes: Stakes, report: Report, pristine: Pristine) -> list[str]:
    """Return the problems in the report of a mutated directory."""
    problems = list(report.problems)
    if not report.ended:
        return problems
    if not report.reported:
        problems += [] if _has_unwritten(kind, report) else _readable(report)
    problems += _at_stake(stakes, report, pristine)
    problems += _untouched(stakes, report, pristine)
    if kind.content != "pool" and stakes.level in (Level.DAMAGE, Level.CONTENT) and not stakes.cut:
        problems += _losses(kind, report, pristine)
    if report.opened:
        problems += _rewritten(stakes, report, pristine)
    return problems


def _has_unwritten(kind: Kind, report: Report) -> bool:
    """Return whether ``verify`` notes files that RLinf may never have written and that cannot be read."""
    return kind.name.startswith("rlinf") and report.notes > 0


def _at_stake(stakes: Stakes, report: Report, pristine: Pristine) -> list[str]:
    level, whole = stakes.level, pristine.whole
    if level is Level.NOTHING:
        alarm = [f"no needed byte was changed, but verify reports: {report.message}"] if report.reported else []
        return alarm + _differing(report, whole)
    if level is Level.DAMAGE:
        return [] if report.reported else ["verify finds nothing"]
    if report.reported or level in (Level.UNCOVERED, Level.FORGED):
        return []
    if level is Level.CONTENT:
        return _differing(report, whole)
    if level is Level.UNPINNED:
        return _differing(report, whole, pins=False)
    expected = pristine.look(stakes.records)
    silent = [] if report.notes or not expected.notes else ["verify does not note the commits that were cut off"]
    return silent + _differing(report, expected, pins=False)


def _looks(report: Report, pins: bool) -> dict[str, Look]:
    looks = {"load_checkpoint": report.strict, "load_checkpoint(strict=False)": report.lenient}
    return looks | ({f"pin {name}": look for name, look in report.pins.items()} if pins else {})


def _differing(report: Report, expected: Report, *, pins: bool = True) -> list[str]:
    problems = []
    for (what, found), wanted in zip(_looks(report, pins).items(), _looks(expected, pins).values(), strict=True):
        if found != wanted:
            names = sorted(
                k for k in found.facts.keys() | wanted.facts.keys() if found.facts.get(k) != wanted.facts.get(k)
            )
            problems.append(f"{what} differs, but verify finds nothing: {found.error or ', '.join(names)}")
    return problems


def _readable(report: Report) -> list[str]:
    """If ``verify`` finds nothing, everything can be read."""
    problems = []
    for what, look in _looks(report, pins=True).items():
        if look.error is not None and not (what.startswith("pin ") and look.error == "StoreNotFoundError"):
            problems.append(f"{what} raises {look.error}, but verify finds nothing")
        refused = [
            f"{name} ({fact.removeprefix(REFUSED)})"
            for name, fact in look.facts.items()
            # Trajectories that cannot be mixed in one batch are not damaged.
            if fact.startswith(REFUSED)
            and not fact.endswith("SchemaMismatchError")
            and fact != REFUSED + "WitnessError"
        ]
        if refused:
            problems.append(f"{what}: {', '.join(refused)} cannot be read, but verify finds nothing")
    return problems


_PAYLOAD = re.compile(r"(.*/)?(shards/.*|trajectory_\d.*)")


def _untouched(stakes: Stakes, report: Report, pristine: Pristine) -> list[str]:
    """Contents of unchanged files are served unchanged if the index is unchanged too."""
    if not all(_PAYLOAD.fullmatch(name) for name in stakes.changed) or stakes.level is Level.FORGED:
        return []
    wanted = pristine.whole.lenient.facts
    safe = [name for name, files in pristine.homes.items() if not files & stakes.changed and name in wanted]
    lost = [name for name in safe if report.lenient.facts.get(name) != wanted[name]]
    if not lost:
        return []
    return [f"in unchanged files, but served differently: {', '.join(lost)} ({report.lenient.error})"]


def _losses(kind: Kind, report: Report, pristine: Pristine) -> list[str]:
    """``verify`` reports unserved trajectories as lost; ``repair`` saves the others and knows if they are all."""
    wanted, served, saved = (
        Counter(fact for name, fact in look.facts.items() if name.startswith("trajectory "))
        for look in (pristine.whole.lenient, report.lenient, report.repaired)
    )
    missing = (wanted - served).total()
    problems = []
    if report.reported and report.lost is not None and report.lost < missing:
        problems.append(f"{missing} trajectories are not served, verify reports {report.lost} as lost")
    if report.repaired_whole is None:
        if report.lenient.error is None:
            problems.append("strict=False loads it, but repair makes no store")
        return problems
    if report.repaired.error is not None:
        return [*problems, f"the repaired store raises {report.repaired.error}"]
    left = (wanted - saved).total()
    if report.repaired_whole and left:
        problems.append(f"repair reports a complete store, but {left} of {wanted.total()} are missing")
    if saved - (wanted | served):  # the evictions may be lost
        problems.append("the repaired store has values that were not there")
    if report.lost is not None and (wanted & served).total() - (wanted & saved).total() > report.lost:
        problems.append(f"repair saved {(wanted & saved).total()} of the {(wanted & served).total()} that are served")
    return problems


def _rewritten(stakes: Stakes, report: Report, pristine: Pristine) -> list[str]:
    """A writer loses no readable trajectory."""
    problems = []
    right = set(pristine.whole.lenient.facts.values()) | set(pristine.snapshot.lenient.facts.values())
    served = {name: fact for name, fact in report.lenient.facts.items() if name.startswith("trajectory ")}
    lost = [name for name, fact in served.items() if fact in right and report.rewritten.facts.get(name) != fact]
    if lost:
        problems.append(f"lost by a writer that continued: {', '.join(lost)} ({report.rewritten.error})")
    if report.reported_after and not report.reported:
        problems.append("verify finds damage after a writer continued, and none before")
    pool = pristine.whole.rewritten.facts.get("pool")
    if stakes.level is Level.NOTHING and report.rewritten.facts.get("pool") != pool:
        problems.append(f"the pool differs: {report.rewritten.facts.get('pool')}")
    return problems


def outcome(report: Report, pristine: Pristine) -> str:
    """Return a short name of a mutation's outcome."""
    if not report.ended:
        return "hung or died"
    if report.reported:
        return "reported by verify"
    if _differing(report, pristine.whole):
        return "noted, an earlier state is served" if report.notes else "not detected"
    return "without effect"
