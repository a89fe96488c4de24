// Curves: axes and size of a plot, and its use by keyboard.

import { short } from "./numbers.js";

export const WHOLE = Array.from({ length: 30 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)); // steps between versions

export const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const shapeOf = (figure) => ({ width: Math.max(200, figure.clientWidth - 24), height: 174, padding: [8, 12, 0, 0] });

/** Returns the two axes of a curve; the lower one has a title, and `more`; the other one `more` of its own. */
export function axes(label, more = {}, upright = {}) {
  const all = { stroke: styleOf("--soft"), grid: { stroke: styleOf("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return [{ ...all, label, labelSize: 16, labelFont: all.font, labelGap: 0, size: 28, ...more }, { ...all, size: 56, values: (_, values) => values.map((value) => (value === null ? "" : short(value))), ...upright }];
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
