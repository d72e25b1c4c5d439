"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const chart = $("chart"), base = $("base"), over = $("over"), tip = $("tip");
const LEFT = 84, AXIS = 26, NK = D.kinds.length;
const RIGHT = D.runs[0].memory.length ? 128 : 24;
const TOTAL = Math.max(...D.runs.map((run) => run.end.reduce((a, b) => Math.max(a, b), 0))) || 1;
const SHORTEST = D.runs[0].end.reduce((least, end, i) => { const d = end - D.runs[0].start[i]; return d > 0 && d < least ? d : least; }, TOTAL);
let whole = false; // labels are whole names, as a typical pass is wide enough
let view = [0, TOTAL], grouped = "run", rows = [], strips = [], captions = [], height = 0, width = 0, css = {}, hover = null, queued = false;

// ---- words -------------------------------------------------------------------------------------------------------
const number = (x, digits = 0) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
function time(us) {
  const size = Math.abs(us);
  if (size < 1e4) return number(us, size % 1 ? 1 : 0) + " µs";
  return size < 1e7 ? number(us / 1e3, 2) + " ms" : number(us / 1e6, 2) + " s";
}
function tick(us, step) {
  const [scale, unit] = TOTAL < 1e4 ? [1, "µs"] : TOTAL < 1e7 ? [1e3, "ms"] : [1e6, "s"];
  return number(us / scale, Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9))) + " " + unit;
}
function bytes(n) {
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < 4) { n /= 1024; unit++; }
  return (unit ? n.toPrecision(3) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
const nameOf = (i) => D.stage[i] + D.kinds[D.kind[i]] + D.microbatch[i] + (D.slice[i] ? "." + D.slice[i] : "");
const lengthOf = (columns) => D.kind.reduce((most, _, i) => Math.max(most, columns(i).length), 0);
const TYPICAL = D.kind.map((_, i) => D.runs[0].end[i] - D.runs[0].start[i]).sort((a, b) => a - b)[D.kind.length >> 1];
const LONGEST = lengthOf(nameOf), DIGITS = lengthOf((i) => String(D.microbatch[i]));
const streamKind = (track) => track.stream.split(":")[0];

// ---- colours -----------------------------------------------------------------------------------------------------
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const shades = D.kinds.map((kind) => [0, 1, 2, 3].map((chunk) => {
  const share = Math.min(0.45, 0.3 * chunk), level = rgb(D.colours[kind]).map((v) => Math.round(v + (255 - v) * share));
  return { fill: `rgb(${level})`, pixel: [...level, 255], ink: 0.299 * level[0] + 0.587 * level[1] + 0.114 * level[2] > 125 ? "#111" : "#fff" };
}));
const shade = (i) => shades[D.kind[i]][Math.min(3, D.chunk[i])];
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "ink", "soft", "line", "track", "grid", "accent", "limit", "area", "area-line", "run-line"])
    css[name] = style.getPropertyValue("--" + name).trim();
}

// ---- tables made once --------------------------------------------------------------------------------------------
for (const run of D.runs) run.tracks = D.tracks.map((track) => {
  const order = Int32Array.from(track.rows).sort((a, b) => run.start[a] - run.start[b] || run.end[a] - run.end[b]);
  const start = Float64Array.from(order, (i) => run.start[i]), end = Float64Array.from(order, (i) => run.end[i]);
  for (let i = 1; i < end.length; i++) if (end[i] < end[i - 1]) end[i] = Math.max(end[i], start[i]);
  return { order, start, end };
});
function adjacency(from, to) {
  const first = new Int32Array(D.kind.length + 1), list = new Int32Array(from.length);
  for (const i of from) first[i + 1]++;
  for (let i = 0; i < D.kind.length; i++) first[i + 1] += first[i];
  const at = first.slice();
  from.forEach((i, e) => { list[at[i]++] = to[e]; });
  return (i) => list.subarray(first[i], first[i + 1]);
}
const before = D.edges.before.concat(D.syncs.map((s) => s[0])), after = D.edges.after.concat(D.syncs.map((s) => s[1]));
const next = adjacency(before, after), previous = adjacency(after, before);
const home = new Int32Array(D.kind.length).fill(-1);
D.tracks.forEach((track, l) => track.rows.forEach((i) => { if (home[i] < 0) home[i] = l; }));
// The first index whose value is above x, in an ascending array.
function above(values, x) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] > x) high = middle; else low = middle + 1; }
  return low;
}
function heldAt(run, rank, t) {
  const curve = D.runs[run].memory[rank], i = above(curve.time, t) - 1;
  return i < 0 ? 0 : curve.held[i];
}

// ---- layout ------------------------------------------------------------------------------------------------------
const memoryPeak = Math.max(0, ...D.runs.flatMap((run) => run.memory.map((c) => c.held.reduce((a, b) => Math.max(a, b), 0))));
const memoryCapacity = D.capacity ? Math.max(...D.capacity) : 0;
const memoryScale = 1.12 * (memoryCapacity > 3 * memoryPeak ? memoryPeak : Math.max(memoryPeak, memoryCapacity)) || 1;
function layout() {
  const units = D.runs.length * D.tracks.reduce((sum, track) => sum + (streamKind(track) === "compute" ? 1 : 0.6), 0);
  const tall = Math.min(34, Math.max(8, (window.innerHeight * 0.62) / units));
  const trackHeight = (track) => (streamKind(track) === "compute" ? tall : Math.max(6, tall * 0.6));
  rows = []; strips = []; captions = [];
  let y = AXIS + 4;
  const add = (track, run, label) => { const h = trackHeight(D.tracks[track]); rows.push({ track, run, y, h, label }); y += h; };
  const streamLabel = (l) => (streamKind(D.tracks[l]) === "compute" ? "rank " + D.tracks[l].rank : streamKind(D.tracks[l]));
  if (D.runs.length > 1 && grouped === "rank") {
    D.tracks.forEach((track, l) => { D.runs.forEach((run, r) => add(l, r, r ? "measured" : streamLabel(l))); y += Math.min(5, tall / 4); });
  } else D.runs.forEach((run, r) => {
    if (D.runs.length > 1) { captions.push({ y: y + 9, text: `${run.name}, ${D.objective} ${time(run.value)}` }); y += 20; }
    D.tracks.forEach((track, l) => add(l, r, streamLabel(l)));
    y += 8;
  });
  if (D.runs[0].memory.length) {
    const strip = Math.min(46, Math.max(13, 420 / D.ranks));
    const alike = D.capacity && D.capacity.every((one) => one === memoryCapacity) ? " " + bytes(memoryCapacity) : "";
    const off = memoryCapacity > memoryScale ? ` (capacity ${bytes(memoryCapacity)} lies above)` : D.capacity ? `, dashed: capacity${alike}` : "";
    captions.push({ y: y + 12, text: `memory held by each rank${off}${D.runs.length > 1 ? ", area: predicted, line: measured" : ""}` });
    y += 24;
    for (let rank = 0; rank < D.ranks; rank++) { strips.push({ rank, y, h: strip }); y += strip + 2; }
  }
  height = Math.ceil(y + 8);
}
function size() {
  width = chart.clientWidth;
  layout();
  for (const canvas of [base, over]) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = height + "px";
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  draw();
}
const plot = () => Math.max(50, width - LEFT - RIGHT);
const toX = (t) => LEFT + ((t - view[0]) / (view[1] - view[0])) * plot();
const toT = (x) => view[0] + ((x - LEFT) / plot()) * (view[1] - view[0]);

// ---- drawing -----------------------------------------------------------------------------------------------------
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
function draw() {
  const g = base.getContext("2d");
  g.clearRect(0, 0, width, height);
  g.textBaseline = "middle";
  for (const row of rows) { g.fillStyle = css.track; g.fillRect(LEFT, row.y, plot(), row.h - 1); }
  for (const strip of strips) { g.fillStyle = css.track; g.fillRect(LEFT, strip.y, plot(), strip.h); }
  axis(g);
  g.save(); g.beginPath(); g.rect(LEFT, 0, plot(), height); g.clip();
  drawRows(g);
  for (const strip of strips) drawStrip(g, strip);
  g.restore();
  labels(g);
  drawOver();
}
function axis(g) {
  const wanted = ((view[1] - view[0]) / plot()) * 110, power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= wanted);
  g.font = `11px ${FONT}`; g.textAlign = "center";
  for (let n = Math.ceil(view[0] / step); n * step <= view[1]; n++) {
    const x = Math.round(toX(n * step)) + 0.5;
    g.strokeStyle = css.grid; g.beginPath(); g.moveTo(x, AXIS - 4); g.lineTo(x, height); g.stroke();
    g.fillStyle = css.soft; g.fillText(tick(n * step, step), x, AXIS - 13);
  }
}
// Passes narrower than two pixels fill pixel columns: one picture row a track, each pixel the kind that fills most of it.
const scratch = document.createElement("canvas");
let table = new Float32Array(0), pixels = null;
function drawRows(g) {
  const columns = Math.ceil(plot()) + 1, scale = plot() / (view[1] - view[0]);
  whole = (TYPICAL * scale - 4) / (LONGEST * 0.6) >= 9.5;
  if (scratch.width !== columns || scratch.height !== rows.length) {
    scratch.width = columns; scratch.height = rows.length; table = new Float32Array(columns * NK);
    pixels = new ImageData(columns, rows.length);
  }
  pixels.data.fill(0);
  const small = rows.filter((row, r) => drawRow(g, row, r, columns, scale));
  if (!small.length) return;
  scratch.getContext("2d").putImageData(pixels, 0, 0);
  g.imageSmoothingEnabled = false;
  rows.forEach((row, r) => g.drawImage(scratch, 0, r, columns, 1, LEFT, row.y, columns, row.h - 1));
}
function drawRow(g, row, r, columns, scale) {
  const track = D.runs[row.run].tracks[row.track];
  let small = false;
  for (let i = above(track.end, view[0]); i < track.order.length && track.start[i] < view[1]; i++) {
    const x = (track.start[i] - view[0]) * scale, wide = (track.end[i] - track.start[i]) * scale;
    if (wide >= 2) { block(g, track.order[i], LEFT + x, row.y, wide, row.h - 1); continue; }
    if (!small) { table.fill(0); small = true; }
    for (let c = Math.max(0, Math.floor(x)); c < Math.min(columns, x + wide); c++)
      table[c * NK + D.kind[track.order[i]]] += Math.min(c + 1, x + wide) - Math.max(c, x);
  }
  if (small) for (let c = 0; c < columns; c++) {
    let most = 0, sum = 0, kind = 0;
    for (let k = 0; k < NK; k++) { const share = table[c * NK + k]; sum += share; if (share > most) { most = share; kind = k; } }
    if (sum >= 0.4) pixels.data.set(shades[kind][0].pixel, 4 * (r * columns + c));
  }
  return small;
}
function block(g, i, x, y, wide, tall) {
  const look = shade(i);
  g.fillStyle = look.fill;
  g.fillRect(x, y, wide > 4 ? wide - 1 : wide, tall);
  if (tall < 11 || wide < 9) return;
  // Labels are sized for the longest one, so that all passes of a width have one or none.
  const largest = Math.min(12, tall * 0.6), fit = (letters) => Math.min(largest, (wide - 4) / (letters * 0.6));
  const font = fit(whole ? LONGEST : DIGITS);
  if (font < Math.min(8, largest)) return;
  const text = whole ? nameOf(i) : String(D.microbatch[i]), unit = font * 0.6;
  // A long pass keeps its label in sight while part of it is.
  const left = Math.max(x, LEFT), right = Math.min(x + wide - 1, LEFT + plot());
  if (right - left < text.length * unit) return;
  g.fillStyle = look.ink; g.font = `${font}px ${FONT}`; g.textAlign = "center";
  g.fillText(text, (left + right) / 2, y + tall / 2 + 0.5);
}
function stepPath(g, curve, toY, floor) {
  let i = Math.max(0, above(curve.time, view[0]) - 1), last = null;
  const first = i;
  g.moveTo(toX(curve.time[i]), floor ?? toY(curve.held[i]));
  for (; i < curve.time.length && (i === first || curve.time[i] <= view[1]); i++) {
    // Many changes within one pixel: the highest is what counts.
    let most = curve.held[i];
    const x = toX(curve.time[i]);
    while (i + 1 < curve.time.length && toX(curve.time[i + 1]) < x + 0.7) most = Math.max(most, curve.held[++i]);
    if (last !== null) g.lineTo(x, toY(last));
    g.lineTo(x, toY(most));
    if (most !== curve.held[i]) g.lineTo(x, toY(curve.held[i]));
    last = curve.held[i];
  }
  const end = Math.min(toX(TOTAL), LEFT + plot() + 2);
  g.lineTo(end, toY(last ?? 0));
  if (floor !== undefined) { g.lineTo(end, floor); g.closePath(); }
}
function drawStrip(g, strip) {
  const bottom = strip.y + strip.h, toY = (held) => bottom - (held / memoryScale) * strip.h;
  D.runs.forEach((run, r) => {
    const curve = run.memory[strip.rank];
    if (r === 0) {
      g.fillStyle = css.area; g.beginPath(); stepPath(g, curve, toY, bottom); g.fill();
      if (strip.h > 18) { g.strokeStyle = css["area-line"]; g.lineWidth = 1; g.beginPath(); stepPath(g, curve, toY); g.stroke(); }
    } else { g.strokeStyle = css["run-line"]; g.lineWidth = 1.2; g.beginPath(); stepPath(g, curve, toY); g.stroke(); }
  });
  if (D.capacity && D.capacity[strip.rank] <= memoryScale) {
    const y = Math.round(toY(D.capacity[strip.rank])) + 0.5;
    g.strokeStyle = css.limit; g.lineWidth = 1; g.setLineDash([5, 4]);
    g.beginPath(); g.moveTo(LEFT, y); g.lineTo(LEFT + plot(), y); g.stroke(); g.setLineDash([]);
  }
}
function labels(g) {
  g.textAlign = "right"; g.fillStyle = css.soft;
  let free = -1e9;
  for (const row of rows) {
    const font = Math.min(12, Math.max(9, row.h * 0.8));
    if (row.y + row.h / 2 < free) continue;
    g.font = `${font}px ${FONT}`; g.fillText(row.label, LEFT - 9, row.y + row.h / 2); free = row.y + row.h / 2 + font;
  }
  for (const strip of strips) {
    const font = Math.min(12, Math.max(9.5, strip.h * 0.5)), middle = strip.y + strip.h / 2;
    g.font = `${font}px ${FONT}`; g.textAlign = "right"; g.fillStyle = css.soft; g.fillText("rank " + strip.rank, LEFT - 9, middle);
    const peaks = D.runs.map((run) => Math.max(...run.memory[strip.rank].held));
    g.textAlign = "left";
    g.fillStyle = D.capacity && Math.max(...peaks) > D.capacity[strip.rank] ? css.limit : css.soft;
    g.fillText("peak " + bytes(peaks[0]), LEFT + plot() + 10, middle - (peaks[1] !== undefined && strip.h > 26 ? font * 0.65 : 0));
    if (peaks[1] !== undefined && strip.h > 26) g.fillText("run " + bytes(peaks[1]), LEFT + plot() + 10, middle + font * 0.65);
  }
  g.textAlign = "left"; g.fillStyle = css.ink; g.font = `600 12px ${FONT}`;
  for (const caption of captions) {
    g.fillStyle = css.card; g.fillRect(LEFT - 1, caption.y - 8, g.measureText(caption.text).width + 8, 16);
    g.fillStyle = css.ink; g.fillText(caption.text, LEFT, caption.y);
  }
}

