"use strict";
/* Refreshes a view, and sends the requests of its buttons and forms.

The server renders every view. After an event about a job, this script fetches the same address
again and replaces the elements marked `data-live` whose content differs. Only rendered templates,
in which everything is escaped, become markup here; logs are set as text. */

const POLL_MS = 5000;
const SOON_MS = 300;
const LOG_KEPT = 1 << 18; // characters
const HEADERS = { "X-Unshard-Page": "1" };

const ROOT = document.body.dataset.root ?? ""; // behind a proxy

const byId = (id) => document.getElementById(id);

/* Show times in the reader's time zone. */
function localise(root) {
  for (const one of root.querySelectorAll("time:not([title])")) {
    const time = new Date(one.dateTime);
    one.title = one.dateTime;
    one.textContent = time.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  }
}

/* ---- Staying up to date ---- */

let since = Number(document.body.dataset.since ?? -1);
let fresh = new Date();
let source = null;
let isOpen = false;
let pending = null;
let isRefreshing = false;
const shown = new Map();

function goToLogIn() {
  location.assign(`${ROOT}/view/log-in?next=${encodeURIComponent(location.pathname + location.search)}`);
}

function setStale(why) {
  const banner = byId("stale");
  if (!why) {
    banner.hidden = true;
    return;
  }
  const text = `${why} This page is from ${fresh.toLocaleTimeString()}. Trying again.`;
  if (banner.textContent !== text) banner.textContent = text;
  banner.hidden = false;
}

async function refresh() {
  pending = null;
  if (isRefreshing) {
    later(SOON_MS);
    return;
  }
  isRefreshing = true;
  try {
    const answer = await fetch(location.href, { headers: { ...HEADERS, Accept: "text/html" } });
    if (answer.status === 401) return goToLogIn();
    if (!answer.ok) {
      setStale(`The server answers with an error (${answer.status}).`);
      return;
    }
    replaceLive(new DOMParser().parseFromString(await answer.text(), "text/html"));
    fresh = new Date();
    setStale("");
    document.dispatchEvent(new CustomEvent("refreshed"));
  } catch {
    setStale("The server does not answer.");
  } finally {
    isRefreshing = false;
  }
}

function replaceLive(page) {
  const focused = document.activeElement?.id;
  const checked = new Set([...document.querySelectorAll("input[name=run]:checked")].map((one) => one.value));
  const open = [...document.querySelectorAll("[data-live] details[open]")].map((one) => one.id);
  for (const now of page.querySelectorAll("[data-live]")) {
    const old = byId(now.id);
    if (!old || shown.get(now.id) === now.innerHTML) continue;
    shown.set(now.id, now.innerHTML);
    old.replaceChildren(...now.childNodes);
    for (const [name, value] of Object.entries(now.dataset)) old.dataset[name] = value;
    localise(old);
    for (const id of open) byId(id)?.setAttribute("open", "");
    for (const box of old.querySelectorAll("input[name=run]")) box.checked = checked.has(box.value);
  }
  if (focused && document.activeElement?.id !== focused) {
    const next = byId(focused) ?? byId(focused.replace("cancel-", "retry-")) ?? byId(focused.replace("retry-", "cancel-"));
    (next ?? byId("main")).focus({ preventScroll: true });
  }
}

function later(delay) {
  if (pending === null) pending = setTimeout(refresh, delay);
}

function follow() {
  source?.close();
  isOpen = false;
  source = new EventSource(`${ROOT}/api/v1/events?since=${since}`);
  source.onopen = () => {
    isOpen = true;
    later(0); // for changes while there was no connection
  };
  source.onerror = () => {
    isOpen = false;
    source.close();
    later(0);
  };
  source.addEventListener("job", (event) => {
    const job = JSON.parse(event.data);
    since = Math.max(since, job.number);
    announce(job);
    later(SOON_MS);
  });
}

function announce(event) {
  const isShown = document.querySelector(`[href="${ROOT}/view/jobs/${event.job?.id}"], [data-job="${event.job?.id}"]`);
  if (isShown) byId("announce").textContent = `Job ${event.job.id.slice(0, 8)}: ${event.status}`;
}

/* Poll the view without events (a buffering proxy, a server that is away), and while a job runs:
its progress makes no events. */
function tick() {
  if (document.hidden) return;
  const isClosed = source === null || source.readyState === EventSource.CLOSED;
  if (isClosed) follow();
  if (!isOpen || document.querySelector("[data-running]")) later(0);
}

function stayUpToDate() {
  for (const one of document.querySelectorAll("[data-live]")) shown.set(one.id, one.innerHTML);
  follow();
  setInterval(tick, POLL_MS);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close(); // browsers have few connections to a host, for all tabs together
      isOpen = false;
    } else tick();
  });
}

/* ---- Buttons and forms ---- */

async function ask(method, address, body) {
  const options = { method, headers: { ...HEADERS, Accept: "application/json" } };
  if (body) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new Error("The server does not answer. Try again later.");
  }
  if (answer.status === 401 && !document.body.contains(byId("log-in"))) goToLogIn();
  const fields = answer.status === 204 ? {} : await answer.json().catch(() => ({}));
  if (answer.ok) return fields;
  const error = fields.error ?? { message: fields.detail ?? `The server answers with ${answer.status}.` };
  const parts = [error.message, error.expected && `expected: ${error.expected}`, error.found && `found: ${error.found}`, error.hint];
  throw new Error(parts.filter(Boolean).join("; "));
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button || button.ariaBusy === "true") return;
  const { action, job } = button.dataset;
  if (action === "cancel" && !confirm(`Cancel job ${job.slice(0, 8)}?`)) return;
  const reason = action === "hide" ? prompt("Reason for hiding these results in curves and tables:") : "";
  if (action === "hide" && !reason) return;
  button.ariaBusy = "true"; // a button that is disabled would lose the focus
  try {
    if (action === "cancel") await ask("DELETE", `${ROOT}/api/v1/jobs/${job}`);
    else {
      const changed = await ask("POST", `${ROOT}/api/v1/jobs/${job}/${action}`, reason ? { reason } : undefined);
      if (action === "retry" && changed.id !== job) return void (location.href = `${ROOT}/view/jobs/${changed.id}`);
    }
    await refresh();
  } catch (error) {
    byId("announce").textContent = error.message;
    alert(error.message);
  } finally {
    button.ariaBusy = "false";
  }
});

function onSubmit(form, send) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const problem = byId(`${form.id}-error`);
    const button = form.querySelector("button");
    problem.hidden = true;
    button.disabled = true;
    try {
      await send(new FormData(form));
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    } finally {
      button.disabled = false;
    }
  });
}

async function sendJob(fields) {
  const body = { checkpoint: fields.get("checkpoint").trim(), profile: fields.get("profile"), weights: fields.get("weights") };
  body.tasks = fields.get("tasks").split(",").map((one) => one.trim()).filter(Boolean);
  if (fields.get("run").trim()) body.run = fields.get("run").trim();
  if (fields.get("step")) body.step = Number(fields.get("step"));
  const job = await ask("POST", `${ROOT}/api/v1/jobs`, body);
  location.assign(`${ROOT}/view/jobs/${job.id}`);
}

async function sendToken(fields) {
  await ask("POST", `${ROOT}/view/log-in`, { token: fields.get("token") });
  const next = new URLSearchParams(location.search).get("next") ?? `${ROOT}/`;
  location.assign(/^\/(?![/\\])/.test(next) ? next : `${ROOT}/`);
}

/* ---- The log ---- */

const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/* A log without escape sequences and earlier states of progress bars; other controls as \x... */
function plain(text) {
  const lines = text.replace(ESCAPES, "").replace(/\r+\n/g, "\n").split("\n");
  const last = lines.map((line) => line.slice(line.lastIndexOf("\r", line.length - 2) + 1).replace("\r", ""));
  return last.join("\n").replace(CONTROLS, (one) => `\\x${one.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

async function followLog(box) {
  let offset = Number(box.dataset.offset);
  let raw = "";
  if (offset > 0) byId("log-note").textContent = "The end of the log is shown.";
  const read = async () => {
    const answer = await fetch(`${box.dataset.source}?offset=${offset}`, { headers: HEADERS });
    const part = await answer.json();
    if (!answer.ok) {
      byId("log-note").textContent = part.error.message;
      return false;
    }
    if (part.text) {
      if (part.offset < offset) raw = ""; // a new attempt
      offset = part.offset;
      raw += part.text;
      if (raw.length > LOG_KEPT) {
        raw = raw.slice(-LOG_KEPT);
        byId("log-note").textContent = "The end of the log is shown.";
      }
      const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      box.textContent = plain(raw);
      if (isAtEnd) box.scrollTop = box.scrollHeight;
      return true;
    }
    if (!raw) box.textContent = part.ended ? "The log is empty." : "Nothing has been written yet.";
    return false;
  };
  let isReading = false;
  const readAll = async () => {
    if (isReading || document.hidden) return;
    isReading = true;
    try {
      while (await read());
    } catch {
      // The banner reports that the server does not answer.
    } finally {
      isReading = false;
    }
  };
  await readAll();
  const isRunning = () => ["running", "queued"].includes(byId("live-job").dataset.state);
  setInterval(() => isRunning() && readAll(), 1000);
  document.addEventListener("refreshed", readAll);
}

localise(document);
if (since >= 0) stayUpToDate();
if (byId("submit")) onSubmit(byId("submit"), sendJob);
if (byId("log-in")) onSubmit(byId("log-in"), sendToken);
if (byId("log")) followLog(byId("log"));
byId("log-out")?.addEventListener("click", async () => {
  await ask("POST", `${ROOT}/view/log-out`);
  location.assign(`${ROOT}/view/log-in`);
});
