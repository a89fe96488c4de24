// A block of steps: pictures as a strip and a player, and curves in step with them, for one environment at a time.

import { ask, askBytes } from "./api.js";
import { axes, scalesOf, shapeOf, styleOf } from "./curve.js";
import { fill, keyOf, make } from "./dom.js";
import { short } from "./numbers.js";

const FIRST = ["rewards", "prev_values", "prev_logprobs", "actions", "versions"];
const ENDS = { terminations: "terminated", truncations: "truncated", dones: "done" };
const SAID = [["rewards", "reward"], ["prev_values", "value"], ["actions", "action"]];
const ABOUT = { prev_values: "the critic's estimates", prev_logprobs: "log-probs of the actions" };
const THUMBS = 12;
const MOST_CURVES = 12;
const AHEAD = 24; // frames asked for at a time while it plays
const SECOND = 10; // steps a second at speed 1
const SPEEDS = [0.25, 0.5, 1, 2, 4];
const MOST_BYTES = 128 * 2 ** 20; // of frames that are kept
const MOST_VALUES = 4; // numbers of a step that are said for each curve

/** Returns curves of one environment: for each channel its values over the steps. */
function curvesOf(array, batch, environment) {
  const [steps, , channels] = array.shape;
  return Array.from({ length: channels }, (_, channel) => Array.from({ length: steps }, (_, step) => {
    const value = Number(array.values[(step * batch + environment) * channels + channel]);
    return Number.isFinite(value) ? value : null;
  }));
}

/** Returns the sum of rewards over valid steps, which begins again after each end of an episode; null from an unknown one on. */
function returnsOf(rewards, ends, isValid) {
  let total = 0;
  return rewards[0].map((_, at) => {
    if (ends.includes(at - 1)) total = 0;
    total += isValid(at) ? rewards.reduce((sum, line) => sum + (line[at] ?? NaN), 0) : 0;
    return Number.isFinite(total) ? total : null;
  });
}

/** Draws a picture of bytes [height, width, channels]. */
function paint(canvas, bytes, [height, width, channels]) {
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  for (let at = 0; at < width * height; at += 1) {
    for (let part = 0; part < 3; part += 1) image.data[4 * at + part] = bytes[channels * at + (channels >= 3 ? part : 0)];
    image.data[4 * at + 3] = channels === 4 ? bytes[channels * at + 3] : 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Shows a block. */
export function showBlock(place, told, { parameters, keep, signal, id }) {
  const { steps, batch } = told;
  const within = (name, end) => Math.max(0, Math.min(Math.trunc(Number(parameters.get(name))) || 0, end - 1));
  let environment = within("environment", batch);
  let step = within("step", steps);
  let plots = [], playing = null, speed = 1, kept = 0; // kept: bytes of frames
  let frames = new Map(); // "column step": bytes, or null while they are on their way; the oldest first
  const cameras = told.columns.filter((column) => column.pictures);
  const others = told.columns.filter((column) => !column.pictures);

  const choose = make("select", { change: () => {
    environment = Number(choose.value);
    keep({ environment: environment ? String(environment) : null });
    [frames, kept] = [new Map(), 0];
    lay();
  } }, Array.from({ length: batch }, (_, number) => make("option", { value: number, selected: number === environment }, number)));
  const slider = make("input", { type: "range", min: 0, max: Math.max(0, steps - 1), value: step, "aria-label": "Step", input: () => go(Number(slider.value)) });
  const play = make("button", { type: "button", class: "play", "aria-pressed": "false", "aria-keyshortcuts": "s", title: "Play or stop (key s)", click: () => (playing === null ? start() : stop()) }, "Play");
  const by = (steps, key, text, title) => make("button", { type: "button", "aria-keyshortcuts": key, "aria-label": title, title: `${title} (key ${key})`, click: () => go(step + steps) }, text);
  const pace = make("select", { "aria-label": "Speed", change: () => {
    speed = Number(pace.value);
    if (playing === null) return;
    stop();
    start();
  } }, SPEEDS.map((value) => make("option", { value, selected: value === speed }, `${value}×`)));
  const says = make("p", { class: "step quiet", role: "status" });
  const pictures = make("div", { class: "cameras" });
  const goesOn = make("p", { class: "goes-on quiet", hidden: true });
  const curves = make("div", { class: "curves" });
  fill(place, make("div", { class: "bar" }, batch > 1 ? make("label", {}, "Environment ", choose, ` (0 to ${batch - 1})`) : null,
    make("span", { class: "player", role: "group", "aria-label": "Player" }, by(-1, ",", "‹", "Previous step"), play, by(1, ".", "›", "Next step"), pace), slider), says, goesOn, make("div", { class: "seen" }, pictures, curves),
    Object.entries(told.texts).map(([name, text]) => make("p", { class: "note" }, `${name}: ${text}`)),
    others.length ? make("p", { class: "note" }, `Not drawn: ${others.map(({ name, dtype, shape }) => `${name} ${dtype} [${shape.join(", ")}]`).join(", ")}`) : null);

  const views = cameras.map((column) => {
    const large = make("canvas", { class: "large", role: "img", "aria-label": `${column.name} at the chosen step` });
    pictures.append(make("figure", { class: "camera", "aria-label": column.name }, make("figcaption", {}, column.name, column.scale ? make("span", { class: "of" }, ` ${column.scale[0]} is black, ${column.scale[1]} white`) : null), large));
    return { column, large };
  });
  /** The first camera's pictures over the whole block. */
  const thumbs = !cameras.length ? [] : Array.from({ length: Math.min(THUMBS, steps) }, (_, at) => {
    const of = Math.round((at * (steps - 1)) / Math.max(1, Math.min(THUMBS, steps) - 1));
    return make("button", { type: "button", "data-step": of, "aria-label": `step ${of}`, click: () => go(of) }, make("canvas"), make("span", {}, of));
  });
  pictures.classList.toggle("several", cameras.length > 1);
  if (cameras.length) (cameras.length > 1 ? pictures : pictures.firstChild).append(make("div", { class: "strip" }, thumbs));

  /** Brings the pictures of some steps here, as far as they are not, and draws them. */
  async function bring(wanted, of = views) {
    for (const view of of) {
      const { name, pictures: size } = view.column;
      const lacking = [...new Set(wanted)].filter((one) => one < steps && !frames.has(`${name} ${one}`));
      if (!lacking.length) continue;
      const mine = frames;
      for (const one of lacking) mine.set(`${name} ${one}`, null);
      let bytes;
      try {
        bytes = await askBytes("frames", { id, name, environment, step: lacking }, signal);
      } catch (error) {
        for (const one of lacking) mine.delete(`${name} ${one}`);
        throw error;
      }
      if (mine !== frames) return;
      const length = size[0] * size[1] * size[2];
      lacking.forEach((one, at) => mine.set(`${name} ${one}`, bytes.slice(at * length, (at + 1) * length)));
      kept += lacking.length * length;
    }
    for (const [key, bytes] of frames) {
      if (kept <= MOST_BYTES) break;
      if (bytes === null || wanted.some((one) => key.endsWith(` ${one}`))) continue;
      frames.delete(key);
      kept -= bytes.length;
    }
    drawPictures();
  }

  function drawPictures() {
    for (const { column, large } of views) {
      const now = frames.get(`${column.name} ${step}`);
      if (now) paint(large, now, column.pictures);
    }
    for (const button of thumbs) {
      const bytes = frames.get(`${cameras[0].name} ${button.dataset.step}`);
      if (bytes && !button.dataset.drawn) {
        paint(button.firstChild, bytes, cameras[0].pictures);
        button.dataset.drawn = "yes";
      }
    }
  }

  function go(to) {
    step = Math.max(0, Math.min(to, steps - 1));
    keep({ step: step ? String(step) : null });
    slider.value = step;
    mark();
    bring([step]).catch(refuse);
    drawPictures();
  }

  function start() {
    if (step + 1 >= steps) go(0);
    play.setAttribute("aria-pressed", "true");
    fill(play, "Stop");
    says.setAttribute("aria-live", "off"); // ten steps a second are not read out
    const fetchFrom = (first) => bring(Array.from({ length: AHEAD }, (_, at) => first + at)).catch(refuse);
    const isThere = (one) => views.every(({ column }) => frames.get(`${column.name} ${one}`));
    fetchFrom(step);
    playing = setInterval(() => {
      if (step + 1 >= steps) return stop();
      if (!frames.has(`${cameras[0]?.name} ${step + AHEAD / 2}`)) fetchFrom(step + 1);
      return isThere(step + 1) ? go(step + 1) : null; // waits for its pictures
    }, 1000 / (SECOND * speed));
  }

  function stop() {
    clearInterval(playing);
    playing = null;
    play.setAttribute("aria-pressed", "false");
    fill(play, "Play");
    says.removeAttribute("aria-live");
  }

  function refuse(error) {
    if (!signal.aborted) fill(says, error.message);
  }

  /** Returns how episodes end, by step; what only says that they do counts last. */
  const endings = () => new Map(Object.keys(ENDS).reverse().flatMap((name) => {
    const array = told.arrays.find((one) => one.name === name);
    return array ? curvesOf(array, batch, environment).flatMap((curve) => curve.flatMap((value, at) => (value ? [[at, ENDS[name]]] : []))) : [];
  }));

  /** Says which step is chosen with its rewards, values and actions, and marks it in all curves. */
  function mark() {
    const ending = endings().get(step);
    const said = SAID.flatMap(([name, title]) => {
      const array = told.arrays.find((one) => one.name === name);
      if (!array) return [];
      const values = curvesOf(array, batch, environment).map((curve) => (curve[step] === null ? "not finite" : short(curve[step])));
      return [` · ${title} ${values.slice(0, MOST_VALUES).join(", ")}${values.length > MOST_VALUES ? ", …" : ""}`];
    });
    fill(says, `step ${step} (0 to ${steps - 1})`, said, ending ? ` · ${ending}` : "", isValid(step) ? "" : " · reset, no step of an episode");
    for (const plot of plots) plot.redraw(false);
  }

  /** Whether a step is one of an episode, and not one at which the environment was reset. */
  function isValid(at) {
    const valid = told.arrays.find(({ name }) => name === "valid");
    return !valid || valid.values[at * batch + environment] !== 0;
  }

  /** Says where the last episode goes on, if it does not end here. */
  async function tellOthers() {
    const last = Array.from({ length: steps }, (_, at) => at).findLast(isValid);
    const isOpen = !endings().has(last) && Object.keys(ENDS).some((name) => told.arrays.some((array) => array.name === name));
    goesOn.hidden = !isOpen;
    if (!isOpen) return;
    const linkTo = (block) => make("a", { href: `#/trajectory/${block}${environment ? `?environment=${environment}` : ""}` }, block);
    const { next } = await ask("around", { id, where: "", order: "trajectory_id" }, signal);
    fill(goesOn, "No episode ends at the last step. It goes on in the block that was recorded next", next === null ? ", which is not here." : [": ", linkTo(next), ", unless the environments were reset between."]);
  }

  function lay() {
    for (const plot of plots) plot.destroy();
    const order = (array) => (FIRST.includes(array.name) ? FIRST.indexOf(array.name) : FIRST.length);
    const isSaid = ({ name, values }) => ["versions", "valid"].includes(name) && values.every((value) => value === values[0]); // in the facts
    const drawn = told.arrays.filter((array) => !(array.name in ENDS) && !isSaid(array)).sort((a, b) => order(a) - order(b)).slice(0, MOST_CURVES);
    const endingOf = endings();
    const ends = [...endingOf.keys()].sort((a, b) => a - b);
    const rewards = drawn.find(({ name }) => name === "rewards");
    const returns = rewards ? returnsOf(curvesOf(rewards, batch, environment), ends, isValid) : [];
    if (returns.some((value) => value !== null)) drawn.splice(1, 0, { name: "return", lines: [returns] });
    fill(curves, drawn.map(({ name }) => make("figure", { "data-curve": name, "aria-label": `${name} over the steps` }, make("figcaption", {}, name, make("span", { class: "of" }, name === "return" ? "sum of the rewards since the episode began, or this block" : ABOUT[name])))));
    const light = styleOf("--dark") === "1" ? 66 : 48; // lines that go with the ground
    const strokeOf = (channel) => `hsl(${(200 + channel * 47) % 360} 45% ${light}%)`;
    const x = Array.from({ length: steps }, (_, at) => at);
    plots = drawn.map((array) => {
      const figure = curves.querySelector(`[data-curve="${CSS.escape(array.name)}"]`);
      const lines = array.lines ?? curvesOf(array, batch, environment);
      const line = (plot, at, stroke, dash, text = "") => {
        const left = plot.valToPos(at, "x", true);
        plot.ctx.save();
        plot.ctx.strokeStyle = stroke;
        plot.ctx.setLineDash(dash);
        plot.ctx.beginPath();
        plot.ctx.moveTo(left, plot.bbox.top);
        plot.ctx.lineTo(left, plot.bbox.top + plot.bbox.height);
        plot.ctx.stroke();
        const isLeft = left > plot.bbox.left + plot.bbox.width / 2; // text stays within the figure, above the curve
        plot.ctx.fillStyle = stroke;
        plot.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
        plot.ctx.textAlign = isLeft ? "right" : "left";
        plot.ctx.textBaseline = "bottom";
        plot.ctx.fillText(text, left, plot.bbox.top - 2 * devicePixelRatio);
        plot.ctx.restore();
      };
      const plot = new uPlot({
        ...shapeOf(figure), height: ends.length ? 152 : 140, padding: [ends.length ? 20 : 8, 12, 0, 0], legend: { show: false }, cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
        scales: scalesOf(),
        axes: axes("step"),
        series: [{}, ...lines.map((_, channel) => ({ stroke: lines.length === 1 ? styleOf("--accent") : strokeOf(channel), width: 1.5, points: { show: steps < 40, size: 4 } }))],
        hooks: { draw: [(shown) => {
          const lefts = ends.map((at) => shown.valToPos(at, "x", true));
          const isFar = (at) => Math.min(lefts[at] - (lefts[at - 1] ?? -Infinity), (lefts[at + 1] ?? Infinity) - lefts[at]) > 80 * devicePixelRatio;
          ends.forEach((at, number) => line(shown, at, styleOf("--bad"), [4, 4], !number || isFar(number) ? endingOf.get(at) : "")); // no text over the next line
          line(shown, step, styleOf("--ink"), []);
        }] },
      }, [x, ...lines], figure);
      if (lines.length > 1) figure.append(keyOf(lines.map((_, channel) => [`${array.name.replace(/s$/, "")} ${channel}`, strokeOf(channel)])));
      plot.over.addEventListener("click", () => plot.cursor.idx !== null && go(plot.cursor.idx));
      return plot;
    });
    for (const button of thumbs) delete button.dataset.drawn;
    mark();
    tellOthers().catch(refuse);
    bring([step]).then(() => bring(thumbs.map((button) => Number(button.dataset.step)), views.slice(0, 1))).catch(refuse);
  }

  if (!steps) fill(place, make("p", { class: "nothing" }, "This block has no steps."));
  else lay();
  window.addEventListener("theme", lay);
  return {
    leave() {
      stop();
      window.removeEventListener("theme", lay);
      for (const plot of plots) plot.destroy();
    },
  };
}
