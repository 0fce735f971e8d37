// Search, jump, and the list of the strongest retrievals.
const ROWS = 25;

// each letter at its place: one alone becomes two otherwise; and one sigma, whether it ends a word or not
const inSmallLetters = (text) => text.replaceAll("\u0130", "i").toLowerCase().replaceAll("\u03c2", "\u03c3");

class Search {
  constructor(doc, strip, choose) {
    Object.assign(this, { doc, strip, choose, at: -1, places: new Uint32Array(0), length: 0 });
    this.box = byId("search");
    this.box.addEventListener("input", () => this.find(this.box.value));
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        this.step(event.shiftKey ? -1 : 1);
      } else if (event.key === "Escape") {
        this.box.value = "";
        this.find("");
      }
    });
    byId("search-next").addEventListener("click", () => this.step(1));
    byId("search-previous").addEventListener("click", () => this.step(-1));
  }

  get lower() {
    this.lowered ??= inSmallLetters(this.doc.text);
    return this.lowered;
  }

  find(words) {
    const { doc, lower } = this, wanted = inSmallLetters(words);
    this.at = -1;
    this.length = wanted.length;
    let found = new Uint32Array(1024), many = 0;
    if (wanted) {
      for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, at + wanted.length)) {
        if (many === found.length) {
          const larger = new Uint32Array(2 * many);
          larger.set(found);
          found = larger;
        }
        found[many++] = at;
      }
    }
    this.places = found.subarray(0, many);
    const chunks = [];
    let t = 0, c = 0;
    for (const at of this.places) {
      while (doc.charStarts[t + 1] <= at) t++;
      if (doc.tokens[c + 1] <= t) {
        c = lastAtMost(doc.tokens, t, doc.C);
      } else if (chunks.length && chunks.at(-1) === c) continue;
      chunks.push(c);
    }
    this.strip.hits = many ? { chunks } : null;
    this.strip.draw();
    this.tell(wanted ? `${plural(many, "match").replace("matchs", "matches")} in ${plural(chunks.length, "chunk")}` : "");
    for (const id of ["search-next", "search-previous"]) byId(id).disabled = !many;
  }

  tell(text) {
    byId("matches").textContent = text;
  }

  step(by) {
    const many = this.places.length;
    if (!many) return;
    this.at = this.at < 0 && by < 0 ? many - 1 : (this.at + by + many) % many;
    const from = this.places[this.at];
    this.tell(`match ${count(this.at + 1)} of ${count(many)}`);
    this.choose(chunkOfCharacter(this.doc, from), false, [from, from + this.length]);
  }
}

function jumpTo(doc, wanted, choose) {
  const percent = /^\s*([\d.]+)\s*%\s*$/.exec(wanted), number = /^\s*#?(\d[\d,]*)\s*$/.exec(wanted);
  if (percent && Number(percent[1]) <= 100) {
    const token = Math.min(doc.T - 1, Math.floor((Number(percent[1]) / 100) * doc.T));
    return choose(lastAtMost(doc.tokens, token, doc.C), true);
  }
  const c = number ? Number(number[1].replaceAll(",", "")) : NaN;
  if (c >= 0 && c < doc.C) return choose(c, true);
  say(`There is no ${oneLine(wanted, 40) || "such place"}: write a chunk from 0 to ${count(doc.C - 1)}, or a percentage like 42%.`);
}

// the strongest retrievals: the best of all entries are kept in a heap, so that no list of them all is sorted
class Strongest {
  constructor(doc) {
    this.doc = doc;
    this.page = 0;
    for (const id of ["sort", "far", "which-group"]) {
      byId(id).addEventListener("change", () => this.show(0));
    }
    byId("list-next").addEventListener("click", () => this.show(this.page + 1));
    byId("list-previous").addEventListener("click", () => this.show(this.page - 1));
    this.show(0);
  }

  key(kind) {
    const { doc } = this;
    const distance = (e) => doc.tokens[doc.reader[e]] - doc.tokens[doc.readChunks[e]];
    if (kind === "distance") return distance;
    if (kind === "gain") return (e) => doc.gain[doc.reader[e]] * doc.readWeights[e];
    return (e) => doc.readWeights[e];
  }

  best(wanted) {
    const { doc } = this, key = this.key(byId("sort").value);
    const far = Number(byId("far").value), group = Number(byId("which-group").value);
    const heap = [], keys = [];
    // the worst on top: the smaller key, of equal ones the later entry
    const worse = (i, j) => keys[i] < keys[j] || (keys[i] === keys[j] && heap[i] > heap[j]);
    const swap = (i, j) => {
      [heap[i], heap[j]] = [heap[j], heap[i]];
      [keys[i], keys[j]] = [keys[j], keys[i]];
    };
    const down = (i) => {
      for (;;) {
        let least = i;
        for (const child of [2 * i + 1, 2 * i + 2]) if (child < heap.length && worse(child, least)) least = child;
        if (least === i) return;
        swap(i, least);
        i = least;
      }
    };
    let many = 0;
    for (let e = 0; e < doc.reader.length; e++) {
      if (group >= 0 && doc.group[e] !== group) continue;
      if (doc.tokens[doc.reader[e]] - doc.tokens[doc.readChunks[e]] < far) continue;
      many++;
      const value = key(e);
      if (heap.length < wanted) {
        heap.push(e);
        keys.push(value);
        for (let i = heap.length - 1; i && worse(i, (i - 1) >> 1); i = (i - 1) >> 1) swap(i, (i - 1) >> 1);
      } else if (value > keys[0]) {
        heap[0] = e;
        keys[0] = value;
        down(0);
      }
    }
    const order = heap.map((_, i) => i).sort((i, j) => keys[j] - keys[i] || heap[i] - heap[j]);
    return { entries: order.map((i) => heap[i]), many };
  }

  show(page) {
    const { doc } = this;
    this.page = Math.max(0, page);
    const { entries, many } = this.best((this.page + 1) * ROWS);
    const first = this.page * ROWS;
    const rows = entries.slice(first, first + ROWS).map((e) => {
      const reader = doc.reader[e], chunk = doc.readChunks[e];
      return make("tr", { data: { reader, chunk, group: doc.group[e], weight: doc.readWeights[e] } },
        make("th", { scope: "row" }, linkTo(reader)),
        make("td", {}, linkTo(chunk)),
        make("td", { className: "number", text: count(doc.group[e]) }),
        make("td", { className: "number", text: doc.readWeights[e].toFixed(3) }),
        make("td", { className: "number", text: count(doc.tokens[reader] - doc.tokens[chunk]) }),
        make("td", { className: "number", text: signed(doc.gain[reader]) }),
        make("td", { className: "words" }, make("bdi", { text: oneLine(chunkText(doc, chunk), 70) })));
    });
    byId("strongest").tBodies[0].replaceChildren(...rows);
    byId("list-place").textContent = many
      ? `${count(first + 1)}\u2013${count(first + rows.length)} of ${count(many)}`
      : "none so far back";
    byId("list-previous").disabled = this.page === 0;
    byId("list-next").disabled = first + ROWS >= many;
  }
}
