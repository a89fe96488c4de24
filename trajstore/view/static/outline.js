// An outline of a conversation: a line for each message, which leads there; results of tools belong to the line of their call.

import { argumentsOf } from "./conversation.js";
import { fill, make } from "./dom.js";
import { fieldsOf } from "./exchanges.js";
import { count } from "./numbers.js";

const LEAST = 6; // lines that are worth an outline
const BEGINNING = 80; // characters

export const NARROW = matchMedia("(max-width: 900px)");

/** Returns the texts of a content, in their order. */
const textsOf = (content) => (Array.isArray(content) ? content : [content]).flatMap((part) => {
  const text = typeof part === "string" ? part : part?.text ?? part?.[part?.type] ?? part?.content;
  return typeof text === "string" ? [text] : Array.isArray(text) ? textsOf(text) : [];
});

const lengthOf = (content) => textsOf(content).reduce((sum, text) => sum + text.length, 0);

/** Returns a length in few characters: 870, 1.2k, 35k, 3.0M. */
function brief(length) {
  const [size, unit] = length < 1000 ? [length, ""] : length < 999_500 ? [length / 1000, "k"] : [length / 1_000_000, "M"];
  return `${unit && size < 9.95 ? size.toFixed(1) : size.toFixed(0)}${unit}`;
}

/** Returns { number, role, tools, text, length, failed, last } of a message: `last` is the number of the last result of its calls. */
function lineOf(number, messages, { calls, results }) {
  const told = fieldsOf(messages[number]);
  const own = calls[number];
  const all = own.flatMap((call) => call.results);
  const content = told.content ?? told.output;
  const [first] = own;
  const given = first && Object.values(fieldsOf(argumentsOf(first.given).value ?? {})).find((value) => typeof value === "string");
  const text = textsOf(content).find((one) => one.trim()) ?? (own.length ? given ?? "" : told.reasoning_content ?? told.reasoning ?? "");
  return {
    number, role: String(told.role ?? told.type ?? "no role"), tools: own.map(({ name }) => String(name ?? "a tool")), text: String(text).trim().slice(0, BEGINNING),
    length: lengthOf(content) + own.reduce((sum, { given: one }) => sum + (typeof one === "string" ? one : JSON.stringify(one) ?? "").length, 0)
      + all.reduce((sum, { message, part }) => sum + (message === number ? 0 : lengthOf(part === null ? fieldsOf(messages[message]).content : messages[message].content[part].content)), 0),
    failed: [...all, ...results[number]].some(({ failure }) => failure),
    odd: own.some((call) => !call.results.length) || results[number].some(({ call }) => call === null),
  };
}

/**
 * Shows the outline of the messages of these numbers. `elementOf` returns the element of a number, null while it is not there; `go` brings a message into sight.
 *
 * Returns { element, leave }; the element is null where there are few messages.
 */
export function showOutline(messages, exchanges, numbers, { elementOf, go }) {
  if (numbers.length < LEAST) return { element: null, leave() {} };
  let chosen = 0; // place among the numbers
  const summary = make("summary", {});
  const items = numbers.map((number, at) => {
    const { role, tools, text, length, failed, odd } = lineOf(number, messages, exchanges);
    const name = tools.length ? [...new Set(tools)].join(", ") : role;
    return make("button", {
      type: "button", class: `turn ${["system", "user", "assistant", "tool"].includes(role) ? role : "others"}`, tabindex: -1, click: () => {
        if (NARROW.matches) element.open = false;
        go(number);
        mark(at);
      },
    }, make("span", { class: "number", "aria-hidden": "true" }, number), make("span", { class: "name" }, name), make("span", { class: "unseen" }, `, ${role}, message ${number}, `),
    failed ? make("span", { class: "failed" }, "error") : odd ? make("span", { class: "failed", title: "A call without a result, or a result without a call" }, "open") : null,
    make("span", { class: "length", title: `${count(length)} characters` }, brief(length)), make("bdi", { class: "begins" }, text));
  });
  const list = make("nav", { class: "turns", "aria-label": "Outline of the messages", keydown: (event) => {
    const to = { ArrowDown: chosenItem() + 1, ArrowUp: chosenItem() - 1, Home: 0, End: items.length - 1 }[event.key];
    if (to === undefined || !items[to]) return;
    event.preventDefault();
    items[to].focus();
  } }, items);
  const chosenItem = () => items.indexOf(document.activeElement);
  const element = make("details", { class: "outline", open: !NARROW.matches }, summary, list);
  const sized = () => (element.open = !NARROW.matches);
  NARROW.addEventListener("change", sized);

  /** Marks the message that is in view. */
  function mark(at) {
    items[chosen].removeAttribute("aria-current");
    items[chosen].tabIndex = -1;
    chosen = at;
    items[at].setAttribute("aria-current", "true");
    items[at].tabIndex = 0;
    fill(summary, `Message ${count(numbers[at])} of ${count(messages.length)}`, make("span", { class: "quiet" }, ` ${items[at].querySelector(".name").textContent}`));
    const pane = NARROW.matches ? list : element;
    const [box, own] = [pane.getBoundingClientRect(), items[at].getBoundingClientRect()];
    if (own.top < box.top || own.bottom > box.bottom) pane.scrollTop += own.top - box.top - box.height / 3;
  }

  let waiting = false;
  function scrolled(event) {
    if (waiting || event.target === list || event.target === element || !event.target.contains?.(element.parentElement) && !element.parentElement.contains(event.target)) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      const limit = Math.max(0, element.nextElementSibling.getBoundingClientRect().top) + 90;
      let at = 0;
      for (let low = 0, high = numbers.length - 1; low <= high;) {
        const middle = (low + high) >> 1;
        const there = elementOf(numbers[middle]);
        if (there && there.getBoundingClientRect().top <= limit) [at, low] = [middle, middle + 1];
        else high = middle - 1;
      }
      if (at !== chosen) mark(at);
    });
  }
  document.addEventListener("scroll", scrolled, { capture: true, passive: true });
  mark(0);
  return { element, leave: () => {
    document.removeEventListener("scroll", scrolled, { capture: true });
    NARROW.removeEventListener("change", sized);
  } };
}
