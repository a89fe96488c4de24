"""Experience replay for GRPO: pools successful rollouts and mixes their tasks into batches.

Imports run downward: ``exchange`` (pools filled, and written as files), ``mixing`` → ``pool`` → ``ledger``,
``notices`` → ``state`` → ``store``, ``selection`` → ``rules``, ``entry`` → ``buckets``, ``outcomes``.
``message_rows`` and ``conversation`` make rows of conversations, ``persistence`` and ``agentevolver`` read and write a
pool's files, ``rows`` joins a rollout's rows into one trajectory, and ``contract`` compares tokenizers.
"""

from trainer_hooks.replay.buckets import TASK_SAMPLING, TaskSampling
from trainer_hooks.replay.conversation import ChatTemplate, TokenRow, rows_of_messages, with_tokens
from trainer_hooks.replay.entry import Refusal, mean_entropy, of_earlier_run
from trainer_hooks.replay.mixing import ExperienceMixCollateFn, RatioSchedule
from trainer_hooks.replay.outcomes import REPLAY_MARK, is_success
from trainer_hooks.replay.persistence import newest_pool
from trainer_hooks.replay.pool import CurrentEntropy, ExperienceManager
from trainer_hooks.replay.rules import PoolRules
from trainer_hooks.replay.store import BufferStore

__all__ = [
    "REPLAY_MARK",
    "TASK_SAMPLING",
    "BufferStore",
    "ChatTemplate",
    "CurrentEntropy",
    "ExperienceManager",
    "ExperienceMixCollateFn",
    "PoolRules",
    "RatioSchedule",
    "Refusal",
    "TaskSampling",
    "TokenRow",
    "is_success",
    "mean_entropy",
    "newest_pool",
    "of_earlier_run",
    "rows_of_messages",
    "with_tokens",
]
