// Elements without markup: what a model wrote only ever becomes text.

/** An element with attributes, handlers (`onclick`), `style` properties and children, which are elements or text. */
export function h(tag, about = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(about ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name === "className" ? "class" : name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace all that is in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

const tip = document.getElementById("tip");

/** Show a few lines of text beside the pointer; null hides them. */
export function tell(text, x = 0, y = 0) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
}

/** A canvas that calls `draw(context, width, height)` whenever asked to (`canvas.redraw()`) or resized. */
export function drawing(draw, about = {}) {
  const canvas = h("canvas", about);
  let pending = false;
  canvas.redraw = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      if (!canvas.isConnected) return;
      const { clientWidth: width, clientHeight: height } = canvas, scale = devicePixelRatio || 1;
      if (!width || !height) return;
      if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
        canvas.width = Math.round(width * scale);
        canvas.height = Math.round(height * scale);
      }
      const context = canvas.getContext("2d");
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
      draw(context, width, height);
    });
  };
  new ResizeObserver(canvas.redraw).observe(canvas);
  return canvas;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "card", "line", "ink", "faint", "accent", "bad", "good", "track"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
}
dark.addEventListener("change", () => { readColours(); document.querySelectorAll("canvas").forEach((canvas) => canvas.redraw?.()); });

/** The page's colours as they are now, for canvases. */
export function theme() {
  if (!colours.ink) readColours();
  return colours;
}

/** A number with few digits; a dash where there is none. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  if (size && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(3));
}

/** A span of time. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${+value.toPrecision(value < 10 ? 2 : 3)} s`;
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}
