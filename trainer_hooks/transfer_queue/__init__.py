"""A storage backend for TransferQueue that also records rollouts in a store, as they arrive.

Importing this package registers the backend ``trajstore``. Only the process that calls ``transfer_queue.init`` first
needs the import; the others import it with the configuration that they get from TransferQueue's controller.
"""

from __future__ import annotations

from trainer_hooks.transfer_queue.recorder import RolloutFormat, StoreOptions
from trainer_hooks.transfer_queue.rows import Row
from trainer_hooks.transfer_queue.storage import BACKEND, RecordedPool, RecorderHandle

__all__ = ["BACKEND", "RecordedPool", "RecorderHandle", "RolloutFormat", "Row", "StoreOptions"]
