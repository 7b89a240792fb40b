"use strict";

// Parameters shown at first; all others of the model are under "More parameters".
const FIRST = ["method", "draft_len", "beam_width", "accept_threshold", "temperature", "top_k", "top_p", "max_tokens",
  "seed"];
// What the two sides need to be comparable and readable: one choice, text only.
const LEFT_OUT = ["n", "top_logprobs"];
const PLAIN = "sample";

const at = (id) => document.getElementById(id);
let model = null;
let running = null; // AbortController of the run in progress

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
  if (response.status === 401) at("key-label").hidden = false;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `HTTP ${response.status}`);
}

/** One input for a parameter, from its JSON schema; empty means the pair's default, which it shows. */
function input(name, schema) {
  const kinds = (schema.anyOf ?? [schema]).flatMap((one) => one.anyOf ?? [one]);
  const choices = kinds.find((one) => one.enum)?.enum ?? (kinds.some((one) => one.type === "boolean") ? ["true", "false"] : null);
  let field;
  if (choices) {
    field = document.createElement("select");
    for (const choice of ["", ...choices]) {
      const option = document.createElement("option");
      option.value = choice;
      option.textContent = choice || `default (${schema.default ?? "none"})`;
      field.append(option);
    }
  } else {
    field = document.createElement("input");
    field.placeholder = schema.default === null || typeof schema.default === "object" ? "" : String(schema.default);
    if (kinds.some((one) => one.type === "integer" || one.type === "number")) field.inputMode = "decimal";
  }
  field.id = `parameter-${name}`;
  field.dataset.name = name;
  field.dataset.kinds = kinds.map((one) => one.type).join(" ");
  field.title = schema.description ?? "";
  const label = document.createElement("label");
  label.append(name, field);
  return label;
}

/** The value of an input as JSON; text that is no JSON of the wanted type goes as it is, for the server to judge. */
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
  const given = {};
  for (const field of document.querySelectorAll("[data-name]")) {
    if (field.value !== "") given[field.dataset.name] = value(field);
  }
  return given;
}

async function load() {
  const response = await explained(await fetch("v1/models", { headers: headers() }));
  model = (await response.json()).data[0];
  at("model").textContent = `Model: ${model.id}.`;
  const known = model.mtad.parameters;
  const names = Object.keys(known).filter((name) => !LEFT_OUT.includes(name));
  at("parameters").replaceChildren(...FIRST.filter((name) => name in known).map((name) => input(name, known[name])));
  at("more").replaceChildren(...names.filter((name) => !FIRST.includes(name)).map((name) => input(name, known[name])));
}

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

/** One side: shows the text as it comes, coloured by origin, with its figures. Returns tokens a second. */
async function decode(side, body, signal) {
  const pre = at(side), figures = at(`${side}-figures`);
  const started = performance.now();
  let first = null, tokens = 0, firstTokens = 0, blocks = 0, drafted = 0, accepted = 0;
  const response = await explained(await fetch("v1/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  }));
  let speed = null;
  for await (const chunk of events(response.body)) {
    const choice = chunk.choices[0];
    if (!choice) continue;
    const origin = choice.mtad;
    blocks += origin.tokens > 0;
    tokens += origin.tokens;
    drafted += origin.drafted;
    accepted += origin.accepted;
    const characters = Array.from(choice.text); // spans count characters, not UTF-16 units
    let from = 0;
    for (const [kind, length] of origin.origins) {
      const span = document.createElement("span");
      span.className = kind;
      span.textContent = characters.slice(from, from + length).join("");
      span.title = kind === "accepted" ? `drafted and accepted, block ${blocks}` : `the target's own, block ${blocks}`;
      from += length;
      pre.append(span);
    }
    const now = performance.now();
    if (first === null) [first, firstTokens] = [now, tokens];
    // the first block's time is the prompt's as well
    speed = tokens > firstTokens ? (tokens - firstTokens) / ((now - first) / 1000) : speed;
    figures.textContent = `${tokens} tokens, ${speed === null ? "–" : speed.toFixed(0)} tokens/s after the first block, `
      // a block is one pass, but for methods that decode without drafts in several; the end tells
      + `${(origin.statistics?.block_efficiency ?? tokens / blocks).toFixed(2)} tokens a target pass`
      + (drafted ? `, ${(100 * accepted / drafted).toFixed(0)} % of drafts accepted` : "")
      + `, first after ${(first - started).toFixed(0)} ms`
      + (choice.finish_reason ? `, ended by ${choice.finish_reason}` : "");
  }
  return speed;
}

async function run() {
  const base = { model: model.id, prompt: at("prompt").value, stream: true };
  const given = parameters();
  const method = given.method ?? model.mtad.parameters.method.default;
  // both sides get the same seed; what belongs to drafts alone is unused by plain sampling
  const seed = given.seed ?? Math.floor(Math.random() * 2 ** 31);
  at("drafted-title").textContent = `${method}, seed ${seed}`;
  at("plain-title").textContent = `${PLAIN}: one token a pass, seed ${seed}`;
  for (const id of ["drafted", "plain", "drafted-figures", "plain-figures", "ratio"]) at(id).textContent = "";
  const signal = running.signal;
  const sides = [
    () => decode("drafted", { ...base, ...given, seed }, signal),
    () => decode("plain", { ...base, ...given, seed, method: PLAIN }, signal),
  ];
  const speeds = [];
  if (at("together").checked) {
    speeds.push(...await Promise.all(sides.map((side) => side())));
  } else {
    for (const side of sides) speeds.push(await side());
  }
  if (speeds[0] && speeds[1]) at("ratio").textContent = `${(speeds[0] / speeds[1]).toFixed(2)} times the tokens/s`;
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  fail("");
  running = new AbortController();
  at("start").disabled = true;
  at("stop").disabled = false;
  try {
    if (!model) await load();
    await run();
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    running.abort(); // ends the other side, if one failed
    running = null;
    at("start").disabled = false;
    at("stop").disabled = true;
  }
});
at("stop").addEventListener("click", () => running?.abort());
load().catch((error) => fail(error.message));
