// What is chosen, the address, keys; and the beginning.
const say = (text) => {
  byId("status").textContent = text;
};

// a token's colour is full from this gain on: 98 % of a sample of tokens have less
function scaleOfGains(doc) {
  const every = Math.max(1, Math.floor(doc.T / 100000)), sample = [];
  for (let t = 0; t < doc.T; t += every) {
    const gain = Math.abs(tokenGain(doc, t));
    if (!Number.isNaN(gain)) sample.push(gain);
  }
  const sorted = Float64Array.from(sample).sort();
  return Math.max(0.01, sorted[Math.floor(0.98 * sorted.length)] ?? 0);
}

function chunkInAddress() {
  const found = /^#chunk=(\d+)$/.exec(location.hash);
  return found ? Number(found[1]) : null;
}

const sayMissing = (doc, c) => say(`There is no chunk ${count(c)}: the last one is ${count(doc.C - 1)}.`);

function start(doc) {
  const gainScale = scaleOfGains(doc);
  let chosen = null;
  const choose = (c, remember, mark = null) => {
    chosen = c;
    const address = `#chunk=${c}`;
    if (location.hash !== address) history[remember ? "pushState" : "replaceState"](null, "", address);
    strip.setChosen(c);
    panel.show(c, mark);
    byId("strip").setAttribute("aria-valuenow", c);
    const read = doc.timesRead[c] ? `read ${plural(doc.timesRead[c], "time")} later` : "never read later";
    const text = `Chunk ${count(c)} of ${count(doc.C)}: gain ${signed(doc.gain[c])} nats, ${read}.`;
    byId("strip").setAttribute("aria-valuetext", text);
    say(text);
  };
  const go = (c, remember) => {
    choose(c, remember);
    const at = byId("chosen").getBoundingClientRect();
    if (at.bottom < 80 || at.top > innerHeight - 80) byId("chosen").scrollIntoView();
  };
  const seeAddress = () => {
    const c = chunkInAddress();
    if (c === null) return;
    if (c >= doc.C) sayMissing(doc, c);
    else if (c !== chosen) go(c, false);
    // a link to what is chosen already leads to it as well
    else byId("chosen").scrollIntoView({ block: "nearest" });
  };
  const by = (many) => choose(Math.max(0, Math.min(doc.C - 1, (chosen ?? 0) + many)), false);
  const strip = new Strip(doc, gainScale, choose);
  const panel = new ChunkPanel(doc, gainScale);
  const search = new Search(doc, strip, choose);
  new Strongest(doc);

  const legend = () => {
    const kind = strip.kinds[strip.shading];
    byId("legend-low").textContent = kind.ends[0];
    byId("legend-high").textContent = kind.ends[1];
    byId("legend-note").textContent = kind.note;
    byId("legend-none").textContent = kind.none;
    byId("legend-none").hidden = !kind.none || !kind.values.some(Number.isNaN);
    byId("legend-bar").className = kind.diverging ? "diverging" : "ramp";
  };
  for (const radio of document.querySelectorAll("input[name=shade]")) {
    radio.addEventListener("change", () => {
      strip.setShading(radio.value);
      legend();
    });
  }
  legend();
  for (const end of document.querySelectorAll("[data-gain-end]")) {
    end.textContent = signed(Number(end.dataset.gainEnd) * gainScale, 2);
  }
  byId("helped").dataset.value = doc.helped;
  byId("loss").dataset.value = doc.total;
  byId("loss-without").dataset.value = doc.totalWithout;

  const zoomBy = { "zoom-in": 0.5, "zoom-out": 2 };
  for (const [id, factor] of Object.entries(zoomBy)) {
    byId(id).addEventListener("click", () => strip.zoom(factor, chosen === null ? undefined : chosen + 0.5));
  }
  byId("zoom-all").addEventListener("click", () => strip.setView(0, doc.C));
  byId("zoom-chunk").addEventListener("click", () => strip.setView(chosen - 0.5, chosen + 1.5));
  byId("previous").addEventListener("click", () => by(-1));
  byId("next").addEventListener("click", () => by(1));
  byId("jump-form").addEventListener("submit", (event) => {
    event.preventDefault();
    jumpTo(doc, byId("jump").value, choose);
  });

  const moves = {
    ArrowLeft: () => by(-1), ArrowRight: () => by(1), ArrowUp: () => by(-10), ArrowDown: () => by(10),
    PageUp: () => by(-100), PageDown: () => by(100), Home: () => choose(0, false), End: () => choose(doc.C - 1, false),
    "[": () => strip.pan((strip.start - strip.end) / 2), "]": () => strip.pan((strip.end - strip.start) / 2),
  };
  const anywhere = {
    "+": () => byId("zoom-in").click(), "=": () => byId("zoom-in").click(), "-": () => byId("zoom-out").click(),
    0: () => byId("zoom-all").click(), z: () => byId("zoom-chunk").click(), j: () => by(1), k: () => by(-1),
    n: () => search.step(1), p: () => search.step(-1), "/": () => byId("search").focus(), g: () => byId("jump").focus(),
    "?": () => byId("help").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    const inside = event.target.closest("input:not([type=radio]), select, textarea");
    const own = event.target.id === "strip" ? moves[event.key] : undefined;
    const act = own ?? (inside ? undefined : anywhere[event.key]);
    if (!act) return;
    event.preventDefault();
    act();
  });
  byId("help-open").addEventListener("click", () => byId("help").showModal());

  addEventListener("hashchange", seeAddress);
  themes(() => strip.recolour());
  matchMedia("print").addEventListener("change", () => strip.recolour());

  const wanted = chunkInAddress(), there = wanted !== null && wanted < doc.C;
  // without one, that which retrieval helped most
  choose(there ? wanted : doc.gain.reduce((best, gain, c) => (gain > doc.gain[best] ? c : best), 0), false);
  if (wanted !== null && !there) sayMissing(doc, wanted);
}

(async () => {
  try {
    // the frame is painted before the data are unpacked
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const arrays = await unpack((share) => say(`Unpacking the text: ${Math.round(100 * share)} %`));
    const doc = documentOf(arrays);
    byId("app").hidden = false;
    start(doc);
    byId("app").setAttribute("aria-busy", "false");
    requestAnimationFrame(() => setTimeout(() => performance.mark("ready")));
  } catch (error) {
    say(error instanceof TooOld ? error.message : `This page is damaged (${error.message}). Make it again.`);
    byId("status").className = "failed";
  }
})();
