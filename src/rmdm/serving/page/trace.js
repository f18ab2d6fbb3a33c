// One denoising as it was recorded: which token stood where after each step.

export class Trace {
  /** `start` is the first event of `/v1/denoise`. */
  constructor(start) {
    this.steps = start.steps;
    this.length = start.length;
    this.settings = start.settings;
    this.received = 0;
    this.isDone = false;
    this.text = "";
    this.seconds = null;
    this.changes = Array.from({ length: this.length }, () => []);
    for (const token of start.rows[0].given) this._set(token.at, 0, { ...token, isGiven: true });
  }

  /** Take in a `step` or `done` event. */
  add(event) {
    const row = event.rows[0];
    if (event.type === "step") {
      this.received = event.step;
      this.steps = Math.max(this.steps, event.step);
      for (const place of row.masked ?? []) this._set(place, event.step, null);
      for (const token of row.new) this._set(token.at, event.step, token);
      return;
    }
    this.isDone = true;
    this.received = this.steps;
    this.text = row.text;
    this._spell(row.tokens);
    this.settings = event.rmdm.settings;
    this.seconds = event.rmdm.seconds;
  }

  /** Nothing more will come: a text that broke off ends with the last step received. */
  close() {
    if (!this.isDone) this.steps = this.received;
  }

  /** What stands at a place after a step, `{step, token}`; `token` is null while it is masked. */
  at(place, step) {
    const changes = this.changes[place];
    for (let i = changes.length - 1; i >= 0; i--) {
      if (changes[i].step <= step) return changes[i];
    }
    return { step: 0, token: null };
  }

  /** The last token known of a place, if any. */
  last(place) {
    return this.changes[place].findLast((change) => change.token)?.token ?? null;
  }

  /** The tokens of the finished text, from left to right. */
  textTokens() {
    return this.changes.map((_, place) => this.at(place, this.steps).token).filter((token) => token && isText(token));
  }

  /** The text of a token may hang on what stands beside it, and where the row's text ends is known at the end only. */
  _spell(tokens) {
    for (const { at, id, text, control } of tokens) {
      for (const { token } of this.changes[at] ?? []) {
        if (token?.id !== id) continue;
        // A word behind the end of the text is none of its tokens in the end.
        if (control) token.isBeyond = !token.control;
        else token.text = text;
      }
    }
  }

  _set(place, step, token) {
    this.changes[place]?.push({ step, token });
  }
}

/** Whether a token is part of the text: it neither ends nor fills the row, nor stands behind the end. */
export function isText(token) {
  return !token.control && !token.isBeyond;
}

/** A text with gaps from tokens: runs of picked places become `[MASK:k]`, the others stay as they are. */
export function withGaps(tokens, picked) {
  let text = "";
  let gap = 0;
  for (const token of [...tokens, null]) {
    if (token && picked.has(token.at)) {
      gap += 1;
      continue;
    }
    if (gap) text += gap === 1 ? "[MASK]" : `[MASK:${gap}]`;
    gap = 0;
    text += token?.text ?? "";
  }
  return text;
}
