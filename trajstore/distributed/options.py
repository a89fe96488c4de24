"""Options of a handle for waiting, sending and drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trajstore._core.base.settings import Count, Positive, Seconds, Settings, Whole, names_of, unknown
from trajstore.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class HandleOptions(Settings):
    """Options of a handle.

    Attributes:
        seed: seed of the draws; None = from the system's entropy.
        deadline: seconds of retries to an unresponsive store before StoreUnreachableError.
        patience: seconds after which trajectories for an unresponsive store go to another one.
        max_pending_bytes: sent, uncommitted bytes above which adding waits.
        refresh_interval: seconds after which a draw fetches news from the stores.
        sample_window_size: number of newest trajectories, over all stores, that draws are from; 0 = all.

    Raises:
        ConfigurationError: a value is out of range.
    """

    seed: int | None = 1234
    deadline: Positive = 60.0
    patience: Positive = 10.0
    max_pending_bytes: Count = 256 << 20
    refresh_interval: Seconds = 1.0
    sample_window_size: Whole = 0


def handle_options(given: Mapping[str, Any]) -> HandleOptions:
    """Return the options given by name.

    Raises:
        ConfigurationError: an option is unknown or out of range.
    """
    if problems := unknown(given, names_of(HandleOptions)):
        raise ConfigurationError("; ".join(problems))
    return HandleOptions(**given)
