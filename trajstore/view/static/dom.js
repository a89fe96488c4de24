// Elements of the page. Text reaches it as text nodes only, with what cannot be read as escapes.

const HIDDEN = /[^\P{C}\n\t\u200d]|[\p{Zl}\p{Zp}]/gu;

/** Returns text with controls and direction marks as escapes: none moves, hides or forges anything. */
export function visible(text) {
  return String(text).replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code === 13) return "\\r";
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u{${code.toString(16)}}`;
  });
}

/**
 * Returns an element. Of `properties`, `class` and names with a dash or of ATTRIBUTES become attributes, functions
 * listeners ("click"); children are elements, texts, or null for none.
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  fill(element, ...children);
  return element;
}

/** Replaces what an element contains. */
export function fill(element, ...children) {
  const kept = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  element.replaceChildren(...kept.map((child) => (child instanceof Node ? child : visible(child))));
  return element;
}

/**
 * Makes elements within another one anew. Where one with `data-focus` had the keyboard's focus, the new one with the same
 * value has it then.
 */
export function keepingFocus(place, remake) {
  const held = place.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  remake();
  if (held !== undefined) place.querySelector(`[data-focus="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

/** Returns what the colours of lines stand for: of pairs of a name and a colour. */
export const keyOf = (pairs) => make("p", { class: "key" }, pairs.map(([name, color]) => {
  const sample = make("span", { class: "sample" });
  sample.style.background = color;
  return make("span", {}, sample, name);
}));

/** Scrolls what contains an element or a range, so that it is a share of the height below the top. */
export function toSight(target, share) {
  let pane = target.startContainer?.parentElement ?? target.parentElement;
  while (pane.parentElement && (pane.scrollHeight <= pane.clientHeight || !/auto|scroll/.test(getComputedStyle(pane).overflowY))) pane = pane.parentElement;
  pane.scrollTop += target.getBoundingClientRect().top - pane.getBoundingClientRect().top - pane.clientHeight * share;
}

const AT_ONCE = 500_000; // characters that a click shows
const WIDTH = 100; // characters that count as a line

const showMore = (title, click, kind = "more") => make("button", { type: "button", class: kind, click }, title);

/** Returns text of any length as an element: at first its first lines, and buttons that show all of it and fold it again. */
export function longText(text, properties = {}, most = 60) {
  const element = make("div", { dir: "auto", ...properties, class: `said ${properties.class ?? ""}` });
  const lines = text.split("\n", 1_000_000);
  const first = lines.slice(0, most).join("\n").slice(0, most * WIDTH);
  const isFolded = text.length - first.length > WIDTH && text.length > 1.3 * first.length;
  const all = lines.length > most ? `all ${lines.length.toLocaleString("en")} lines` : `all ${text.length.toLocaleString("en")} characters`;

  function fold(isAgain) {
    fill(element, first);
    const more = showMore(`Show ${all}`, () => unfold(0));
    element.append(more);
    if (!isAgain) return;
    more.focus({ preventScroll: true });
    element.scrollIntoView({ block: "nearest" });
  }

  /** Shows more from a character on. */
  function unfold(from) {
    const isHeld = element.contains(document.activeElement);
    for (const button of [...element.querySelectorAll("button")]) button.remove();
    if (from === 0) element.replaceChildren();
    const end = from + AT_ONCE;
    element.append(visible(text.slice(from, end)));
    if (end < text.length) element.append(showMore(`Show more (${(text.length - end).toLocaleString("en")} characters left)`, () => unfold(end)));
    if (isFolded) element.append(showMore("Show less", () => fold(true), "less"));
    if (isHeld) element.querySelector("button")?.focus({ preventScroll: true });
  }

  if (isFolded) fold(false);
  else unfold(0);
  return element;
}
