// Asks for the state once a second and hands it to the parts of the page.

import { Chat, problem } from "./chat.js";
import { count, element, percent, seconds } from "./format.js";
import { History } from "./history.js";
import { drawMemory, drawRanks, titleOf } from "./panels.js";
import { Plot } from "./plot.js";
import { TreePicture } from "./tree.js";

const INTERVAL = 1000; // milliseconds
const byId = (id) => document.getElementById(id);

let key = sessionStorage.getItem("raydix-key") ?? ""; // until the tab is closed
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

const history = new History();
const quiet = "Nothing has been generated in the last minutes.";
const latencies = [{ label: "p50", kind: "first" }, { label: "p99", kind: "second" }];
const throughput = new Plot(byId("throughput"), {
  title: "Tokens per second", series: [{ label: "tokens/s", kind: "first" }], format: count, floor: 10, empty: "",
});
const firstToken = new Plot(byId("first-token"), {
  title: "Time to first token", series: latencies, format: seconds, floor: 0.02, empty: quiet,
});
const betweenTokens = new Plot(byId("between-tokens"), {
  title: "Inter-token latency", series: latencies, format: seconds, floor: 0.005, empty: quiet,
});
const tree = new TreePicture(byId("tree-picture"));
const replicaOfTree = byId("tree-replica");
const modelOfChat = byId("chat-model");
const chat = new Chat(headers, () => models(history.last).find(({ model }) => model === modelOfChat.value) ?? history.last);

function show(state) {
  const names = models(state).map(({ model }) => model);
  byId("model").textContent = names.join(", ") || state.model;
  document.title = `${byId("model").textContent} on Raydix`;
  offer(modelOfChat, names, names);
  history.add(state);
  const running = total(state, "running");
  byId("running").textContent = count(running);
  byId("waiting").textContent = count(total(state, "waiting"));
  byId("recoveries").textContent = count(total(state, "recoveries"));
  byId("hit-rate").textContent = percent(history.hitRate());
  throughput.update(history.throughput());
  firstToken.update(history.latency("first", state.ingresses[0]?.first_token));
  betweenTokens.update(history.latency("between", state.ingresses[0]?.between_tokens));
  drawMemory(byId("memory-bars"), state.replicas);
  drawRanks(byId("rank-map"), state.replicas);
  const ranks = state.replicas.reduce((sum, replica) => sum + replica.ranks.length, 0);
  byId("rank-count").textContent = `${ranks} in ${state.replicas.length} ${state.replicas.length === 1 ? "replica" : "replicas"}`;
  showTree(state.replicas);
  const down = state.replicas.filter((replica) => replica.problem);
  list(byId("problems"), [...down.map((replica) => `${replica.name}: ${replica.problem}`), ...state.silent]);
  if (!state.replicas.length) say("bad", "no replica answers");
  else if (down.some((replica) => !replica.recovering)) say("bad", "down");
  else if (down.length) say("waiting", "recovering");
  else say("good", running ? "serving" : "ready");
}

function showTree(replicas) {
  offer(replicaOfTree, replicas.map(({ name }) => name), replicas.map((_, index) => titleOf(replicas, index)));
  const replica = replicas[replicaOfTree.selectedIndex];
  tree.update(replica?.tree ?? []);
  byId("tree-most").textContent = tree.most ? `0 to ${count(tree.most)} hits` : "no hits";
  const metrics = replica?.metrics;
  const shown = (replica?.tree ?? []).reduce((sum, [, tokens]) => sum + tokens, 0);
  const cached = metrics ? metrics.cached_pages * replica.settings.page_size : 0;
  byId("tree-size").textContent = metrics ? `${count(cached)} tokens${shown < cached ? `, ${count(shown)} shown` : ""}` : "";
}

// Every model that some replica serves: {model, max_seq_len}
function models(state) {
  const settings = state.replicas.map((replica) => replica.settings);
  const found = new Map(settings.map(({ served_model_name: model, max_seq_len }) => [model, { model, max_seq_len }]));
  return [...found.values()].sort((one, other) => one.model.localeCompare(other.model));
}

// The options of a select; what was chosen stays chosen while it is there.
function offer(select, values, texts) {
  const chosen = Math.max(0, values.indexOf(select.value));
  if (values.join() !== [...select.options].map((option) => option.value).join()) {
    select.replaceChildren(...values.map((value, index) => element("option", { value, text: texts[index] })));
    select.selectedIndex = values.length ? chosen : -1;
  }
  select.hidden = values.length < 2;
}

function total(state, name) {
  return state.replicas.reduce((sum, replica) => sum + (replica.metrics?.[name] ?? 0), 0);
}

function say(state, text) {
  byId("status").dataset.state = state;
  byId("status").textContent = text;
}

function list(holder, lines) {
  holder.hidden = !lines.length;
  holder.replaceChildren(...lines.map((text) => element("li", { text })));
}

async function poll() {
  if (document.hidden) return;
  try {
    const response = await fetch("dashboard/state", { headers: headers() });
    byId("key-form").hidden = response.status !== 401;
    if (response.ok) show(await response.json());
    else say(response.status === 401 ? "waiting" : "bad", await problem(response));
  } catch {
    say("bad", "no connection to the server");
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("raydix-key", key);
  poll();
});
modelOfChat.addEventListener("change", () => chat.clear());
replicaOfTree.addEventListener("change", () => showTree(history.last.replicas));

const root = document.documentElement;
const preferred = matchMedia("(prefers-color-scheme: dark)");
const paint = () => (root.dataset.theme = localStorage.getItem("raydix-theme") ?? (preferred.matches ? "dark" : "light"));
preferred.addEventListener("change", paint);
byId("theme").addEventListener("click", () => {
  localStorage.setItem("raydix-theme", root.dataset.theme === "dark" ? "light" : "dark");
  paint();
});
paint();

for (;;) {
  await poll();
  await new Promise((done) => setTimeout(done, INTERVAL));
}
