// The chosen chunk: its tokens, what it read, who read it.
const CONTEXT = 240; // characters before and after a chunk
const EXTREME = 8; // tokens of each end in the table
const READERS = 100; // shown at first
const MORE = 500; // shown in addition

class ChunkPanel {
  constructor(doc, gainScale) {
    this.doc = doc;
    this.gainScale = gainScale;
    this.box = byId("chunk-text");
    this.tip = byId("tip");
    this.box.addEventListener("pointerover", (event) => this.hover(event));
    this.box.addEventListener("pointerleave", () => (this.tip.hidden = true));
    byId("more-readers").addEventListener("click", () => this.readers(this.chosen, this.shown + MORE));
  }

  // mark: the place [from, to) of a match in the text, or null
  show(c, mark) {
    this.chosen = c;
    this.tip.hidden = true;
    this.heading(c);
    this.text(c, mark);
    this.extremes(c);
    this.reads(c);
    this.readers(c, READERS);
    // when all stands there: what asks for a place has the page laid out
    const own = this.box.querySelector(".own"), line = parseFloat(getComputedStyle(this.box).lineHeight);
    this.box.scrollTop = own.offsetTop - 3 * line;
    this.box.dataset.chunk = c;
    markShared(this.doc, c, this.box, byId("reads"));
  }

  heading(c) {
    const { doc } = this, first = doc.tokens[c], last = doc.tokens[c + 1] - 1;
    byId("chunk-number").textContent = `Chunk ${count(c)}`;
    const place = `of ${count(doc.C)} \u00b7 tokens ${count(first)}\u2013${count(last)} \u00b7 ${((100 * first) / doc.T).toFixed(1)}% of the text`;
    byId("chunk-place").replaceChildren(place, ...sourcesOf(doc, c).flatMap((file, n) => [n ? ", " : " \u00b7 ", make("bdi", { text: oneLine(file, 80), title: file })]));
    const number = (id, value, shown) => {
      byId(id).dataset.value = String(value);
      byId(id).textContent = shown;
    };
    const bears = doc.bearing[c];
    number("gain", doc.gain[c], signed(doc.gain[c]));
    byId("gain-per-token").textContent = bears ? `${signed(doc.gain[c] / bears)} a token` : "no token bears a loss";
    number("chunk-loss", doc.loss[c], bears ? (doc.loss[c] / bears).toFixed(3) : "\u2013");
    number("chunk-loss-without", doc.without[c], bears ? (doc.without[c] / bears).toFixed(3) : "\u2013");
    number("times-read", doc.timesRead[c], count(doc.timesRead[c]));
    number("age", doc.age[c], Number.isNaN(doc.age[c]) ? "\u2013" : count(Math.round(doc.age[c])));
  }

  text(c, mark) {
    const { doc, box } = this, first = doc.charStarts[doc.tokens[c]], last = doc.charStarts[doc.tokens[c + 1]];
    const parts = document.createDocumentFragment();
    const around = (from, to) => make("span", { className: "around", text: visible(doc.text.slice(whole16(doc, from), whole16(doc, to))) });
    parts.append(around(Math.max(0, first - CONTEXT), first));
    const own = make("span", { className: "own" });
    for (const piece of piecesOf(doc, c)) {
      const token = make("span", { text: visible(doc.text.slice(piece.from, piece.to)), data: { token: piece.first, end: piece.end } });
      const share = Math.min(1, Math.abs(piece.gain) / this.gainScale);
      if (share > 0.01) {
        token.className = piece.gain > 0 ? "helped" : "hurt";
        token.style.setProperty("--share", share.toFixed(2));
      }
      if (mark && piece.from < mark[1] && piece.to > mark[0]) token.classList.add("match");
      own.append(token);
    }
    parts.append(own, around(last, Math.min(doc.text.length, last + CONTEXT)));
    box.replaceChildren(parts);
  }

  hover(event) {
    const t = Number(event.target.dataset?.token ?? NaN), { doc, tip } = this;
    if (Number.isNaN(t)) return (tip.hidden = true);
    const lines = [];
    for (let one = t; one < Number(event.target.dataset.end); one++) lines.push(this.tellToken(one));
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const at = event.target.getClientRects()[0];
    placeTip(tip, at.left + at.width / 2, at.bottom + 6);
  }

  tellToken(t) {
    const { doc } = this, gain = tokenGain(doc, t), times = Math.exp(Math.abs(gain));
    const says = Number.isNaN(gain)
      ? "the first token of the text bears no loss"
      : `gain ${signed(gain)} nats: ${times < 1000 ? times.toFixed(times < 10 ? 2 : 0) : times.toExponential(0)} times ${
          gain < 0 ? "less" : "as"} likely \u00b7 loss ${doc.losses[t].toFixed(3)}, without retrieval ${doc.lossesWithout[t].toFixed(3)}`;
    return make("div", {}, make("strong", { text: `Token ${count(t)}` }), ` \u00b7 ${says}`);
  }

  extremes(c) {
    const { doc } = this, tokens = [];
    for (let t = doc.tokens[c]; t < doc.tokens[c + 1]; t++) if (!Number.isNaN(tokenGain(doc, t))) tokens.push(t);
    tokens.sort((a, b) => tokenGain(doc, b) - tokenGain(doc, a) || a - b);
    const fill = (id, wanted) => {
      const rows = wanted.map((t) => make("tr", {},
        make("th", { scope: "row" }, make("bdi", { className: "token", text: oneLineToken(tokenText(doc, t)) || "\u2205" })),
        make("td", { text: signed(tokenGain(doc, t)) }),
        make("td", { text: doc.losses[t].toFixed(3) }),
        make("td", { text: doc.lossesWithout[t].toFixed(3) })));
      byId(id).replaceChildren(...rows);
    };
    fill("most-helped", tokens.filter((t) => tokenGain(doc, t) > 0).slice(0, EXTREME));
    fill("most-hurt", tokens.filter((t) => tokenGain(doc, t) < 0).slice(-EXTREME).reverse());
  }

  entry(e, other, distance, direction) {
    const { doc } = this, weight = doc.readWeights[e], g = doc.group[e];
    const bar = make("span", { className: "weight", text: weight.toFixed(3) });
    bar.style.setProperty("--share", Math.max(0, Math.min(1, weight)).toFixed(4));
    bar.style.setProperty("--colour", `var(--series-${groupColour(g)})`);
    return make("li", { data: { chunk: other, group: g, weight } },
      make("div", { className: "line" }, linkTo(other), make("span", { className: "distance", text: `${plural(distance, "token")} ${direction}` }), bar));
  }

  reads(c) {
    const { doc } = this, groups = [];
    for (let g = 0; g < doc.G; g++) {
      const entries = [];
      for (let e = doc.readStarts[c * doc.G + g]; e < doc.readStarts[c * doc.G + g + 1]; e++) entries.push(e);
      entries.sort((a, b) => doc.readWeights[b] - doc.readWeights[a] || a - b);
      const list = entries.map((e) => {
        const other = doc.readChunks[e];
        const item = this.entry(e, other, doc.tokens[c] - doc.tokens[other], "back");
        const text = make("p", { className: "excerpt", dir: "ltr" }, make("bdi", { text: visible(chunkText(doc, other)).replace(/\n+$/, "") }));
        const more = make("details", {}, make("summary", { text: "before and after" }));
        more.addEventListener("toggle", () => this.surroundings(more, other), { once: true });
        item.append(text, more);
        return item;
      });
      const name = `${about.group_name[0].toUpperCase()}${about.group_name.slice(1)} ${g}`;
      const title = make("h4", {}, make("span", { className: "swatch", style: `background:var(--series-${groupColour(g)})` }), name);
      groups.push(make("section", { className: "group" }, title,
        entries.length ? make("ol", {}, ...list) : make("p", { className: "none", text: "reads nothing" })));
      const rest = doc.readRest?.[c * doc.G + g];
      if (entries.length && rest > 0) groups.at(-1).append(make("p", { className: "rest fine", text: `Other chunks together: weight ${rest.toFixed(3)}.` }));
    }
    byId("reads").replaceChildren(...groups);
  }

  surroundings(details, c) {
    const { doc } = this;
    const near = [c - 1, c, c + 1].filter((n) => n >= 0 && n < doc.C);
    details.append(...near.map((n) => make("p", { className: "excerpt" }, linkTo(n), " ", make("bdi", { text: visible(chunkText(doc, n)) }))));
  }

  readers(c, most) {
    const { doc } = this, entries = readersOf(doc, c, most), all = doc.timesRead[c];
    const shown = entries.map((e) => {
      const other = doc.reader[e], item = this.entry(e, other, doc.tokens[other] - doc.tokens[c], "later");
      item.append(make("p", { className: "excerpt short" }, make("bdi", { text: oneLine(chunkText(doc, other), 160) })));
      return item;
    });
    byId("read-by").replaceChildren(...shown);
    this.shown = entries.length;
    byId("nobody").hidden = all > 0;
    const rest = byId("more-readers");
    rest.hidden = all <= entries.length;
    rest.textContent = `Show ${count(Math.min(MORE, all - entries.length))} more of ${count(all)}`;
  }
}

const groupColour = (g) => [3, 4, 5, 6, 7, 8, 1, 2][g % 8];

// a place in the text that does not cut a character in two
function whole16(doc, at) {
  const code = doc.text.charCodeAt(at);
  return code >= 0xdc00 && code <= 0xdfff && at > 0 ? at - 1 : at;
}

// --- words that a chunk and what it read share ---------------------------------------------------------------

const WORD = /[\p{L}\p{N}_:]{3,}/gu;
const RARE = 0.01; // of the chunks, at most
let marking = 0;

// underlines, a word at a time while the page rests, the words of the chosen chunk that stand in its reads too and that
// the whole text holds but rarely
async function markShared(doc, c, box, reads) {
  const turn = ++marking;
  if (!globalThis.Highlight || !CSS.highlights) return;
  CSS.highlights.delete("shared");
  byId("shared").hidden = true;
  const wordsOf = (text) => new Set(Array.from(text.matchAll(WORD), ([word]) => word));
  const read = new Set();
  for (let e = doc.readStarts[c * doc.G]; e < doc.readStarts[(c + 1) * doc.G]; e++) {
    for (const word of wordsOf(chunkText(doc, doc.readChunks[e]))) read.add(word);
  }
  const rare = new Set(), most = Math.max(8, RARE * doc.C);
  for (const word of wordsOf(chunkText(doc, c))) {
    if (!read.has(word)) continue;
    await new Promise((done) => setTimeout(done));
    if (turn !== marking) return;
    let seen = 0;
    for (let at = doc.text.indexOf(word); at >= 0 && seen <= most; at = doc.text.indexOf(word, at + word.length)) seen++;
    if (seen <= most) rare.add(word);
  }
  if (!rare.size) return;
  const ranges = [box.querySelector(".own"), ...reads.querySelectorAll(".excerpt bdi")].flatMap((part) => rangesOf(part, rare));
  CSS.highlights.set("shared", new Highlight(...ranges));
  byId("shared").hidden = false;
}

// of each of the words in an element's text, which may stand in several of its nodes
function rangesOf(part, words) {
  const walk = document.createTreeWalker(part, NodeFilter.SHOW_TEXT), nodes = [], starts = [];
  let text = "";
  while (walk.nextNode()) {
    nodes.push(walk.currentNode);
    starts.push(text.length);
    text += walk.currentNode.data;
  }
  const found = [];
  for (const match of text.matchAll(WORD)) {
    if (!words.has(match[0])) continue;
    const range = new Range(), end = match.index + match[0].length;
    const node = (at) => lastAtMost(starts, at, starts.length);
    range.setStart(nodes[node(match.index)], match.index - starts[node(match.index)]);
    range.setEnd(nodes[node(end - 1)], end - starts[node(end - 1)]);
    found.push(range);
  }
  return found;
}
