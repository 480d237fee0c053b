// What is known of the run, kept up to date by asking for what has changed.

import { ask } from "./api.js";
import { OVER } from "./palette.js";
import { Profile } from "./profile.js";

const ARRANGE_MS = 1000; // While a long journal is read, what is there so far is drawn this often.
const MAX_ACTIVITY = 50000;

/** A sample: one row of /api/events. Times are seconds after the journal's first event. */
export class Life {
  constructor([serial, id, domain, version, trained, reward, tokens, course]) {
    Object.assign(this, { serial, id, domain, version, trained, reward, tokens, course });
    this.lane = 0;
  }
  get phase() { return this.course[this.course.length - 2]; }
  get since() { return this.course[this.course.length - 1]; }
  get start() { return this.course[1]; }
  get isOver() { return this.phase >= OVER; }
  get end() { return this.isOver ? this.since : Infinity; }
  get group() { return this.id.slice(0, this.id.indexOf(".")); }
}

export class Store {
  constructor() {
    this.run = null;
    this.clear();
  }

  clear() {
    this.boot = null;
    this.lives = new Map();
    this.ordered = []; // By admission.
    this.living = []; // Those that are not over.
    this.short = []; // Those that lasted no longer than `reach`, and are over; the others are long.
    this.long = [];
    this.reach = 0;
    this.profile = new Profile(); // Of those that are over.
    this.isStale = false; // Whether lives have changed since they were put in order.
    this.arrangedMs = -Infinity;
    this.numLanes = 0;
    this.marks = [];
    this.activity = { spans: [], ticks: [], open: new Map(), next: 0 }; // Leases and the like; engines once a second.
    this.revision = 0;
    this.firstS = 0;
    this.metrics = new Map(); // By run; "" is this one.
  }

  /** How late it is, on the journal's clock: the run's end if it has ended. */
  get nowS() {
    const { run } = this;
    if (!run?.first_s) return 0;
    if (run.status !== "running") return run.last_s - this.firstS;
    return run.now_s + (performance.now() - this.runAskedMs) / 1000 - this.firstS;
  }

  async refreshRun() {
    const run = await ask("run");
    if (this.boot && run.boot !== this.boot) this.clear(); // Another server, or another run in this folder.
    this.runAskedMs = performance.now();
    this.run = run;
    this.boot = run.boot;
  }

  /** Ask for what has happened. `onPart` is called after every part of a long answer. */
  async refreshEvents(onPart = () => {}) {
    for (;;) {
      const answer = await ask("events", { since: this.revision, marks: this.marks.length, activity: this.activity.next });
      if (this.boot && answer.boot !== this.boot) { this.clear(); return; }
      this.firstS = answer.first_s;
      this.run.last_s = answer.last_s;
      for (const row of answer.lives) this.take(new Life(row));
      for (const [time, kind, version, engine] of answer.marks) this.marks.push({ time, kind, version, engine });
      this.takeActivity(answer.activity);
      this.revision = answer.revision;
      this.isStale ||= answer.lives.length > 0;
      if (this.isStale && (!answer.more || performance.now() - this.arrangedMs > ARRANGE_MS)) {
        this.arrange();
        onPart();
      }
      if (!answer.more) return;
    }
  }

  take(life) {
    if (life.isOver && !this.lives.get(life.serial)?.isOver) this.profile.add(life);
    this.lives.set(life.serial, life);
  }

  takeActivity({ next, rows }) {
    const { spans, ticks, open } = this.activity;
    this.activity.next = next;
    for (const [time, what, ...told] of rows) {
      if (what === "engines") ticks.push({ time, busy: told[0], load: told[1] });
      else if (what === "begun") { // Nothing goes on over a restart.
        for (const span of open.values()) span.end = time;
        open.clear();
      } else if (told[0]) {
        open.set(what, { role: what, start: time, end: null });
        spans.push(open.get(what));
      } else if (open.has(what)) {
        open.get(what).end = time;
        open.delete(what);
      }
    }
    for (const list of [spans, ticks]) if (list.length > MAX_ACTIVITY) list.splice(0, list.length - MAX_ACTIVITY);
  }

  async refreshMetrics(run = "") {
    const known = this.metrics.get(run) ?? { generation: 0, rows: [] };
    for (;;) {
      const answer = await ask("metrics", { run, since: known.rows.length, generation: known.generation });
      known.rows.length = answer.start;
      known.rows.push(...answer.rows);
      known.generation = answer.generation;
      this.metrics.set(run, known);
      if (!answer.more) return;
    }
  }

  rows(run = "") { return this.metrics.get(run)?.rows ?? []; }

  /** Give every sample a lane of its own for as long as it lives. */
  arrange() {
    this.ordered = [...this.lives.values()].sort((a, b) => a.serial - b.serial);
    const free = new Heap((lane) => lane), busy = new Heap(([end]) => end);
    let num = 0;
    for (const life of this.ordered) {
      while (busy.size && busy.top[0] <= life.start) free.push(busy.pop()[1]);
      life.lane = free.size ? free.pop() : num++;
      busy.push([life.end, life.lane]);
    }
    this.numLanes = num;
    this.living = this.ordered.filter((life) => !life.isOver);
    this.reach = this.nowS / 16;
    this.short = [];
    this.long = [];
    for (const life of this.ordered) (life.isOver && life.since - life.start <= this.reach ? this.short : this.long).push(life);
    this.isStale = false;
    this.arrangedMs = performance.now();
  }

  /** The samples that lived in a window, and how many these are, which takes no more than to look at its edge. */
  within(from, to) { return [...this.fromBefore(from, to), ...this.short.slice(this.startingAt(from), this.startingAt(to))]; }
  numWithin(from, to) { return this.fromBefore(from, to).length + Math.max(0, this.startingAt(to) - this.startingAt(from)); }

  /** Those that may have begun before the window, and the long ones. */
  fromBefore(from, to) {
    const edge = this.short.slice(this.startingAt(from - this.reach), this.startingAt(Math.min(from, to)));
    return [...edge.filter((life) => life.end >= from), ...this.long.filter((life) => life.start < to && life.end >= from)];
  }

  /** Where among the short the first is that began at this time or later. */
  startingAt(time) {
    let low = 0, high = this.short.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.short[middle].start >= time) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** The smallest first. */
class Heap {
  constructor(key) { this.key = key; this.items = []; }
  get size() { return this.items.length; }
  get top() { return this.items[0]; }
  push(item) {
    const { items, key } = this;
    let place = items.push(item) - 1;
    while (place > 0) {
      const above = (place - 1) >> 1;
      if (key(items[above]) <= key(item)) break;
      items[place] = items[above];
      place = above;
    }
    items[place] = item;
  }
  pop() {
    const { items, key } = this, first = items[0], last = items.pop();
    if (!items.length) return first;
    let place = 0;
    for (;;) {
      let below = 2 * place + 1;
      if (below >= items.length) break;
      if (below + 1 < items.length && key(items[below + 1]) < key(items[below])) below++;
      if (key(items[below]) >= key(last)) break;
      items[place] = items[below];
      place = below;
    }
    items[place] = last;
    return first;
  }
}
