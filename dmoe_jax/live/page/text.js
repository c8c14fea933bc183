// Numbers and times as people read them.

const small = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const large = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, notation: "compact" });

// Compares texts as people do: layer2 before layer10.
export const byNumbers = new Intl.Collator("en", { numeric: true }).compare;

export function short(value) {
  if (typeof value === "string") return value;
  if (typeof value !== "number" || !Number.isFinite(value)) return "";
  return Math.abs(value) < 1e6 ? small.format(Number.isInteger(value) ? value : round(value)) : large.format(value);
}

function round(value) {
  return Number(value.toPrecision(Math.abs(value) >= 1000 ? 4 : 3));
}

export function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = String(Math.floor(seconds % 60)).padStart(2, "0");
  if (minutes < 60) return `${minutes}:${rest} min`;
  return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest} h`;
}

export function words(name) {
  const unit = name.match(/_(s|mb)$/) && !name.endsWith("_per_s") ? { s: " (s)", mb: " (MB)" }[name.split("_").at(-1)] : "";
  return (unit ? name.slice(0, name.lastIndexOf("_")) : name).replaceAll("_", " ") + unit;
}

// Set a text only if it is another one: a node that stays as it is costs no layout, and is not read out again.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function made(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
