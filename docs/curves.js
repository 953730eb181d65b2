// Draws the curves of one environment: CURVES = {environment: {algorithm: {seed: [[steps], [returns]]}}}.
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "ink", "#999999"]; // ink: of the text
const choice = document.getElementById("environment"), logarithmic = document.getElementById("logarithmic");
const seedsToo = document.getElementById("seeds"), inSteps = name => !name.endsWith("(gradient steps)");

// At each step that some seed has and all have reached: the mean of the seeds, each a straight line between its own steps.
function meanOf(seeds) {
  const at = ([x, y], step) => {
    const i = x.findIndex(other => other >= step);
    return i < 1 || x[i] === step ? y[Math.max(i, 0)] : y[i - 1] + (y[i] - y[i - 1]) * (step - x[i - 1]) / (x[i] - x[i - 1]);
  };
  const end = Math.min(...seeds.map(([x]) => x.at(-1)));
  const steps = [...new Set(seeds.flatMap(([x]) => x))].filter(step => step <= end).sort((a, b) => a - b);
  return [steps, steps.map(step => seeds.reduce((sum, seed) => sum + at(seed, step), 0) / seeds.length)];
}

// Whether one algorithm takes so many more steps than the others that it would squeeze them into a corner.
function stretched() {
  const shown = Object.entries(CURVES[choice.value]).filter(([name]) => inSteps(name));
  const ends = shown.map(([, seeds]) => Math.max(...Object.values(seeds).map(([x]) => x.at(-1)))).sort((a, b) => a - b);
  return ends.at(-1) > 4 * ends[Math.floor((ends.length - 1) / 2)];
}

function draw() {
  const style = getComputedStyle(document.body), theme = name => style.getPropertyValue(`--color-${name}`).trim();
  const ink = theme("foreground-primary"), grid = theme("background-border"), narrow = innerWidth < 600;
  const lines = Object.entries(CURVES[choice.value]).flatMap(([name, seeds], i) => {
    const color = COLORS[i % COLORS.length].replace("ink", ink), dash = ["solid", "dot", "dash"][Math.floor(i / COLORS.length) % 3];
    const visible = inSteps(name) || "legendonly"; // gradient steps are no environment steps
    const line = { mode: "lines", legendgroup: name, name, visible, hoverlabel: { namelength: -1 } };
    const points = ([x, y]) => { // a logarithmic axis has no 0
      const from = logarithmic.checked ? x.findIndex(step => step > 0) : 0;
      return { x: x.slice(from), y: y.slice(from) };
    };
    const runs = Object.entries(seeds);
    const thin = !seedsToo.checked ? [] : runs.map(([seed, run]) => ({
      ...line, ...points(run), name: `${name}, seed ${seed}`, showlegend: false, opacity: 0.35, line: { color, dash, width: 1 },
    }));
    return [...thin, { ...line, ...points(meanOf(runs.map(([, run]) => run))), line: { color, dash, width: 3 } }];
  });
  const decades = [1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7], tickvals = decades.flatMap(x => narrow ? x : [x, 2 * x, 5 * x]);
  const ticktext = tickvals.map(x => x < 1e3 ? `${x}` : x < 1e6 ? `${x / 1e3}k` : `${x / 1e6}M`);
  const scale = logarithmic.checked ? { type: "log", tickvals, ticktext } : { type: "linear" };
  const axis = { automargin: true, gridcolor: grid, linecolor: grid, zerolinecolor: grid };
  const axes = { xaxis: { ...axis, ...scale, tickangle: 0 }, yaxis: { ...axis, title: { text: "mean return" } } };
  const title = { text: "environment steps", side: "top center" }; // of the axis, in the legend, which so never covers it
  const place = { orientation: "h", x: 0.5, xanchor: "center", yref: "container", y: 0, yanchor: "bottom" };
  const layout = {
    ...axes, height: narrow ? 640 : 560, margin: { t: 40, r: 10, l: 10 }, legend: { title, ...place, font: { size: 15 } },
    font: { size: 15, color: ink, family: style.fontFamily }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    modebar: { bgcolor: "transparent", color: ink, activecolor: ink },
  };
  Plotly.react("curves", lines, layout, { responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover" });
}

function choose() {
  logarithmic.checked = stretched();
  draw();
}

for (const name of Object.keys(CURVES)) choice.add(new Option(name));
choice.value = "CartPole-v1";
choice.addEventListener("change", choose);
for (const box of [logarithmic, seedsToo]) box.addEventListener("change", draw);
new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-theme"] }); // dark or light
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
choose();
