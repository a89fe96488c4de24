// Curves: scales, axes and size of a plot, and its use by keyboard.

import { ZONE, count, short, tick, ticks } from "./numbers.js";

export const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const shapeOf = (figure) => ({ width: Math.max(200, figure.clientWidth - 24), height: 174, padding: [8, 12, 0, 0] });

const BESIDE = { true: 30, false: 1 }; // around a single point: seconds, or versions and steps

/** Returns the scales of a curve: a single point is in the middle, and the upright one has 0. */
export const scalesOf = (time = false) => ({
  x: { time, range: ({ data: [x] }) => (x[0] === x.at(-1) ? [x[0] - BESIDE[time], x[0] + BESIDE[time]] : [x[0], x.at(-1)]) },
  y: { range: (_, low, high) => (low || high ? [Math.min(0, low * 1.08), Math.max(0, high * 1.08)] : [0, 1]) },
});

/** Returns a step of 1, 2 or 5 times a power of ten between ticks that are at least `space` pixels apart. */
function stepOf(low, high, length, space) {
  const least = ((high - low) * space) / length;
  const steps = [1, 2, 5, 10].map((times) => Number(`${times}e${Math.floor(Math.log10(least))}`));
  return steps.find((step) => step >= least);
}

/** Returns the ticks of an axis of numbers, of whole ones where only these are meant. */
const ticksOf = (isWhole) => ({
  incrs: (_, __, low, high, length, space) => [Math.max(isWhole ? 1 : 0, stepOf(low, high, length, space))],
  splits: (_, __, low, high, step) => Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (___, at) => Number(((Math.ceil(low / step) + at) * step).toPrecision(12))),
});

/** Returns the two axes of a curve: the lower one of time or of whole numbers, with a title, and the upright one. */
export function axes(label, { time = false, whole = false } = {}) {
  const all = { stroke: styleOf("--soft"), grid: { stroke: styleOf("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const lower = time ? { space: 96, values: (_, at, __, ___, apart) => ticks(at, apart) }
    : { ...ticksOf(true), space: (_, __, low, high) => 24 + 7 * Math.max(count(Math.floor(low)).length, count(Math.floor(high)).length), values: (_, values) => values.map(short) };
  return [{ ...all, label: time ? `${label}, ${ZONE}` : label, labelSize: 16, labelFont: all.font, labelGap: 0, size: 28, ...lower },
    { ...all, ...ticksOf(whole), space: 24, size: (_, values) => Math.max(40, 14 + 7 * Math.max(...(values ?? [""]).map((value) => value.length))), values: (_, values) => values.map(tick) }];
}

/**
 * Makes a plot a slider: arrows go from point to point, Enter opens one.
 *
 * `real` has the indices of the existing points in `y`, `chosen` the chosen point of each curve by `name`. `said` returns the text
 * for an x; `open` opens the point with an index.
 */
export function slider(plot, y, { real, name, title, chosen, said, open }) {
  const x = plot.data[0];
  const last = real.length - 1;
  const go = (at) => {
    const number = Math.max(0, Math.min(at, last));
    const here = real[number];
    plot.setCursor({ left: plot.valToPos(x[here], "x"), top: plot.valToPos(y[here] ?? 0, "y") });
    plot.over.setAttribute("aria-valuenow", number);
    plot.over.setAttribute("aria-valuetext", said(x[here]));
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
    else if (event.key === "Enter") open(real[at]);
    else return;
    event.preventDefault();
  });
}
