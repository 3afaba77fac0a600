"""A few checks in the spirit of axe, run inside a page: contrast, names of controls and pictures, headings, language. Not a whole audit."""

from __future__ import annotations

CONTRAST = 4.5  # WCAG AA; 3 for large text

_SCRIPT = """
const found = [];
const tell = (rule, element, why) => found.push(`${rule}: <${element.tagName.toLowerCase()} class="${element.getAttribute('class') || ''}"> `
  + `${(element.textContent || '').trim().slice(0, 60)} ${why || ''}`);
const shown = (element) => element.checkVisibility({opacityProperty: true, visibilityProperty: true}) && element.getClientRects().length > 0;
const numbers = (color) => { const part = color.match(/[\\d.]+/g).map(Number); return part.length === 3 ? [...part, 1] : part; };
const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3]));
function background(element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const color = numbers(getComputedStyle(at).backgroundColor);
    if (color[3] > 0) layers.push(color);
    if (color[3] === 1) break;
  }
  return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255]);
}
const luminance = (color) => color.map((c) => c / 255).map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };

// 1. every text that is shown, in HTML and on a chart's axes and legend, can be told from what it stands on
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(element.tagName)) continue;
  if (element.closest('[aria-hidden="true"], [disabled], [aria-disabled="true"]') || !shown(element)) continue;
  const drawn = element.closest('svg');
  if (drawn && !element.closest('.xaxislayer-above, .yaxislayer-above, .infolayer')) continue;
  const style = getComputedStyle(element), size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
  const back = background(drawn ? drawn.parentElement : element);
  const front = over(numbers(drawn ? style.fill : style.color), back);
  const ratio = contrast(front, back);
  if (ratio < (large ? 3 : arguments[0])) tell('contrast', element, `(${ratio.toFixed(2)})`);
}
// 2. pictures say what they show
for (const image of document.querySelectorAll('img')) if (!image.hasAttribute('alt')) tell('alt text', image);
for (const image of document.querySelectorAll('[role="img"]'))
  if (shown(image) && !(image.getAttribute('aria-label') || '').trim()) tell('alt text', image);
if (arguments[1]) for (const chart of document.querySelectorAll('.js-plotly-plot'))
  if (shown(chart) && !chart.closest('[role="img"][aria-label]')) tell('chart without a description', chart);
// 3. controls have a name
const named = (element) => (element.getAttribute('aria-label') || element.getAttribute('title') || element.getAttribute('placeholder') || '').trim()
  || [...(element.labels || [])].some((label) => label.textContent.trim())
  || (element.getAttribute('aria-labelledby') || '').split(' ').some((id) => (document.getElementById(id)?.textContent || '').trim());
for (const control of document.querySelectorAll('input:not([type=hidden]), select, textarea'))
  if (shown(control) && !named(control)) tell('control without a name', control, control.outerHTML.slice(0, 120));
for (const button of document.querySelectorAll('button, a[href], [role=button], summary'))
  if (shown(button) && !button.textContent.trim() && !named(button)) tell('button without a name', button);
// 4. headings go down step by step below one first heading
const levels = [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter(shown).map((heading) => Number(heading.tagName[1]));
if (levels.filter((level) => level === 1).length !== 1) found.push(`headings: ${levels.filter((level) => level === 1).length} of the first level`);
// 5. the page has a language and a title, tables a head
if (!document.documentElement.lang) found.push('language: none');
if (!document.title.trim()) found.push('title: none');
for (const table of document.querySelectorAll('table')) if (shown(table) && !table.querySelector('th')) tell('table without a head', table);
return [...new Set(found)];
"""


def problems(browser, *, charts_described: bool) -> list[str]:
    """What is wrong with the page that is open. charts_described: must every chart be inside an element that describes it?"""
    return browser.execute_script(_SCRIPT, CONTRAST, charts_described)
