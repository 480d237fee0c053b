// A small line plot on a canvas: smoothing, and the values under the pointer.

import { drawing, fill, h, short, tell, theme } from "./dom.js";
import { swatch } from "./now.js";

const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22, MAX_LEGEND = 12;

/** A card with a title, the plot and its legend. Series: {name, colour, xs, ys, dashed}. */
export class Plot {
  constructor(title, about = "") {
    this.series = [];
    this.hidden = new Set();
    this.smoothing = 0;
    this.canvas = drawing((context, width, height) => this.draw(context, width, height), {
      onpointermove: (event) => { this.pointer = event; this.canvas.redraw(); },
      onpointerleave: () => { this.pointer = null; tell(null); this.canvas.redraw(); },
    });
    this.legend = h("p", { class: "legend" });
    this.element = h("section", { class: "card" }, h("h2", { title: about || false }, title), this.canvas, this.legend);
  }

  show(series, smoothing) {
    this.series = series;
    this.smoothing = smoothing;
    const key = JSON.stringify(series.map(({ name, colour }) => [name, colour]));
    if (key !== this.key) {
      this.key = key;
      const entries = series.length > 1 ? series.slice(0, MAX_LEGEND) : [];
      fill(this.legend, entries.map(({ name, colour }) => h("button", { "aria-pressed": String(!this.hidden.has(name)), onclick: (event) => this.toggle(name, event) }, swatch(colour), name)),
        series.length > MAX_LEGEND ? `and ${series.length - MAX_LEGEND} more` : null);
    }
    this.canvas.redraw();
  }

  toggle(name, event) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    this.canvas.redraw();
  }

  draw(context, width, height) {
    const shown = this.series.filter(({ name }) => !this.hidden.has(name));
    const smooth = shown.map(({ ys }) => smoothed(ys, this.smoothing));
    const [low, high] = bounds(smooth), [first, last] = bounds(shown.map(({ xs }) => xs));
    if (!Number.isFinite(low) || !Number.isFinite(first)) return;
    const pad = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
    const bottom = low >= 0 && low - pad < 0 ? 0 : low - pad, top = high + pad;
    const x = (value) => LEFT + ((value - first) / (last - first || 1)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - bottom) / (top - bottom)) * (height - TOP - BOTTOM);
    this.drawAxes(context, { x, y, bottom, top, first, last, width, height });
    context.save();
    context.beginPath();
    context.rect(LEFT - 3, 0, width - LEFT - RIGHT + 6, height - BOTTOM + 3);
    context.clip();
    shown.forEach((series, place) => {
      if (this.smoothing) line(context, series, series.ys, x, y, 0.22);
      line(context, series, smooth[place], x, y, 1);
    });
    context.restore();
    if (this.pointer) this.point(context, shown, smooth, x, y, first, last, width, height);
  }

  drawAxes(context, { x, y, bottom, top, first, last, width, height }) {
    const colours = theme();
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    for (const value of ticks(bottom, top, 4)) {
      context.fillStyle = colours.line;
      context.fillRect(LEFT, Math.round(y(value)), width - LEFT - RIGHT, 1);
      context.fillStyle = colours.faint;
      context.fillText(short(value), LEFT - 6, y(value) + 4);
    }
    context.textAlign = "center";
    for (const value of ticks(first, last, Math.max(2, Math.floor(width / 60)))) if (Number.isInteger(value)) context.fillText(short(value), x(value), height - 6);
    context.textAlign = "left";
  }

  point(context, shown, smooth, x, y, first, last, width, height) {
    const share = (this.pointer.offsetX - LEFT) / (width - LEFT - RIGHT);
    if (share < -0.02 || share > 1.02) return tell(null);
    const wanted = first + share * (last - first), { faint } = theme();
    const step = shown.flatMap(({ xs }) => nearest(xs, wanted)).reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best), Infinity);
    if (!Number.isFinite(step)) return undefined;
    context.fillStyle = faint;
    context.fillRect(x(step), TOP, 1, height - TOP - BOTTOM);
    const lines = [`step ${step}`];
    shown.forEach(({ name, colour, xs, ys }, place) => {
      const at = xs.indexOf(step);
      if (at < 0 || ys[at] === null) return;
      context.fillStyle = colour;
      context.beginPath();
      context.arc(x(step), y(smooth[place][at]), 3.5, 0, 7);
      context.fill();
      lines.push(`${name}: ${short(ys[at])}${this.smoothing ? ` (${short(smooth[place][at])})` : ""}`);
    });
    return tell(lines.slice(0, 14).join("\n"), this.pointer.clientX, this.pointer.clientY);
  }
}

function line(context, { xs, colour, dashed }, ys, x, y, alpha) {
  context.globalAlpha = alpha;
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.setLineDash(dashed ? [5, 4] : []);
  context.beginPath();
  const stride = Math.max(1, Math.floor(xs.length / 4000)); // More points than twice the pixels cannot be seen.
  let isOpen = false;
  for (let place = 0; place < xs.length; place += stride) {
    if (ys[place] === null) { isOpen = false; continue; }
    if (isOpen) context.lineTo(x(xs[place]), y(ys[place]));
    else context.moveTo(x(xs[place]), y(ys[place]));
    isOpen = true;
  }
  context.stroke();
  context.setLineDash([]);
  if (xs.length < 30) for (let place = 0; place < xs.length; place++) if (ys[place] !== null) context.fillRect(x(xs[place]) - 1.5, y(ys[place]) - 1.5, 3, 3);
  context.globalAlpha = 1;
}

/** An exponential mean that starts without a bias towards 0. */
export function smoothed(ys, share) {
  if (!share) return ys;
  let mean = 0, weight = 0;
  return ys.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

function bounds(columns) {
  let low = Infinity, high = -Infinity;
  for (const column of columns) for (const value of column) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle + 1; else high = middle;
  }
  return [xs[low - 1], xs[low]].filter((value) => value !== undefined);
}

function ticks(low, high, num) {
  if (!(high > low)) return [low];
  const rough = (high - low) / num, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(+value.toPrecision(12));
  return found;
}
