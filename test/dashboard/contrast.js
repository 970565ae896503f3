// Contrast of all texts against what is behind them, and of all pictures and borders against their card, by WCAG.
(() => {
  const channels = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = channels(colour).slice(0, 3).map((c) => (c /= 255, c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, noscript")) continue;
    texts++;
    const found = ratio(getComputedStyle(element).color, behind(element));
    if (found < 4.5) low.push({ text: walker.currentNode.data, ratio: found });
  }
  const marks = [];
  for (const element of document.querySelectorAll("#map rect:not(.free), .area:not(.free), .curve-line")) {
    const style = getComputedStyle(element);
    const colour = element.matches(".curve-line") ? style.stroke : style.fill;
    marks.push({ mark: element.getAttribute("class"), ratio: ratio(colour, behind(element.closest("section"))) });
  }
  for (const element of document.querySelectorAll("button, input")) {
    marks.push({ mark: element.id, ratio: ratio(getComputedStyle(element).borderTopColor, behind(element.parentElement)) });
  }
  return { texts, low, marks };
})()
