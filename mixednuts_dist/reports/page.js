"use strict";
// Draws the charts for the reader's width and colour scheme, and lets the slider move along the predicted curve.
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 52rem)");
  const slider = document.getElementById("beta");
  let views = {};
  const options = { mode: "vega-lite", actions: false, renderer: "svg" };
  let drawing = Promise.resolve();

  function showStop() {
    const stop = page.curve[Number(slider.value)];
    for (const [field, words] of Object.entries(stop.words)) {
      document.getElementById(`at-${field}`).textContent = words;
    }
    slider.setAttribute("aria-valuetext", `beta ${stop.words.beta}`);
    if (views.tradeoff) views.tradeoff.signal(page.selectedBeta, stop.beta).runAsync();
  }

  async function drawAll() {
    const specs = page.specs[narrow.matches ? "narrow" : "wide"];
    const config = { ...page.configs[dark.matches ? "dark" : "light"], background: "transparent" };
    const drawn = {};
    for (const [name, spec] of Object.entries(specs)) {
      const place = document.querySelector(`[data-chart="${name}"]`);
      const still = place.querySelector("img");
      const target = document.createElement("div");
      const embedded = await vegaEmbed(target, structuredClone(spec), { ...options, config });
      if (still) still.hidden = true;
      place.querySelectorAll(".drawn").forEach((old) => old.remove());
      target.classList.add("drawn");
      place.append(target);
      drawn[name] = embedded.view;
    }
    Object.values(views).forEach((view) => view.finalize());
    views = drawn;
    showStop();
    document.body.dataset.drawn = "yes";
  }

  function redraw() {
    drawing = drawing.then(drawAll).catch((error) => {
      document.body.dataset.drawn = "failed"; // the static figures stay
      console.error(error);
    });
  }

  slider.addEventListener("input", showStop);
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);
  document.getElementById("slider").hidden = false;
  showStop();
  redraw();
})();
