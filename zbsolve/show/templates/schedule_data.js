// ---- what the page is of: words in D, columns in C, tables made from them ---------------------------------------
let D, C, COUNT, TOTAL, SHORTEST, TYPICAL, LONGEST, DIGITS, runs, next, previous, home;

// The first index whose value is above x, in an ascending array.
function above(values, x) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] > x) high = middle; else low = middle + 1; }
  return low;
}
const nameOf = (i) => C.stage[i] + D.kinds[C.kind[i]] + C.microbatch[i] + (C.slice[i] ? "." + C.slice[i] : "");
const streamKind = (track) => track.stream.split(":")[0];

// Rows by rising value, a whole number each; rows with one value as they were. With the place of each row behind its value,
// numbers are sorted alone, which takes a tenth of the time of sorting by a function. (Loops, as `from` takes ten times theirs.)
function sortedBy(rows, values, more) {
  const size = rows.length, places = 2 ** Math.ceil(Math.log2(size + 1)), keys = new Float64Array(size), found = new Int32Array(size);
  let most = 0;
  for (let place = 0; place < size; place++) {
    const i = rows[place], value = more ? values[i] + more[i] : values[i];
    if (value > most) most = value;
    keys[place] = value * places + place;
  }
  if (most * places > Number.MAX_SAFE_INTEGER) return Int32Array.from(rows).sort((i, j) => values[i] - values[j] + (more ? more[i] - more[j] : 0));
  keys.sort();
  for (let place = 0; place < size; place++) found[place] = rows[keys[place] % places];
  return found;
}
// The passes of a track in order, with their times. Of two that start together the one without length comes first; and ends
// must not fall, or they could not be searched.
function inOrder(rows, run) {
  const order = sortedBy(rows, run.start), size = order.length, start = new Float64Array(size), end = new Float64Array(size);
  for (let i = 1; i < size; i++)
    for (let j = i; j && run.start[order[j]] === run.start[order[j - 1]] && run.length[order[j]] < run.length[order[j - 1]]; j--)
      [order[j], order[j - 1]] = [order[j - 1], order[j]];
  for (let i = 0; i < size; i++) {
    start[i] = run.start[order[i]] / run.scale;
    end[i] = (run.start[order[i]] + run.length[order[i]]) / run.scale;
    if (i && end[i] < end[i - 1]) end[i] = end[i - 1];
  }
  return { order, start, end };
}
function runFrom(words, r) {
  const start = C["start" + r], length = C["length" + r], turn = C["turn" + r], counted = C["held" + r], scale = words.scale;
  return { ...words, start, length, turn, counted, startOf: (i) => start[i] / scale, endOf: (i) => (start[i] + length[i]) / scale,
    ready: C["ready" + r] ? (i) => C["ready" + r][i] / scale : null, curves: new Map() };
}
// Bytes held by a rank over time: { time, held }, held from each time on. As timeline.memory: at one time frees come before
// takes, but those of passes without length, which free in their turn.
function curveOf(run, rank) {
  if (!run.curves.has(rank)) run.curves.set(rank, (run.counted ? countedCurve : memoryCurve)(run, byRank(rank)));
  return run.curves.get(rank);
}
let ranked = null;
function byRank(rank) {
  if (!ranked) {
    const count = new Int32Array(D.ranks + 1);
    for (const r of C.rank) count[r + 1]++;
    for (let r = 0; r < D.ranks; r++) count[r + 1] += count[r];
    const at = count.slice(), rows = new Int32Array(COUNT);
    for (let i = 0; i < COUNT; i++) rows[at[C.rank[i]]++] = i;
    ranked = (r) => rows.subarray(count[r], count[r + 1]);
  }
  return ranked(rank);
}
function memoryCurve(run, rows) {
  const { start, length, scale } = run, { taken, freed } = C;
  const takes = sortedBy(run.turn ? sortedBy(rows, run.turn) : rows, start);
  const frees = sortedBy(rows.filter((i) => length[i] > 0 && freed[i]), start, length);
  const time = new Float64Array(2 * rows.length + 1), held = new Float64Array(2 * rows.length + 1);
  let size = 1, now = 0, f = 0;
  const change = (t, by) => { if (by) { now += by; time[size] = t / scale; held[size++] = now; } };
  const freeUntil = (t) => { for (; f < frees.length && start[frees[f]] + length[frees[f]] <= t; f++) change(start[frees[f]] + length[frees[f]], -freed[frees[f]]); };
  for (let n = 0; n < takes.length; n++) {
    const i = takes[n];
    freeUntil(start[i]);
    change(start[i], taken[i]);
    if (!length[i]) change(start[i], -freed[i]);
  }
  freeUntil(Infinity);
  return { time: time.slice(0, size), held: held.slice(0, size) };
}
// Bytes that were counted are known at the ends of passes.
function countedCurve(run, rows) {
  const ends = sortedBy(rows, run.start, run.length), time = new Float64Array(rows.length + 1), held = new Float64Array(rows.length + 1);
  ends.forEach((i, at) => { time[at + 1] = run.endOf(i); held[at + 1] = run.counted[i]; });
  return { time, held };
}
const heldAt = (run, rank, t) => { const curve = curveOf(run, rank), i = above(curve.time, t) - 1; return i < 0 ? 0 : curve.held[i]; };

// From each pass to its neighbours in the graph, made when the first one is asked for.
function adjacency(from, to) {
  let first = null, list;
  return (i) => {
    if (!first) {
      first = new Int32Array(COUNT + 1); list = new Int32Array(from.length);
      for (const one of from) first[one + 1]++;
      for (let one = 0; one < COUNT; one++) first[one + 1] += first[one];
      const at = first.slice();
      for (let e = 0; e < from.length; e++) list[at[from[e]]++] = to[e];
    }
    return list.subarray(first[i], first[i + 1]);
  };
}
async function prepare() {
  D = JSON.parse(document.getElementById("data").textContent);
  C = await unpacked(D.packed);
  D.packed = null;
  COUNT = C.kind.length;
  runs = D.runs.map(runFrom);
  let at = 0;
  for (const track of D.tracks) { track.rows = C.rows.subarray(at, at + track.passes); at += track.passes; }
  for (const run of runs) run.tracks = D.tracks.map((track) => inOrder(track.rows, run));
  TOTAL = 0;
  for (const run of runs) for (const track of run.tracks) TOTAL = Math.max(TOTAL, track.end.length ? track.end[track.end.length - 1] : 0);
  TOTAL = TOTAL || 1;
  SHORTEST = TOTAL;
  let stages = 0;
  DIGITS = 0;
  for (let i = 0; i < COUNT; i++) {
    const length = runs[0].length[i];
    if (length > 0 && length < SHORTEST) SHORTEST = length;
    if (C.stage[i] > stages) stages = C.stage[i];
    if (C.microbatch[i] > DIGITS) DIGITS = C.microbatch[i];
  }
  DIGITS = String(DIGITS).length;
  LONGEST = DIGITS + String(stages).length + Math.max(...D.present.map((kind) => kind.length)) + (C.slice.some((s) => s) ? 2 : 0);
  const some = Math.ceil(COUNT / 20000), lengths = [];
  for (let i = 0; i < COUNT; i += some) lengths.push(runs[0].length[i]);
  TYPICAL = lengths.sort((a, b) => a - b)[lengths.length >> 1];
  next = adjacency(C.before, C.after); previous = adjacency(C.after, C.before);
  home = new Int32Array(COUNT).fill(-1);
  D.tracks.forEach((track, l) => { for (const i of track.rows) if (home[i] < 0) home[i] = l; });
}
