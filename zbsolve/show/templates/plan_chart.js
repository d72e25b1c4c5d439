// ---- the chart: each layout a dot at its bound over the best step, stacked, in rows by one field -------------------
const chart = $("chart"), base = $("base"), over = $("over"), tip = $("tip");
const AXIS = 38, NARROW = 560, GAP = 10, SIGN = 7, FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const PAPER = 980; // pixels of the chart on paper
const TICKS = [0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 1.3, 1.7, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 1e4];
let D, C, COUNT, byBound, stepOf, dominates; // words, columns, how many, rows by bound, row → step, row → how many it dominates
let field = "", range = 2, lanes = [], cells = new Map(), width = 0, height = 0, narrow = false, printing = false, css = {}, hover = null;
let LEFT = 92, PITCH = 4, wide = 4, low = 0, sides = [];

async function prepare() {
  D = JSON.parse($("data").textContent);
  C = await unpacked(D.packed);
  COUNT = C.rule.length;
  byBound = [...Array(COUNT).keys()].filter((i) => C.bound[i] >= 0).sort((i, j) => C.bound[i] - C.bound[j]);
  stepOf = new Map(D.solved);
  dominates = new Int32Array(COUNT);
  for (const i of C.by) if (i >= 0) dominates[i]++;
  field = D.groups[0] || D.fields[0].name;
}
const ratio = (i) => C.bound[i] / D.step;
const named = (name, value) => { const { names } = D.fields.find((one) => one.name === name); return names ? names[value] : number(value); };

// ---- colours -----------------------------------------------------------------------------------------------------
function readTheme() {
  document.documentElement.classList.toggle("paper", printing);
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "ink", "soft", "line", "track", "grid", "accent", "found"]) css[name] = style.getPropertyValue("--" + name).trim();
  css.rules = D.rules.map((_, i) => style.getPropertyValue("--rule" + i).trim() || `hsl(${(i * 67) % 360} 45% 52%)`);
}

// ---- layout ------------------------------------------------------------------------------------------------------
function size() {
  width = printing ? PAPER : chart.clientWidth;
  narrow = width < NARROW;
  LEFT = narrow ? 58 : 104;
  layout();
  const scale = printing ? 3 : window.devicePixelRatio || 1;
  for (const canvas of [base, over]) {
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); canvas.style.height = printing ? "auto" : height + "px";
    canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
  }
  draw();
}
const plotEnd = () => (sides.length ? sides[0].x - GAP : width - GAP);
const columns = () => Math.max(10, Math.floor((plotEnd() - LEFT) / wide));
const most = () => Math.max(range === Infinity ? ratio(byBound[byBound.length - 1] ?? 0) : range, 1.005);
const toX = (r) => LEFT + ((Math.log(r) - low) / (Math.log(most()) - low)) * (plotEnd() - LEFT);
// Where a layout goes: a column of the chart, or one of the boxes beside it.
function placeOf(i) {
  if (C.rule[i] === D.dominated) return "dominated";
  if (C.bound[i] < 0) return "no room";
  return ratio(i) > most() ? "further" : Math.min(columns() - 1, Math.max(0, Math.floor((toX(ratio(i)) - LEFT) / wide)));
}
function layout() {
  const shown = byBound.filter((i) => ratio(i) <= most()).length;
  PITCH = (narrow ? 3 : 4) * (shown < 800 ? 1.75 : 1); // few dots are larger
  wide = PITCH;
  low = Math.log(Math.min(1, ratio(byBound[0] ?? 0) || 1) * (1 - 0.02 * Math.log(Math.max(most(), 1.05))));
  const names = ["further", "dominated", "no room"].filter((name) => name !== "further" || ratio(byBound[byBound.length - 1] ?? 0) > most());
  const box = narrow ? 44 : 120;
  sides = names.map((name, k) => ({ name, x: width - (names.length - k) * (box + 6), w: box }));
  const values = [...new Set(C[field])].sort((a, b) => a - b), room = printing ? 420 : window.innerHeight * 0.6;
  lanes = values.map((value) => ({ value, count: 0, solved: [], places: new Map() }));
  const at = new Map(values.map((value, k) => [value, lanes[k]]));
  const rules = [...Array(COUNT).keys()].sort((i, j) => C.rule[i] - C.rule[j] || C.bound[i] - C.bound[j]); // one colour stands together
  for (const i of rules) {
    const lane = at.get(C[field][i]), place = placeOf(i);
    lane.count++;
    if (!lane.places.has(place)) lane.places.set(place, []);
    lane.places.get(place).push(i);
  }
  for (const [i] of [...stepOf].sort((a, b) => a[1] - b[1])) if (stepOf.get(i) / D.step <= most()) at.get(C[field][i]).solved.push(i);
  const tall = Math.min(120, Math.max(narrow ? 44 : 52, room / lanes.length - 12));
  let y = AXIS + 4;
  for (const lane of lanes) {
    lane.sign = lane.solved.length > 14 ? Math.max(2, 98 / lane.solved.length) : SIGN;
    Object.assign(lane, { y, h: tall, foot: y + tall });
    y += tall + lane.solved.length * lane.sign + GAP;
  }
  height = Math.ceil(y);
  arrange(tall);
}
// The place of each dot. Dots have one height everywhere, so that rows can be compared; and in boxes one size.
function arrange(tall) {
  const stacks = lanes.flatMap((lane) => [...lane.places].filter(([place]) => typeof place === "number").map(([, rows]) => rows.length));
  const boxes = lanes.flatMap((lane) => [...lane.places].filter(([place]) => typeof place === "string").map(([, rows]) => rows.length));
  const step = Math.min(PITCH, (tall - 4) / Math.max(1, ...stacks)), side = sides.length ? sides[0].w : 1;
  let dot = PITCH;
  while (dot > 0.5 && Math.floor(side / dot) * Math.floor((tall - 16) / dot) < Math.max(1, ...boxes)) dot -= 0.1;
  cells = new Map();
  for (const lane of lanes) for (const [place, rows] of lane.places) {
    const box = sides.find((one) => one.name === place), across = box ? Math.max(1, Math.floor(box.w / dot)) : 1;
    rows.forEach((i, k) => cells.set(i, box
      ? { x: box.x + (k % across) * dot, y: lane.y + 15 + Math.floor(k / across) * dot, w: dot, h: dot, lane }
      : { x: LEFT + place * wide, y: lane.foot - (k + 1) * step, w: wide, h: step, lane }));
  }
}

// ---- drawing -----------------------------------------------------------------------------------------------------
function draw() {
  const g = base.getContext("2d"), one = toX(1);
  g.clearRect(0, 0, width, height);
  g.textBaseline = "middle";
  g.fillStyle = css.track;
  for (const lane of lanes) {
    g.fillRect(LEFT, lane.y, plotEnd() - LEFT, lane.h);
    for (const box of sides) g.fillRect(box.x, lane.y, box.w, lane.h);
  }
  g.globalAlpha = 0.1; g.fillStyle = css.found; // no bound excludes what lies here
  for (const lane of lanes) g.fillRect(LEFT, lane.y, one - LEFT, lane.h);
  g.globalAlpha = 1;
  axis(g, one);
  for (const [i, cell] of cells) {
    g.fillStyle = css.rules[C.rule[i]];
    const gap = cell.h > 2.4 ? 0.8 : 0;
    g.fillRect(cell.x, cell.y, cell.w - (cell.w > 2.4 ? 0.8 : 0), Math.max(0.4, cell.h - gap));
  }
  g.strokeStyle = css.found; g.lineWidth = 1.5;
  g.beginPath(); g.moveTo(one, AXIS - 4); g.lineTo(one, height - GAP); g.stroke();
  for (const lane of lanes) { solved(g, lane); label(g, lane); }
  drawOver();
}
function axis(g, one) {
  const taken = [], wanted = [1, ...TICKS.filter((r) => r !== 1)];
  g.font = `11px ${FONT}`;
  for (const r of wanted) {
    const x = Math.round(toX(r)) + 0.5, half = narrow ? 16 : g.measureText(time(r * D.step)).width / 2 + 5;
    if (x < LEFT || x > plotEnd() || taken.some(([other, its]) => Math.abs(other - x) < its + half)) continue;
    taken.push([x, half]);
    g.strokeStyle = css.grid; g.lineWidth = 1; g.beginPath(); g.moveTo(x, AXIS - 4); g.lineTo(x, height - GAP); g.stroke();
    g.textAlign = "center"; g.fillStyle = r === 1 ? css.found : css.soft;
    const mid = Math.min(Math.max(x, half), width - half);
    g.fillText(`${r}×`, mid, AXIS - 12);
    if (!narrow) g.fillText(time(r * D.step), mid, AXIS - 26);
  }
  g.font = `11px ${FONT}`; g.textAlign = "left"; g.fillStyle = css.soft;
  const short = { further: "beyond", dominated: "domin.", "no room": "no room" };
  for (const box of sides) g.fillText(narrow ? short[box.name] : box.name === "further" ? `beyond ${most()}×` : box.name, box.x, AXIS - 12, box.w);
}
// What was solved: a line from the bound to the step, the best first.
function solved(g, lane) {
  lane.solved.forEach((i, k) => {
    const y = lane.foot + (k + 0.5) * lane.sign, from = C.bound[i] < 0 ? toX(1) : Math.max(LEFT, toX(ratio(i))), to = toX(stepOf.get(i) / D.step), r = Math.min(3.2, lane.sign / 2);
    g.strokeStyle = css.soft; g.lineWidth = 1; g.beginPath(); g.moveTo(from, y); g.lineTo(to, y); g.stroke();
    g.fillStyle = css.found;
    g.beginPath(); g.moveTo(to, y - r); g.lineTo(to + r, y); g.lineTo(to, y + r); g.lineTo(to - r, y); g.fill();
  });
}
function label(g, lane) {
  g.textAlign = "right"; g.fillStyle = css.ink; g.font = `600 12px ${FONT}`;
  g.fillText(named(field, lane.value), LEFT - 8, lane.y + 12, LEFT - 12);
  g.fillStyle = css.soft; g.font = `11px ${FONT}`;
  g.fillText(narrow ? number(lane.count) : `${number(lane.count)} layouts`, LEFT - 8, lane.y + 28, LEFT - 12);
  g.textAlign = "left";
  for (const box of sides) g.fillText(number((lane.places.get(box.name) || []).length), box.x + 3, lane.y + 8, box.w - 4);
}
