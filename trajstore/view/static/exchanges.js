// Which result in a conversation belongs to which call of a tool. Pure.

/** Returns an object as it is; anything else is a message's content. */
export const fieldsOf = (message) => (message !== null && typeof message === "object" && !Array.isArray(message) ? message : { content: message });

const listed = (value) => (Array.isArray(value) ? value : []);

const CALLS = ["function", "tool_use", "server_tool_use", "function_call"];

/** Returns a call in OpenAI's form, older or newer, Anthropic's or inspect_ai's; `more` has its further fields. */
function callOf(call, part) {
  const { function: called, type, id, call_id: otherId, tool_call_id: thirdId, index: _, ...own } = fieldsOf(call);
  const { name = null, function_name: otherName, arguments: given, input, args, ...more } = { ...own, ...(called && typeof called === "object" ? called : { name: called ?? own.name }) };
  if (!CALLS.includes(type ?? "function")) more.type = type;
  return { id: otherId ?? id ?? thirdId ?? null, name: name ?? otherName ?? null, given: given ?? input ?? args ?? null, more, part, results: [] };
}

function callsIn(message) {
  if (message.type === "function_call") return [callOf(message, null)];
  const parts = listed(message.content).flatMap((part, at) => (String(part?.type).endsWith("tool_use") ? [callOf(part, at)] : []));
  return [...parts, ...[...listed(message.tool_calls), ...(message.function_call ?? null ? [message.function_call] : [])].map((call) => callOf(call, null))];
}

const ERROR = /^\W*(error|traceback|exception|fatal|[\w.]*(Error|Exception):|command failed|exit (code|status):? [1-9])/i;

/** Returns why a result is taken for an error: by a field, or by its first words; null for none. */
function failureOf(told, content) {
  if (told.is_error === true || told.status === "error" || (told.error ?? null)) return "The result says that it is an error.";
  const [part] = listed(content).length ? content : [content];
  const text = typeof part === "string" ? part : part?.text;
  return typeof text === "string" && ERROR.test(text.slice(0, 200)) ? "The result begins like an error." : null;
}

function resultsIn(message) {
  const own = { id: message.tool_call_id ?? message.tool_use_id ?? message.call_id ?? null, name: message.name ?? (typeof message.function === "string" ? message.function : null), part: null };
  if (message.role === "tool" || message.role === "function" || message.type === "function_call_output") return [{ ...own, failure: failureOf(message, message.content ?? message.output) }];
  return listed(message.content).flatMap((part, at) => (String(part?.type).endsWith("tool_result")
    ? [{ id: part.tool_use_id ?? part.tool_call_id ?? null, name: part.name ?? null, part: at, failure: failureOf(part, part.content) }] : []));
}

/** Returns the call that a result belongs to: the newest one with its id; without ids, the first of its name that has no result. */
function callFor({ id, name }, known) {
  const same = known.get(id)?.filter((call) => id !== null || (!call.results.length && (name ?? call.name) === call.name)) ?? [];
  const newest = same.filter(({ message }) => message === same.at(-1).message); // ids may begin anew in each message
  return newest.find(({ results }) => !results.length) ?? newest.at(-1) ?? null;
}

/**
 * Returns { calls, results }: by number of a message, its calls { id, name, given, more, part, message, results } and its
 * results { id, name, part, failure, message, call }. `part` is a number in the content, null where there is none.
 */
export function exchangesOf(messages) {
  const calls = [], results = [], known = new Map();
  messages.forEach((one, message) => {
    const told = fieldsOf(one);
    results.push(resultsIn(told).map((result) => {
      const call = callFor(result, known);
      const found = { ...result, message, call };
      call?.results.push(found);
      return found;
    }));
    calls.push(callsIn(told).map((call) => ({ ...call, message })));
    for (const call of calls.at(-1)) known.set(call.id, [...(known.get(call.id) ?? []), call]);
  });
  return { calls, results };
}
