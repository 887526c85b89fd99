// Small charts by hand: lines over the last five minutes, with a readout under the pointer.

import { clock, drawing, element, percent, rate, seconds } from "./format.js";

// What a point's values are, in the order in which frames send them.
const POINT = ["at", "ttft50", "ttft95", "tpot50", "tpot95", "decisions", "hits"];
const KEPT_MAX = 150;
const WIDTH = 320, HEIGHT = 118, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 18;

const CHARTS = [
  { title: "Time to first token", lines: [["ttft50", "p50"], ["ttft95", "p95"]], show: seconds },
  { title: "Time per output token", lines: [["tpot50", "p50"], ["tpot95", "p95"]], show: seconds },
  { title: "Decisions per second", lines: [["decisions", ""]], show: rate },
  { title: "Cached prompt tokens", lines: [["hits", ""]], show: percent, top: 1 },
];

export class Charts {
  constructor(box) {
    this.points = [];
    this.charts = CHARTS.map((chart) => new Chart(chart));
    box.append(...this.charts.map((chart) => chart.node));
  }

  take(series, whole) {
    const points = series.map((values) => Object.fromEntries(POINT.map((name, place) => [name, values[place]])));
    if (whole) this.points = points;
    else {
      const from = points[0]?.at ?? Infinity;
      this.points = [...this.points.filter((point) => point.at < from - 0.5), ...points].slice(-KEPT_MAX);
    }
    for (const chart of this.charts) chart.draw(this.points);
  }
}

class Chart {
  constructor({ title, lines, show, top }) {
    this.lines = lines;
    this.show = show;
    this.fixed = top;
    this.points = [];
    this.svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title, preserveAspectRatio: "none" });
    this.readout = element("output", {});
    this.node = element("figure", { class: "chart" }, element("figcaption", {}, element("span", {}, title), this.readout), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  draw(points) {
    this.points = points;
    const values = points.flatMap((point) => this.lines.map(([name]) => point[name])).filter((value) => value != null);
    this.top = this.fixed ?? nice(Math.max(...values, 1e-6));
    const grid = [0, 0.5, 1].map((share) => [
      drawing("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(share * this.top), y2: this.y(share * this.top) }),
      drawing("text", { class: "tick", x: LEFT - 5, y: this.y(share * this.top) + 3.5, "text-anchor": "end" }, values.length ? this.show(share * this.top) : ""),
    ]);
    const ends = points.length > 15 ? [0, points.length - 1] : points.length ? [points.length - 1] : [];
    const times = ends.map((place) => drawing("text", {
      class: "tick", x: this.x(place), y: HEIGHT - 4, "text-anchor": place ? "end" : "start",
    }, clock(points[place].at).slice(0, 5)));
    this.cursor = drawing("g", { class: "cursor" });
    this.svg.replaceChildren(...grid.flat(), ...times, ...this.lines.flatMap(([name], place) => this.line(name, place)), this.cursor);
    if (!values.length) this.svg.append(drawing("text", { class: "nothing", x: (WIDTH + LEFT) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet"));
    if (this.under === undefined) this.say(points.length - 1);
    else this.mark(this.under);
  }

  x(place) {
    const count = Math.max(this.points.length, 30);
    return LEFT + ((WIDTH - LEFT - RIGHT) * (place + count - this.points.length)) / (count - 1);
  }

  y(value) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(value / this.top, 1));
  }

  line(name, place) {
    const runs = [];
    let run = null;
    this.points.forEach((point, number) => {
      if (point[name] == null) run = null;
      else {
        if (!run) runs.push((run = []));
        run.push([this.x(number), this.y(point[name])]);
      }
    });
    return runs.flatMap((spots) => {
      const path = spots.map(([x, y], number) => `${number ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      const floor = this.y(0);
      const shapes = [drawing("path", { class: `line l${place}`, d: spots.length > 1 ? path : `${path}h1.5` })];
      if (place === 0 && spots.length > 1) {
        shapes.unshift(drawing("path", { class: "area", d: `${path}L${spots.at(-1)[0].toFixed(1)} ${floor}L${spots[0][0].toFixed(1)} ${floor}Z` }));
      }
      return shapes;
    });
  }

  point(event) {
    if (!event || !this.points.length) {
      this.under = undefined;
      this.cursor?.replaceChildren();
      this.say(this.points.length - 1);
      return;
    }
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    let best = 0;
    for (let place = 0; place < this.points.length; place++) if (Math.abs(this.x(place) - x) < Math.abs(this.x(best) - x)) best = place;
    this.under = this.points.length - 1 - best;
    this.mark(this.under);
  }

  mark(fromEnd) {
    const place = this.points.length - 1 - fromEnd;
    if (place < 0) return;
    const x = this.x(place);
    this.cursor.replaceChildren(drawing("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    this.say(place, true);
  }

  say(place, timed = false) {
    // The newest slot is not over; the one before it says more.
    let spot = place;
    if (!timed) while (spot > 0 && this.lines.every(([name]) => this.points[spot]?.[name] == null)) spot -= 1;
    const point = this.points[spot];
    if (!point) return this.readout.replaceChildren();
    const parts = this.lines.map(([name, title], number) => element("span", { class: `k${number}` }, title ? `${title} ` : "", element("b", {}, this.show(point[name]))));
    this.readout.replaceChildren(...(timed ? [element("span", {}, clock(point.at))] : []), ...parts);
  }
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value);
}
