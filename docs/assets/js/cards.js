// Show only the cards of a topic, level or form, or with certain words.
(() => {
  const form = document.querySelector("form.card-filter");
  if (!form) return;
  const cards = [...document.querySelectorAll(".card")];
  const topics = [...document.querySelectorAll(".topic")];
  const count = form.querySelector("output");

  function filter() {
    const wanted = new FormData(form);
    const words = wanted.get("words").toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const card of cards) {
      const fits = ["topic", "level", "form"].every((key) => !wanted.get(key) || wanted.get(key) === card.dataset[key]);
      const text = card.textContent.toLowerCase();
      card.hidden = !(fits && words.every((word) => text.includes(word)));
      shown += !card.hidden;
    }
    for (const topic of topics) topic.hidden = !topic.querySelector(".card:not([hidden])");
    count.textContent = shown === cards.length ? `${shown} cards` : `${shown} of ${cards.length} cards`;
  }

  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
})();
