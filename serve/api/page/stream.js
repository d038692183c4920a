// The HTTP interface as this page needs it: the model's description, and one chat as a stream of chunks.

/** What went wrong, in words for the reader. */
export class Problem extends Error {
  constructor(message, { status = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The one model that is served: {id, max_model_len, drafters}. */
export async function fetchModel(key) {
  const response = await request("v1/models", { headers: headers(key), cache: "no-store" });
  const model = (await response.json().catch(() => null))?.data?.[0];
  if (typeof model?.id !== "string") throw new Problem("The server’s list of models cannot be read.");
  return { drafters: [], max_model_len: null, ...model };
}

/** The latest sessions of devices, the last one first. */
export async function fetchEdgeSessions(key) {
  const response = await request("v1/edge/sessions", { headers: headers(key), cache: "no-store" });
  return (await response.json()).data;
}

/**
 * The chunks of a streamed answer, until the server says that it is whole.
 * Throws a Problem where it is refused or breaks off, and an AbortError once `signal` says so.
 */
export async function* streamChat(body, key, signal) {
  const options = {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  };
  const response = await request("v1/chat/completions", options);
  let isWhole = false; // the body is read to its end all the same: a connection that is cut cannot be used again
  for await (const data of events(response.body)) {
    if (isWhole || data === "[DONE]") {
      isWhole = true;
      continue;
    }
    const chunk = parsed(data);
    if (chunk.error) throw new Problem(chunk.error.message ?? "The server broke the answer off.");
    yield chunk;
  }
  if (isWhole) return;
  throw new Problem("The connection broke before the answer was whole.");
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Is it running, and is this machine online?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { status } = response;
  const words = await response.json().catch(() => null);
  const message = words?.error?.message ?? response.statusText;
  const lead = {
    401: "The API key is missing or wrong",
    403: "This API key may not do that",
    429: "The server is busy",
    503: "The server is not ready",
  };
  const title = lead[status] ?? (status >= 500 ? "The server has failed" : "The server refused this");
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const retryAfter = Number.isNaN(seconds) ? null : seconds;
  const wait = retryAfter === null ? "" : ` Try again in ${retryAfter} s.`;
  return new Problem(`${title} (${status})${message ? `: ${message}` : ""}.${wait}`, { status, retryAfter });
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Problem("The server sent something that is not an answer.");
  }
}

/** The data of server-sent events; what stands after the last empty line was cut off and is dropped. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await read(reader);
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The connection broke before the answer was whole.");
  }
}
