// The controls beside the text: they show a state, and say when someone changes it.

import { OWN, isCausal, numberOf, randomSeed, stepsOf } from "./state.js";

const LADDER = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];
const TEMPERATURES = { low: 0, high: 1.5 };
const NUMBERS = ["steps", "seed", "temperature", "top_p", "remask", "spacing", "guidance", "latent_temperature",
  "latent_seed"];

const at = (id) => document.getElementById(id);

export class Controls {
  /** `run(isQuiet)` is called after each change that asks for a new text. */
  constructor(run) {
    this.run = run;
    this.state = null;
    this.shown = [];
    for (const name of NUMBERS) at(name).addEventListener("change", () => this._number(name));
    at("steps-range").addEventListener("change", () => this._set({ steps: this.ladder[at("steps-range").value] }));
    at("steps-range").addEventListener("input", () => (at("steps").value = this.ladder[at("steps-range").value]));
    at("temperature-range").addEventListener("change", () => this._set({ temperature: Number(at("temperature-range").value) }));
    at("temperature-range").addEventListener("input", () => (at("temperature").value = at("temperature-range").value));
    at("sampler").addEventListener("change", () => this._set({ sampler: at("sampler").value || null }));
    at("own").addEventListener("click", () => this._set({ ...Object.fromEntries(OWN.map((name) => [name, null])), sampler: null }));
    at("text").addEventListener("input", () => {
      this.state.text = at("text").value;
      grow(at("text"));
    });
    at("another").addEventListener("click", () => this._set({ seed: randomSeed(), latent_seed: null }));
    this._bindLatent();
  }

  _bindLatent() {
    for (const radio of document.querySelectorAll("[name=z]")) {
      radio.addEventListener("change", () => this._source(radio.value));
    }
    const latentSeed = () => this.state.latent_seed ?? this.state.seed;
    at("new-latent").addEventListener("click", () => this._set({ latent_seed: randomSeed() }));
    at("new-words").addEventListener("click", () => this._set({ seed: randomSeed(), latent_seed: latentSeed() }));
    for (const end of ["from", "to"]) {
      at(`keep-${end}`).addEventListener("click", () => {
        this.kept = { ...this.kept, [end]: String(latentSeed()) };
        this.state[end] = this.kept[end];
        this.show(this.state, this.shown);
      });
      at(end).addEventListener("change", () => at(end).reportValidity() && this._set({ [end]: at(end).value }));
    }
    at("weight").addEventListener("input", () => {
      clearTimeout(this.sliding);
      this.state.weight = Number(at("weight").value);
      this._tellWeight();
      this.sliding = setTimeout(() => this.run(true), 90);
    });
    at("like").addEventListener("input", () => (this.state.like = at("like").value));
    at("like-go").addEventListener("click", () => this._set({}));
  }

  /** Show a state for the models in the panes. */
  show(state, shown) {
    this.state = state;
    this.shown = shown;
    at("text").value = state.text;
    grow(at("text"));
    const longest = Math.max(...shown.map((model) => model.length));
    this.ladder = LADDER.filter((steps) => steps <= Math.max(longest, 16));
    const steps = stepsOf(state, shown);
    at("steps-row").hidden = shown.every(isCausal);
    at("steps-range").max = this.ladder.length - 1;
    at("steps-range").value = nearest(this.ladder, steps);
    at("steps").value = steps ?? "";
    for (const name of NUMBERS.slice(1)) at(name).value = state[name] ?? "";
    for (const name of OWN.slice(1)) at(name).placeholder = ownOf(shown, name);
    at("temperature-range").value = state.temperature ?? shown[0].settings.temperature;
    this._showSamplers();
    this._showLatent();
  }

  _showSamplers() {
    const names = [...new Set(this.shown.flatMap((model) => model.samplers))];
    const own = new Option(`${this.shown.length > 1 ? "the models’" : "the model’s"} own (${ownOf(this.shown, "sampler")})`, "");
    at("sampler").replaceChildren(own, ...names.map((name) => new Option(name.replace("_", " "), name)));
    at("sampler").value = names.includes(this.state.sampler) ? this.state.sampler : "";
  }

  _showLatent() {
    const { state } = this;
    const having = this.shown.filter((model) => model.latent);
    const reads = having.some((model) => model.reads_text);
    at("latent").hidden = having.length === 0;
    at("guidance-row").hidden = !having.some((model) => model.has_null);
    at("latent_temperature-row").hidden = having.length === 0 || state.z !== "draw";
    at("remask-row").hidden = this.shown.every(isCausal);
    at("spacing-row").hidden = !this.shown.some((model) => (this.state.sampler ?? model.settings.sampler) === "spaced");
    for (const end of ["from", "to"]) at(end).disabled = having.length === 0 || state.z !== "between"; // else it must hold something
    if (!having.length) return;
    at("latent-title").textContent = this.shown.length > 1 ? `Latent of ${having.map(({ id }) => id).join(" and ")}` : "Latent";
    at("like-choice").hidden = at("ends-text").hidden = !reads;
    for (const radio of document.querySelectorAll("[name=z]")) radio.checked = radio.value === state.z;
    for (const panel of document.querySelectorAll("[data-z]")) panel.hidden = panel.dataset.z !== state.z;
    for (const end of ["from", "to"]) at(end).value = state[end];
    const kept = Object.entries(this.kept ?? {}).map(([end, seed]) => `${end === "from" ? "A" : "B"} is ${seed}`);
    at("kept").textContent = kept.join(", ") || "to go between two";
    at("weight").value = state.weight;
    this._tellWeight();
    at("like").value = state.like;
    at("new-latent").hidden = at("new-latent-hint").hidden = state.z !== "draw";
  }

  _tellWeight() {
    at("weight").setAttribute("aria-valuetext", `${Math.round(100 * this.state.weight)}% of the way from A to B`);
  }

  /** Another source of latents; two ends nobody chose are what is shown now and some other. */
  _source(z) {
    const { kept = {} } = this;
    const changes = { z };
    if (z === "between" && this.state.z === "draw") {
      changes.from = kept.from ?? String(this.state.latent_seed ?? this.state.seed);
      changes.to = kept.to ?? String(randomSeed());
      changes.weight = kept.from && kept.to ? 0.5 : 0;
    }
    if (z === "like" && !this.state.like.trim()) {
      Object.assign(this.state, changes);
      this.show(this.state, this.shown);
      at("like").focus();
      return;
    }
    this._set(changes);
  }

  _number(name) {
    const box = at(name);
    if (!box.reportValidity()) return;
    this._set({ [name]: box.value === "" ? null : numberOf(name, box.value) });
  }

  _set(changes) {
    Object.assign(this.state, changes);
    this.show(this.state, this.shown);
    this.run(false);
  }
}

/** What the models themselves use, for an empty box. */
function ownOf(models, name) {
  const values = models.map((model) => model.settings[name]).filter((value) => value !== undefined && value !== null);
  return [...new Set(values)].join(" / ") || "own";
}

function nearest(ladder, value) {
  if (value === null) return 0;
  const away = ladder.map((step) => Math.abs(Math.log(step / value)));
  return away.indexOf(Math.min(...away));
}

/** As many lines as the text needs. */
function grow(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}
