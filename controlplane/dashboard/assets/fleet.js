// The fleet map: an instance a cell, as large as there is room for, coloured by one quantity.

import { compact, element, number, percent } from "./format.js";

// What a cell's values are, in the order in which frames send them.
const CELL = ["id", "state", "trust", "batch", "queued", "running", "waiting", "kv", "hit", "blocks", "routed", "hot"];

// Where the newest decisions of a frame went flashes; all of a busy fleet would flash all the time.
const PULSES_A_FRAME = 2;

const TRUSTS = ["exact", "resyncing", "stale", "none"];

const METRICS = {
  batch: { name: "Batch", of: (c, top) => c.batch / Math.max(top.batch, 4), show: (c) => number(c.batch), end: (top) => `${number(Math.max(top.batch, 4))} requests` },
  queued: { name: "Queued", of: (c, top) => c.queued / Math.max(top.queued, 1000), show: (c) => compact(c.queued), end: (top) => `${compact(Math.max(top.queued, 1000))} tokens` },
  kv: { name: "KV use", of: (c) => c.kv ?? 0, show: (c) => percent(c.kv), end: () => "100%" },
  hit: { name: "Hits", of: (c) => c.hit ?? 0, show: (c) => percent(c.hit), end: () => "100% of prompt tokens" },
  trust: { name: "Trust", of: () => 0, show: (c) => c.trust, end: () => "" },
};

// Up to so many instances each form is readable; beyond the last, cells are as small as they get.
const FORMS = [[12, "card"], [120, "tile"], [500, "dot"], [Infinity, "speck"]];

export class Fleet {
  constructor(at, opened) {
    this.box = at("cells");
    this.count = at("fleet-count");
    this.inspector = at("inspect");
    this.legend = at("legend");
    this.opened = opened;
    this.cells = new Map();
    this.metric = "batch";
    this.top = { batch: 0, queued: 0 };
    this.looked = null;
    this.segments(at("metric"));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("click", (event) => this.click(event));
    for (const kind of ["pointerover", "focusin"]) this.box.addEventListener(kind, (event) => this.look(event.target.closest("button")));
    this.inspect();
  }

  get(name) {
    return this.cells.get(name)?.values;
  }

  take(frame, latest) {
    if (frame.full) {
      this.cells.clear();
      this.box.replaceChildren();
    }
    let added = false;
    for (const values of frame.cells) added = this.put(values) || added;
    for (const name of frame.gone) {
      this.cells.get(name)?.node.remove();
      this.cells.delete(name);
    }
    if (added || frame.gone.length || frame.full) this.arrange();
    const top = this.tops();
    const all = top.batch !== this.top.batch || top.queued !== this.top.queued || added;
    this.top = top;
    const dirty = all ? this.cells.values() : frame.cells.map((values) => this.cells.get(values[0]));
    for (const cell of dirty) this.paint(cell);
    if (!frame.full) for (const name of latest.slice(-PULSES_A_FRAME)) this.pulse(name);
    this.inspect();
    this.describe();
  }

  put(values) {
    const named = Object.fromEntries(CELL.map((name, place) => [name, values[place]]));
    let cell = this.cells.get(named.id);
    const isNew = !cell;
    if (isNew) {
      const node = element("button", { type: "button", class: "cell", "data-id": named.id, tabindex: "-1" },
        element("span", { class: "name" }, named.id),
        element("span", { class: "value" }),
        element("span", { class: "bar kv" }, element("small", {}, "KV"), element("i")),
        element("span", { class: "bar queue" }, element("small", {}, "queue"), element("i")),
        element("span", { class: "note" }));
      cell = { node };
      this.cells.set(named.id, cell);
    }
    cell.values = named;
    return isNew;
  }

  arrange() {
    const names = [...this.cells.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    this.box.append(...names.map((name) => this.cells.get(name).node));
    this.box.dataset.form = this.legend.dataset.form = FORMS.find(([most]) => names.length <= most)[1];
    this.count.textContent = names.length ? number(names.length) : "";
    this.box.dataset.empty = names.length === 0;
    if (!this.box.querySelector('[tabindex="0"]')) this.box.firstElementChild?.setAttribute("tabindex", "0");
  }

  tops() {
    const top = { batch: 0, queued: 0 };
    for (const { values } of this.cells.values()) {
      if (values.batch > top.batch) top.batch = values.batch;
      if (values.queued > top.queued) top.queued = values.queued;
    }
    return top;
  }

  paint(cell) {
    const { node, values } = cell;
    const metric = METRICS[this.metric];
    const share = Math.min(Math.max(metric.of(values, this.top), 0), 1);
    node.style.setProperty("--v", share.toFixed(3));
    node.style.setProperty("--kv", values.kv ?? 0);
    node.style.setProperty("--queue", Math.min(values.queued / Math.max(this.top.queued, 1000), 1).toFixed(3));
    node.dataset.trust = values.trust;
    node.dataset.state = values.state;
    node.dataset.hot = values.hot;
    const parts = node.children;
    set(parts[1], metric.show(values));
    set(parts[4], values.state === "ready" ? `${percent(values.hit)} hits` : values.state);
    node.setAttribute("aria-label", sentence(values));
  }

  pulse(name) {
    const node = this.cells.get(name)?.node;
    if (!node) return;
    node.classList.remove("pulse");
    void node.offsetWidth;
    node.classList.add("pulse");
  }

  segments(box) {
    for (const [key, { name }] of Object.entries(METRICS)) {
      const input = element("input", { type: "radio", name: "metric", value: key, id: `metric-${key}` });
      input.checked = key === this.metric;
      input.addEventListener("change", () => {
        this.metric = key;
        for (const cell of this.cells.values()) this.paint(cell);
        this.box.dataset.metric = key;
        this.describe();
      });
      box.append(element("label", { for: `metric-${key}` }, input, element("span", {}, name)));
    }
    this.box.dataset.metric = this.metric;
  }

  describe() {
    const key = `${this.metric} ${this.top.batch} ${this.top.queued} ${this.cells.size > 0}`;
    if (this.legend.dataset.key === key) return;
    this.legend.dataset.key = key;
    if (!this.cells.size) this.legend.replaceChildren();
    else if (this.metric === "trust") {
      this.legend.replaceChildren(...TRUSTS.map((trust) => element("span", { class: "swatch", "data-trust": trust }, trust === "none" ? "publishes no blocks" : trust)));
    } else {
      this.legend.replaceChildren("0", element("span", { class: "ramp", "aria-hidden": "true" }), METRICS[this.metric].end(this.top),
        element("span", { class: "swatch", "data-hot": "1" }, "holds a hot class"), element("span", { class: "swatch", "data-state": "draining" }, "takes no requests"));
    }
  }

  look(node) {
    if (!node) return;
    this.looked = node.dataset.id;
    this.inspect();
  }

  inspect() {
    const cell = this.cells.get(this.looked);
    const empty = this.cells.size ? "Point at an instance, or move with the arrow keys." : "No instance has registered yet; sidecars do that.";
    const shown = cell ? pairs(cell.values) : null;
    const key = cell ? JSON.stringify(cell.values) : empty;
    if (this.inspector.dataset.key === key) return;
    this.inspector.dataset.key = key;
    this.inspector.replaceChildren(...(shown ?? [empty]));
  }

  click(event) {
    const node = event.target.closest("button");
    if (!node) return;
    this.focus(node, false);
    this.opened(node.dataset.id);
  }

  key(event) {
    const nodes = [...this.box.children];
    const here = nodes.indexOf(document.activeElement);
    if (here < 0) return;
    const first = nodes[0].offsetTop;
    const columns = Math.max(nodes.findIndex((node) => node.offsetTop > first), 1);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -here, End: nodes.length - 1 - here };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = nodes[here + step];
    if (next) this.focus(next, true);
  }

  focus(node, move) {
    this.box.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    node.setAttribute("tabindex", "0");
    if (move) node.focus();
  }
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function sentence(c) {
  const hot = c.hot ? ", holds a hot class" : "";
  return `${c.id}: ${c.state}, block set ${c.trust}, batch ${c.batch}, ${c.queued} queued tokens, KV use ${percent(c.kv)}, hits ${percent(c.hit)}${hot}`;
}

function pairs(c) {
  const item = (name, value) => element("span", {}, element("em", {}, name), value);
  return [
    element("strong", {}, c.id),
    element("span", { class: "badge", "data-trust": c.trust }, c.trust),
    c.state === "ready" ? null : element("span", { class: "badge", "data-state": c.state }, c.state),
    c.hot ? element("span", { class: "badge", "data-hot": "1" }, "hot") : null,
    item("batch", number(c.batch)),
    item("queued", compact(c.queued)),
    item("running", `${number(c.running)} + ${number(c.waiting)} waiting`),
    item("KV", percent(c.kv)),
    item("hits", percent(c.hit)),
    item("blocks", compact(c.blocks)),
  ].filter(Boolean);
}
