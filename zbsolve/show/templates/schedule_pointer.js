// ---- what is pointed at, and moving about: mouse, touch, keys ----------------------------------------------------
let pointer = null, band = null; // where the mouse is; the range that is being dragged over

function find(x, y) {
  const t = toT(x), row = rows.find((one) => y >= one.y && y < one.y + one.h);
  if (!row || x < LEFT || x > LEFT + plot()) return null;
  const track = runs[row.run].tracks[row.track], slack = (2 * (view[1] - view[0])) / plot();
  const i = Math.min(above(track.end, t), track.order.length - 1);
  for (const j of [i, i - 1])
    if (j >= 0 && track.start[j] <= t + (j === i && track.start[j] <= t ? 0 : slack) && track.end[j] >= t - slack) return { i: track.order[j], row };
  return null;
}
function rowOf(i, run) { return rows.find((row) => row.track === home[i] && row.run === run); }
function outline(g, i, row, colour, thick) {
  const run = runs[row.run], x = toX(run.startOf(i)), wide = Math.max(2, toX(run.endOf(i)) - x);
  g.strokeStyle = css.card; g.lineWidth = thick + 2; g.strokeRect(x, row.y, wide - 1, row.h - 1);
  g.strokeStyle = colour; g.lineWidth = thick; g.strokeRect(x, row.y, wide - 1, row.h - 1);
}
function arrow(g, a, b, run, colour) {
  const from = rowOf(a, run), to = rowOf(b, run);
  const x0 = toX(runs[run].endOf(a)), x1 = toX(runs[run].startOf(b)), y0 = from.y + from.h / 2, y1 = to.y + to.h / 2;
  const bow = Math.max(14, Math.min(60, Math.abs(x1 - x0) / 2)), lift = from === to ? -from.h : 0;
  for (const [style, thick] of [[css.card, 4.5], [colour, 1.8]]) {
    g.strokeStyle = g.fillStyle = style; g.lineWidth = thick;
    g.beginPath(); g.moveTo(x0, y0); g.bezierCurveTo(x0 + bow, y0 + lift, x1 - bow, y1 + lift, x1 - 5, y1); g.stroke();
    const head = thick > 3 ? 2 : 0;
    g.beginPath(); g.moveTo(x1 + head, y1); g.lineTo(x1 - 8 - head, y1 - 4.5 - head); g.lineTo(x1 - 8 - head, y1 + 4.5 + head); g.fill();
  }
}
function drawOver() {
  const g = over.getContext("2d");
  g.clearRect(0, 0, width, height);
  if (printing) return;
  g.save(); g.beginPath(); g.rect(LEFT, 0, plot(), height); g.clip();
  if (band) { g.fillStyle = css.accent; g.globalAlpha = 0.15; g.fillRect(Math.min(...band), AXIS, Math.abs(band[1] - band[0]), height); g.globalAlpha = 1; }
  if (pointer && !band) {
    const x = Math.round(pointer.x) + 0.5;
    g.strokeStyle = css.soft; g.lineWidth = 1; g.setLineDash([2, 3]); g.beginPath(); g.moveTo(x, AXIS); g.lineTo(x, height); g.stroke(); g.setLineDash([]);
  }
  if (hover) {
    runs.forEach((run, r) => { if (r !== hover.row.run) outline(g, hover.i, rowOf(hover.i, r), css.soft, 1.5); });
    for (const j of previous(hover.i)) arrow(g, j, hover.i, hover.row.run, css.soft);
    for (const j of next(hover.i)) arrow(g, hover.i, j, hover.row.run, css.accent);
    outline(g, hover.i, hover.row, css.ink, 2);
  }
  g.restore();
}

// ---- the tip: a name, what it is, and a table; texts are set as texts ---------------------------------------------
function describe(i, row) {
  const run = runs[row.run], track = D.tracks[row.track], length = run.endOf(i) - run.startOf(i), cells = [];
  cells.push(["rank, stage", `${C.rank[i]}, ${C.stage[i]}`]);
  cells.push(["microbatch", C.microbatch[i] + (C.slice[i] ? `, slice ${C.slice[i]}` : "")]);
  cells.push(["start", time(run.startOf(i))], ["end", time(run.endOf(i))]);
  let change = "";
  if (row.run) {
    const planned = runs[0].endOf(i) - runs[0].startOf(i), share = planned ? ((length / planned - 1) * 100).toFixed(1) : "";
    change = ` (predicted ${time(planned)}${share && `, ${share > 0 ? "+" : ""}${share} %`})`;
  }
  cells.push(["duration", time(length) + change]);
  if (run.ready && track.stream.startsWith("compute")) {
    const { order, end } = run.tracks[row.track], at = order.indexOf(i), free = at ? end[at - 1] : 0;
    const had = Math.min(Math.max(run.ready(i), free), Math.max(run.startOf(i), free));
    cells.push(["before it", `waited ${time(had - free)}, launch ${time(Math.max(0, run.startOf(i) - had))}`]);
  }
  if (D.memory) {
    cells.push(["memory", `takes ${bytes(C.taken[i])}, frees ${bytes(C.freed[i])}`]);
    cells.push(["rank holds", `${bytes(heldAt(run, C.rank[i], run.startOf(i)))} from its start`]);
  }
  return [nameOf(i), D.meaning[D.kinds[C.kind[i]]], cells];
}
function describeStrip(strip, t) {
  const cells = runs.map((run) => [runs.length > 1 ? run.name : "holds", bytes(heldAt(run, strip.rank, t))]);
  if (D.capacity) cells.push(["capacity", bytes(D.capacity[strip.rank])]);
  return [`rank ${strip.rank}`, `at ${time(Math.max(0, t))}`, cells];
}
function showTip(x, y) {
  const strip = strips.find((one) => y >= one.y && y < one.y + one.h), inside = x >= LEFT && x <= LEFT + plot();
  const said = hover ? describe(hover.i, hover.row) : strip && inside ? describeStrip(strip, toT(x)) : null;
  tip.style.visibility = said ? "visible" : "hidden";
  if (!said) return;
  const table = element("table", "", ...said[2].map(([label, value]) => element("tr", "", element("td", label), element("td", value))));
  tip.replaceChildren(element("b", said[0]), " ", element("span", said[1]), table);
  const wide = tip.offsetWidth, tall = tip.offsetHeight;
  tip.style.left = Math.min(Math.max(4, x + wide + 26 > width ? x - wide - 18 : x + 18), Math.max(4, width - wide - 4)) + "px";
  // Below the neighbouring rank, so that the arrows to it stay in sight; above where there is no room.
  const clear = hover ? Math.min(60, hover.row.h * 2) + 6 : 16, low = y + clear;
  tip.style.top = (low + tall + 6 < height ? low : Math.max(4, y - tall - clear)) + "px";
}
function point(x, y) { hover = find(x, y); drawOver(); showTip(x, y); }
function leave() { pointer = hover = null; tip.style.visibility = "hidden"; drawOver(); }

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

// Fingers and buttons that are down, by id. One moves the view; two pinch it, so that the times under them stay under them.
const down = new Map();
let drag = null, lastTap = { at: -1e9, x: 0 };
function grip() {
  const [a, b] = [...down.values()];
  drag = { x: a.x, view: view.slice(), moved: drag ? drag.moved : false, range: a.range, times: b ? [toT(a.x), toT(b.x)] : null };
}
over.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  down.set(event.pointerId, { x: event.offsetX, y: event.offsetY, range: event.shiftKey });
  over.setPointerCapture(event.pointerId);
  if (down.size <= 2) grip();
});
function pinch() {
  const [a, b] = [...down.values()], [s, t] = drag.times;
  if (Math.abs(b.x - a.x) < 8 || s === t) return;
  const length = ((t - s) / (b.x - a.x)) * plot();
  if (length > 0) { const from = s - ((a.x - LEFT) / plot()) * length; show(from, from + length); }
}
over.addEventListener("pointermove", (event) => {
  const x = event.offsetX, y = event.offsetY, mine = down.get(event.pointerId);
  if (!mine) { pointer = x >= LEFT && x <= LEFT + plot() ? { x, y } : null; point(x, y); return; }
  mine.x = x; mine.y = y;
  if (!drag.moved && !drag.times && Math.abs(x - drag.x) < 4) return;
  drag.moved = true; hover = pointer = null; tip.style.visibility = "hidden";
  if (drag.times) pinch();
  else if (drag.range) { band = [drag.x, x]; drawOver(); }
  else {
    const by = ((x - drag.x) / plot()) * (drag.view[1] - drag.view[0]);
    show(drag.view[0] - by, drag.view[1] - by);
    over.style.cursor = "grabbing";
  }
});
function release(event) {
  const mine = down.get(event.pointerId);
  down.delete(event.pointerId);
  if (!mine) return;
  if (band && Math.abs(band[1] - band[0]) > 4) { const [a, b] = band.map(toT).sort((p, q) => p - q); show(a, b); }
  else if (event.type === "pointerup" && event.pointerType !== "mouse" && !drag.moved) tap(mine, event.timeStamp);
  band = null; over.style.cursor = "";
  if (down.size) grip(); else drag = null;
  drawOver();
}
function tap({ x, y }, at) {
  if (at - lastTap.at < 350 && Math.abs(x - lastTap.x) < 30) { leave(); reset(); } else point(x, y);
  lastTap = { at, x };
}
over.addEventListener("pointerup", release);
over.addEventListener("pointercancel", release);
over.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
over.addEventListener("dblclick", reset);

// Keys: the view with arrows, + − 0; with shift the arrows go from pass to pass, and from row to row.
function go(to) {
  if (!to) return;
  const run = runs[to.row.run], middle = (run.startOf(to.i) + run.endOf(to.i)) / 2;
  if (middle < view[0] || middle > view[1]) show(middle - (view[1] - view[0]) / 2, middle + (view[1] - view[0]) / 2);
  hover = to;
  drawOver(); showTip(Math.min(Math.max(toX(middle), LEFT), LEFT + plot()), to.row.y + to.row.h / 2);
}
function passBeside(steps) {
  if (!hover) return rows.length ? nearest(rows[0], (view[0] + view[1]) / 2) : null;
  const { order } = runs[hover.row.run].tracks[hover.row.track], i = order[order.indexOf(hover.i) + steps];
  return i === undefined ? null : { i, row: hover.row };
}
function passInRow(steps) {
  if (!hover) return passBeside(0);
  const row = rows[rows.indexOf(hover.row) + steps], run = runs[hover.row.run];
  return row ? nearest(row, (run.startOf(hover.i) + run.endOf(hover.i)) / 2) : null;
}
function nearest(row, t) {
  const { order, end } = runs[row.run].tracks[row.track];
  return order.length ? { i: order[Math.min(above(end, t), order.length - 1)], row } : null;
}
function keys(event) {
  const length = view[1] - view[0], middle = (view[0] + view[1]) / 2;
  const by = (share) => show(view[0] + length * share, view[1] + length * share);
  const moves = event.shiftKey
    ? { ArrowLeft: () => go(passBeside(-1)), ArrowRight: () => go(passBeside(1)), ArrowUp: () => go(passInRow(-1)), ArrowDown: () => go(passInRow(1)) }
    : { ArrowLeft: () => by(-0.2), ArrowRight: () => by(0.2), 0: reset, Escape: leave };
  Object.assign(moves, { "+": () => zoom(middle, 0.7), "=": () => zoom(middle, 0.7), "-": () => zoom(middle, 1.4), _: () => zoom(middle, 1.4) });
  if (moves[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); moves[event.key](); }
}
chart.addEventListener("keydown", keys);
