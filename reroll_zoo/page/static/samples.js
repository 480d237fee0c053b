// Samples: a table to sort, filter and search; one of them turn by turn, token by token, with its siblings.

import { ask, Refused } from "./api.js";
import { fill, h, short, tell } from "./dom.js";
import { creditColour, versionColour } from "./palette.js";
import { swatch } from "./now.js";
import { boardsIn } from "./boards.js";

const PAGE = 50, WAIT_MS = 250;
const SORTS = [["newest", "newest"], ["oldest", "oldest"], ["best", "highest reward"], ["worst", "lowest reward"], ["longest", "longest"], ["shortest", "shortest"]];
const LIKELY = [0.9, 0.5, 0.1, 0.01];

export class SamplesView {
  constructor(store) {
    this.store = store;
    this.offset = 0;
    this.id = "";
    this.colouring = "probability";
    const changed = () => { this.offset = 0; this.load(); };
    this.sort = h("select", { onchange: changed, "aria-label": "order" }, SORTS.map(([value, label]) => h("option", { value }, label)));
    this.domain = h("select", { onchange: changed, "aria-label": "domain" }, h("option", { value: "" }, "every domain"));
    this.phase = h("select", { onchange: changed, "aria-label": "state" }, h("option", { value: "scored" }, "scored"));
    this.step = h("input", { type: "number", min: 1, placeholder: "step", onchange: changed, "aria-label": "step", style: { width: "5.5rem" } });
    this.search = h("input", { type: "search", placeholder: "search ids, prompts and texts", class: "grow", oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(changed, WAIT_MS); } });
    this.table = h("div", {}, h("p", { class: "faint" }, "reading …"));
    this.list = h("section", { class: "card" }, h("div", { class: "bar" }, this.sort, this.domain, this.phase, this.step, this.search), this.table);
    this.one = h("div");
    this.element = h("div", {}, this.list, this.one);
  }

  open(id) {
    this.list.hidden = Boolean(id);
    this.one.hidden = !id;
    if (id && id !== this.id) this.loadOne(id);
    if (!id) this.load();
    this.id = id;
  }

  /** The newest page follows the run; others stay as they are. */
  update() {
    if (this.id || this.offset || this.search.value || this.store.revision === this.shownRevision) return;
    this.load();
  }

  async load() {
    this.shownRevision = this.store.revision;
    const ticket = (this.ticket = {});
    const query = { sort: this.sort.value, domain: this.domain.value, phase: this.phase.value, step: this.step.value, search: this.search.value.trim(), offset: this.offset, limit: PAGE };
    let answer;
    try {
      answer = await ask("samples", query);
    } catch (error) {
      if (!(error instanceof Refused)) return;
      fill(this.table, h("p", { class: "bad" }, error.message));
      return;
    }
    if (ticket !== this.ticket) return;
    choices(this.domain, "every domain", answer.domains);
    choices(this.phase, "every state", ["scored", ...answer.phases, "truncated"]);
    fill(this.table, answer.total ? this.rows(answer) : h("p", { class: "faint" }, "No sample has ended that fits."));
  }

  rows({ rows, total, offset }) {
    const go = (id) => { location.hash = `samples/${id}`; };
    const body = rows.map((row) => h("tr", row.is_readable ? { tabindex: 0, onclick: () => go(row.id), onkeydown: (event) => { if (event.key === "Enter") go(row.id); } } : {},
      h("td", { class: "mono narrow" }, row.id),
      h("td", { class: "number" }, short(row.reward)),
      h("td", { class: "number" }, row.tokens ?? "–"),
      h("td", { class: "wide" }, row.domain),
      h("td", {}, state(row)),
      h("td", { class: "number" }, row.step ?? "–"),
      h("td", { class: "wide mono" }, row.prompt),
      h("td", { class: "wide faint" }, row.reason)));
    const heads = [["sample"], ["reward", "number"], ["tokens", "number"], ["domain", "wide"], ["state"], ["step", "number"], ["prompt", "wide"], ["", "wide"]];
    const move = (by) => () => { this.offset = Math.max(0, this.offset + by); this.load(); };
    return [
      h("table", {}, h("thead", {}, h("tr", {}, heads.map(([name, kind]) => h("th", { class: kind }, name)))), h("tbody", {}, body)),
      h("div", { class: "bar", style: { margin: ".7rem 0 0" } },
        h("button", { onclick: move(-PAGE), disabled: offset === 0 }, "back"),
        h("button", { onclick: move(PAGE), disabled: offset + rows.length >= total }, "on"),
        h("span", { class: "faint" }, `${offset + 1} to ${offset + rows.length} of ${total.toLocaleString("en")}`)),
    ];
  }

  async loadOne(id) {
    fill(this.one, h("p", { class: "faint" }, `opening ${id} …`));
    try {
      this.shown = await ask(`sample/${encodeURIComponent(id)}`);
    } catch (error) {
      fill(this.one, h("p", {}, h("a", { href: "#samples" }, "← all samples")), h("p", { class: "bad" }, error.message));
      return;
    }
    if (this.id === id) this.showOne();
  }

  showOne() {
    const { episode, life, siblings, group_mean: mean, note, advantage } = this.shown;
    const turns = episode.turns;
    this.credit = new Credit(advantage, turns);
    const beyond = mean === null || episode.reward === null ? null : episode.reward - mean;
    const facts = [
      ["reward", short(episode.reward)], ["above its group", beyond === null ? null : `${beyond >= 0 ? "+" : ""}${short(beyond)}`],
      ["status", episode.status], ["tokens", episode.num_tokens], ["turns", turns.length], ["domain", episode.domain], ["prompt", episode.prompt_id],
      ["advantage", this.credit.inWords], ["step", episode.step], ["admitted under", life?.version === undefined || life?.version === null ? null : `v${life.version}`], ["answer", episode.answer], ["reason", episode.reason || null],
    ].filter(([, value]) => value !== null && value !== undefined);
    const toggle = h("select", { "aria-label": "colour of tokens", onchange: (event) => { this.colouring = event.target.value; this.showOne(); } },
      ["probability", "advantage", "mask", "version", "none"].map((name) => h("option", { selected: name === this.colouring }, name)));
    fill(this.one,
      h("div", { class: "bar" }, h("a", { href: "#samples" }, "← all samples"), h("h2", { style: { margin: 0 }, class: "grow" }, `sample ${episode.id}`), h("label", {}, "colour tokens by", toggle)),
      note ? h("p", { class: "warn" }, note) : null,
      h("div", { class: "sample" },
        h("div", {},
          h("section", { class: "card" }, h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { style: String(value).length > 14 ? { "font-size": ".9rem" } : {} }, String(value)))))),
          h("section", { class: "card" }, measures({ ...episode.parts, ...episode.info }, "parts"), turns.map((turn, place) => this.turn(turn, place, turns.length)), this.tokenLegend(turns))),
        h("aside", {}, siblings.length ? h("section", { class: "card" }, h("h2", {}, "siblings"), h("ul", { class: "siblings" }, siblingRows(siblings, episode.id))) : null)));
  }

  turn(turn, place, num) {
    const versions = [...new Set(turn.versions.map(([version]) => `v${version}`))].join(" → ");
    return h("article", { class: "turn" },
      num > 1 ? h("h3", {}, `turn ${place + 1}`) : null,
      turn.is_rendered_afresh ? h("p", { class: "faint" }, "Its prompt does not continue the turn before: a training row of its own.") : null,
      turn.shown.map(({ role, content, images, tools }) => h("div", { class: this.showsMask ? "message unlearned" : "message" }, h("h3", {}, role, this.showsMask ? h("small", {}, "not in the loss") : null), withPictures(content, images), tools?.length ? h("p", { class: "faint" }, `may call ${tools.join(", ")}`) : null)),
      h("div", { class: "message policy" },
        h("h3", {}, "policy", h("small", {}, [versions, turn.finish_reason].filter(Boolean).join(" · "))),
        turn.pieces.length ? this.tokens(turn, place) : h("pre", {}, turn.text),
        num > 1 || Object.keys(turn.info).length ? measures({ reward: turn.reward, ...turn.info }) : null));
  }

  get showsMask() { return (this.colouring === "advantage" || this.colouring === "mask") && this.credit.isKnown; }

  tokens(turn, number) {
    const versions = turn.versions.flatMap(([version, count]) => Array(count).fill(version));
    const place = h("pre", {
      onpointermove: (event) => {
        const at = Number(event.target.dataset?.at ?? NaN);
        if (Number.isNaN(at)) return tell(null);
        const logp = turn.logp[at], chance = logp === null ? "–" : `${short(100 * Math.exp(logp))} %`;
        return tell(`${JSON.stringify(turn.pieces[at])}\nlog-prob ${short(logp)} (${chance})${this.credit.tell(number, at)}\nweights v${versions[at]}, token ${at + 1} of ${turn.pieces.length}`, event.clientX, event.clientY);
      },
      onpointerleave: () => tell(null),
    });
    turn.pieces.forEach((piece, at) => {
      const token = h("span", { class: this.colouring === "probability" ? `t s${shade(turn.logp[at])}` : "t", "data-at": at }, piece.replaceAll("\n", "↵\n") || "·");
      if (this.showsMask) {
        const value = this.credit.at(number, at);
        if (value === null) token.classList.add("masked");
        else token.style.background = this.colouring === "mask" ? "var(--learned)" : creditColour(value / this.credit.highest);
      }
      if (this.colouring === "version") token.style.boxShadow = `inset 0 -.22em ${versionColour(versions[at])}`;
      place.append(token);
    });
    return place;
  }

  creditLegend() {
    const { credit } = this;
    if (!credit.isKnown) return h("p", { class: "faint" }, "It was not trained on, or by an earlier version, which did not write its advantage down.");
    const masked = h("span", {}, h("span", { class: "t masked" }, "abc"), " not in the loss");
    if (this.colouring === "mask") return h("p", { class: "legend" }, h("span", {}, swatch("var(--learned)"), "in the loss"), masked);
    const shades = [-1, -0.5, 0, 0.5, 1].map((share) => h("span", {}, swatch(creditColour(share)), short(share * credit.highest)));
    return h("p", { class: "legend" }, "advantage", shades, masked);
  }

  tokenLegend(turns) {
    if (this.colouring === "version") {
      const versions = [...new Set(turns.flatMap((turn) => turn.versions.map(([version]) => version)))];
      return h("p", { class: "legend" }, versions.map((version) => h("span", {}, swatch(versionColour(version)), `v${version}`)));
    }
    if (this.colouring === "advantage" || this.colouring === "mask") return this.creditLegend();
    if (this.colouring !== "probability") return null;
    const labels = [...LIKELY.map((bound) => `p ≥ ${bound}`), `p < ${LIKELY.at(-1)}`];
    return h("p", { class: "legend" }, labels.map((label, place) => h("span", { class: `t s${place}`, style: { padding: "0 .4rem" } }, label)));
  }
}

/** What each token was trained with, as the journal tells it: a number for all, or runs of them; null is out of the loss. */
class Credit {
  constructor(told, turns) {
    const num = turns.reduce((sum, turn) => sum + turn.pieces.length, 0);
    this.isKnown = told !== null && told !== undefined;
    const runs = !this.isKnown ? [] : typeof told === "number" ? [[told, num]] : told;
    this.values = runs.flatMap(([value, count]) => Array(count).fill(value));
    this.starts = [];
    turns.reduce((start, turn) => { this.starts.push(start); return start + turn.pieces.length; }, 0);
    const known = runs.map(([value]) => value).filter((value) => value !== null);
    this.highest = Math.max(1, ...known.map(Math.abs)); // Most estimators give numbers around one.
    const low = Math.min(...known), high = Math.max(...known);
    this.inWords = !this.isKnown ? null : !known.length ? "none: masked" : low === high ? short(low) : `${short(low)} to ${short(high)}`;
  }

  at(turn, token) { return this.values[this.starts[turn] + token] ?? null; }

  tell(turn, token) {
    if (!this.isKnown) return "";
    const value = this.at(turn, token);
    return value === null ? "\nnot in the loss" : `\nadvantage ${short(value)}`;
  }
}

/** A text with boards, and pictures where they stood. */
function withPictures(content, images) {
  if (!images?.length) return boardsIn(content);
  const [first, ...rest] = content.split("\ufffc"), words = (text) => (text ? boardsIn(text) : []);
  return [words(first), ...rest.map((text, place) => [picture(images[place]), words(text)])].flat(2);
}

function picture(name) {
  if (!name) return h("p", { class: "faint" }, "a picture that is not kept with the run");
  return h("img", { class: "picture", src: `/api/image/${encodeURIComponent(name)}`, alt: "a picture that the policy was shown", loading: "lazy" });
}

function siblingRows(siblings, id) {
  const rewards = siblings.map(({ reward }) => reward).filter((reward) => reward !== null), low = Math.min(0, ...rewards), high = Math.max(...rewards, low + 1e-9);
  return siblings.map((row) => h("li", {}, h("a", { href: row.is_readable ? `#samples/${row.id}` : null, "aria-current": row.id === id ? "true" : null },
    h("span", { class: "mono" }, row.id), h("span", { class: "number" }, row.reward === null ? row.phase : short(row.reward)),
    h("span", { class: "meter" }, h("div", { style: { width: `${row.reward === null ? 0 : Math.max(2, (100 * (row.reward - low)) / (high - low))}%` } })))));
}

function state(row) {
  const text = row.status && row.status !== "completed" ? `${row.phase}, ${row.status}` : row.phase;
  return h("span", { class: row.phase === "failed" ? "bad" : row.phase === "trained" ? "good" : "faint" }, text);
}

function measures(values) {
  const known = Object.entries(values).filter(([, value]) => value !== undefined);
  return known.length ? h("p", { class: "measures" }, known.map(([name, value]) => h("span", {}, `${name} ${short(value)}`))) : null;
}

/** How surprising a token was, from 0 (all but certain) to 4 (less than one in a hundred). */
function shade(logp) {
  const chance = logp === null ? 0 : Math.exp(logp);
  return LIKELY.filter((bound) => chance < bound).length;
}

function choices(select, all, values) {
  const key = JSON.stringify(values);
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  const chosen = select.value;
  fill(select, h("option", { value: "" }, all), values.map((value) => h("option", { value, selected: value === chosen }, value)));
}
