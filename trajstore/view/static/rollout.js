// A rollout: its conversation, and its tokens beside it.

import { showConversation } from "./conversation.js";
import { showFinding } from "./find.js";
import { fill, longText, make } from "./dom.js";
import { count } from "./numbers.js";
import { showSession } from "./session.js";
import { placesOf, showTokens } from "./tokens.js";

/** Returns a link to a token of a rollout, null if there is none; `properties` are those of the link. */
export const tokenLink = (token, properties) => (typeof token === "number" ? make("a", { class: "to-token", title: "Show its tokens", ...properties }, `token ${count(token)}`) : null);

/**
 * Shows a rollout. `hrefOf` returns the address of one of its tokens; `calls`, if the tree of its session is shown already,
 * marks a call there (see showSession).
 */
export function showRollout(place, told, { parameters, keep, signal, id, hrefOf = (token) => `#/trajectory/${id}?token=${token}`, calls = null }) {
  const conversation = make("section", { class: "conversation", "aria-label": "Conversation" });
  const tokens = make("section", { class: "tokens", "aria-label": "Tokens" });
  const both = make("div", { class: "both" }, conversation, tokens);
  const hasMessages = told.messages.length > 0 || told.query;
  const part = told.tokens === null ? "conversation" : parameters.get("show") ?? (hasMessages && parameters.get("token") === null ? "conversation" : "tokens");
  const choose = (name) => {
    both.dataset.show = name;
    for (const button of tabs.children) button.setAttribute("aria-pressed", button.dataset.show === name ? "true" : "false");
  };
  const tabs = make("div", { class: "tabs", role: "group", "aria-label": "What is shown" },
    [["conversation", "Conversation"], ["tokens", "Tokens"]].map(([name, title]) => make("button", {
      type: "button", "data-show": name, click: () => {
        choose(name);
        keep({ show: name });
        window.dispatchEvent(new Event("resize"));
      },
    }, title)));
  const session = told.session && !calls ? make("section", { class: "of-session", "aria-label": "Session" }) : null;
  if (told.tokens === null) fill(both, conversation);
  fill(place, session, told.tokens === null ? null : tabs, both);
  choose(part);

  if (told.query && told.messages.length === 0) conversation.append(make("h2", {}, "Query"), longText(told.query));
  let leaveFinding = () => {};
  let view = null; // of the tokens
  const places = told.tokens === null ? [] : placesOf(told);
  const linkTo = (token) => ({ href: hrefOf(token), title: "Show its tokens", click: (event) => {
    event.preventDefault();
    if (!view) return;
    view.go(token);
    choose("tokens");
    keep({ show: "tokens" });
    tokens.scrollIntoView({ block: "nearest" });
  } });
  const linkOf = (number) => tokenLink(places[number], linkTo(places[number]));
  if (session) calls = showSession(session, told.session, { row: id, linkTo, signal });
  if (told.messages.length) {
    const messages = make("div", {});
    leaveFinding = showFinding(conversation, messages, told.messages, { parameters, keep });
    conversation.append(messages);
    showConversation(messages, told.messages, linkOf);
  } else conversation.append(make("p", { class: "nothing" }, "No messages were recorded."));
  const besides = make("div", {});
  conversation.append(besides);
  /** Shows reward and metadata; again after a correction, folded as they were. */
  function tell({ reward, metadata }) {
    const open = [...besides.children].map((one) => one.open);
    fill(besides, [["Reward", reward], ["Metadata", metadata]].filter(([, text]) => text).map(([title, text], at) => make("details", {
      class: "json", open: open[at] ?? text.length < 400,
    }, make("summary", {}, title), longText(text, { class: "code" }))));
  }
  tell(told);
  for (const text of told.left_out) (told.tokens === null ? conversation : tokens).append(make("p", { class: "refused" }, text));
  if (told.tokens === null) return { leave: leaveFinding, tell };
  view = showTokens(tokens, told, { parameters, keep, calls });
  if (!told.texts) tokens.append(make("p", { class: "note" }, "Tokens are shown as ids: no tokenizer is known. Start with --tokenizer PATH to see text."));
  return { leave: () => (view.leave(), leaveFinding()), tell };
}
