"use strict";
// Draws the charts, shows their values, hides series, and copies tables.
(() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const tip = document.getElementById("tip");

  const show = (handler, event, item, value) => {
    tip.hidden = value === null || value === undefined || value === "";
    if (tip.hidden) return;
    const shown = item.isVoronoi ? item.datum.tooltip : value; // a cell around a mark has the mark's values
    tip.replaceChildren(...Object.entries(shown).map(([name, text]) => {
      const line = document.createElement("div"), label = document.createElement("b");
      label.textContent = name;
      line.append(label, " ", text);
      return line;
    }));
    const left = event.clientX + 14 + tip.offsetWidth > window.innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
    tip.style.left = `${Math.max(4, Math.min(left, window.innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 4))}px`;
  };

  const hidden = (figure) => [...figure.querySelectorAll(".legend [aria-pressed=false]")].map((button) => button.dataset.series);

  const apply = (box) => {
    const figure = box.closest("figure");
    if (figure && box.view) box.view.signal("hidden", hidden(figure)).runAsync();
  };

  const draw = (root) => {
    for (const box of root.querySelectorAll(".chart:not(.drawn)")) {
      if (box.closest("details:not([open])")) continue;
      box.classList.add("drawn");
      vegaEmbed(box, specs[box.dataset.spec], { actions: false, renderer: "svg", ast: true, tooltip: show }).then(({ view }) => {
        box.view = view;
        box.addEventListener("pointerleave", () => { tip.hidden = true; });
        view.addEventListener("click", (event, item) => show(null, event, item, item && item.tooltip));
        apply(box);
      });
    }
  };

  draw(document);
  document.addEventListener("toggle", (event) => draw(event.target), true);

  document.addEventListener("click", (event) => {
    if (!event.target.closest(".chart")) tip.hidden = true;
    const series = event.target.closest(".legend button");
    if (series) {
      series.setAttribute("aria-pressed", series.getAttribute("aria-pressed") === "false");
      series.closest("figure").querySelectorAll(".chart").forEach(apply);
    }
    const copy = event.target.closest(".copy");
    if (copy) {
      const cells = (row) => [...row.cells].map((cell) => `"${cell.textContent.replaceAll('"', '""')}"`).join(",");
      const text = [...copy.closest(".frame").querySelectorAll("tr")].map(cells).join("\n");
      navigator.clipboard.writeText(text).then(() => { copy.textContent = "Copied"; }, () => { copy.textContent = "Not allowed"; });
    }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
})();
