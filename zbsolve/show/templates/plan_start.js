// ---- buttons, legend, paper and start ----------------------------------------------------------------------------
function buttons(home, label, choices, chosen, choose) {
  const made = choices.map(([value, text]) => {
    const button = element("button", text);
    button.setAttribute("aria-pressed", String(value === chosen));
    button.onclick = () => {
      for (const other of made) other.setAttribute("aria-pressed", String(other === button));
      choose(value); leave(); size();
    };
    return button;
  });
  $(home).append(element("b", label), ...made);
}
function controls() {
  const groups = D.groups.map((name) => [name, D.fields.find((one) => one.name === name).words]);
  if (groups.length > 1) buttons("rows", "rows by", groups, field, (value) => { field = value; });
  const ranges = [[1.02, "1.02×"], [1.1, "1.1×"], [2, "2×"], [Infinity, "all"]];
  buttons("ranges", "bounds up to the best step times", ranges, range, (value) => { range = value; });
}
function legend() {
  const counts = new Int32Array(D.rules.length);
  for (const rule of C.rule) counts[rule]++;
  const place = $("legend");
  place.replaceChildren(element("b", "a dot a layout, by what decides its bound"));
  D.rules.forEach((text, i) => { if (counts[i]) place.append(swatch([css.rules[i]], `${text} (${number(counts[i])})`)); });
  place.append(swatch([css.found], "step of a layout that was solved, with a line from its bound; the best is 1×"));
}
function hint() {
  $("hint").textContent = matchMedia("(pointer: coarse)").matches
    ? "tap: which layout it is, its bound, and by what it was pruned · left of 1×: no bound excludes it"
    : "point: which layout it is, its bound, and by what it was pruned · left of 1×: no bound excludes it · keys, after a click: ← → by bound, page up and down, home, end";
}
function onPaper(now) { printing = now; leave(); readTheme(); legend(); size(); }
prepare().then(() => {
  readTheme(); controls(); legend(); hint(); size();
  new ResizeObserver(() => { if (!printing && chart.clientWidth !== width) { leave(); size(); } }).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); legend(); draw(); });
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  chart.dataset.ready = "yes";
}).catch((error) => { chart.replaceChildren(element("p", error.message)); });
