"""Values set from the page: over HTTP, and in a real Chromium."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from tests.stores import another_writer, stored, writer_to
from tests.support.waiting import freeze, wait_until
from tests.view.conftest import Serve
from tests.view.rollouts import clicked, opened, rollout, text_of
from tests.view.test_server import ask, get
from tools.browser import PATIENCE, Command, Page
from trajstore import TrajectoryReplayBuffer, annotate, notes_of
from trajstore.cli import main
from trajstore.errors import ConfigurationError, StoreNotFoundError
from trajstore.view import living
from trajstore.view.server import listening

JSON = {"Content-Type": "application/json"}

HOSTILE = "<img src=x onerror='window.stolen = 1'>\x1b[2J \u202egnp.exe\u202c {{7*7}}\nsecond line \U0001f600"


def post(address: str, body: Any, headers: Mapping[str, str | None] | None = None) -> tuple[int, str]:
    """Post a page's request; return the answer's status and message. Headers of None are left out."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)
    sent_headers = {"Origin": address, "Sec-Fetch-Site": "same-origin", **JSON, **(headers or {})}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(
        "POST", "/api/annotate", data, {name: value for name, value in sent_headers.items() if value is not None}
    )
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text).get("error", "") if text.startswith("{") else text


def wish(value: str, kind: str = "number", name: str = "judge", shown: str = "0") -> dict[str, Any]:
    return {"ids": [shown], "name": name, "kind": kind, "value": value}


def given(path: Path, shown: str = "0") -> list[Any]:
    return [(note.name, note.value, note.who) for note in notes_of(path, shown)]


def history_of(address: str, shown: str = "0") -> list[Any]:
    """Return the page's late values."""
    return [(value["name"], value["value"], value["place"]) for value in ask(address, "notes", id=shown)["values"]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return stored(tmp_path / "store", [rollout(number) for number in range(4)])


# -- over HTTP -----------------------------------------------------------------------------------------


def test_what_the_page_gives_is_in_the_history(path: Path, serve: Serve) -> None:
    address = serve(path, who="anna")
    for value, kind, name in (
        ("0.5", "number", "judge"),
        (" -3 ", "number", "judge"),
        ("5", "text", "tag"),
        (HOSTILE, "text", "tag"),
        ("", "nothing", "judge"),
        ("9007199254740991", "number", "outcome"),
    ):
        assert post(address, wish(value, kind, name)) == (200, ""), (name, value)
    expected = [("judge", 0.5), ("judge", -3), ("tag", "5"), ("tag", HOSTILE), ("judge", None), ("outcome", 2**53 - 1)]
    assert given(path) == [(*note, "anna") for note in expected]
    answer = ask(address, "notes", id="0")
    assert [(note["name"], note["value"]) for note in answer["values"]] == expected
    assert [note["latest"] for note in answer["values"]] == [False, False, False, True, True, True]
    assert answer["names"] == [["judge", "number"], ["tag", "text"], ["outcome", "number"]]
    assert ask(address, "about")["write"] == {"who": "anna"}
    assert ask(address, "facts", id="0")["outcome"] == 2**53 - 1
    notes = {column["name"]: column["note"] for column in ask(address, "about")["columns"]}
    assert (notes["tag"], notes["reward_judge"]) == ("late value", "judge of the reward's metadata")


def test_what_cannot_be_given_is_told_in_a_sentence(path: Path, serve: Serve) -> None:
    annotate(path, 0, {"known": 1})
    address = serve(path, who="anna")
    for body, message in (
        (wish("0.5", name="1x"), "'1x', must be a name"),
        (wish("0.5", name="__proto__ "), "must be a name"),
        (wish("0,5"), "'0,5' must be a number, such as 0.5"),
        (wish("1_0"), "must be a number"),
        (wish("٣"), "must be a number"),
        (wish(""), "'' must be a number"),
        (wish("9" * 5000), "must be a number"),
        (wish("1e400"), "inf, must be a finite number"),
        (wish("nan"), "nan, must be a finite number"),
        (wish("9007199254740993"), "too high to be kept exactly"),
        (wish("x", "text", "outcome"), "replaces a number"),
        (wish("x", "text", "bytes"), "is a fact that stays as it is"),
        (wish("x" * 4097, "text"), "a text of 4,097 characters, the most is 4,096"),
        (wish("", "nothing", "unknown"), "there is no value of this name to remove"),
        (wish("x", "text", "known"), "a text, but the values of this name are numbers here"),
        (wish("1", "list"), "Invalid enum value 'list' - at `$.kind`"),
        (wish("1", shown="../0"), "must be an id"),
        (wish("1", shown="7"), "no trajectory has the id 7"),
        (wish("1", shown="1/0"), "in a single store an id is a number"),
        ({**wish("1"), "ids": [0]}, "Expected `str`, got `int` - at `$.ids[0]`"),
        ({**wish("1"), "ids": []}, "Expected `array` of length >= 1 - at `$.ids`"),
        ({**wish("1"), "ids": ["0", "7"]}, "no trajectory has the id 7"),
        ({**wish("1"), "name": 1}, "Expected `str`, got `int` - at `$.name`"),
        ([], "Expected `object`, got `array`"),
        (b"", "the request: Input data was truncated"),
        (b"[" * 60_000, "Expected `object`, got `array`"),
        (b'{"ids": ["\\ud800"], "name": "judge", "kind": "number", "value": "1"}', "the request: JSON is malformed"),
        (b'"' + b"x" * 600_000, "at most 524,288 bytes"),
    ):
        status, sentence = post(address, body)
        assert (status >= 400, message in sentence) == (True, True), sentence
    assert len(given(path)) == 1


def test_only_the_page_itself_can_give_values(path: Path, serve: Serve) -> None:
    address = serve(path, who="anna")
    port = urlsplit(address).port
    refused: list[dict[str, str | None]] = [
        {"Origin": "http://evil.example"},
        {"Origin": f"http://localhost:{port}"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://[::1"},
        {"Origin": None},
        {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=application/json"},
        {"Content-Type": "text/plain; application/json"},
        {"Content-Type": None},
    ]
    for headers in refused:
        assert post(address, wish("1"), headers)[0] == 403, headers
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        assert get(address, "/api/annotate", method=method)[0] == 403, method
    assert get(address, "/api/annotate")[0] == 405
    for other in ("/", "/api/about", "/static/app.js"):
        assert get(address, other, {"Origin": address, **JSON}, "POST")[0] == 405, other
    assert given(path) == []
    secret = serve(path, "secret", who="anna")
    assert post(secret, wish("1"))[0] == 401
    cookie = get(secret, "/?token=secret")[1]["set-cookie"].split(";")[0]
    assert post(secret, wish("1"), {"Cookie": cookie, "Origin": "http://evil.example"})[0] == 403
    assert post(secret, wish("1"), {"Cookie": cookie, "Content-Type": "application/json; charset=utf-8"})[0] == 200
    assert len(given(path)) == 1


def test_without_write_nothing_is_taken(path: Path, serve: Serve) -> None:
    annotate(path, 0, {"judge": 0.25}, who="bob")
    address = serve(path)
    status, sentence = post(address, wish("1"))
    assert (status, sentence) == (403, "method POST: this page is read-only; `trajstore view --write` accepts values")
    answer = ask(address, "notes", id="0")
    assert (ask(address, "about")["write"], [value["who"] for value in answer["values"]]) == (None, ["bob"])
    assert len(given(path)) == 1


def test_a_value_waits_for_the_writer_and_is_seen_waiting(path: Path, serve: Serve) -> None:
    address, other = serve(path, who="anna"), serve(path)
    with another_writer(path) as writer:
        freeze(writer)
        assert post(address, wish("0.5"))[0] == 200  # does not wait for the writer
        assert post(address, wish("x", "text"))[0] == 400  # contradicts a waiting value
        (first,) = (path / "inbox").iterdir()
        first.rename(path / "first")  # as if another arrived at the same moment
        assert post(address, wish("x", "text"))[0] == 200
        (path / "first").rename(first)
        for viewer in (address, other):
            assert history_of(viewer) == [("judge", 0.5, "inbox"), ("judge", "x", "refused")]
            assert history_of(viewer, "1") == []
        os.kill(writer, signal.SIGCONT)
        for viewer in (address, other):
            wait_until(lambda: not first.exists() and history_of(viewer)[0][2] != "inbox")  # noqa: B023 - called here
            assert history_of(viewer) == [("judge", 0.5, "store"), ("judge", "x", "refused")]
        (_, refused) = ask(address, "notes", id="0")["values"]
        assert "a text, but the values of this name are numbers here" in refused["why"]


def test_many_viewers_give_values_at_once(path: Path, serve: Serve) -> None:
    servers = [serve(path, who=who) for who in ("anna", "bob")]
    with ThreadPoolExecutor(8) as pool:
        wishes = [(server, wish(str(number))) for number in range(6) for server in servers]
        assert list(pool.map(lambda one: post(*one), wishes)) == [(200, "")] * 12
    assert sorted(given(path)) == sorted(
        ("judge", float(number), who) for number in range(6) for who in ("anna", "bob")
    )
    assert history_of(servers[0]) == history_of(servers[1])


def test_a_run_and_a_pin(tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        with writer_to(tmp_path / "run" / f"rank_{rank}") as writer:
            writer.add_trajectories([rollout(number) for number in range(2)])
            writer.points.pin("kept")
            writer.evict([0])
    run = serve(tmp_path / "run", who="anna")
    assert post(run, wish("0.5", shown="1/1"))[0] == 200
    assert (history_of(run, "1/1"), history_of(run, "0/1")) == ([("judge", 0.5, "store")], [])
    assert get(run, "/api/notes?id=2/0")[0] == 404
    pinned = serve(tmp_path / "run" / "rank_1", pin="kept")
    assert (history_of(pinned), history_of(pinned, "1")) == ([], []), "0 was evicted; 1 got its value after the pin"
    assert main(["view", str(tmp_path / "run" / "rank_1"), "--write", "--pin", "kept"]) == 2
    assert "leave out --pin" in capsys.readouterr().err


def test_a_directory_of_rlinf_takes_no_values(tmp_path: Path, serve: Serve, shared_fixtures: Path) -> None:
    rlinf = next(
        directory
        for directory in sorted((shared_fixtures / "rlinf").iterdir())
        if (directory / "metadata.json").is_file()
    )
    assert ask(serve(rlinf), "notes", id="0")["values"] == []
    for absent in (rlinf, tmp_path / "none"):
        with pytest.raises(StoreNotFoundError):
            serve(absent, who="anna")


def test_the_command_prints_where_it_listens_and_says_who(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "login")
    with Command(path, "--write") as command:
        assert post(command.address, wish("1")) == (200, "")
        port = urlsplit(command.address).port or 0
        with pytest.raises(ConfigurationError, match="--port 0 chooses a free port"), listening("127.0.0.1", port):
            pass
        with urlopen(f"{command.address}/api/events", timeout=PATIENCE) as events:  # an open page
            assert events.readline().startswith(b"id: ")
            assert "Error" not in command.end()
    assert given(path) == [("judge", 1.0, "login")]


# -- in a browser --------------------------------------------------------------------------------------

FORM = "document.querySelector('form.give:not([hidden])')"
STATUS = "document.querySelector('.late [role=status]').textContent"
REFUSED = "document.querySelector('.late [role=alert]').textContent"
CELLS = "[...row.cells].slice(0, 3).map((one) => one.textContent).join('|')"
VALUES = f"[...document.querySelectorAll('.given tbody tr')].map((row) => {CELLS})"
ENTER, TAB, SHIFT = "\ue007", "\ue004", "\ue008"


def enter(page: Page, name: str, value: str, kind: str = "number") -> None:
    """Fill in the form and submit it with the keyboard."""
    page.run("for (const one of document.querySelectorAll('#late-name, #late-value')) one.value = ''")
    page.keys("#late-name", name, TAB)
    page.keys("#late-kind", kind)
    page.keys("#late-value", value, ENTER)


def test_a_value_is_given_seen_elsewhere_and_taken_away(path: Path, serve: Serve, page: Page) -> None:
    annotate(path, 0, {"known": "x"}, who="bob")
    with writer_to(path) as writer:
        address = serve(path, who="anna")
        opened(page, f"{address}/#/trajectory/0?show=scores", FORM)
        first = page.driver.current_window_handle
        page.driver.switch_to.new_window("tab")
        second = page.driver.current_window_handle
        page.open(f"{serve(path)}/#/trajectory/0")  # another server, without --write
        clicked(page, "[data-show=scores]", "document.querySelector('.facts').textContent.includes('knownx')")
        assert page.run(f"return {FORM} === null && document.querySelector('.given button') === null")
        page.driver.switch_to.window(first)
        enter(page, "outcome", "-0.25")
        page.until(f"{STATUS} === 'Set outcome. It is stored.' || {STATUS} === 'It is stored.'")
        page.until(f"{VALUES}[0] === 'outcome|-0.25|anna' && {VALUES}[1] === 'known|x|bob'")
        page.until("document.querySelector('.facts .outcome').textContent === '-0.25'")
        page.until("document.querySelector('.scores').textContent.includes('outcome-0.25')")
        page.until("document.querySelector('.scores').textContent.includes('recordedoutcome0')")
        page.driver.switch_to.window(second)
        page.until(f"{VALUES}[0] === 'outcome|-0.25|anna'")
        page.until("document.querySelector('.facts .outcome').textContent === '-0.25'")
        page.driver.close()
        page.driver.switch_to.window(first)
        page.keys("[aria-label='Remove outcome']", ENTER)
        page.until(f"{VALUES}[0] === 'outcome|removed|anna'")
        page.until("document.querySelector('.facts .outcome').textContent === '0'")
        assert page.run("return document.activeElement.id") == "late-name"
        assert [note.value for note in notes_of(writer, 0)] == ["x", -0.25, None]


def test_what_is_refused_is_said_beside_the_form_and_hostile_values_are_text(
    path: Path, serve: Serve, page: Page
) -> None:
    opened(page, f"{serve(path, who=HOSTILE)}/#/trajectory/0?show=scores", FORM)
    page.expected_errors.append("status of 400")
    for name, value, kind, message in (
        ("1x", "1", "number", "must be a name"),
        ("judge", "1,5", "number", "must be a number"),
        ("outcome", "good", "text", "replaces a number"),
    ):
        enter(page, name, value, kind)
        page.until(f"{REFUSED}.includes(arguments[0])", message)
        assert page.run("return document.querySelector('#late-value').value") == value  # kept for correction
    assert given(path) == []
    page.run("document.querySelector('#late-name').value = 'tag'; document.querySelector('#late-kind').value = 'text'")
    page.run("document.querySelector('#late-value').value = arguments[0]", HOSTILE)  # drivers cannot type emoji
    page.keys("#late-value", ENTER)
    page.until(f"{VALUES}.length === 1")
    assert given(path) == [("tag", HOSTILE, HOSTILE)]
    text = text_of(page, ".late")
    assert "\\x1b[2J" in text
    assert "\\u{202e}" in text
    assert not set("\x1b\u202e\u202c") & set(text)
    assert page.run("return document.querySelectorAll('main script, main img').length") == 0
    assert page.run("return [window.stolen, document.querySelector('#late-value').value]") == [None, ""]


def test_a_waiting_value_is_shown_as_waiting_until_the_writer_has_it(path: Path, serve: Serve, page: Page) -> None:
    opened(page, f"{serve(path, who='anna')}/#/trajectory/0?show=scores", FORM)
    with another_writer(path) as writer:
        freeze(writer)
        enter(page, "judge", "0.5")
        page.until(f'{STATUS}.startsWith("1 value in the store\'s inbox")')
        page.until("document.querySelector('.given tr.inbox').textContent.includes('waits for the writer')")
        assert not page.run("return document.querySelector('.given button')")
        os.kill(writer, signal.SIGCONT)
        page.until(f"{STATUS} === 'It is stored.' && document.querySelector('.given tr.latest.store')")
    assert given(path) == [("judge", 0.5, "anna")]


ROWS = "[...document.querySelectorAll('.row')].map((row) => row.innerText.split(/\\n+/))"


def test_all_rows_of_a_table_are_given_a_value_and_it_is_taken_back(path: Path, serve: Serve, page: Page) -> None:
    address = serve(path, who="anna")
    page.open(f"{address}/#/table?where=outcome%20%3D%201&columns=trajectory_id,outcome,label")
    page.until("document.querySelector('.late summary').textContent === 'Set a value for 2 trajectories'")
    page.click(".late summary")
    enter(page, "label", "good", "text")
    page.until(f"{STATUS} === 'Set label for 2 trajectories. It is stored.'")
    assert [given(path, shown) for shown in "0123"] == [[], [("label", "good", "anna")]] * 2
    page.until("[...document.querySelectorAll('.choices label')].some((one) => one.textContent === 'label')")
    page.until("document.querySelectorAll('.row').length === 2")
    page.run("[...document.querySelectorAll('.choices label')].find((one) => one.textContent === 'label').click()")
    page.until(f"{ROWS}.every((row) => row.at(-1) === 'good')")
    enter(page, "outcome", "0.5", "number")
    page.until("document.querySelector('.nothing')?.textContent === 'No trajectory matches the filter.'")
    page.until(f"{STATUS} === 'Set outcome for 2 trajectories. It is stored.'")
    page.open(f"{address}/#/table?where=outcome%20%3D%200.5")
    page.until("document.querySelector('.late summary').textContent === 'Set a value for 2 trajectories'")
    page.click(".late summary")
    page.keys("#late-name", "outcome")
    page.keys("#late-kind", "none")
    assert page.run("return document.querySelector('#late-value').disabled")
    clicked(page, ".give button", "document.querySelector('.nothing')?.textContent.startsWith('No trajectory matches')")
    assert given(path, "1") == [("label", "good", "anna"), ("outcome", 0.5, "anna"), ("outcome", None, "anna")]


def test_rows_that_are_shown_are_given_a_value_whatever_came_and_went(tmp_path: Path, serve: Serve, page: Page) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(number) for number in range(400)])
        writer.flush()
        page.open(f"{serve(tmp_path, who='anna')}/#/table?where=outcome%20%3D%201")
        page.until("document.querySelectorAll('.row .id a').length > 10")
        page.run("document.querySelector('.grid').scrollTop = 34 * 100")  # scrolled down, the table does not move
        page.click(".late summary")
        writer.add_trajectories([rollout(number) for number in range(400, 408)])
        writer.evict([1, 3, 5])
        writer.flush()
        page.until("document.querySelector('.news').checkVisibility()")
        enter(page, "seen", "1")
        page.until(f"{STATUS} === 'Set seen for 197 trajectories. 3 others have left the store. It is stored.'")
        assert writer.query().where("seen = 1").ids().tolist() == list(range(7, 400, 2))
        writer.evict(range(7, 400, 2))
        writer.flush()
        enter(page, "seen", "0")
        page.until(f"{REFUSED} === 'Nothing was set: all of them have left the store.'")


def test_siblings_are_given_a_value(path: Path, serve: Serve, page: Page) -> None:
    page.open(f"{serve(path, who='anna')}/#/group?task=task-0")
    page.until("document.querySelectorAll('.sibling .message').length >= 4")
    page.click(".late summary")
    page.expected_errors.append("status of 400")
    enter(page, "outcome", "good", "text")
    page.until(f"{REFUSED}.includes('replaces a number')")
    enter(page, "outcome", "0.75", "number")
    page.until(f"{STATUS} === 'Set outcome for 4 trajectories. It is stored.'")
    outcomes = "[...document.querySelectorAll('.sibling .outcome')].map((one) => one.textContent).join()"
    page.until(f"{outcomes} === '0.75,0.75,0.75,0.75'")
    assert "mean outcome 0.75 · standard deviation 0" in text_of(page, ".summary")


def test_values_for_too_many_at_once_are_refused(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living, "MOST_GIVEN", 30)
    stored(tmp_path, [rollout(0)] * 31)
    address = serve(tmp_path, who="anna")
    assert len(ask(address, "ids", where="trajectory_id > 0")["ids"]) == 30
    status, _, body = get(address, "/api/ids")
    assert (status, "31 trajectories, at most 30 can be set at once" in body.decode()) == (400, True)
    every = [str(number) for number in range(1, 31)]
    assert post(address, {**wish("x" * 4096, "text", "tag"), "ids": every}) == (200, "")
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        assert reader.query().where("tag is not null").count() == 30
