"""Options of a handle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trajstore.arguments import is_number, whole
from trajstore.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleOptions:
    """How a handle waits, sends and draws.

    Attributes:
        seed: of the draws; None takes one from the system.
        deadline: seconds for which a store that does not answer is asked again, before StoreUnreachableError.
        patience: seconds after which trajectories for such a store go to another one.
        max_pending_bytes: bytes that were sent and are not known to be committed, beyond which adding waits.
        parcel_bytes: most bytes that are sent at once, unless one trajectory has more.
        refresh_interval: seconds after which a draw asks the stores what is new.
        sample_window_size: draws are from this many newest trajectories of all stores together; 0 = from all.

    Raises:
        ConfigurationError: one is out of range.
    """

    seed: int | None = 1234
    deadline: float = 60.0
    patience: float = 10.0
    max_pending_bytes: int = 256 << 20
    parcel_bytes: int = 8 << 20
    refresh_interval: float = 1.0
    sample_window_size: int = 0

    def __post_init__(self) -> None:
        for name in ("deadline", "patience", "max_pending_bytes", "parcel_bytes"):
            value = getattr(self, name)
            if not is_number(value) or not value > 0:
                raise ConfigurationError(f"{name}: {value!r}, must be a number of more than 0")
        whole("sample_window_size", self.sample_window_size, 0)
        if not is_number(self.refresh_interval) or not self.refresh_interval >= 0:
            raise ConfigurationError(f"refresh_interval: {self.refresh_interval!r}, must be a number of at least 0")


def handle_options(given: Mapping[str, Any]) -> HandleOptions:
    """Return options by name.

    Raises:
        ConfigurationError: there is no such option, or one is out of range.
    """
    known = [field.name for field in fields(HandleOptions)]
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise ConfigurationError(f"{', '.join(unknown)}: no such option of a handle; there are {', '.join(known)}")
    return HandleOptions(**given)
