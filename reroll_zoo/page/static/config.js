// Config: what differs from the defaults, or from another run.

import { ask } from "./api.js";
import { fill, h } from "./dom.js";

export class ConfigView {
  constructor(store) {
    this.store = store;
    this.against = h("select", { onchange: () => this.load(), "aria-label": "compare with" });
    this.filter = h("input", { type: "search", placeholder: "find a field", class: "grow", oninput: () => this.show() });
    this.table = h("div");
    this.element = h("section", { class: "card" }, h("div", { class: "bar" }, h("label", {}, "what differs from", this.against), this.filter), this.table);
  }

  open() { this.load(); }

  update() {
    const { runs } = this.store.run, key = JSON.stringify(runs);
    if (key === this.key) return;
    this.key = key;
    const chosen = this.against.value;
    fill(this.against, h("option", { value: "" }, "the defaults"), runs.map((run) => h("option", { value: run, selected: run === chosen }, run)));
  }

  async load() {
    try {
      this.answer = await ask("config", { against: this.against.value });
    } catch (error) {
      fill(this.table, h("p", { class: "bad" }, error.message));
      return;
    }
    this.show();
  }

  show() {
    if (!this.answer) return;
    const words = this.filter.value.trim().toLowerCase(), rows = this.answer.rows.filter((row) => JSON.stringify(row).toLowerCase().includes(words));
    if (!rows.length) return fill(this.table, h("p", { class: "faint" }, words ? "No such field differs." : "Nothing differs."));
    return fill(this.table, h("table", {},
      h("thead", {}, h("tr", {}, ["field", "this run", this.answer.against || "default"].map((name) => h("th", {}, name)))),
      h("tbody", {}, rows.map(([path, here, there]) => h("tr", {}, h("td", { class: "mono" }, path), h("td", {}, value(here)), h("td", { class: "faint" }, value(there)))))));
  }
}

function value(item) {
  if (item === null || item === undefined) return h("span", { class: "faint" }, "–");
  return h("code", {}, typeof item === "string" ? item : JSON.stringify(item));
}
