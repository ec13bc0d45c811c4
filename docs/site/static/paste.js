// A button on each Python block copies a program that runs alone: the set-up and the block.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll("div.paste")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.title = "Copy the block with its set-up";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(place.dataset.program);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    place.append(button);
  }
});
