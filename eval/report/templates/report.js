(() => {
  "use strict";
  const themes = ["system", "light", "dark"];
  const root = document.documentElement;
  const button = document.getElementById("theme");
  // From a file some browsers have no storage: then the choice lasts as long as the page.
  const stored = () => {
    try { return localStorage.getItem("mla-convert-theme"); } catch { return null; }
  };
  const keep = (theme) => {
    try { localStorage.setItem("mla-convert-theme", theme); } catch { return; }
  };
  const show = (theme) => {
    if (theme === "system") { delete root.dataset.theme; } else { root.dataset.theme = theme; }
    button.dataset.choice = theme;
    button.textContent = `Theme: ${theme}`;
  };
  const found = stored();
  show(themes.includes(found) ? found : "system");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(button.dataset.choice) + 1) % themes.length];
    keep(next);
    show(next);
  });
})();
