// The page: ask by a file or a recording, walk through what fits, ask for more like it.

import { address, clock, close, legend, show, stop, toggle } from "./player.js";

const by = (id) => document.getElementById(id);
const SHOWN = 12, LONGEST = 10; // results; seconds of a recording

let trail = []; // what was asked, the present one last: {name, file | moment, to, url}
let hits = [], chosen = -1, summary = "";
let asking = 0; // counts requests: only the latest one's answer is shown
let limits = { bytes: Infinity };

// ---- asking

async function answer(request) {
  let reply;
  try {
    reply = await request;
  } catch {
    throw new Error("The server cannot be reached.");
  }
  const tree = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(tree.error || `The server answered ${reply.status}.`);
  return tree;
}

function sentence(text) {
  return text.replace(/^[a-z]+ /, (word) => word.charAt(0).toUpperCase() + word.slice(1)) + (/[.!?]$/.test(text) ? "" : ".");
}

function fail(error) {
  by("error").textContent = sentence(error.message);
  by("error").hidden = false;
}

async function ask(query) {
  const mine = ++asking;
  by("error").hidden = true;
  by("progress").hidden = false;
  by("results").setAttribute("aria-busy", "true");
  by("summary").textContent = "Searching …";
  try {
    if (query.file && query.file.size > limits.bytes)
      throw new Error(`the file has more than ${limits.bytes / 1e6} MB; give a shorter or smaller one`);
    const more = `k=${SHOWN}${query.to ? `&to=${query.to}` : ""}`;
    const tree = await answer(query.file
      ? fetch(`/api/search?${more}`, { method: "POST", body: query.file, headers: { "content-type": "application/octet-stream" } })
      : fetch(`${address(query.moment, "like")}?${more}`));
    if (mine !== asking) return;
    query.to = tree.to;
    query.by = tree.query.by;
    if (trail.at(-1) !== query) trail = query.file ? begun(query) : [...trail, query];
    render(tree);
  } catch (error) {
    if (mine !== asking) return;
    by("summary").textContent = summary; // what was found before is still there
    fail(query.file ? new Error(`${query.name}: ${error.message}`) : error);
  } finally {
    if (mine === asking) {
      by("progress").hidden = true;
      by("results").removeAttribute("aria-busy");
    }
  }
}

function begun(query) { // a file begins a new trail
  trail.forEach((one) => one.url && one.url !== query.url && URL.revokeObjectURL(one.url));
  return [query];
}

function askFile(file, name) {
  stop();
  return ask({ file, name: name || file.name, url: URL.createObjectURL(file) });
}

// ---- results

function element(tag, text, attributes = {}) {
  const made = Object.assign(document.createElement(tag), attributes);
  if (text) made.textContent = text;
  return made;
}

const short = (moment) => moment.name.split("/").at(-1);

function render(tree) {
  const query = trail.at(-1), count = tree.hits.length;
  document.body.classList.add("found");
  by("ask").hidden = true;
  by("asked").hidden = false;
  by("back").hidden = trail.length < 2;
  by("results").hidden = !count;
  by("query").replaceChildren(...queryParts(query));
  document.querySelectorAll("#to input").forEach((one) => { one.checked = one.value === tree.to; });
  note(tree.stale);
  const what = tree.to === "video" ? ["moment whose picture fits", "moments whose pictures fit"] : ["sound that fits", "sounds that fit"];
  summary = count
    ? `${count} ${what[count === 1 ? 0 : 1]}, the best first, in ${Math.max(1, Math.round(1000 * tree.seconds))} ms`
    : "Nothing in the index has what was asked for.";
  by("summary").textContent = summary;
  hits = tree.hits;
  by("keys").hidden = !count;
  by("hits").replaceChildren(...hits.map(card));
  if (count) choose(0, true); else close();
}

function queryParts(query) {
  const how = query.by === "audio" ? "its sound" : "its pictures";
  const text = element("p");
  text.append(element("b", query.name, { title: query.name }), element("small", query.moment ? `more like this moment, by ${how}` : `asked by ${how}`));
  if (query.moment) return [element("img", "", { src: address(query.moment, "picture"), alt: "" }), text];
  const button = element("button", "", { type: "button", title: "Play the query" });
  button.setAttribute("aria-label", "Play the query");
  const sound = element("audio", "", { src: query.url });
  button.addEventListener("click", () => { stop(); if (sound.paused) sound.play().catch(fail); else sound.pause(); });
  for (const event of ["play", "pause", "ended"])
    sound.addEventListener(event, () => button.classList.toggle("on", !sound.paused));
  return [button, text];
}

function card(hit, number) {
  const button = element("button", "", { type: "button", className: "hit", tabIndex: number ? -1 : 0 });
  const what = hit.sound ? "Spectrogram" : "Frame";
  const image = element("img", "", { src: address(hit, "picture"), loading: "lazy", alt: `${what} of ${hit.name} at ${clock(hit.start)}` });
  const text = element("span");
  text.append(element("b", short(hit), { title: hit.name }), element("small", `${clock(hit.start)} – ${clock(hit.end)}${hit.label ? ` · ${hit.label}` : ""}`));
  const score = element("span", hit.score.toFixed(2), { className: "score" });
  const bar = element("i");
  bar.style.setProperty("--score", `${Math.max(0, 100 * hit.score)}%`);
  score.append(bar);
  button.append(image, text, score);
  button.addEventListener("click", () => choose(number, true));
  const item = element("li");
  item.append(button);
  return item;
}

const cards = () => [...document.querySelectorAll(".hit")];

function choose(number, play) {
  chosen = number;
  const hit = hits[number];
  cards().forEach((one, i) => {
    if (i === number) one.setAttribute("aria-current", "true"); else one.removeAttribute("aria-current");
    one.tabIndex = i === number ? 0 : -1;
  });
  by("name").textContent = short(hit);
  by("fit").textContent = hit.modality === "video" ? "Sounds that fit" : "Pictures that fit";
  by("toggle").hidden = hit.sound;
  by("heat").setAttribute("aria-label", `Heat map over ${hit.name}: where its sound comes from`);
  show(hit, play);
}

function like(to) {
  const hit = hits[chosen];
  if (hit) ask({ moment: hit, name: short(hit), to });
}

function back() {
  if (trail.length < 2) return false;
  trail.pop();
  ask(trail.at(-1));
  return true;
}

function reset() {
  asking++;
  close();
  trail = [];
  hits = [];
  for (const id of ["asked", "results", "error", "progress", "keys"]) by(id).hidden = true;
  by("summary").textContent = summary = "";
  by("ask").hidden = false;
  by("choose").focus();
}

// ---- ways to give a query

by("choose").addEventListener("click", () => by("file").click());
by("file").addEventListener("change", () => {
  const [file] = by("file").files;
  by("file").value = "";
  if (file) askFile(file);
});
let depth = 0;
addEventListener("dragenter", (event) => { event.preventDefault(); depth++; document.body.classList.add("over"); });
addEventListener("dragleave", () => { if (--depth <= 0) document.body.classList.remove("over"); });
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  depth = 0;
  document.body.classList.remove("over");
  const [file] = event.dataTransfer.files;
  if (file) askFile(file); else fail(new Error("That is not a file."));
});

let recording = null;
async function record() {
  if (recording) return recording.finish();
  by("error").hidden = true;
  if (!navigator.mediaDevices || !window.MediaRecorder)
    return fail(new Error("This browser records only on pages of this machine or over https; choose a file instead"));
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch {
    return fail(new Error("The microphone cannot be used; allow it in the browser, or choose a file"));
  }
  const type = ["audio/webm;codecs=opus", "audio/ogg;codecs=opus", "audio/mp4"].find((one) => MediaRecorder.isTypeSupported(one));
  const recorder = new MediaRecorder(stream, type ? { mimeType: type } : {}), parts = [];
  const context = new AudioContext(), listener = context.createAnalyser();
  context.createMediaStreamSource(stream).connect(listener);
  const began = performance.now();
  let kept = true;
  recording = { finish: (keep = true) => { kept = keep; if (recorder.state !== "inactive") recorder.stop(); } };
  recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
  recorder.addEventListener("stop", () => {
    recording = null;
    stream.getTracks().forEach((track) => track.stop());
    context.close();
    showRecording(false);
    if (kept) askFile(new Blob(parts, { type: recorder.mimeType }), "Your recording");
  });
  recorder.start();
  showRecording(true);
  meter(listener, began);
  return undefined;
}

function showRecording(on) {
  by("drop").classList.toggle("recording", on);
  by("level").hidden = by("recorded").hidden = !on;
  by("choose").hidden = on;
  document.querySelector(".invite").hidden = on;
  by("record-label").textContent = on ? "Stop and search" : "Record a sound";
}

function meter(listener, began) {
  const canvas = by("level"), pen = canvas.getContext("2d"), wave = new Float32Array(listener.fftSize), levels = [];
  const step = () => {
    if (!recording) return;
    const seconds = (performance.now() - began) / 1000;
    listener.getFloatTimeDomainData(wave);
    levels.push(Math.sqrt(wave.reduce((sum, x) => sum + x * x, 0) / wave.length));
    levels.splice(0, levels.length - 128);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = getComputedStyle(canvas).getPropertyValue("--accent");
    levels.forEach((level, i) => {
      const high = Math.max(2, Math.min(1, 4 * level) * canvas.height);
      pen.fillRect(i * 5, (canvas.height - high) / 2, 3, high);
    });
    by("recorded").textContent = `Listening, ${seconds.toFixed(0)} of ${LONGEST} s`;
    if (seconds >= LONGEST) recording.finish(); else requestAnimationFrame(step);
  };
  step();
}
by("record").addEventListener("click", record);

// ---- the rest of the page

by("again").addEventListener("click", reset);
by("back").addEventListener("click", back);
by("like").addEventListener("click", () => like(hits[chosen]?.modality));
by("fit").addEventListener("click", () => like(hits[chosen]?.modality === "video" ? "audio" : "video"));
by("toggle").addEventListener("click", () => {
  const cold = by("stage").classList.toggle("cold");
  by("toggle").setAttribute("aria-pressed", String(!cold));
  legend();
});
document.querySelectorAll("#to input").forEach((one) => one.addEventListener("change", () => {
  if (trail.length) ask(Object.assign(trail.at(-1), { to: one.value }));
}));

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.matches("input");
  const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (move && !field && hits.length) {
    event.preventDefault();
    const focused = cards().indexOf(document.activeElement);
    const next = Math.min(hits.length - 1, Math.max(0, (focused < 0 ? chosen - (move < 0 ? 0 : 1) : focused) + move));
    cards().forEach((one, i) => { one.tabIndex = i === next ? 0 : -1; });
    cards()[next].focus();
    cards()[next].scrollIntoView({ block: "nearest" });
  } else if (event.key === "Escape") {
    if (recording) recording.finish(false); else if (!back() && trail.length) reset();
  } else if (event.key === " " && !event.target.matches("button, input, summary, a") && hits.length) {
    event.preventDefault();
    toggle();
  } else if (event.key === "m" && hits.length) like(hits[chosen].modality);
  else if (event.key === "h" && hits.length) by("toggle").click();
});

function note(text) {
  by("stale").hidden = !text;
  by("stale").textContent = text ? sentence(text) : "";
}

const counted = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;

async function showState() {
  const state = await answer(fetch("/api/state"));
  limits = state.limits;
  note(state.stale);
  by("caveat").hidden = !state.caveat;
  by("caveat").textContent = state.caveat ? `${state.caveat}.` : "";
  by("about").textContent = counted(state.files, "file");
  const facts = {
    Folders: state.folders.join(", ") || "none",
    Files: counted(state.files, "file") + (state.bad ? `, and ${state.bad.toLocaleString("en")} that cannot be used` : ""),
    Moments: `${state.windows.video.toLocaleString("en")} of pictures, ${state.windows.audio.toLocaleString("en")} of sound`,
    Model: state.model ? `${state.model.name}, version ${state.model.version}` : "none",
    Vectors: state.bytes < 2 ** 20 ? `${Math.ceil(state.bytes / 1024)} KiB` : `${(state.bytes / 2 ** 20).toFixed(1)} MiB`,
    State: state.stale ? sentence(state.stale) : "Up to date with its model.",
    Uploads: `up to ${state.limits.bytes / 1e6} MB; deleted when they are answered`,
  };
  by("facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  by("learns").hidden = !state.learner;
  by("bad").hidden = !state.bad;
  by("bad").querySelector("summary").textContent = `${counted(state.bad, "file")} that cannot be used`;
  by("bad").querySelector("ul").replaceChildren(...state.bad_files.map((one) => element("li", `${one.name}: ${one.reason}`)));
}
by("about").addEventListener("click", () => { by("index").showModal(); showState().catch(fail); });
showState().catch(fail);
setInterval(() => { if (!document.hidden) showState().catch(() => {}); }, 15000);
