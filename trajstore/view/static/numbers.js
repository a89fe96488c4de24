// Numbers and times for people.

export const count = (value) => Number(value).toLocaleString("en");

/** Returns how many of a thing there are: "1 task", "2 tasks". */
export const several = (value, thing, things = `${thing}s`) => `${count(value)} ${value === 1 ? thing : things}`;

/** Returns a number with four significant digits; whole ones whole. */
export function short(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : String(value);
  if (!Number.isFinite(value)) return String(value);
  const rounded = Number(value.toPrecision(4));
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? count(value) : rounded.toExponential();
  return Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7 ? rounded.toExponential() : String(rounded);
}

/** Returns a number for an axis or a bar, where there is little room. */
export const tick = (value) => (Math.abs(value) >= 1e6 ? Number(value.toPrecision(4)).toExponential() : short(value)).replace("e+", "e");

/** Returns the shortest digits that give exactly this number in its type ("f4", "f8", "i4", "i8", "u1"). */
export function exact(value, type) {
  if (type !== "f4" || !Number.isFinite(value)) return String(value);
  for (let digits = 1; digits < 10; digits += 1) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(value);
}

export const size = (bytes) => {
  const unit = Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${short(Number((bytes / 1024 ** unit).toPrecision(3)))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};

const TIME = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });

/** Time zone of all times on the page. */
export const ZONE = TIME.resolvedOptions().timeZone;

const milliseconds = (second) => `.${String(Math.round(1000 * second) % 1000).padStart(3, "0")}`;

/** Returns a time in seconds since 1970, with milliseconds where points are less than a second apart. */
export const moment = (second, apart) => time(1000 * second) + (apart < 1 ? milliseconds(second) : "");

/** Returns texts for points of an axis of time, in seconds since 1970, as short as their distance allows. */
export const ticks = (seconds, apart) => seconds.map((second) => {
  const text = time(1000 * second);
  if (apart >= 86400) return text.slice(5, 10);
  if (apart >= 60) return seconds.at(-1) - seconds[0] > 86400 ? text.slice(5, 16) : text.slice(11, 16);
  return text.slice(11) + (apart < 1 ? milliseconds(second) : "");
});

/** Returns a time in the browser's zone, of milliseconds since 1970. */
export function time(value) {
  if (value === null) return "";
  const date = new Date(value);
  return Number.isNaN(date.getTime()) ? String(value) : TIME.format(date); // a clock may say anything
}
