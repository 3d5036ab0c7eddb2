const $ = id => document.getElementById(id);
const theme = new URLSearchParams(location.search).get("theme");
if (theme) document.documentElement.dataset.theme = theme;
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** The picture's width in pixels, which are its units. While it is hidden, any. */
const room = (svg = $("picture")) => svg.getBoundingClientRect().width || 360;

/** Show shapes, [tag, attributes, text], in a picture. Elements are reused, so that they keep the focus. */
function draw(height, shapes, svg = $("picture")) {
  const group = svg.querySelector(":scope > g");
  svg.setAttribute("viewBox", `0 0 ${room(svg)} ${height}`);
  shapes.forEach(([tag, attributes, text = ""], i) => {
    let node = group.children[i];
    if (node?.tagName !== tag) {
      const fresh = document.createElementNS(svg.namespaceURI, tag);
      node ? node.replaceWith(fresh) : group.append(fresh);
      node = fresh;
    }
    for (const name of node.getAttributeNames()) if (!(name in attributes)) node.removeAttribute(name);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (node.textContent !== String(text)) node.textContent = text;
  });
  while (group.children.length > shapes.length) group.lastChild.remove();
}

const range = (from, to) => Array.from({length: Math.max(0, to - from)}, (_, i) => from + i);
const sum = numbers => numbers.reduce((a, b) => a + b, 0);
const clamp = (x, least, most) => Math.max(least, Math.min(most, x));
const chosen = id => Number($(id).value);

// Shapes, and looks for them.
const rect = (x, y, width, height, look) => ["rect", {x, y, width: Math.max(0, width), height, ...look}];
const line = (x1, y1, x2, y2, look) => ["line", {x1, y1, x2, y2, stroke: "var(--ink)", ...look}];
const text = (x, y, words, look) => ["text", {x, y, ...look}, words];
const paint = color => ({fill: `var(--${color}-tint)`, stroke: `var(--${color})`});
const frame = (color, wide = 2) => ({fill: "none", stroke: `var(--${color})`, "stroke-width": wide});
const HATCH = {fill: "url(#hatch)"}, DASHED = {"stroke-dasharray": "6 4"}, BOLD = {"font-weight": "bold"};
const MIDDLE = {"text-anchor": "middle"}, END = {"text-anchor": "end"}, QUIET = {style: "fill: var(--quiet)"};

/** Say in words what the picture shows: only when it changed, since a screen reader reads it out. */
function say(words) {
  if ($("say").textContent !== words) $("say").textContent = words;
}

// --- steps ---------------------------------------------------------------------------------------
let picture, timer;

/**
 * Show a picture two steps in, with buttons and the sentence of `say` in #player. It plays by itself, once, while it is
 * in sight, until the reader does something.
 * redraw(): draws the state. at(), last(): the steps that are taken, and all. go(to): takes `to` steps, and updates.
 * pace: milliseconds of a step.
 */
function start(steps) {
  picture = steps;
  $("player").innerHTML = `<div class="controls"><button id="back">Back</button><button id="step">Step</button>
    <button id="play">Play</button></div><p id="say" role="status"></p>`;
  $("back").onclick = () => picture.go(picture.at() - 1);
  $("step").onclick = () => picture.go(picture.at() + 1);
  $("play").onclick = () => {
    if (!timer && picture.at() === picture.last()) picture.go(0);
    play(!timer);
  };
  update();  // how many steps there are may depend on what is drawn
  picture.go(2);
  addEventListener("resize", update);
  playInSight();
  const tell = () => parent.postMessage({height: Math.ceil(document.body.getBoundingClientRect().height)}, "*");
  if (parent === window) return;
  tell();  // an observer of a frame that is out of sight hears nothing
  addEventListener("message", tell);  // the page asks once it listens: the first answer may be lost
  new ResizeObserver(tell).observe(document.body);
}

/** Draw the picture as it is now. */
function update() {
  picture.redraw();
  $("back").disabled = picture.at() === 0;
  $("step").disabled = picture.at() === picture.last();
}

/** Take a step every `pace` milliseconds until the last, or stop. A screen reader is told of the last one only. */
function play(on) {
  clearInterval(timer);
  timer = on && setInterval(() => {
    if (picture.at() + 1 === picture.last()) play(false);
    picture.go(picture.at() + 1);
  }, picture.pace);
  $("play").textContent = on ? "Pause" : "Play";
  $("say").ariaLive = on ? "off" : "polite";
}

function playInSight() {
  if (still.matches) return;
  const sight = new IntersectionObserver(seen => {
    if (picture.at() === picture.last()) sight.disconnect();
    else play(seen.at(-1).isIntersecting);  // a frame that has just got its height is told of several at once
  }, {threshold: 0.5});
  sight.observe($("picture"));
  for (const use of ["pointerdown", "keydown"]) addEventListener(use, ({target}) => {
    sight.disconnect();
    if (target !== $("play")) play(false);
  });
}
