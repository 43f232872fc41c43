"use strict";
/* The plots of a view: one figure per metric, with error bars, stars, the base model and a table. */

const COLOURS = 6;
const plotsBox = document.getElementById("plots");
const figures = new Map();
const hidden = new Set(); // names of lines
const settings = document.querySelectorAll("#plot-tools input");
const [logX, logY, fromStep, toStep] = settings;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, text, fields = {}) => Object.assign(document.createElement(tag), text === null ? {} : { textContent: text }, fields);
const short = (value, digits = 6) => Number(value.toPrecision(digits)).toString();
/* Runs share colours; a later run with the same colour has hollow points. */
const isHollow = (one, runs) => runs.indexOf(one.run) % (2 * COLOURS) >= COLOURS;
/* Solid, dashed for EMA; dotted if another line differs in its settings only. */
function dashOf(one, plot) {
  const isFurther = plot.series.some((other) => other.settings < one.settings && ["run", "weights", "profile"].every((key) => other[key] === one[key]));
  const dash = one.weights === "ema" ? [8, 5] : [];
  return isFurther ? [...dash, 2, 4] : dash;
}

/* The colour is of the run; with a single run, of profile and settings. */
function colourOf(one, plot, runs) {
  if (runs.length > 1) return runs.indexOf(one.run) % COLOURS;
  const of = (line) => JSON.stringify([line.profile, line.settings]);
  return [...new Set(plot.series.map(of))].indexOf(of(one)) % COLOURS;
}

/* The name of a line has run, weights, and what else differs between the lines of the plot. */
function nameLines(series) {
  const several = (key) => new Set(series.map((one) => one[key])).size > 1;
  return series.map((one) => {
    const parts = [one.run, one.weights];
    if (several("profile")) parts.push(one.profile);
    if (one.settings) parts.push(one.settings);
    return parts.join(" · ");
  });
}

/* A logarithmic scale of values needs positive ones. */
const isLogarithmic = (plot) => logY.checked && plot.series.every((one) => one.values.every((value) => value > 0));
const bestOf = (one) => one.values[one.steps.indexOf(one.best)];

/* Steps of all lines together, and each line's values at them, in a unit.

Differences of the largest floats are infinite, and an axis of the smallest has no ticks. */
function align(plot) {
  const steps = [...new Set(plot.series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  let largest = 0;
  for (const value of plot.series.flatMap((one) => [...one.values, ...one.errors])) largest = Math.max(largest, Math.abs(value));
  const isExtreme = !isLogarithmic(plot) && largest && (largest > 1e15 || largest < 1e-12);
  const unit = isExtreme ? Math.max(10 ** Math.floor(Math.log10(largest)), Number.MIN_VALUE) : 1;
  const spread = (one, values) => {
    const row = Array(steps.length).fill(null);
    one.steps.forEach((step, index) => (row[at.get(step)] = values[index] === null ? null : values[index] / unit));
    return row;
  };
  const bases = plot.series.filter((one) => one.base !== null);
  return {
    data: [steps, ...plot.series.map((one) => spread(one, one.values)), ...bases.map((one) => steps.map(() => one.base / unit))],
    errors: plot.series.map((one) => spread(one, one.errors)),
    bases,
    unit,
  };
}

/* The range of steps that is entered, of a plot; null: all. */
function zoomOf(u) {
  const [first, last] = [fromStep, toStep].map((one) => (one.value === "" ? null : one.valueAsNumber));
  if (first === null && last === null) return null;
  const low = first ?? Math.min(u.data[0][0], last - 1);
  const high = last ?? Math.max(u.data[0].at(-1), low + 1);
  return low === high ? [low - 0.5, low + 0.5] : [Math.min(low, high), Math.max(low, high)];
}

/* The range of all visible bars and of the lines at the edges, with a margin. */
function rangeOf(u, errors, isLog) {
  let low = Infinity;
  let high = -Infinity;
  const [min, max] = zoomOf(u) ?? [-Infinity, Infinity];
  const across = logX.checked ? Math.asinh : Number;
  const [up, back] = isLog ? [Math.log, Math.exp] : [Number, Number];
  const include = (bottom, top) => ([low, high] = [Math.min(low, bottom), Math.max(high, top)]);
  u.data.slice(1).forEach((row, line) => {
    if (!u.series[line + 1].show) return;
    let before = null;
    row.forEach((value, index) => {
      if (value === null) return;
      const step = u.data[0][index];
      for (const edge of [min, max]) {
        if (before === null || edge <= before.step || edge >= step) continue;
        const part = (across(edge) - across(before.step)) / (across(step) - across(before.step));
        const crossing = back(up(before.value) * (1 - part) + up(value) * part);
        include(crossing, crossing);
      }
      before = { step, value };
      if (step < min || step > max) return;
      const error = errors[line]?.[index] ?? 0;
      include(isLog && value <= error ? value : value - error, value + error);
    });
  });
  if (low > high) return [isLog ? 0.1 : 0, 1];
  if (isLog) return [Math.max(low / 1.08, Number.MIN_VALUE), Math.min(Math.max(high * 1.08, low * 2), Number.MAX_VALUE)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

/* Draw inside the plot only: a zoomed plot does not show all steps. */
function paint(u, draw) {
  const { ctx, bbox: { left, top, width, height } } = u;
  const room = zoomOf(u) ? 0 : 10 * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left - room, top - room, width + 2 * room, height + 2 * room);
  ctx.clip();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([]);
  draw(ctx);
  ctx.restore();
}

function drawBars(u, ctx, errors, strokes) {
  const cap = 3 * devicePixelRatio;
  errors.forEach((row, line) => {
    if (!u.series[line + 1].show) return;
    ctx.strokeStyle = strokes[line];
    ctx.beginPath();
    row.forEach((error, index) => {
      if (!error) return;
      const value = u.data[line + 1][index];
      const x = Math.round(u.valToPos(u.data[0][index], "x", true));
      const isLow = u.scales.y.distr === 3 && value <= error; // the end has no logarithm
      const low = isLow ? u.scales.y.min : value - error;
      for (const end of [...(isLow ? [] : [low]), value + error]) {
        const y = Math.round(u.valToPos(end, "y", true));
        ctx.moveTo(x - cap, y);
        ctx.lineTo(x + cap, y);
      }
      ctx.moveTo(x, Math.round(u.valToPos(low, "y", true)));
      ctx.lineTo(x, Math.round(u.valToPos(value + error, "y", true)));
    });
    ctx.stroke();
  });
}

/* A star at the best point of each line, with an edge against the line and the bars. */
function drawStars(u, ctx, plot, strokes) {
  const radius = 9 * devicePixelRatio;
  ctx.strokeStyle = colour("--back");
  plot.series.forEach((one, line) => {
    if (one.best === null || !u.series[line + 1].show) return;
    const x = u.valToPos(one.best, "x", true);
    const y = u.valToPos(u.data[line + 1][u.data[0].indexOf(one.best)], "y", true);
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
}

/* The ticks of a logarithmic axis: 1 to 9 within a decade, fewer for longer ranges. */
const inDecades = {
  filter: (u, ticks) => ticks,
  incrs: (u, axis, low, high) => [Math.max(5, high - low)], // uPlot draws no ticks without one that fits
  splits: (u, axis, low, high) => {
    const digits = high < 10 * low ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : high < 1000 * low ? [1, 2, 5] : [1];
    const [first, last] = [low > 0 ? Math.floor(Math.log10(low)) : 0, Math.ceil(Math.log10(high))];
    const every = Math.max(1, Math.ceil((last - first) / 12));
    const decades = Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, place) => 10 ** (first + place * every));
    return [0, ...decades.flatMap((one) => digits.map((digit) => one * digit))].filter((one) => low <= one && one <= high);
  },
};

function options(plot, runs, width, aligned) {
  const order = plot.series.map((one) => colourOf(one, plot, runs));
  const strokes = order.map((index) => colour(`--s${index}`));
  const names = nameLines(plot.series);
  const lines = plot.series.map((one, line) => ({
    label: names[line], stroke: strokes[line], width: 2, spanGaps: true, show: !hidden.has(names[line]),
    dash: dashOf(one, plot), points: { show: true, size: 7, fill: isHollow(one, runs) ? colour("--back") : strokes[line] },
  }));
  const bases = aligned.bases.map((one) => {
    const line = plot.series.indexOf(one);
    return { width: 1, dash: [2, 4], points: { show: false }, stroke: strokes[line], show: lines[line].show };
  });
  const axis = { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const values = (u, ticks) => ticks.map((one) => short(one));
  const inUnit = (u, ticks) => ticks.map((one) => (Number.isFinite(one * aligned.unit) ? short(one * aligned.unit) : ""));
  const whole = [1, 2, 5, ...[10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((one) => [one, 2 * one, 5 * one])];
  const isLog = isLogarithmic(plot);
  // Step 0 has no logarithm: the scale is linear below 1.
  const scales = {
    x: { time: false, distr: logX.checked ? 4 : 1, range: stepRange },
    y: { distr: isLog ? 3 : 1, range: (u) => rangeOf(u, aligned.errors, isLog) },
  };
  return {
    width, height: 240, series: [{ label: "step" }, ...lines, ...bases], scales,
    axes: [{ ...axis, values, ...(logX.checked ? inDecades : { incrs: whole }) }, { ...axis, size: 72, values: inUnit, ...(isLog ? inDecades : {}) }],
    legend: { show: false },
    cursor: {
      drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => setZoom("", "") },
      sync: { key: "steps", scales: ["x", null], filters: { pub: (type) => type.startsWith("mousem") || type === "mouseleave" } },
    },
    hooks: {
      draw: [(u) => paint(u, (ctx) => drawBars(u, ctx, aligned.errors, strokes)), (u) => paint(u, (ctx) => drawStars(u, ctx, plot, strokes))],
      setCursor: [(u) => showValues(u, plot, order, names)], setSelect: [zoomTo],
    },
  };
}

function stepRange(u, low, high) {
  const zoom = zoomOf(u);
  if (zoom) return zoom;
  const room = (high - low) * 0.04 || 1;
  return logX.checked ? [low, high + (low === high)] : [low - room, high + room];
}

function zoomTo(u) {
  const { left, width } = u.select;
  if (width < 4) return;
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  setZoom(Math.floor(u.posToVal(left, "x")), Math.ceil(u.posToVal(left + width, "x")));
}

function setZoom(first, last) {
  [fromStep.value, toStep.value] = [first, last];
  keepSettings();
  for (const { plot } of figures.values()) plot.setScale("x", { min: plot.data[0][0], max: plot.data[0].at(-1) });
}

/* The settings are in the address, and so in the links and the form that lead to other plots. */
function keepSettings() {
  document.getElementById("unzoom").hidden = !fromStep.value && !toStep.value;
  history.replaceState(null, "", withSettings(location));
  for (const link of document.querySelectorAll(".pages a, .tools a")) link.href = withSettings(link);
}

function withSettings({ href }) {
  const address = new URL(href);
  putSettings(address.searchParams);
  return address.href;
}

function putSettings(fields) {
  for (const one of settings) {
    fields.delete(one.id);
    if (one.type === "checkbox" ? one.checked : one.value) fields.set(one.id, one.type === "checkbox" ? "1" : one.value);
  }
}

/* The values at the step under the pointer, next to it, in all plots with this step. */
function showValues(u, plot, order, names) {
  const tip = u.over.querySelector(".tip") ?? u.over.appendChild(make("div", null, { className: "tip" }));
  const { idx, left } = u.cursor;
  const [min, max] = zoomOf(u) ?? [-Infinity, Infinity];
  tip.hidden = left < 0 || typeof idx !== "number" || u.data[0][idx] < min || u.data[0][idx] > max;
  if (tip.hidden) return;
  const lines = [make("p", `step ${u.data[0][idx]}`)];
  plot.series.forEach((one, line) => {
    const at = one.steps.indexOf(u.data[0][idx]);
    if (at < 0 || !u.series[line + 1].show) return;
    const error = one.errors[at] === null ? "" : ` ± ${short(one.errors[at], 3)}`;
    const text = make("p", "● ", { className: `c${order[line]}` });
    text.append(make("bdi", `${short(one.values[at])}${error} ${names[line]}`));
    lines.push(text);
  });
  tip.replaceChildren(...lines);
  const right = u.over.clientWidth - left;
  const side = left > right ? { left: "", right: `${right + 12}px` } : { left: `${left + 12}px`, right: "" };
  Object.assign(tip.style, { ...side, maxWidth: `${Math.max(left, right) - 12}px` });
}

function legendOf(plot, runs) {
  const list = make("ul", null, { className: "legend" });
  nameLines(plot.series).forEach((name, line) => {
    const one = plot.series[line];
    const item = make("li", null, { className: `c${colourOf(one, plot, runs)}` });
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
    label.append(make("bdi", ` ${name}`), make("span", best, { className: "detail" }));
    const button = make("button", null, { type: "button", title: "hide or show in all plots" });
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    button.addEventListener("click", () => hide(name));
    button.append(svg, label);
    item.append(button);
    list.append(item);
  });
  return list;
}

function hide(name) {
  if (!hidden.delete(name)) hidden.add(name);
  const from = document.activeElement?.closest(".legend");
  const place = from ? [...from.querySelectorAll("button")].indexOf(document.activeElement) : -1;
  const figure = from?.closest("figure");
  drawAll(true);
  figure?.querySelectorAll(".legend button")[place]?.focus();
}

/* A text with its middle left out, if it is too wide. */
function fit(ctx, text, width) {
  let [half, shown] = [Math.ceil(text.length / 2), text];
  while (half > 1 && ctx.measureText(shown).width > width) {
    half -= 1;
    shown = `${text.slice(0, half)}…${text.slice(-half)}`;
  }
  return shown;
}

/* A picture of a plot with its name and its legend. */
function picture(figure) {
  const { plot, points } = figure;
  const ratio = devicePixelRatio;
  const names = nameLines(points.series);
  const shown = names.map((name, line) => line).filter((line) => plot.series[line + 1].show);
  const line = 20 * ratio;
  const { width, height } = plot.ctx.canvas;
  const canvas = make("canvas", null, { width, height: height + line * (shown.length + 2) });
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = colour("--back");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = colour("--text");
  ctx.font = `600 ${14 * ratio}px system-ui, sans-serif`;
  ctx.fillText(fit(ctx, points.name, width - line), line / 2, line);
  ctx.drawImage(plot.ctx.canvas, 0, line * 1.5);
  ctx.font = `${13 * ratio}px system-ui, sans-serif`;
  shown.forEach((one, place) => {
    const [y, { dash, points: { fill }, stroke }] = [height + line * (place + 2), plot.series[one + 1]];
    ctx.strokeStyle = stroke();
    ctx.lineWidth = 2 * ratio;
    ctx.setLineDash(dash.map((part) => part * ratio));
    ctx.beginPath();
    ctx.moveTo(line / 2, y - 4 * ratio);
    ctx.lineTo(line * 2.5, y - 4 * ratio);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.arc(line * 1.5, y - 4 * ratio, 3 * ratio, 0, 2 * Math.PI);
    ctx.fillStyle = fill();
    ctx.fill();
    ctx.stroke();
    ctx.fillStyle = colour("--text");
    ctx.fillText(fit(ctx, names[one], width - line * 3.5), line * 3, y);
  });
  const name = `${runs.join("-")}-${points.name}`.replace(/[^\w.-]+/g, "-").slice(0, 100);
  make("a", null, { href: canvas.toDataURL(), download: `${name}.png` }).click();
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
  const tools = make("p", null, { className: "tools" });
  const add = (text, address, of) => {
    const one = make(address ? "a" : "button", text, address ? { href: address } : { type: "button", className: "plain" });
    if (address) one.href = withSettings(one);
    one.setAttribute("aria-label", `${text} ${of} ${plot.name}`);
    tools.append(one);
    return one;
  };
  const { csv, here } = plotsBox.dataset;
  const name = encodeURIComponent(plot.name);
  add("PNG", null, "of").addEventListener("click", () => picture(figure));
  if (csv) {
    add("CSV", `${csv}&metric=${name}`, "of");
    add("Show first", `${here}&metric=${name}`, "of all:");
    if (plot.subtasks) add(`${plot.subtasks} subtasks`, `${here}&q=${encodeURIComponent(`${plot.task}_`)}`, "of");
  }
  tools.append(make("span", "Linear: a value is 0 or less.", { className: "detail linear", hidden: true }));
  const canvas = make("div", null, { className: "canvas" });
  canvas.setAttribute("role", "img");
  figure.append(make("figcaption", plot.name), canvas, make("ul", null, { className: "legend" }), tools, table);
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
  figure.querySelector(".linear").hidden = !logY.checked || isLogarithmic(plot);
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

for (const one of settings) {
  const value = new URL(location.href).searchParams.get(one.id) ?? "";
  if (one.type === "checkbox") one.checked = value !== "";
  else one.value = value;
  one.addEventListener("change", () => {
    setZoom(fromStep.value, toStep.value);
    if (one.type === "checkbox") drawAll(true);
  });
}
keepSettings();
document.getElementById("unzoom").addEventListener("click", () => setZoom("", ""));
document.querySelector("form[role=search]")?.addEventListener("formdata", ({ formData }) => putSettings(formData));
const saved = document.getElementById("plots-data");
if (saved) {
  ({ plots: known, runs } = JSON.parse(saved.textContent));
  drawAll(false);
} else {
  load();
  document.addEventListener("refreshed", load);
}
addEventListener("resize", () => drawAll(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(true));
