// States of a swarm, from the events that the server sends: see dmoe_jax/live/events.py.

const STATES_BETWEEN_COPIES = 64;

// Apply a merge patch (RFC 7396) to a state, in place.
export function merge(state, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (name === "__proto__") continue; // a stranger's name must not reach every object
    if (value === null) delete state[name];
    else if (isObject(value)) merge(isObject(own(state, name)) ? state[name] : (state[name] = {}), value);
    else state[name] = value;
  }
  return state;
}

export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function own(object, name) {
  return isObject(object) && Object.hasOwn(object, name) ? object[name] : undefined;
}

export function numberOf(object, name) {
  const value = own(object, name);
  return typeof value === "number" && Number.isFinite(value) ? value : undefined;
}

// True if a patch brings or takes a peer or an expert, so that the map must be laid out anew.
export function changesLayout(state, patch) {
  for (const [key, peer] of Object.entries(own(patch, "peers") ?? {})) {
    const before = own(own(state, "peers"), key);
    if (!isObject(peer) || before === undefined || own(peer, "role") !== undefined) return true;
    for (const [uid, load] of Object.entries(own(peer, "experts") ?? {})) {
      if (load === null || own(own(before, "experts"), uid) === undefined) return true;
    }
  }
  return false;
}

// The state after an event. `state` may be changed for it; the event stays as it is: lists in it are never written to.
export function after(state, event) {
  return event.what === "all" ? structuredClone(event.state) : merge(state, event.state);
}

// All states of a recording. Each is kept as its patch, and every few ones also whole, so that any is soon there again.
export class Timeline {
  constructor() {
    this.events = [];
    this.layouts = []; // of each event: true if the map must be laid out anew after it
    this.copies = []; // of the states before the events 0, 64, 128, ...
    this.last = {};
  }

  add(event) {
    if (this.events.length % STATES_BETWEEN_COPIES === 0) this.copies.push(structuredClone(this.last));
    this.layouts.push(event.what === "all" || changesLayout(this.last, event.state));
    this.events.push(event);
    this.last = after(this.last, event);
  }

  // Turn the state after event number `from` into that after event number `to`; returns it.
  seek(state, from, to) {
    const copy = Math.floor(to / STATES_BETWEEN_COPIES);
    let next = from + 1;
    if (to < from || next < copy * STATES_BETWEEN_COPIES) {
      state = structuredClone(this.copies[copy]);
      next = copy * STATES_BETWEEN_COPIES;
    }
    for (; next <= to; next += 1) {
      state = after(state, this.events[next]);
    }
    return state;
  }
}
