// The data: from the server, or from inside the page where it is a report.

// A curve is kept as columns: first and last place, minimum, maximum, mean, count, and the number
// of values that are not finite.
class Curve {
  constructor(answer) {
    this.run = answer.run;
    this.metric = answer.metric;
    this.records = answer.records;
    this.generation = answer.generation;
    this.columns = [[], [], [], [], [], [], []];
    this.add(answer.places, answer.values);
  }

  get length() {
    return this.columns[0].length;
  }

  add(places, values) {
    const [first, last, min, max, mean, count, wrong] = this.columns;
    values.forEach((value, index) => {
      if (value === false || value === undefined) return;
      const place = places[index];
      first.push(Array.isArray(place) ? place[0] : place);
      last.push(Array.isArray(place) ? place[1] : place);
      if (Array.isArray(value)) {
        min.push(value[0] ?? NaN);
        max.push(value[1] ?? NaN);
        mean.push(value[2] ?? NaN);
        count.push(value[3]);
        wrong.push(value[4]);
      } else {
        const number = value === null ? NaN : value;
        min.push(number);
        max.push(number);
        mean.push(number);
        count.push(value === null ? 0 : 1);
        wrong.push(value === null ? 1 : 0);
      }
    });
  }

  // Adds what an event brings. False: something is missing between.
  append(news) {
    if (news.generation !== this.generation || news.start > this.records) return false;
    if (news.end <= this.records) return true;
    if (news.start < this.records) return false;
    this.add(news.places, news.values[this.metric] || []);
    this.records = news.end;
    return true;
  }

  // Joins neighbours until at most `most` buckets are left. Minimum, maximum and mean stay exact.
  condense(most) {
    while (this.length > most) {
      const next = this.columns.map(() => []);
      const [first, last, min, max, mean, count, wrong] = this.columns;
      for (let i = 0; i < this.length; i += 2) {
        const j = Math.min(i + 1, this.length - 1);
        const both = i === j ? count[i] : count[i] + count[j];
        const pick = (a, b, better) => (Number.isNaN(a) ? b : Number.isNaN(b) ? a : better(a, b));
        next[0].push(first[i]);
        next[1].push(last[j]);
        next[2].push(pick(min[i], min[j], Math.min));
        next[3].push(pick(max[i], max[j], Math.max));
        const sum = (count[i] ? mean[i] * count[i] : 0) + (i !== j && count[j] ? mean[j] * count[j] : 0);
        next[4].push(both ? sum / both : NaN);
        next[5].push(both);
        next[6].push(i === j ? wrong[i] : wrong[i] + wrong[j]);
      }
      this.columns = next;
    }
  }

  lastValue() {
    const mean = this.columns[4];
    for (let i = mean.length - 1; i >= 0; i--) if (!Number.isNaN(mean[i])) return mean[i];
    return null;
  }
}

class Server {
  isLive = true;

  async get(path, parameters) {
    const query = new URLSearchParams(parameters).toString();
    const answer = await fetch(path + (query ? "?" + query : ""));
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  runs() {
    return this.get("api/runs", []);
  }

  details(run) {
    return this.get("api/run", [["run", run]]);
  }

  timeline(run, step) {
    return this.get("api/timeline", [["run", run], ["step", step]]);
  }

  async curves(runs, metrics, from, to, bins, scale) {
    const parameters = [["bins", bins], ["scale", scale]];
    runs.forEach((run) => parameters.push(["run", run]));
    metrics.forEach((metric) => parameters.push(["metric", metric]));
    if (Number.isFinite(from)) parameters.push(["from", from]);
    if (Number.isFinite(to)) parameters.push(["to", to]);
    const answer = await this.get("api/curves", parameters);
    return { reading: answer.reading, curves: answer.curves.map((curve) => new Curve(curve)) };
  }

  watch(news, connected) {
    const events = new EventSource("events");
    events.onmessage = (event) => news(JSON.parse(event.data));
    events.onopen = () => connected(true);
    events.onerror = () => connected(false);
  }
}

class Embedded {
  isLive = false;

  constructor(data) {
    this.data = data;
  }

  async runs() {
    return this.data.runs;
  }

  async details(run) {
    const details = this.data.details[run];
    if (!details) throw new Error("this report does not have the run " + run);
    return details;
  }

  async timeline(run, step) {
    const steps = this.data.timelines[run] || [];
    return steps.reduce((a, b) => (!a || Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a), null);
  }

  async curves(runs, metrics) {
    const wanted = this.data.curves.filter((curve) => runs.includes(curve.run) && metrics.includes(curve.metric));
    return { reading: false, curves: wanted.map((curve) => new Curve(curve)) };
  }

  watch() {}
}
