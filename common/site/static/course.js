// A picture in a frame is as high as it says, and follows the page from light to dark.
const pictures = () => document.querySelectorAll("iframe.picture");

addEventListener("message", ({ source, data }) => {
  for (const frame of pictures())
    if (frame.contentWindow === source && data.height) frame.style.height = `${data.height}px`;
});

function follow() {
  const theme = document.body.dataset.theme; // "light", "dark", or "auto": as the system has it
  const query = ["light", "dark"].includes(theme) ? `?theme=${theme}` : "";
  for (const frame of pictures()) {
    const address = frame.getAttribute("src").split("?")[0] + query;
    if (frame.getAttribute("src") !== address) frame.setAttribute("src", address);
  }
}

// What was typed beside a question stands above its answer.
function compare({ target }) {
  for (const said of document.querySelectorAll(`[data-guess="${target.id}"]`))
    said.textContent = `Your prediction: ${target.value}`;
}

// A box that scrolls is reached by keyboard.
function makeReachable() {
  for (const box of document.querySelectorAll("article :is(pre, .table-wrapper, .output, div.math)"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
}

// What furo and the tables leave without level, name or words.
function nameForScreenReaders() {
  for (const heading of document.querySelectorAll("[role=heading]:not([aria-level])")) heading.ariaLevel = 2;
  for (const side of document.querySelectorAll("aside")) side.ariaLabel = side.className.split("-")[0];
  for (const header of document.querySelectorAll("th"))
    if (!header.textContent.trim()) header.replaceWith(document.createElement("td"));
}

addEventListener("DOMContentLoaded", () => {
  follow();
  for (const frame of pictures()) frame.contentWindow.postMessage("height", "*"); // it may have told it before
  new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-theme"] });
  for (const field of document.querySelectorAll(".prediction + input")) field.addEventListener("input", compare);
  nameForScreenReaders();
});
for (const event of ["load", "resize"]) addEventListener(event, makeReachable);
