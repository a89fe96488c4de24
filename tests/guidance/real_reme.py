"""The real ReMe service in a separate environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guidance.stub_model import StubModel
from trainer_hooks.guidance import EMClient, MakerError, Retrieved

FLOW = "reme config=default backend=http thread_pool_max_workers=8 http.host=127.0.0.1 http.port={port}"
FLOW += " llm.default.model_name=stub embedding_model.default.model_name=stub vector_store.default.backend=local"
START = "reme start service.host=127.0.0.1 service.port={port} service.web_enabled=false"


def kept_environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the environments' folder: ``TRAJSTORE_REME``, or a new one (takes minutes to fill)."""
    kept = os.environ.get("TRAJSTORE_REME")
    return Path(kept) if kept else tmp_path_factory.mktemp("reme")


def programs_of_0_2(environments: Path, fixtures: Path) -> Path:
    """Return the ``bin`` of ReMe 0.2."""
    pins = fixtures.parent / "reme" / "constraints-reme-0.2.0.6.txt"
    return environment(environments, "r02", "-c", str(pins), "reme-ai==0.2.0.6", "flowllm[reme]==0.2.0.10")


def environment(folder: Path, name: str, *packages: str) -> Path:
    """Return the ``bin`` of an environment with these packages, created if missing."""
    path = folder / name
    if not (path / "bin" / "reme").exists():
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
        subprocess.run([path / "bin" / "pip", "install", "--quiet", *packages], check=True)
    return path / "bin"


class Service:
    """A running service."""

    def __init__(self, programs: Path, command: str, model: StubModel, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        names = {"API_KEY": "x", "BASE_URL": model.url}
        services = ("FLOW_LLM", "FLOW_EMBEDDING", "LLM")
        variables = {f"{kind}_{name}": value for kind in services for name, value in names.items()}
        self.log = folder / "log"
        program, *arguments = command.format(port=port).split()
        self.process = subprocess.Popen(
            [programs / program, *arguments],
            env={**os.environ, **variables, "LLM_BACKEND": "openai", "LLM_MODEL_NAME": "stub"},
            cwd=folder,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )
        self.url = f"http://127.0.0.1:{port}"
        self.client = EMClient(self.url, workspace_id="w1", retrieve_timeout=600, rest=0.0, retries=0)

    def eventually(self, call: Callable[[], Retrieved]) -> Retrieved:
        end = time.monotonic() + 300
        while True:
            try:
                return call()
            except MakerError:
                if self.process.poll() is not None or time.monotonic() > end:
                    pytest.fail(self.log.read_text())
                time.sleep(1)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(600)
