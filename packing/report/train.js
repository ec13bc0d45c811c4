"use strict";
// The page of a training: curves by step, conversations before and after.
function panel({ title, percent: isShare, curves }) {
  const write = isShare ? value => `${Math.round(100 * value)} %` : compact;
  return section(title.toLowerCase().replaceAll(" ", "-"), title, null,
    legend(curves.map(one => [one.name, one.label])),
    drawn(place => lines(place, figures.steps, curves, { write, most: isShare && Math.max(...curves.flatMap(one => one.values)) > 0.5 ? 1 : null })));
}

function conversations(label, several) {
  return make("section", {}, make("h2", {}, label), several.map(one =>
    make("div", { class: "conversation" }, one.map(({ kind, text, reward }) =>
      make("div", { class: "span", style: `--kind:${colour(kind)}`, "data-kind": kind },
        make("small", {}, kind + (reward === null ? "" : reward > 0 ? ", right" : ", wrong")),
        make("div", { class: "tokens" }, text))))));
}

function pairs(rows) {
  return make("div", { class: "tiles" }, rows.map(([name, value]) =>
    make("div", { class: "tile" }, make("small", {}, name), value)));
}

page.replaceChildren(
  make("h1", {}, figures.title), make("p", { class: "lead", id: "lead" }, figures.lead), pairs(figures.rows),
  make("p", {}, "Pale lines are single steps, bold ones the mean of five."),
  make("div", { class: "columns" }, figures.panels.map(panel)),
  make("div", { class: "columns below" },
    conversations("Conversations of the first step", figures.before),
    conversations("Conversations of the last step", figures.after)),
  section("run", "What was run", null, pairs(figures.run)));
drawAll();
