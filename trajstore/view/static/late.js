// Late values of a trajectory; with --write, a form that sets values for one or many trajectories.

import { ask, change } from "./api.js";
import { Refused } from "./bundle.js";
import { fill, longText, make } from "./dom.js";
import { ZONE, count, several, time } from "./numbers.js";

const PATIENCE = 2000; // ms between two looks while something waits: the writer may also drop it, which is no commit

const PLACES = { store: "", inbox: "waits for the writer", refused: "refused by the writer" };

/** Shows the values in a section, unfolded if `isOpen`; `changed` is called when there are others than before. */
export function showLate(section, { id, signal, isOpen, changed }) {
  const title = make("summary", {}, "Late values");
  const list = make("div", { class: "given" });
  const status = make("p", { class: "quiet", role: "status" });
  const refused = make("p", { class: "refused", role: "alert" });
  const form = formOf("Set", [], give);
  const details = make("details", {}, title, list, form.element, refused, status);
  let told = { state: "", values: [], names: [], earlier: 0 };
  let write = null;
  let shown = ""; // what the list shows, as text
  let asked = 0;
  let later = null;
  fill(section, details);
  signal.addEventListener("abort", () => clearTimeout(later));

  async function look(given = "") {
    clearTimeout(later);
    const number = (asked += 1);
    let now;
    try {
      [now, { write }] = await Promise.all([ask("notes", { id }, signal), ask("about", {}, signal)]);
    } catch (error) {
      if (signal.aborted || number !== asked) return;
      section.hidden = false;
      fill(refused, error.message);
      return;
    }
    if (signal.aborted || number !== asked) return;
    const waiting = countOf(now, "inbox");
    if (waiting) {
      fill(status, `${several(waiting, "value")} in the store's inbox, until the writer stores ${waiting === 1 ? "it" : "them"}.`);
      later = setTimeout(() => look(), PATIENCE);
    } else if (given || countOf(told, "inbox")) {
      const isRefused = countOf(now, "refused") > countOf(told, "refused");
      fill(status, given ? `${given} ` : null, isRefused ? "The writer refused it." : "It is stored.");
    }
    told = now;
    tell();
  }

  function tell() {
    section.hidden = !told.values.length && !write;
    if (write) form.tell(write, told.names);
    const text = JSON.stringify([told.values, told.earlier]);
    if (text === shown) return;
    if (shown) changed();
    else details.open = isOpen || Boolean(write);
    shown = text;
    const held = list.contains(document.activeElement);
    fill(list, told.values.length ? tableOf(told, write && take) : []);
    if (held) form.focus();
  }

  /** Sets a value; returns whether it was accepted. */
  async function give(name, kind, value) {
    fill(refused);
    fill(status, "Saving …");
    try {
      await change("annotate", { ids: [id], name, kind, value });
    } catch (error) {
      if (signal.aborted) return false;
      fill(status);
      fill(refused, sentenceOf(error));
      return false;
    }
    if (signal.aborted) return false;
    await look(`${kind === "nothing" ? "Removed" : "Set"} ${name}.`);
    return true;
  }

  const take = (name) => give(name, "nothing", "");

  look();
  return { changed: (state) => (state.state === told.state ? null : look()) };
}

/**
 * Shows a form that sets or removes a value for all trajectories of a view. `ids` returns { ids, gone }: theirs, and the
 * number that left the store; `stored` is called when the value is in the store. Call `tell` with the view's number of trajectories.
 */
export function showGiving(section, { columns, write, ids, signal, stored = () => {} }) {
  const title = make("summary", {});
  const status = make("p", { class: "quiet", role: "status" });
  const refused = make("p", { class: "refused", role: "alert" });
  const form = formOf("Set for all", [make("option", { value: "nothing" }, "none: remove it")], give);
  let later = null;
  signal.addEventListener("abort", () => clearTimeout(later));
  fill(section, make("details", {}, title, form.element, refused, status));
  form.tell(write, columns.filter(({ note }) => note === "late value").map(({ name, type }) => [name, type]));

  async function give(name, kind, value) {
    clearTimeout(later);
    fill(refused);
    fill(status, "Saving …");
    let all, gone;
    try {
      ({ ids: all, gone } = await ids());
      if (!all.length) throw new Refused("Nothing was set: all of them have left the store.");
      await change("annotate", { ids: all, name, kind, value });
    } catch (error) {
      if (!signal.aborted) {
        fill(status);
        fill(refused, sentenceOf(error));
      }
      return false;
    }
    await follow(all.at(-1), name, `${kind === "nothing" ? "Removed" : "Set"} ${name} for ${several(all.length, "trajectory", "trajectories")}.${gone ? ` ${several(gone, "other has", "others have")} left the store.` : ""}`);
    return !signal.aborted;
  }

  /** Reports whether the value is stored, by the last of its trajectories. */
  async function follow(id, name, said) {
    try {
      const { values } = await ask("notes", { id }, signal);
      const last = values.findLast((one) => one.name === name);
      if (last?.place === "refused") fill(refused, `The writer refused it: ${last.why}`);
      const waits = last?.place === "inbox";
      fill(status, said, waits ? " It waits in the store's inbox for the writer." : last?.place === "store" ? " It is stored." : null);
      if (last?.place === "store") await stored();
      if (waits) later = setTimeout(() => follow(id, name, said), PATIENCE);
    } catch (error) {
      if (!signal.aborted) fill(status, said, ` Not known whether it is stored: ${error.message}`);
    }
  }

  return { tell: (many) => {
    section.hidden = many === 0 && !status.textContent; // the value may be why no trajectory matches any more
    fill(title, `Set a value for ${several(many, "trajectory", "trajectories")}`);
  } };
}

const sentenceOf = (error) => (error instanceof Refused ? error.message
  : `No answer (${error.message}). If the value was stored, it is shown once the server answers again.`);

const countOf = (told, place) => told.values.filter((one) => one.place === place).length;

function tableOf(told, take) {
  const row = (one) => make("tr", { class: `${one.place} ${one.latest ? "latest" : ""}` },
    make("th", { scope: "row" }, one.name),
    make("td", { class: typeof one.value === "number" ? "exact" : /^[^\n]{0,40}$/.test(one.value ?? "") ? null : "text" }, one.value === null ? make("i", {}, "removed") : typeof one.value === "number" ? String(one.value) : longText(String(one.value), {}, 12)),
    make("td", { class: "said", dir: "auto" }, one.who),
    make("td", { class: "quiet" }, time(one.time)),
    make("td", { class: one.why ? null : "quiet" }, one.place === "store" && !one.latest ? "replaced" : PLACES[one.place], one.why ? `: ${one.why}` : null,
      take && one.latest && one.value !== null
        ? make("button", { type: "button", "aria-label": `Remove ${one.name}`, click: () => take(one.name) }, "Remove") : null));
  return [
    told.earlier ? make("p", { class: "note" }, `${several(told.earlier, "earlier value")}: see trajstore inspect --trajectory.`) : null,
    make("table", {}, make("caption", { class: "unseen" }, "Late values, the latest first"),
      make("thead", {}, make("tr", {}, ["name", "value", "author", `time, ${ZONE}`, ""].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, [...told.values].reverse().map(row))),
  ];
}

/** Returns the form: its element, `tell` with the author and the known names and kinds, and `focus`. */
function formOf(title, kindsMore, give) {
  const name = make("input", { id: "late-name", list: "late-names", autocomplete: "off", spellcheck: "false", autocapitalize: "off", size: "16" });
  const names = make("datalist", { id: "late-names" });
  const kind = make("select", { id: "late-kind" }, make("option", { value: "number" }, "number"), make("option", { value: "text" }, "text"), kindsMore);
  const value = make("textarea", { id: "late-value", rows: "1", "aria-describedby": "late-keys", autocomplete: "off" });
  const button = make("button", { type: "submit" }, title);
  const who = make("span", { class: "quiet" });
  const element = make("form", { class: "give", "aria-label": "Set a value", novalidate: true, hidden: true, submit: send },
    make("label", { for: "late-name" }, "Name"), name, names, make("label", { for: "late-kind" }, "Type"), kind,
    make("label", { for: "late-value" }, "Value"), value, button, who,
    make("span", { class: "unseen", id: "late-keys" }, "Enter sets it, Shift and Enter begin a new line"));
  let kinds = new Map();
  let busy = false;

  kind.addEventListener("change", () => (value.disabled = kind.value === "nothing"));
  name.addEventListener("change", () => {
    if (kinds.has(name.value) && !value.disabled) kind.value = kinds.get(name.value);
  });
  value.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    element.requestSubmit();
  });

  async function send(event) {
    event.preventDefault();
    if (busy) return; // the button says so
    busy = true;
    button.setAttribute("aria-disabled", "true");
    const sent = value.value;
    if (await give(name.value, kind.value, sent) && value.value === sent) value.value = "";
    busy = false;
    button.removeAttribute("aria-disabled");
  }

  return {
    element,
    focus: () => name.focus(),
    tell(write, known) {
      element.hidden = false;
      kinds = new Map(known);
      fill(names, known.map(([one]) => make("option", { value: one })));
      fill(who, write.who ? `author: ${write.who}` : "without an author: --who NAME sets one");
    },
  };
}
