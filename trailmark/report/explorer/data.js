// What the page holds, unpacked, and what follows from it. Sums are of double precision.
const byId = (id) => document.getElementById(id);
const about = JSON.parse(byId("about").textContent);

class TooOld extends Error {}

async function unpack(progress) {
  if (typeof DecompressionStream === "undefined") {
    throw new TooOld("This browser cannot unpack the page's data. Use one of 2023 or later.");
  }
  const holder = byId("data");
  const packed = holder.textContent;
  holder.textContent = "";
  const step = 1 << 21; // characters, a multiple of 4
  const parts = [];
  for (let at = 0; at < packed.length; at += step) {
    const bytes = atob(packed.slice(at, at + step));
    const part = new Uint8Array(bytes.length);
    for (let i = 0; i < bytes.length; i++) part[i] = bytes.charCodeAt(i);
    parts.push(part);
    progress(at / packed.length);
    await new Promise((done) => setTimeout(done));
  }
  progress(1);
  const stream = new Blob(parts).stream().pipeThrough(new DecompressionStream("gzip"));
  return arraysOf(await new Response(stream).arrayBuffer());
}

function arraysOf(buffer) {
  const kinds = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };
  const found = {};
  for (const { name, type, offset, length } of about.arrays) found[name] = new kinds[type](buffer, offset, length);
  return found;
}

// a character of UTF-16 per unit: offsets of tokens count those
function documentOf(arrays) {
  const T = about.tokens, C = about.chunks, G = about.num_groups;
  const { token_chars, chunk_tokens, losses, losses_without, read_starts, read_chunks, read_weights, read_rest } = arrays;
  const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(arrays.text);
  const charStarts = new Uint32Array(T + 1);
  for (let t = 0; t < T; t++) charStarts[t + 1] = charStarts[t] + token_chars[t];
  if (charStarts[T] !== text.length) throw new Error("its tokens and its text do not fit");

  const gain = new Float64Array(C), loss = new Float64Array(C), without = new Float64Array(C);
  const bearing = new Uint32Array(C);
  let helped = 0, total = 0, totalWithout = 0;
  for (let c = 0; c < C; c++) {
    for (let t = chunk_tokens[c]; t < chunk_tokens[c + 1]; t++) {
      if (Number.isNaN(losses[t])) continue;
      loss[c] += losses[t];
      without[c] += losses_without[t];
      gain[c] += losses_without[t] - losses[t];
      total += losses[t];
      totalWithout += losses_without[t];
      bearing[c]++;
      if (losses_without[t] > losses[t]) helped++;
    }
  }

  const entries = read_chunks.length;
  const reader = new Uint32Array(entries), group = new Uint16Array(entries);
  const timesRead = new Uint32Array(C), age = new Float64Array(C).fill(NaN);
  for (let c = 0; c < C; c++) {
    let weights = 0, distance = 0;
    for (let g = 0; g < G; g++) {
      for (let e = read_starts[c * G + g]; e < read_starts[c * G + g + 1]; e++) {
        reader[e] = c;
        group[e] = g;
        timesRead[read_chunks[e]]++;
        weights += read_weights[e];
        distance += read_weights[e] * (chunk_tokens[c] - chunk_tokens[read_chunks[e]]);
      }
    }
    if (weights > 0) age[c] = distance / weights;
  }
  // who read a chunk: its entries lie from byStarts[chunk] to byStarts[chunk + 1]
  const byStarts = new Uint32Array(C + 1);
  for (let c = 0; c < C; c++) byStarts[c + 1] = byStarts[c] + timesRead[c];
  const place = byStarts.slice(), byEntries = new Uint32Array(entries);
  for (let e = 0; e < entries; e++) byEntries[place[read_chunks[e]]++] = e;

  return {
    T, C, G, text, charStarts, gain, loss, without, bearing, timesRead, age, reader, group, byStarts, byEntries,
    helped, total, totalWithout,
    tokens: chunk_tokens, losses, lossesWithout: losses_without,
    readStarts: read_starts, readChunks: read_chunks, readWeights: read_weights,
    readRest: read_rest ?? null, // where not all that was read is listed
  };
}

const chunkText = (doc, c) => doc.text.slice(doc.charStarts[doc.tokens[c]], doc.charStarts[doc.tokens[c + 1]]);
const tokenText = (doc, t) => doc.text.slice(doc.charStarts[t], doc.charStarts[t + 1]);
// a chunk's tokens as they are shown, with the places of their text and the sum of their gains: a token without a
// character of its own (a byte of one that the next token ends) goes with the next, at a chunk's end with the last; and
// what changes the letter before it, an accent or the rest of an emoji, with that
const JOINS = /^[\p{M}\p{EMod}\u200d]/u;
function piecesOf(doc, c) {
  const found = [];
  let first = doc.tokens[c], gain = NaN;
  for (let t = first; t < doc.tokens[c + 1]; t++) {
    const own = tokenGain(doc, t);
    if (!Number.isNaN(own)) gain = (Number.isNaN(gain) ? 0 : gain) + own;
    if (doc.charStarts[t + 1] === doc.charStarts[t] && t + 1 < doc.tokens[c + 1]) continue;
    const last = found.at(-1), from = doc.charStarts[first], to = doc.charStarts[t + 1];
    if (last && (from === to || JOINS.test(doc.text.slice(from, Math.min(to, from + 2))) || doc.text[from - 1] === "\u200d")) {
      last.end = t + 1;
      last.to = to;
      last.gain += gain;
    } else found.push({ first, end: t + 1, from, to, gain });
    [first, gain] = [t + 1, NaN];
  }
  return found;
}
const tokenGain = (doc, t) => doc.lossesWithout[t] - doc.losses[t];

// the entries of the `most` heaviest readings of a chunk, the heaviest first, of equal ones the earliest; there may be
// tens of thousands, so that not all are sorted by comparing
let asked = { chunk: -1, most: 0, entries: [] };
function readersOf(doc, c, most) {
  if (asked.chunk === c && asked.most >= most) return asked.entries.slice(0, most);
  const all = doc.byEntries.subarray(doc.byStarts[c], doc.byStarts[c + 1]), weights = doc.readWeights;
  const sorted = Float32Array.from(all, (e) => weights[e]).sort();
  const least = all.length > most ? sorted[all.length - most] : -Infinity;
  const entries = Array.from(all.filter((e) => weights[e] >= least));
  entries.sort((a, b) => weights[b] - weights[a] || a - b);
  asked = { chunk: c, most, entries: entries.slice(0, most) };
  return asked.entries;
}

// the last place of an ascending array whose value is at most the given one
function lastAtMost(sorted, value, count) {
  let low = 0, high = count;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}
const chunkOfCharacter = (doc, at) => lastAtMost(doc.tokens, lastAtMost(doc.charStarts, at, doc.T), doc.C);

// the files of which a chunk holds tokens: more than one where a file ends within it
function sourcesOf(doc, c) {
  const stop = doc.tokens[c + 1], begun = about.sources.filter((source) => source.first_token < stop);
  const ends = (n) => begun[n + 1]?.first_token ?? stop;
  return begun.filter((source, n) => ends(n) > doc.tokens[c] && ends(n) > source.first_token).map((source) => source.name);
}

// characters that a reader cannot see, or that would disturb the text around them, as signs; but not what joins letters
// and emoji, or keeps them apart (U+200C, U+200D)
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;
function signOf(character) {
  const code = character.charCodeAt(0);
  if (code === 10) return "\u21b5\n";
  if (code === 9) return "\u21e5";
  return code < 32 ? String.fromCharCode(0x2400 + code) : "\ufffd";
}
const visible = (text) => text.replace(UNSEEN, signOf);
const oneLine = (text, most) => {
  const flat = text.replace(/\s+/g, " ").replace(UNSEEN, "\ufffd").trim();
  return flat.length > most ? flat.slice(0, most).replace(/[\ud800-\udbff]$/, "") + "\u2026" : flat;
};

const whole = new Intl.NumberFormat("en");
const count = (value) => whole.format(value);
const signed = (value, digits = 3) => (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(digits);
const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

// an element with properties, data and children; text only ever becomes text
function make(tag, { text, data, ...properties } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && name !== "style") made[name] = value;
    else made.setAttribute(name, value);
  }
  if (data) Object.assign(made.dataset, data);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}
const linkTo = (c, text) => make("a", { href: `#chunk=${c}`, text: text ?? `chunk ${count(c)}` });
