// Draw Mermaid diagrams in the page's colours with the copy beside this file. Loaded only by pages that have one.
(() => {
  const library = new URL("../vendor/mermaid/mermaid.tiny.js", document.currentScript.src).href;
  const diagrams = [...document.querySelectorAll("pre.diagram")];
  if (!diagrams.length) return;
  const sources = diagrams.map((pre) => pre.textContent);
  const places = diagrams.map((pre) => {
    const place = Object.assign(document.createElement("div"), { className: "diagram" });
    place.setAttribute("role", "img");
    pre.replaceWith(place);
    return place;
  });

  async function draw() {
    const dark = document.body.dataset.mdColorScheme === "slate";
    const fontFamily = getComputedStyle(document.body).fontFamily;
    window.mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral", fontFamily });
    for (const [i, place] of places.entries()) {
      const id = `diagram-${i}`;
      for (const direction of ["LR", "TB"]) {
        place.innerHTML = (await window.mermaid.render(id, sources[i].replace("flowchart LR", `flowchart ${direction}`))).svg;
        const svg = place.firstElementChild; // at least at a size that can be read
        svg.style.minWidth = `${0.55 * parseFloat(svg.style.maxWidth)}px`;
        if (place.scrollWidth <= place.clientWidth) break; // too wide: from top to bottom, and what still is scrolls
      }
    }
  }

  const script = Object.assign(document.createElement("script"), { src: library });
  script.onload = async () => {
    await draw();
    new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  };
  document.head.append(script);
})();
