"""Known faults: a line of the store as it was, or could be, wrong. The simulator must find each of them."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Fault:
    """Replaces text of a function.

    Attributes:
        name: the fault.
        where: module and qualified name of the function.
        right: text in its source, once.
        wrong: what stands there instead.
    """

    name: str
    where: str
    right: str
    wrong: str

    def put_in(self) -> None:
        """Break this process: every name of the function, imported before too."""
        function = self._function()
        made: dict[str, Any] = {}
        code = compile(f"from __future__ import annotations\n{self.source()}", self.where, "exec")
        exec(code, vars(sys.modules[function.__module__]), made)
        function.__code__ = inspect.unwrap(made[function.__name__]).__code__

    def source(self) -> str:
        """Return the broken source.

        Raises:
            ValueError: the function has no such text, or has it several times.
        """
        source = textwrap.dedent(inspect.getsource(self._function()))
        if source.count(self.right) != 1:
            raise ValueError(f"{self.where}: has {source.count(self.right)} times {self.right!r}")
        return source.replace(self.right, self.wrong)

    def _function(self) -> Any:
        module, _, qualified = self.where.partition(":")
        return inspect.unwrap(attrgetter(qualified)(importlib.import_module(module)))


_LOCAL = "trajstore._core.files.local:LocalDirectory"
_LOG = "trajstore._core.writing.commit_log:CommitLog"
_SINK = "trajstore._core.buffer.sink:StoreSink"
_QUEUE = "trajstore._core.writing.queue:WriteQueue"

FAULTS = (
    Fault("files are not synced", f"{_LOCAL}.publish", "os.fsync(descriptor)", "pass"),
    Fault("names of files are not synced", f"{_LOCAL}.publish", "self._sync(folders)", "pass"),
    Fault("the log is not synced", f"{_LOCAL}.append", "os.fdatasync(descriptor)", "pass"),
    Fault("the name of a log segment is not synced", f"{_LOCAL}.append", "self._sync(folders)", "pass"),
    Fault(
        "a failed append is not cut off",
        f"{_LOCAL}.append",
        "self._cut(descriptor, name, end)\n            raise",
        "pass\n            raise",
    ),
    Fault(
        "changes are shown before they are in the log",
        f"{_LOG}._append",
        "self.directory.append(self._segment, data)\n",
        "self._apply(data, apply); self.directory.append(self._segment, data); return\n",
    ),
    Fault(
        "log segments are removed before the index is written",
        "trajstore._core.writing.maintenance:Snapshots.write",
        "index = catalog.snapshot_file()\n",
        "index = catalog.snapshot_file(); remove_segments(self._directory, catalog.generation, catalog.fences)\n",
    ),
    Fault("additions are shown and queued without a lock", f"{_SINK}._submit", "with self.lock:", "if True:"),
    Fault(
        "late values do not wait for an addition that is shown",
        f"{_SINK}._flush_pending",
        "with self.lock:",
        "if True:",
    ),
    Fault(
        "a writer does not wait for a tool",
        "trajstore._core.writing.opening:lock_store",
        "if not (wait and error.brief) or",
        "if True or",
    ),
    Fault(
        "files of readers are deleted",
        "trajstore._core.writing.maintenance:Garbage.collect",
        "readers = self._directory.readers(tidy=True)",
        "readers = []",
    ),
    Fault(
        "files that are being read are deleted",
        "trajstore._core.writing.maintenance:Garbage.collect",
        "self.put_off = self.holds > 0",
        "self.put_off = False",
    ),
    Fault("flush returns one commit early", f"{_QUEUE}.wait", ">= trajectory_id:", ">= trajectory_id - 1:"),
    Fault(
        "commits overtake each other",
        f"{_QUEUE}.take_ready",
        "self._commit_ticket + len(groups)",
        "min(self._ready, default=-1)",
    ),
    Fault(
        "a wake-up is lost",
        "trajstore._core.base.interrupts:WaitList.wake",
        "list(gates.values())",
        "list(gates.values())[1:]",
    ),
    Fault(
        "values that wait replace later ones",
        "trajstore._core.writing.writer:StoreWriter.annotate",
        "self.inbox.take_in()",
        "self.inbox.look()",
    ),
    Fault(
        "values of a trajectory evicted meanwhile are not dropped",
        "trajstore._core.writing.inbox:Inbox._take",
        "except TrajectoryUnavailableError:\n            continue",
        "except TrajectoryUnavailableError:\n            raise",
    ),
    Fault(
        "values are taken in twice",
        "trajstore._core.writing.inbox:Inbox._take",
        "if name in catalog.notes.sources:",
        "if False:",
    ),
    Fault(
        "a folder made by a killed writer is not synced",
        f"{_LOCAL}._make_folders",
        "if present and above in self._durable:",
        "if present:",
    ),
    Fault(
        "a removed pin comes back",
        "trajstore._core.writing.opening:open_store",
        "directory.settle(PINS_FOLDER)",
        "pass",
    ),
    Fault(
        "a torn record of a killed writer is written after",
        "trajstore._core.writing.opening:open_store",
        "or catalog.segment_torn or",
        "or",
    ),
    Fault(
        "an eviction returns before it is in the log",
        "trajstore._core.files.local:LocalDirectory.append",
        "os.fdatasync(descriptor)",
        "None if b'evict' in bytes(memoryview(data)) else os.fdatasync(descriptor)",
    ),
    Fault(
        "calls are not synced",
        "trajstore._core.sessions.journal:CallJournal._write",
        "os.fdatasync(descriptor)",
        "pass",
    ),
    Fault(
        "a record that was not queued is waited for",
        "trajstore._core.sessions.journal:CallJournal.append",
        "while not self.queue(entry, self.failures):",
        "if not self.queue(entry, self.failures):",
    ),
    Fault(
        "rollouts of a session are added again after a crash",
        "trajstore._core.buffer.session_rows:BufferSessions.row_ids",
        "return self._sink.ids_of(row_uuids(session_id, count))",
        "return []",
    ),
    Fault(
        "the mirror names shards that it lacks",
        "trajstore.remote.mirror.mirror:StoreMirror._bring",
        "rows = replica.lacking(picture, catalog, lines) or []",
        "rows = []",
    ),
    Fault(
        "sessions are kept by a process whose close fails",
        "trajstore._core.sessions.sessions:Sessions.close",
        "finally:",
        "except ZeroDivisionError:\n            pass\n        else:",
    ),
    Fault(
        "a loader of an emptied store fails",
        "trajstore._core.buffer.sampling:Sampling.readable",
        'found[found] = contents.index.at("slot", positions[found])',
        'found &= contents.index.at("slot", positions)',
    ),
    Fault(
        "a beginning whose names are not all there is refused",
        "trajstore._core.store.catalog:Catalog.is_beginning",
        "name not in (INDEX_NAME, COPY_NAME)",
        "name != INDEX_NAME",
    ),
    Fault(
        "the generator of a saved point is not restored",
        "trajstore._core.sampling.draws:Draws.take_up",
        "self._generator.set_state(rng_state)",
        "pass",
    ),
    Fault(
        "the place in an epoch is not restored",
        "trajstore._core.sampling.epochs:EpochSampler.load_state_dict",
        "self._key, self._place, self._begun, self._passed_over = key, place, epoch, passed_over",
        "self._key, self._begun, self._passed_over = key, epoch, passed_over",
    ),
)
