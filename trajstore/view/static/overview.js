// All trajectories together: figures, curves over policy versions and time, tasks.

import { ask } from "./api.js";
import { conditionField } from "./condition.js";
import { axes, scalesOf, shapeOf, slider, styleOf } from "./curve.js";
import { fill, keepingFocus, make } from "./dom.js";
import { showOpen } from "./open.js";
import { ZONE, count, moment, several, short, size, tick, time } from "./numbers.js";

const CURVES = [
  { name: "outcome", title: "Mean outcome" },
  { name: "success_rate", title: "Mean success rate" },
  { name: "response", title: "Mean response tokens" },
  { name: "turns", title: "Mean turns" },
  { name: "count", title: "Number of trajectories" },
];
/** Returns a mean with the ends of its interval, and n. */
const meanOf = (mean, low, high, n) => `${short(mean)}${typeof low === "number" ? ` (${[low, high].map(tick).join(" to ")})` : ""}${n === null ? "" : `, n = ${count(n)}`}`;

/** Returns two times as one text, the day of both once. */
const spanOf = (first, last) => (first === last ? first : `${first} to ${first.slice(0, 10) === last.slice(0, 10) ? last.slice(11) : last}`);

const numberOf = (value) => (typeof value === "number" ? value : null);

/**
 * Returns the points of a curve with one more where policy versions are missing, at which it is `value`. `real` says
 * which points there were. Versions are as far from each other as the nearest two.
 */
function withGaps(data, names, value) {
  const points = { x: [], lines: names.map(() => []), real: [] };
  const add = (x, valueOf) => (points.x.push(x), points.lines.forEach((line, at) => line.push(valueOf(names[at]))));
  const all = data.x.map(Number);
  const apart = all.slice(1).map((x, at) => x - all[at]);
  const step = apart.reduce((least, one) => Math.min(least, one), Infinity);
  all.forEach((x, at) => {
    if (at && apart[at - 1] > step) {
      add(all[at - 1] + step, () => value);
      if (x - step > points.x.at(-1)) add(x - step, () => value);
    }
    points.real.push(points.x.length);
    add(x, (name) => numberOf(data[name][at]));
  });
  return points;
}

const linkTo = (where) => `#/table?${new URLSearchParams({ where })}`;

export async function show(main, { parameters, keep, signal }) {
  let told = null;
  let over = parameters.get("over") ?? null;
  const plots = new Map(); // by curve
  const chosen = {}; // by curve: which point the keyboard is at; the last one unless it was moved
  const field = conditionField(parameters.get("where") ?? "", () => {
    keep({ where: field.condition() });
    start();
  });
  const axis = make("div", { class: "switch", role: "group", "aria-label": "Curves over" }, make("span", { class: "quiet" }, "Curves over"),
    [["version", "Policy version"], ["time", "Time"]].map(([name, title]) => make("button", {
      type: "button", "data-over": name, click: () => {
        over = name;
        keep({ over });
        lay();
      },
    }, title)));
  const refused = make("p", { class: "refused", id: "refused", role: "alert" });
  const figures = make("dl", { class: "figures" });
  const lacking = make("ul", { class: "lacking" });
  const curves = make("div", { class: "curves" });
  const help = make("p", { class: "note", hidden: true });
  const tasks = make("section", { class: "by-task", "aria-label": "Tasks" });
  const open = make("section", { class: "open", "aria-label": "Open sessions" });
  fill(main, make("h1", { class: "unseen" }, "Overview"), make("div", { class: "bar" }, field.element, axis), refused, figures, lacking, open, curves, help, tasks);

  async function start() {
    fill(refused);
    if (!told) fill(figures, make("p", { class: "nothing" }, "Reading facts …"));
    const where = field.condition();
    try {
      told = { ...(await ask("overview", { where }, signal)), where };
      field.suggest(told.by_task[0]?.task);
      keepingFocus(main, lay);
    } catch (error) {
      if (!signal.aborted) fill(refused, error.message);
    }
  }

  const hasTimes = () => told.by_time.x.length > 0 || told.trajectories === 0; // RLinf's directories have none
  const isOver = () => (!hasTimes() ? "version" : over ?? (told.by_version.x.length > 1 ? "version" : "time"));

  const within = (condition) => (told.where ? `(${told.where}) and ${condition}` : condition);

  function lay() {
    axis.hidden = !hasTimes() || told.trajectories === 0;
    for (const button of axis.querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.over === isOver() ? "true" : "false");
    const pairs = [
      ["trajectories", count(told.trajectories)],
      ["mean outcome", told.outcome === null ? null : meanOf(told.outcome, told.outcome_low, told.outcome_high, told.outcome_n === told.trajectories ? null : told.outcome_n)],
      ["tasks", told.tasks ? count(told.tasks) : null],
      ["policy versions", told.by_version.x.length ? [...new Set([told.by_version.x[0], told.by_version.x.at(-1)])].map(short).join(" to ") : null],
      ["samples (steps × environments)", told.agents < told.trajectories ? count(told.samples) : null],
      ["size", size(told.bytes)],
      [`committed, ${ZONE}`, told.begun === null ? null : spanOf(time(told.begun), time(told.ended))],
    ];
    fill(figures, pairs.filter(([, value]) => value !== null).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    const say = (number, noun, text, where) => (number ? make("li", {}, make("a", { href: linkTo(within(where)), "data-focus": where }, several(number, ...noun)), ` ${text}`) : null);
    const all = ["trajectory", "trajectories"];
    fill(lacking, ...[
      say(told.unreadable_count, all, "unreadable, with unknown facts (see trajstore verify)", "not readable"),
      say(told.without_outcome, ["rollout"], "without an outcome", "kind = 'agent' and outcome is null"),
      told.by_version.x.length > 0 && say(told.without_version, all, "without a policy version, in no curve over versions", "version_high is null")].flat());
    draw();
    fill(tasks, told.by_task.length ? [make("h2", {}, "Tasks by mean outcome, lowest first"), ...told.by_task.map(taskRow)] : []);
  }

  const taskRow = ({ task, outcome, count: number }) => {
    const bar = make("span", { class: outcome === null ? null : "bar-of" });
    if (outcome !== null) bar.style.setProperty("--share", Math.max(0, Math.min(1, Number(outcome))));
    return make("a", { class: "task", "data-focus": `task ${task}`, href: `#/group?${new URLSearchParams({ task })}` }, make("span", { class: "of" }, task),
      bar, make("span", { class: "number" }, outcome === null ? "" : short(outcome)), make("span", { class: "number quiet" }, several(number, "rollout")));
  };

  const known = (name, data) => data[name].some((value) => value !== null);

  function draw() {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    const data = isOver() === "version" ? told.by_version : told.by_time;
    const kept = CURVES.filter(({ name }) => known(name, data));
    fill(curves, data.x.length ? null : make("p", { class: "nothing" }, isOver() === "version" ? "No policy version is known." : told.where ? "No trajectory matches the filter." : "No trajectories yet: they appear here once they are committed."),
      kept.map(figureOf));
    help.hidden = !kept.length;
    fill(help, "Bands, and the numbers in brackets: 95 % interval of the mean, if the n trajectories are independent. Of outcomes that are 0 or 1 it is Wilson's interval of a proportion, otherwise the mean ± 1.96 standard errors. ",
      isOver() === "time" ? "The time is divided into 60 equal intervals, with a point for each that has trajectories. " : null, "Point at a curve for its values; click a point to see its trajectories.");
    for (const curve of kept) drawCurve(curve, data);
  }

  const figureOf = ({ name, title }) => make("figure", { "data-curve": name, "aria-label": `${title} over ${isOver() === "version" ? "policy versions" : "time"}` },
    make("figcaption", {}, name === "count" ? title : `${title}, 95 % interval`));

  /** Draws the interval of each point without neighbours as a line: a band needs two points. */
  function drawAlone(plot, series) {
    const [x, high, low, line] = plot.data, { ctx } = plot;
    if (plot.data[series] !== line) return;
    const isThere = (at) => numberOf(high[at]) !== null;
    ctx.save();
    ctx.strokeStyle = plot.series[series].stroke();
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    x.forEach((value, at) => {
      if (!isThere(at) || isThere(at - 1) || isThere(at + 1)) return;
      const left = plot.valToPos(value, "x", true);
      ctx.moveTo(left, plot.valToPos(low[at], "y", true));
      ctx.lineTo(left, plot.valToPos(high[at], "y", true));
    });
    ctx.stroke();
    ctx.restore();
  }

  /** Draws a curve; that of a mean with a band, its interval. */
  function drawCurve({ name, title }, data) {
    const isVersion = isOver() === "version";
    const figure = curves.querySelector(`[data-curve=${name}]`);
    const hasBand = name !== "count";
    const names = hasBand ? [`${name}_high`, `${name}_low`, name] : [name]; // the line is drawn over its band
    const { x, lines, real } = isVersion ? withGaps(data, names, hasBand ? null : 0)
      : { x: data.x.map(Number), lines: names.map((one) => data[one].map(numberOf)), real: [...data.x.keys()] };
    const values = lines.at(-1);
    const said = (point) => {
      if (values[point] === null) return "";
      const at = real.indexOf(point);
      return hasBand ? meanOf(...["", "_low", "_high", "_n"].map((of) => data[`${name}${of}`][at])) : short(values[point]);
    };
    const last = x.length - 1;
    const momentOf = (at) => moment(at, (x[last] - x[0]) / 60);
    const edge = { stroke: "transparent", class: "unseen", points: { show: false } };
    const plot = new uPlot({
      ...shapeOf(figure), legend: { show: true, live: true },
      cursor: { points: { size: 7 }, drag: { x: false, y: false } },
      scales: scalesOf(!isVersion),
      axes: axes(isVersion ? "policy version" : "time", { time: !isVersion, whole: !hasBand }),
      hooks: { setCursor: [(u) => u.cursor.idx === null && u.setLegend({ idx: last })], // else it is empty
        drawSeries: hasBand ? [drawAlone] : [] },
      series: [{ label: isVersion ? "policy version" : "time", value: (_, at) => (at === null ? "" : isVersion ? short(at) : momentOf(at)) },
        ...(hasBand ? [edge, edge] : []), {
          label: hasBand ? "mean" : name, stroke: styleOf("--accent"), width: 1.75, spanGaps: false,
          points: { show: x.length < 80, size: 5, fill: styleOf("--card") }, value: (_, __, ___, at) => (Number.isInteger(at) ? said(at) : ""),
        }],
      bands: hasBand ? [{ series: [1, 2], fill: styleOf("--accent-back") }] : [],
    }, [x, ...lines], figure);
    plot.setLegend({ idx: last });
    const open = (point) => {
      const at = real.indexOf(point);
      if (at < 0) return; // nothing is there
      const condition = isVersion ? `version_high = ${data.x[at]}` : `trajectory_id between ${data.first[at]} and ${data.last[at]}`;
      location.hash = linkTo(within(condition));
    };
    plot.over.addEventListener("click", () => Number.isInteger(plot.cursor.idx) && open(plot.cursor.idx));
    figure.querySelector(".u-legend").setAttribute("aria-hidden", "true"); // the slider says the same
    const placeOf = (at) => (isVersion ? `policy version ${at}` : momentOf(at));
    slider(plot, values, { real, name, title, chosen, said: (at) => `${placeOf(at)}: ${said(x.indexOf(at)) || "unknown"}`, open });
    plots.set(name, plot);
  }

  const again = () => told && keepingFocus(main, lay);
  window.addEventListener("theme", again);
  window.addEventListener("resize", again);
  const listOpen = showOpen(open, signal);
  await start();
  return {
    leave() {
      window.removeEventListener("theme", again);
      window.removeEventListener("resize", again);
      for (const plot of plots.values()) plot.destroy();
    },
    changed: (state) => {
      listOpen(state);
      return told && state.state !== told.state && start();
    },
  };
}
