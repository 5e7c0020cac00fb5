// Typeset what arithmatex marked, with the bundled KaTeX; on every page, also after instant navigation.
const typeset = () => renderMathInElement(document.body, {
  delimiters: [{left: "\\[", right: "\\]", display: true}, {left: "\\(", right: "\\)", display: false}],
  throwOnError: true,
});
window.document$ ? document$.subscribe(typeset) : addEventListener("DOMContentLoaded", typeset);
