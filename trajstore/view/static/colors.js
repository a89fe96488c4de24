// From numbers to colours. A colour has an alpha, so that it goes with light and dark.

import { fill, make } from "./dom.js";
import { count, short } from "./numbers.js";

const WARM = "206, 92, 40"; // towards less, worse, surprising
const COOL = "38, 122, 176"; // towards more, better

/** Returns a value below which a share of sorted numbers lies. */
const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.round(share * (sorted.length - 1)))];

const NAMES = {
  input_ids: "token id", attention_mask: "attention mask", loss_mask: "loss mask", old_log_probs: "log-prob (trainer)",
  rollout_log_probs: "log-prob (engine)", entropys: "entropy", response_mask: "response mask", ratio: "ratio, trainer ÷ engine",
};
export const nameOf = (name) => NAMES[name] ?? name;

/** Returns the scale of a column's values: { kind, least, most, background(value), note }. */
export function scaleOf(name, values) {
  const finite = Float64Array.from(values).filter(Number.isFinite).sort();
  const least = finite[0], most = finite.at(-1);
  const isMask = name.includes("mask") || (finite.length > 0 && finite.every((value) => value === 0 || value === 1));
  if (finite.length === 0) return { kind: "none", least: null, most: null, background: () => "" };
  if (isMask) {
    return { kind: "mask", least, most, background: (value) => (value ? `rgba(${COOL}, .5)` : "") };
  }
  // One value far out must not wash out all others: what lies beyond 2 and 98 of 100 has the colour of these.
  const low = quantile(finite, 0.02), high = quantile(finite, 0.98);
  const center = name === "ratio" ? 1 : 0;
  const isBothWays = least < center && most > center;
  const reach = Math.max(Math.abs(low - center), Math.abs(high - center)) || Math.max(Math.abs(least - center), Math.abs(most - center)) || 1;
  const isWarm = name.includes("log_prob") || name.includes("entrop");
  return {
    kind: isBothWays ? "both" : "one", least, most, reach, center,
    background(value) {
      const share = Math.min(1, Math.abs(value - center) / reach);
      if (share < 0.02) return "";
      const color = isBothWays ? (value < center ? WARM : COOL) : isWarm || value < center ? WARM : COOL;
      return `rgba(${color}, ${(0.14 + 0.61 * share ** 0.8).toFixed(3)})`; // the least one can be seen on a dark ground
    },
  };
}

const FULL = "The colour has its full strength at the 98th percentile: at 98 of 100 values. Those beyond have the same colour.";

/** Colour of strips where the model wrote nothing, in light and dark. */
export const UNWRITTEN = "rgba(128, 132, 136, .32)";

/** Says what the colours of a scale stand for, and the grey of strips where they have it. */
export function fillLegend(legend, scale, values, hasGrey) {
  const sample = make("span", { class: "ramp unwritten" });
  sample.style.background = UNWRITTEN;
  const grey = hasGrey ? make("span", { class: "quiet" }, sample, " grey: prompt and observations") : null;
  if (scale.kind === "none") fill(legend, "no finite value", grey);
  else if (scale.kind === "mask") fill(legend, make("span", { class: "ramp mask" }), "not 0", grey);
  else {
    const bar = make("span", { class: "ramp" });
    const ends = scale.kind === "both" ? [scale.center - scale.reach, scale.center + scale.reach] : [scale.center, scale.least < scale.center ? scale.center - scale.reach : scale.center + scale.reach];
    const steps = Array.from({ length: 9 }, (_, at) => scale.background(ends[0] + ((ends[1] - ends[0]) * at) / 8) || "transparent");
    bar.style.background = `linear-gradient(to right, ${steps.join(", ")})`;
    const odd = values.length - values.filter(Number.isFinite).length;
    const sayEnd = (end) => `${short(end)}${end > scale.center && scale.most > end ? " and above" : end < scale.center && scale.least < end ? " and below" : ""}`;
    const beyond = [
      scale.least < Math.min(...ends) ? `lowest ${short(scale.least)}` : null, scale.most > Math.max(...ends) ? `highest ${short(scale.most)}` : null,
      odd ? `${count(odd)} not finite` : null,
    ].filter(Boolean);
    fill(legend, make("span", { title: FULL }, sayEnd(ends[0])), bar, make("span", { title: FULL }, sayEnd(ends[1])),
      beyond.length ? make("span", { class: "quiet", title: FULL }, `· ${beyond.join(" · ")}`) : null, grey);
  }
}
