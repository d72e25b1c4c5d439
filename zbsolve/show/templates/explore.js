"use strict";
// The controls say a state; the address holds it; the server answers it. Nothing is worked out here.
const form = document.getElementById("controls"), answer = document.getElementById("answer");
const table = document.getElementById("table"), progress = document.getElementById("progress");
const { usual, placements } = JSON.parse(document.getElementById("facts").textContent);
const GONE =
  '<p class="wrong" role="alert">The server does not answer: it has ended, or was started anew. Start zbsolve explore again.</p>';

function query() {
  const said = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value !== usual[name]) said.append(name, value);
  return said.toString();
}

function address(part, asked) {
  return `${part}?width=${Math.floor(answer.clientWidth - 2)}&state=${encodeURIComponent(asked)}`;
}

// What the server says to a request, piece by piece: {part: HTML} to show, or {said: text} while it works.
async function* pieces(part, asked) {
  let reader = null;
  try {
    const reply = await fetch(address(part, asked));
    if (!reply.ok) yield { part: GONE };
    else if (!reply.headers.get("content-type").includes("ndjson")) yield { part: await reply.text() };
    else {
      reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "", piece; !(piece = await reader.read()).done;) {
        const lines = (rest + piece.value).split("\n");
        rest = lines.pop();
        for (const line of lines) yield JSON.parse(line);
      }
    }
  } catch {
    yield { part: GONE };
  } finally {
    reader?.cancel().catch(() => {}); // the server then stops too
  }
}

// One request of a kind at a time: while it runs only the newest wish is kept, and an answer to an older one is dropped.
// null is the wish for nothing.
function asking(part, place, shown) {
  let busy = false, wanted = null;
  return async (asked) => {
    wanted = { asked };
    place.classList.toggle("late", asked !== null);
    if (asked === null) place.innerHTML = "";
    if (busy) return;
    busy = true;
    while (wanted !== null) {
      const now = wanted.asked;
      wanted = null;
      for await (const piece of now === null ? [] : pieces(part, now)) {
        if (wanted !== null) break;
        place.innerHTML = piece.part;
      }
      if (wanted === null) {
        place.classList.remove("late");
        shown(now);
      }
    }
    busy = false;
  };
}

function mark() {
  const wrong = answer.querySelector("[data-control]");
  for (const one of form.querySelectorAll(".control")) {
    const bad = wrong !== null && one.id === `control-${wrong.dataset.control}`;
    one.classList.toggle("bad", bad);
    for (const input of one.querySelectorAll("[name]")) input.toggleAttribute("aria-invalid", bad);
  }
  const save = document.getElementById("save");
  if (save !== null) save.href = address("schedule.json", query());
}

const askAnswer = asking("answer", answer, (asked) => {
  mark();
  askTable(answer.querySelector(".figures") === null ? null : asked);
});
const askTable = asking("compare", table, () => {});

// A named schedule has a placement and a backward of its own; a part that is not slower has no factor.
function agree(from) {
  const { system, placement, backward, slow_part, slow_factor } = form.elements;
  const own = placements[system.value];
  const shaped = own === undefined || placement.value.replace(/\d+$/, "") === own;
  if (from === system && !shaped) placement.value = own;
  else if (from === placement && !shaped) system.value = usual.system;
  backward.disabled = system.value !== usual.system;
  if (slow_factor) {
    for (const one of form.querySelectorAll("#slow_factor, [data-for=slow_factor]")) one.disabled = slow_part.value === "0";
  }
}

function ask() {
  document.getElementById("address-wrong")?.remove();
  progress.textContent = "";
  askAnswer(query());
}

let timer = 0;
function changed(wait) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    const asked = query();
    if (`?${asked}` !== (location.search || "?")) history.pushState(null, "", asked ? `?${asked}` : location.pathname);
    ask();
  }, wait);
}

addEventListener("popstate", () => {
  clearTimeout(timer);
  const said = new URLSearchParams(location.search);
  for (const one of form.querySelectorAll("[name], [data-for]")) {
    const name = one.name || one.dataset.for;
    one.value = said.get(name) ?? usual[name];
  }
  agree(form.elements.system);
  ask();
});

form.addEventListener("input", (event) => {
  const from = event.target;
  const slider = form.querySelector(`[data-for="${from.name}"]`);
  if (from.dataset.for) form.elements[from.dataset.for].value = from.value;
  else if (slider !== null) slider.value = from.value;
  agree(from);
  changed(120);
});
form.addEventListener("submit", (event) => event.preventDefault());

table.addEventListener("click", (event) => {
  const row = event.target.closest("[data-system]");
  if (row === null) return;
  form.elements.system.value = row.dataset.system;
  form.elements.placement.value = row.dataset.placement;
  agree(form.elements.system);
  changed(0);
  answer.scrollIntoView({ block: "nearest" });
});

answer.addEventListener("click", async (event) => {
  if (event.target.id === "search") search(event.target);
  if (event.target.id === "copy") {
    const text = document.getElementById("commands");
    getSelection().selectAllChildren(text);
    try {
      await navigator.clipboard.writeText(text.textContent);
      progress.textContent = "The commands are in the clipboard.";
    } catch {
      progress.textContent = "The commands are selected: copy them with Ctrl-C.";
    }
  }
});

async function search(button) {
  const asked = query();
  button.disabled = true;
  for await (const { said, part } of pieces("search", asked)) {
    if (asked !== query()) return;
    progress.textContent = said ?? "";
    if (part !== undefined) {
      answer.innerHTML = part;
      mark();
      askTable(asked);
    }
  }
}

let width = answer.clientWidth, resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    if (Math.abs(answer.clientWidth - width) < 40) return;
    width = answer.clientWidth;
    askAnswer(query());
  }, 250);
});

agree(form.elements.system);
askAnswer(query());
