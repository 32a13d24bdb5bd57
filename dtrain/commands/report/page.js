"use strict";
// Draws the charts into their frames, and where the page is live asks for what is new. All data come from dtrain, with
// the words of runs escaped: `plain` does it for those that plotly would read as tags.
(() => {
  const find = (id) => document.getElementById(id);
  let data = JSON.parse(find("data").textContent);
  const controls = { x: find("x-axis"), smooth: find("smooth"), log: find("log-y") };
  const hidden = new Set();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const AXES = { step: "step", tokens: "tokens", hours: "hours in steps" };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // What `values` are at `at`, between the neighbours of `places`, which rise.
  function between(places, values, at) {
    let low = 0, high = places.length - 1;
    if (at <= places[low]) return values[low];
    if (at >= places[high]) return values[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] <= at) low = middle; else high = middle;
    }
    return values[low] + (values[high] - values[low]) * (at - places[low]) / (places[high] - places[low]);
  }

  function across(line, isCurve) {
    const axes = data.axes[line.run], wanted = controls.x.value;
    if (!isCurve || wanted === "step") return line.x;
    return axes[wanted] ? line.x.map((step) => between(axes[wanted + "_steps"], axes[wanted], step)) : [];
  }

  // The running mean with weights that fall by `weight` a point, without a bias to its beginning.
  function smoothed(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * weight + value; total = total * weight + 1;
      return sum / total;
    });
  }

  function traces(chart) {
    const weight = Number(controls.smooth.value), found = [];
    const isCurve = chart.steps_of === undefined;
    for (const line of chart.lines) {
      if (hidden.has(line.run)) continue;
      const x = across(line, isCurve), name = plain(data.runs.length > 1 ? `${data.runs[line.run]} ${line.name}` : line.name);
      const own = colour(`--run-${line.run % 8}`);
      const few = line.dots || line.x.length < 3;
      const base = { x, type: "scatter", name, mode: few && isCurve ? "lines+markers" : "lines", marker: { size: 5, color: own } };
      base.hovertemplate = "%{y:.5~g}";
      const shape = { color: own, width: 1.8, dash: line.dash, shape: isCurve ? "linear" : "hv" };
      if (isCurve && weight > 0 && !line.dots) {
        found.push({ ...base, y: line.y, mode: "lines", opacity: .25, hoverinfo: "skip", hovertemplate: null, line: { ...shape, width: 1 } });
        found.push({ ...base, y: smoothed(line.y, weight), name: `${name}, smoothed`, line: shape });
      } else {
        found.push({ ...base, y: line.y, line: shape });
      }
    }
    for (const level of chart.levels) {
      const ends = chart.lines.filter((line) => line.run === level.run).flatMap((line) => across(line, true));
      if (hidden.has(level.run) || !ends.length) continue;
      const x = [ends[0], ends.reduce((most, one) => Math.max(most, one))];
      found.push({ x, y: [level.y, level.y], type: "scatter", mode: "lines", name: plain(`${data.runs[level.run]} planned`),
        hovertemplate: "%{y:.4~g}", line: { color: colour(`--run-${level.run % 8}`), width: 1.2, dash: "longdash" } });
    }
    return found;
  }

  function layout(chart) {
    const ink = colour("--soft"), grid = colour("--line"), card = colour("--card");
    const isCurve = chart.steps_of === undefined;
    const isAbove = chart.lines.every((line) => line.y.every((value) => value === null || value > 0));
    const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickcolor: grid, automargin: true, exponentformat: "e" };
    return {
      height: 240, margin: { l: 48, r: 10, t: 8, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: ink }, showlegend: false, hovermode: "x unified",
      hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: colour("--ink") }, namelength: 40 },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", uirevision: controls.x.value + controls.log.checked,
      xaxis: { ...axis, zeroline: false, nticks: 6, ...(isCurve && controls.x.value === "hours" ? { exponentformat: "none" } : { exponentformat: "SI", hoverformat: ",.0f" }), title: { text: isCurve ? AXES[controls.x.value] : chart.steps_of, standoff: 6 } },
      yaxis: { ...axis, nticks: 6, type: isCurve && controls.log.checked && isAbove ? "log" : "linear", rangemode: isCurve ? "normal" : "tozero" },
    };
  }

  let drawing = 0;
  // Chart after chart, so that the page answers in between; a newer call ends an older one.
  async function draw() {
    const mine = ++drawing;
    document.documentElement.dataset.drawn = "no";
    for (const chart of data.charts) {
      const place = find(chart.id) && find(chart.id).querySelector(".plot");
      if (place) await Plotly.react(place, traces(chart), layout(chart), { responsive: true, displayModeBar: false });
      await new Promise((next) => setTimeout(next));
      if (mine !== drawing) return;
    }
    document.documentElement.dataset.drawn = "yes";
  }

  function chooseRuns() {
    const box = find("shown-runs");
    box.hidden = data.runs.length < 2;
    if (box.children.length === data.runs.length) return;
    box.replaceChildren(...data.runs.map((name, run) => {
      const label = document.createElement("label"), tick = document.createElement("input"), chip = document.createElement("span");
      tick.type = "checkbox"; tick.checked = true;
      tick.addEventListener("change", () => { if (tick.checked) hidden.delete(run); else hidden.add(run); draw(); });
      chip.className = "chip"; chip.dataset.run = run % 8; chip.textContent = name;
      label.append(tick, chip);
      return label;
    }));
  }

  function offerAxes() {
    for (const option of controls.x.options) {
      option.hidden = option.disabled = option.value !== "step" && !data.axes.some((axes) => axes[option.value]);
    }
  }

  // Puts a section's new text in its place. Charts stay where they are, since a reader may have zoomed into one.
  function renew(id, html) {
    const section = find(id), body = section.querySelector(".body");
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    const ids = (root) => [...root.querySelectorAll(".plot")].map((plot) => plot.parentElement.id).join();
    if (ids(body) && ids(body) === ids(fresh.content)) {
      for (const figure of fresh.content.querySelectorAll("figure[id]")) {
        const old = find(figure.id);
        for (const part of [".key", "figcaption"]) old.querySelector(part).replaceWith(figure.querySelector(part));
      }
    } else {
      const open = new Map([...body.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
      body.replaceChildren(fresh.content);
      for (const one of body.querySelectorAll("details[id]")) if (open.has(one.id)) one.open = open.get(one.id);
    }
    section.hidden = html === "";
    const link = document.querySelector(`nav a[href="#${id}"]`);
    if (link) link.parentElement.hidden = html === "";
  }

  async function follow(seen) {
    const told = find("following");
    try {
      const answer = await fetch(`state?seen=${encodeURIComponent(seen)}`, { cache: "no-store" });
      if (answer.status === 200) {
        const state = await answer.json();
        const shown = data.html || {};
        data = { ...state.data, html: state.html };
        for (const [id, html] of Object.entries(state.html)) if (shown[id] !== html) renew(id, html);
        seen = state.seen;
        chooseRuns(); offerAxes(); draw();
      }
      told.textContent = answer.ok ? `follows the run, ${new Date().toLocaleTimeString()}` : await answer.text();
    } catch (error) {
      told.textContent = "dtrain report has ended; this is what it last knew";
    }
    setTimeout(follow, 3000, seen);
  }

  chooseRuns();
  offerAxes();
  find("controls").hidden = data.charts.length === 0;
  for (const control of Object.values(controls)) control.addEventListener("input", draw);
  dark.addEventListener("change", draw);
  draw();
  if (document.documentElement.dataset.live) follow(document.documentElement.dataset.live);
})();
