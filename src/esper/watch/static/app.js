// The page: an address such as #view=hosts&run=0123456789ab names all that is shown.
// A stream of the current run appends new rows, or asks views to load again.

import { Chart, clear, cut, el, figure, kind, redraw, text } from "./charts.js";
import { showHost, showHosts } from "./hosts.js";

const main = document.getElementById("main");
const picker = document.getElementById("run");
const status = document.getElementById("state");
const VIEWS = ["runs", "learning", "hosts", "comparison"];
const MOST_POINTS = 1500, MOST_CURVES = 6, EVERY = 1500; // milliseconds between two loads
const LEARNING = [
  ["Return", "mean_return"], ["Score", "mean_score"], ["KL", "kl"], ["Clip fraction", "clip_fraction"],
  ["Explained variance", "explained_variance"], ["Value loss", "value_loss"], ["Gradient norm", "grad_norm"], ["Parameters added", "added"],
];
let runs = [], stream = null, streamed = null, data = null, view = null, timer = null, loaded = 0, turn = 0, kept = {};

const given = () => new URLSearchParams(location.hash.slice(1));
function link(changes) {
  const next = given();
  for (const [name, value] of Object.entries(changes)) value === null ? next.delete(name) : next.set(name, value);
  return `#${next}`;
}

async function load(path) {
  const answer = await fetch(path);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? `error ${answer.status}`);
  return found;
}

const current = () => runs.find((run) => run.id === given().get("run")) ?? runs[0];
const numbers = (name) => (given().has(name) ? Number(given().get(name)) : null);

function badge(node, state, trouble = "") {
  node.className = `badge state-${["running", "finished", "stopped"].includes(state) ? state : "lost"}`;
  node.textContent = trouble ? `${state}: ${cut(trouble, 160)}` : state;
}

async function listRuns() {
  const found = await load("/api/runs");
  runs = found.runs.sort((a, b) => (b.id === found.first) - (a.id === found.first));
  const run = current();
  const shape = JSON.stringify(runs.map((each) => [each.id, each.state]));
  if (shape !== picker.dataset.shape) {
    picker.dataset.shape = shape;
    picker.replaceChildren(...runs.map((each) => el("option", { value: each.id }, `${cut(each.name, 40)} (${each.state})`)));
    if (view === "runs") reload();
  }
  if (run) picker.value = run.id;
  if (run && document.activeElement !== picker && !stream) badge(status, run.state, run.trouble);
}

// ---- views ----

async function showRuns() {
  const chosen = (given().get("with") ?? "").split(",").filter((id) => runs.some((run) => run.id === id));
  const plotted = (chosen.length ? chosen : runs.slice(0, 1).map((run) => run.id)).slice(0, MOST_CURVES);
  const curves = await Promise.all(plotted.map((id) => load(`/api/runs/${id}/curve`).catch((error) => ({ error: error.message }))));
  return () => {
    const rows = runs.map((run) => {
      const curve = curves[plotted.indexOf(run.id)];
      const last = curve?.overview?.last;
      const state = el("span");
      badge(state, run.state, run.trouble);
      const box = el("input", { type: "checkbox", "aria-label": `plot ${cut(run.name)}`, onchange: (event) => {
        const next = event.target.checked ? [...plotted, run.id] : plotted.filter((id) => id !== run.id);
        location.hash = link({ with: next.slice(-MOST_CURVES).join(",") });
      } });
      box.checked = plotted.includes(run.id);
      return el("tr", {}, el("td", {}, box), el("th", { scope: "row" }, el("a", { href: `#view=learning&run=${run.id}` }, cut(run.name))),
        el("td", {}, state), el("td", {}, cut(run.kind, 20) || figure(null)), el("td", {}, cut(run.began, 19) || figure(null)),
        ...(curve ? [el("td", {}, figure(last?.round ?? null)), el("td", {}, figure(last?.mean_return ?? null))] : [el("td", {}, "–"), el("td", {}, "–")]));
    });
    const box = el("div");
    main.append(el("h1", {}, "Runs"), box,
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of runs" }, el("table", {}, el("thead", {}, el("tr", {}, ["plot", "run", "state", "kind", "began", "round", "return"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows))));
    if (!runs.length) main.append(el("p", { class: "unmeasured" }, "There are no runs in this folder."));
    new Chart(box, "Return", "environment steps").update(plotted.map((id, at) => ({
      name: runs.find((run) => run.id === id).name, xs: curves[at].env_steps ?? [], ys: curves[at].mean_return ?? [] })));
  };
}

async function showLearning(run) {
  const found = await load(`/api/runs/${run.id}/learning`);
  return () => {
    const box = el("div", { class: "grid" }), facts = el("dl", { class: "facts" }), words = el("div", { class: "grid" });
    main.append(el("h1", {}, cut(run.name)), facts, box, words);
    const charts = LEARNING.map(([title]) => new Chart(box, title, "environment steps"));
    const entropy = new Chart(box, "Entropy per head", "environment steps"), tested = new Chart(box, "Validation return", "environment steps");
    const scored = new Chart(box, "Validation score", "environment steps");
    data = { ...found, draw() {
      const { rounds, heads, validation, overview } = data;
      const xs = rounds.env_steps ?? [];
      LEARNING.forEach(([, name], at) => charts[at].update(xs.length ? [{ name: "", xs, ys: rounds[name] }] : []));
      entropy.update(Object.entries(heads).slice(0, 16).flatMap(([head, table]) => split(table, () => head, "entropy", rounds)));
      const arms = (at) => `${validation.controller[at]} ${validation.task[at]}`;
      tested.update(split(validation, arms, "mean_return", rounds));
      scored.update(split(validation, arms, "mean_score", rounds));
      const last = overview.last ?? {}, refused = (rounds.refused ?? []).reduce((sum, each) => sum + (each ?? 0), 0);
      const planned = [overview.rounds_planned && `${text(overview.rounds_planned)} rounds`, overview.env_steps_planned && `${text(overview.env_steps_planned)} steps`, overview.minutes_planned && `${text(overview.minutes_planned)} minutes`].filter(Boolean).join(" or ");
      const rows = { round: figure(last.round), "environment steps": figure(last.env_steps), return: figure(last.mean_return), budget: planned || figure(null),
        "time so far": figure(last.seconds === null || last.seconds === undefined ? null : `${text(last.seconds, 3)} s`.trim()), "time left": el("span", {}, overview.seconds_left === null ? "unknown" : `${text(overview.seconds_left, 2)} s`),
        processes: figure(overview.attempts), "refused updates": el("span", { class: refused ? "broken" : rounds.round ? "value" : "unmeasured" }, rounds.round ? text(refused) : "not measured") };
      if (typeof last.seconds === "number") rows["time so far"] = el("span", { class: "value" }, `${text(last.seconds, 3)} s`);
      facts.replaceChildren(...Object.entries(rows).flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)]));
      const list = (title, items) => el("section", {}, el("h2", {}, title), items.length ? el("ul", { class: "small" }, items) : el("p", { class: "quiet" }, "none"));
      words.replaceChildren(
        list("Notes", data.notes.map((note) => el("li", {}, el("b", {}, cut(note.kind, 20)), ` round ${note.round}: ${cut(note.text, 300)}`))),
        list("Last events", data.events.map((row) => el("li", {}, `decision ${row.step}, ${cut(row.task, 20)} host ${row.env}: ${cut(row.what, 20)} ${cut(row.blueprint ?? "", 30)} in slot ${row.slot}`))));
    } };
    data.draw();
  };
}

// One line per value of `key`, over the environment steps of the rounds.
function split(table, key, name, rounds) {
  const steps = rounds.env_steps ?? [], at = (round) => {
    const found = rounds.round?.findIndex((each) => each >= round) ?? -1;
    return round === 0 ? 0 : found < 0 ? steps.at(-1) ?? round : steps[found];
  };
  const lines = new Map();
  (table.round ?? []).forEach((round, row) => {
    const label = key(row);
    if (!lines.has(label)) lines.set(label, { name: label, xs: [], ys: [] });
    const line = lines.get(label), x = at(round);
    if (line.xs.at(-1) === x) line.ys[line.ys.length - 1] = table[name][row];
    else if (!(x < line.xs.at(-1))) { line.xs.push(x); line.ys.push(table[name][row]); }
  });
  return [...lines.values()].slice(0, 16);
}

async function showComparison(run) {
  const arms = await load(`/api/runs/${run.id}/comparison`);
  return () => {
    main.append(el("h1", {}, "Comparison"), el("p", { class: "quiet" }, "Mean return on the test hosts, with 95 % confidence intervals."));
    if (!arms.length) main.append(el("p", { class: "unmeasured" }, "This run has no final evaluation yet."));
    for (const task of [...new Set(arms.map((arm) => arm.task))]) {
      const own = arms.filter((arm) => arm.task === task).sort((a, b) => Number(b.mean) - Number(a.mean));
      const ends = own.flatMap((arm) => [arm.low, arm.high]).filter((end) => typeof end === "number");
      const [low, high] = [Math.min(...ends), Math.max(...ends)], place = (value) => `${(98 * (value - low)) / Math.max(high - low, 1e-12)}%`;
      const rows = own.map((arm) => el("tr", {}, el("th", { scope: "row" }, cut(arm.controller, 40)), el("td", {}, figure(arm.mean)),
        el("td", {}, figure(arm.low)), el("td", {}, figure(arm.high)), el("td", {}, figure(arm.added, 3)), el("td", {}, text(arm.hosts)),
        el("td", { class: "range" }, ["mean", "low", "high"].every((end) => typeof arm[end] === "number")
          ? [el("i", { style: { left: place(arm.low), width: `calc(${place(arm.high)} - ${place(arm.low)})` } }), el("b", { style: { left: place(arm.mean) } })]
          : el("span", { class: kind(arm.low) }, "no interval"))));
      main.append(el("h2", {}, cut(task)), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": cut(task) }, el("table", {}, el("thead", {}, el("tr", {}, ["controller", "mean", "low", "high", "added", "hosts", "interval"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows))));
    }
  };
}

async function showOneOrAllHosts(run, fresh) {
  if (numbers("env") === null) {
    const hosts = await load(`/api/runs/${run.id}/hosts`);
    return () => showHosts(main, hosts, given().get("task"), link);
  }
  const query = new URLSearchParams({ task: given().get("task") ?? "", env: given().get("env") });
  if (given().has("episode")) query.set("episode", given().get("episode"));
  const path = `/api/runs/${run.id}/host?${query}`;
  const host = fresh || kept.path !== path ? await load(path) : kept.host; // steps need no load
  kept = { path, host };
  return () => showHost(main, host, numbers("step"), link);
}

const SHOW = { runs: showRuns, learning: showLearning, hosts: showOneOrAllHosts, comparison: showComparison };

// ---- what is shown, and when ----

async function show(fresh) {
  const mine = ++turn, asked = given().get("view"), run = current();
  const next = VIEWS.includes(asked) ? asked : run ? "learning" : "runs";
  for (const each of document.querySelectorAll("nav a")) {
    each.href = link({ view: each.dataset.view, env: null, episode: null, step: null });
    each.toggleAttribute("aria-current", each.dataset.view === next);
  }
  if (run) picker.value = run.id;
  let fill;
  try {
    fill = next === "runs" || run ? await SHOW[next](run, fresh) : () => main.append(el("p", { class: "unmeasured" }, "There are no runs in this folder."));
  } catch (error) {
    fill = () => main.append(el("h1", {}, run ? cut(run.name) : "Esper"), el("p", { class: "broken", role: "alert" }, cut(error.message, 300)));
  }
  if (mine !== turn) return; // another view was asked for meanwhile
  const focus = main.contains(document.activeElement) ? document.activeElement.id : "", top = view === next ? scrollY : 0;
  const opened = new Set([...main.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  clear(main);
  data = null;
  fill();
  if (view === next) for (const each of main.querySelectorAll("summary")) if (opened.has(each.textContent)) each.parentNode.open = true;
  view = next;
  main.dataset.view = next;
  loaded = performance.now();
  if (focus) document.getElementById(focus)?.focus();
  scrollTo(0, top);
  listen(run);
}

// Loads the view again, but not more often than EVERY.
function reload() {
  if (timer) return;
  timer = setTimeout(() => { timer = null; show(true); }, Math.max(EVERY - (performance.now() - loaded), 0));
}

function listen(run) {
  if (streamed === run?.id && stream?.readyState !== EventSource.CLOSED) return;
  stream?.close();
  streamed = run?.id;
  stream = null;
  if (!run) return;
  const after = data?.overview ? data.overview.position.join("-") : "";
  stream = new EventSource(`/api/runs/${run.id}/stream?after=${after}`);
  stream.onmessage = (event) => take(JSON.parse(event.data));
  stream.addEventListener("lost", (event) => { lost(JSON.parse(event.data).trouble); stream.close(); });
  stream.onerror = () => lost("no connection; figures may be old");
}

function lost(trouble) {
  badge(status, "lost", trouble);
  setTimeout(() => { if (stream?.readyState === EventSource.CLOSED) listRuns().then(() => show(true), () => lost("no connection; figures may be old")); }, 3000);
}

function take(message) {
  badge(status, message.state);
  const { rounds, position } = { rounds: message.rounds, position: message.overview.position };
  status.dataset.position = position.join("-");
  if (!data || view !== "learning") return reload();
  const known = data.overview.position;
  if (message.reset || known[0] !== position[0] || (data.rounds.round?.length ?? 0) > MOST_POINTS) return reload();
  if (known[1] < position[1]) {
    for (const name of ["rounds", "validation"]) append(data[name], message[name]);
    for (const [head, more] of Object.entries(message.heads)) append(data.heads[head] ??= {}, more);
    Object.assign(data, { overview: message.overview, notes: message.notes, events: message.events });
    data.draw();
  } else data.overview = message.overview;
}

function append(table, more) {
  for (const [name, values] of Object.entries(more)) table[name] = [...(table[name] ?? []), ...values];
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const number = "1234".indexOf(event.key);
  const side = { "[": -1, "]": 1 }[event.key];
  if (number >= 0) location.hash = link({ view: VIEWS[number], env: null, episode: null, step: null });
  else if (side && runs.length) {
    const at = runs.indexOf(current()) + side;
    if (runs[at]) location.hash = link({ run: runs[at].id, env: null, episode: null, step: null, task: null });
  }
  const step = document.getElementById({ ArrowLeft: "earlier", ArrowRight: "later" }[event.key] ?? "");
  if (step?.hash) {
    location.hash = step.hash;
    show(false); // at once: the next key may come before the event
  }
}

picker.addEventListener("change", () => { location.hash = link({ run: picker.value, env: null, episode: null, step: null, task: null }); });
addEventListener("hashchange", () => show(false));
addEventListener("keydown", press);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
setInterval(() => listRuns().catch(() => {}), 3000);
listRuns().then(() => show(true), (error) => { badge(status, "lost", error.message); });
