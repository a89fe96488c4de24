"""T11: a mixed padded batch from 512 agent trajectories, over bare ``pad_sequence`` of the same tensors; one thread.

"The same tensors" are all eleven padded tensors of the batch: the peer gets the rows of each of them ready-made and
does nothing but pad.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tools.bench.report import Figure, Options
from tools.bench.timing import in_turn, ratio, torch_threads
from tools.bench.workloads import PROMPT, RESPONSE, rollout, turns
from trainer_hooks.batch import BatchRow, build_batch, to_tensordict

ROWS, GROUP = 512, 8
TARGET = 1.0


def figures(options: Options) -> Iterator[Figure]:
    """Yield the one figure."""
    generator = torch.Generator().manual_seed(0)
    rows = [make_row(number, generator) for number in range(options.count(ROWS, GROUP))]
    pieces = ready_made(rows)
    with torch_threads(1):
        times = in_turn([partial(build_batch, rows, 0), partial(pad, pieces)], 2 * options.repeats)
    yield Figure("T11", "build_batch over pad_sequence of the same tensors", ratio(*times), TARGET)


def make_row(number: int, generator: torch.Generator) -> BatchRow:
    """Return a trajectory of about 1,000 tokens; every fourth row is replayed."""
    mask = turns(RESPONSE - number % 11)
    names = {"task_id": f"task-{number // GROUP}", "rollout_id": str(number % GROUP), "policy_version": number % 5}
    made = rollout(generator, number, PROMPT - number % 7, mask, **names)
    return BatchRow(trajectory=made, group_id=number // GROUP, is_experience_replay=number % 4 == 0)


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
