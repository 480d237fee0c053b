// Now: every sample in flight as a dot in its state, who waits for whom, and what bounds the step.

import { drawing, fill, h, seconds, short, tell } from "./dom.js";
import { Roles } from "./roles.js";
import { LIVING, PHASES, PHASE_COLOURS, versionColour } from "./palette.js";

const PARTS = [
  ["time/wait_s", "waiting for samples", PHASE_COLOURS[1]],
  ["time/train_s", "training", PHASE_COLOURS[5]],
  ["time/critic_s", "critic", "#b15bd6"],
  ["time/push_s", "pushing weights", "#f2994a"],
  ["time/swap_s", "moving models", "#8d6e63"],
];
const NUM_STEPS = 10, NUM_STRAGGLERS = 6, MIN_DOT = 3, MAX_DOT = 12, MAX_ROWS = 12;

export class NowView {
  constructor(store) {
    this.store = store;
    this.facts = h("dl", { class: "facts" });
    this.lanes = LIVING.map((lane) => new Lane(lane, store));
    this.versions = h("p", { class: "legend" });
    this.bound = h("div");
    this.stragglers = h("div");
    this.roles = new Roles(store);
    this.title = h("h2", {}, "Samples in flight");
    this.element = h("div", {},
      h("section", { class: "card" }, this.facts),
      h("section", { class: "card" }, this.title, this.lanes.map((lane) => lane.element), this.versions),
      this.roles.element,
      h("div", { class: "two" },
        h("section", { class: "card" }, h("h2", {}, "Where the last steps went"), this.bound),
        h("section", { class: "card" }, h("h2", {}, "Who waits for whom"), this.stragglers)));
  }

  update() {
    const { store } = this, living = store.living, { run } = store;
    this.title.textContent = run.status === "running" ? "Samples in flight" : "Samples in flight when the journal ends";
    for (const lane of this.lanes) lane.show(living.filter((life) => life.phase === lane.phase));
    const versions = [...new Set(living.map((life) => life.version))].sort((a, b) => a - b);
    fill(this.versions, versions.length ? "admitted under weights" : "", versions.map((version) => h("span", {}, swatch(versionColour(version)), `v${version}`)));
    this.showFacts(living);
    this.roles.update();
    this.showBound();
    this.showStragglers(living);
  }

  showFacts(living) {
    const { store } = this, { run } = store, { prompts_per_step: prompts, max_staleness: staleness } = run.rollout;
    const groups = new Set(living.map((life) => life.group)).size, now = store.nowS;
    const version = store.marks.findLast((mark) => mark.version !== null)?.version ?? null;
    const slots = prompts ? (staleness + 1) * prompts : null;
    const oldest = living.length ? now - Math.min(...living.slice(0, 1).map((life) => life.start)) : null;
    const minute = store.ordered.slice(-20000).filter((life) => life.phase >= 3 && doneAt(life) > now - 60).length;
    const behind = version === null ? null : Math.max(0, ...living.map((life) => version - life.version));
    const last = store.rows().findLast((row) => row["throughput/tokens_per_s"] !== undefined) ?? {};
    fact(this.facts, [
      ["samples in flight", short(living.length), store.lives.size ? `of ${short(store.lives.size)} seen` : ""],
      ["slots in use", slots ? `${groups}/${slots}` : String(groups), "groups"],
      ["weights", version === null ? "–" : `v${version}`, staleness ? `${behind} of ${staleness} versions behind` : "synchronous"],
      ["oldest in flight", seconds(oldest), ""],
      ["ended in the last minute", short(minute), "samples"],
      ["throughput", short(last["throughput/tokens_per_s"]), "tokens/s"],
    ]);
  }

  showBound() {
    const rows = this.store.rows().filter((row) => row["time/step_s"]).slice(-NUM_STEPS);
    if (!rows.length) return fill(this.bound, h("p", { class: "faint" }, "No step is finished yet."));
    const sum = (name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
    const total = sum("time/step_s"), parts = PARTS.map(([name, label, colour]) => [label, sum(name) / total, colour]).filter(([, share]) => share >= 0.005);
    const rest = Math.max(0, 1 - parts.reduce((all, [, share]) => all + share, 0));
    parts.push(["the rest", rest, "#9aa5b1"]);
    const [label, share] = parts.reduce((best, part) => (part[1] > best[1] ? part : best));
    const words = {
      "waiting for samples": "Samples bound the step: the trainer waits for them",
      training: "The update bounds the step",
      critic: "The critic's update bounds the step",
      "pushing weights": "Pushing weights bounds the step",
      "moving models": "Moving models between devices bounds the step",
      "the rest": "What is not measured takes most of the step",
    };
    return fill(this.bound,
      h("p", {}, `${words[label]}, ${percent(share)} of the last ${rows.length} steps of ${seconds(total / rows.length)}.`),
      h("div", { class: "shares" }, parts.map(([name, part, colour]) => h("div", {
        style: { width: `${part * 100}%`, background: colour },
        onpointermove: (event) => tell(`${name}: ${percent(part)}, ${seconds((part * total) / rows.length)} a step`, event.clientX, event.clientY),
        onpointerleave: () => tell(null),
      }))),
      h("p", { class: "legend" }, parts.map(([name, part, colour]) => h("span", {}, swatch(colour), `${name} ${percent(part)}`))));
  }

  /** Groups that have most of their samples, and wait for the others. */
  showStragglers(living) {
    const groups = new Map(), now = this.store.nowS;
    for (const life of living) groups.set(life.group, [...(groups.get(life.group) ?? []), life]);
    const waiting = [...groups].map(([group, lives]) => ({ group, waits: lives.filter((life) => life.phase === 3), runs: lives.filter((life) => life.phase < 3), lives }))
      .filter(({ waits, runs }) => waits.length && runs.length)
      .map((entry) => ({ ...entry, since: Math.min(...entry.waits.map((life) => life.since)) }))
      .sort((a, b) => a.since - b.since);
    if (!waiting.length) return fill(this.stragglers, h("p", { class: "faint" }, living.length ? "No group waits for a sibling." : "Nothing is in flight."));
    return fill(this.stragglers,
      h("p", { class: "faint" }, `${waiting.length} ${waiting.length > 1 ? "groups wait" : "group waits"} for siblings; the longest first`),
      h("table", {}, h("tbody", {}, waiting.slice(0, NUM_STRAGGLERS).map(({ group, runs, lives, since }) => {
        const slowest = runs.reduce((a, b) => (a.start < b.start ? a : b));
        return h("tr", {},
          h("td", { class: "narrow" }, `group ${group}`),
          h("td", { class: "number" }, `${lives.length - runs.length} of ${lives.length}`),
          h("td", { class: "number narrow" }, seconds(now - since)),
          h("td", {}, `${slowest.id} ${PHASES[slowest.phase]} for ${seconds(now - slowest.since)}`));
      }))));
  }
}

/** One state, and a dot for each sample in it. */
class Lane {
  constructor({ phase, name, about }, store) {
    Object.assign(this, { phase, store, lives: [], size: MAX_DOT, perRow: 1 });
    this.count = h("span", { class: "count" }, "0");
    this.canvas = drawing((context, width) => this.draw(context, width), {
      onpointermove: (event) => this.point(event),
      onpointerleave: () => tell(null),
      onclick: (event) => { const life = this.at(event); if (life && life.phase >= 3) location.hash = `samples/${life.id}`; },
    });
    this.canvas.style.height = `${MAX_DOT}px`;
    this.element = h("div", { class: "lane" }, h("div", {}, this.count, swatch(PHASE_COLOURS[phase]), h("b", {}, name), h("span", { class: "faint" }, about)), this.canvas);
  }

  show(lives) {
    this.lives = lives;
    this.count.textContent = lives.length;
    const width = this.canvas.clientWidth || 600;
    this.size = MAX_DOT;
    while (this.size > MIN_DOT && Math.ceil(lives.length / Math.floor(width / this.size)) * this.size > MAX_ROWS * 8) this.size--;
    this.perRow = Math.max(1, Math.floor(width / this.size));
    const rows = Math.max(1, Math.ceil(lives.length / this.perRow));
    this.canvas.style.height = `${Math.min(rows * this.size, 400)}px`;
    this.canvas.redraw();
  }

  draw(context) {
    const { size, perRow } = this, radius = size / 2 - (size > 5 ? 1 : 0.4);
    for (const [place, life] of this.lives.entries()) {
      context.fillStyle = versionColour(life.version);
      const x = (place % perRow) * size, y = Math.floor(place / perRow) * size;
      if (size < 6) context.fillRect(x, y, size - 1, size - 1);
      else {
        context.beginPath();
        context.arc(x + size / 2, y + size / 2, radius, 0, 7);
        context.fill();
      }
    }
  }

  at(event) {
    const column = Math.floor(event.offsetX / this.size);
    return column < this.perRow ? this.lives[Math.floor(event.offsetY / this.size) * this.perRow + column] : undefined;
  }

  point(event) {
    const life = this.at(event), now = this.store.nowS;
    this.canvas.style.cursor = life && life.phase >= 3 ? "pointer" : "";
    if (!life) return tell(null);
    const lines = [`sample ${life.id} · ${life.domain}`, `${PHASES[life.phase]} for ${seconds(now - life.since)}, admitted ${seconds(now - life.start)} ago under v${life.version}`];
    if (life.tokens !== null) lines.push(`${life.tokens} tokens${life.reward === null ? "" : `, reward ${short(life.reward)}`}`);
    return tell(lines.join("\n"), event.clientX, event.clientY);
  }
}

/** When a sample was scored; minus infinity if it never was. */
function doneAt(life) {
  for (let place = 0; place < life.course.length; place += 2) if (life.course[place] === 3) return life.course[place + 1];
  return -Infinity;
}

export const swatch = (colour, opacity = 1) => h("span", { class: "swatch", style: { background: colour, opacity } });
const percent = (share) => `${share > 0.995 && share < 1 ? 99 : Math.round(share * 100)} %`;

function fact(list, rows) {
  fill(list, rows.map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, ` ${note}`) : null))));
}
