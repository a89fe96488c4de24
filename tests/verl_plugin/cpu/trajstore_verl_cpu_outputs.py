"""An agent loop with two outputs for tasks of even index, like a loop that cuts its context."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class TwoOutputs(SingleTurnAgentLoop):  # type: ignore[misc]  # verl is not typed
    """Answers; for an even task index, answers again without the first answer in the context."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """Return the outputs of a session."""
        first = await super().run(sampling_params, priority=priority, **kwargs)
        if int(str(kwargs["index"]).split("-")[-1]) % 2:
            return first
        again = [*kwargs["raw_prompt"], {"role": "user", "content": "again"}]
        second = await super().run(sampling_params, priority=priority, **{**kwargs, "raw_prompt": again})
        return [first, second]
