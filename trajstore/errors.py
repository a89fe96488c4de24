"""Every error that trajstore raises on purpose.

Each message names the file or field at fault and a remedy. The tree::

    TrajstoreError
    ├── InvalidTrajectoryError (ValueError)      a trajectory was refused when it was added
    ├── InvalidCallError (ValueError)            a call of a session was refused
    │   └── CallConflictError                        another call of the session has this id
    ├── ConfigurationError (ValueError)          an argument or configuration key is out of range
    ├── SchemaMismatchError (ValueError)         trajectories of one window have different columns
    ├── EmptyBufferError (RuntimeError)          nothing to sample from
    │   └── EpochsEndedError                         a sampler's epochs have all been drawn
    ├── TrajectoryUnavailableError (KeyError)    no such trajectory, or it is no longer kept
    ├── MissingDependencyError (ImportError)     an optional package is needed; names the extra
    ├── DescriptorLimitError (OSError)           too many open files; names the limit
    └── StoreError                               a problem with a directory
        ├── StoreNotFoundError (FileNotFoundError)   no store at this path
        ├── StoreLockedError                     another writer holds the directory; names the holder
        ├── StoreWriteError (OSError)            a write did not reach the disk; names the file
        │   ├── UnwritableTrajectoryError            trajectories that cannot be encoded or written; names their ids
        │   ├── PartlyAddedError                     the first of a long list were added; names their ids
        │   └── WriterFencedError (StoreLockedError)     another writer has taken the store over; names it
        ├── StoreUnreachableError                a store on another machine does not answer
        ├── StoreClosedError                     used after close(), or in a forked child
        │   └── SessionFinishedError                 a finished session was to be changed
        ├── UnsupportedVersionError              the directory has another layout version
        ├── UnsafeContentError                   a pickle or a name that would leave the sandbox
        └── CorruptStoreError                    damage: truncated, changed or foreign files
            └── IncompleteCheckpointError (FileNotFoundError)   the index names files that are absent

The standard-library classes in parentheses are second base classes, so that code written for other
replay buffers (``except FileNotFoundError``) keeps working.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class TrajstoreError(Exception):
    """Base class of every error raised on purpose by trajstore."""


class InvalidTrajectoryError(TrajstoreError, ValueError):
    """A trajectory has fields that do not fit together; nothing of its list was added.

    Attributes:
        position: of the trajectory in the list; None for one that is in no list.
    """

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class InvalidCallError(TrajstoreError, ValueError):
    """A call of a session, or its end, has values that do not fit together; the session is as before."""


class CallConflictError(InvalidCallError):
    """A call has the id of another call of its session, which has other content."""


class ConfigurationError(TrajstoreError, ValueError):
    """An argument or configuration key has a value outside its range."""


class UnknownColumnError(ConfigurationError):
    """An SQL expression names a column that does not exist; late values become columns once there is one."""


class SchemaMismatchError(TrajstoreError, ValueError):
    """The trajectories to be sampled together differ in their columns."""


class EmptyBufferError(TrajstoreError, RuntimeError):
    """There is nothing to sample from."""


class EpochsEndedError(EmptyBufferError):
    """All epochs of a sampler have been drawn."""


class TrajectoryUnavailableError(TrajstoreError, KeyError):
    """No trajectory has this id, or its data is no longer kept."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class MissingDependencyError(TrajstoreError, ImportError):
    """A feature needs an optional package."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package!r}: in your checkout, install it with "
            f"`pip install '/path/to/trajstore[{extra}]'`"
        )


class DescriptorLimitError(TrajstoreError, OSError):
    """No file can be opened: the process or the machine has no descriptor left. No :class:`StoreError`: no damage."""

    __str__ = Exception.__str__


class StoreError(TrajstoreError):
    """A problem with a directory on disk."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no store at this path."""

    __str__ = Exception.__str__


class StoreLockedError(StoreError):
    """Another writer holds the directory.

    Args:
        message: of the error.
        brief: the holder is a tool that lets go in a moment, or may be one: trying again helps.
    """

    def __init__(self, message: str, *, brief: bool = False) -> None:
        super().__init__(message)
        self.brief = brief


class StoreWriteError(StoreError, OSError):
    """A write did not reach the disk. The unwritten data is still held in memory."""

    __str__ = Exception.__str__


class UnwritableTrajectoryError(StoreWriteError):
    """Added trajectories cannot be encoded. All others were written without them.

    Attributes:
        ids: of these trajectories, which the store does not hold.
    """

    def __init__(self, message: str, ids: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ids = list(ids)

    @staticmethod
    def of(errors: Iterable[UnwritableTrajectoryError]) -> UnwritableTrajectoryError:
        """Merge several errors into one."""
        several = list(errors)
        return UnwritableTrajectoryError(
            listed((str(error) for error in several), 3), [number for error in several for number in error.ids]
        )


class PartlyAddedError(StoreWriteError):
    """The first trajectories of a list larger than a shard were added, the others were not; or late values were not.

    Its ``__cause__`` is the error that interrupted it.

    Attributes:
        ids: of the added trajectories, in the order of the list.
    """

    def __init__(self, message: str, ids: Iterable[int]) -> None:
        super().__init__(message)
        self.ids = list(ids)


class WriterFencedError(StoreWriteError, StoreLockedError):
    """Another writer has taken the store over while this one was cut off; this one can write no more.

    The trajectories that it acknowledged are in the store. The others are not; add them again to the store, opened
    anew, once the other writer has closed.
    """


class StoreUnreachableError(StoreError):
    """A store on another machine has not answered in time; the outcome of the last request is unknown."""


class StoreClosedError(StoreError):
    """The store was closed, or belongs to another process."""


class SessionFinishedError(StoreClosedError):
    """A session was finished: no call can be added, and it cannot be finished otherwise."""


class UnsupportedVersionError(StoreError):
    """The directory has a layout version that this version of trajstore does not read."""


class UnsafeContentError(StoreError):
    """Loading this would run code or leave the directory."""


class CorruptStoreError(StoreError):
    """Files are truncated, changed or of another kind than their names say."""


class IncompleteCheckpointError(CorruptStoreError, FileNotFoundError):
    """Files of trajectories that the index names are absent, or ranks of a run."""

    __str__ = Exception.__str__


@contextmanager
def written(outcome: str) -> Iterator[None]:
    """Convert OS errors in the block to ``StoreWriteError``, with the outcome appended to the message.

    Raises:
        StoreWriteError: writing failed. An existing one passes unchanged.
    """
    try:
        yield
    except StoreWriteError:
        raise
    except OSError as error:
        raise StoreWriteError(f"{error}{outcome}") from error


def counted(count: int, noun: str, one: str = "", many: str = "") -> str:
    """Return a number with its noun: ``"1 shard is"``, ``"5 trajectories are"``.

    Args:
        count: the number.
        noun: the noun in the singular.
        one: words that follow a single one.
        many: words that follow any other number.
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural} {one if count == 1 else many}".rstrip()


def trajectories(count: int, one: str = "", many: str = "") -> str:
    """Return a number of trajectories, like :func:`counted`."""
    return counted(count, "trajectory", one, many)


def listed(items: Iterable[str], limit: int = 10) -> str:
    """Join the first few of many names, for a message."""
    names = list(items)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
