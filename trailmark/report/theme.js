// The button between light and dark colours; changed is called at once, and whenever they change.
function themes(changed) {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const mark = "trailmark-theme-";
  // a tab keeps its name when the page is loaded again: nothing is stored
  if (window.name.startsWith(mark)) root.dataset.theme = window.name.slice(mark.length);
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const tell = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Show in light colours" : "Show in dark colours");
    changed();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    window.name = mark + root.dataset.theme;
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}
