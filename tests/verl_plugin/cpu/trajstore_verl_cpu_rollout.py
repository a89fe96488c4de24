"""A reproducible rollout engine for verl that samples with transformers on CPU.

A generation's seed combines the prompt's token ids, the version of the weights, and the number of earlier
requests with this prompt and version, or the request's ``seed``. Requests of one prompt may arrive in any order:
as a set, their answers equal those of any run with the same weights. Greedy requests (temperature 0: validation) are
not counted.

All replicas of a run share one engine, so that the count does not depend on the load balancer, and a run with two
data-parallel workers samples the same as a run with one.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "trajstore_cpu"
ENGINE = "trajstore_cpu_engine"

logger = logging.getLogger(__name__)


def make_seed(prompt_ids: list[int], version: int, number: int) -> int:
    """Return the seed, 63 bits, of the ``number``-th answer (from 0) to a prompt by weights of ``version``."""
    text = f"{version}/{number}/{','.join(map(str, prompt_ids))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Engine:
    """Ray actor that holds a model and answers one request at a time, in order of arrival."""

    def __init__(self, model_path: str, response_length: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._response_length = response_length
        self._version = 0
        self._counts: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._turn = asyncio.Lock()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_more: Any
    ) -> TokenOutput:
        """Return up to ``max_tokens`` tokens and the log-prob of each under the tempered distribution."""
        prompt, version = list(prompt_ids), self._version
        temperature = float(sampling_params.get("temperature", 1.0))
        number = int(sampling_params.get("seed", 0))
        if temperature > 0 and "seed" not in sampling_params:
            number = self._counts[tuple(prompt)]
            self._counts[tuple(prompt)] += 1
        limit = int(sampling_params.get("max_tokens") or self._response_length)
        async with self._turn:
            ids, log_probs = await asyncio.to_thread(
                self._sample, prompt, temperature, min(limit, self._response_length), make_seed(prompt, version, number)
            )
        return TokenOutput(
            token_ids=ids,
            log_probs=log_probs,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": version},
        )

    @torch.no_grad()
    def _sample(self, prompt: list[int], temperature: float, limit: int, seed: int) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        log_probs: list[float] = []
        step, cache = torch.tensor([prompt]), None
        while len(ids) < limit:
            output = self._model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            scores = (output.logits[0, -1].double() / (temperature or 1.0)).log_softmax(-1)  # [vocabulary]
            if temperature > 0:
                token = int(torch.multinomial(scores.exp(), 1, generator=generator))
            else:
                token = int(scores.argmax())
            ids.append(token)
            log_probs.append(float(scores[token]))
            if token == self._model.config.eos_token_id:
                break
            step = torch.tensor([[token]])
        return ids, log_probs

    async def update_weights(self, weights: dict[str, np.ndarray], version: int | None) -> None:
        """Take over the weights of ``version`` (verl's global step); refused unless every name fits."""
        async with self._turn:
            self._model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
            if version is not None:
                self._version = version
                self._counts.clear()

    async def get_address(self) -> str:
        """Return an address that is never dialled: verl's load balancer wants a name."""
        return "127.0.0.1:0"

    async def wake_up(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing, like the methods below: on CPU nothing is released or cached between steps."""

    sleep = abort_all_requests = resume_generation = wake_up
    clear_kv_cache = release_kv_cache = resume_kv_cache = wake_up
    start_profile = stop_profile = wake_up


class CpuReplica(RolloutReplica):
    """A replica whose server is the run's one engine."""

    async def launch_servers(self) -> None:
        path = getattr(self.model_config, "local_path", None) or self.model_config.path
        options = {"name": ENGINE, "get_if_exists": True, "num_cpus": 0, "max_concurrency": 64}
        engine = ray.remote(Engine).options(**options).remote(path, self.config.response_length)
        await engine.get_address.remote()
        self._server_address = f"127.0.0.1:{self.replica_rank}"
        self._server_handle = engine
        self.servers = [engine]


class CpuAdapter(BaseRollout):
    """The end of the weight transfer that lives in the actor's worker."""

    async def resume(self, tags: list[str]) -> None:
        return None

    async def release(self) -> None:
        return None

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_more: Any,
    ) -> None:
        if hasattr(weights, "__aiter__"):
            named = {name: self._to_array(tensor) async for name, tensor in weights}
        else:
            # Every rank gathers, since gathering is collective, though only one sends.
            named = {name: self._to_array(tensor) for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(ENGINE).update_weights.remote(named, global_steps)
            logger.info("weights of step %s: %d tensors sent to the engine", global_steps, len(named))

    @staticmethod
    def _to_array(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().float().cpu().numpy()


RolloutReplicaRegistry.register(NAME, lambda: CpuReplica)
_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{CpuAdapter.__name__}"
