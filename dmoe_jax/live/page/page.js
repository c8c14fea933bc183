// The page of `dmoe watch`: takes events, and draws what they say once in a frame, tables and curves less often.

import { Curve } from "./curve.js";
import { HeatMap } from "./heatmap.js";
import { factsOf, fillFacts, showGroups, showLayers, showNews, showPeers } from "./tables.js";
import { duration, made, put, short } from "./text.js";
import { after, changesLayout, isObject, numberOf, own, Timeline } from "./timeline.js";

const FIGURES = [
  ["peers", "Peers", "--grey"],
  ["experts", "Experts", "--grey"],
  ["step", "Step", "--accent"],
  ["loss", "Training loss", "--trainer"],
  ["validation_perplexity", "Perplexity", "--accent"],
  ["items_per_s", "Items per s", "--trainer"],
  ["calls_per_s", "Calls per s", "--accent"],
  ["staleness", "Staleness", "--auxiliary"],
  ["failed_calls", "Failed calls", "--lost"],
  ["sent_mb", "MB sent", "--averager"],
];
const MOST_POINTS = 1200; // of a curve; if there are more, every second one goes
const CURVES_MS = 200;
const TABLES_MS = 1000;
const SPOKEN_MS = 15000; // a screen reader must have time for other things
const PLAYED_S = 30; // in which a recording is played from its beginning to its end
const KEYS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];

const at = (id) => document.getElementById(id);
const map = new HeatMap(at("map-canvas"));
const figures = new Map();
// What tests read: events applied, and frames drawn.
const counts = (window.dmoeCounts = { events: 0, frames: 0 });

let about = {};
let state = {};
let timeline = null; // of a recording
let shown = -1; // number of the event of a recording whose state is shown
let time = 0;
let points = new Map(); // name of a figure -> [time, value]
let page = 0;
let chosen = 0; // number of a square
let layoutIsOld = true;
let isNew = false; // since the last frame
const due = { curves: 0, tables: 0, spoken: 0 };
let playing = null;

function begin(event) {
  about = event;
  [state, shown, time, points, layoutIsOld] = [{}, -1, 0, new Map(), true];
  for (const part of Object.keys(due)) due[part] = 0;
  timeline = about.kind === "recorded" ? new Timeline() : null;
  put(at("title"), short(about.title));
  document.title = `${short(about.title)} · dmoe watch`;
  at("time").hidden = !timeline;
  for (const [seconds, totals] of Array.isArray(about.past) ? about.past : []) remember(seconds, totals);
  say(timeline ? "recorded" : "live", timeline ? "recorded" : "live");
}

function take(event) {
  counts.events += 1;
  if (event.what === "about") begin(event);
  else if (event.what === "end") source.close();
  else if (timeline) takeRecorded(event);
  else {
    layoutIsOld ||= event.what === "all" || changesLayout(state, event.state);
    state = after(state, event);
    time = event.time;
    remember(time, own(state, "totals"));
  }
  isNew = true;
}

function takeRecorded(event) {
  const slider = at("slider");
  const follows = shown === timeline.events.length - 1;
  timeline.add(event);
  remember(event.time, own(timeline.last, "totals"));
  slider.max = timeline.events.length - 1;
  if (follows) showMoment(timeline.events.length - 1);
}

function showMoment(index) {
  if (index === shown || index < 0 || index >= timeline.events.length) return;
  const passed = timeline.layouts.slice(Math.min(shown, index) + 1, Math.max(shown, index) + 1);
  layoutIsOld ||= passed.includes(true);
  state = timeline.seek(state, shown, index);
  [shown, isNew] = [index, true];
  time = timeline.events[index].time;
  const slider = at("slider");
  slider.value = index;
  const step = numberOf(own(state, "totals"), "step");
  const text = `${duration(time)}${step === undefined ? "" : `, step ${short(step)}`}`;
  slider.setAttribute("aria-valuetext", text);
  put(at("moment"), text);
}

function remember(seconds, totals) {
  for (const [name] of FIGURES) {
    const value = numberOf(totals, name);
    if (value === undefined) continue;
    if (!points.has(name)) points.set(name, []);
    points.get(name).push([seconds, value]);
    if (points.get(name).length > MOST_POINTS) points.set(name, points.get(name).filter((_, index) => index % 2 === 0));
  }
}

function drawFrame(now) {
  requestAnimationFrame(drawFrame);
  if (!isNew || !Object.keys(state).length) return;
  isNew = false;
  counts.frames += 1;
  const peers = own(state, "peers") ?? {};
  if (layoutIsOld) {
    const key = map.squares[chosen]?.key;
    map.layOut(peers);
    chosen = Math.max(0, map.squares.findIndex((square) => square.key === key));
    layoutIsOld = false;
    moveRing();
  } else map.draw(peers);
  put(at("clock"), timeline ? "" : duration(time));
  showChosen(peers);
  if (isDue("curves", now, CURVES_MS)) showFigures();
  if (isDue("tables", now, TABLES_MS)) showTables(peers);
  if (isDue("spoken", now, SPOKEN_MS)) put(at("spoken"), sentence());
}

// True if a part that is drawn less often is to be drawn now; if not, it will be when it is time.
function isDue(part, now, everyMs) {
  if (now >= due[part]) {
    due[part] = now + everyMs;
    return true;
  }
  clearTimeout(due[`${part}Later`]);
  due[`${part}Later`] = setTimeout(() => (isNew = true), due[part] - now);
  return false;
}

function showFigures() {
  const totals = own(state, "totals");
  for (const [name, label, variable] of FIGURES) {
    const value = numberOf(totals, name);
    if (value === undefined && !figures.has(name)) continue;
    if (!figures.has(name)) addFigure(name, label, variable);
    const { box, number, curve } = figures.get(name);
    put(box.firstChild, name === "items_per_s" ? capital(`${short(about.unit)} per s`) : label);
    put(number, value === undefined ? "–" : short(value));
    curve.draw(points.get(name) ?? [], time);
  }
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function addFigure(name, label, variable) {
  const box = made("div");
  const number = made("dd");
  const canvas = made("canvas", "", { "aria-hidden": "true" });
  const picture = made("dd", "", { "aria-hidden": "true" });
  picture.append(canvas);
  box.append(made("dt", label), number, picture);
  figures.set(name, { box, number, curve: new Curve(canvas, variable) });
  const order = FIGURES.map(([each]) => each).filter((each) => figures.has(each));
  at("figures").insertBefore(box, at("figures").children[order.indexOf(name)] ?? null);
}

function showTables(peers) {
  const pages = showPeers(at("peers-table"), peers, page);
  if (page >= pages) [page, isNew, due.tables] = [pages - 1, true, 0];
  put(at("page-place"), `${page + 1} of ${pages}`);
  at("page-before").disabled = page === 0;
  at("page-next").disabled = page + 1 >= pages;
  showLayers(at("layers"), peers, short(about.load));
  showGroups(at("groups"), own(state, "groups"));
  showNews(at("news"), own(state, "news"));
}

function sentence() {
  const totals = own(state, "totals");
  const told = FIGURES.map(([name, label]) => [label, numberOf(totals, name)]).filter(([, value]) => value !== undefined);
  return told.map(([label, value]) => `${label}: ${short(value)}`).join(", ");
}

function moveRing() {
  const square = map.squares[chosen];
  const ring = at("ring");
  ring.hidden = !square;
  if (!square) return;
  ring.style.width = ring.style.height = `${map.side + 4}px`;
  ring.style.transform = `translate(${square.x - 2}px, ${square.y - 2}px)`;
}

function choose(index) {
  chosen = index;
  isNew = true;
  moveRing();
  // An option of its own for each choice: a screen reader tells of another element, not of another text.
  const { key } = map.squares[index];
  const peer = own(own(state, "peers"), key);
  const option = made("div", nameOf(peer), { role: "option", id: `option-${index}`, "aria-selected": "true" });
  option.setAttribute("aria-posinset", index + 1);
  option.setAttribute("aria-setsize", map.squares.length);
  at("option").replaceChildren(option);
  at("map").setAttribute("aria-activedescendant", option.id);
}

function nameOf(peer) {
  const experts = Object.keys(own(peer, "experts") ?? {}).length;
  const parts = [`${short(own(peer, "role"))} ${short(own(peer, "name"))}`, short(own(peer, "state"))];
  return [...parts, experts ? `${experts} experts` : ""].filter(Boolean).join(", ");
}

function showChosen(peers) {
  const square = map.squares[chosen];
  const peer = square && own(peers, square.key);
  put(at("chosen-heading"), isObject(peer) ? short(own(peer, "name")) : "No peer chosen");
  fillFacts(at("chosen"), isObject(peer) ? factsOf(peer) : []);
}

function play(isOn) {
  cancelAnimationFrame(playing);
  playing = null;
  put(at("play"), isOn ? "Pause" : "Play");
  at("play").setAttribute("aria-pressed", String(isOn));
  if (!isOn) return;
  const last = timeline.events.length - 1;
  if (shown >= last) showMoment(0);
  const [begin, seconds] = [time, Math.max(timeline.events[last].time, 1e-9)];
  const start = performance.now();
  const tick = (now) => {
    const wanted = begin + ((now - start) / 1000) * (seconds / PLAYED_S);
    let index = shown;
    while (index < timeline.events.length - 1 && timeline.events[index + 1].time <= wanted) index += 1;
    showMoment(index);
    if (index >= timeline.events.length - 1) play(false);
    else playing = requestAnimationFrame(tick);
  };
  playing = requestAnimationFrame(tick);
}

function say(kind, text) {
  at("connection").dataset.kind = kind;
  put(at("connection"), text);
}

function turnPage(by) {
  page = Math.max(0, page + by);
  [isNew, due.tables] = [true, 0];
}

function redraw() {
  map.readColours();
  [layoutIsOld, isNew, due.curves] = [true, true, 0];
}

at("map").addEventListener("keydown", (event) => {
  if (!KEYS.includes(event.key) || !map.squares.length) return;
  event.preventDefault();
  choose(map.after(chosen, event.key));
});
at("map").addEventListener("focus", () => map.squares.length && choose(chosen));
at("map").addEventListener("pointerdown", (event) => {
  const bounds = at("map-canvas").getBoundingClientRect();
  const found = map.at(event.clientX - bounds.left, event.clientY - bounds.top);
  if (found !== undefined) choose(found);
});
at("page-before").addEventListener("click", () => turnPage(-1));
at("page-next").addEventListener("click", () => turnPage(1));
at("play").addEventListener("click", () => play(playing === null));
at("slider").addEventListener("input", () => {
  play(false);
  showMoment(Number(at("slider").value));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width !== width) redraw();
  width = contentRect.width;
}).observe(at("map"));

const source = new EventSource("events");
source.onmessage = ({ data }) => take(JSON.parse(data));
source.onerror = () => {
  const isOver = source.readyState === EventSource.CLOSED;
  say("lost", isOver ? "not connected: reload to try again" : "connection lost, trying again");
};
requestAnimationFrame(drawFrame);
