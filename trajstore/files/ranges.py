"""Ranges of objects, several at once; what fails is tried again after a pause that grows."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from trajstore.errors import CorruptStoreError
from trajstore.files.object_store import ObjectStore
from trajstore.files.partial import Range

logger = logging.getLogger(__name__)

AT_ONCE = 32
"""Requests under way."""

ATTEMPTS = 6

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
"""Seconds; each pause is twice the one before, and half to one and a half times that, so that readers do not return
all at once to a server that has had too much."""


class RangeFetcher:
    """Fetches ranges of the objects of one directory.

    Args:
        objects: of the directory.
        gone: returns the error for a file that is absent.
        chance: of the length of pauses.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        objects: ObjectStore,
        gone: Callable[[str], CorruptStoreError],
        chance: random.Random | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._objects = objects
        self._gone = gone
        self._chance = chance or random.Random()
        self._sleep = sleep

    def __call__(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range.

        Raises:
            CorruptStoreError: a file is absent.
            OSError: a range could not be fetched in several attempts; names the file.
        """
        found: dict[int, bytes] = {}
        waiting = list(range(len(ranges)))
        for attempt in range(ATTEMPTS):
            pieces = [(ranges[at].name, ranges[at].start, ranges[at].stop) for at in waiting]
            failed: list[tuple[int, OSError]] = []
            for at, answer in zip(waiting, self._objects.ranges(pieces, AT_ONCE), strict=True):
                if isinstance(answer, FileNotFoundError):
                    raise self._gone(ranges[at].name) from answer
                if isinstance(answer, OSError):
                    failed.append((at, answer))
                else:
                    found[at] = answer
            if not failed:
                return [found[at] for at in range(len(ranges))]
            waiting, error = [at for at, _ in failed], failed[0][1]
            if attempt == ATTEMPTS - 1 or isinstance(error, PermissionError):
                break
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt) * self._chance.uniform(0.5, 1.5)
            logger.info("%s: %d of %d ranges again in %.1f s", error, len(failed), len(ranges), pause)
            self._sleep(pause)
        raise OSError(
            error.errno,
            f"{error.strerror} ({len(waiting)} of {len(ranges)} ranges could not be fetched in {attempt + 1} attempts)",
            error.filename,
        ) from error
