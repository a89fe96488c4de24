"""Harbor rollouts of OpenEnv as sessions of a store.

Written for OpenEnv 0.10: the training contract of ``openenv.harbor.contract.export_training_contract``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from trajstore import Reward, Sessions, TrajectoryReplayBuffer
from trajstore.errors import ConfigurationError, InvalidCallError

OPENENV = "openenv"
"""Key of ``metadata`` with the rest of a contract, and of an entry."""


def record_rollout(
    store: TrajectoryReplayBuffer | Sessions, contract: Mapping[str, Any], *, policy_version: int | None = None
) -> list[int]:
    """Make rollouts of the trace entries of a contract: a session, and a path for each prompt that begins anew.

    Tokens of a completion whose ``loss_mask`` is 0 are part of the history and not trained. The turns that the contract
    excludes are named in ``metadata``.

    Args:
        store: the buffer, or the sessions of a process that does not write the store.
        contract: of a training rollout.
        policy_version: training step whose weights sampled.

    Returns:
        The ids of the rollouts; empty in a process that does not write the store.

    Raises:
        ConfigurationError: it is no contract of this version; names the field.
        InvalidCallError: a turn has values that do not fit together; nothing is kept of the rollout.
    """
    try:
        if contract["schema_version"] != 1:
            raise ConfigurationError(f"schema_version: {contract['schema_version']}, must be 1; update trajstore")
        entries, turns, reward = contract["trace_entries"], contract["turns"], contract["reward"]
        session = store.session(contract["task_id"], contract["session_id"])
    except KeyError as error:
        raise ConfigurationError(f"contract: has no {error}; pass what export_training_contract returns") from error
    rest = {name: value for name, value in contract.items() if name not in ("trace_entries", "turns")}
    rest["excluded"] = [turn["turn"] for turn in turns if not turn["trainable"]]
    try:
        for entry in entries:
            _add_turn(session, entry, policy_version)
    except InvalidCallError:
        session.discard()
        raise
    made = None if reward is None else Reward(outcome=float(reward))
    return session.finish(made, metadata={OPENENV: rest})


def _add_turn(session: Any, entry: Mapping[str, Any], policy_version: int | None) -> None:
    """Add a call for each run of trained tokens, and one for untrained ones at the end."""
    prompt, completion = entry["prompt_token_ids"], entry["completion_token_ids"]
    log_probs, mask = entry["per_token_logps"], entry["loss_mask"][len(prompt) :]
    if not len(mask) == len(completion) == len(log_probs) or any(entry["loss_mask"][: len(prompt)]):
        turn = entry["metadata"]["turn"]
        raise InvalidCallError(f"turn {turn}: loss_mask and per_token_logps do not fit its {len(completion)} tokens")
    choice = entry["response"]["choices"][0]
    about = {
        "messages": [*entry["request"]["messages"], choice["message"]],
        "policy_version": policy_version,
        "finish_reason": choice["finish_reason"] or "",
        "metadata": {OPENENV: {**entry["metadata"], "tools": entry["request"]["tools"]}},
    }
    begin = 0
    for is_trained, run in groupby(mask):
        end = begin + len(list(run))
        if is_trained or end == len(mask):
            start = begin if is_trained else end
            name = str(entry["metadata"]["node_id"] or entry["metadata"]["turn"]) + (f".{begin}" if begin else "")
            history = [*prompt, *completion[:start]]
            session.add_call(history, completion[start:end], log_probs[start:end], call_id=name, **about)
        begin = end
