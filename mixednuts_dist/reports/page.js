"use strict";
// Moves the slider along the predicted curve: exchanges the words and marks the dot of its beta in the trade-off figure.
(() => {
  const stops = JSON.parse(document.getElementById("page-data").textContent);
  const slider = document.getElementById("beta");
  if (!slider) return; // a run without std has no curve
  let announcing;

  function show() {
    const { words } = stops[Number(slider.value)];
    for (const [field, text] of Object.entries(words)) {
      const place = document.getElementById(`at-${field}`);
      if (place) place.textContent = text;
    }
    slider.setAttribute("aria-valuetext", `beta ${words.beta}`);
    document.querySelectorAll("#chart-tradeoff [aria-label]").forEach((dot) => {
      dot.classList.toggle("chosen", dot.getAttribute("aria-label") === `beta ${words.beta}`);
    });
    clearTimeout(announcing); // a screen reader hears the result once the slider rests
    announcing = setTimeout(() => {
      document.getElementById("at-all").textContent =
        `Predicted clean accuracy ${words.clean}; predicted retention ${words.kept_predicted}; measured: ${words.measured}; ` +
        `s ${words.s}, p ${words.p}, c ${words.c}, alpha ${words.alpha}.`;
    }, 500);
  }

  slider.addEventListener("input", show);
  document.getElementById("slider").hidden = false;
  show();
})();
