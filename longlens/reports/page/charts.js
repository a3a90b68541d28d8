"use strict";
// Charts of a board: learning curves with bands, and the test metric against time and memory. Uses Plotly.
const Charts = (() => {
  const isTouch = matchMedia("(pointer: coarse)").matches; // there, a drag scrolls the page
  const state = { boards: new Map(), styles: {}, split: "valid", isShown: () => true };

  // Plotly reads some markup in texts: names stay text.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const probe = document.createElement("span");
  function color(name, alpha = 1) {
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    const [red, green, blue] = found.match(/[\d.]+/g);
    return `rgba(${red},${green},${blue},${alpha})`;
  }

  const isPercent = (metric) => metric === "accuracy";
  const show = (value, metric) => (isPercent(metric) ? `${(100 * value).toFixed(1)} %` : value.toFixed(3));

  // A second config of a layer has its color and its mark, hollow.
  const symbol = (line) => `${state.styles[line.layer].mark}${line.again ? "-open" : ""}`;

  function curveTraces(board) {
    const metric = state.split === "valid" ? board.metric : "loss";
    const bands = [], lines = [];
    for (const line of board.lines.filter((found) => state.isShown(found.layer))) {
      const style = state.styles[line.layer], curve = line.curves[state.split], steps = curve.step;
      if (!steps.length) continue;
      const highs = curve.mean.map((value, i) => value + curve.deviation[i]);
      const lows = curve.mean.map((value, i) => value - curve.deviation[i]);
      if (curve.deviation.some((value) => value > 0)) {
        bands.push({
          x: [...steps, ...[...steps].reverse()], y: [...highs, ...lows.reverse()], mode: "lines", line: { width: 0 },
          fill: "toself", fillcolor: color(`c${style.color}`, 0.16), hoverinfo: "skip",
        });
      }
      const said = curve.mean.map((value, i) => curve.seeds[i] > 1
        ? `${show(value, metric)} ± ${show(curve.deviation[i], metric)}, ${curve.seeds[i]} seeds` : show(value, metric));
      lines.push({
        x: steps, y: curve.mean, text: said, name: plain(line.label),
        mode: steps.length > 40 ? "lines" : "lines+markers",
        line: { color: color(`c${style.color}`), dash: style.dash, width: line.again ? 1.2 : 2.2 },
        marker: { symbol: symbol(line), size: 7, color: color(`c${style.color}`) },
        hovertemplate: `<b>${plain(line.label)}</b> %{text}<extra></extra>`,
      });
    }
    return [...bands, ...lines];
  }

  function costTraces(board, kind) {
    const place = kind === "seconds" ? 1 : 2;
    return board.lines
      .filter((line) => state.isShown(line.layer) && line.test !== null && line[kind] !== null)
      .map((line) => {
        const style = state.styles[line.layer];
        return {
          x: [line[kind]], y: [line.test], mode: "markers", name: plain(line.label),
          error_y: { array: [line.deviation], visible: line.deviation > 0, thickness: 1.5, width: 4 },
          marker: { symbol: symbol(line), size: 12, color: color(`c${style.color}`), line: { width: 2, color: color(`c${style.color}`) } },
          hovertemplate: `<b>${plain(line.label)}</b><br>${plain(line.shown[0])}<br>${plain(line.shown[place])}<extra></extra>`,
        };
      });
  }

  // Room around a point that is alone, where plotly would show one unit to both sides.
  function room(traces, axis, metric) {
    const values = [...new Set(traces.flatMap((trace) => trace[axis]))];
    if (values.length === 1) return { include: [0.9 * values[0], 1.1 * values[0]] };
    return metric === "R²" ? { clipmin: -0.5 } : {}; // before the first steps, it is anywhere below 0
  }

  function layout(board, kind, traces) {
    const metric = kind === "curves" && state.split === "train" ? "loss" : board.metric;
    const axis = {
      gridcolor: color("grid"), linecolor: color("line"), zeroline: false, automargin: true, ticks: "",
      tickfont: { size: 11 }, nticks: kind === "curves" ? 7 : 4,
    };
    const title = { curves: "step", seconds: "seconds", memory: "MiB" }[kind];
    return {
      margin: { l: 8, r: 10, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: color("soft"), size: 12 }, showlegend: false,
      hovermode: kind === "curves" && traces.length <= 16 ? "x unified" : "closest", hoverdistance: kind === "curves" ? -1 : 40,
      dragmode: isTouch ? false : "zoom",
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text"), size: 12 }, align: "left" },
      xaxis: { ...axis, autorangeoptions: room(traces, "x"), title: { text: title, standoff: 6, font: { size: 12 } }, hoverformat: ",d" },
      yaxis: { ...axis, autorangeoptions: room(traces, "y", metric), tickformat: isPercent(metric) ? ".0%" : "" },
      annotations: traces.length ? [] : [{ text: "nothing to draw yet", showarrow: false, xref: "paper", yref: "paper" }],
    };
  }

  function draw(canvas) {
    const card = canvas.closest(".card"), board = state.boards.get(card.dataset.key), kind = canvas.dataset.kind;
    if (!board || card.hidden) return;
    const traces = kind === "curves" ? curveTraces(board) : costTraces(board, kind);
    const isLoss = kind === "curves" && state.split === "train";
    const what = isLoss ? "training loss" : `${kind === "curves" ? "validation" : "test"} ${board.metric}`;
    canvas.closest("figure").querySelector(".what").textContent = what;
    canvas.dataset.drawn = "";
    const asked = layout(board, kind, traces);
    const before = canvas.layout;
    if (before && !before.xaxis.autorange) { // someone has zoomed: new points do not undo it
      for (const axis of ["xaxis", "yaxis"]) Object.assign(asked[axis], { range: before[axis].range, autorange: false });
    }
    Plotly.react(canvas, traces, asked, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  }

  // Charts are drawn when they come into view: a page with many tasks is there at once.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.dataset.near = entry.isIntersecting ? "yes" : "no";
      if (entry.isIntersecting && entry.target.dataset.drawn === undefined) draw(entry.target);
    }
  }, { rootMargin: "400px" });

  function refresh() {
    for (const canvas of document.querySelectorAll(".canvas")) {
      delete canvas.dataset.drawn;
      if (canvas.dataset.near === "yes") draw(canvas);
    }
  }

  function observe() {
    for (const canvas of document.querySelectorAll(".canvas")) seen.observe(canvas);
  }

  function load(data) {
    state.boards = new Map(data.boards.map((board) => [board.key, board]));
    state.styles = data.styles;
  }

  function zoom(canvas, how) {
    if (!canvas.layout) return;
    if (how === "reset") { Plotly.relayout(canvas, { "xaxis.autorange": true, "yaxis.autorange": true }); return; }
    const moves = { in: [0.7, 0, 0], out: [1 / 0.7, 0, 0], left: [1, -0.2, 0], right: [1, 0.2, 0], up: [1, 0, 0.2], down: [1, 0, -0.2] };
    const [factor, right, up] = moves[how], changes = {};
    for (const [axis, shift] of [["xaxis", right], ["yaxis", up]]) {
      const [low, high] = canvas.layout[axis].range, middle = (low + high) / 2 + shift * (high - low);
      changes[`${axis}.range`] = [middle - factor * (high - low) / 2, middle + factor * (high - low) / 2];
    }
    Plotly.relayout(canvas, changes);
  }

  const keys = { "+": "in", "=": "in", "-": "out", 0: "reset", ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" };
  document.addEventListener("keydown", (event) => {
    if (!event.target.matches(".canvas") || !(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    zoom(event.target, keys[event.key]);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-zoom]");
    if (button) zoom(button.closest("figure").querySelector(".canvas"), button.dataset.zoom);
  });

  return { state, load, refresh, observe };
})();
