// Mouse, pen and fingers on the strip and on the overview above it.
class Pointers {
  constructor(strip) {
    this.strip = strip;
    this.pointers = new Map(); // where each that is down was last
    this.moved = 0; // pixels since the first went down
    this.listen();
  }

  listen() {
    const { strip } = this, { canvas, overview } = strip;
    const place = (event, of = canvas) => event.clientX - of.getBoundingClientRect().left;
    canvas.addEventListener("wheel", (event) => {
      // the whole text in view: the page may scroll on
      if (event.deltaY > 0 && !event.shiftKey && !event.ctrlKey && strip.end - strip.start >= strip.doc.C) return;
      event.preventDefault();
      const at = strip.start + (place(event) / strip.width) * (strip.end - strip.start);
      const unit = event.deltaMode === 1 ? 16 : 1;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        const moved = (event.deltaX || event.deltaY) * unit;
        strip.pan((moved / strip.width) * (strip.end - strip.start));
      } else strip.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY * unit)) * 0.002), at);
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
      const after = [...this.pointers.values()], span = strip.end - strip.start;
      if (after.length === 1) {
        this.moved += Math.abs(place(event) - was);
        if (this.moved > 4) strip.pan(((was - place(event)) / strip.width) * span);
      } else {
        const apart = (pair) => Math.max(12, Math.abs(pair[0] - pair[1]));
        const at = strip.start + ((after[0] + after[1]) / 2 / strip.width) * span;
        strip.zoom(apart(before) / apart(after), at);
      }
      strip.tip.hidden = true;
    });
    const up = (event) => {
      const known = this.pointers.delete(event.pointerId);
      if (known && event.type === "pointerup" && this.moved <= 4) strip.choose(strip.chunkAt(place(event)), true);
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => (strip.tip.hidden = true));
    const centre = (event) => {
      const at = (place(event, overview) / strip.width) * strip.doc.C, span = strip.end - strip.start;
      strip.setView(at - span / 2, at + span / 2);
    };
    overview.addEventListener("pointerdown", (event) => {
      overview.setPointerCapture(event.pointerId);
      centre(event);
    });
    overview.addEventListener("pointermove", (event) => overview.hasPointerCapture(event.pointerId) && centre(event));
  }

  hover(event, x) {
    const { doc, tip, canvas } = this.strip, c = this.strip.chunkAt(x);
    if (event.pointerType === "touch") return;
    tip.replaceChildren(
      make("strong", { text: `Chunk ${count(c)}` }),
      make("span", {
        text: ` \u00b7 tokens ${count(doc.tokens[c])}\u2013${count(doc.tokens[c + 1] - 1)} \u00b7 read ${plural(doc.timesRead[c], "time")} \u00b7 gain ${signed(doc.gain[c])}`,
      }),
      make("bdi", { text: oneLine(chunkText(doc, c), 90) }),
    );
    tip.hidden = false;
    placeTip(tip, event.clientX, canvas.getBoundingClientRect().top + ARCS + CELLS + 8);
  }
}
