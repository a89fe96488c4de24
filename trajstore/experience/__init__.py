"""Experience replay for GRPO: the pool of successful rollouts, and the mixing of its tasks into batches.

Floor 7 of ``docs/design/house.md``: imports from lower floors only.

Imports run downward: ``exchange`` (pools to files and back), ``mixing`` → ``pool`` →
``ledger``, ``notices`` → ``journal`` → ``store``, ``selection``, ``compact`` →
``rules``, ``entry`` → ``buckets``, ``outcomes``; ``transcripts`` and ``message_rows`` make rows of conversations,
``persistence`` and ``agentevolver`` read and write a pool's files,
``rows`` makes one trajectory of a rollout's rows, ``contract`` compares tokenizers.
"""

from trajstore.experience.buckets import TASK_SAMPLING, TaskSampling
from trajstore.experience.conversation import ChatTemplate, TokenRow, rows_of_messages, with_tokens
from trajstore.experience.entry import Refusal, mean_entropy, of_earlier_run
from trajstore.experience.mixing import ExperienceMixCollateFn, RatioSchedule
from trajstore.experience.outcomes import REPLAY_MARK, is_success
from trajstore.experience.persistence import newest_pool
from trajstore.experience.pool import CurrentEntropy, ExperienceManager
from trajstore.experience.rules import PoolRules
from trajstore.experience.store import BufferStore, MemoryStore, PoolStore

__all__ = [
    "REPLAY_MARK",
    "TASK_SAMPLING",
    "BufferStore",
    "ChatTemplate",
    "CurrentEntropy",
    "ExperienceManager",
    "ExperienceMixCollateFn",
    "MemoryStore",
    "PoolRules",
    "PoolStore",
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
