"""Checks the options of a run and starts nothing: ``python -m trainer_hooks.verl.check`` in place of ``main_ppo``.

The rest of the command stays as it is. What verl's own command line checks before it starts Ray is checked here by the
same functions, and the errors are the same; of ours the sentence alone is written, to stderr, and the exit code is 1.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from trainer_hooks.verl.config import SECTION, ReplayBlock
from trainer_hooks.verl.early import REPLAY_MODES
from trajstore.errors import ConfigurationError, TrajstoreError

_WITHOUT_FILES = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")
"""What keeps Hydra from making a folder for a run that is none."""


def check(config: Any) -> list[str]:
    """Return what a run with these options records and replays, a line each.

    Args:
        config: verl's whole configuration, an OmegaConf node.

    Raises:
        ConfigurationError: options of ours cannot take effect; or verl has not found the plugin.
        AssertionError, ValueError: verl refuses an option of its own.
    """
    if not hasattr(validate_config, "__wrapped__"):
        raise ConfigurationError(
            "verl has not loaded trajstore's plugin, and would not know its trainers: install trajstore into this"
            " environment, or name trainer_hooks.verl.plugin in VERL_USE_EXTERNAL_MODULES"
        )
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    mode = str(config.trainer.v1.trainer_mode)
    get_trainer_cls(mode)
    said = [f"trainer.v1.trainer_mode={mode}: the options can take effect"]
    if mode not in REPLAY_MODES:
        return [*said, "nothing is recorded or replayed"]
    block = ReplayBlock.from_config(config)
    replay = block.experience_replay
    where = block.recording_path if block.recording.enable else f"not recorded ({SECTION}.recording.enable=false)"
    said.append(f"rollouts: {where}")
    pool = "in memory" if replay.store is None else replay.store["path"]
    said.append(f"pool: {pool}" if replay.enable else "nothing is replayed (experience_replay.enable=false)")
    return said


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: Any) -> None:
    """Check the options of the command line, and say what they amount to."""
    try:
        said = check(config)
    except TrajstoreError as error:  # of options; where it was raised says nothing to who wrote them
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    sys.stdout.write("".join(f"{line}\n" for line in said))


if __name__ == "__main__":
    sys.argv += _WITHOUT_FILES
    main()
