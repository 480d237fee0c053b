// Questions to the server that this page came from.

/** The answer to GET /api/PATH. Throws an Error with the server's words. */
export async function ask(path, query = {}) {
  const wanted = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return read(await fetch(`/api/${path}?${new URLSearchParams(wanted)}`, { headers }));
}

/** Have the run do something: POST /api/hands/DEED. */
export async function order(deed) {
  return read(await fetch(`/api/hands/${deed}`, { method: "POST", headers }));
}

async function read(response) {
  const answer = await response.json();
  if (!response.ok) throw new Refused(answer.error ?? response.statusText);
  return answer;
}

/** The token of the address, kept for this tab and taken out of what can be seen and copied. */
function takeToken() {
  const given = new URLSearchParams(location.search).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", `${location.pathname}${location.hash}`);
  }
  return sessionStorage.getItem("token");
}

export const token = takeToken();
const headers = token ? { "X-Reroll-Token": token } : {};

/** The server answered that there is no such thing; without it, it did not answer at all. */
export class Refused extends Error {}
