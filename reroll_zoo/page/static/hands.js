// Hands: pause, go on, save, stop; for whoever came with the run's token.

import { ask, order, Refused } from "./api.js";
import { fill, h } from "./dom.js";

const DEEDS = {
  pause: ["pause", "finish the step under way, then wait"],
  resume: ["go on", "begin the next step"],
  checkpoint: ["save now", "take a checkpoint as soon as no step is under way"],
  stop: ["stop", "as Ctrl-C: finish the update, save, end; --resume goes on from there"],
};

export class Hands {
  constructor(place) { this.place = place; }

  async update(isRunning) {
    const { may, is_paused: isPaused } = isRunning ? await ask("hands") : { may: false, is_paused: false };
    this.isPaused = isPaused;
    const names = may ? [isPaused ? "resume" : "pause", "checkpoint", "stop"] : [], key = names.join();
    if (key === this.key) return;
    this.key = key;
    fill(this.place, names.map((name) => h("button", { title: DEEDS[name][1], onclick: (event) => this.act(name, event.currentTarget) }, DEEDS[name][0])));
  }

  async act(name, button) {
    if (name === "stop" && button.textContent !== "really stop?") {
      button.textContent = "really stop?"; // A second click means it.
      setTimeout(() => { button.textContent = DEEDS.stop[0]; }, 4000);
      return;
    }
    button.disabled = true;
    try {
      await order(name);
      await this.update(true);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      button.title = error.message;
    }
    setTimeout(() => { button.disabled = false; }, 1000);
  }
}
