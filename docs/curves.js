// Draws the curves of one environment: CURVES = {environment: {algorithm: {seed: [[steps], [returns]]}}}.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"];
const choice = document.getElementById("environment");

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
  const axes = { xaxis: { automargin: true }, yaxis: { title: { text: "mean return" } } };
  const title = { text: "environment steps", side: "top center" }; // of the axis: as a part of the legend it is never covered by it
  const legend = { title, orientation: "h", x: 0.5, xanchor: "center", yref: "container", y: 0, yanchor: "bottom" };
  const layout = { ...axes, height: innerWidth < 600 ? 720 : 520, margin: { t: 20, r: 10 }, legend };
  Plotly.react("curves", lines, layout, { responsive: true, displaylogo: false });
}

for (const name of Object.keys(CURVES)) choice.add(new Option(name));
choice.value = "CartPole-v1";
choice.addEventListener("change", draw);
draw();
