// Trajectories as a table: facts as columns, sorted and filtered by the server, a page of rows at a time.

import { ask } from "./api.js";
import { isBundle } from "./bundle.js";
import { NEWEST, amongOf, conditionField } from "./condition.js";
import { fill, keepingFocus, make } from "./dom.js";
import { ZONE, count, several, short, time } from "./numbers.js";

const ROW = 34; // height of a row, as in style.css
const PAGE = 100; // rows asked for at a time
const MOST_HIGH = 12_000_000; // pixels; browsers have a limit, beyond which the bar is scaled
const PREFERRED = ["trajectory_id", "task", "kind", "outcome", "turns", "steps", "batch", "response", "version_high", "committed"];
const TITLES = {
  trajectory_id: "id", version_high: "policy version", version_low: "lowest policy version", response: "response tokens", batch: "environments",
  committed: `committed, ${ZONE}`, model_weights_id: "weights id",
};

/** Returns the function that names facts, for a store with these columns: steps are tokens where all trajectories are rollouts. */
export function titlesOf(columns) {
  const hasBlocks = columns.some(({ name, known }) => name === "batch" && known);
  return (name) => (name === "steps" && !hasBlocks ? "tokens" : TITLES[name] ?? name.replace(/^metadata\.(?="?(.*?)"?$).*/, "$1").replaceAll("_", " "));
}

/** Describes an order: "by response tokens, descending". */
export const orderText = (order, title) => `by ${order.replace(/^.*?(?=$| desc$)/, title)}`.replace(/ desc$/, ", descending");

/** Returns which columns are shown unless the URL says it: those with values, a kind only where there are two. */
function chosen(columns, told) {
  if (told) return told.split(",").filter((name) => columns.some((column) => column.name === name));
  const known = columns.filter((column) => column.known).map((column) => column.name);
  const scores = known.filter((name) => name.startsWith("reward_")).slice(0, 4);
  return [...PREFERRED.filter((name) => known.includes(name)), ...scores];
}

/** Returns a cell's text, or an element for what is more than text. */
function shownValue(column, value) {
  if (value === null) return "";
  if (column.type === "time") return time(value);
  if (column.type === "bool") return value ? "yes" : "no";
  if (column.type !== "number") return value;
  if (column.name === "outcome" || column.name === "success_rate") {
    const mood = value > 0.5 ? "good" : value <= 0 ? "bad" : "middling";
    return make("span", { class: `outcome ${mood}` }, short(value));
  }
  return short(value);
}

export async function show(main, { parameters, keep, signal }) {
  fill(main, make("p", { class: "nothing" }, "Reading facts …"));
  let { columns } = await ask("about", {}, signal), keys = [];
  const isKey = (name) => name.startsWith("metadata.");
  const isKnown = (name) => columns.some((column) => column.name === name && column.known);
  const title = (name) => titlesOf(columns)(name);
  const factOf = (name) => (title(name) === name ? null : make("code", {}, name)); // what conditions call it
  const question = { where: parameters.get("where") ?? "", order: parameters.get("order") };
  const asking = () => ({ where: question.where, order: question.order ?? NEWEST, columns: visible.filter(isKey) });
  const inOrder = () => (question.order ? orderText(question.order, title) : isKnown("committed") ? "newest commit first" : "newest first");
  const listed = parameters.get("columns");
  let visible = listed?.split(",") ?? [];
  if (visible.some(isKey)) await askKeys();
  visible = chosen(columns, listed);
  let pages = new Map(); // number of a page: its rows, or null while it is on its way
  let answer = null; // { state, total }
  let selected = Number(parameters.get("row") ?? 0);
  let asked = 0; // counts questions: late answers to others are not shown

  const field = conditionField(question.where, () => {
    question.where = field.condition();
    keep({ where: question.where, row: null });
    selected = 0;
    start();
  });
  const choices = make("div", { class: "choices" });
  const menu = make("details", { class: "menu", toggle: () => menu.open && askKeys().then(offer, (error) => !signal.aborted && fill(refused, error.message)) }, make("summary", {}, "Columns"), choices);
  const total = make("span", { class: "total", role: "status" });
  const news = make("button", { type: "button", class: "news", hidden: true, click: () => {
    grid.focus({ preventScroll: true });
    start();
  } });
  const refused = make("p", { class: "refused", id: "refused", role: "alert" });
  let laid = null; // of what the heads are made
  const heads = make("div", { class: "heads", role: "row", "aria-rowindex": 1 });
  const body = make("div", { class: "rows", role: "rowgroup" });
  const grid = make("div", {
    class: "grid", role: "grid", tabindex: 0, "aria-label": "Trajectories", keydown: pressed, scroll: draw,
  }, make("div", { role: "rowgroup", class: "header" }, heads), body);
  fill(main, make("h1", { class: "unseen" }, "Trajectories"),
    make("div", { class: "bar" }, field.element, menu, total, news), refused, grid);

  async function askColumns() {
    columns = [...(await ask("about", {}, signal)).columns, ...keys];
    offer();
  }

  /** Adds columns of metadata: rollouts are read for them. */
  async function askKeys() {
    ({ columns: keys } = await ask("keys", {}, signal));
    const named = visible.filter((name) => isKey(name) && !keys.some((key) => key.name === name));
    keys.push(...(isBundle ? [] : named).map((name) => ({ name, type: "text", note: "in the rollout's metadata", known: true })));
    columns = [...columns.filter(({ name }) => !isKey(name)), ...keys];
  }

  function offer() {
    fill(choices, columns.filter(({ name }) => name !== "trajectory_id").map(({ name, note }) => make("label", { title: note },
      make("input", { type: "checkbox", checked: visible.includes(name), change: (event) => {
        visible = event.target.checked ? [...visible, name] : visible.filter((other) => other !== name);
        keep({ columns: visible.join(",") });
        lay();
        if (event.target.checked && isKey(name)) start();
      } }), title(name), factOf(name))));
  }

  function lay() {
    const widths = visible.map((name) => {
      const type = columns.find((column) => column.name === name).type;
      const [least, share] = name === "task" ? [9, 2] : type === "text" ? [7, 1] : type === "time" ? [11, 0] : [5.5, 0.6];
      return [Math.max(least, 0.47 * title(name).length + 2.8, 0.45 * name.length + 1.7), share];
    });
    grid.style.setProperty("--columns", widths.map(([least, share]) => (share ? `minmax(${least}rem, ${share}fr)` : `${least}rem`)).join(" "));
    grid.style.setProperty("--least", `${widths.reduce((sum, [least]) => sum + least, 0)}rem`);
    grid.setAttribute("aria-colcount", visible.length);
    const wanted = JSON.stringify([visible, columns, question.order]);
    if (wanted !== laid) makeHeads(); // a click is lost if its button is replaced between press and release
    laid = wanted;
    draw();
  }

  function makeHeads() {
    const [by, way] = (question.order ?? NEWEST[0]).split(/\s+(?=desc$)/);
    keepingFocus(heads, () => fill(heads, visible.map((name) => {
      const column = columns.find((one) => one.name === name);
      const sorted = by !== name ? "none" : way ? "descending" : "ascending";
      return make("div", { role: "columnheader", "aria-sort": sorted, class: column.type }, make("button", {
        type: "button", "data-focus": name, title: `${column.note}. Sort by it`, click: () => {
          const order = sorted === "descending" ? name : `${name} desc`;
          question.order = order === NEWEST[0] ? null : order;
          keep({ order: question.order, row: null });
          selected = 0;
          start();
        },
      }, title(name), make("span", { class: "way", "aria-hidden": "true" }, { none: "", ascending: " ↑", descending: " ↓" }[sorted]), factOf(name)));
    })));
  }

  /** Asks the question anew, of the present state. */
  async function start(isAsked = true) {
    const mine = (asked += 1);
    news.hidden = true;
    fill(refused);
    total.setAttribute("aria-live", isAsked ? "polite" : "off"); // app.js tells of what comes by itself
    if (!answer) fill(total, "reading facts …");
    grid.setAttribute("aria-busy", "true");
    try {
      const first = Math.floor(selected / PAGE) * PAGE;
      const wanted = asking();
      const told = await ask("page", { ...wanted, first, count: PAGE }, signal);
      if (Object.keys(told.rows[0] ?? {}).some((name) => !columns.some((column) => column.name === name))) {
        await askColumns(); // values under a new name have come
      }
      if (mine !== asked) return;
      answer = { ...told, asking: wanted };
      field.suggest(told.rows.find(({ task }) => task)?.task);
      pages = new Map([[first / PAGE, told.rows]]);
      fill(total, several(told.total, "trajectory", "trajectories"), told.total > 1 ? `, ${inOrder()}` : null);
      grid.setAttribute("aria-rowcount", told.total + 1);
      selected = Math.max(0, Math.min(selected, told.total - 1));
      lay();
      bringIn();
    } catch (error) {
      if (mine !== asked || signal.aborted) return;
      if (!answer) fill(total);
      fill(refused, error.message);
    } finally {
      if (mine === asked) grid.setAttribute("aria-busy", "false");
    }
  }

  async function fetchPage(number) {
    const mine = asked;
    pages.set(number, null);
    try {
      const told = await ask("page", { ...answer.asking, first: number * PAGE, count: PAGE, state: answer.state }, signal);
      if (mine !== asked) return;
      if (told.state !== answer.state) start(); // the server has forgotten the state that is shown
      else {
        pages.set(number, told.rows);
        draw();
      }
    } catch (error) {
      if (mine !== asked || signal.aborted) return;
      pages.delete(number);
      fill(refused, error.message);
    }
  }

  // The bar stands for at most MOST_HIGH pixels: of more rows, each of its pixels for several of theirs.
  const whole = () => answer.total * ROW;
  const scale = () => {
    const seen = grid.clientHeight - heads.offsetHeight;
    return whole() <= MOST_HIGH ? 1 : (whole() - seen) / (MOST_HIGH - seen);
  };

  function draw() {
    if (!answer) return;
    body.style.height = `${Math.min(whole(), MOST_HIGH)}px`;
    const top = grid.scrollTop * scale();
    const first = Math.max(0, Math.floor(top / ROW) - 5);
    const last = Math.min(answer.total, Math.ceil((top + grid.clientHeight) / ROW) + 5);
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) if (!pages.has(page)) fetchPage(page);
    const rows = [];
    for (let at = first; at < last; at += 1) rows.push(row(at, at * ROW - top + grid.scrollTop));
    fill(body, rows);
    if (answer.total) grid.setAttribute("aria-activedescendant", `row-${selected}`);
    else {
      grid.removeAttribute("aria-activedescendant");
      fill(body, make("p", { class: "nothing" }, question.where ? "No trajectory matches the filter." : "No trajectories yet: they appear here once they are committed."));
    }
  }

  function row(at, top) {
    const values = pages.get(Math.floor(at / PAGE))?.[at % PAGE];
    const id = values?.trajectory_id;
    const element = make("div", {
      role: "row", id: `row-${at}`, class: `row${at % 2 ? " odd" : ""}`, "aria-rowindex": at + 2,
      "aria-selected": at === selected ? "true" : "false",
      click: (event) => {
        if (event.target.closest("a")) return;
        select(at);
      },
      dblclick: () => open(at),
    }, visible.map((name) => {
      const column = columns.find((one) => one.name === name);
      const value = values?.[name] ?? null;
      const cell = make("div", { role: "gridcell", class: column.type });
      if (!values) return fill(cell, name === "trajectory_id" ? "…" : "");
      if (name === "trajectory_id") return fill(cell, make("a", { href: linkTo(id), tabindex: -1 }, id));
      if (name === "task" && value !== null) {
        return fill(cell, make("a", { href: groupOf(value, values), tabindex: -1, title: value }, value));
      }
      if (value === null) cell.classList.add("null");
      return fill(cell, shownValue(column, value));
    }));
    if (values?.readable === false) element.classList.add("damaged");
    if (values?.kind === null) element.classList.add("gone");
    element.style.transform = `translateY(${top}px)`;
    return element;
  }

  const linkTo = (id) => `#/trajectory/${id}${amongOf(question.where, question.order)}`;

  function groupOf(task, { version_high: version }) {
    return `#/group?${new URLSearchParams(version === null ? { task } : { task, version })}`;
  }

  function bringIn() {
    const seen = grid.clientHeight - heads.offsetHeight;
    const top = grid.scrollTop * scale();
    if (selected * ROW < top) grid.scrollTop = (selected * ROW) / scale();
    else if ((selected + 1) * ROW > top + seen) grid.scrollTop = ((selected + 1) * ROW - seen) / scale();
  }

  function select(at) {
    selected = Math.max(0, Math.min(at, answer.total - 1));
    keep({ row: selected ? String(selected) : null });
    bringIn();
    draw();
  }

  function open(at) {
    const id = pages.get(Math.floor(at / PAGE))?.[at % PAGE]?.trajectory_id;
    if (id !== undefined) location.hash = linkTo(id);
  }

  function pressed(event) {
    if (!answer || event.target.closest("button, a")) return;
    const seen = Math.max(1, Math.floor((grid.clientHeight - heads.offsetHeight) / ROW) - 1);
    const moves = {
      ArrowDown: selected + 1, ArrowUp: selected - 1, PageDown: selected + seen, PageUp: selected - seen,
      Home: 0, End: answer.total - 1, j: selected + 1, k: selected - 1,
    };
    if (event.key in moves && !event.ctrlKey && !event.metaKey) select(moves[event.key]);
    else if (event.key === "Enter") open(selected);
    else return;
    event.preventDefault();
  }

  const resized = new ResizeObserver(draw);
  resized.observe(grid);
  offer();
  lay();
  await start();
  grid.focus({ preventScroll: true });
  return {
    leave: () => resized.disconnect(),
    changed(told) {
      if (!answer || told.state === answer.state) return;
      if (grid.scrollTop === 0 && selected === 0) start(false);
      else {
        fill(news, "Show new trajectories");
        news.hidden = false;
      }
    },
  };
}
