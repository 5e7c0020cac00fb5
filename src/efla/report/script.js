"use strict";
// Values on hover and by arrow keys. Each chart carries its values: [[pixel, text, [[colour, label, value], ...]], ...].
(() => {
  const tip = document.getElementById("tip");
  const width = 440;

  const hide = (chart) => {
    tip.style.visibility = "hidden";
    chart.querySelector(".cursor").style.visibility = "hidden";
  };

  const show = (chart, values, index) => {
    const [pixel, title, lines] = values[index];
    const cursor = chart.querySelector(".cursor");
    cursor.setAttribute("x1", pixel);
    cursor.setAttribute("x2", pixel);
    cursor.style.visibility = "visible";
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = title;
    tip.append(head);
    for (const [key, label, value] of lines) {
      const row = document.createElement("div");
      const dot = document.createElement("i");
      dot.style.background = `var(--c-${key})`;
      row.append(dot, `${label}: ${value}`);
      tip.append(row);
    }
    const box = chart.getBoundingClientRect();
    const x = box.left + (pixel / width) * box.width;
    const left = x + 14 + tip.offsetWidth > window.innerWidth ? x - 14 - tip.offsetWidth : x + 14;
    tip.style.left = `${Math.max(4, Math.min(left, window.innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(box.top + 10, window.innerHeight - tip.offsetHeight - 4))}px`;
    tip.style.visibility = "visible";
  };

  for (const chart of document.querySelectorAll("svg.chart")) {
    const values = JSON.parse(chart.dataset.values);
    let index = 0;
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * width;
      index = values.reduce((best, value, i) => (Math.abs(value[0] - at) < Math.abs(values[best][0] - at) ? i : best), 0);
      show(chart, values, index);
    });
    chart.addEventListener("pointerleave", () => hide(chart));
    chart.addEventListener("blur", () => hide(chart));
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) {
        if (event.key === "Escape") hide(chart);
        return;
      }
      event.preventDefault();
      const visible = chart.querySelector(".cursor").style.visibility === "visible";
      index = visible ? Math.max(0, Math.min(values.length - 1, index + step)) : index;
      show(chart, values, index);
    });
  }
})();
