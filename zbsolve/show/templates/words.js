// ---- words and elements of a page; texts are set as texts ---------------------------------------------------------
const $ = (id) => document.getElementById(id);
const number = (x, digits = 0) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
function time(us) {
  const size = Math.abs(us);
  if (size < 1e4) return number(us, size % 1 ? 1 : 0) + " µs";
  return size < 1e7 ? number(us / 1e3, 2) + " ms" : number(us / 1e6, 2) + " s";
}
function bytes(n) {
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < 4) { n /= 1024; unit++; }
  return (unit ? n.toPrecision(3) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
}
function element(tag, text, ...inside) {
  const found = document.createElement(tag);
  found.append(text, ...inside);
  return found;
}
function swatch(colours, text) {
  const key = element("span", "");
  key.className = "key";
  for (const colour of colours) { const mark = element("i", ""); mark.style.background = colour; key.append(mark); }
  key.append(text);
  return key;
}
