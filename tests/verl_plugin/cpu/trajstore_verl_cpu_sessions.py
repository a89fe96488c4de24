"""An agent loop whose answers follow from prompt, weights and session, whichever sessions are generated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

CALLS = "TRAJSTORE_VERL_CALLS"
"""Environment variable: file that gets a line ``{uid}_{session}`` per call."""


class SessionSeeds(SingleTurnAgentLoop):  # type: ignore[misc]  # verl is not typed
    """Answers with the session's number as seed, and notes the call."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """Return the output of a session."""
        if path := os.environ.get(CALLS):
            with Path(path).open("a", encoding="utf-8") as calls:
                calls.write(f"{kwargs['uid']}_{kwargs['session_id']}\n")
        seeded = {**sampling_params, "seed": int(kwargs["session_id"])}
        return await super().run(seeded, priority=priority, **kwargs)
