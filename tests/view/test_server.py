"""The server's answers over real HTTP, without a browser."""

from __future__ import annotations

import http.client
import io
import json
import signal
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from tests.stores import stored, writer_to
from tests.support.witness import witness
from tests.view.conftest import Serve
from tests.view.rollouts import PROMPT, rollout
from tools.browser import PATIENCE, Command, serving
from trajstore import Reward, Trajectory, TrajectoryReplayBuffer
from trajstore.cli import main
from trajstore.errors import ConfigurationError
from trajstore.view.living import Living
from trajstore.view.page import STATIC
from trajstore.view.rollout import texts_of
from trajstore.view.server import listening


def get(
    address: str, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, Any, bytes]:
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)
    connection.request(method, path, headers=dict(headers or {}))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def ask(address: str, path: str, **asked: Any) -> Any:
    """Return a JSON answer."""
    status, _, body = get(address, f"/api/{path}?{urlencode(asked, doseq=True)}")
    assert status == 200, body
    return json.loads(body)


def trajectory(address: str, shown: str) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """Return a trajectory's header and its arrays by name."""
    status, _, body = get(address, f"/api/rollout?{urlencode({'id': shown})}")
    assert status == 200, body
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    behind = body[4 + length :]
    assert (4 + length) % 8 == 0
    arrays = {}
    for array in header["arrays"]:
        values = np.frombuffer(behind, f"<{array['type']}", int(np.prod(array["shape"])), array["at"])
        arrays[array["name"]] = values.reshape(array["shape"])
    return header, arrays


def test_pages_are_those_of_the_query_and_stay_while_others_write(tmp_path: Path, serve: Serve) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(number) for number in range(40)])
        writer.flush()
        address = serve(tmp_path)
        about = ask(address, "about")
        names = [column["name"] for column in about["columns"]]
        question = writer.query().where("outcome > 0").order_by("version_high", "trajectory_id desc")
        asked = {"where": "outcome > 0", "order": ["version_high", "trajectory_id desc"], "count": 7}
        pages = [ask(address, "page", **asked, first=first) for first in range(0, 21, 7)]
        assert [page["total"] for page in pages] == [20] * 3
        rows = [row for page in pages for row in page["rows"]]
        assert all(list(row) == names for row in rows)
        assert [int(row["trajectory_id"]) for row in rows] == question.ids().tolist()
        first, second, *_, last = [row["trajectory_id"] for row in rows]
        around = ask(address, "around", id=second, **asked)
        assert (around["at"], around["total"], around["previous"]) == (1, 20, first)
        assert ask(address, "around", id=last, **asked)["next"] is None
        assert ask(address, "around", id="0", **asked)["at"] is None  # its outcome is 0
        assert [row["reward_judge"] for row in rows] == [row["reward_judge"] for row in question.rows()]
        writer.evict([39])
        writer.add_trajectories([rollout(41)])
        writer.flush()
        seen = about["state"]
        while not ask(address, "page", where="trajectory_id = 40")["total"]:
            seen, _ = stream(address, seen)
        assert ask(address, "page", **asked, first=0, state=about["state"])["rows"] == pages[0]["rows"]
        last = ask(address, "page", **asked, first=14, state=about["state"])
        evicted = next(row for row in last["rows"] if row["trajectory_id"] == "39")
        assert {name for name, value in evicted.items() if value is not None} == {"trajectory_id"}
        now = ask(address, "page", **{**asked, "count": 100})
        assert "39" not in {row["trajectory_id"] for row in now["rows"]}
        assert "40" in {row["trajectory_id"] for row in now["rows"]}


def stream(address: str, seen: str | None = None) -> tuple[str, Any]:
    """Return id and data of the first state sent to a page that last saw ``seen``."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)
    connection.request("GET", "/api/events", headers={} if seen is None else {"Last-Event-ID": seen})
    answer = connection.getresponse()
    name = ""
    for line in answer:
        if line.startswith(b"id: "):
            name = line[4:].strip().decode()
        if line.startswith(b"data: "):
            connection.close()
            return name, json.loads(line[6:])
    raise AssertionError("the stream ended")


def test_a_page_that_was_cut_off_is_told_of_what_it_missed(tmp_path: Path, serve: Serve) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(0)])
        writer.flush()
        address = serve(tmp_path)
        first, state = stream(address)
        assert (state["state"], state["trajectories"], state["trouble"]) == (first.partition(".")[0], 1, None)
        writer.add_trajectories([rollout(number) for number in range(1, 5)])
        writer.flush()
        second, state = stream(address, first)
        assert second != first
        assert state["trajectories"] == 5
        assert stream(address, first)[0] == second  # gets the current state, not the missed ones
        assert stream(address, "of a server before")[0] == second
    assert ask(address, "page", count=10)["total"] == 5


def test_numbers_of_a_rollout_are_exact_and_where_they_belong(tmp_path: Path, serve: Serve) -> None:
    odd = torch.tensor([-0.1, float("nan"), float("-inf"), -3e-9] * 5)
    narrow = torch.linspace(0, 1, 20).to(torch.bfloat16)
    ids = torch.arange(24) + 2**40
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(0, old_log_probs=odd, entropys=narrow, input_ids=ids)])
        writer.add_trajectories([rollout(1, input_ids=None, loss_mask=None, attention_mask=None)])
        writer.add_trajectories([rollout(2, messages=[], metadata={"advantages": [0.5], "why": "\u202e\x1b[2J"})])
    address = serve(tmp_path)
    header, arrays = trajectory(address, "0")
    assert (header["tokens"], header["parts"]) == (24, [["prompt", 0, PROMPT], ["model", PROMPT, 20]])
    assert {array["name"]: array["first"] for array in header["arrays"]} == {
        **dict.fromkeys(("input_ids", "attention_mask", "loss_mask"), 0),
        **dict.fromkeys(("old_log_probs", "entropys", "response_mask", "rollout_log_probs", "metadata.advantages"), 4),
    }
    np.testing.assert_array_equal(arrays["old_log_probs"], odd.numpy())
    np.testing.assert_array_equal(arrays["entropys"], narrow.float().numpy())
    np.testing.assert_array_equal(arrays["input_ids"], ids.numpy())
    assert arrays["metadata.advantages"].tolist() == [1.0, -1.0] * 10
    assert trajectory(address, "1")[0]["tokens"] == 20
    header, arrays = trajectory(address, "2")
    assert "metadata.advantages" not in arrays
    assert "\u202e" in header["metadata"]["why"]


def test_each_kind_of_directory_is_shown(tmp_path: Path, serve: Serve, shared_fixtures: Path) -> None:
    for rank in range(2):
        stored(tmp_path / f"rank_{rank}", [rollout(rank), witness(7)])
    address = serve(tmp_path)
    assert ask(address, "facts", id="1/0")["task"] == "task-0"
    header, arrays = trajectory(address, "1/1")
    block = witness(7)
    assert block.rewards is not None
    steps, batch = block.rewards.shape[:2]
    assert (header["kind"], header["steps"], header["batch"]) == ("step", steps, batch)
    np.testing.assert_array_equal(arrays["rewards"].reshape(block.rewards.shape), block.rewards.numpy())
    assert arrays["dones"].shape[:2] == (steps, batch)  # without the rows at epoch starts
    status, _, body = get(address, "/api/rollout?id=5/1")
    assert (status, "5/1" in json.loads(body)["error"]) == (404, True)
    rlinf = next(path for path in sorted((shared_fixtures / "rlinf").iterdir()) if (path / "metadata.json").is_file())
    address = serve(rlinf)
    rows = ask(address, "page")["rows"]
    assert len(rows) == ask(address, "about")["trajectories"] > 0
    assert trajectory(address, rows[0]["trajectory_id"])[0]["kind"] == "step"


def test_a_store_at_a_url_is_shown_and_followed(memory_url: str, serve: Serve) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=memory_url) as writer:
        writer.add_trajectories([rollout(number) for number in range(8)])
        writer.flush()
        address = serve(memory_url)
        assert ask(address, "overview")["by_version"]["count"] == [8]
        assert trajectory(address, "3")[0]["tokens"] == 24
        writer.add_trajectories([rollout(8)])
        writer.flush()
        seen = ""
        while ask(address, "page")["total"] < 9:
            seen, _ = stream(address, seen)


def test_overview_and_group_are_what_the_query_says(tmp_path: Path, serve: Serve) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(number) for number in range(40)])
        writer.add_trajectories([rollout(40, reward=None, task_id="", policy_version=None), witness(3)])
        writer.flush()
        address = serve(tmp_path)
        overview = ask(address, "overview")
        assert (overview["trajectories"], overview["agents"], overview["tasks"], overview["outcome"]) == (
            42,
            41,
            5,
            0.5,
        )
        assert (overview["without_outcome"], overview["unreadable_count"]) == (1, 0)
        wilson = pytest.approx([0.3519953, 0.6480047])  # scipy.stats.binomtest(20, 40).proportion_ci(method="wilson")
        assert (overview["outcome_n"], [overview["outcome_low"], overview["outcome_high"]]) == (40, wilson)
        versions = writer.query().where("version_high is not null").group_by("version_high")
        curve = {row["version_high"]: row["n"] for row in versions.select("count(*) as n").rows()}
        assert {at: overview["by_version"]["count"][overview["by_version"]["x"].index(at)] for at in curve} == curve
        assert sum(overview["by_time"]["count"]) == 42
        at = overview["by_version"]["x"].index(0)  # eight rollouts, outcomes 0 and 1
        curve = [overview["by_version"][f"outcome{name}"][at] for name in ("", "_n", "_low", "_high")]
        assert curve == [0.5, 8, pytest.approx(0.2152161), pytest.approx(0.7847839)]
        assert [row["count"] for row in overview["by_task"]] == [8] * 5
        assert ask(address, "overview", where="task = 'task-1'")["trajectories"] == 8
        assert ask(address, "overview", where="task = 'none'")["by_version"]["x"] == []
        group = ask(address, "group", task="task-1")
        assert group["versions"] == [0, 3]
        assert [row["trajectory_id"] for row in group["rollouts"]] == ["24", "25", "26", "27"]
        assert len(ask(address, "group", task="task-1", version=0)["rollouts"]) == 4
        every = ask(address, "group", task="task-1", version="all")["rollouts"]
        assert [row["trajectory_id"] for row in every] == ["27", "26", "25", "24", "7", "6", "5", "4"]  # newest first
        assert ask(address, "group", task="' or 1 = 1")["rollouts"] == []


def test_a_group_may_have_a_negative_policy_version(tmp_path: Path, serve: Serve) -> None:
    address = serve(stored(tmp_path, [rollout(0, task_id="a", policy_version=version) for version in (-1, 3)]))
    group = ask(address, "group", task="a", version=ask(address, "group", task="a")["versions"][0])
    assert (group["version"], [row["trajectory_id"] for row in group["rollouts"]]) == (-1, ["0"])


def test_waiting_requests_are_answered_when_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered, answers = threading.Event(), threading.Event(), []
    monkeypatch.setattr(Living, "keys", lambda _: (asked.set(), answered.wait(PATIENCE)))
    store = stored(tmp_path, [rollout(0)])

    def client(address: str) -> None:
        try:
            answers.append(json.loads(get(address, "/api/keys")[2]))
        finally:
            answered.set()

    with serving(store) as address:
        thread = threading.Thread(target=client, args=(address,))
        thread.start()
        assert asked.wait(PATIENCE)
    thread.join()
    assert answers == [{"error": "the server is ending"}]


def test_the_address_is_printed_when_the_server_handles_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: list[Any] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            if "http:" in self.getvalue() and not handlers:
                handlers.append(signal.getsignal(signal.SIGINT))
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("sys.stdout", Terminal())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        assert main(["view", str(stored(tmp_path, [rollout(0)])), "--port", "0"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers[0] is not signal.default_int_handler


def test_a_command_ends_quietly_under_an_open_page_and_a_taken_port_is_named(tmp_path: Path) -> None:
    with Command(stored(tmp_path, [rollout(0)])) as command:
        port = urlsplit(command.address).port or 0
        with pytest.raises(ConfigurationError, match="--port 0 chooses a free port"), listening("127.0.0.1", port):
            pass
        with urlopen(f"{command.address}/api/events", timeout=PATIENCE) as events:
            assert events.readline().startswith(b"id: ")
            assert "Error" not in command.end()


def test_the_curve_of_success_rates_is_of_those_that_have_one(tmp_path: Path, serve: Serve) -> None:
    rewards = [Reward(outcome=3.0, success_rate=rate) for rate in (0.25, 0.75, None)]
    made = [rollout(at, reward=reward) for at, reward in enumerate([*rewards, Reward(outcome=1.0)])]
    made[3].policy_version = 1
    address = serve(stored(tmp_path, made))
    assert ask(address, "overview")["by_version"]["success_rate"] == [0.5, None]


def test_a_wrong_question_is_told_where_it_is_wrong(tmp_path: Path, serve: Serve) -> None:
    address = serve(stored(tmp_path, [rollout(0)]))
    for path, message in (
        ("page?where=taks%20%3D%201", "where: 'taks = 1': there is no column 'taks'"),
        ("page?order=nothing", "order_by: 'nothing'"),
        ("page?first=-1", "first"),
        ("page?count=x", "count: 'x', must be a whole number"),
        ("page?count=%C2%B2", "count: '²', must be a whole number"),
        ("overview?where=outcome", "not true or false"),
        ("group?task=x&version=1.5", "version"),
        ("rollout?id=../x", "trajectory_id"),
        ("frames?id=0&name=x&step=0", "block 0 has no pictures 'x'"),
        ("frames?id=0&name=x&step=y", "step: 'y', must be a whole number"),
        ("facts?id=", "trajectory_id"),
    ):
        status, _, body = get(address, f"/api/{path}")
        assert (status, message in json.loads(body)["error"]) == (400, True), body


def test_other_sites_names_and_methods_are_refused(tmp_path: Path, serve: Serve) -> None:
    address = serve(stored(tmp_path, [rollout(0)]))
    refused: list[dict[str, str]] = [
        {"Host": "evil.example"},
        {"Host": f"evil.example:{urlsplit(address).port}"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ]
    for headers in refused:
        assert get(address, "/api/about", headers)[0] == 403, headers
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert get(address, "/api/about", method=method)[0] == 403, method
    own = {"Origin": address, "Sec-Fetch-Site": "same-origin"}
    for headers in ({"Host": f"localhost:{urlsplit(address).port}"}, own):
        status, answer_headers, _ = get(address, "/", headers)
        assert status == 200, headers
        assert answer_headers["content-security-policy"].startswith("default-src 'self'; ")
        assert answer_headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer_headers
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/api/none"):
        assert get(address, path)[0] == 404, path


def test_only_who_has_the_token_is_let_in(tmp_path: Path, serve: Serve) -> None:
    stored(tmp_path, [rollout(0)])
    address = serve(tmp_path, "secret")
    for path in ("/", "/api/about", "/static/app.js", "/?token=", "/?token=secre", "/?token=other"):
        assert get(address, path)[0] == 401, path
    status, answer_headers, _ = get(address, "/?token=secret", {"Host": "node7:8421"})
    cookie = answer_headers["set-cookie"]
    assert (status, answer_headers["location"]) == (303, "/")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert get(address, "/api/about", {"Cookie": cookie.split(";")[0]})[0] == 200
    assert get(address, "/api/about", {"Cookie": cookie.split("=")[0] + "=other"})[0] == 401
    assert get(address, "/api/about", {"Cookie": cookie.split(";")[0], "Origin": "http://evil.example"})[0] == 403


def test_conditions_on_messages_and_keys_of_metadata_are_answered(tmp_path: Path, serve: Serve) -> None:
    metadata = [{"b c": number, 'a"b': 1, "mixed": [1, "x"][number], "many": [0], "no": None} for number in range(2)]
    many = [rollout(number, metadata=metadata[number % 2]) for number in range(6)]
    address = serve(stored(tmp_path, many))
    kinds = {column["name"]: column["type"] for column in ask(address, "keys")["columns"]}
    assert kinds == {'metadata."b c"': "number", "metadata.mixed": "text"}
    where = "content like 'answer%' and content > 'answer 2' and outcome = 1"
    order = ['metadata."b c"', "trajectory_id desc"]
    page = ask(address, "page", where=where, order=order, columns=list(kinds))
    assert [(row["trajectory_id"], row['metadata."b c"'], row["metadata.mixed"]) for row in page["rows"]] == [
        ("5", 1, "x"),
        ("3", 1, "x"),
    ]
    assert ask(address, "overview", where=where)["trajectories"] == 2
    assert ask(address, "around", id="5", where=where, order=order)["next"] == "3"
    for asked in ("where=content+like+'x'+and+nothing=1", "columns=metadata.many"):
        status, _, body = get(address, f"/api/page?{asked}")
        assert (status, b"nothing" in body or b"a list" in body) == (400, True)


def test_text_of_tokens_is_that_of_the_whole() -> None:
    """A byte tokenizer that drops a text's leading space, like some do."""
    text = " für 😀 das\nEnde é"
    ids = list(text.encode())

    def decode(some: Any) -> str:
        return bytes(some).decode(errors="replace").removeprefix(" ")

    texts = texts_of(ids, decode)
    words = dict(zip(texts["ids"], texts["words"], strict=True))
    joined = {place: (count, word) for place, count, word in texts["joined"]}
    rebuilt, at = "", 0
    while at < len(ids):
        count, word = joined.get(at, (1, words[ids[at]]))
        rebuilt += word
        at += count
    assert rebuilt.removeprefix(" ") == text.removeprefix(" ")
    assert len(texts["ids"]) == len(set(ids))


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) <= 300_000


def test_pictures_of_all_kinds_are_drawn(tmp_path: Path, serve: Serve) -> None:
    """Channels first or last, grey, stacked, float, depth with holes, in blocks of three steps and of one."""
    shape = 3, 2, 16, 18
    colours = (torch.arange(3 * 2 * 16 * 18 * 3) % 251).reshape(*shape, 3).to(torch.uint8)
    red = colours[..., :1]
    depth = red.float() / 50 - 1
    holes = torch.where(red == 9, torch.nan, depth)
    scaled = ((red.double() / 250) * 255).round().to(torch.uint8)
    kinds = {
        "last": (colours, colours),
        "first": (colours.movedim(-1, 2), colours),
        "grey": (red[..., 0], red),
        "stack": (torch.stack([red[..., 0] * 0] * 3 + [red[..., 0]], 2), red),
        "float": (colours.float() / 255, colours),
        "half": ((colours.half() / 255).movedim(-1, 2), colours),
        "depth": (depth.movedim(-1, 2), scaled),
        "millimetres": (red[..., 0].to(torch.uint16) * 9, scaled),
        "holes": (holes[..., 0], torch.where(red == 9, 0, scaled)),
        "matrix": (torch.rand(3, 2, 7, 9), None),
    }
    observations = [{name: made[:steps] for name, (made, _) in kinds.items()} for steps in (3, 1)]
    blocks = [Trajectory(rewards=torch.zeros(len(each["last"]), 2, 1), curr_obs=each) for each in observations]
    address = serve(stored(tmp_path, blocks))
    status, _, body = get(address, "/api/frames?id=0&name=curr_obs.grey&step=3")
    assert (status, b"block 0 has 3 steps and 2 environments" in body) == (400, True)
    header, _ = trajectory(address, "0")
    columns = {column["name"].removeprefix("curr_obs."): column for column in header["columns"]}
    assert (columns["float"]["scale"], columns["depth"]["scale"]) == (["0", "1"], ["-1", "4"])
    for name, (_, drawn) in kinds.items():
        for number, steps in (("0", (2, 0, 1)), ("1", (0,))):
            asked = "&".join(f"step={step}" for step in steps)
            status, _, body = get(address, f"/api/frames?id={number}&name=curr_obs.{name}&environment=1&{asked}")
            assert (status == 200) == (drawn is not None), (name, body)
            if drawn is not None:
                seen = np.frombuffer(body, np.uint8).reshape(len(steps), *drawn.shape[2:])
                assert (seen == drawn[list(steps), 1].numpy()).all(), name
    assert [columns[name]["pictures"] for name in ("last", "stack", "matrix")] == [[16, 18, 3], [16, 18, 1], None]
