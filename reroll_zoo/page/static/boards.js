// Boards that games write as text, as boards.

import { h } from "./dom.js";

const EMPTY = "_.-·", WALL = "#";

/** A text and the boards in it: equally long lines of single characters, separated by spaces or, from three by three on, not. */
export function boardsIn(text) {
  const parts = [], lines = text.split("\n");
  let words = [];
  for (let place = 0; place < lines.length;) {
    const rows = rowsFrom(lines, place);
    if (!rows.length) { words.push(lines[place++]); continue; }
    if (words.length) parts.push(h("pre", {}, words.join("\n")));
    words = [];
    parts.push(board(rows));
    place += rows.length;
  }
  if (words.length) parts.push(h("pre", {}, words.join("\n")));
  return parts;
}

function rowsFrom(lines, start) {
  for (const [cellsOf, least, mustBeDrawn] of [[spaced, 2, false], [unspaced, 3, true]]) {
    const rows = [];
    for (const line of lines.slice(start)) {
      const cells = cellsOf(line.trimEnd());
      if (cells.length < least || (rows.length && cells.length !== rows[0].length)) break;
      rows.push(cells);
    }
    const isDrawn = !mustBeDrawn || rows.some((row) => row.some((cell) => (EMPTY + WALL).includes(cell)));
    if (rows.length >= least && isDrawn) return rows;
  }
  return [];
}

const spaced = (line) => (/^\S(?: \S)+$/.test(line) ? [...line].filter((_, place) => place % 2 === 0) : []);
const unspaced = (line) => (/^\S+$/.test(line) ? [...line] : []);

function board(rows) {
  const cells = rows.flat().map((symbol) => {
    const kind = EMPTY.includes(symbol) ? "empty" : symbol === WALL ? "wall" : "thing";
    return h("i", { class: kind, style: { "--hue": (symbol.codePointAt(0) * 249) % 360 } }, symbol);
  });
  return h("div", { class: "board", role: "img", "aria-label": rows.map((row) => row.join(" ")).join("; "), style: { "--columns": rows[0].length } }, cells);
}
