"""Division of one sequence of batches among the workers of a DataLoader."""

from __future__ import annotations

import mmap

import torch
from torch.utils.data import get_worker_info

from trajstore.errors import ConfigurationError


class Workers:
    """Lets worker w of n read every n-th batch of one sequence, once.

    The processes cannot continue each other's sequence, so after the workers of one epoch neither new workers nor the
    parent may read from the same start.
    """

    def __init__(self) -> None:
        self._epoch = _shared()
        """Seed of the DataLoader's epoch whose workers read the sequence; 0 before."""

    def begin(self) -> None:
        """Begin or continue to read in this process.

        Raises:
            ConfigurationError: workers of another epoch have read this sequence.
        """
        worker = get_worker_info()
        epoch = 0 if worker is None else max(1, worker.seed - worker.id)
        if self._epoch.item() not in (0, epoch):
            raise ConfigurationError(
                "DataLoader workers of an earlier epoch have drawn from this loader, and their batches would be "
                "repeated; use "
                "persistent_workers=True, or iterate in this process without workers, or call load_state_dict with "
                "the state to continue from"
            )
        if worker is not None:
            self._epoch.fill_(epoch)

    def restart(self) -> None:
        """Allow new workers, after a state was loaded; workers that are still running keep the earlier number."""
        if get_worker_info() is None:
            self._epoch = _shared()
        else:
            self._epoch.zero_()

    @staticmethod
    def reads(number: int) -> bool:
        """Return whether this process reads a batch, by its number in the sequence."""
        worker = get_worker_info()
        return worker is None or number % worker.num_workers == worker.id


def _shared() -> torch.Tensor:
    """Return a 0 in memory shared with forked children; torch shares it with spawned ones."""
    return torch.frombuffer(mmap.mmap(-1, 8), dtype=torch.int64)
