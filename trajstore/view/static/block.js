// A block of steps: pictures as a strip and a player, and curves in step with them, for one environment at a time.

import { askBytes } from "./api.js";
import { fill, keyOf, make } from "./dom.js";
import { short } from "./numbers.js";

const FIRST = ["rewards", "prev_values", "prev_logprobs", "actions", "versions"];
const ENDS = { terminations: "terminated", truncations: "truncated", dones: "done" };
const ABOUT = { prev_values: "the critic's estimates", prev_logprobs: "log-probs of the actions", return: "sum of the rewards since the episode began" };
const THUMBS = 12;
const MOST_CURVES = 12;
const AHEAD = 24; // frames asked for at a time while it plays
const FRAME = 100; // milliseconds

/** Returns curves of one environment: for each channel its values over the steps. */
function curvesOf(array, batch, environment) {
  const [steps, , channels] = array.shape;
  return Array.from({ length: channels }, (_, channel) => Array.from({ length: steps }, (_, step) => {
    const value = Number(array.values[(step * batch + environment) * channels + channel]);
    return Number.isFinite(value) ? value : null;
  }));
}

/** Returns the sum of rewards over the steps, which begins again after each end of an episode. */
function returnsOf(rewards, ends) {
  let total = 0;
  return rewards[0].map((_, at) => {
    if (ends.includes(at - 1)) total = 0;
    return (total += rewards.reduce((sum, line) => sum + (line[at] ?? 0), 0));
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

/**
 * Shows a block. `moved` is called with each step that somebody goes to; the `go` that is returned goes to one without
 * calling it: so two blocks stay in step.
 */
export function showBlock(place, told, { parameters, keep, signal, id, moved }) {
  const { steps, batch } = told;
  const within = (name, end) => Math.max(0, Math.min(Math.trunc(Number(parameters.get(name))) || 0, end - 1));
  let environment = within("environment", batch);
  let step = within("step", steps);
  let plots = [], playing = null, frames = new Map(); // "column step": bytes, or null while they are on their way
  const cameras = told.columns.filter((column) => column.pictures);
  const others = told.columns.filter((column) => !column.pictures);

  const choose = make("select", { change: () => {
    environment = Number(choose.value);
    keep({ environment: environment ? String(environment) : null });
    frames = new Map();
    lay();
  } }, Array.from({ length: batch }, (_, number) => make("option", { value: number, selected: number === environment }, number)));
  const slider = make("input", { type: "range", min: 0, max: Math.max(0, steps - 1), value: step, "aria-label": "Step", input: () => go(Number(slider.value)) });
  const play = make("button", { type: "button", "aria-pressed": "false", click: () => (playing === null ? start() : stop()) }, "Play");
  const says = make("span", { class: "total", role: "status" });
  const pictures = make("div", { class: "cameras" });
  const curves = make("div", { class: "curves" });
  fill(place, make("div", { class: "bar" }, make("label", {}, "Environment ", choose, ` (0 to ${batch - 1})`), play, slider, says,
    moved ? null : make("a", { class: "button besides", href: `#/beside/${id}`, click: besides }, "Compare with another episode")), make("div", { class: "seen" }, pictures, curves),
    others.length ? make("p", { class: "note" }, `Not drawn: ${others.map(({ name, dtype, shape }) => `${name} ${dtype} [${shape.join(", ")}]`).join(", ")}`) : null);

  const views = cameras.map((column) => {
    const large = make("canvas", { class: "large", role: "img", "aria-label": `${column.name} at the chosen step` });
    const strip = make("div", { class: "strip" }, Array.from({ length: Math.min(THUMBS, steps) }, (_, at) => {
      const of = Math.round((at * (steps - 1)) / Math.max(1, Math.min(THUMBS, steps) - 1));
      return make("button", { type: "button", "data-step": of, "aria-label": `step ${of}`, click: () => go(of) }, make("canvas"), make("span", {}, of));
    }));
    pictures.append(make("figure", { class: "camera", "aria-label": column.name }, make("figcaption", {}, column.name), large, strip));
    return { column, large, strip };
  });

  /** Brings the pictures of some steps here, as far as they are not, and draws them. */
  async function bring(wanted) {
    for (const view of views) {
      const { name, pictures: size } = view.column;
      const lacking = [...new Set(wanted)].filter((one) => one < steps && !frames.has(`${name} ${one}`));
      if (!lacking.length) continue;
      const mine = frames;
      for (const one of lacking) mine.set(`${name} ${one}`, null);
      const bytes = await askBytes("frames", { id, name, environment, step: lacking }, signal);
      if (mine !== frames) return;
      const length = size[0] * size[1] * size[2];
      lacking.forEach((one, at) => mine.set(`${name} ${one}`, bytes.subarray(at * length, (at + 1) * length)));
    }
    drawPictures();
  }

  function drawPictures() {
    for (const { column, large, strip } of views) {
      const now = frames.get(`${column.name} ${step}`);
      if (now) paint(large, now, column.pictures);
      for (const button of strip.children) {
        const bytes = frames.get(`${column.name} ${button.dataset.step}`);
        if (bytes && !button.dataset.drawn) {
          paint(button.firstChild, bytes, column.pictures);
          button.dataset.drawn = "yes";
        }
      }
    }
  }

  /** Makes the link to the view of two episodes: this one beside the next environment's, if there is one. */
  function besides(event) {
    const more = { other: id, environment, other_environment: environment + 1 < batch ? environment + 1 : 0, step };
    event.target.href = `#/beside/${id}?${new URLSearchParams(more)}`;
  }

  function go(to, isFollowing = false) {
    if (!isFollowing) moved?.(to);
    step = Math.max(0, Math.min(to, steps - 1));
    if (!isFollowing) keep({ step: step ? String(step) : null });
    slider.value = step;
    mark();
    bring([step]).catch(refuse);
    drawPictures();
  }

  function start() {
    play.setAttribute("aria-pressed", "true");
    fill(play, "Stop");
    says.setAttribute("aria-live", "off"); // ten steps a second are not read out
    playing = setInterval(() => {
      if (step + 1 >= steps) return stop();
      if (step % AHEAD === 0) bring(Array.from({ length: 2 * AHEAD }, (_, at) => step + at)).catch(refuse);
      return go(step + 1);
    }, FRAME);
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

  /** Says which step is chosen, and marks it in all curves. */
  function mark() {
    const ending = endings().get(step);
    const rewards = told.arrays.find(({ name }) => name === "rewards");
    const reward = rewards ? curvesOf(rewards, batch, environment).reduce((sum, curve) => sum + (curve[step] ?? NaN), 0) : null;
    fill(says, `step ${step} (0 to ${steps - 1})`, reward === null ? "" : ` · reward ${short(reward)}`, ending ? ` · ${ending}` : "");
    for (const plot of plots) plot.redraw(false);
  }

  function lay() {
    for (const plot of plots) plot.destroy();
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const order = (array) => (FIRST.includes(array.name) ? FIRST.indexOf(array.name) : FIRST.length);
    const isSaid = ({ name, values }) => name === "versions" && values.every((value) => value === values[0]); // in the facts
    const drawn = told.arrays.filter((array) => !(array.name in ENDS) && !isSaid(array)).sort((a, b) => order(a) - order(b)).slice(0, MOST_CURVES);
    const endingOf = endings();
    const ends = [...endingOf.keys()].sort((a, b) => a - b);
    const rewards = drawn.find(({ name }) => name === "rewards");
    if (rewards) drawn.splice(1, 0, { name: "return", lines: [returnsOf(curvesOf(rewards, batch, environment), ends)] });
    fill(curves, drawn.map(({ name }) => make("figure", { "data-curve": name, "aria-label": `${name} over the steps` }, make("figcaption", {}, name, make("span", { class: "of" }, ABOUT[name])))));
    const light = color("--dark") === "1" ? 66 : 48; // lines that go with the ground
    const strokeOf = (channel) => `hsl(${(200 + channel * 47) % 360} 45% ${light}%)`;
    const x = Array.from({ length: steps }, (_, at) => at);
    plots = drawn.map((array) => {
      const figure = curves.querySelector(`[data-curve="${CSS.escape(array.name)}"]`);
      const lines = array.lines ?? curvesOf(array, batch, environment);
      const axisOf = (more) => ({ stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif", ...more });
      const line = (plot, at, stroke, dash, text = "") => {
        const left = plot.valToPos(at, "x", true);
        plot.ctx.save();
        plot.ctx.strokeStyle = stroke;
        plot.ctx.setLineDash(dash);
        plot.ctx.beginPath();
        plot.ctx.moveTo(left, plot.bbox.top);
        plot.ctx.lineTo(left, plot.bbox.top + plot.bbox.height);
        plot.ctx.stroke();
        const isLeft = left > plot.bbox.left + plot.bbox.width / 2; // text stays within the curve
        plot.ctx.fillStyle = stroke;
        plot.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
        plot.ctx.textAlign = isLeft ? "right" : "left";
        plot.ctx.textBaseline = "top";
        plot.ctx.fillText(text, left + (isLeft ? -4 : 4) * devicePixelRatio, plot.bbox.top);
        plot.ctx.restore();
      };
      const plot = new uPlot({
        width: Math.max(200, figure.clientWidth - 24), height: 140, padding: [8, 12, 0, 0], legend: { show: false }, cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
        scales: { x: { time: false }, y: { range: (_, low, high) => (low || high ? [Math.min(0, low * 1.1), Math.max(0, high * 1.1)] : [0, 1]) } },
        axes: [axisOf({ label: "step", labelSize: 16, labelFont: "12px system-ui, sans-serif", labelGap: 0, size: 28 }), axisOf({ size: 56, values: (_, values) => values.map(short) })],
        series: [{}, ...lines.map((_, channel) => ({ stroke: lines.length === 1 ? color("--accent") : strokeOf(channel), width: 1.5, points: { show: steps < 40, size: 4 } }))],
        hooks: { draw: [(shown) => {
          const lefts = ends.map((at) => shown.valToPos(at, "x", true));
          const isFar = (at) => Math.min(lefts[at] - (lefts[at - 1] ?? -Infinity), (lefts[at + 1] ?? Infinity) - lefts[at]) > 80 * devicePixelRatio;
          ends.forEach((at, number) => line(shown, at, color("--bad"), [4, 4], !number || isFar(number) ? endingOf.get(at) : "")); // no text over the next line
          line(shown, step, color("--ink"), []);
        }] },
      }, [x, ...lines], figure);
      if (lines.length > 1) figure.append(keyOf(lines.map((_, channel) => [`${array.name.replace(/s$/, "")} ${channel}`, strokeOf(channel)])));
      plot.over.addEventListener("click", () => plot.cursor.idx !== null && go(plot.cursor.idx));
      return plot;
    });
    for (const { strip } of views) for (const button of strip.children) delete button.dataset.drawn;
    mark();
    bring([step, ...views.flatMap(({ strip }) => [...strip.children].map((button) => Number(button.dataset.step)))]).catch(refuse);
  }

  if (!steps) fill(place, make("p", { class: "nothing" }, "This block has no steps."));
  else lay();
  window.addEventListener("theme", lay);
  return {
    go: (to) => steps && go(to, true),
    leave() {
      stop();
      window.removeEventListener("theme", lay);
      for (const plot of plots) plot.destroy();
    },
  };
}
