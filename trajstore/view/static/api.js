// Asking the server; of a bundle, its files.

import { Refused, answerOf, bytesOf, isBundle } from "./bundle.js";

/** Returns an answer; one that refuses is thrown with its sentence. */
async function answered(path, parameters, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  const answer = await fetch(`api/${path}?${query}`, { signal });
  if (answer.ok) return answer;
  const text = await answer.text();
  let sentence = text || `${answer.status} ${answer.statusText}`;
  try {
    sentence = JSON.parse(text).error;
  } catch { /* the guard answers in plain text */ }
  throw new Refused(sentence);
}

/** Returns an answer of JSON. */
export const ask = async (path, parameters = {}, signal = undefined) =>
  (isBundle ? answerOf(path, parameters) : (await answered(path, parameters, signal)).json());

const askBuffer = async (path, parameters, signal) =>
  (isBundle ? bytesOf(path, parameters, signal) : (await answered(path, parameters, signal)).arrayBuffer());

/** Returns a value of JSON whose numbers are written again as they are: 9007199254740993 and 1.0 are none of the browser's. */
export const exactly = (text) => JSON.parse(text, (_, value, context) =>
  (typeof value === "number" && JSON.rawJSON && String(value) !== context.source ? JSON.rawJSON(context.source) : value));

const ARRAYS = { f4: Float32Array, f8: Float64Array, i4: Int32Array, i8: BigInt64Array, u1: Uint8Array };

/** Returns a trajectory; its `arrays` have `values` (see view/rollout.py for the form). */
export const askTrajectory = async (id, signal) => unpacked(await askBuffer("rollout", { id }, signal));

/** Returns the first path of an open session that has a call, as a trajectory. */
export const askPath = async (id, call, signal) => unpacked(await askBuffer("path", { id, call }, signal));

function unpacked(body) {
  const length = new DataView(body).getUint32(0, true);
  const told = exactly(new TextDecoder().decode(new Uint8Array(body, 4, length)));
  for (const array of told.arrays) {
    const size = array.shape.reduce((product, side) => product * side, 1);
    const values = new ARRAYS[array.type](body, 4 + length + array.at, size);
    array.values = array.type === "i8" ? Float64Array.from(values, Number) : values;
    array.exact = array.type === "i8" ? (at) => String(values[at]) : null;
  }
  return told;
}

/** Returns an answer of bytes. */
export const askBytes = async (path, parameters, signal) =>
  new Uint8Array(await askBuffer(path, parameters, signal));
