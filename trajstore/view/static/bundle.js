// Answers of a bundle: from files that were written ahead, in the forms in which a server gives them.

const MOST_PARTS = 16; // files of pictures that are kept

export class Refused extends Error {}

/** Whether this page is of a bundle, and there is no server to ask. */
export const isBundle = document.querySelector("meta[name=trajstore-bundle]") !== null;

/** Returns the content of a file of the bundle. */
async function file(path, signal) {
  const answer = await fetch(path, { signal });
  if (!answer.ok) throw new Refused(`${path}: ${answer.status} ${answer.statusText}; the folder is incomplete; copy all of it`);
  return answer;
}

let told = null;

/** Returns what `bundle.json` tells, with rows by name; read once. */
export function bundle() {
  told ??= file("bundle.json").then((answer) => answer.json()).then((read) => {
    const names = read.about.columns.map((column) => column.name);
    const rows = read.rows.map((row) => Object.fromEntries(row.map((value, at) => [names[at], value])));
    return { ...read, names, rows, places: new Map(rows.map((row, at) => [row.trajectory_id, at])) };
  }).catch((error) => {
    told = null;
    throw error;
  });
  return told;
}

/** Returns the number of an id as it is shown; see store/run_ids.py. */
function numberOf(shown) {
  const [own, rank = "-1"] = shown.split("/").reverse();
  return (Number(rank) + 1) * 2 ** 42 + Number(own);
}

// Conditions to which the page itself links. Others are SQL, which takes a server.
const CONDITIONS = [
  [/^version_high = (\S+)$/, (row, value) => row.version_high === Number(value)],
  [/^trajectory_id between '?([\d/]+)'? and '?([\d/]+)'?$/, ({ trajectory_id: id }, first, last) => numberOf(id) >= numberOf(first) && numberOf(id) <= numberOf(last)],
  [/^not readable$/, (row) => row.readable === false],
  [/^kind = 'agent' and outcome is null$/, (row) => row.kind === "agent" && row.outcome === null],
  [/^version_high is null$/, (row) => row.version_high === null],
  [/^session = '((?:[^']|'')*)'$/, (row, session) => row.session === session.replaceAll("''", "'")],
  [/^task = '((?:[^']|'')*)'(?: and version_high = (-?\d+))?$/, (row, task, version) => row.task === task.replaceAll("''", "'") && (version === undefined || row.version_high === Number(version))],
];

const unanswered = (where) => new Refused(`where: '${where}': a bundle answers no conditions; use trajstore view`);

function chosen(rows, where) {
  if (!where) return rows;
  for (const [form, holds] of CONDITIONS) {
    const found = form.exec(where);
    if (found) return rows.filter((row) => holds(row, ...found.slice(1)));
  }
  throw unanswered(where);
}

const ODD = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** Compares two facts that are not null: NaN is the highest number. */
function compare(one, other) {
  if (Number.isNaN(one) || Number.isNaN(other)) return Number.isNaN(one) - Number.isNaN(other);
  return one < other ? -1 : Number(one > other);
}

/** Returns rows sorted as a server sorts them: null comes last, equal ones in the order of their ids. */
const sorted = (all, rows, orders) => [orders].flat().reduceRight((found, order) => sortedBy(all, found, order), rows);

function sortedBy({ about, names }, rows, order) {
  const name = order.replace(/ desc$/, "");
  if (!names.includes(name)) throw new Refused(`order: '${order}': this page sorts by a fact, or by a fact and desc`);
  const { type } = about.columns[names.indexOf(name)];
  const way = order === name ? 1 : -1;
  const keyOf = { id: numberOf, number: (value) => ODD[value] ?? value }[type] ?? ((value) => value);
  return rows.map((row) => [row[name] === null ? null : keyOf(row[name]), row])
    .sort(([one], [other]) => (one === null || other === null ? (one === null) - (other === null) : way * compare(one, other)))
    .map(([, row]) => row);
}

function group({ rows }, { task, version }) {
  const all = rows.filter((row) => row.task === task);
  const versions = [...new Set(all.map((row) => row.version_high))].filter((one) => one !== null).sort((a, b) => a - b);
  const newest = versions.at(-1) ?? null;
  const wanted = version === "all" ? null : version === null || version === undefined ? newest : Number(version);
  return { task, versions, version: wanted, rollouts: wanted === null ? all.reverse() : all.filter((row) => row.version_high === wanted) };
}

function placeOf({ places, problems }, id) {
  if (!places.has(id)) throw new Refused(`trajectory ${id}: not in this bundle`);
  if (id in problems) throw new Refused(problems[id]);
  return places.get(id);
}

const ANSWERS = {
  about: (all) => all.about,
  keys: () => ({ columns: [] }),
  page: (all, { where, order, first, count }) => {
    const rows = sorted(all, chosen(all.rows, where), order);
    return { total: rows.length, first, rows: rows.slice(first, first + count) };
  },
  around: (all, { id, where, order }) => {
    const found = sorted(all, chosen(all.rows, where), order);
    const at = found.findIndex((row) => row.trajectory_id === id);
    const idOf = (row) => row?.trajectory_id ?? null;
    const isFailure = ({ kind, outcome }) => (outcome === null ? kind === "agent" : outcome <= 0.5);
    return { at: at < 0 ? null : at, total: found.length, previous: idOf(found[at - 1]), next: at < 0 ? null : idOf(found[at + 1]),
      previous_failure: at < 0 ? null : idOf(found.slice(0, at).findLast(isFailure)), next_failure: at < 0 ? null : idOf(found.slice(at + 1).find(isFailure)) };
  },
  notes: ({ late }, { id }) => ({ values: [], earlier: 0, ...late[id] }),
  facts: (all, { id }) => all.rows[placeOf({ ...all, problems: {} }, id)],
  overview: (all, { where }) => {
    if (where) throw unanswered(where);
    return all.overview;
  },
  group,
  sessions: () => ({ sessions: [], of: 0, damaged: [] }),
  session: async ({ sessions }, { id }) => {
    if (!(id in sessions)) throw new Refused(`session ${id}: not in this bundle`);
    return (await file(`data/session-${sessions[id]}.json`)).json();
  },
};

/** Returns an answer of JSON. */
export async function answerOf(path, parameters) {
  const all = await bundle();
  if (!ANSWERS[path]) throw new Refused(`${path}: not available in a bundle; use trajstore view`);
  return { ...(await ANSWERS[path](all, parameters)), state: all.about.state };
}

const parts = new Map(); // path: promise of bytes, the last used last

function partOf(path, signal) {
  const found = parts.get(path) ?? file(path, signal).then((answer) => answer.arrayBuffer());
  parts.delete(path);
  parts.set(path, found);
  found.catch(() => parts.delete(path));
  while (parts.size > MOST_PARTS) parts.delete(parts.keys().next().value);
  return found;
}

/** Returns an answer of bytes, as an ArrayBuffer. */
export async function bytesOf(path, { id, name, environment, step: steps }, signal) {
  const all = await bundle();
  const number = placeOf(all, id);
  if (path === "rollout") return (await file(`data/${number}.bin`, signal)).arrayBuffer();
  const { place, each, size } = all.pictures[id].find((one) => one.name === name);
  const bytes = new Uint8Array(steps.length * size);
  await Promise.all(steps.map(async (step, at) => {
    const part = await partOf(`${place}-${environment}-${Math.floor(step / each)}.bin`, signal);
    bytes.set(new Uint8Array(part, (step % each) * size, size), at * size);
  }));
  return bytes.buffer;
}
