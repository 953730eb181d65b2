// Draws the curves of one environment: CURVES = {environment: {algorithm: {seed: [[steps], [returns]]}}}.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"];
const choice = document.getElementById("environment");

function meanOf(seeds) {
  const sums = new Map();
  for (const [steps, returns] of seeds) steps.forEach((step, i) => sums.set(step, [...(sums.get(step) || []), returns[i]]));
  const shared = [...sums].filter(([, values]) => values.length === seeds.length).sort(([a], [b]) => a - b);
  return [shared.map(([step]) => step), shared.map(([, values]) => values.reduce((a, b) => a + b) / values.length)];
}

function draw() {
  const lines = Object.entries(CURVES[choice.value]).flatMap(([name, seeds], i) => {
    const line = { mode: "lines", legendgroup: name, name, hoverlabel: { namelength: -1 } };
    const color = COLOURS[i % COLOURS.length], dash = i < COLOURS.length ? "solid" : "dot";
    const runs = Object.entries(seeds);
    const thin = runs.map(([seed, [x, y]]) => ({
      ...line, x, y, name: `${name}, seed ${seed}`, showlegend: false, opacity: 0.35, line: { color, dash, width: 1 },
    }));
    const [x, y] = meanOf(runs.map(([, run]) => run));
    return [...thin, { ...line, x, y, line: { color, dash, width: 3 } }];
  });
  const axes = { xaxis: { title: { text: "environment steps" } }, yaxis: { title: { text: "mean return" } } };
  const layout = { ...axes, height: 520, margin: { t: 20, r: 10 }, legend: { orientation: "h", y: -0.2 } };
  Plotly.react("curves", lines, layout, { responsive: true, displaylogo: false });
}

for (const name of Object.keys(CURVES)) choice.add(new Option(name));
choice.value = "CartPole-v1";
choice.addEventListener("change", draw);
draw();
