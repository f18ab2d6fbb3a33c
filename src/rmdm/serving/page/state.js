// What is asked for: one plain object, its form in a link, and the request it is for each model.

const GAP = /\[MASK(?::[^\]]*)?\]/;
/** Rounds in which a latent is fitted to a text with gaps: fewer than by default, for someone is looking. */
const ROUNDS = 8;
const CONFIDENCE = ["max_prob", "margin", "entropy", "balanced"];

/** Numbers of the state, with the rule each keeps; null leaves the choice to the model. */
const NUMBERS = {
  steps: { low: 1, high: 4096, isWhole: true },
  seed: { low: 0, high: Number.MAX_SAFE_INTEGER, isWhole: true },
  temperature: { low: 0, high: 100 },
  top_p: { low: 0, high: 1 },
  remask: { low: 0, high: 1 },
  spacing: { low: 2, high: 1000000, isWhole: true },
  guidance: { low: -1000, high: 1000 },
  latent_temperature: { low: 0, high: 1000 },
  latent_seed: { low: 0, high: Number.MAX_SAFE_INTEGER, isWhole: true },
  weight: { low: 0, high: 1 },
};

/** Numbers that only say how to sample. */
export const OWN = ["steps", "temperature", "top_p", "remask", "spacing", "guidance", "latent_temperature"];

export function freshState(models) {
  return {
    models: models.slice(0, 2).map((model) => model.id),
    text: "", seed: 0, steps: null, sampler: null, temperature: null, top_p: null, remask: null, spacing: null,
    guidance: null, latent_temperature: null, latent_seed: null, z: "draw", like: "", from: "0", to: "1", weight: 0.5,
  };
}

export function hasGap(text) {
  return GAP.test(text);
}

export function isCausal(model) {
  return model.samplers.every((name) => name === "ar");
}

export function randomSeed() {
  return Math.floor(Math.random() * 100000);
}

/** Steps as sent to every model: what was chosen, else what the first of them prefers. */
export function stepsOf(state, models) {
  return state.steps ?? models.find((model) => !isCausal(model))?.settings.steps ?? null;
}

/** The state as the part of a link after `#`. */
export function toFragment(state, models) {
  const query = new URLSearchParams();
  for (const id of state.models) query.append("model", id);
  if (state.text) query.set("text", state.text);
  query.set("seed", state.seed);
  const steps = stepsOf(state, models);
  if (steps !== null) query.set("steps", steps);
  for (const name of ["sampler", ...OWN.slice(1), "latent_seed"]) {
    if (state[name] !== null) query.set(name, state[name]);
  }
  if (state.z === "like") query.set("like", state.like);
  if (state.z === "between") {
    for (const name of ["from", "to", "weight"]) query.set(name, state[name]);
  }
  return query.toString();
}

/** The state of a link, and a line for each thing in it that cannot be met. */
export function fromFragment(fragment, served) {
  const query = new URLSearchParams(fragment);
  const state = freshState(served);
  const problems = [];
  const asked = [...new Set(query.getAll("model"))];
  const known = asked.filter((id) => served.some((model) => model.id === id));
  for (const id of asked.filter((id) => !known.includes(id))) {
    problems.push(`The link is about ${id}, which is not served here.`);
  }
  if (known.length) state.models = known.slice(0, 2);
  for (const name of Object.keys(NUMBERS)) {
    if (!query.has(name)) continue;
    const value = numberOf(name, query.get(name));
    if (value === undefined) problems.push(`The link’s ${name}=${query.get(name)} is not ${ruleOf(name)}; it is left out.`);
    else state[name] = value;
  }
  for (const name of ["sampler", "text", "like", "from", "to"]) {
    if (query.has(name)) state[name] = query.get(name);
  }
  const samplers = served.flatMap((model) => model.samplers);
  if (state.sampler !== null && !samplers.includes(state.sampler)) {
    problems.push(`The link’s sampler=${state.sampler} is none of ${[...new Set(samplers)].join(", ")}; it is left out.`);
    state.sampler = null;
  }
  if (query.has("like")) state.z = "like";
  else if (query.has("from") || query.has("to")) state.z = "between";
  return { state, problems };
}

/** The number a text spells; undefined where it breaks its rule. */
export function numberOf(name, text) {
  const { low, high, isWhole } = NUMBERS[name];
  const value = Number(text);
  const isFit = text.trim() !== "" && value >= low && value <= high && (!isWhole || Number.isInteger(value));
  return isFit ? value : undefined;
}

function ruleOf(name) {
  const { low, high, isWhole } = NUMBERS[name];
  return `${isWhole ? "a whole number" : "a number"} from ${low} to ${high}`;
}

/** The body of a request to one model; what the model cannot take is left out, so that two kinds can be compared. */
export function requestFor(model, state, steps) {
  const body = { model: model.id };
  if (hasGap(state.text)) body.infill = state.text;
  else if (state.text) body.prompt = state.text;
  body.seed = state.seed;
  if (steps !== null && !isCausal(model)) body.steps = steps;
  if (state.sampler !== null && model.samplers.includes(state.sampler)) body.sampler = state.sampler;
  for (const name of ["temperature", "top_p"]) {
    if (state[name] !== null) body[name] = state[name];
  }
  if (state.remask !== null && model.samplers.some((name) => CONFIDENCE.includes(name))) body.remask = state.remask;
  if (state.spacing !== null && (body.sampler ?? model.settings.sampler) === "spaced") body.spacing = state.spacing;
  if (state.guidance !== null && model.has_null) body.guidance = state.guidance;
  return model.latent ? { ...body, ...latentOf(model, state) } : body;
}

function latentOf(model, state) {
  const seed = state.latent_seed === null ? {} : { latent_seed: state.latent_seed };
  if (state.z === "like" && model.reads_text) return { ...seed, like: state.like };
  if (state.z === "between") return { ...seed, between: [endOf(state.from), endOf(state.to)], weight: state.weight };
  const drawn = { ...seed };
  if (hasGap(state.text)) drawn.rounds = ROUNDS; // to go on from a prompt takes all of them
  if (state.latent_temperature !== null) drawn.latent_temperature = state.latent_temperature;
  return drawn;
}

/** One end of an interpolation: digits are a seed, anything else a text. */
function endOf(text) {
  return /^\s*\d+\s*$/.test(text) ? { seed: Number(text) } : text;
}

/** Why a model cannot do what the state asks for; empty where it can. */
export function refusal(model, state) {
  if (isCausal(model) && hasGap(state.text)) {
    return `${model.id} writes from left to right: it continues a prompt and fills no gaps.`;
  }
  return "";
}

/** What of the state has no bearing on a model, for a quiet remark beside its text. */
export function remark(model, state) {
  if (!model.latent && (state.z !== "draw" || state.latent_seed !== null)) return "no latent: writes without one";
  if (model.latent && state.z === "like" && !model.reads_text) return "cannot read texts: draws its latent";
  return "";
}
