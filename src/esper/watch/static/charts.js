// Elements from text, numbers as text, and line charts that follow a training.
// Nothing here reads HTML: text from runs only becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";
export const LINES = ["blue", "orange", "green", "purple", "amber", "sky", "grey", "text"];
const open = new Set(); // charts on the page

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
export const cut = (text, length = 60) =>
  String(text).length > length ? `${String(text).slice(0, length - 1)}…` : String(text);

// null is not measured; "nan", "inf" and "-inf" are measured.
export function text(value, digits = 4) {
  if (value === null || value === undefined) return "not measured";
  if (typeof value !== "number") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[value] ?? cut(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4
    ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function kind(value) {
  if (value === null || value === undefined) return "unmeasured";
  return typeof value === "string" ? "broken" : "value";
}

export const figure = (value, digits) => el("span", { class: kind(value) }, text(value, digits));

export function clear(node) {
  for (const chart of [...open]) if (node.contains(chart.node)) chart.close();
  node.replaceChildren();
}

export function redraw() {
  for (const chart of open) chart.plot.redraw(true, true);
}

// Marks where values are missing or not finite, below the lines.
function marks(plot) {
  const { ctx, bbox } = plot;
  const [xs, ...raw] = plot.raw;
  const unmeasured = css("unmeasured"), broken = css("broken");
  for (const values of raw)
    values.forEach((value, at) => {
      if (value === undefined || typeof value === "number") return;
      const x = plot.valToPos(xs[at], "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.fillStyle = value === null ? unmeasured : broken;
      ctx.fillRect(x - 2, bbox.top + bbox.height - 5, 4, 5);
    });
}

// A chart with a title, the last value of every line, and a line for the cursor.
export class Chart {
  constructor(parent, title, x) {
    this.x = x;
    this.values = el("span", { class: "lines" });
    this.cursor = el("span", { class: "quiet" });
    this.area = el("div", { class: "area", tabindex: 0, role: "img", onkeydown: (event) => this.key(event) });
    this.node = el("figure", {}, el("figcaption", {}, el("b", {}, title), this.values, this.cursor), this.area);
    this.title = title;
    parent.append(this.node);
    open.add(this);
    this.watch = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.watch.observe(this.area);
  }

  size() {
    return { width: Math.max(this.area.clientWidth, 120), height: 170 };
  }

  // lines: [{name, xs, ys}], each with its own xs.
  update(lines) {
    const shape = lines.map((line) => line.name).join("\n");
    if (this.plot && shape !== this.shape) this.plot = this.plot.destroy();
    this.shape = shape;
    const known = lines.filter((line) => line.xs.length);
    const raw = known.length ? uPlot.join(known.map((line) => [line.xs, line.ys])) : [[]];
    const data = raw.map((values, at) => (at ? values.map((y) => (typeof y === "string" ? null : y)) : values));
    const measured = known.map((line) => line.ys.filter((y) => typeof y === "number").length);
    const total = measured.reduce((sum, count) => sum + count, 0);
    this.values.replaceChildren(
      ...(known.length ? known : [{ name: "", ys: [null] }]).flatMap((line, at) => [
        el("span", {}, known.length > 1 || line.name ? el("i", { style: { background: `var(--${LINES[at % LINES.length]})` } }) : null,
          `${cut(line.name, 24)} `, figure(line.ys.at(-1) ?? null)),
      ]),
      ...known.flatMap((line, at) => {
        const missing = line.ys.length - measured[at];
        return missing && measured[at]
          ? [el("span", { class: "unmeasured" }, `${missing} of ${line.ys.length} not measured`)] : [];
      }),
    );
    const last = known.map((line) => `${cut(line.name)} ${text(line.ys.at(-1))}`).join(", ");
    this.area.setAttribute("aria-label", `${this.title}: ${last || "not measured"}; ${total} values over ${this.x}`);
    this.node.classList.toggle("empty", !total);
    if (!known.length) return;
    if (!this.plot) this.plot = new uPlot(this.options(known), data, this.area);
    this.plot.raw = raw;
    this.plot.setData(data);
  }

  options(lines) {
    const axis = { stroke: () => css("muted"), grid: { stroke: () => css("rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    return {
      ...this.size(),
      legend: { show: false },
      scales: { x: { time: false } },
      cursor: { drag: { x: true, y: false } },
      axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => text(tick, 3)) },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => text(tick, 3)) }],
      series: [{}, ...lines.map((line, at) => ({
        stroke: () => css(LINES[at % LINES.length]), width: 1.5, spanGaps: false,
        points: { show: line.ys.length < 40, size: 4 },
      }))],
      hooks: {
        draw: [(plot) => plot.raw && marks(plot)],
        setCursor: [(plot) => {
          const at = plot.cursor.idx;
          this.cursor.textContent = at === null || at === undefined ? "" :
            `${this.x} ${text(plot.data[0][at])}: ` + plot.raw.slice(1).map((ys) => (ys[at] === undefined ? "–" : text(ys[at]))).join(", ");
        }],
      },
    };
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.plot) return;
    event.preventDefault();
    event.stopPropagation();
    const xs = this.plot.data[0];
    const at = Math.min(Math.max((this.plot.cursor.idx ?? xs.length) + move, 0), xs.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(xs[at], "x"), top: 10 });
  }

  close() {
    open.delete(this);
    this.watch.disconnect();
    this.plot?.destroy();
  }
}
