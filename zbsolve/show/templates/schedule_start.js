// ---- legend, paper and start -------------------------------------------------------------------------------------
function legend() {
  for (const kind of D.present) $("legend").append(swatch([D.shades[kind][0]], `${kind} ${D.meaning[kind]}`));
  const chunks = D.shades[D.present[0]].length;
  const later = chunks > 1 ? swatch(D.shades[D.present[0]], `a rank's ${chunks} stages, first to last: each paler than the one before`) : "";
  $("legend").append(later);
  if (runs.length > 1) {
    const button = element("button", "pair the rows of each rank");
    button.setAttribute("aria-pressed", "false");
    button.onclick = () => { grouped = grouped === "run" ? "rank" : "run"; button.setAttribute("aria-pressed", String(grouped === "rank")); leave(); size(); };
    $("legend").append(button);
  }
}
function hint() {
  $("hint").textContent = matchMedia("(pointer: coarse)").matches
    ? "pinch: zoom · drag: move · tap: what a pass is · double tap: all"
    : "wheel: zoom · drag: move · shift-drag: zoom to a range · double-click: all · keys, after a click: ← → + − 0, with shift ← → ↑ ↓ from pass to pass";
}
function onPaper(now) { printing = now; leave(); readTheme(); size(); }
prepare().then(() => {
  prepareColours(); prepareMemory(); legend(); hint(); readTheme();
  view = [0, TOTAL * 1.02];
  size();
  new ResizeObserver(() => { if (!printing && chart.clientWidth !== width) { leave(); size(); } }).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); draw(); });
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  chart.dataset.ready = "yes";
}).catch((error) => { chart.replaceChildren(element("p", error.message)); });
