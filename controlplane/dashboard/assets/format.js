// Numbers, times and elements, as every part of the page writes them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const none = "–";

export function number(value) {
  return value == null ? none : whole.format(value);
}

export function compact(value) {
  if (value == null) return none;
  return Math.abs(value) < 10_000 ? whole.format(value) : short.format(value);
}

export function rate(value) {
  if (value == null) return none;
  return value < 9.95 ? tenth.format(value) : compact(value);
}

export function percent(value) {
  return value == null ? none : `${Math.round(100 * value)}%`;
}

export function seconds(value) {
  if (value == null) return none;
  if (value === 0) return "0 s";
  if (value < 0.0009995) return `${Math.round(1e6 * value)} µs`;
  if (value < 0.00995) return `${tenth.format(1e3 * value)} ms`;
  if (value < 0.9995) return `${Math.round(1e3 * value)} ms`;
  return `${tenth.format(value)} s`;
}

export function clock(wall) {
  return new Date(1e3 * wall).toLocaleTimeString("en-GB");
}

export function tail(id, length = 12) {
  return id.length <= length ? id : `…${id.slice(-length)}`;
}

// An element with attributes and children; strings become text, never markup.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else if (name === "vars") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}
