// ---- what is pointed at: mouse, touch, keys ----------------------------------------------------------------------
function find(x, y) {
  const lane = lanes.find((one) => y >= one.y - GAP / 2 && y < one.foot + one.solved.length * one.sign + GAP / 2);
  if (!lane) return null;
  if (y >= lane.foot && lane.solved.length) return lane.solved[Math.min(lane.solved.length - 1, Math.floor((y - lane.foot) / lane.sign))];
  const box = sides.find((one) => x >= one.x && x < one.x + one.w);
  if (box) return inside(lane.places.get(box.name) || [], x, y);
  const column = Math.floor((x - LEFT) / wide); // an empty column: the nearest one beside it
  for (const k of [0, -1, 1, -2, 2]) if (lane.places.has(column + k)) return inside(lane.places.get(column + k), x, y);
  return null;
}
// The dot under the pointer, or else the nearest of these.
function inside(rows, x, y) {
  let best = null, least = Infinity;
  for (const i of rows) {
    const cell = cells.get(i), away = (cell.x + cell.w / 2 - x) ** 2 + (cell.y + cell.h / 2 - y) ** 2;
    if (away < least) { least = away; best = i; }
  }
  return best;
}
function drawOver() {
  const g = over.getContext("2d");
  g.clearRect(0, 0, width, height);
  if (hover === null || printing) return;
  const mark = (i, colour) => {
    const cell = cells.get(i), x = cell.x + cell.w / 2, y = cell.y + cell.h / 2;
    for (const [style, thick] of [[css.card, 4], [colour, 2]]) { g.strokeStyle = style; g.lineWidth = thick; g.beginPath(); g.arc(x, y, 5, 0, 7); g.stroke(); }
  };
  if (C.by[hover] >= 0) mark(C.by[hover], css.accent);
  mark(hover, css.ink);
}
const share = (r) => `${r >= 1 ? "+" : "−"}${number(Math.abs(r - 1) * 100, 2)} % of the best step`;
function heading(i) {
  const placement = named("placement", C.placement[i]), chunks = placement === "loop" ? C.chunks[i] : "";
  return `dp ${C.dp[i]} tp ${C.tp[i]} pp ${C.pp[i]} ${placement}${chunks}, ${C.count[i]} × ${C.size[i]}`;
}
function verdict(i) {
  if (i === D.solved.reduce((a, b) => (b[1] < a[1] ? b : a))[0]) return "the plan";
  if (C.by[i] >= 0) return "pruned: dominated";
  if (C.bound[i] < 0) return "pruned: no room";
  return C.open[i] ? "open: no bound excludes it" : "pruned by its bound";
}
function describe(i) {
  const told = ["dp", "tp", "pp", "chunks", "placement", "size", "count"];
  const found = D.fields.filter(({ name }) => D.varying.includes(name) && !told.includes(name)).map(({ name, words }) => [words, named(name, C[name][i])]);
  if (stepOf.has(i)) found.push(["step, found", `${time(stepOf.get(i))} (${share(stepOf.get(i) / D.step)})`]);
  if (C.bound[i] >= 0) found.push(["step at least", `${time(C.bound[i])} (${share(ratio(i))})`]);
  found.push(["because of", D.rules[C.rule[i]]]);
  if (C.by[i] >= 0) found.push(["which is", heading(C.by[i])], ...differences(i, C.by[i]));
  if (dominates[i]) found.push(["dominates", `${number(dominates[i])} others`]);
  found.push(["memory at least", `${bytes(C.need[i])} of ${bytes(D.memory)}`]);
  return found;
}
// In what a layout differs from the one that dominates it.
function differences(i, j) {
  const names = D.fields.filter(({ name }) => C[name][i] !== C[name][j]);
  return names.length ? [["with", names.map(({ name, words }) => `${words} ${named(name, C[name][j])}`).join(", ")]] : [];
}
function showTip(x, y) {
  tip.style.visibility = hover === null ? "hidden" : "visible";
  if (hover === null) return;
  const table = element("table", "", ...describe(hover).map(([label, value]) => element("tr", "", element("td", label), element("td", value))));
  tip.replaceChildren(element("b", heading(hover)), " ", element("span", verdict(hover)), table);
  const across = tip.offsetWidth, tall = tip.offsetHeight;
  tip.style.left = Math.min(Math.max(4, x + across + 26 > width ? x - across - 18 : x + 18), Math.max(4, width - across - 4)) + "px";
  tip.style.top = Math.max(4, y + tall + 20 < height ? y + 14 : y - tall - 14) + "px";
}
function tell(i, x, y) { hover = i; drawOver(); showTip(x, y); }
function leave() { tell(null, 0, 0); }
over.addEventListener("pointermove", (event) => tell(find(event.offsetX, event.offsetY), event.offsetX, event.offsetY));
over.addEventListener("pointerdown", (event) => tell(find(event.offsetX, event.offsetY), event.offsetX, event.offsetY));
over.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
// Keys: from layout to layout by rising bound; those without a bound follow in the order of the space.
let inOrder = null;
function beside(steps) {
  inOrder ??= [...byBound, ...[...Array(COUNT).keys()].filter((i) => C.bound[i] < 0)];
  return hover === null ? inOrder[0] : inOrder[Math.min(COUNT - 1, Math.max(0, inOrder.indexOf(hover) + steps))];
}
function go(i) { const cell = cells.get(i); tell(i, cell.x, cell.y); }
chart.addEventListener("keydown", (event) => {
  const moves = { ArrowRight: () => go(beside(1)), ArrowLeft: () => go(beside(-1)), PageDown: () => go(beside(100)), PageUp: () => go(beside(-100)), Home: () => go(beside(-COUNT)), End: () => go(beside(COUNT)), Escape: leave };
  if (moves[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); moves[event.key](); }
});
