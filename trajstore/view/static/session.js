// The session that a rollout is a row of: the calls of its path, and the session's other paths.

import { ask, askTrajectory } from "./api.js";
import { fill, make } from "./dom.js";
import { count, several } from "./numbers.js";

const NEAR = 32; // other paths that are listed and compared, around the one that is shown
const FEW = 6; // rows of a list that is open at first

const idsOf = (told) => told.arrays.find((array) => array.name === "input_ids")?.values ?? null;

/** Returns how many tokens two rollouts begin with alike. */
function sharedOf(one, other) {
  let same = 0;
  while (same < one.length && same < other.length && one[same] === other[same]) same += 1;
  return same;
}

const listOf = (label, titles, rows) => make("div", { class: "given" }, make("table", { "aria-label": label },
  make("thead", {}, make("tr", {}, titles.map((title) => make("th", { scope: "col" }, title)))), make("tbody", {}, rows)));

/** Shows a session; `linkOf` returns a link to a token of the row. */
export function showSession(place, told, { linkOf, signal }) {
  const { id, path, paths, calls, incomplete } = told.session;
  const where = `session = '${id.replaceAll("'", "''")}'`;
  const rows = calls.map(({ id: name, start, stop, version, trained }, at) => {
    const added = start - (at ? calls[at - 1].stop : 0);
    return make("tr", { class: trained === false ? null : "latest" }, make("th", { scope: "row" }, name),
      make("td", {}, start < stop ? linkOf(start) : `token ${count(start)}`),
      make("td", {}, `${count(Math.max(0, added))} added`), make("td", {}, `${count(stop - start)} sampled`),
      make("td", {}, version === null ? "version unknown" : `version ${version}`),
      make("td", {}, trained === null ? "mask unknown" : trained ? "in the loss" : "not in the loss of this row"));
  });
  const others = make("div", {});
  const list = make("details", { open: paths <= FEW, toggle: () => list.open && read() }, make("summary", {}, `Other paths: ${count(paths - 1)}`), others);
  fill(place, make("p", {}, "Session ", make("a", { class: "id", href: `#/table?${new URLSearchParams({ where, order: "session_path" })}`, title: "Its rows in the table" }, id), `: path ${count(path)}, ${several(paths, "path")} in all`),
    make("details", { open: calls.length <= FEW }, make("summary", {}, several(calls.length, "call")),
      listOf("Calls of this path", ["call", "begins at", "prompt tokens", "sampled tokens", "policy version", "loss"], rows)),
    incomplete.length ? make("details", {}, make("summary", {}, several(incomplete.length, "gap")),
      make("ul", {}, incomplete.map(({ id: name, reason }) => make("li", {}, `${name}: ${reason}`)))) : null,
    paths > 1 ? list : null);

  let isRead = false;
  async function read() {
    if (isRead) return;
    isRead = true;
    fill(others, make("p", { class: "quiet" }, "reading …"));
    try {
      const first = Math.max(0, path - NEAR / 2);
      const found = await ask("page", { where, order: ["session_path"], first, count: NEAR + 1 }, signal);
      const near = found.rows.filter((row) => row.session_path !== path);
      const cells = near.map(() => make("td", {}, "…"));
      fill(others, listOf("Other paths", ["path", "calls", "shared"], near.map((row, at) => make("tr", { class: "latest" },
        make("th", { scope: "row" }, make("a", { href: `#/trajectory/${row.trajectory_id}` }, `path ${count(row.session_path)}`)),
        make("td", {}, several(row.session_calls ?? 0, "call")), cells[at]))),
      found.total < paths ? make("p", { class: "quiet" }, `${count(paths - found.total)} of its ${count(paths)} paths are not among the trajectories shown here.`) : null,
      found.total > near.length + 1 ? make("p", { class: "quiet" }, `${count(near.length)} of ${count(found.total - 1)} are listed; the session's link has all.`) : null);
      const own = idsOf(told);
      for (const [at, row] of near.entries()) {
        try {
          const ids = own && idsOf(await askTrajectory(row.trajectory_id, signal));
          fill(cells[at], ids ? `first ${several(sharedOf(own, ids), "token")} shared` : "no token ids");
        } catch (error) {
          if (signal.aborted) return;
          fill(cells[at], make("span", { class: "refused" }, error.message));
        }
      }
    } catch (error) {
      isRead = false;
      if (!signal.aborted) fill(others, make("p", { class: "refused" }, error.message));
    }
  }
}
