// The chosen chunk: its tokens, what it read, who read it.
const CONTEXT = 400; // characters before and after a chunk
const EXTREME = 8; // tokens of each end in the table
const READERS = 100; // shown at first

const colourOf = (share) => {
  const strength = Math.round(Math.min(1, Math.abs(share)) * 75);
  return strength ? `color-mix(in srgb, var(--series-${share > 0 ? 1 : 2}) ${strength}%, transparent)` : "";
};

class ChunkPanel {
  constructor(doc, gainScale) {
    this.doc = doc;
    this.gainScale = gainScale;
    this.box = byId("chunk-text");
    this.tip = byId("tip");
    this.box.addEventListener("pointerover", (event) => this.hover(event));
    this.box.addEventListener("pointerleave", () => (this.tip.hidden = true));
    byId("all-readers").addEventListener("click", () => this.readers(this.chosen, Infinity));
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
    this.box.dataset.chunk = c;
  }

  heading(c) {
    const { doc } = this, first = doc.tokens[c], last = doc.tokens[c + 1] - 1, file = sourceOf(first);
    byId("chunk-number").textContent = `Chunk ${count(c)}`;
    const place = `of ${count(doc.C)} \u00b7 tokens ${count(first)}\u2013${count(last)} \u00b7 ${((100 * first) / doc.T).toFixed(1)} % of the text`;
    byId("chunk-place").replaceChildren(place, ...(file === null ? [] : [" \u00b7 ", make("bdi", { text: oneLine(file, 80) })]));
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
    for (let t = doc.tokens[c]; t < doc.tokens[c + 1]; t++) {
      const gain = tokenGain(doc, t), token = make("span", { text: visible(tokenText(doc, t)) });
      token.dataset.token = t;
      if (!Number.isNaN(gain)) token.style.backgroundColor = colourOf(gain / this.gainScale);
      if (mark && doc.charStarts[t] < mark[1] && doc.charStarts[t + 1] > mark[0]) token.className = "match";
      own.append(token);
    }
    parts.append(own, around(last, Math.min(doc.text.length, last + CONTEXT)));
    box.replaceChildren(parts);
  }

  hover(event) {
    const t = Number(event.target.dataset?.token ?? NaN), { doc, tip } = this;
    if (Number.isNaN(t)) return (tip.hidden = true);
    const gain = tokenGain(doc, t);
    const says = Number.isNaN(gain)
      ? "the first token of the text bears no loss"
      : `gain ${signed(gain)} \u00b7 loss ${doc.losses[t].toFixed(3)} with retrieval, ${doc.lossesWithout[t].toFixed(3)} without`;
    tip.replaceChildren(make("strong", { text: `Token ${count(t)}` }), make("span", { text: ` \u00b7 ${says}` }));
    tip.hidden = false;
    const at = event.target.getClientRects()[0];
    placeTip(tip, at.left + at.width / 2, at.bottom + 6);
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
      const name = `${about.group_name[0].toUpperCase()}${about.group_name.slice(1)} ${g + 1}`;
      const title = make("h4", {}, make("span", { className: "swatch", style: `background:var(--series-${groupColour(g)})` }), name);
      groups.push(make("section", { className: "group" }, title,
        entries.length ? make("ol", {}, ...list) : make("p", { className: "none", text: "reads nothing" })));
    }
    byId("reads").replaceChildren(...groups);
  }

  surroundings(details, c) {
    const { doc } = this;
    const near = [c - 1, c, c + 1].filter((n) => n >= 0 && n < doc.C);
    details.append(...near.map((n) => make("p", { className: "excerpt" }, linkTo(n), " ", make("bdi", { text: visible(chunkText(doc, n)) }))));
  }

  readers(c, most) {
    const { doc } = this, entries = [...doc.byEntries.subarray(doc.byStarts[c], doc.byStarts[c + 1])];
    entries.sort((a, b) => doc.readWeights[b] - doc.readWeights[a] || a - b);
    const shown = entries.slice(0, most).map((e) => {
      const other = doc.reader[e], item = this.entry(e, other, doc.tokens[other] - doc.tokens[c], "later");
      item.append(make("p", { className: "excerpt short" }, make("bdi", { text: oneLine(chunkText(doc, other), 160) })));
      return item;
    });
    byId("read-by").replaceChildren(...shown);
    byId("nobody").hidden = entries.length > 0;
    const rest = byId("all-readers");
    rest.hidden = entries.length <= most;
    rest.textContent = `Show all ${count(entries.length)}`;
  }
}

const groupColour = (g) => [3, 4, 5, 6, 7, 8, 1, 2][g % 8];

// a place in the text that does not cut a character in two
function whole16(doc, at) {
  const code = doc.text.charCodeAt(at);
  return code >= 0xdc00 && code <= 0xdfff && at > 0 ? at - 1 : at;
}
