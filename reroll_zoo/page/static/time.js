// Time: the samples' lives in swim-lanes, or from afar how many were in which state; steps, pushes, checkpoints, faults.

import { drawing, fill, h, seconds, short, tell, theme } from "./dom.js";
import { swatch } from "./now.js";
import { LIVING, OVER, PHASES, PHASE_COLOURS, rewardColour, strength, versionColour } from "./palette.js";

const HEAD = 34, FOOT = 20, MIN_LANE = 5, MAX_LANE = 16, MAX_SINGLE = 4000, MIN_SPAN_S = 0.02;
const FATES = ["lost", "restarted", "joined"]; // Of an engine.
const STACK = [5, 4, 3, 2, 1, 0];

export class TimeView {
  constructor(store) {
    this.store = store;
    this.from = this.to = null; // Seconds; null follows all that there is.
    this.top = 0;
    this.colouring = "state";
    this.detail = "auto";
    this.pointers = new Map();
    this.canvas = drawing((context, width, height) => this.draw(context, width, height), {
      tabindex: 0, role: "img", "aria-label": "the course of the run over time",
      onpointerdown: (event) => this.press(event), onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.release(event), onpointercancel: (event) => this.release(event),
      onpointerleave: () => tell(null), ondblclick: () => this.look(null, null), onkeydown: (event) => this.key(event),
    });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.legend = h("p", { class: "legend" });
    this.note = h("span", { class: "faint grow" });
    const choose = (name, options, set) => h("label", {}, name, h("select", { onchange: (event) => { set(event.target.value); this.update(); } }, options.map((option) => h("option", {}, option))));
    this.element = h("section", { class: "card timeline" },
      h("div", { class: "bar" },
        h("button", { onclick: () => this.look(null, null) }, "all"),
        h("button", { onclick: () => this.lastSteps(10) }, "last 10 steps"),
        h("button", { onclick: () => this.lastSteps(1) }, "last step"),
        h("button", { onclick: () => this.zoom(0.5), "aria-label": "closer" }, "+"),
        h("button", { onclick: () => this.zoom(2), "aria-label": "further" }, "−"),
        choose("colour", ["state", "version", "reward", "domain"], (value) => { this.colouring = value; }),
        choose("show", ["auto", "samples", "sum"], (value) => { this.detail = value; }),
        this.note),
      this.canvas, this.legend);
  }

  update() { this.canvas.redraw(); }

  get whole() { return [0, (this.store.nowS + 0.001) * 1.01]; } // Marks are told to the millisecond, and may be rounded up.
  get window() { return this.from === null ? this.whole : [this.from, this.to]; }

  look(from, to) {
    const [start, end] = this.whole;
    if (from !== null) {
      const span = Math.min(Math.max(to - from, MIN_SPAN_S), (end - start) * 1.2);
      from = Math.max(start - span * 0.5, Math.min(from, end - span * 0.5));
      to = from + span;
    }
    [this.from, this.to] = [from, to];
    this.update();
  }

  zoom(factor, at = null) {
    const [from, to] = this.window, middle = at ?? (from + to) / 2;
    this.look(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  lastSteps(num) {
    const steps = this.store.marks.filter((mark) => mark.kind === "stepped"), start = steps[steps.length - 1 - num]?.time ?? 0;
    this.look(start, Math.max(steps[steps.length - 1]?.time ?? 0, start + MIN_SPAN_S));
  }

  timeAt(x) {
    const [from, to] = this.window;
    return from + (x / this.canvas.clientWidth) * (to - from);
  }

  wheel(event) {
    event.preventDefault();
    const [from, to] = this.window, sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
      const step = (sideways / this.canvas.clientWidth) * (to - from);
      this.look(from + step, to + step);
    } else this.zoom(Math.exp(event.deltaY * 0.0015), this.timeAt(event.offsetX));
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event);
    this.moved = 0;
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.point(event);
    const [from, to] = this.window, perPixel = (to - from) / this.canvas.clientWidth;
    const others = [...this.pointers.values()].filter((other) => other.pointerId !== event.pointerId);
    const dx = event.offsetX - before.offsetX, dy = event.offsetY - before.offsetY;
    this.moved += Math.abs(dx) + Math.abs(dy);
    if (others.length) {
      const anchor = others[0].offsetX, was = Math.abs(before.offsetX - anchor), is = Math.abs(event.offsetX - anchor);
      if (was > 4 && is > 4) this.zoom(was / is, this.timeAt(anchor));
    } else {
      this.top = Math.max(0, this.top - dy);
      this.look(from - dx * perPixel, to - dx * perPixel);
    }
    this.pointers.set(event.pointerId, event);
    return undefined;
  }

  release(event) {
    this.pointers.delete(event.pointerId);
    const life = this.moved < 4 ? this.lifeAt(event.offsetX, event.offsetY) : null;
    if (life && scored(life)) location.hash = `samples/${life.id}`;
  }

  key(event) {
    const [from, to] = this.window, step = (to - from) * 0.15;
    const deeds = {
      ArrowLeft: () => this.look(from - step, to - step), ArrowRight: () => this.look(from + step, to + step),
      "+": () => this.zoom(0.7), "-": () => this.zoom(1.4), 0: () => this.look(null, null),
    };
    if (!deeds[event.key]) return;
    event.preventDefault();
    deeds[event.key]();
  }

  draw(context, width, height) {
    const { store } = this, [from, to] = this.window, x = (time) => ((time - from) / (to - from)) * width;
    const num = store.numWithin(from, to), isSingle = this.detail === "samples" || (this.detail === "auto" && num <= MAX_SINGLE);
    const visible = (this.visible = isSingle ? store.within(from, to) : []);
    this.drawSteps(context, x, width, height);
    if (isSingle) this.drawSingle(context, visible, x, width, height);
    else this.drawSum(context, from, to, width, height);
    this.drawMarks(context, x, width, height);
    this.drawClock(context, from, to, width, height);
    const hint = !isSingle ? `, at most ${short(this.highest)} at once; come closer to see each` : this.isCut ? ", drag up and down to see all" : "";
    this.note.textContent = `${short(num)} samples${hint}`;
    this.showLegend(isSingle, visible);
  }

  drawSteps(context, x, width, height) {
    const { store } = this, { faint, track } = theme();
    let taken = null, labelledTo = -Infinity;
    for (const mark of store.marks) {
      if (mark.kind === "taken") taken = mark.time;
      if (mark.kind === "begun") taken = null;
      if (mark.kind !== "stepped") continue;
      const left = x(taken ?? mark.time), right = x(mark.time);
      taken = null;
      if (right < 0 || left > width) continue;
      context.fillStyle = track;
      context.globalAlpha = 0.55;
      if (right - left > 2) context.fillRect(left, HEAD, right - left, height - HEAD - FOOT);
      context.globalAlpha = 1;
      context.fillStyle = PHASE_COLOURS[5];
      context.fillRect(left, HEAD - 8, Math.max(1, right - left), 5);
      context.font = "11px system-ui, sans-serif";
      const label = `step ${mark.version}`, at = Math.max(2, left), size = context.measureText(label).width;
      if (at > labelledTo + 6 && Math.min(right, width) - at > size * 0.6) {
        context.fillStyle = faint;
        context.fillText(label, at, HEAD - 13);
        labelledTo = at + size;
      }
    }
  }

  drawMarks(context, x, width, height) {
    const { store } = this, { faint, bad, good, accent } = theme();
    const pushes = store.marks.filter((mark) => mark.kind === "stepped" && x(mark.time) >= 0 && x(mark.time) <= width);
    if (pushes.length < width / 8) {
      context.fillStyle = faint;
      context.globalAlpha = 0.5;
      for (const mark of pushes) context.fillRect(x(mark.time) - 0.5, HEAD - 8, 1, height - HEAD - FOOT + 8);
      context.globalAlpha = 1;
    }
    for (const mark of store.marks.filter((mark) => mark.kind === "begun").slice(1)) {
      const place = x(mark.time);
      if (place < 0 || place > width) continue;
      context.fillStyle = bad;
      context.fillRect(place - 1, 4, 2, height - FOOT - 4);
      context.font = "11px system-ui, sans-serif";
      context.fillText(`restart from v${mark.version}`, Math.min(place + 5, width - 100), 12);
    }
    for (const { kind, time, engine } of store.marks.filter((mark) => FATES.includes(mark.kind))) {
      const place = x(time);
      if (place < 0 || place > width) continue;
      context.fillStyle = kind === "lost" ? bad : good;
      context.fillRect(place - 1, HEAD, 2, height - FOOT - HEAD);
      context.font = "11px system-ui, sans-serif";
      context.fillText(`engine ${engine} ${kind}`, Math.min(place + 5, width - 110), HEAD + 12 + 13 * FATES.indexOf(kind));
    }
    let labelledTo = -Infinity;
    for (const { step, time_s: time } of store.run.checkpoints) {
      const place = x(time - store.firstS);
      if (place < 0 || place > width) continue;
      context.fillStyle = accent;
      context.beginPath();
      context.moveTo(place - 4, 2); context.lineTo(place + 4, 2); context.lineTo(place, 9);
      context.fill();
      context.font = "10px system-ui, sans-serif";
      const label = `saved ${step}`, size = context.measureText(label).width, left = place + 7 + size > width ? place - 7 - size : place + 7;
      if (Math.min(left, place - 4) > labelledTo + 4) {
        context.fillText(label, left, 10);
        labelledTo = Math.max(left + size, place + 4);
      }
    }
  }

  drawSingle(context, visible, x, width, height) {
    const { store } = this, space = height - HEAD - FOOT, now = store.nowS;
    const lanes = [...new Set(visible.map((life) => life.lane))].sort((a, b) => a - b);
    const row = new Map(lanes.map((lane, place) => [lane, place]));
    const size = (this.size = Math.min(MAX_LANE, Math.max(MIN_LANE, space / Math.max(1, lanes.length))));
    this.top = Math.max(0, Math.min(this.top, lanes.length * size - space));
    this.isCut = lanes.length * size > space + 1;
    this.rowOf = row;
    context.save();
    context.beginPath();
    context.rect(0, HEAD, width, space);
    context.clip();
    const thick = size > 6 ? size - 2 : size - 1, colour = this.colours(visible);
    for (const life of visible) {
      const y = HEAD + row.get(life.lane) * size - this.top;
      if (y < HEAD - size || y > height - FOOT) continue;
      const { course } = life, paint = colour(life);
      for (let place = 0; place < course.length; place += 2) {
        const phase = course[place];
        if (phase >= OVER) continue;
        const left = x(course[place + 1]), right = x(place + 2 < course.length ? course[place + 3] : now);
        if (right < 0 || left > width) continue;
        context.fillStyle = paint ?? PHASE_COLOURS[phase];
        context.globalAlpha = strength(phase);
        context.fillRect(left, y, Math.max(0.7, right - left - (right - left > 3 ? 0.5 : 0)), thick);
      }
      context.globalAlpha = 1;
      if (life.phase > OVER && size > 3) {
        context.fillStyle = PHASE_COLOURS[life.phase];
        context.fillRect(x(life.since) - 1, y, 2, thick);
      }
    }
    context.restore();
  }

  colours(visible) {
    if (this.colouring === "version") return (life) => versionColour(life.version);
    if (this.colouring === "reward") {
      const known = visible.map((life) => life.reward).filter((reward) => reward !== null);
      const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
      return (life) => rewardColour(life.reward, low, high);
    }
    if (this.colouring === "domain") {
      const names = this.domains(visible);
      return (life) => versionColour(names.indexOf(life.domain));
    }
    return () => null;
  }

  domains(visible) { return [...new Set(visible.map((life) => life.domain))].sort(); }

  /** How many samples were in each state, pixel by pixel: their mean over the time that a pixel stands for. From afar, those that
   *  are over are read off in buckets. */
  drawSum(context, from, to, width, height) {
    const columns = Math.ceil(width), scale = columns / (to - from), now = this.store.nowS;
    const sums = STACK.map(() => new Float32Array(columns + 2));
    const steps = STACK.map(() => new Float32Array(columns + 2));
    const place = new Array(OVER);
    STACK.forEach((phase, index) => { place[phase] = index; });
    const { profile } = this.store, isAfar = (to - from) / columns >= profile.width;
    if (isAfar) STACK.forEach((phase, index) => profile.addTo(sums[index], phase, from, to, columns));
    for (const { course } of isAfar ? this.store.living : this.store.within(from, to)) {
      for (let at = 0; at < course.length; at += 2) {
        const phase = course[at];
        if (phase >= OVER) continue;
        const left = Math.max(0, (course[at + 1] - from) * scale);
        const right = Math.min(columns, ((at + 2 < course.length ? course[at + 3] : now) - from) * scale);
        if (right <= left) continue;
        const first = Math.floor(left), last = Math.floor(right), index = place[phase];
        if (first === last) sums[index][first] += right - left;
        else {
          sums[index][first] += first + 1 - left;
          sums[index][last] += right - last;
          steps[index][first + 1] += 1;
          steps[index][last] -= 1;
        }
      }
    }
    let highest = 1;
    const total = new Float32Array(columns + 1);
    STACK.forEach((_, index) => {
      let level = 0;
      for (let column = 0; column <= columns; column++) {
        level += steps[index][column];
        sums[index][column] += level;
        total[column] += sums[index][column];
        if (total[column] > highest) highest = total[column];
      }
    });
    const bottom = height - FOOT, unit = (bottom - HEAD - 4) / highest, base = new Float32Array(columns + 1);
    STACK.forEach((phase, index) => {
      context.fillStyle = PHASE_COLOURS[phase];
      context.globalAlpha = strength(phase);
      context.beginPath();
      context.moveTo(0, bottom - base[0] * unit);
      for (let column = 0; column < columns; column++) context.lineTo(column, bottom - (base[column] + sums[index][column]) * unit);
      for (let column = columns - 1; column >= 0; column--) context.lineTo(column, bottom - base[column] * unit);
      context.fill();
      for (let column = 0; column < columns; column++) base[column] += sums[index][column];
    });
    context.globalAlpha = 1;
    this.highest = Math.round(highest);
  }

  drawClock(context, from, to, width, height) {
    const { faint, line } = theme(), step = niceStep((to - from) / Math.max(2, width / 110));
    context.fillStyle = line;
    context.fillRect(0, height - FOOT, width, 1);
    context.fillStyle = faint;
    context.font = "11px system-ui, sans-serif";
    for (let time = Math.ceil(Math.max(0, from) / step) * step; time < to; time += step) {
      const place = ((time - from) / (to - from)) * width;
      context.fillRect(place, height - FOOT, 1, 4);
      if (place < width - 40) context.fillText(clock(time, step), place + 3, height - 5);
    }
  }

  showLegend(isSingle, visible) {
    let entries = LIVING.map(({ phase, name }) => [PHASE_COLOURS[phase], name, strength(phase)]);
    if (isSingle && this.colouring === "version") entries = [...new Set(visible.map((life) => life.version))].sort((a, b) => a - b).slice(-12).map((version) => [versionColour(version), `v${version}`]);
    if (isSingle && this.colouring === "domain") entries = this.domains(visible).map((name, place) => [versionColour(place), name]);
    if (isSingle && this.colouring === "reward") entries = [[rewardColour(0, 0, 1), "lowest reward"], [rewardColour(1, 0, 1), "highest"], [rewardColour(null), "none yet"]];
    const key = JSON.stringify(entries);
    if (key === this.legendKey) return;
    this.legendKey = key;
    fill(this.legend, entries.map(([colour, name, opacity = 1]) => h("span", {}, swatch(colour, opacity), name)));
  }

  lifeAt(px, py) {
    if (!this.visible?.length || py < HEAD) return null;
    const time = this.timeAt(px), row = Math.floor((py - HEAD + this.top) / this.size), now = this.store.nowS;
    return this.visible.find((life) => this.rowOf.get(life.lane) === row && life.start <= time && Math.min(life.end, now) >= time) ?? null;
  }

  point(event) {
    const life = this.lifeAt(event.offsetX, event.offsetY);
    this.canvas.style.cursor = life && scored(life) ? "pointer" : "crosshair";
    if (!life) return tell(null);
    const { course } = life, lines = [`sample ${life.id} · ${life.domain} · v${life.version}${life.trained === null ? "" : ` → step ${life.trained}`}`];
    for (let place = 0; place < course.length; place += 2) {
      const until = place + 2 < course.length ? course[place + 3] : this.store.nowS;
      lines.push(course[place] >= OVER ? PHASES[course[place]] : `${PHASES[course[place]]} ${seconds(until - course[place + 1])}`);
    }
    if (life.tokens !== null) lines.push(`${life.tokens} tokens${life.reward === null ? "" : `, reward ${short(life.reward)}`}`);
    return tell(lines.join("\n"), event.clientX, event.clientY);
  }
}

function scored(life) {
  for (let place = 0; place < life.course.length; place += 2) if (life.course[place] === 3) return true;
  return false;
}

/** The round number of seconds, minutes or hours that is next above. */
function niceStep(least) {
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  return steps.find((step) => step >= least) ?? Math.ceil(least / 86400) * 86400;
}

function clock(time, step) {
  if (step < 1) return `${+time.toFixed(3)} s`;
  const hours = Math.floor(time / 3600), minutes = Math.floor((time % 3600) / 60), rest = Math.round(time % 60), two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}
