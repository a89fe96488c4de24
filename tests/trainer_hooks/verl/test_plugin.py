"""How verl finds the plugin, and which verl the plugin accepts. Every question is put to a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer_hooks.verl.versions import SUPPORTED, check_verl
from trajstore.errors import ConfigurationError, MissingDependencyError

MODES = {"sync_replay", "colocate_async_replay"}

# Collects what is logged, imports verl and nothing else, then tells what is registered.
LOOK = """
import importlib.metadata, json, logging, os, sys

logged = []
class Collector(logging.Handler):
    def emit(self, record):
        logged.append([record.name, record.levelname, record.getMessage()])
logging.getLogger().addHandler(Collector())
if fake := os.environ.get("FAKE_VERL"):
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: fake if name == "verl" else real(name)
import verl
ours = sorted(name for name in sys.modules if name.startswith("trainer_hooks.verl."))
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1 import get_trainer_cls

def known(mode):
    try:
        return get_trainer_cls(mode).__name__
    except Exception as error:
        return None

modes = {mode: known(mode) for mode in (*MODES, "sync")}
import verl.utils.config
print("RESULT " + json.dumps({
    "checked": hasattr(verl.utils.config.validate_config, "__wrapped__"),
    "ours": ours,
    "modes": modes,
    "losses": sorted(POLICY_LOSS_REGISTRY),
    "logged": [one for one in logged if one[0].startswith("trainer_hooks")],
}))
""".replace("MODES", repr(sorted(MODES)))

INSTALLED = any(
    one.value == "trainer_hooks.verl.plugin" for one in importlib.metadata.entry_points(group="verl.plugins")
)
FOUND = {} if INSTALLED else {"VERL_USE_EXTERNAL_MODULES": "trainer_hooks.verl.plugin"}
"""How verl finds the plugin: by the entry point of an installed trajstore, else by name."""
PROCESSES: dict[str, dict[str, str]] = {
    "found": FOUND,
    "not found": {"VERL_USE_EXTERNAL_PLUGINS": "none"},
    "another verl": {**FOUND, "FAKE_VERL": "0.10.3"},
}


@pytest.fixture(scope="module")
def seen(project_root: Path) -> Mapping[str, dict[str, Any]]:
    """What each process told; they run side by side, as most of their time goes into imports."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", LOOK],
            env=clean | more,
            cwd=project_root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, more in PROCESSES.items()
    }
    results = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
        results[name] = json.loads(line.removeprefix("RESULT "))
    return results


def test_importing_verl_registers_the_plugin(seen: Mapping[str, dict[str, Any]]) -> None:
    result = seen["found"]
    assert "het" in result["losses"]
    assert result["checked"], "the options are checked with verl's own, before Ray is started"
    assert all(result["modes"][mode] for mode in MODES)
    assert result["logged"] == []


def test_without_the_plugin_verl_knows_nothing_of_it(seen: Mapping[str, dict[str, Any]]) -> None:
    result = seen["not found"]
    assert result["ours"] == []
    assert "het" not in result["losses"]
    assert not result["checked"]
    assert result["modes"]["sync"]
    assert not any(result["modes"][mode] for mode in MODES)


def test_another_verl_gets_one_warning_and_no_trainer(seen: Mapping[str, dict[str, Any]]) -> None:
    result = seen["another verl"]
    ((name, level, message),) = result["logged"]
    assert (name, level) == ("trainer_hooks.verl.plugin", "WARNING")
    assert "0.10.3" in message
    assert SUPPORTED in message
    assert "het" not in result["losses"]
    assert not any(result["modes"][mode] for mode in MODES)
    assert result["modes"]["sync"], "verl itself goes on"
    assert "trainer_hooks.verl.trainer" not in result["ours"]


# ---- versions ----


@pytest.mark.parametrize("version", ["0.9.1", "0.9.2", "0.9.10", "0.9.2.dev3", "0.9.1.post1"])
def test_versions_that_it_was_written_for(version: str) -> None:
    check_verl(version)


@pytest.mark.parametrize("version", ["0.9.0", "0.10.0", "0.10.0.dev0", "0.10.0rc1", "0.8", "0.9.1.dev0", "1.0"])
def test_other_versions_are_refused_by_both_names(version: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_verl(version)
    assert f"verl {version} is installed" in str(caught.value)
    assert SUPPORTED in str(caught.value)


def test_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("trainer_hooks.verl.versions.version", absent)
    with pytest.raises(MissingDependencyError, match=r"trajstore\[verl\]"):
        check_verl()


def test_the_package_alone_loads_nothing(project_root: Path) -> None:
    code = "import sys, trainer_hooks.verl; print(sorted({'verl', 'torch', 'ray'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
