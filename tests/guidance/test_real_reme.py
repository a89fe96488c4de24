"""The real ReMe service, in an environment of its own, with a stub of its model.

``TRAJSTORE_REME`` names a folder in which the environments ``r02`` and ``r04`` are made and kept; without it they are
made anew, which takes minutes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guidance.rollouts import rollout
from tests.guidance.stub_model import StubModel
from trajstore.guidance import EMClient, MakerError, Retrieved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLOW = "reme config=default backend=http thread_pool_max_workers=8 http.host=127.0.0.1 http.port={port}"
FLOW += " llm.default.model_name=stub embedding_model.default.model_name=stub vector_store.default.backend=local"
START = "reme start service.host=127.0.0.1 service.port={port} service.web_enabled=false"


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("TRAJSTORE_REME")
    return Path(kept) if kept else tmp_path_factory.mktemp("reme")


def environment(folder: Path, name: str, *packages: str) -> Path:
    """Return the ``bin`` of an environment with these packages; made if it is not there."""
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
        variables = {f"{what}_{name}": value for what in services for name, value in names.items()}
        self.log = folder / "log"
        program, *arguments = command.format(port=port).split()
        self.process = subprocess.Popen(
            [programs / program, *arguments],
            env={**os.environ, **variables, "LLM_BACKEND": "openai", "LLM_MODEL_NAME": "stub"},
            cwd=folder,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )
        self.client = EMClient(f"http://127.0.0.1:{port}", workspace_id="w1", retrieve_timeout=60, rest=0.0, retries=0)

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
        self.process.wait(60)


def test_reme_0_2_keeps_finds_and_fails_as_the_client_expects(
    environments: Path, shared_fixtures: Path, tmp_path: Path
) -> None:
    pins = shared_fixtures.parent / "reme" / "constraints-reme-0.2.0.6.txt"
    programs = environment(environments, "r02", "-c", str(pins), "reme-ai==0.2.0.6", "flowllm[reme]==0.2.0.10")
    with StubModel() as model:
        service = Service(programs, FLOW, model, tmp_path)
        try:
            assert service.eventually(lambda: service.client.retrieve("where is the cup", 2)).text == ""
            assert service.client.summarize([rollout("cup", "go kitchen"), rollout("cup", "go attic", 0.0, "2")]) > 0
            found = service.client.retrieve("where is the cup", 1)
            assert "Content: go kitchen" in found.text
            assert len(found.names) == 1
            model.up = False
            with pytest.raises(MakerError) as caught:
                service.client.retrieve("where is the cup", 1)
            assert caught.value.kind == "failed"
            assert service.client.summarize([rollout("cup", "go kitchen")]) == 0
        finally:
            service.close()


def test_reme_0_4_keeps_finds_and_fails_as_the_client_expects(environments: Path, tmp_path: Path) -> None:
    programs = environment(environments, "r04", "reme-ai[as]==0.4.2.0")
    with StubModel() as model:
        service = Service(programs, START, model, tmp_path)
        try:
            service.eventually(lambda: service.client.retrieve("where is the cup", 2))
            assert service.client.summarize([rollout("cup", "go kitchen")]) == 1
            end = time.monotonic() + 60
            while not (found := service.client.retrieve("where is the cup", 2)).text:
                assert time.monotonic() < end
                time.sleep(1)
            assert "kitchen" in found.text
            model.up = False
            with pytest.raises(MakerError):
                service.client.summarize([rollout("cup", "go kitchen")])
        finally:
            service.close()
