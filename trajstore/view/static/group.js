// Rollouts of one task side by side, two of them, or two policy versions: outcomes, tokens as strips, and what they say once they differ.

import { ask, askTrajectory } from "./api.js";
import { amongOf } from "./condition.js";
import { fillLegend, nameOf, scaleOf } from "./colors.js";
import { showConversation } from "./conversation.js";
import { fill, make } from "./dom.js";
import { exchangesOf } from "./exchanges.js";
import { count, several, short } from "./numbers.js";
import { tokenLink } from "./rollout.js";
import { PREFERRED, colouredValues, columnsOf, drawStrip, hasUnwritten, placesOf } from "./tokens.js";

const AT_ONCE = 8; // rollouts read at a time
const VERSIONS = 30; // policy versions with a link each, around the one that is shown

/** Returns mean and standard deviation (of the sample) of numbers; null where there are none. */
function spread(values) {
  if (!values.length) return { mean: null, deviation: null };
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, deviation: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : null };
}

const fact = (name, value) => (value === null ? null : make("span", { class: "pair" }, make("span", { class: "quiet" }, name), " ", value));

/** Returns a message, a part of one or a call without its id, which says nothing. */
function withoutId(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
  const { id: _, tool_call_id: __, tool_use_id: ___, call_id: ____, ...more } = value;
  for (const name of ["content", "tool_calls"]) if (Array.isArray(more[name])) more[name] = more[name].map(withoutId);
  return more;
}

/** Returns how many messages all conversations begin with, whatever the ids of calls. */
function commonOf(conversations) {
  if (conversations.length < 2) return 0;
  const texts = conversations.map((messages) => messages.map((message) => JSON.stringify(withoutId(message))));
  let same = 0;
  while (texts.every((one) => same < one.length && one[same] === texts[0][same])) same += 1;
  return same;
}

/** Returns the text nodes of a message, without its header. */
function textsOf(message) {
  const walker = document.createTreeWalker(message, NodeFilter.SHOW_TEXT, ({ parentElement }) => (parentElement.closest("header, button") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT));
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  return nodes;
}

/** Marks where two messages begin to differ, to the end of the line; what is folded there unfolds. */
function markDifference(messages) {
  globalThis.CSS.highlights?.delete("differs");
  if (messages.some((message) => !message)) return;
  const contents = () => messages.map((message) => textsOf(message).map(({ data }) => data).join(""));
  let texts = contents();
  while (texts[0] === texts[1] && messages.some((message) => message.querySelector(".more"))) {
    for (const message of messages) message.querySelector(".more")?.click();
    texts = contents();
  }
  let at = 0;
  while (at < texts[0].length && texts[0][at] === texts[1][at]) at += 1;
  const ranges = messages.flatMap((message) => {
    let left = at;
    for (const node of textsOf(message)) {
      if (left < node.length) {
        const range = new Range();
        const end = node.data.indexOf("\n", left + 1);
        range.setStart(node, left);
        range.setEnd(node, end < 0 ? node.length : end);
        return [range];
      }
      left -= node.length;
    }
    return [];
  });
  if (texts[0] !== texts[1]) globalThis.CSS.highlights?.set("differs", new Highlight(...ranges));
}

export async function show(main, { parameters, keep, signal }) {
  const task = parameters.get("task") ?? "";
  const against = parameters.get("against");
  const pair = (parameters.get("pair") ?? "").split(",").filter(Boolean).slice(0, 2);
  const isPair = pair.length === 2;
  /** Returns the rollouts to show; of two policy versions in turn. */
  async function answer() {
    const versions = isPair ? ["all"] : [parameters.get("version"), ...(against === null ? [] : [against])];
    const [first, other = { rollouts: [] }] = await Promise.all(versions.map((version) => ask("group", { task, version }, signal)));
    const longest = Math.max(first.rollouts.length, other.rollouts.length);
    const rollouts = against === null || isPair ? first.rollouts : Array.from({ length: longest }, (_, at) => [first.rollouts[at], other.rollouts[at]]).flat().filter(Boolean);
    const chosen = pair.flatMap((id) => rollouts.filter((row) => row.trajectory_id === id)); // first, or alone
    return { ...first, rollouts: isPair ? chosen : [...chosen, ...rollouts.filter((row) => !chosen.includes(row))] };
  }
  const told = await answer();
  const addressOf = (changes) => {
    const wanted = new URLSearchParams(location.hash.split("?")[1]);
    for (const [name, value] of Object.entries(changes)) value === null ? wanted.delete(name) : wanted.set(name, value);
    return `#/group?${wanted}`;
  };
  const toVersion = (version, text) => make("a", {
    href: `#/group?${new URLSearchParams({ task, version })}`, "aria-current": version === told.version ? "page" : null,
  }, text ?? version);
  const all = told.versions.length;
  const chosen = told.versions.indexOf(told.version);
  const from = Math.max(0, Math.min((chosen < 0 ? all : chosen) - VERSIONS / 2, all - VERSIONS));
  const to = Math.min(all, from + VERSIONS);
  const beside = make("select", { id: "against", change: () => (location.hash = addressOf({ against: beside.value || null })) }, make("option", { value: "" }, "none"),
    told.versions.filter((version) => version !== told.version).map((version) => make("option", { value: version, selected: String(version) === against }, version)));
  const versions = make("nav", { class: "versions", "aria-label": "Policy versions", hidden: all < 2 || isPair }, all > 1
    ? [make("span", { class: "quiet" }, "policy version"), make("a", {
      href: `#/group?${new URLSearchParams({ task, version: "all" })}`, "aria-current": told.version === null ? "page" : null,
    }, "all"), from ? toVersion(told.versions[from - 1], `‹ ${count(from)} earlier`) : null,
      ...told.versions.slice(from, to).map((version) => toVersion(version)),
      to < all ? toVersion(told.versions[to], `${count(all - to)} later ›`) : null,
      told.version === null ? null : [make("label", { class: "quiet", for: "against" }, "beside version"), beside]].flat() : []);
  const select = make("select", { id: "color", change: () => {
    keep({ color: select.value });
    dye();
  } });
  const legend = make("div", { class: "legend" });
  const same = make("section", { class: "same" });
  const isVersus = against !== null && !isPair && told.version !== null;
  const sides = isVersus ? [told.version, Number(against)].map((version) => ({ version, title: make("h2", {}), list: make("div", {}) })) : [];
  const siblings = make("div", { class: isVersus ? "versus" : "siblings" });
  const summary = make("p", { class: "summary" });
  const colors = make("div", { class: "bar" }, make("label", { for: "color" }, "Colour"), select, legend);
  fill(main, make("h1", {}, "Task ", make("span", { class: "id" }, task)), summary, versions, colors, same, siblings);

  const read = []; // { rollout, columns, strip, said, judged } in the order of the siblings

  /** Says the outcomes and what follows from them. */
  function judge() {
    const spreadOf = (rows) => spread(rows.map((row) => row.outcome).filter((value) => typeof value === "number"));
    const { mean, deviation } = spreadOf(told.rollouts);
    const groups = Map.groupBy(told.rollouts, (row) => row.version_high); // in which rewards are compared
    const spreads = new Map([...groups].map(([version, rows]) => [version, spreadOf(rows)]));
    fill(summary, isPair && told.rollouts.length < 2 ? "One of the two is not among these rollouts. " : null, [`${several(told.rollouts.length, "rollout")}${told.version === null && all > 1 && !isPair ? ", newest first" : ""}`,
      isPair ? "from their first difference" : mean === null ? "no outcome is known" : `mean outcome ${short(mean)}`, deviation === null || isPair ? null : `standard deviation ${short(deviation)}`,
      told.version === null || all > 1 ? null : `policy version ${told.version}`].filter(Boolean).join(" · "),
      isPair ? [" · ", make("a", { href: addressOf({ pair: null }) }, "Show all of the task")] : told.rollouts.length > 1 ? ` · ${pair.length ? "choose Compare in another one, too" : "Compare in two rollouts shows them alone"}` : null);
    for (const { version, title } of sides) {
      const rows = groups.get(version) ?? [];
      const of = (name) => spread(rows.map((row) => row[name]).filter((value) => typeof value === "number")).mean;
      fill(title, [`Policy version ${version}: ${several(rows.length, "rollout")}`, ...[["mean outcome", "outcome"], ["turns", "turns"], ["response tokens", "response"]].map(([words, name]) => (of(name) === null ? null : `${words} ${short(of(name))}`))].filter(Boolean).join(" · "));
    }
    const hasTokens = read.some(({ rollout }) => rollout?.tokens);
    read.forEach(({ judged }, at) => {
      const { outcome, version_high: version } = told.rollouts[at];
      const group = spreads.get(version);
      const advantage = hasTokens && typeof outcome === "number" && group.deviation ? (outcome - group.mean) / group.deviation : null;
      const mood = outcome > 0.5 ? "good" : outcome <= 0 ? "bad" : "middling";
      fill(judged, outcome === null ? make("span", { class: "quiet" }, "no outcome") : make("span", { class: `outcome ${mood}` }, short(outcome)),
        advantage === null ? null : make("span", { class: "pair", title: "(outcome − mean) ÷ standard deviation, of the task's rollouts of this policy version" }, make("span", { class: "quiet" }, "advantage in group"), " ", short(advantage)));
    });
  }

  async function more() {
    const some = told.rollouts.slice(read.length, read.length + AT_ONCE);
    const found = await Promise.all(some.map((row) => askTrajectory(row.trajectory_id, signal).catch((error) => ({ error: error.message }))));
    if (signal.aborted) return;
    some.forEach((row, at) => read.push(sibling(row, found[at])));
    judge();
    lay();
  }

  function sibling(row, rollout) {
    const judged = make("span", { class: "judged" });
    const strip = make("canvas", { class: "map", height: 16, "aria-hidden": "true" });
    const said = make("div", { class: "said-by" });
    const isChosen = pair.includes(row.trajectory_id);
    const choice = isPair ? null : make("button", { type: "button", class: "quiet choice", "aria-pressed": String(isChosen), title: "Compare two rollouts from their first difference",
      click: () => (location.hash = addressOf({ pair: [...pair.filter((id) => id !== row.trajectory_id), ...(isChosen ? [] : [row.trajectory_id])].join() || null })) }, "Compare");
    const among = amongOf(`task = '${task.replaceAll("'", "''")}'${told.version === null ? "" : ` and version_high = ${told.version}`}`, told.version === null ? "trajectory_id desc" : "trajectory_id");
    const element = make("section", { class: "sibling", "aria-label": `rollout ${row.trajectory_id}` },
      make("header", {}, make("a", { class: "id", href: `#/trajectory/${row.trajectory_id}${among}` }, row.trajectory_id), judged, choice),
      make("div", { class: "pairs" }, fact("tokens", row.steps === null ? null : count(row.steps)), fact("response tokens", row.response === null ? null : count(row.response)), fact("turns", row.turns),
        told.version === null || isPair ? [fact("policy version", row.version_high), fact("versions behind", row.version_high === null ? null : told.versions.at(-1) - row.version_high)] : null),
      rollout.error ? make("p", { class: "refused" }, rollout.error) : rollout.tokens === null ? null : strip, isVersus ? make("details", {}, make("summary", {}, "Messages"), said) : said);
    return { id: row.trajectory_id, rollout, columns: rollout.error ? [] : columnsOf(rollout), strip, said, judged, element };
  }

  function lay() {
    const conversations = read.filter(({ rollout }) => !rollout.error).map(({ rollout }) => rollout.messages);
    const shared = commonOf(conversations);
    const left = told.rollouts.length - read.length;
    fill(same, shared ? make("details", {}, make("summary", {}, `${shared === 1 ? "Message 0 is" : `Messages 0 ${shared === 2 ? "and" : "to"} ${count(shared - 1)} are`} the same in ${isPair ? "both" : `${left ? "the first" : "all"} ${count(conversations.length)}`} rollouts`)) : null);
    if (shared) showConversation(same.firstChild, conversations[0], exchangesOf(conversations[0]), { end: shared });
    for (const { rollout, said, id } of read) {
      fill(said);
      if (rollout.error) continue;
      if (shared && rollout.messages.length === shared) fill(said, make("p", { class: "nothing" }, "No further messages."));
      else {
        const places = placesOf(rollout);
        const linkOf = (number) => tokenLink(places[number], { href: `#/trajectory/${id}?token=${places[number]}` });
        showConversation(said, rollout.messages, exchangesOf(rollout.messages), { linkOf, first: shared });
      }
    }
    const button = left ? make("button", { type: "button", class: "more", click: more }, `Show more (${count(left)} left)`) : null;
    for (const { version, list } of sides) fill(list, read.filter((_, at) => told.rollouts[at].version_high === version).map(({ element }) => element));
    fill(siblings, isVersus ? sides.map(({ title, list }) => make("section", {}, title, list)) : read.map(({ element }) => element), button);
    if (isPair && read.length === 2) markDifference(read.map(({ said }) => said.querySelector(`[data-number="${shared}"]`)));
    const names = [...new Set(read.flatMap(({ columns }) => columns.map(({ name }) => name)))].filter((name) => name !== "input_ids");
    const wanted = parameters.get("color") ?? PREFERRED.find((name) => names.includes(name));
    colors.hidden = names.length === 0;
    fill(select, names.map((name) => make("option", { value: name, selected: name === wanted }, nameOf(name))));
    dye();
  }

  /** Colours the strips, all on one scale. */
  function dye() {
    const shown = read.map((one) => ({ ...one, column: one.columns.find(({ name }) => name === select.value) })).filter(({ column }) => column);
    if (!shown.length) return;
    const values = shown.flatMap(({ column, rollout }) => colouredValues(column, rollout));
    const scale = scaleOf(select.value, values);
    fillLegend(legend, scale, values, shown.some(({ rollout }) => hasUnwritten(rollout)));
    for (const { strip, column, rollout } of shown) drawStrip(strip, column, scale, rollout);
  }

  judge();
  if (told.rollouts.length) await more();
  else fill(siblings, make("p", { class: "nothing" }, "No rollouts of this task."));
  const idsOf = ({ rollouts }) => rollouts.map((row) => row.trajectory_id).join();
  return {
    leave: () => globalThis.CSS.highlights?.delete("differs"),
    async changed(state) {
      if (state.state === told.state) return;
      told.state = state.state;
      const now = await answer().catch(() => null);
      if (!now || signal.aborted) return;
      if (idsOf(now) !== idsOf(told) || now.version !== told.version) window.dispatchEvent(new Event("hashchange"));
      else {
        told.rollouts = now.rollouts; // an outcome may have come late
        judge();
      }
    },
  };
}
