// The dialog: the story of a request, or an instance looked at closely.

import { clock, compact, element, none, number, percent, seconds, tail } from "./format.js";

export class Panel {
  constructor(dialog, page) {
    this.dialog = dialog;
    this.page = page;
    this.title = dialog.querySelector("h2");
    this.body = dialog.querySelector(".dialog-body");
    dialog.querySelector("#close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("close", () => { if (/(request|instance)=/.test(location.hash)) history.replaceState(null, "", location.pathname); });
  }

  async story(request) {
    this.show(`Request ${request}`, element("p", { class: "empty" }, "looking for it …"), `request=${encodeURIComponent(request)}`);
    const found = await ask("story", { model: this.page.model(), request });
    if (found.error) this.body.replaceChildren(element("p", { class: "empty" }, found.error.message));
    else {
      this.title.textContent = `Request ${found.request_id}`;
      this.body.replaceChildren(...story(found, this));
    }
  }

  async instance(name) {
    this.show(name, element("p", { class: "empty" }, "…"), `instance=${encodeURIComponent(name)}`);
    const details = await ask("instance", { model: this.page.model(), instance: name });
    this.body.replaceChildren(...instance(name, details.error ? {} : details, this));
  }

  show(title, content, hash) {
    this.title.textContent = title;
    this.body.replaceChildren(content);
    history.replaceState(null, "", `#${hash}`);
    if (!this.dialog.open) this.dialog.showModal();
    this.title.focus();
  }
}

async function ask(path, query) {
  try {
    const answer = await fetch(`/api/${path}?${new URLSearchParams(query)}`);
    return await answer.json();
  } catch (error) {
    return { error: { message: `the dashboard does not answer: ${error.message}` } };
  }
}

// --- a request

function story(found, panel) {
  const last = found.attempts.at(-1);
  return [
    element("p", { class: "lede" }, `${found.model} · router ${found.router_id}`, found.attempts.length > 1 ? ` · ${found.attempts.length} attempts` : "", found.ended ? "" : " · not ended yet"),
    timeline(last),
    ...found.attempts.flatMap((attempt) => told(attempt, found.attempts.length > 1, panel)),
  ];
}

const STEPS = [["queue", "queued"], ["tokenize", "tokenized"], ["decide", "decided"], ["prefill", "to first byte"], ["streaming", "streamed"]];

// Where the time went; tiny parts keep a sliver, so that they can be seen at all.
function timeline({ routed, finished }) {
  const before = (routed.queue_s ?? 0) + (routed.tokenize_s ?? 0) + (routed.decide_s ?? 0);
  const ttft = finished?.ttft_s;
  const total = finished?.duration_s;
  const parts = {
    queue: routed.queue_s ?? 0,
    tokenize: routed.tokenize_s ?? 0,
    decide: routed.decide_s ?? 0,
    prefill: ttft == null ? null : Math.max(ttft - before, 0),
    streaming: total == null || ttft == null ? null : Math.max(total - ttft, 0),
  };
  const shown = STEPS.filter(([name]) => parts[name]);
  const all = shown.reduce((sum, [name]) => sum + parts[name], 0);
  if (!shown.length) return null;
  return element("div", { class: "timeline" },
    element("div", { class: "track", "aria-hidden": "true" }, shown.map(([name]) => element("i", { class: name, vars: { "--grow": (100 * parts[name]) / all } }))),
    element("ul", {}, shown.map(([name, title]) => element("li", { class: name }, `${title} `, element("b", {}, seconds(parts[name]))))));
}

function told({ routed, finished, prefilled }, many, panel) {
  const why = routed.why;
  const rows = routed.candidates;
  return [
    element("h3", {}, many ? `Attempt ${(routed.attempt ?? 0) + 1}: ` : "Sent to ", button(routed.instance_id, () => panel.instance(routed.instance_id)), element("small", {}, clock(routed.at_wall_s))),
    element("dl", { class: "facts" },
      fact("Prompt", `${routed.exact === false ? "about " : ""}${number(routed.prompt_tokens)} tokens`, routed.exact === false ? "not tokenized exactly" : routed.block_size ? `blocks of ${routed.block_size}` : ""),
      fact("Promised", `${number(routed.hit_tokens ?? 0)} cached`, `${number(routed.new_tokens)} to compute`),
      fact("Found", finished?.cached_tokens == null ? none : `${number(finished.cached_tokens)} cached`, kept(routed, finished)),
      fact("Block set", routed.trust ?? "exact", routed.kv_seq ? `as of seq ${number(routed.kv_seq[1])}` : ""),
      fact("Policy", routed.policy ?? "multiplicative", routed.reason ?? ""),
      fact("Ended", finished ? `${finished.outcome} ${finished.status || ""}` : "not yet", finished?.output_tokens == null ? "" : `${number(finished.output_tokens)} tokens out`)),
    why ? element("p", { class: "formula" }, formula(routed, why)) : null,
    rows ? candidates(routed, rows) : element("p", { class: "empty" }, "Its candidates were not recorded."),
    prefilled.length > 1 ? element("p", { class: "lede" }, `prefill told in ${prefilled.length} steps`) : null,
  ].filter(Boolean);
}

function kept(routed, finished) {
  if (finished?.cached_tokens == null) return "";
  const difference = finished.cached_tokens - (routed.hit_tokens ?? 0);
  return difference ? `${difference > 0 ? "+" : "−"}${number(Math.abs(difference))} against the promise` : "as promised";
}

function formula(routed, why) {
  const queued = routed.queued_tokens ?? 0;
  const parts = [
    `(${number(queued)} queued + ${number(routed.new_tokens)} new) × (${number(routed.batch_size ?? 0)} + 1) = `,
    element("b", {}, number(routed.score ?? 0)),
  ];
  if ((routed.policy ?? "multiplicative") !== "multiplicative") parts.splice(0, 2, `${routed.policy}: `, element("b", {}, compact(routed.score ?? 0)));
  if (why.ties > 1) parts.push(` · one of ${number(why.ties)} equally good, in turn`);
  else if (why.next_best) parts.push(` · next best ${why.next_best[0]} with ${compact(why.next_best[1])}`);
  return parts;
}

const ROWS_SHOWN = 40;

function candidates(routed, rows) {
  const sorted = [...rows].sort((a, b) => (a.eligible === false) - (b.eligible === false) || a.score - b.score);
  const shown = sorted.slice(0, ROWS_SHOWN);
  const chosen = sorted.find((row) => row.instance_id === routed.instance_id);
  if (chosen && !shown.includes(chosen)) shown.push(chosen);
  const most = Math.max(...shown.map((row) => row.score), 1);
  const heads = ["Instance", "Cached", "Queued", "Batch", "Score", ""];
  return element("div", { class: "scroll" }, element("table", { class: "candidates" },
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, shown.map((row) => element("tr", { class: row.instance_id === routed.instance_id ? "chosen" : row.eligible === false ? "out" : null },
      element("th", { scope: "row" }, row.instance_id),
      element("td", {}, number(row.hit_tokens)),
      element("td", {}, number(row.queued_tokens)),
      element("td", {}, number(row.batch_size)),
      element("td", {}, element("span", { class: "score" }, element("i", { vars: { "--share": Math.sqrt(Math.min(row.score / most, 1)) } }), element("span", {}, compact(row.score)))),
      element("td", {}, row.instance_id === routed.instance_id ? "chosen" : (row.excluded_by ?? []).join(", "))))),
  ), sorted.length > shown.length ? element("p", { class: "lede" }, `and ${number(sorted.length - shown.length)} more`) : null);
}

// --- an instance

function instance(name, details, panel) {
  const cell = panel.page.instance(name);
  if (!cell) return [element("p", { class: "empty" }, "It is not in the fleet any more.")];
  const latest = panel.page.decisions(name);
  return [
    element("dl", { class: "facts" },
      fact("State", cell.state, `block set ${cell.trust}`),
      fact("Batch", number(cell.batch), `${number(cell.running)} running, ${number(cell.waiting)} waiting`),
      fact("Queued", `${number(cell.queued)} tokens`, "prompt tokens not computed yet"),
      fact("KV use", percent(cell.kv), details.num_blocks ? `of ${number(details.num_blocks)} blocks` : ""),
      fact("Hits", percent(cell.hit), "of prompt tokens, last minute"),
      fact("Published", number(cell.blocks), `blocks of ${details.block_size ?? none} tokens`),
      fact("Prefill", details.prefill_tokens_per_s == null ? none : `${compact(details.prefill_tokens_per_s)} tok/s`, "recent"),
      fact("Decode", details.decode_tokens_per_s == null ? none : `${compact(details.decode_tokens_per_s)} tok/s`, "recent"),
      fact("Engine", details.engine || none, details.url ?? "")),
    element("h3", {}, "Latest decisions ", latest.length ? button("show all", () => { panel.dialog.close(); panel.page.only(name); }) : ""),
    latest.length ? element("ul", { class: "brief" }, latest.map((each) => element("li", {}, element("time", {}, clock(each.at)), button(tail(each.id, 12), () => panel.story(each.id), each.id), element("span", {}, `${compact(each.prompt)} tokens, ${percent(each.prompt ? each.hit / each.prompt : 0)} cached`)))) : element("p", { class: "empty" }, "None of the latest went here."),
  ];
}

function fact(name, value, note) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value, note ? element("small", {}, note) : null));
}

function button(text, call, title) {
  return element("button", { type: "button", class: "inline", title, on: { click: call } }, text);
}
