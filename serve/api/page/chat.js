// The chat page: what the reader does, and what is asked of the server for it.

import { EdgePanel } from "./edge.js";
import { Figures, drawPasses } from "./figures.js";
import { fetchModel, streamChat } from "./stream.js";
import { Transcript } from "./transcript.js";

const KEY = "moray.api-key";
const byId = (id) => document.getElementById(id);
const transcript = new Transcript(byId("transcript"));
const question = byId("question");

const edge = new EdgePanel(apiKey);

let model = null;
let conversation = { turns: [] }; // replaced by a new one; what still runs for the old one is let go
let running = null; // AbortController of the answer that comes

// --- Asking ---

async function ask(text) {
  const mine = conversation;
  byId("welcome").hidden = true;
  const asked = { text, turn: transcript.addQuestion(text) };
  mine.turns.push({ role: "user", content: text });
  await answer(mine, asked);
}

async function answer(mine, asked) {
  const controller = new AbortController();
  const figures = new Figures(performance.now());
  const view = transcript.addAnswer();
  let reason = null;
  let problem = null;
  begin(controller);
  showFigures(figures);
  try {
    for await (const chunk of streamChat(requestBody(mine.turns), apiKey(), controller.signal)) {
      reason = chunk.choices[0]?.finish_reason ?? reason;
      if (chunk.speculation) {
        figures.add(chunk.speculation, performance.now());
        view.add(chunk.speculation);
        showSoon(figures);
        transcript.follow();
      }
    }
  } catch (error) {
    problem = error;
  }
  if (mine !== conversation) return; // a new chat has begun meanwhile
  end();
  showFigures(figures);
  const isStopped = problem?.name === "AbortError";
  if (problem && figures.numTokens === 0) {
    takeBack(mine, asked, view);
    if (!isStopped) showProblem(problem);
    return;
  }
  mine.turns.push({ role: "assistant", content: view.text });
  if (problem && !isStopped) {
    view.finish(figures.summary, problem.message, () => again(mine, asked, view));
  } else {
    view.finish(figures.summary, isStopped ? "Stopped." : reason === "length" ? "Cut off: no more tokens may come." : "");
    byId("status").textContent = isStopped ? "Stopped." : "The answer is complete.";
  }
  transcript.follow();
}

/** A question that got no token of an answer: back into the field with it, before whatever was typed since. */
function takeBack(mine, asked, view) {
  mine.turns.pop();
  view.turn.remove();
  asked.turn.remove();
  byId("welcome").hidden = mine.turns.length > 0;
  question.value = [asked.text, question.value].filter(Boolean).join("\n");
  fit();
}

function again(mine, asked, view) {
  const isLast = mine === conversation && !view.turn.nextElementSibling;
  if (running || !isLast || !canSend()) return;
  mine.turns.pop();
  view.turn.remove();
  answer(mine, asked);
}

function requestBody(turns) {
  const isOn = byId("speculate").checked && model.drafters.length > 0;
  const speculation = { enabled: isOn, trace: true };
  if (isOn) speculation.drafter = byId("drafter").value;
  const body = { model: model.id, messages: turns, temperature: byId("temperature").valueAsNumber, speculation };
  const most = byId("max-tokens").valueAsNumber;
  const seed = byId("seed").valueAsNumber;
  if (!Number.isNaN(most)) body.max_completion_tokens = most;
  if (!Number.isNaN(seed)) body.seed = seed;
  return body;
}

function begin(controller) {
  running = controller;
  hideProblem();
  byId("status").textContent = "The answer begins.";
  for (const turn of document.querySelectorAll(".note button")) turn.remove(); // only the last answer can be had again
  toggleRunning(true);
}

function end() {
  running = null;
  toggleRunning(false);
}

function toggleRunning(isRunning) {
  const hadFocus = document.activeElement === byId(isRunning ? "send" : "stop");
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  if (hadFocus) byId(isRunning ? "stop" : "send").focus();
}

function startOver() {
  running?.abort();
  end();
  conversation = { turns: [] };
  transcript.clear();
  hideProblem();
  byId("welcome").hidden = false;
  byId("status").textContent = "";
  showFigures(new Figures(0));
  question.focus();
}

// --- Showing ---

let waiting = null; // figures that the next frame shows

function showSoon(figures) {
  if (!waiting) requestAnimationFrame(() => waiting && showFigures(waiting));
  waiting = figures;
}

function showFigures(figures) {
  waiting = null;
  for (const [id, words] of Object.entries(figures.words)) byId(id).textContent = words;
  const peak = drawPasses(byId("passes"), figures.passes);
  byId("peak").textContent = peak === null ? "" : `, ${peak} at most`;
}

function showProblem(problem) {
  const line = byId("problem");
  line.textContent = problem.message;
  line.hidden = false;
  if (problem.status === 401) askForKey();
}

function hideProblem() {
  byId("problem").hidden = true;
}

function askForKey() {
  toggleSettings(true);
  byId("api-key").focus();
}

function toggleSettings(isOpen) {
  document.body.classList.toggle("settings-open", isOpen);
  byId("open-settings").setAttribute("aria-expanded", String(isOpen));
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

// --- The model, and the key to it ---

function apiKey() {
  return byId("api-key").value.trim();
}

async function connect() {
  try {
    model = await fetchModel(apiKey());
  } catch (problem) {
    model = null;
    byId("model").textContent = "not connected";
    byId("context").textContent = "";
    showProblem(problem);
    edge.watch(false);
    return false;
  }
  hideProblem();
  edge.watch((model.edge_drafters?.length ?? 0) > 0);
  byId("model").textContent = model.id;
  const most = model.max_model_len?.toLocaleString("en");
  byId("context").textContent = most ? ` · ${most} tokens of context` : "";
  const drafter = byId("drafter");
  const before = drafter.value;
  drafter.replaceChildren(...(model.drafters.length ? model.drafters : ["none"]).map((name) => new Option(name, name)));
  if (model.drafters.includes(before)) drafter.value = before;
  showDrafting();
  return true;
}

function showDrafting() {
  const isPossible = (model?.drafters.length ?? 0) > 0;
  byId("speculate").disabled = !isPossible;
  byId("drafter").disabled = !isPossible || !byId("speculate").checked;
}

function canSend() {
  if (byId("settings").checkValidity()) return true;
  toggleSettings(true);
  byId("settings").reportValidity();
  return false;
}

function remembered() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage is switched off
  }
}

function remember(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage is switched off: the field itself remembers
  }
}

// --- Wiring ---

async function submit() {
  const text = question.value;
  if (running || !text.trim() || !canSend()) return;
  if (!model && !(await connect())) return;
  if (running || question.value !== text) return; // more was done while it connected
  question.value = "";
  fit();
  await ask(text);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else toggleSettings(false);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", startOver);
byId("open-settings").addEventListener("click", () => {
  toggleSettings(!document.body.classList.contains("settings-open"));
});
byId("speculate").addEventListener("change", showDrafting);
byId("api-key").addEventListener("change", () => {
  remember(apiKey());
  connect();
});
for (const [id, className] of [["show-refused", "with-refused"], ["show-origins", "with-origins"]]) {
  const tick = byId(id);
  const show = () => document.body.classList.toggle(className, tick.checked);
  tick.addEventListener("change", show);
  show();
}
for (const button of document.querySelectorAll(".prompt")) {
  button.addEventListener("click", () => {
    question.value = button.textContent;
    fit();
    question.focus();
  });
}
byId("api-key").value = remembered();
showDrafting();
connect();
