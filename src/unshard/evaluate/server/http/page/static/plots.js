"use strict";
/* The plots of a view: one figure per metric, with error bars, stars, the base model and a table. */

const COLOURS = 6;
const plotsBox = document.getElementById("plots");
const figures = new Map();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, text, fields = {}) => Object.assign(document.createElement(tag), text === null ? {} : { textContent: text }, fields);
const short = (value, digits = 6) => Number(value.toPrecision(digits)).toString();
/* Of runs with the same colour, the later ones have hollow points. */
const isHollow = (one, runs) => runs.indexOf(one.run) % (2 * COLOURS) >= COLOURS;
/* Solid, dashed for EMA; what differs from these in its settings alone is dotted. */
function dashOf(one, plot) {
  const isFurther = plot.series.some((other) => other.settings < one.settings && ["run", "weights", "profile"].every((key) => other[key] === one[key]));
  const dash = one.weights === "ema" ? [8, 5] : [];
  return isFurther ? [...dash, 2, 4] : dash;
}

/* What distinguishes the lines of a plot is what their names have. */
function nameLines(series) {
  const several = (key) => new Set(series.map((one) => one[key])).size > 1;
  return series.map((one) => {
    const parts = [one.run, one.weights];
    if (several("profile")) parts.push(one.profile);
    if (one.settings) parts.push(one.settings);
    return parts.join(" · ");
  });
}

const bestOf = (one) => one.values[one.steps.indexOf(one.best)];

/* Steps of all lines together, and each line's values at them. */
function align(plot) {
  const steps = [...new Set(plot.series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  const spread = (one, values) => {
    const row = Array(steps.length).fill(null);
    one.steps.forEach((step, index) => (row[at.get(step)] = values[index]));
    return row;
  };
  const bases = plot.series.filter((one) => one.base !== null);
  return {
    data: [steps, ...plot.series.map((one) => spread(one, one.values)), ...bases.map((one) => steps.map(() => one.base))],
    errors: plot.series.map((one) => spread(one, one.errors)),
    bases,
  };
}

/* The lowest and highest end of all bars, with some room. */
function rangeOf(data, errors) {
  let low = Infinity;
  let high = -Infinity;
  data.slice(1).forEach((row, line) => {
    row.forEach((value, index) => {
      if (value === null) return;
      const error = errors[line]?.[index] ?? 0;
      low = Math.min(low, value - error);
      high = Math.max(high, value + error);
    });
  });
  const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

function drawBars(u, errors, strokes) {
  const { ctx } = u;
  const cap = 3 * devicePixelRatio;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([]);
  errors.forEach((row, line) => {
    ctx.strokeStyle = strokes[line];
    ctx.beginPath();
    row.forEach((error, index) => {
      if (!error) return;
      const value = u.data[line + 1][index];
      const x = Math.round(u.valToPos(u.data[0][index], "x", true));
      for (const end of [value - error, value + error]) {
        const y = Math.round(u.valToPos(end, "y", true));
        ctx.moveTo(x - cap, y);
        ctx.lineTo(x + cap, y);
      }
      ctx.moveTo(x, Math.round(u.valToPos(value - error, "y", true)));
      ctx.lineTo(x, Math.round(u.valToPos(value + error, "y", true)));
    });
    ctx.stroke();
  });
  ctx.restore();
}

/* A star at the best point of each line; its edge sets it off from the line and from the bars. */
function drawStars(u, plot, strokes) {
  const { ctx } = u;
  const radius = 9 * devicePixelRatio;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([]);
  ctx.strokeStyle = colour("--back");
  plot.series.forEach((one, line) => {
    if (one.best === null) return;
    const x = u.valToPos(one.best, "x", true);
    const y = u.valToPos(bestOf(one), "y", true);
    ctx.fillStyle = strokes[line];
    ctx.beginPath();
    for (let corner = 0; corner < 10; corner++) {
      const angle = (corner * Math.PI) / 5;
      const far = corner % 2 ? radius * 0.45 : radius;
      ctx.lineTo(x + far * Math.sin(angle), y - far * Math.cos(angle));
    }
    ctx.closePath();
    ctx.fill();
    ctx.stroke();
  });
  ctx.restore();
}

function options(plot, runs, width, aligned) {
  const order = plot.series.map((one) => runs.indexOf(one.run) % COLOURS);
  const strokes = order.map((index) => colour(`--s${index}`));
  const names = nameLines(plot.series);
  const lines = plot.series.map((one, line) => ({
    label: names[line], stroke: strokes[line], width: 2, spanGaps: true,
    dash: dashOf(one, plot), points: { show: true, size: 7, fill: isHollow(one, runs) ? colour("--back") : strokes[line] },
    value: (u, value) => (value === null ? "–" : short(value)),
  }));
  const bases = aligned.bases.map((one) => ({
    label: `${names[plot.series.indexOf(one)]} at step 0`, width: 1, dash: [2, 4], points: { show: false },
    stroke: strokes[plot.series.indexOf(one)], value: (u, value) => (value === null ? "–" : short(value)),
  }));
  const axis = { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  return {
    width, height: 240, series: [{ label: "step" }, ...lines, ...bases], scales: { x: { time: false, range: stepRange }, y: { range: () => rangeOf(aligned.data, aligned.errors) } },
    axes: [{ ...axis, incrs: [1, 2, 5, ...[10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((one) => [one, 2 * one, 5 * one])] }, { ...axis, size: 64, values: (u, ticks) => ticks.map((one) => short(one)) }],
    legend: { show: false }, cursor: { drag: { x: false, y: false } },
    hooks: { draw: [(u) => drawBars(u, aligned.errors, strokes), (u) => drawStars(u, plot, strokes)], setCursor: [(u) => showValues(u)] },
  };
}

function stepRange(u, low, high) {
  const room = (high - low) * 0.04 || 1;
  return [low - room, high + room];
}

/* The values at the step under the pointer, below the plot. */
function showValues(u) {
  const index = u.cursor.idx;
  const values = u.root.closest("figure").querySelectorAll(".value");
  values.forEach((one, line) => {
    const value = index === null || index === undefined ? null : u.data[line + 1]?.[index];
    one.textContent = value === null || value === undefined ? "" : ` · ${short(value)} at ${u.data[0][index]}`;
  });
}

function legendOf(plot, runs) {
  const list = make("ul", null, { className: "legend" });
  nameLines(plot.series).forEach((name, line) => {
    const one = plot.series[line];
    const item = make("li", null, { className: `c${runs.indexOf(one.run) % COLOURS}` });
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [key, value] of Object.entries({ width: 28, height: 8, "aria-hidden": "true" })) svg.setAttribute(key, value);
    const stroke = document.createElementNS(svg.namespaceURI, "path");
    const dash = dashOf(one, plot).join(" ") || "none";
    for (const [key, value] of Object.entries({ d: "M0 4h28", stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": dash })) stroke.setAttribute(key, value);
    const point = document.createElementNS(svg.namespaceURI, "circle");
    for (const [key, value] of Object.entries({ cx: 14, cy: 4, r: 2.75, stroke: "currentColor", fill: isHollow(one, runs) ? colour("--back") : "currentColor" })) point.setAttribute(key, value);
    svg.append(stroke, point);
    const label = make("span", null, { className: "label" });
    const best = one.best === null ? "" : ` ★ best ${short(bestOf(one), 4)} at ${one.best}`;
    label.append(make("bdi", ` ${name}`), make("span", best, { className: "detail" }), make("span", "", { className: "value detail" }));
    item.append(svg, label);
    list.append(item);
  });
  return list;
}

function tableOf(plot) {
  const table = make("table", null);
  table.append(make("caption", `Points of ${plot.name}`, { className: "hidden" }));
  const head = table.createTHead().insertRow();
  for (const name of ["Step", "Line", "Value", "Standard error"]) head.append(make("th", name, { scope: "col" }));
  const body = table.createTBody();
  const names = nameLines(plot.series);
  plot.series.forEach((one, line) => one.steps.forEach((step, index) => {
    const row = body.insertRow();
    const error = one.errors[index];
    const value = short(one.values[index]) + (step === one.best ? " ★ best" : "");
    for (const text of [step, names[line], value, error === null ? "–" : `± ${short(error)}`]) row.insertCell().textContent = text;
  }));
  return table;
}

function describe(plot) {
  const names = nameLines(plot.series);
  const lines = plot.series.map((one, line) => {
    const best = one.best === null ? "" : `, best ${short(bestOf(one))} at step ${one.best}`;
    return `${names[line]}: ${short(one.values.at(-1))} at step ${one.steps.at(-1)}${best}`;
  });
  return `Plot of ${plot.name} against the training step. ${lines.join("; ")}. The table below has all points.`;
}

function addFigure(plot) {
  const figure = make("figure", null);
  const table = make("details", null);
  table.append(make("summary", "Table"));
  const csv = make("a", "CSV", { href: `${plotsBox.dataset.csv}metric=${encodeURIComponent(plot.name)}` });
  csv.setAttribute("aria-label", `CSV of ${plot.name}`);
  const canvas = make("div", null, { className: "canvas" });
  canvas.setAttribute("role", "img");
  figure.append(make("figcaption", plot.name), canvas, make("ul", null, { className: "legend" }), csv, table);
  table.addEventListener("toggle", () => showTable(figure));
  plotsBox.append(figure);
  figures.set(plot.name, figure);
  return figure;
}

function showTable(figure) {
  const details = figure.querySelector("details");
  details.querySelector("table")?.remove();
  if (details.open) details.append(tableOf(figure.points));
}

function draw(plot, runs) {
  const figure = figures.get(plot.name) ?? addFigure(plot);
  const state = JSON.stringify(plot);
  const canvas = figure.querySelector(".canvas");
  const width = Math.max(200, Math.floor(figure.clientWidth));
  if (figure.state === state && figure.plot.width === width) return;
  Object.assign(figure, { state, points: plot });
  figure.plot?.destroy();
  const aligned = align(plot);
  figure.plot = new uPlot(options(plot, runs, width, aligned), aligned.data, canvas);
  canvas.setAttribute("aria-label", describe(plot));
  figure.querySelector(".legend").replaceWith(legendOf(plot, runs));
  showTable(figure);
}

const AGAIN_MS = 5000;
let known = [];
let runs = [];
let again = null;

function drawAll(isAnew) {
  for (const [name, figure] of figures) {
    if (isAnew) figure.state = null;
    if (!known.some((one) => one.name === name)) {
      figure.plot?.destroy();
      figure.remove();
      figures.delete(name);
    }
  }
  for (const plot of known) draw(plot, runs);
}

async function load() {
  const loading = document.getElementById("plots-loading");
  clearTimeout(again);
  if (!figures.size && document.getElementById("plot-names").textContent !== "0") loading.hidden = false;
  try {
    const answer = await fetch(plotsBox.dataset.source, { headers: { "X-Unshard-Page": "1" } });
    if (!answer.ok) throw new Error(`the server answers with ${answer.status}`);
    ({ plots: known, runs } = await answer.json());
    drawAll(false);
    loading.hidden = true;
  } catch (error) {
    loading.textContent = `The plots cannot be loaded: ${error.message}. Trying again.`;
    loading.hidden = false;
    again = setTimeout(load, AGAIN_MS);
  }
}

load();
document.addEventListener("refreshed", load);
addEventListener("resize", () => drawAll(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(true));
