// The server as the page sees it: which models there are, and the events of one denoising.

const KEY = "rmdm-api-key";

/** What went wrong, in one line for people; `status` is HTTP's, or 0 where no answer came. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let kept = null;

/** Whether a text can be a key: no header carries other characters to every server alike. */
export function isKey(text) {
  return /^[ -~]+$/.test(text);
}

/** The key of this tab, if it was asked for one. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? kept;
  } catch {
    return kept; // some browsers are told to keep nothing
  }
}

export function keepApiKey(key) {
  kept = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Then it is forgotten with the page.
  }
}

function forgetApiKey() {
  kept = null;
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    // Then it was never there.
  }
}

/** The models served, each as `{id, process, parameters, length, samplers, settings, latent, has_null, reads_text}`. */
export async function listModels() {
  const answer = await ask("/v1/models");
  const { data } = await answer.json();
  return data.map(({ id, rmdm }) => ({ id, ...rmdm }));
}

/** The events of one denoising as they come; ends after `done`, throws `ServerError` where they break off. */
export async function* denoise(body, signal) {
  const answer = await ask("/v1/denoise", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let isDone = false;
  for await (const data of serverSentData(answer.body)) {
    if (data === "[DONE]") continue; // the connection ends by itself, and can be used again
    const event = JSON.parse(data);
    if (event.type === "error") throw new ServerError(event.error.message, 500);
    isDone ||= event.type === "done";
    yield event;
  }
  if (!isDone) throw new ServerError("The answer broke off before the text was finished; generate it again.");
}

async function ask(path, options = {}) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(`No answer from ${location.host}; is rmdm serve still running there?`);
  }
  if (answer.ok) return answer;
  if (answer.status === 401 && apiKey() === key) forgetApiKey(); // a newer one may be right
  throw new ServerError(await messageOf(answer), answer.status);
}

async function messageOf(answer) {
  let said = "";
  try {
    said = (await answer.json()).error?.message ?? "";
  } catch {
    // An answer that is not the server's own, such as a proxy's page: its status has to do.
  }
  if (answer.status === 401) return said || "The server asks for an API key.";
  if (answer.status === 429 && !said) {
    const wait = answer.headers.get("retry-after");
    return `The server is busy; try again in ${wait ? `${wait} seconds` : "a moment"}.`;
  }
  return said || `The server answered ${answer.status} ${answer.statusText}`.trim() + ".";
}

/** The `data:` of each event of a stream. */
async function* serverSentData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError(`The connection to ${location.host} was lost; generate the text again.`);
      }
      if (chunk.done) return;
      const events = (rest + chunk.value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
