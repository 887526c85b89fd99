// Live decisions, the newest first; each opens its story.

import { clock, compact, drawing, element, number, percent, seconds, tail } from "./format.js";

const KEPT_MAX = 600;
const SHOWN_MAX = 80;

// More rows than this in a quarter of a second are a blur: the newest of a busy moment are shown.
const ROWS_A_FRAME = 3;

export class Decisions {
  constructor(at, opened) {
    this.list = at("list");
    this.empty = at("empty");
    this.filter = at("filter");
    this.button = at("pause");
    this.opened = opened;
    this.kept = [];
    this.open = new Map();
    this.latest = [];
    this.paused = this.under = false;
    this.waiting = 0;
    this.held = at("held");
    this.filter.addEventListener("input", () => this.redraw());
    this.button.addEventListener("click", () => this.pause(!this.paused));
    // Rows keep still under a pointer or the focus, so that the one that is aimed at is hit.
    for (const [kind, under] of [["pointerenter", true], ["pointerleave", false], ["focusin", true], ["focusout", false]]) {
      this.list.addEventListener(kind, () => this.hold(this.paused, under));
    }
  }

  only(text) {
    this.filter.value = text;
    this.redraw();
    this.list.closest("section").scrollIntoView({ block: "nearest" });
  }

  of(instance) {
    return this.kept.filter((each) => each.instance === instance).slice(-12).reverse();
  }

  take(feed, whole) {
    if (whole) {
      this.kept = [];
      this.open.clear();
    }
    const fresh = feed.filter((data) => data.outcome === undefined);
    this.latest = fresh.map((data) => data.instance);
    for (const data of fresh) {
      this.kept.push(data);
      this.open.set(`${data.id} ${data.instance}`, data);
    }
    while (this.kept.length > KEPT_MAX) {
      const old = this.kept.shift();
      this.open.delete(`${old.id} ${old.instance}`);
    }
    for (const data of feed) if (data.outcome !== undefined) this.end(data);
    const fitting = fresh.filter((data) => this.fits(data));
    if (whole) this.redraw();
    else if (this.paused || this.under) this.waiting += fitting.length;
    else for (const data of fitting.slice(-ROWS_A_FRAME)) this.list.prepend(this.row(data));
    this.say();
    this.trim();
  }

  say() {
    const text = this.waiting ? `${compact(this.waiting)} newer` : "";
    if (this.held.textContent !== text) this.held.textContent = text;
    this.held.hidden = !this.waiting;
  }

  end(data) {
    const decision = this.open.get(`${data.id} ${data.instance}`);
    if (!decision) return;
    decision.end = data;
    decision.node?.replaceWith(this.row(decision));
  }

  trim() {
    while (this.list.childElementCount > SHOWN_MAX) this.list.lastElementChild.remove();
    const hasRows = this.list.childElementCount > 0;
    this.empty.hidden = hasRows;
    if (!hasRows && this.kept.length) this.empty.textContent = "No decision among the latest has that.";
  }

  fits(data) {
    const text = this.filter.value.trim().toLowerCase();
    if (!text) return true;
    const words = [data.id, data.instance, data.tenant, data.policy, data.reason, data.router, ...data.keys];
    return words.some((word) => word.toLowerCase().includes(text));
  }

  redraw() {
    const shown = this.kept.filter((data) => this.fits(data)).slice(-SHOWN_MAX).reverse();
    this.list.replaceChildren(...shown.map((data) => this.row(data)));
    this.trim();
  }

  pause(on) {
    this.button.setAttribute("aria-pressed", on);
    this.button.textContent = on ? "Resume" : "Pause";
    this.hold(on, this.under);
  }

  hold(paused, under) {
    const held = this.paused || this.under;
    this.paused = paused;
    this.under = under;
    if (held && !paused && !under) {
      this.waiting = 0;
      this.say();
      this.redraw();
    }
  }

  row(data) {
    const node = element("li", { "data-outcome": data.end?.outcome ?? "open" },
      element("button", { type: "button", class: "row", "data-request": data.id, "aria-label": label(data), on: { click: () => this.opened(data.id) } },
        element("time", {}, clock(data.at)),
        element("span", { class: "who" }, element("code", { title: data.id }, tail(data.id, 6)), element("b", {}, data.instance)),
        prompt(data),
        bars(data),
        ending(data),
        element("span", { class: "why" }, why(data))));
    data.node = node;
    return node;
  }
}

function label(data) {
  return `Request ${data.id} to ${data.instance}: ${number(data.prompt)} tokens, ${number(data.hit)} cached. ${data.why ?? data.policy}. Opens its story.`;
}

function why(data) {
  const retry = data.attempt ? `attempt ${data.attempt + 1} · ` : "";
  const tenant = data.tenant ? `${data.tenant} · ` : "";
  const plain = [`${data.policy} ${compact(data.score)}`, data.reason].filter(Boolean).join("; ");
  return `${retry}${tenant}${data.why ?? plain}`;
}

// The prompt as a bar: what is cached, and what has to be computed.
function prompt(data) {
  const share = data.prompt ? Math.min(data.hit / data.prompt, 1) : 0;
  return element("span", { class: "prompt", title: `${number(data.hit)} of ${number(data.prompt)} tokens cached` },
    element("i", { vars: { "--share": share } }),
    element("small", {}, `${compact(data.prompt)} tok · ${percent(share)}`));
}

// The best candidates' scores as bars, the chosen one marked: lower is better.
function bars(data) {
  const top = data.top ?? [];
  const most = Math.max(...top.map(([, score]) => score), 1);
  const height = (score) => 2 + 16 * Math.sqrt(Math.min(score / most, 1));
  const chart = drawing("svg", { class: "scores", viewBox: "0 0 40 20", width: 40, height: 20, "aria-hidden": "true" },
    top.map(([name, score, , out], place) => drawing("rect", {
      x: 8 * place + 1, y: 19 - height(score), width: 6, height: height(score), rx: 1,
      class: out.length ? "out" : name === data.instance ? "chosen" : "other",
    })));
  return element("span", { title: top.map(([name, score]) => `${name} ${compact(score)}`).join("\n") }, chart);
}

function ending(data) {
  const end = data.end;
  if (!end) return element("span", { class: "end open" }, "…");
  if (end.outcome !== "ok" || end.status >= 400) {
    return element("span", { class: "end bad" }, end.status ? `${end.outcome} ${end.status}` : end.outcome);
  }
  return element("span", { class: "end" }, seconds(end.ttft_s ?? end.duration_s));
}
