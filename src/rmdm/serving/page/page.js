// The page: one state, one pane a model, a request for each, one scrubber for all.

import { ServerError, apiKey, denoise, isKey, keepApiKey, listModels } from "./api.js";
import { Controls } from "./controls.js";
import { Pane, say } from "./pane.js";
import { Player } from "./player.js";
import { copy, curlFor, pythonFor } from "./share.js";
import { freshState, fromFragment, randomSeed, refusal, remark, requestFor, stepsOf, toFragment } from "./state.js";

const STOPPED = "stopped";
const STOP_AFTER_MS = 300;
const COPIED_MS = 4000;

const at = (id) => document.getElementById(id);

let served = [];
let state = null;
let panes = [];
let running = null;

const controls = new Controls((isQuiet) => run(isQuiet));
const player = new Player(() => panes);

/** Ask what is served, then show what the link asks for, or a first text. */
async function open() {
  try {
    served = await listModels();
  } catch (error) {
    complain(error, at("notice"));
    if (apiKey() !== null) askForKey(); // it may be the key that no answer comes to
    return;
  }
  say(at("notice"), "");
  allow(true);
  at("compare-row").hidden = served.length < 2;
  follow();
}

/** Make the state that of the link, and run it. */
function follow() {
  const found = fromFragment(location.hash.slice(1), served);
  state = found.state;
  say(at("notice"), found.problems.join(" "));
  arrange();
  run();
}

const modelOf = (id) => served.find((model) => model.id === id);
const shownModels = () => state.models.map(modelOf);

/** As many panes as models are shown. */
function arrange() {
  while (panes.length > state.models.length) panes.pop().root.remove();
  while (panes.length < state.models.length) {
    const pane = new Pane({
      model: (id) => choose(panes.indexOf(pane), id),
      refill: (text) => change({ text, seed: randomSeed() }), // else it would be the same words again
      like: (text) => change({ z: "like", like: text, seed: randomSeed() }),
      copy: (text) => share(text, "Text copied"),
      whole: () => player.toEnd(),
    });
    panes.push(pane);
    at("panes").append(pane.root);
  }
  panes.forEach((pane, index) => pane.setModel(shownModels()[index], served, index + 1, panes.length));
  at("compare").checked = panes.length > 1;
  controls.show(state, shownModels());
}

/** Show a model in a pane; the other pane takes this one's where it had the same. */
function choose(index, id) {
  const other = state.models.indexOf(id);
  if (other >= 0) state.models[other] = state.models[index];
  state.models[index] = id;
  arrange();
  panes[index].root.querySelector("select").focus();
  run();
}

function change(changes) {
  Object.assign(state, changes);
  controls.show(state, shownModels());
  run();
}

/** Write the texts of the state, all at once; what was still being written is given up. */
async function run(isQuiet = false) {
  running?.abort();
  const own = (running = new AbortController());
  const steps = stepsOf(state, shownModels());
  const bodies = shownModels().map((model) => requestFor(model, state, steps));
  history.replaceState(null, "", `#${toFragment(state, shownModels())}`);
  at("curl").textContent = curlFor(bodies, apiKey() !== null);
  at("python").textContent = pythonFor(bodies, apiKey() !== null);
  at("said").textContent = "";
  setBusy(true);
  const asked = [...panes];
  asked.forEach((pane, index) => {
    pane.setRemark(remark(shownModels()[index], state));
    pane.begin(isQuiet);
  });
  if (!isQuiet) player.start();
  await Promise.all(asked.map((pane, index) => write(pane, bodies[index], own.signal)));
  if (running !== own) return;
  setBusy(false);
  if (isQuiet) player.toEnd();
  player.heard();
  const finished = asked.filter((pane) => pane.isFinished);
  at("said").textContent = finished.map((pane) => `${pane.model.id}: ${pane.trace.text}`).join("\n");
}

/** One model's text, into its pane. */
async function write(pane, body, signal) {
  const impossible = refusal(pane.model, state);
  if (impossible) return pane.end(impossible);
  try {
    for await (const event of denoise(body, signal)) {
      if (signal.aborted) return;
      pane.hear(event);
      player.heard();
    }
    pane.end();
  } catch (error) {
    if (signal.aborted) {
      if (signal.reason === STOPPED) pane.end("Stopped.");
      return;
    }
    pane.end(complain(error));
  }
}

/** What went wrong, in a line; it is also put where there is no pane to put it in yet. */
function complain(error, where = null) {
  const isKnown = error instanceof ServerError;
  if (!isKnown) console.error(error);
  if (error.status === 401) askForKey();
  const message = isKnown ? error.message : `The page cannot make sense of the answer: ${error.message}`;
  if (where) say(where, message);
  return message;
}

function askForKey() {
  const form = at("key");
  if (!form.hidden) return;
  form.hidden = false;
  at("key-value").focus();
}

/** Until it is known what is served there is nothing to ask for, but for the key. */
function allow(isAllowed) {
  for (const control of document.querySelectorAll("#compare, main :is(button, input, select, textarea)")) {
    if (control.form === at("key")) continue;
    control.disabled = !isAllowed;
  }
}

/** Browsers fill in what stood in the controls before, and give some the value of another: the state knows better. */
function restore() {
  at("speed").value = player.speed;
  if (!state) return;
  at("compare").checked = panes.length > 1;
  controls.show(state, shownModels());
}

/** While a text is being written, Stop stands where Generate was; what is there in a moment needs none. */
function setBusy(isBusy) {
  at("panes").setAttribute("aria-busy", isBusy);
  clearTimeout(setBusy.timer);
  if (isBusy) setBusy.timer = setTimeout(() => offerStop(true), STOP_AFTER_MS);
  else offerStop(false);
}

function offerStop(isOffered) {
  const [from, to] = isOffered ? [at("generate"), at("stop")] : [at("stop"), at("generate")];
  const hasFocus = document.activeElement === from;
  from.parentElement.classList.toggle("busy", isOffered);
  if (hasFocus) to.focus();
}

/** Copy, and say so for a while. */
async function share(text, said) {
  const note = at("copied");
  const isCopied = await copy(text);
  note.classList.toggle("failed", !isCopied);
  note.textContent = isCopied ? said : "The browser forbids copying; select the text instead";
  clearTimeout(share.timer);
  share.timer = setTimeout(() => (note.textContent = ""), COPIED_MS);
  return isCopied;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state) run();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("stop").addEventListener("click", () => {
  running?.abort(STOPPED);
});
at("compare").addEventListener("change", () => {
  const [first] = state.models;
  const second = served.find((model) => model.id !== first);
  state.models = at("compare").checked ? [first, second.id] : [first];
  arrange();
  run();
});
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = at("key-value");
  const key = field.value.trim();
  if (key && !isKey(key)) {
    say(at("notice"), "A key has plain ASCII characters only; this one has others.");
    return field.select();
  }
  field.value = "";
  if (!key) return field.reportValidity();
  say(at("notice"), "");
  keepApiKey(key);
  at("key").hidden = true;
  if (state) run();
  else open();
});
at("copy-link").addEventListener("click", () => share(location.href, "Link copied"));
at("copy-curl").addEventListener("click", () => share(at("curl").textContent, "curl command copied"));
at("copy-python").addEventListener("click", () => share(at("python").textContent, "Python copied"));
addEventListener("hashchange", () => served.length && follow());
addEventListener("pageshow", (event) => event.persisted || restore());

for (const control of document.querySelectorAll("input, select, textarea")) control.setAttribute("autocomplete", "off");
allow(false);
open();
