// The training ledger: curves over optimizer steps, and the rows of a step.

import { ask } from "./api.js";
import { axes, scalesOf, shapeOf, slider, styleOf } from "./curve.js";
import { fill, keepingFocus, make } from "./dom.js";
import { count, several, short } from "./numbers.js";

const TITLES = {
  rows: "Trained rows", replayed: "Share of replayed rows", no_loss: "Share of rows without loss", ratio: "Mean importance ratio",
  advantage: "Mean absolute advantage", age: "Mean age in policy versions",
};
const titleOf = (name) => TITLES[name] ?? name;

/** Columns of a row: name, title, what it means. */
const COLUMNS = [
  ["advantage", "advantage", "mean over the trained tokens"], ["ratio", "ratio", "mean importance ratio over the trained tokens"],
  ["weight", "weight", "further factor in the loss; 0: the row had no loss"], ["tokens", "tokens", "tokens that the mask left in the loss"],
  ["version", "policy version", "of the policy that sampled it"], ["age", "age", "policy versions from then to the step"],
];

const said = (value) => (value === null ? "unknown" : short(value));

/** Returns a table of trained rows; `titles` and `cells` (of a row) are the first columns. */
const tableOf = (label, rows, titles, cells) => make("div", { class: "wide" }, make("table", { class: "trained", "aria-label": label },
  make("thead", {}, make("tr", {}, titles.map((title) => make("th", { scope: "col" }, title)),
    COLUMNS.map(([, title, note]) => make("th", { scope: "col", class: "number", title: note }, title)), make("th", { scope: "col" }, "replayed"))),
  make("tbody", {}, rows.map((row) => make("tr", { class: row.weight === 0 ? "without-loss" : null }, cells(row).map((cell) => make("td", {}, cell)),
    COLUMNS.map(([name]) => make("td", { class: "number" }, row[name] === null ? "" : short(row[name]))), make("td", {}, row.replayed ? "yes" : ""))))));

const linkToStep = (step) => make("a", { href: `#/step/${step}` }, count(step));

/** Shows the steps that trained a trajectory, if the store has a ledger. */
export async function showTrained(place, id, signal) {
  const { training } = await ask("about", {}, signal);
  if (!training) return;
  const { trained, of } = await ask("trained", { id }, signal);
  place.hidden = false;
  const steps = new Set(trained.map(({ step }) => step)).size;
  const note = of > trained.length ? ` (the newest ${count(trained.length)} of ${count(of)} rows)` : "";
  const open = trained.length > 0 && trained.length <= 12;
  fill(place, trained.length ? make("details", { open }, make("summary", {}, `Trained in ${several(steps, "step")}${note}`),
    tableOf("Steps that trained it", trained, ["step", "row"], (row) => [linkToStep(row.step), count(row.row)])) : make("p", { class: "quiet" }, "No recorded step trained it."));
}

/** Shows the rows of an optimizer step. */
export async function showStep(main, { of: number, signal }) {
  const answer = await ask("step", { step: number }, signal);
  const to = (step, key, title) => (step === null ? make("span", { class: "button quiet", "aria-disabled": "true" }, title)
    : make("a", { class: "button", href: `#/step/${step}`, "aria-keyshortcuts": key, title: `Step ${step} (key ${key})` }, title));
  const facts = answer.ranks.flatMap(({ rank, policy, loss, data, seeds }) => {
    const of = answer.ranks.length > 1 ? `rank ${rank}: ` : "";
    const pairs = [["policy version", policy.map(said).join(" to ")], ...Object.entries(loss).map(([name, value]) => [name, short(value)]),
      ...[["data", data], ["seeds", seeds]].filter(([, values]) => Object.keys(values).length).map(([name, values]) => [name, Object.entries(values).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")])];
    return pairs.map(([name, value]) => make("div", {}, make("dt", {}, of + name), make("dd", {}, value)));
  });
  const trajectory = (row) => (row.id === null ? `rollout ${row.rollout} of the batch, in no store` : make("a", { class: "id", href: `#/trajectory/${row.id}` }, row.id));
  const task = (row) => (row.task === null ? "" : make("a", { href: `#/group?${new URLSearchParams({ task: row.task })}` }, row.task));
  fill(main, make("div", { class: "bar" }, make("h1", {}, "Step ", make("span", { class: "id" }, count(answer.step))),
    make("nav", { class: "neighbours", "aria-label": "Neighbours" }, to(answer.previous, "p", "‹ Previous"), to(answer.next, "n", "Next ›"), make("a", { href: "#/training" }, "all steps"))),
  make("dl", { class: "facts" }, facts),
  make("p", { class: "note" }, `${several(answer.of, "row")}${answer.of > answer.rows.length ? `, of which the first ${count(answer.rows.length)} are shown` : ""}. `,
    make("code", {}, `trajstore replay-step RUN ${answer.step}`), " recomputes their masks, rewards and advantages from the store."),
  tableOf("Rows of the step", answer.rows, ["trajectory", "row", "task"], (row) => [trajectory(row), count(row.row), task(row)]));
  return {};
}

/** Shows curves over optimizer steps; a point leads to the rows behind it. */
export async function show(main, { signal }) {
  const plots = new Map(), chosen = {};
  let answer = null;
  const notes = make("ul", { class: "lacking" }), curves = make("div", { class: "curves" });
  fill(main, make("h1", { class: "unseen" }, "Training"), notes, curves, make("p", { class: "note" }, "Means over the rows of each optimizer step, from the training ledger. Click a point for the rows behind it."));

  function draw() {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    const names = Object.keys(answer.curves);
    fill(notes, answer.damaged.map((sentence) => make("li", {}, sentence)),
      answer.replaced ? make("li", { class: "quiet" }, `${several(answer.replaced, "step")} recorded before a resume ${answer.replaced === 1 ? "was" : "were"} replaced; trajstore audit lists them.`) : null,
      answer.of > answer.steps.length ? make("li", { class: "quiet" }, `${count(answer.steps.length)} of ${count(answer.of)} steps are shown, evenly spaced.`) : null);
    fill(curves, answer.steps.length ? names.map((name) => make("figure", { "data-curve": name, "aria-label": `${titleOf(name)} over optimizer steps` }, make("figcaption", {}, titleOf(name))))
      : make("p", { class: "nothing" }, "This store has no training ledger with steps: see the guide \"The curve broke at step 412\"."));
    if (answer.steps.length) names.forEach(drawCurve);
  }

  function drawCurve(name) {
    const values = answer.curves[name].map((value) => (typeof value === "number" ? value : null));
    const figure = curves.querySelector(`[data-curve="${CSS.escape(name)}"]`);
    const x = answer.steps, last = x.length - 1;
    const plot = new uPlot({
      ...shapeOf(figure), legend: { show: true, live: true }, cursor: { points: { size: 7 }, drag: { x: false, y: false } },
      scales: scalesOf(),
      axes: axes("optimizer step"), hooks: { setCursor: [(u) => u.cursor.idx === null && u.setLegend({ idx: last })] },
      series: [{ label: "step", value: (_, at) => (at === null ? "" : count(at)) }, { label: name, stroke: styleOf("--accent"), width: 1.75, points: { show: x.length < 80, size: 5, fill: styleOf("--card") }, value: (_, value) => (value === null ? "" : short(value)) }],
    }, [x, values], figure);
    plot.setLegend({ idx: last });
    const open = (at) => {
      location.hash = `#/step/${x[at]}`;
    };
    plot.over.addEventListener("click", () => Number.isInteger(plot.cursor.idx) && open(plot.cursor.idx));
    figure.querySelector(".u-legend").setAttribute("aria-hidden", "true"); // the slider says the same
    slider(plot, values, { real: [...x.keys()], name, title: titleOf(name), chosen, open, said: (step) => `step ${count(step)}: ${said(values[x.indexOf(step)])}` });
    plots.set(name, plot);
  }

  const again = () => answer && keepingFocus(main, draw);
  async function start() {
    answer = await ask("training", {}, signal);
    keepingFocus(main, draw);
  }
  window.addEventListener("theme", again);
  window.addEventListener("resize", again);
  await start();
  return {
    leave() {
      window.removeEventListener("theme", again);
      window.removeEventListener("resize", again);
      for (const plot of plots.values()) plot.destroy();
    },
    changed: (state) => state.state !== answer.state && start(),
  };
}
