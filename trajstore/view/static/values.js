// Values of JSON to read: names and values in rows, texts with their line breaks, numbers with all digits.

import { longText, make } from "./dom.js";

const SHORT = 100; // characters of a value on one line
const MOST = 50; // elements of a list that have a row each
const DEEPEST = 6;

export const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

const isPlain = (value) => value === null || typeof value !== "object" || Boolean(JSON.isRawJSON?.(value));

/** Returns a number as one of the browser's, also where `exactly` kept its digits; anything else as it is. */
export const roundedOf = (value) => (JSON.isRawJSON?.(value) ? Number(value.rawJSON) : value);

/** Whether a text would be taken for another value without quotes. */
const isDoubtful = (text) => text.trim() !== text || /^(null|true|false|-?[\d.]+(e[+-]?\d+)?|)$/i.test(text);

/** Returns a value as an element; `most` lines of a text are shown at first. */
export function valueOf(value, most = 12, depth = 0) {
  if (typeof value === "string" && (value.length > SHORT || value.includes("\n"))) return longText(value, {}, most);
  if (typeof value === "string") return make("span", { class: "value", dir: "auto" }, isDoubtful(value) ? JSON.stringify(value) : value);
  const text = JSON.stringify(value);
  const pairs = isPlain(value) ? [] : Object.entries(value);
  const isList = Array.isArray(value);
  if (!pairs.length || (isList && text.length <= SHORT && pairs.every(([, one]) => isPlain(one)))) return make("code", { class: "value" }, text);
  if (depth === DEEPEST || (isList && (pairs.length > MOST || pairs.every(([, one]) => typeof one === "number")))) return longText(pairs.every(([, one]) => isPlain(one)) ? text : asText(value), { class: "code" }, most);
  return make("dl", { class: "values" }, pairs.map(([name, one]) => make("div", {}, make("dt", {}, name), make("dd", {}, valueOf(one, most, depth + 1)))));
}
