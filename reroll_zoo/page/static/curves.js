// Curves: what the run measured, step by step, with other runs laid over it.

import { fill, h } from "./dom.js";
import { seriesColour } from "./palette.js";
import { Plot } from "./plot.js";

/** Cards in their order: a title, which metrics belong there, and what to leave of their names. */
const CARDS = [
  ["Reward", (name) => name === "reward/mean" || /^reward\/[^/]+$/.test(name) && name !== "reward/std"],
  ["Held-out", (name) => /^eval\/(.*\/)?(pass@\d+|avg@\d+|maj@\d+|average|reward|loss)$/.test(name)],
  ["Reward parts", (name) => /^reward\/(?!judge\/)[^/]+\/[^/]+$/.test(name)],
  ["Environments", (name) => /^env\/[^/]+\/(success|valid|effective)$/.test(name)],
  ["Response length, tokens", (name) => ["rollout/completion_tokens", "eval/completion_tokens"].includes(name)],
  ["Truncated, with signal, failed", (name) => ["rollout/truncated", "rollout/groups_with_signal", "rollout/failed_fraction"].includes(name)],
  ["Loss", (name) => ["train/loss", "train/sft_loss", "train/preference_loss", "critic/loss"].includes(name)],
  ["Entropy, nats", (name) => ["train/entropy", "train/full_entropy"].includes(name)],
  ["Gap between trainer and sampler, nats", (name) => name === "train/sampler_gap"],
  ["KL", (name) => ["kl/reference", "train/kl_old", "train/kl_ref"].includes(name)],
  ["Gradient norm", (name) => name === "train/grad_norm" || name === "critic/grad_norm"],
  ["Clipped", (name) => name === "train/clip_fraction"],
  ["Staleness, versions", (name) => ["rollout/staleness", "rollout/staleness_max"].includes(name)],
  ["Throughput, tokens/s", (name) => ["throughput/tokens_per_s", "train/tokens_per_s", "engine/tokens_per_s"].includes(name)],
  ["Seconds of a step", (name) => ["time/step_s", "time/wait_s", "time/train_s", "time/push_s", "time/critic_s"].includes(name)],
  ["Accuracy and margin", (name) => ["train/accuracy", "train/margin", "eval/accuracy", "eval/margin"].includes(name)],
];
const MAX_OTHERS = 60;

export class CurvesView {
  constructor(store) {
    this.store = store;
    this.overlaid = [];
    this.plots = new Map();
    this.smoothing = h("input", { type: "range", min: 0, max: 0.98, step: 0.01, value: 0, oninput: () => this.update() });
    this.filter = h("input", { type: "search", placeholder: "other metrics, e.g. engine", style: { flex: "0 1 14rem" }, oninput: () => this.update(), "aria-label": "find metrics" });
    this.runs = h("select", { "aria-label": "lay another run over this one", onchange: (event) => this.add(event.target.value) });
    this.chips = h("span", { class: "legend" });
    this.grid = h("div", { class: "plots" });
    this.element = h("div", {}, h("div", { class: "bar" }, h("label", {}, "smooth", this.smoothing), this.filter, this.runs, this.chips), this.grid);
  }

  async add(run) {
    if (run && !this.overlaid.includes(run)) {
      this.overlaid.push(run);
      await this.store.refreshMetrics(run);
    }
    this.update();
  }

  remove(run) {
    this.overlaid = this.overlaid.filter((other) => other !== run);
    this.update();
  }

  update() {
    const { store } = this;
    this.showRuns();
    const columns = new Map(["", ...this.overlaid].map((run) => [run, columnsOf(store.rows(run))]));
    const names = [...new Set([...columns.values()].flatMap((known) => [...known.keys()]))].sort();
    const cards = CARDS.map(([title, wanted]) => [title, names.filter(wanted)]).filter(([, found]) => found.length);
    const words = this.filter.value.trim().toLowerCase();
    if (words) cards.unshift(...names.filter((name) => name.toLowerCase().includes(words)).slice(0, MAX_OTHERS).map((name) => [name, [name]]));
    const shown = cards.map(([title, found]) => {
      if (!this.plots.has(title)) this.plots.set(title, new Plot(title, found.join(", ")));
      const plot = this.plots.get(title);
      plot.show(this.series(found, columns), Number(this.smoothing.value));
      return plot.element;
    });
    const isSame = shown.length === this.grid.children.length && shown.every((element, place) => this.grid.children[place] === element);
    if (!isSame) fill(this.grid, shown.length ? shown : h("p", { class: "faint" }, "No step is finished yet."));
  }

  /** This run's metrics in full lines, those of others dashed. */
  series(names, columns) {
    const bare = names.map((name) => name.replace(/^(reward|eval|time|train|rollout|throughput|env)\//, ""));
    const short = (name) => (new Set(bare).size < names.length ? name : bare[names.indexOf(name)]);
    const found = [];
    for (const [run, known] of columns) {
      for (const name of names) {
        const column = known.get(name);
        if (!column) continue;
        const place = run ? names.length * this.overlaid.indexOf(run) + names.length + names.indexOf(name) : names.indexOf(name);
        const label = [run, names.length > 1 || !run ? short(name) : ""].filter(Boolean).join(" ");
        found.push({ name: label, colour: seriesColour(place), dashed: Boolean(run), xs: column.xs, ys: column.ys });
      }
    }
    return found;
  }

  showRuns() {
    const others = this.store.run.runs.filter((run) => !this.overlaid.includes(run)), key = JSON.stringify([others, this.overlaid]);
    this.runs.hidden = !this.store.run.runs.length;
    if (key === this.runsKey) return;
    this.runsKey = key;
    fill(this.runs, h("option", { value: "" }, "compare with …"), others.map((run) => h("option", { value: run }, run)));
    fill(this.chips, this.overlaid.map((run) => h("button", { onclick: () => this.remove(run), title: "remove" }, `${run} ×`)));
  }
}

/** Metric by metric, where it was measured. */
function columnsOf(rows) {
  const columns = new Map();
  for (const row of rows) {
    for (const [name, value] of Object.entries(row)) {
      if (name === "step" || (typeof value !== "number" && value !== null)) continue;
      if (!columns.has(name)) columns.set(name, { xs: [], ys: [] });
      const column = columns.get(name);
      column.xs.push(row.step);
      column.ys.push(value);
    }
  }
  return columns;
}
