"use strict";
// Shows the runs in the block "data". Every text of it goes into the page by textContent alone.
(() => {
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const data = read("data");
const LANES = ["first", "second", "third", "fourth", "fifth", "sixth", "noise", "first"];
const WINDOW = 16; // steps, as in the window's plot of acceptance
const MOST_ROWS = 400; // tokens of a round in the inspector
const AT_ONCE = 4000; // tokens that are laid out before the page is painted again
const PHASES = ["draft", "verify", "sample", "save", "rollback", "restore", "replay", "total"];
const PATHS = ["seq_rm", "restore", "restore_depth", "refused"];
const state = {run: null, seq: 0, round: null, token: null, spans: []};
let plots = null;
let shown = 0; // grows with every text that is laid out: a later one ends the one before

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = String(text);
  if (name) element.className = name;
  return element;
}

function row(cells, heading) {
  const line = make("tr");
  for (const cell of cells) line.append(make(heading ? "th" : "td", cell === null ? "" : cell));
  return line;
}

// -- data --------------------------------------------------------------------------------------

function expanded(column, n) {
  if (column === undefined) return new Array(n).fill(null);
  if (Array.isArray(column)) return column;
  return "all" in column ? new Array(n).fill(column.all) : column.at.map((i) => column.of[i]);
}

function table(packed) {
  const found = {n: packed.n};
  for (const name of Object.keys(packed)) if (name !== "n") found[name] = expanded(packed[name], packed.n);
  return found;
}

// per sequence: the rows of its rounds in order, and by round
function prepared(run) {
  if (run.ready) return run;
  run.rounds = table(run.rounds);
  run.drafts = table(run.drafts);
  const again = new Set(run.tokens.again);
  delete run.tokens.again;
  run.tokens = table(run.tokens);
  run.again = again;
  run.bySeq = new Map();
  const of = (seq) => {
    if (!run.bySeq.has(seq)) run.bySeq.set(seq, {rows: [], rowOf: new Map(), tokens: [], tokensOf: new Map()});
    return run.bySeq.get(seq);
  };
  for (let i = 0; i < run.rounds.n; i++) {
    const one = of(run.rounds.seq_id[i]);
    one.rowOf.set(run.rounds.round[i], i);
    one.rows.push(i);
  }
  for (let i = 0; i < run.tokens.n; i++) {
    const one = of(run.tokens.seq_id[i]), round = run.tokens.round[i];
    one.tokens.push(i);
    if (!one.tokensOf.has(round)) one.tokensOf.set(round, []);
    one.tokensOf.get(round).push(i);
  }
  run.ready = true;
  return run;
}

const sequence = () => state.run.bySeq.get(state.seq);
const kindOf = (i) => data.kinds[state.run.tokens.kind[i]];
const isGhost = (i) => data.ghosts.includes(kindOf(i));

// -- text --------------------------------------------------------------------------------------

function textOf(i) {
  const kind = kindOf(i), text = data.pieces[state.run.tokens.piece[i]];
  if (data.ghosts.includes(kind)) return lineOf(text);
  return kind === "prompt" || kind === "target" ? text : text.replaceAll("\n", "⏎\n");
}

function layOut() {
  const mine = ++shown, area = $("text"), tokens = sequence() ? sequence().tokens : [];
  area.replaceChildren();
  state.spans = new Map();
  let at = 0, chunk = null, inChunk = 0;
  const some = () => {
    if (mine !== shown) return;
    const stop = Math.min(tokens.length, at + AT_ONCE);
    for (; at < stop; at++) {
      if (chunk === null) {
        chunk = make("div", null, "chunk");
        inChunk = 0;
        area.append(chunk);
      }
      const i = tokens[at], span = make("span", textOf(i), kindOf(i));
      if (state.run.again.has(i)) span.classList.add("again");
      span.token = i;
      state.spans.set(i, span);
      chunk.append(span);
      // a block may end only where the text has a line of its own
      if (++inChunk > 300 && !isGhost(i) && span.textContent.endsWith("\n")) {
        span.textContent = span.textContent.slice(0, -1) || " ";
        chunk = null;
      }
    }
    mark();
    if (at < tokens.length) setTimeout(some, 0);
  };
  some();
}

function mark() {
  for (const span of document.querySelectorAll("#text .chosen, #text .token")) {
    span.classList.remove("chosen", "token");
  }
  const tokens = sequence() ? sequence().tokensOf.get(state.round) || [] : [];
  for (const i of tokens) {
    const span = state.spans.get(i);
    if (span) span.classList.add("chosen");
  }
  const span = state.spans.get(state.token);
  if (span) span.classList.add("token");
}

function bringIntoSight() {
  const tokens = sequence().tokensOf.get(state.round) || [];
  const span = state.spans.get(state.token) || state.spans.get(tokens[0]);
  if (!span) return;
  const area = $("text"), box = span.getBoundingClientRect(), around = area.getBoundingClientRect();
  if (box.top < around.top || box.bottom > around.bottom) {
    area.scrollTop += box.top - around.top - area.clientHeight / 2;
  }
}

// -- selection ---------------------------------------------------------------------------------

function choose(round, token) {
  if (round === null || round === undefined || !sequence()) return;
  state.round = round;
  state.token = token === undefined ? null : token;
  mark();
  bringIntoSight();
  inspect();
  moveCursors();
  const place = `#run=${state.run.id}&seq=${state.seq}&round=${round}`;
  if (location.hash !== place) history.replaceState(null, "", place);
}

function step(by) {
  const {rows} = sequence(), rounds = state.run.rounds.round;
  let at = rows.findIndex((i) => rounds[i] >= state.round);
  if (at < 0) at = rows.length;
  const exact = at < rows.length && rounds[rows[at]] === state.round;
  if (state.round === null) at = by > 0 ? -1 : rows.length;
  else if (!exact && by > 0) at -= 1;
  const next = rows[at + by];
  if (next !== undefined) choose(rounds[next]);
}

function nextRejection(by) {
  const {tokens} = sequence(), here = state.token !== null ? state.token : null;
  const wanted = tokens.filter((i) => kindOf(i) === "rejected");
  const round = (i) => state.run.tokens.round[i];
  const after = (i) => here !== null ? i > here : state.round === null || round(i) > state.round;
  const before = (i) => here !== null ? i < here : state.round !== null && round(i) < state.round;
  const found = by > 0 ? wanted.find(after) : wanted.filter(before).pop();
  if (found !== undefined) choose(round(found), found);
}

function comparedLanes() { // of the comparison that the run on show is in
  const {comparison} = state.run;
  return data.runs.filter((run) => run.divergence && comparison !== null && run.comparison === comparison);
}

function places() { // of all lanes that are beyond their bounds
  const found = [], lanes = comparedLanes();
  for (const run of lanes.length ? lanes : data.runs) {
    const there = run.divergence;
    if (!there) continue;
    const seqs = expanded(there.seq_id, there.n), rounds = expanded(there.round, there.n);
    const positions = expanded(there.pos, there.n);
    for (const i of there.beyond) found.push({run, seq: seqs[i], round: rounds[i], pos: positions[i]});
    const [seq, round, pos] = there.first;
    if (!there.beyond.length && seq !== null && round !== null) found.push({run, seq, round, pos});
  }
  return found;
}

function goToDivergence(next) {
  const all = places();
  if (!all.length) return;
  const here = all.findIndex((one) => one.run === state.run && one.seq === state.seq && one.round === state.round);
  goTo(next ? all[Math.min(here + 1, all.length - 1)] : all[0]);
}

function goTo({run, seq, round, pos}) {
  if (run !== state.run) showRun(run);
  if (seq !== null && seq !== state.seq && state.run.bySeq.has(seq)) showSequence(seq);
  const {tokens, tokensOf} = sequence() || {tokens: [], tokensOf: new Map()};
  let token = (tokensOf.get(round) || []).find((i) => state.run.tokens.pos[i] === pos && !isGhost(i));
  if (token === undefined && pos !== undefined && pos !== null) {
    token = tokens.find((i) => state.run.tokens.pos[i] === pos && !isGhost(i));
  }
  choose(round, token);
}

// -- inspector, findings, settings -----------------------------------------------------------------

const lineOf = (text) => text.replaceAll("\n", "⏎");

function inspect() {
  const {rounds, tokens, drafts} = state.run, one = sequence(), i = one.rowOf.get(state.round);
  $("where").textContent = `Round ${state.round}, sequence ${state.seq}` + (i === undefined ? ": not recorded" : "");
  const steps = $("step"), facts = $("facts");
  steps.replaceChildren(row(["pos", "token", "kind", "draft p", "target p", "rank", "entropy"], true));
  const rows = one.tokensOf.get(state.round) || [];
  for (const t of rows.slice(0, MOST_ROWS)) {
    const cells = [tokens.pos[t], lineOf(data.pieces[tokens.piece[t]]), kindOf(t)];
    for (const name of ["draft_p", "target_p", "target_rank", "target_entropy"]) {
      cells.push(tokens[name] ? tokens[name][t] : null);
    }
    const line = row(cells);
    line.title = data.meaning[kindOf(t)] || "";
    line.className = t === state.token ? "goes chosen" : "goes";
    line.token = t;
    steps.append(line);
  }
  listCandidates(state.token);
  facts.replaceChildren();
  if (i !== undefined) addFacts(facts, rounds, i, data.about.rounds);
  for (let d = 0; d < drafts.n; d++) {
    if (drafts.seq_id[d] === state.seq && drafts.round[d] === state.round) addFacts(facts, drafts, d, data.about.drafts, "draft: ");
  }
}

function listCandidates(t) {
  const area = $("candidates"), {tokens} = state.run;
  area.replaceChildren();
  if (t === null) return;
  for (const [name, whose] of [["target_top", "target"], ["draft_top", "drafter"]]) {
    const found = tokens[name] ? tokens[name][t] : null;
    if (!found) continue;
    area.append(row([`most probable, ${whose}`, "p"], true));
    for (let k = 0; k < found.length; k += 2) area.append(row([lineOf(data.pieces[found[k]]), found[k + 1]]));
  }
  if (!data.candidates) area.append(row(["The candidates of this many tokens are only in the trace.", ""]));
}

function addFacts(facts, of, i, about, before) {
  for (const name of Object.keys(of)) {
    const value = name === "n" ? null : of[name][i];
    if (value === null || value === "" || name === "round" || name === "seq_id") continue;
    const line = make("tr");
    line.append(make("th", (before || "") + name.replaceAll("_", " ")), make("td", value));
    line.title = about[name] || "";
    facts.append(line);
  }
}

function listFindings() {
  const area = $("findings");
  area.replaceChildren();
  for (const one of state.run.findings) {
    const block = make("div", null, "finding");
    block.classList.add(one.severity);
    const where = (one.round === null ? "" : `, round ${one.round}`) + (one.seq === null ? "" : `, sequence ${one.seq}`);
    const head = make("p");
    head.append(make("b", one.rule), make("span", where, "muted"));
    block.append(head, make("p", one.message), make("p", one.evidence, "muted"), make("p", one.suggestion));
    if (one.round !== null) {
      block.classList.add("goes");
      block.tabIndex = 0;
      block.place = {run: state.run, seq: one.seq === null ? state.seq : one.seq, round: one.round};
    }
    area.append(block);
  }
  if (!state.run.findings.length) area.append(make("p", "Nothing was found.", "muted"));
  const settings = $("settings");
  settings.replaceChildren();
  for (const name of Object.keys(state.run.settings)) {
    const line = make("tr");
    line.append(make("th", name.replaceAll("_", " ")), make("td", state.run.settings[name]));
    settings.append(line);
  }
}

function listLanes() {
  const lanes = comparedLanes();
  $("lanes").replaceChildren();
  if (!lanes.length) return;
  $("lanes").append(row(["lane", "verdict", "band", "first divergence"], true));
  for (const run of lanes) {
    const [seq, round, pos] = run.divergence.first;
    const where = pos === null ? "" : `sequence ${seq}, position ${pos}` + (round === null ? "" : `, round ${round}`);
    const line = row([run.lane, run.divergence.verdict, run.divergence.band, where]);
    line.className = "goes";
    line.place = {run, seq: seq === null ? 0 : seq, round: round === null ? 0 : round, pos};
    $("lanes").append(line);
  }
}

// -- what is shown ---------------------------------------------------------------------------------

function showRun(run) {
  state.run = prepared(run);
  $("run").value = String(data.runs.indexOf(run));
  $("headline").textContent = run.headline;
  const seqs = [...run.bySeq.keys()].sort((a, b) => a - b), select = $("seq");
  select.replaceChildren(...seqs.map((seq) => {
    const option = make("option", seq);
    option.value = String(seq);
    return option;
  }));
  select.parentElement.hidden = seqs.length < 2;
  listFindings();
  listLanes();
  show("divergence", comparedLanes().length);
  showSequence(seqs.length ? seqs[0] : 0);
}

function showSequence(seq) {
  state.seq = seq;
  $("seq").value = String(seq);
  state.round = state.token = null;
  $("where").textContent = "Choose a token, a round in a plot, or press ].";
  $("step").replaceChildren();
  $("candidates").replaceChildren();
  $("facts").replaceChildren();
  layOut();
  if (plots) fillPlots();
}

function legend(card, entries) {
  const line = document.querySelector(`#card-${card} .legend`);
  line.replaceChildren();
  for (const [text, colour] of entries) {
    const swatch = make("i");
    swatch.style.background = `var(--${colour})`;
    line.append(swatch, make("span", text));
  }
}

// -- plots, by Bokeh ---------------------------------------------------------------------------------

const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

async function drawPlots() {
  if (typeof Bokeh === "undefined") return;
  const {document: described, roots} = read("plots");
  const elements = {};
  for (const id of Object.keys(roots)) elements[id] = $(`plot-${roots[id]}`);
  const items = [{docid: "session", roots: elements, root_ids: Object.keys(elements)}];
  await Bokeh.embed.embed_items({session: described}, items);
  const found = {};
  for (const figure of Bokeh.documents[Bokeh.documents.length - 1].roots()) {
    found[figure.name] = figure;
    figure.on_event("tap", (event) => tapped(figure, event));
  }
  plots = found;
  fillPlots();
  colourPlots();
  if (state.round !== null) moveCursors();
}

function tapped(figure, event) {
  if (figure.name === "divergence") {
    const pos = Math.round(event.x), {tokens} = sequence();
    const token = tokens.find((i) => state.run.tokens.pos[i] === pos && !isGhost(i));
    if (token !== undefined) choose(state.run.tokens.round[token], token);
    return;
  }
  const round = Math.round(event.x);
  if (sequence().rowOf.has(round)) choose(round);
}

function source(figure, name) {
  return plots[figure].renderers.map((one) => one.data_source).find((one) => one.name === name);
}

function show(card, has) {
  $(`card-${card}`).hidden = !has;
}

function setRange(range, start, end) {
  range.setv({start, end, reset_start: start, reset_end: end});
}

function fillPlots() {
  const run = state.run, {rounds} = run, rows = sequence() ? sequence().rows : [];
  const first = rows.length ? rounds.round[rows[0]] : 0;
  const last = rows.length ? rounds.round[rows[rows.length - 1]] : 1;
  setRange(plots.time.x_range, first - 0.5, last + 0.5);
  fillTimes(run);
  const x = [], rate = [], soFar = [], drafted = {x: [], drafted: [], accepted: []};
  const depth = new Map(PATHS.map((path) => [path, {x: [], depth: []}])), limit = {x: [], limit: []};
  let all = 0, good = 0;
  const last16 = [];
  for (const i of rows) {
    const round = rounds.round[i], n = rounds.num_draft_tokens ? rounds.num_draft_tokens[i] : null;
    const accepted = rounds.num_accepted_draft_tokens ? rounds.num_accepted_draft_tokens[i] : null;
    if (n !== null && n > 0 && accepted !== null) {
      drafted.x.push(round);
      drafted.drafted.push(n);
      drafted.accepted.push(accepted);
      all += n;
      good += accepted;
      last16.push([n, accepted]);
      if (last16.length > WINDOW) last16.shift();
      let some = 0, hit = 0;
      for (const [a, b] of last16) { some += a; hit += b; }
      x.push(round);
      rate.push(hit / some);
      soFar.push(good / all);
    }
    const path = rounds.rollback_path ? rounds.rollback_path[i] : "";
    const undone = rounds.rollback_depth ? rounds.rollback_depth[i] : null;
    if (undone !== null && undone > 0) {
      const there = depth.get(path) || depth.get("seq_rm");
      there.x.push(round);
      there.depth.push(undone);
    }
    const planes = rounds.n_rs_seq ? rounds.n_rs_seq[i] : null;
    if (planes !== null) { limit.x.push(round); limit.limit.push(planes); }
  }
  source("acceptance", "acceptance data").data = {x, rate, so_far: soFar};
  source("drafts", "drafts data").data = drafted;
  for (const [path, values] of depth) source("depth", `depth ${path}`).data = values;
  source("depth", "limit").data = limit;
  setRange(plots.acceptance.y_range, 0, 1.05);
  setRange(plots.drafts.y_range, 0, 1.05 * drafted.drafted.reduce((a, b) => Math.max(a, b), 1));
  const deepest = [limit.limit, ...[...depth.values()].map((one) => one.depth)].flat();
  setRange(plots.depth.y_range, 0, 1.1 * deepest.reduce((a, b) => Math.max(a, b), 1));
  show("acceptance", x.length);
  show("drafts", x.length);
  const taken = PATHS.filter((path) => depth.get(path).x.length);
  legend("depth", [...taken.map((path) => [path, `path-${path}`]), ["n_rs_seq", "plot-limit"]]);
  show("depth", limit.x.length || taken.length);
  fillRing(run);
  fillDivergence();
}

function fillTimes(run) {
  const {rounds} = run, at = new Map();
  const values = Object.fromEntries(PHASES.map((phase) => [phase, []])), x = [], sums = [];
  const plain = [];
  for (let i = 0; i < rounds.n; i++) {
    const round = rounds.round[i];
    if (!at.has(round)) {
      at.set(round, x.length);
      x.push(round);
      sums.push(0);
      plain.push(true);
      for (const phase of PHASES) values[phase].push(0);
    }
    const k = at.get(round);
    let known = false;
    for (const phase of PHASES.slice(0, -1)) {
      const ms = rounds[`${phase}_ms`] ? rounds[`${phase}_ms`][i] : null;
      if (ms !== null) { values[phase][k] += ms; sums[k] += ms; known = true; }
    }
    const whole = rounds.total_ms ? rounds.total_ms[i] : null;
    if (!known && whole !== null) { values.total[k] += whole; sums[k] += whole; }
    if (rounds.num_draft_tokens && rounds.num_draft_tokens[i] === null) plain[k] = false;
  }
  source("time", "times").data = {x, ...values};
  for (const one of plots.time.renderers) {
    one.visible = values[one.name.slice("phase-".length)].some((ms) => ms > 0);
  }
  const sorted = sums.slice().sort((a, b) => a - b), most = sorted[sorted.length - 1] || 0;
  const usual = sorted[Math.floor(0.95 * (sorted.length - 1))] || 0;
  const end = most > 4 * usual && usual > 0 ? 1.5 * usual : 1.05 * most || 1;
  const cut = sums.filter((ms) => ms > end).length;
  setRange(plots.time.y_range, 0, end);
  legend("time", [
    ...PHASES.filter((phase) => values[phase].some((ms) => ms > 0)).map((phase) => [phase, `phase-${phase}`]),
    ...(cut ? [[`${cut} bars are cut at the top`, "ui-panel"]] : []),
  ]);
  show("time", most > 0);
}

function fillRing(run) {
  const there = run.ring.find((one) => one.seq === state.seq);
  show("ring", there);
  for (const one of plots.ring.renderers) one.visible = one.name === `ring-${run.id}-${state.seq}`;
  if (!there) return;
  setRange(plots.ring.y_range, there.planes - 0.5, -0.5); // the first on top, as in the window
  legend("ring", there.states.map((name) => [name, `slot-${name}`]));
}

function fillDivergence() {
  const lanes = comparedLanes().slice(0, LANES.length);
  show("divergence", lanes.length);
  let first = Infinity, last = -Infinity, low = Infinity, high = 0, bound = null;
  const entries = [];
  lanes.forEach((run, k) => {
    const there = run.divergence, x = [], nmse = [];
    const seqs = expanded(there.seq_id, there.n), positions = expanded(there.pos, there.n);
    const errors = expanded(there.nmse, there.n);
    for (let i = 0; i < there.n; i++) {
      if (seqs[i] !== state.seq) continue;
      first = Math.min(first, positions[i]);
      last = Math.max(last, positions[i]);
      if (!(errors[i] > 0)) continue;
      x.push(positions[i]);
      nmse.push(errors[i]);
      low = Math.min(low, errors[i]);
      high = Math.max(high, errors[i]);
    }
    source("divergence", `lane ${k}`).data = {x, nmse};
    if (run === state.run) bound = there.bound;
    entries.push([run.lane + (nmse.length ? "" : " (exact)"), `lane-${LANES[k]}`]);
  });
  if (first <= last) setRange(plots.divergence.x_range, first - 0.5, last + 0.5);
  if (low < Infinity) setRange(plots.divergence.y_range, low / 2, high * 2);
  marker("bound").location = bound === null ? 1e-30 : bound;
  legend("divergence", [...entries, ...(bound === null ? [] : [[`bound ${bound.toPrecision(2)}`, "plot-limit"]])]);
}

function marker(name) {
  for (const figure of Object.values(plots)) {
    for (const one of figure.center) if (one.name === name) return one;
  }
  return null;
}

function moveCursors() {
  if (!plots) return;
  for (const name of Object.keys(plots)) {
    const pos = state.token === null ? null : state.run.tokens.pos[state.token];
    const place = name === "divergence" ? pos : state.round;
    marker(`${name} cursor`).location = place === null ? -9 : place;
  }
}

function colourPlots() {
  const slots = [...data.states.map((name) => colour(`slot-${name}`)), colour("plot-background")];
  for (const one of plots.ring.renderers) one.glyph.color_mapper.palette = slots;
  for (const figure of Object.values(plots)) {
    figure.setv({
      background_fill_color: colour("plot-background"),
      border_fill_color: colour("ui-panel"),
      outline_line_color: colour("plot-grid"),
    });
    for (const axis of [...figure.below, ...figure.left]) {
      axis.setv({
        axis_line_color: colour("plot-axis"),
        major_tick_line_color: colour("plot-axis"),
        minor_tick_line_color: null,
        major_label_text_color: colour("plot-text"),
        axis_label_text_color: colour("plot-text"),
      });
    }
    for (const one of figure.center) {
      if ("grid_line_color" in one) one.grid_line_color = colour("plot-grid");
      else if ("location" in one) one.line_color = colour(one.name === "bound" ? "plot-limit" : "plot-cursor");
    }
    for (const one of figure.renderers) {
      if (!one.name) continue;
      const lane = /^lane-(\d)$/.exec(one.name);
      const value = {value: colour(lane ? `lane-${LANES[Number(lane[1])]}` : one.name)};
      if ("fill_color" in one.glyph) one.glyph.fill_color = value;
      if (!("fill_color" in one.glyph) || lane) one.glyph.line_color = value;
    }
  }
}

// -- keys and buttons ----------------------------------------------------------------------------------

function setTheme(name) {
  root.dataset.theme = name;
  if (plots) colourPlots();
}

const KEYS = {
  "[": () => step(-1),
  "]": () => step(1),
  n: () => nextRejection(1),
  N: () => nextRejection(-1),
  x: () => goToDivergence(false),
  X: () => goToDivergence(true),
  g: () => $("text").classList.toggle("no-ghosts"),
  i: () => {
    $("right").hidden = !$("right").hidden;
    document.querySelector("main").classList.toggle("narrow", $("right").hidden);
  },
  "?": () => { $("keys").hidden = !$("keys").hidden; },
};

function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  $("title").textContent = data.title;
  data.runs.forEach((run, i) => {
    const option = make("option", run.name);
    option.value = String(i);
    $("run").append(option);
  });
  $("run").parentElement.hidden = data.runs.length < 2;
  $("run").addEventListener("change", () => showRun(data.runs[Number($("run").value)]));
  $("seq").addEventListener("change", () => showSequence(Number($("seq").value)));
  $("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  $("help").addEventListener("click", KEYS["?"]);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
    const act = Object.hasOwn(KEYS, event.key) ? KEYS[event.key] : null;
    if (act) { act(); event.preventDefault(); }
    else if (event.key === "Enter" && event.target.place) goTo(event.target.place);
  });
  document.addEventListener("click", (event) => {
    for (let one = event.target; one && one !== document.body; one = one.parentElement) {
      if (one.place) { goTo(one.place); return; }
      if (one.token !== undefined) { choose(state.run.tokens.round[one.token], one.token); return; }
    }
  });
  for (const kind of data.kinds) {
    if (kind === "prompt" || kind === "target") continue;
    const one = make("span", kind, kind);
    one.title = data.meaning[kind] || "";
    $("kinds").append(one);
  }
  legend("acceptance", [[`last ${WINDOW} steps`, "accepted-line"], ["so far", "plot-text"]]);
  legend("drafts", [["accepted", "accepted-line"], ["drafted", "rejected-tint"]]);
  const asked = Object.fromEntries([...location.hash.matchAll(/(run|seq|round)=(\d{1,9})/g)].map((one) => [one[1], Number(one[2])]));
  const run = data.runs.find((one) => one.id === (asked.run ?? data.shown)) || data.runs.find((one) => one.divergence) || data.runs[0];
  if (!run) return;
  showRun(run);
  if (run.bySeq.has(asked.seq) && asked.seq !== state.seq) showSequence(asked.seq);
  if (asked.round !== undefined) choose(asked.round);
}

start();
addEventListener("load", () => requestAnimationFrame(() => setTimeout(drawPlots, 0)));
})();
