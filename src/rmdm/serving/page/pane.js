// One model's text: its tokens as they are written, which of them to mask, and what went wrong.

import { isCausal } from "./state.js";
import { Trace, isText, withGaps } from "./trace.js";

const KINDS = { mdlm: "MDLM", rmdm: "RMDM", sedd: "SEDD", ar: "autoregressive" };
const LONG = 160;
const SURE = 0.9;
const REST_MS = 1400;
const COPIED_MS = 2000;

export class Pane {
  /** `on` has `model(id)`, `refill(text)`, `like(text)`, `copy(text)` and `whole()`, called when people ask for it. */
  constructor(on) {
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    const part = (name) => this.root.querySelector(name);
    this.part = {
      name: part(".name"), about: part(".about"), alert: part(".alert"), text: part(".text"), readout: part(".readout"),
      refill: part(".refill"), clear: part(".clear"), like: part(".as-like"), copy: part(".copy-text"), used: part(".used"),
    };
    this.anew = document.createElement("span");
    this.anew.className = "hint";
    this.anew.textContent = "both texts are written anew";
    this.part.clear.after(this.anew);
    this.on = on;
    this.cells = [];
    this.trace = null;
    this.ended = null;
    this.step = 0;
    this.picked = new Set();
    this.lit = new Set();
    this.cursor = 0;
    this.part.refill.addEventListener("click", () => this._refill());
    this.part.clear.addEventListener("click", () => this._pick(() => this.picked.clear(), true));
    this.part.like.addEventListener("click", () => on.like(this.trace.text));
    this.part.copy.addEventListener("click", () => this._copy());
    const { text } = this.part;
    text.addEventListener("click", (event) => this._click(event));
    text.addEventListener("keydown", (event) => this._key(event));
    for (const kind of ["pointerover", "focusin"]) text.addEventListener(kind, (event) => this._read(this._place(event)));
    for (const kind of ["pointerleave", "focusout"]) text.addEventListener(kind, () => this._read(null));
  }

  /** Show a model, in pane `number` of `count`; where there is a choice its name is a menu. */
  setModel(model, served, number, count) {
    this.model = model;
    this.isAlone = count === 1;
    this.anew.id = `anew-${number}`;
    if (this.isAlone) this.part.refill.removeAttribute("aria-describedby");
    else this.part.refill.setAttribute("aria-describedby", this.anew.id);
    const { name, about, text } = this.part;
    if (served.length > 1) {
      const menu = document.createElement("select");
      menu.setAttribute("aria-label", `Model ${number}`);
      menu.autocomplete = "off"; // browsers would restore it into another menu
      for (const { id } of served) menu.add(new Option(id, id, false, id === model.id));
      menu.style.setProperty("--letters", model.id.length);
      menu.addEventListener("change", () => this.on.model(menu.value));
      name.replaceChildren(menu);
    } else {
      name.textContent = model.id;
    }
    const size = sizeOf(model.parameters);
    about.textContent = [KINDS[model.process] ?? model.process, `${size} parameters`, `${model.length} tokens`].join(" · ");
    text.setAttribute("aria-label", `Text by ${model.id}; select words to mask them`);
  }

  /** A new text is on its way. With `isQuiet` the old one stays until the new one is finished. */
  begin(isQuiet = false) {
    say(this.part.alert, "");
    this.next = null;
    this.isQuiet = isQuiet && this.trace?.isDone === true;
    this.isLive = true;
    if (this.isQuiet) return;
    this.part.text.style.minHeight = `${this.part.text.offsetHeight}px`; // what stands below stays where it is
    this.trace = null;
    this.picked.clear();
    this.lit.clear();
    this.part.used.textContent = "";
    this._fit(this.model.length);
    this.show(0);
    this._read(null); // the word that was read is gone, though its place may still have the focus
  }

  /** Take in an event of the stream. */
  hear(event) {
    if (event.type === "start") {
      this.next = new Trace(event);
    } else {
      this.next.add(event);
    }
    if (this.isQuiet && !this.next.isDone) return;
    if (this.isQuiet) this._light(this.trace, this.next);
    if (this.trace !== this.next) {
      this.trace = this.next;
      this.picked.clear();
      this._fit(this.trace.length);
    }
    if (event.type !== "step") this._tell();
    this.show(this.step);
    if (this.trace.received <= 1) this._read(null);
  }

  /** The stream is over; `message` says why where it ended badly. */
  end(message = "") {
    this.isLive = false;
    this.part.text.style.minHeight = "";
    say(this.part.alert, message);
    if (this.trace) this.trace.close();
    else this._fit(0);
    this.show(this.step);
    this._read(null);
  }

  /** What the text was written with, and a remark on what of it has no bearing here. */
  setRemark(remark) {
    this.remark = remark;
  }

  get steps() {
    return this.trace?.steps ?? 0;
  }

  /** Up to which step there is something to show. */
  get reach() {
    if (!this.isLive || this.trace?.isDone) return Infinity;
    return this.trace?.received ?? 0;
  }

  get isFinished() {
    return this.trace?.isDone === true;
  }

  /** Show the text as it stood after a step. */
  show(step) {
    this.step = step;
    if (step < this.steps) this.lit.clear();
    for (let place = 0; place < this.cells.length; place++) this._draw(place);
    this._rest(this.isFinished && step >= this.steps);
    const count = this.picked.size;
    const { refill, clear, like, copy } = this.part;
    refill.hidden = clear.hidden = count === 0;
    this.anew.hidden = count === 0 || this.isAlone;
    refill.textContent = `Refill ${count} ${count === 1 ? "word" : "words"}`;
    like.hidden = !this.isFinished || !this.model.reads_text || count > 0;
    copy.hidden = !this.isFinished || count > 0;
    if (!this.part.text.contains(document.activeElement)) this._read(null);
  }

  /** The light on the last words goes out a while after the end; what is done to the text then does not bring it back. */
  _rest(isOver) {
    const ended = isOver ? this.trace : null;
    if (ended === this.ended) return;
    this.ended = ended;
    this.root.classList.toggle("is-over", isOver);
    clearTimeout(this.resting);
    this.part.text.classList.remove("resting");
    if (isOver) this.resting = setTimeout(() => this.part.text.classList.add("resting"), REST_MS);
  }

  /** As many cells as the text has places; those that are there already stay, and so does the focus. */
  _fit(length) {
    const { text } = this.part;
    text.classList.toggle("long", length > LONG);
    while (this.cells.length > length) {
      const { space, box } = this.cells.pop();
      space.remove();
      box.remove();
    }
    while (this.cells.length < length) {
      const space = document.createTextNode("");
      const box = document.createElement("span");
      box.setAttribute("role", "option");
      box.dataset.place = this.cells.length;
      text.append(space, box);
      this.cells.push({ space, box, key: "" });
    }
    this._setCursor(Math.min(this.cursor, Math.max(length - 1, 0)));
  }

  _draw(place) {
    const cell = this.cells[place];
    const { step, token } = this.trace?.at(place, this.step) ?? { step: 0, token: null };
    const isPicked = this.picked.has(place);
    const isFresh = token !== null && !token.isGiven && ((step === this.step && step > 0) || this.lit.has(place));
    // A block is as wide as the word that comes to stand there, once that is known, so that lines do not jump.
    const shown = token ?? this.trace?.last(place) ?? null;
    const key = [shown?.id, shown?.text, token === null, token?.isBeyond, token?.p, isFresh, isPicked].join("|");
    if (cell.key === key) return;
    cell.key = key;
    const kind = kindOf(token);
    const { lead, body } = spaced(shown, place);
    if (cell.space.data !== lead) cell.space.data = lead;
    cell.box.className = ["token", kind, isFresh && "fresh", isPicked && "picked"].filter(Boolean).join(" ");
    if (kind === "masked") {
      const ghost = document.createElement("span");
      ghost.textContent = shown?.control ? "" : body;
      cell.box.replaceChildren(ghost);
    } else {
      cell.box.textContent = kind === "control" ? "" : body;
    }
    const p = token?.p ?? 1;
    cell.box.style.setProperty("--p", p > SURE ? 1 : p);
    cell.box.setAttribute("aria-label", labelOf(kind, token));
    cell.box.setAttribute("aria-selected", isPicked);
    if (kind === "control" || kind === "beyond") cell.box.setAttribute("aria-disabled", "true");
    else cell.box.removeAttribute("aria-disabled");
  }

  /** Remember which words are not those of the text before. */
  _light(before, after) {
    const old = new Map(before.textTokens().map((token) => [token.at, token.id]));
    this.lit = new Set(after.textTokens().filter((token) => old.get(token.at) !== token.id).map((token) => token.at));
  }

  _tell() {
    const { settings, seconds } = this.trace;
    const order = settings.spacing ? `${settings.sampler} ${settings.spacing} apart` : settings.sampler;
    const said = [`${this.trace.steps} steps`, order, `temperature ${settings.temperature}`, `seed ${settings.seed}`];
    const { latent, latent_seed: seed } = settings;
    if (latent && seed !== null && seed !== undefined && seed !== settings.seed) said.push(`latent seed ${seed}`);
    if (latent === "like" || latent === "between") said.push(`latent ${latent === "like" ? "like a text" : `at ${settings.weight}`}`);
    if (seconds !== null) said.push(`${seconds < 0.1 ? seconds.toFixed(3) : seconds.toFixed(2)} s`);
    if (this.remark) said.push(this.remark);
    this.part.used.textContent = said.join(" · ");
  }

  _read(place) {
    this.part.readout.textContent = place === null ? this._hint() : this._about(place);
  }

  _hint() {
    if (this.isLive && !this.trace) return "Waiting for the first step…";
    if (this.isLive && this.trace.received === 0 && this.trace.settings.latent === "resample") {
      return "Fitting the latent to the words that are given…"; // it takes seconds
    }
    if (!this.isFinished) return "";
    if (isCausal(this.model)) return "From left to right, one token a step.";
    return "Click words to mask them.";
  }

  _about(place) {
    const { step, token } = this.trace?.at(place, this.step) ?? { token: null };
    if (token === null) return `Place ${place + 1}: not written yet`;
    if (token.control) return `Place ${place + 1}: ends or fills the row, step ${step}`;
    const word = `“${token.text.trim() || JSON.stringify(token.text)}”`;
    if (token.isBeyond) return `${word} stands behind the end of the text`;
    if (token.isGiven) return `${word} was given`;
    return `${word}: step ${step}${token.p == null ? "" : `, probability ${chance(token.p)}`}`;
  }

  // Masking

  _canPick(place) {
    const token = this.isFinished ? this.trace.at(place, this.trace.steps).token : null;
    return token !== null && isText(token) && !isCausal(this.model);
  }

  /** Change what is picked; the whole text must be in view for it. */
  _pick(change, takesFocus = false) {
    if (!this.isFinished) return;
    change();
    this.on.whole();
    if (takesFocus) this._focus(this.cursor);
  }

  _toggle(place, isOn = !this.picked.has(place)) {
    if (!this._canPick(place)) return;
    if (isOn) this.picked.add(place);
    else this.picked.delete(place);
  }

  _click(event) {
    const place = this._place(event);
    if (place === null) return;
    this._pick(() => {
      if (event.shiftKey) this._range(this.cursor, place);
      else this._toggle(place);
    });
    this._focus(place);
  }

  _range(from, to) {
    for (let place = Math.min(from, to); place <= Math.max(from, to); place++) this._toggle(place, true);
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.cells.length - 1;
    const to = {
      ArrowRight: () => Math.min(this.cursor + 1, last), ArrowLeft: () => Math.max(this.cursor - 1, 0),
      ArrowDown: () => this._line(1), ArrowUp: () => this._line(-1), Home: () => 0, End: () => last,
    }[event.key]?.();
    if (to !== undefined) {
      if (event.shiftKey) this._pick(() => this._range(this.cursor, to));
      this._focus(to);
    } else if (event.key === " " || event.key === "Enter") {
      this._pick(() => this._toggle(this.cursor));
    } else if (event.key === "Escape" && this.picked.size) {
      this._pick(() => this.picked.clear());
    } else {
      return;
    }
    event.preventDefault();
  }

  /** The place a line above or below the cursor, nearest to it. */
  _line(direction) {
    const middle = (place) => {
      const { left, right, top, bottom } = this.cells[place].box.getBoundingClientRect();
      return { x: (left + right) / 2, y: (top + bottom) / 2, height: bottom - top };
    };
    const from = middle(this.cursor);
    let best = this.cursor;
    let least = Infinity;
    for (let place = 0; place < this.cells.length; place++) {
      const { x, y } = middle(place);
      const away = (y - from.y) * direction;
      if (away < from.height / 2) continue;
      const distance = away * 1000 + Math.abs(x - from.x);
      if (distance < least) [best, least] = [place, distance];
    }
    return best;
  }

  _place(event) {
    const box = event.target.closest("[data-place]");
    return box ? Number(box.dataset.place) : null;
  }

  _setCursor(place) {
    this.cursor = place;
    this.cells.forEach(({ box }, at) => (box.tabIndex = at === place ? 0 : -1));
  }

  _focus(place) {
    this._setCursor(place);
    this.cells[place]?.box.focus();
  }

  async _copy() {
    const { copy } = this.part;
    if (!(await this.on.copy(this.trace.text))) return;
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy text"), COPIED_MS);
  }

  _refill() {
    const text = withGaps(this.trace.textTokens(), this.picked);
    this.cursor = Math.min(...this.picked);
    this._focus(this.cursor); // the button goes away
    this.on.refill(text);
  }
}

/** Put a message into an alert; one too long for it is scrolled, with the keyboard too. */
export function say(alert, message) {
  alert.textContent = message;
  if (alert.scrollHeight > alert.clientHeight) alert.tabIndex = 0;
  else alert.removeAttribute("tabindex");
}

/** A token's text as the space before it and the rest; what is nothing but space gets a sign to click on. */
function spaced(token, place) {
  if (token === null) return { lead: place ? " " : "", body: "" };
  if (token.control) return { lead: " ", body: "" };
  if (token.text === "") return { lead: "", body: "\ufffd" }; // part of a character
  const lead = token.text.match(/^\s*/)[0];
  const body = token.text.slice(lead.length);
  return body ? { lead, body } : { lead, body: lead.includes("\n") ? "↵" : "␣" };
}

function kindOf(token) {
  if (token === null) return "masked";
  if (!isText(token)) return token.control ? "control" : "beyond";
  return token.isGiven ? "given" : "written";
}

function labelOf(kind, token) {
  if (kind === "masked") return "not written yet";
  if (kind === "control") return "end of the text";
  const word = token.text.trim() || "space";
  if (kind === "beyond") return `${word}, behind the end`;
  if (kind === "given") return `${word}, given`;
  return token.p == null ? word : `${word}, ${chance(token.p)}`;
}

function chance(p) {
  if (p > 0 && p < 0.01) return "below 1%";
  return p < 1 && p > 0.99 ? "over 99%" : `${Math.round(100 * p)}%`;
}

function sizeOf(count) {
  for (const [unit, name] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (count >= unit) return `${Number((count / unit).toPrecision(3))}${name}`;
  }
  return String(count);
}
