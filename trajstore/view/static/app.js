// The page: which view, live states, light or dark. Everything that is shown is in the URL.

import { ask } from "./api.js";
import { bundle, isBundle } from "./bundle.js";
import { fill, make } from "./dom.js";
import { count, time } from "./numbers.js";
import * as group from "./group.js";
import * as overview from "./overview.js";
import * as table from "./table.js";
import * as trajectory from "./trajectory.js";

const VIEWS = { overview, table, trajectory, group };
const main = document.getElementById("main");

let current = null; // { leave, changed }: changed compares the state told with the one that the view shows
let shown = null; // AbortController of what is shown
let state = null; // the last one told

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
    fill(main, make("p", { class: "trouble", role: "alert" }, error.message));
  }
  if (!signal.aborted) main.setAttribute("aria-busy", "false");
}

function follow() {
  const live = document.getElementById("live");
  const trouble = document.getElementById("trouble");
  const events = new EventSource("api/events");
  events.onmessage = (event) => {
    const told = JSON.parse(event.data);
    state = told;
    live.dataset.live = "yes";
    fill(live, `live · ${count(told.trajectories)} trajectories`);
    trouble.hidden = told.trouble === null;
    fill(trouble, told.trouble);
    current?.changed?.(told);
  };
  events.onerror = () => {
    live.dataset.live = "no";
    fill(live, "not connected, trying again");
  };
}

/** Says of what a bundle is, and which of its trajectories could not be read. */
async function tellBundle() {
  const { about, where, written, problems } = await bundle();
  fill(document.getElementById("live"), `written ${time(written)} · ${count(about.trajectories)} trajectories`, where ? ` where ${where}` : "");
  const ids = Object.keys(problems);
  const unread = ids.length ? `${count(ids.length)} could not be read when this was written: ${ids.slice(0, 20).join(", ")}${ids.length > 20 ? " …" : ""}` : null;
  const said = [unread, about.trouble].filter(Boolean).join(". ");
  document.getElementById("trouble").hidden = said === "";
  fill(document.getElementById("trouble"), said);
}

function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  window.dispatchEvent(new Event("theme"));
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
  localStorage.setItem("trajstore-theme", dark ? "light" : "dark");
  dress(dark ? "light" : "dark");
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    const filter = document.querySelector("input[type=search]");
    if (filter) {
      filter.focus();
      event.preventDefault();
    }
  }
});

dress(localStorage.getItem("trajstore-theme"));
window.addEventListener("hashchange", show);
ask("about").then((about) => {
  fill(document.getElementById("path"), about.path);
  document.title = `${about.path.split("/").filter(Boolean).at(-1) ?? about.path} · trajstore`;
}, () => {});
if (isBundle) tellBundle().catch(() => {}); // the view says it
else follow();
show();
