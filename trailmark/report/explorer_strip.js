// The whole text as a strip of chunks, above it an overview. The view is a stretch of chunks, [start, end).
const ARCS = 104, CELLS = 86, BELOW = 62, OVERVIEW = 34; // heights in pixels
const NARROWEST = 0.6; // chunks in view at most zoom
const TOKENS_FROM = 220; // pixels of a cell from which on its tokens are written in it

// colours of the theme as numbers, looked up again when it changes
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const numbers = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const ramp = [];
  for (let level = 0; level < 11; level++) ramp.push(of(`heat-${level}`));
  return {
    paper: of("paper"), ink: of("ink"), muted: of("muted"), rule: of("rule"), raised: of("raised"), link: of("link"),
    shade: of("shade"), ramp,
    rgbPaper: numbers(of("paper")), rgbHelp: numbers(of("series-1")), rgbHurt: numbers(of("series-2")),
    groups: [3, 4, 5, 6, 7, 8, 1, 2].map((n) => of(`series-${n}`)),
  };
}

// how each way of shading turns a chunk into 0 .. 1 (or -1 .. 1), and what its legend says
function shadings(doc) {
  const quantile = (values, share) => {
    const sorted = Float64Array.from(values).sort();
    return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
  };
  const perToken = new Float64Array(doc.C);
  for (let c = 0; c < doc.C; c++) perToken[c] = doc.bearing[c] ? doc.gain[c] / doc.bearing[c] : NaN;
  const known = perToken.filter((value) => !Number.isNaN(value));
  const widest = quantile(known.map(Math.abs), 0.98) || 1e-3;
  const most = doc.timesRead.reduce((a, b) => Math.max(a, b), 1);
  const ages = doc.age.filter((value) => !Number.isNaN(value));
  const oldest = ages.reduce((a, b) => Math.max(a, b), 2), youngest = ages.reduce((a, b) => Math.min(a, b), oldest);
  const logs = Math.log(oldest / youngest) || 1;
  return {
    read: {
      values: doc.timesRead, diverging: false, ends: ["0", plural(most, "time")],
      scale: (value) => Math.log1p(value) / Math.log1p(most),
      note: "times read by later chunks, logarithmic",
    },
    gain: {
      values: perToken, diverging: true, ends: [`${signed(-widest)} or less`, `${signed(widest)} or more`],
      scale: (value) => Math.max(-1, Math.min(1, value / widest)),
      note: "gain from retrieval in nats a token; the ends are 98 % of all chunks",
    },
    age: {
      values: doc.age, diverging: false, ends: [plural(Math.round(youngest), "token"), plural(Math.round(oldest), "token")],
      scale: (value) => Math.log(value / youngest) / logs,
      note: "how far back it reads, weighted mean, logarithmic",
    },
  };
}

function mixed(colours, share) {
  const towards = share >= 0 ? colours.rgbHelp : colours.rgbHurt, part = Math.abs(share);
  return `rgb(${colours.rgbPaper.map((own, i) => Math.round(own + (towards[i] - own) * part)).join(" ")})`;
}

class Strip {
  constructor(doc, gainScale, choose) {
    Object.assign(this, { doc, gainScale, choose, start: 0, end: doc.C, chosen: null, hits: null });
    this.canvas = byId("strip");
    this.overview = byId("overview");
    this.tip = byId("tip");
    this.kinds = shadings(doc);
    this.colours = readColours();
    this.shading = document.querySelector("input[name=shade]:checked").value;
    this.pointers = new Map();
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    this.resize();
    this.listen();
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
    this.draw();
  }

  resize() {
    const ratio = devicePixelRatio || 1, width = this.canvas.parentElement.clientWidth;
    this.width = width;
    for (const [canvas, height] of [[this.canvas, ARCS + CELLS + BELOW], [this.overview, OVERVIEW]]) {
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
        context.fillRect(left, top, Math.max(0.6, wide - (wide > 4 ? 1 : 0)), height);
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

  paint() {
    if (!this.width) return;
    this.paintOverview();
    const context = this.context(this.canvas), { doc } = this;
    const first = Math.max(0, Math.floor(this.start)), last = Math.min(doc.C, Math.ceil(this.end));
    this.cells(context, first, last, (c) => this.x(c), ARCS, CELLS);
    if (this.x(first + 1) - this.x(first) >= TOKENS_FROM) {
      for (let c = first; c < last; c++) this.writeTokens(context, c);
    }
    this.marks(context, first, last);
    this.files(context);
    if (this.chosen !== null) this.paintChosen(context);
  }

  paintOverview() {
    const context = this.context(this.overview), { doc, width } = this;
    this.cells(context, 0, doc.C, (c) => (c / doc.C) * width, 4, OVERVIEW - 8);
    const left = (this.start / doc.C) * width, wide = Math.max(3, ((this.end - this.start) / doc.C) * width);
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 1, Math.max(1.5, Math.min(wide, width - left) - 1.5), OVERVIEW - 2);
    if (this.hits) {
      context.fillStyle = this.colours.ink;
      for (const c of this.hits.chunks) context.fillRect((c / doc.C) * width, OVERVIEW - 4, 1, 4);
    }
    if (this.chosen !== null) {
      context.fillStyle = this.colours.link;
      context.fillRect(((this.chosen + 0.5) / doc.C) * width - 1, 0, 2, OVERVIEW);
    }
  }

  // a chunk's tokens in its cell, line by line, as far as they have room
  writeTokens(context, c) {
    const { doc, colours } = this;
    const left = Math.max(0, this.x(c)) + 5, right = Math.min(this.width, this.x(c + 1)) - 6;
    if (right - left < 60) return;
    context.save();
    context.beginPath();
    context.rect(this.x(c), ARCS, this.x(c + 1) - this.x(c) - 1, CELLS);
    context.fillStyle = colours.paper;
    context.fill();
    context.clip();
    context.font = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
    context.textBaseline = "middle";
    context.direction = "ltr";
    const advance = context.measureText("m").width, high = 16;
    let x = left, y = ARCS + 11;
    for (let t = doc.tokens[c]; t < doc.tokens[c + 1]; t++) {
      const shown = oneLineToken(tokenText(doc, t)), wide = Math.max(advance, context.measureText(shown).width);
      if (x + wide > right && x > left) {
        x = left;
        y += high;
        if (y + high / 2 > ARCS + CELLS) break;
      }
      const gain = tokenGain(doc, t);
      if (!Number.isNaN(gain)) {
        context.fillStyle = mixed(colours, 0.75 * Math.max(-1, Math.min(1, gain / this.gainScale)));
        context.fillRect(x, y - high / 2 + 1, wide, high - 2);
      }
      context.fillStyle = colours.ink;
      context.fillText(shown, x, y);
      x += wide;
    }
    context.restore();
  }

  marks(context, first, last) {
    if (!this.hits) return;
    context.fillStyle = this.colours.ink;
    const wide = Math.max(1, Math.min(6, this.x(1) - this.x(0)));
    for (const c of this.hits.chunks) {
      if (c >= first && c < last) context.fillRect(this.x(c + 0.5) - wide / 2, ARCS + CELLS + 1, wide, 5);
    }
  }

  files(context) {
    if (about.sources.length < 2) return;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    let free = -Infinity;
    for (const source of about.sources) {
      const x = this.x(lastAtMost(this.doc.tokens, source.first_token, this.doc.C));
      if (x < -1 || x > this.width) continue;
      context.fillStyle = this.colours.muted;
      context.fillRect(Math.max(0, x), 0, 1, ARCS + CELLS);
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
    const many = Math.min(400, doc.byStarts[chosen + 1] - doc.byStarts[chosen]);
    for (let i = 0; i < many; i++) {
      const e = doc.byEntries[doc.byStarts[chosen] + i];
      const to = this.x(doc.reader[e] + 0.5);
      this.arc(context, from, to, doc.readWeights[e], doc.group[e], ARCS + CELLS + 7, 1, BELOW - 10);
    }
  }

  arc(context, from, to, weight, g, base, side, most) {
    const middle = (from + to) / 2, half = Math.abs(to - from) / 2;
    context.strokeStyle = this.colours.groups[g % this.colours.groups.length];
    context.globalAlpha = 0.25 + 0.75 * Math.min(1, weight);
    context.lineWidth = 1 + 3 * Math.min(1, weight);
    context.beginPath();
    const high = Math.min(most, 12 + half * 0.6);
    context.ellipse(middle, base, Math.max(0.5, half), high, 0, 0, Math.PI, side < 0);
    context.stroke();
    context.globalAlpha = 1;
  }

  // --- pointers ---------------------------------------------------------------------------------------------

  listen() {
    const { canvas, overview } = this;
    const place = (event, of = canvas) => event.clientX - of.getBoundingClientRect().left;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = this.start + (place(event) / this.width) * (this.end - this.start);
      const unit = event.deltaMode === 1 ? 16 : 1;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        const moved = (event.deltaX || event.deltaY) * unit;
        this.pan((moved / this.width) * (this.end - this.start));
      } else this.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY * unit)) * 0.002), at);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, place(event));
      this.moved = this.pointers.size > 1 ? Infinity : 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.pointers.has(event.pointerId)) return this.hover(event, place(event));
      const before = [...this.pointers.values()], was = this.pointers.get(event.pointerId);
      this.pointers.set(event.pointerId, place(event));
      const after = [...this.pointers.values()], span = this.end - this.start;
      if (after.length === 1) {
        this.moved += Math.abs(place(event) - was);
        if (this.moved > 4) this.pan(((was - place(event)) / this.width) * span);
      } else {
        const apart = (pair) => Math.max(12, Math.abs(pair[0] - pair[1]));
        const at = this.start + ((after[0] + after[1]) / 2 / this.width) * span;
        this.zoom(apart(before) / apart(after), at);
      }
      this.tip.hidden = true;
    });
    const up = (event) => {
      const known = this.pointers.delete(event.pointerId);
      if (known && event.type === "pointerup" && this.moved <= 4) this.choose(this.chunkAt(place(event)), true);
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    const centre = (event) => {
      const at = (place(event, overview) / this.width) * this.doc.C, span = this.end - this.start;
      this.setView(at - span / 2, at + span / 2);
    };
    overview.addEventListener("pointerdown", (event) => {
      overview.setPointerCapture(event.pointerId);
      centre(event);
    });
    overview.addEventListener("pointermove", (event) => overview.hasPointerCapture(event.pointerId) && centre(event));
  }

  hover(event, x) {
    const { doc, tip } = this, c = this.chunkAt(x);
    if (event.pointerType === "touch") return;
    tip.replaceChildren(
      make("strong", { text: `Chunk ${count(c)}` }),
      make("span", {
        text: ` \u00b7 tokens ${count(doc.tokens[c])}\u2013${count(doc.tokens[c + 1] - 1)} \u00b7 read ${plural(doc.timesRead[c], "time")} \u00b7 gain ${signed(doc.gain[c])}`,
      }),
      make("bdi", { text: oneLine(chunkText(doc, c), 90) }),
    );
    tip.hidden = false;
    placeTip(tip, event.clientX, this.canvas.getBoundingClientRect().top + ARCS + CELLS + 8);
  }
}

const oneLineToken = (text) => text.replace(/\n/g, "\u21b5").replace(UNSEEN, signOf);

function placeTip(tip, x, y) {
  const width = tip.offsetWidth, room = document.documentElement.clientWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(room - width, x - width / 2))}px`;
  tip.style.top = `${y}px`;
}
