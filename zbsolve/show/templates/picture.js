"use strict";
// What marks of a picture say, under the mouse and under a finger. Without this script browsers show their titles.
{
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  document.body.append(tip);
  for (const title of document.querySelectorAll(".picture svg > * > title")) {
    title.parentNode.dataset.said = title.textContent;
    title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  let told = null;
  const tell = (event) => {
    const mark = event.target.closest("[data-said]");
    if (told) told.classList.remove("told");
    told = mark;
    tip.style.visibility = mark ? "visible" : "hidden";
    if (!mark) return;
    mark.classList.add("told");
    tip.textContent = mark.dataset.said;
    const left = Math.min(event.pageX + 14, scrollX + document.documentElement.clientWidth - tip.offsetWidth - 6);
    tip.style.left = Math.max(scrollX + 4, left) + "px";
    tip.style.top = event.pageY + 18 + "px";
  };
  addEventListener("pointermove", tell);
  addEventListener("pointerdown", tell);
}
