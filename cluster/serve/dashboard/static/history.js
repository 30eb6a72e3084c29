// Totals and histograms of successive states as rates and percentiles over time.

const KEPT = 180; // states
const WINDOW = 10; // states that a percentile is taken over: a second may see no first token at all

export class History {
  constructor() {
    this.points = []; // {time, tokens, cached, computed, first: counts, between: counts}, differences to the state before
    this.last = null;
  }

  add(state) {
    const last = this.last;
    this.last = state;
    if (!last || state.time <= last.time) return;
    const point = { time: state.time, tokens: 0, cached: 0, computed: 0, first: null, between: null };
    for (const [now, before] of pairs(state.replicas, last.replicas)) {
      if (!now.metrics || !before.metrics) continue;
      const grown = (name) => Math.max(0, now.metrics[name] - before.metrics[name]);
      point.tokens += grown("generation_tokens") / (state.time - last.time);
      point.cached += grown("cached_tokens");
      point.computed += grown("prefilled_tokens");
    }
    for (const [now, before] of pairs(state.ingresses, last.ingresses)) {
      point.first = sum(point.first, difference(now.first_token, before.first_token));
      point.between = sum(point.between, difference(now.between_tokens, before.between_tokens));
    }
    this.points.push(point);
    if (this.points.length > KEPT) this.points.shift();
  }

  // [{time, values}]
  throughput() {
    return this.points.map((point) => ({ time: point.time, values: [point.tokens] }));
  }

  // p50 and p99 in seconds of `first` or `between`; null where nothing was measured
  latency(name, histogram) {
    if (!histogram) return [];
    return this.points.map((point, index) => {
      let counts = null;
      for (const each of this.points.slice(Math.max(0, index - WINDOW + 1), index + 1)) counts = sum(counts, each[name]);
      return { time: point.time, values: [0.5, 0.99].map((share) => quantile(histogram.bounds, counts, share)) };
    });
  }

  hitRate() {
    let cached = 0, computed = 0;
    for (const point of this.points) {
      cached += point.cached;
      computed += point.computed;
    }
    return cached + computed ? cached / (cached + computed) : null;
  }
}

// What was there in both states, by name; a process that is new has nothing to be compared with.
function* pairs(now, before) {
  const earlier = new Map(before.map((each) => [each.name, each]));
  for (const each of now) if (earlier.has(each.name)) yield [each, earlier.get(each.name)];
}

function difference(now, before) {
  return now.counts.map((count, index) => Math.max(0, count - before.counts[index]));
}

function sum(one, other) {
  return one && other ? one.map((count, index) => count + other[index]) : one || other;
}

// Linear within a bucket; the last, open bucket counts as its lower bound.
function quantile(bounds, counts, share) {
  const total = counts ? counts.reduce((a, b) => a + b, 0) : 0;
  if (!total) return null;
  let left = share * total;
  for (let index = 0; index < bounds.length; index++) {
    if (left <= counts[index]) {
      const lower = index ? bounds[index - 1] : 0;
      return lower + (bounds[index] - lower) * (left / counts[index]);
    }
    left -= counts[index];
  }
  return bounds.at(-1);
}
