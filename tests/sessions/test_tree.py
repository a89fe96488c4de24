"""Random trees of calls beside plain Python: parents, paths, masks, log-probs, trained once, and bytes stored."""

from collections import Counter

import numpy as np
import pytest
import torch

from trajstore import Reward, TrajectoryReplayBuffer

MAKERS = (list, lambda ids: np.array(ids, np.int64), lambda ids: torch.tensor(ids, dtype=torch.int64))


class Plain:
    """A session as lists: each call with all its tokens."""

    def __init__(self):
        self.calls = []

    def add(self, prompt, sampled, log_probs):
        begun = [n for n, (tokens, *_) in enumerate(self.calls) if prompt[: len(tokens)] == tokens]
        parent = max(begun, key=lambda n: (len(self.calls[n][0]), n), default=None)
        self.calls.append((prompt + sampled, len(prompt), log_probs, parent))

    def line(self, number):
        above = self.calls[number][3]
        return [*([] if above is None else self.line(above)), number]

    def paths(self):
        parents = {call[3] for call in self.calls}
        return [self.line(number) for number in range(len(self.calls)) if number not in parents]

    def rows(self):
        trained, rows = set(), []
        for path in self.paths():
            tokens = self.calls[path[-1]][0]
            mask, probs = [0] * len(tokens), [0.0] * len(tokens)
            for number in path:
                _, start, log_probs, _ = self.calls[number]
                for at, value in enumerate(log_probs, start):
                    mask[at], probs[at] = int(number not in trained), value
                trained.add(number)
            start = self.calls[path[0]][1]
            rows.append((tokens, mask, probs[start:], start))
        return rows


def random_call(rng, plain, words):
    """Return prompt, sampled tokens and log-probs of a call that continues, forks, rewrites or begins."""

    def new(least, most):
        return rng.integers(0, words, rng.integers(least, most)).tolist()

    kind = rng.choice(["continue", "retry", "rewrite", "root"], p=[0.5, 0.2, 0.2, 0.1])
    if not plain.calls or kind == "root":
        prompt = new(1, 5)
    else:
        newest = rng.random() < 0.5
        tokens, start, *_ = plain.calls[-1 if newest else rng.integers(len(plain.calls))]
        if kind == "continue":
            prompt = tokens + new(0, 4)
        elif kind == "retry":
            prompt = tokens[:start]
        else:
            cut = int(rng.integers(len(tokens)))
            prompt = tokens[:cut] + new(1, 3) + tokens[cut + int(rng.integers(0, 3)) :]
    sampled = new(0, 5)
    return prompt, sampled, np.float32(-rng.random(len(sampled))).tolist()


@pytest.mark.parametrize("words", [2, 200, 100_000, 1 << 31])
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_plain_python(tmp_path, seed, words):
    rng, plain = np.random.default_rng(seed), Plain()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, sample_window_size=0) as buffer:
        session = buffer.session("task", "rollout")
        for _ in range(int(rng.integers(1, 40))):
            prompt, sampled, log_probs = random_call(rng, plain, words)
            plain.add(prompt, sampled, log_probs)
            make = MAKERS[rng.integers(len(MAKERS))]
            call = session.add_call(make(prompt), make(sampled), log_probs)
            assert call.tokens.tolist() == prompt + sampled
            assert call.sampled_ids.tolist() == sampled
            if rng.random() < 0.2:  # a repeated attempt
                assert session.add_call(prompt, sampled, log_probs, call_id=call.id) is call
        parents = [call.parent and call.parent.number for call in session.calls()]
        assert parents == [parent for *_, parent in plain.calls]
        assert [[call.number for call in path] for path in session.paths()] == plain.paths()
        ids = session.finish(Reward(outcome=1.0))
        rows = [buffer.get(number) for number in ids]
    assert len(rows) == len(plain.paths())
    trained = Counter()
    for path, (row, (tokens, mask, log_probs, start)) in enumerate(zip(rows, plain.rows(), strict=True)):
        assert row.input_ids.tolist() == tokens
        assert row.response_start == start
        assert row.loss_mask.tolist() == mask
        assert row.response_mask.tolist() == mask[start:]
        assert row.rollout_log_probs.tolist() == log_probs
        about = row.metadata["session"]
        assert (about["path"], about["paths"]) == (path, len(rows))
        assert row.reward.outcome == 1.0
        for call in about["calls"]:
            trained.update([call["id"]] * (mask[call["start"] : call["stop"]].count(1)))
    assert trained == Counter({str(n): len(call[2]) for n, call in enumerate(plain.calls) if call[2]})
    shared = sum(call.taken for call in session.calls())
    assert shared == sum(
        max((common(call[0][: call[1]], other[0]) for other in plain.calls[:n]), default=0)
        for n, call in enumerate(plain.calls)
    )  # as much as any earlier call has in common


def common(one, other):
    """Return the number of leading tokens that two lists share."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
