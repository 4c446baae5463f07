// Swimlanes of all hosts, and one host decision by decision.

import { Chart, clear, cut, el, figure, kind, svg, text } from "./charts.js";

const MOST = 48; // hosts of one task that are drawn
const STAGES = ["TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "COOLING"];
const stage = (name) => `stage-${STAGES.includes(name) ? name.toLowerCase() : "other"}`;

function lane(spans, from, to, last, label) {
  const wide = Math.max(to - from + 1, 1);
  const at = (step) => 100 * Math.min(Math.max((step - from) / wide, 0), 1);
  return el("div", { class: "lane", role: "img", "aria-label": label },
    spans.map((span) => {
      const end = span.end === null || span.end >= last ? last + 1 : span.end;
      return el("i", { class: stage(span.stage), title: `${cut(span.blueprint ?? "?")} ${cut(span.stage)} from ${span.start}`,
        style: { left: `${at(span.start)}%`, width: `${Math.max(at(end) - at(span.start), 0.8)}%` } }, cut(span.blueprint ?? "?", 12));
    }));
}

function lanes(host, slots, to) {
  return slots.map((slot) => {
    const spans = host.lanes.filter((span) => span.slot === slot);
    const newest = spans.at(-1);
    return lane(spans, host.began, to, host.step, `slot ${slot}: ${newest ? `${cut(newest.blueprint ?? "?")} ${cut(newest.stage)}` : "empty"}`);
  });
}

export function key() {
  return el("p", { class: "key" }, ...STAGES.map((name) => [el("i", { class: stage(name) }), `${name.toLowerCase()} `]).flat(),
    el("i", { class: "unmeasured" }), "not measured");
}

// All hosts of one task; `link` makes the address of a host.
export function showHosts(main, hosts, task, link) {
  const tasks = [...new Set(hosts.map((host) => host.task))];
  const shown = tasks.includes(task) ? task : tasks[0];
  const own = hosts.filter((host) => host.task === shown);
  const slots = [...new Set(own.flatMap((host) => host.lanes.map((span) => span.slot)))].sort((a, b) => a - b).slice(0, 32);
  const longest = Math.max(...own.map((host) => host.step - host.began), 1);
  main.append(
    el("h1", {}, "Hosts"),
    el("p", { class: "quiet" }, `Newest episode of each host; one lane per slot, ${longest + 1} decisions from left to right. `,
      own.length > MOST ? `The first ${MOST} of ${own.length} hosts.` : ""),
    tasks.length > 1 ? el("p", {}, ...tasks.map((name) => el("a", { class: "tab", href: link({ task: name, env: null }), "aria-current": name === shown && "true" }, cut(name)))) : "",
    key(),
  );
  if (!own.length) main.append(el("p", { class: "unmeasured" }, "This run records no hosts."));
  const rows = own.slice(0, MOST).map((host) => el("li", { "data-host": `${host.task}/${host.env}` },
    el("a", { href: link({ task: host.task, env: host.env, episode: null }) }, `host ${host.env}`),
    el("span", { class: "small" }, `episode ${host.episode}${host.ended ? ", ended" : ""} · score `, figure(host.score), " · loss ", figure(host.loss),
      " · added ", figure(host.added), " · widths ", host.layers.length ? host.layers.map((layer) => layer.width).join("–") : figure(null)),
    el("div", { class: "lanes" }, slots.length ? lanes(host, slots, host.began + longest) : el("span", { class: "small quiet" }, "nothing planted"))));
  main.append(el("ul", { class: "hosts" }, rows));
}

const now = (rows, step) => {
  const found = new Map();
  for (const row of rows) if (row.step <= step) found.set(row.layer, row);
  return [...found.values()].sort((a, b) => a.layer - b.layer);
};

// The network as layers, as high as they are wide; `before` are the first widths.
function network(layers, before) {
  if (!layers.length) return el("p", { class: "unmeasured" }, "Widths are not measured.");
  const most = Math.max(...layers.map((layer) => layer.width), 1);
  const height = (width) => 8 + (92 * width) / most;
  const first = new Map(before.map((layer) => [layer.layer, layer.width]));
  const label = layers.map((layer) => `${cut(layer.name, 24)} ${layer.width}`).join(", ");
  const shown = layers.slice(0, 40);
  return svg("svg", { class: "network", viewBox: `0 0 ${shown.length * 70} 140`, role: "img", "aria-label": `widths: ${label}` },
    shown.map((layer, at) => {
      const [h, old] = [height(layer.width), height(Math.min(first.get(layer.layer) ?? layer.width, layer.width))];
      return svg("g", { transform: `translate(${at * 70 + 6} 0)` },
        at ? svg("path", { class: "edge", d: `M-26 55H6` }) : null,
        svg("rect", { class: "grown", x: 8, y: 55 - h / 2, width: 36, height: h, rx: 3 }),
        svg("rect", { class: "first", x: 8, y: 55 - old / 2, width: 36, height: old, rx: 3 }),
        svg("text", { x: 26, y: 59, "text-anchor": "middle" }, text(layer.width)),
        svg("text", { x: 26, y: 124, "text-anchor": "middle", class: "name" }, svg("title", {}, cut(layer.name)), cut(layer.name, 10)));
    }));
}

function bars(name, head) {
  const legal = Object.entries(head?.legal ?? {}).slice(0, 60);
  return el("div", { class: "head" }, el("b", {}, cut(name, 24)), ...legal.map(([choice, chance]) => {
    const known = typeof chance === "number";
    return el("div", { class: "chance", "data-chosen": choice === String(head.chosen) && "true" },
      el("span", {}, cut(choice, 28)), el("i", { class: known ? "bar" : kind(chance), style: { width: `${known ? 100 * Math.min(Math.max(chance, 0), 1) : 100}%` } }),
      el("span", { class: kind(chance) }, known ? `${(100 * chance).toFixed(1)} %` : text(chance)));
  }));
}

// Any JSON as nested lists.
function tree(value, depth = 0) {
  if (value === null || typeof value !== "object") return figure(value);
  if (depth > 5) return "…";
  const entries = Object.entries(value).slice(0, 80);
  if (!entries.length) return el("span", { class: "quiet" }, "none");
  if (entries.every(([, each]) => each === null || typeof each !== "object"))
    return el("dl", {}, entries.map(([name, each]) => [el("dt", {}, cut(name, 28)), el("dd", {}, figure(each))]).flat());
  return entries.map(([name, each]) => el("details", { open: depth < 1 && name !== "offers" }, el("summary", {}, cut(name, 40)), tree(each, depth + 1)));
}

// One host; `given` has the step that is asked for, or null for the newest one.
export function showHost(main, host, given, link) {
  const steps = [...new Set([...(host.steps.step ?? []), ...host.decisions.map((row) => row.step), ...host.events.map((row) => row.step)])].sort((a, b) => a - b);
  const to = (step) => link({ task: host.task, env: host.env, episode: host.episode, step });
  const at = given === null ? steps.length - 1 : Math.max(steps.findLastIndex((step) => step <= given), 0);
  const step = steps[at] ?? 0;
  const go = (label, target, id) => target === undefined || target === null ? el("span", { class: "tab off" }, label)
    : el("a", { class: "tab", id, href: target }, label);
  const episode = (number) => number < host.first || number > host.last || number === host.episode ? null
    : link({ task: host.task, env: host.env, episode: number, step: null });
  main.append(
    el("h1", {}, `${cut(host.task)} · host ${host.env}`),
    el("p", {}, el("a", { class: "tab", href: link({ env: null, episode: null, step: null }) }, "All hosts"),
      go("◀ episode", episode(host.episode - 1)), ` episode ${host.episode} `, go("episode ▶", episode(host.episode + 1))));
  const charts = el("div", { class: "grid" });
  main.append(charts);
  const ran = host.steps.step ?? [];
  for (const name of ["score", "loss"])
    new Chart(charts, name[0].toUpperCase() + name.slice(1), "decision").update(ran.length ? [{ name, xs: ran, ys: host.steps[name] }] : []);
  const slots = [...new Set(host.lanes.map((span) => span.slot))].slice(0, 32);
  main.append(key(), el("div", { class: "lanes" }, lanes({ ...host, began: steps[0] ?? 0, step: steps.at(-1) ?? 1 }, slots, steps.at(-1) ?? 1)));
  main.append(el("p", { class: "stepper" }, go("◀ earlier", at > 0 ? to(steps[at - 1]) : null, "earlier"),
    el("b", {}, ` decision ${text(step)} `), el("span", { class: "quiet" }, `${at + 1} of ${steps.length} `),
    go("later ▶", at + 1 < steps.length ? to(steps[at + 1]) : null, "later")));
  main.append(el("h2", {}, "Network"), network(now(host.layers, step), now(host.layers, steps[0] ?? 0)));
  const row = host.decisions.find((each) => each.step === step);
  main.append(el("h2", {}, "Decision"), el("p", {}, row ? el("b", {}, cut(row.action, 200)) : figure(null),
    " · expected return ", figure(row?.value ?? null)));
  main.append(el("h2", {}, "What came of it"), outcome(host, step, steps[at + 1]));
  main.append(el("h2", {}, "Probabilities"), row?.heads ? el("div", { class: "heads" }, Object.entries(row.heads).slice(0, 16).map(([name, head]) => bars(name, head))) : el("p", {}, figure(null)));
  main.append(el("h2", {}, "What the controller saw"), row?.features ? el("div", { class: "seen" }, tree(row.features)) : el("p", {}, figure(null)));
}

function outcome(host, step, next) {
  const at = (host.steps.step ?? []).indexOf(step);
  const after = next === undefined ? -1 : host.steps.step?.indexOf(next) ?? -1;
  const of = (name, index) => (index < 0 ? null : host.steps[name][index]);
  const events = host.events.filter((row) => row.step === step);
  if (at < 0 && !events.length) return el("p", {}, figure(null));
  return el("ul", {},
    el("li", {}, "reward ", figure(of("reward", at))),
    ["score", "loss"].map((name) => el("li", {}, `${name} `, figure(of(name, at)), next === undefined ? " before the last decision" : [" → ", figure(of(name, after))])),
    events.map((row) => {
      const later = host.events.find((each) => each.slot === row.slot && each.step > step && ["kept", "pruned"].includes(each.what));
      return el("li", {}, `slot ${row.slot}: ${cut(row.what)} ${cut(row.blueprint ?? "")}`,
        row.what === "planted" ? `; later ${later ? `${later.what} at decision ${later.step}` : "neither kept nor pruned"}` : "");
    }));
}
