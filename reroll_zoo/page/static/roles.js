// Roles: engines, trainer, environments and rewards as lanes of the last minute, busy and idle, and what waits for each.

import { drawing, fill, h, seconds, short, tell, theme } from "./dom.js";
import { PHASE_COLOURS } from "./palette.js";

const WINDOW_S = 60, NUM_STEPS = 4, MAX_ENGINES = 8, MAX_LIVES = 20000, TICK_S = 1;
const COLOURS = { engine: PHASE_COLOURS[1], policy: PHASE_COLOURS[5], push: "#f2994a", checkpoint: "#12a5b8", evaluation: "#b15bd6", environment: "#d6549f", reward: PHASE_COLOURS[2] };
const NAMES = { policy: "training", push: "pushing weights", checkpoint: "saving", evaluation: "evaluating, while the trainer waits" };

export class Roles {
  constructor(store) {
    this.store = store;
    this.rows = [];
    this.title = h("h2");
    this.list = h("div");
    this.legend = h("p", { class: "legend" }, Object.entries(NAMES).map(([role, name]) => h("span", {}, h("span", { class: "swatch", style: { background: COLOURS[role] } }), name)));
    this.element = h("section", { class: "card roles" }, this.title, this.list, this.legend);
  }

  update() {
    const { store } = this, [from, to] = this.window();
    const samples = samplesWithin(store, from, to);
    const lanes = [...this.engines(from, to), this.trainer(from, to), ...(store.run.has_envs ? this.environments(samples, from, to) : []), this.rewards(samples, from, to)];
    this.element.hidden = !store.ordered.length;
    this.title.textContent = `Busy and idle, ${store.run.status === "running" ? "the last" : "at its end,"} ${seconds(to - from)}`;
    if (lanes.length !== this.rows.length) {
      this.rows = lanes.map(() => new Row());
      fill(this.list, this.rows.map((row) => row.element));
    }
    lanes.forEach((lane, place) => this.rows[place].show({ ...lane, from, to }));
  }

  /** The last minute, or a few steps where they take longer; of a run that is over, its last. */
  window() {
    const { store } = this, to = store.nowS, steps = store.marks.filter((mark) => mark.kind === "stepped").slice(-NUM_STEPS);
    return [Math.max(0, Math.min(to - WINDOW_S, steps[0]?.time ?? to)), to];
  }

  /** Each engine by its own reports; of many, their mean. A journal of an earlier version tells nothing of them. */
  engines(from, to) {
    const seen = this.ticksFrom(from);
    if (seen.length < 2) return [];
    const num = seen.at(-1).busy.length, loads = seen.at(-1).load;
    const lane = (name, shareOf, load) => {
      const told = seen.map((tick) => ({ ...tick, share: shareOf(tick) })).filter(({ share }) => share !== null); // Reports may take longer than a look.
      const bars = between(told, from, ({ share }) => bar(COLOURS.engine, share, `${name}: ${Math.round(100 * share)} % busy`));
      const busy = bars.reduce((sum, one) => sum + one.share * (one.to - one.from), 0) / Math.max(1e-9, to - from);
      return { name, about: `${short(load)} ${load === 1 ? "request" : "requests"}`, busy, bars };
    };
    const share = (tick, place) => (tick.busy[place] === null || tick.busy[place] === undefined ? null : tick.busy[place] / 100);
    if (num > MAX_ENGINES) return [lane(`${num} engines`, (tick) => mean(tick.busy.map((_, place) => share(tick, place)).filter((one) => one !== null)), loads.reduce((a, b) => a + b, 0))];
    return Array.from({ length: num }, (_, place) => lane(num > 1 ? `engine ${place}` : "engine", (tick) => share(tick, place), loads[place]));
  }

  /** The looks at the engines since a time, with the last before it. */
  ticksFrom(from) {
    const { ticks } = this.store.activity;
    return ticks.slice(Math.max(0, firstAfter(ticks, from) - 1));
  }

  trainer(from, to) {
    const { store } = this, roles = { policy: "policy", engine: "push", checkpoint: "checkpoint", evaluation: "evaluation" };
    let spans = store.activity.spans.filter((span) => roles[span.role] && (span.end ?? to) > from);
    if (!store.activity.spans.length) spans = stepsOf(store.marks); // A journal of an earlier version.
    const bars = spans.map((span) => {
      const role = roles[span.role], end = Math.min(span.end ?? to, to);
      return { ...bar(COLOURS[role], 1, `${NAMES[role]}, ${seconds(end - span.start)}`), role, from: Math.max(from, span.start), to: end };
    }).filter((one) => one.to > one.from);
    const ready = store.living.filter((life) => life.phase === 4).length;
    return { name: "trainer", about: `${short(ready)} ${ready === 1 ? "sample waits" : "samples wait"}`, busy: covered(bars.filter((one) => one.role !== "evaluation")) / Math.max(1e-9, to - from), bars };
  }

  /** A sample that generates and is with no engine is in its environment. */
  environments(samples, from, to) {
    const seen = this.ticksFrom(from).map((tick) => ({ ...tick, inside: Math.max(0, samples.filter((life) => phaseAt(life, tick.time) === 1).length - tick.load.reduce((a, b) => a + b, 0)) }));
    const bars = between(seen, from, ({ inside }) => bar(COLOURS.environment, inside ? 1 : 0, `${inside} samples in their environments`)).filter((one) => one.share);
    const num = seen.at(-1)?.inside ?? 0;
    return [{ name: "environments", about: `${short(num)} ${num === 1 ? "sample" : "samples"}`, busy: covered(bars) / Math.max(1e-9, to - from), bars }];
  }

  rewards(samples, from, to) {
    const bars = [];
    for (const { course, id } of samples) {
      for (let at = 0; at < course.length; at += 2) {
        const start = Math.max(from, course[at + 1]), end = Math.min(to, at + 2 < course.length ? course[at + 3] : to);
        if (course[at] === 2 && end > start) bars.push({ ...bar(COLOURS.reward, 1, `sample ${id} judged for ${seconds(end - start)}`), from: start, to: end });
      }
    }
    const num = this.store.living.filter((life) => life.phase === 2).length;
    return { name: "rewards", about: `${short(num)} ${num === 1 ? "sample" : "samples"} judged`, busy: covered(bars) / Math.max(1e-9, to - from), bars };
  }
}

/** One role: how busy it was, and when. */
class Row {
  constructor() {
    this.name = h("b");
    this.about = h("span", { class: "faint" });
    this.share = h("span", { class: "count" });
    this.canvas = drawing((context, width, height) => this.draw(context, width, height), { role: "img", onpointermove: (event) => this.point(event), onpointerleave: () => tell(null) });
    this.element = h("div", { class: "role" }, h("div", {}, this.share, this.name, this.about), this.canvas);
  }

  show(lane) {
    this.lane = lane;
    this.name.textContent = lane.name;
    this.about.textContent = lane.about;
    this.share.textContent = `${Math.round(100 * Math.min(1, lane.busy))} %`;
    this.canvas.setAttribute("aria-label", `${lane.name}: busy ${this.share.textContent} of the time`);
    this.canvas.redraw();
  }

  draw(context, width, height) {
    const { from, to, bars } = this.lane, x = (time) => ((time - from) / Math.max(1e-9, to - from)) * width;
    context.fillStyle = theme().track;
    context.fillRect(0, 0, width, height);
    for (const one of bars) {
      context.fillStyle = one.colour;
      context.fillRect(x(one.from), height * (1 - one.share), Math.max(0.7, x(one.to) - x(one.from)), height * one.share);
    }
  }

  point(event) {
    const { from, to, bars } = this.lane, time = from + (event.offsetX / this.canvas.clientWidth) * (to - from);
    const found = bars.findLast((one) => one.from <= time && time <= one.to);
    return tell(found ? found.label : `${this.lane.name}: idle`, event.clientX, event.clientY);
  }
}

const bar = (colour, share, label) => ({ colour, share, label });
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

/** For each look at the engines, what `barOf` says of it, from the look before. While all are idle there are none. */
function between(ticks, since, barOf) {
  const wasIdle = ({ busy, load }) => !busy.some(Boolean) && !load.some(Boolean);
  return ticks.slice(1).map((tick, place) => {
    const before = ticks[place], from = wasIdle(before) ? Math.max(before.time, tick.time - TICK_S) : before.time;
    return { ...barOf(tick), from: Math.max(from, since), to: tick.time };
  }).filter((one) => one.to > one.from);
}

/** The time that these take together, where they overlap once. */
function covered(bars) {
  let total = 0, until = -Infinity;
  for (const { from, to } of [...bars].sort((a, b) => a.from - b.from)) {
    total += Math.max(0, to - Math.max(from, until));
    until = Math.max(until, to);
  }
  return total;
}

function stepsOf(marks) {
  const spans = [];
  let start = null;
  for (const { kind, time } of marks) {
    if (kind === "taken") start = time;
    else if (kind === "stepped" && start !== null) { spans.push({ role: "policy", start, end: time }); start = null; }
    else if (kind === "begun") start = null;
  }
  if (start !== null) spans.push({ role: "policy", start, end: null });
  return spans;
}

const samplesWithin = (store, from, to) => store.ordered.slice(-MAX_LIVES).filter((life) => life.end >= from && life.start <= to);

function phaseAt(life, time) {
  let phase = null;
  for (let at = 0; at < life.course.length && life.course[at + 1] <= time; at += 2) phase = life.course[at];
  return phase;
}

/** Where in a list by time the first after this one is. */
function firstAfter(list, time) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].time > time) high = middle;
    else low = middle + 1;
  }
  return low;
}
