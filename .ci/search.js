// Asks the search of the built site for the words of a problem: node .ci/search.js docs/_build/html
// Each has to find one of its pages among the first three. Runs the site's own code, without a browser.
const fs = require("fs");
const vm = require("vm");

const HTML = process.argv[2];
const PAGES = {
  "gradient norm": ["questions", "how-to/record", "coming-from/trainers"],
  "debug": ["how-to/agents", "questions", "how-to/find-the-layer", "coming-from/model-debugger"],
  "monitor": ["questions", "coming-from/trainers"],
  "profile": ["questions"],
  "deterministic": ["questions", "how-to/find-the-layer"],
  "reproducible": ["questions", "how-to/find-the-layer"],
  "leak": ["questions", "how-to/find-the-layer", "notebooks/10"],
  "padding": ["questions", "how-to/find-the-layer", "coming-from/pytest-torch"],
  "causal": ["questions", "how-to/find-the-layer"],
  "spike": ["questions", "how-to/find-the-layer"],
  "outlier": ["questions"],
  "out of memory": ["questions", "how-to/summary", "how-to/big-models"],
  "FLOPs": ["questions", "how-to/summary"],
  "NaN": ["questions", "how-to/find-the-layer", "how-to/diagnose", "reference/watch"],
  "resume": ["how-to/resume", "questions"],
  "port": ["how-to/compare", "how-to/find-the-layer", "notebooks/08", "questions"],
  "dead units": ["questions", "how-to/diagnose", "how-to/record", "understand/diagnosis"],
  "batch": ["how-to/find-the-layer", "questions", "how-to/processes", "reference/callbacks"],
};

const element = { textContent: "", appendChild() {}, querySelector: () => null };
const page = {
  console, URLSearchParams, DOMParser: class {}, localStorage: { getItem() {}, setItem() {} },
  location: {}, Documentation: {}, DOCUMENTATION_OPTIONS: {}, SPHINX_HIGHLIGHT_ENABLED: false, _ready() {}, _: (text) => text,
  document: { ...element, getElementById: () => element, createElement: () => element, addEventListener() {}, documentElement: { dataset: {} } },
};
page.window = page;
vm.createContext(page);
for (const file of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${HTML}/${file}`, "utf8"), page);

const code = `(query) => {
  const [q, terms, excluded, highlight, objects] = Search._parseQuery(query);
  return Search._performSearch(q, terms, excluded, highlight, objects).map((found) => found[0]);
}`;
const search = vm.runInContext(code, page);
let missing = 0;
for (const [words, pages] of Object.entries(PAGES)) {
  const found = [...new Set(search(words).reverse())].slice(0, 3); // the best is last
  if (found.some((name) => pages.some((p) => name.startsWith(p)))) continue;
  console.log(`"${words}" finds ${found.join(", ") || "nothing"}, none of ${pages.join(", ")}`);
  missing++;
}
process.exit(missing ? 1 : 0);
