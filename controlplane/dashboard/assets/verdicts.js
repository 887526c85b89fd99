// What detectors and operators have said that is in force, and what tenants get.

import { compact, element, number, percent, rate, seconds } from "./format.js";

const TITLES = { hotspot_raised: "Hotspot", policy_override: "Policy", drain: "Drain", blacklist: "Blacklist" };

export class Verdicts {
  constructor(at, only, opened) {
    this.list = at("verdicts");
    this.count = at("verdict-count");
    this.only = only;
    this.opened = opened;
    this.clocks = [];
    this.take([]);
  }

  take(found) {
    this.clocks = [];
    this.count.textContent = found.length ? number(found.length) : "";
    this.list.replaceChildren(...found.map((each) => this.card(each)));
    if (!found.length) this.list.append(element("li", { class: "empty" }, "Nothing stands: no class outgrows its holders, and nobody ordered anything."));
  }

  tick(now) {
    for (const { node, until } of this.clocks) {
      const text = until > now ? `${Math.ceil(until - now)} s left` : "running out";
      if (node.textContent !== text) node.textContent = text;
    }
  }

  card(each) {
    const left = element("span", { class: "left" });
    if (each.until != null) this.clocks.push({ node: left, until: each.until });
    else left.textContent = "until lifted";
    const hot = each.type === "hotspot_raised";
    return element("li", { class: `card ${each.type}` },
      element("div", { class: "card-head" }, element("strong", {}, TITLES[each.type] ?? each.type), left),
      hot ? this.hotspot(each) : this.order(each),
      each.reason ? element("p", { class: "reason" }, each.reason) : null);
  }

  hotspot(each) {
    const [requests, total] = each.share ?? [0, 0];
    return element("div", {},
      element("p", {}, "class ", element("button", { type: "button", class: "inline", title: "Show its requests", on: { click: () => this.only(each.key) } }, each.key), ` · ${number(each.depth_blocks)} blocks`),
      meter("of requests", total ? requests / total : 0, "hot"),
      meter("of instances hold it", each.fleet ? each.holders / each.fleet : 0, "calm"),
      each.instances.length ? element("p", {}, "barred: ", this.names(each.instances)) : null);
  }

  names(instances) {
    return instances.slice(0, 12).flatMap((name, place) => [place ? ", " : "", element("button", { type: "button", class: "inline", on: { click: () => this.opened(name) } }, name)])
      .concat(instances.length > 12 ? [` and ${instances.length - 12} more`] : []);
  }

  order(each) {
    if (each.type === "policy_override") return element("p", {}, "routed by ", element("b", {}, each.policy), each.by ? ` · by ${each.by}` : "");
    return element("p", {}, this.names([each.instance_id]), each.by ? ` · by ${each.by}` : "");
  }
}

function meter(title, share, kind) {
  return element("p", { class: `meter ${kind}` }, element("i", { vars: { "--share": Math.min(share, 1) } }), element("span", {}, `${percent(share)} ${title}`));
}

export class Tenants {
  constructor(at, only) {
    this.panel = at("tenants-panel");
    this.table = at("tenants");
    this.only = only;
  }

  take(rows, queue) {
    this.panel.hidden = !rows.length;
    if (!rows.length) return;
    const heads = ["Tenant", "Requests / s", "Hits", "TTFT p50", "TTFT p95", ...(queue ? ["Queue"] : []), "Failed"];
    this.table.replaceChildren(
      element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
      element("tbody", {}, rows.map((row) => element("tr", {},
        element("th", { scope: "row" }, element("button", { type: "button", class: "inline", on: { click: () => this.only(row.tenant) } }, row.tenant)),
        ...[rate(row.per_s), percent(row.hit), seconds(row.ttft_p50_s), seconds(row.ttft_p95_s), ...(queue ? [seconds(row.queue_s)] : []), compact(row.failed)].map((text) => element("td", {}, text))))));
  }
}
