// The stage: a moment plays, with the heat map over its picture and the seconds that matter below it.

const video = document.getElementById("video");
const screen = document.getElementById("screen");
const stage = document.getElementById("stage");
const heat = document.getElementById("heat");
const matter = document.getElementById("matter");
const seek = document.getElementById("seek");
const play = document.getElementById("play");
const words = document.getElementById("words");
const button = document.getElementById("toggle"); // of the heat map
const small = document.createElement("canvas"); // one pixel a cell of the map; the browser scales it smoothly

let hit = null;
let maps = null; // {grid, times, heat, seconds, sound}
let offset = 0; // seconds of the file at which what is played begins
let wanted = false; // playing, as far as the user is concerned

export const address = (moment, what) => `/api/moments/${moment.id}/${what}`;

export function clock(seconds) {
  const tenths = Math.round(10 * seconds);
  const minutes = Math.floor(tenths / 600) % 60, hours = Math.floor(tenths / 36000);
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

const now = () => video.currentTime + offset;

export async function show(moment, start) {
  hit = moment;
  maps = null;
  wanted = start;
  heat.width = heat.width; // clears it
  words.textContent = "";
  button.disabled = true;
  video.poster = address(moment, "picture");
  screen.style.aspectRatio = moment.sound ? "16 / 9" : "";
  open(moment.whole ? "media" : "clip");
  try {
    const answer = await fetch(address(moment, "heat"));
    const tree = await answer.json();
    if (hit !== moment) return;
    maps = answer.ok ? tree : null;
    button.disabled = !maps;
    words.textContent = moment.sound || answer.ok ? "" : tree.error;
    legend();
  } catch { /* the page goes on without it */ }
  draw();
}

export function legend() { // once both the map and the size of the picture are there
  const shown = !hit?.sound && !stage.classList.contains("cold");
  const sides = shown && video.videoWidth && video.videoWidth !== video.videoHeight;
  if (maps) words.textContent = `bars: seconds of its sound that matter${sides ? "; dark sides of the picture: not seen by the model" : ""}`;
}

function open(what) {
  offset = what === "clip" ? hit.start : 0;
  video.dataset.what = what;
  video.src = address(hit, what);
  video.load();
}

video.addEventListener("loadedmetadata", () => {
  if (video.videoWidth) screen.style.aspectRatio = `${video.videoWidth} / ${video.videoHeight}`;
  legend();
  to(hit.start);
  if (wanted) start();
});
video.addEventListener("error", () => { // what the browser cannot play, the server cuts and encodes
  if (video.dataset.what === "media" && hit) open("clip");
  else if (video.src) words.textContent = "this moment cannot be played";
});
video.addEventListener("play", () => { stage.classList.add("playing"); play.setAttribute("aria-label", "Pause"); frame(); });
video.addEventListener("pause", () => { stage.classList.remove("playing"); play.setAttribute("aria-label", "Play"); draw(); });
video.addEventListener("ended", () => { if (wanted) { to(hit.start); start(); } });
video.addEventListener("seeked", draw);
play.addEventListener("click", toggle);
seek.addEventListener("input", () => to(hit.start + seek.value * (hit.end - hit.start)));
addEventListener("resize", draw);

function to(second) {
  video.currentTime = Math.max(0, second - offset);
}

function start() {
  wanted = true;
  video.play().catch(() => { wanted = false; }); // a browser may want a click first
}

export function stop() {
  wanted = false;
  video.pause();
}

export function toggle() {
  if (video.paused) start(); else stop();
}

export function close() {
  stop();
  hit = maps = null;
  video.removeAttribute("src");
  video.load();
}

function frame() {
  if (!hit) return;
  if (now() >= hit.end && !video.paused) to(hit.start); // a moment is played again and again
  draw();
  if (!video.paused) requestAnimationFrame(frame);
}

function sized(canvas) {
  const ratio = devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  const width = Math.round(box.width * ratio), height = Math.round(box.height * ratio);
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  return canvas.getContext("2d");
}

function draw() {
  if (!hit) return;
  const second = Math.min(Math.max(now(), hit.start), hit.end);
  document.getElementById("clock").textContent = clock(second);
  seek.value = (second - hit.start) / Math.max(1e-6, hit.end - hit.start);
  seek.setAttribute("aria-valuetext", clock(second));
  drawStrip(second);
  drawHeat(second);
}

// The map between those of the two frames around a second.
function cells(second) {
  const after = maps.times.findIndex((time) => time >= second);
  if (after <= 0) return maps.heat[after === 0 ? 0 : maps.heat.length - 1];
  const share = (second - maps.times[after - 1]) / Math.max(1e-6, maps.times[after] - maps.times[after - 1]);
  return maps.heat[after - 1].map((value, i) => value + share * (maps.heat[after][i] - value));
}

function drawHeat(second) {
  const pen = sized(heat);
  pen.clearRect(0, 0, heat.width, heat.height);
  if (!maps || hit.sound) return;
  const n = maps.grid, image = new ImageData(n, n);
  cells(second).forEach((value, i) => {
    const x = value / 255; // from nothing over red and orange to a pale yellow
    image.data.set([Math.min(255, 150 + 240 * x), 250 * x ** 1.5, 140 * x ** 4, 225 * x ** 0.7], 4 * i);
  });
  small.width = small.height = n;
  small.getContext("2d").putImageData(image, 0, 0);
  // the model sees the centre square of the picture, which is shown as large as fits
  const wide = video.videoWidth || 1, high = video.videoHeight || 1;
  const scale = Math.min(heat.width / wide, heat.height / high), side = Math.min(wide, high) * scale;
  const left = (heat.width - side) / 2, top = (heat.height - side) / 2;
  pen.fillStyle = "#0006"; // the rest is not seen by the model
  if (left > 1) for (const x of [0, left + side]) pen.fillRect(x, 0, left, heat.height);
  if (top > 1) for (const y of [0, top + side]) pen.fillRect(0, y, heat.width, top);
  pen.imageSmoothingEnabled = true;
  pen.imageSmoothingQuality = "high";
  pen.drawImage(small, left, top, side, side);
}

function drawStrip(second) {
  const pen = sized(matter), { width, height } = matter, length = Math.max(1e-6, hit.end - hit.start);
  const style = getComputedStyle(stage), accent = style.getPropertyValue("--accent"), ink = style.getPropertyValue("--ink");
  pen.clearRect(0, 0, width, height);
  pen.fillStyle = style.getPropertyValue("--line");
  pen.fillRect(0, height - 2, width, 2);
  if (maps) {
    const step = maps.seconds.length > 1 ? maps.seconds[1] - maps.seconds[0] : length, bar = (step / length) * width;
    maps.sound.forEach((value, i) => {
      const x = ((maps.seconds[i] - hit.start) / length) * width;
      pen.globalAlpha = 0.25 + 0.75 * value;
      pen.fillStyle = accent;
      pen.fillRect(x + 1, height - 2 - value * (height - 4), Math.max(1, bar - 2), 2 + value * (height - 4));
    });
    pen.globalAlpha = 1;
  }
  pen.fillStyle = ink;
  pen.fillRect(((second - hit.start) / length) * (width - 2), 0, 2 * (devicePixelRatio || 1), height);
}
