"use strict";

const PLAIN = "sample"; // the method that takes one pass of the target per token
// Left out: what an answer that comes in pieces cannot show.
const LEFT_OUT = ["n", "top_logprobs", "prompt_logprobs"];
const GROUPS = [
  ["Output", ["max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "ignore_eos", "draft_details"]],
  ["What to draft", ["method", "draft", "draft_len", "beam_width", "branching", "draft_confidence"]],
  ["What to accept", ["accept_threshold", "divergence", "plausible", "relaxed_topk"]],
  ["Thoughts", ["thinking_method", "thinking_threshold", "thinking_divergence", "thinking_tags",
    "thinking_token_budget"]],
  ["Filters", []], // and whatever is in no other group
];
const SHOWN_ORDER = ["What to draft", "What to accept", "Filters", "Output", "Thoughts"];

const CARS = "Table car, columns = [*, car_id, name, founded, street, year, maker_id]\n"
  + "Table maker, columns = [*, maker_id, name, color, wins, points]\nForeign_keys = [car.maker_id = maker.maker_id]\n";
const SHIPS = "Table ship, columns = [*, ship_id, name, level, points, rank, country, company_id]\n"
  + "Table company, columns = [*, company_id, name, status, length, capacity]\n"
  + "Table store, columns = [*, store_id, name, rank, color, company_id]\n"
  + "Foreign_keys = [ship.company_id = company.company_id, store.company_id = company.company_id]\n";
const SINGERS = "Table singer, columns = [*, singer_id, name, age, city, festival_id]\n"
  + "Table festival, columns = [*, festival_id, name, year, price]\n"
  + "Foreign_keys = [singer.festival_id = festival.festival_id]";
const DEMO = {
  question: ["Which cars come from the maker with the fewest points?",
    `${CARS}Question: I need the names of all cars belonging to the maker with the lowest point total.\nSQL:`],
  code: ["A query over three tables",
    `${SHIPS}Question: Give me the names of all firms with the most vessels.\nSQL:`],
  chat: ["Who sings at the cheapest festival?", SINGERS,
    "I need the names of all singers belonging to the festival with the lowest price."],
  more: ["Show the names of the festivals that have no singers.", "What are the names of the singers whose age is below 30?"],
};
const OTHERS = {
  question: ["Why is the sky blue?", "Explain in four sentences why the sky is blue, and why sunsets are red."],
  code: ["A function that merges intervals",
    "Write a Python function `merge(intervals)` that merges overlapping intervals, with a docstring and one example."],
  chat: ["Plan a weekend in Rome", "", "Plan a weekend in Rome for two people who like food and hate queues."],
  more: ["Make it cheaper.", "Now write it as a table."],
};
const TEXTS = { // for a model without a chat template
  question: ["The largest planets", "The five largest planets of the solar system, from the largest to the smallest:\n1."],
  code: ["A function that merges intervals", 'def merge(intervals):\n    """Merge overlapping intervals.'],
};

const at = (id) => document.getElementById(id);
const made = (tag, text = "", kind = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = kind;
  return element;
};
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
let model = null;
let running = null; // AbortController of what runs

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function fail(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

async function explained(response) {
  if (response.ok) return response;
  if (response.status === 401) at("key-form").hidden = false;
  const told = (await response.json().catch(() => null))?.error;
  throw Object.assign(new Error(told?.message ?? `HTTP ${response.status}`), { code: told?.code });
}

// Parameters

const method = () => at("parameter-method")?.value || model.mtad.parameters.method.default;

/** What a parameter is where nothing is given. */
function usual(name) {
  const known = model.mtad.parameters, own = model.mtad.methods[method()], { default: value } = known[name];
  if (name === "draft_details") return "true"; // the page asks for them
  if (name === "accept_threshold" && (value === null || method() !== known.method.default)) return String(own.threshold ?? "none");
  if (value === null) return { max_tokens: "what fits", seed: "random" }[name] ?? "none";
  if (typeof value === "object") return Object.keys(value).length ? JSON.stringify(value) : "none";
  return String(value);
}

/** A field for a parameter, from its JSON schema; empty means its default, which it shows. */
function fieldOf(name, schema) {
  const kinds = (schema.anyOf ?? [schema]).flatMap((one) => one.anyOf ?? [one]);
  const choices = kinds.find((one) => one.enum)?.enum ?? (kinds.some((one) => one.type === "boolean") ? ["true", "false"] : null);
  const field = document.createElement(choices ? "select" : "input");
  for (const choice of choices ? ["", ...choices] : []) {
    const option = made("option", choice);
    option.value = choice;
    field.append(option);
  }
  field.id = `parameter-${name}`;
  field.dataset.name = name;
  field.dataset.kinds = kinds.map((one) => one.type).join(" ");
  field.title = schema.description ?? "";
  field.setAttribute("aria-describedby", "help");
  const label = made("label");
  label.title = field.title;
  name.split(/(?<=_)/).forEach((part) => label.append(part, made("wbr"))); // long names break at underscores
  label.append(field);
  for (const event of ["focusin", "pointerenter"]) {
    label.addEventListener(event, () => { at("help").textContent = `${name}: ${field.title}`; });
  }
  return label;
}

/** Shows the defaults, and only what the chosen method uses. */
function fit() {
  const { uses } = model.mtad.methods[method()], given = [];
  for (const field of document.querySelectorAll("[data-name]")) {
    const { name } = field.dataset;
    field.parentElement.hidden = !uses.includes(name);
    if (field.options) field.options[0].textContent = usual(name);
    else field.placeholder = usual(name);
    if (field.value !== "" && uses.includes(name)) given.push(`${name} ${field.value}`);
  }
  for (const group of at("parameters").children) {
    group.hidden = [...group.querySelectorAll("label")].every((label) => label.hidden);
  }
  at("given").textContent = given.join(", ");
}

/** The value of a field as JSON; text that is no JSON of the wanted type goes as it is, for the server to judge. */
function value(field) {
  const text = field.value, kinds = field.dataset.kinds.split(" ");
  if (kinds.some((kind) => ["integer", "number", "boolean", "object", "array"].includes(kind))) {
    try {
      const parsed = JSON.parse(text);
      if (typeof parsed !== "string") return parsed;
    } catch { /* not JSON: text */ }
  }
  return text;
}

function parameters() {
  const given = { draft_details: true, n: 1 };
  for (const field of document.querySelectorAll("[data-name]")) {
    if (field.value !== "" && !field.parentElement.hidden) given[field.dataset.name] = value(field);
  }
  return given;
}

async function load() {
  const response = await explained(await fetch("v1/models", { headers: headers() }));
  model = (await response.json()).data[0];
  at("model").textContent = `Model: ${model.id}.`;
  const known = model.mtad.parameters, names = Object.keys(known).filter((name) => !LEFT_OUT.includes(name));
  const grouped = (name) => (GROUPS.find(([, some]) => some.includes(name)) ?? GROUPS.at(-1))[0];
  at("parameters").replaceChildren(...SHOWN_ORDER.map((title) => {
    const group = document.createElement("fieldset");
    group.append(made("legend", title), ...names.filter((name) => grouped(name) === title).map((name) => fieldOf(name, known[name])));
    return group;
  }));
  at("mode").options[1].disabled = !model.mtad.chat;
  examples();
  fit();
}

function set(name, text) {
  const field = at(`parameter-${name}`);
  if (field) field.value = text;
  fit();
}

function examples() {
  const demo = model.mtad.vocab_size === 2048; // of the pair in scripts/demo, which knows text-to-SQL alone
  const { chat: hasChat } = model.mtad, own = demo ? DEMO : hasChat ? OTHERS : TEXTS, shown = [];
  const add = (kind, title, click) => {
    const button = made("button");
    button.append(made("b", kind), made("span", title));
    button.addEventListener("click", () => running || click());
    shown.push(button);
  };
  const race = (prompt) => () => {
    at("prompt").value = prompt;
    at("mode").value = demo || !hasChat ? "text" : "chat";
    set("temperature", "0");
    at("race-form").requestSubmit();
  };
  add("A question", own.question[0], race(own.question[1]));
  add("Code", own.code[0], race(own.code[1]));
  if (hasChat) {
    add("Chat", own.chat[0], () => {
      view("chat");
      forget();
      at("system").value = own.chat[1];
      at("system-box").open = !!own.chat[1];
      set("temperature", "0");
      at("message").value = own.chat[2];
      at("chat-form").requestSubmit();
    });
  }
  at("examples").replaceChildren(...shown);
  at("suggestions").replaceChildren(...(hasChat ? own.more : []).map((text) => {
    const button = made("button", text);
    button.addEventListener("click", () => {
      if (running) return;
      at("message").value = text;
      at("chat-form").requestSubmit();
    });
    return button;
  }));
}

// Answers

/** The objects of a stream of server-sent events. */
async function* events(body) {
  const decoder = new TextDecoder();
  let text = "";
  for (const reader = body.getReader(); ;) {
    const { done, value: bytes } = await reader.read();
    text += done ? decoder.decode() : decoder.decode(bytes, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
    if (done) throw new Error("the stream ended early");
  }
}

/** Each chunk of a request with the milliseconds since it was sent. */
async function* chunks(path, body, signal) {
  const began = performance.now();
  const response = await explained(await fetch(`v1/${path}`, {
    method: "POST", headers: headers(), signal, body: JSON.stringify({ ...body, model: model.id, stream: true }),
  }));
  for await (const chunk of events(response.body)) yield { time: performance.now() - began, chunk };
}

/** Beams of a method's draft, or the paths of its tree; 1 for a chain. */
function width(body) {
  const of = (name) => body[name] ?? model.mtad.parameters[name].default;
  const { form } = model.mtad.methods[of("method")];
  if (form !== "branches") return form === "beams" ? of("beam_width") : 1;
  const branching = of("branching"); // what is no list is for the server to judge
  return Array.isArray(branching) ? branching.reduce((product, children) => product * children, 1) : 1;
}

/** One answer: its tokens in a <pre>, and its figures. */
class Answer {
  constructor(pre) {
    this.pre = pre;
    for (const event of ["pointerover", "focusin"]) pre.addEventListener(event, ({ target }) => hint(target));
    for (const event of ["pointerleave", "focusout"]) pre.addEventListener(event, () => hint(null));
    pre.addEventListener("keydown", (event) => this.move(event));
    this.begin(1);
  }

  begin(beams) {
    Object.assign(this, { beams, text: [], tokens: 0, blocks: 0, drafted: 0, accepted: 0, shown: [], passes: 0 });
    Object.assign(this, { first: null, firstTokens: 0, seconds: 0, end: null, thinks: false });
    this.pre.replaceChildren();
  }

  /** Takes a chunk that came after so many milliseconds. */
  add({ time, chunk }) {
    const choice = chunk.choices[0];
    if (!choice) return;
    const { mtad } = choice, from = this.text.length;
    this.text.push(...(choice.text ?? choice.delta.content ?? "")); // offsets count characters, not UTF-16 units
    this.thinks ||= !!choice.delta?.reasoning_content; // what is written is then more than what is said
    this.blocks += mtad.tokens > 0;
    this.tokens += mtad.tokens;
    this.drafted += mtad.drafted;
    this.accepted += mtad.accepted;
    this.end = choice.finish_reason;
    if (this.first === null) [this.first, this.firstTokens] = [time, this.tokens];
    const { statistics: own } = mtad; // at the end, with the server's own clock
    this.passes = own?.target_passes ?? this.blocks; // one each, but for methods that decode in several
    this.seconds = own ? own.total_seconds - own.first_token_seconds : (time - this.first) / 1000;
    if (own && this.tokens === this.firstTokens) this.seconds = own.total_seconds;
    for (const token of mtad.details ?? [{ offset: from, text: (choice.delta?.reasoning_content ?? "") + (choice.text ?? choice.delta.content ?? "") }]) this.token(token); // without details, a chunk is one
    this.write();
  }

  token(token) {
    const { accepted } = token, span = made("span", "", accepted ? "token drafted" : token.p === undefined ? "" : "token own");
    span.token = { ...token, block: this.blocks, width: this.beams };
    span.tabIndex = -1;
    if (accepted) span.style.setProperty("--share", Math.min(1, accepted.beams / this.beams));
    if (token.rejected?.length) {
      span.dataset.ghost = token.rejected.map((one) => one.text).join("").replaceAll("\n", "⏎");
      setTimeout(() => delete span.dataset.ghost, 1300);
    }
    this.shown.push(span);
    this.pre.append(span);
  }

  /** Writes into the tokens what has come of their text; it may lag behind them. */
  write() {
    for (let n = this.shown.length - 1; n >= 0; n--) {
      const { offset } = this.shown[n].token, next = this.shown[n + 1]?.token.offset;
      const text = this.thinks ? this.shown[n].token.text : this.text.slice(offset, next).join("");
      if (text && this.shown[n].textContent === text) return;
      this.shown[n].textContent = text;
    }
  }

  /** Arrow keys go from token to token. */
  move(event) {
    const last = this.shown.length - 1, now = this.shown.indexOf(document.activeElement);
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hint(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.shown[Math.max(0, Math.min(last, to))].focus();
  }

  /** Tokens per second after the first block, whose time is the prompt's as well. */
  get speed() {
    const behind = this.tokens - this.firstTokens;
    return behind || this.end ? (behind || this.tokens) / this.seconds : 0;
  }

  get figures() {
    if (!this.tokens) return "";
    return `${counted(this.tokens, "token")} in ${counted(this.passes, "pass")}, `
      + `${(this.tokens / this.passes).toFixed(2)} per pass`
      + (this.drafted ? `, ${(100 * this.accepted / this.drafted).toFixed(0)} % of the drafts accepted` : "")
      + `, the first after ${this.first.toFixed(0)} ms` + (this.end ? `, ended by ${this.end}` : "");
  }
}

let pointed = null; // the element that is pointed at, or has the focus

/** Shows what is known of the token that is pointed at. */
function hint(span) {
  const tip = at("tip"), token = span?.token, place = span?.getClientRects()[0];
  pointed = span;
  tip.hidden = !place || token?.p === undefined; // it is not shown, or, without draft_details, nothing is known
  if (tip.hidden) return;
  const title = made("p"), quoted = (text) => made("code", `“${text.replaceAll("\n", "⏎")}”`);
  title.append(quoted(span.textContent), token.accepted
    ? ` drafted by ${token.width > 1 ? `${token.accepted.beams} of ${token.width} beams` : "the chain"}, block ${token.block}`
    : ` the target's own, block ${token.block}`);
  const lines = [title];
  for (const [name, share] of [["p target", token.p], ["q auxiliary", token.accepted?.q]]) {
    if (share === undefined) continue;
    const line = made("p"), part = made("span", "", "part"), bar = made("i");
    bar.style.width = `${100 * share}%`;
    part.append(bar);
    line.append(made("b", name), part, share.toFixed(3));
    lines.push(line);
  }
  token.rejected.slice(0, 4).forEach((one, n) => {
    const line = made("p", n ? "then " : "rejected: ");
    line.append(quoted(one.text), ` p ${one.p.toFixed(3)}, q ${one.q.toFixed(3)}`);
    lines.push(line);
  });
  tip.replaceChildren(...lines);
  const size = tip.getBoundingClientRect();
  const below = place.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(8, place.top - size.height - 6)}px`;
}

/** Runs what a form asks for, one thing at a time; errors are shown in words. */
async function run(start, stop, work) {
  if (running) return;
  fail("");
  running = new AbortController();
  at(start).disabled = true;
  at(stop).disabled = false;
  try {
    if (!model) await load();
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    running = null;
    at(start).disabled = false;
    at(stop).disabled = true;
  }
}

// The race

class Lane extends Answer {
  constructor(id) {
    at(id).append(at("lane").content.cloneNode(true));
    super(at(id).querySelector("pre"));
    this.place = at(id);
    this.frames = [];
  }

  show(frame) {
    this.add(frame);
    this.place.querySelector(".figures").textContent = this.figures;
    const most = Math.max(...lanes.map((lane) => lane.speed));
    for (const lane of lanes) {
      lane.place.querySelector("b").textContent = lane.speed ? lane.speed.toFixed(0) : "–";
      lane.place.querySelector("i").style.width = `${most ? 100 * lane.speed / most : 0}%`;
    }
  }

  /** Decodes; the other one waits, because both at once would share the batch and the machine. */
  async decode(path, body, signal) {
    this.place.scrollIntoView({ block: "nearest" });
    for await (const frame of chunks(path, body, signal)) {
      this.frames.push(frame);
      this.show(frame);
    }
  }
}

const lanes = [new Lane("drafted"), new Lane("plain")];

function reset(...titles) {
  at("verdict").textContent = "";
  lanes.forEach((lane, n) => {
    lane.begin(lane.beams);
    lane.place.querySelector(".figures").textContent = "";
    lane.place.querySelector("b").textContent = "–";
    lane.place.querySelector("i").style.width = 0;
    if (titles.length) lane.place.querySelector("h2").textContent = titles[n];
  });
}

async function race(signal) {
  const prompt = at("prompt").value, chat = at("mode").value === "chat";
  const given = parameters(), path = chat ? "chat/completions" : "completions";
  // both get the same seed; what belongs to drafts alone is not used by the plain one
  const seed = given.seed ?? Math.floor(Math.random() * 2 ** 31), chosen = method();
  const body = { ...given, seed, ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }) };
  const lossless = model.mtad.methods[chosen].lossless ? ", lossless" : "";
  at("replay").hidden = true;
  reset(`${chosen}${lossless}`, `${PLAIN}: one token per pass`);
  lanes.forEach((lane) => { lane.frames = []; });
  lanes[0].beams = width(body);
  await lanes[0].decode(path, body, signal);
  const thinks = given.thinking_method ?? model.mtad.parameters.thinking_method.default;
  await lanes[1].decode(path, { ...body, method: PLAIN, thinking_method: thinks && PLAIN }, signal);
  verdict();
  at("replay").hidden = false;
  at("replay").textContent = slowed() > 1 ? `Replay, slowed down ${slowed()} times` : "Replay";
}

function verdict() {
  const [ours, plain] = lanes, ratio = ours.speed / plain.speed;
  at("verdict").scrollIntoView({ block: "nearest" });
  const same = ours.text.join("") === plain.text.join("") ? "the same text" : "a different text";
  at("verdict").textContent = `${counted(ours.passes, "pass")} instead of ${ours.tokens}, ${ratio.toFixed(1)} times as fast.`;
  at("verdict").append(made("small", `Measured one after the other on this server; plain decoding gave ${same}.`));
}

/** How much slower than it was a replay runs, so that it takes some seconds. */
function slowed() {
  return Math.max(1, Math.round(6000 / Math.max(...lanes.map(({ frames }) => frames.at(-1).time - frames[0].time), 1)));
}

/** Shows both answers again, at once, by the times that were measured. */
async function replay(signal) {
  const slow = slowed(), queues = lanes.map(({ frames }) => [...frames]);
  reset();
  at("verdict").textContent = slow > 1 ? `Both at once, ${slow} times slower than they were.` : "Both at once.";
  const began = performance.now();
  while (queues.some((queue) => queue.length)) {
    const now = await new Promise(requestAnimationFrame);
    if (signal.aborted) at("verdict").textContent = "";
    if (signal.aborted) return;
    queues.forEach((queue, n) => {
      const [{ time: start }] = lanes[n].frames;
      while (queue.length && queue[0].time - start <= (now - began) / slow) lanes[n].show(queue.shift());
    });
  }
  verdict();
}

at("race-form").addEventListener("submit", (event) => {
  event.preventDefault();
  run("start", "stop", race);
});
at("replay").addEventListener("click", () => run("replay", "stop", replay));
at("stop").addEventListener("click", () => running?.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("race-form").requestSubmit();
});

// The chat

let conversation = [];
let left = 0; // oldest messages that are no longer sent

function forget() {
  conversation = [];
  left = 0;
  at("log").replaceChildren();
}

function said(kind, text = "") {
  const message = made("article", text, `message ${kind}`);
  at("log").append(message);
  message.scrollIntoView({ block: "nearest" });
  return message;
}

/** Leaves the oldest question and its answer out of what is sent. */
function leaveOut() {
  if (!left) at("log").append(made("p", "The conversation fills the context: its oldest messages are no longer sent.", "note"));
  left += 2;
}

async function converse(signal) {
  const text = at("message").value, asked = said("user", text), place = said("assistant");
  const answer = new Answer(made("pre", "", "answer")), figures = made("p", "", "figures");
  const given = parameters(), system = at("system").value.trim(), talk = conversation; // until it is forgotten
  const before = left;
  answer.pre.tabIndex = 0;
  answer.begin(width(given));
  place.append(answer.pre, figures);
  at("message").value = "";
  talk.push({ role: "user", content: text });
  let usage = null;
  const ask = async () => {
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...talk.slice(left)];
    for await (const frame of chunks("chat/completions", { ...given, messages, stream_options: { include_usage: true } }, signal)) {
      const { top, bottom } = figures.getBoundingClientRect();
      const follows = bottom > 0 && top < innerHeight; // the reader has not scrolled away
      answer.add(frame);
      usage = frame.chunk.usage ?? usage;
      figures.textContent = (answer.speed ? `${answer.speed.toFixed(0)} tokens/s: ` : "") + answer.figures;
      if (follows) figures.scrollIntoView({ block: "nearest" });
    }
  };
  try {
    for (let full = true; full;) {
      full = false;
      await ask().catch((error) => {
        full = error.code === "context_length_exceeded" && left + 1 < talk.length;
        if (!full) throw error;
        leaveOut();
      });
    }
  } finally {
    if (answer.tokens) {
      talk.push({ role: "assistant", content: answer.text.join("") });
    } else { // nothing was said: the message is not part of the conversation
      talk.pop();
      asked.remove();
      place.remove();
      at("message").value = text;
      if (talk === conversation) { // what was left out for it is sent again
        left = before;
        if (!left) at("log").querySelector(".note")?.remove();
      }
    }
  }
  const room = model.mtad.max_prompt_and_new_tokens; // the next answer is to have a quarter of it
  if (usage?.total_tokens > .75 * room && left + 2 < talk.length) leaveOut();
}

at("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  run("send", "chat-stop", converse);
});
at("chat-stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  forget();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  if (event.isComposing || event.keyCode === 229) return; // an input method takes it; Safari tells by the code alone
  event.preventDefault();
  at("chat-form").requestSubmit();
});

// The views

function view(wanted) {
  for (const name of ["race", "chat"]) {
    at(name).hidden = name !== wanted;
    at(`${name}-tab`).setAttribute("aria-selected", name === wanted);
    at(`${name}-tab`).tabIndex = name === wanted ? 0 : -1;
  }
}

for (const name of ["race", "chat"]) at(`${name}-tab`).addEventListener("click", () => view(name));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  const other = at("race").hidden ? "race" : "chat";
  view(other);
  at(`${other}-tab`).focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  fail("");
  load().catch((error) => fail(error.message));
});
at("panel").open = matchMedia("(min-width: 60rem)").matches;
at("parameters").addEventListener("input", fit);
addEventListener("scroll", () => hint(pointed), { passive: true });
reset("with drafts", `${PLAIN}: one token per pass`);
load().catch((error) => fail(error.message));
