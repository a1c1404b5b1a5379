// The timeline of a step over all ranks, one row a lane.

const ROW = 18;
const KINDS = ["forward", "backward", "update", "gather", "reduce", "send", "recv", "exchange", "fetch", "evict"];

function kindColour(name) {
  const kind = name.split(" ")[0];
  const known = KINDS.indexOf(kind);
  return known < 0 ? themeColours().muted : colour(known);
}

class TimelineView {
  constructor(source, run, steps) {
    Object.assign(this, { source, run, steps, range: null, hover: null });
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": "timeline of a step" });
    this.tip = element("div.tip", { hidden: true });
    this.label = element("span.muted");
    this.slider = element("input", {
      type: "range", min: "0", max: String(steps.length - 1), value: String(steps.length - 1),
      "aria-label": "recorded step", oninput: () => this.load(),
    });
    this.slider.hidden = steps.length < 2;
    this.legend = element("div.legend");
    this.box = element("section.card.timeline", null,
      element("div.row", null, element("h2", null, "Timeline of a step"), this.slider, this.label), this.legend,
      element("div.scroll", null, this.canvas), this.tip);
    this.listen();
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.canvas);
    this.load();
  }

  remove() {
    this.resize.disconnect();
  }

  async load() {
    const step = this.steps[Number(this.slider.value)];
    const timeline = await this.source.timeline(this.run, step);
    if (!timeline) return;
    this.timeline = timeline;
    this.rows = [];
    this.range = null;
    let end = 0;
    for (const rank of timeline.ranks) {
      const lanes = [...new Set(rank.spans.map((span) => span.lane))].sort((a, b) => a - b);
      for (const lane of lanes) {
        const spans = rank.spans.filter((span) => span.lane === lane);
        spans.forEach((span) => (end = Math.max(end, span.start + span.length)));
        this.rows.push({ rank: rank.rank, name: rank.lanes[lane] || "lane " + lane, spans, isFirst: lane === lanes[0] });
      }
    }
    this.end = end || 1;
    this.label.textContent = `step ${timeline.step.toLocaleString("en")}, ${formatSeconds(end / 1e6)}, ${timeline.ranks.length} rank${timeline.ranks.length === 1 ? "" : "s"}`;
    const kinds = new Set(this.rows.flatMap((row) => row.spans.map((span) => span.name.split(" ")[0])));
    this.legend.replaceChildren(...[...kinds].map((kind) =>
      element("span", null, element("i.dot", { style: { background: kindColour(kind) } }), kind)));
    this.canvas.style.height = this.rows.length * ROW + 26 + "px";
    this.draw();
  }

  draw() {
    if (!this.rows) return;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width) return;
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const theme = themeColours();
    const left = 118;
    const [low, high] = this.range || [0, this.end];
    const x = scaleOf(low, high, left, width - 10, false);
    this.x = x;
    pen.font = theme.font;
    pen.textBaseline = "middle";
    pen.strokeStyle = theme.grid;
    for (const tick of ticks(x, Math.round(width / 120), "")) {
      const at = Math.round(x.to(tick)) + 0.5;
      pen.beginPath();
      pen.moveTo(at, 0);
      pen.lineTo(at, height - 20);
      pen.stroke();
      pen.fillStyle = theme.muted;
      pen.textAlign = "center";
      pen.fillText(formatSeconds(tick / 1e6), at, height - 8);
    }
    this.rows.forEach((row, index) => {
      const top = index * ROW;
      pen.fillStyle = theme.muted;
      pen.textAlign = "left";
      if (row.isFirst) pen.fillText("rank " + row.rank, 0, top + ROW / 2);
      pen.textAlign = "right";
      pen.fillText(row.name, left - 8, top + ROW / 2);
      pen.save();
      pen.beginPath();
      pen.rect(left, top, width - left - 10, ROW);
      pen.clip();
      for (const span of row.spans) {
        const a = x.to(span.start);
        const b = x.to(span.start + span.length);
        if (b < left || a > width) continue;
        pen.fillStyle = kindColour(span.name);
        pen.fillRect(a, top + 2, Math.max(b - a - (b - a > 3 ? 0.5 : 0), 0.6), ROW - 4);
        if (b - a > 60) {
          pen.fillStyle = "#fff";
          pen.textAlign = "left";
          pen.fillText(span.name, Math.max(a, left) + 4, top + ROW / 2, b - Math.max(a, left) - 8);
        }
      }
      pen.restore();
    });
  }

  listen() {
    let from = null;
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.rows || !this.x) return;
      const [px, py] = at(event);
      const row = this.rows[Math.floor(py / ROW)];
      const place = this.x.from(px);
      const slack = (this.x.high - this.x.low) * 0.002;
      const span = row && row.spans.find((one) => one.start - slack <= place && place <= one.start + one.length + slack);
      this.tip.hidden = !span;
      if (!span) return;
      const facts = [`starts at ${formatSeconds(span.start / 1e6)}`];
      if (span.waited > 0) facts.push(`its lane waited ${formatSeconds(span.waited / 1e6)} before`);
      if (span.bytes > 0) facts.push(formatBytes(span.bytes));
      this.tip.replaceChildren(element("b", null, `${span.name}: ${formatSeconds(span.length / 1e6)}`), element("div", null, facts.join(", ")));
      this.tip.style.left = Math.max(0, Math.min(px + 14, this.canvas.clientWidth - this.tip.offsetWidth)) + "px";
      this.tip.style.top = this.canvas.parentElement.offsetTop + py + 16 + "px";
    });
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("pointerdown", (event) => event.pointerType !== "touch" && (from = at(event)[0]));
    this.canvas.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = at(event)[0];
      if (Math.abs(to - from) > 5) this.range = [this.x.from(Math.min(from, to)), this.x.from(Math.max(from, to))];
      from = null;
      this.draw();
    });
    this.canvas.addEventListener("dblclick", () => {
      this.range = null;
      this.draw();
    });
  }
}
