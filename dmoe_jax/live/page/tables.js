// Tables and lists of the page. Whatever strangers say becomes text, by `textContent` alone.

import { inOrder, ROLES } from "./heatmap.js";
import { byNumbers, duration, made, put, short, words } from "./text.js";
import { isObject, numberOf, own } from "./timeline.js";

export const ROWS_OF_A_PAGE = 25;

const FACTS = ["step", "loss", "items_per_s", "calls_per_s", "waiting_rows", "failed_calls", "sent_mb"];
const PEERS_HEAD = ["peer", "role", "state", "address", "experts", ...FACTS.map(words)];
const LAYERS_HEAD = ["layer", "experts", "in use", "per s", "busiest", "share of the busiest", "entropy"];
const TEXTS = new Set(["peer", "role", "state", "address", "layer"]);

// Fill a table with rows of texts. Cells that are there already stay, and are changed only where their text is another.
export function fillTable(table, caption, head, rows) {
  if (!table.tHead) {
    table.append(made("caption"), made("thead"), made("tbody"));
    const row = table.tHead.insertRow();
    for (const name of head) row.append(made("th", name, { scope: "col", class: TEXTS.has(name) ? "text" : "number" }));
  }
  put(table.caption, caption);
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((texts, index) => {
    const row = body.rows[index] ?? body.insertRow();
    texts.forEach((text, column) => {
      let cell = row.cells[column];
      if (!cell) {
        const kind = TEXTS.has(head[column]) ? "text" : "number";
        cell = column ? made("td", "", { class: kind }) : made("th", "", { scope: "row", class: kind });
        row.append(cell);
      }
      put(cell, text);
      if (column === 2) cell.classList.toggle("lost", text === "no answer" || text === "killed");
    });
  });
}

// Show a page of the peers; returns the number of pages.
export function showPeers(table, peers, page) {
  const order = inOrder(peers);
  const role = (key) => ROLES.indexOf(own(peers[key], "role"));
  const keys = Object.keys(peers).sort((left, right) => role(left) - role(right) || order(left, right));
  const shown = keys.slice(page * ROWS_OF_A_PAGE, (page + 1) * ROWS_OF_A_PAGE);
  const rows = shown.map((key) => {
    const peer = peers[key];
    const [experts, facts] = [own(peer, "experts"), own(peer, "facts")];
    const texts = ["name", "role", "state", "address"].map((name) => short(own(peer, name)));
    const count = isObject(experts) ? Object.keys(experts).length : numberOf(facts, "experts");
    return [...texts, short(count), ...FACTS.map((name) => short(own(facts, name)))];
  });
  fillTable(table, `Peers ${keys.length ? page * ROWS_OF_A_PAGE + 1 : 0} to ${page * ROWS_OF_A_PAGE + rows.length}`, PEERS_HEAD, rows);
  return Math.max(1, Math.ceil(keys.length / ROWS_OF_A_PAGE));
}

// Show how the experts of each layer share the work; copies of an expert count together.
export function showLayers(table, peers, unit) {
  const layers = new Map();
  for (const peer of Object.values(peers)) {
    for (const [uid, load] of Object.entries(own(peer, "experts") ?? {})) {
      const name = uid.split(".")[0];
      if (!layers.has(name)) layers.set(name, new Map());
      const experts = layers.get(name);
      const rate = Number.isFinite(load?.[1]) ? load[1] : 0;
      experts.set(uid, (experts.get(uid) ?? 0) + rate);
    }
  }
  const names = [...layers.keys()].sort(byNumbers);
  fillTable(table, `Load of experts, in ${unit} per second`, LAYERS_HEAD, names.map((name) => layerRow(name, layers.get(name))));
}

function layerRow(name, experts) {
  const entries = [...experts];
  const sum = entries.reduce((total, [, rate]) => total + rate, 0);
  const [busiest, most] = entries.reduce((best, each) => (each[1] > best[1] ? each : best));
  const shares = entries.map(([, rate]) => rate / sum).filter((share) => share > 0);
  const entropy = shares.reduce((total, share) => total - share * Math.log(share), 0) / Math.log(entries.length);
  if (!sum) return [name, short(entries.length), "0", "0", "", "", ""];
  const figures = [entries.length, shares.length, sum].map(short);
  const evenness = entries.length > 1 ? entropy.toFixed(3) : "";
  return [name, ...figures, busiest, `${((100 * most) / sum).toFixed(1)} %`, evenness];
}

// Fill a list of names and values.
export function fillFacts(list, facts) {
  while (list.children.length > 2 * facts.length) list.lastElementChild.remove();
  facts.forEach(([name, value], index) => {
    if (!list.children[2 * index]) list.append(made("dt"), made("dd"));
    put(list.children[2 * index], name);
    put(list.children[2 * index + 1], value);
  });
}

export function factsOf(peer) {
  const facts = Object.entries(own(peer, "facts") ?? {}).map(([name, value]) => [words(name), short(value)]);
  const experts = Object.entries(own(peer, "experts") ?? {});
  const busiest = experts.sort(([, left], [, right]) => (right?.[1] ?? 0) - (left?.[1] ?? 0)).slice(0, 8);
  const told = ["role", "state", "address"].map((name) => [name, short(own(peer, name))]).filter(([, text]) => text);
  return [...told, ...facts, ...busiest.map(([uid, load]) => [uid, `${short(load?.[0])}, ${short(load?.[1])} per s`])];
}

function fillList(list, items, fill) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  items.forEach((item, index) => {
    if (!list.children[index]) list.append(made("li"));
    fill(list.children[index], item);
  });
}

export function showNews(list, news) {
  const lines = Array.isArray(news) ? [...news].reverse() : [];
  fillList(list, lines.length ? lines : [[undefined, "nothing yet"]], (item, line) => {
    if (!item.firstChild) item.append(made("span", "", { class: "when" }), made("span"));
    put(item.firstChild, Number.isFinite(line?.[0]) ? duration(line[0]) : "");
    put(item.lastChild, short(line?.[1]));
  });
}

export function showGroups(list, groups) {
  const entries = Object.entries(isObject(groups) ? groups : {});
  fillList(list, entries.length ? entries : [["nobody averages", {}]], (item, [key, group]) => {
    if (!item.firstChild) item.append(made("span"), made("span", "", { class: "aside" }), made("progress"));
    put(item.children[0], key);
    const told = Object.entries(group).filter(([, value]) => short(value));
    put(item.children[1], told.map(([name, value]) => ` ${words(name)} ${short(value)}`).join(","));
    const [gathered, target] = [numberOf(group, "gathered"), numberOf(group, "target")];
    item.children[2].hidden = !target;
    item.children[2].setAttribute("aria-label", `${key}: gathered`);
    item.children[2].max = target || 1;
    item.children[2].value = Math.min(gathered ?? 0, target || 1);
  });
}
