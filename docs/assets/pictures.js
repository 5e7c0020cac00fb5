// Pictures follow the page's light or dark scheme, which the reader may have switched away from the system's.
const followScheme = () => {
  const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
  for (const source of document.querySelectorAll("picture source")) {
    source.dataset.media ??= source.media;
    source.media = source.dataset.media.replace("(prefers-color-scheme: dark)", dark ? "(min-width: 0)" : "(max-width: 0)");
  }
};
addEventListener("DOMContentLoaded", () => {
  followScheme();
  new MutationObserver(followScheme).observe(document.body, {attributeFilter: ["data-md-color-scheme"]});
});
