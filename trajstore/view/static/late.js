// Late values of a trajectory.

import { ask } from "./api.js";
import { fill, longText, make } from "./dom.js";
import { ZONE, several, time } from "./numbers.js";

/** Shows the values in a section, unfolded if `isOpen`; `changed` is called when there are others than before. */
export function showLate(section, { id, signal, isOpen, changed }) {
  const list = make("div", { class: "given" });
  const refused = make("p", { class: "refused", role: "alert" });
  const details = make("details", { open: isOpen }, make("summary", {}, "Late values"), list, refused);
  let shown = null; // what the list shows, as text
  let seen = ""; // the state that it is of
  fill(section, details);

  async function look() {
    try {
      const told = await ask("notes", { id }, signal);
      if (signal.aborted) return;
      seen = told.state;
      section.hidden = !told.values.length;
      fill(refused);
      const text = JSON.stringify([told.values, told.earlier]);
      if (text === shown) return;
      if (shown !== null) changed();
      shown = text;
      fill(list, told.values.length ? tableOf(told) : []);
    } catch (error) {
      if (signal.aborted) return;
      section.hidden = false;
      fill(refused, error.message);
    }
  }

  look();
  return { changed: (state) => (state.state === seen ? null : look()) };
}

function tableOf(told) {
  const row = (one) => make("tr", { class: one.latest ? "latest" : null },
    make("th", { scope: "row" }, one.name),
    make("td", { class: typeof one.value === "number" ? "exact" : /^[^\n]{0,40}$/.test(one.value ?? "") ? null : "text" }, one.value === null ? make("i", {}, "removed") : typeof one.value === "number" ? String(one.value) : longText(String(one.value), {}, 12)),
    make("td", { class: "said", dir: "auto" }, one.who),
    make("td", { class: "quiet" }, time(one.time)),
    make("td", { class: "quiet" }, one.latest ? "" : "replaced"));
  return [
    told.earlier ? make("p", { class: "note" }, `${several(told.earlier, "earlier value")}: see trajstore inspect --trajectory.`) : null,
    make("table", {}, make("caption", { class: "unseen" }, "Late values, the latest first"),
      make("thead", {}, make("tr", {}, ["name", "value", "author", `time, ${ZONE}`, ""].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, [...told.values].reverse().map(row))),
  ];
}
