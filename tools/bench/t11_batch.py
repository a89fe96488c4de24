"""T11: a mixed padded batch from 512 agent trajectories, over bare ``pad_sequence`` of the same tensors.

Prints one JSON line per figure. "The same tensors" are all eleven padded tensors of the batch: the peer gets
the rows of each of them ready-made and does nothing but pad. In the stricter second figure it pads only the four
columns that a trajectory brings, so that everything derived from them counts as overhead; it has no target.

    python tools/bench/t11_batch.py [--repeats 15] [--threads 1]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tools.bench.timing import repeats_told
from trainer_hooks.batch import BatchRow, build_batch, to_tensordict
from trajstore.trajectory import AgentTrajectory

ROWS, PROMPT, RESPONSE, TURNS, GROUP = 512, 300, 700, 3, 8
TARGET = 1.0
STORED = ("input_ids", "attention_mask", "loss_mask", "recorded_old_log_probs")


def make_row(number: int, generator: torch.Generator) -> BatchRow:
    """Return a trajectory of about 1,000 tokens; every fourth row is replayed."""
    prompt, response = PROMPT - number % 7, RESPONSE - number % 11
    turn = response // TURNS
    trajectory = AgentTrajectory(
        input_ids=torch.randint(1, 32000, (prompt + response,), generator=generator),
        attention_mask=torch.ones(prompt + response, dtype=torch.int64),
        loss_mask=torch.cat([torch.zeros(prompt), torch.arange(response) % turn < turn * 2 // 3]).long(),
        response_start=prompt,
        old_log_probs=-torch.rand(response, generator=generator),
        task_id=f"task-{number // GROUP}",
        rollout_id=str(number % GROUP),
        policy_version=number % 5,
    )
    return BatchRow(trajectory=trajectory, group_id=number // GROUP, is_experience_replay=number % 4 == 0)


def ready_made(rows: Sequence[BatchRow]) -> dict[str, list[Tensor]]:
    """Return, for every padded tensor of the batch, its rows without padding."""
    batch = to_tensordict(build_batch(rows, pad_token_id=0), jagged=True)
    return {
        name: [row.clone() for row in value.unbind()]
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.is_nested
    }


def pad(pieces: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Pad every list of rows; prompts on the left."""
    return {
        name: pad_sequence(rows, batch_first=True, padding_side="left" if name == "prompts" else "right")
        for name, rows in pieces.items()
    }


def time_ratio(mine: Callable[[], object], peer: Callable[[], object], repeats: int) -> float:
    """Return the median of (time of ``mine`` ÷ time of ``peer``), the two alternating."""
    ratios = []
    for repeat in range(repeats + 2):
        times = []
        for work in (mine, peer):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        if repeat >= 2:  # the first ones warm up
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def main() -> None:
    """Measure and print."""
    repeats = repeats_told(__doc__, 15)
    generator = torch.Generator().manual_seed(0)
    rows = [make_row(number, generator) for number in range(ROWS)]
    pieces = ready_made(rows)
    stored = {name: pieces[name] for name in STORED}
    for name, peer, target in (("the same tensors", pieces, TARGET), ("stored columns only", stored, None)):
        ratio = time_ratio(partial(build_batch, rows, 0), partial(pad, peer), repeats)
        figure = {"id": "T11", "name": f"build_batch over pad_sequence, {name}", "ratio": round(ratio, 3)}
        sys.stdout.write(json.dumps({**figure, "target": target}) + "\n")


if __name__ == "__main__":
    main()
