// A phrase in the messages of a rollout, also in those that are folded or not yet there.

import { isPicture } from "./conversation.js";
import { fill, make, visible } from "./dom.js";
import { count } from "./numbers.js";

const MOST_MARKED = 1000; // places in one message that are marked
const LONGEST = 1000; // characters of a phrase

/** Returns all texts in a value of JSON as they are shown, names of fields too. */
function textsIn(value) {
  if (typeof value === "string") return isPicture(value) ? [] : [visible(value)];
  if (JSON.isRawJSON?.(value)) return [value.rawJSON];
  if (value === null || typeof value !== "object") return [String(value)];
  return Array.isArray(value) ? value.flatMap(textsIn) : Object.entries(value).flatMap(([name, one]) => [visible(name), ...textsIn(one)]);
}

/** Returns what finds a phrase as it was entered, small or capital letters alike, where it is shown. */
const finderOf = (phrase) => new RegExp(visible(phrase).replaceAll(/[.*+?^${}()|[\]\\/]/g, "\\$&"), "giu");

/** Returns ranges of an element's text nodes with the phrase, as far as they can be seen. */
function placesIn(element, finder) {
  const places = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    if (!walker.currentNode.parentElement.checkVisibility()) continue;
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

/**
 * Adds a field to a bar, by which one goes from message to message with a phrase; returns what ends it.
 * `list` is the element of the messages.
 */
export function showFinding(place, list, messages, { parameters, keep }) {
  const field = make("input", { type: "search", id: "find", spellcheck: "false", autocomplete: "off", placeholder: "find in messages",
    "aria-label": "Find in messages", value: parameters.get("find") ?? "" });
  const said = make("span", { class: "quiet", role: "status" });
  const step = (title, by) => make("button", { type: "button", "aria-label": title, click: () => go(by) }, by < 0 ? "↑" : "↓");
  const form = make("form", { class: "question", role: "search", "aria-label": "Find in messages", submit: (event) => {
    event.preventDefault();
    if (field.value === phrase && phrase) go(1);
    else start();
  } }, field, step("Previous message", -1), step("Next message", 1), said);
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
    const message = () => list.querySelector(`:scope > [data-number="${found[at]}"]`);
    while (!message()) list.querySelector(":scope > .more").click();
    for (const folded of message().querySelectorAll("details:not(.painted)")) {
      folded.open = true;
      folded.dispatchEvent(new Event("toggle")); // fills it now, not with the next frame
    }
    const finder = finderOf(phrase);
    for (let more; message().textContent.search(finder) < 0 && (more = message().querySelector(".more"));) more.click();
    message().normalize(); // a long text came in parts, and the phrase may begin in one and end in the next
    const places = placesIn(message(), finder);
    globalThis.CSS.highlights?.set("found", new Highlight(...places));
    const top = (places[0] ?? message()).getBoundingClientRect().top;
    let pane = list.parentElement;
    while (pane.scrollHeight <= pane.clientHeight && pane.parentElement) pane = pane.parentElement;
    pane.scrollTop += top - pane.getBoundingClientRect().top - pane.clientHeight / 3;
  }

  place.append(form);
  if (field.value) requestAnimationFrame(start); // once the messages are there
  return () => globalThis.CSS.highlights?.delete("found");
}
