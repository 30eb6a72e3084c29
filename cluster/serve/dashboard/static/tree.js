// The radix tree: left to right by position in the prompt, one row per leaf. Darker: more hits. Framed: in use now.

import { ago, count, element, hideTip, showTip, svg } from "./format.js";

const TOP = 2, BOTTOM = 20, RIGHT = 4;
const COLD = 120; // seconds without use
const FIELDS = ["parent", "tokens", "hits", "locks", "idle", "children"]; // of a node, in the order of NodeSummary

export class TreePicture {
  constructor(holder) {
    this.holder = holder;
    this.nodes = [];
    this.empty = element("div", { class: "empty", text: "Nothing is cached yet. Prompts that begin alike will share what is shown here." });
    holder.addEventListener("pointermove", (event) => this.point(event));
    holder.addEventListener("pointerleave", hideTip);
    new ResizeObserver(() => this.draw()).observe(holder);
  }

  update(tree) {
    this.nodes = tree.map((values) => ({ ...Object.fromEntries(FIELDS.map((name, index) => [name, values[index]])), below: [] }));
    this.roots = [];
    this.most = Math.max(0, ...this.nodes.map((node) => node.hits));
    for (const node of this.nodes) {
      const parent = this.nodes[node.parent];
      node.start = parent ? parent.start + parent.tokens : 0;
      (parent ? parent.below : this.roots).push(node);
    }
    // Not in the order they came in, which changes with what is in use: rows would jump.
    for (const list of [this.roots, ...this.nodes.map((node) => node.below)])
      list.sort((one, other) => other.hits - one.hits || other.tokens - one.tokens);
    this.draw();
  }

  draw() {
    const width = this.holder.clientWidth, height = this.holder.clientHeight;
    if (!width || !height) return;
    if (!this.nodes.length) {
      this.holder.replaceChildren(this.empty);
      return;
    }
    const deepest = Math.max(...this.nodes.map((node) => node.start + node.tokens));
    // A root scale: system prompts of thousands of tokens leave room for the questions behind them, and the other way round.
    this.x = (position) => (width - RIGHT) * Math.sqrt(position / deepest);
    const rows = this.roots.reduce((total, node) => total + place(node, total), 0);
    this.row = Math.min((height - TOP - BOTTOM) / rows, 44);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "prefix cache" });
    for (const position of ticks(deepest)) {
      const x = Math.round(this.x(position)) + 0.5;
      picture.append(svg("line", { class: "gridline", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }));
      const anchor = x > width - 60 ? "end" : position ? "middle" : "start";
      const text = position ? count(position) : "token 0";
      picture.append(svg("text", { x, y: height - 5, "text-anchor": anchor, text }));
    }
    this.nodes.forEach((node, index) => picture.append(this.box(node, index)));
    for (const node of this.nodes) this.label(node, picture);
    this.holder.replaceChildren(picture);
  }

  area(node) {
    const gap = this.row > 5 ? 2 : this.row > 2.5 ? 0.7 : 0;
    const x = this.x(node.start), y = TOP + node.row * this.row;
    return { x, y, width: Math.max(1, this.x(node.start + node.tokens) - x - 2), height: Math.max(1, node.rows * this.row - gap) };
  }

  box(node, index) {
    const level = this.most && node.hits ? Math.ceil(4 * (Math.log1p(node.hits) / Math.log1p(this.most))) : 0;
    const state = node.locks ? "locked" : node.idle > COLD ? "cold" : "";
    node.level = state === "cold" ? 0 : level;
    let { x, y, width, height } = this.area(node);
    if (node.locks && height > 4 && width > 4) [x, y, width, height] = [x + 1, y + 1, width - 2, height - 2]; // room for the frame
    const rx = Math.min(3, height / 3, width / 3);
    return svg("rect", { class: `node hits-${level} ${state}`, x, y, width, height, rx, "data-index": index });
  }

  label(node, picture) {
    const { x, y, width, height } = this.area(node);
    if (height < 14 || width < 34) return;
    const long = `${count(node.tokens)} tokens${node.hits ? `, ${count(node.hits)} hits` : ""}`;
    const text = width > 7 * long.length ? long : count(node.tokens);
    const middle = y + Math.min(height / 2, 60) + 4;
    picture.append(svg("text", { class: `label${node.level >= 3 ? " on" : ""}`, x: x + 7, y: middle, text }));
  }

  point(event) {
    const index = event.target.dataset?.index;
    this.holder.querySelector(".lit")?.classList.remove("lit");
    if (index == null) return hideTip();
    event.target.classList.add("lit");
    const node = this.nodes[index];
    const use = node.locks ? `in use by ${node.locks} running` : `last used ${ago(node.idle)} ago`;
    const lines = [`tokens ${node.start}–${node.start + node.tokens - 1}`, `${count(node.hits)} hits, ${use}`];
    if (node.children) lines.push(`${count(node.children)} ${node.children > 1 ? "branches" : "branch"} behind it, ${node.below.length} shown`);
    return showTip(lines.join("\n"), event);
  }
}

// Give the node and what is below it rows from `first` on; returns how many.
function place(node, first) {
  node.row = first;
  node.rows = Math.max(1, node.below.reduce((total, child) => total + place(child, first + total), 0));
  return node.rows;
}

function ticks(deepest) {
  const rough = deepest / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const found = [0, step / 4, step];
  for (let position = 2 * step; position <= deepest; position += step) found.push(position);
  return found.map(Math.round);
}
