// What a sample may do, in the server's order, and the colours of it all.

export const PHASES = ["queued", "generating", "scoring", "done", "ready", "training", "trained", "filtered", "aborted", "failed", "lost"];
export const OVER = 6; // From here on a sample's life is over.
export const LIVING = [
  { phase: 0, name: "queued", about: "admitted, not yet begun" },
  { phase: 1, name: "generating", about: "its episode and environment" },
  { phase: 2, name: "scoring", about: "its reward is asked for" },
  { phase: 3, name: "waiting for siblings", about: "scored; its group is not whole" },
  { phase: 4, name: "ready", about: "its group waits for the trainer" },
  { phase: 5, name: "training", about: "in the step that is under way" },
];
export const PHASE_COLOURS = ["#9aa5b1", "#4c8bf5", "#a26bf0", "#eaa221", "#22a699", "#2f9e5b", "#6cbf84", "#8d99a6", "#c08497", "#e5484d", "#5f6b77"];
/** What only waits is drawn faintly, so that work stands out. */
export const strength = (phase) => (phase === 0 || phase === 3 || phase === 4 ? 0.5 : 1);
const WHEEL = ["#4c8bf5", "#f2994a", "#27ae60", "#b15bd6", "#e5566d", "#12a5b8", "#c9a400", "#d6549f"];

/** Neighbouring versions of the weights differ clearly. */
export const versionColour = (version) => (version === null || version === undefined ? "#9aa5b1" : WHEEL[version % WHEEL.length]);
export const seriesColour = (place) => WHEEL[place % WHEEL.length];

/** From red (lowest) over grey to green. */
export function rewardColour(reward, low, high) {
  if (reward === null || reward === undefined) return "#9aa5b1";
  const share = high > low ? (reward - low) / (high - low) : 0.5;
  return `hsl(${Math.round(5 + share * 130)} 55% 50%)`;
}

/** An advantage as a share of the highest: red below nothing, green above. Lies under the text, in the light and in the dark. */
export const creditColour = (share) => `rgb(${share < 0 ? "229 72 77" : "47 158 91"} / ${(0.08 + 0.6 * Math.min(1, Math.abs(share))).toFixed(2)})`;
