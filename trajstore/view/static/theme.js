// Light or dark: as the system says, also when it changes, unless somebody chose the other one here.

const NAME = "trajstore-theme";
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const ofSystem = () => (system.matches ? "dark" : "light");

let chosen = null;
try {
  chosen = localStorage.getItem(NAME);
} catch { /* a browser that keeps nothing */ }

function dress() {
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  button.setAttribute("aria-label", `Light or dark: ${chosen ?? "as the system"}`);
  window.dispatchEvent(new Event("theme"));
}

button.addEventListener("click", () => {
  const wanted = (chosen ?? ofSystem()) === "dark" ? "light" : "dark";
  chosen = wanted === ofSystem() ? null : wanted;
  try {
    if (chosen) localStorage.setItem(NAME, chosen);
    else localStorage.removeItem(NAME);
  } catch { /* kept as long as the page is open */ }
  dress();
});

system.addEventListener("change", dress);
dress();
