"""Stores of known content for the commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.stores import stored
from trajstore import Trajectory, cli
from trajstore.cli import FAILED, main

_parser = cache(cli.build_parser)


class Run:
    """Runs command lines; returns exit code, stdout and stderr, or one of the outputs."""

    def __init__(self, capsys: pytest.CaptureFixture[str], command: Callable[[Sequence[str]], int] = main) -> None:
        self._capsys, self._command = capsys, command

    def __call__(self, *words: object) -> tuple[int, str, str]:
        with patch.object(cli, "build_parser", _parser):  # making it takes longer than most commands
            code = self._command([str(word) for word in words])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def out(self, *words: object, code: int = 0) -> str:
        """Return a command's stdout; check its exit code."""
        exit_code, out, err = self(*words)
        assert exit_code == code, err or out
        return out

    def err(self, *words: object, code: int = FAILED) -> str:
        """Return a command's stderr; check its exit code."""
        exit_code, out, err = self(*words)
        assert exit_code == code, err or out
        return err

    def json(self, *words: object, code: int = 0) -> Any:
        """Return a command's JSON output; check its exit code."""
        return json.loads(self.out(*words, "--json", code=code))


STEPS, ENVIRONMENTS = 6, 3


def make_rollout(version: int) -> Trajectory:
    """Return a rollout of rewards 1; environment 0 ends an episode at step 4, all do at step 6."""
    dones = torch.zeros(STEPS, ENVIRONMENTS, 1, dtype=torch.bool)
    dones[3, 0] = True
    dones[-1] = True
    return Trajectory(
        max_episode_length=100,
        actions=torch.full((STEPS, ENVIRONMENTS, 2), float(version)),
        rewards=torch.ones(STEPS, ENVIRONMENTS, 1),
        dones=dones,
        versions=torch.full((STEPS, ENVIRONMENTS, 1), float(version)),
        curr_obs={"states": torch.arange(STEPS * ENVIRONMENTS, dtype=torch.float32).reshape(STEPS, ENVIRONMENTS, 1)},
    )


def write_store(path: Path, versions: range, trajectory_format: str = "pt") -> Path:
    return stored(path, [make_rollout(version) for version in versions], trajectory_format=trajectory_format)
