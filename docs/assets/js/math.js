// Typeset formulas with the copy of KaTeX beside this file. Loaded only by pages that have a formula.
(() => {
  const vendor = new URL("../vendor/katex/", document.currentScript.src);

  function load(tag, attributes) {
    return new Promise((resolve, reject) => {
      const element = Object.assign(document.createElement(tag), attributes);
      element.onload = resolve;
      element.onerror = () => reject(new Error(`cannot load ${attributes.src ?? attributes.href}`));
      document.head.append(element);
    });
  }

  /** Typeset what arithmatex marked below `root`: \( ... \) in a line, \[ ... \] on its own. */
  async function typeset(root) {
    const formulas = root.querySelectorAll(".arithmatex:not([data-done])");
    if (!formulas.length) return;
    if (!window.katex) {
      await Promise.all([
        load("link", { rel: "stylesheet", href: new URL("katex.min.css", vendor).href }),
        load("script", { src: new URL("katex.min.js", vendor).href }),
      ]);
    }
    for (const formula of formulas) {
      const text = formula.textContent.trim();
      formula.dataset.done = "";
      window.katex.render(text.slice(2, -2), formula, { displayMode: text.startsWith("\\["), throwOnError: false });
    }
  }

  window.typeset = typeset;
  typeset(document);
})();
