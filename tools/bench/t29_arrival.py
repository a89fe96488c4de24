"""T29: time from the put of a finished rollout until it is durable, and what recording adds to the put.

One session of 1,024 response tokens per put, as verl's agent loop does, in a real data plane. Puts alternate between
the recorded partition and the partition of validations, which takes the same path without the recorder. A thread polls
the recorder for the newest id on disk; its interval is part of the time until a rollout is durable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tools.bench.report import Figure, Options, needs
from tools.bench.t16_verl import GROUP, NEEDED, RESPONSE_TOKENS, new_row, open_plane
from tools.bench.timing import in_child, percentile
from tools.meanwhile import meanwhile

PUTS, WARM_UP = 2000, 50
POLL_SECONDS = 0.02
DURABLE_TARGET_S, PUT_TARGET_MS = 1.0, 0.1


def figures(options: Options) -> Iterator[Figure]:
    """Yield the time until a rollout is durable, and the time that recording adds to a put."""
    needs(*NEEDED, extra="verl")
    measured = in_child(_measured, options.folder, options.count(PUTS, 100))
    durable = measured["durable"]
    yield Figure(
        "T29",
        "time from the put of a rollout until it is durable, p99",
        percentile(durable, 0.99),
        DURABLE_TARGET_S,
        "s",
        details={"p50_s": statistics.median(durable), "max_s": max(durable), "rollouts": len(durable)},
    )
    used, unused = (statistics.mean(measured[partition]) for partition in ("train", "val"))
    yield Figure(
        "T16",
        f"processor time that recording adds to a put of {RESPONSE_TOKENS} tokens, in the process that puts",
        (used - unused) * 1e3,
        PUT_TARGET_MS,
        "ms",
        details={"put_ms": unused * 1e3},
    )


# ---- in the child ----


def _measured(folder: Path, puts: int) -> dict[str, list[float]]:
    """Return seconds until durable, and processor seconds of the puts by partition."""
    with open_plane(folder) as session:  # before TransferQueue is imported, which reads the environment
        import torch
        import transfer_queue
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        random = torch.Generator().manual_seed(0)
        committed: list[float] = []

        def look() -> None:
            news = session._recorder.status().committed + 1 - len(committed)
            committed.extend([time.perf_counter()] * news)

        times: dict[str, list[float]] = {"train": [], "val": []}
        ends: list[float] = []
        with meanwhile(look, POLL_SECONDS):
            for number in range(-WARM_UP, puts):
                for partition in ("train", "val") if number % 2 else ("val", "train"):
                    key, tag, columns = new_row((number + WARM_UP) // GROUP, number % GROUP, random)
                    fields = list_of_dict_to_tensordict([columns])
                    start, used = time.perf_counter(), time.process_time()
                    transfer_queue.kv_batch_put(keys=[key], partition_id=partition, fields=fields, tags=[tag])
                    used = time.process_time() - used
                    transfer_queue.kv_clear(keys=[key], partition_id=partition)
                    if partition == "train":
                        ends.append(start)
                    if number >= 0:
                        times[partition].append(used)
            while len(committed) < len(ends):
                time.sleep(POLL_SECONDS)
        times["durable"] = [at - start for at, start in zip(committed, ends, strict=True)][WARM_UP:]
        return times
