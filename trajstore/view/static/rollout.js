// A rollout: an outline, its conversation, and beside it what a tab shows: tokens, tools, scores, metadata.

import { showConversation } from "./conversation.js";
import { exchangesOf } from "./exchanges.js";
import { showFinding } from "./find.js";
import { fill, longText, make, toSight } from "./dom.js";
import { count, several } from "./numbers.js";
import { NARROW, showOutline } from "./outline.js";
import { showSession } from "./session.js";
import { placesOf, showTokens } from "./tokens.js";
import { roundedOf, valueOf } from "./values.js";

/** Returns a link to a token of a rollout, null if there is none; `properties` are those of the link. */
export const tokenLink = (token, properties) => (typeof token === "number" ? make("a", { class: "to-token", title: "Show its tokens", ...properties }, `token ${count(token)}`) : null);

const isKnown = (value) => Boolean(value && Object.values(value).some((one) => one !== null && one !== "" && !(typeof one === "object" && Object.keys(one).length === 0)));

/** Returns the tools that a rollout names, and its other metadata. */
function toolsIn(metadata) {
  const { tools, ...others } = metadata ?? {};
  return Array.isArray(tools) && tools.length ? { tools, others } : { tools: [], others: metadata ?? {} };
}

const digits = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

/** Returns the function that says which model made a message, with time and cost of the call, by `metadata.calls`; null where it is not known. */
function notesOf(calls) {
  const notes = new Map();
  for (const call of Array.isArray(calls) ? calls : []) {
    const { message, model, seconds, cost, retries, usage } = Object.fromEntries(Object.entries(call ?? {}).map(([name, value]) => [name, roundedOf(value)]));
    const of = (value, text) => (typeof value === "number" && text(value));
    const text = [typeof model === "string" && model, of(seconds, (value) => `${digits(value)} s`), of(cost, (value) => `$${digits(value)}`),
      of(roundedOf(usage?.total_tokens), (value) => several(value, "token")), retries > 0 && several(retries, "retry", "retries")].filter(Boolean).join(" · ");
    if (text) notes.set(message, [notes.get(message), text].filter(Boolean).join("; "));
  }
  return (number) => notes.get(number) ?? null;
}

/** Returns a tool as an element: name, description, parameters. */
function toolOf(tool) {
  const { name, description, parameters, input_schema: otherwise, inputSchema: otherwiseAgain, ...more } = { ...tool, ...(tool?.function ?? {}) };
  const { type: _, function: __, ...others } = more;
  const schema = parameters ?? otherwise ?? otherwiseAgain ?? {};
  const required = new Set(Array.isArray(schema.required) ? schema.required : []);
  const { properties, required: ___, type: ____, ...rest } = schema;
  return make("article", { class: "tool-of" }, make("h3", {}, make("code", {}, typeof name === "string" ? name : "a tool without a name")),
    typeof description === "string" ? longText(description, {}, 8) : null,
    properties && typeof properties === "object" ? make("dl", { class: "values" }, Object.entries(properties).map(([key, one]) => {
      const { type, description: meaning, ...details } = one ?? {};
      return make("div", {}, make("dt", {}, make("code", {}, key), " ", [typeof type === "string" ? type : JSON.stringify(type), required.has(key) ? "required" : null].filter(Boolean).join(", ")),
        make("dd", {}, typeof meaning === "string" ? longText(meaning, {}, 8) : null, Object.keys(details).length ? valueOf(details) : null));
    })) : null, isKnown(rest) ? valueOf(rest) : null, isKnown(others) ? valueOf(others) : null);
}

/**
 * Shows a rollout. `hrefOf` returns the address of one of its tokens; `calls`, if the tree of its session is shown already,
 * marks a call there (see showSession). `late` is a section that is shown once it is not hidden.
 */
export function showRollout(place, told, { parameters, keep, signal, id, hrefOf = (token) => `#/trajectory/${id}?token=${token}`, calls = null, late = null }) {
  const part = (name, label) => make("section", { class: name, "aria-label": label });
  const conversation = part("conversation", "Conversation"), tokens = part("tokens", "Tokens");
  const { tools } = toolsIn(told.metadata);
  const reward = make("div", {}), metadata = part("metadata", "Metadata");
  const sides = new Map([["tokens", ["Tokens", told.tokens === null ? null : tokens]],
    ["tools", [`Tools ${count(tools.length)}`, tools.length ? fill(part("tools", "Tools"), tools.map(toolOf)) : null]],
    ["scores", ["Scores", fill(part("scores", "Scores"), reward, late)]], ["metadata", ["Metadata", metadata]]]);
  for (const [name, [, element]] of [...sides]) if (!element) sides.delete(name);
  const side = make("div", { class: "side" }, [...sides].map(([, [, element]]) => element));
  const both = make("div", { class: "both" }, conversation, side);

  const tabs = make("div", { class: "tabs", role: "group", "aria-label": "What is shown" }, [["conversation", ["Conversation"]], ...sides].map(([name, [title]]) => make("button", {
    type: "button", "data-show": name, click: () => {
      choose(name);
      keep({ show: name });
    },
  }, title)));
  const tab = (name) => tabs.querySelector(`[data-show="${name}"]`);
  function choose(name) {
    both.dataset.show = name;
    for (const button of tabs.children) button.setAttribute("aria-pressed", button.dataset.show === name ? "true" : "false");
    for (const [one, [, element]] of sides) element.classList.toggle("chosen", one === name);
    window.dispatchEvent(new Event("resize"));
  }

  /** Shows reward and metadata; again after a correction. */
  function tell({ reward: score, metadata: all }) {
    const { others } = toolsIn(all);
    const known = Object.entries({ ...score, recorded: all?.["trajstore.recorded"] }).filter(([, value]) => isKnown([value]));
    fill(reward, known.length ? [make("h2", {}, "Reward"), valueOf(Object.fromEntries(known))] : null);
    fill(metadata, Object.keys(others).length ? valueOf(others) : null);
    showTabs();
  }
  function showTabs() {
    tab("scores").hidden = !reward.childElementCount && (late?.hidden ?? true);
    tab("metadata").hidden = !metadata.childElementCount;
    tabs.hidden = [...tabs.children].every((one) => one.hidden || one.dataset.show === "conversation");
  }
  const watching = new MutationObserver(showTabs);
  if (late) watching.observe(late, { attributeFilter: ["hidden"] });
  tell(told);

  const session = told.session && !calls ? make("section", { class: "of-session", "aria-label": "Session" }) : null;
  fill(place, session, tabs, both);
  const hasMessages = told.messages.length > 0 || told.query;
  const hasToken = parameters.get("token") !== null || !hasMessages;
  const usual = sides.has("tokens") && (hasToken || !NARROW.matches) ? "tokens" : "conversation";
  choose(sides.has(parameters.get("show")) || parameters.get("show") === "conversation" ? parameters.get("show") : usual);

  if (told.query && told.messages.length === 0) conversation.append(make("h2", {}, "Query"), longText(told.query));
  let leaveFinding = () => {}, outline = { leave() {} };
  let view = null; // of the tokens
  const places = told.tokens === null ? [] : placesOf(told);
  const linkTo = (token) => ({ href: hrefOf(token), title: "Show its tokens", click: (event) => {
    event.preventDefault();
    if (!view) return;
    choose("tokens");
    view.go(token);
    keep({ show: "tokens" });
    tokens.scrollIntoView({ block: "nearest" });
  } });
  const linkOf = (number) => tokenLink(places[number], linkTo(places[number]));
  if (session) calls = showSession(session, told.session, { row: id, linkTo, signal });
  if (told.messages.length) {
    const messages = make("div", {});
    const exchanges = exchangesOf(told.messages);
    const partsOf = (number) => [...messages.querySelectorAll(`[data-number="${number}"]`)];
    /** Returns the elements of a message, once it is there. */
    const messageAt = (number) => {
      while (!partsOf(number).length) messages.querySelector(":scope > .more").click();
      return partsOf(number);
    };
    leaveFinding = showFinding(conversation, messageAt, told.messages, { parameters, keep });
    conversation.append(messages);
    const numbers = showConversation(messages, told.messages, exchanges, { linkOf, noteOf: notesOf(told.metadata?.calls) });
    outline = showOutline(told.messages, exchanges, numbers, { elementOf: (number) => partsOf(number)[0] ?? null, go: (number) => {
      choose(NARROW.matches ? "conversation" : both.dataset.show);
      toSight(messageAt(number)[0], 0.08);
    } });
    if (outline.element) conversation.before(outline.element);
  } else conversation.append(make("p", { class: "nothing" }, "No messages were recorded."));
  for (const text of told.left_out) (told.tokens === null ? conversation : tokens).append(make("p", { class: "refused" }, text));
  const leave = () => {
    view?.leave();
    leaveFinding();
    outline.leave();
    watching.disconnect();
  };
  if (told.tokens === null) return { leave, tell };
  view = showTokens(tokens, told, { parameters, keep, calls });
  if (!told.texts) tokens.append(make("p", { class: "note" }, "Tokens are shown as ids: no tokenizer is known. Start with --tokenizer PATH to see text."));
  return { leave, tell };
}
