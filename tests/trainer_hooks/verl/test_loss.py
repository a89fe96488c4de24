"""The loss ``het`` in verl's ``ppo_loss``: equals verl's without replay and ours with it; figures add up."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from tests.trainer_hooks.verl.builders import GlobalBatch, jagged, loss_rows, micro_batch
from trainer_hooks.losses import LossOptions, het_compute_token_on_off_policy_loss
from trainer_hooks.metrics import PREFIX, figures_of, token_sums
from trainer_hooks.verl import loss as module
from trainer_hooks.verl.loss import EXP_MASK, FIGURES, align, het_policy_loss, het_ppo_loss, take_figures
from trajstore.errors import ConfigurationError

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LENGTHS = ((2, 3), (4, 1), (1, 5), (3, 2))
PLAIN: LossOptions = {
    "off_cliprange_high": 1.0,
    "off_policy_shaping": None,
    "drop_negative_off_policy": False,
    "clip_off_policy": True,
}
LOW, HIGH, BOUND = 0.2, 0.28, 3.0

lengths_of_rows = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)


def actor(mode: str, agg: str = "token-mean", **more: Any) -> ActorConfig:
    options = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": BOUND} | more
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=8,
        loss_agg_mode=agg,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        **options,
    )


def check_close(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def whole_of(rows: Sequence[Mapping[str, Tensor]], dp_size: int) -> GlobalBatch:
    return GlobalBatch(dp_size, sum(int(row["response_mask"].sum()) for row in rows), len(rows))


def padded(rows: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)


def own_terms(
    rows: Sequence[Mapping[str, Tensor]], log_probs: Tensor, options: LossOptions = PLAIN
) -> dict[str, Tensor]:
    """Return our loss of rows, from padded tensors, without verl."""
    return het_compute_token_on_off_policy_loss(
        padded(rows, "old_log_probs"),
        log_probs,
        padded(rows, "advantages"),
        padded(rows, "response_mask"),
        padded(rows, EXP_MASK),
        cliprange_low=LOW,
        cliprange_high=HIGH,
        clip_ratio_c=BOUND,
        **options,
    )


def current_log_probs(rows: Sequence[Mapping[str, Tensor]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [row["log_probs"][len(row["prompts"]) - 1 : -1] for row in rows], batch_first=True
    )


# ---- without replayed tokens ----


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    lengths=lengths_of_rows,
    agg=st.sampled_from(MODES),
    spread=st.sampled_from([0.0, 0.3, 1.5]),
    dp_size=st.sampled_from([None, 1, 2]),
    scale=st.sampled_from([None, 7]),
    weights=st.booleans(),
    entropy=st.sampled_from([None, 0.0, 0.1]),
    kl=st.sampled_from([None, "kl", "low_var_kl"]),
    clip=st.sampled_from([{}, {"clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio": 0.1}]),
)
def test_without_replay_it_is_verls_loss(
    seed: int,
    lengths: list[tuple[int, int]],
    agg: str,
    spread: float,
    dp_size: int | None,
    scale: int | None,
    weights: bool,
    entropy: float | None,
    kl: str | None,
    clip: dict[str, Any],
) -> None:
    rows = loss_rows(seed, lengths, spread=spread)
    whole = GlobalBatch() if dp_size is None else whole_of(rows, dp_size)
    columns = [EXP_MASK, *(["rollout_is_weights"] if weights else []), *(["ref_log_prob"] if kl else [])]
    more = {"loss_scale_factor": scale, "entropy_coeff": entropy or 0.0, "use_kl_loss": kl is not None, **clip}
    if kl:
        more |= {"kl_loss_type": kl, "kl_loss_coef": 0.3}
    results = []
    for mode in ("vanilla", "het"):
        data, output, leaves = micro_batch(rows, whole, columns)
        if entropy is None:
            del output["entropy"]
        call = partial(het_ppo_loss, options=PLAIN) if mode == "het" else ppo_loss
        loss, metrics = call(config=actor(mode, agg, **more), model_output=output, data=data)
        loss.backward()
        results.append((loss.detach(), metrics, leaves))
    (theirs, their_metrics, their_leaves), (ours, our_metrics, our_leaves) = results
    check_close(ours, theirs)
    check_close(our_leaves["log_probs"].grad, their_leaves["log_probs"].grad)
    if entropy is not None:
        check_close(our_leaves["entropy"].grad, their_leaves["entropy"].grad)
    assert [name for name in our_metrics if not name.startswith(FIGURES)] == list(their_metrics)
    for name, theirs_one in their_metrics.items():
        ours_one = our_metrics[name]
        if isinstance(theirs_one, Metric):
            assert ours_one.aggregation is theirs_one.aggregation, name
            ours_one, theirs_one = ours_one.aggregate(), theirs_one.aggregate()
        assert ours_one == pytest.approx(theirs_one, rel=1e-5, abs=1e-6), name


# ---- with replayed tokens ----


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    seed=seeds,
    lengths=lengths_of_rows,
    agg=st.sampled_from(MODES),
    dp_size=st.sampled_from([None, 2]),
    scale=st.sampled_from([None, 7]),
    weights=st.booleans(),
    options=st.builds(
        LossOptions,
        off_cliprange_high=st.sampled_from([0.1, 1.0, 5.0]),
        off_policy_shaping=st.sampled_from([None, 0.1]),
        drop_negative_off_policy=st.booleans(),
        clip_off_policy=st.booleans(),
    ),
)
def test_with_replay_it_is_the_het_loss(
    data: st.DataObject,
    seed: int,
    lengths: list[tuple[int, int]],
    agg: str,
    dp_size: int | None,
    scale: int | None,
    weights: bool,
    options: LossOptions,
) -> None:
    replayed = data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))
    rows = loss_rows(seed, lengths, spread=1.0, replayed=sorted(replayed))
    whole = GlobalBatch() if dp_size is None else whole_of(rows, dp_size)
    columns = [EXP_MASK, *(["rollout_is_weights"] if weights else [])]
    batch, output, leaves = micro_batch(rows, whole, columns)
    del output["entropy"]
    loss, metrics = het_ppo_loss(actor("het", agg, loss_scale_factor=scale), output, batch, options=options)
    torch.autograd.backward(loss)

    log_probs = current_log_probs(rows).requires_grad_()
    terms = own_terms(rows, log_probs, options)
    losses = terms["pg_losses"] * padded(rows, "rollout_is_weights") if weights else terms["pg_losses"]
    expected = agg_loss(
        losses,
        padded(rows, "response_mask"),
        agg,
        dp_size=whole.dp_size,
        batch_num_tokens=whole.tokens,
        global_batch_size=whole.rows,
        loss_scale_factor=scale,
    )
    torch.autograd.backward(expected)
    check_close(loss.detach(), expected.detach())
    assert leaves["log_probs"].grad is not None
    begin = 0
    for row, gradient in zip(rows, log_probs.grad, strict=True):
        prompt, response = len(row["prompts"]), len(row["responses"])
        got = leaves["log_probs"].grad[begin : begin + prompt + response]
        check_close(got[prompt - 1 : -1], gradient[:response])
        assert not got[: prompt - 1].any()
        assert got[-1] == 0
        begin += prompt + response

    valid, off = padded(rows, "response_mask").bool(), padded(rows, EXP_MASK).bool()
    ratio, advantages = (log_probs.detach() - padded(rows, "old_log_probs")).exp(), padded(rows, "advantages")
    high = torch.where(off, options["off_cliprange_high"], HIGH)
    if options == {**PLAIN, "off_cliprange_high": options["off_cliprange_high"]}:  # otherwise other tokens are clipped
        clipped = valid & (((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - LOW)))
        share = clipped.sum().item() / valid.sum().item()
        assert metrics["actor/pg_clipfrac"].aggregate() == pytest.approx(share, abs=1e-6)


def test_a_ratio_that_overflows_counts_as_the_largest() -> None:
    rows = loss_rows(0, LENGTHS, replayed=[0, 1])
    rows[0]["old_log_probs"][0] = -200.0
    data, output, _ = micro_batch(rows, whole_of(rows, 1), [EXP_MASK])
    figures = take_figures(through_verl([[[(data, output)]]]))
    name = f"{PREFIX}off_effective_sample_size"
    assert figures[name] == pytest.approx(reference(rows)[name])
    assert figures[f"{PREFIX}off_ratio_max"] == torch.finfo(torch.float32).max


# ---- missing columns ----


def test_a_micro_batch_without_the_mask_is_refused() -> None:
    data, output, _ = micro_batch(loss_rows(0, LENGTHS), GlobalBatch())
    with pytest.raises(ConfigurationError, match=r"exp_mask.*data plane drops a column"):
        het_ppo_loss(actor("het"), output, data, options=PLAIN)


def policy_loss_arguments() -> dict[str, Any]:
    rows = loss_rows(0, LENGTHS)
    names = {"old_log_prob": "old_log_probs", "advantages": "advantages", "response_mask": "response_mask"}
    tensors = {name: padded(rows, column) for name, column in names.items()}
    return {**tensors, "log_prob": current_log_probs(rows), "config": actor("het")}


def test_the_loss_without_its_wrapper_is_refused() -> None:
    data, output, _ = micro_batch(loss_rows(0, LENGTHS), GlobalBatch(), [EXP_MASK])
    with pytest.raises(ConfigurationError, match=r"loss_mode=het needs a replay trainer.*sync_replay"):
        ppo_loss(actor("het"), output, data)
    with pytest.raises(ConfigurationError, match="loss_mode=het"):
        het_policy_loss(**policy_loss_arguments())


def test_a_call_that_fails_leaves_no_mask_behind() -> None:
    data, output, _ = micro_batch(loss_rows(0, LENGTHS), GlobalBatch(dp_size=2), [EXP_MASK])
    with pytest.raises(ValueError, match="batch_num_tokens is required"):
        het_ppo_loss(actor("het"), output, data, options=PLAIN)
    with pytest.raises(ConfigurationError, match="loss_mode=het"):
        het_policy_loss(**policy_loss_arguments())


# ---- masks of another length than the response ----


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_align_keeps_to_each_rows_response(lengths: list[tuple[int, int]], nested: bool, padded_mask: bool) -> None:
    responses = [torch.ones(length) for length, _ in lengths]
    masks = [torch.arange(1, length + 1) for _, length in lengths]
    response_mask = jagged(responses) if nested else torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)
    width = max(length for length, _ in lengths)
    given_masks = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True) if padded_mask else jagged(masks)
    aligned = align(given_masks, response_mask)
    assert (aligned.shape, aligned.dtype) == ((len(lengths), width), torch.int64)
    for row, (response, mask) in zip(aligned.tolist(), lengths, strict=True):
        count = min(response if nested else width, mask)
        assert row == [*range(1, count + 1), *[0] * (width - count)]


def test_padding_rows_do_not_count() -> None:
    """Padding rows have one uncounted response token and the first row's whole mask."""
    rows = loss_rows(7, LENGTHS, spread=1.0, replayed=[0, 2])
    (padding,) = loss_rows(8, [(6, 1)])
    padding |= {"response_mask": torch.zeros(1, dtype=torch.int64), EXP_MASK: rows[0][EXP_MASK]}
    results = []
    for late_rows_of in (rows, [*rows, padding]):
        data, output, _ = micro_batch(late_rows_of, whole_of(rows, 1), [EXP_MASK])
        results.append(het_ppo_loss(actor("het"), output, data, options=PLAIN))
    (expected, expected_metrics), (got, got_metrics) = results
    check_close(got, expected)
    assert {name: value.aggregate() for name, value in got_metrics.items()} == pytest.approx(
        {name: value.aggregate() for name, value in expected_metrics.items()}
    )


# ---- figures ----


def through_verl(
    mini_batches: Sequence[Sequence[Sequence[tuple[TensorDict, dict[str, Tensor]]]]], options: LossOptions = PLAIN
) -> dict[str, Any]:
    """Return an actor update's metrics, combined like verl's engine, worker and trainer do.

    Args:
        mini_batches: of each, the micro-batches of every rank.
        options: of the loss.
    """
    update: dict[str, Any] = {}
    for ranks in mini_batches:
        by_rank: list[dict[str, Any]] = []
        for micro_batches in ranks:
            rank: dict[str, Any] = {}
            for data, output in micro_batches:
                append_to_dict(rank, het_ppo_loss(actor("het"), output, data, options=options)[1])
            by_rank.append(rank)
        assert all(rank.keys() == by_rank[0].keys() for rank in by_rank)
        append_to_dict(update, {name: Metric.aggregate_dp([rank[name] for rank in by_rank]) for name in by_rank[0]})
    return dict(reduce_metrics(rename_dict(update, "actor/")))


def split(
    rows: Sequence[dict[str, Tensor]], mini_batches: int, ranks: int, micro_batches: int
) -> list[list[list[tuple[TensorDict, dict[str, Tensor]]]]]:
    size = len(rows) // (mini_batches * ranks * micro_batches)
    parts = iter([rows[begin : begin + size] for begin in range(0, len(rows), size)])
    return [
        [[micro_batch(next(parts), whole_of(rows, ranks), [EXP_MASK])[:2] for _ in range(micro_batches)]
         for _ in range(ranks)]
        for _ in range(mini_batches)
    ]  # fmt: skip


def reference(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the figures of the whole batch at once."""
    terms, masks = own_terms(rows, current_log_probs(rows)), (padded(rows, "response_mask"), padded(rows, EXP_MASK))
    return figures_of(token_sums(terms, *masks))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=seeds, mini_batches=st.integers(1, 2), ranks=st.integers(1, 2), micro=st.integers(1, 3))
def test_figures_of_parts_are_those_of_the_whole(
    data: st.DataObject, seed: int, mini_batches: int, ranks: int, micro: int
) -> None:
    count = mini_batches * ranks * micro * data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=count, max_size=count))
    replayed = data.draw(st.sets(st.integers(0, count - 1)))
    rows = loss_rows(seed, lengths, spread=1.0, replayed=sorted(replayed))
    metrics = through_verl(split(rows, mini_batches, ranks, micro))
    assert take_figures(metrics) == pytest.approx(reference(rows), rel=1e-5, abs=1e-6)
    assert not [name for name in metrics if FIGURES in name]
    assert {"actor/pg_clipfrac", "actor/pg_loss", "actor/ppo_kl"} <= metrics.keys()


def test_nothing_counts() -> None:
    rows = [{**row, "response_mask": torch.zeros_like(row["response_mask"])} for row in loss_rows(1, LENGTHS)]
    data, output, _ = micro_batch(rows, GlobalBatch(1, 9, 4), [EXP_MASK])
    metrics = through_verl([[[(data, output)]]])
    assert take_figures(metrics) == {}
    assert not [name for name in metrics if FIGURES in name]


# ---- threads ----


def test_two_threads_do_not_mix_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = loss_rows(13, LENGTHS, spread=1.0)
    all_replayed = [{**row, EXP_MASK: row["response_mask"]} for row in rows]
    both_inside = threading.Barrier(2, timeout=600)

    def waiting(*arguments: Any) -> Any:
        both_inside.wait()  # both threads have set their masks
        return ppo_loss(*arguments)

    monkeypatch.setattr(module, "ppo_loss", waiting)
    tokens: dict[str, list[float]] = {}

    def work(name: str, own_rows: list[dict[str, Tensor]]) -> None:
        config = actor("het")  # verl writes into it
        for _ in range(20):
            data, output, _ = micro_batch(own_rows, GlobalBatch(), [EXP_MASK])
            _, metrics = het_ppo_loss(config, output, data, options=PLAIN)
            tokens.setdefault(name, []).append(metrics[f"{FIGURES}off_tokens"].aggregate())

    threads = [threading.Thread(target=work, args=case) for case in (("none", rows), ("all", all_replayed))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    counted = sum(int(row["response_mask"].sum()) for row in rows)
    assert tokens == {"none": [0.0] * 20, "all": [float(counted)] * 20}
