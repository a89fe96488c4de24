"""``trajstore pool``: export a pool to files; import files, rollouts or transcripts into a pool."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_hooks.cli import replay_step
from trajstore.cli.command import Command
from trajstore.cli.output import Output, ProgressBar
from trajstore.errors import ConfigurationError, counted, trajectories

if TYPE_CHECKING:
    from trainer_hooks.replay.exchange import Exchanged
    from trainer_hooks.replay.message_rows import MessageTokenizer
    from trainer_hooks.replay.rules import PoolRules

_REFUSED = {
    "no_llm_token": "have no token that the model wrote",
    "no_response_mask": "have no loss_mask with response_start, nor response_mask: whose tokens are they?",
    "log_probs_mismatch": "have no old_log_probs, or none that fit the response, or some that are not finite",
    "malformed": "have a field that no store could keep, which the log names",
    "no_tokens": "have no token ids; --tokenizer makes them of their messages",
    "log_probs_above_zero": "have old_log_probs above 0, which are none",
    "no_outcome": "have no outcome: neither success nor failure",
    "outcome_not_finite": "have an outcome that is NaN or infinite",
    "no_entropy": "have neither old_log_probs nor finite entropys, so that nothing tells how sure the model was",
    "not_worth_keeping": "are no successes",
    "duplicate": "have the tokens of one that the pool has",
    "not_better": "are no better than those of their task, which has its full number",
}
_LEFT = {
    "task_solved": "since every rollout of a later step of their task succeeded",
    "replaced": "since a better one of their task came, which has its full number",
    "unavailable": "since the store evicted them",
    "unreadable": "since they are damaged",
}
_OF_MESSAGES = ("chat_template", "context", "think_hint")


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("export", "import"), help="which way")
    parser.add_argument("store", metavar="STORE", help="the pool's store (exp_manager.experience_replay.store.path)")
    parser.add_argument(
        "files",
        metavar="FILES",
        help="export: folder to write, such as experience_pool/step_120; import: such a folder, ours or AgentEvolver's,"
        " a folder of several (the newest counts), a store of rollouts, or a file of transcripts (JSON lines)",
    )
    parser.add_argument("--replace", action="store_true", help="import: allow replacing a pool that is not empty")
    parser.add_argument(
        "--same-run",
        action="store_true",
        help="import: the run that will use the pool continues from the checkpoint of the imported run, so policy"
        " versions stay comparable; otherwise the age of the imported trajectories is unknown",
    )
    parser.add_argument(
        "--task-prefix",
        default="",
        metavar="TEXT",
        help="import: prefix of every task name; verl's names are data_source:index",
    )
    parser.add_argument(
        "--json", action="store_true", help="write the result as JSON; the guide to agents explains its names (part 6)"
    )
    for name, default, text in (
        ("--n-rollout", 8, "import: rollouts per task (default: %(default)s)"),
        ("--max-trajectories-per-task", 10, "import: as in the run's configuration (default: %(default)s)"),
    ):
        parser.add_argument(name, default=default, type=int, metavar="N", help=text)
    parser.add_argument(
        "--success-threshold",
        type=float,
        default=1.0,
        metavar="X",
        help="import: lowest outcome of a success (default: %(default)s)",
    )
    transcripts = parser.add_argument_group(
        "messages", "how conversations without token ids become rows: transcripts, and pools or stores of messages"
    )
    transcripts.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer of the run: folder, or cached name of a hub"
    )
    transcripts.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's own")
    transcripts.add_argument(
        "--context",
        choices=("linear", "linear_think"),
        help="linear: a conversation is one row (default); linear_think: a row for each of the model's turns",
    )
    transcripts.add_argument(
        "--think-hint", metavar="TEXT", help="linear_think: text after the message that a turn answers"
    )
    transcripts.add_argument(
        "--outcome", type=float, metavar="X", help="outcome of lines with neither reward nor success"
    )


def _run(options: Namespace, out: Output) -> int:
    from trainer_hooks.replay.exchange import import_pool
    from trainer_hooks.replay.rules import PoolRules
    from trajstore._core.files.held import check_path

    rules = PoolRules(
        n_rollout=options.n_rollout,
        max_trajectories_per_task=options.max_trajectories_per_task,
        success_threshold=options.success_threshold,
    )
    if options.action == "import" and check_path(Path(options.files)).is_file():
        return _import_transcripts(options, rules, out)
    if options.outcome is not None:
        raise ConfigurationError(f"--outcome: {options.files} is not a file of transcripts; leave it out")
    if options.action == "export":
        return _export(options, out)
    done = import_pool(
        options.store,
        options.files,
        rules,
        replace=options.replace,
        same_run=options.same_run,
        tokenizer=_message_tokenizer(options),
        task_prefix=options.task_prefix,
    )
    if options.json:
        out.json(_as_json(done))
    else:
        _tell(options.store, done, "rollouts", out)
        _tell_unreadable(done, out)
    return int(bool(done.unreadable))


def _message_tokenizer(options: Namespace) -> MessageTokenizer | None:
    """Return the tokenizer of messages, if one is given."""
    from trainer_hooks.replay.message_rows import MessageTokenizer
    from trainer_hooks.replay.transcripts import load_tokenizer

    if options.tokenizer is None:
        given = [f"--{name.replace('_', '-')}" for name in _OF_MESSAGES if getattr(options, name) is not None]
        if given:
            raise ConfigurationError(f"{', '.join(given)}: has no effect without --tokenizer; give it, or leave it out")
        return None
    tokenizer = load_tokenizer(options.tokenizer, options.chat_template)
    return MessageTokenizer.of(tokenizer, options.context or "linear", options.think_hint or "")


def _export(options: Namespace, out: Output) -> int:
    """Write a pool as files; return 1 if some of its trajectories are damaged."""
    from trainer_hooks.replay.exchange import export_pool

    for name in ("replace", "same_run", "task_prefix", "tokenizer", *_OF_MESSAGES):
        if getattr(options, name):
            raise ConfigurationError(f"--{name.replace('_', '-')}: applies to imports only; leave it out")
    done = export_pool(options.store, options.files)
    if options.json:
        names = ("source", "trajectories", "tasks", "unreadable")
        out.json({name: getattr(done, name) for name in names})
    else:
        out.line(
            f"{options.files}: {trajectories(done.trajectories)} of {counted(done.tasks, 'task')}, from {done.source}"
        )
        _tell_unreadable(done, out)
    return int(bool(done.unreadable))


def _import_transcripts(options: Namespace, rules: PoolRules, out: Output) -> int:
    """Import a file of conversations; return 1 if some lines are invalid."""
    from trainer_hooks.replay.transcripts import TranscriptReader, import_transcripts, load_tokenizer

    if options.tokenizer is None:
        raise ConfigurationError(f"{options.files}: a file of transcripts needs --tokenizer, the one of the run")
    if options.replace:
        raise ConfigurationError(f"--replace: transcripts in {options.files} are added to what is there; leave it out")
    if options.task_prefix:
        raise ConfigurationError(f"--task-prefix: transcripts in {options.files} name their tasks; leave it out")
    if options.same_run:
        raise ConfigurationError(f"--same-run: transcripts in {options.files} have no policy version; leave it out")
    reader = TranscriptReader(
        load_tokenizer(options.tokenizer, options.chat_template),
        context=options.context or "linear",
        think_hint=options.think_hint or "",
        outcome=options.outcome,
        success_threshold=options.success_threshold,
    )
    with ProgressBar("importing", sys.stderr) as bar:
        done = import_transcripts(options.store, options.files, rules, reader, bar)
    if options.json:
        bad = [{"line": bad_line.line, "reason": bad_line.reason} for bad_line in done.bad]
        more = {"highest_failure": done.highest_failure, "control_tokens": done.control_tokens, "bad": bad}
        out.json({**_as_json(done), **more})
    else:
        _tell(options.store, done, "conversations", out)
        if done.highest_failure is not None:
            out.line(
                f"the highest outcome of those not worth keeping is {done.highest_failure:g}, success_threshold"
                f" {rules.success_threshold:g}"
            )
        if done.control_tokens:
            out.line(
                f"control tokens: {done.control_tokens:,} names of them in texts; each has a space behind its first"
                " character now"
            )
        for bad_line in done.bad:
            out.line(f"{done.source}:{bad_line.line}: {bad_line.reason}")
    return int(bool(done.bad))


def _as_json(done: Exchanged) -> dict[str, Any]:
    names = ("source", "trajectories", "tasks", "read", "before", "entered", "left", "refused", "left_out")
    return {name: getattr(done, name) for name in (*names, "tokenized", "without_log_probs", "unreadable")}


def _tell(store: str, done: Exchanged, what: str, out: Output) -> None:
    """Write the result of an import; its numbers add up to those read."""
    out.line(f"{store}: {trajectories(done.trajectories)} of {counted(done.tasks, 'task')}, from {done.source}")
    there = f" beside {done.before:,} that were there" if done.before else ""
    out.line(f"entered: {done.entered:,} of {done.read:,} {what}{there}")
    for reason, count in done.left.most_common():
        out.line(f"left the pool again: {count:,} {_LEFT[reason]} ({reason})")
    for reason, count in done.refused.most_common():
        out.line(f"not taken: {count:,} {_REFUSED[reason]} ({reason})")
    for reason in done.left_out:
        out.line(f"not taken: {reason}")
    if done.tokenized:
        out.line(
            f"had messages only: {done.tokenized:,}, which have the tokenizer's tokens now;"
            f" {done.without_log_probs:,} of them are replayed with the current policy's log-probs"
        )


def _tell_unreadable(done: Exchanged, out: Output) -> None:
    if done.unreadable:
        out.line(
            f"{done.source}: {trajectories(done.unreadable, 'is', 'are')} damaged and left out; see `trajstore verify`"
        )


_POOL = Command(
    name="pool",
    summary="write an experience pool as files, or fill one",
    description=(
        "Export: write the pool in a store as the files difficulty2task_dict.json, skip_uid_set.json and"
        " task2trajectories.pkl; its run may be running. Import: fill a pool from such files, from a store"
        " of rollouts, which enter as they would have during training, or from a file of transcripts, which are"
        " replayed with the log-probs of the policy that trains. Exit code 1: some lines are not transcripts, or some"
        " trajectories are damaged; the others are in the pool."
    ),
    configure=_configure,
    run=_run,
)

COMMAND = (_POOL, replay_step.COMMAND)
"""The commands on the files of a trainer with replay."""
