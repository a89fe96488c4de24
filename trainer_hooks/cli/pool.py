"""``trajstore pool``: fill a pool from rollouts or pool files, and write one as files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_hooks.cli import replay_step
from trajstore.cli.command import Command
from trajstore.cli.output import Output
from trajstore.errors import ConfigurationError, counted, trajectories

if TYPE_CHECKING:
    from trainer_hooks.replay.exchange import Exchanged
    from trainer_hooks.replay.message_rows import MessageTokenizer

_LEFT = {
    "task_solved": "since every rollout of a later step of their task succeeded",
    "replaced": "since a better one of their task came, which has its full number",
    "unavailable": "since the store evicted them",
    "unreadable": "since they are damaged",
}
_OF_MESSAGES = ("chat_template", "context", "think_hint")


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("seed", "export"), help="which way")
    parser.add_argument("store", metavar="STORE", help="the pool's store (exp_manager.experience_replay.store.path)")
    parser.add_argument(
        "files",
        metavar="FILES",
        help="seed: a store of rollouts; or a pool's files, ours or AgentEvolver's, or a folder of several (the newest"
        " counts), for an empty pool. export: folder to write, such as experience_pool/step_120",
    )
    parser.add_argument("--json", action="store_true", help="write the result as JSON (names: docs/howto/agents.md)")
    seed = parser.add_argument_group("seed")
    seed.add_argument(
        "--same-run",
        action="store_true",
        help="the run that will use the pool continues from the checkpoint of these rollouts, so policy versions stay"
        " comparable; otherwise their age is unknown",
    )
    seed.add_argument(
        "--task-prefix", default="", metavar="TEXT", help="before each task's name; verl's are data_source:index"
    )
    seed.add_argument("--n-rollout", default=8, type=int, metavar="N", help="rollouts per task (default: %(default)s)")
    seed.add_argument(
        "--max-trajectories-per-task",
        default=10,
        type=int,
        metavar="N",
        help="as in the run's configuration (default: %(default)s)",
    )
    seed.add_argument(
        "--success-threshold", type=float, default=1.0, metavar="X", help="lowest outcome of a success (default: 1)"
    )
    seed.add_argument("--outcome", type=float, metavar="X", help="outcome of rollouts that have none")
    messages = parser.add_argument_group("messages", "how rollouts without token ids become rows (seed)")
    messages.add_argument("--tokenizer", metavar="PATH", help="tokenizer of the run: folder, or cached name of a hub")
    messages.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's own")
    messages.add_argument(
        "--context",
        choices=("linear", "linear_think"),
        help="linear: a conversation is one row (default); linear_think: a row for each of the model's turns",
    )
    messages.add_argument(
        "--think-hint", metavar="TEXT", help="linear_think: text after the message that a turn answers"
    )


def _run(options: Namespace, out: Output) -> int:
    done = _export(options) if options.action == "export" else _seed(options)
    if options.json:
        out.json(vars(done))
    else:
        _write(options, done, out)
    return int(bool(done.unreadable or done.problems))


def _seed(options: Namespace) -> Exchanged:
    from trainer_hooks.replay.exchange import seed_pool
    from trainer_hooks.replay.rules import PoolRules
    from trajstore._core.files.held import check_path

    if check_path(Path(options.files)).is_file():
        raise ConfigurationError(
            f"{options.files}: is a file; make a store of it first: `trajstore convert FILE STORE --from chat` (or"
            " jsonl, parquet, trl, verl)"
        )
    rules = PoolRules(
        n_rollout=options.n_rollout,
        max_trajectories_per_task=options.max_trajectories_per_task,
        success_threshold=options.success_threshold,
    )
    return seed_pool(
        options.store,
        options.files,
        rules,
        same_run=options.same_run,
        tokenizer=_message_tokenizer(options),
        task_prefix=options.task_prefix,
        outcome=options.outcome,
    )


def _message_tokenizer(options: Namespace) -> MessageTokenizer | None:
    """Return the tokenizer of messages, if one is given."""
    from trainer_hooks.replay.message_rows import MessageTokenizer, load_tokenizer

    if options.tokenizer is None:
        given = [f"--{name.replace('_', '-')}" for name in _OF_MESSAGES if getattr(options, name) is not None]
        if given:
            raise ConfigurationError(f"{', '.join(given)}: has no effect without --tokenizer; give it, or leave it out")
        return None
    tokenizer = load_tokenizer(options.tokenizer, options.chat_template)
    return MessageTokenizer.of(tokenizer, options.context or "linear", options.think_hint or "")


def _export(options: Namespace) -> Exchanged:
    from trainer_hooks.replay.exchange import export_pool

    for name in ("same_run", "task_prefix", "outcome", "tokenizer", *_OF_MESSAGES):
        if getattr(options, name) not in (None, False, ""):
            raise ConfigurationError(f"--{name.replace('_', '-')}: applies to seed only; leave it out")
    return export_pool(options.store, options.files)


def _write(options: Namespace, done: Exchanged, out: Output) -> None:
    """Write the result; the numbers of seeding add up to those read."""
    from trainer_hooks.replay.entry import Refusal
    from trainer_hooks.replay.notices import REASONS

    target = options.files if options.action == "export" else options.store
    out.line(f"{target}: {trajectories(done.trajectories)} of {counted(done.tasks, 'task')}, from {done.source}")
    if options.action == "seed":
        there = f" beside {done.before:,} that were there" if done.before else ""
        out.line(f"entered: {done.entered:,} of {done.read:,} rollouts{there}")
    for reason, count in done.left.most_common():
        out.line(f"left the pool again: {count:,} {_LEFT[reason]} ({reason})")
    for reason, count in done.refused.most_common():
        out.line(f"not taken: {count:,} refused as {reason}: {REASONS[Refusal(reason)]}")
    for reason in done.left_out:
        out.line(f"not taken: {reason}")
    if done.tokenized:
        out.line(
            f"had messages only: {done.tokenized:,}, which have the tokenizer's tokens now;"
            f" {done.without_log_probs:,} of them are replayed with the current policy's log-probs"
        )
    out.problems([f"{done.source}: {problem}" for problem in done.problems], f"{done.source}: ")
    if done.unreadable:
        out.line(
            f"{done.source}: {trajectories(done.unreadable, 'is', 'are')} damaged and left out; see `trajstore verify`"
        )


_POOL = Command(
    name="pool",
    summary="fill an experience pool from rollouts, or write one as files",
    description=(
        "Seed: fill a pool from a store of rollouts, which enter as they would have during training; those without"
        " log-probs, such as conversations from `trajstore convert --from chat`, are replayed with the log-probs of the"
        " policy that trains. Export: write the pool in a store as the files difficulty2task_dict.json,"
        " skip_uid_set.json and task2trajectories.pkl; its run may be running. Exit code 1: some rollouts are damaged,"
        " or their messages cannot become tokens; the others are in the pool."
    ),
    configure=_configure,
    run=_run,
)

COMMAND = (_POOL, replay_step.COMMAND)
"""The commands on the files of a trainer with replay."""
