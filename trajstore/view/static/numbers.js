// Numbers and times for people.

export const count = (value) => Number(value).toLocaleString("en");

/** Returns how many of a thing there are: "1 task", "2 tasks". */
export const several = (value, thing, things = `${thing}s`) => `${count(value)} ${value === 1 ? thing : things}`;

/** Returns a number with four significant digits; whole ones whole. */
export function short(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : String(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? count(value) : value.toExponential(3);
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e7) return value.toExponential(3);
  return String(Number(value.toPrecision(4)));
}

/** Returns the shortest digits that give exactly this number in its type ("f4", "f8", "i4", "i8", "u1"). */
export function exact(value, type) {
  if (type !== "f4" || !Number.isFinite(value)) return String(value);
  for (let digits = 1; digits < 10; digits += 1) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(value);
}

const TIME = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });

/** Returns texts for points of an axis of time, in seconds since 1970, as short as their distance allows. */
export const ticks = (seconds, apart) => seconds.map((second) => {
  const text = time(1000 * second);
  if (apart >= 86400) return text.slice(5, 10);
  if (apart >= 60) return seconds.at(-1) - seconds[0] > 86400 ? text.slice(5, 16) : text.slice(11, 16);
  return apart >= 1 ? text.slice(11) : `${text.slice(14)}.${String(Math.round(1000 * (second % 1))).padStart(3, "0")}`;
});

/** Returns a time of day here, of milliseconds since 1970. */
export function time(milliseconds) {
  if (milliseconds === null) return "";
  const date = new Date(milliseconds);
  return Number.isNaN(date.getTime()) ? String(milliseconds) : TIME.format(date); // a clock may say anything
}
