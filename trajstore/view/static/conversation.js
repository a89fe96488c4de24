// Messages as a conversation. What a model wrote is text, whatever it looks like.

import { longText, make } from "./dom.js";
import { count } from "./numbers.js";

const BEGINNING = 300; // characters of a call's arguments that are shown while it is folded
const FOLDED = 1500; // characters beyond which what a tool or the system says is folded

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

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

/** Returns the parts of a message's content: { kind, text, data }, data being that of a picture. */
function partsOf(content) {
  if (content === null || content === undefined) return [];
  if (!Array.isArray(content)) return [{ kind: "text", text: asText(content) }];
  return content.map((part) => {
    if (typeof part === "string") return { kind: "text", text: part };
    if (part?.type === "text" && typeof part.text === "string") return { kind: "text", text: part.text };
    return { kind: String(part?.type ?? "part"), text: asText(part), data: pictureIn(part) };
  });
}

function folded(title, text, kind = null) {
  const content = make("div", { class: "folded" });
  const element = make("details", { class: kind }, make("summary", {}, title), content);
  element.addEventListener("toggle", () => element.open && !content.firstChild && content.append(longText(text)));
  return element;
}

/** Returns how the arguments of a call begin; of a single one, its value alone. */
function beginningOf(given) {
  let value = given;
  try {
    if (typeof given === "string" && given.length < FOLDED) value = JSON.parse(given);
  } catch { /* no JSON: shown as it is */ }
  const values = value !== null && typeof value === "object" ? Object.values(value) : [];
  const said = values.length === 1 && typeof values[0] === "string" ? values[0] : asText(given).replaceAll(/\s+/g, " ");
  return said.slice(0, BEGINNING);
}

function callOf(call) {
  const told = call?.function ?? call ?? {};
  const given = told.arguments ?? told.input;
  return folded([`calls ${asText(told.name ?? "a tool")}`, (given ?? null) === null ? null : make("code", {}, beginningOf(given))], asText(given ?? told), "call");
}

/** Returns one message as an element; `more` is added to its header. */
export function messageOf(message, number, link = null) {
  const told = message !== null && typeof message === "object" && !Array.isArray(message) ? message : { content: message };
  const { role = "no role", content, author, tool_calls: calls, name, ...more } = told;
  const parts = partsOf(content);
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  const said = parts.flatMap(({ kind, text, data }) => {
    if (data) return [picture(data), folded(`${kind}, ${count(text.length)} characters`, text, "painted")];
    if (kind !== "text") return folded(`${kind}, ${count(text.length)} characters`, text);
    const isLong = text.length > FOLDED && (known === "system" || known === "tool");
    return isLong ? folded(`${text.slice(0, 120).split("\n")[0]} … ${count(text.length)} characters`, text) : longText(text);
  });
  return make("article", { class: `message ${known}`, "aria-label": `message ${number}, ${asText(role)}`, "data-number": number },
    make("header", {}, make("span", { class: "role" }, asText(role)), name ? make("span", {}, asText(name)) : null,
      author ? make("span", { class: "author" }, asText(author)) : null, link, make("span", { class: "number" }, `message ${number}`)),
    said, Array.isArray(calls) ? calls.map(callOf) : null,
    Object.keys(more).length ? folded(Object.keys(more).join(", "), asText(more)) : null);
}

const AT_ONCE = 200; // messages

/**
 * Fills an element with messages; those beyond the first 200 come when they are asked for. `linkOf` returns the link to the
 * tokens of a number of a message, null for none.
 */
export function showConversation(place, messages, linkOf, first = 0) {
  const some = messages.slice(first, first + AT_ONCE);
  place.append(...some.map((message, at) => messageOf(message, first + at, linkOf(first + at))));
  const next = first + some.length;
  if (next >= messages.length) return;
  const more = make("button", { type: "button", class: "more", click: () => {
    more.remove();
    showConversation(place, messages, linkOf, next);
  } }, `Show more (${count(messages.length - next)} messages left)`);
  place.append(more);
}
