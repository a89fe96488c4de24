// The session that a rollout is a row of: its calls as a tree, with the other paths.

import { ask } from "./api.js";
import { fill, make } from "./dom.js";
import { count, several } from "./numbers.js";
import { showTree, treeInWords } from "./tree.js";

export const refusals = (texts) => texts.map((text) => make("p", { class: "refused" }, text));

/**
 * Shows the session of a row; `linkTo` returns properties of a link to one of its tokens. The tree comes when it is read.
 *
 * Returns { choose(id), focus(id) }, which mark a call of the row and go to it.
 */
export function showSession(place, { id, path, paths }, { row, linkTo, signal }) {
  const where = `session = '${id.replaceAll("'", "''")}'`;
  const box = make("div", { class: "calls" }, make("p", { class: "quiet" }, "reading its calls …"));
  const summary = make("summary", {}, "Calls");
  let tree = null;
  let chosen = null; // a call that is to be marked once there is a tree
  fill(place, make("p", {}, "Session ", make("a", { class: "id", href: `#/table?${new URLSearchParams({ where, order: "session_path" })}`, title: "Its rows in the table" }, id), `: path ${count(path)}, ${several(paths, "path")} in all`),
    make("details", { open: true }, summary, box));
  const linkOf = (call) => (call.isOwn ? linkTo(call.start) : { href: `#/trajectory/${call.row}?token=${call.start}`, title: `Show its tokens in path ${count(call.path)}` });
  ask("session", { id, row }, signal).then((told) => {
    const rows = new Map(told.paths ?? []);
    const missing = paths - rows.size;
    fill(summary, treeInWords(told));
    tree = showTree(box, told, { path, linkOf, endOf: ({ end }) => (end === path || !rows.has(end) ? make("span", { class: "end" }, `path ${count(end)}`)
      : make("a", { class: "end", href: `#/trajectory/${rows.get(end)}` }, `path ${count(end)}`)) });
    tree.choose(chosen);
    box.after(...refusals([...told.left_out, ...Object.entries(told.unread ?? {}).map(([name, text]) => `${name}: ${text}`)]),
      missing > 0 ? make("p", { class: "quiet" }, `${count(missing)} of its ${count(paths)} paths are not shown: they are not among these trajectories, or there are too many.`) : "");
  }).catch((error) => !signal.aborted && fill(box, refusals([error.message])));
  return {
    choose: (name) => (tree ? tree.choose(name) : chosen = name),
    focus: (name) => tree?.focus(name),
  };
}
