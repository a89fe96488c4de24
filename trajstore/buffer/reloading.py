"""What ``load_checkpoint`` and ``refresh`` do: contents are replaced whole, or follow what a live writer commits."""

from __future__ import annotations

import logging

from trajstore.buffer.backing import Backing
from trajstore.buffer.loading import Loaded
from trajstore.buffer.view import LoadRequest, View

logger = logging.getLogger(__name__)


def load(request: LoadRequest, view: View, backing: Backing) -> Loaded:
    """Show what a request names instead of what is shown; the caller holds ``view.steady``.

    Raises:
        StoreNotFoundError: there is nothing that can be loaded.
        IncompleteCheckpointError: files are absent (``strict``); lists them.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read.
    """
    contents, loaded = view.open(request)
    intake = backing.intake
    with intake.lock:
        view.replace(request, contents, loaded)
        intake.go_on(loaded.counter, request.first_id(loaded.next_id), request.stride)
    return loaded


def refresh(view: View, backing: Backing) -> bool:
    """Show what was committed since to what was loaded; return whether anything was.

    Raises:
        StoreNotFoundError: what was loaded is there no longer.
        CorruptStoreError, UnsafeContentError, UnsupportedVersionError: it cannot be read; nothing changed.
    """
    with view.steady:
        before = view.generations
        request = view.request_if_changed()
        if request is None:
            return False
        with backing.intake.lock:
            next_id = view.follow()
            if next_id is not None:
                backing.intake.go_on(next_id, request.first_id(next_id), request.stride)
        if next_id is None:
            _tell_of_added(view, backing)
            load(request, view, backing)
        changed = view.generations != before
    backing.retain()
    return changed


def _tell_of_added(view: View, backing: Backing) -> None:
    """Warn that what was added since the load is about to be shown no longer."""
    added = view.contents.added
    if added:
        where = "they stay in its own store" if backing.keeps else "they were in memory only and are lost"
        logger.warning(
            "refresh: loads again, and no longer shows the %d trajectories that were added here since; %s",
            added,
            where,
        )
