// Two episodes beside each other, in step: of two blocks, or of two environments of one.

import { ask, askTrajectory } from "./api.js";
import { Refused } from "./bundle.js";
import { fill, make } from "./dom.js";
import { ZONE, short, time } from "./numbers.js";
import { showBlock } from "./block.js";

/** Names in the URL of what belongs to the right side; the step belongs to both. */
const OTHERS = { environment: "other_environment" };

export async function show(main, { of: id, parameters, keep, signal }) {
  const ids = [id, parameters.get("other") ?? id];
  const told = await Promise.all([...new Set(ids)].map((one) => askTrajectory(one, signal)));
  const facts = await Promise.all(ids.map((one) => ask("facts", { id: one }, signal)));
  const blocks = [told[0], told.at(-1)];
  if (blocks.some(({ kind }) => kind === "agent")) throw new Refused("rollouts of agents have no episodes; a task's page shows its rollouts side by side");
  const places = ids.map(() => make("div", { class: "body" }));
  const sides = ids.map((one, at) => make("section", { "aria-label": at ? "Right episode" : "Left episode" }, choice(one, at), places[at]));
  fill(main, make("h1", {}, "Two episodes, in step"), make("div", { class: "episodes" }, sides));

  /** Returns the link to a block, and a form that takes another one. */
  function choice(one, at) {
    const { version_high: version, committed } = facts[at];
    const field = make("input", { type: "search", size: 8, value: one, "aria-label": `Trajectory, ${at ? "right" : "left"}`, spellcheck: "false", autocomplete: "off" });
    return make("form", { class: "bar", "aria-label": at ? "Right" : "Left", submit: (event) => {
      event.preventDefault();
      const wanted = new URLSearchParams(location.hash.split("?")[1]);
      wanted.set("other", at ? field.value.trim() : ids[1]);
      location.hash = `#/beside/${at ? id : field.value.trim()}?${wanted}`;
    } }, make("span", {}, "Trajectory"), field, make("button", { type: "submit" }, "Show"), make("a", { href: `#/trajectory/${one}` }, "Open"),
      make("span", { class: "quiet" }, [version === null ? null : `policy version ${short(version)}`, committed === null ? null : `committed ${time(committed)} ${ZONE}`].filter(Boolean).join(", ")));
  }

  const views = blocks.map((block, at) => {
    const nameOf = (name) => (at ? OTHERS[name] ?? name : name);
    return showBlock(places[at], block, {
      parameters: { get: (name) => parameters.get(nameOf(name)) },
      keep: (changes) => keep(Object.fromEntries(Object.entries(changes).map(([name, value]) => [nameOf(name), value]))),
      signal, id: ids[at], moved: (step) => views?.[1 - at]?.go(step),
    });
  });
  return { leave: () => views.forEach((view) => view.leave()) };
}
