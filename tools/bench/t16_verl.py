"""T16: what recording costs a run of verl's V1 trainer (no replay).

*Trainer*: verl's trainer on the CPU with a tiny model (the harness of ``tests/verl_plugin``), modes ``sync`` and
``sync_replay``, in the order stock, recording, recording, stock; same weights, data and seed. Steps of 16 prompts with
8 rollouts of up to 32 tokens. *Rows*: a step's rows of 1,280 tokens in a real data plane, without a training.

Everything runs in a child process: verl and Ray change the environment and write to standard output.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from tools.bench.report import Figure, Options, SkippedError
from tools.bench.timing import in_child

PROMPTS, GROUP = 16, 8
STEPS, WARM_UP_STEPS = 10, 2
ROWS = (512, 2048)
PROMPT_TOKENS, RESPONSE_TOKENS = 256, 1024
VOCABULARY = 150_000
WARM_UP = 2
TARGET_MS = 0.1
MODES = ("sync", "sync_replay", "sync_replay", "sync")

Times = dict[str, list[float]]

OVERRIDES = (
    f"data.train_batch_size={PROMPTS}",
    "data.max_response_length=32",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={PROMPTS * GROUP}",
    f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS * GROUP}",
    f"actor_rollout_ref.rollout.n={GROUP}",
    "trainer.total_epochs=1000",
    f"transfer_queue.backend.SimpleStorage.total_storage_size={4 * max(ROWS)}",
)


def figures(options: Options) -> Iterator[Figure]:
    """Yield how much longer steps take, and milliseconds per trajectory."""
    measured = _measure(options, options.count(STEPS, 2))
    yield from _trainer_figures(measured["trainings"])
    yield from _rows_figures(measured["rows"])


def row_figures(options: Options) -> Iterator[Figure]:
    """Yield milliseconds per trajectory alone."""
    yield from _rows_figures(_measure(options, 0)["rows"])


def need_verl() -> None:
    """Check that verl is installed.

    Raises:
        SkippedError: it is not.
    """
    missing = [name for name in ("verl", "ray", "transfer_queue") if find_spec(name) is None]
    if missing:
        raise SkippedError(f"needs {', '.join(missing)}: install trajstore[verl]")


def _measure(options: Options, steps: int) -> Any:
    """Return the child's measurements; without trainings if they have no steps."""
    need_verl()
    sizes = [max(GROUP, options.count(rows) // GROUP * GROUP) for rows in ROWS]
    return in_child(_measured, options.folder, steps, options.repeats, sizes)


def _trainer_figures(trainings: Sequence[Mapping[str, Sequence[float]]]) -> Iterator[Figure]:
    """Yield the figures of trainings in the order of :data:`MODES`."""
    stock, recording = (
        [one for one, mode in zip(trainings, MODES, strict=True) if mode == wanted]
        for wanted in ("sync", "sync_replay")
    )
    steps = {name: _steps(runs, "step") for name, runs in (("stock", stock), ("recording", recording))}
    # A step has the same prompts and seed in every run, so steps can be compared one by one as well.
    pairs = zip(*([run["step"] for run in runs] for runs in (recording, stock)), strict=True)
    paired = [ours / theirs for mine, other in pairs for ours, theirs in zip(mine, other, strict=True)]
    yield Figure(
        "T16",
        "a step of verl's trainer on CPU, recording ÷ stock",
        statistics.median(steps["recording"]) / statistics.median(steps["stock"]),
        None,
        details={
            "paired": statistics.median(paired),
            **{f"{name}_s": statistics.median(times) for name, times in steps.items()},
            "stock_min_s": min(steps["stock"]),
            "stock_max_s": max(steps["stock"]),
            "steps": len(steps["stock"]),
            "gets_s": statistics.median(_steps(stock, "gets")),
        },
    )
    ours, recorder = _steps(recording, "ours"), _steps(recording, "recorder")
    yield Figure(
        "T16",
        "part of a recording step that is spent in our code",
        statistics.median(mine / step for mine, step in zip(ours, steps["recording"], strict=True)),
        None,
        details={
            "ms_per_trajectory": statistics.median(ours) / (PROMPTS * GROUP) * 1e3,
            "recorder_ms_per_trajectory": statistics.median(recorder) / (PROMPTS * GROUP) * 1e3,
        },
    )


def _rows_figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    for row in rows:
        yield from _size_figures(row["size"], row["times"])


def _size_figures(size: int, times: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
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
            "other_get_ms": each["other_get"],
        },
    )
    yield Figure(
        "T16",
        f"afterwards, beside the training, until what {size} rollouts got late is committed",
        each["background"],
        None,
        "ms",
        details={"seconds": statistics.median(times["background"])},
    )


def _steps(runs: Sequence[Mapping[str, Sequence[float]]], name: str) -> list[float]:
    return [value for run in runs for value in run[name]]


# ---- in the child ----


def _measured(folder: Path, steps: int, repeats: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the measurements of trainings and rows."""
    from tests.verl_plugin.harness import make_config

    with _verl(folder) as (session, assets):
        trainings = []
        for number, mode in enumerate(MODES if steps else ()):
            more = (f"trainer.v1.trainer_mode={mode}", f"trainer.total_training_steps={steps + WARM_UP_STEPS}")
            config = make_config(assets, folder / f"run{number}", [*OVERRIDES, *more])
            trainings.append(_training(session.run, config))
        rows = _rows(make_config(assets, folder / "rows", OVERRIDES), folder / "rows", sizes, repeats)
    return {"trainings": trainings, "rows": rows}


@contextmanager
def _verl(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Start Ray for verl; yield the session and the assets."""
    from tests.verl_plugin.assets import make_assets
    from tests.verl_plugin.harness import VerlSession

    # The data plane wants 8 threads by default, and says so at every call where there are fewer cores.
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))
    assets = make_assets(folder / "assets")
    session = VerlSession.start()
    try:
        yield session, assets
    finally:
        session.close()


@contextmanager
def open_plane(folder: Path) -> Iterator[Any]:
    """Start Ray and a data plane that is recorded; yield a replay session."""
    from tests.verl_plugin.harness import make_config

    with _verl(folder) as (_, assets), _recording(make_config(assets, folder, OVERRIDES), folder) as session:
        yield session


def _training(run: Callable[[Any], Any], config: Any) -> Times:
    """Train; return seconds per step.

    ``step`` as verl measures it, ``recorder`` as its figure says, ``ours`` in the session's methods (the recorder
    included), ``gets`` in all reads of the data plane by the trainer's process.
    """
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    per_step: Times = {}
    with _timed(_trainer_parts()) as times:
        done = PPOTrainerSync.on_step_end

        def step_done(trainer: Any) -> None:
            for name, values in times.items():
                per_step.setdefault(name, []).append(sum(values))
                values.clear()
            done(trainer)

        with mock.patch.object(PPOTrainerSync, "on_step_end", step_done):
            metrics = [record for record in run(config).metrics if "timing_s/step" in record]
    kept = {name: values[WARM_UP_STEPS:] for name, values in per_step.items()}
    return {
        "step": [record["timing_s/step"] for record in metrics[WARM_UP_STEPS:]],
        "recorder": [record.get("recording/seconds", 0.0) for record in metrics[WARM_UP_STEPS:]],
        "ours": [sum(parts) for parts in zip(kept["scored"], kept["join"], strict=True)],
        "gets": kept["get"],
    }


def _trainer_parts() -> dict[str, tuple[Any, str]]:
    import transfer_queue

    from trainer_hooks.verl.session import ReplaySession

    return {
        "scored": (ReplaySession, "scored"),
        "join": (ReplaySession, "join"),
        "get": (transfer_queue, "kv_batch_get"),
    }


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


def _rows(config: Any, folder: Path, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Join and record steps of these many rows; return seconds per step and part, for each size."""
    import transfer_queue

    from trainer_hooks.verl import dataplane, session

    parts = {
        "get": (transfer_queue, "kv_batch_get"),
        "read": (dataplane, "read_rows"),
        "build": (session, "finished_of"),
        "record": (session.ReplaySession, "_report"),
    }
    result = []
    with _recording(config, folder) as ours:
        for size in sizes:
            batch = _put_rows(size)
            kept: Times = {}
            for repeat in range(-WARM_UP, repeats):
                took = _record_once(ours, batch, repeat + WARM_UP, parts)
                if repeat >= 0:
                    for name, seconds in took.items():
                        kept.setdefault(name, []).append(seconds)
            transfer_queue.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
            result.append({"size": size, "times": kept})
    return result


def _tokenizer() -> Any:
    """Return a tokenizer of 150,000 tokens that decodes bytes as those of language models do."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"Ġ{number:x}": number for number in range(VOCABULARY)}, unk_token="Ġ0"))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def _record_once(ours: Any, batch: Any, step: int, parts: Mapping[str, tuple[Any, str]]) -> dict[str, float]:
    import transfer_queue

    # What verl reads itself when it computes old log-probs, for comparison.
    others = ["entropy", "old_log_probs", "response_mask", "responses", "rollout_log_probs"]
    start = time.perf_counter()
    transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=others)
    other_get = time.perf_counter() - start
    with _timed(parts) as times:
        start, own_start = time.perf_counter(), time.thread_time()
        ours.scored(ours.join(batch), step)
        whole, own = time.perf_counter() - start, time.thread_time() - own_start
        ours._recorder.flush()
        background = time.perf_counter() - start - whole
    sums = {name: sum(values) for name, values in times.items()}
    return {"whole": whole, "own": own, "background": background, "other_get": other_get, **sums}


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
    with ExitStack() as patches:
        for name, (owner, attribute) in places.items():
            noting = _noting(getattr(owner, attribute), times[name])
            patches.enter_context(mock.patch.object(owner, attribute, noting))
        yield times


def _noting(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    @wraps(function)
    def noted(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            times.append(time.perf_counter() - start)

    return noted
