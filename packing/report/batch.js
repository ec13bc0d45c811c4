"use strict";
// The page of a packed batch.
const { tokens, plan, ranks, lengths, groups, breaks, trajectories } = figures;
let colouredBy = "role";

function head() {
  const saved = figures.saved.find(([name]) => name.startsWith("saved against"));
  const lead = saved
    ? `Packing saved ${saved[1].split(" ")[0]} of the tokens: ${whole.format(tokens.packed)} in place of ${whole.format(tokens[saved[0].includes("turn") ? "turns" : "padded"])}.`
    : `${whole.format(tokens.packed)} tokens.`;
  const tiles = [...figures.summary, ...figures.saved].map(([name, value]) =>
    make("div", { class: "tile" }, make("small", {}, name), value));
  return [make("h1", {}, figures.title), make("p", { class: "lead", id: "lead" }, lead), make("div", { class: "tiles" }, tiles)];
}

function microBatches() {
  if (!plan) return null;
  const names = [...figures.kinds, ...figures.padding];
  const labels = plan.bars[0].map((_, i) => `${i * plan.at_once}`);
  const words =
    `${counted(plan.micro_batches, "micro-batch").replace("batchs", "batches")} of up to ${whole.format(plan.capacity)} tokens, ` +
    `at least ${whole.format(plan.lower_bound)} are needed; fill ${percent(plan.fill)}. ` +
    `Padding: ${whole.format(plan.alignment)} by alignment, ${whole.format(plan.tail)} in tails, ${whole.format(plan.dummy)} in dummies. ` +
    `The fullest has ${plan.token_imbalance.toFixed(2)} times the mean.` +
    (plan.at_once > 1 ? ` A bar is the sum of ${plan.at_once} micro-batches.` : "");
  return section("micro-batches", "Micro-batches", "Tokens of each micro-batch by kind, planned by plan_micro_batches.",
    legend([["prompt"], ["observation"], ["generated"], ["shared", "shared with another sequence"],
      ["alignment", "padding: alignment"], ["tail", "padding: tail"], ["dummy", "padding: dummy"]]),
    drawn(place => stackedBars(place, names.map((name, i) => [name, plan.bars[i]]), labels, { of: "micro-batch " })),
    make("p", { id: "plan" }, words));
}

function rankCosts() {
  if (!ranks.planned) return null;
  const names = ranks.planned.pairs.map((_, i) => `${i}`);
  const excess = pairs => Math.max(...pairs) * pairs.length / Math.max(pairs.reduce((a, b) => a + b, 0), 1);
  const chart = pairs => drawn(place => stackedBars(place, [["accent", pairs]], names, { height: 160, of: "rank " }));
  return section("ranks", `Attention cost of ${counted(ranks.num_ranks, "rank")}`,
    `Pairs of a query and a key. By plan_ranks, the busiest rank has ${excess(ranks.planned.pairs).toFixed(2)} times the mean; ` +
    `if ranks take the sequences in order, ${excess(ranks.in_order.pairs).toFixed(2)} times.`,
    make("p", {}, "planned"), chart(ranks.planned.pairs), make("p", {}, "in order"), chart(ranks.in_order.pairs));
}

function histogram() {
  const labels = lengths.edges.slice(0, -1).map(compact);
  const used = Math.max(lengths.sequences.findLastIndex(n => n), lengths.completions.findLastIndex(n => n)) + 1;
  const chart = (name, values) => drawn(place =>
    stackedBars(place, [[name, values.slice(0, used)]], labels.slice(0, used), { height: 160, of: "from " }));
  return section("lengths", "Lengths", "Number of sequences, and of completions, by their tokens.",
    make("p", {}, "sequences"), chart("prompt", lengths.sequences),
    make("p", {}, "completions"), chart("generated", lengths.completions));
}

function groupScores() {
  if (!groups.shown.length) return null;
  const rows = key => groups.shown.map(one => ({ name: one.name, values: (one[key] || []).filter(Number.isFinite) }))
    .filter(one => one.values.length);
  const parts = [["scores", "summed rewards of the members"], ["advantages", "mean advantages of the members"]];
  const left = groups.left_out ? ` ${counted(groups.left_out, "more group")} left out.` : "";
  return section("groups", "Rewards by group", `A point is a trajectory.${left}`,
    ...parts.filter(([key]) => rows(key).length).flatMap(([key, label]) =>
      [make("p", {}, label), drawn(place => strips(place, rows(key)))]));
}

const around = ([before, token, after], id) =>
  [before, make("mark", { title: id === null ? "the end" : `token ${id}` }, id === null ? "∎" : token), after];

function prefixBreaks() {
  if (!breaks.known) return null;
  const reasons = Object.entries(breaks.reasons).map(([name, count]) => `${whole.format(count)} ${name}`).join(", ");
  const note = reasons
    ? `Turns whose prompt does not begin with the conversation so far: ${reasons}.` +
      (breaks.left_out ? ` ${counted(breaks.left_out, "more break")} left out.` : "")
    : "Every prompt begins with the conversation so far.";
  const rows = breaks.shown.map(one => make("tr", { class: "link", onclick: () => choose(one.index) },
    make("td", { class: "id" }, `${one.trajectory}, turn ${one.turn}`),
    make("td", { class: "number" }, whole.format(one.position)),
    make("td", { class: "tokens" }, ...around(one.history, one.expected)),
    make("td", { class: "tokens" }, ...around(one.came, one.got)),
    make("td", {}, one.reason)));
  return section("breaks", "Prefix breaks", note,
    rows.length ? table([["turn"], ["position", "number"], ["conversation had"], ["prompt has"], ["reason"]], rows) : null);
}

const viewer = make("div", { id: "viewer" });
let chosenRow = null;

function scale(value, least, most) {
  if (!Number.isFinite(value) || most <= least) return "";
  const share = (value - least) / (most - least);
  const [name, strength] = share < 0.5 ? ["low", 1 - 2 * share] : ["high", 2 * share - 1];
  return `background:color-mix(in srgb, var(--${name}) ${Math.round(55 * strength)}%, transparent)`;
}

function spanOf(span, rewards, column, least, most) {
  const left = span.left_out ? make("span", { class: "gone" }, ` … ${counted(span.left_out, "token")} left out`) : null;
  const reward = span.turn < rewards.length ? `, reward ${short(rewards[span.turn])}` : "";
  const title = span.kind === "generated" ? `generated, turn ${span.turn}${reward}` : span.kind;
  const parts = span.kind !== "generated" ? [span.text] : span.pieces.map(piece => {
    const words = `log-probability ${short(piece[1])}` + (piece[2] === null ? "" : `, advantage ${short(piece[2])}`) + `, version ${piece[3]}`;
    return make("span", { class: "part", title: words, style: column ? scale(piece[column], least, most) : null }, piece[0]);
  });
  return make("div", { class: "span", style: `--kind:${colour(span.kind)}`, "data-kind": span.kind },
    make("small", {}, `${title}, ${counted(span.tokens, "token")}`), make("div", { class: "tokens" }, parts, left));
}

function show(index) {
  const one = trajectories.rows[index];
  const columns = { role: 0, "log-probability": 1, advantage: 2, "policy version": 3 };
  const buttons = Object.keys(columns).map(name => make("button", {
    type: "button", "aria-pressed": name === colouredBy, onclick: () => { colouredBy = name; show(index); } }, name));
  const column = columns[colouredBy];
  const spans = (one.sequences || []).flat();
  const values = column ? spans.flatMap(span => span.pieces || []).map(piece => piece[column]).filter(Number.isFinite) : [];
  let [least, most] = [Math.min(...values), Math.max(...values)];
  if (column === 2) [least, most] = [-Math.max(-least, most), Math.max(-least, most)];
  const body = (one.sequences || []).map((sequence, number) => make("div", {},
    one.sequences.length > 1 ? make("p", {}, `sequence ${number + 1} of ${one.sequences.length}`) : null,
    sequence.map(span => spanOf(span, one.rewards, column, least, most))));
  viewer.replaceChildren(
    make("h2", {}, one.id), make("p", {}, `rewards ${one.rewards.map(short).join(", ")}` +
      (one.advantage === null ? "" : `; mean advantage ${short(one.advantage)}`) + (one.truncated ? "; cut off" : "")),
    make("div", { class: "controls" }, "colour by", buttons),
    ...(body.length ? body : [make("p", { class: "gone" }, "The text of this trajectory was left out.")]));
}

function choose(index) {
  if (!trajectories.rows[index]) return;
  if (chosenRow) chosenRow.classList.remove("chosen");
  chosenRow = document.querySelector(`tr[data-index="${index}"]`);
  if (chosenRow) chosenRow.classList.add("chosen");
  show(index);
  viewer.scrollIntoView({ block: "nearest" });
}

function list() {
  const notes = [];
  if (trajectories.left_out) notes.push(`${counted(trajectories.left_out, "more trajectory").replace("trajectorys", "trajectories")} left out.`);
  if (trajectories.without_text) notes.push(`${whole.format(trajectories.without_text)} are shown without text.`);
  const rows = trajectories.rows.map((one, index) => make("tr", { class: "link", "data-index": index, onclick: () => choose(index) },
    make("td", { class: "id" }, one.id), make("td", { class: "id" }, one.group ?? ""),
    make("td", { class: "number" }, short(one.score)), make("td", { class: "number" }, short(one.advantage)),
    make("td", { class: "number" }, one.turns), make("td", { class: "number" }, whole.format(one.generated))));
  const filter = make("input", { type: "search", placeholder: "id or group", "aria-label": "filter", oninput: event => {
    const wanted = event.target.value.toLowerCase();
    trajectories.rows.forEach((one, index) => {
      rows[index].hidden = !`${one.id} ${one.group ?? ""}`.toLowerCase().includes(wanted);
    });
  } });
  return section("trajectories", "Trajectories", ["Click one to read it.", ...notes].join(" "),
    make("div", { class: "controls" }, filter),
    table([["id"], ["group"], ...["score", "advantage", "turns", "generated"].map(name => [name, "number"])], rows), viewer);
}

page.replaceChildren(...head(), ...[microBatches(), make("div", { class: "columns" },
  ...[rankCosts(), histogram()].filter(one => one)), groupScores(), prefixBreaks(), list()].filter(one => one));
drawAll();
const asked = new URLSearchParams(location.hash.slice(1));
if (trajectories.rows.length) choose(Number(asked.get("trajectory") || 0));
if (!asked.has("trajectory")) scrollTo(0, 0);
