themes(() => {});

// on paper nothing can be opened
const closed = new Set();
const open = () => {
  for (const part of document.querySelectorAll("details:not([open])")) {
    closed.add(part);
    part.open = true;
  }
};
const close = () => {
  for (const part of closed) part.open = false;
  closed.clear();
};
matchMedia("print").addEventListener("change", (event) => (event.matches ? open() : close()));
addEventListener("beforeprint", open);
addEventListener("afterprint", close);

const links = new Map();
for (const link of document.querySelectorAll("nav li a")) links.set(link.hash.slice(1), link);
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  },
  { rootMargin: "-20% 0px -70% 0px" },
);
for (const part of document.querySelectorAll("main > section")) seen.observe(part);
