"use strict";
// Filters, sorting, the theme, and what follows runs that train.
(() => {
  const $ = (selector) => document.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  let data = JSON.parse($("#data").textContent);
  const chosen = { task: "", scale: "", hidden: new Set(), column: 0, down: false };

  const layers = () => Object.keys(data.styles);
  Charts.state.isShown = (layer) => !chosen.hidden.has(layer);

  // --- filters

  function fits(element) {
    const { task, scale, layer } = element.dataset;
    return (!chosen.task || task === undefined || task === chosen.task)
      && (!chosen.scale || scale === undefined || scale === chosen.scale)
      && (layer === undefined || !chosen.hidden.has(layer));
  }

  function apply() {
    for (const name of ["task", "scale"]) {
      const select = $(`#${name}`);
      if (![...select.options].some((option) => option.value === chosen[name])) chosen[name] = "";
      select.value = chosen[name];
    }
    for (const chip of all(".chip[data-layer]")) chip.setAttribute("aria-pressed", !chosen.hidden.has(chip.dataset.layer));
    $("#every-layer")?.setAttribute("aria-pressed", !layers().some((layer) => chosen.hidden.has(layer)));
    for (const element of all("tr.row, .legend li, .live li, .run, .card[data-key]")) element.hidden = !fits(element);
    let rows = 0;
    for (const body of all(".board tbody")) {
      const count = all("tr.row", body).filter((row) => !row.hidden).length;
      body.hidden = !fits(body) || !count;
      rows += body.hidden ? 0 : count;
    }
    const total = all("tr.row").length;
    $("#shown").textContent = rows === total ? "" : `${rows} of ${total} lines shown`;
    remember();
    Charts.refresh();
  }

  function remember() {
    const words = new URLSearchParams();
    for (const name of ["task", "scale"]) if (chosen[name]) words.set(name, chosen[name]);
    for (const layer of chosen.hidden) words.append("without", layer);
    const hash = words.size ? `#?${words}` : location.hash.startsWith("#?") ? "#" : location.hash;
    if (hash !== location.hash) history.replaceState(null, "", hash);
  }

  function recall() {
    if (!location.hash.startsWith("#?")) return;
    const words = new URLSearchParams(location.hash.slice(2));
    chosen.task = words.get("task") ?? "";
    chosen.scale = words.get("scale") ?? "";
    chosen.hidden = new Set(words.getAll("without"));
  }

  document.addEventListener("change", (event) => {
    const { id, name, value } = event.target;
    if (id === "task" || id === "scale") { chosen[id] = value; apply(); }
    if (name === "curve") {
      Charts.state.split = value;
      for (const canvas of all(".canvas[data-kind=curves]")) if (canvas.layout) canvas.layout.xaxis.autorange = true;
      Charts.refresh();
    }
  });

  function toggle(chip) {
    const { hidden } = chosen, layer = chip.dataset.layer;
    if (layer !== undefined) {
      if (!hidden.delete(layer)) hidden.add(layer);
    } else if (layers().some((name) => hidden.has(name))) {
      hidden.clear();
    } else {
      for (const name of layers()) hidden.add(name);
    }
    apply();
  }

  // --- sorting, within each task

  function value(row) {
    const text = row.cells[chosen.column].dataset.v ?? "";
    const isText = all(".board thead th")[chosen.column].classList.contains("text");
    return isText ? text : text === "" ? null : Number(text);
  }

  function compare(first, second) {
    const [a, b] = [value(first), value(second)];
    if (a === null || b === null) return (a === null) - (b === null); // what is not known comes last
    return (chosen.down ? -1 : 1) * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  }

  function sort() {
    if (!$(".board")) return;
    all(".board thead th").forEach((head, i) => {
      if (i === chosen.column) head.setAttribute("aria-sort", chosen.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    for (const body of all(".board tbody")) body.append(...all("tr.row", body).sort(compare));
  }

  async function copy(button) {
    const text = button.previousElementSibling.textContent;
    try { await navigator.clipboard.writeText(text); } catch { getSelection().selectAllChildren(button.previousElementSibling); }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }

  // --- the theme

  const themes = { auto: "as the system", light: "light", dark: "dark" };
  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    $("#theme span").textContent = name;
    $("#theme").setAttribute("aria-label", `color theme: ${themes[name]}`);
    try { localStorage.setItem("longlens-theme", name); } catch { /* a file may have no storage */ }
    Charts.refresh();
  }

  function nextTheme() {
    const names = Object.keys(themes), now = document.documentElement.dataset.theme ?? "auto";
    setTheme(names[(names.indexOf(now) + 1) % names.length]);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.matches(".chip")) toggle(button);
    if (button.matches(".copy")) copy(button);
    if (button.id === "theme") nextTheme();
    if (button.matches(".sort")) {
      const column = button.closest("th").cellIndex;
      chosen.down = chosen.column === column ? !chosen.down : false;
      chosen.column = column;
      sort();
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.refresh());

  // --- following runs

  const drawn = new Map();
  function replace(id, html) {
    const part = document.getElementById(id);
    if (drawn.get(id) === html) return false;
    drawn.set(id, html);
    const open = all("details[open]", part).map((element) => element.id);
    const focused = part.contains(document.activeElement) ? document.activeElement.closest("[id]")?.id : null;
    part.innerHTML = html; // of our templates, in which every name is escaped; no script of it would run
    for (const name of open) document.getElementById(name)?.setAttribute("open", "");
    if (focused && focused !== id) document.getElementById(focused)?.focus();
    return true;
  }

  function update(news) {
    data = { ...data, ...news.data };
    Charts.load(data);
    const changed = Object.entries(news.parts).filter(([id, html]) => replace(id, html)).map(([id]) => id);
    if (changed.includes("cards")) Charts.observe();
    if (changed.includes("board")) sort();
    apply();
  }

  async function follow() {
    try {
      const answer = await fetch(`live?seen=${data.version}`, { cache: "no-store" });
      if (answer.status === 200) {
        const news = await answer.json();
        data.version = news.version;
        update(news);
      } else if (answer.status !== 204) {
        throw new Error(answer.statusText);
      }
      $("#link").textContent = "following the runs";
      $("#link").classList.remove("lost");
    } catch {
      $("#link").textContent = "the server does not answer: what you see is the last that it said";
      $("#link").classList.add("lost");
    }
    setTimeout(follow, document.hidden ? 10000 : 2000);
  }

  try {
    const theme = localStorage.getItem("longlens-theme");
    if (theme in themes) setTheme(theme);
  } catch { /* as the system */ }
  recall();
  Charts.load(data);
  sort();
  Charts.observe();
  apply();
  if (data.follows) follow();
  document.documentElement.dataset.ready = "";
})();
