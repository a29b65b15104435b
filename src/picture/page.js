"use strict";

// The page of a run: lanes of actions on a canvas, all scenes under one view of time.
(() => {
  window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

  const GUTTER = 104;      // left of the lanes: their names
  const RIGHT = 12;
  const AXIS = 26;
  const HEIGHT_MAX = 12000; // a canvas has a limit; lanes of very many ranks get lower
  const COLOURS = ["ink", "dim", "lane", "rule", "bg", "f", "b", "w", "u", "on", "path", "drift", "memory", "memory-fill"];
  const byId = (id) => document.getElementById(id);
  const scenes = JSON.parse(byId("data").textContent).scenes;
  const end = Math.max(...scenes.map((s) => s.end), 1e-3);

  const view = { from: 0, to: end, shown: scenes.length > 1 ? "both" : 0, path: true, drift: true, memory: true };
  let hovered = null;      // { scene, action } or { scene, rank, at } over a memory strip
  let colour = {};

  // ---- what follows from the data ----

  function prepare(scene) {
    scene.byLane = scene.lanes.map(() => []);
    for (const action of scene.actions) scene.byLane[action.rank].push(action);
    scene.path.forEach((step, i) => {
      const action = scene.actions[step.action];
      action.wait = step.wait;
      step.of = action;
      step.before = i > 0 ? scene.path[i - 1].of : null;
    });
    // Forward and backward pass of a micro-batch that see different weights.
    const forward = new Map();
    scene.drifts = scene.lanes.map(() => []);
    for (const action of scene.actions) {
      const key = action.stage + ":" + action.mb;
      if (action.op === "F") forward.set(key, action);
      const f = action.op === "B" || action.op === "I" ? forward.get(key) : null;
      if (!f) continue;
      action.drift = action.version - f.version;
      f.later = action.version;
      if (action.drift > 0) scene.drifts[action.rank].push({ f, b: action });
    }
    scene.drifting = scene.drifts.some((list) => list.length > 0);
    scene.onPath = scene.path.reduce((sum, step) => sum + step.of.end - step.of.start, 0);
  }

  // ---- texts ----

  function time(us) {
    const digits = (x) => String(Number(x.toFixed(x < 10 ? 3 : x < 100 ? 2 : 1)));
    if (us >= 1e6) return digits(us / 1e6) + " s";
    if (us >= 1e3) return digits(us / 1e3) + " ms";
    return digits(us) + " us";
  }

  function amount(value, unit) {
    if (unit === "microbatches") return value + (value === 1 ? " micro-batch" : " micro-batches");
    for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (value >= size) return (value / size).toFixed(2) + " " + name;
    }
    return value + " B";
  }

  // Memory of a rank is drawn on one scale in all scenes.
  const most = (rank) => Math.max(...scenes.map((s) => (s.lanes[rank] ? s.lanes[rank].memory.limit : 0)));

  const percent = (x) => (100 * x).toFixed(1) + " %";
  const count = (n, what) => n + " " + what + (n === 1 ? "" : "s");
  const updates = (n) => count(n, "update");

  function facts(scene) {
    const idle = scene.end - scene.onPath;
    return [
      "steady bubble " + percent(scene.bubble),
      "drift at most " + updates(scene.drift),
      "delay at most " + updates(scene.delay),
      "critical path " + time(scene.end) + (idle > scene.end * 1e-9 ? ", " + time(idle) + " of it between ranks" : ""),
    ].join(" · ");
  }

  function describe(scene, action) {
    const kind = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", U: "optimizer update" }[action.op];
    const lines = [action.op + action.mb + ": " + kind, "rank " + action.rank + ", stage " + action.stage];
    if (action.op === "U") {
      lines.push("makes version " + action.version + " of the weights");
    } else {
      lines.push("micro-batch " + action.mb + " of update " + Math.floor(action.mb / scene.accumulate));
      lines.push("stash slot " + action.slot);
      if (action.op !== "W") lines.push("reads version " + action.version + " of the weights" + (action.drift ? ": drift " + action.drift : ""));
      if (action.later > action.version) lines.push("its backward pass reads version " + action.later);
    }
    lines.push(time(action.start) + " to " + time(action.end) + ", takes " + time(action.end - action.start));
    if (action.wait) lines.push("on the critical path: " + action.wait);
    return lines.join("\n");
  }

  function memoryAt(scene, rank, at) {
    const memory = scene.lanes[rank].memory;
    let value = memory.fixed;
    for (const [from, then] of memory.points) if (from <= at) value = then;
    const lines = ["rank " + rank + " at " + time(at), amount(value, memory.unit) + (memory.unit === "bytes" ? " in use" : " in flight")];
    lines.push(memory.unit === "bytes" ? amount(memory.limit, memory.unit) + " allocated" : "at most " + memory.limit);
    return lines.join("\n");
  }

  // ---- geometry ----

  function geometry(scene) {
    const arc = view.drift && scene.drifting ? 20 : 5;
    const memory = view.memory ? 30 : 0;
    const pitch = arc + 28 + memory + 5;
    const scale = Math.min(1, HEIGHT_MAX / (pitch * scene.lanes.length));
    return { arc: arc * scale, bar: 28 * scale, memory: memory * scale, pitch: pitch * scale };
  }

  const width = (canvas) => Math.max(canvas.clientWidth - GUTTER - RIGHT, 50);
  const toX = (canvas, t) => GUTTER + ((t - view.from) / (view.to - view.from)) * width(canvas);
  const toTime = (canvas, x) => view.from + ((x - GUTTER) / width(canvas)) * (view.to - view.from);

  // First action of a lane that ends after `t`: lanes are sorted, so a far zoom draws little.
  function firstVisible(lane, t) {
    let low = 0, high = lane.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane[middle].end < t) low = middle + 1; else high = middle;
    }
    return low;
  }

  // ---- drawing ----

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    colour = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  }

  function draw(scene, canvas) {
    const g = geometry(scene), ratio = window.devicePixelRatio || 1;
    const height = g.pitch * scene.lanes.length + AXIS;
    canvas.style.height = height + "px";
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.textBaseline = "middle";
    axis(c, canvas, g.pitch * scene.lanes.length);
    let drawn = 0;
    c.save();
    c.beginPath();
    c.rect(GUTTER - 2, 0, width(canvas) + 5, height);
    c.clip();
    scene.lanes.forEach((lane, rank) => {
      c.fillStyle = colour.lane;
      c.fillRect(GUTTER, rank * g.pitch + g.arc, width(canvas), g.bar);
      if (view.memory) memory(c, canvas, lane.memory, most(rank), rank * g.pitch + g.arc + g.bar + 2, g.memory - 2);
      drawn += actions(c, canvas, scene, rank, g);
    });
    if (view.path) path(c, canvas, scene, g);
    if (view.drift) scene.drifts.forEach((list, rank) => drift(c, canvas, list, rank * g.pitch + g.arc, g.arc));
    if (hovered && hovered.action && hovered.scene === scene) sameMicrobatch(c, canvas, scene, g);
    c.restore();
    names(c, scene, g);
    return drawn;
  }

  function actions(c, canvas, scene, rank, g) {
    const lane = scene.byLane[rank], y = rank * g.pitch + g.arc;
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "center";
    const made = [];
    let drawn = 0;
    for (let i = firstVisible(lane, view.from); i < lane.length && lane[i].start <= view.to; i++) {
      const action = lane[i], x = toX(canvas, action.start), w = toX(canvas, action.end) - x;
      drawn++;
      if (action.op === "U") { made.push([x + w / 2, Math.max(w, 3)]); continue; }
      c.fillStyle = colour[{ F: "f", B: "b", I: "b", W: "w" }[action.op]];
      c.fillRect(x, y + 1, Math.max(w - 1, 0.6), g.bar - 2);
      const later = scene.lanes[rank].stages.indexOf(action.stage);
      if (later > 0) { // of several stages on a rank, the later ones are darker
        c.fillStyle = "rgb(0 0 0 / " + Math.min(0.16 * later + 0.1, 0.5) + ")";
        c.fillRect(x, y + 1, Math.max(w - 1, 0.6), g.bar - 2);
      }
      const text = w >= 30 ? action.op + action.mb : w >= 8 + 6.5 * String(action.mb).length ? String(action.mb) : "";
      if (text && g.bar >= 14) {
        c.fillStyle = colour.on;
        c.fillText(text, x + w / 2, y + g.bar / 2 + 0.5);
      }
    }
    // Updates stand between actions: over both.
    c.fillStyle = colour.u;
    for (const [x, w] of made) c.fillRect(x - w / 2, y - 3, w, g.bar + 6);
    return drawn;
  }

  // A frame around each stretch of the path on a rank, and a line to where it goes on.
  function path(c, canvas, scene, g) {
    c.strokeStyle = colour.path;
    c.lineWidth = 2.5;
    c.beginPath();
    scene.path.forEach(({ of: action, before }, i) => {
      if (action.end < view.from || (before ? before.end : action.start) > view.to) return;
      const top = action.rank * g.pitch + g.arc + 1, bottom = top + g.bar - 2;
      const x = toX(canvas, action.start), right = toX(canvas, action.end);
      const next = i + 1 < scene.path.length ? scene.path[i + 1].of : null;
      const edge = (at) => { c.moveTo(at, top); c.lineTo(at, bottom); };
      const stretch = (y) => { c.moveTo(x - 1, y); c.lineTo(right, y); };
      stretch(top);
      stretch(bottom);
      if (!before || before.rank !== action.rank) edge(x);
      if (!next || next.rank !== action.rank) edge(right - 1);
      if (before && before.rank !== action.rank) {
        c.moveTo(toX(canvas, before.end) - 1, before.rank * g.pitch + g.arc + g.bar / 2);
        c.lineTo(x, (top + bottom) / 2);
      }
    });
    c.stroke();
  }

  // Neighbouring lines run at different heights; a thick one stands for more than one update. Where they are many, their
  // ends and their run get fainter, and that of the micro-batch pointed at does not.
  function drift(c, canvas, list, y, height) {
    c.strokeStyle = c.fillStyle = colour.drift;
    const visible = list.filter(({ f, b }) => b.end >= view.from && f.start <= view.to);
    const length = visible.reduce((sum, { f, b }) => sum + Math.min(b.end, view.to) - Math.max(f.start, view.from), 0);
    const ends = visible.filter(({ f, b }) => f.start >= view.from || b.end <= view.to).length;
    const clear = Math.min(Math.max(width(canvas) / ends / 14, 0.1), 1);
    const run = Math.min(clear, Math.max((6 * (view.to - view.from)) / length, 0.02));
    visible.forEach(({ f, b }) => {
      const x0 = toX(canvas, (f.start + f.end) / 2), x1 = toX(canvas, (b.start + b.end) / 2);
      const top = y - height + 3 + 4 * (b.mb % 3), bend = Math.min(8, (x1 - x0) / 3);
      const pointed = hovered && hovered.action && (hovered.action === f || hovered.action === b);
      c.lineWidth = pointed ? 3 : b.drift > 1 ? 2.4 : 1.2;
      c.globalAlpha = pointed ? 1 : run;
      c.beginPath();
      c.moveTo(x0 + bend, top);
      c.lineTo(x1 - bend, top);
      c.stroke();
      c.globalAlpha = pointed ? 1 : clear;
      c.beginPath();
      c.moveTo(x0, y + 1);
      c.quadraticCurveTo(x0, top, x0 + bend, top);
      c.moveTo(x1 - bend, top);
      c.quadraticCurveTo(x1, top, x1, y - 2);
      c.stroke();
      c.beginPath();
      c.moveTo(x1, y + 2);
      c.lineTo(x1 - 3, y - 4);
      c.lineTo(x1 + 3, y - 4);
      c.fill();
    });
    c.globalAlpha = 1;
  }

  function memory(c, canvas, curve, most, y, height) {
    const right = GUTTER + width(canvas);
    const level = (value) => y + height - (most > 0 ? (value / most) * (height - 3) : 0);
    const line = new Path2D();
    let next = curve.points.findIndex(([t]) => t > view.from);
    if (next < 0) next = curve.points.length;
    let at = level(curve.points[Math.max(next - 1, 0)][1]);
    line.moveTo(GUTTER, at);
    for (; next < curve.points.length && curve.points[next][0] <= view.to; next++) {
      const [t, value] = curve.points[next], x = toX(canvas, t);
      line.lineTo(x, at);
      at = level(value);
      line.lineTo(x, at);
    }
    line.lineTo(right, at);
    const area = new Path2D(line);
    area.lineTo(right, level(0));
    area.lineTo(GUTTER, level(0));
    c.fillStyle = colour["memory-fill"];
    c.fill(area);
    c.strokeStyle = colour.memory;
    c.lineWidth = 1.2;
    c.stroke(line);
  }

  function sameMicrobatch(c, canvas, scene, g) {
    const { action } = hovered;
    c.strokeStyle = colour.ink;
    c.lineWidth = 2;
    for (const other of scene.actions) {
      const same = other === action || (action.op !== "U" && other.op !== "U" && other.mb === action.mb);
      if (!same || other.end < view.from || other.start > view.to) continue;
      const x = toX(canvas, other.start), w = toX(canvas, other.end) - x;
      c.strokeRect(x, other.rank * g.pitch + g.arc, Math.max(w - 1, 1), g.bar);
    }
  }

  function names(c, scene, g) {
    c.textAlign = "left";
    scene.lanes.forEach((lane, rank) => {
      const y = rank * g.pitch + g.arc;
      if (g.bar < 8 && rank % Math.ceil(12 / g.pitch)) return;
      c.font = "12px system-ui, sans-serif";
      c.fillStyle = colour.ink;
      c.fillText("rank " + rank, 2, y + Math.min(8, g.bar / 2));
      if (g.bar < 24) return;
      c.font = "10.5px system-ui, sans-serif";
      c.fillStyle = colour.dim;
      const stages = (lane.stages.length === 1 ? "stage " : "stages ") + lane.stages.join(", ");
      c.fillText(stages + ", idle " + percent(lane.bubble), 2, y + 22, GUTTER - 8);
      if (g.memory >= 24) c.fillText(amount(lane.memory.limit, lane.memory.unit).replace("micro-batches", "in flight").replace("micro-batch", "in flight"), 2, y + g.bar + g.memory / 2 + 2, GUTTER - 8);
    });
  }

  function axis(c, canvas, y) {
    const raw = Math.max((view.to - view.from) / Math.max(width(canvas) / 110, 1), 1e-3);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "center";
    c.fillStyle = colour.dim;
    c.strokeStyle = colour.rule;
    c.lineWidth = 1;
    for (let n = Math.ceil(view.from / step); n * step <= view.to * (1 + 1e-12); n++) {
      const x = toX(canvas, n * step);
      c.beginPath();
      c.moveTo(x, y);
      c.lineTo(x, y + 5);
      c.stroke();
      c.fillText(n === 0 ? "0" : time(n * step), Math.min(x, canvas.clientWidth - 22), y + 14);
    }
  }

  let pending = false;
  function redraw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; drawAll(); });
  }

  function drawAll() {
    let drawn = 0;
    for (const scene of scenes) if (!scene.section.hidden) drawn += draw(scene, scene.canvas);
    document.documentElement.dataset.drawn = drawn;
  }

  // ---- moving in time ----

  function show(from, to) {
    const least = end / 1e5;
    const span = Math.min(Math.max(to - from, least), end);
    view.from = Math.min(Math.max(from + (to - from - span) / 2, 0), end - span);
    view.to = view.from + span;
    redraw();
  }

  function zoom(factor, at = (view.from + view.to) / 2) {
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }

  const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
  const fit = () => show(0, end);

  function hit(scene, event) {
    const box = scene.canvas.getBoundingClientRect(), g = geometry(scene);
    const x = event.clientX - box.left, y = event.clientY - box.top, rank = Math.floor(y / g.pitch);
    if (x < GUTTER || x > GUTTER + width(scene.canvas) || rank < 0 || rank >= scene.lanes.length) return null;
    const at = toTime(scene.canvas, x), within = y - rank * g.pitch - g.arc;
    if (within > g.bar && view.memory) return { scene, rank, at };
    if (within < -4 || within > g.bar) return null;
    const lane = scene.byLane[rank], near = (toTime(scene.canvas, x + 3) - at);
    // An update is thin: near it counts as on it.
    const update = lane.find((a) => a.op === "U" && Math.abs(a.end - at) < near);
    const action = update || lane.find((a) => a.start <= at && at < a.end);
    return action ? { scene, action } : null;
  }

  function hover(found, event) {
    const tip = byId("tip");
    const changed = (hovered && hovered.action) !== (found && found.action);
    hovered = found;
    tip.hidden = !found;
    if (found) {
      tip.textContent = found.action ? describe(found.scene, found.action) : memoryAt(found.scene, found.rank, found.at);
      const x = event.clientX + 14, y = event.clientY + 16;
      tip.style.left = Math.min(x, window.innerWidth - tip.offsetWidth - 6) + "px";
      tip.style.top = (y + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : y) + "px";
    }
    if (changed) redraw();
  }

  function listen(scene) {
    const { canvas } = scene;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      const x = event.clientX - canvas.getBoundingClientRect().left;
      if (x < GUTTER) return; // over the names the wheel scrolls the page
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / width(canvas));
      else zoom(Math.exp(event.deltaY * 0.0015), toTime(canvas, x));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, from: view.from, to: view.to };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragged");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return hover(hit(scene, event), event);
      const moved = ((drag.x - event.clientX) / width(canvas)) * (drag.to - drag.from);
      show(drag.from + moved, drag.to + moved);
    });
    const drop = () => { drag = null; canvas.classList.remove("dragged"); };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointerleave", () => hover(null));
  }

  // ---- the page around ----

  function choose(shown) {
    view.shown = shown;
    scenes.forEach((scene, i) => { scene.section.hidden = shown !== "both" && shown !== i; });
    for (const button of byId("switch").children) button.setAttribute("aria-pressed", String(button.value === String(shown)));
    redraw();
  }

  function toggle(name) {
    const box = byId("show-" + name);
    view[name] = box.checked;
    redraw();
  }

  function button(text, value, title) {
    const made = document.createElement("button");
    Object.assign(made, { type: "button", textContent: text, value, title });
    made.addEventListener("click", () => choose(value === "both" ? "both" : Number(value)));
    byId("switch").append(made, " ");
  }

  function build() {
    const first = scenes[0];
    byId("title").textContent = scenes.map((s) => s.schedule).join(" and ");
    byId("about").textContent = first.file + ": " + count(first.lanes.length, "rank") + ", " + amount(first.accumulate, "microbatches") + " an update, " + updates(first.updates);
    byId("memory-name").textContent = first.lanes[0].memory.unit === "bytes" ? "memory" : "micro-batches in flight";
    if (scenes.length > 1) {
      scenes.forEach((scene, i) => button(scene.schedule, String(i), "key " + (i + 1)));
      button("both", "both", "key 3");
    }
    const kinds = [["F", "forward"], ["B", "backward"], ["I", "input gradient"], ["W", "weight gradient"], ["U", "update"]];
    for (const [op, name] of kinds) {
      if (!scenes.some((s) => s.actions.some((a) => a.op === op))) continue;
      const entry = document.createElement("span"), key = document.createElement("i");
      key.className = "key " + op;
      entry.append(key, name);
      byId("legend").append(entry);
    }
    if (scenes.some((s) => s.lanes.some((l) => l.stages.length > 1))) byId("legend").append("darker: later stages of a rank");
    for (const scene of scenes) section(scene);
  }

  function section(scene) {
    const make = (tag, text, name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });
    scene.section = make("section", "");
    scene.canvas = document.createElement("canvas");
    scene.canvas.setAttribute("role", "img");
    scene.canvas.setAttribute("aria-label", scene.schedule + ": " + facts(scene));
    scene.section.append(make("h2", scene.schedule), make("p", facts(scene)));
    for (const sentence of scene.beyond) scene.section.append(make("p", "beyond a bound: " + sentence, "beyond"));
    scene.section.append(scene.canvas);
    byId("scenes").append(scene.section);
    listen(scene);
  }

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const flip = (name) => { byId("show-" + name).checked = !byId("show-" + name).checked; toggle(name); };
    const acts = {
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": fit, Home: fit,
      ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), Escape: () => hover(null),
      p: () => flip("path"), d: () => flip("drift"), m: () => flip("memory"),
      "1": () => choose(0), "2": () => scenes.length > 1 && choose(1), "3": () => scenes.length > 1 && choose("both"),
    };
    const act = Object.hasOwn(acts, event.key) ? acts[event.key] : null;
    if (!act) return;
    event.preventDefault();
    act();
  }

  scenes.forEach(prepare);
  build();
  readColours();
  for (const name of ["path", "drift", "memory"]) byId("show-" + name).addEventListener("change", () => toggle(name));
  byId("zoom-in").addEventListener("click", () => zoom(0.7));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 0.7));
  byId("zoom-fit").addEventListener("click", fit);
  window.addEventListener("keydown", keys);
  window.addEventListener("resize", redraw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
  choose(view.shown);
  drawAll();
})();
