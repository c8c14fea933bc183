// The map of peers: a square for each node, in it a cell for each expert, coloured by its load; circles for others. Only cells whose colour has
// changed are drawn, colour by colour, so that thousands of them cost a few milliseconds.

import { byNumbers } from "./text.js";
import { isObject, own } from "./timeline.js";

export const ROLES = ["node", "trainer", "averager", "collaborator", "auxiliary"];

const LEVELS = 48; // colours of the ramp
const GAP = 4;
const LABEL = 20; // pixels for the line above the peers of a role
const [LARGEST, SMALLEST] = [56, 13]; // sides of a square
const MOST_HEIGHT = 430; // pixels, if squares need not be smaller than the smallest for it
const FAIR_MEMORY = 0.9; // weight of the past in the mean load: colours must not flicker with it

export class HeatMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d", { alpha: false });
    this.squares = []; // {key, x, y}, in the order in which arrow keys go
    this.side = LARGEST;
    this.columns = 1;
    this.fair = 0; // the mean load of all experts that do something
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const stops = [0, 1, 2].map((index) => components(colour(`--load-${index}`)));
    this.ramp = Array.from({ length: LEVELS }, (_, level) => mixed(stops, level / (LEVELS - 1)));
    this.colours = Object.fromEntries(ROLES.map((role) => [role, colour(`--${role}`)]));
    this.colours.node = colour("--faint");
    [this.paper, this.grey, this.lost] = ["--card", "--grey", "--lost"].map(colour);
  }

  // Find a place for every peer and expert, and draw them all.
  layOut(peers) {
    const byRole = ROLES.map((role) => Object.keys(peers).filter((key) => own(peers[key], "role") === role));
    this.groups = ROLES.map((role, index) => ({ role, keys: byRole[index].sort(inOrder(peers)) })).filter(
      ({ keys }) => keys.length,
    );
    const width = this.canvas.clientWidth;
    this.side = LARGEST;
    while (this.side > SMALLEST && this.height(width) > MOST_HEIGHT) this.side -= 1;
    this.columns = this.columnsOf(width);
    const scale = window.devicePixelRatio || 1;
    const height = Math.max(this.height(width), LABEL);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.pen.fillStyle = this.paper;
    this.pen.fillRect(0, 0, width, height);
    this.place();
    for (const square of this.squares) {
      square.cells = cellsOf(square, peers[square.key], this.side);
      this.frame(square, peers[square.key]);
    }
    this.cells = this.squares.flatMap(({ cells }) => cells);
    this.fair = 0;
    this.drawLoad();
  }

  columnsOf(width) {
    return Math.max(1, Math.floor((width + GAP) / (this.side + GAP)));
  }

  height(width) {
    const columns = this.columnsOf(width);
    return this.groups.reduce((sum, { keys }) => sum + LABEL + Math.ceil(keys.length / columns) * (this.side + GAP), 0);
  }

  place() {
    this.squares = [];
    this.pen.font = "12px system-ui, sans-serif";
    let y = 0;
    for (const { role, keys } of this.groups) {
      this.pen.fillStyle = this.grey;
      this.pen.fillText(`${keys.length} ${plural(role, keys.length)}`, 0, y + 13);
      y += LABEL;
      keys.forEach((key, index) => {
        const [row, column] = [Math.floor(index / this.columns), index % this.columns];
        const step = this.side + GAP;
        this.squares.push({ key, role, x: column * step, y: y + row * step, state: "" });
      });
      y += Math.ceil(keys.length / this.columns) * (this.side + GAP);
    }
  }

  // What is under the cells of a peer; a vermilion frame if it is not well.
  frame(square, peer) {
    square.state = own(peer, "state") ?? "";
    const isLost = ["no answer", "killed"].includes(square.state);
    this.pen.fillStyle = this.paper;
    this.pen.fillRect(square.x, square.y, this.side, this.side);
    this.fill(square, isLost ? this.lost : this.colours[square.role], 0);
    if (isLost) this.fill(square, this.paper, edgeOf(this.side));
    for (const cell of square.cells) cell.level = -1;
  }

  // Fill a node's square, or the circle of another peer, but for an edge of some pixels.
  fill({ role, x, y }, colour, edge) {
    const inner = this.side - 2 * edge;
    this.pen.fillStyle = colour;
    this.pen.beginPath();
    if (role === "node") this.pen.roundRect(x + edge, y + edge, inner, inner, Math.min(4, this.side / 6));
    else this.pen.arc(x + this.side / 2, y + this.side / 2, Math.max(1, Math.min(inner / 2, 11 - edge)), 0, 2 * Math.PI);
    this.pen.fill();
  }

  // Draw what has changed since the last time. `peers` are the same objects as in `layOut`, or others of that layout.
  draw(peers) {
    for (const square of this.squares) {
      const peer = peers[square.key];
      if ((own(peer, "state") ?? "") !== square.state) this.frame(square, peer);
    }
    for (const cell of this.cells) cell.experts = own(peers[cell.owner.key], "experts") ?? {};
    this.drawLoad();
  }

  drawLoad() {
    let [sum, count] = [0, 0];
    for (const cell of this.cells) {
      const load = cell.experts[cell.uid]?.[1];
      cell.load = typeof load === "number" && load > 0 ? load : 0;
      if (cell.load) [sum, count] = [sum + cell.load, count + 1];
    }
    const mean = count ? sum / count : 0;
    this.fair = this.fair && mean ? FAIR_MEMORY * this.fair + (1 - FAIR_MEMORY) * mean : mean;
    const byLevel = new Map();
    for (const cell of this.cells) {
      const level = Math.round((LEVELS - 1) * (cell.load ? cell.load / (cell.load + this.fair) : 0));
      if (level === cell.level) continue;
      cell.level = level;
      if (!byLevel.has(level)) byLevel.set(level, []);
      byLevel.get(level).push(cell);
    }
    for (const [level, cells] of byLevel) {
      this.pen.fillStyle = this.ramp[level];
      for (const cell of cells) this.pen.fillRect(cell.x, cell.y, cell.width, cell.width);
    }
  }

  // Number of the square at a place, or undefined.
  at(x, y) {
    const found = this.squares.findIndex(
      (square) => x >= square.x && x < square.x + this.side && y >= square.y && y < square.y + this.side,
    );
    return found < 0 ? undefined : found;
  }

  // Number of the square that a key leads to from number `index`.
  after(index, key) {
    const { squares } = this;
    const last = squares.length - 1;
    if (key === "Home") return 0;
    if (key === "End") return last;
    if (key === "ArrowLeft") return Math.max(0, index - 1);
    if (key === "ArrowRight") return Math.min(last, index + 1);
    const { x, y } = squares[index];
    const rows = squares.filter((square) => (key === "ArrowUp" ? square.y < y : square.y > y));
    if (!rows.length) return index;
    const nearest = key === "ArrowUp" ? rows.at(-1).y : rows[0].y;
    const row = rows.filter((square) => square.y === nearest);
    return squares.indexOf(row.reduce((best, each) => (Math.abs(each.x - x) < Math.abs(best.x - x) ? each : best)));
  }
}

// Pixels of the frame around the cells of a node.
function edgeOf(side) {
  return Math.max(2, Math.round(side / 16));
}

export function plural(role, count) {
  if (count === 1) return role;
  return role === "auxiliary" ? "auxiliaries" : `${role}s`;
}

// Compares keys of peers by their names: ids digit by digit, other names with the numbers in them.
export function inOrder(peers) {
  const name = (key) => `${own(peers[key], "name") ?? ""} ${key}`;
  const isId = /^[0-9a-f]{8} /;
  return (left, right) => {
    const [one, other] = [name(left), name(right)];
    if (isId.test(one) && isId.test(other)) return one < other ? -1 : Number(one > other);
    return byNumbers(one, other);
  };
}

function cellsOf(owner, peer, side) {
  const experts = own(peer, "experts");
  if (!isObject(experts)) return [];
  const uids = Object.keys(experts).sort(byNumbers);
  const across = Math.ceil(Math.sqrt(uids.length)) || 1;
  const inner = side - 2 * edgeOf(side);
  const gap = inner / across >= 6 ? 1 : 0;
  const width = Math.max(1, Math.floor((inner - gap * (across - 1)) / across));
  const begin = Math.floor((side - (width * across + gap * (across - 1))) / 2);
  return uids.map((uid, index) => ({
    owner,
    uid,
    experts,
    load: 0,
    level: -1,
    x: owner.x + begin + (index % across) * (width + gap),
    y: owner.y + begin + Math.floor(index / across) * (width + gap),
    width,
  }));
}

// Red, green and blue of a colour written #rrggbb.
function components(text) {
  return [1, 3, 5].map((begin) => Number.parseInt(text.slice(begin, begin + 2), 16));
}

function mixed([low, middle, high], share) {
  const [from, to, part] = share < 0.5 ? [low, middle, 2 * share] : [middle, high, 2 * share - 1];
  return `rgb(${from.map((value, index) => Math.round(value + (to[index] - value) * part)).join(" ")})`;
}
