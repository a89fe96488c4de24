// All trajectories together: figures, curves over policy versions and time, tasks.

import { ask } from "./api.js";
import { conditionField } from "./condition.js";
import { fill, keepingFocus, make } from "./dom.js";
import { count, short, time } from "./numbers.js";

const CURVES = [
  { name: "outcome", title: "Mean outcome" },
  { name: "success_rate", title: "Mean success rate" },
  { name: "response", title: "Mean response, tokens" },
  { name: "turns", title: "Mean turns" },
  { name: "count", title: "Trajectories" },
];
const LOG_PROB = { name: "log_prob", title: "Mean log-prob, of up to 8 rollouts" };

const WHOLE = Array.from({ length: 30 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)); // steps between versions

const size = (bytes) => {
  const unit = Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${short(Number((bytes / 1024 ** unit).toPrecision(3)))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};

const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const shapeOf = (figure) => ({ width: Math.max(200, figure.clientWidth - 24), height: 158, padding: [8, 12, 0, 0] });

/** Returns the two axes of a curve; `more` is of the lower one. */
function axes(more) {
  const all = { stroke: styleOf("--soft"), grid: { stroke: styleOf("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return [{ ...all, ...more }, { ...all, size: 56, values: (_, values) => values.map((value) => (value === null ? "" : short(value))) }];
}

const linkTo = (where) => `#/table?${new URLSearchParams({ where })}`;

export async function show(main, { parameters, keep, signal }) {
  let told = null;
  let over = parameters.get("over") ?? null;
  const plots = new Map(); // by curve
  const logProbs = {}; // the last ones told, by what they are over
  let isReading = false;
  const chosen = {}; // by curve: which point the keyboard is at; the last one unless it was moved
  const field = conditionField(parameters.get("where") ?? "", "task = 't1'", () => {
    keep({ where: field.condition() });
    start();
  });
  const axis = make("div", { class: "switch", role: "group", "aria-label": "Curves over" },
    [["version", "Policy version"], ["time", "Time"]].map(([name, title]) => make("button", {
      type: "button", "data-over": name, click: () => {
        over = name;
        keep({ over });
        lay();
        readLogProbs();
      },
    }, title)));
  const refused = make("p", { class: "refused", id: "refused", role: "alert" });
  const figures = make("dl", { class: "figures" });
  const lacking = make("ul", { class: "lacking" });
  const curves = make("div", { class: "curves" });
  const pool = make("section", { class: "by-task", "aria-label": "Pool" });
  const tasks = make("section", { class: "by-task", "aria-label": "Tasks" });
  fill(main, make("h1", { class: "unseen" }, "Overview"), make("div", { class: "bar" }, field.element, axis), refused, figures, lacking, curves, pool, tasks);

  async function start() {
    fill(refused);
    if (!told) fill(figures, make("p", { class: "nothing" }, "Reading facts …"));
    const where = field.condition();
    try {
      told = { ...(await ask("overview", { where }, signal)), where };
      keepingFocus(main, lay);
      readLogProbs();
    } catch (error) {
      if (!signal.aborted) fill(refused, error.message);
    }
  }

  /** Asks for the curve of log-probs, one at a time: its rollouts are read, which far away takes longer than the next commit. */
  async function readLogProbs() {
    const [is, { state, where }] = [isOver(), told];
    if (isReading || logProbs[is]?.state === state && logProbs[is].where === where) return;
    isReading = true;
    let read = { x: [], log_prob: [] };
    try {
      read = await ask("log_probs", { where, over: is }, signal);
    } catch (error) {
      if (!signal.aborted) fill(refused, error.message);
    }
    isReading = false;
    if (signal.aborted) return;
    logProbs[is] = { ...read, state, where };
    const now = logProbsRead();
    const isThere = curves.querySelector("[data-curve=log_prob]") !== null;
    if (now && isThere !== known(LOG_PROB.name, now)) keepingFocus(main, lay);
    else if (now && isThere) keepingFocus(curves, () => drawLogProbs(now));
    readLogProbs(); // another one may be shown by now
  }

  const isOver = () => over ?? (told.by_version.x.length > 1 ? "version" : "time");

  const within = (condition) => (told.where ? `(${told.where}) and ${condition}` : condition);

  function lay() {
    for (const button of axis.children) button.setAttribute("aria-pressed", button.dataset.over === isOver() ? "true" : "false");
    const pairs = [
      ["trajectories", count(told.trajectories)],
      ["mean outcome", told.outcome === null ? null : short(told.outcome)],
      ["tasks", told.tasks ? count(told.tasks) : null],
      ["policy versions", told.by_version.x.length ? `${short(told.by_version.x[0])} to ${short(told.by_version.x.at(-1))}` : null],
      ["samples", told.agents < told.trajectories ? count(told.samples) : null],
      ["size", size(told.bytes)],
      ["first commit", told.begun === null ? null : time(told.begun)],
      ["last commit", told.ended === null ? null : time(told.ended)],
    ];
    fill(figures, pairs.filter(([, value]) => value !== null).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    const say = (number, text, where) => (number ? make("li", {}, make("a", { href: linkTo(within(where)), "data-focus": where }, count(number)), ` ${text}`) : null);
    fill(lacking, ...[
      say(told.unreadable_count, "cannot be read: their facts are unknown (trajstore verify says more)", "not readable"),
      say(told.without_outcome, "rollouts have no outcome", "kind = 'agent' and outcome is null"),
      told.agents < told.trajectories ? make("li", { class: "quiet" }, "Rewards of blocks are not among the facts; each block shows its own.") : null,
      told.limits.map((text) => make("li", { class: "quiet" }, text)),
      say(told.without_version, "have no policy version and are in no curve over versions", "version_high is null")].flat());
    draw();
    if (told.pool) drawPool(told.pool);
    fill(tasks, told.by_task.length ? [make("h2", {}, "Tasks, those with the lowest outcome first"), ...told.by_task.map(taskRow)] : []);
  }

  const taskRow = (row) => {
    const bar = make("span", { class: "bar-of" });
    if (row.outcome !== null) bar.style.setProperty("--share", Math.max(0, Math.min(1, Number(row.outcome))));
    return make("a", { class: "task", "data-focus": `task ${row.task}`, href: `#/group?${new URLSearchParams({ task: row.task })}` }, make("span", { class: "of" }, row.task),
      bar, make("span", { class: "number" }, row.outcome === null ? "" : short(row.outcome)), make("span", { class: "number quiet" }, `${count(row.count)} ${row.count === 1 ? "rollout" : "rollouts"}`));
  };

  const known = (name, data) => data[name].some((value) => value !== null);

  function draw() {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    const data = isOver() === "version" ? told.by_version : told.by_time;
    const kept = CURVES.filter(({ name }) => known(name, data));
    const read = logProbsRead();
    const isLater = kept.length && told.agents && (!read || known(LOG_PROB.name, read));
    fill(curves, data.x.length ? null : make("p", { class: "nothing" }, isOver() === "version" ? "No policy version is known." : "Nothing here yet."),
      kept.map((curve) => figureOf(curve)), isLater ? figureOf(LOG_PROB, ["reading them …"]) : null);
    for (const curve of kept) drawCurve(curve, data);
    if (isLater && read) drawLogProbs(read);
  }

  function logProbsRead() {
    const read = logProbs[isOver()];
    return read?.where === told.where ? read : null;
  }

  function drawLogProbs(read) {
    const odd = read.log_prob.filter((value) => typeof value === "string").length;
    drawCurve(LOG_PROB, read, [read.of > read.x.length ? `at ${count(read.x.length)} of ${count(read.of)} points` : null,
      odd ? `${count(odd)} not finite` : null, read.unread ? `${count(read.unread)} cannot be read` : null].filter(Boolean));
  }

  const figureOf = ({ name, title }, notes = []) => make("figure", { "data-curve": name, "aria-label": `${title} over ${isOver() === "version" ? "policy versions" : "time"}` },
    make("figcaption", {}, [title, ...notes].join(", ")));

  /** Draws a curve, and nothing else anew: what is beside it may be clicked on. */
  function drawCurve(curve, data, notes) {
    const { name, title } = curve;
    const isVersion = isOver() === "version";
    const figure = figureOf(curve, notes);
    plots.get(name)?.destroy();
    curves.querySelector(`[data-curve=${name}]`).replaceWith(figure);
    const plot = new uPlot({
      ...shapeOf(figure), legend: { show: true, live: true },
      cursor: { points: { size: 7 }, drag: { x: false, y: false } },
      scales: { x: { time: !isVersion }, y: { range: (_, low, high) => (name === "count" ? [0, Math.max(1, high * 1.1)] : low === high ? [low - 0.5, high + 0.5] : [low - (high - low) * 0.1, high + (high - low) * 0.1]) } },
      axes: axes(isVersion ? { size: 28, incrs: WHOLE } : { size: 28 }),
      hooks: { setCursor: [(u) => u.cursor.idx === null && u.setLegend({ idx: data.x.length - 1 })] }, // else it is empty
      series: [
        { label: isVersion ? "version" : "time" },
        { label: name, stroke: styleOf("--accent"), width: 1.75, fill: name === "count" ? styleOf("--accent-back") : undefined, spanGaps: false,
          points: { show: data.x.length < 80, size: 5, fill: styleOf("--card") }, value: (_, value) => (value === null ? "" : short(value)) },
      ],
    }, [data.x.map(Number), data[name].map((value) => (typeof value === "number" ? value : null))], figure);
    plot.setLegend({ idx: data.x.length - 1 });
    const open = (at) => {
      const condition = isVersion ? `version_high = ${data.x[at]}` : `trajectory_id between ${data.first[at]} and ${data.last[at]}`;
      location.hash = linkTo(within(condition));
    };
    plot.over.addEventListener("click", () => Number.isInteger(plot.cursor.idx) && open(plot.cursor.idx));
    figure.querySelector(".u-legend").setAttribute("aria-hidden", "true"); // the slider says the same
    atKeys(plot, name, title, isVersion, open);
    plots.set(name, plot);
  }

  /** Shows what a pool holds: how many tasks are how difficult, now and over the steps that its journal or files tell. */
  function drawPool({ histories, tasks: held, demonstrations, skipped, difficulties, steps, by_step: counts }) {
    const most = Math.max(1, ...difficulties.map(([, number]) => number));
    const shades = difficulties.map((_, at) => `hsl(${(200 + at * 47) % 360} 45% ${styleOf("--dark") === "1" ? 66 : 48}%)`);
    const rows = difficulties.map(([difficulty, number], at) => {
      const bar = make("span", { class: "bar-of" });
      bar.style.setProperty("--share", number / most);
      if (steps.length > 1) bar.style.setProperty("--accent", shades[at]);
      return make("a", { class: "task", "data-focus": `difficulty ${difficulty}`, href: linkTo(`difficulty = ${difficulty}`) },
        make("span", { class: "of" }, `${difficulty} ${difficulty === 1 ? "success" : "successes"}`), bar, make("span", { class: "number" }, count(number)), make("span", { class: "number quiet" }, number === 1 ? "task" : "tasks"));
    });
    const figure = make("figure", { "data-curve": "difficulty", role: "img", "aria-label": `Tasks by difficulty, steps ${steps[0]} to ${steps.at(-1)}` }, make("figcaption", {}, "Tasks by difficulty over steps"));
    fill(pool, make("h2", {}, `The pool: ${count(histories)} histories of ${count(held)} tasks`, demonstrations ? `, ${count(demonstrations)} of them demonstrations` : "",
      `; ${count(skipped)} solved tasks left out. Tasks by successes in their newest step:`), rows, steps.length > 1 ? make("div", { class: "curves" }, figure) : null);
    if (steps.length > 1) plots.set("difficulty", new uPlot({
      ...shapeOf(figure), legend: { show: false }, scales: { x: { time: false } }, axes: axes({ size: 28, incrs: WHOLE }),
      series: [{ label: "step" }, ...difficulties.map(([difficulty], at) => ({ label: String(difficulty), stroke: shades[at], width: 1.75, points: { show: steps.length < 80, size: 5 } }))],
    }, [steps, ...counts], figure));
  }

  /** Makes a curve a slider: arrows go from point to point, Enter opens the trajectories of one. */
  function atKeys(plot, name, title, isVersion, open) {
    const [x, y] = plot.data;
    const last = x.length - 1;
    const go = (at) => {
      const here = Math.max(0, Math.min(at, last));
      plot.setCursor({ left: plot.valToPos(x[here], "x"), top: plot.valToPos(y[here] ?? 0, "y") });
      plot.over.setAttribute("aria-valuenow", here);
      plot.over.setAttribute("aria-valuetext", `${isVersion ? `version ${x[here]}` : time(1000 * x[here])}: ${y[here] === null ? "unknown" : short(y[here])}`);
    };
    const properties = { role: "slider", tabindex: 0, "data-focus": `curve ${name}`, "aria-label": title, "aria-valuemin": 0, "aria-valuemax": last };
    for (const [key, value] of Object.entries(properties)) plot.over.setAttribute(key, value);
    go(chosen[name] ?? last);
    plot.setCursor({ left: -10, top: -10 });
    plot.over.addEventListener("focus", () => plot.over.matches(":focus-visible") && go(chosen[name] ?? last)); // not at a click
    plot.over.addEventListener("keydown", (event) => {
      const at = chosen[name] ?? last;
      const moves = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: last };
      if (event.key in moves) go((chosen[name] = Math.max(0, Math.min(moves[event.key], last))));
      else if (event.key === "Enter") open(at);
      else return;
      event.preventDefault();
    });
  }

  const again = () => told && keepingFocus(main, lay);
  window.addEventListener("theme", again);
  window.addEventListener("resize", again);
  await start();
  return {
    leave() {
      window.removeEventListener("theme", again);
      window.removeEventListener("resize", again);
      for (const plot of plots.values()) plot.destroy();
    },
    changed: (state) => told && state.state !== told.state && start(),
  };
}
