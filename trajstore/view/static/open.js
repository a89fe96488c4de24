// Sessions that are not in the store yet: their list in the overview, and one of them, with the calls that are durable.

import { ask, askPath } from "./api.js";
import { fill, keepingFocus, make } from "./dom.js";
import { ZONE, count, several, time } from "./numbers.js";
import { showRollout } from "./rollout.js";
import { refusals } from "./session.js";
import { showTree, treeInWords } from "./tree.js";

const linkTo = (id, parameters = {}) => `#/session/${encodeURIComponent(id)}?${new URLSearchParams(parameters)}`;

const ownerOf = ({ owner, state }) => owner ?? (state === "finished" ? "waits for the writer of the store" : "none: its process has ended");

/** Shows the list, if there are any; returns the function to call with new states. */
export function showOpen(section, signal) {
  let seen = null;
  const titles = ["session", "state", "calls", "tokens", `opened, ${ZONE}`, `last call, ${ZONE}`, "process"];
  async function changed(state) {
    if (state.sessions === seen) return;
    seen = state.sessions;
    try {
      const { sessions, of, damaged } = await ask("sessions", {}, signal);
      const rows = sessions.map((one) => make("tr", { class: "latest" },
        make("th", { scope: "row" }, make("a", { href: linkTo(one.id), "data-focus": `session ${one.id}` }, `${one.task_id} / ${one.rollout_id}`)),
        [one.state, several(one.calls, "call") + (one.gaps ? `, ${several(one.gaps, "gap")}` : ""), several(one.tokens, "token"), time(one.opened), time(one.last), ownerOf(one)].map((text) => make("td", {}, text))));
      keepingFocus(section, () => fill(section, of || damaged.length ? [make("h2", {}, `Open sessions: ${count(of)}`),
        ...refusals(damaged),
        make("div", { class: "given" }, make("table", { "aria-label": "Open sessions" }, make("thead", {}, make("tr", {}, titles.map((title) => make("th", { scope: "col" }, title)))), make("tbody", {}, rows))),
        of > rows.length ? make("p", { class: "quiet" }, `The ${count(rows.length)} with the newest calls are listed; trajstore list --open has all.`) : null] : []));
    } catch (error) {
      if (!signal.aborted) fill(section, refusals([error.message]));
    }
  }
  return changed;
}

/** Shows an open session: its tree, and the path that has the chosen call; a session in the store leads to its rollout. */
export async function show(main, { of: id, parameters, keep, signal }) {
  const facts = make("dl", { class: "facts" });
  const box = make("div", { class: "calls" });
  const summary = make("summary", {});
  const problems = make("div", {});
  const more = make("button", { type: "button", class: "news", hidden: true, click: () => read(shown.call).catch(failed) });
  const place = make("div", { class: "body" });
  const name = make("span", { class: "id" }, id);
  fill(main, make("div", { class: "bar" }, make("h1", {}, "Session ", name), more), facts,
    make("section", { class: "of-session", "aria-label": "Session" }, make("details", { open: true }, summary, box)), problems, place);
  let told = null;
  let tree = null;
  let view = null; // of the path
  let shown = { call: null, calls: 0 }; // the call that was chosen, and the number of calls of its path

  /** Returns the number of calls of the first path that has a call. */
  function lengthOf(name) {
    const { path } = told.calls.find((call) => call.id === name) ?? {};
    let number = 0;
    for (let call = told.calls.find(({ end }) => end === path); call; call = told.calls[call.parent]) number += 1;
    return number;
  }

  async function look() {
    told = await ask("session", { id, row: "" }, signal);
    if (told.paths) { // it is in the store
      const wanted = told.calls.find((call) => call.id === parameters.get("call")) ?? told.calls.at(-1);
      location.replace(wanted ? `#/trajectory/${wanted.row}?token=${wanted.start}` : `#/trajectory/${told.paths[0][1]}`);
      return;
    }
    fill(name, `${told.task_id} / ${told.rollout_id}`);
    fill(facts, [["state", told.state], ["process", ownerOf(told)], ["tokens", count(told.tokens)], ["opened", time(told.opened)], ["last call", time(told.last)], ["id", told.id]]
      .map(([title, value]) => make("div", {}, make("dt", {}, title), make("dd", {}, value))));
    fill(summary, treeInWords(told));
    fill(problems, refusals(told.left_out));
    drawTree();
    const news = shown.call === null ? 0 : lengthOf(shown.call) - shown.calls;
    more.hidden = news <= 0;
    fill(more, `Show ${several(news, "more call")} of this path`);
  }

  function drawTree() {
    const { path } = told.calls.find((call) => call.id === shown.call) ?? {};
    keepingFocus(box, () => tree = showTree(box, told, { path, linkOf, endOf: ({ end }) => make("span", { class: "end" }, `path ${count(end)}`) }));
    tree.choose(shown.call);
  }

  const linkOf = (call) => ({ href: linkTo(id, { call: call.id }), title: "Show its tokens", "data-focus": call.id, click: (event) => {
    event.preventDefault();
    keep({ call: call.id, token: null });
    read(call.id).catch(failed);
  } });

  /** Shows the path of a call. */
  async function read(wanted) {
    const call = told.calls.find((one) => one.id === wanted) ?? told.calls.at(-1);
    if (!call) {
      fill(place, make("p", { class: "nothing" }, "No call is durable yet."));
      return;
    }
    const body = await askPath(id, call.id, signal);
    shown = { call: call.id, calls: body.session.calls.length };
    more.hidden = true;
    view?.leave();
    drawTree();
    const now = new URLSearchParams(location.hash.split("?")[1]);
    if (!now.has("token")) now.set("token", String(Math.min(call.start, body.tokens - 1)));
    const hrefOf = (token) => linkTo(id, { call: call.id, token });
    const calls = { choose: (one) => tree.choose(one), focus: (one) => tree.focus(one) };
    view = showRollout(place, body, { parameters: now, keep, signal, hrefOf, calls });
  }

  const failed = (error) => !signal.aborted && fill(problems, refusals([error.message]));
  await look();
  if (!told.paths) await read(parameters.get("call"));
  return {
    leave: () => view?.leave(),
    changed: (state) => state.sessions !== told.seen && look().then(() => shown.call === null && read(null)).catch(failed),
  };
}
