// Numbers, times and names in words, and the making of elements.

const METRICS = {
  "loss": ["Loss", ""],
  "evaluation.loss": ["Validation loss", ""],
  "evaluation.perplexity": ["Validation perplexity", ""],
  "evaluation.bits_per_byte": ["Validation bits per byte", ""],
  "lr": ["Learning rate", ""],
  "grad_norm": ["Gradient norm", ""],
  "loss_scale": ["Loss scale", ""],
  "skipped": ["Skipped steps", ""],
  "epoch": ["Epochs", ""],
  "tokens": ["Tokens", "count"],
  "tps": ["Tokens per second", "count"],
  "tflops": ["TFLOP/s", ""],
  "mfu": ["Utilisation (MFU)", "share"],
  "step_s": ["Step time", "s"],
  "predicted_step_s": ["predicted", "s"],
  "data_wait_s": ["Waiting for data", "s"],
  "comm_s": ["Exchanging", "s"],
  "comm_exposed_s": ["Exposed communication", "s"],
  "mem_peak_bytes": ["Peak memory", "bytes"],
  "mem_reserved_bytes": ["Reserved memory", "bytes"],
  "predicted_mem_peak_bytes": ["predicted", "bytes"],
};

function metricTitle(name) {
  if (METRICS[name]) return METRICS[name][0];
  return name.replace(/^(monitor|evaluation|mem_peak)\./, "").replace(/[_.]/g, " ");
}

function metricUnit(name) {
  if (METRICS[name]) return METRICS[name][1];
  if (/bytes(_per_s)?$/.test(name) || name.startsWith("mem_peak.")) return "bytes";
  if (/_s$/.test(name)) return "s";
  return "";
}

function formatNumber(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  let text;
  if (size >= 1e6 || size < 1e-3) {
    text = value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  } else if (size >= 1000) {
    text = Math.round(value).toLocaleString("en");
  } else {
    text = String(Number(value.toPrecision(digits)));
  }
  return text.replace("-", "−");
}

function formatCount(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6]]) {
    if (Math.abs(value) >= size) return String(Number((value / size).toPrecision(3))) + " " + unit;
  }
  return formatNumber(Math.round(value * 100) / 100, 4);
}

function formatBytes(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [unit, power] of [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]]) {
    if (Math.abs(value) >= 2 ** power) return Number((value / 2 ** power).toPrecision(4)) + " " + unit;
  }
  return Number(value.toPrecision(4)) + " B";
}

function formatSeconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return Number((value * 1e6).toPrecision(3)) + " µs";
  if (size < 1) return Number((value * 1e3).toPrecision(4)) + " ms";
  if (size < 120) return Number(value.toPrecision(4)) + " s";
  const minutes = Math.round(value / 60);
  if (minutes < 120) return minutes + " min";
  return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

function formatUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "bytes") return formatBytes(value);
  if (unit === "s") return formatSeconds(value);
  if (unit === "share") return Number((100 * value).toPrecision(3)) + " %";
  if (unit === "count") return formatCount(value);
  if (unit === "time") return formatClock(value);
  return formatNumber(value);
}

function formatClock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

function formatAgo(seconds) {
  const ago = Date.now() / 1000 - seconds;
  if (ago < 10) return "now";
  if (ago < 90) return Math.round(ago) + " s ago";
  if (ago < 5400) return Math.round(ago / 60) + " min ago";
  if (ago < 172800) return Math.round(ago / 3600) + " h ago";
  return new Date(seconds * 1000).toISOString().slice(0, 10);
}

function formatSetting(value) {
  if (value === undefined) return "–";
  if (Array.isArray(value)) return value.map(formatSetting).join(", ");
  if (value !== null && typeof value === "object") return JSON.stringify(value);
  return String(value);
}

// Makes an element: element("div.card", {title: "x"}, child, ...). Texts are never markup.
function element(kind, attributes, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag || "div");
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const PALETTE = 10;

// The colour of a run or a metric, by its number.
function colour(number) {
  return getComputedStyle(document.documentElement).getPropertyValue("--c" + (number % PALETTE)).trim();
}
