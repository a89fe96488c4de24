"""T16: what recording adds to a step of verl: a step's rows of 1,280 tokens in a real data plane, without a training.

Everything runs in a child process: verl and Ray change the environment and write to standard output.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

from tools.bench.report import Figure, Options, needs
from tools.bench.timing import in_child

NEEDED = ("verl", "ray", "transfer_queue")
GROUP = 8
ROWS = (512, 2048)
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 1024
VOCABULARY = 150_000
WARM_UP = 2
TARGET_MS = 0.1

Times = dict[str, list[float]]
OVERRIDES = (f"transfer_queue.backend.SimpleStorage.total_storage_size={4 * max(ROWS)}",)


def figures(options: Options) -> Iterator[Figure]:
    """Yield milliseconds per trajectory."""
    needs(*NEEDED, extra="verl")
    sizes = [max(GROUP, options.count(rows) // GROUP * GROUP) for rows in ROWS]
    for size, times in in_child(_measured, options.folder, options.repeats, sizes):
        yield from _figures(size, times)


def _figures(size: int, times: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    each = {name: statistics.median(values) / size * 1e3 for name, values in times.items()}
    ours = [whole - get for whole, get in zip(times["whole"], times["get"], strict=True)]
    yield Figure(
        "T16",
        f"our part per trajectory of {RESPONSE_TOKENS} response tokens, {size} in a step",
        statistics.median(ours) / size * 1e3,
        TARGET_MS,
        "ms",
        details={
            "processor_ms": each["own"],
            "unpack_ms": each["read"] - each["get"],
            "build_ms": each["build"],
            "record_ms": each["record"],
            "get_ms": each["get"],
            "added_in_all_ms": each["whole"],
        },
    )


# ---- in the child ----


def _measured(folder: Path, repeats: int, sizes: Sequence[int]) -> list[tuple[int, Times]]:
    """Join and record steps of these many rows; return seconds per step and part, for each size."""
    with open_plane(folder) as ours:
        import transfer_queue

        from trainer_hooks.verl import dataplane, session

        parts = {
            "get": (transfer_queue, "kv_batch_get"),
            "read": (dataplane, "read_rows"),
            "build": (session, "finished_of"),
            "record": (session.ReplaySession, "_report"),
        }
        result = []
        for size in sizes:
            batch = _put_rows(size)
            kept: Times = {}
            for repeat in range(-WARM_UP, repeats):
                took = _record_once(ours, batch, repeat + WARM_UP, parts)
                if repeat >= 0:
                    for name, seconds in took.items():
                        kept.setdefault(name, []).append(seconds)
            transfer_queue.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
            result.append((size, kept))
        return result


@contextmanager
def open_plane(folder: Path) -> Iterator[Any]:
    """Start Ray and a data plane that is recorded; yield a replay session."""
    from tests.verl_plugin.assets import make_assets
    from tests.verl_plugin.harness import VerlSession, make_config

    # The data plane wants 8 threads by default, and says so at every call where there are fewer cores.
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))
    config = make_config(make_assets(folder / "assets"), folder, OVERRIDES)
    ray = VerlSession.start()
    try:
        with _recording(config, folder) as session:
            yield session
    finally:
        ray.close()


@contextmanager
def _recording(config: Any, folder: Path) -> Iterator[Any]:
    """Run a data plane with a replay session that records; yield the session."""
    import transfer_queue
    from omegaconf import OmegaConf

    from trainer_hooks.config import ExperienceReplayConfig
    from trainer_hooks.verl.config import OutcomeRule, RecordingConfig, ReplayBlock
    from trainer_hooks.verl.reading import RunTokenizer
    from trainer_hooks.verl.session import ReplaySession

    OmegaConf.resolve(config)
    block = ReplayBlock(
        experience_replay=ExperienceReplayConfig(),
        recording=RecordingConfig(),
        outcome=OutcomeRule(),
        folder=folder / "trajstore",
        n_rollout=GROUP,
    )
    config.transfer_queue.backend.storage_backend = "trajstore"
    transfer_queue.init(config.transfer_queue)
    tokenizer = RunTokenizer("0" * 16, decoder=_tokenizer())
    session = ReplaySession(block, None, tokenizer=tokenizer, run="benchmark", checkpoints=folder)
    try:
        yield session
    finally:
        session.close()
        transfer_queue.close()


def _tokenizer() -> Any:
    """Return a tokenizer of 150,000 tokens that decodes bytes as those of language models do."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"Ġ{number:x}": number for number in range(VOCABULARY)}, unk_token="Ġ0"))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def _record_once(ours: Any, batch: Any, step: int, parts: Mapping[str, tuple[Any, str]]) -> dict[str, float]:
    with _timed(parts) as times:
        start, own_start = time.perf_counter(), time.thread_time()
        ours.scored(ours.join(batch), step)
        whole, own = time.perf_counter() - start, time.thread_time() - own_start
        ours._recorder.flush()
    return {"whole": whole, "own": own, **{name: sum(values) for name, values in times.items()}}


def _put_rows(count: int) -> Any:
    """Put rows into the data plane as verl's agent loop and trainer do; return their batch."""
    import torch
    import transfer_queue
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from trainer_hooks.verl.dataplane import write_column

    random = torch.Generator().manual_seed(0)
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    for group in range(count // GROUP):
        for number in range(GROUP):
            key, tag, columns = new_row(group, number, random)
            fields = list_of_dict_to_tensordict([columns])
            transfer_queue.kv_batch_put(keys=[key], partition_id="train", fields=fields, tags=[tag])
            keys.append(key)
            tags.append(tag)
    for name in ("old_log_probs", "entropy"):
        write_column(keys, "train", name, [-torch.rand(RESPONSE_TOKENS, generator=random) for _ in keys])
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags, extra_info={})


def new_row(group: int, number: int, random: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return key, tag and columns of a rollout, as verl's agent loop puts them."""
    import numpy as np
    import torch

    prompt = torch.randint(0, VOCABULARY, (PROMPT_TOKENS,), generator=random)
    response = torch.randint(0, VOCABULARY, (RESPONSE_TOKENS,), generator=random)
    mask = torch.ones(RESPONSE_TOKENS, dtype=torch.int64)
    scores = torch.zeros(RESPONSE_TOKENS)
    scores[-1] = 1.0
    versions = {"min_global_steps": 0, "max_global_steps": 0}
    columns = {
        "prompts": prompt,
        "responses": response,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(PROMPT_TOKENS + RESPONSE_TOKENS),
        "rm_scores": scores,
        "rollout_log_probs": -torch.rand(RESPONSE_TOKENS, generator=random),
        "uid": f"{group:032x}",
        "session_id": number,
        "index": group,
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "multi_modal_inputs": {},
        "extra_fields": {"reward_extra_info": {"acc": np.float64(1.0)}, **versions},
    }
    lengths = {"prompt_len": PROMPT_TOKENS, "response_len": RESPONSE_TOKENS, "seq_len": PROMPT_TOKENS + RESPONSE_TOKENS}
    return f"{group:032x}_{number}_0", {"status": "success", "global_steps": 1, **lengths, **versions}, columns


@contextmanager
def _timed(places: Mapping[str, tuple[Any, str]]) -> Iterator[Times]:
    """Time every call of functions, given as owner and attribute, while this is open."""
    times: Times = {name: [] for name in places}

    def noting(function: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
        @wraps(function)
        def noted(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                taken.append(time.perf_counter() - start)

        return noted

    with ExitStack() as patches:
        for name, (owner, attribute) in places.items():
            timed = noting(getattr(owner, attribute), times[name])
            patches.enter_context(mock.patch.object(owner, attribute, timed))
        yield times
