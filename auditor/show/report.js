// Draws the figure and follows the page's width; colours follow the theme in the style sheet.
"use strict";
(function () {
  const box = document.getElementById("figure");
  const source = document.getElementById("figure-data");
  if (!box || !source || !window.Plotly) return;
  const figure = JSON.parse(source.textContent);
  const isNarrow = window.matchMedia("(max-width: 720px)");
  const isTouch = window.matchMedia("(pointer: coarse)").matches;

  // On a touch screen a drag over the figure scrolls the page; buttons zoom.
  figure.layout.dragmode = isTouch ? false : "zoom";

  function placed() {
    return isNarrow.matches ? figure.narrow : figure.wide;
  }

  function put(layout, changes) {
    for (const [path, value] of Object.entries(changes)) {
      const names = path.split(".");
      let at = layout;
      for (const name of names.slice(0, -1)) at = at[name] || (at[name] = {});
      at[names[names.length - 1]] = value;
    }
    return layout;
  }

  window.Plotly.newPlot(box, figure.data, put(figure.layout, placed()), {
    responsive: true,
    displaylogo: false,
    doubleClick: "reset",
    // Named one by one: the library's own set has one that uploads the figure.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
    plotlyServerURL: "",
    toImageButtonOptions: { filename: "auditor-report", scale: 2 },
  }).then(function () {
    box.setAttribute("data-drawn", "true");
  });

  isNarrow.addEventListener("change", function () {
    window.Plotly.relayout(box, placed());
  });
  window.addEventListener("beforeprint", function () {
    window.Plotly.relayout(box, Object.assign({ width: 680 }, figure.wide));
  });
  window.addEventListener("afterprint", function () {
    window.Plotly.relayout(box, Object.assign({ width: null, autosize: true }, placed()));
  });

  for (const input of document.querySelectorAll("input[name=variant]")) {
    input.addEventListener("change", function () {
      const places = [];
      const visible = [];
      figure.data.forEach(function (trace, place) {
        if (trace.meta !== "raw" && trace.meta !== "column") return;
        places.push(place);
        visible.push(trace.meta === input.value);
      });
      window.Plotly.restyle(box, { visible: visible }, places);
    });
  }
  const reset = document.getElementById("reset-zoom");
  if (reset) {
    const range = figure.layout.xaxis.range.slice();
    reset.addEventListener("click", function () {
      window.Plotly.relayout(box, { "xaxis.range": range.slice() });
    });
  }
})();
