// The scrubber: one step counter for all panes, moved by hand or by the clock.

const WHOLE_MS = 4200;
const SLOWEST_MS = 520;
const FASTEST_MS = 16;
const CALM = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  /** `panes()` are those shown now. */
  constructor(panes) {
    this.panes = panes;
    this.step = 0;
    this.isPlaying = false;
    this.speed = 1;
    this.part = Object.fromEntries(["play", "scrub", "where", "speed"].map((id) => [id, document.getElementById(id)]));
    const { play, scrub, speed } = this.part;
    play.addEventListener("click", () => (this.isPlaying ? this.pause() : this.play()));
    scrub.addEventListener("input", () => {
      const step = Number(scrub.value);
      this.pause();
      this.go(step);
    });
    speed.addEventListener("change", () => {
      this.speed = Number(speed.value);
      if (this.isPlaying) this._schedule();
    });
  }

  /** Steps of the longest text. */
  get total() {
    return Math.max(0, ...this.panes().map((pane) => pane.steps));
  }

  /** A new text begins: from its first step on, or at its end where people prefer less motion. */
  start() {
    this.step = 0;
    if (CALM.matches) {
      this.follows = true;
      this.pause();
    } else {
      this.follows = false;
      this.play();
    }
  }

  play() {
    if (this.step >= this.total) this.go(0);
    this.isPlaying = true;
    this._schedule();
    this._tell();
  }

  pause() {
    this.isPlaying = false;
    clearTimeout(this.timer);
    this._tell();
  }

  /** Show a step. */
  go(step) {
    this.follows = false;
    this.step = step;
    for (const pane of this.panes()) pane.show(Math.min(step, pane.steps));
    this._tell();
  }

  /** Show the finished text. */
  toEnd() {
    this.pause();
    this.go(this.total);
  }

  /** More of the text has arrived. */
  heard() {
    if (this.follows) {
      this.go(Math.min(this.total, ...this.panes().map((pane) => pane.reach)));
      this.follows = true;
    }
    this._tell();
  }

  _schedule() {
    clearTimeout(this.timer);
    const pace = Math.min(SLOWEST_MS, Math.max(FASTEST_MS, WHOLE_MS / Math.max(this.total, 1)));
    this.timer = setTimeout(() => this._tick(), pace / this.speed);
  }

  _tick() {
    const panes = this.panes();
    const reach = Math.min(...panes.map((pane) => pane.reach));
    if (this.step < this.total && this.step < reach) this.go(this.step + 1);
    if (this.step >= this.total && panes.every((pane) => pane.reach === Infinity)) this.pause();
    else this._schedule();
  }

  _tell() {
    const { play, scrub, where } = this.part;
    const { total, step } = this;
    scrub.max = total;
    scrub.value = step;
    scrub.style.setProperty("--done", total ? step / total : 0);
    where.lastChild.data = `${step} of ${total}`;
    scrub.setAttribute("aria-valuetext", where.textContent);
    play.classList.toggle("playing", this.isPlaying);
    play.setAttribute("aria-label", this.isPlaying ? "Pause" : "Play");
  }
}
