"""Take an image of each moving picture, some steps in: `python -m common.site.stills`.

Needs playwright and chromium. Run it after a picture has changed; a test asks for it.
"""

import io
import shutil

from common.arguments import arguments
from common.site import moving

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import sync_playwright

SHARPNESS = 1.5  # an image's pixels for each of the page
STEPS = {
    "softmax": 1,
    "tiles": 5,
    "masks": 2,
    "pipeline": 4,
    "ring": 1,
    "order": 9,
}  # after the two in which a picture starts


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        look = dict(device_scale_factor=SHARPNESS, color_scheme="light", reduced_motion="reduce")
        page = browser.new_page(viewport=dict(width=moving.WIDTH, height=300), **look)
        for name in moving.TITLES:
            page.goto((moving.FOLDER / f"{name}.html").as_uri())
            for _ in range(STEPS[name]):
                page.get_by_role("button", name="Step").click()
            page.mouse.move(0, 0)
            page.evaluate("document.activeElement.blur()")
            image = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            info = PngInfo()
            info.add_text("source", moving.digest(name))
            image.quantize(32).save(moving.still(name), pnginfo=info, optimize=True)
            print(f"{moving.still(name)}: {moving.still(name).stat().st_size} bytes")
        browser.close()


if __name__ == "__main__":
    arguments()
    main()
