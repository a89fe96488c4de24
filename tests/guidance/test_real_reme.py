"""The real ReMe service in a separate environment, with a stub of its model.

``TRAJSTORE_REME`` names the folder that keeps the environments ``r02`` and ``r04``; without it they are
created anew, which takes minutes.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.guidance.real_reme import FLOW, START, Service, environment, kept_environments, programs_of_0_2
from tests.guidance.rollouts import rollout
from tests.guidance.stub_model import StubModel
from trainer_hooks.guidance import MakerError

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_environments(tmp_path_factory)


def test_reme_0_2_keeps_finds_and_fails_as_the_client_expects(
    environments: Path, shared_fixtures: Path, tmp_path: Path
) -> None:
    with StubModel() as model:
        service = Service(programs_of_0_2(environments, shared_fixtures), FLOW, model, tmp_path)
        try:
            assert service.eventually(lambda: service.client.retrieve("where is the cup", 2)).text == ""
            assert service.client.summarize([rollout("cup", "go kitchen"), rollout("cup", "go attic", 0.0, "2")]) > 0
            experiences = service.client.retrieve("where is the cup", 1)
            assert "Content: go kitchen" in experiences.text
            assert len(experiences.names) == 1
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
            while not (experiences := service.client.retrieve("where is the cup", 2)).text:
                assert time.monotonic() < end
                time.sleep(1)
            assert "kitchen" in experiences.text
            model.up = False
            with pytest.raises(MakerError):
                service.client.summarize([rollout("cup", "go kitchen")])
        finally:
            service.close()
