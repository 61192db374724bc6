"use strict";
// The page's data is in #data; nothing is loaded from anywhere else.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = [["#1f5a99", "#ffffff"], ["#f2a33a", "#1a1a1a"], ["#2e7d5b", "#ffffff"], ["#d9b3e6", "#1a1a1a"]];

function element(name, attributes, text) {
  const made = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const key in attributes || {}) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}
const percent = (share) => share === null || share === undefined ? "unknown" : (100 * share).toFixed(1) + " %";
function time(micro) {
  if (micro >= 1e7) return (micro / 1e6).toPrecision(4) + " s";
  return micro >= 1000 ? (micro / 1e3).toPrecision(4) + " ms" : micro.toPrecision(3) + " µs";
}
function tick(micro) {
  const milli = view.to >= 1000;
  return Number((micro / (milli ? 1e3 : 1)).toPrecision(8)) + (milli ? " ms" : " µs");
}
function table(target, head, rows) {
  const heading = element("tr");
  for (const [text, numeric] of head) heading.append(element("th", numeric ? {class: "number"} : {}, text));
  target.append(heading);
  for (const cells of rows) {
    const row = element("tr");
    cells.forEach((cell, i) => row.append(element("td", head[i][1] ? {class: "number"} : {}, String(cell))));
    target.append(row);
  }
}

// Run: the figures that one looks for first.
function showRun() {
  byId("versions").textContent = "afd-graph " + data.version;
  const report = data.report, traced = data.steps.filter((s) => s.number !== null);
  const figures = [];
  if (report) {
    const unsplit = Object.entries(report.steps_unsplit);
    figures.push(["MoE layers", report.layers.length], ["graphs", report.graphs.length]);
    figures.push(["order", report.order + " (" + report.credits + " credits)"]);
    figures.push(["steps in two stages", report.steps_split], ["of them cut inside a request", report.steps_mid_request]);
    figures.push(["steps unsplit", unsplit.length ? unsplit.map(([why, n]) => n + " " + why).join(", ") : 0]);
    figures.push(["nodes captured / emitted", report.nodes_before + " / " + report.nodes_after]);
  }
  const split = traced.filter((s) => s.policy !== null);
  if (split.length) {
    const last = split[split.length - 1];
    figures.push(["attention busy", percent(last.busy.attention)], ["experts busy", percent(last.busy.ffn)]);
    figures.push(["last split step", last.ms.toFixed(2) + " ms"]);
  }
  for (const [name, value] of figures) {
    const box = element("div");
    box.append(element("b", {}, value), element("span", {}, name));
    byId("figures").append(box);
  }
  if (!figures.length) byId("figures").append(element("p", {}, "No report in these files."));
}

// Timeline: panels below one another on one time axis.
const LEFT = 96, RIGHT = 20, LANE = 30, GAP = 4, LINKS = 44, HEAD = 26;
let view = {step: null, from: 0, to: 1};

function choose(step) {
  view.step = step;
  view.from = 0;
  view.to = Math.max(1e-3, ...step.panels.map((p) => p.total));
  byId("step").value = String(data.steps.indexOf(step));
  for (const row of byId("plans").querySelectorAll("tr[data-step]"))
    row.classList.toggle("chosen", row.dataset.step === String(data.steps.indexOf(step)));
  draw();
  showBubbles();
}

function draw() {
  const width = Math.max(560, byId("drawing").clientWidth || 1200);
  const scale = (width - LEFT - RIGHT) / (view.to - view.from);
  const x = (t) => LEFT + (t - view.from) * scale;
  const svg = element("svg:svg", {xmlns: SVG, width, "font-family": "Helvetica, Arial, sans-serif", "font-size": 12});
  const clip = element("svg:clipPath", {id: "inside"});
  const frame = element("svg:rect", {x: LEFT, y: 0, width: width - LEFT - RIGHT});
  clip.append(frame);
  svg.append(clip);
  const inside = element("svg:g", {"clip-path": "url(#inside)"});
  let y = 4;
  legend(svg, view.step.panels, y + 10);
  y += 20;
  for (const panel of view.step.panels) {
    svg.append(element("svg:text", {x: LEFT, y: y + 15, "font-weight": "bold"}, panel.title));
    const busy = panel.lanes.map((l) => laneName(panel, l) + " busy " + percent(l.busy)).join(" · ");
    svg.append(element("svg:text", {x: width - RIGHT, y: y + 15, "text-anchor": "end", fill: "#555"},
      "total " + time(panel.total) + " · " + busy));
    y += HEAD;
    const places = new Map();
    panel.lanes.forEach((lane, i) => {
      if (i && panel.lanes[i - 1].engine !== lane.engine) y += LINKS - GAP;
      places.set(lane.engine + lane.rank, y);
      svg.append(element("svg:text", {x: LEFT - 8, y: y + LANE / 2 + 4, "text-anchor": "end"}, laneName(panel, lane)));
      inside.append(element("svg:rect", {x: x(0), y, width: Math.max(0, panel.total * scale), height: LANE, fill: "#e9ebee"}));
      y += LANE + GAP;
    });
    drawIntervals(inside, panel, places, x, scale);
    y += 10;
  }
  svg.append(inside);
  axis(svg, x, y, width);
  const height = y + 30;
  frame.setAttribute("height", y);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", "0 0 " + width + " " + height);
  byId("drawing").replaceChildren(svg);
}

function laneName(panel, lane) {
  const several = panel.lanes.filter((l) => l.engine === lane.engine).length > 1;
  return (lane.engine === "ffn" ? "FFN" : "attention") + (several ? " " + lane.rank : "");
}

function drawIntervals(group, panel, places, x, scale) {
  const firstFFN = Math.min(...panel.lanes.filter((l) => l.engine === "ffn").map((l) => places.get("ffn" + l.rank)));
  for (const [engine, layer, stage, begin, end, rank] of panel.intervals) {
    if (end < view.from || begin > view.to) continue;
    const [fill, ink] = COLOURS[stage % COLOURS.length];
    const name = data.engines[engine];
    const what = name + ", layer " + layer + ", stage " + stage + ", rank " + rank + ": " + time(end - begin)
      + " from " + time(begin) + " (" + panel.title + ")";
    if (name === "attention" || name === "ffn") {
      const top = places.get(name + rank), wide = Math.max(0.6, (end - begin) * scale - 0.6);
      if (top === undefined) continue;
      const box = element("svg:rect", {x: x(begin), y: top, width: wide, height: LANE, fill, "data-tip": what, class: name});
      group.append(box);
      if (wide > 8 * String(layer).length + 4)
        group.append(element("svg:text", {x: x(begin) + wide / 2, y: top + LANE / 2 + 4, "text-anchor": "middle",
          fill: ink, "pointer-events": "none"}, layer));
    } else {
      const top = places.get("attention" + rank), low = places.get("ffn" + rank) ?? firstFFN;
      if (top === undefined || !Number.isFinite(low)) continue;
      const out = name === "link out";
      group.append(element("svg:line", {x1: x(begin), x2: x(end), y1: out ? top + LANE : low, y2: out ? low : top + LANE,
        stroke: fill, "stroke-width": 1.5, "stroke-dasharray": out ? "" : "4 3", "data-tip": what, class: "link"}));
    }
  }
}

function legend(svg, panels, y) {
  const stages = [...new Set(panels.flatMap((p) => p.intervals.map((i) => i[2])))].sort();
  let x = LEFT;
  for (const stage of stages) {
    svg.append(element("svg:rect", {x, y: y - 10, width: 14, height: 12, fill: COLOURS[stage % COLOURS.length][0]}));
    svg.append(element("svg:text", {x: x + 20, y}, "stage " + stage));
    x += 84;
  }
  for (const [name, dash] of [["dispatch", ""], ["return", "4 3"]]) {
    svg.append(element("svg:line", {x1: x, x2: x + 24, y1: y - 4, y2: y - 4, stroke: "#1a1a1a", "stroke-dasharray": dash}));
    svg.append(element("svg:text", {x: x + 30, y}, name));
    x += 100;
  }
  svg.append(element("svg:rect", {x, y: y - 10, width: 14, height: 12, fill: "#e9ebee"}));
  svg.append(element("svg:text", {x: x + 20, y}, "idle; number in a box: MoE layer"));
}

function axis(svg, x, y, width) {
  const least = (view.to - view.from) * 80 / (width - LEFT - RIGHT);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((f) => power * f >= least);
  svg.append(element("svg:line", {x1: LEFT, x2: width - RIGHT, y1: y, y2: y, stroke: "#1a1a1a"}));
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    svg.append(element("svg:line", {x1: x(t), x2: x(t), y1: y, y2: y + 4, stroke: "#1a1a1a"}));
    svg.append(element("svg:text", {x: x(t), y: y + 17, "text-anchor": "middle", fill: "#555"}, tick(t)));
  }
}

function zoom(factor, centre) {
  const most = Math.max(1e-3, ...view.step.panels.map((p) => p.total));
  const length = Math.min(most, (view.to - view.from) * factor);
  const share = (centre - view.from) / (view.to - view.from);
  view.from = Math.min(Math.max(0, centre - share * length), most - length);
  view.to = view.from + length;
  draw();
}

function showBubbles() {
  const target = byId("bubbles");
  target.replaceChildren();
  if (!view.step.panels.length) return;
  const made = element("table");
  const rows = [];
  for (const panel of view.step.panels)
    for (const lane of panel.lanes) {
      const lengths = lane.bubbles.map(([a, b]) => b - a);
      const lost = lengths.reduce((sum, l) => sum + l, 0);
      rows.push([panel.title, laneName(panel, lane), percent(lane.busy), lengths.length, time(lost),
        lengths.length ? time(Math.max(...lengths)) : "none"]);
    }
  table(made, [["timeline", 0], ["side", 0], ["busy", 1], ["bubbles", 1], ["idle in all", 1], ["longest", 1]], rows);
  target.append(made);
}

function showTimeline() {
  const drawable = data.steps.filter((s) => s.panels.length);
  if (!drawable.length) {
    byId("drawing").append(element("p", {}, "No timeline: nothing was traced (AFDConfig(trace=True)) and no graph has two stages."));
    return;
  }
  for (const step of drawable) {
    const name = step.number === null ? "the schedule, equal costs"
      : step.number + ": " + (step.policy ?? step.reason) + ", " + step.ms.toFixed(2) + " ms";
    byId("step").append(element("option", {value: data.steps.indexOf(step)}, name));
  }
  byId("step").addEventListener("change", (event) => choose(data.steps[Number(event.target.value)]));
  byId("fit").addEventListener("click", () => choose(view.step));
  byId("closer").addEventListener("click", () => zoom(0.5, (view.from + view.to) / 2));
  byId("farther").addEventListener("click", () => zoom(2, (view.from + view.to) / 2));
  const drawing = byId("drawing");
  const at = (event) => {
    const box = drawing.getBoundingClientRect();
    return view.from + (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT) * (view.to - view.from);
  };
  drawing.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event));
  }, {passive: false});
  let held = null;
  drawing.addEventListener("pointerdown", (event) => { held = at(event); });
  window.addEventListener("pointerup", () => { held = null; });
  drawing.addEventListener("pointermove", (event) => {
    byId("tip").textContent = event.target.getAttribute?.("data-tip") ?? "";
    if (held === null) return;
    const most = Math.max(...view.step.panels.map((p) => p.total)), length = view.to - view.from;
    view.from = Math.min(Math.max(0, view.from + held - at(event)), most - length);
    view.to = view.from + length;
    draw();
  });
  window.addEventListener("resize", draw);
  byId("svg").addEventListener("click", () => save("timeline.svg", svgURL()));
  byId("png").addEventListener("click", savePNG);
  const split = drawable.filter((s) => s.policy !== null);
  choose(split.length ? split[split.length - 1] : drawable[drawable.length - 1]);
}

function svgURL() {
  const text = new XMLSerializer().serializeToString(byId("drawing").querySelector("svg"));
  return "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
}
function save(name, url) {
  element("a", {href: url, download: name}).click();
}
function savePNG() {
  const svg = byId("drawing").querySelector("svg"), picture = new Image();
  picture.addEventListener("load", () => {
    const canvas = element("canvas", {width: 2 * svg.width.baseVal.value, height: 2 * svg.height.baseVal.value});
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#ffffff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    save("timeline.png", canvas.toDataURL("image/png"));
  });
  picture.src = svgURL();
}

// Steps: what was planned, and why not.
function showSteps() {
  const steps = data.steps.filter((s) => s.number !== null), plans = byId("plans");
  const head = [["step", 1], ["plan", 0], ["why unsplit", 0], ["rows per stage", 0], ["time", 1], ["attention busy", 1], ["experts busy", 1]];
  table(plans, head, steps.map((s) => [s.number, s.policy ?? "unsplit", s.reason ?? "", s.rows.join(" + "),
    s.ms.toFixed(2) + " ms", percent(s.busy.attention), percent(s.busy.ffn)]));
  const rows = [...plans.querySelectorAll("tr")].slice(1);
  rows.forEach((row, i) => {
    if (steps[i].policy === null) row.classList.add("unsplit");
    if (!steps[i].panels.length) return;
    row.dataset.step = data.steps.indexOf(steps[i]);
    row.addEventListener("click", () => choose(steps[i]));
  });
  const filter = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      shown += !row.hidden;
    }
    byId("shown").textContent = steps.length ? shown + " of " + steps.length + " steps"
      : "no step was traced; counts are above";
  };
  byId("filter").addEventListener("input", filter);
  filter();
}

function showModel() {
  const report = data.report, layers = byId("layers");
  if (!report) {
    layers.append(element("p", {}, "No report in these files."));
  } else {
    const made = element("table");
    table(made, [["index", 1], ["layer", 0], ["experts", 1], ["top-k", 1], ["shared", 1], ["gate and top-k", 0]],
      report.layers.map((l) => [l.index, l.name ?? "?", l.experts, l.top_k, l.shared, l.gate]));
    layers.append(made);
    for (const [i, graph] of report.graphs.entries()) {
      const how = graph.mode ? "two stages (" + graph.mode + ")" : "unsplit: " + graph.unsplit_reason;
      const passes = Object.entries(graph.pass_seconds).map(([n, s]) => n + " " + (1e3 * s).toFixed(1) + " ms").join(", ");
      byId("unmatched").append(element("p", {}, "graph " + i + ": " + graph.layers.length + " MoE layers, " + how + ", "
        + graph.nodes_before + " nodes captured, " + graph.nodes_after + " emitted. " + passes));
      for (const text of graph.no_match) byId("unmatched").append(element("p", {class: "refused"}, "not matched: " + text));
    }
  }
}

// Graphs: two texts, what differs, and a search over both.
const unpacked = new Map();
async function text(number) {
  if (!unpacked.has(number)) {
    const bytes = Uint8Array.from(atob(data.texts[number]), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(number, await new Response(stream).text());
  }
  return unpacked.get(number);
}

let hits = [], current = -1, shownPass = 0;
async function showPass() {
  const graph = data.graphs[Number(byId("graph").value)], pass = graph.passes[Number(byId("pass").value)];
  const request = ++shownPass;
  const [before, after] = (await Promise.all([text(pass.before), text(pass.after)])).map((t) => t.split("\n"));
  if (request !== shownPass) return;
  byId("difference").textContent = pass.difference;
  const query = byId("query").value.toLowerCase(), only = byId("changed").checked;
  fill("before", before, new Set(after), "removed", query, only);
  fill("after", after, new Set(before), "added", query, only);
  hits = [...document.querySelectorAll("#before mark, #after mark")];
  current = -1;
  byId("hits").textContent = query ? hits.length + " hits" : "";
  if (hits.length) jump(1);
}

function fill(id, lines, others, mark, query, only) {
  const target = byId(id), made = document.createDocumentFragment();
  let different = 0;
  for (const line of lines) {
    const changed = line.trim() !== "" && !others.has(line);
    different += changed;
    if (only && !changed) continue;
    const row = element("span", {class: "line" + (changed ? " " + mark : "")});
    let rest = line, at;
    while (query && (at = rest.toLowerCase().indexOf(query)) >= 0) {
      row.append(rest.slice(0, at), element("mark", {}, rest.slice(at, at + query.length)));
      rest = rest.slice(at + query.length);
    }
    row.append(rest || "\u200b");
    made.append(row);
  }
  target.replaceChildren(made);
  byId(id + "-count").textContent = lines.length + " lines, " + different + " not on the other side";
}

function jump(by) {
  if (!hits.length) return;
  hits[current]?.classList.remove("current");
  current = (current + by + hits.length) % hits.length;
  hits[current].classList.add("current");
  const box = hits[current].closest(".tall");
  box.scrollTop = hits[current].offsetTop - box.offsetTop - box.clientHeight / 2;
  byId("hits").textContent = (current + 1) + " of " + hits.length + " hits";
}

function showGraphs() {
  const graphs = data.graphs.filter((g) => g.passes.length);
  if (!graphs.length) {
    byId("difference").textContent = "No graph was dumped: set AFDConfig(dump_dir=...) or AFD_ASYNC_MOE_LAYOUT_LOG=DIR.";
    return;
  }
  data.graphs.forEach((graph, i) => {
    if (graph.passes.length) byId("graph").append(element("option", {value: i}, graph.name));
  });
  const passes = () => {
    const graph = data.graphs[Number(byId("graph").value)];
    byId("pass").replaceChildren(...graph.passes.map((p, i) => element("option", {value: i}, (i + 1) + " " + p.name)));
    const insert = graph.passes.findIndex((p) => p.name === "insert");
    if (insert >= 0) byId("pass").value = String(insert);
  };
  passes();
  byId("graph").addEventListener("change", () => { passes(); showPass(); });
  let waiting = 0;
  byId("query").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(showPass, 150); });
  for (const id of ["pass", "changed"]) byId(id).addEventListener("change", showPass);
  byId("next").addEventListener("click", () => jump(1));
  byId("previous").addEventListener("click", () => jump(-1));
  byId("query").addEventListener("keydown", (event) => { if (event.key === "Enter") jump(event.shiftKey ? -1 : 1); });
  return showPass();
}

showRun();
showSteps();
showTimeline();
showModel();
Promise.resolve(showGraphs()).then(() => { document.body.dataset.ready = "yes"; });
