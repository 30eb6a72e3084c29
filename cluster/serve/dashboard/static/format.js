// Numbers as people read them, and elements without innerHTML: what comes from a model or a server stays text.

export function count(value) {
  if (value == null) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

export function ago(value) {
  if (value < 90) return `${Math.round(value)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

export function percent(share) {
  return share == null ? "–" : `${share > 0 && share < 0.095 ? (100 * share).toFixed(1) : Math.round(100 * share)}%`;
}

export function element(name, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  return fill(made, text, attributes, children);
}

export function svg(name, { text, ...attributes } = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), text, attributes, children);
}

function fill(made, text, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text != null) made.textContent = text;
  made.append(...children);
  return made;
}

const tip = document.getElementById("tip");

export function showTip(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  const y = Math.min(event.clientY + 12, innerHeight - box.height - 6);
  tip.style.left = `${Math.max(6, x)}px`;
  tip.style.top = `${y}px`;
}

export function hideTip() {
  tip.hidden = true;
}
