// ---- words and elements of a page; texts are set as texts ---------------------------------------------------------
const $ = (id) => document.getElementById(id);
// So many digits behind the point, rounded as Python rounds: by the exact value, and halves (which have one binary digit more
// than decimal ones) to the even neighbour. toFixed alone takes halves up.
function fixed(x, digits) {
  const halves = x * 2 ** (digits + 1), scaled = x * 10 ** digits, down = Math.floor(scaled);
  const half = Number.isInteger(halves) && halves % 2 !== 0;
  return (half ? (down + Math.abs(down % 2)) / 10 ** digits : x).toFixed(digits);
}
const number = (x, digits = 0) => fixed(x, digits).replace(/\B(?<!\.\d*)(?=(\d{3})+(?!\d))/g, ",");
function time(us) {
  const size = Math.abs(us);
  if (size < 1e4) return number(us, size % 1 ? 1 : 0) + " µs";
  return size < 1e7 ? number(us / 1e3, 2) + " ms" : number(us / 1e6, 2) + " s";
}
function bytes(n) {
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < 4) { n /= 1024; unit++; }
  const digits = unit === 4 ? 2 : unit === 0 || Math.abs(n) >= 100 ? 0 : Math.abs(n) >= 10 ? 1 : 2; // as format_bytes
  return fixed(n, digits) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
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
