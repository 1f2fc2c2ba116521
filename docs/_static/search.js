// Excerpts in search results have formulas as texts (data-text, by docs/generators/formulas.py), not as TeX.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    for (const formula of page.querySelectorAll("[data-text]")) formula.textContent = formula.dataset.text;
    return textOf(page.documentElement.outerHTML, anchor);
  };
});
