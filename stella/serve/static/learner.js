// The learner that made the index: where it stands, accuracy and forgetting over its rounds, what it is forgetting.

const by = (id) => document.getElementById(id);
const WIDTH = 520, HEIGHT = 190, LEFT = 34, RIGHT = 96, EDGE = 14; // of the drawing; room for numbers and names

function element(tag, text, attributes = {}) {
  const made = Object.assign(document.createElement(tag), attributes);
  if (text) made.textContent = text;
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
  if (text) made.textContent = text;
  return made;
}

const count = (n) => n.toLocaleString("en");
const counted = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
const figure = (value, digits = 1) => value === null ? "–" : value.toFixed(digits);

function facts(tree) {
  const last = tree.history.at(-1);
  const found = {
    Learnt: `${counted(tree.clips, "clip")} in ${counted(tree.round, "round")}; ${count(tree.set_aside)} more set aside to measure with`,
  };
  if (last) {
    found["Last round"] = `${counted(last.clips, "clip")}, ${new Date(last.ended).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}`;
    for (const [name, each] of [["Old clips", last.old], ["New clips", last.new]])
      if (each) found[name] = `accuracy ${figure(each[0])}% before it, ${figure(each[1])}% after, of ${counted(each[2], "clip")}`;
    if (last.chance !== null) found.Chance = `${figure(last.chance)}%: guessing among the ${counted(last.gallery, "clip")} measured`;
    if (last.F !== null) found.Forgetting = `${figure(last.F)} points lost from the best, on average (F)`;
    if (last.matching !== null) found.Matching = `${figure(last.matching)}% of ${last.pairs ? `${last.pairs} ` : ""}pairs told right`;
  }
  if (tree.memory) {
    const held = tree.memory.rounds.reduce((sum, n) => sum + n, 0);
    const distinct = tree.memory.distinct ? `, ${count(tree.memory.distinct)} of them distinct` : "";
    found.Memory = `${counted(held, "clip")}${distinct}: ${tree.memory.sources.slice(0, 4).map(([name, n]) => `${count(n)} from ${name}`).join(", ")}`;
  }
  return found;
}

function curves(history) {
  const lines = [
    ["old clips", "old", history.map((one) => one.old && one.old[1])],
    ["new clips", "new", history.map((one) => one.new && one.new[1])],
    ["chance", "chance", history.map((one) => one.chance)],
    ["forgetting", "lost", history.map((one) => one.F)],
  ].filter(([, , values]) => values.some((value) => value !== null));
  const every = lines.flatMap(([, , values]) => values.filter((value) => value !== null));
  const low = Math.min(0, ...every), high = Math.max(20, 20 * Math.ceil(Math.max(...every) / 20)), first = history[0].round;
  const x = (round) => LEFT + (WIDTH - LEFT - RIGHT) * (history.length > 1 ? (round - first) / (history.length - 1) : 0.5);
  const y = (value) => HEIGHT - EDGE - 12 - (HEIGHT - 2 * EDGE - 12) * (value - low) / (high - low);
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "Accuracy on old and on new clips, chance and forgetting, by round" });
  for (const tick of [0, high / 2, high]) {
    svg.append(drawn("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick), class: "tick" }));
    svg.append(drawn("text", { x: LEFT - 6, y: y(tick) + 4, class: "number" }, tick.toFixed(0)));
  }
  for (const one of new Set([history[0].round, history.at(-1).round])) // the last one ends before the names begin
    svg.append(drawn("text", { x: x(one), y: HEIGHT - 4, class: one > first ? "last" : "round" }, `round ${one}`));
  const ends = lines.map(([, , values]) => y(values.findLast((value) => value !== null)));
  lines.forEach(([name, kind, values], i) => {
    const points = values.map((value, n) => value === null ? null : [x(history[n].round), y(value)]).filter(Boolean);
    svg.append(drawn("polyline", { points: points.map((point) => point.join(",")).join(" "), class: kind }));
    points.forEach(([px, py]) => svg.append(drawn("circle", { cx: px, cy: py, r: points.length > 60 ? 1 : 2.6, class: kind })));
    const above = ends.filter((end, other) => other !== i && (end < ends[i] || (end === ends[i] && other < i)) && ends[i] - end < 13).length;
    svg.append(drawn("text", { x: WIDTH - RIGHT + 10, y: ends[i] + 4 + 13 * above, class: `name ${kind}` }, name));
  });
  return svg;
}

function clip(one) {
  const item = element("li"), words = `rank ${one.before} → ${one.after}, round ${one.round}`;
  item.append(element("img", "", { src: `/api/learner/clips/${one.key}`, alt: "", loading: "lazy" }), element("b", one.name, { title: one.name }), element("small", words));
  return item;
}

async function show() {
  const reply = await fetch("/api/learner"), tree = await reply.json();
  if (!reply.ok) {
    by("doing").textContent = tree.error;
    return;
  }
  by("learner-title").textContent = `The learner ${tree.name}`;
  by("doing").textContent = `${tree.round ? `Round ${tree.round} is in use` : "Nothing is learnt yet"}; ${tree.doing}.`;
  by("learnt").replaceChildren(...Object.entries(facts(tree)).flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  by("caveats").replaceChildren(...tree.caveats.map((line) => element("p", `${line.charAt(0).toUpperCase()}${line.slice(1)}.`, { className: "small" })));
  const measured = tree.history.filter((one) => one.old || one.new);
  by("curves").hidden = !measured.length;
  by("curves").querySelector("svg")?.remove();
  if (measured.length) by("curves").prepend(curves(tree.history));
  by("curves").querySelector("figcaption").textContent = "Accuracy after each round, %: how often a clip set aside is among the first 1, 5 and 10 that fit, the mean. Forgetting: points lost.";
  by("forgetting").hidden = !tree.forgetting.length;
  by("forgetting").querySelector("ul").replaceChildren(...tree.forgetting.map(clip));
}

by("learns").addEventListener("click", () => { by("learner").showModal(); show().catch(() => {}); });
setInterval(() => { if (by("learner").open && !document.hidden) show().catch(() => {}); }, 15000);
