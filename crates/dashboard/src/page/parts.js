// Parts of views: groups of charts, tiles, bars, tables.

// Charts of the usual metrics: the section, then for each chart its title and its metrics with
// their style.
const SECTIONS = [
  ["Loss", [
    ["Loss", [["loss", "line"], ["evaluation.loss", "dots"]]],
    ["Validation perplexity", [["evaluation.perplexity", "line"]]],
    ["Validation bits per byte", [["evaluation.bits_per_byte", "line"]]],
  ]],
  ["Optimizer", [
    ["Gradient norm", [["grad_norm", "line"]]],
    ["Learning rate", [["lr", "line"]]],
    ["Loss scale", [["loss_scale", "line"]]],
  ]],
  ["Speed", [
    ["Tokens per second", [["tps", "line"]]],
    ["Utilisation (MFU)", [["mfu", "line"]]],
    ["Step time", [["step_s", "line"], ["predicted_step_s", "dashed"]]],
  ]],
  ["Waiting", [
    ["Waiting for data", [["data_wait_s", "line"]]],
    ["Exposed communication", [["comm_exposed_s", "line"], ["comm_s", "dashed"]]],
  ]],
  ["Memory", [
    ["Peak memory", [["mem_peak_bytes", "line"], ["predicted_mem_peak_bytes", "dashed"]]],
    ["Memory by purpose", "mem_peak."],
    ["Reserved memory", [["mem_reserved_bytes", "line"]]],
  ]],
];
const UNLISTED = new Set(["step", "tokens", "skipped", "evaluation.step", "evaluation.tokens", "evaluation.seconds", "monitor.step", "monitor.unix_s", "monitor.time_s", "monitor.time"]);

// The charts of `runs` (name and colour) as sections. Charts are made when they come into view.
function chartSections(source, runs, names, filter) {
  const known = new Set(names);
  const used = new Set(UNLISTED);
  const sections = [];
  const isSingle = runs.length === 1;
  const matches = (title, metrics) => {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (title + " " + metrics.join(" ")).toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const makeChart = (title, metrics, colourByMetric) => {
    const present = metrics.filter(([name]) => known.has(name));
    present.forEach(([name]) => used.add(name));
    if (!present.length || !matches(title, present.map(([name]) => name))) return null;
    const series = [];
    runs.forEach((run) => present.forEach(([metric, style], index) => series.push({
      run: run.name, metric, style,
      colour: colourByMetric ? colour(index) : style === "dots" && isSingle ? colour(1) : style === "dashed" && isSingle ? themeColours().muted : run.colour,
      name: isSingle ? metricTitle(metric) : run.name + (style === "line" ? "" : ", " + metricTitle(metric).toLowerCase()),
    })));
    const axis = present[0][0].startsWith("monitor.") ? "time" : "step";
    const chart = new Chart(source, { title, series, axis, unit: metricUnit(present[0][0]) });
    if (isSingle && present.length > 1) {
      chart.box.append(element("div.legend", null, present.map(([metric], index) =>
        element("span", null, element("i.dot", { style: { background: series[index].colour } }), metricTitle(metric)))));
    }
    return chart;
  };
  const addSection = (title, list, isOpen = true) => {
    const found = list.filter(Boolean);
    if (!found.length) return;
    sections.push(element("details.section", { open: isOpen }, element("summary", null, title, element("span.muted", null, " " + found.length)),
      element("div.grid", null, found.map((chart) => chart.box))));
  };
  for (const [title, list] of SECTIONS) {
    addSection(title, list.map(([name, metrics]) => {
      if (typeof metrics !== "string") return makeChart(name, metrics, false);
      const purposes = names.filter((metric) => metric.startsWith(metrics)).map((metric) => [metric, "line"]);
      if (isSingle) return makeChart(name, purposes, true);
      purposes.forEach(([metric]) => used.add(metric));
      return null;
    }));
  }
  const rest = names.filter((name) => !used.has(name));
  const monitor = rest.filter((name) => name.startsWith("monitor."));
  const single = (name) => makeChart(metricTitle(name), [[name, "line"]], false);
  addSection("Machine", groupedMonitor(monitor).map(([title, metrics]) => makeChart(title, metrics.map((name) => [name, "line"]), isSingle && metrics.length > 1)));
  addSection("More", rest.filter((name) => !name.startsWith("monitor.")).map(single));
  return sections;
}

// Numbers of the machine that belong together, such as those of each core, share a chart.
function groupedMonitor(names) {
  const groups = new Map();
  for (const name of names) {
    const group = name.replace(/\.\d+$/, "");
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  return [...groups].map(([group, metrics]) => [metricTitle(group), metrics]);
}

function removeCharts(within) {
  for (const chart of [...charts]) if (within.contains(chart.box)) chart.remove();
}

function stateMark(run) {
  return element("span.state." + run.state, { title: run.state }, element("i", null), run.state);
}

function tile(title, value, note, quality) {
  return element("div.tile", null, element("span", null, title), element("b", null, value), note ? element("small" + (quality ? "." + quality : ""), null, note) : null);
}

function differenceText(measured, predicted, unit) {
  if (!measured || !predicted) return null;
  const share = 100 * (measured / predicted - 1);
  if (Math.abs(share) < 0.05) return "as predicted";
  return `predicted ${formatUnit(predicted, unit)} (${share < 0 ? "−" : "+"}${Math.abs(share).toFixed(Math.abs(share) < 10 ? 1 : 0)} %)`;
}

function tiles(details) {
  const { run } = details;
  const { last } = run;
  const stepS = run.median_step_s || last.step_s;
  const left = run.steps && run.state === "running" && stepS ? (run.steps - run.step) * stepS : null;
  const list = [];
  const part = run.steps ? Math.min(1, run.step / run.steps) : null;
  list.push(element("div.tile.wide", null, element("span", null, "Step"),
    element("b", null, run.step.toLocaleString("en"), run.steps ? element("em", null, " / " + run.steps.toLocaleString("en")) : null),
    part === null ? null : element("progress", { value: part, max: 1 }),
    element("small", null, left !== null ? formatSeconds(left) + " left" : "last record " + formatAgo(run.updated_s))));
  list.push(tile("Loss", formatNumber(last.loss), last.grad_norm === undefined ? null : "gradient norm " + formatNumber(last.grad_norm, 3)));
  if (run.validation_loss !== null) list.push(tile("Validation loss", formatNumber(run.validation_loss), "perplexity " + formatNumber(Math.exp(run.validation_loss))));
  if (last.tps !== undefined) list.push(tile("Tokens per second", formatCount(last.tps), last.tokens === undefined ? null : formatCount(last.tokens) + " tokens so far"));
  if (last.mfu !== undefined && Number.isFinite(last.mfu)) list.push(tile("Utilisation", formatUnit(last.mfu, "share"), last.tflops === undefined ? null : formatNumber(last.tflops, 3) + " TFLOP/s"));
  if (stepS) {
    const text = differenceText(stepS, last.predicted_step_s, "s");
    list.push(tile("Step time", formatSeconds(stepS), text, text && stepS > 1.2 * last.predicted_step_s ? "off" : ""));
  }
  if (last.mem_peak_bytes !== undefined) {
    const text = differenceText(last.mem_peak_bytes, last.predicted_mem_peak_bytes, "bytes");
    list.push(tile("Peak memory", formatBytes(last.mem_peak_bytes), text, text && last.mem_peak_bytes > 1.05 * last.predicted_mem_peak_bytes ? "off" : ""));
  }
  return element("div.tiles", null, list);
}

// Bars of predicted above measured numbers.
function comparison(title, unit, predicted, measured) {
  const keys = [...new Set([...Object.keys(predicted), ...Object.keys(measured)])];
  const size = (key) => Math.max(predicted[key] || 0, measured[key] || 0);
  keys.sort((a, b) => size(b) - size(a));
  const most = Math.max(...keys.map(size));
  if (!(most > 0)) return null;
  const shown = keys.filter((key) => size(key) > 0.002 * most);
  const bar = (value, kind) => element("div.bar." + kind, null,
    element("i", { style: { width: `${(100 * (value || 0)) / most}%` } }), element("span", null, value === undefined ? "–" : formatUnit(value, unit)));
  return element("section.card", null, element("h2", null, title),
    element("div.legend", null, element("span", null, element("i.dot.predicted", null), "predicted"), element("span", null, element("i.dot.measured", null), "measured")),
    element("div.bars", null, shown.map((key) => [element("label", null, key.replace(/_/g, " ")), element("div", null, bar(predicted[key], "predicted"), bar(measured[key], "measured"))])));
}

function alertCard(alerts) {
  if (!alerts.length) return null;
  return element("section.card.alerts", { role: "status" }, element("h2", null, "Alerts"),
    element("ul", null, alerts.map((alert) => element("li." + alert.level, null, element("i", null), element("span", null, alert.step ? `step ${alert.step.toLocaleString("en")}: ` : "", alert.text)))));
}

// The verdicts of `trainyard doctor RUN --json`.
function verdictCard(report) {
  const verdicts = report && report.verdicts;
  if (!Array.isArray(verdicts) || !verdicts.length) return null;
  const one = ({ cause, severity, summary, saving, advice }) => element("li", null,
    element("b", null, `${formatSetting(cause).replace(/_/g, " ")} (${formatSetting(severity)})`), ": ", formatSetting(summary),
    saving && element("div.muted", null, `saves ${formatSeconds(saving.seconds)} of ${formatSeconds(saving.step_seconds)} a step`),
    (advice || []).map(({ text, setting }) => element("div.muted", null, "→ " + formatSetting(text), setting && `: ${setting}`)));
  return element("section.card.verdicts", null, element("h2", null, "Verdicts"), element("ol", null, verdicts.slice(0, 20).map(one)));
}

function sampleCard(samples) {
  if (!samples.length) return null;
  const text = element("pre", null, "");
  const label = element("span.muted", null, "");
  const show = (index) => {
    text.textContent = samples[index].text || "";
    label.textContent = "after step " + Number(samples[index].step || 0).toLocaleString("en");
  };
  const slider = element("input", { type: "range", min: "0", max: String(samples.length - 1), value: String(samples.length - 1), "aria-label": "sample", oninput: () => show(Number(slider.value)) });
  slider.hidden = samples.length < 2;
  show(samples.length - 1);
  return element("section.card", null, element("div.row", null, element("h2", null, "Sample text"), slider, label), text);
}

// A table of settings that can be searched. `runs` are their configurations.
function settingsCard(title, runs, keys) {
  const body = element("tbody", null);
  const fill = (text) => body.replaceChildren(...keys.filter((key) => key.includes(text)).map((key) => {
    const values = runs.map((run) => formatSetting(run.config[key]));
    return element("tr", null, element("th", { scope: "row" }, key), values.map((value) => element("td", null, value)));
  }));
  fill("");
  const search = element("input", { type: "search", placeholder: "search settings", "aria-label": "search settings", oninput: () => fill(search.value.trim()) });
  return element("section.card", null, element("div.row", null, element("h2", null, title), search),
    element("div.scroll", null, element("table.settings", null,
      runs.length > 1 ? element("thead", null, element("tr", null, element("th", null, "setting"), runs.map((run) => element("th", null, run.name)))) : null, body)));
}
