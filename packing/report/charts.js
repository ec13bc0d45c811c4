"use strict";
// Elements and charts. Text becomes text nodes, never markup.
const figures = JSON.parse(document.getElementById("figures").textContent);
const page = document.querySelector("main");
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, ...children) {
  const isSvg = ["svg", "rect", "line", "path", "text", "circle", "g", "title"].includes(tag);
  const one = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) one.setAttribute(name, value);
  }
  one.append(...children.flat().filter(child => child !== null && child !== undefined));
  return one;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const percent = share => (100 * share).toFixed(1) + " %";
const short = value => (Number.isFinite(value) ? Number(value.toPrecision(4)).toString() : value ?? "");
const colour = name => `var(--${name})`;
const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;

function section(id, title, note, ...children) {
  return make("section", { id }, make("h2", {}, title), note ? make("p", {}, note) : null, ...children);
}

function legend(names) {
  const entries = names.map(([name, label]) =>
    make("span", {}, make("i", { style: `background:${colour(name)}` }), label || name));
  return make("div", { class: "legend" }, entries);
}

function compact(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + letter;
  return Number(value.toPrecision(3)).toString();
}

// A step of 1, 2, 2.5 or 5 times a power of ten, so that five of them cover `range`.
function stepOf(range) {
  const size = 10 ** Math.floor(Math.log10(range / 4));
  return [1, 2, 2.5, 5, 10].map(times => times * size).find(step => step * 4 >= range);
}

// Axes with lines from `least` to at least `most`; returns the drawing and two scales.
function axes(width, height, least, most, write = compact) {
  const [left, right, top, bottom] = [46, 8, 8, 24];
  const step = stepOf(most > least ? most - least : 1);
  const low = Math.floor(least / step) * step, high = Math.max(Math.ceil(most / step), low / step + 1) * step;
  const y = value => top + (height - top - bottom) * (1 - (value - low) / (high - low));
  const x = share => left + (width - left - right) * share;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (let line = 0; line <= Math.round((high - low) / step); line++) {
    const value = low + line * step;
    svg.append(
      make("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      make("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, write(value)));
  }
  return { svg, x, y, bottom: height - bottom };
}

const widthOf = place => Math.max(280, Math.min(place.clientWidth || 600, 1200));

// Stacked bars: `series` are [name, values]; `labels` are written below, as many as fit.
function stackedBars(place, series, labels, { height = 220, write = compact, of = "" } = {}) {
  const width = widthOf(place), count = labels.length;
  const most = Math.max(1e-9, ...labels.map((_, i) => series.reduce((sum, one) => sum + one[1][i], 0)));
  const { svg, x, y, bottom } = axes(width, height, 0, most, write);
  const step = count ? 1 / count : 1, gap = count > 40 ? 0.08 : 0.15;
  const every = Math.ceil((count * 44) / width) || 1;
  for (let i = 0; i < count; i++) {
    let sum = 0;
    const words = series.filter(one => one[1][i]).map(one => `${one[0]} ${whole.format(one[1][i])}`);
    const bar = make("g", {}, make("title", {}, `${of}${labels[i]}: ${words.join(", ")}`));
    for (const [name, values] of series) {
      if (!values[i]) continue;
      const [low, high] = [y(sum), y(sum + values[i])];
      const wide = (x(step) - x(0)) * (1 - gap);
      bar.append(make("rect", {
        x: x(i * step) + ((x(step) - x(0)) * gap) / 2, y: high, width: wide,
        height: Math.max(low - high, 0), fill: colour(name), "data-kind": name }));
      sum += values[i];
    }
    svg.append(bar);
    if (i % every === 0)
      svg.append(make("text", { x: x((i + 0.5) * step), y: bottom + 14, "text-anchor": "middle" }, labels[i]));
  }
  place.replaceChildren(svg);
}

// One row of points for each group, on one axis.
function strips(place, rows, { write = short } = {}) {
  const width = widthOf(place), height = 30 + 18 * rows.length, left = Math.min(150, width * 0.35);
  const all = rows.flatMap(row => row.values);
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const x = value => left + (width - left - 14) * (most > least ? (value - least) / (most - least) : 0.5);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  rows.forEach((row, i) => {
    const y = 12 + 18 * i, room = Math.floor(left / 6.2);
    const name = row.name.length > room ? row.name.slice(0, room - 1) + "…" : row.name;
    svg.append(
      make("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, name),
      make("line", { class: "axis", x1: left, x2: width - 14, y1: y, y2: y }));
    row.values.forEach(value => svg.append(make("circle",
      { cx: x(value), cy: y, r: 4.5, fill: colour("accent"), opacity: 0.55 },
      make("title", {}, `${row.name}: ${write(value)}`))));
  });
  for (const value of most > least ? [least, most] : [least])
    svg.append(make("text", { x: x(value), y: height - 4, "text-anchor": "middle" }, write(value)));
  place.replaceChildren(svg);
}

// Draw now and whenever the width changes.
const drawings = [];
function drawn(draw) {
  const place = make("div", {});
  drawings.push(() => draw(place));
  return place;
}
function drawAll() { drawings.forEach(draw => draw()); }
let pending = 0;
addEventListener("resize", () => { clearTimeout(pending); pending = setTimeout(drawAll, 150); });

function table(head, rows, className = "scroll") {
  return make("div", { class: className }, make("table", {},
    make("thead", {}, make("tr", {}, head.map(([name, className]) => make("th", { class: className }, name)))), make("tbody", {}, rows)));
}
