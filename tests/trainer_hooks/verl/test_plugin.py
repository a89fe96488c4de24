"""Discovery of the plugin by verl, and accepted versions of verl."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer_hooks.verl import plugin
from trainer_hooks.verl.versions import SUPPORTED, check_verl
from trajstore.errors import ConfigurationError, MissingDependencyError

MODES = {"sync_replay", "colocate_async_replay"}

# Collects log records, imports only verl, then prints the registered names.
LOOK = """
import json, logging

logged = []
class Collector(logging.Handler):
    def emit(self, record):
        logged.append([record.name, record.levelname, record.getMessage()])
logging.getLogger().addHandler(Collector())
import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1 import get_trainer_cls
import verl.utils.config

print("RESULT " + json.dumps({
    "checked": hasattr(verl.utils.config.validate_config, "__wrapped__"),
    "modes": [get_trainer_cls(mode).__name__ for mode in MODES],
    "losses": sorted(POLICY_LOSS_REGISTRY),
    "logged": [record for record in logged if record[0].startswith("trainer_hooks")],
}))
""".replace("MODES", repr(sorted(MODES)))

INSTALLED = any(
    entry.value == "trainer_hooks.verl.plugin" for entry in importlib.metadata.entry_points(group="verl.plugins")
)
FOUND = {} if INSTALLED else {"VERL_USE_EXTERNAL_MODULES": "trainer_hooks.verl.plugin"}
"""Environment for finding the plugin: the entry point of an installed trajstore, else the module name."""


def test_importing_verl_registers_the_plugin(project_root: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(
        command, env=clean | FOUND, cwd=project_root, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert "het" in result["losses"]
    assert result["checked"], "the options are checked with verl's own, before Ray is started"
    assert len(result["modes"]) == len(MODES)
    assert result["logged"] == []


def test_another_verl_gets_one_warning_and_nothing_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered: list[str] = []
    monkeypatch.setattr("trainer_hooks.verl.versions.version", lambda name: "0.10.3")
    monkeypatch.setattr("trainer_hooks.verl.plugin.importlib", SimpleNamespace(import_module=registered.append))
    with pytest.raises(ConfigurationError, match=r"0\.10\.3"):
        plugin.register()  # verl continues after this error
    assert registered == []
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("trainer_hooks.verl.plugin", "WARNING")
    assert SUPPORTED in record.getMessage()


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
        [sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "[]"
