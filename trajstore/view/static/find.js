// A phrase in the messages of a rollout, also in those that are folded or not yet there.

import { argumentsOf, isPicture } from "./conversation.js";
import { fill, make, toSight, visible } from "./dom.js";
import { count } from "./numbers.js";

const MOST_MARKED = 1000; // places in one message that are marked
const LONGEST = 1000; // characters of a phrase

/** Names in messages that say how they are built, and are not shown. */
const STRUCTURE = new Set(["role", "content", "tool_calls", "function", "arguments", "input", "type", "id", "name", "text", "tool_call_id", "tool_use_id", "call_id", "source", "data"]);

/** Returns all texts in a value of JSON as they are shown, names of other fields too. */
function textsIn(value) {
  if (typeof value === "string") return isPicture(value) ? [] : [visible(value)];
  if (JSON.isRawJSON?.(value)) return [value.rawJSON];
  if (value === null || typeof value !== "object") return [String(value)];
  if (Array.isArray(value)) return value.flatMap(textsIn);
  return Object.entries(value).flatMap(([name, one]) => [...(STRUCTURE.has(name) ? [] : [visible(name)]), ...(name === "type" ? [] : textsIn(one)),
    ...(name === "arguments" && typeof one === "string" ? textsIn(argumentsOf(one).value) : [])]);
}

/** Returns what finds a phrase as it was entered, small or capital letters alike, where it is shown. */
const finderOf = (phrase) => new RegExp(visible(phrase).replaceAll(/[.*+?^${}()|[\]\\/]/g, "\\$&"), "giu");

/** Returns ranges of a message's text nodes with the phrase, as far as they can be seen; not those of results beside its calls. */
function placesIn(element, finder) {
  const places = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { parentElement: parent } = walker.currentNode;
    if (!parent.checkVisibility() || parent.closest("[data-number]") !== element) continue;
    for (const { index, 0: { length } } of walker.currentNode.data.matchAll(finder)) {
      if (places.length === MOST_MARKED) return places;
      const range = new Range();
      range.setStart(walker.currentNode, index);
      range.setEnd(walker.currentNode, index + length);
      places.push(range);
    }
  }
  return places;
}

/** Returns elements of a message that are not of a result beside one of its calls. */
const own = (message, selector) => [...message.querySelectorAll(selector)].filter((one) => one.closest("[data-number]") === message);

/** Opens what is folded in a message, but for data of pictures. */
function unfold(message) {
  for (const folded of own(message, "details:not(.painted)")) {
    folded.open = true;
    folded.dispatchEvent(new Event("toggle")); // fills it now, not with the next frame
  }
  for (const more of own(message, ".more")) more.click();
}

/**
 * Adds a field to a bar, by which one goes from message to message with a phrase; returns what ends it.
 * `messageAt` returns the elements of a number of a message.
 */
export function showFinding(place, messageAt, messages, { parameters, keep }) {
  const field = make("input", { type: "search", id: "find", spellcheck: "false", autocomplete: "off", placeholder: "find in messages",
    "aria-label": "Find in messages", value: parameters.get("find") ?? "" });
  const said = make("span", { class: "quiet", role: "status" });
  const step = (title, by) => make("button", { type: "button", "aria-label": title, title, click: () => go(by) }, by < 0 ? "↑" : "↓");
  const form = make("form", { class: "question", role: "search", "aria-label": "Find in messages", submit: (event) => {
    event.preventDefault();
    if (field.value === phrase && phrase) go(1);
    else start();
  } }, field, step("Previous match", -1), step("Next match", 1), said);
  field.addEventListener("search", () => field.value === "" && start());
  let phrase = "";
  let found = []; // numbers of the messages that have it
  let at = -1;

  function start() {
    const isTooLong = field.value.length > LONGEST;
    phrase = isTooLong ? "" : field.value;
    keep({ find: phrase });
    const finder = finderOf(phrase);
    found = phrase ? messages.flatMap((message, number) => (textsIn(message).some((text) => text.search(finder) >= 0) ? [number] : [])) : [];
    at = -1;
    globalThis.CSS.highlights?.delete("found");
    if (found.length) go(1);
    else fill(said, phrase ? "in no message" : isTooLong ? `a phrase has at most ${count(LONGEST)} characters` : null);
  }

  function go(by) {
    if (!found.length) return;
    at = (at + by + found.length) % found.length;
    fill(said, `${count(at + 1)} of ${count(found.length)} ${found.length === 1 ? "message" : "messages"}`);
    const parts = messageAt(found[at]); // a message with results of several calls has a part beside each
    for (const part of parts) unfold(part);
    const finder = finderOf(phrase);
    for (const part of parts) for (let more; part.textContent.search(finder) < 0 && (more = own(part, ".more")[0]);) more.click();
    for (const part of parts) part.normalize(); // a long text came in parts, and the phrase may begin in one and end in the next
    const places = parts.flatMap((part) => placesIn(part, finder));
    globalThis.CSS.highlights?.set("found", new Highlight(...places));
    toSight(places[0] ?? parts[0], 1 / 3);
  }

  place.append(form);
  if (field.value) requestAnimationFrame(start); // once the messages are there
  return () => globalThis.CSS.highlights?.delete("found");
}
