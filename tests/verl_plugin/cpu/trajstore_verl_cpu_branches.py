"""An agent loop that records each run as a session of a store, with a branch for tasks of even index."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from trainer_hooks.verl.reused_loop import session_outputs
from trajstore import AgentTrajectory, TrajectoryReplayBuffer


class Branches(SingleTurnAgentLoop):  # type: ignore[misc]  # verl is not typed
    """Answers; for an even task index two agents continue from the answer, and one goes on once more."""

    buffer: TrajectoryReplayBuffer | None = None

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """Return the outputs of a session, one per path."""
        sampling_params = {**sampling_params, "max_tokens": 6}
        first = await super().run(sampling_params, priority=priority, **kwargs)
        cls = type(self)
        if cls.buffer is None:
            cls.buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=Path(tempfile.mkdtemp()) / "sessions")
        session = cls.buffer.session(str(kwargs["index"]), f"{kwargs['uid']}/{kwargs['session_id']}")
        version = first.extra_fields["min_global_steps"] + 1
        history = [*first.prompt_ids, *first.response_ids]
        session.add_call(
            first.prompt_ids, first.response_ids, first.response_logprobs, call_id="0", policy_version=version
        )
        if int(str(kwargs["index"]).split("-")[-1]) % 2 == 0:
            for number, added in enumerate(
                ([first.prompt_ids[0]], [first.prompt_ids[1], first.prompt_ids[0]]), start=1
            ):
                prompt = [*history, *added]
                told = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params
                )
                session.add_call(
                    prompt, told.token_ids, told.log_probs, call_id=f"{number}", parent="0", policy_version=version
                )
        session.finish()
        rows = [cls.buffer.get(number) for number in session.row_ids]
        return session_outputs([row for row in rows if isinstance(row, AgentTrajectory)])
