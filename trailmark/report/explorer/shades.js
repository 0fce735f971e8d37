// Colours, and which number shades a chunk on which scale.
// colours of the theme as numbers, looked up again when it changes
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const numbers = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const ramp = [];
  for (let level = 0; level < 11; level++) ramp.push(of(`heat-${level}`));
  return {
    paper: of("paper"), ink: of("ink"), muted: of("muted"), rule: of("rule"), raised: of("raised"), link: of("link"),
    shade: of("shade"), ramp, mark: of("notice-rule"),
    rgbNone: numbers(of("raised")), rgbHelp: numbers(of("series-1")), rgbHurt: numbers(of("series-2")), strength: parseFloat(of("strength")) / 100,
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
      note: "times read by later chunks, logarithmic", none: "",
    },
    gain: {
      values: perToken, diverging: true, ends: [`${signed(-widest)} or less`, `${signed(widest)} or more`],
      scale: (value) => Math.max(-1, Math.min(1, value / widest)),
      note: "nats a token that retrieval took off the loss; 98% of all chunks lie between the ends", none: "no token bears a loss",
    },
    age: {
      values: doc.age, diverging: false, ends: [plural(Math.round(youngest), "token"), plural(Math.round(oldest), "token")],
      scale: (value) => Math.log(value / youngest) / logs,
      note: "how far back it reads: mean by weight, logarithmic", none: "reads nothing",
    },
  };
}

function mixed(colours, share) {
  const towards = share >= 0 ? colours.rgbHelp : colours.rgbHurt, part = Math.abs(share);
  return `rgb(${colours.rgbNone.map((own, i) => Math.round(own + (towards[i] - own) * part)).join(" ")})`;
}
