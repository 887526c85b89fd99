// The page: follows one model's frames and hands each part what concerns it.

import { compact, element, percent, rate, seconds } from "./format.js";
import { Fleet } from "./fleet.js";
import { Decisions } from "./decisions.js";
import { Charts } from "./charts.js";
import { Verdicts, Tenants } from "./verdicts.js";
import { Panel } from "./panel.js";

const at = (id) => document.getElementById(id);

const panel = new Panel(at("dialog"), {
  model: () => current,
  instance: (name) => fleet.get(name),
  decisions: (name) => decisions.of(name),
  only: (text) => decisions.only(text),
});
const fleet = new Fleet(at, (name) => panel.instance(name));
const decisions = new Decisions(at, (request) => panel.story(request));
const charts = new Charts(at("charts"));
const verdicts = new Verdicts(at, (text) => decisions.only(text), (name) => panel.instance(name));
const tenants = new Tenants(at, (text) => decisions.only(text));

let current = "";
let source = null;
let heard = 0;

function follow(model) {
  source?.close();
  source = new EventSource(`/events?model=${encodeURIComponent(model)}`);
  source.onmessage = (event) => {
    heard = performance.now();
    take(JSON.parse(event.data));
  };
  source.onerror = () => link("lost", "reconnecting");
}

function take(frame) {
  models(frame.models);
  if (!frame.connected) link("lost", "the bus is lost");
  else if (!frame.models.length) link("idle", "no model yet");
  else link("live", "live");
  if (frame.model === undefined) return;
  if (frame.full) {
    current = frame.model;
    at("model").value = current;
  }
  kpi(frame.kpi);
  decisions.take(frame.feed, frame.full);
  fleet.take(frame, decisions.latest);
  if (frame.series) charts.take(frame.series, frame.full);
  if (frame.verdicts) verdicts.take(frame.verdicts);
  verdicts.tick(frame.at);
  if (frame.tenants) tenants.take(frame.tenants, frame.kpi.queue);
}

function link(state, text) {
  const shown = at("link");
  if (shown.dataset.state === state && shown.textContent === text) return;
  shown.dataset.state = state;
  shown.textContent = text;
}

function models(names) {
  const select = at("model");
  const key = names.join("\n");
  if (select.dataset.names === key) return;
  select.dataset.names = key;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  select.parentElement.hidden = !names.length;
  if (current) select.value = current;
}

const KPI = [
  ["decisions", "Decisions / s", (k) => rate(k.decisions_per_s)],
  ["hit", "Cache hits", (k) => percent(k.hit_rate)],
  ["ttft", "TTFT p95", (k) => seconds(k.ttft_p95_s)],
  ["tpot", "TPOT p95", (k) => seconds(k.tpot_p95_s)],
  ["batch", "Under way", (k) => compact(k.batch)],
  ["queued", "Queued tokens", (k) => compact(k.queued_tokens)],
  ["exact", "Exact sets", (k) => `${compact(k.exact)} / ${compact(k.instances)}`],
  ["hotspots", "Hotspots", (k) => compact(k.hotspots)],
];
const values = KPI.map(([id, name]) => {
  const value = element("dd", { id: `kpi-${id}` }, "–");
  at("kpi").append(element("div", {}, element("dt", {}, name), value));
  return value;
});

function kpi(now) {
  KPI.forEach(([, , show], place) => {
    const text = show(now);
    if (values[place].textContent !== text) values[place].textContent = text;
  });
  at("kpi-exact").parentElement.dataset.warn = now.instances > 0 && now.exact < now.instances;
  at("kpi-hotspots").parentElement.dataset.warn = now.hotspots > 0;
  const policy = at("policy");
  policy.hidden = !now.policy;
  policy.textContent = now.policy;
}

at("model").addEventListener("change", (event) => follow(event.target.value));

at("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}

function open() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("request")) panel.story(wanted.get("request"));
  else if (wanted.has("instance")) panel.instance(wanted.get("instance"));
}

// A page that nobody sees lets go of its connection: a browser has six for each host.
let leaving = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) {
    leaving = setTimeout(() => {
      source.close();
      source = null;
    }, 20_000);
  } else if (!source) follow(current);
});

setInterval(() => {
  if (heard && performance.now() - heard > 3000) link("lost", "nothing is heard");
}, 1000);

const kept = localStorage.getItem("theme");
if (kept) setTheme(kept);
addEventListener("hashchange", open);
follow(new URLSearchParams(location.hash.slice(1)).get("model") ?? "");
open();
