// Tokens, coloured by a column. Rows are laid out once; only those in sight are elements, so that 200,000 tokens scroll.

import { UNWRITTEN, fillLegend, nameOf, scaleOf } from "./colors.js";
import { fill, make, visible } from "./dom.js";
import { count, exact } from "./numbers.js";

const ROW = 24; // height of a row, as in style.css
const LONGEST = 160; // characters of one token that are shown in the text
const PARTS = { prompt: "prompt", model: "written by the model", observation: "observation", tokens: "token" };
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\u{1f000}-\u{1faff}\u{20000}-\u{3fffd}]/u;
export const PREFERRED = ["notes.advantages", "metadata.advantages", "metadata.advantage", "old_log_probs", "rollout_log_probs", "entropys", "loss_mask", "response_mask"];

/** Returns how many columns of a terminal a text takes. */
function widthOf(text) {
  let width = 0;
  for (const character of text) width += WIDE.test(character) ? 2 : 1;
  return width;
}

/** Returns the text of each token; a character of several tokens stands at the first, nothing at the others. */
function textsOf(told) {
  const ids = told.arrays.find((array) => array.name === "input_ids")?.values;
  if (!ids) return Array.from({ length: told.tokens }, (_, at) => String(at));
  if (!told.texts) return Array.from(ids, (id) => String(id));
  const words = new Map(told.texts.ids.map((id, at) => [id, told.texts.words[at]]));
  const texts = Array.from(ids, (id) => words.get(Number(id)));
  for (const [at, size, text] of told.texts.joined) {
    texts[at] = text;
    for (let more = 1; more < size; more += 1) texts[at + more] = "";
  }
  return texts;
}

/** Returns the columns, and what they are compared in: log-probs of trainer and engine give a ratio. */
export function columnsOf(told) {
  const columns = told.arrays.map((array) => ({ ...array, length: array.values.length }));
  const [old, sampled] = ["old_log_probs", "rollout_log_probs"].map((name) => columns.find((one) => one.name === name));
  if (old && sampled && old.first === sampled.first && old.length === sampled.length) {
    const values = Float64Array.from(old.values, (value, at) => Math.exp(value - sampled.values[at]));
    columns.push({ name: "ratio", type: "f8", first: old.first, length: values.length, values, exact: null });
  }
  return columns;
}

/** Returns the value of a token, undefined where it has none. */
const valueAt = (one, at) => (at >= one.first && at < one.first + one.length ? one.values[at - one.first] : undefined);

/** Returns the name of the part that has a token; parts are [name, first token, tokens], in their order. */
function partAt(parts, at) {
  let part = 0;
  for (let low = 0, high = parts.length - 1; low <= high;) {
    const middle = (low + high) >> 1;
    if (parts[middle][1] <= at) [part, low] = [middle, middle + 1];
    else high = middle - 1;
  }
  return parts[part]?.[0] ?? "tokens";
}

const isUnwritten = (part) => part === "prompt" || part === "observation";

/** Whether a token has a colour: log-probs and entropies of tokens that the model did not write have none. */
const isColoured = ({ name }, parts, at) => !(POLICY.includes(name) && isUnwritten(partAt(parts, at)));

const POLICY = ["old_log_probs", "rollout_log_probs", "entropys", "ratio"]; // what they say of tokens of others is no choice of the model

/** Returns the values by which a column is coloured: those of tokens that the model wrote, if it has any. */
export function colouredValues({ first, values }, { parts }) {
  const own = parts.filter(([name]) => name === "model").map(([, start, tokens]) => Array.from(values.slice(Math.max(0, start - first), Math.max(0, start + tokens - first))));
  return own.some((some) => some.some(Number.isFinite)) ? own.flat() : Array.from(values);
}

/** Whether a rollout has tokens that the model did not write. */
export const hasUnwritten = ({ parts }) => parts.some(([name]) => isUnwritten(name));

const NEEDLE = 60; // characters of a message by which its tokens are found

/** Returns the beginning of a message's text. */
function beginningOf({ content }) {
  const parts = Array.isArray(content) ? content : [content];
  const text = parts.map((part) => (typeof part === "string" ? part : part?.text)).find((one) => typeof one === "string");
  return (text ?? "").trim().slice(0, NEEDLE).trimEnd();
}

/**
 * Returns the first token of each message, null where it is not known. Texts are found in order, what the model said in its own
 * parts or in the prompt; without texts, each assistant message needs a part of its own.
 */
export function placesOf(told) {
  const models = told.parts.filter(([name]) => name === "model").map(([, first]) => first);
  const isModels = told.messages.map((message) => message?.role === "assistant");
  if (!told.texts) {
    const isPlain = isModels.filter(Boolean).length === models.length;
    return isModels.map((isModel) => (isModel && isPlain ? models.shift() : null));
  }
  const texts = textsOf(told);
  const ends = [];
  texts.reduce((end, text, at) => (ends[at] = end + text.length), 0);
  const all = texts.join("");
  let from = 0; // character behind the beginning of the message before
  const tokenAt = (place) => {
    let low = 0, high = ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > place) high = middle;
      else low = middle + 1;
    }
    return low;
  };
  return told.messages.map((message, number) => {
    const needle = beginningOf(message ?? {});
    let token = null;
    if (needle === "") token = (isModels[number] ? models.find((first) => (ends[first - 1] ?? 0) >= from) : null) ?? null; // it only calls
    else for (let place = all.indexOf(needle, from); place >= 0 && token === null; place = all.indexOf(needle, place + 1)) {
      const found = tokenAt(place);
      if (partAt(told.parts, found) !== (isModels[number] ? "observation" : "model")) token = found;
    }
    if (token !== null) from = ends[token];
    return token;
  });
}

/**
 * Draws a whole rollout as a strip: each column of pixels has the colour of the farthest value of its tokens, and is
 * grey where the model wrote none of them.
 */
export function drawStrip(canvas, column, scale, { tokens, parts }) {
  const width = (canvas.width = Math.max(1, canvas.clientWidth));
  const pen = canvas.getContext("2d");
  const center = scale.center ?? 0;
  for (let x = 0; x < width; x += 1) {
    const from = Math.floor((x * tokens) / width);
    const to = Math.max(from + 1, Math.floor(((x + 1) * tokens) / width));
    let most = 0, value = 0, isGrey = true;
    for (let at = from; at < to; at += Math.max(1, (to - from) >> 6)) {
      isGrey = isGrey && isUnwritten(partAt(parts, at));
      const here = isColoured(column, parts, at) ? valueAt(column, at) : undefined;
      if (here === undefined || !Number.isFinite(here) || Math.abs(here - center) < most) continue;
      [most, value] = [Math.abs(here - center), here];
    }
    pen.fillStyle = (most && scale.background(value)) || (isGrey ? UNWRITTEN : "transparent");
    pen.fillRect(x, 0, 1, canvas.height);
  }
}

/** Shows the tokens of a rollout; `calls` marks their call in the tree of its session, null if there is none. */
export function showTokens(place, told, { parameters, keep, calls = null }) {
  const texts = textsOf(told);
  const isText = told.texts !== null;
  const columns = columnsOf(told);
  const choices = columns.filter((column) => column.name !== "input_ids");
  const wanted = parameters.get("color");
  let column = choices.find((one) => one.name === wanted) ?? PREFERRED.map((name) => choices.find((one) => one.name === name)).find(Boolean) ?? choices[0];
  let scale = null;
  let selected = Math.min(Number(parameters.get("token") ?? -1), told.tokens - 1);
  let rows = []; // [first token, one past the last] of each row, as pairs in one array
  let elements = new Map(); // row: element

  const select = make("select", { id: "color", change: () => {
    column = choices.find((one) => one.name === select.value);
    keep({ color: column.name });
    recolor();
  } }, choices.map((one) => make("option", { value: one.name, selected: one === column }, nameOf(one.name))));
  const legend = make("div", { class: "legend" });
  const scroller = make("div", {
    class: "scroller", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys move from one to the next", "aria-describedby": "token",
    scroll: draw, keydown: pressed,
    click: (event) => event.target.dataset.at !== undefined && choose(Number(event.target.dataset.at)),
    pointerover: (event) => event.target.dataset.at !== undefined && tell(Number(event.target.dataset.at)),
    pointerleave: () => tell(selected),
  });
  const canvas = make("div", { class: "canvas" });
  scroller.append(canvas);
  const panel = make("div", { class: "panel", id: "token", "aria-live": "polite" });
  const map = make("canvas", { class: "map", "aria-hidden": "true", height: 14, click: (event) => {
    choose(Math.floor((event.offsetX / map.clientWidth) * told.tokens), true);
  } });
  fill(place, make("div", { class: "bar" }, make("label", { for: "color" }, "Colour"), select, legend), map, panel, scroller);

  const exactAt = (one, at) => (one.name === "ratio" ? String(Number(valueAt(one, at).toPrecision(5))) : one.exact ? one.exact(at - one.first) : exact(valueAt(one, at), one.type));
  const partOf = (at) => partAt(told.parts, at);

  const callOf = (at) => told.session?.calls.find(({ start, stop }) => start <= at && at < stop);

  function shownText(at) {
    const text = visible(texts[at]).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
    const cut = text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text;
    return isText ? cut : `${cut} `;
  }

  /** Lays the tokens out in rows of the present width. */
  function lay() {
    const probe = make("span", { class: "probe" }, "0".repeat(100));
    canvas.append(probe);
    const columnsOfRow = Math.max(8, Math.floor(((canvas.clientWidth - 4) * 100) / probe.getBoundingClientRect().width));
    probe.remove();
    const ends = [];
    let first = 0, width = 0;
    for (let at = 0; at < told.tokens; at += 1) {
      const size = widthOf(shownText(at));
      if (width + size > columnsOfRow && at > first) {
        ends.push(first, at);
        [first, width] = [at, 0];
      }
      width += size;
      if (isText && texts[at].endsWith("\n")) {
        ends.push(first, at + 1);
        [first, width] = [at + 1, 0];
      }
    }
    if (first < told.tokens) ends.push(first, told.tokens);
    rows = Uint32Array.from(ends);
    canvas.style.height = `${(rows.length / 2) * ROW}px`;
    elements.forEach((element) => element.remove());
    elements = new Map();
    draw();
  }

  function rowOf(at) {
    let low = 0, high = rows.length / 2 - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (rows[2 * middle] <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function draw() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 8);
    const last = Math.min(rows.length / 2, Math.ceil((scroller.scrollTop + scroller.clientHeight) / ROW) + 8);
    for (const [number, element] of elements) {
      if (number < first || number >= last) {
        element.remove();
        elements.delete(number);
      }
    }
    const fresh = [];
    for (let number = first; number < last; number += 1) {
      if (elements.has(number)) continue;
      const element = make("div", { class: "line", dir: "ltr" });
      for (let at = rows[2 * number]; at < rows[2 * number + 1]; at += 1) element.append(tokenOf(at));
      element.style.transform = `translateY(${number * ROW}px)`;
      elements.set(number, element);
      fresh.push(element);
    }
    canvas.append(...fresh);
  }

  function tokenOf(at) {
    const element = document.createElement("bdi");
    element.textContent = shownText(at);
    element.dataset.at = at;
    element.className = `token ${partOf(at)}`;
    if (at === selected) element.classList.add("selected");
    dye(element, at);
    return element;
  }

  function dye(element, at) {
    const value = column ? valueAt(column, at) : undefined;
    element.classList.toggle("odd", value !== undefined && !Number.isFinite(value));
    const background = value === undefined || !Number.isFinite(value) || !isColoured(column, told.parts, at) ? "" : scale.background(value);
    element.style.backgroundColor = background;
    element.classList.toggle("dyed", background !== ""); // grey text has too little contrast on a colour
  }

  function recolor() {
    if (!column) return;
    const values = colouredValues(column, told);
    scale = scaleOf(column.name, values);
    for (const element of canvas.querySelectorAll(".token")) dye(element, Number(element.dataset.at));
    fillLegend(legend, scale, values, hasUnwritten(told));
    drawStrip(map, column, scale, told);
  }

  /** Says all that is known of a token. */
  function tell(at) {
    if (at < 0) {
      fill(panel, make("span", { class: "quiet" }, "Point at a token, or move to it with the arrow keys, to see its numbers."));
      return;
    }
    const values = columns.filter((one) => valueAt(one, at) !== undefined).map((one) => make("span", { class: one === column ? "pair chosen" : "pair" },
      make("span", { class: "quiet" }, nameOf(one.name)), " ", make("b", {}, exactAt(one, at))));
    const call = callOf(at);
    fill(panel, make("span", { class: "pair" }, make("b", {}, `token ${count(at)}`), " ", make("span", { class: "quiet" }, PARTS[partOf(at)])),
      call ? make("span", { class: "pair" }, make("span", { class: "quiet" }, "call"), " ", make("button", { type: "button", title: "Go to the call", click: () => calls?.focus(call.id) }, call.id)) : null,
      isText ? make("code", { class: "text" }, JSON.stringify(visible(texts[at].slice(0, 400)))) : null, values);
  }

  function choose(at, isFar = false) {
    const before = canvas.querySelector(".token.selected");
    before?.classList.remove("selected");
    selected = Math.max(0, Math.min(at, told.tokens - 1));
    keep({ token: String(selected) });
    const top = rowOf(selected) * ROW;
    if (isFar || top < scroller.scrollTop || top + ROW > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = Math.max(0, top - scroller.clientHeight / 3);
      brought = scroller.scrollTop;
    }
    draw();
    canvas.querySelector(`[data-at="${selected}"]`)?.classList.add("selected");
    tell(selected);
    calls?.choose(callOf(selected)?.id);
  }

  function pressed(event) {
    const row = rowOf(Math.max(0, selected));
    const down = (rows_) => rows[2 * Math.max(0, Math.min(row + rows_, rows.length / 2 - 1))];
    const moves = {
      ArrowRight: selected + 1, ArrowLeft: selected - 1, ArrowDown: down(1), ArrowUp: down(-1), PageDown: down(20), PageUp: down(-20),
      Home: 0, End: told.tokens - 1,
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    choose(moves[event.key]);
  }

  if (column) scale = scaleOf(column.name, colouredValues(column, told));
  let brought = null; // where the selected token was brought into sight
  let isLinked = selected >= 0; // a link names a token: it is brought into sight once there are rows
  const resized = new ResizeObserver(() => {
    if (!scroller.clientHeight) return; // another tab is shown
    const isLeft = scroller.scrollTop === brought; // it stays in sight until somebody scrolls
    lay();
    recolor();
    if (!(isLinked || isLeft)) return;
    isLinked = false;
    choose(selected, true);
  });
  resized.observe(scroller);
  tell(selected);
  return {
    leave: () => resized.disconnect(),
    go(at) {
      isLinked = !scroller.clientHeight; // else it is not shown yet
      choose(at, true);
    },
  };
}
