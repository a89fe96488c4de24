"""What verl imports in every process: registers the policy loss, the trainer modes and the loop of guided rollouts.

verl swallows what goes wrong here (it logs at debug level), and would then only say that it knows no such trainer.
So a reason that the user can do something about is logged before it is raised.
"""

from __future__ import annotations

import importlib
import logging

from trainer_hooks.verl.versions import check_verl
from trajstore.errors import TrajstoreError

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the loss ``het``, the replay trainers, the guided agent loop; let verl check our options with its own.

    Raises:
        ConfigurationError: another verl is installed than the plugin was written for.
        ImportError: a package that verl's V1 trainer needs is absent.
    """
    try:
        check_verl()
        importlib.import_module("trainer_hooks.verl.trainer")
        importlib.import_module("trainer_hooks.verl.guided_loop")
        importlib.import_module("trainer_hooks.verl.early").install()
    except (TrajstoreError, ImportError) as error:
        logger.warning("trajstore: the replay trainers are not available: %s", error)
        raise


register()
