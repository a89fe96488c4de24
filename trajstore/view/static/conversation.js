// Messages as a conversation. What a model wrote is text, whatever it looks like.

import { exactly } from "./api.js";
import { longText, make } from "./dom.js";
import { fieldsOf } from "./exchanges.js";
import { count, several } from "./numbers.js";
import { asText, valueOf } from "./values.js";

const LINES = { system: 12, tool: 20 }; // of a text that are shown at first; 60 of others

const PICTURE = /^data:image\/(?:png|jpeg|webp|gif);base64,/;
const WIDEST = 1024; // pixels of a picture
export const isPicture = (text) => PICTURE.test(text);

/** Returns the data of a picture that a part of a message has, as OpenAI's and Anthropic's forms have it; null for none. */
function pictureIn(part) {
  const { image_url: url, image, source } = part ?? {};
  const found = [url?.url, url, image, source?.data && `data:${source.media_type};base64,${source.data}`];
  return found.find((one) => typeof one === "string" && isPicture(one)) ?? null;
}

/** Paints pictures when they come into sight: a conversation may have hundreds. */
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) {
    seen.unobserve(target);
    target.paint();
  }
});

function picture(data) {
  const place = make("div", { class: "picture" });
  place.paint = async () => {
    try {
      const bytes = Uint8Array.from(atob(data.slice(data.indexOf(",") + 1)), (character) => character.charCodeAt(0));
      const bitmap = await createImageBitmap(new Blob([bytes]));
      const scale = Math.min(1, WIDEST / bitmap.width);
      const canvas = make("canvas", { role: "img", "aria-label": `picture, ${bitmap.width} × ${bitmap.height}`,
        width: Math.ceil(bitmap.width * scale), height: Math.ceil(bitmap.height * scale) });
      canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
      bitmap.close();
      place.append(canvas);
    } catch (error) {
      place.append(make("p", { class: "refused" }, `This picture cannot be shown: ${error.message}`));
    }
  };
  seen.observe(place);
  return place;
}

const nothing = (text) => make("p", { class: "absent" }, text);

function folded(title, text, kind = null, content = () => longText(text)) {
  const place = make("div", { class: "folded" });
  const element = make("details", { class: kind }, make("summary", {}, title), place);
  element.addEventListener("toggle", () => element.open && !place.firstChild && place.append(content()));
  return element;
}

const sized = (kind, text) => `${kind}, ${text.includes("\n") ? several(text.split("\n").length, "line") : several(text.length, "character")}`;

const TEXTS = ["text", "input_text", "output_text"];

/** Returns a part of a message's content as elements. */
function partOf(part, most) {
  if (typeof part === "string") return longText(part, {}, most);
  const { type = "part", ...more } = fieldsOf(part);
  if (TEXTS.includes(type) && typeof part.text === "string") return [longText(part.text, {}, most), furtherOf(known({ ...more, text: null }))];
  const data = pictureIn(part);
  if (data) return [picture(data), folded(`${type}, ${several(asText(part).length, "character")}`, asText(part), "painted")];
  const { [type]: own, ...others } = more; // as in { type: "thinking", thinking: "..." }
  if (typeof own === "string" && typeof type === "string") return folded(sized(type, own), own, "aside", () => (Object.keys(others).length ? valueOf(more) : longText(own)));
  return folded(sized(String(type), asText(part)), asText(part));
}

/** Returns the arguments of a call as JSON, if they are; whether nothing is lost so; and as they were written. */
export function argumentsOf(given) {
  if (typeof given !== "string") return { value: given, written: null };
  try {
    const value = exactly(given);
    const isWhole = JSON.stringify(value).replaceAll(/\s/g, "") === given.replaceAll(/\s/g, "");
    return { value, written: isWhole ? null : given };
  } catch {
    return { value: given, written: null };
  }
}

/** Returns the fields that have a value. */
const known = (fields) => Object.entries(fields).filter(([, value]) => value !== null && !(Array.isArray(value) && value.length === 0));

const furtherOf = (pairs) => (pairs.length ? folded(pairs.map(([name]) => name).join(", "), "", null, () => valueOf(Object.fromEntries(pairs))) : null);

/** Returns a call of a tool: its name and its arguments. */
function callOf({ id, name, given, more }) {
  const { value, written } = argumentsOf(given);
  const others = known(more);
  const isEmpty = value === null || (typeof value === "object" && Object.keys(value).length === 0);
  return make("div", { class: "call" }, make("p", {}, make("span", { class: "quiet" }, "calls "), make("code", { class: "name", title: id === null ? null : `id ${asText(id)}` }, asText(name ?? "a tool")),
    isEmpty ? make("span", { class: "quiet" }, " without arguments") : null),
  isEmpty ? null : valueOf(value), written === null ? null : folded("arguments as they were written", written), furtherOf(others));
}

/** Returns a call and its results; those outside the shown messages are named. */
function exchangeOf(call, context) {
  const shown = call.results.filter(({ message }) => message < context.end);
  const [first] = call.results;
  return make("div", { class: "exchange" }, callOf(call), make("div", {}, shown.map((result) => resultOf(result, context)),
    shown.length ? null : nothing(first ? `Its result is message ${first.message}.` : `No result of this call${call.id === null ? "" : ` (id ${asText(call.id)})`} was recorded.`)));
}

const failureChip = ({ failure }) => (failure ? make("span", { class: "failed", title: failure }, "error") : null);

/** Returns a result beside its call: a message of its own, or a part of one. */
function resultOf(result, context) {
  const { message: number, part } = result;
  if (part === null) return messageOf(number, context, result);
  const content = context.messages[number].content[part].content;
  return make("article", { class: "message tool", "aria-label": `result in message ${number}`, "data-number": number },
    make("header", {}, make("span", { class: "role" }, "result"), failureChip(result), make("span", { class: "number" }, `message ${number}`)),
    contentOf(content, LINES.tool));
}

/** Returns a content's parts; `special` returns those that are calls or results, by their number. */
function contentOf(content, most, special = () => null) {
  if (content === "") return [nothing("Empty text.")];
  if ((content ?? null) === null) return [];
  if (!Array.isArray(content)) return [typeof content === "string" ? longText(content, {}, most) : longText(asText(content), { class: "code" }, most)];
  return content.length ? content.map((part, at) => special(at) ?? partOf(part, most)).flat() : [nothing("No parts.")];
}

const isIn = ({ call }, { first }) => call !== null && call.message >= first;

/** Whether all of a message is shown beside calls of tools. */
function isBeside(number, context) {
  const results = context.results[number];
  const { content, role, ...more } = fieldsOf(context.messages[number]);
  return results.length > 0 && results.every((result) => isIn(result, context))
    && (results[0].part === null || (results.length === content.length && Object.keys(more).length === 0));
}

/** Returns one message as an element; `beside` is the result that it is, where it stands beside its call. */
function messageOf(number, context, beside = null) {
  const told = fieldsOf(context.messages[number]);
  const { role = told.type ?? "no role", content, output, author, tool_calls: calls, function_call: _, name, tool_call_id: id, ...more } = told;
  const kind = ["system", "user", "assistant", "tool"].includes(role) ? role : context.results[number].some(({ part }) => part === null) ? "tool" : "others";
  const [whole] = context.results[number].filter(({ part }) => part === null);
  const most = LINES[kind] ?? 60;
  const exchanges = context.calls[number].map((call) => [call.part, exchangeOf(call, context)]);
  const parts = new Map([...exchanges.filter(([part]) => part !== null), ...context.results[number].filter(({ part }) => part !== null).map((result) => [result.part,
    isIn(result, context) ? nothing(`The result of ${asText(result.call.name ?? "a call")} is shown beside its call, in message ${result.call.message}.`) : [answerTo(result), resultOf(result, context)]])]);
  const isForm = (key) => (told.type?.startsWith?.("function_call") && ["arguments", "call_id", "type"].includes(key)) || (whole && key === "function");
  const left = known(more).filter(([key]) => !isForm(key));
  const texts = left.filter(([key, value]) => typeof value === "string" && (REASONING.includes(key) || value.includes("\n")));
  const others = left.filter(([key]) => !texts.some(([one]) => one === key) && !(key === "error" && whole));
  const isCalling = exchanges.length > 0 && content === ""; // as a model that only calls says
  const said = isCalling ? [] : contentOf(content ?? output, most, (at) => parts.get(at));
  const later = exchanges.filter(([part]) => part === null).map(([, element]) => element);
  return make("article", { class: `message ${kind}`, "aria-label": `message ${number}, ${asText(role)}`, "data-number": number },
    make("header", {}, make("span", { class: "role" }, beside ? "result" : asText(role)), name && !beside ? make("span", {}, asText(name)) : null,
      author ? make("span", { class: "author" }, asText(author)) : null, whole ? failureChip(whole) : null, make("span", { class: "quiet" }, context.noteOf(number)), context.linkOf(number), make("span", { class: "number" }, `message ${number}`)),
    whole && !beside ? answerTo(whole) : null, texts.map(([key, text]) => folded(sized(key, text), text, "aside")),
    whole && (told.error ?? null) !== null ? make("div", { class: "refused" }, valueOf(told.error)) : null,
    said.length || later.length || texts.length ? said : nothing("No content."), later,
    Array.isArray(calls) || (calls ?? null) === null ? null : folded(sized("tool_calls", asText(calls)), asText(calls)),
    furtherOf(others));
}

const REASONING = ["reasoning_content", "reasoning", "thinking"];

/** Says which call a result belongs to that does not stand beside it. */
function answerTo({ id, call }) {
  if (call) return nothing(`Result of ${asText(call.name ?? "a call")}, called in message ${call.message}.`);
  return make("p", { class: "absent unmatched" }, id === null ? "A result without a call: it has no id, and no call before it is without a result."
    : `A result without a call: no call before it has the id ${asText(id)}.`);
}

const AT_ONCE = 200; // messages, each with the results of its calls

/**
 * Fills an element with messages; those beyond the first 200 come when they are asked for. `exchanges` is that of `exchangesOf`, `linkOf`
 * returns the link to the tokens of a number of a message, `noteOf` what is known of its call, null for none. Messages `first` to `end` are shown.
 */
export function showConversation(place, messages, exchanges, { linkOf = () => null, noteOf = () => null, first = 0, end = messages.length } = {}) {
  const context = { ...exchanges, messages, linkOf, noteOf, first, end };
  const numbers = messages.map((_, number) => number).slice(first, end).filter((number) => !isBeside(number, context));
  (function show(from) {
    place.append(...numbers.slice(from, from + AT_ONCE).map((number) => messageOf(number, context)));
    const next = from + AT_ONCE;
    if (next >= numbers.length) return;
    const more = make("button", { type: "button", class: "more", click: () => {
      more.remove();
      show(next);
    } }, `Show more (${count(end - numbers[next])} messages left)`);
    place.append(more);
  }(0));
  return numbers;
}
