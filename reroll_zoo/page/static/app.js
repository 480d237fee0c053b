// The page: tabs, and a loop that asks the server for what is new while somebody looks.

import { Refused, token } from "./api.js";
import { fill, h, seconds } from "./dom.js";
import { Store } from "./store.js";
import { ConfigView } from "./config.js";
import { CurvesView } from "./curves.js";
import { Hands } from "./hands.js";
import { NowView } from "./now.js";
import { SamplesView } from "./samples.js";
import { TimeView } from "./time.js";

const POLL_MS = 1000, IDLE_POLL_MS = 5000, MAX_WAIT_MS = 15000;
const VIEWS = { now: ["Now", NowView], time: ["Time", TimeView], curves: ["Curves", CurvesView], samples: ["Samples", SamplesView], config: ["Config", ConfigView] };

const store = new Store();
const views = {}, hands = new Hands(document.getElementById("hands"));
let current = null, currentName = "";

/** What stands behind the # of the address: a view's name, and what to show in it. */
function route() {
  const [name, ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (VIEWS[name]) return [name, rest.join("/")];
  return [!store.run.has_journal ? "curves" : store.run.status === "running" ? "now" : "time", ""];
}

function show() {
  const [name, rest] = route();
  if (name !== currentName) {
    views[name] ??= new VIEWS[name][1](store);
    current = views[name];
    currentName = name;
    fill(document.getElementById("main"), current.element);
    for (const link of document.querySelectorAll("#tabs a")) {
      if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
  current.open?.(rest);
  current.update();
}

function showHead() {
  const { run } = store, status = document.getElementById("status");
  document.title = `${run.name} · reroll`;
  document.getElementById("name").textContent = run.name;
  status.textContent = hands.isPaused ? "paused" : run.status;
  status.className = `pill ${run.status === "ended without a word" ? "crashed" : run.status}`;
  document.querySelector("#progress div").style.width = run.steps ? `${Math.min(100, (100 * run.step) / run.steps)}%` : "0";
  const step = run.steps ? `step ${run.step} of ${run.steps}` : `step ${run.step}`;
  const rows = store.rows().slice(-20).map((row) => row["time/step_s"]).filter((value) => value);
  const left = run.status === "running" && rows.length && run.steps ? `about ${seconds((rows.reduce((a, b) => a + b) / rows.length) * (run.steps - run.step))} left` : "";
  document.getElementById("about").textContent = [step, left, run.algorithm ?? run.pipeline, run.model, run.reason].filter(Boolean).join(" · ");
}

function trouble(text) {
  const place = document.getElementById("trouble");
  place.hidden = !text;
  place.textContent = text;
}

async function refresh() {
  await store.refreshRun();
  showHead();
  if (!current) show();
  if (token) await hands.update(store.run.status === "running");
  await store.refreshMetrics();
  if (store.run.has_journal) await store.refreshEvents(() => current?.update());
  showHead();
}

async function loop() {
  let wait = POLL_MS;
  for (;;) {
    try {
      await refresh();
      trouble("");
      current.update();
      wait = store.run.status === "running" ? POLL_MS : IDLE_POLL_MS;
    } catch (error) {
      if (error instanceof Refused) trouble(error.message);
      else if (error instanceof TypeError || error instanceof SyntaxError) trouble("The server does not answer: what you see may be old. Trying again …");
      else { trouble(`The page has a fault: ${error.message}`); console.error(error); }
      wait = Math.min(MAX_WAIT_MS, wait * 1.5);
    }
    await new Promise((done) => setTimeout(done, wait));
    while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
  }
}

fill(document.getElementById("tabs"), Object.entries(VIEWS).map(([name, [label]]) => h("a", { href: `#${name}` }, label)));
addEventListener("hashchange", () => { if (store.run) show(); });
loop();
