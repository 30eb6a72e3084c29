// A line plot over the last minutes, with a cross-hair.

import { element, hideTip, showTip, svg } from "./format.js";

const SPAN = 180; // seconds
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 18;

export class Plot {
  // series: [{label, kind}], kind "first" or "second" for the colour; format: a value as text; floor: smallest top of y
  constructor(section, { title, series, format, floor, empty }) {
    Object.assign(this, { series, format, floor, points: [], hover: null });
    this.value = element("span", { class: "value" });
    const legend = element("span", { class: "legend" });
    if (series.length > 1)
      for (const { label, kind } of series)
        legend.append(element("i", { class: `swatch line ${kind}` }), element("span", { text: label }));
    this.canvas = element("div", { class: "canvas" });
    this.empty = element("div", { class: "empty", text: empty });
    section.append(
      element("div", { class: "head" }, element("h2", { text: title }), this.value, element("span", { class: "spacer" }), legend),
      this.canvas,
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  update(points) {
    this.points = points;
    const latest = points.at(-1)?.values ?? [];
    const bold = element("b", { text: latest[0] == null ? "" : this.format(latest[0]) });
    this.value.replaceChildren(bold);
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width || !height) return;
    const measured = this.points.some((point) => point.values.some((value) => value != null));
    const largest = Math.max(...this.points.flatMap((point) => point.values.map((value) => value ?? 0)), this.floor);
    const step = niceStep(largest / 3), top = Math.ceil(largest / step) * step;
    const end = this.points.at(-1)?.time ?? 0;
    this.x = (time) => LEFT + (width - LEFT - RIGHT) * (1 - (end - time) / SPAN);
    this.y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    for (let value = 0; value <= top + step / 2; value += step) {
      const y = Math.round(this.y(value)) + 0.5;
      picture.append(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      if (measured) picture.append(svg("text", { x: LEFT - 7, y: y + 3.5, "text-anchor": "end", text: this.format(value) }));
    }
    for (const [back, text] of [[SPAN, "3 min ago"], [SPAN / 2, "90 s"], [0, "now"]]) {
      const anchor = back === SPAN ? "start" : back ? "middle" : "end";
      picture.append(svg("text", { x: this.x(end - back), y: height - 3, "text-anchor": anchor, text }));
    }
    this.series.map((each, index) => this.drawLine(picture, each.kind, index)).reverse();
    if (measured && this.hover != null) this.drawCross(picture, height);
    this.canvas.replaceChildren(measured ? picture : this.empty);
  }

  drawLine(picture, kind, index) {
    const shown = this.points.filter((point) => this.points.at(-1).time - point.time <= SPAN);
    for (const run of runs(shown, index)) {
      const line = run.map(({ time, values }) => `${this.x(time).toFixed(1)},${this.y(values[index]).toFixed(1)}`).join("L");
      if (index === 0) {
        const floor = this.y(0);
        const area = `M${this.x(run[0].time)},${floor}L${line}L${this.x(run.at(-1).time)},${floor}Z`;
        picture.prepend(svg("path", { class: "wash", d: area }));
      }
      picture.append(svg("path", { class: `series ${kind}`, d: `M${line}${run.length > 1 ? "" : "h0.1"}` }));
    }
  }

  drawCross(picture, height) {
    const { time, values } = this.points[this.hover] ?? {};
    if (time == null) return;
    picture.append(svg("line", { class: "cross", x1: this.x(time), x2: this.x(time), y1: TOP, y2: height - BOTTOM }));
    values.forEach((value, index) => {
      if (value != null)
        picture.append(svg("circle", { class: `dot ${this.series[index].kind}`, r: 4, cx: this.x(time), cy: this.y(value) }));
    });
  }

  point(event) {
    if (!this.points.length || !this.x) return;
    const at = event.clientX - this.canvas.getBoundingClientRect().left;
    let best = 0;
    this.points.forEach((point, index) => {
      if (Math.abs(this.x(point.time) - at) < Math.abs(this.x(this.points[best].time) - at)) best = index;
    });
    this.hover = best;
    const { time, values } = this.points[best];
    const lines = this.series.map(({ label }, index) => `${label}: ${this.format(values[index])}`);
    showTip([`${Math.round(this.points.at(-1).time - time)} s ago`, ...lines].join("\n"), event);
    this.draw();
  }

  leave() {
    this.hover = null;
    hideTip();
    this.draw();
  }
}

// Stretches of points that have a value.
function runs(points, index) {
  const found = [];
  let open = null;
  for (const point of points) {
    if (point.values[index] == null) open = null;
    else if (open) open.push(point);
    else found.push((open = [point]));
  }
  return found;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
}
