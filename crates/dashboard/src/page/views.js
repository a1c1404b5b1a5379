// The views: all curves compared, one run, the list as a table, and the difference of settings.

class CompareView {
  constructor(app) {
    this.app = app;
    this.box = element("div.view", null);
    this.filter = "";
    this.render();
  }

  async render() {
    const { app } = this;
    const names = app.selectedNames();
    const key = names.join("\n") + "\n" + this.filter;
    if (key === this.key) return;
    this.key = key;
    if (!names.length) {
      removeCharts(this.box);
      this.box.replaceChildren(element("p.empty", null, app.runs.size ? "Select runs in the list to see their curves." : "No runs yet. They appear here when a training begins."));
      return;
    }
    const details = await Promise.all(names.map((name) => app.details(name)));
    if (key !== this.key) return;
    const metrics = [...new Set(details.flatMap((one) => one.metrics))];
    removeCharts(this.box);
    const runs = names.map((name) => ({ name, colour: app.colourOf(name) }));
    const search = element("input", { type: "search", placeholder: "search metrics", "aria-label": "search metrics", value: this.filter });
    search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => {
        this.filter = search.value.trim();
        this.render().then(() => {
          const next = this.box.querySelector("input[type=search]");
          next.focus();
          next.setSelectionRange(next.value.length, next.value.length);
        });
      }, 200);
    });
    const diff = runs.length > 1 ? element("a.button", { href: "#/diff" }, "Settings that differ") : null;
    this.box.replaceChildren(controls(element("div.row.grow", null, search, diff)), ...chartSections(app.source, runs, metrics, this.filter));
    loadInView();
  }

  append(news) {
    charts.forEach((chart) => chart.append(news));
    const known = this.app.known.get(news.run);
    if (known && Object.keys(news.values).some((metric) => !known.metrics.includes(metric))) {
      this.app.known.delete(news.run);
      this.key = null;
      this.render();
    }
  }

  update() {
    this.render();
  }

  remove() {
    removeCharts(this.box);
  }
}

class RunView {
  constructor(app, name) {
    this.app = app;
    this.name = name;
    this.box = element("div.view", null, element("p.empty", null, "…"));
    this.render();
  }

  async render() {
    const { app, name } = this;
    let details;
    try {
      details = await app.details(name, true);
    } catch (error) {
      this.box.replaceChildren(element("p.empty", null, String(error.message || error)));
      return;
    }
    this.metrics = details.metrics;
    removeCharts(this.box);
    if (this.timeline) this.timeline.remove();
    this.head = element("div", null);
    this.notices = element("div.parts.two", null);
    this.showHead(details);
    const run = { name, colour: colour(0) };
    const { predicted, measured } = details;
    const config = { name, config: details.config };
    const bars = element("div.parts.two", null,
      comparison("Memory by purpose", "bytes", (predicted && predicted.mem_peak) || {}, (measured && measured.mem_peak) || {}),
      comparison("Time by instruction", "s", (predicted && predicted.time && predicted.time.instructions) || {}, (measured && measured.instructions) || {}));
    this.timeline = details.timeline_steps.length ? new TimelineView(app.source, name, details.timeline_steps) : null;
    this.box.replaceChildren(this.head, this.notices, controls(null), ...chartSections(app.source, [run], details.metrics, ""),
      ...[this.timeline && this.timeline.box, bars, sampleCard(details.samples), settingsCard("Settings", [config], Object.keys(details.config))].filter(Boolean));
    loadInView();
  }

  showHead(details) {
    const { run } = details;
    const about = [details.model && details.model.family, details.model && `${details.model.layers} layers, ${details.model.dim} wide`, `made ${formatAgo(run.created_s)}`];
    this.head.replaceChildren(
      element("div.title", null, element("h1", null, run.name), stateMark(run), element("span.muted", null, about.filter(Boolean).join(" · "))),
      tiles(details));
    this.notices.replaceChildren(...[alertCard(details.alerts), verdictCard(details.verdicts)].filter(Boolean));
  }

  append(news) {
    if (news.run !== this.name) return;
    if (this.metrics && Object.keys(news.values).some((metric) => !this.metrics.includes(metric))) {
      this.render();
      return;
    }
    charts.forEach((chart) => chart.append(news));
  }

  async update(changed) {
    if (!changed.has(this.name) || !this.head) return;
    const details = await this.app.details(this.name, true);
    const hadTimeline = Boolean(this.timeline);
    if (details.timeline_steps.length && !hadTimeline) return this.render();
    if (details.run.state !== "running" && this.wasRunning) return this.render().then(() => (this.wasRunning = false));
    this.wasRunning = details.run.state === "running";
    this.showHead(details);
  }

  remove() {
    removeCharts(this.box);
    if (this.timeline) this.timeline.remove();
  }
}

const COLUMNS = [
  ["run", (run) => run.name, (run) => element("a", { href: "#/run/" + encodeURIComponent(run.name) }, run.name)],
  ["state", (run) => run.state, stateMark],
  ["step", (run) => run.step, (run) => run.step.toLocaleString("en") + (run.steps ? " / " + run.steps.toLocaleString("en") : "")],
  ["loss", (run) => run.last.loss, (run) => formatNumber(run.last.loss)],
  ["validation", (run) => run.validation_loss, (run) => formatNumber(run.validation_loss)],
  ["tokens/s", (run) => run.last.tps, (run) => formatCount(run.last.tps)],
  ["MFU", (run) => run.last.mfu, (run) => formatUnit(run.last.mfu, "share")],
  ["step time", (run) => run.median_step_s || run.last.step_s, (run) => formatSeconds(run.median_step_s || run.last.step_s)],
  ["memory", (run) => run.last.mem_peak_bytes, (run) => formatBytes(run.last.mem_peak_bytes)],
  ["tokens", (run) => run.last.tokens, (run) => formatCount(run.last.tokens)],
  ["updated", (run) => run.updated_s, (run) => formatAgo(run.updated_s)],
];

class TableView {
  constructor(app) {
    this.app = app;
    this.sort = { column: COLUMNS.length - 1, up: false };
    this.box = element("div.view", null);
    this.render();
  }

  render() {
    const { app, sort } = this;
    const differing = app.differing.slice(0, 12);
    const columns = [...COLUMNS, ...differing.map((key) => [key.split(".").pop(), (run) => run.settings && run.settings[key], (run) => formatSetting(run.settings && run.settings[key]), key])];
    const value = columns[sort.column][1];
    const rows = app.visibleRuns().sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const isNothing = (v) => v === undefined || v === null || Number.isNaN(v);
      if (isNothing(x) || isNothing(y)) return isNothing(x) - isNothing(y);
      return (x < y ? -1 : x > y ? 1 : 0) * (sort.up ? 1 : -1);
    });
    const head = columns.map(([title, , , full], index) => element("th", { scope: "col", title: full, "aria-sort": index === sort.column ? (sort.up ? "ascending" : "descending") : null },
      element("button", { onclick: () => {
        this.sort = { column: index, up: index === sort.column ? !sort.up : index === 0 };
        this.render();
      } }, title, index === sort.column ? (sort.up ? " ↑" : " ↓") : "")));
    const most = 500;
    this.box.replaceChildren(element("section.card", null,
      element("div.row", null, element("h2", null, `${rows.length} run${rows.length === 1 ? "" : "s"}`), element("span.muted", null, "settings that differ are at the right")),
      element("div.scroll", null, element("table.runs", null, element("thead", null, element("tr", null, head)),
        element("tbody", null, rows.slice(0, most).map((run) => element("tr", null, columns.map(([, , show], index) => element(index === 0 ? "th" : "td", null, show(run))))))))),
      rows.length > most ? element("p.muted", null, `the first ${most}; search for others`) : "");
  }

  append() {}

  update() {
    this.render();
  }

  remove() {}
}

class DiffView {
  constructor(app) {
    this.app = app;
    this.box = element("div.view", null);
    this.render();
  }

  async render() {
    const names = this.app.selectedNames();
    if (names.length < 2) {
      this.box.replaceChildren(element("p.empty", null, "Select two runs or more in the list to see how their settings differ."));
      return;
    }
    const details = await Promise.all(names.map((name) => this.app.details(name)));
    const runs = details.map((one) => ({ name: one.run.name, config: one.config }));
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter((key) => {
      const values = runs.map((run) => formatSetting(run.config[key]));
      return values.some((value) => value !== values[0]) && key !== "run.name";
    });
    const results = COLUMNS.slice(3, 9).map(([title, , show]) => [title, details.map((one) => show(one.run))]);
    this.box.replaceChildren(
      keys.length ? settingsCard("Settings that differ", runs, keys) : element("p.empty", null, "All settings are the same."),
      element("section.card", null, element("h2", null, "Results"), element("div.scroll", null, element("table.settings", null,
        element("thead", null, element("tr", null, element("th", null, ""), runs.map((run) => element("th", null, run.name)))),
        element("tbody", null, results.map(([title, values]) => element("tr", null, element("th", { scope: "row" }, title), values.map((value) => element("td", null, value)))))))));
  }

  append() {}

  update() {}

  remove() {}
}
