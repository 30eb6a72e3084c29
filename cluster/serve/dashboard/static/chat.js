// A chat with the served model that says of every answer how much of its prompt came from the cache.

import { count, element, percent, seconds } from "./format.js";

export class Chat {
  // headers(): for every request; served(): {model, max_seq_len}
  constructor(headers, served) {
    Object.assign(this, { headers, served, messages: [], tokens: 0, running: null });
    this.list = document.getElementById("messages");
    this.text = document.getElementById("chat-text");
    this.send = document.getElementById("chat-send");
    document.getElementById("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.ask(this.text.value.trim());
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.ask(this.text.value.trim());
      }
    });
    document.getElementById("chat-clear").addEventListener("click", () => this.clear());
    this.clear();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.tokens = 0; // of the chat so far
    const hint = "Each answer says how many tokens of its prompt came from the cache. Go on, and see them grow.";
    this.list.replaceChildren(element("div", { class: "message hint", text: hint }));
  }

  async ask(question) {
    if (!question) return;
    if (!this.messages.length) this.list.replaceChildren();
    const messages = this.messages; // of this chat: "new chat" makes another list
    messages.push({ role: "user", content: question });
    this.text.value = "";
    this.show(element("div", { class: "message user", text: question }));
    const answer = element("div", { class: "message" }), words = element("span", { text: "…" });
    const thoughts = element("div", { class: "thoughts", hidden: "" });
    answer.append(thoughts, words);
    this.show(answer);
    this.running = new AbortController();
    this.send.textContent = "Stop";
    const measured = { began: performance.now(), first: null, last: null, usage: null, text: "", thoughts: "" };
    try {
      await this.stream(messages, measured, { thoughts, words }, this.running.signal);
      messages.push({ role: "assistant", content: measured.text });
      if (measured.usage) {
        this.tokens = measured.usage.total_tokens;
        answer.append(footer(measured));
      }
    } catch (error) {
      if (error.name === "AbortError") {
        messages.push({ role: "assistant", content: measured.text || "…" });
        answer.append(element("div", { class: "cached", text: "stopped" }));
      } else {
        messages.pop();
        answer.className = "message error";
        words.textContent = error.message;
      }
    }
    this.running = null;
    this.send.textContent = "Send";
    this.scroll();
  }

  async stream(messages, measured, { thoughts, words }, signal) {
    const { model, max_seq_len: context } = this.served();
    const body = { model, messages, stream: true, stream_options: { include_usage: true } };
    const limit = Math.min(1024, Math.floor(context / 4)); // leaves room for more turns; the last ones take what is left
    if (this.tokens + messages.at(-1).content.length + 64 + limit < context) body.max_tokens = limit;
    const headers = { "Content-Type": "application/json", ...this.headers() };
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      measured.usage = event.usage ?? measured.usage;
      const { content, reasoning_content: thought } = event.choices?.[0]?.delta ?? {};
      if (!content && !thought) continue;
      measured.last = performance.now();
      measured.first ??= measured.last;
      if (thought) {
        thoughts.hidden = false;
        thoughts.textContent = measured.thoughts += thought;
      }
      if (content) words.textContent = measured.text += content;
      this.scroll();
    }
    if (!measured.text) words.textContent = measured.thoughts ? "(no answer after its thoughts)" : "(an empty answer)";
  }

  show(message) {
    this.list.append(message);
    this.scroll();
  }

  scroll() {
    this.list.scrollTop = this.list.scrollHeight;
  }
}

function footer({ usage, began, first, last }) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, share = cached / usage.prompt_tokens;
  const fill = element("div", { class: "segment used" });
  fill.style.width = `${100 * share}%`;
  const rest = [];
  if (first != null) rest.push(`first token ${seconds((first - began) / 1000)}`);
  if (last > first) rest.push(`${count((usage.completion_tokens - 1) / ((last - first) / 1000))} tokens/s`);
  return element(
    "div",
    { class: "cached" },
    element("div", { class: "track" }, fill),
    element("b", { text: `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached` }),
    ` (${percent(share)}), ${[...rest, `${count(usage.completion_tokens)} tokens`].join(", ")}`,
  );
}

// The JSON payloads of a server-sent event stream.
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answers ${response.status}`;
  }
}
