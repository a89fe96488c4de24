// Rollouts of one task side by side: outcomes, tokens as strips, and what they say once they differ.

import { ask, askTrajectory } from "./api.js";
import { amongOf } from "./condition.js";
import { fillLegend, nameOf, scaleOf } from "./colors.js";
import { showConversation } from "./conversation.js";
import { fill, make } from "./dom.js";
import { exchangesOf } from "./exchanges.js";
import { showGiving } from "./late.js";
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

/** Returns how many messages all conversations begin with. */
function commonOf(conversations) {
  if (conversations.length < 2) return 0;
  const texts = conversations.map((messages) => messages.map((message) => JSON.stringify(message)));
  let same = 0;
  while (texts.every((one) => same < one.length && one[same] === texts[0][same])) same += 1;
  return same;
}

export async function show(main, { parameters, keep, signal }) {
  const task = parameters.get("task") ?? "";
  const [told, { columns, write }] = await Promise.all([ask("group", { task, version: parameters.get("version") }, signal), ask("about", {}, signal)]);
  const toVersion = (version, text) => make("a", {
    href: `#/group?${new URLSearchParams({ task, version })}`, "aria-current": version === told.version ? "page" : null,
  }, text ?? version);
  const all = told.versions.length;
  const chosen = told.versions.indexOf(told.version);
  const from = Math.max(0, Math.min((chosen < 0 ? all : chosen) - VERSIONS / 2, all - VERSIONS));
  const to = Math.min(all, from + VERSIONS);
  const versions = make("nav", { class: "versions", "aria-label": "Policy versions" }, all > 1
    ? [make("span", { class: "quiet" }, "policy version"), make("a", {
      href: `#/group?${new URLSearchParams({ task, version: "all" })}`, "aria-current": told.version === null ? "page" : null,
    }, "all"), from ? toVersion(told.versions[from - 1], `‹ ${count(from)} earlier`) : null,
      ...told.versions.slice(from, to).map((version) => toVersion(version)),
      to < all ? toVersion(told.versions[to], `${count(all - to)} later ›`) : null] : []);
  const select = make("select", { id: "color", change: () => {
    keep({ color: select.value });
    dye();
  } });
  const legend = make("div", { class: "legend" });
  const same = make("section", { class: "same" });
  const siblings = make("div", { class: "siblings" });
  const summary = make("p", { class: "summary" });
  const giving = make("section", { class: "late", "aria-label": "A value for all", hidden: true });
  const colors = make("div", { class: "bar" }, make("label", { for: "color" }, "Colour"), select, legend);
  fill(main, make("h1", {}, "Task ", make("span", { class: "id" }, task)), summary, versions, giving, colors, same, siblings);
  if (write) showGiving(giving, { columns, write, signal, ids: async () => ({ ids: told.rollouts.map((row) => row.trajectory_id), gone: 0 }) }).tell(told.rollouts.length);

  const read = []; // { rollout, columns, strip, said, judged } in the order of the siblings

  /** Says the outcomes and what follows from them. */
  function judge() {
    const spreadOf = (rows) => spread(rows.map((row) => row.outcome).filter((value) => typeof value === "number"));
    const { mean, deviation } = spreadOf(told.rollouts);
    const groups = Map.groupBy(told.rollouts, (row) => row.version_high); // in which rewards are compared
    const spreads = new Map([...groups].map(([version, rows]) => [version, spreadOf(rows)]));
    fill(summary, [`${several(told.rollouts.length, "rollout")}${told.version === null && all > 1 ? ", newest first" : ""}`,
      mean === null ? "no outcome is known" : `mean outcome ${short(mean)}`, deviation === null ? null : `standard deviation ${short(deviation)}`,
      told.version === null || all > 1 ? null : `policy version ${told.version}`].filter(Boolean).join(" · "));
    read.forEach(({ judged }, at) => {
      const { outcome, version_high: version } = told.rollouts[at];
      const group = spreads.get(version);
      const advantage = typeof outcome === "number" && group.deviation ? (outcome - group.mean) / group.deviation : null;
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
    const among = amongOf(`task = '${task.replaceAll("'", "''")}'${told.version === null ? "" : ` and version_high = ${told.version}`}`, told.version === null ? "trajectory_id desc" : "trajectory_id");
    const element = make("section", { class: "sibling", "aria-label": `rollout ${row.trajectory_id}` },
      make("header", {}, make("a", { class: "id", href: `#/trajectory/${row.trajectory_id}${among}` }, row.trajectory_id), judged),
      make("div", { class: "pairs" }, fact("tokens", row.steps === null ? null : count(row.steps)), fact("response tokens", row.response === null ? null : count(row.response)), fact("turns", row.turns),
        told.version === null ? [fact("policy version", row.version_high), fact("versions behind", row.version_high === null ? null : told.versions.at(-1) - row.version_high)] : null,
        fact("drawn", row.uses ? several(row.uses, "time") : null), row.demonstration ? fact("a demonstration", "") : null),
      rollout.error ? make("p", { class: "refused" }, rollout.error) : rollout.tokens === null ? null : strip, said);
    return { id: row.trajectory_id, rollout, columns: rollout.error ? [] : columnsOf(rollout), strip, said, judged, element };
  }

  function lay() {
    const conversations = read.filter(({ rollout }) => !rollout.error).map(({ rollout }) => rollout.messages);
    const shared = commonOf(conversations);
    const left = told.rollouts.length - read.length;
    fill(same, shared ? make("details", {}, make("summary", {}, `${shared === 1 ? "Message 0 is" : `Messages 0 ${shared === 2 ? "and" : "to"} ${count(shared - 1)} are`} the same in ${left ? "the first" : "all"} ${count(conversations.length)} rollouts`)) : null);
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
    fill(siblings, read.map(({ element }) => element), left
      ? make("button", { type: "button", class: "more", click: more }, `Show more (${count(left)} left)`) : null);
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
    async changed(state) {
      if (state.state === told.state) return;
      told.state = state.state;
      const now = await ask("group", { task, version: parameters.get("version") }, signal).catch(() => null);
      if (!now || signal.aborted) return;
      if (idsOf(now) !== idsOf(told) || now.version !== told.version) window.dispatchEvent(new Event("hashchange"));
      else {
        told.rollouts = now.rollouts; // an outcome may have come late
        judge();
      }
    },
  };
}
