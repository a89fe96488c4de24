"""verl's plugin entry point: registers the policy loss, the trainer modes and the guided agent loop.

verl logs exceptions of plugins only at debug level and later reports an unknown trainer. So errors that the user can
fix are logged here before they are raised.
"""

from __future__ import annotations

import importlib
import logging

from trainer_hooks.verl.versions import check_verl
from trajstore.errors import TrajstoreError

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the loss ``het``, the replay trainers, our agent loops and the check of our options.

    Raises:
        ConfigurationError: the installed verl is not a supported version.
        ImportError: a package of verl's V1 trainer is absent.
    """
    try:
        check_verl()
        importlib.import_module("trainer_hooks.verl.trainer")
        importlib.import_module("trainer_hooks.verl.guided_loop")
        importlib.import_module("trainer_hooks.verl.reused_loop")
        importlib.import_module("trainer_hooks.verl.early").install()
    except (TrajstoreError, ImportError) as error:
        logger.warning("trajstore: the replay trainers are not available: %s", error)
        raise


register()
