// ---- what the pointer is on --------------------------------------------------------------------------------------
function find(x, y) {
  const t = toT(x), row = rows.find((one) => y >= one.y && y < one.y + one.h);
  if (!row || x < LEFT || x > LEFT + plot()) return null;
  const track = D.runs[row.run].tracks[row.track], slack = (2 * (view[1] - view[0])) / plot();
  const i = Math.min(above(track.end, t), track.order.length - 1);
  for (const j of [i, i - 1])
    if (j >= 0 && track.start[j] <= t + (j === i && track.start[j] <= t ? 0 : slack) && track.end[j] >= t - slack) return { i: track.order[j], row };
  return null;
}
function rowOf(i, run) { return rows.find((row) => row.track === home[i] && row.run === run); }
function outline(g, i, row, colour, thick) {
  const run = D.runs[row.run], x = toX(run.start[i]), wide = Math.max(2, toX(run.end[i]) - x);
  g.strokeStyle = css.card; g.lineWidth = thick + 2; g.strokeRect(x, row.y, wide - 1, row.h - 1);
  g.strokeStyle = colour; g.lineWidth = thick; g.strokeRect(x, row.y, wide - 1, row.h - 1);
}
function arrow(g, a, b, run, colour) {
  const from = rowOf(a, run), to = rowOf(b, run);
  const x0 = toX(D.runs[run].end[a]), x1 = toX(D.runs[run].start[b]), y0 = from.y + from.h / 2, y1 = to.y + to.h / 2;
  const bow = Math.max(14, Math.min(60, Math.abs(x1 - x0) / 2)), lift = from === to ? -from.h : 0;
  for (const [style, thick] of [[css.card, 4.5], [colour, 1.8]]) {
    g.strokeStyle = g.fillStyle = style; g.lineWidth = thick;
    g.beginPath(); g.moveTo(x0, y0); g.bezierCurveTo(x0 + bow, y0 + lift, x1 - bow, y1 + lift, x1 - 5, y1); g.stroke();
    const head = thick > 3 ? 2 : 0;
    g.beginPath(); g.moveTo(x1 + head, y1); g.lineTo(x1 - 8 - head, y1 - 4.5 - head); g.lineTo(x1 - 8 - head, y1 + 4.5 + head); g.fill();
  }
}
let pointer = null, band = null;
function drawOver() {
  const g = over.getContext("2d");
  g.clearRect(0, 0, width, height);
  g.save(); g.beginPath(); g.rect(LEFT, 0, plot(), height); g.clip();
  if (band) { g.fillStyle = css.accent; g.globalAlpha = 0.15; g.fillRect(Math.min(...band), AXIS, Math.abs(band[1] - band[0]), height); g.globalAlpha = 1; }
  if (pointer && !band) {
    const x = Math.round(pointer.x) + 0.5;
    g.strokeStyle = css.soft; g.lineWidth = 1; g.setLineDash([2, 3]); g.beginPath(); g.moveTo(x, AXIS); g.lineTo(x, height); g.stroke(); g.setLineDash([]);
  }
  if (hover) {
    D.runs.forEach((run, r) => { if (r !== hover.row.run) outline(g, hover.i, rowOf(hover.i, r), css.soft, 1.5); });
    for (const j of previous(hover.i)) arrow(g, j, hover.i, hover.row.run, css.soft);
    for (const j of next(hover.i)) arrow(g, hover.i, j, hover.row.run, css.accent);
    outline(g, hover.i, hover.row, css.ink, 2);
  }
  g.restore();
}
function cell(label, value) { return `<tr><td>${label}</td><td>${value}</td></tr>`; }
function describe(i, row) {
  const run = D.runs[row.run], track = D.tracks[row.track], length = run.end[i] - run.start[i];
  let text = `<b>${nameOf(i)}</b> <span>${D.meaning[D.kinds[D.kind[i]]]}</span><table>`;
  text += cell("rank, stage", `${D.rank[i]}, ${D.stage[i]}`) + cell("microbatch", D.microbatch[i] + (D.slice[i] ? `, slice ${D.slice[i]}` : ""));
  text += cell("start", time(run.start[i])) + cell("end", time(run.end[i]));
  let change = "";
  if (row.run) {
    const planned = D.runs[0].end[i] - D.runs[0].start[i], share = planned ? ((length / planned - 1) * 100).toFixed(1) : "";
    change = ` <span>(predicted ${time(planned)}${share && `, ${share > 0 ? "+" : ""}${share} %`})</span>`;
  }
  text += cell("duration", time(length) + change);
  if (run.ready && track.stream.startsWith("compute")) {
    const order = run.tracks[row.track].order, at = order.indexOf(i), free = at ? run.end[order[at - 1]] : 0;
    const had = Math.min(Math.max(run.ready[i], free), Math.max(run.start[i], free));
    text += cell("before it", `waited ${time(had - free)}, launch ${time(Math.max(0, run.start[i] - had))}`);
  }
  if (run.memory.length) {
    text += cell("memory", `takes ${bytes(D.taken[i])}, frees ${bytes(D.freed[i])}`);
    text += cell("rank holds", `${bytes(heldAt(row.run, D.rank[i], run.start[i]))} from its start`);
  }
  return text + `</table>`;
}
function describeStrip(strip, t) {
  let text = `<b>rank ${strip.rank}</b> <span>at ${time(Math.max(0, t))}</span><table>`;
  D.runs.forEach((run, r) => { text += cell(D.runs.length > 1 ? run.name : "holds", bytes(heldAt(r, strip.rank, t))); });
  if (D.capacity) text += cell("capacity", bytes(D.capacity[strip.rank]));
  return text + `</table>`;
}
function showTip(x, y) {
  const strip = strips.find((one) => y >= one.y && y < one.y + one.h), inside = x >= LEFT && x <= LEFT + plot();
  // Only numbers and words of this page's own tables get here: streams and sources, which a file may name, do not.
  const text = hover ? describe(hover.i, hover.row) : strip && inside ? describeStrip(strip, toT(x)) : "";
  tip.style.visibility = text ? "visible" : "hidden";
  if (!text) return;
  tip.innerHTML = text;
  const wide = tip.offsetWidth, tall = tip.offsetHeight;
  tip.style.left = (x + wide + 26 > width ? Math.max(4, x - wide - 18) : x + 18) + "px";
  // Below the neighbouring rank, so that the arrows to it stay in sight; above where there is no room.
  const clear = hover ? Math.min(60, hover.row.h * 2) + 6 : 16, low = y + clear;
  tip.style.top = (low + tall + 6 < height ? low : Math.max(4, y - tall - clear)) + "px";
}

// ---- moving ------------------------------------------------------------------------------------------------------
function redraw() { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; draw(); }); } }
function show(from, to) {
  const least = Math.max(SHORTEST * 1.5, TOTAL / 1e6), length = Math.min(TOTAL * 1.02, Math.max(least, to - from));
  const middle = (from + to) / 2, low = Math.min(Math.max(middle - length / 2, 0), Math.max(0, TOTAL * 1.02 - length));
  view = [low, low + length];
  redraw();
}
const reset = () => show(0, TOTAL * 1.02);
function zoom(t, factor) { show(t - (t - view[0]) * factor, t + (view[1] - t) * factor); }
over.addEventListener("wheel", (event) => {
  if (event.offsetX < LEFT) return; // over the labels the page scrolls
  event.preventDefault();
  const unit = event.deltaMode ? 30 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const by = ((event.deltaX || event.deltaY) * unit * (view[1] - view[0])) / plot();
    show(view[0] + by, view[1] + by);
  } else zoom(toT(event.offsetX), Math.exp(event.deltaY * unit * 0.0016));
}, { passive: false });
let drag = null;
over.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  drag = { x: event.offsetX, view: view.slice(), range: event.shiftKey };
  over.setPointerCapture(event.pointerId);
});
over.addEventListener("pointermove", (event) => {
  const x = event.offsetX, y = event.offsetY;
  if (drag && drag.range) { band = [drag.x, x]; hover = null; tip.style.visibility = "hidden"; drawOver(); return; }
  if (drag && (event.buttons & 1)) {
    const by = ((x - drag.x) / plot()) * (drag.view[1] - drag.view[0]);
    show(drag.view[0] - by, drag.view[1] - by);
    over.style.cursor = "grabbing"; hover = null; tip.style.visibility = "hidden";
    return;
  }
  pointer = x >= LEFT && x <= LEFT + plot() ? { x, y } : null;
  hover = find(x, y);
  drawOver(); showTip(x, y);
});
function release() {
  if (drag && drag.range && band && Math.abs(band[1] - band[0]) > 4) { const [a, b] = band.map(toT).sort((p, q) => p - q); show(a, b); }
  drag = band = null; over.style.cursor = ""; drawOver();
}
over.addEventListener("pointerup", release);
over.addEventListener("pointercancel", release);
over.addEventListener("pointerleave", () => { pointer = hover = null; tip.style.visibility = "hidden"; drawOver(); });
over.addEventListener("dblclick", reset);
chart.addEventListener("keydown", (event) => {
  const length = view[1] - view[0], middle = (view[0] + view[1]) / 2;
  const moves = { ArrowLeft: () => show(view[0] - length / 5, view[1] - length / 5), ArrowRight: () => show(view[0] + length / 5, view[1] + length / 5),
    "+": () => zoom(middle, 0.7), "=": () => zoom(middle, 0.7), "-": () => zoom(middle, 1.4), 0: reset };
  if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
});

// ---- legend and start --------------------------------------------------------------------------------------------
function legend() {
  for (const kind of D.present) {
    const key = document.createElement("span"), mark = document.createElement("i");
    key.className = "key"; mark.style.background = D.colours[kind];
    key.append(mark, `${kind} ${D.meaning[kind]}`); $("legend").append(key);
  }
  if (D.chunk.some((c) => c)) $("legend").append(Object.assign(document.createElement("span"), { textContent: "paler: a rank's later stages" }));
  if (D.runs.length > 1) {
    const button = document.createElement("button");
    button.textContent = "pair the rows of each rank"; button.setAttribute("aria-pressed", "false");
    button.onclick = () => { grouped = grouped === "run" ? "rank" : "run"; button.setAttribute("aria-pressed", String(grouped === "rank")); size(); };
    $("legend").append(button);
  }
  $("legend").append(Object.assign(document.createElement("span"), { className: "hint", textContent: "wheel: zoom · drag: move · shift-drag: zoom to a range · double-click: all" }));
}
legend(); readTheme(); view = [0, TOTAL * 1.02]; size();
new ResizeObserver(() => { if (chart.clientWidth !== width) size(); }).observe(chart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); draw(); });
