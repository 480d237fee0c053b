// Questions to the server that this page came from.

/** The answer to GET /api/PATH. Throws an Error with the server's words. */
export async function ask(path, query = {}) {
  const wanted = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const response = await fetch(`/api/${path}?${new URLSearchParams(wanted)}`);
  const answer = await response.json();
  if (!response.ok) throw new Refused(answer.error ?? response.statusText);
  return answer;
}

/** The server answered that there is no such thing; without it, it did not answer at all. */
export class Refused extends Error {}
