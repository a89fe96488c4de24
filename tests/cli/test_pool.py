"""``trajstore pool``: a pool to files and back, and rollouts into a pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.stores import Run
from tests.experience.conftest import build
from tests.experience.transcripts import TEMPLATES, conversation, make_tokenizer, write
from trajstore import TrajectoryReplayBuffer
from trajstore.cli import DAMAGED, FAILED
from trajstore.experience import BufferStore, ExperienceManager, PoolRules

RULES = PoolRules(n_rollout=4)


def write_rollouts(path: Path) -> None:
    """Two steps of two tasks: ``a`` half solved, ``b`` never; without entropies. One of ``a`` did not come back."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(path)) as buffer:
        for step in (2, 1):
            for number in range(4):
                for task in "ab":
                    if step == 2 and number == 3 and task == "a":
                        continue
                    outcome = float(number < 2 and task == "a") * 0.7
                    buffer.add_trajectories(
                        [
                            build(
                                task,
                                10 * step + number,
                                outcome,
                                policy_version=step,
                                entropy=None,
                                metadata={"task_rollouts": 4},
                            )
                        ]
                    )
        buffer.flush()


def held(path: Path) -> dict[str, list[str]]:
    store = BufferStore.open(path)
    try:
        manager = ExperienceManager(RULES, store=store)
        return {task: [one.rollout_id for one in several] for task, several in manager.task2trajectories.items()}
    finally:
        store.close()


def test_rollouts_enter_a_pool_that_goes_to_files_and_back(run: Run, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    words = ("--n-rollout", 4, "--success-threshold", 0.7)
    code, out, _ = run("pool", "import", tmp_path / "pool", tmp_path / "rollouts", *words)
    assert code == 0
    assert "4 trajectories of 1 tasks" in out
    assert held(tmp_path / "pool") == {"a": ["a/10", "a/11", "a/20", "a/21"]}
    code, out, _ = run("pool", "export", tmp_path / "pool", tmp_path / "experience_pool" / "step_2", *words)
    assert code == 0
    assert json.loads((tmp_path / "experience_pool" / "step_2" / "difficulty2task_dict.json").read_text()) == {
        "0": ["b"],
        "3": ["a"],
    }
    code, out, _ = run("pool", "import", tmp_path / "other", tmp_path / "experience_pool", "--json")
    assert code == 0
    assert json.loads(out)["trajectories"] == 4
    assert held(tmp_path / "other") == held(tmp_path / "pool")


def test_a_pool_that_holds_something_is_replaced_only_when_asked(run: Run, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    run("pool", "import", tmp_path / "pool", tmp_path / "rollouts", "--success-threshold", 0.7)
    run("pool", "export", tmp_path / "pool", tmp_path / "files")
    code, _, err = run("pool", "import", tmp_path / "pool", tmp_path / "files")
    assert code == FAILED
    assert "--replace" in err
    assert run("pool", "import", tmp_path / "pool", tmp_path / "files", "--replace")[0] == 0


def test_a_pool_of_agentevolver_is_imported(run: Run, tmp_path: Path, shared_fixtures: Path) -> None:
    source = shared_fixtures / "experience_pool_cmt" / "linear"
    code, out, _ = run("pool", "import", tmp_path / "pool", source)
    assert code == 0
    assert "12 trajectories of 6 tasks" in out
    assert "step_40" in out


def test_what_is_not_there_is_told(run: Run, tmp_path: Path) -> None:
    for words in (("export", tmp_path / "no", tmp_path / "files"), ("import", tmp_path / "pool", tmp_path / "no")):
        code, _, err = run("pool", *words)
        assert code == FAILED
        assert f"{tmp_path / 'no'}: no such directory" in err


def test_transcripts_become_demonstrations(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    source = write(tmp_path / "demos.jsonl", conversation("a"), "{", conversation("b"), conversation("a"))
    words = ("pool", "import", tmp_path / "pool", source)
    code, _, err = run(*words)
    assert code == FAILED
    assert "--tokenizer" in err
    code, out, _ = run(*words, "--tokenizer", tmp_path / "tokenizer")
    assert code == DAMAGED, "a line is no transcript"
    assert "took 2 of 4 conversations" in out
    assert "not taken: 1 (there already)" in out
    assert f"{source}:2: not JSON" in out
    code, out, _ = run(*words, "--tokenizer", tmp_path / "tokenizer", "--json")
    done = json.loads(out)
    assert (done["taken"], done["refused"], done["bad"][0]["line"]) == (0, {"duplicate": 3}, 2)
    assert {task: len(several) for task, several in held(tmp_path / "pool").items()} == {"a": 1, "b": 1}
    for words, message in (
        ((tmp_path, "--outcome", 1.0), "--outcome"),
        ((source, "--tokenizer", tmp_path / "none"), "cannot be loaded"),
        ((source, "--tokenizer", tmp_path / "tokenizer", "--replace"), "--replace"),
        ((source, "--tokenizer", tmp_path / "tokenizer", "--think-hint", "x"), "has no effect"),
    ):
        code, _, err = run("pool", "import", tmp_path / "pool", *words)
        assert code == FAILED
        assert message in err


def test_a_template_of_a_file_takes_the_place_of_the_tokenizers_own(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    source = write(tmp_path / "demos.jsonl", conversation())
    words = ("--tokenizer", tmp_path / "tokenizer", "--chat-template", TEMPLATES / "llama3.jinja")
    assert run("pool", "import", tmp_path / "pool", source, *words)[0] == 0
    code, _, err = run("pool", "import", tmp_path / "pool", source, "--tokenizer", tmp_path / "tokenizer")
    assert code == FAILED
    assert "made with tokenizer" in err
