// The values of a trajectory that came late, and, where the server takes them, a form that gives more.

import { ask, change } from "./api.js";
import { Refused } from "./bundle.js";
import { fill, make } from "./dom.js";
import { count, time } from "./numbers.js";

const PATIENCE = 2000; // ms between two looks while something waits: the writer may also drop it, which is no commit

const PLACES = { store: "", inbox: "waits for the writer", refused: "not taken in", rollback: "taken back by a rollback" };

/** Shows the values in a section; `changed` is called when there are others than before. */
export function showLate(section, { id, signal, changed }) {
  const title = make("summary", {});
  const list = make("div", { class: "given" });
  const status = make("p", { class: "quiet", role: "status" });
  const refused = make("p", { class: "refused", role: "alert" });
  const form = formOf(give);
  const details = make("details", {}, title, list, form.element, refused, status);
  let told = { state: "", values: [], names: [], earlier: 0, write: null };
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
      now = await ask("notes", { id }, signal);
    } catch (error) {
      if (signal.aborted || number !== asked) return;
      section.hidden = false;
      fill(refused, error.message);
      return;
    }
    if (signal.aborted || number !== asked) return;
    const waiting = countOf(now, "inbox");
    if (waiting) {
      fill(status, waiting === 1 ? "One value waits in the store's inbox until its writer takes it in."
        : `${count(waiting)} values wait in the store's inbox until its writer takes them in.`);
      later = setTimeout(() => look(), PATIENCE);
    } else if (given || countOf(told, "inbox")) {
      const isRefused = countOf(now, "refused") > countOf(told, "refused");
      fill(status, given ? `${given} ` : null, isRefused ? "The writer does not take it in." : "It is in the store.");
    }
    told = now;
    tell();
  }

  function tell() {
    section.hidden = !told.values.length && !told.write && !told.limits?.length;
    form.tell(told);
    const text = JSON.stringify([told.values, told.earlier, Boolean(told.write)]);
    if (text === shown) return;
    if (shown) changed();
    else details.open = Boolean(told.write);
    shown = text;
    const held = list.contains(document.activeElement);
    const latest = told.values.filter((one) => one.latest && one.value !== null);
    fill(title, "Late values", latest.map((one) => make("span", { class: "chip" }, make("span", { class: "quiet" }, one.name), " ", short(one.value))));
    fill(list, (told.limits ?? []).map((text) => make("p", { class: "note" }, text)), told.values.length ? tableOf(told, take) : []);
    if (held) form.focus();
  }

  /** Gives a value; returns whether it was given. */
  async function give(name, kind, value) {
    fill(refused);
    fill(status, "Giving it.");
    try {
      await change("annotate", { id, name, kind, value });
    } catch (error) {
      if (signal.aborted) return false;
      fill(status);
      fill(refused, error instanceof Refused ? error.message : `No answer (${error.message}). If it was given, it is in the list once the server answers again.`);
      return false;
    }
    if (signal.aborted) return false;
    await look(`${kind === "nothing" ? "Taken away" : "Given"}: ${name}.`);
    return true;
  }

  const take = (name) => give(name, "nothing", "");

  look();
  return { changed: (state) => (state.state === told.state ? null : look()) };
}

const countOf = (told, place) => told.values.filter((one) => one.place === place).length;

const short = (value) => (String(value).length > 40 ? `${String(value).slice(0, 40)}...` : String(value));

function tableOf(told, take) {
  const row = (one) => make("tr", { class: `${one.place} ${one.latest ? "latest" : ""}` },
    make("th", { scope: "row" }, one.name),
    make("td", { class: "said", dir: "auto" }, one.value === null ? make("i", {}, "taken away") : String(one.value)),
    make("td", { class: "said", dir: "auto" }, one.who),
    make("td", { class: "quiet" }, time(one.time)),
    make("td", {}, PLACES[one.place], one.why ? `: ${one.why}` : null,
      told.write && one.latest && one.value !== null
        ? make("button", { type: "button", "aria-label": `Take ${one.name} away`, click: () => take(one.name) }, "Take away") : null));
  return [
    told.earlier ? make("p", { class: "note" }, `${count(told.earlier)} earlier values: trajstore inspect --trajectory shows them.`) : null,
    make("table", {}, make("caption", { class: "unseen" }, "Late values, the latest first"),
      make("thead", {}, make("tr", {}, ["name", "value", "given by", "when", ""].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, [...told.values].reverse().map(row))),
  ];
}

/** Returns the form: its element, `tell` what the server has told, and `focus`. */
function formOf(give) {
  const name = make("input", { id: "late-name", list: "late-names", autocomplete: "off", spellcheck: "false", autocapitalize: "off", size: "16" });
  const names = make("datalist", { id: "late-names" });
  const kind = make("select", { id: "late-kind" }, make("option", { value: "number" }, "a number"), make("option", { value: "text" }, "a text"));
  const value = make("textarea", { id: "late-value", rows: "1", "aria-describedby": "late-keys", autocomplete: "off" });
  const button = make("button", { type: "submit" }, "Give");
  const who = make("span", { class: "quiet" });
  const element = make("form", { class: "give", "aria-label": "Give a value", novalidate: true, hidden: true, submit: send },
    make("label", { for: "late-name" }, "Name"), name, names, make("label", { for: "late-kind" }, "is"), kind,
    make("label", { for: "late-value" }, "Value"), value, button, who,
    make("span", { class: "unseen", id: "late-keys" }, "Enter gives it, Shift and Enter begin a new line"));
  let kinds = new Map();
  let busy = false;

  name.addEventListener("change", () => {
    if (kinds.has(name.value)) kind.value = kinds.get(name.value);
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
    tell(told) {
      element.hidden = !told.write;
      if (!told.write) return;
      kinds = new Map(told.names);
      fill(names, told.names.map(([known]) => make("option", { value: known })));
      fill(who, told.write.who ? `as ${told.write.who}` : "by nobody in particular: --who NAME says who");
    },
  };
}
