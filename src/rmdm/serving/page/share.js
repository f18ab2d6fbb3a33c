// Ways to take a text along: the same request as a curl command and as Python, and the clipboard.

const OPENAI = ["model", "prompt", "seed", "temperature", "top_p", "echo"];

/** The requests as they go to `/v1/completions`; a prompt comes back in front, as on the page. */
function completion(body) {
  return body.prompt ? { ...body, echo: true } : body;
}

export function curlFor(bodies, isKeyed) {
  const key = isKeyed ? ` \\\n  -H "authorization: Bearer $RMDM_API_KEY"` : "";
  return bodies
    .map((body) => {
      const data = JSON.stringify(completion(body)).replaceAll("'", "'\\''");
      return `curl -s ${location.origin}/v1/completions -H 'content-type: application/json'${key} \\\n  -d '${data}'`;
    })
    .join("\n");
}

export function pythonFor(bodies, isKeyed) {
  const key = isKeyed ? 'os.environ["RMDM_API_KEY"]' : '"none"';
  const lines = [
    ...(isKeyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(`${location.origin}/v1`)}, api_key=${key})`,
  ];
  for (const body of bodies) {
    const all = Object.entries({ prompt: "", ...completion(body) });
    const own = all.filter(([name]) => OPENAI.includes(name)).sort(([a], [b]) => OPENAI.indexOf(a) - OPENAI.indexOf(b));
    const extra = Object.fromEntries(all.filter(([name]) => !OPENAI.includes(name)));
    lines.push(
      "done = client.completions.create(",
      ...own.map(([name, value]) => `    ${name}=${python(value)},`),
      ...(Object.keys(extra).length ? [`    extra_body=${python(extra)},`] : []),
      ")",
      "print(done.choices[0].text)",
    );
  }
  return lines.join("\n");
}

/** A JSON value as Python spells it. */
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

/** Put a text on the clipboard; false where the browser forbids it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // no clipboard API on plain http, except for localhost
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const box = document.createElement("textarea");
  box.value = text;
  box.className = "unseen";
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return isCopied;
}
