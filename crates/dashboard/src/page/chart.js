// Curves on a canvas.
//
// A bucket that stands for several records is drawn as its range from minimum to maximum, and the
// line goes through its means. So a spike of one record is seen at every zoom, and smoothing, which
// changes the line alone, hides none.

const GUTTER = { left: 60, right: 10, top: 8, bottom: 22 };
const charts = new Set();

// The settings of all charts: zoom of each kind of horizontal axis, scales, smoothing, and the
// pointer's place.
const look = {
  zoom: { step: null, time: null },
  logX: false,
  logY: false,
  smoothing: 0,
  clip: false,
  at: null,
};

class Chart {
  // `series`: run, metric, colour, name, style ("line", "dashed" or "dots").
  // `axis`: "step" or "time".
  constructor(source, { title, series, axis, unit, logY }) {
    Object.assign(this, { source, series, axis, unit, ownLogY: logY });
    this.curves = new Map();
    this.request = 0;
    this.isVisible = false;
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.value = element("span.value");
    this.tip = element("div.tip", { hidden: true });
    this.box = element("figure.card.chart", null,
      element("figcaption", null, element("span", null, title), this.value), this.canvas, this.tip);
    this.listen();
    charts.add(this);
    observer.observe(this.box);
    sizes.observe(this.canvas);
  }

  remove() {
    charts.delete(this);
    observer.unobserve(this.box);
    sizes.unobserve(this.canvas);
    this.request = -1;
  }

  get bins() {
    return Math.max(100, Math.min(2000, Math.round(this.canvas.clientWidth - GUTTER.left - GUTTER.right) || 600));
  }

  async load() {
    if (!this.isVisible || this.request < 0) return;
    const request = ++this.request;
    const zoom = look.zoom[this.axis];
    const runs = [...new Set(this.series.map((one) => one.run))];
    const metrics = [...new Set(this.series.map((one) => one.metric))];
    const [from, to] = zoom || [-Infinity, Infinity];
    let answer;
    try {
      const scale = look.logX && this.axis === "step" ? "log" : "linear";
      answer = await this.source.curves(runs, metrics, from, to, this.bins, scale);
    } catch (error) {
      this.value.textContent = "";
      this.box.classList.add("broken");
      this.box.title = String(error.message || error);
      return;
    }
    if (request !== this.request) return;
    this.curves = new Map(answer.curves.map((curve) => [curve.run + "\n" + curve.metric, curve]));
    this.isStale = false;
    this.draw();
    performance.mark("chart");
    // A long file is read in parts; what was read is shown meanwhile.
    if (answer.reading) setTimeout(() => this.load(), 150);
  }

  // Shows the curves at hand at once, and finer ones when they come.
  refresh() {
    this.isStale = true;
    this.draw();
    this.load();
  }

  // Adds the records of an event.
  append(news) {
    if (!this.isVisible) {
      this.isStale = true;
      return;
    }
    let changed = false;
    for (const one of this.series) {
      if (one.run !== news.run || !(one.metric in news.values)) continue;
      const curve = this.curves.get(one.run + "\n" + one.metric);
      if (look.zoom[this.axis] && curve) continue;
      if (!curve || !curve.append(news)) {
        this.load();
        return;
      }
      curve.condense(2 * this.bins);
      changed = true;
    }
    if (changed) this.draw();
  }

  // The scale of the horizontal axis, as two functions and the range.
  horizontal() {
    let [low, high] = look.zoom[this.axis] || [Infinity, -Infinity];
    const isLog = look.logX && this.axis === "step";
    if (!look.zoom[this.axis]) {
      for (const { columns } of this.curves.values()) {
        if (!columns[0].length) continue;
        low = Math.min(low, isLog ? Math.max(columns[0][0], 1) : columns[0][0]);
        high = Math.max(high, columns[1][columns[1].length - 1]);
      }
      if (low > high) return null;
    }
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    return scaleOf(low, high, GUTTER.left, this.width - GUTTER.right, isLog && low > 0);
  }

  vertical(horizontal) {
    let [low, high] = [Infinity, -Infinity];
    const isLog = this.ownLogY || look.logY;
    const all = [];
    for (const { columns } of this.curves.values()) {
      const [first, last, min, max, mean] = columns;
      for (let i = 0; i < first.length; i++) {
        if (last[i] < horizontal.low || first[i] > horizontal.high || Number.isNaN(mean[i])) continue;
        if (isLog && max[i] <= 0) continue;
        low = Math.min(low, isLog && min[i] <= 0 ? max[i] : min[i]);
        high = Math.max(high, max[i]);
        if (look.clip) all.push(mean[i]);
      }
    }
    if (low > high) return null;
    if (look.clip && all.length > 20) {
      all.sort((a, b) => a - b);
      const quantile = (q) => all[Math.round(q * (all.length - 1))];
      const [a, b] = [quantile(0.02), quantile(0.98)];
      low = Math.max(low, a - 0.2 * (b - a));
      high = Math.min(high, b + 0.2 * (b - a));
    }
    if (low === high) {
      const margin = Math.abs(low) * 0.1 || 1;
      [low, high] = isLog ? [low / 1.5, high * 1.5] : [low - margin, high + margin];
    } else if (!isLog) {
      const margin = 0.04 * (high - low);
      // Quantities that are never negative get no axis below zero.
      [low, high] = [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
    }
    return scaleOf(low, high, this.height - GUTTER.bottom, GUTTER.top, isLog);
  }

  draw() {
    if (!this.isVisible) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    if (!this.width) return;
    const [w, h] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) [this.canvas.width, this.canvas.height] = [w, h];
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    const theme = themeColours();
    const x = this.horizontal();
    const y = x && this.vertical(x);
    [this.x, this.y] = [x, y];
    if (!x || !y) {
      pen.fillStyle = theme.muted;
      pen.font = theme.font;
      pen.textAlign = "center";
      if (this.request > 0) pen.fillText("no values here", this.width / 2, this.height / 2);
      return;
    }
    this.drawAxes(pen, theme, x, y);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER.left, 0, this.width - GUTTER.left - GUTTER.right, this.height - GUTTER.bottom + 1);
    pen.clip();
    for (const one of this.series) {
      const curve = this.curves.get(one.run + "\n" + one.metric);
      if (curve && curve.length) this.drawCurve(pen, one, curve, x, y);
    }
    pen.restore();
    this.showValue();
    this.drawPointer(pen, theme, x, y);
  }

  drawAxes(pen, theme, x, y) {
    pen.font = theme.font;
    pen.lineWidth = 1;
    pen.fillStyle = theme.muted;
    pen.strokeStyle = theme.grid;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const yTicks = ticks(y, 5, this.unit);
    for (const tick of yTicks) {
      const at = Math.round(y.to(tick)) + 0.5;
      pen.beginPath();
      pen.moveTo(GUTTER.left, at);
      pen.lineTo(this.width - GUTTER.right, at);
      pen.stroke();
      pen.fillText(tickText(tick, yTicks, this.unit), GUTTER.left - 6, at);
    }
    pen.textBaseline = "alphabetic";
    const xTicks = ticks(x, Math.max(2, Math.round(this.width / 110)), this.axis === "time" ? "time" : "");
    for (const tick of xTicks) {
      const at = x.to(tick);
      const text = this.axis === "time" ? formatClock(tick) : formatCount(tick);
      const half = pen.measureText(text).width / 2;
      if (at - half < GUTTER.left - 8 || at + half > this.width) continue;
      pen.textAlign = "center";
      pen.fillText(text, at, this.height - 6);
    }
  }

  drawCurve(pen, one, curve, x, y) {
    const [first, last, min, max, mean, count, wrong] = curve.columns;
    const ink = one.colour;
    const middle = (i) => x.to((first[i] + last[i]) / 2);
    if (one.style === "dots") {
      pen.fillStyle = ink;
      pen.strokeStyle = themeColours().card;
      // Many dots are small, so that the curve below stays to be seen.
      const radius = Math.max(1.5, Math.min(3.5, 100 / first.length));
      pen.lineWidth = radius / 2.4;
      for (let i = 0; i < first.length; i++) {
        if (Number.isNaN(mean[i])) continue;
        pen.beginPath();
        pen.arc(middle(i), y.to(mean[i]), radius, 0, 2 * Math.PI);
        pen.fill();
        pen.stroke();
      }
      return;
    }
    const smooth = look.smoothing > 0 && one.style !== "dashed" ? smoothed(curve, x) : null;
    pen.strokeStyle = ink;
    // The ranges of buckets.
    pen.globalAlpha = smooth ? 0.22 : 0.42;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let i = 0; i < first.length; i++) {
      if (count[i] < 2 || !(max[i] > min[i])) continue;
      const at = middle(i);
      pen.moveTo(at, y.to(min[i]));
      pen.lineTo(at, y.to(max[i]) - 0.5);
    }
    pen.stroke();
    const line = (values) => {
      pen.beginPath();
      let isDown = false;
      for (let i = 0; i < first.length; i++) {
        if (Number.isNaN(values[i])) {
          isDown = false;
          continue;
        }
        const [px, py] = [middle(i), y.to(values[i])];
        if (isDown) pen.lineTo(px, py);
        else pen.moveTo(px, py);
        isDown = true;
      }
      pen.stroke();
    };
    pen.lineJoin = "round";
    if (smooth) {
      pen.globalAlpha = 0.28;
      line(mean);
      pen.globalAlpha = 1;
      pen.lineWidth = 1.8;
      line(smooth);
    } else {
      pen.globalAlpha = one.style === "dashed" ? 0.7 : 1;
      pen.lineWidth = one.style === "dashed" ? 1.2 : 1.5;
      if (one.style === "dashed") pen.setLineDash([5, 4]);
      line(mean);
      pen.setLineDash([]);
    }
    pen.globalAlpha = 1;
    if (first.length === 1) {
      pen.fillStyle = ink;
      pen.beginPath();
      pen.arc(middle(0), y.to(mean[0]), 2.5, 0, 2 * Math.PI);
      pen.fill();
    }
    // Values that are not finite stand at the bottom; values outside of the axis at the edge.
    pen.fillStyle = themeColours().bad;
    for (let i = 0; i < first.length; i++) {
      if (wrong[i]) pen.fillRect(middle(i) - 1, this.height - GUTTER.bottom - 7, 2, 7);
    }
    if (!look.clip) return;
    pen.fillStyle = ink;
    for (let i = 0; i < first.length; i++) {
      if (max[i] > y.high) triangle(pen, middle(i), GUTTER.top, 4);
      if (min[i] < y.low) triangle(pen, middle(i), this.height - GUTTER.bottom, -4);
    }
  }

  // The nearest bucket of a curve to a place.
  nearest(curve, at) {
    const [first, last, , , mean] = curve.columns;
    let [low, high] = [0, first.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (last[middle] < at) low = middle + 1;
      else high = middle;
    }
    const before = Math.max(0, low - 1);
    const index = at - last[before] < first[low] - at ? before : low;
    return Number.isNaN(mean[index]) && !curve.columns[6][index] ? -1 : index;
  }

  drawPointer(pen, theme, x, y) {
    const at = look.at && look.at.axis === this.axis ? look.at.place : null;
    if (at === null || at < x.low || at > x.high) {
      this.tip.hidden = true;
      return;
    }
    const px = x.to(at);
    pen.strokeStyle = theme.muted;
    pen.globalAlpha = 0.6;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(px) + 0.5, GUTTER.top);
    pen.lineTo(Math.round(px) + 0.5, this.height - GUTTER.bottom);
    pen.stroke();
    pen.globalAlpha = 1;
    const rows = [];
    for (const one of this.series) {
      const curve = this.curves.get(one.run + "\n" + one.metric);
      const index = curve && curve.length ? this.nearest(curve, at) : -1;
      if (index < 0) continue;
      const [first, last, min, max, mean, count, wrong] = curve.columns.map((column) => column[index]);
      if (!Number.isNaN(mean)) {
        pen.fillStyle = one.colour;
        pen.beginPath();
        pen.arc(x.to((first + last) / 2), y.to(mean), 3, 0, 2 * Math.PI);
        pen.fill();
      }
      const range = count > 1 ? ` (${formatUnit(min, this.unit)} … ${formatUnit(max, this.unit)})` : "";
      const bad = wrong ? ` ${wrong} not finite` : "";
      rows.push({ one, first, last, text: (count ? formatUnit(mean, this.unit) : "") + range + bad });
    }
    if (look.at.chart !== this || !rows.length) {
      this.tip.hidden = true;
      return;
    }
    const { first, last } = rows[0];
    const name = this.axis === "time" ? formatClock(first) : "step " + first.toLocaleString("en");
    const head = first === last || this.axis === "time" ? name : `${name} – ${last.toLocaleString("en")}`;
    this.tip.replaceChildren(element("b", null, head), ...rows.slice(0, 12).map(({ one, text }) =>
      element("div", null, element("i.dot", { style: { background: one.colour } }), element("span", null, one.name), element("em", null, text))));
    this.tip.hidden = false;
    const width = this.tip.offsetWidth;
    const left = px + 14 + width > this.width ? px - 14 - width : px + 14;
    this.tip.style.left = Math.max(0, left) + "px";
  }

  showValue() {
    const values = this.series.filter((one) => one.style === "line")
      .map((one) => this.curves.get(one.run + "\n" + one.metric)).filter(Boolean);
    const value = values.length === 1 ? values[0].lastValue() : null;
    this.value.textContent = value === null ? "" : formatUnit(value, this.unit);
  }

  listen() {
    let from = null;
    const canvas = this.canvas;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return this.x ? this.x.from(event.clientX - box.left) : null;
    };
    const point = (at) => {
      look.at = at === null ? null : { axis: this.axis, place: at, chart: this };
      redraw();
    };
    canvas.addEventListener("pointermove", (event) => {
      point(place(event));
      if (from === null || event.pointerType === "touch") return;
      const pen = canvas.getContext("2d");
      const [a, b] = [this.x.to(from), this.x.to(place(event))];
      pen.fillStyle = themeColours().accent;
      pen.globalAlpha = 0.14;
      pen.fillRect(Math.min(a, b), GUTTER.top, Math.abs(a - b), this.height - GUTTER.top - GUTTER.bottom);
      pen.globalAlpha = 1;
    });
    canvas.addEventListener("pointerleave", () => point(null));
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0 || !this.x) return;
      from = place(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = place(event);
      if (Math.abs(this.x.to(from) - this.x.to(to)) > 4) zoomTo(this.axis, [Math.min(from, to), Math.max(from, to)]);
      from = null;
    });
    canvas.addEventListener("dblclick", () => zoomTo(this.axis, null));
    canvas.addEventListener("keydown", (event) => {
      if (!this.x) return;
      const { low, high } = this.x;
      const [middle, half] = [(low + high) / 2, (high - low) / 2];
      const moves = {
        ArrowLeft: [low - half / 2, high - half / 2],
        ArrowRight: [low + half / 2, high + half / 2],
        "+": [middle - half / 2, middle + half / 2],
        "=": [middle - half / 2, middle + half / 2],
        "-": [middle - half * 2, middle + half * 2],
        Escape: null,
      };
      if (!(event.key in moves)) return;
      event.preventDefault();
      zoomTo(this.axis, moves[event.key]);
    });
  }
}

// Changes the zoom of all charts with the same axis.
function zoomTo(axis, range) {
  look.zoom[axis] = range;
  performance.mark("zoom");
  const zoomed = Object.values(look.zoom).some(Boolean);
  document.querySelectorAll(".unzoom").forEach((button) => (button.hidden = !zoomed));
  charts.forEach((chart) => chart.axis === axis && chart.refresh());
}

let redrawing = 0;
function redraw() {
  if (!redrawing) {
    redrawing = requestAnimationFrame(() => {
      redrawing = 0;
      charts.forEach((chart) => chart.draw());
    });
  }
}

// How far outside of the window a chart counts as in view, in pixels.
const MARGIN = 200;

// Loads the new charts that are in view. The observer would tell of them a frame or two later.
function loadInView() {
  for (const chart of charts) {
    if (chart.isVisible || chart.request) continue;
    const { top, bottom, width } = chart.box.getBoundingClientRect();
    if (!width || top > innerHeight + MARGIN || bottom < -MARGIN) continue;
    chart.isVisible = true;
    chart.load();
  }
}

// Only charts in view are loaded and drawn.
const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const chart = [...charts].find((one) => one.box === target);
    if (!chart) continue;
    const wasVisible = chart.isVisible;
    chart.isVisible = isIntersecting;
    if (isIntersecting && !wasVisible) {
      if (!chart.request || chart.isStale) chart.load();
      else chart.draw();
    }
  }
}, { rootMargin: `${MARGIN}px` });

const sizes = new ResizeObserver(() => redraw());

function scaleOf(low, high, start, end, isLog) {
  const f = isLog ? Math.log : (value) => value;
  const g = isLog ? Math.exp : (value) => value;
  const [a, b] = [f(low), f(high)];
  return {
    low, high, isLog,
    to: (value) => start + ((f(value) - a) / (b - a)) * (end - start),
    from: (pixel) => g(a + ((pixel - start) / (end - start)) * (b - a)),
  };
}

function ticks({ low, high, isLog }, number, unit) {
  if (isLog && high / low >= 10) {
    const found = [];
    const decades = Math.log10(high / low);
    const every = Math.max(1, Math.ceil(decades / number));
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power += every) found.push(10 ** power);
    if (found.length >= 2) return found;
  }
  const span = high - low;
  const base = unit === "bytes" ? 2 ** Math.floor(Math.log2(span / number)) : 10 ** Math.floor(Math.log10(span / number));
  const steps = unit === "bytes" ? [1, 2, 4] : unit === "time" ? [1, 1.5, 3, 6] : [1, 2, 5, 10];
  const step = base * (steps.find((factor) => span / (base * factor) <= number) || steps[steps.length - 1]);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high && found.length < 30; n++) found.push(n * step);
  return found;
}

function tickText(value, all, unit) {
  if (unit) return formatUnit(Number(value.toPrecision(12)), unit);
  if (value === 0) return "0";
  return formatNumber(Number(value.toPrecision(8)), 5);
}

// An exponential mean over the means of buckets. Its length is a share of the axis, so a curve
// looks equally smooth however many records it has.
function smoothed(curve, x) {
  const [first, last, , , mean, count] = curve.columns;
  const length = 0.25 * look.smoothing ** 2 * Math.abs(x.to(x.high) - x.to(x.low));
  const result = new Array(first.length);
  let [sum, weight, before] = [0, 0, null];
  for (let i = 0; i < first.length; i++) {
    const at = x.to(Math.max((first[i] + last[i]) / 2, x.isLog ? 1e-9 : -Infinity));
    const decay = before === null ? 0 : Math.exp(-Math.max(0, at - before) / length);
    [sum, weight, before] = [sum * decay, weight * decay, at];
    if (!Number.isNaN(mean[i])) {
      sum += mean[i] * count[i];
      weight += count[i];
    }
    result[i] = weight ? sum / weight : NaN;
  }
  return result;
}

function triangle(pen, x, y, size) {
  pen.beginPath();
  pen.moveTo(x - Math.abs(size), y + size);
  pen.lineTo(x + Math.abs(size), y + size);
  pen.lineTo(x, y - size / 2);
  pen.fill();
}

let themeCache = null;
function themeColours() {
  if (!themeCache) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue("--" + name).trim();
    themeCache = {
      muted: read("muted"), grid: read("grid"), accent: read("accent"), bad: read("bad"), card: read("card"),
      font: "11px " + read("font"),
    };
  }
  return themeCache;
}
