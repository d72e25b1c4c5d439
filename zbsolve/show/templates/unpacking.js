"use strict";
// Columns that packing.py wrote: base64, gzip, then the differences of neighbours or the values, little-endian, in a type that
// holds their sums too. Name → typed array.
async function unpacked(packed) {
  if (typeof DecompressionStream === "undefined") throw new Error("This page needs a browser of 2023 or newer: it has no DecompressionStream.");
  const letters = atob(packed.text), squeezed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) squeezed[i] = letters.charCodeAt(i);
  const stream = new Blob([squeezed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const found = {};
  let at = 0;
  for (const [name, type, length] of packed.columns) {
    const Column = type === "i4" ? Int32Array : Float64Array, end = at + length * Column.BYTES_PER_ELEMENT;
    const column = new Column(buffer.slice(at, end)); // a copy: columns need not start where their type wants to
    if (type !== "values") for (let i = 1; i < length; i++) column[i] += column[i - 1];
    found[name] = column;
    at = end;
  }
  return found;
}
