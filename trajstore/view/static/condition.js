// The condition of a view: a field where a server answers it, in a bundle what it was.

import { isBundle } from "./bundle.js";
import { make } from "./dom.js";

/**
 * Returns { element, condition }: what stands in the bar of a view, and what gives the condition as it is.
 * `asked` is called when there is another one.
 */
export function conditionField(where, placeholder, asked) {
  if (isBundle) {
    const element = make("p", { class: "question" }, where
      ? ["where ", make("code", {}, where), " ", make("a", { href: location.hash.split("?")[0] }, "Show all")]
      : make("span", { class: "quiet" }, "Written ahead: conditions, and what came later, are shown by trajstore view."));
    return { element, condition: () => where };
  }
  const filter = make("input", {
    type: "search", id: "filter", spellcheck: "false", autocomplete: "off", value: where, placeholder, "aria-describedby": "refused",
  });
  const condition = () => filter.value.trim();
  const element = make("form", { class: "question", role: "search", "aria-label": "Condition", submit: (event) => {
    event.preventDefault();
    asked();
  } }, make("label", { for: "filter" }, "where"), filter, make("button", { type: "submit" }, "Filter"));
  filter.addEventListener("search", () => filter.value === "" && element.requestSubmit());
  return { element, condition };
}
