"""The page in a real Chromium, over stores with active writers."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stores import stored, writer_to
from tests.support.witness import witness
from tests.tokenizers_of_words import tokenizer_of
from tests.view.conftest import Serve
from tests.view.rollouts import clicked, opened, rollout, text_of
from tools.browser import Page
from trajstore import AgentTrajectory, Reward, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.store.sealed import COPY_NAME, INDEX_NAME

ROWS = "[...document.querySelectorAll('.row a.id, .row .id a')].map((one) => one.textContent)"

HOSTILE = (
    "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'> \x1b[2J\x1b]0;title\x07 \u202egnp.exe "
    "\u202c &amp; {{7*7}} javascript:alert(1) \u2028 \U0001f600"
)


def test_the_table_sorts_filters_scrolls_and_follows(tmp_path: Path, serve: Serve, page: Page) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(number) for number in range(400)])
        writer.flush()
        address = serve(tmp_path)
        page.open(f"{address}/#/table")
        assert page.until(f"{ROWS}[0] === '399' && {ROWS}")[:3] == ["399", "398", "397"]
        assert page.run("return document.querySelectorAll('.row').length") < 100
        page.run("window.head = document.querySelector('.heads button')")
        writer.add_trajectories([rollout(400)])
        writer.flush()
        page.until(f"{ROWS}[0] === '400'")  # at the top, new rows appear without a reload
        assert page.run("return window.head.isConnected"), "a click on it would have been lost"
        page.keys("#filter", "outcome > 0 and task = 'task-1'\n")
        page.until("document.querySelector('.total').textContent === '40 trajectories, newest commit first'")
        clicked(page, ".heads button", "document.querySelector('[aria-sort=descending]:first-child')")
        clicked(page, ".heads button", f"{ROWS}[0] === '5'")
        assert text_of(page, ".total") == "40 trajectories, by id"
        assert text_of(page, "[aria-sort=ascending]") == "id ↑trajectory_id"
        page.keys(".grid", "\ue010")  # End
        page.until(f"{ROWS}.at(-1) === '387'")
        page.keys(".grid", "\ue011", "\ue015", "\ue015")  # Home, down, down
        page.until("document.querySelector('[aria-selected=true]').getAttribute('aria-rowindex') === '4'")
        link = page.run("return location.href")
        page.keys(".grid", "\ue007")  # Enter
        page.until("location.hash.startsWith('#/trajectory/25?') && document.querySelector('.token')")
        page.until("document.querySelector('.neighbours')?.textContent.includes('3 of 40 where outcome > 0')")
        page.keys("body", "j")
        page.until("document.querySelector('.neighbours')?.textContent.includes('4 of 40 where outcome > 0')")
        assert page.run("return document.querySelector('[aria-keyshortcuts=n]')") is None  # these all succeeded
        page.keys("body", "k")
        page.until("location.hash.startsWith('#/trajectory/25?') && document.querySelector('.token')")
        opened(page, link, f"{ROWS}[0] === '5' && document.querySelector('#row-2[aria-selected=true]')")
        page.run("document.querySelector('#filter').value = ''")
        page.keys("#filter", "taks = 1\n")
        page.expected_errors.append("status of 400")
        page.until("document.querySelector('.refused').textContent.includes(\"there is no column 'taks'\")")


def test_a_rollout_is_a_conversation_and_coloured_tokens(tmp_path: Path, serve: Serve, page: Page) -> None:
    odd = torch.tensor([-0.1, float("nan"), float("-inf"), -3.0] * 5)
    tokenizer_of(["<unk>", "be ", "brief ", "it ", "ok "], " ", "").save_pretrained(tmp_path / "words")
    said = [("system", "be brief"), ("user", "be it"), ("assistant", "be brief")]
    worded = rollout(
        2,
        input_ids=torch.tensor([1, 2, 1, 3, 1, 2, *[4] * 18]),
        messages=[{"role": role, "content": content} for role, content in said],
        metadata={"tokenizer": str(tmp_path / "words")},
    )
    mask = torch.tensor([0] * 4 + [1] * 10 + [0] * 10)  # a trainer scored what a tool said
    scored = torch.tensor([-0.5] * 10 + [-12.0] * 10)
    observed = rollout(3, loss_mask=mask, response_mask=mask[4:], old_log_probs=scored, metadata={})
    with writer_to(tmp_path / "store") as writer:
        writer.add_trajectories([rollout(1, rollout_log_probs=odd), rollout(1), worded, observed])
        annotate(writer, [1], {"advantages": [torch.linspace(-1, 1, 20)]})
    address = serve(tmp_path / "store")
    page.open(f"{address}/#/trajectory/0?color=old_log_probs")
    page.until("document.querySelectorAll('.token').length === 24 && document.querySelector('.facts .outcome')")
    texts = page.run("return [...document.querySelectorAll('.message')].map((one) => one.className)")
    assert texts == ["message system", "message user", "message assistant"]
    assert text_of(page, ".exchange") == "calls find without argumentsNo result of this call was recorded."
    colors = "[...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor)"
    rendered = page.run(f"return {colors}")
    assert set(rendered[:4]) == {""}  # the prompt has no log-probs
    assert len(set(rendered[8:])) > 8
    page.keys(".scroller", *["\ue014"] * 7)  # right, from no token to token 6
    page.until("document.querySelector('#token').textContent.includes('token 6')")
    assert "log-prob (trainer) -0.2857143" in text_of(page, "#token")
    assert "token=6" in page.run("return location.hash")
    page.run(
        "const select = document.querySelector('#color'); select.value = 'rollout_log_probs';"
        "select.dispatchEvent(new Event('change'))"
    )
    page.until("document.querySelectorAll('.token.odd').length === 10")
    assert "10 not finite" in text_of(page, ".legend")
    page.keys(".scroller", "\ue012")  # left
    page.until("document.querySelector('#token').textContent.includes('log-prob (engine) NaN')")
    for number, colored in ((0, "metadata.advantages"), (1, "notes.advantages")):  # late values win
        page.open(f"{address}/#/trajectory/{number}?token=4")
        page.until("document.querySelectorAll('.token').length === 24 && document.querySelector('.token.selected')")
        assert page.run("return document.querySelector('#color').value") == colored
    assert "notes.advantages -1" in text_of(page, "#token")
    links = "[...document.querySelectorAll('.to-token')].map((one) => one.textContent).join()"
    assert page.run(f"return {links}") == "token 4"  # without a tokenizer, what the model wrote
    opened(page, f"{address}/#/trajectory/2", f"{links} === 'token 0,token 2,token 4'")
    clicked(page, "article:nth-child(3) .to-token", "document.querySelector('.token.selected')?.dataset.at === '4'")
    opened(page, f"{address}/#/trajectory/3?color=old_log_probs", "document.querySelectorAll('.token').length === 24")
    own = page.run(f"return {colors}")
    assert (own[4:14], set(own[14:])) == (["rgba(206, 92, 40, 0.75)"] * 10, {""})  # the scale is the model's


def test_what_a_model_wrote_is_text(tmp_path: Path, serve: Serve, page: Page) -> None:
    long = "x" * 1_000_000
    calls = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
    messages = [
        {"role": HOSTILE, "content": HOSTILE, "author": HOSTILE, HOSTILE: HOSTILE},
        {"role": "assistant", "content": [{"type": HOSTILE, "text": HOSTILE}, {"type": "text", "text": HOSTILE}, 7]},
        {"role": "assistant", "content": None, "tool_calls": [calls, 3]},
        {"role": "tool", "content": long},
        {"role": "user", "content": long + HOSTILE},
    ]
    reward = Reward(outcome=1.0, metadata={HOSTILE: 0.5, "a": HOSTILE})
    hostile = rollout(0, messages=messages, task_id=HOSTILE, reward=reward, metadata={HOSTILE: HOSTILE})
    address = serve(stored(tmp_path, [hostile, rollout(1, task_id=HOSTILE)]))
    counted = "document.querySelectorAll('.message').length === 5 && document.querySelectorAll('.token').length === 24"
    for place, shown in (
        ("trajectory/0", counted),
        ("table", "document.querySelectorAll('.row .id a').length === 2"),
        ("overview", "document.querySelector('.task .of')"),
    ):
        opened(page, f"{address}/#/{place}", shown)
        page.run("for (const one of document.querySelectorAll('details')) one.open = true")
        text = text_of(page, "main")
        assert "<script>window.stolen = 1</script>" in text, place
        assert "\\x1b[2J" in text, place
        assert "\\u{202e}" in text, place
        assert not set("\x1b\x07\u202e\u2028") & set(text), place
        assert page.run("return document.querySelectorAll('main script, main img').length") == 0
    clicked(page, ".task", "document.querySelectorAll('.sibling').length === 2")
    assert page.run("return window.stolen") is None
    title = page.run("return document.title")
    assert title.startswith("Task <script>")
    assert title.endswith(f" · {tmp_path.name} · trajstore")


def test_a_phrase_is_found_in_messages_that_are_folded_or_not_there_yet(
    tmp_path: Path, serve: Serve, page: Page
) -> None:
    call = {"function": {"name": "run", "arguments": {"command": "grep [a.b] (x"}}}
    messages: list[Any] = [{"role": "user", "content": f"line {number}"} for number in range(450)]
    messages[7] = {"role": "tool", "content": f"{'x ' * 30_000}The NEEDLE{' y' * 30_000}"}
    messages[8] = {"role": "user", "content": HOSTILE}
    messages[430] = {"role": "assistant", "content": "no", "tool_calls": [call, {"function": {"name": "needle"}}]}
    stored(tmp_path, [rollout(0, messages=messages)])
    opened(page, f"{serve(tmp_path)}/#/trajectory/0", "document.querySelectorAll('.message').length === 200")
    status = "document.querySelector('.conversation [role=status]').textContent"
    marked = (
        "[...CSS.highlights.get('found') ?? []].map((one) => "
        "`${one.startContainer.parentElement.closest('.message').dataset.number} ${one}`)"
    )
    inside = (
        "[...CSS.highlights.get('found')].every((one) => { const { top } = one.getBoundingClientRect();"
        "return top > 0 && top < innerHeight; })"
    )
    page.keys("body", "/")
    page.until("document.activeElement.id === 'find'")
    page.keys("#find", "needle\n")
    page.until(f"{status} === '1 of 2 messages' && {marked}.join() === '7 NEEDLE' && {inside}")
    assert "find=needle" in page.run("return location.hash")
    page.keys("#find", "\n")
    page.until(f"{status} === '2 of 2 messages' && {marked}[0] === '430 needle' && {inside}")
    clicked(page, "[aria-label='Next match']", f"{status} === '1 of 2 messages'")
    page.keys("#find", "\ue009a\ue009", "grep [a.b] (X\n")  # searched literally, not as a pattern
    page.until(f"{status} === '1 of 1 message' && {marked}.join() === '430 grep [a.b] (x' && {inside}")
    page.keys("#find", "\ue009a\ue009", "x The needle\n")  # a long text is shown in parts; the match starts in one
    page.until(f"{marked}.join() === '7 x The NEEDLE' && {inside}")
    search = "const field = document.querySelector('#find'); field.value = arguments[0]; field.form.requestSubmit()"
    for phrase, shown in (("<script>", "<script>"), ("\x1b[2J", "\\x1b[2J"), ("\\u{202E}", "\\u{202e}")):
        page.run(search, phrase)  # raw or as shown
        page.until(f"{status} === '1 of 1 message' && {marked}[0] === arguments[0]", f"8 {shown}")
    page.run(search, "(" * 1_000_000)
    page.until(f"{status} === 'a phrase has at most 1,000 characters' && !CSS.highlights.has('found')")
    page.keys("#find", "\ue009a\ue009", "nowhere\n")
    page.until(f"{status} === 'in no message' && !CSS.highlights.has('found')")
    page.open(page.run("return location.href").replace("nowhere", "line+449"))
    page.until(f"{status} === '1 of 1 message' && {marked}.join() === '449 line 449' && {inside}")


def png(width: int, height: int, color: bytes) -> bytes:
    """Return a picture of a single colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + color * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_pictures_in_messages_are_painted(tmp_path: Path, serve: Serve, page: Page) -> None:
    data = base64.b64encode(png(2, 1, bytes([10, 200, 30]))).decode()
    url = f"data:image/png;base64,{data}"
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "image_url", "image_url": {"url": "http://other.example/x.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}},
    ]
    stored(tmp_path, [rollout(0, messages=[{"role": "user", "content": parts}])])
    page.open(f"{serve(tmp_path)}/#/trajectory/0")
    page.expected_errors.append("willReadFrequently")
    pixels = (
        "[...document.querySelectorAll('.picture canvas')]"
        ".map((one) => [one.width, one.height, ...one.getContext('2d').getImageData(1, 0, 1, 1).data].join()).join(' ')"
    )
    page.until(f"{pixels} === '2,1,10,200,30,255 2,1,10,200,30,255'")
    page.until("document.querySelectorAll('.picture .refused').length === 2")
    folded = "document.querySelectorAll('.message details').length"
    assert page.run(f"return {folded}") == len(parts) - 1  # with all of their text
    page.keys("#find", "what is\n")  # unfolds candidates, but no picture data
    page.until("document.querySelectorAll('.message details[open]').length === 2")
    assert page.run("return document.querySelectorAll('main img').length") == 0


def test_what_a_model_wrote_is_shown_as_it_is(tmp_path: Path, serve: Serve, page: Page) -> None:
    written = '{"id": 9007199254740993,  "id": 1.0}'
    run = {"function": {"name": "run", "arguments": '{"command": "ls  -l"}'}}
    calls = [{"function": {"name": "find", "arguments": written}}, {"name": "find", "input": {"id": 2**63 - 1}}, run]
    messages = [{"role": "assistant", "content": {"at": 2**53 + 1}, "tool_calls": calls, "score": 1.0}]
    stored(tmp_path, [rollout(0, messages=messages)])
    opened(page, f"{serve(tmp_path)}/#/trajectory/0", "document.querySelector('.message')")
    given = page.run("return [...document.querySelectorAll('.call > .values')].map((one) => one.textContent)")
    assert given == ["id1.0", f"id{2**63 - 1}", "commandls  -l"]
    page.run("for (const one of document.querySelectorAll('.message details')) one.open = true")
    for expected in (written, str(2**63 - 1), str(2**53 + 1), "score1.0"):
        page.until("document.querySelector('.message').textContent.includes(arguments[0])", expected)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(number: object, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_a_call_stands_beside_its_result_and_what_lacks_one_is_named(tmp_path: Path, serve: Serve, page: Page) -> None:
    results = [{"type": "tool_result", "tool_use_id": f"u{n}", "is_error": bool(n), "content": f"r{n}"} for n in (0, 1)]
    uses = [{"type": "tool_use", "id": f"u{n}", "name": "look", "input": {"at": n}} for n in (0, 1)]
    messages = [
        said("assistant", "", tool_calls=[called("a", "bash", cmd="ls\nwc"), called("b", "edit", old="5", new=5)]),
        said("tool", "no file", tool_call_id="b"),
        said("tool", "Traceback (most recent call last):", tool_call_id="a"),
        said("assistant", [*uses, {"type": "thinking", "thinking": "hm"}]),
        said("user", results),
        said("assistant", None, tool_calls=[{"id": "a", "function": "python", "arguments": {"code": "1"}}]),
        said("tool", "one", tool_call_id="a"),  # ids begin anew
        said("assistant", None, function_call={"name": "old", "arguments": "{"}),
        said("function", "two", name="old"),
        said("assistant", "", tool_calls=[called("c", "last")]),
        said("tool", "three", tool_call_id="d"),
    ]
    opened(
        page,
        f"{serve(stored(tmp_path, [rollout(0, messages=messages)]))}/#/trajectory/0",
        "document.querySelector('.exchange')",
    )
    shown = "[...document.querySelectorAll('.exchange')].map((one) => one.innerText.replaceAll(/\\s+/g, ' '))"
    assert page.run(f"return {shown}") == [
        "calls bash cmd ls wc result error message 2 Traceback (most recent call last):",
        'calls edit old "5" new 5 result message 1 no file',
        "calls look at 0 result message 4 r0",
        "calls look at 1 result error message 4 r1",
        'calls python code "1" result message 6 one',
        "calls old { result message 8 two",
        "calls last without arguments No result of this call (id c) was recorded.",
    ]
    assert text_of(page, ".unmatched") == "A result without a call: no call before it has the id d."
    parts = "[...turn.querySelectorAll('.number, .name, .failed, .length, .begins')].map((one) => one.textContent)"
    outline = page.run(f"return [...document.querySelectorAll('.turn')].map((turn) => {parts}.join(' '))")
    assert outline[:2] == ["0 bash, edit error 80 ls\nwc", "3 look error 22 hm"]
    assert outline[-1] == "10 tool open 5 three"


def test_long_texts_are_folded_and_an_outline_leads_to_each_turn(tmp_path: Path, serve: Serve, page: Page) -> None:
    lines = "\n".join(f"line {number}" for number in range(400))
    messages: list[Any] = [said("user", "go")]
    for number in range(210):
        messages += [said("assistant", f"turn {number}", tool_calls=[called(str(number), "run")])]
        messages += [said("tool", lines if number == 207 else "ok", tool_call_id=str(number))]
    tools = [{"type": "function", "function": {"name": "run", "description": "Runs it."}}]
    metadata = {"tools": tools, "explanation": "Because\nof this.", "big": 2**60 + 1}
    store = stored(tmp_path, [AgentTrajectory(messages=messages, metadata=metadata, reward=Reward(outcome=0.25))])
    annotate(store, 0, {"remark": "Too\nslow."}, who="anna")
    opened(page, f"{serve(store)}/#/trajectory/0", "document.querySelectorAll('.turn').length === 211")
    inside = (
        "((box) => box && box.top >= 0 && box.bottom < innerHeight)"
        "(document.querySelector(`[data-number='${arguments[0]}'] header`)?.getBoundingClientRect())"
    )
    current = "document.querySelector('.turn[aria-current] .number').textContent === String(arguments[0])"
    page.run("document.querySelectorAll('.turn')[208].click()")
    page.until(f"{inside} && {current}", 415)
    page.run("document.querySelector('.conversation').scrollTop = 0")
    page.until(current, 0)
    page.keys(".turn[aria-current]", "\ue010", "\ue007")  # End, Enter
    page.until(inside, 419)
    folded = "document.querySelector('[data-number=\"416\"] .said')"
    assert page.run(f"return {folded}.textContent.split('\\n').length") == 20
    page.run(f"{folded}.querySelector('.more').focus()")
    assert page.run("return document.activeElement.textContent") == "Show all 400 lines"
    page.keys("[data-number='416'] .more", "\ue007")
    page.until(f"{folded}.textContent.includes('line 399') && document.activeElement.textContent === 'Show less'")
    page.keys("[data-number='416'] .less", "\ue007")
    page.until(f"!{folded}.textContent.includes('line 399') && document.activeElement.className === 'more'")
    page.keys("#find", "line 398\n")
    page.until(f"{folded}.textContent.includes('line 398') && CSS.highlights.get('found').size === 1")
    for tab, expected in (("tools", "runRuns it."), ("scores", "Too\nslow."), ("metadata", f"of this.big{2**60 + 1}")):
        clicked(
            page,
            f"[data-show={tab}]",
            "document.querySelector('.side .chosen').textContent.includes(arguments[0])",
            expected,
        )


def test_a_failure_is_a_key_away(tmp_path: Path, serve: Serve, page: Page) -> None:
    outcomes = [0.0, 1.0, 0.6, None, 1.0, 0.5]
    rewards = [None if outcome is None else Reward(outcome=outcome) for outcome in outcomes]
    store = stored(tmp_path, [rollout(at, reward=reward) for at, reward in enumerate(rewards)])
    page.open(f"{serve(store)}/#/trajectory/0?order=trajectory_id")
    at = 0
    for key, to in (("n", 3), ("n", 5), ("p", 3), ("j", 4), ("n", 5), ("k", 4)):
        page.until(
            f"document.querySelector('h1').textContent === 'Trajectory {at}' && document.querySelector('.neighbours a')"
        )
        page.keys("body", key)
        at = to
    page.until("document.querySelector('h1').textContent === 'Trajectory 4'")


def test_damage_is_said_and_hides_nothing_else_while_others_write(tmp_path: Path, serve: Serve, page: Page) -> None:
    with writer_to(tmp_path) as writer:
        for number in range(3):
            writer.add_trajectories([rollout(number)])
            writer.flush()
        address = serve(tmp_path)
        shard = tmp_path / "shards" / "shard_00000001.pt"
        shard.write_bytes(shard.read_bytes()[:1000])
        opened(page, f"{address}/#/table", f"{ROWS}.length === 3")
        page.expected_errors.append("status of 500")
        for at, shown in (("1", ".trouble[role=alert]"), ("0", ".message")):
            page.run("location.hash = `#/trajectory/${arguments[0]}`", at)
            page.until("document.querySelector(`main ${arguments[0]}`)", shown)
        page.expected_errors.append("status of 400")
        page.run("location.hash = '#/trajectory/%'")
        page.until("document.querySelector('main .trouble')?.textContent.includes('%')")
    metadata = tmp_path / "metadata.json"  # an open writer would repair it within a second
    whole = metadata.read_bytes()
    metadata.write_bytes(b"\xff")
    page.until("document.querySelector('#trouble').textContent.includes('metadata.json')")
    page.run("location.hash = '#/table'")
    page.until(f"{ROWS}.length === 3")
    metadata.write_bytes(whole)
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(3)])
        writer.flush()
        page.until(f"document.querySelector('#trouble').hidden && {ROWS}[0] === '3'")


@pytest.mark.parametrize(
    "damaged", ["metadata.json", "rank_1/trajectory_index.json", "rank_1/shards/shard_00000001.pt"]
)
def test_a_store_that_was_damaged_before_is_shown_with_what_is_whole(
    tmp_path: Path, serve: Serve, page: Page, damaged: str
) -> None:
    of_run = damaged.startswith("rank")
    for rank in range(1 + of_run):
        with writer_to(tmp_path / f"rank_{rank}" if of_run else tmp_path) as writer:
            for number in range(3):
                writer.add_trajectories([rollout(number)])
                writer.flush()
    (tmp_path / damaged).write_bytes(b"\xff")
    if damaged.endswith(INDEX_NAME):
        (tmp_path / damaged).with_name(COPY_NAME).write_bytes(b"\xff")
    whole = {"metadata.json": 3, f"rank_1/{INDEX_NAME}": 6}.get(damaged, 5)
    opened(page, f"{serve(tmp_path)}/#/table", f"{ROWS}.length === {whole}")
    page.until("document.querySelector('#trouble').textContent.includes(arguments[0])", damaged.rsplit("/", 1)[-1])
    page.run("location.hash = '#/overview'")
    page.until("document.querySelector('main.overview')?.getAttribute('aria-busy') === 'false'")
    page.run("document.location.hash = `#/trajectory/${arguments[0]}`", "0/0" if of_run else "0")
    page.until("document.querySelector('main .message')")
    if damaged.endswith(".pt"):
        page.expected_errors.append("status of 404")
        page.run("document.location.hash = '#/trajectory/1/1'")
        page.until("document.querySelector('main .trouble')?.textContent.includes('recorded, but unreadable')")


def test_200000_tokens_are_scrolled(tmp_path: Path, serve: Serve, page: Page) -> None:
    stored(tmp_path, [rollout(0, 200_000, metadata={})])
    opened(page, f"{serve(tmp_path)}/#/trajectory/0?show=tokens", "document.querySelector('.token')")
    page.run("const pane = document.querySelector('.scroller'); pane.scrollTop = pane.scrollHeight / 2")
    page.until("Number(document.querySelector('.token').dataset.at) > 90000")
    assert page.run("return document.querySelectorAll('.token').length") < 3000
    page.keys(".scroller", "\ue010")  # End
    page.until("document.querySelector('#token').textContent.includes('token 199,999')")
    page.open(page.run("return location.href").replace("199999", "150000"))  # a link scrolls to its token
    page.until("document.querySelector('.token.selected').dataset.at === '150000'")


def test_siblings_stand_side_by_side(tmp_path: Path, serve: Serve, page: Page) -> None:
    with writer_to(tmp_path) as writer:
        writer.add_trajectories([rollout(number) for number in range(28)])
        writer.flush()
        page.open(f"{serve(tmp_path)}/#/group?task=task-1")
        page.until("document.querySelectorAll('.sibling .message').length === 4")
        assert "Messages 0 and 1 are the same in all 4 rollouts" in text_of(page, ".same")
        outcomes = page.run("return [...document.querySelectorAll('.sibling .outcome')].map((one) => one.textContent)")
        assert outcomes == ["0", "1", "0", "1"]
        assert "advantage in group -0.866" in text_of(page, ".sibling")
        assert text_of(page, ".versions [aria-current]") == "3"
        writer.add_trajectories([rollout(24, policy_version=9)])
        writer.flush()
        page.until("document.querySelector('.versions [aria-current]')?.textContent === '9'")
        clicked(page, ".versions a", "document.querySelectorAll('.sibling').length === 8")
        assert "9 rollouts, newest first" in text_of(page, ".summary")
        shown = "return [...document.querySelectorAll('.sibling > header')].map((one) => one.textContent)"
        group = ["271advantage in group 0.866Compare", "260advantage in group -0.866Compare"]
        assert page.run(shown)[:3] == ["280Compare", *group]  # a single rollout has no advantage
        page.click(".versions a:nth-of-type(2)")
        page.until(
            "document.querySelector('.versions [aria-current]').textContent === '0' && "
            "document.querySelectorAll('.sibling').length === 4"
        )
        writer.evict([3])
        writer.flush()
        page.until("document.querySelector('#live').textContent === 'live · 28 trajectories'")
        page.expected_errors.append("status of 404")
        page.run("location.hash = '#/trajectory/3'")
        page.until("document.querySelector('main .trouble')?.textContent.includes('id 3')")


def test_two_rollouts_and_two_policy_versions_stand_side_by_side(tmp_path: Path, serve: Serve, page: Page) -> None:
    rollouts = []
    for at in range(4):  # ids of calls differ in each, and say nothing
        calls = [said("assistant", None, tool_calls=[called(f"a{at}", "ls")]), said("tool", "x", tool_call_id=f"a{at}")]
        text = "\n".join([*map(str, range(90)), f"end {at // 2}", "-"])
        rollouts += [rollout(0, messages=[*calls, said("assistant", text)], policy_version=at // 2)]
    page.open(f"{serve(stored(tmp_path, rollouts))}/#/trajectory/3")
    clicked(page, ".facts .compare", "document.querySelectorAll('.sibling').length === 4")
    ids = "[...document.querySelectorAll('.sibling .id')].map((one) => one.textContent).join()"
    assert page.run(f"return {ids}") == "3,2,1,0"
    clicked(page, ".sibling:nth-of-type(3) .choice", f"{ids} === '3,1' && CSS.highlights.get('differs')?.size === 2")
    assert page.run("return [...CSS.highlights.get('differs')].map(String)") == ["1", "0"]  # in folded text
    assert "Messages 0 and 1 are the same in both rollouts" in text_of(page, ".same")
    clicked(page, ".summary a", f"{ids} === '3,2,1,0'")
    clicked(page, ".versions a:nth-of-type(2)", f"{ids} === '0,1'")
    page.keys("#against", "1")
    page.until(f"{ids} === '0,1,2,3'")
    titles = page.run("return [...document.querySelectorAll('.versus h2')].map((one) => one.textContent)")
    assert titles == [
        f"Policy version {at}: 2 rollouts · mean outcome 0 · turns 2 · response tokens 20" for at in (0, 1)
    ]


def test_rollouts_without_tokens_say_nothing_of_tokens(tmp_path: Path, serve: Serve, page: Page) -> None:
    with writer_to(tmp_path) as writer:
        said = [{"role": "user", "content": "7 + 5?"}, {"role": "assistant", "content": "12"}]
        writer.add_trajectories([AgentTrajectory(messages=said, task_id="sum", reward=Reward(outcome=1.0))] * 2)
        writer.flush()
        address = serve(tmp_path)
        for place, drawn in (
            ("trajectory/0", ".conversation .message"),
            ("group?task=sum", ".sibling"),
            ("table", ".rows [role=row]"),
            ("overview", "[data-curve=turns]"),
        ):
            page.open(f"{address}/#/{place}")
            page.until("document.querySelector(arguments[0])", drawn)
            assert "token" not in page.run("return document.querySelector('main').innerText").lower(), place
        page.open(f"{address}/#/trajectory/0?show=tokens")
        page.until("document.querySelector('.conversation .message')")
        page.open(f"{address}/#/group?task=sum")
        page.until("document.querySelector('.sibling')")
        assert page.run("return document.querySelector('#color').checkVisibility()") is False


def test_rollouts_of_an_api_show_their_metadata(tmp_path: Path, serve: Serve, page: Page) -> None:
    """Why a rollout failed, each call's model, time and cost, and values of metadata as columns of the table."""
    said = [{"role": "user", "content": "7 + 5?"}, {"role": "assistant", "content": "Traceback: 12"}]
    call = {"message": 1, "model": "big", "seconds": 1.25, "cost": 1e-05, "retries": 1, "usage": {"total_tokens": 90}}
    error = "Traceback (most recent call last):\n  File\nRateLimitError: 429"
    metadata = [
        {"cost": 2.0, "model": "big", "calls": [call]},
        {"cost": 0.5, "error": error, "tries": [1]},
        {"cost": 1},
    ]
    with writer_to(tmp_path) as writer:
        for number, one in enumerate(metadata):
            outcome = Reward(outcome=float(number))
            rollout = AgentTrajectory(messages=said[: 2 - number % 2], task_id="sum", reward=outcome, metadata=one)
            writer.add_trajectories([rollout])
    address = serve(tmp_path)
    opened(page, f"{address}/#/trajectory/0", "document.querySelector('.conversation .message')")
    assert page.run("return document.querySelector('[data-show=conversation]').ariaPressed") == "true"
    assert "big · 1.25 s · $0.00001 · 90 tokens · 1 retry" in text_of(page, ".conversation")
    opened(page, f"{address}/#/trajectory/1", "document.querySelector('.facts .failed')")
    assert text_of(page, ".facts + .facts") == "errorRateLimitError: 429cost0.5"
    opened(page, f"{address}/#/group?task=sum", "document.querySelector('.sibling .outcome')")
    assert "advantage" not in text_of(page, "main")
    opened(page, f"{address}/#/overview", "document.querySelector('[data-curve=turns]')")
    assert "policy version," not in text_of(page, ".lacking")
    page.open(f"{address}/#/table?row=1")
    choice = "[...document.querySelectorAll('.choices label')].find((one) => one.textContent === arguments[0])"
    clicked(page, ".menu summary", choice, "costmetadata.cost")
    assert page.run(f"return {choice} === undefined", "triesmetadata.tries")  # a list
    page.run(f"{choice}.click()", "costmetadata.cost")
    cost = "[...document.querySelectorAll('.row')].map((row) => row.lastElementChild.textContent).join()"
    page.until(f"{cost} === '1,0.5,2'")
    clicked(page, ".menu summary", "!document.querySelector('.menu').open")
    clicked(page, ".heads > :last-child button", f"{cost} === '2,1,0.5'")
    assert text_of(page, ".total") == "3 trajectories, by cost, descending"
    page.keys("#filter", "content like 'Traceback%' and outcome = 2\n")
    page.until(f"{cost} === '1'")


def test_a_group_has_a_way_to_each_of_its_versions(tmp_path: Path, serve: Serve, page: Page) -> None:
    stored(tmp_path / "rank_0", [rollout(0, policy_version=version) for version in range(100)])
    links = "[...document.querySelectorAll('.versions a')].map((one) => one.textContent)"
    page.open(f"{serve(tmp_path)}/#/group?task=task-0")
    page.until("document.querySelector('.versions [aria-current]')?.textContent === '99'")
    assert page.run(f"return {links}") == ["all", "\u2039 70 earlier", *map(str, range(70, 100))]
    assert "1 rollout ·" in text_of(page, ".summary")
    chosen = "document.querySelector('.versions [aria-current]').textContent"
    clicked(page, ".versions a:nth-of-type(2)", f"{chosen} === '69'")
    assert page.run(f"return {links}") == ["all", "\u2039 54 earlier", *map(str, range(54, 84)), "16 later \u203a"]
    clicked(page, ".versions a", f"{chosen} === 'all'")
    assert "100 rollouts, newest first ·" in text_of(page, ".summary")
    page.keys("body", "?")
    assert "filter, or find in messages" in text_of(page, "dialog")


def test_a_number_of_a_run_is_shown_with_its_rank(tmp_path: Path, serve: Serve, page: Page) -> None:
    for rank in range(2):
        stored(tmp_path / f"rank_{rank}", [rollout(rank)])
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        number = int(max(reader.trajectory_ids))
    page.open(f"{serve(tmp_path)}/#/trajectory/{number}")
    page.until("document.querySelector('h1').textContent === 'Trajectory 1/0'")
    assert text_of(page, "h1") == "Trajectory 1/0"


def test_a_curve_breaks_where_a_version_has_no_rollouts(tmp_path: Path, serve: Serve, page: Page) -> None:
    address = serve(stored(tmp_path, [rollout(0, policy_version=version) for version in (0, 1, 2, 9, 10)]))
    opened(page, f"{address}/#/overview", "document.querySelectorAll('.curves canvas').length === 4")
    page.click_at("[data-curve=count] .u-over", 120, 20)
    values = "[...document.querySelectorAll('[data-curve=count] .u-value')].map((one) => one.textContent).join()"
    page.until(f"['3,0', '8,0'].includes({values})")
    assert "overview" in page.run("return location.hash")  # no trajectories to show
    page.keys("[data-curve=count] .u-over", "\ue012", "\ue012")  # left, left: to an existing version
    label = "document.querySelector('[data-curve=count] .u-over').getAttribute('aria-valuetext')"
    assert page.run(f"return {label}") == "policy version 2: 1"


def test_an_episode_leads_to_the_next_block(tmp_path: Path, serve: Serve, page: Page) -> None:
    steps = torch.arange(6.0).reshape(-1, 1, 1)
    blocks = [
        Trajectory(rewards=torch.full((3, 1, 1), reward), dones=steps[:3] == 4, curr_obs={"task": "lift"})
        for reward in (1.0, torch.nan)
    ]
    address = serve(stored(tmp_path, blocks))
    page.open(f"{address}/#/trajectory/0?environment=-3&step=x")  # not an address that the page writes
    page.until("document.querySelector('.step').textContent === 'step 0 (0 to 2) · reward 1'")
    page.until("document.querySelector('.goes-on a')")
    assert "It goes on in the block that was recorded next: 1, unless" in text_of(page, ".goes-on")
    assert text_of(page, ".note") == "curr_obs.task: lift"
    assert "since the episode began, or this block" in text_of(page, "[data-curve=return] figcaption")
    assert page.run("return [...document.querySelectorAll('.neighbours .button')].map((one) => one.textContent)") == [
        *("\u2039 Previous", "Next \u203a")  # blocks without an outcome are no failures
    ]
    page.click(".goes-on a")
    page.until("location.hash.startsWith('#/trajectory/1') && document.querySelector('[data-curve=rewards] canvas')")
    assert not page.run("return document.querySelector('[data-curve=return]')"), "its rewards are unknown"


def test_a_narrow_screen(tmp_path: Path, serve: Serve, page: Page) -> None:
    address = serve(stored(tmp_path, [*(rollout(number) for number in range(30)), witness(3)]))
    opened(page, f"{address}/#/trajectory/0", "document.querySelector('.token')")
    size: dict[str, Any] = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    rollouts = ("trajectory/0", "trajectory/0?show=tokens", "group?task=task-1", "group?task=task-1&version=all")
    for place in ("overview", "table", *rollouts, "trajectory/30"):
        page.run("location.hash = `#/${arguments[0]}`", place)
        page.until("arguments[0].startsWith(document.querySelector('main[aria-busy=false]').className)", place)
        assert page.run("return document.documentElement.scrollWidth") <= 360, place
        assert page.run("return document.querySelector('main').scrollWidth") <= 360, place
    assert page.run("return document.querySelector('#path').checkVisibility()")
    assert text_of(page, "#live") == "no writer · 31 trajectories"
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
