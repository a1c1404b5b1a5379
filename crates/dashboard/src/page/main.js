// The frame around the views: the list of runs, the keys, the news.

class App {
  constructor(source) {
    this.source = source;
    this.runs = new Map();
    this.known = new Map();
    this.colours = new Map();
    this.selected = new Set();
    this.differing = [];
    this.search = "";
    this.group = "";
    this.cursor = 0;
    this.build();
  }

  build() {
    this.status = element("span.live", { title: "connection" }, "");
    this.folder = element("span.folder", null, "");
    this.nav = element("nav", { "aria-label": "views" },
      element("a", { href: "#/" }, "Curves"), element("a", { href: "#/runs" }, "Table"), element("a", { href: "#/diff" }, "Differences"));
    const theme = element("button.icon", { onclick: () => this.changeTheme(), title: "light or dark (t)", "aria-label": "light or dark" }, "◐");
    const help = element("button.icon", { onclick: () => this.help.showModal(), title: "keys (?)", "aria-label": "keys" }, "?");
    const menu = element("button.icon.menu", { onclick: () => document.body.classList.toggle("listed"), title: "runs", "aria-label": "show the list of runs" }, "☰");
    this.searchBox = element("input", { type: "search", placeholder: "search runs  /", "aria-label": "search runs", oninput: () => {
      this.search = this.searchBox.value;
      this.renderList();
      this.view && this.view.update(new Set());
    } });
    this.groupBox = element("select", { "aria-label": "group by a setting", onchange: () => {
      this.group = this.groupBox.value;
      this.renderList();
    } });
    this.list = element("div.list", { role: "list" });
    this.main = element("main", { id: "main", tabindex: "-1" });
    this.help = helpDialog();
    document.body.append(
      element("header", null, menu, element("a.brand", { href: "#/" }, "Trainyard"), this.folder, this.nav, element("span.grow", null), this.status, theme, help),
      element("aside", { "aria-label": "runs" }, element("div.tools", null, this.searchBox, this.groupBox), this.list), this.main, this.help);
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.route());
    this.main.addEventListener("click", () => document.body.classList.remove("listed"));
  }

  async start() {
    // The details of the run in the address are asked for at once, not after the list. Both are
    // shown together, so that the first curve does not wait until a page without it is drawn.
    const [, where, name] = location.hash.split("/");
    if (where === "run" && name) this.early = { name: decodeURIComponent(name), details: this.source.details(decodeURIComponent(name)) };
    try {
      await Promise.all([this.loadRuns(), this.early && this.early.details.catch(() => {})]);
    } catch (error) {
      this.main.replaceChildren(element("p.empty", null, String(error.message || error)));
      return;
    }
    const live = [...this.runs.values()].filter((run) => run.state === "running").map((run) => run.name);
    const newest = [...this.runs.values()].sort((a, b) => b.updated_s - a.updated_s).map((run) => run.name);
    (live.length ? live : newest).slice(0, 5).forEach((name) => this.selected.add(name));
    this.route();
    this.renderList();
    this.source.watch((news) => this.hear(news), (isConnected) => {
      const wasLost = this.status.classList.contains("lost");
      this.status.textContent = isConnected ? "live" : "reconnecting";
      this.status.classList.toggle("lost", !isConnected);
      if (isConnected && wasLost) this.loadRuns().then(() => charts.forEach((chart) => chart.refresh()));
    });
  }

  async loadRuns() {
    const answer = await this.source.runs();
    this.folder.textContent = answer.folder || "";
    this.differing = answer.differing;
    const was = this.runs;
    this.runs = new Map(answer.runs.map((run) => [run.name, run]));
    if (was.size) this.renderList();
    const value = this.groupBox.value;
    this.groupBox.replaceChildren(element("option", { value: "" }, "no groups"), element("option", { value: "state" }, "group by state"),
      ...this.differing.map((key) => element("option", { value: key }, "group by " + key)));
    this.groupBox.value = value;
  }

  // Everything about a run but its curves, from the server once or `isFresh`.
  async details(name, isFresh) {
    const early = this.early && this.early.name === name ? this.early.details : null;
    this.early = null;
    if (early || isFresh || !this.known.has(name)) this.known.set(name, await (early || this.source.details(name)));
    return this.known.get(name);
  }

  selectedNames() {
    return [...this.selected].filter((name) => this.runs.has(name)).sort();
  }

  colourOf(name) {
    if (!this.colours.has(name)) this.colours.set(name, this.colours.size);
    return colour(this.colours.get(name));
  }

  visibleRuns() {
    const words = this.search.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.name, run.state, ...Object.entries(run.settings || {}).map(([key, value]) => `${key}=${formatSetting(value)}`)].join(" ").toLowerCase();
    return [...this.runs.values()].filter((run) => !words.length || words.every((word) => text(run).includes(word)));
  }

  renderList() {
    const runs = this.visibleRuns().sort((a, b) => (b.state === "running") - (a.state === "running") || b.updated_s - a.updated_s);
    this.order = [];
    const row = (run) => {
      const isOn = this.selected.has(run.name);
      const index = this.order.push(run.name) - 1;
      const box = element("input", { type: "checkbox", checked: isOn, "aria-label": "show the curves of " + run.name, onchange: () => this.toggle(run.name) });
      if (isOn) box.style.accentColor = this.colourOf(run.name);
      const part = run.steps ? Math.min(100, Math.round((100 * run.step) / run.steps)) + " %" : "step " + formatCount(run.step);
      return element("div.run" + (index === this.cursor ? ".cursor" : ""), { role: "listitem" }, box,
        element("a", { href: "#/run/" + encodeURIComponent(run.name) }, element("b", null, run.name),
          element("small", null, `${part} · loss ${formatNumber(run.last.loss, 4)} · ${formatAgo(run.updated_s)}`)),
        element("i.state." + run.state, { title: run.state }));
    };
    const most = 300;
    let rows;
    if (this.group) {
      const groups = new Map();
      for (const run of runs) {
        const value = this.group === "state" ? run.state : formatSetting((run.settings || {})[this.group]);
        if (!groups.has(value)) groups.set(value, []);
        groups.get(value).push(run);
      }
      rows = [...groups].map(([value, members]) => {
        const losses = members.map((run) => run.validation_loss ?? run.last.loss).filter(Number.isFinite);
        const best = losses.length ? `best ${formatNumber(Math.min(...losses))}` : "";
        return element("details", { open: true }, element("summary", null, `${this.group.split(".").pop()} = ${value} `, element("small", null, `${members.length} · ${best}`)), members.slice(0, most).map(row));
      });
    } else {
      rows = runs.slice(0, most).map(row);
    }
    if (runs.length > most) rows.push(element("p.muted", null, `${runs.length - most} more: search for them`));
    this.list.replaceChildren(...rows);
  }

  toggle(name) {
    if (!this.selected.delete(name)) this.selected.add(name);
    this.renderList();
    if (location.hash.startsWith("#/run/")) location.hash = "#/";
    else if (this.view instanceof DiffView || this.view instanceof CompareView) this.view.render();
  }

  route() {
    const [, where, name] = location.hash.split("/");
    if (this.view) this.view.remove();
    look.zoom = { step: null, time: null };
    look.at = null;
    if (where === "run" && name) this.view = new RunView(this, decodeURIComponent(name));
    else if (where === "runs") this.view = new TableView(this);
    else if (where === "diff") this.view = new DiffView(this);
    else this.view = new CompareView(this);
    this.nav.querySelectorAll("a").forEach((link) => link.toggleAttribute("aria-current", link.getAttribute("href") === (location.hash || "#/")));
    this.main.replaceChildren(this.view.box);
    this.main.scrollTop = 0;
    document.body.classList.remove("listed");
  }

  hear(news) {
    const changed = new Set();
    for (const run of news.runs) {
      const before = this.runs.get(run.name);
      this.runs.set(run.name, { ...run, settings: before ? before.settings : {} });
      if (!before) {
        this.loadRuns().then(() => this.renderList());
        if (run.state === "running") this.selected.add(run.name);
      }
      changed.add(run.name);
    }
    news.gone.forEach((name) => this.runs.delete(name));
    news.records.forEach((records) => this.view && this.view.append(records));
    if (changed.size || news.gone.length) {
      this.renderList();
      if (this.view) this.view.update(changed);
    }
  }

  changeTheme() {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    keepTheme(theme);
    this.showTheme(theme);
  }

  showTheme(theme) {
    setTheme(theme);
    // Charts and the list hold colours of the theme before.
    this.route();
    this.renderList();
  }

  key(event) {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range";
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isTyping) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const move = (by) => {
      this.cursor = Math.max(0, Math.min(this.order.length - 1, this.cursor + by));
      this.renderList();
      const row = this.list.querySelector(".cursor");
      if (row) row.scrollIntoView({ block: "nearest" });
    };
    const press = (name) => {
      const control = this.main.querySelector(`[data-control=${name}]`);
      if (control) control.click();
    };
    const actions = {
      "/": () => this.searchBox.focus(),
      j: () => move(1),
      k: () => move(-1),
      x: () => this.order[this.cursor] && this.toggle(this.order[this.cursor]),
      o: () => this.order[this.cursor] && (location.hash = "#/run/" + encodeURIComponent(this.order[this.cursor])),
      c: () => (location.hash = "#/"),
      r: () => (location.hash = "#/runs"),
      d: () => (location.hash = "#/diff"),
      l: () => press("logY"),
      g: () => press("logX"),
      h: () => press("clip"),
      0: () => ["step", "time"].forEach((axis) => zoomTo(axis, null)),
      t: () => this.changeTheme(),
      "?": () => this.help.showModal(),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}

// The controls of all charts of a view.
function controls(more) {
  const switchOf = (name, text, title) => {
    const button = element("button.switch", { "data-control": name, "aria-pressed": String(look[name]), title, onclick: () => {
      look[name] = !look[name];
      button.setAttribute("aria-pressed", String(look[name]));
      charts.forEach((chart) => (name === "logX" ? chart.refresh() : chart.draw()));
    } }, text);
    return button;
  };
  const smoothing = element("input", { type: "range", min: "0", max: "1", step: "0.01", value: String(look.smoothing), "aria-label": "smoothing", oninput: () => {
    look.smoothing = Number(smoothing.value);
    redraw();
  } });
  const unzoom = element("button.switch.unzoom", { title: "show everything (0)", onclick: () => ["step", "time"].forEach((axis) => zoomTo(axis, null)) }, "whole range");
  unzoom.hidden = !Object.values(look.zoom).some(Boolean);
  return element("div.controls", null, more,
    element("label.smooth", null, "smoothing", smoothing), switchOf("logX", "log x", "logarithmic steps (g)"), switchOf("logY", "log y", "logarithmic values (l)"),
    switchOf("clip", "trim spikes", "axis without the extremes, which are marked at the edge (h)"), unzoom);
}

function helpDialog() {
  const keys = [["/", "search runs"], ["j  k", "move in the list"], ["x", "show or hide the curves of a run"], ["o", "open a run"], ["c  r  d", "curves, table, differences"],
    ["l  g", "logarithmic values, steps"], ["h", "trim spikes; they are marked at the edge"], ["0", "show the whole range"], ["t", "light or dark"],
    ["drag", "zoom into a part of a chart; all charts follow"], ["double click", "show the whole range"], ["←  →  +  −", "move and zoom the chart that has the focus"]];
  const dialog = element("dialog", { "aria-label": "keys" }, element("h2", null, "Keys"),
    element("dl", null, keys.map(([key, what]) => [element("dt", null, key), element("dd", null, what)])),
    element("form", { method: "dialog" }, element("button", null, "close")));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  return dialog;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  themeCache = null;
}

// A browser may refuse to keep anything. The theme is then the system's again on the next visit.
function keepTheme(theme) {
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // See above.
  }
}

function keptTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function begin() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const systemTheme = () => (system.matches ? "dark" : "light");
  setTheme(keptTheme() || systemTheme());
  const data = document.getElementById("data");
  const app = new App(data ? new Embedded(JSON.parse(data.textContent)) : new Server());
  app.start();
  system.addEventListener("change", () => keptTheme() || app.showTheme(systemTheme()));
}

begin();
