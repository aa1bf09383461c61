// The quiz: one question at a time; answers stay in this browser (localStorage) and nowhere else.
(() => {
  const root = document.querySelector("#questions");
  if (!root) return;
  const questionsUrl = new URL("../questions.json", document.currentScript.src);
  const cardsUrl = new URL("../../cards/", document.currentScript.src);
  const KEY = "zero-from-scratch-quiz-1";
  const LEVELS = ["junior", "mid", "senior", "staff"];

  // {current: id, topic, level, answers: {id: {given, right, variant}}}
  function read() {
    const text = localStorage.getItem(KEY);
    try {
      return { answers: {}, ...JSON.parse(text) };
    } catch {
      localStorage.setItem(`${KEY}-damaged`, text); // set aside, never overwritten by what follows
      return { answers: {} };
    }
  }
  function write(change) {
    localStorage.setItem(KEY, JSON.stringify({ ...read(), ...change }));
  }

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }
  /** "177 elements" -> ["177", "elements"]. */
  const split = (text) => text.trim().match(/^([-+\d,._]+(?:[eE][-+]?\d+)?)\s*(.*)$/).slice(1);
  const html = (text, className = "") => make("div", { innerHTML: text, className });
  const button = (text, onclick, className = "") => make("button", { type: "button", textContent: text, onclick, className });

  /** How a question of each form is asked. `answer(given)` is called once; returns what to show, `kept` is an old answer. */
  const FORMS = {
    choice(question, kept, answer) {
      const options = question.options.map((text, i) => {
        const input = make("input", { type: "radio", name: "option", checked: kept === i, disabled: kept !== undefined });
        input.onchange = () => answer(i);
        const label = make("label", { className: "option" }, input, html(text));
        if (kept !== undefined && question.right[0] === i) label.classList.add("right");
        if (kept === i && question.right[0] !== i) label.classList.add("wrong");
        return label;
      });
      return make("fieldset", {}, make("legend", { textContent: "Pick one" }), ...options);
    },

    numeric(question, kept, answer) {
      const input = make("input", { type: "text", inputMode: "decimal", required: true, value: kept ?? "", disabled: kept !== undefined });
      input.pattern = "\\s*[\\-+]?[0-9][0-9,_]*(\\.[0-9]+)?([eE][\\-+]?[0-9]+)?\\s*([^0-9\\s].*)?";
      input.title = "a number, for example 12.5";
      const form = make("form", {}, make("label", {}, "Your answer ", input, ` ${question.unit}`), " ");
      if (kept === undefined) form.append(make("button", { textContent: "Check", className: "md-button md-button--primary" }));
      input.oninput = () => input.setCustomValidity("");
      form.onsubmit = (event) => {
        event.preventDefault();
        const [number, unit] = split(input.value);
        const wanted = question.unit ? `give it in ${question.unit}` : "give a bare number";
        input.setCustomValidity(!unit || unit === question.unit ? "" : wanted);
        if (input.reportValidity()) answer(number);
      };
      return form;
    },

    order(question, kept, answer) {
      const places = kept ?? question.options.map((_, i) => i);
      const list = make("ol", { className: "order" });
      const rows = places.map((option) => {
        const row = html(question.options[option]);
        const item = make("li", {}, row);
        item.dataset.option = option;
        if (kept === undefined) {
          const up = button("↑", () => item.previousElementSibling?.before(item));
          const down = button("↓", () => item.nextElementSibling?.after(item));
          up.ariaLabel = "Move up";
          down.ariaLabel = "Move down";
          item.append(down, up); // they float to the right
        }
        return item;
      });
      list.append(...rows);
      if (kept !== undefined) return list;
      const given = () => [...list.children].map((item) => Number(item.dataset.option));
      return make("div", {}, list, button("Check", () => answer(given()), "md-button md-button--primary"));
    },

    open(question, kept, answer) {
      if (kept !== undefined) return make("p", { textContent: kept ? "You knew it." : "You did not know it." });
      const place = make("div", {}, make("p", { textContent: question.task ? "Write it and let the grader judge. Then compare." : "Answer aloud, in 30 seconds. Then compare." }));
      const reveal = button("Show the answer", () => {
        place.append(
          html(question.short, "answer"),
          button("I knew it", () => answer(true), "md-button md-button--primary"), " ",
          button("Not yet", () => answer(false), "md-button"),
        );
        reveal.remove();
        window.typeset(place);
      }, "md-button md-button--primary");
      place.append(reveal);
      return place;
    },
  };
  FORMS.bug = FORMS.choice;
  FORMS.code = FORMS.open; // the task and its command are in what is asked; the grader runs in the reader's clone

  const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);
  const GRADES = {
    choice: (question, given) => given === question.right[0],
    bug: (question, given) => given === question.right[0],
    numeric(question, given) {
      const error = Math.abs(Number(given.replaceAll(/[,_]/g, "")) - question.value);
      return error <= question.tolerance * Math.abs(question.value) + 1e-12;
    },
    order: (question, given) => same(given, question.right),
    open: (question, given) => given,
    code: (question, given) => given,
  };

  function verdict(card, question, kept) {
    const parts = [make("p", { className: "verdict", textContent: kept.right ? "✓ Right" : "✗ Not yet" })];
    if (question.why && !kept.right) parts.push(html(question.why[kept.given], "why"));
    if (card.form === "numeric") parts.push(html(`<p>It is <strong>${question.answer}</strong>.</p>`));
    if (card.form === "order" && !kept.right) {
      parts.push(make("ol", { className: "order" }, ...question.right.map((i) => make("li", {}, html(question.options[i])))));
    }
    parts.push(html(question.short, "answer"), make("details", { className: "answer" }, make("summary", { textContent: "Derivation" }), html(question.deep)));
    const link = make("a", { href: `${cardsUrl}#${card.id}`, textContent: "The card: code, proof, sources" });
    parts.push(make("p", {}, link));
    const place = make("div", { className: `result ${kept.right ? "right" : "wrong"}` }, ...parts);
    place.setAttribute("role", "status");
    return place;
  }

  function select(name, values, chosen) {
    const options = values.map((value) => make("option", { value, textContent: value, selected: value === chosen }));
    const element = make("select", { name }, make("option", { value: "", textContent: "all" }), ...options);
    element.onchange = () => {
      write({ [name]: element.value, current: null });
      show();
    };
    return make("label", {}, `${name} `, element);
  }

  let cards = [];

  function show() {
    const { answers, current, topic, level } = read();
    const chosen = cards.filter((card) => (!topic || card.topic === topic) && (!level || card.level === level));
    const next = (after) => {
      const rest = [...chosen.slice(after + 1), ...chosen.slice(0, after + 1)];
      return rest.find((card) => !answers[card.id]) ?? rest.find((card) => !answers[card.id].right) ?? rest[0];
    };
    const at = chosen.findIndex((card) => card.id === current);
    const card = chosen[at] ?? next(-1);
    const done = chosen.filter((c) => answers[c.id]);
    const right = done.filter((c) => answers[c.id].right).length;

    const bar = make("p", { className: "quiz-bar" },
      select("topic", [...new Set(cards.map((c) => c.topic))], topic),
      select("level", LEVELS.filter((l) => cards.some((c) => c.level === l)), level));
    const progress = make("p", { className: "quiz-progress", textContent: `${done.length} of ${chosen.length} answered, ${right} right` });
    root.replaceChildren(bar, progress);
    if (!card) {
      root.append(make("p", { textContent: "No question has this topic and this level." }));
      return;
    }

    const kept = answers[card.id];
    const number = kept ? kept.variant : Math.floor(Math.random() * card.variants.length);
    const question = card.variants[number] ?? card.variants[0];
    const answer = (given) => {
      const mine = { given, right: GRADES[card.form](question, given), variant: number };
      write({ current: card.id, answers: { ...read().answers, [card.id]: mine } });
      show();
    };
    const place = make("article", { className: "question" },
      make("p", { className: "badges", innerHTML: `<span>${card.topic}</span> <span>${card.level}</span> <span>${card.form}</span>` }),
      html(question.ask, "ask"), FORMS[card.form](question, kept?.given, answer));
    if (kept) place.append(verdict(card, question, kept));
    const forward = button(kept ? "Next question" : "Skip", () => {
      const following = next(chosen.indexOf(card));
      if (answers[following.id]) { // all are answered: ask again
        const { [following.id]: _, ...others } = answers;
        write({ current: following.id, answers: others });
      } else write({ current: following.id });
      show();
    }, "md-button");
    const again = button("Start over", () => {
      if (!confirm("Forget all answers kept in this browser?")) return;
      write({ answers: {}, current: null });
      show();
    }, "quiz-reset");
    root.append(place, make("p", { className: "quiz-forward" }, forward, again));
    if (!current) write({ current: card.id });
    window.typeset(root);
  }

  fetch(questionsUrl).then((reply) => reply.json()).then((all) => {
    cards = all;
    show();
  });
})();
