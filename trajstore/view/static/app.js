// The page: which view, and live states. Everything that is shown is in the URL.

import { ask } from "./api.js";
import { bundle, isBundle } from "./bundle.js";
import { fill, make, visible } from "./dom.js";
import "./theme.js";
import { ZONE, count, several, time } from "./numbers.js";
import * as group from "./group.js";
import * as session from "./open.js";
import * as overview from "./overview.js";
import * as table from "./table.js";
import * as trajectory from "./trajectory.js";

const VIEWS = { overview, table, trajectory, session, group };
const main = document.getElementById("main");

let current = null; // { leave, changed }: changed compares the state told with the one that the view shows
let shown = null; // AbortController of what is shown
let state = null; // the last one told
let store = ""; // name of what is shown, for the title

const QUIET = 20_000; // ms between two commits that a screen reader is told: they may come every second
let saidCount = null, saidAt = -Infinity, later = null;

/** Returns what a part of an address stands for; one that no page has written is taken as it is. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Returns which view a URL names, of what, and its parameters. */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return {
    name: VIEWS[name] ? name : "overview",
    of: rest.map(decoded).join("/"),
    parameters: new URLSearchParams(query),
  };
}

/** Writes parameters into the URL without another entry of the history; null takes one away. */
function keep(changes) {
  const { name, of, parameters } = place();
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === "") parameters.delete(key);
    else parameters.set(key, value);
  }
  const query = parameters.toString();
  history.replaceState(null, "", `#/${name}${of ? `/${of}` : ""}${query ? `?${query}` : ""}`);
}

async function show() {
  const wanted = place();
  shown?.abort();
  shown = new AbortController();
  const { signal } = shown;
  current?.leave?.();
  current = null;
  for (const link of document.querySelectorAll("nav [data-view]")) {
    if (link.dataset.view === wanted.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.setAttribute("aria-busy", "true");
  main.className = wanted.name;
  try {
    const view = await VIEWS[wanted.name].show(main, { ...wanted, keep, signal });
    if (signal.aborted) view?.leave?.();
    else current = view;
    if (state) current?.changed?.(state); // it may have come while the view was being made
  } catch (error) {
    if (signal.aborted) return;
    fill(main, make("h1", { class: "unseen" }, "Not shown"), make("p", { class: "trouble", role: "alert" }, error.message));
  }
  if (signal.aborted) return;
  main.setAttribute("aria-busy", "false");
  entitle();
}

function entitle() {
  document.title = [main.querySelector("h1")?.textContent, visible(store), "trajstore"].filter(Boolean).join(" · ");
}

/** Tells a screen reader how many trajectories have come, some commits at a time. */
function say(trajectories) {
  saidCount ??= trajectories; // those of the beginning are no news
  later ??= setTimeout(() => {
    later = null;
    const more = state.trajectories - saidCount;
    if (!more) return;
    [saidCount, saidAt] = [state.trajectories, performance.now()];
    fill(document.getElementById("said"), `${several(Math.abs(more), "trajectory", "trajectories")} ${more > 0 ? "more" : "fewer"}, ${count(saidCount)} now`);
  }, Math.max(0, saidAt + QUIET - performance.now()));
}

function follow() {
  const live = document.getElementById("live");
  const trouble = document.getElementById("trouble");
  const events = new EventSource("api/events");
  events.onmessage = (event) => {
    const told = JSON.parse(event.data);
    state = told;
    live.dataset.live = told.written ? "yes" : "idle";
    live.classList.toggle("partial", told.trouble !== null);
    live.title = told.written ? "A writer has the store open: what it commits appears here" : "No writer has the store open. What one commits will appear here";
    fill(live, `${told.written ? "live" : "no writer"} · ${several(told.trajectories, "trajectory", "trajectories")}`);
    trouble.hidden = told.trouble === null;
    fill(trouble, told.trouble);
    say(told.trajectories);
    current?.changed?.(told);
  };
  events.onerror = () => {
    live.dataset.live = "no";
    fill(live, "not connected, trying again");
    fill(document.getElementById("said"), "not connected, trying again");
  };
}

/** Says of what a bundle is, and which of its trajectories could not be read. */
async function tellBundle() {
  const { about, where, written, problems } = await bundle();
  fill(document.getElementById("live"), `written ${time(written)} ${ZONE} · ${several(about.trajectories, "trajectory", "trajectories")}`, where ? ` where ${where}` : "");
  const ids = Object.keys(problems);
  const unread = ids.length ? `${several(ids.length, "trajectory", "trajectories")} unreadable when this was written: ${ids.slice(0, 20).join(", ")}${ids.length > 20 ? " …" : ""}` : null;
  const said = [unread, about.trouble].filter(Boolean).join(". ");
  document.getElementById("trouble").hidden = said === "";
  fill(document.getElementById("trouble"), said);
}

const KEYS = [
  ["/", "filter, or find in messages"], ["arrows", "next and previous row, token, point or line of the outline"],
  ["j, k", "next and previous row of the table, or trajectory of the list"], ["n, p", "next and previous failure of the list: outcome 0.5 or lower, or unknown"],
  ["s", "play or stop an episode"], [", .", "previous and next step of an episode"],
  ["Page Up, Page Down, Home, End", "move in the table"], ["Enter", "open"], ["?", "these keys"], ["Escape", "close this"],
];

/** Shows the keys in a dialog, which Escape closes. */
function showKeys() {
  const list = make("dl", { class: "keys" }, KEYS.flatMap(([key, action]) => [make("dt", {}, key), make("dd", {}, action)]));
  const dialog = make("dialog", { "aria-label": "Keys", close: () => dialog.remove() }, make("h2", {}, "Keys"), list,
    make("form", { method: "dialog" }, make("button", { type: "submit" }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

document.getElementById("keys").addEventListener("click", showKeys);
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
  if (event.key === "?") showKeys();
  document.querySelector(`[aria-keyshortcuts="${CSS.escape(event.key)}"]`)?.click();
  if (event.key === "/") {
    const filter = document.querySelector("input[type=search]");
    if (filter) {
      filter.focus();
      event.preventDefault();
    }
  }
});

window.addEventListener("hashchange", async () => {
  await show();
  if (document.activeElement === document.body) main.focus({ preventScroll: true }); // what had it is gone
});
ask("about").then(({ path }) => {
  fill(document.getElementById("path"), path);
  store = path.split("/").filter(Boolean).at(-1) ?? path;
  entitle();
}, () => {}); // the view says what is wrong
if (isBundle) tellBundle().catch(() => {}); // the view says it
else follow();
show();
