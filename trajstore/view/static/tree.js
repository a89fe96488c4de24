// The calls of a session as a tree: a row for each, in order, with lines from a call to those that continue it.

import { fill, make } from "./dom.js";
import { count, several, short } from "./numbers.js";

const SVG = "http://www.w3.org/2000/svg";

/**
 * Returns the place of each call and gap: { rows, lanes }. A row is { call or gap, lane, from }, `from` being the row of
 * the call that it continues. The first call that continues another one stays in its
 * lane; a lane is free again after the last call in it.
 */
function laidOut(calls, gaps) {
  const rows = calls.map((call) => ({ call, from: null, lane: 0 }));
  const above = (number) => (row) => !row.call || row.call.number === null || row.call.number < number;
  for (const gap of gaps) {
    const at = gap.number === null ? rows.length : rows.filter(above(gap.number)).length;
    rows.splice(at, 0, { gap, from: null, lane: 0 });
  }
  const placeOf = new Map(rows.map((row, at) => [row.call, at]));
  const strands = []; // { first, last, rows }, a call and those that each continue the one before
  const strandOf = new Map(); // by the row of the last call in it
  rows.forEach((row, at) => {
    if (!row.call) return;
    if (row.call.parent !== null) row.from = placeOf.get(calls[row.call.parent]);
    let strand = strandOf.get(row.from);
    if (strand) strandOf.delete(row.from);
    else strands.push(strand = { first: row.from ?? at, last: at, rows: [] });
    strand.last = at;
    strand.rows.push(row);
    strandOf.set(at, strand);
  });
  const ends = []; // of each lane, the last row in use
  for (const strand of strands.toSorted((one, other) => one.first - other.first)) {
    let lane = ends.findIndex((end) => end < strand.first);
    if (lane < 0) lane = ends.push(0) - 1;
    ends[lane] = strand.last;
    for (const row of strand.rows) row.lane = lane;
  }
  return { rows, lanes: Math.max(1, ends.length) };
}

/** Returns the lines; a row is one unit high, a lane one wide. */
function linesOf({ rows, lanes }) {
  const drawn = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${lanes} ${rows.length}`, preserveAspectRatio: "none", "aria-hidden": "true" })) drawn.setAttribute(name, value);
  rows.forEach(({ call, from, lane }, at) => {
    if (!call || from === null) return;
    const begin = rows[from];
    const [x, y, to] = [begin.lane + 0.5, from + 0.5, lane + 0.5];
    const line = document.createElementNS(SVG, "path");
    line.setAttribute("d", x === to ? `M${x} ${y}V${at + 0.5}` : `M${x} ${y}C${x} ${y + 0.6} ${to} ${y + 0.4} ${to} ${y + 1}V${at + 0.5}`);
    if (call.isOwn) line.setAttribute("class", "own");
    drawn.append(line);
  });
  return drawn;
}

/** Says what a call did. */
function didOf(call, { calls, path }) {
  const base = call.base === null ? null : calls[call.base];
  const isAgain = base && call.shared >= call.start; // another sample of the same prompt
  const loss = call.row === null ? null : call.trained === null ? "mask unknown" : call.trained.length === 0 && call.stop > call.start ? "in no loss"
    : call.isOwn && call.trained.length && !call.trained.includes(path) ? `in the loss of path ${count(call.trained[0])}` : null;
  return [
    isAgain ? `prompt of ${base.id}` : `${count(call.added)} added`,
    base && !isAgain && call.parent === null ? `${count(call.shared)} shared with ${base.id}` : null,
    `${count(call.stop - call.start)} sampled`,
    call.log_prob !== null ? `log-prob ${short(call.log_prob)}, lowest ${short(call.least)}` : call.stop > call.start ? "no log-probs" : null,
    call.version === null ? "version unknown" : `version ${call.version}`,
    call.finish && call.finish !== "stop" ? call.finish : null,
    call.retried === null ? null : `retried${call.retried ? `: ${call.retried}` : ""}`,
    loss,
  ].filter(Boolean).join(" · ");
}

/**
 * Shows a tree (see view/session.py). `path` is the one that is shown beside it, undefined for none. `linkOf` returns properties of a link to a call, `endOf` the end of a path as an element.
 *
 * Returns { choose(id) }, which marks a call and brings it into sight.
 */
export function showTree(place, told, { path, linkOf, endOf }) {
  const { calls } = told;
  for (const call of calls) call.isOwn = false;
  for (let call = calls.find(({ end }) => end === (path ?? -1)); call; call = calls[call.parent]) call.isOwn = true;
  const layout = laidOut(calls, told.incomplete);
  const elements = new Map();
  const items = layout.rows.map(({ call, gap, lane }) => {
    const item = make("li", { class: gap ? "gap" : call.isOwn ? "own" : null }, make("span", { class: "dot" }), gap
      ? [make("span", { class: "name" }, gap.id), make("span", { class: "did" }, gap.reason ? `incomplete: ${gap.reason}` : "incomplete")]
      : [make("a", { class: "name", ...linkOf(call) }, call.id),
        make("span", { class: "did" }, call.parent === null ? null : make("span", { class: "unseen" }, `continues ${calls[call.parent].id}: `), didOf(call, { calls, path })),
        call.end === null ? null : endOf(call),
        make("span", { class: "heard" }, call.said.map(([role, text]) => [make("b", {}, role), ` ${text} `]).flat())]);
    item.style.setProperty("--lane", lane);
    if (call) elements.set(call.id, item);
    return item;
  });
  const list = make("ol", { "aria-label": "Calls of the session" }, items);
  const tree = make("div", { class: "tree" }, linesOf(layout), list);
  tree.style.setProperty("--lanes", layout.lanes);
  fill(place, tree);
  return {
    choose(id) {
      tree.querySelector("[aria-current]")?.removeAttribute("aria-current");
      const item = elements.get(id);
      if (!item) return;
      item.setAttribute("aria-current", "true");
      const [box, own] = [place.getBoundingClientRect(), item.getBoundingClientRect()];
      if (own.top < box.top || own.bottom > box.bottom) place.scrollTop += own.top - box.top - box.height / 3;
    },
    focus: (id) => elements.get(id)?.querySelector("a").focus(),
  };
}

/** Returns a summary of a tree. */
export const treeInWords = ({ calls, incomplete }) => [
  several(calls.length, "call"), several(calls.filter(({ end }) => end !== null).length, "path"), incomplete.length ? several(incomplete.length, "gap") : null,
].filter(Boolean).join(", ");
