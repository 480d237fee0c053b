// How many samples were in each state over time, kept in buckets: a window of any length is read off without going through lives.

import { OVER } from "./palette.js";

const NUM = 16384, FIRST_WIDTH_S = 1 / 128;

/** Lives that are over, each added once. Times are seconds from 0 on; buckets grow twice as wide whenever one lies beyond the last. */
export class Profile {
  constructor() {
    this.width = FIRST_WIDTH_S;
    this.areas = Array.from({ length: OVER }, () => new Float64Array(NUM + 2)); // Seconds of samples in each bucket.
    this.steps = Array.from({ length: OVER }, () => new Float64Array(NUM + 2)); // Of whole buckets, where a sample comes or goes.
    this.totals = Array.from({ length: OVER }, () => new Float64Array(NUM + 2)); // All areas before a bucket.
    this.isSettled = true;
  }

  add({ course }) {
    while (course[course.length - 1] >= NUM * this.width) this.widen();
    const { width } = this;
    for (let at = 0; at + 2 < course.length; at += 2) {
      const phase = course[at], start = course[at + 1], end = course[at + 3];
      if (phase >= OVER || end <= start) continue;
      const first = Math.floor(start / width), last = Math.floor(end / width), area = this.areas[phase];
      if (first === last) area[first] += end - start;
      else {
        area[first] += (first + 1) * width - start;
        area[last] += end - last * width;
        this.steps[phase][first + 1] += 1;
        this.steps[phase][last] -= 1;
      }
    }
    this.isSettled = false;
  }

  widen() {
    this.settle();
    for (const area of this.areas) {
      for (let place = 0; place < NUM / 2; place++) area[place] = area[2 * place] + area[2 * place + 1];
      area.fill(0, NUM / 2);
    }
    this.width *= 2;
    this.isSettled = false;
  }

  settle() {
    if (this.isSettled) return;
    for (let phase = 0; phase < OVER; phase++) {
      const area = this.areas[phase], steps = this.steps[phase], totals = this.totals[phase];
      let level = 0;
      for (let place = 0; place <= NUM; place++) {
        level += steps[place];
        area[place] += level * this.width;
        totals[place + 1] = totals[place] + area[place];
      }
      steps.fill(0);
    }
    this.isSettled = true;
  }

  /** Add to each column the mean number of samples in this phase, over the time that the column stands for. */
  addTo(columns, phase, from, to, num) {
    this.settle();
    const span = (to - from) / num;
    let before = this.upTo(phase, from);
    for (let column = 0; column < num; column++) {
      const after = this.upTo(phase, from + (column + 1) * span);
      columns[column] += (after - before) / span;
      before = after;
    }
  }

  /** Seconds of samples in this phase until a time. */
  upTo(phase, time) {
    const place = Math.min(NUM, Math.max(0, time / this.width)), bucket = Math.floor(place);
    return this.totals[phase][bucket] + this.areas[phase][bucket] * (place - bucket);
  }
}
