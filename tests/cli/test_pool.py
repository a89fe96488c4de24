"""``trajstore pool``: a pool seeded from rollouts, files and conversations, and written as files."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.stores import Run, write_store
from tests.replay.conftest import build
from tests.replay.transcripts import TEMPLATES, conversation, make_tokenizer, write
from tests.stores import files_of, stored
from trainer_hooks.cli.pool import _LEFT
from trainer_hooks.replay import REPLAY_MARK, BufferStore, ExperienceManager, PoolRules, Refusal
from trainer_hooks.replay.entry import Departure
from trainer_hooks.replay.notices import REASONS
from trainer_hooks.replay.persistence import read_pool
from trajstore.cli import DAMAGED, FAILED

RULES = PoolRules(n_rollout=4)


def write_rollouts(path: Path) -> None:
    """Write two steps of two tasks without entropies: ``a`` half solved with one rollout missing, ``b`` unsolved."""
    given: dict[str, Any] = {"entropy": None, "metadata": {"task_rollouts": 4}}
    there = [(step, n, task) for step in (2, 1) for n in range(4) for task in "ab" if (step, n, task) != (2, 3, "a")]
    made = [
        build(task, 10 * step + n, float(n < 2 and task == "a") * 0.7, policy_version=step, **given)
        for step, n, task in there
    ]
    stored(path, made)


def held(path: Path) -> dict[str, list[str]]:
    with closing(BufferStore.open(path)) as store:
        manager = ExperienceManager(RULES, store=store)
        return {
            task: [rollout.rollout_id for rollout in several] for task, several in manager.task2trajectories.items()
        }


def test_rollouts_enter_a_pool_that_goes_to_files_and_back(run: Run, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    words = ("--n-rollout", 4, "--success-threshold", 0.7)
    out = run.out("pool", "seed", tmp_path / "named", tmp_path / "rollouts", *words, "--task-prefix", "x:")
    assert held(tmp_path / "named") == {"x:a": ["a/10", "a/11", "a/20", "a/21"]}
    out = run.out("pool", "seed", tmp_path / "pool", tmp_path / "rollouts", *words)
    assert "4 trajectories of 1 task" in out
    assert "entered: 4 of 15 rollouts" in out
    assert held(tmp_path / "pool") == {"a": ["a/10", "a/11", "a/20", "a/21"]}
    out = run.out("pool", "export", tmp_path / "pool", tmp_path / "experience_pool" / "step_2", *words)
    buckets = (tmp_path / "experience_pool" / "step_2" / "difficulty2task_dict.json").read_text()
    assert json.loads(buckets) == {"0": ["b"], "3": ["a"]}
    assert run.json("pool", "seed", tmp_path / "other", tmp_path / "experience_pool")["trajectories"] == 4
    assert held(tmp_path / "other") == held(tmp_path / "pool")
    assert "the pool holds 4" in run.err("pool", "seed", tmp_path / "other", tmp_path / "experience_pool")


def test_a_pool_of_agentevolver_is_imported(run: Run, tmp_path: Path, shared_fixtures: Path) -> None:
    source = shared_fixtures / "experience_pool_cmt" / "linear"
    out = run.out("pool", "seed", tmp_path / "pool", source, "--task-prefix", "house:")
    assert "12 trajectories of 6 tasks" in out
    assert "step_40" in out
    run.out("pool", "export", tmp_path / "pool", tmp_path / "files")
    named = read_pool(tmp_path / "files")
    known = read_pool(source / "step_40")
    assert named.skip_uid_set == [f"house:{task}" for task in known.skip_uid_set] != []
    assert {rollout.task_id for held in named.task2trajectories.values() for rollout in held} == {
        *named.task2trajectories
    }
    assert {*named.task2trajectories} == {f"house:{task}" for task in known.task2trajectories}
    wanted = {number: {f"house:{task}" for task in tasks} for number, tasks in known.difficulty2task_dict.items()}
    assert {number: {*tasks} for number, tasks in named.difficulty2task_dict.items()} == wanted


def test_a_pool_of_messages_needs_a_tokenizer(run: Run, tmp_path: Path, shared_fixtures: Path) -> None:
    pytest.importorskip("transformers")
    words = ("pool", "seed", tmp_path / "pool", shared_fixtures / "experience_pool")
    assert "--tokenizer" in run.err(*words)
    assert "without --tokenizer" in run.err(*words, "--context", "linear")
    words = (*words, "--tokenizer", shared_fixtures / "experience_pool_cmt" / "tokenizer")
    out = run.out(*words)
    assert "entered: 10 of 13 rollouts" in out
    assert "not taken: 3 refused as duplicate: the pool has a trajectory with its tokens" in out
    assert "had messages only: 13, which have the tokenizer's tokens now; 13 of them" in out
    done = run.json("pool", "seed", tmp_path / "other", *words[3:], "--context", "linear_think")
    assert (done["entered"], done["tokenized"], done["without_log_probs"]) == (10, 13, 13)


def test_conversations_become_demonstrations(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    source = write(tmp_path / "demos.jsonl", conversation("a"), "{", conversation("b"), conversation("a"))
    words = ("pool", "seed", tmp_path / "pool", tmp_path / "demos", "--tokenizer", tmp_path / "tokenizer")
    assert "trajstore convert FILE STORE --from chat" in run.err("pool", "seed", tmp_path / "pool", source)
    out = run.out("convert", source, tmp_path / "demos", "--from", "chat", code=DAMAGED)
    assert f"{source}: line 2 was left out: is not JSON" in out
    out = run.out(*words)
    assert "2 trajectories of 2 tasks" in out
    assert "entered: 2 of 3 rollouts" in out
    done = run.json(*words)
    assert (done["entered"], done["refused"]) == (0, {"duplicate": 3})
    assert {task: len(several) for task, several in held(tmp_path / "pool").items()} == {"a": 1, "b": 1}
    write(tmp_path / "more.jsonl", conversation("c", messages=[{"role": "user", "content": "go"}]), conversation("d"))
    run.out("convert", tmp_path / "more.jsonl", tmp_path / "more", "--from", "chat")
    out = run.out("pool", "seed", tmp_path / "pool", tmp_path / "more", *words[4:], code=DAMAGED)
    assert f"{tmp_path / 'more'}: rollout 'more/0' of task 'c': messages: none is the model's" in out
    assert "entered: 1 of 2" in out
    template = ("--chat-template", TEMPLATES / "llama3.jinja")
    for more, message in (
        (("--tokenizer", tmp_path / "tokenizer", "--think-hint", "x"), "has no effect"),
        (("--tokenizer", tmp_path / "tokenizer", *template), "made with tokenizer"),
        (("--tokenizer", tmp_path / "none"), "no such folder"),
        (("--tokenizer", "no-such/tokenizer"), "no name in the cache of the model hub on this machine"),
        (("--tokenizer", tmp_path), "cannot be loaded from this folder"),
    ):
        assert message in run.err(*words[:4], *more)
    assert "without --tokenizer" in run.err(*words[:4], *template)


def test_what_is_no_pool_is_neither_filled_nor_exported(run: Run, tmp_path: Path, shared_fixtures: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    write_rollouts(tmp_path / "plain")
    write_store(tmp_path / "steps", range(2))
    write_store(tmp_path / "run" / "rank_0", range(2))
    files = tmp_path / "experience_pool" / "step_40"
    shutil.copytree(shared_fixtures / "experience_pool_cmt" / "linear" / "step_40", files)
    for place, message in (
        ("steps", "trajectory 1 is a step trajectory"),
        ("run", "holds a run directory with rank_0"),
        ("experience_pool/step_40", "holds the files of a pool, not its store"),
    ):
        before = files_of(tmp_path / place)
        for words in (
            ("seed", tmp_path / place, tmp_path / "rollouts"),
            ("seed", tmp_path / place, files),
            ("export", tmp_path / place, tmp_path / "new"),
        ):
            code, out, err = run("pool", *words)
            assert (code, out) == (FAILED, ""), words
            assert message in err, words
        assert files_of(tmp_path / place) == before
    assert "plain: holds rollouts and no experience pool" in run.err("pool", "export", tmp_path / "plain", "new")
    assert not (tmp_path / "new").exists()


def test_a_store_of_rollouts_can_be_seeded(run: Run, tmp_path: Path) -> None:
    """The pool chooses among the rollouts of a run that records there later; nothing is evicted."""
    write_rollouts(tmp_path / "rollouts")
    write_rollouts(tmp_path / "run")
    assert (
        run.json("pool", "seed", tmp_path / "run", tmp_path / "rollouts", "--n-rollout", 4, "--success-threshold", 0.7)[
            "trajectories"
        ]
        == 4
    )
    with closing(BufferStore.open(tmp_path / "run")) as store:
        manager = ExperienceManager(PoolRules(n_rollout=4), store=store)
        assert (store.is_recording, len(manager)) == (True, 4)
        ExperienceManager(manager.rules).save_experience_pool_to_disk(tmp_path / "empty")
        manager.load_experience_pool_from_disk(tmp_path / "empty")
        manager.flush()
        assert (len(manager), len(store.ids())) == (0, 19)


def test_files_of_a_pool_are_shown_once_they_are_in_a_store(run: Run, shared_fixtures: Path) -> None:
    for folder in (shared_fixtures / "experience_pool", shared_fixtures / "experience_pool" / "step_120"):
        for words in (("inspect", folder), ("verify", folder), ("view", folder, "--port", 0), ("list", folder)):
            assert f"`trajstore pool seed STORE {folder}` makes a store of them" in run.err(*words)


def test_files_and_the_pool_itself_are_no_places_for_it(run: Run, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    (tmp_path / "file").write_text("mine")
    words = ("--success-threshold", 0.7)
    assert run("pool", "seed", tmp_path / "pool", tmp_path / "rollouts", *words)[0] == 0
    for given, message in (
        (("seed", tmp_path / "file", tmp_path / "rollouts"), "file: is a file"),
        (("export", tmp_path / "pool", tmp_path / "file"), "file: is a file"),
        (("seed", tmp_path / "pool", tmp_path / "pool"), "is both the pool and its source"),
    ):
        assert message in run.err("pool", *given, *words)
    assert (tmp_path / "file").read_text() == "mine"
    report = run.json("pool", "seed", tmp_path / "other", tmp_path / "pool", *words)
    assert (report["trajectories"], report["read"]) == (4, 4)


def test_why_no_rollout_enters_is_said(run: Run, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    out = run.out("pool", "seed", tmp_path / "pool", tmp_path / "rollouts")
    assert "0 trajectories of 0 tasks" in out
    assert "of 15 rollouts" in out
    assert "not taken: 15 are no successes: the highest outcome is 0.7, success_threshold 1" in out
    report = run.json("pool", "seed", tmp_path / "low", tmp_path / "rollouts", "--success-threshold", -1)
    assert (report["trajectories"], report["read"]) == (0, 15)
    assert report["left_out"] == [
        "15 are of tasks that were solved when they came: every rollout of that step, or of an earlier one without a"
        " failure since, is a success"
    ]
    words = ("--success-threshold", 0.7, "--n-rollout", 40)
    out = run.out("pool", "seed", tmp_path / "bounds", tmp_path / "rollouts", *words)
    assert "entered: 4 of 15" in out, "the upper bound follows n_rollout: 10 successes of 40 are few"
    stored(tmp_path / "nameless", [build("", 1), build("a", 2, None), build("b", 3, metadata={REPLAY_MARK: True})])
    out = run.out("pool", "seed", tmp_path / "none", tmp_path / "nameless")
    assert "not taken: 1 have no task_id" in out
    assert "not taken: 1 came out of a pool themselves" in out
    assert "not taken: 1 refused as no_outcome: its reward has no outcome" in out


def test_export_writes_what_the_pool_holds_whatever_the_options(run: Run, tmp_path: Path) -> None:
    made = [build("a", number, 1.0, policy_version=number, entropy=1 - number / 10) for number in range(6)]
    failed = [build("a", 10 + number, 0.0, policy_version=number) for number in range(6)]
    stored(tmp_path / "rollouts", [*made, *failed])
    words = ("--max-trajectories-per-task", 2)
    assert "2 trajectories of 1 task" in run.out("pool", "seed", tmp_path / "pool", tmp_path / "rollouts", *words)
    out = run.out("pool", "export", tmp_path / "pool", tmp_path / "files")
    assert out == f"{tmp_path / 'files'}: 2 trajectories of 1 task, from {tmp_path / 'pool'}\n"


def test_every_name_of_a_result_is_explained(run: Run, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    of_rollouts = run.json("pool", "seed", tmp_path / "pool", tmp_path / "rollouts", "--success-threshold", 0.7)
    run("pool", "export", tmp_path / "pool", tmp_path / "files")
    of_files = run.json("pool", "seed", tmp_path / "other", tmp_path / "files", "--max-trajectories-per-task", 1)
    assert of_rollouts.keys() == of_files.keys()
    assert (of_files["read"], of_files["trajectories"]) == (4, 1)
    page = (Path(__file__).parents[2] / "docs" / "howto" / "agents.md").read_text()
    assert all(f"`{key}`" in page for key in of_rollouts)


def test_every_reason_has_a_sentence() -> None:
    assert {*REASONS} == {*Refusal}
    assert {*_LEFT} == {*Departure}
