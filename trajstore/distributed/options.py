"""Options of a handle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.core.base.settings import Count, Positive, Seconds, Settings, Whole, names_of, unknown
from trajstore.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class HandleOptions(Settings):
    """How a handle waits, sends and draws.

    Attributes:
        seed: of the draws; None takes one from the system.
        deadline: seconds for which a store that does not answer is asked again, before StoreUnreachableError.
        patience: seconds after which trajectories for such a store go to another one.
        max_pending_bytes: bytes that were sent and are not known to be committed, beyond which adding waits.
        refresh_interval: seconds after which a draw asks the stores what is new.
        sample_window_size: draws are from this many newest trajectories of all stores together; 0 = from all.

    Raises:
        ConfigurationError: one is out of range.
    """

    seed: int | None = 1234
    deadline: Positive = 60.0
    patience: Positive = 10.0
    max_pending_bytes: Count = 256 << 20
    refresh_interval: Seconds = 1.0
    sample_window_size: Whole = 0


def handle_options(given: Mapping[str, Any]) -> HandleOptions:
    """Return options by name.

    Raises:
        ConfigurationError: there is no such option, or one is out of range.
    """
    if problems := unknown(given, names_of(HandleOptions)):
        raise ConfigurationError("; ".join(problems))
    return HandleOptions(**given)
