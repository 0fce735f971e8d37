// The whole text as a strip of chunks, above it an overview. The view is a stretch of chunks, [start, end).
const ARCS = 104, CELLS = 100, BELOW = 60, AXIS = 22, OVERVIEW = 36; // heights in pixels
const NARROWEST = 0.6; // chunks in view at most zoom
const TOKENS_FROM = 80; // pixels of a cell from which on its tokens are written in it
const MOST_ARCS = 400; // of those who read the chosen chunk
const LETTERS = [16, 14, 12.5, 11]; // their sizes: the largest with which the chunks in view fit
const LINE = 1.42; // of a letter's size

class Strip {
  constructor(doc, gainScale, choose) {
    Object.assign(this, { doc, gainScale, choose, start: 0, end: doc.C, chosen: null, hits: null });
    this.canvas = byId("strip");
    this.overview = byId("overview");
    this.tip = byId("tip");
    this.pictures = new Map(); // kept ones, by name
    this.kinds = shadings(doc);
    this.colours = readColours();
    this.shading = document.querySelector("input[name=shade]:checked").value;
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    this.resize();
    new Pointers(this);
  }

  // --- the view ---------------------------------------------------------------------------------------------

  setView(start, end) {
    const span = Math.max(Math.min(NARROWEST, this.doc.C), Math.min(this.doc.C, end - start));
    const middle = (start + end) / 2;
    this.start = Math.max(0, Math.min(this.doc.C - span, middle - span / 2));
    this.end = this.start + span;
    this.draw();
  }

  zoom(factor, at = (this.start + this.end) / 2) {
    const span = Math.max(Math.min(NARROWEST, this.doc.C), Math.min(this.doc.C, (this.end - this.start) * factor));
    const share = (at - this.start) / (this.end - this.start);
    this.setView(at - share * span, at - share * span + span);
  }

  pan(chunks) {
    this.setView(this.start + chunks, this.end + chunks);
  }

  show(c) {
    const span = this.end - this.start;
    if (c < this.start || c + 1 > this.end) this.setView(c + 0.5 - span / 2, c + 0.5 + span / 2);
    this.draw();
  }

  setChosen(c) {
    this.chosen = c;
    this.show(c);
  }

  setShading(kind) {
    this.shading = kind;
    this.draw();
  }

  recolour() {
    this.colours = readColours();
    this.pictures.clear();
    this.draw();
  }

  resize() {
    const ratio = devicePixelRatio || 1, width = this.canvas.parentElement.clientWidth;
    this.width = width;
    for (const [canvas, height] of [[this.canvas, ARCS + CELLS + BELOW + AXIS], [this.overview, OVERVIEW]]) {
      canvas.width = Math.max(1, Math.round(width * ratio));
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    this.paint();
  }

  // --- drawing ----------------------------------------------------------------------------------------------

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.paint();
    });
  }

  context(canvas) {
    const context = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, canvas.height);
    return context;
  }

  x(chunk) {
    return ((chunk - this.start) / (this.end - this.start)) * this.width;
  }

  chunkAt(x) {
    const at = this.start + (x / this.width) * (this.end - this.start);
    return Math.max(0, Math.min(this.doc.C - 1, Math.floor(at)));
  }

  colour(value) {
    if (Number.isNaN(value)) return this.colours.shade;
    const kind = this.kinds[this.shading], share = kind.scale(value);
    if (kind.diverging) return mixed(this.colours, share);
    return this.colours.ramp[Math.max(0, Math.min(10, Math.round(share * 10)))];
  }

  // chunks from first to last side by side; where several share a pixel, their mean, and above it their extreme
  cells(context, first, last, x, top, height) {
    const { values } = this.kinds[this.shading], edge = Math.min(7, height / 4);
    let c = first;
    while (c < last) {
      const left = x(c);
      let stop = c + 1;
      const wide = x(stop) - left;
      if (wide >= 1) {
        context.fillStyle = this.colour(values[c]);
        // from pixel to pixel: no seams between them
        const begin = Math.floor(left);
        context.fillRect(begin, top, Math.max(1, Math.floor(x(stop)) - begin - (wide > 4 ? 1 : 0)), height);
      } else {
        const pixel = Math.floor(left);
        let sum = 0, many = 0, extreme = NaN;
        for (stop = c; stop < last && Math.floor(x(stop)) <= pixel; stop++) {
          const value = values[stop];
          if (Number.isNaN(value)) continue;
          sum += value;
          many++;
          if (!(Math.abs(value) <= Math.abs(extreme))) extreme = value;
        }
        context.fillStyle = this.colour(many ? sum / many : NaN);
        context.fillRect(pixel, top + edge, 1, height - edge);
        context.fillStyle = this.colour(extreme);
        context.fillRect(pixel, top, 1, edge);
      }
      c = stop;
    }
  }

  // draws what was drawn the last time, if nothing has changed on which it depends
  kept(name, context, height, key, draw) {
    const ratio = devicePixelRatio || 1;
    key = `${key} ${this.shading} ${this.width} ${ratio}`;
    let own = this.pictures.get(name);
    if (own?.key !== key) {
      const canvas = document.createElement("canvas");
      canvas.width = Math.max(1, Math.round(this.width * ratio));
      canvas.height = Math.round(height * ratio);
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      draw(pen);
      own = { key, canvas };
      this.pictures.set(name, own);
    }
    context.drawImage(own.canvas, 0, 0, own.canvas.width / ratio, own.canvas.height / ratio);
  }

  paint() {
    if (!this.width) return;
    this.paintOverview();
    const context = this.context(this.canvas), { doc } = this;
    const first = Math.max(0, Math.floor(this.start)), last = Math.min(doc.C, Math.ceil(this.end));
    this.kept("strip", context, ARCS + CELLS, `${this.start} ${this.end}`, (own) =>
      this.cells(own, first, last, (c) => this.x(c), ARCS, CELLS));
    if (this.x(first + 1) - this.x(first) >= TOKENS_FROM) {
      const size = this.letters(first, last);
      for (let c = first; c < last; c++) this.writeTokens(context, c, size);
    }
    this.axis(context);
    this.marks(context, first, last);
    this.files(context);
    if (this.chosen !== null) this.paintChosen(context);
  }

  paintOverview() {
    const context = this.context(this.overview), { doc, width } = this;
    this.kept("overview", context, OVERVIEW, "", (own) =>
      this.cells(own, 0, doc.C, (c) => (c / doc.C) * width, 4, OVERVIEW - 8));
    const left = (this.start / doc.C) * width, wide = Math.max(3, ((this.end - this.start) / doc.C) * width);
    context.fillStyle = this.colours.paper;
    context.globalAlpha = 0.55;
    context.fillRect(0, 0, left, OVERVIEW);
    context.fillRect(left + wide, 0, width, OVERVIEW);
    context.globalAlpha = 1;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 1, Math.max(1.5, Math.min(wide, width - left) - 1.5), OVERVIEW - 2);
    if (this.hits) {
      context.fillStyle = this.colours.mark;
      this.ticks((c) => (c / doc.C) * width, 0, doc.C, (x) => context.fillRect(x, OVERVIEW - 6, 2, 6));
    }
    if (this.chosen !== null) {
      context.fillStyle = this.colours.link;
      context.fillRect(((this.chosen + 0.5) / doc.C) * width - 1, 0, 2, OVERVIEW);
    }
  }

  letters(first, last) {
    const { doc } = this;
    let most = 1;
    for (let c = first; c < last; c++) most = Math.max(most, doc.charStarts[doc.tokens[c + 1]] - doc.charStarts[doc.tokens[c]]);
    const room = Math.min(this.width, this.x(first + 1) - this.x(first)) - 11;
    const fits = (size) => Math.floor(room / (0.61 * size)) * Math.floor((CELLS - 12) / (LINE * size)) >= 1.07 * most;
    return LETTERS.find(fits) ?? LETTERS.at(-1);
  }

  // a chunk's tokens in its cell, each on the colour of its gain, line by line; dots where they have no more room
  writeTokens(context, c, size) {
    const { doc, colours } = this, high = LINE * size, begin = this.x(c), cell = this.x(c + 1) - begin - 1;
    const left = Math.max(0, begin) + 5, right = Math.min(this.width, begin + cell) - 5;
    const lines = Math.floor((CELLS - 12) / high);
    if (right - left < 3 * size) return;
    context.fillStyle = colours.raised;
    context.fillRect(begin, ARCS + 6, cell, CELLS - 6); // above it the chunk's own shade is still seen
    context.font = `${size}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
    context.textBaseline = "middle";
    context.direction = "ltr";
    let x = left, line = 0;
    for (const piece of piecesOf(doc, c)) {
      const ground = mixed(colours, colours.strength * Math.max(-1, Math.min(1, piece.gain / this.gainScale)));
      const shown = oneLineToken(doc.text.slice(piece.from, Math.min(piece.to, piece.from + 600)));
      for (const part of shown.length > 12 ? shown : [shown]) {
        const wide = context.measureText(part).width;
        if (x + wide > right && x > left) {
          x = left;
          line++;
        }
        const y = ARCS + 9 + (line + 0.5) * high;
        if (line >= lines) {
          context.fillStyle = colours.raised;
          context.fillRect(right - size, y - 1.5 * high, size, high);
          context.fillStyle = colours.muted;
          context.fillText("\u2026", right - size, y - high);
          return;
        }
        context.fillStyle = ground;
        context.fillRect(x, y - high / 2 + 1, wide, high - 2);
        context.fillStyle = colours.ink;
        context.fillText(part, x, y, right - left);
        x += wide;
      }
    }
  }

  marks(context, first, last) {
    if (!this.hits) return;
    context.fillStyle = this.colours.mark;
    const wide = Math.max(2, Math.min(8, this.x(1) - this.x(0)));
    this.ticks((c) => this.x(c + 0.5), first, last, (x) => context.fillRect(x - wide / 2, ARCS + CELLS + 2, wide, 6));
  }

  // where chunks with a match lie, no pixel twice
  ticks(place, first, last, draw) {
    let before = -1;
    for (const c of this.hits.chunks) {
      if (c < first || c >= last) continue;
      const x = Math.floor(place(c));
      if (x !== before) draw(x);
      before = x;
    }
  }

  // between chunks' numbers and tokens' numbers, fractions of both
  tokenAt(place) {
    const { doc } = this, c = Math.min(doc.C - 1, Math.floor(place));
    return doc.tokens[c] + (place - c) * (doc.tokens[c + 1] - doc.tokens[c]);
  }

  placeOf(token) {
    const { doc } = this, c = lastAtMost(doc.tokens, token, doc.C);
    return c + (token - doc.tokens[c]) / (doc.tokens[c + 1] - doc.tokens[c]);
  }

  // token numbers; a chunk is as wide as any other, so they stand at the chunks that hold them
  axis(context) {
    const { width, colours } = this, y = ARCS + CELLS + BELOW;
    const [low, high] = [this.tokenAt(this.start), this.tokenAt(this.end)];
    const rough = (high - low) / Math.max(2, width / 130), power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(1, [1, 2, 5, 10].find((n) => n * power >= rough) * power);
    context.fillStyle = colours.rule;
    context.fillRect(0, y, width, 1);
    context.fillStyle = colours.muted;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    for (let at = Math.ceil(low / step) * step, first = true; at <= high; at += step, first = false) {
      const x = this.x(this.placeOf(at)), says = first ? `token ${count(at)}` : count(at);
      const wide = context.measureText(says).width;
      context.fillRect(x, y, 1, 5);
      context.fillText(says, Math.max(0, Math.min(width - wide, x - wide / 2)), y + 7);
    }
  }

  files(context) {
    if (about.sources.length < 2) return;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    let free = -Infinity;
    const inView = this.tokenAt(this.start);
    const current = about.sources.findLast((source) => source.first_token <= inView);
    for (const source of about.sources) {
      const begin = this.x(this.placeOf(source.first_token));
      if (begin > this.width) break;
      // of the files that began before the view the last one is named
      if (begin < -1 && source !== current) continue;
      const x = Math.max(0, begin);
      context.fillStyle = this.colours.muted;
      if (begin >= 0) context.fillRect(x, 0, 1, ARCS + CELLS);
      const name = oneLine(source.name, 28);
      if (x < free) continue;
      context.fillText(name, x + 4, 1);
      free = x + context.measureText(name).width + 12;
    }
  }

  paintChosen(context) {
    const { doc, chosen, colours } = this, from = this.x(chosen + 0.5);
    const wide = Math.max(2, this.x(chosen + 1) - this.x(chosen));
    context.strokeStyle = colours.link;
    context.lineWidth = 2;
    context.strokeRect(from - wide / 2, ARCS - 1, wide, CELLS + 2);
    for (let g = 0; g < doc.G; g++) {
      const begin = doc.readStarts[chosen * doc.G + g], stop = doc.readStarts[chosen * doc.G + g + 1];
      for (let e = begin; e < stop; e++) {
        this.arc(context, from, this.x(doc.readChunks[e] + 0.5), doc.readWeights[e], g, ARCS - 2, -1, ARCS - 16);
      }
    }
    const later = readersOf(doc, chosen, MOST_ARCS), faint = Math.min(1, Math.sqrt(40 / later.length));
    for (const e of later.slice().reverse()) {
      const to = this.x(doc.reader[e] + 0.5);
      this.arc(context, from, to, doc.readWeights[e], doc.group[e], ARCS + CELLS + 7, 1, BELOW - 10, faint);
    }
  }

  arc(context, from, to, weight, g, base, side, most, faint = 1) {
    const middle = (from + to) / 2, half = Math.abs(to - from) / 2;
    context.strokeStyle = this.colours.groups[g % this.colours.groups.length];
    context.globalAlpha = faint * (0.35 + 0.65 * Math.min(1, weight));
    context.lineWidth = 1 + 3 * Math.min(1, weight);
    context.beginPath();
    const high = Math.min(most, 12 + half * 0.6);
    context.ellipse(middle, base, Math.max(0.5, half), high, 0, 0, Math.PI, side < 0);
    context.stroke();
    context.fillStyle = context.strokeStyle;
    context.fillRect(to - 2, base - (side < 0 ? 1 : 2), 4, 3);
    context.globalAlpha = 1;
  }
}

const oneLineToken = (text) => text.replace(/\n/g, "\u21b5").replace(UNSEEN, signOf);

function placeTip(tip, x, y) {
  const width = tip.offsetWidth, room = document.documentElement.clientWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(room - width, x - width / 2))}px`;
  tip.style.top = `${y}px`;
}
