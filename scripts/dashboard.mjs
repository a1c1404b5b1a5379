// Clicks through the dashboard in a headless Chromium and measures it. `cargo xtask dashboard`
// starts it:
// node dashboard.mjs PLAYWRIGHT CHROMIUM URL LONG-RUN LIVE-RUN PICTURES SPIKES
// It prints one JSON object.
import { createRequire } from "node:module";

const [playwright, executablePath, url, longRun, liveRun, pictures, spikes] = process.argv.slice(2);
const { chromium } = createRequire(import.meta.url)(playwright);
const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const errors = [];
const open = async (address, { width = 1360, height = 900, scheme = "light" } = {}) => {
  const page = await browser.newPage({ viewport: { width, height }, colorScheme: scheme, deviceScaleFactor: width < 600 ? 2 : 1 });
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("requestfailed", (request) => !request.url().endsWith("/events") && errors.push("failed: " + request.url()));
  await page.goto(address);
  return page;
};
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
const painted = (page, after = 0) => page.waitForFunction((start) => performance.getEntriesByName("chart").find((mark) => mark.startTime > start)?.startTime, after).then((handle) => handle.jsonValue());
const result = {};

// First paint of the long run: from the start of the navigation to the first curve.
const long = `${url}#/run/${longRun}`;
const paints = [];
for (let turn = 0; turn < 6; turn++) {
  const page = await open(long);
  paints.push(await painted(page));
  await page.close();
}
result.first_paint_cold_ms = paints[0];
result.first_paint_ms = median(paints.slice(1));

// All of the long run has been read when its last step is there. Then every spike must be drawn.
const page = await open(long);
const planted = JSON.parse(spikes);
await page.waitForFunction((records) => [...charts].some((chart) => [...chart.curves.values()].some((curve) => curve.records >= records)), planted.records, { timeout: 120000 });
result.all_read_ms = await page.evaluate(() => performance.now());
result.spikes_visible = await page.evaluate(({ steps, value }) => {
  const chart = [...charts].find((one) => one.series[0].metric === "loss");
  chart.draw();
  const ratio = devicePixelRatio;
  const pen = chart.canvas.getContext("2d");
  const isInk = (step) => {
    const x = Math.round(chart.x.to(step) * ratio);
    // Upper half of the spike: nothing else of the curve is there.
    const y = Math.round(chart.y.to(value * 0.75) * ratio);
    const { data } = pen.getImageData(x - 2, y, 5, 1);
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 60 && data[i + 2] > data[i] + 40) return true;
    return false;
  };
  return steps.filter(isInk).length;
}, planted);
const zooms = [];
for (let turn = 0; turn < 20; turn++) {
  const width = planted.records / 2 ** (turn % 12 + 1);
  const from = ((turn * 0.37) % 1) * (planted.records - width);
  const before = await page.evaluate(([a, b]) => {
    const start = performance.now();
    zoomTo("step", [a, b]);
    return start;
  }, [from, from + width]);
  zooms.push((await painted(page, before)) - before);
}
result.zoom_median_ms = median(zooms);
result.zoom_max_ms = Math.max(...zooms);
await page.close();

// Every page of a live run, by mouse and by key.
const live = await open(`${url}#/run/${liveRun}`);
await live.waitForSelector(".tiles .tile");
await live.waitForFunction(() => performance.getEntriesByName("chart").length > 2);
const step = () => live.evaluate(() => document.querySelector(".tile b").textContent);
const before = await step();
await live.waitForFunction((was) => document.querySelector(".tile b").textContent !== was, before, { timeout: 30000 });
result.live_step = [before, await step()];
for (const name of ["logX", "logY", "clip", "clip", "logY", "logX"]) await live.click(`[data-control=${name}]`);
await live.fill("input[aria-label=smoothing]", "0.6");
const chart = live.locator(".chart canvas").first();
const box = await chart.boundingBox();
await live.mouse.move(box.x + 120, box.y + 60);
await live.mouse.down();
await live.mouse.move(box.x + 260, box.y + 60, { steps: 4 });
await live.mouse.up();
await live.waitForSelector(".unzoom:not([hidden])");
await live.keyboard.press("0");
await chart.focus();
for (const key of ["+", "ArrowRight", "-", "Escape"]) await live.keyboard.press(key);
for (const [key, selector] of [["c", ".chart"], ["r", "table.runs"], ["d", ".view"]]) {
  await live.evaluate(() => document.activeElement.blur());
  await live.keyboard.press(key);
  await live.waitForSelector(selector);
}
await live.fill("input[aria-label='search runs']", liveRun);
await live.waitForFunction(() => document.querySelectorAll(".list .run").length === 1);
await live.fill("input[aria-label='search runs']", "");
await live.selectOption("select", "state");
await live.waitForSelector(".list details");
await live.click("button[title='keys (?)']");
await live.waitForSelector("dialog[open]");
await live.keyboard.press("Escape");
await live.click("button[title='light or dark (t)']");
await live.click(`.list a:has(b:text-is("${liveRun}"))`);
await live.waitForSelector(".tiles .tile");
await live.close();

// Pictures.
for (const [name, address, look] of [
  ["dashboard-run", `${url}#/run/${liveRun}`, { height: 1000 }],
  ["dashboard-curves", `${url}#/`, { scheme: "dark", height: 860 }],
  ["dashboard-phone", `${url}#/run/${liveRun}`, { width: 390, height: 844 }],
  ["dashboard-table", `${url}#/runs`, {}],
]) {
  const view = await open(address, look);
  await view.waitForTimeout(1500);
  const wide = await view.evaluate(() => document.documentElement.scrollWidth > innerWidth || document.querySelector("main").scrollWidth > document.querySelector("main").clientWidth);
  if (wide) errors.push(`${name} is wider than the window`);
  await view.screenshot({ path: `${pictures}/${name}.png` });
  await view.close();
}
result.errors = errors;
console.log(JSON.stringify(result));
await browser.close();
