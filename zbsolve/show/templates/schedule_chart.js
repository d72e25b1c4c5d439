// ---- the chart: a row a track, a strip of memory a rank ----------------------------------------------------------
const chart = $("chart"), base = $("base"), over = $("over"), tip = $("tip");
const AXIS = 26, NARROW = 560, FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const PAPER = { width: 980, height: 330 }; // pixels of the chart on paper: an A4 page across, with the words below on it
let LEFT = 84, RIGHT = 24, narrow = false, printing = false;
let whole = false; // labels are whole names, as a typical pass is wide enough
let view = [0, 1], grouped = "run", rows = [], strips = [], captions = [], height = 0, width = 0, css = {}, hover = null, queued = false;

function tick(us, step) {
  const [scale, unit] = TOTAL < 1e4 ? [1, "µs"] : TOTAL < 1e7 ? [1e3, "ms"] : [1e6, "s"];
  return number(us / scale, Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9))) + " " + unit;
}

// ---- colours -----------------------------------------------------------------------------------------------------
let looks = [], NK = 0; // by kind, by chunk; a kind's first one stands for it where passes are narrower than pixels
function prepareColours() {
  NK = D.kinds.length;
  looks = D.kinds.map((kind) => (D.shades[kind] || []).map((fill) => {
    const level = [1, 3, 5].map((i) => parseInt(fill.slice(i, i + 2), 16));
    return { fill, pixel: [...level, 255], ink: 0.299 * level[0] + 0.587 * level[1] + 0.114 * level[2] > 125 ? "#111" : "#fff" };
  }));
}
const look = (i) => looks[C.kind[i]][C.chunk[i]];
function readTheme() {
  document.documentElement.classList.toggle("paper", printing);
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "ink", "soft", "line", "track", "grid", "accent", "limit", "area", "area-line", "run-line"])
    css[name] = style.getPropertyValue("--" + name).trim();
}

// ---- layout ------------------------------------------------------------------------------------------------------
let memoryScale = 1, memoryCapacity = 0;
function prepareMemory() {
  if (!D.memory) return;
  const peak = Math.max(...D.runs.flatMap((run) => run.peaks));
  memoryCapacity = D.capacity ? Math.max(...D.capacity) : 0;
  memoryScale = 1.12 * (memoryCapacity > 3 * peak ? peak : Math.max(peak, memoryCapacity)) || 1;
}
function streamLabel(l) {
  const track = D.tracks[l], kind = streamKind(track);
  return kind === "compute" ? (narrow ? String(track.rank) : "rank " + track.rank) : kind;
}
function layout() {
  const units = runs.length * D.tracks.reduce((sum, track) => sum + (streamKind(track) === "compute" ? 1 : 0.6), 0);
  const room = printing ? PAPER.height * (D.memory ? 0.6 : 1) : window.innerHeight * 0.62;
  const tall = Math.min(34, Math.max(printing ? 1 : 8, room / units));
  const trackHeight = (track) => (streamKind(track) === "compute" ? tall : Math.max(printing ? 1 : 6, tall * 0.6));
  rows = []; strips = []; captions = [];
  let y = AXIS + 4;
  const add = (track, run, label) => { const h = trackHeight(D.tracks[track]); rows.push({ track, run, y, h, label }); y += h; };
  if (runs.length > 1 && grouped === "rank") {
    D.tracks.forEach((track, l) => { runs.forEach((run, r) => add(l, r, r ? (narrow ? "run" : "measured") : streamLabel(l))); y += Math.min(5, tall / 4); });
  } else runs.forEach((run, r) => {
    if (runs.length > 1) { captions.push({ y: y + 9, text: `${run.name}, ${D.objective} ${time(run.value)}` }); y += 20; }
    D.tracks.forEach((track, l) => add(l, r, streamLabel(l)));
    y += 8;
  });
  if (D.memory) y = layoutMemory(y);
  height = Math.ceil(y + 8);
}
function layoutMemory(y) {
  const strip = printing ? Math.max(1, (PAPER.height * 0.4) / D.ranks - 2) : Math.min(46, Math.max(13, 420 / D.ranks));
  const alike = D.capacity && D.capacity.every((one) => one === memoryCapacity) ? " " + bytes(memoryCapacity) : "";
  const off = memoryCapacity > memoryScale ? ` (capacity ${bytes(memoryCapacity)} lies above)` : D.capacity ? `, dashed: capacity${alike}` : "";
  captions.push({ y: y + 12, text: `memory held by each rank${off}${runs.length > 1 ? `, area: ${runs[0].memory}, line: ${runs[1].memory}` : ""}` });
  y += 24;
  const gap = strip < 8 ? 0 : 2;
  for (let rank = 0; rank < D.ranks; rank++) { strips.push({ rank, y, h: strip }); y += strip + gap; }
  return y;
}
function size() {
  width = printing ? PAPER.width : chart.clientWidth;
  narrow = width < NARROW;
  LEFT = narrow ? (D.tracks.every((track) => streamKind(track) === "compute") && runs.length < 2 ? 30 : 64) : 84;
  RIGHT = narrow ? 8 : D.memory ? 128 : 24;
  layout();
  const ratio = printing ? 3 : window.devicePixelRatio || 1;
  for (const canvas of [base, over]) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = printing ? "auto" : height + "px";
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  draw();
}
const plot = () => Math.max(50, width - LEFT - RIGHT);
const toX = (t) => LEFT + ((t - view[0]) / (view[1] - view[0])) * plot();
const toT = (x) => view[0] + ((x - LEFT) / plot()) * (view[1] - view[0]);

// ---- drawing -----------------------------------------------------------------------------------------------------
function draw() {
  const g = base.getContext("2d");
  g.clearRect(0, 0, width, height);
  g.textBaseline = "middle";
  g.fillStyle = css.track;
  for (const row of rows) g.fillRect(LEFT, row.y, plot(), inner(row));
  for (const strip of strips) g.fillRect(LEFT, strip.y, plot(), strip.h);
  axis(g);
  g.save(); g.beginPath(); g.rect(LEFT, 0, plot(), height); g.clip();
  drawRows(g);
  for (const strip of strips) drawStrip(g, strip);
  g.restore();
  labels(g);
  drawOver();
}
const inner = (row) => (row.h > 4 ? row.h - 1 : row.h); // rows of few pixels stand without a gap
function axis(g) {
  const wanted = ((view[1] - view[0]) / plot()) * (narrow ? 76 : 110), power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= wanted);
  g.font = `11px ${FONT}`; g.textAlign = "center";
  for (let n = Math.ceil(view[0] / step); n * step <= view[1]; n++) {
    const x = Math.round(toX(n * step)) + 0.5, text = tick(n * step, step), half = g.measureText(text).width / 2;
    g.strokeStyle = css.grid; g.beginPath(); g.moveTo(x, AXIS - 4); g.lineTo(x, height); g.stroke();
    g.fillStyle = css.soft; g.fillText(text, Math.min(x, width - half - 2), AXIS - 13);
  }
}
// Passes narrower than two pixels fill pixel columns: one picture row a track, each pixel the kind that fills most of it.
const scratch = document.createElement("canvas");
let table = new Float32Array(0), pixels = null;
function drawRows(g) {
  const columns = Math.ceil(plot()) + 1, scale = plot() / (view[1] - view[0]);
  whole = (TYPICAL * scale - 4) / (LONGEST * 0.6) >= 9.5;
  if (scratch.width !== columns || scratch.height !== rows.length || table.length !== columns * NK) {
    scratch.width = columns; scratch.height = rows.length; table = new Float32Array(columns * NK);
    pixels = new ImageData(columns, rows.length);
  }
  pixels.data.fill(0);
  const small = rows.filter((row, r) => drawRow(g, row, r, columns, scale));
  if (!small.length) return;
  scratch.getContext("2d").putImageData(pixels, 0, 0);
  g.imageSmoothingEnabled = false;
  rows.forEach((row, r) => g.drawImage(scratch, 0, r, columns, 1, LEFT, row.y, columns, inner(row)));
}
function drawRow(g, row, r, columns, scale) {
  const { order, start, end } = runs[row.run].tracks[row.track], from = view[0], kinds = C.kind;
  let small = false;
  for (let i = above(end, from); i < order.length && start[i] < view[1]; i++) {
    const x = (start[i] - from) * scale, stop = (end[i] - from) * scale;
    if (stop - x >= 2) { block(g, order[i], LEFT + x, row.y, stop - x, inner(row)); continue; }
    if (!small) { table.fill(0); small = true; }
    const kind = kinds[order[i]], last = Math.min(columns, stop);
    for (let c = x > 0 ? x | 0 : 0; c < last; c++) table[c * NK + kind] += (c + 1 < stop ? c + 1 : stop) - (c > x ? c : x);
  }
  if (small) for (let c = 0; c < columns; c++) {
    let most = 0, sum = 0, kind = 0;
    for (let k = 0; k < NK; k++) { const share = table[c * NK + k]; sum += share; if (share > most) { most = share; kind = k; } }
    if (sum >= 0.4) pixels.data.set(looks[kind][0].pixel, 4 * (r * columns + c));
  }
  return small;
}
function block(g, i, x, y, wide, tall) {
  const { fill, ink } = look(i);
  g.fillStyle = fill;
  g.fillRect(x, y, wide > 4 ? wide - 1 : wide, tall);
  if (tall < 11 || wide < 9) return;
  // Labels are sized for the longest one, so that all passes of a width have one or none.
  const largest = Math.min(12, tall * 0.6), fit = (letters) => Math.min(largest, (wide - 4) / (letters * 0.6));
  const font = fit(whole ? LONGEST : DIGITS);
  if (font < Math.min(8, largest)) return;
  const text = whole ? nameOf(i) : String(C.microbatch[i]), unit = font * 0.6;
  // A long pass keeps its label in sight while part of it is.
  const left = Math.max(x, LEFT), right = Math.min(x + wide - 1, LEFT + plot());
  if (right - left < text.length * unit) return;
  g.fillStyle = ink; g.font = `${font}px ${FONT}`; g.textAlign = "center";
  g.fillText(text, (left + right) / 2, y + tall / 2 + 0.5, right - left - 2); // a W is wider than other letters
}
function stepPath(g, curve, toY, floor) {
  let i = Math.max(0, above(curve.time, view[0]) - 1), last = null;
  const first = i, { time, held } = curve;
  g.moveTo(toX(time[i]), floor ?? toY(held[i]));
  for (; i < time.length && (i === first || time[i] <= view[1]); i++) {
    // Many changes within one pixel: the highest is what counts.
    let most = held[i];
    const x = toX(time[i]), until = toT(x + 0.7);
    while (i + 1 < time.length && time[i + 1] < until) { i++; if (held[i] > most) most = held[i]; }
    if (last !== null) g.lineTo(x, toY(last));
    g.lineTo(x, toY(most));
    if (most !== held[i]) g.lineTo(x, toY(held[i]));
    last = held[i];
  }
  const end = Math.min(toX(TOTAL), LEFT + plot() + 2);
  g.lineTo(end, toY(last ?? 0));
  if (floor !== undefined) { g.lineTo(end, floor); g.closePath(); }
}
function drawStrip(g, strip) {
  const bottom = strip.y + strip.h, toY = (held) => bottom - (held / memoryScale) * strip.h;
  runs.forEach((run, r) => {
    const curve = curveOf(run, strip.rank);
    if (r === 0) {
      g.fillStyle = css.area; g.beginPath(); stepPath(g, curve, toY, bottom); g.fill();
      if (strip.h > 18) { g.strokeStyle = css["area-line"]; g.lineWidth = 1; g.beginPath(); stepPath(g, curve, toY); g.stroke(); }
    } else { g.strokeStyle = css["run-line"]; g.lineWidth = strip.h > 10 ? 1.2 : 0.5; g.beginPath(); stepPath(g, curve, toY); g.stroke(); }
  });
  if (D.capacity && D.capacity[strip.rank] <= memoryScale && strip.h > 5) {
    const y = Math.round(toY(D.capacity[strip.rank])) + 0.5;
    g.strokeStyle = css.limit; g.lineWidth = 1; g.setLineDash([5, 4]);
    g.beginPath(); g.moveTo(LEFT, y); g.lineTo(LEFT + plot(), y); g.stroke(); g.setLineDash([]);
  }
}
function labels(g) {
  g.textAlign = "right"; g.fillStyle = css.soft;
  let free = -1e9;
  for (const row of rows) {
    const font = Math.min(12, Math.max(9, row.h * 0.8)), middle = row.y + row.h / 2;
    if (middle < free) continue;
    g.font = `${font}px ${FONT}`; g.fillText(row.label, LEFT - 9, middle); free = middle + font;
  }
  free = -1e9;
  for (const strip of strips) {
    const font = Math.min(12, Math.max(9.5, strip.h * 0.5)), middle = strip.y + strip.h / 2;
    if (middle < free) continue;
    free = middle + font;
    g.font = `${font}px ${FONT}`; g.textAlign = "right"; g.fillStyle = css.soft; g.fillText((narrow ? "" : "rank ") + strip.rank, LEFT - 9, middle);
    peakLabel(g, strip, middle, font);
  }
  g.textAlign = "left"; g.font = `600 12px ${FONT}`;
  for (const caption of captions) {
    const room = width - LEFT - 6, wide = g.measureText(caption.text).width;
    g.fillStyle = css.card; g.fillRect(LEFT - 1, caption.y - 8, Math.min(wide, room) + 8, 16);
    g.fillStyle = css.ink; g.fillText(caption.text, LEFT, caption.y, room);
  }
}
function peakLabel(g, strip, middle, font) {
  const peaks = D.runs.map((run) => run.peaks[strip.rank]), two = peaks.length > 1 && strip.h > 26;
  g.fillStyle = D.capacity && Math.max(...peaks) > D.capacity[strip.rank] ? css.limit : css.soft;
  g.textAlign = narrow ? "right" : "left";
  const x = narrow ? LEFT + plot() - 3 : LEFT + plot() + 10;
  const put = (text, y) => {
    if (narrow) { g.strokeStyle = css.track; g.lineWidth = 3; g.strokeText(text, x, y); }
    g.fillText(text, x, y);
  };
  put("peak " + bytes(peaks[0]), middle - (two ? font * 0.65 : 0));
  if (two) put("run " + bytes(peaks[1]), middle + font * 0.65);
}
