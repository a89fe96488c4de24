// One trajectory: a rollout of an agent, or a block of steps.

import { ask, askTrajectory } from "./api.js";
import { NEWEST } from "./condition.js";
import { fill, make } from "./dom.js";
import { count, short, size, time } from "./numbers.js";
import { showBlock } from "./block.js";
import { showLate } from "./late.js";
import { showRollout } from "./rollout.js";
import { orderText, titlesOf } from "./table.js";
import { asText, roundedOf } from "./values.js";

const MOST_SCALARS = 6, LONGEST = 40, LONGEST_ERROR = 200; // values of metadata among the facts, and characters of each

const SHOWN = [
  "outcome", "success_rate", "turns", "steps", "batch", "response", "version_high", "committed", "model_weights_id", "data_id", "rollout_id",
];

export async function show(main, { of: id, parameters, keep, signal }) {
  const facts = make("dl", { class: "facts" }), scalars = make("dl", { class: "facts", hidden: true });
  const name = make("span", { class: "id" }, id);
  const late = make("section", { class: "late", "aria-label": "Late values", hidden: true });
  const place = make("div", { class: "body" });
  const neighbours = make("nav", { class: "neighbours", "aria-label": "Neighbours" });
  fill(main, make("div", { class: "bar" }, make("h1", {}, "Trajectory ", name), neighbours), facts, scalars, place);
  const where = parameters.get("where") ?? "", order = parameters.get("order") ?? NEWEST;
  const about = ask("about", {}, signal);
  /** Links to the trajectories before and after this one in the list that it was opened from, and to the failures among them. */
  const askAround = () => Promise.all([ask("around", { id, where, order }, signal), about]).then(([{ at, total, previous, next, previous_failure: earlier, next_failure: later }, { columns }]) => {
    const failure = (...of) => (earlier === null && later === null ? null : neighbour(...of));
    fill(neighbours, failure(earlier, "p", "‹ Failure", "Previous failure"), neighbour(previous, "k", "‹ Previous"), neighbour(next, "j", "Next ›"), failure(later, "n", "Failure ›", "Next failure"),
      at === null ? null : make("span", { class: "quiet" }, `${count(at + 1)} of ${count(total)}`, where ? [" where ", make("code", {}, where)] : null,
        order === NEWEST ? ", newest first" : `, ${orderText(order, titlesOf(columns))}`));
  }, (error) => !signal.aborted && fill(neighbours, make("span", { class: "refused" }, error.message)));
  askAround();
  const askFacts = () => Promise.all([ask("facts", { id }, signal), about]).then(([told, { columns }]) => {
    fill(name, told.trajectory_id); // a number that was asked for may be of a rank
    tell(facts, told, columns.filter(({ note }) => note === "late value").map((column) => column.name));
  }, (error) => {
    if (!signal.aborted) fill(facts, make("p", { class: "refused" }, error.message));
  });
  askFacts();
  const told = await askTrajectory(id, signal);
  const isRollout = told.kind === "agent";
  tellScalars(scalars, told.metadata ?? {});
  let view = null;
  const values = showLate(late, { id, signal, isOpen: isRollout, changed: () => {
    askFacts();
    if (view?.tell) askTrajectory(id, signal).then(view.tell, () => {}); // facts say what is wrong
  } });
  if (isRollout) view = showRollout(place, told, { parameters, keep, signal, id, late });
  else {
    place.before(late);
    view = showBlock(place, told, { parameters, keep, signal, id });
  }
  return { ...view, changed: (state) => {
    askAround();
    return values.changed(state);
  } };
}

/** Shows short values of metadata as facts, after its `error`. */
function tellScalars(place, { error, ...others }) {
  const text = error ? asText(error).trim() : "";
  const reason = text.split("\n").at(text.startsWith("Traceback") ? -1 : 0).slice(0, LONGEST_ERROR);
  const known = Object.entries(others).map(([name, value]) => [name, roundedOf(value)])
    .filter(([, value]) => ["number", "boolean"].includes(typeof value) || (typeof value === "string" && value && value.length <= LONGEST && !value.includes("\n")));
  fill(place, reason ? make("div", {}, make("dt", {}, "error"), make("dd", { class: "failed", title: text }, reason)) : null,
    known.slice(0, MOST_SCALARS).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, short(value)))));
  place.hidden = !place.childElementCount;
}

/** Returns a link to a neighbour, which keeps how this one is shown; what is not there is greyed out. */
function neighbour(id, key, title, meaning = `Trajectory ${id}`) {
  if (id === null) return make("span", { class: "button quiet", "aria-disabled": "true" }, title);
  const follow = (event) => {
    const kept = new URLSearchParams(location.hash.split("?")[1]);
    for (const own of ["token", "step", "environment"]) kept.delete(own);
    event.target.href = `#/trajectory/${id}${kept.size ? `?${kept}` : ""}`;
  };
  return make("a", { class: "button", href: `#/trajectory/${id}`, "aria-keyshortcuts": key, title: `${meaning} (key ${key})`, click: follow }, title);
}

function tell(facts, told, late) {
  const pairs = [];
  const titleOf = titlesOf([{ name: "batch", known: told.batch !== null }]);
  const add = (name, ...value) => pairs.push(make("div", {}, make("dt", {}, name), make("dd", {}, ...value)));
  if (told.task !== null) {
    const group = new URLSearchParams(told.version_high === null ? { task: told.task } : { task: told.task, version: told.version_high });
    add("task", make("a", { href: `#/group?${group}`, title: "All rollouts of this task" }, told.task), told.kind === "agent" ? [" ", make("a", { class: "compare", href: `#/group?${new URLSearchParams({ task: told.task, version: "all", pair: told.trajectory_id })}`, title: "Choose another rollout of the task beside this one" }, "compare")] : null);
  }
  for (const name of [...SHOWN, ...Object.keys(told).filter((name) => name.startsWith("reward_"))]) {
    const [value, title] = [told[name] ?? null, titleOf(name)];
    if (value === null) continue;
    if (name === "outcome") {
      const mood = value > 0.5 ? "good" : value <= 0 ? "bad" : "middling";
      add(title, make("span", { class: `outcome ${mood}` }, short(value)));
    } else add(title, name === "committed" ? time(value) : short(value));
  }
  for (const name of late) {
    const value = told[name] ?? null;
    if (value !== null) add(name, short(typeof value === "string" && value.length > 40 ? `${value.slice(0, 40)}…` : value));
  }
  if (told.terminated !== null) add("terminated", told.terminated ? "yes" : "no");
  add("size", make("span", { title: `${count(told.bytes)} bytes` }, size(told.bytes)));
  fill(facts, pairs);
}
