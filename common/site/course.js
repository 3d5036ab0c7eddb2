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

addEventListener("DOMContentLoaded", () => {
  follow();
  for (const frame of pictures()) frame.contentWindow.postMessage("height", "*"); // it may have told it before
  new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-theme"] });
});
