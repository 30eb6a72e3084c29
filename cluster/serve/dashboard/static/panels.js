// KV pages of every replica, and where every rank runs.

import { count, element, percent } from "./format.js";

export function drawMemory(holder, replicas) {
  holder.replaceChildren(
    ...replicas.map((replica, index) => {
      const metrics = replica.metrics;
      const title = element("span", { class: "who", text: titleOf(replicas, index), title: replica.name });
      if (!metrics) return element("div", { class: "bar" }, element("p", {}, title, element("span", { class: "number", text: "no answer" })));
      const free = metrics.free_pages, reusable = metrics.evictable_pages, used = metrics.total_pages - free - reusable;
      const text = `${percent(used / metrics.total_pages)} in use, ${percent(reusable / metrics.total_pages)} cached of ${count(metrics.total_pages)}`;
      const track = element("div", { class: "track", title: `${used} in use, ${reusable} cached and free to reuse, ${free} free` });
      for (const [pages, kind] of [[used, "used"], [reusable, "reusable"]]) {
        const segment = element("div", { class: `segment ${kind}` });
        segment.style.width = `${(100 * pages) / metrics.total_pages}%`;
        if (pages) track.append(segment);
      }
      return element("div", { class: "bar" }, element("p", {}, title, element("span", { class: "number", text })), track);
    }),
  );
}

export function drawRanks(holder, replicas) {
  const hosts = new Map(); // by address
  const chips = (address) => {
    if (!hosts.has(address)) hosts.set(address, []);
    return hosts.get(address);
  };
  replicas.forEach((replica, index) => {
    const who = replicas.length > 1 ? `#${index + 1} ` : "";
    const state = replica.problem ? " down" : "";
    replica.ranks.forEach((rank, number) => {
      const where = rank.gpu_ids.length ? `GPU ${rank.gpu_ids.join(", ")}` : "CPU";
      const title = `replica ${replica.name}, process ${rank.pid}`;
      const name = element("b", { text: `${who}rank ${number}` });
      chips(rank.node_ip).push(element("span", { class: `chip${state}`, title }, name, ` ${where}`));
    });
    const title = `replica ${replica.name}, process ${replica.settings.driver_pid}`;
    chips(replica.node_ip).push(element("span", { class: "chip driver", title, text: `${who}driver` }));
  });
  holder.replaceChildren(
    ...[...hosts].sort(([one], [other]) => one.localeCompare(other, "en", { numeric: true })).map(([address, list]) =>
      element("div", { class: "host" }, element("h3", { text: address }), element("div", { class: "chips" }, ...list)),
    ),
  );
}

export function titleOf(replicas, index) {
  const { served_model_name: name, tp_size, device } = replicas[index].settings;
  const several = replicas.some((replica) => replica.settings.served_model_name !== name);
  return `#${index + 1} ${several ? `${name}, ` : ""}TP ${tp_size}, ${device}`;
}
