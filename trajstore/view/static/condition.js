// The condition of a view: a field where a server answers it, in a bundle what it was.

import { isBundle } from "./bundle.js";
import { make, visible } from "./dom.js";

/** Order of a table unless its address has another: newest commit first. */
export const NEWEST = ["committed desc", "trajectory_id desc"];

/** Returns the parameters of a link to a trajectory by which it knows its neighbours. */
export const amongOf = (where, order) => {
  const among = new URLSearchParams({ ...(where && { where }), ...(order && { order }) });
  return among.size ? `?${among}` : "";
};

/**
 * Returns { element, condition, suggest }: what stands in the bar of a view, what gives the condition as it is, and
 * what makes an example of a task that exists. `asked` is called when there is another condition.
 */
export function conditionField(where, asked) {
  if (isBundle) {
    const element = make("p", { class: "question" }, where
      ? ["where ", make("code", {}, where), " ", make("a", { href: location.hash.split("?")[0] }, "Show all")]
      : make("span", { class: "quiet" }, "A bundle: for filters and newer trajectories, use trajstore view."));
    return { element, condition: () => where, suggest() {} };
  }
  const filter = make("input", {
    type: "search", id: "filter", spellcheck: "false", autocomplete: "off", value: where, placeholder: "e.g. version_high > 0", "aria-describedby": "refused",
  });
  const condition = () => filter.value.trim();
  const element = make("form", { class: "question", role: "search", "aria-label": "Condition", submit: (event) => {
    event.preventDefault();
    asked();
  } }, make("label", { for: "filter" }, "Filter"), filter, make("button", { type: "submit" }, "Apply"));
  filter.addEventListener("search", () => filter.value === "" && element.requestSubmit());
  const suggest = (task) => typeof task === "string" && filter.setAttribute("placeholder", `e.g. task = '${visible(task.replaceAll("'", "''"))}', or content like '%error%'`);
  return { element, condition, suggest };
}
