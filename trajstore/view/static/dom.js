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

const MOST_SHOWN = 20000;

/** Returns text of any length as an element: the beginning, and a button for more of it. */
export function longText(text, properties = {}) {
  const element = make("div", { dir: "auto", ...properties, class: `said ${properties.class ?? ""}` });
  let shown = 0;
  const more = make("button", { type: "button", class: "more", click: () => show() });
  function show() {
    const held = document.activeElement === more;
    more.remove();
    const next = text.slice(shown, shown + MOST_SHOWN);
    element.append(document.createTextNode(visible(next)));
    shown += next.length;
    if (shown < text.length) {
      fill(more, `Show more (${(text.length - shown).toLocaleString("en")} characters left)`);
      element.append(more);
      if (held) more.focus({ preventScroll: true });
    }
  }
  show();
  return element;
}
