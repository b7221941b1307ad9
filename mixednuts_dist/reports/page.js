"use strict";
// Draws the charts for the reader's width and colour scheme, and lets the slider move along the predicted curve.
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("screen and (max-width: 52rem)");
  const slider = document.getElementById("beta");
  let views = {};
  const options = { mode: "vega-lite", actions: false, renderer: "svg" };
  let drawing = Promise.resolve();
  let telling;

  function showStop() {
    const stop = page.curve[Number(slider.value)];
    for (const [field, words] of Object.entries(stop.words)) {
      const place = document.getElementById(`at-${field}`);
      if (place) place.textContent = words;
    }
    slider.setAttribute("aria-valuetext", `beta ${stop.words.beta}`);
    clearTimeout(telling); // told once the slider rests, not at every stop on the way
    telling = setTimeout(() => tell(stop.words), 500);
    for (const [name, view] of Object.entries(views)) {
      const follows = (page.specs.wide[name].params || []).some((each) => each.name === page.selectedBeta);
      if (follows) view.signal(page.selectedBeta, stop.beta).runAsync();
    }
  }

  function tell(words) {
    document.getElementById("at-all").textContent =
      `Predicted clean accuracy ${words.clean}; kept of the robust images ${words.kept_predicted}; measured: ${words.measured}; ` +
      `s ${words.s}, p ${words.p}, c ${words.c}, alpha ${words.alpha}.`;
  }

  async function drawAll() {
    const specs = page.specs[narrow.matches ? "narrow" : "wide"];
    const config = { ...page.configs[dark.matches ? "dark" : "light"], background: "transparent" };
    const drawn = {};
    let state = "yes";
    for (const [name, spec] of Object.entries(specs)) {
      try {
        drawn[name] = await draw(document.querySelector(`[data-chart="${CSS.escape(name)}"]`), spec, config);
      } catch (error) {
        state = "failed"; // this chart's static figure stays, the others are drawn
        console.error(`chart ${name}:`, error);
      }
    }
    Object.values(views).forEach((view) => view.finalize());
    views = drawn;
    if (slider) showStop();
    document.body.dataset.drawn = state;
  }

  async function draw(place, spec, config) {
    if (!place) throw new Error("the page has no place for it");
    const target = document.createElement("div");
    const embedded = await vegaEmbed(target, structuredClone(spec), { ...options, config });
    place.querySelectorAll("img").forEach((still) => { still.hidden = true; });
    place.querySelectorAll(".drawn").forEach((old) => old.remove());
    target.classList.add("drawn");
    const svg = target.querySelector("svg"); // one picture with one text: its marks have roles and no names
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", place.querySelector("img").alt);
    [...svg.children].forEach((part) => part.setAttribute("aria-hidden", "true"));
    place.append(target);
    return embedded.view;
  }

  function redraw() {
    drawing = drawing.then(drawAll).catch((error) => {
      document.body.dataset.drawn = "failed"; // the static figures stay
      console.error(error);
    });
  }

  document.querySelectorAll("a[data-still]").forEach((link) => {
    const still = document.querySelector(`[data-chart="${CSS.escape(link.dataset.still)}"] img`);
    if (!still) return; // its chart has no place; the others are drawn
    link.href = still.src;
    link.hidden = false;
  });
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);
  if (slider) { // a run without std has no curve to move along
    slider.addEventListener("input", showStop);
    document.getElementById("slider").hidden = false;
    showStop();
  }
  redraw();
})();
